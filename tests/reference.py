"""What every operation of okernel.h should compute, in float64 numpy: the tests' ground truth.

Inputs are rounded to their storage type beforehand with `stored`, so that a reference sees the very
numbers a kernel sees.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pyengine.native import Activation, DType

Array = np.ndarray[Any, Any]

Q8_0_BLOCK = 32
Q8_0_BLOCK_TYPE = np.dtype([("scale", "<f2"), ("quant", "i1", (Q8_0_BLOCK,))])  # 34 bytes
KV_BLOCK_SIZE = 32
BANNED_FIRST = 8  # column of the first banned id in a row of ok_sample's integers
PROMPT_BIT = 1 << 31


# ---- storage types -------------------------------------------------------------------------------


def to_bf16(x: Array) -> Array:
    """float32 -> bfloat16 as uint16, to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(x), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def from_bf16(x: Array) -> Array:
    """bfloat16 as uint16 -> float32."""
    return (np.ascontiguousarray(x, np.uint16).astype(np.uint32) << 16).view(np.float32)


def quantize_q8_0(x: Array) -> Array:
    """ggml's q8_0 of float32 (rows, cols): structured blocks (rows, ceil(cols / 32)).

    d = max|x| / 127 in float32, stored as f16; q = round(x / d), d unrounded, half away from zero.
    """
    rows, cols = x.shape
    padded = np.zeros((rows, -(-cols // Q8_0_BLOCK) * Q8_0_BLOCK), np.float32)
    padded[:, :cols] = x
    groups = padded.reshape(rows, -1, Q8_0_BLOCK)
    scale = np.abs(groups).max(axis=2) / np.float32(127)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratio = np.where(scale[..., None] > 0, groups * (np.float32(1) / scale)[..., None], 0)
    blocks = np.zeros(groups.shape[:2], Q8_0_BLOCK_TYPE)
    blocks["scale"] = scale
    whole = np.trunc(ratio)
    blocks["quant"] = whole + np.trunc(2 * (ratio - whole))  # exact, unlike trunc(ratio + 0.5)
    return blocks


def dequantize_q8_0(blocks: Array, cols: int) -> Array:
    """Structured blocks (rows, n) -> float32 (rows, cols), exact."""
    values = blocks["quant"].astype(np.float32) * blocks["scale"].astype(np.float32)[..., None]
    return values.reshape(len(blocks), -1)[:, :cols]


def stored(x: Array, dtype: DType) -> Array:
    """float32 values after a trip through a storage type."""
    x = np.ascontiguousarray(x, np.float32)
    if dtype == DType.F16:
        return x.astype(np.float16).astype(np.float32)
    if dtype == DType.BF16:
        return from_bf16(to_bf16(x))
    if dtype == DType.Q8_0:
        return dequantize_q8_0(quantize_q8_0(x), x.shape[1])
    return x


# ---- matrices ------------------------------------------------------------------------------------


def matmul(
    x: Array, weight: Array, bias: Array | None = None, residual: Array | None = None
) -> Array:
    """x (rows, in), weight (out, in) -> (rows, out)."""
    y = x.astype(np.float64) @ weight.astype(np.float64).T
    return y + (0 if bias is None else bias) + (0 if residual is None else residual)


def embedding(table: Array, ids: Array, residual: Array | None = None) -> Array:
    """table (vocab, cols)[ids], zeros for ids outside it."""
    known = (ids >= 0) & (ids < len(table))
    rows = np.where(known[:, None], table[np.where(known, ids, 0)].astype(np.float64), 0.0)
    return rows + (0 if residual is None else residual)


# ---- norms, rotary, activations ------------------------------------------------------------------


def rms_norm(
    x: Array, weight: Array, eps: float, groups: int = 1, residual: Array | None = None
) -> Array:
    """Zhang & Sennrich 2019, eq. 4, on each of `groups` vectors of a row."""
    v = x.astype(np.float64).reshape(len(x), groups, -1)
    y = v / np.sqrt((v * v).mean(axis=2, keepdims=True) + eps)
    y = y.reshape(x.shape) * weight.reshape(-1)
    return y + (0 if residual is None else residual)


def layer_norm(
    x: Array,
    weight: Array,
    bias: Array | None,
    eps: float,
    groups: int = 1,
    residual: Array | None = None,
) -> Array:
    """Ba et al. 2016, eq. 4, on each of `groups` vectors of a row."""
    v = x.astype(np.float64).reshape(len(x), groups, -1)
    v = v - v.mean(axis=2, keepdims=True)
    y = v / np.sqrt((v * v).mean(axis=2, keepdims=True) + eps)
    y = y.reshape(x.shape) * weight.reshape(-1) + (0 if bias is None else bias.reshape(-1))
    return y + (0 if residual is None else residual)


def rope_table(positions: int, rotary_dim: int, theta: float = 10000.0) -> Array:
    """float32 (positions, rotary_dim): cos, then sin. Su et al. 2021, eq. 34."""
    frequency = theta ** (-np.arange(0, rotary_dim, 2) / rotary_dim)
    angle = np.arange(positions)[:, None] * frequency
    return np.concatenate([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)


def rope(x: Array, table: Array, table_row: Array, heads: int, rotary_dim: int) -> Array:
    """x (rows, heads * head_dim); the first rotary_dim of each head rotated, paired at half."""
    y = x.astype(np.float64).reshape(len(x), heads, -1).copy()
    half = rotary_dim // 2
    for row, at in enumerate(table_row):
        if 0 <= at < len(table):
            cos, sin = table[at, :half].astype(np.float64), table[at, half:].astype(np.float64)
            low, high = y[row, :, :half].copy(), y[row, :, half:rotary_dim].copy()
            y[row, :, :half] = low * cos - high * sin
            y[row, :, half:rotary_dim] = high * cos + low * sin
    return y.reshape(x.shape)


def activate(x: Array, kind: Activation) -> Array:
    """The four activations, with tails that keep their digits."""
    x = x.astype(np.float64)
    if kind == Activation.SILU:
        return x * _sigmoid(x)
    if kind == Activation.GELU_TANH:  # 0.5 (1 + tanh u) = sigmoid(2 u)
        return x * _sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    if kind == Activation.GELU_ERF:  # 0.5 (1 + erf z) = 0.5 erfc(-z)
        return 0.5 * x * np.vectorize(math.erfc, otypes=[float])(-x / math.sqrt(2))
    return np.maximum(x, 0)


def _sigmoid(x: Array) -> Array:
    e = np.exp(-np.abs(x))
    return np.where(x < 0, e, 1.0) / (1.0 + e)


def activate_gated(x: Array, kind: Activation) -> Array:
    """x (rows, 2 cols), gate then up."""
    cols = x.shape[1] // 2
    return activate(x[:, :cols], kind) * x[:, cols:]


# ---- attention -----------------------------------------------------------------------------------


def attention_paged(
    q: Array,
    keys: Array,
    values: Array,
    block_table: Array,
    sequence: Array,
    position: Array,
    *,
    scale: float,
    slope: Array | None = None,
    window: int = 0,
) -> Array:
    """Causal attention of ragged rows.

    q: (rows, heads, head_dim). keys, values: (blocks * KV_BLOCK_SIZE, kv_heads, head_dim), as
    stored. block_table: (sequences, n). Returns (rows, heads, head_dim); zeros where position < 0.
    """
    rows, heads, _ = q.shape
    share = heads // keys.shape[1]
    y = np.zeros(q.shape)
    for row in range(rows):
        last = int(position[row])
        if last < 0:
            continue
        seen = np.arange(max(0, last - window + 1) if window else 0, last + 1)
        blocks = block_table[sequence[row], seen // KV_BLOCK_SIZE].astype(np.int64)
        slots = blocks * KV_BLOCK_SIZE + seen % KV_BLOCK_SIZE
        for head in range(heads):
            k = keys[slots, head // share].astype(np.float64)
            score = scale * (k @ q[row, head].astype(np.float64))
            if slope is not None:
                score += float(slope[head]) * (seen - last)
            p = np.exp(score - score.max())
            y[row, head] = (p / p.sum()) @ values[slots, head // share].astype(np.float64)
    return y


def alibi_slopes(heads: int) -> Array:
    """Press et al. 2022, with the interleaved second series where heads is no power of two."""
    power = 1 << (heads.bit_length() - 1)
    first = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    second = [2 ** (-4 * (2 * i + 1) / power) for i in range(heads - power)]
    return np.array(first + second)


# ---- sampling ------------------------------------------------------------------------------------


def philox4x32(key: tuple[int, int], counter: tuple[int, int, int, int]) -> tuple[int, ...]:
    """Philox4x32-10: Salmon et al. 2011, section 4.3."""
    k0, k1 = key
    c = list(counter)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k0, b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k1, a & 0xFFFFFFFF]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return tuple(c)


def uniform(seed: int, position: int) -> float:
    """24 bits of Philox, key = seed, counter = position: in [0, 1)."""
    key = (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF)
    return (philox4x32(key, (position & 0xFFFFFFFF, 0, 0, 0))[0] >> 8) / 2**24


def log_softmax(logits: Array) -> Array:
    """Along the last axis."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def sample_distribution(
    logits: Array, floats: Array, ints: Array, counts: Array | None, bias: Array | None
) -> Array | None:
    """Unnormalised probabilities of one row after all filters, in the header's order.

    counts, bias: the row's slot (vocab), or None. At temperature 0 the largest has all
    the probability. None: nothing to pick.
    """
    temperature, top_p, min_p, repetition, presence, frequency = (float(v) for v in floats[:6])
    if np.isnan(logits).any() or np.isposinf(logits).any():
        return None
    score = logits.astype(np.float64) + (0 if bias is None else bias)
    if counts is not None:
        seen, times = counts != 0, (counts & (PROMPT_BIT - 1)).astype(np.float64)
        punished = np.where(score > 0, score / repetition, score * repetition)
        score = np.where(seen, punished, score)
        score = score - presence * (times > 0) - frequency * times
    banned = ints[BANNED_FIRST:]
    score[banned[(banned >= 0) & (banned < len(score))]] = -np.inf
    if np.isneginf(score).all():
        return None
    if temperature == 0:
        return (np.arange(len(score)) == score.argmax()).astype(np.float64)
    score = (score - score.max()) / temperature
    p = np.exp(score)
    top_k = int(ints[0])
    if 0 < top_k < len(p):
        p[score < np.sort(score)[-top_k]] = 0
    if top_p < 1:
        order = np.sort(p)[::-1]
        last = int(np.searchsorted(np.cumsum(order), top_p * order.sum()))
        p[p < order[min(last, len(order) - 1)]] = 0
    p[p < min_p * p.max()] = 0
    return p


def sample_row(
    logits: Array, floats: Array, ints: Array, counts: Array | None, bias: Array | None
) -> int:
    """The picked id of one row, or -1."""
    p = sample_distribution(logits, floats, ints, counts, bias)
    if p is None:
        return -1
    seed = (int(ints[1]) & 0xFFFFFFFF) | (int(ints[2]) & 0xFFFFFFFF) << 32
    u = uniform(seed, int(ints[3]))
    return int(np.searchsorted(np.cumsum(p), u * p.sum(), side="right"))
