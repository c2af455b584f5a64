"""GGUF files as checkpoints: hyperparameters in Hugging Face spelling, tensors under its names.

Sources: gguf.constants and llama.cpp's convert_hf_to_gguf.py for keys, names and the order of rows.
The `gguf` package dequantizes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from pyengine.errors import ConfigError, UnsupportedModelError, WeightError
from pyengine.models.gguf_header import Array, Header, TensorInfo, read_header, read_rows

# Types handed out as they lie in the file; all others are dequantized to f32.
_STORED = {
    GGMLQuantizationType.F32: ("F32", "<f4"),
    GGMLQuantizationType.F16: ("F16", "<f2"),
    GGMLQuantizationType.BF16: ("BF16", "<u2"),
    GGMLQuantizationType.Q8_0: ("Q8_0", "u1"),
}

# ---- hyperparameters ---------------------------------------------------------------------------

ARCHITECTURES = ("llama", "qwen2")

_CONFIG_KEYS = {  # after "<architecture>." -> Hugging Face's config.json
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_OTHER_KEYS = {  # honoured below, or without meaning for the forward pass
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
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
    "tensor_data_layout",
    "vocab_size",
}
ROPE_FACTORS = "rope_freqs.weight"  # llama3's frequency factors, worked out at conversion


def _uniform(path: Path, key: str, value: Any) -> Any:
    """A per-layer list whose entries agree, as one value."""
    if not isinstance(value, list):
        return value
    if len(set(value)) != 1:
        raise UnsupportedModelError(f"{path}: {key} differs from layer to layer: {value}")
    return value[0]


def config_from_header(header: Header) -> dict[str, Any]:
    """The file's hyperparameters as a config.json of Hugging Face.

    Raises:
        UnsupportedModelError: another architecture, or a hyperparameter not honoured; named.
        ConfigError: a required key is missing.
    """
    path, metadata = header.path, header.metadata
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{path}: GGUF architecture {architecture!r} is not supported; "
            f"{' and '.join(ARCHITECTURES)} are"
        )
    prefix = f"{architecture}."
    facts = {
        key.removeprefix(prefix): _uniform(path, key, value)
        for key, value in metadata.items()
        if key.startswith(prefix)
    }
    for key, value in facts.items():
        if key not in _CONFIG_KEYS and key not in _OTHER_KEYS and value:
            raise UnsupportedModelError(f"{path}: {prefix}{key}={value!r} is not supported")

    config: dict[str, Any] = {"model_type": architecture, "hidden_act": "silu"}
    for key, name in _CONFIG_KEYS.items():
        if key not in facts:
            raise ConfigError(f"{path}: {prefix}{key} is missing")
        expected = float if name == "rms_norm_eps" else int
        if not isinstance(facts[key], expected) or not facts[key] > 0:
            raise ConfigError(f"{path}: {prefix}{key}={facts[key]!r} must be above 0")
        config[name] = facts[key]
    for name in ("token_embd.weight", "blk.0.attn_q.weight"):
        if name not in header.tensors:
            raise WeightError(f"{path}: tensor {name} is missing")
    heads = config["num_attention_heads"]
    head_dim = facts.get(
        "attention.key_length", header.tensors["blk.0.attn_q.weight"].rows // heads
    )
    if not isinstance(head_dim, int) or head_dim <= 0 or head_dim % 2:
        raise ConfigError(f"{path}: heads of {head_dim!r} values; an even number is needed")
    for key in ("attention.value_length", "rope.dimension_count"):
        if facts.get(key, head_dim) != head_dim:
            raise UnsupportedModelError(
                f"{path}: {prefix}{key}={facts[key]}, heads have {head_dim}"
            )
    config |= {
        "head_dim": head_dim,
        "num_key_value_heads": facts.get("attention.head_count_kv", heads),
        "vocab_size": header.tensors["token_embd.weight"].rows,
        "rope_theta": facts.get("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(header, facts, head_dim),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": end_token_ids(metadata),
    }
    if architecture == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
        config["mlp_bias"] = "blk.0.ffn_up.bias" in header.tensors
    else:
        config["use_sliding_window"] = False
    return config


def end_token_ids(metadata: dict[str, Any]) -> list[int]:
    """Ids that end an answer: end of text, of turn and of message, where the file names them."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = (metadata.get(f"tokenizer.ggml.{key}") for key in keys)
    return list(dict.fromkeys(i for i in ids if i is not None))


def _rope_scaling(header: Header, facts: dict[str, Any], head_dim: int) -> dict[str, Any] | None:
    kind = facts.get("rope.scaling.type") or ("linear" if "rope.scale_linear" in facts else "none")
    factor = facts.get("rope.scaling.factor", facts.get("rope.scale_linear", 1.0))
    if ROPE_FACTORS in header.tensors:
        if kind != "none":
            raise UnsupportedModelError(
                f"{header.path}: both {ROPE_FACTORS} and {kind} rope scaling"
            )
        return _llama3_scaling(header, facts.get("rope.freq_base", 10000.0), head_dim)
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
    with open(header.path, "rb") as file:
        stored = read_rows(file, header.path, ROPE_FACTORS, header.tensors[ROPE_FACTORS], 0, 1)
    factors = stored.view("<f4")[0].astype(np.float64)
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


# ---- tensors -----------------------------------------------------------------------------------

_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


_GGUF_NAMES = {theirs: ours for ours, theirs in _NAMES.items()}
_GGUF_LAYER_NAMES = {theirs: ours for ours, theirs in _LAYER_NAMES.items()}


def _hugging_face_name(name: str) -> str:
    """Hugging Face's name of a tensor; one that has none is kept, and refused at loading."""
    stem, _, suffix = name.rpartition(".")
    if stem in _NAMES:
        return f"{_NAMES[stem]}.{suffix}"
    block, _, role = stem.removeprefix("blk.").partition(".")
    if stem.startswith("blk.") and role in _LAYER_NAMES:
        return f"model.layers.{block}.{_LAYER_NAMES[role]}.{suffix}"
    return name


def gguf_name(name: str) -> str:
    """GGUF's name of a tensor that has Hugging Face's. Raises KeyError where there is none."""
    stem, _, suffix = name.rpartition(".")
    if stem in _GGUF_NAMES:
        return f"{_GGUF_NAMES[stem]}.{suffix}"
    layer, _, role = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_GGUF_LAYER_NAMES[role]}.{suffix}"


def interleaved_row(rows: Array, head_dim: int) -> Array:
    """Where llama.cpp's conversion put row `r` of a Llama q or k projection.

    Hugging Face orders a head's rows [first halves | second halves] (rotary pairing `half`); the
    conversion reorders them into pairs (`interleaved`): LlamaModel.permute. Both arrays: int64.
    """
    head, within = np.divmod(rows, head_dim)
    half, pair = np.divmod(within, head_dim // 2)
    return np.asarray(head * head_dim + 2 * pair + half)


class GGUFCheckpoint:
    """A GGUF file as a checkpoint: Hugging Face's config, tensor names and order of rows.

    Attributes:
        path: the file.
        config: hyperparameters, spelled as in config.json.
        header: metadata and tensor table.

    Raises (at construction):
        WeightError: not a GGUF file, damaged or cut.
        UnsupportedModelError: architecture, hyperparameter or quantisation not supported; named.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header = read_header(path)
        try:
            self.config = config_from_header(self.header)
        except (AttributeError, IndexError, KeyError, OverflowError, TypeError) as error:
            raise ConfigError(f"{path}: its metadata is malformed: {error!r}") from error
        self._tensors = {
            _hugging_face_name(name): (name, info)
            for name, info in self.header.tensors.items()
            if name != ROPE_FACTORS
        }
        for kind in {info.kind for _, info in self._tensors.values()} - set(_STORED):
            try:
                dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
            except NotImplementedError:
                raise UnsupportedModelError(
                    f"{path}: holds {kind.name} tensors, which the gguf package does not dequantize"
                ) from None
        for name, info in self.header.tensors.items():
            if len(info.shape) > 2:
                raise UnsupportedModelError(f"{path}: {name} has {len(info.shape)} dimensions")
        self._file = open(path, "rb")

    def names(self) -> list[str]:
        """Tensor names, in the file's order."""
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape in weights. Raises WeightError if there is no such tensor."""
        return self._find(name)[1].shape

    def dtype(self, name: str) -> str:
        """What `read` gives: "F32", "F16", "BF16", "Q8_0" as stored; "F32" for other types."""
        _, info = self._find(name)
        if info.kind == GGMLQuantizationType.Q8_0 and len(info.shape) == 1:
            return "F32"
        return _STORED[info.kind][0] if info.kind in _STORED else "F32"

    def stored_as(self, name: str) -> str:
        """Its ggml type: "Q4_1", "F16", ..."""
        return self._find(name)[1].kind.name

    def read(self, name: str, rows: slice | None = None) -> Array:
        """Rows of a tensor (all without `rows`), as `dtype` says.

        Returns float32, float16 or uint16 (bf16) of the tensor's shape, or for Q8_0 uint8 (rows,
        blocks * 34): ggml's blocks. Raises WeightError if the file ends early, as one cut while it
        is open does.
        """
        stored_name, info = self._find(name)
        start, stop, _ = (rows or slice(None)).indices(info.shape[0])
        wanted = np.arange(start, stop)
        if self.config["model_type"] == "llama" and name.split(".")[-2] in ("q_proj", "k_proj"):
            wanted = interleaved_row(wanted, self.config["head_dim"])
        if len(info.shape) == 1:
            values = self._values(info.kind, self._rows(stored_name, info, 0, 1))
            return np.asarray(values[0, wanted])
        if not wanted.size:
            return self._values(info.kind, np.empty((0, info.row_bytes), np.uint8))
        first, last = int(wanted.min()), int(wanted.max())
        data = self._rows(stored_name, info, first, last + 1)
        if not np.array_equal(wanted, np.arange(first, last + 1)):
            data = data[wanted - first]
        return data if self.dtype(name) == "Q8_0" else self._values(info.kind, data)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def __enter__(self) -> GGUFCheckpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _find(self, name: str) -> tuple[str, TensorInfo]:
        try:
            return self._tensors[name]
        except KeyError:
            raise WeightError(f"{self.path}: tensor {name} is missing") from None

    def _rows(self, stored_name: str, info: TensorInfo, start: int, stop: int) -> Array:
        return read_rows(self._file, self.path, stored_name, info, start, stop)

    @staticmethod
    def _values(kind: GGMLQuantizationType, data: Array) -> Array:
        """Raw rows of bytes as rows of numbers."""
        if kind in _STORED and kind != GGMLQuantizationType.Q8_0:
            return data.view(_STORED[kind][1])
        return np.asarray(dequantize(data, kind))
