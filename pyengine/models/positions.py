"""Positions as numbers: rotary frequencies and tables, and ALiBi slopes. Pure numpy, float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary parameters of a model, all defaults filled in.

    Attributes:
        rope_type: "default", "linear", "llama3", "yarn" or "longrope".
        rope_theta: base of the frequencies.
        rotary_dim: leading values of each head that rotate; even.
        attention_factor: multiplies cos and sin.
        original_max_position_embeddings: trained length (llama3, yarn, longrope).
        factor: how far the context is stretched (linear, llama3, yarn).
        low_freq_factor, high_freq_factor: llama3's band.
        beta_fast, beta_slow, truncate: yarn's band, in rotations within the trained length.
        short_factor, long_factor: longrope's divisors, rotary_dim / 2 each.
    """

    rope_type: str
    rope_theta: float
    rotary_dim: int
    attention_factor: float = 1.0
    original_max_position_embeddings: int = 0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    @property
    def switch_length(self) -> int | None:
        """A sequence longer than this uses the second (long) table; None: there is one table."""
        return self.original_max_position_embeddings if self.rope_type == "longrope" else None


def frequencies(rope: RopeConfig, *, long: bool = False) -> Array:
    """Radians per position of each rotated pair: float64 (rotary_dim / 2).

    f_j = theta^(-2j / rotary_dim), Su et al. 2021 (arXiv:2104.09864), then the rule of rope_type as
    in transformers 5.24 modeling_rope_utils.py. `long` picks longrope's second set.
    """
    exponent = np.arange(0, rope.rotary_dim, 2, dtype=np.float64) / rope.rotary_dim
    base: Array = rope.rope_theta**-exponent
    if rope.rope_type == "linear":
        return base / rope.factor
    if rope.rope_type == "llama3":
        return _llama3(rope, base)
    if rope.rope_type == "yarn":
        return _yarn(rope, base)
    if rope.rope_type == "longrope":
        return base / np.asarray(rope.long_factor if long else rope.short_factor, np.float64)
    return base


def _llama3(rope: RopeConfig, base: Array) -> Array:
    """Waves longer than the trained length are stretched, short ones kept, a ramp between."""
    wavelength = 2 * np.pi / base
    turns = rope.original_max_position_embeddings / wavelength
    band = rope.high_freq_factor - rope.low_freq_factor
    keep = np.clip((turns - rope.low_freq_factor) / band, 0.0, 1.0)
    return (1 - keep) * base / rope.factor + keep * base


def _yarn(rope: RopeConfig, base: Array) -> Array:
    """Peng et al. 2023 (arXiv:2309.00071), section 3.2: stretch the slow pairs, keep the fast."""

    def pair_at(rotations: float) -> float:
        turns = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        return rope.rotary_dim * math.log(turns) / (2 * math.log(rope.rope_theta))

    low, high = pair_at(rope.beta_fast), pair_at(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(base.size, dtype=np.float64) - low) / (high - low), 0.0, 1.0)
    return ramp * base / rope.factor + (1 - ramp) * base


def yarn_attention_factor(factor: float, mscale: float = 0.0, mscale_all_dim: float = 0.0) -> float:
    """0.1 ln(factor) + 1; with both scales given, the quotient of 0.1 m ln(factor) + 1 of each."""

    def grow(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if mscale and mscale_all_dim:
        return grow(mscale) / grow(mscale_all_dim)
    return grow(1.0)


def longrope_attention_factor(factor: float, original_max_position_embeddings: int) -> float:
    """sqrt(1 + ln(factor) / ln(original length)); 1 where nothing is stretched."""
    if factor <= 1.0:
        return 1.0
    return math.sqrt(1 + math.log(factor) / math.log(original_max_position_embeddings))


def rope_rows(
    rope: RopeConfig, first: int, stop: int, *, long: bool = False
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Table rows of positions [first, stop): float32 (stop - first, rotary_dim), cos then sin.

    Angles are float64, so that a row is exact to float32 at any position.
    """
    angle = np.arange(first, stop, dtype=np.float64)[:, None] * frequencies(rope, long=long)
    table = np.concatenate([np.cos(angle), np.sin(angle)], axis=1) * rope.attention_factor
    return table.astype(np.float32)


def alibi_slopes(heads: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Slope of each head: float32 (heads).  Press et al. 2022 (arXiv:2108.12409), appendix.

    2^(-8i / p), i = 1..p, where p is the largest power of two <= heads; then 2^(-4i / p) for odd i.
    """
    power = 1 << (heads.bit_length() - 1)
    first = 2.0 ** (-8.0 * np.arange(1, power + 1) / power)
    rest = 2.0 ** (-4.0 * np.arange(1, 2 * (heads - power), 2) / power)
    return np.concatenate([first, rest]).astype(np.float32)
