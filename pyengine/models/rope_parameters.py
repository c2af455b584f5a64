"""Rotary parameters of config.json, in either spelling, with all defaults filled in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pyengine.errors import ConfigError, UnsupportedModelError
from pyengine.models.positions import (
    RopeConfig,
    longrope_attention_factor,
    yarn_attention_factor,
)
from pyengine.models.spec import DecoderSpec, Field

_NUMBER = Field(float, minimum=0.0, maximum=1e30)


def read_rope(
    raw: Mapping[str, Any], spec: DecoderSpec, head_dim: int, max_positions: int, source: str
) -> RopeConfig:
    """Rotary parameters from either spelling.

    v5 writes one dict, rope_parameters; v4 a dict rope_scaling (type or rope_type) beside top-level
    rope_theta and partial_rotary_factor. Where both dicts stand, rope_scaling counts. A value in
    the dict goes before the top level, that before the class default.
    """
    given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(given, dict):
        raise ConfigError(f"{source}: rope_scaling={given!r} is not an object")
    nested = [key for key, value in given.items() if isinstance(value, dict)]
    if nested or given.get("mrope_section"):
        field = nested[0] if nested else "mrope_section"
        raise UnsupportedModelError(f"{source}: {field} in rope_parameters is not supported")

    def number(key: str, default: float | None = None, *, top: bool = False) -> float:
        value = given.get(key)
        if value is None and top:
            value = raw.get(key)
        if value is None:
            value = default
        if value is None:
            raise ConfigError(f"{source}: rope_parameters lacks {key}")
        return float(_NUMBER.check(value, key, source))

    def positive(key: str, default: float | None = None) -> float:
        value = number(key, default)
        if value <= 0:
            raise ConfigError(f"{source}: {key}={value:g} in rope_parameters, must be > 0")
        return value

    word = given.get("rope_type") or given.get("type") or "default"
    rope_type = spec.rope_types.get(word) if isinstance(word, str) else None
    if rope_type is None:
        known = ", ".join(spec.rope_types)
        raise UnsupportedModelError(
            f"{source}: rope_type {word!r} is not supported; known: {known}"
        )
    theta = number("rope_theta", 10000.0, top=True)
    share = number("partial_rotary_factor", spec.partial_rotary or 1.0, top=True)
    if spec.partial_rotary is None and share != 1.0:
        raise UnsupportedModelError(
            f"{source}: partial_rotary_factor={share:g} is not supported for model_type "
            f"{spec.model_type!r}"
        )
    rotary_dim = int(head_dim * share)
    if theta <= 1.0 or not 0.0 < share <= 1.0 or rotary_dim < 2:
        raise ConfigError(
            f"{source}: rope_theta={theta:g}, partial_rotary_factor={share:g} rotate nothing"
        )
    if rotary_dim % 2:
        raise UnsupportedModelError(
            f"{source}: {rotary_dim} rotary dimensions (head_dim {head_dim} x {share:g}) are odd"
        )
    base = RopeConfig(rope_type, theta, rotary_dim)
    if rope_type == "default":
        return base
    original = raw.get("original_max_position_embeddings") or spec.original_max_default
    original = original or given.get("original_max_position_embeddings") or max_positions
    original = Field(int, minimum=2).check(original, "original_max_position_embeddings", source)
    base = replace(base, original_max_position_embeddings=original)
    stretch = max_positions / original
    if rope_type == "linear":
        return replace(base, factor=positive("factor"))
    if rope_type == "llama3":
        low, high = positive("low_freq_factor"), positive("high_freq_factor")
        if high <= low:
            raise ConfigError(f"{source}: high_freq_factor={high:g} <= low_freq_factor={low:g}")
        return replace(
            base,
            factor=positive("factor"),
            low_freq_factor=low,
            high_freq_factor=high,
        )
    if rope_type == "yarn":
        factor = positive("factor", stretch if "factor" in given else None)
        mscales = (number("mscale", 0.0), number("mscale_all_dim", 0.0))
        return replace(
            base,
            factor=factor,
            attention_factor=number("attention_factor", yarn_attention_factor(factor, *mscales)),
            beta_fast=number("beta_fast", 32.0) or 32.0,
            beta_slow=number("beta_slow", 1.0) or 1.0,
            truncate=bool(given.get("truncate", True)),
        )
    factor = positive("factor", stretch)
    return replace(
        base,
        factor=factor,
        attention_factor=number("attention_factor", longrope_attention_factor(factor, original)),
        short_factor=_divisors(given, "short_factor", rotary_dim // 2, source),
        long_factor=_divisors(given, "long_factor", rotary_dim // 2, source),
    )


def _divisors(given: Mapping[str, Any], key: str, count: int, source: str) -> tuple[float, ...]:
    """One of longrope's two lists: `count` positive numbers."""
    listed = given.get(key)
    if not isinstance(listed, list) or len(listed) != count:
        found = len(listed) if isinstance(listed, list) else "none"
        raise ConfigError(f"{source}: {key} needs {count} entries (rotary dims / 2), found {found}")
    numbers = tuple(float(Field(float).check(value, key, source)) for value in listed)
    if min(numbers) <= 0:
        raise ConfigError(f"{source}: {key} holds {min(numbers):g}, must be > 0")
    return numbers
