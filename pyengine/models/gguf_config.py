"""The hyperparameters of a GGUF file as fields of a config, and as config.json spells them.

Sources: gguf.constants for keys; llama.cpp's conversion and src/models/ for what they mean.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal

import numpy as np
from gguf.constants import GGMLQuantizationType

from pyengine.errors import ConfigError, UnsupportedModelError, WeightError
from pyengine.models.families import families, family_spec
from pyengine.models.gguf_header import Array, Header, read_rows
from pyengine.models.gguf_tensors import (
    LONG_FACTORS,
    ROPE_FACTORS,
    SHORT_FACTORS,
    gguf_stems,
    parse_name,
    rope_tensors,
)
from pyengine.models.positions import longrope_attention_factor
from pyengine.models.spec import DecoderSpec, GGUFForm

KEYS = {  # after "<architecture>." -> our name
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
_EPSILON = "attention.layer_norm_epsilon"
_RMS_EPSILON = "attention.layer_norm_rms_epsilon"
_OTHER_KEYS = {  # honoured below, or without meaning for the forward pass
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "tensor_data_layout",
    "vocab_size",
}
_ROPE_KEYS = {
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.attn_factor",
    "rope.scaling.factor",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
}


def gguf_form(model_type: str) -> GGUFForm | None:
    """A family's form in GGUF; None for one that has none, or is not known."""
    return family_spec(model_type).gguf if model_type in families() else None


def gguf_families() -> list[str]:
    """The families that GGUF files are read and written of."""
    return [name for name in families() if gguf_form(name)]


def epsilon_key(norm: Literal["rms", "layer"]) -> str:
    """The hyperparameter that holds the epsilon of that kind of norm."""
    return _RMS_EPSILON if norm == "rms" else _EPSILON


def _uniform(path: Path, key: str, value: Any) -> Any:
    """A per-layer list whose entries agree, as one value."""
    if not isinstance(value, list):
        return value
    if len(set(value)) != 1:
        raise UnsupportedModelError(f"{path}: {key} differs from layer to layer: {value}")
    return value[0]


def family_of(header: Header) -> tuple[DecoderSpec, GGUFForm]:
    """The family that the file names."""
    architecture = header.metadata.get("general.architecture")
    form = gguf_form(architecture) if isinstance(architecture, str) else None
    if not isinstance(architecture, str) or form is None:
        *others, last = gguf_families()
        raise UnsupportedModelError(
            f"{header.path}: GGUF architecture {architecture!r} is not supported; "
            f"{', '.join(others)} and {last} are"
        )
    return family_spec(architecture), form


def read_values(header: Header) -> dict[str, Any]:
    """The file's hyperparameters as fields of a config, under our names.

    Raises:
        UnsupportedModelError: another architecture, or a hyperparameter not honoured; named.
        ConfigError: a required key is missing.
    """
    spec, form = family_of(header)
    facts = _facts(header, spec, form)
    values = {name: facts[key] for key, name in _required(spec).items()}
    if "token_embd.weight" not in header.tensors:
        raise WeightError(f"{header.path}: tensor token_embd.weight is missing")
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    values |= {
        "head_dim": _head_dim(header, spec, facts, hidden // heads),
        "num_key_value_heads": facts.get("attention.head_count_kv", heads),
        "vocab_size": header.tensors["token_embd.weight"].rows,
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }
    implied = {
        "head_dim": hidden // heads,
        "num_key_value_heads": heads,
        "intermediate_size": 4 * hidden,
    }
    for name, value in implied.items():
        if name not in spec.config and values[name] != value:
            raise UnsupportedModelError(
                f"{header.path}: {name}={values[name]} where {spec.model_type} has {value}"
            )
    if spec.position == "rope":
        values |= _rope(header, facts, spec, form, values["head_dim"])
    return values | dict(form.read(facts, _roles(header, spec)))


def _required(spec: DecoderSpec) -> dict[str, str]:
    return {**KEYS, epsilon_key(spec.norm): "norm_eps"}


def _facts(header: Header, spec: DecoderSpec, form: GGUFForm) -> dict[str, Any]:
    """The architecture's keys without its name, each known, and the required ones there."""
    prefix, required = f"{spec.model_type}.", _required(spec)
    facts = {
        key.removeprefix(prefix): _uniform(header.path, key, value)
        for key, value in header.metadata.items()
        if key.startswith(prefix)
    }
    known = required.keys() | _OTHER_KEYS | form.keys
    known |= _ROPE_KEYS if spec.position == "rope" else set()
    for key, value in facts.items():
        if key not in known and value:
            raise UnsupportedModelError(f"{header.path}: {prefix}{key}={value!r} is not supported")
    for key, name in required.items():
        if key not in facts:
            raise ConfigError(f"{header.path}: {prefix}{key} is missing")
        expected = float if name == "norm_eps" else int
        if not isinstance(facts[key], expected) or not facts[key] > 0:
            raise ConfigError(f"{header.path}: {prefix}{key}={facts[key]!r} must be above 0")
    return facts


def _head_dim(header: Header, spec: DecoderSpec, facts: dict[str, Any], default: int) -> int:
    head_dim = facts.get("attention.key_length", default)
    if not isinstance(head_dim, int) or head_dim <= 0 or (spec.position == "rope" and head_dim % 2):
        raise ConfigError(f"{header.path}: heads of {head_dim!r} values; an even number is needed")
    if facts.get("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModelError(
            f"{header.path}: {spec.model_type}.attention.value_length="
            f"{facts['attention.value_length']}, heads have {head_dim}"
        )
    return head_dim


def as_config_json(header: Header, values: dict[str, Any]) -> dict[str, Any]:
    """What `read_values` found as a config.json of Hugging Face."""
    spec, _ = family_of(header)
    config: dict[str, Any] = {"model_type": spec.model_type}
    read_elsewhere = _ROPE_FIELDS if spec.position == "rope" else set()
    for name, value in values.items():
        if name in spec.config:
            spellings = spec.config[name].spellings
            config[spellings[0] if spellings else name] = value
        elif name in read_elsewhere:
            config[name] = value
    return config | {
        "bos_token_id": header.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": end_token_ids(header.metadata),
    }


def _roles(header: Header, spec: DecoderSpec) -> Collection[str]:
    """Roles in layer 0, "q" of its weight and "q.bias" of its bias."""
    stems = gguf_stems(spec)
    names = [parse_name(stems, name) for name in header.tensors]
    return {
        name.role + ("" if name.part == "weight" else f".{name.part}")
        for name in names
        if name is not None and name.layer == "0"
    }


def end_token_ids(metadata: dict[str, Any]) -> list[int]:
    """Ids that end an answer: end of text, of turn and of message, where the file names them."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = (metadata.get(f"tokenizer.ggml.{key}") for key in keys)
    return list(dict.fromkeys(i for i in ids if i is not None))


# ---- rotary parameters -------------------------------------------------------------------------

_ROPE_FIELDS = {
    "rope_theta",
    "rope_scaling",
    "partial_rotary_factor",
    "original_max_position_embeddings",
}


def _rope(
    header: Header, facts: dict[str, Any], spec: DecoderSpec, form: GGUFForm, head_dim: int
) -> dict[str, Any]:
    """config.json's rotary fields."""
    rotary = facts.get("rope.dimension_count", head_dim)
    if not 0 < rotary <= head_dim or (spec.partial_rotary is None and rotary != head_dim):
        raise UnsupportedModelError(
            f"{header.path}: {spec.model_type}.rope.dimension_count={rotary}, heads have {head_dim}"
        )
    theta = facts.get("rope.freq_base", 10000.0)
    scaling = _rope_scaling(header, facts, form, theta, head_dim)
    rope_type = scaling["rope_type"] if scaling else "default"
    if rope_type not in form.rope_types:
        raise UnsupportedModelError(
            f"{header.path}: rope scaling {rope_type!r} is not supported for {spec.model_type}"
        )
    fields = {"rope_theta": theta, "rope_scaling": scaling}
    if spec.partial_rotary is not None:  # of which the product with head_dim is rounded down
        fields["partial_rotary_factor"] = min((rotary + 0.5) / head_dim, 1.0)
    if rope_type == "longrope":
        fields["original_max_position_embeddings"] = _original_length(facts)
    return fields


def _original_length(facts: dict[str, Any]) -> int:
    original = facts.get("rope.scaling.original_context_length", facts["context_length"])
    if not isinstance(original, int) or original < 2:
        raise ConfigError(f"rope.scaling.original_context_length={original!r}: must be at least 2")
    return original


def _rope_scaling(
    header: Header, facts: dict[str, Any], form: GGUFForm, theta: float, head_dim: int
) -> dict[str, Any] | None:
    kind = facts.get("rope.scaling.type") or ("linear" if "rope.scale_linear" in facts else "none")
    factor = facts.get("rope.scaling.factor", facts.get("rope.scale_linear", 1.0))
    divisors = sorted(rope_tensors(form) & header.tensors.keys())
    if divisors:
        if kind not in ("none", "longrope"):
            raise UnsupportedModelError(
                f"{header.path}: both {divisors[0]} and {kind} rope scaling"
            )
        if ROPE_FACTORS in divisors:
            return _llama3_scaling(header, theta, head_dim)
        return _longrope_scaling(header, facts)
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise UnsupportedModelError(f"{header.path}: rope scaling {kind!r} is not supported")
    scaling = {"rope_type": "yarn", "factor": factor}
    for key, name in (
        ("original_context_length", "original_max_position_embeddings"),
        ("attn_factor", "attention_factor"),
        ("yarn_beta_fast", "beta_fast"),
        ("yarn_beta_slow", "beta_slow"),
    ):
        if f"rope.scaling.{key}" in facts:
            scaling[name] = facts[f"rope.scaling.{key}"]
    return scaling


def _llama3_scaling(header: Header, theta: float, head_dim: int) -> dict[str, Any]:
    """The parameters of llama3's rope scaling, recovered from the factors the converter stored.

    All published Llama 3.1 to 3.3 models have low 1, high 4 and 8192 original positions; the
    largest factor is `factor` itself. Factors that these do not reproduce are refused.
    """
    factors = _read_divisors(header, ROPE_FACTORS)
    factor, low, high, original = float(factors.max()), 1.0, 4.0, 8192
    wavelength = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    blend = np.clip((original / wavelength - low) / (high - low), 0, 1)
    expected = 1 / ((1 - blend) / factor + blend)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        raise UnsupportedModelError(f"{header.path}: {ROPE_FACTORS} is not llama3's rope scaling")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _longrope_scaling(header: Header, facts: dict[str, Any]) -> dict[str, Any]:
    """longrope's two lists, and the factor on cos and sin where it is not the usual one."""
    for name in (SHORT_FACTORS, LONG_FACTORS):
        if name not in header.tensors:
            raise WeightError(f"{header.path}: tensor {name} is missing")
    scaling: dict[str, Any] = {
        "rope_type": "longrope",
        "short_factor": _read_divisors(header, SHORT_FACTORS).tolist(),
        "long_factor": _read_divisors(header, LONG_FACTORS).tolist(),
    }
    original = _original_length(facts)
    usual = longrope_attention_factor(facts["context_length"] / original, original)
    attention = facts.get("rope.scaling.attn_factor", 1.0)
    if np.float32(usual) != np.float32(attention):
        scaling["attention_factor"] = attention
    return scaling


def _read_divisors(header: Header, name: str) -> Array:
    info = header.tensors[name]
    if info.kind != GGMLQuantizationType.F32 or len(info.shape) != 1:
        raise UnsupportedModelError(f"{header.path}: {name} is not a vector of f32")
    with open(header.path, "rb") as file:
        stored = read_rows(file, header.path, name, info, 0, 1)
    divisors = stored.view("<f4")[0]
    if not np.isfinite(divisors).all():
        raise WeightError(f"{header.path}: {name} holds values that are not finite")
    return np.asarray(divisors, np.float64)
