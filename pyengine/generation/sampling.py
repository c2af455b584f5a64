"""Sampling parameters: Transformers' names and meanings, validated, packed for ok_sample."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypedDict

import numpy as np

from pyengine.errors import RequestError
from pyengine.native.memory import Array
from pyengine.native.ops import SAMPLE_FLOATS, SAMPLE_INTS, SAMPLE_MAX_BANNED

MAX_STOP_STRINGS = 64
MAX_LOGPROBS = 100
LARGEST = 1e30  # of any real parameter: sums with logits stay in float32
LARGEST_PENALTY = 1e6


class SamplingOptions(TypedDict, total=False):
    """SamplingParams as keywords, for type checkers."""

    max_new_tokens: int
    min_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int | None
    stop: str | Sequence[str]
    logprobs: int | None
    ignore_eos: bool


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How a continuation is chosen. The defaults are greedy.

    Attributes:
        max_new_tokens: most tokens to generate; generation also ends at the context's end.
        min_new_tokens: end-of-text tokens are not picked before this many.
        temperature: 0 is greedy (whatever top_k, top_p and seed say); else logits are divided by
            it.
        top_k: keep the k most probable tokens; 0 or -1: all.
        top_p: keep the smallest set of most probable tokens whose sum is >= top_p; 1: all.
        min_p: keep tokens at least min_p times as probable as the most probable one.
        repetition_penalty: > 1 discourages ids of prompt and output: l / p if l > 0 else l * p.
        presence_penalty: subtracted once from logits of ids in the output (OpenAI's meaning).
        frequency_penalty: subtracted once for each time an id is in the output.
        logit_bias: added to the logits of these ids.
        seed: the same seed gives the same text, in any batch; None: a fresh one each time.
        stop: strings that end the text; they are not part of it.
        logprobs: None: none; n: log-probability of each token and of the n most probable ones,
            under the model's own distribution (before penalties and temperature).
        ignore_eos: go on past end-of-text tokens.

    Raises:
        RequestError: a value outside its range; names it.
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: str | Sequence[str] = ()
    logprobs: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "min_new_tokens", "top_k"):
            _integer(name, getattr(self, name))
        for name in _FLOATS:
            _real(name, getattr(self, name))
        _range("max_new_tokens", self.max_new_tokens, 0, None)
        _range("min_new_tokens", self.min_new_tokens, 0, None)
        _range("temperature", self.temperature, 0.0, None)
        _range("top_k", self.top_k, -1, None)
        _range("top_p", self.top_p, 0.0, 1.0)
        _range("min_p", self.min_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise RequestError("top_p=0: must be > 0 and <= 1")
        if self.repetition_penalty <= 0.0:
            raise RequestError(f"repetition_penalty={self.repetition_penalty}: must be > 0")
        _range("repetition_penalty", self.repetition_penalty, 1 / LARGEST_PENALTY, LARGEST_PENALTY)
        for name in ("presence_penalty", "frequency_penalty"):
            _range(name, getattr(self, name), -LARGEST_PENALTY, LARGEST_PENALTY)
        if self.seed is not None:
            _integer("seed", self.seed)
            _range("seed", self.seed, -(2**63), 2**64 - 1)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs)
            _range("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos={self.ignore_eos!r}: must be True or False")
        self._check_stop()
        self._check_bias()

    def _check_stop(self) -> None:
        stop = self.stop
        if not isinstance(stop, str) and not isinstance(stop, Sequence):
            raise RequestError(f"stop={stop!r}: must be a string or a list of strings")
        strings = self.stop_strings
        if len(strings) > MAX_STOP_STRINGS:
            raise RequestError(f"stop: {len(strings)} strings, at most {MAX_STOP_STRINGS}")
        for text in strings:
            if not isinstance(text, str) or not text:
                raise RequestError(f"stop: {text!r} is not a non-empty string")

    def _check_bias(self) -> None:
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError(f"logit_bias={self.logit_bias!r}: must map token ids to numbers")
        for token, value in self.logit_bias.items():
            _integer("logit_bias id", token)
            _real(f"logit_bias[{token}]", value)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def needs_history(self) -> bool:
        """Whether the sampler needs the counts of past ids or a bias table."""
        return bool(
            self.logit_bias
            or self.repetition_penalty != 1.0
            or self.presence_penalty
            or self.frequency_penalty
        )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> SamplingParams:
        """From names and values; None means absent. Raises RequestError for an unknown name."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise RequestError(f"unknown sampling parameter {unknown[0]!r}; known: {sorted(known)}")
        return cls(**{name: value for name, value in values.items() if value is not None})


_FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
_POSITION = 3  # in a row of ok_sample's integers


def _integer(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise RequestError(f"{name}={value!r}: must be an integer")


def _real(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise RequestError(f"{name}={value!r}: must be a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RequestError(f"{name}={value!r}: must be finite")
    if abs(number) > LARGEST:
        raise RequestError(f"{name}={value!r}: must be within +-{LARGEST:g}, as float32 computes")


def _range(name: str, value: float, low: float | None, high: float | None) -> None:
    if (low is not None and value < low) or (high is not None and value > high):
        limits = f">= {low}" if high is None else f"between {low} and {high}"
        raise RequestError(f"{name}={value!r}: must be {limits}")


def pack_floats(params: SamplingParams) -> list[float]:
    """One row of ok_sample's float parameters."""
    row = [float(getattr(params, name)) for name in _FLOATS]
    return row + [0.0] * (SAMPLE_FLOATS - len(row))


def pack_ints(
    params: SamplingParams, *, seed: int, position: int, slot: int, banned: Sequence[int]
) -> list[int]:
    """One row of ok_sample's integer parameters.

    seed: 64 bits. position: the counter of the random generator, one a token. slot: row of the
    history tables or -1. banned: at most SAMPLE_MAX_BANNED ids that must not be picked.
    """
    low, high = (_signed(seed >> shift & 0xFFFFFFFF) for shift in (0, 32))
    top_k = min(max(params.top_k, 0), 2**31 - 1)
    padded = list(banned) + [-1] * (SAMPLE_MAX_BANNED - len(banned))
    row = [top_k, low, high, position, slot]
    return row + [0] * (SAMPLE_INTS - SAMPLE_MAX_BANNED - len(row)) + padded


class SampleRow:
    """A sequence's row of ok_sample's parameters, packed once; each token then costs two copies.

    Args: as pack_ints.
    """

    def __init__(
        self, params: SamplingParams, *, seed: int, slot: int, banned: Sequence[int] = ()
    ) -> None:
        self._floats = np.array(pack_floats(params), np.float32)
        self._free, self._banning = (
            np.array(pack_ints(params, seed=seed, position=0, slot=slot, banned=ids), np.int32)
            for ids in ((), banned)
        )

    def write(self, floats: Array, ints: Array, *, position: int, banning: bool) -> None:
        """Into one row of each table, or into several. banning: hold the banned ids back."""
        floats[...] = self._floats
        ints[...] = self._banning if banning else self._free
        ints[..., _POSITION] = position


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word
