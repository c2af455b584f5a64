"""A folder of models, each in several precisions and with its negative controls: one table."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from pyengine.errors import CannotCompare, EngineError
from pyengine.evidence.controls import ControlResult, Remembered, applicable, run_control
from pyengine.evidence.parity import ParityReport, collect_prompts, compare_model, open_reference
from pyengine.generation.source import open_model


@dataclass
class SuiteRow:
    """One model of a suite: its reports by precision, or why there is none."""

    name: str
    reports: dict[str, ParityReport] = field(default_factory=dict)
    controls: list[ControlResult] = field(default_factory=list)
    error: str = ""

    @property
    def exit_code(self) -> int:
        """0 passed, 1 failed, 2 not compared."""
        passed = all(r.passed for r in self.reports.values())
        passed = passed and all(c.succeeded for c in self.controls)
        return 2 if self.error else 0 if passed else 1


def run_suite(
    directory: str | os.PathLike[str],
    *,
    dtypes: Sequence[str] = ("f32", "f16", "bf16"),
    controls: bool = True,
    references: Path | None = None,
    positions: int | None = None,
    device: str = "auto",
    threads: int | None = None,
    batch: int = 1,
    repeat: int = 1,
    untrained: bool = False,
    oracle_device: str = "auto",
    command: str | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> list[SuiteRow]:
    """Every model of a folder in several precisions, with the controls that apply, in f32.

    Args:
        directory: holds model directories (with config.json), or is one.
        controls: whether to run them.
        references: a folder of recordings named as the models; None: Transformers, live.

    The other arguments are those of run_parity.

    Returns:
        A row for each model, by name; a model that cannot be compared has a reason instead.

    Raises:
        CannotCompare: there is no model in the folder.
    """
    folder = Path(directory)
    models = sorted(path.parent for path in folder.glob("*/config.json"))
    if (folder / "config.json").exists():
        models = [folder]
    if not models:
        raise CannotCompare(f"{folder}: no model directories (folders with a config.json) in it")

    def run(path: Path, row: SuiteRow, closing: ExitStack) -> None:
        source = open_model(path)
        closing.callback(source.close)
        where = "transformers" if references is None else references / path.name
        prompts = collect_prompts(source, positions=positions) if references is None else None
        oracle = open_reference(
            where, source, prompts=prompts, untrained=untrained, oracle_device=oracle_device
        )
        closing.callback(oracle.close)
        for dtype in dtypes:
            progress(f"{path.name}: {dtype}")
            row.reports[dtype] = compare_model(
                source, oracle, name=path.name, dtype=dtype, device=device, threads=threads,
                batch=batch, repeat=repeat, untrained=untrained, command=command,
            )  # fmt: skip
        remembered = Remembered(oracle)
        for control in applicable(source) if controls else ():
            progress(f"{path.name}: {control.name}")
            row.controls.append(run_control(control, source, remembered, device, threads))

    rows = []
    for path in models:
        row = SuiteRow(path.name)
        try:
            with ExitStack() as closing:
                run(path, row, closing)
        except EngineError as error:
            row.error = str(error)
        rows.append(row)
    return rows


def suite_exit_code(rows: Sequence[SuiteRow]) -> int:
    """The worst of the rows: 2 if one could not be compared, else 1 if one failed, else 0."""
    return max((row.exit_code for row in rows), default=2)
