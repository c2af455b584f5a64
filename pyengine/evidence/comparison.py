"""Our logits beside a reference's: figures of every position, their summary, and the gates."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pyengine.errors import CannotCompare
from pyengine.evidence.prompts import Prompt
from pyengine.evidence.reference import (
    Expected,
    Reference,
    known_entries,
    log_probabilities,
    relative_errors,
)
from pyengine.generation.engine import Engine
from pyengine.generation.source import ModelSource

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

MIN_COSINE = 0.9999999
"""f32: smallest cosine of any position. Two float32 engines differ by about 1e-14 in it."""
MIN_ARGMAX = 1.0
"""f32: share of positions with the same largest logit."""
TIE = 2.0**-22
"""f32: where the reference's own two largest logits are no further apart than this share of the
largest, two to four units in its last place, it cannot say which is larger: either counts."""
MAX_ERROR = 1e-4
"""f32: largest error of any logit over the largest logit of its position. Two attention
implementations of Transformers differ by 2e-6 on the same checkpoints."""
RMS_RATIO = 0.8
"""f16, bf16: our root mean square error over Transformers' own in the same precision."""
MAX_RATIO = 1.1
"""f16, bf16: the same of the largest error, where the reference's rounding is a matter of luck."""

DTYPES = ("f32", "f16", "bf16", "q8_0")

_ROWS_AT_ONCE = 64
"""Rows compared in float64 at a time, since a vocabulary may have 250,000 entries."""


class Logits(Protocol):
    """What is compared: an Engine, or anything that answers like one."""

    def logits_batch(self, batch: Sequence[Sequence[int]]) -> list[F32]:
        """float32 (T, vocab_size) of each sequence."""
        ...

    def close(self) -> None:
        """Gives memory back."""
        ...


# ---- one prompt ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """One prompt's positions, R of T of which the reference knows the logits.

    Errors are relative to the largest absolute logit of their position, over the vocabulary entries
    that the reference knows.

    Attributes:
        prompt: what was computed.
        rows: int64 (R).
        same_argmax: bool (T). ties: how many of them are so because either of two counts (TIE).
        cosine: float64 (R).
        top5: float64 (R); share of the reference's five largest among our five largest.
        kl: float64 (R); nats of KL(reference || ours); from the top entries and the rest as one
            where the reference knows no more, which is a lower bound.
        rms, max: float64 (R); error.
        norm: float64 (R); relative difference of the Euclidean norms of whole rows.
        own_rms, own_max: float64 (R); Transformers' own error in our precision; empty in f32.
        decided: bool (R); the reference's two largest logits are further apart than both errors.
        loss: float64 (R); our nats of the token that follows; NaN at the end.
    """

    prompt: Prompt
    rows: NDArray[np.int64]
    same_argmax: NDArray[np.bool_]
    cosine: F64
    top5: F64
    kl: F64
    rms: F64
    max: F64
    norm: F64
    own_rms: F64
    own_max: F64
    decided: NDArray[np.bool_]
    loss: F64 = field(default_factory=lambda: np.zeros(0))
    ties: int = 0


def compare(prompt: Prompt, ours: F32, expected: Expected, dtype: str) -> Comparison:
    """Holds float32 logits (T, vocab_size) against what the reference says about the prompt.

    Raises:
        CannotCompare: the shapes do not fit.
    """
    if len(ours) != len(prompt.ids) or ours.shape[1] <= int(expected.columns.max(initial=0)):
        raise CannotCompare(f"{prompt.name}: logits of shape {ours.shape} do not fit the reference")
    following = np.array([*prompt.ids[1:], -1])[expected.rows]
    parts = [
        _compare_rows(ours[expected.rows[block]], _cut(expected, block), following[block])
        for block in (
            slice(start, start + _ROWS_AT_ONCE)
            for start in range(0, len(expected.rows), _ROWS_AT_ONCE)
        )
    ]
    found = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    own = expected.own.get(dtype, np.zeros((0, 2)))
    gap = (expected.top_logits[:, 0] - expected.top_logits[:, 1]).astype(np.float64)
    noise = found["max"] + (own[:, 1] if len(own) else 0.0)
    picked = ours.argmax(axis=1)
    same = picked == expected.argmax
    tied = np.zeros(len(gap), bool)
    if dtype == "f32":
        tied = (gap / expected.largest <= TIE) & (picked[expected.rows] == expected.top_ids[:, 1])
        same[expected.rows[tied]] = True
    return Comparison(
        prompt=prompt,
        rows=expected.rows,
        same_argmax=same,
        ties=int(tied.sum()),
        own_rms=own[:, 0],
        own_max=own[:, 1],
        decided=gap / expected.largest > noise,
        **found,
    )


def _cut(expected: Expected, block: slice) -> Expected:
    per_row = ("rows", "logits", "top_ids", "top_logits", "largest", "norm", "logsumexp")
    cut = {name: getattr(expected, name)[block] for name in per_row}
    return Expected(argmax=expected.argmax, columns=expected.columns, **cut)


def _compare_rows(ours: F32, expected: Expected, following: NDArray[np.int64]) -> dict[str, F64]:
    """The per-row figures of Comparison for whole rows (R, V) of ours; all in float64."""
    columns, top_ids = expected.columns, expected.top_ids
    theirs = np.concatenate([expected.logits, expected.top_logits], axis=1).astype(np.float64)
    known = known_entries(ours, expected)
    twice = np.isin(top_ids, columns)  # a top entry that is a known column counts once
    known[:, len(columns) :][twice] = 0.0
    theirs[:, len(columns) :][twice] = 0.0
    errors = relative_errors(known - theirs, expected.largest)
    lengths = np.sqrt((known**2).sum(axis=1) * (theirs**2).sum(axis=1))
    wide = ours.astype(np.float64)
    norm = np.sqrt((wide**2).sum(axis=1))
    log_ours = log_probabilities(wide)
    loss = -log_ours[np.arange(len(wide)), following]
    if len(columns) == ours.shape[1]:
        log_theirs = expected.logits - expected.logsumexp[:, None]
        kl = (np.exp(log_theirs) * (log_theirs - log_ours)).sum(axis=1)
    else:
        kl = _coarse_kl(
            expected.top_logits - expected.logsumexp[:, None],
            np.take_along_axis(log_ours, top_ids, axis=1),
        )
    five = min(5, top_ids.shape[1])
    our_five = np.argpartition(-ours, five - 1, axis=1)[:, :five]
    shared = (our_five[:, :, None] == top_ids[:, None, :five]).any(axis=2).mean(axis=1)
    return {
        "cosine": (known * theirs).sum(axis=1) / np.maximum(lengths, 1e-300),
        "top5": shared,
        "kl": np.maximum(kl, 0.0),
        "rms": errors[:, 0],
        "max": errors[:, 1],
        "norm": np.abs(norm - expected.norm) / expected.norm,
        "loss": np.where(following < 0, np.nan, loss),
    }


def _coarse_kl(log_theirs: F64, log_ours: F64) -> F64:
    """KL divergence of distributions known at some entries, all others taken as one entry."""
    p, q = np.exp(log_theirs), np.exp(log_ours)
    rest_p = np.clip(1.0 - p.sum(axis=1), 1e-12, 1.0)
    rest_q = np.clip(1.0 - q.sum(axis=1), 1e-12, 1.0)
    inner = (p * (log_theirs - log_ours)).sum(axis=1)
    result: F64 = inner + rest_p * np.log(rest_p / rest_q)
    return result


# ---- many prompts -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Summary:
    """All positions of all prompts.

    Attributes:
        positions: how many were compared by their largest logit.
        logit_positions: how many of them by their logits.
        argmax: share of positions with the same largest logit; `ties` of them by TIE.
        decided, decided_argmax: positions where rounding cannot decide, and the same share there.
        rms, max: root mean square and largest error over all of them, relative as in Comparison.
        own_rms, own_max: Transformers' own in the same precision; None in f32.
        spread: figure -> {min, p1, p50, mean, p99, max} over positions.
    """

    positions: int
    logit_positions: int
    argmax: float
    decided: int
    decided_argmax: float
    rms: float
    max: float
    own_rms: float | None
    own_max: float | None
    spread: Mapping[str, Mapping[str, float]]
    ties: int = 0


def summarise(comparisons: Sequence[Comparison]) -> Summary:
    """Figures over every position of every prompt."""

    def every(name: str) -> F64:
        return np.concatenate([getattr(c, name) for c in comparisons])

    def together(values: F64) -> float:
        return float(np.sqrt(np.mean(values**2)))

    same = every("same_argmax")
    same_known = np.concatenate([c.same_argmax[c.rows] for c in comparisons])
    decided = every("decided").astype(bool)
    own_rms, own_max = every("own_rms"), every("own_max")
    figures = ("cosine", "top5", "kl", "rms", "max", "norm")
    return Summary(
        positions=len(same),
        logit_positions=len(decided),
        argmax=float(same.mean()),
        decided=int(decided.sum()),
        decided_argmax=float(same_known[decided].mean()) if decided.any() else 1.0,
        rms=together(every("rms")),
        max=float(every("max").max()),
        own_rms=together(own_rms) if len(own_rms) else None,
        own_max=float(own_max.max()) if len(own_max) else None,
        spread={name: _spread(every(name)) for name in figures},
        ties=sum(c.ties for c in comparisons),
    )


def _spread(values: F64) -> dict[str, float]:
    low, middle, high = np.percentile(values, [1, 50, 99])
    return {
        "min": float(values.min()),
        "p1": float(low),
        "p50": float(middle),
        "mean": float(values.mean()),
        "p99": float(high),
        "max": float(values.max()),
    }


@dataclass(frozen=True)
class Gate:
    """One condition: `value` at least or at most `limit`."""

    name: str
    value: float
    limit: float
    at_least: bool

    @property
    def passed(self) -> bool:
        """Whether it holds; a NaN never does."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit


def gates(
    summary: Summary,
    dtype: str,
    *,
    untrained: bool = False,
    min_cosine: float | None = None,
    min_argmax: float | None = None,
) -> list[Gate]:
    """What a precision has to reach.

    f32 has fixed bars. f16 and bf16 are held against Transformers' own error in the same precision.
    q8_0 is another set of numbers: beside a live reference it is held against what the format
    itself costs (quantized.Cost.gates), else only an asked-for bar judges it. With random weights
    in 16 bits the largest logit counts only where rounding cannot decide it.

    Raises:
        CannotCompare: the reference does not say how far Transformers itself is off in `dtype`.
    """
    found: list[Gate] = []
    cosine, argmax = summary.spread["cosine"]["min"], summary.argmax
    if dtype == "f32":
        min_cosine = MIN_COSINE if min_cosine is None else min_cosine
        min_argmax = MIN_ARGMAX if min_argmax is None else min_argmax
        found.append(Gate("largest error", summary.max, MAX_ERROR, False))
        found.append(Gate("norm", summary.spread["norm"]["max"], MAX_ERROR, False))
    elif dtype in ("f16", "bf16"):
        if summary.own_rms is None or summary.own_max is None:
            raise CannotCompare(f"the reference has no {dtype} of its own to be held against")
        found.append(Gate("rms ratio", _ratio(summary.rms, summary.own_rms), RMS_RATIO, False))
        found.append(Gate("max ratio", _ratio(summary.max, summary.own_max), MAX_RATIO, False))
        if untrained:
            found.append(Gate("decided argmax", summary.decided_argmax, 1.0, True))
    if min_cosine is not None:
        found.append(Gate("cosine", cosine, min_cosine, True))
    if min_argmax is not None:
        found.append(Gate("argmax", argmax, min_argmax, True))
    return found


def _ratio(ours: float, theirs: float) -> float:
    return ours / theirs if theirs > 0 else (0.0 if ours == 0 else math.inf)


# ---- computing --------------------------------------------------------------------------------


def compare_all(
    ours: Logits, reference: Reference, dtype: str, *, batch: int = 1,
    digest: Any = None, progress: Callable[[str], None] = lambda _: None,
) -> list[Comparison]:  # fmt: skip
    """Every prompt, `batch` at a time through the engine's own batch.

    digest: a hash that is fed all logits, to tell whether two runs gave the same bits.
    """
    found: list[Comparison] = []
    for start in range(0, len(reference.prompts), batch):
        group = reference.prompts[start : start + batch]
        progress(", ".join(f"{prompt.name} ({len(prompt.ids)})" for prompt in group))
        for index, rows in enumerate(ours.logits_batch([prompt.ids for prompt in group])):
            if digest is not None:
                digest.update(np.ascontiguousarray(rows))
            expected = reference.expected(start + index, dtype)
            found.append(compare(group[index], rows, expected, dtype))
    return found


def open_engine(
    source: ModelSource,
    prompts: Sequence[Prompt],
    *,
    dtype: str,
    device: str = "auto",
    threads: int | None = None,
    batch: int = 1,
    **options: Any,
) -> Engine:
    """An Engine with just the room that the prompts need; `options` go before what dtype says."""
    longest = max(len(prompt.ids) for prompt in prompts)
    return Engine(
        source,
        device=device,
        dtype="auto" if dtype == "q8_0" else dtype,
        threads=threads,
        max_context=longest,
        max_batch=batch,
        **{"weights": "q8_0" if dtype == "q8_0" else "float", **options},
    )
