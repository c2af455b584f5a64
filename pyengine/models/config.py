"""config.json -> ModelConfig: every field that changes the maths is honoured or refused by name."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pyengine.errors import ConfigError, UnsupportedModelError
from pyengine.models.checkpoint import Q8_0_DIRECTORY, open_checkpoint, read_json
from pyengine.models.families import family_spec
from pyengine.models.model_config import ModelConfig
from pyengine.models.rope_parameters import read_rope
from pyengine.models.spec import REQUIRED, DecoderSpec, Field, Values
from pyengine.native import Activation

# Words of `hidden_act`. The tanh formulas of Transformers differ among each other by < 5e-7.
ACTIVATIONS: Mapping[str, Activation] = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU_ERF,
    "gelu_new": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
}

# Fields that change the maths of some family and are not computed here, with the values at which
# they do nothing. A family whose spec names such a field is not asked.
_REFUSED: Mapping[str, tuple[object, ...]] = {
    name: (None, False, 0, "", [], {}, *neutral)
    for name, neutral in {
        "quantization_config": (), "compression_config": (), "clip_qkv": (),
        "add_cross_attention": (), "is_encoder_decoder": (), "pruned_heads": (),
        "attn_logit_softcapping": (), "final_logit_softcapping": (), "query_pre_attn_scalar": (),
        "logit_scale": (1,), "logits_scaling": (1,), "embedding_multiplier": (1,),
        "residual_multiplier": (1,), "attention_multiplier": (), "num_local_experts": (1,),
        "num_experts": (1,), "alibi": (), "multi_query": (), "parallel_attn": (), "use_mrope": (),
        "attention_bias": (), "mlp_bias": (), "use_qkv_bias": (), "qk_layernorm": (),
        "use_qk_norm": (), "use_parallel_residual": (), "sliding_window": (), "no_rope_layers": (),
        "attention_chunk_size": (), "rope_interleaved": (), "bias": (), "attn_config": (),
    }.items()
}  # fmt: skip

# Fields about training, bookkeeping or generation: known to change no logit.
_HARMLESS = re.compile(
    r"_.*|architectures|auto_map|model_type|transformers_version|torch_dtype|dtype|use_cache"
    r"|initializer_range|.*dropout.*|.*_pdrop|(bos|eos|pad|unk|sep|decoder_start)_token_id"
    r"|output_.*|return_dict|gradient_checkpointing|summary_.*|task_specific_params|id2label"
    r"|label2id|problem_type|finetuning_task|tokenizer_class|chunk_size_feed_forward"
)  # fmt: skip
_ROPE_KEYS = frozenset(
    "rope_theta rope_scaling rope_parameters partial_rotary_factor"
    " original_max_position_embeddings".split()
)


def load_config(path: str | os.PathLike[str]) -> tuple[ModelConfig, DecoderSpec]:
    """Configuration and resolved spec of a Hugging Face directory or a GGUF file.

    Raises:
        ConfigError: a file is missing or malformed, or a value impossible.
        UnsupportedModelError: a family, field or value that is not computed here.
    """
    folder = Path(path)
    if folder.suffix == ".gguf":
        with open_checkpoint(folder) as checkpoint:
            return parse_config(checkpoint.config, str(folder), turned=True)
    file = folder / "config.json"
    generation_file = folder / "generation_config.json"
    generation = read_json(generation_file) if os.path.lexists(generation_file) else {}
    return parse_config(read_json(file), str(file), generation)


def parse_config(
    raw: Mapping[str, Any],
    source: str,
    generation: Mapping[str, Any] | None = None,
    *,
    turned: bool = False,
) -> tuple[ModelConfig, DecoderSpec]:
    """What load_config returns, from a parsed config.json (`source` names it in messages).

    turned: matrices lie (out, in) even if the family's own files have them (in, out), as in GGUF.
    """
    model_type = raw.get("model_type")
    if not isinstance(model_type, str):
        raise ConfigError(f"{source}: model_type is missing")
    spec = family_spec(model_type)
    if turned or raw.get("quantization_config") == Q8_0_DIRECTORY:
        spec = replace(spec, linear="out_in")
    values = _read_values(raw, spec, source)
    _refuse(raw, spec, source)
    reason = spec.refuse(values)
    if reason:
        raise UnsupportedModelError(f"{source}: {reason} is not supported")
    activation = ACTIVATIONS.get(values["hidden_act"])
    if activation is None:
        known = ", ".join(ACTIVATIONS)
        raise UnsupportedModelError(
            f"{source}: activation {values['hidden_act']!r} is not supported; known: {known}"
        )
    rope = None
    if spec.position == "rope":
        rope = read_rope(raw, spec, values["head_dim"], values["max_position_embeddings"], source)
        values["partial_rotary_factor"] = rope.rotary_dim / values["head_dim"]
    _check_obsolete(raw, spec, values, source)
    layers = values["num_hidden_layers"]
    names = set(ModelConfig.__dataclass_fields__) & set(values)
    config = ModelConfig(
        **{name: values[name] for name in names},
        model_type=model_type,
        position_limit=values["max_position_embeddings"] if spec.position == "learned" else None,
        activation=activation,
        rope=rope,
        layer_windows=spec.windows(values),
        attention_scales=tuple(spec.attention_scale(values, layer) for layer in range(layers)),
        bos_token_id=_token_id(raw, generation, "bos_token_id", source),
        eos_token_ids=eos_token_ids(raw, generation, source),
        pad_token_id=_token_id(raw, generation, "pad_token_id", source),
        ignored_fields=tuple(key for key in raw if not _is_known(key, spec)),
        source=source,
    )
    return config, spec.resolve(values)


def _read_values(raw: Mapping[str, Any], spec: DecoderSpec, source: str) -> dict[str, Any]:
    """Every field of the family under our names, checked, with sizes that follow from others."""
    values = {name: _read(raw, name, field, source) for name, field in spec.config.items()}
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    values.setdefault("head_dim", None)
    if values["head_dim"] is None:
        if hidden % heads:
            raise ConfigError(
                f"{source}: hidden_size={hidden} is not a multiple of num_attention_heads={heads}"
            )
        values["head_dim"] = hidden // heads
    values["num_key_value_heads"] = kv = values.get("num_key_value_heads") or heads
    if heads % kv:
        raise ConfigError(
            f"{source}: num_attention_heads={heads} is not a multiple of num_key_value_heads={kv}"
        )
    values["intermediate_size"] = values.get("intermediate_size") or 4 * hidden
    if values["norm_eps"] <= 0:
        raise ConfigError(f"{source}: epsilon of the norms is {values['norm_eps']}, must be > 0")
    types = values.get("layer_types")
    if types is not None:
        unknown = [kind for kind in types if kind not in ("full_attention", "sliding_attention")]
        if unknown:
            raise UnsupportedModelError(f"{source}: layer_types has {unknown[0]!r}")
        if len(types) != values["num_hidden_layers"]:
            raise ConfigError(
                f"{source}: layer_types has {len(types)} entries for "
                f"num_hidden_layers={values['num_hidden_layers']}"
            )
    return values


def _read(raw: Mapping[str, Any], name: str, field: Field, source: str) -> Any:
    """One field by its accepted spellings, which must agree where several are given."""
    spellings = (name,) if field.spellings is None else field.spellings
    found = {key: raw[key] for key in spellings if key in raw}
    given = {key: value for key, value in found.items() if value is not None}
    if not given:
        default = field.null if found and field.null is not REQUIRED else field.default
        if default is REQUIRED:
            raise ConfigError(f"{source}: {' or '.join(spellings)} is missing")
        return default
    (key, value), *others = given.items()
    for other, same in others:
        if same != value:
            raise ConfigError(f"{source}: {key}={value!r} and {other}={same!r} disagree")
    return field.check(value, key, source)


def _spelled(spec: DecoderSpec) -> set[str]:
    """Keys of config.json that the family reads."""
    keys = {key for name, f in spec.config.items() for key in (f.spellings or (name,))}
    return keys | _ROPE_KEYS if spec.position == "rope" else keys


def _is_known(key: str, spec: DecoderSpec) -> bool:
    """Whether a key is read, checked, or known to change nothing."""
    return bool(
        key in _spelled(spec)
        or key in spec.ignored
        or key in spec.obsolete
        or key in _REFUSED
        or _HARMLESS.fullmatch(key)
    )


def _refuse(raw: Mapping[str, Any], spec: DecoderSpec, source: str) -> None:
    """Raises for a field that asks for something no family here computes."""
    accepted = _spelled(spec) | spec.ignored
    for key, neutral in _REFUSED.items():
        if key in raw and key not in accepted and raw[key] not in (*neutral, Q8_0_DIRECTORY):
            shown = raw[key] if not isinstance(raw[key], dict) else "{...}"
            raise UnsupportedModelError(
                f"{source}: {key}={shown!r} is not supported for model_type {spec.model_type!r}"
            )
    types = raw.get("layer_types")
    plain = isinstance(types, list) and all(kind == "full_attention" for kind in types)
    if types is not None and "layer_types" not in accepted and not plain:
        raise UnsupportedModelError(
            f"{source}: layer_types is not supported for model_type {spec.model_type!r}"
        )


def _check_obsolete(raw: Mapping[str, Any], spec: DecoderSpec, values: Values, source: str) -> None:
    """Keys that Transformers leaves unread must at least not say something else."""
    for key, name in spec.obsolete.items():
        if raw.get(key) not in (None, values[name]):
            raise UnsupportedModelError(
                f"{source}: {key}={raw[key]!r} is an old spelling that Transformers does not read; "
                f"it would use {values[name]:g}"
            )


# ---- token ids and description -----------------------------------------------------------------


def eos_token_ids(
    raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None, source: str = "config.json"
) -> tuple[int, ...]:
    """Ids that end a text: an int or a list; generation_config.json goes before config.json."""
    value = (generation or {}).get("eos_token_id")
    if value is None:
        value = raw.get("eos_token_id")
    listed = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in listed):
        raise ConfigError(f"{source}: eos_token_id={value!r} is not an id or a list of ids")
    return tuple(dict.fromkeys(listed))


def _token_id(
    raw: Mapping[str, Any], generation: Mapping[str, Any] | None, key: str, source: str
) -> int | None:
    value = (generation or {}).get(key)
    if value is None:
        value = raw.get(key)
    if value is None or (isinstance(value, int) and value < 0):
        return None
    return int(Field(int).check(value, key, source))


def describe(config: ModelConfig, spec: DecoderSpec) -> dict[str, str]:
    """The traits of a model in words, for `pyengine info`; only those that say something."""
    rope = config.rope
    position = {"alibi": "ALiBi", "learned": "learned"}.get(spec.position, "")
    if rope is not None:
        position = f"rotary, {rope.rotary_dim} of {config.head_dim}, theta {rope.rope_theta:g}"
        position += "" if rope.rope_type == "default" else f", {rope.rope_type}"
    windows = sorted({window for window in config.layer_windows if window})
    biases = [
        name
        for name, on in (
            ("qkv", spec.qkv_bias), ("attention output", spec.attn_out_bias),
            ("mlp", spec.mlp_bias), ("norm", spec.norm_bias),
        ) if on
    ]  # fmt: skip
    heads, kv = config.num_attention_heads, config.num_key_value_heads
    words = {
        "norm": f"{'RMSNorm' if spec.norm == 'rms' else 'LayerNorm'}, {spec.norm_placement}",
        "position": position,
        "attention": f"{heads} heads" + ("" if kv == heads else f", {kv} kv heads"),
        "head_dim": str(config.head_dim),
        "mlp": f"{spec.mlp} {config.hidden_act}",
        "qk_norm": {"full": "RMSNorm, full width", "per_head": "LayerNorm, per head"}.get(
            spec.qk_norm or "", ""
        ),
        "biases": ", ".join(biases),
        "residual": "parallel" if spec.parallel_residual else "",
        "residual_source": "post-layernorm" if spec.residual_from_norm else "",
        "embedding_norm": "yes" if spec.embed_norm else "",
        "window": ", ".join(map(str, windows))
        + (f" in {sum(map(bool, config.layer_windows))} layers" if windows else ""),
        "head": "tied" if config.tie_word_embeddings else "untied",
    }
    return {name: text for name, text in words.items() if text}
