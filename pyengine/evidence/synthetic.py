"""Random checkpoints of every family, in the layout that people publish, made without torch.

The same seed gives the same bytes on every machine and with every numpy: a weight is a sum of four
16-bit pieces of raw Philox output, which is integer arithmetic, times one float32 constant. (numpy
promises neither its normal distribution nor the last bit of its logarithms.)
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

Config = Mapping[str, Any]
Std = Callable[[str, tuple[int, ...]], float]
"""Standard deviation of a tensor, given its name and shape; norm weights are spread around 1."""

_CHUNK = 1 << 18  # weights generated at a time: 2 MiB of raw bits, which stay in the cache
_ODD = np.uint64(0x0000FFFF0000FFFF)
_TYPES = {"f32": ("F32", 4), "f16": ("F16", 2), "bf16": ("BF16", 2)}


# ---- tensors of a family ------------------------------------------------------------------------


def tensor_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Checkpoint name -> shape of every tensor that Transformers 5 writes for this config.

    Args:
        config: config.json as a dict, with sizes spelled out (`num_key_value_heads` may be absent).

    Raises:
        KeyError: an unknown `model_type` or a size that is missing.
    """
    return dict(_FAMILIES[config["model_type"]](config))


def _linear(name: str, out: int, inner: int, bias: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (out, inner)
    if bias:
        yield f"{name}.bias", (out,)


def _norm(name: str, width: int, bias: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (width,)
    if bias:
        yield f"{name}.bias", (width,)


def _rotary_families(c: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Llama's names, and what StableLM, OLMo-2, Qwen2 and Phi-3 change in them."""
    family = c["model_type"]
    hidden, inner, heads = c["hidden_size"], c["intermediate_size"], c["num_attention_heads"]
    kv_heads = c.get("num_key_value_heads") or heads
    head_dim = c.get("head_dim") or hidden // heads
    q, kv = heads * head_dim, kv_heads * head_dim
    layer_norm = family == "stablelm"
    out_bias = family in ("llama", "olmo2") and bool(c.get("attention_bias"))
    qkv_bias = out_bias or family == "qwen2" or bool(c.get("use_qkv_bias"))
    mlp_bias = family == "llama" and bool(c.get("mlp_bias"))

    yield "model.embed_tokens.weight", (c["vocab_size"], hidden)
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        if family == "phi3":
            yield from _linear(p + "self_attn.qkv_proj", q + 2 * kv, hidden, False)
            yield from _linear(p + "mlp.gate_up_proj", 2 * inner, hidden, False)
        else:
            yield from _linear(p + "self_attn.q_proj", q, hidden, qkv_bias)
            yield from _linear(p + "self_attn.k_proj", kv, hidden, qkv_bias)
            yield from _linear(p + "self_attn.v_proj", kv, hidden, qkv_bias)
            yield from _linear(p + "mlp.gate_proj", inner, hidden, mlp_bias)
            yield from _linear(p + "mlp.up_proj", inner, hidden, mlp_bias)
        yield from _linear(p + "self_attn.o_proj", hidden, q, out_bias)
        yield from _linear(p + "mlp.down_proj", hidden, inner, mlp_bias)
        if family == "olmo2":
            yield p + "self_attn.q_norm.weight", (q,)
            yield p + "self_attn.k_norm.weight", (kv,)
            yield p + "post_feedforward_layernorm.weight", (hidden,)
        else:
            yield from _norm(p + "input_layernorm", hidden, layer_norm)
        if not c.get("use_parallel_residual", False):
            yield from _norm(p + "post_attention_layernorm", hidden, layer_norm)
        if family == "stablelm" and c.get("qk_layernorm", False):
            for name, count in (("q_layernorm", heads), ("k_layernorm", kv_heads)):
                for head in range(count):
                    yield f"{p}self_attn.{name}.norms.{head}.weight", (head_dim,)
    yield from _norm("model.norm", hidden, layer_norm)
    if not c.get("tie_word_embeddings", False):
        yield "lm_head.weight", (c["vocab_size"], hidden)


def _bloom(c: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden = c["hidden_size"]
    yield "transformer.word_embeddings.weight", (c["vocab_size"], hidden)
    yield from _norm("transformer.word_embeddings_layernorm", hidden, True)
    for i in range(c["n_layer"]):
        p = f"transformer.h.{i}."
        yield from _norm(p + "input_layernorm", hidden, True)
        yield from _linear(p + "self_attention.query_key_value", 3 * hidden, hidden, True)
        yield from _linear(p + "self_attention.dense", hidden, hidden, True)
        yield from _norm(p + "post_attention_layernorm", hidden, True)
        yield from _linear(p + "mlp.dense_h_to_4h", 4 * hidden, hidden, True)
        yield from _linear(p + "mlp.dense_4h_to_h", hidden, 4 * hidden, True)
    yield from _norm("transformer.ln_f", hidden, True)
    if not c.get("tie_word_embeddings", True):
        yield "lm_head.weight", (c["vocab_size"], hidden)


def _gpt2(c: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden = c["n_embd"]
    inner = c.get("n_inner") or 4 * hidden
    yield "transformer.wte.weight", (c["vocab_size"], hidden)
    yield "transformer.wpe.weight", (c["n_positions"], hidden)
    for i in range(c["n_layer"]):
        p = f"transformer.h.{i}."
        yield from _norm(p + "ln_1", hidden, True)
        yield p + "attn.c_attn.weight", (hidden, 3 * hidden)  # stored (in, out)
        yield p + "attn.c_attn.bias", (3 * hidden,)
        yield p + "attn.c_proj.weight", (hidden, hidden)
        yield p + "attn.c_proj.bias", (hidden,)
        yield from _norm(p + "ln_2", hidden, True)
        yield p + "mlp.c_fc.weight", (hidden, inner)
        yield p + "mlp.c_fc.bias", (inner,)
        yield p + "mlp.c_proj.weight", (inner, hidden)
        yield p + "mlp.c_proj.bias", (hidden,)
    yield from _norm("transformer.ln_f", hidden, True)
    if not c.get("tie_word_embeddings", True):
        yield "lm_head.weight", (c["vocab_size"], hidden)


_FAMILIES: dict[str, Callable[[Config], Iterator[tuple[str, tuple[int, ...]]]]] = {
    "stablelm": _rotary_families,
    "olmo2": _rotary_families,
    "qwen2": _rotary_families,
    "phi3": _rotary_families,
    "llama": _rotary_families,
    "bloom": _bloom,
    "gpt2": _gpt2,
}


# ---- random numbers and files -------------------------------------------------------------------


def is_norm_weight(name: str) -> bool:
    """Whether a tensor scales a normalised vector, and so is spread around 1 rather than 0."""
    head, _, last = name.rpartition(".")
    module = head.rpartition(".")[2]
    return last == "weight" and ("norm" in head or module in ("ln_1", "ln_2", "ln_f"))


def random_chunks(
    name: str, shape: tuple[int, ...], seed: int, std: float
) -> Iterator[NDArray[np.float32]]:
    """Values of one tensor in row-major order, some at a time; nearly normal, cut at 3.5 std.

    The stream is keyed by seed and name, so it does not depend on the order of tensors.
    """
    bits = np.random.Philox(key=[seed, zlib.crc32(name.encode())])
    scale = np.float32(std / np.sqrt(4 * (2.0**32 - 1) / 12))
    mean = np.float32(1 if is_norm_weight(name) else 0)
    count = int(np.prod(shape, dtype=np.int64))
    for start in range(0, count, _CHUNK):
        raw = np.atleast_1d(bits.random_raw(min(_CHUNK, count - start)))
        pairs = (raw & _ODD) + ((raw >> np.uint64(16)) & _ODD)  # two sums of two pieces each
        total = ((pairs + (pairs >> np.uint64(32))) & np.uint64(0xFFFFFFFF)).astype(np.int32)
        yield (total - np.int32(2 * 65535)).astype(np.float32) * scale + mean


def encode(values: NDArray[np.float32], dtype: str) -> bytes:
    """Little-endian bytes of float32 values in a safetensors type: "f32", "f16" or "bf16"."""
    if dtype == "bf16":  # round to nearest, ties to even; weights are finite
        bits = values.view(np.uint32)
        rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        return (rounded >> np.uint32(16)).astype("<u2").tobytes()
    return values.astype({"f32": "<f4", "f16": "<f2"}[dtype]).tobytes()


def write_weights(
    directory: Path,
    config: Config,
    *,
    seed: int,
    std: Std,
    dtype: str = "f32",
    shard_bytes: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Path]:
    """Streams random weights into safetensors files; memory stays at a few chunks.

    Args:
        directory: where model.safetensors, or shards and their index, are written.
        config: which tensors there are, as `tensor_shapes` reads it.
        seed: names the weights.
        std: standard deviation by tensor name and shape.
        dtype: "f32", "f16" or "bf16".
        shard_bytes: begin a new file before a tensor would take one above this size.
        progress: called with bytes written and bytes in all.

    Returns:
        The weight files in order.
    """
    code, size = _TYPES[dtype]
    shapes = tensor_shapes(config)
    bytes_of = {name: size * int(np.prod(s, dtype=np.int64)) for name, s in shapes.items()}
    shards: list[dict[str, int]] = [{}]
    for name, count in bytes_of.items():
        if shards[-1] and shard_bytes and sum(shards[-1].values()) + count > shard_bytes:
            shards.append({})
        shards[-1][name] = count

    total, done, files, weight_map = sum(bytes_of.values()), 0, [], {}
    for number, shard in enumerate(shards, 1):
        part = "" if len(shards) == 1 else f"-{number:05}-of-{len(shards):05}"
        file = f"model{part}.safetensors"
        files.append(directory / file)
        with open(files[-1], "wb") as out:
            _write_header(out, code, shapes, shard)
            for name in shard:
                weight_map[name] = file
                for values in random_chunks(name, shapes[name], seed, std(name, shapes[name])):
                    done += out.write(encode(values, dtype))
                    progress(done, total)
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    return files


def _write_header(
    out: BinaryIO, code: str, shapes: Mapping[str, tuple[int, ...]], shard: Mapping[str, int]
) -> None:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, count in shard.items():
        entries[name] = {
            "dtype": code,
            "shape": list(shapes[name]),
            "data_offsets": [offset, offset + count],
        }
        offset += count
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    out.write(struct.pack("<Q", len(text)) + text)


def write_byte_tokenizer(directory: Path, specials: tuple[str, ...]) -> None:
    """A byte-level tokenizer: ids 0-255 are bytes in alphabet order, then the special tokens.

    The first three specials are the beginning, the end and the padding token.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: i for i, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(specials))
    tokenizer.save(str(directory / "tokenizer.json"))
    names = dict(zip(("bos_token", "eos_token", "pad_token"), specials, strict=False))
    record = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    (directory / "tokenizer_config.json").write_text(json.dumps(record, indent=1))
