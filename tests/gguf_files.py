"""Small GGUF files for tests, written by the gguf package's own writer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

HIDDEN, HEADS, KV_HEADS, INTERMEDIATE, LAYERS, VOCAB = 64, 4, 2, 96, 2, 300
HEAD_DIM = HIDDEN // HEADS
Weights = dict[str, np.ndarray]

_ROLES = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.q_proj.bias": "attn_q.bias",
    "self_attn.k_proj.bias": "attn_k.bias",
    "self_attn.v_proj.bias": "attn_v.bias",
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}


def random_weights(*, biases: bool = False, seed: int = 0) -> Weights:
    """A tied two-layer model's f32 weights under Hugging Face names."""
    rng = np.random.default_rng(seed)
    q, kv = HIDDEN, KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (HIDDEN,),
            prefix + "post_attention_layernorm.weight": (HIDDEN,),
            prefix + "self_attn.q_proj.weight": (q, HIDDEN),
            prefix + "self_attn.k_proj.weight": (kv, HIDDEN),
            prefix + "self_attn.v_proj.weight": (kv, HIDDEN),
            prefix + "self_attn.o_proj.weight": (HIDDEN, q),
            prefix + "mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
            prefix + "mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
            prefix + "mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
        }
        if biases:
            for name, rows in (("q", q), ("k", kv), ("v", kv)):
                shapes[f"{prefix}self_attn.{name}_proj.bias"] = (rows,)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's LlamaModel.permute: a head's rows [halves] -> pairs."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
        .swapaxes(1, 2)
        .reshape(weight.shape)
    )


def gguf_name(name: str) -> str:
    """GGUF's name of a Hugging Face tensor."""
    whole = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in whole:
        return whole[name]
    layer, role = name.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{_ROLES[role]}"


def write_gguf(
    path: Path,
    weights: Weights | None = None,
    *,
    architecture: str = "llama",
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    metadata: dict[str, Any] | None = None,
    without: tuple[str, ...] = (),
    extra: Weights | None = None,
    extra_kind: gguf.GGMLQuantizationType | None = None,
) -> Path:
    """Writes a file as llama.cpp's converter would.

    Args:
        kind: type of the matrices (norms and biases stay f32).
        metadata: added keys; values choose their GGUF type by Python type.
        without: keys left out.
        extra: further tensors, by GGUF name: f32, or raw rows of bytes of `extra_kind`.
    """
    weights = random_weights(biases=architecture == "qwen2") if weights is None else weights
    writer = gguf.GGUFWriter(path, architecture)
    facts: dict[str, Any] = {
        f"{architecture}.block_count": LAYERS,
        f"{architecture}.context_length": 256,
        f"{architecture}.embedding_length": HIDDEN,
        f"{architecture}.feed_forward_length": INTERMEDIATE,
        f"{architecture}.attention.head_count": HEADS,
        f"{architecture}.attention.head_count_kv": KV_HEADS,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{architecture}.rope.freq_base": 10000.0,
    }
    for key, value in (facts | (metadata or {})).items():
        if key not in without:
            _add(writer, key, value)
    for name, weight in weights.items():
        if architecture == "llama" and ".q_proj." in name:
            weight = permute(weight, HEADS)
        if architecture == "llama" and ".k_proj." in name:
            weight = permute(weight, KV_HEADS)
        matrix_kind = kind if weight.ndim == 2 else gguf.GGMLQuantizationType.F32
        data = gguf.quants.quantize(weight, matrix_kind)
        writer.add_tensor(gguf_name(name), data, raw_dtype=matrix_kind)
    for name, weight in (extra or {}).items():
        writer.add_tensor(name, weight, raw_dtype=extra_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, value)
