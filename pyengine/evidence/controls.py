"""Negative controls: one feature made wrong on purpose, after which parity must break.

A check that cannot fail proves nothing. A control of the catalogue (mistakes.py) changes a model,
which then computes in f32; it succeeds only if the comparison notices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pyengine.errors import CannotCompare, ConfigError, EngineError, NonFiniteError
from pyengine.evidence.altered import Model
from pyengine.evidence.comparison import MAX_ERROR, compare_all, open_engine, summarise
from pyengine.evidence.mistakes import CONTROLS, Control, find_control
from pyengine.evidence.parity import collect_prompts, open_reference
from pyengine.evidence.prompts import Prompt
from pyengine.evidence.quantized import BLOCK
from pyengine.evidence.reference import Expected, Reference
from pyengine.generation.source import ModelSource, open_model
from pyengine.models.config import parse_config
from pyengine.models.model_config import ModelConfig

STRUCTURAL_ERROR = 0.05
"""A structural control must bring the largest error to this share of the largest logit ..."""
STRUCTURAL_ARGMAX = 0.95
"""... and the share of equal largest logits below this."""
NUMERIC_ERROR = 5 * MAX_ERROR
"""A numeric control must bring the largest error to this: five times what f32 may have."""
COARSE_RATIO = 5.0
"""A coarser format must bring the mean of 1 - cosine to this multiple of q8_0's own."""
_OUTLIER = 7, 64.0  # column of the down projections, and how much larger it is made


@dataclass(frozen=True)
class ControlResult:
    """What a control did to the comparison.

    Attributes:
        max_error: over the largest logit of its position; infinite where logits were not finite.
        argmax: share of positions with the same largest logit.
        min_cosine: of any position.
        needed: what had to happen, in words.
        outcome: what happened, in words.
        succeeded: parity broke as it had to.
    """

    name: str
    mistake: str
    max_error: float
    argmax: float
    min_cosine: float
    needed: str
    outcome: str
    succeeded: bool
    positions: int = 0
    traits: str = field(default="", compare=False)

    def to_json(self) -> dict[str, Any]:
        """Plain values; a number that is not finite is null."""
        values = dict(self.__dict__)
        for key in ("max_error", "argmax", "min_cosine"):
            values[key] = values[key] if np.isfinite(values[key]) else None
        return values


class Remembered:
    """A reference that answers each question once and keeps the answer (a Reference)."""

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        self.prompts: Sequence[Prompt] = reference.prompts
        self.vocab_size, self.info = reference.vocab_size, reference.info
        self._known: dict[int, Expected] = {}

    def expected(self, index: int, dtype: str) -> Expected:
        """See Reference."""
        if index not in self._known:
            self._known[index] = self._reference.expected(index, dtype)
        return self._known[index]

    def close(self) -> None:
        """See Reference."""
        self._reference.close()


def run_controls(
    model: str | Path,
    names: str | Sequence[str] = "all",
    *,
    reference: str | Path = "transformers",
    positions: int | None = 400,
    device: str = "auto",
    threads: int | None = None,
    untrained: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> list[ControlResult]:
    """Runs negative controls in f32; each succeeds if parity breaks.

    Args:
        names: "all" for every control that applies to the model, or names.
        positions: about how many positions to compare on; a recording has its own.

    Raises:
        CannotCompare: an unknown name, or one that does not apply to this model; no reference.
    """
    source = open_model(model)
    try:
        stored = {name: source.checkpoint.dtype(name) for name in source.checkpoint.names()}
        if quantised := [name for name, dtype in stored.items() if dtype == "Q8_0"]:
            raise CannotCompare(
                f"{source.path}: controls change stored floats, and {quantised[0]} is q8_0: "
                "run them on the model it was made from"
            )
        chosen = _choose(names, source)
        live = str(reference) == "transformers"
        prompts = collect_prompts(source, positions=positions) if live else None
        oracle = Remembered(open_reference(reference, source, prompts=prompts, untrained=untrained))
        try:
            results = []
            for control in chosen:
                progress(control.name)
                results.append(run_control(control, source, oracle, device, threads))
            return results
        finally:
            oracle.close()
    finally:
        source.close()


def applicable(source: ModelSource) -> list[Control]:
    """Controls whose traits the model has."""
    return [control for control in CONTROLS if control.applies(source.spec, source.config)]


def _choose(names: str | Sequence[str], source: ModelSource) -> list[Control]:
    if names == "all":
        return applicable(source)
    chosen = [find_control(name) for name in ([names] if isinstance(names, str) else names)]
    for control in chosen:
        if not control.applies(source.spec, source.config):
            raise CannotCompare(
                f"{source.path}: {control.name} does not apply, it needs {control.needs}"
            )
    return chosen


def run_control(
    control: Control,
    source: ModelSource,
    reference: Reference,
    device: str = "auto",
    threads: int | None = None,
) -> ControlResult:
    """Makes one mistake and holds the result against the reference."""
    model = Model(source)
    if control.coarse:
        return _run_coarse(control, source, reference, device, threads)
    control.change(model)
    if control.degenerate:
        return _run_degenerate(control, model, reference, device, threads)
    engine = open_engine(
        model.source(), reference.prompts, dtype="f32", device=device, threads=threads
    )
    try:
        if control.change_engine is not None:
            control.change_engine(engine)
        summary = summarise(compare_all(engine, reference, "f32"))
    finally:
        engine.close()
    if control.numeric:
        succeeded = summary.max >= NUMERIC_ERROR
        needed = f"largest error >= {NUMERIC_ERROR:g}"
    else:
        succeeded = summary.max >= STRUCTURAL_ERROR and summary.argmax < STRUCTURAL_ARGMAX
        needed = f"largest error >= {STRUCTURAL_ERROR:g}, argmax < {STRUCTURAL_ARGMAX:.0%}"
    return ControlResult(
        name=control.name,
        mistake=control.mistake,
        max_error=summary.max,
        argmax=summary.argmax,
        min_cosine=summary.spread["cosine"]["min"],
        needed=needed,
        outcome="parity broke" if succeeded else "not noticed",
        succeeded=succeeded,
        positions=summary.positions,
        traits=control.needs,
    )


def _run_coarse(
    control: Control,
    source: ModelSource,
    reference: Reference,
    device: str,
    threads: int | None,
) -> ControlResult:
    """The mistake and q8_0 itself, both computed in f32 on a model that has an outlier column.

    Small models are trained into weights without outliers, which hardly tell blocks from rows.
    """
    found = []
    for change in (lambda model: model.quantise(BLOCK), control.change):
        model = Model(source)
        model.raise_inner_column(*_OUTLIER)
        change(model)
        engine = open_engine(
            model.source(), reference.prompts, dtype="f32", device=device, threads=threads
        )
        try:
            found.append(summarise(compare_all(engine, reference, "f32")))
        finally:
            engine.close()
    format_loss, loss = (1.0 - summary.spread["cosine"]["mean"] for summary in found)
    ratio = loss / max(format_loss, 1e-16)
    return ControlResult(
        name=control.name,
        mistake=control.mistake,
        max_error=found[1].max,
        argmax=found[1].argmax,
        min_cosine=found[1].spread["cosine"]["min"],
        needed=f"mean of 1 - cosine >= {COARSE_RATIO:g} x that of q8_0",
        outcome=f"{ratio:.1f} x that of q8_0 ({format_loss:.1e})",
        succeeded=ratio >= COARSE_RATIO,
        positions=found[1].positions,
        traits=control.needs,
    )


def _run_degenerate(
    control: Control,
    model: Model,
    reference: Reference,
    device: str,
    threads: int | None,
) -> ControlResult:
    """A configuration without meaning: refused when read, and, built all the same, named as NaN."""
    refusal = _refusal(model.config)
    caught = ""
    with np.errstate(all="ignore"):  # infinite frequencies are the point
        try:
            engine = open_engine(
                model.source(), reference.prompts, dtype="f32", device=device, threads=threads
            )
            try:
                engine.logits_batch([reference.prompts[-1].ids])
            finally:
                engine.close()
        except NonFiniteError as error:
            caught = str(error)
        except EngineError as error:
            refusal = refusal or str(error)
    return ControlResult(
        name=control.name,
        mistake=control.mistake,
        max_error=float("inf") if caught else 0.0,
        argmax=0.0 if caught else 1.0,
        min_cosine=float("nan") if caught else 1.0,
        needed="refused at load; forced, NaN caught by name",
        outcome=f"refused: {refusal or 'no'}; forced: {caught or 'not noticed'}",
        succeeded=bool(refusal) and bool(caught),
        positions=len(reference.prompts[-1].ids),
        traits=control.needs,
    )


def _refusal(config: ModelConfig) -> str:
    """What reading such a configuration says: rotary positions without a base."""
    raw = {
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "rope_theta": 0.0,
    }
    try:
        parse_config(raw, "config.json")
    except ConfigError as error:
        return str(error)
    return ""
