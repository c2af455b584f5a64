"""A model compared with a reference: the whole run, and everything needed to do it again."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import pyengine
from pyengine.errors import CannotCompare
from pyengine.evidence import prompts as prompt_set
from pyengine.evidence.comparison import (
    DTYPES,
    Comparison,
    Gate,
    Summary,
    compare_all,
    gates,
    open_engine,
    summarise,
)
from pyengine.evidence.prompts import Prompt, Text, limit, make_prompts
from pyengine.evidence.quantized import measure_cost
from pyengine.evidence.reference import (
    RecordedReference,
    Reference,
    TransformersReference,
    check_same_model,
    checkpoint_hashes,
)
from pyengine.generation.engine import Engine
from pyengine.generation.source import ModelSource, open_model


@dataclass
class ParityReport:
    """What was compared, how it came out, and everything needed to do it again.

    Attributes:
        model: as it was named; path: where it lies.
        family: model_type.
        dtype: "f32", "f16", "bf16" or "q8_0".
        untrained: the loss check was waived: the weights may be random.
        summary: over all positions; gates: the verdict.
        prompts: name, kind, tokens and figures of each prompt.
        comparisons: the arrays behind them.
        reference: who said what is right: versions, dtype, attention implementation, loss.
        sha256: file -> hash of config and weights.
        environment: versions, device, driver, library build, threads, batch, prompt set, command.
        repeats: runs made; identical: whether all gave the same bits; repeat_rms: rms of each.
        controls: results of negative controls, if they were run (controls.ControlResult).
        cost: of q8_0 beside the format's own, where the reference is live (quantized.Cost).
    """

    model: str
    path: str
    family: str
    dtype: str
    untrained: bool
    summary: Summary
    gates: list[Gate]
    prompts: list[dict[str, Any]]
    comparisons: list[Comparison]
    reference: Mapping[str, Any]
    sha256: Mapping[str, str]
    environment: Mapping[str, Any]
    repeats: int = 1
    identical: bool = True
    repeat_rms: list[float] = field(default_factory=list)
    controls: list[Any] = field(default_factory=list)
    cost: Any = None

    @property
    def passed(self) -> bool:
        """Whether every gate holds and every control that was run broke parity."""
        held = all(gate.passed for gate in self.gates)
        return self.judged and held and all(c.succeeded for c in self.controls)

    @property
    def judged(self) -> bool:
        """Whether there was a bar: q8_0 beside a recording has those that are asked for."""
        return bool(self.gates or self.controls)

    @property
    def verdict(self) -> str:
        """ "passed", "FAILED" or "not judged"."""
        return "passed" if self.passed else "FAILED" if self.judged else "not judged"

    @property
    def exit_code(self) -> int:
        """0: passed, 1: failed, 2: not judged. (CannotCompare and other errors are 2 too.)"""
        return 0 if self.passed else 1 if self.judged else 2

    def to_json(self) -> dict[str, Any]:
        """Plain values: report.json, whose keys docs/parity.md lists."""
        return {
            "format": 1,
            "passed": self.passed,
            "model": self.model,
            "path": self.path,
            "family": self.family,
            "dtype": self.dtype,
            "untrained": self.untrained,
            "gates": [{**asdict(gate), "passed": gate.passed} for gate in self.gates],
            "summary": asdict(self.summary),
            "prompts": self.prompts,
            "controls": [control.to_json() for control in self.controls],
            "cost": asdict(self.cost) if self.cost else None,
            "repeats": self.repeats,
            "identical_bits": self.identical,
            "repeat_rms": self.repeat_rms,
            "reference": dict(self.reference),
            "sha256": dict(self.sha256),
            "environment": dict(self.environment),
        }


def collect_prompts(
    source: ModelSource,
    *,
    positions: int | None = None,
    text: str | None = None,
    ids: Sequence[int] | None = None,
) -> list[Prompt]:
    """The prompts of a live comparison: the built-in ones, a text of the user's, or token ids.

    Raises:
        CannotCompare: the model has no tokenizer and no ids were given, or nothing was given.
    """
    room = source.config.position_limit or source.config.max_position_embeddings
    if ids is not None:
        prompts = [Prompt("ids", "given token ids", tuple(ids), natural=False)]
        prompts = prompts if positions is None else limit(prompts, positions)
        if not prompts or not ids:
            raise CannotCompare("no token ids to compare on")
        return prompts
    if source.tokenizer is None:
        raise CannotCompare(f"{source.path}: no tokenizer.json; give token ids with --ids FILE")
    tokenizer = source.tokenizer

    def encode(passage: str) -> list[int]:
        return tokenizer.encode(passage, add_special_tokens=False)

    if text is not None:
        given = [Text("text", "given text", room, text)]
        prompts = make_prompts(encode, max_tokens=room, positions=positions, texts=given)
        if not prompts:
            raise CannotCompare("the given text has no tokens")
        return [Prompt(p.name, p.kind, p.ids, natural=True) for p in prompts]
    switch = source.config.rope.switch_length if source.config.rope else None
    room = min(room, prompt_set.MAX_WHOLE_TOKENS)
    exact = (switch - 1, switch, switch + 1) if switch and 1 < switch < room else ()
    return make_prompts(encode, max_tokens=room, positions=positions, exact=exact)


def open_reference(
    reference: str | Path,
    source: ModelSource,
    *,
    prompts: Sequence[Prompt] | None,
    untrained: bool,
    oracle_device: str = "auto",
) -> Reference:
    """Transformers, live, or a recorded file whose weights are the model's own.

    Args:
        reference: "transformers" or the path of a recording.
        prompts: what to ask a live one.

    Raises:
        CannotCompare: neither can be had, or it is not sane.
    """
    if str(reference) == "transformers":
        return TransformersReference(
            source.path, prompts or [], untrained=untrained, device=oracle_device
        )
    recorded = RecordedReference(Path(reference))
    check_same_model(recorded.info, source.path)
    if recorded.info.get("untrained") and not untrained:
        raise CannotCompare(
            f"{reference}: recorded from untrained weights; --untrained accepts that"
        )
    return recorded


def run_parity(
    model: str | os.PathLike[str],
    *,
    reference: str | Path = "transformers",
    dtype: str = "f32",
    device: str = "auto",
    threads: int | None = None,
    positions: int | None = None,
    text: str | None = None,
    ids: Sequence[int] | None = None,
    batch: int = 1,
    repeat: int = 1,
    untrained: bool = False,
    min_cosine: float | None = None,
    min_argmax: float | None = None,
    oracle_device: str = "auto",
    command: str | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> ParityReport:
    """Computes logits with an Engine and compares them with a reference.

    Args:
        model: a directory, a GGUF file or a known name.
        reference: "transformers" (live) or a recording made by scripts/make_reference.py.
        dtype: "f32", "f16", "bf16", or "q8_0" (weights in 8 bits, the rest in the file's type).
        positions: about how many; the built-in prompts have some 4,000. Not with a recording.
        text, ids: compare on these instead of the built-in prompts.
        batch: sequences side by side, through the batched and cached path.
        repeat: run again, to see whether bits repeat.
        untrained: accept random weights; waives the oracle's loss check and says so.
        min_cosine, min_argmax: bars in place of the precision's own.
        oracle_device: where Transformers runs.
        command: what the user typed, for the report.
        progress: called with a line of what is being done.

    Raises:
        CannotCompare, or another EngineError: no comparison came about (exit status 2).
    """
    recorded = str(reference) != "transformers"
    if recorded and (positions or text is not None or ids is not None):
        raise CannotCompare("a recorded reference has prompts of its own; give no others")
    source = open_model(model)
    try:
        prompts = None
        if not recorded:
            prompts = collect_prompts(source, positions=positions, text=text, ids=ids)
        progress(f"reference: {reference}")
        oracle = open_reference(
            reference, source, prompts=prompts, untrained=untrained, oracle_device=oracle_device
        )
        try:
            return compare_model(
                source, oracle, name=str(model), dtype=dtype, device=device, threads=threads,
                batch=batch, repeat=repeat, untrained=untrained, min_cosine=min_cosine,
                min_argmax=min_argmax, command=command, progress=progress,
            )  # fmt: skip
        finally:
            oracle.close()
    finally:
        source.close()


def compare_model(
    source: ModelSource,
    oracle: Reference,
    *,
    name: str,
    dtype: str,
    device: str = "auto",
    threads: int | None = None,
    batch: int = 1,
    repeat: int = 1,
    untrained: bool = False,
    min_cosine: float | None = None,
    min_argmax: float | None = None,
    command: str | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> ParityReport:
    """The part of run_parity between opening and closing; see there for the arguments."""
    if dtype not in DTYPES:
        raise CannotCompare(f"dtype={dtype!r}: expected one of {', '.join(DTYPES)}")
    if repeat < 1 or batch < 1:
        raise CannotCompare(f"repeat={repeat}, batch={batch}: must be at least 1")
    engine = open_engine(
        source, oracle.prompts, dtype=dtype, device=device, threads=threads, batch=batch
    )
    try:
        runs, digests = [], []
        for run in range(repeat):
            digest = hashlib.sha256()
            say = progress if run == 0 else (lambda _: None)
            runs.append(
                compare_all(engine, oracle, dtype, batch=batch, digest=digest, progress=say)
            )
            digests.append(digest.hexdigest())
        environment = describe_environment(engine, batch=batch, command=command)
    finally:
        engine.close()
    summary = summarise(runs[0])
    untrained = untrained or bool(oracle.info.get("untrained"))
    judged = gates(
        summary, dtype, untrained=untrained, min_cosine=min_cosine, min_argmax=min_argmax
    )
    cost = None
    if dtype == "q8_0" and isinstance(oracle, TransformersReference):
        progress("what q8_0 itself costs")
        cost = measure_cost(source, oracle, runs[0], device=device, threads=threads, batch=batch)
        judged += cost.gates(summary)
    return ParityReport(
        model=name,
        path=str(source.path),
        family=source.config.model_type,
        dtype=dtype,
        untrained=untrained,
        summary=summary,
        gates=judged,
        cost=cost,
        prompts=[describe_prompt(comparison) for comparison in runs[0]],
        comparisons=runs[0],
        reference=oracle.info,
        sha256=checkpoint_hashes(source.path),
        environment=environment,
        repeats=repeat,
        identical=len(set(digests)) == 1,
        repeat_rms=[summarise(run).rms for run in runs],
    )


def describe_prompt(comparison: Comparison) -> dict[str, Any]:
    """Name, kind, tokens and the worst figures of one prompt."""
    return {
        "name": comparison.prompt.name,
        "kind": comparison.prompt.kind,
        "tokens": len(comparison.prompt.ids),
        "argmax": float(comparison.same_argmax.mean()),
        "min_cosine": float(comparison.cosine.min()),
        "max_error": float(comparison.max.max()),
    }


def describe_environment(engine: Engine, *, batch: int, command: str | None) -> dict[str, Any]:
    """Versions, machine, device and build, so that a figure can be traced and repeated."""
    library = engine.device.library
    runtime_version, runtime_path = library.runtime()
    return {
        "pyengine": _version(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "system": platform.platform(),
        "device": engine.device.label,
        "device_name": engine.device.name,
        "architecture": engine.device.arch,
        "runtime_version": runtime_version,
        "runtime": runtime_path,
        "library": library.build_info,
        "path": library.c.ok_path().decode() if library.backend == "cpu" else "",
        "threads": int(library.c.ok_threads()),
        "batch": batch,
        "kv_dtype": engine.kv_dtype.name.lower(),
        "prompt_set": prompt_set.VERSION,
        "seed": None,  # nothing is drawn: prompts are fixed and logits are not sampled
        "command": command if command is not None else " ".join(sys.argv),
    }


def _version() -> str:
    return str(getattr(pyengine, "__version__", "unknown"))
