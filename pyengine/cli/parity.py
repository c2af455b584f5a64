"""`pyengine parity`: proof that the logits are the reference's, and that the proof can fail."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from pyengine.cli import options
from pyengine.errors import RequestError
from pyengine.evidence import report as reports
from pyengine.evidence.controls import run_controls
from pyengine.evidence.parity import ParityReport, run_parity
from pyengine.evidence.suite import run_suite, suite_exit_code

_DTYPES = ("f32", "f16", "bf16", "q8_0")


def parity(
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="A directory, a GGUF file or a name."),
    ] = None,
    suite: Annotated[
        Path | None, typer.Option(help="Instead of MODEL: every model of a folder, one table.")
    ] = None,
    reference: Annotated[
        str, typer.Option(help="transformers (live), or a recording by make_reference.py.")
    ] = "transformers",
    dtype: Annotated[list[str], typer.Option(help="f32, f16, bf16, q8_0. May be repeated.")] = [
        "f32"
    ],
    positions: Annotated[
        int | None, typer.Option(help="About how many positions; all the prompts have.", min=1)
    ] = None,
    text: Annotated[Path | None, typer.Option(help="Compare on a file's text instead.")] = None,
    ids: Annotated[
        Path | None, typer.Option(help="Compare on a JSON list of token ids instead.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences side by side.", min=1)] = 1,
    repeat: Annotated[int, typer.Option(help="Runs, to see whether bits repeat.", min=1)] = 1,
    control: Annotated[
        list[str],
        typer.Option(help="Make this mistake on purpose; succeeds if parity breaks. Repeatable."),
    ] = [],
    controls: Annotated[
        str | None,
        typer.Option(help="all: every control that applies; a suite runs them unless none."),
    ] = None,
    min_cosine: Annotated[float | None, typer.Option(help="Bar instead of the default.")] = None,
    min_argmax: Annotated[float | None, typer.Option(help="Bar instead of the default.")] = None,
    untrained: Annotated[
        bool, typer.Option("--untrained", help="Accept random weights, and say so in red.")
    ] = False,
    report: Annotated[
        Path | None, typer.Option(help="Write report.json, report.md and report.html here.")
    ] = None,
    as_json: options.Json = False,
    device: options.Device = "auto",
    oracle_device: Annotated[str, typer.Option(help="Where Transformers runs.")] = "auto",
    threads: options.Threads = None,
) -> None:
    """Compare logits with Transformers on the same token ids, position by position.

    Exit status: 0 passed, 1 failed, 2 could not compare. What is proved and what is not:
    docs/parity.md.
    """
    for word in dtype:
        if word not in _DTYPES:
            raise RequestError(f"--dtype {word}: expected one of {', '.join(_DTYPES)}")
    if (model is None) == (suite is None):
        raise RequestError("give one MODEL, or --suite FOLDER")
    if controls not in (None, "all", "none") or (controls == "none" and suite is None):
        raise RequestError(f"--controls {controls}: expected all, or with --suite none")
    if control and report is not None:
        raise RequestError(
            "--report needs a comparison: use --controls all, or leave out --control"
        )
    if suite is not None and (text or ids or control or min_cosine or min_argmax):
        raise RequestError("--suite has prompts, controls and bars of its own; give no others")
    options_of_run: dict[str, Any] = {
        "positions": positions, "batch": batch, "repeat": repeat, "untrained": untrained,
        "device": device, "oracle_device": oracle_device, "threads": threads,
        "command": shlex.join(["pyengine", *sys.argv[1:]]), "progress": _say,
    }  # fmt: skip
    if suite is not None:
        options_of_run["controls"] = controls != "none"
        _suite(suite, dtype, reference, report, as_json, options_of_run)
    assert model is not None
    names = "all" if controls else control
    results = []
    if names:
        results = run_controls(
            model, names, reference=reference, device=device, threads=threads,
            untrained=untrained, progress=_say,
        )  # fmt: skip
    found = []
    if not control:
        for word in dtype:
            found.append(
                run_parity(
                    model,
                    reference=reference,
                    dtype=word,
                    min_cosine=min_cosine,
                    min_argmax=min_argmax,
                    text=_read(text) if text else None,
                    ids=_read_ids(ids) if ids else None,
                    **options_of_run,
                )
            )
        found[0].controls = results
    if report is not None:
        for one in found:
            reports.write_report(one, report if len(found) == 1 else report / one.dtype)
    if as_json:
        values = [one.to_json() for one in found] or [result.to_json() for result in results]
        print(json.dumps(values[0] if len(values) == 1 else values))
    else:
        for one in found:
            _show(one)
        if results:
            _print_table(reports.control_table(results))
    codes = [one.exit_code for one in found]
    codes += [0 if result.succeeded else 1 for result in results]
    raise typer.Exit(1 if 1 in codes else max(codes))


def _suite(
    folder: Path,
    dtypes: Sequence[str],
    reference: str,
    report: Path | None,
    as_json: bool,
    options_of_run: dict[str, Any],
) -> None:
    recorded = None if reference == "transformers" else Path(reference)
    rows = run_suite(folder, dtypes=dtypes, references=recorded, **options_of_run)
    if report is not None:
        reports.write_suite(rows, report)
    if as_json:
        print(json.dumps(reports.suite_json(rows)))
    else:
        _print_table(reports.suite_table(rows))
    raise typer.Exit(suite_exit_code(rows))


def _show(one: ParityReport) -> None:
    print(f"{one.model} in {one.dtype}: {one.verdict} over {one.summary.positions} positions")
    if not one.judged:
        print("q8_0 has no bar beside a recording: give --min-cosine or --min-argmax")
    if one.untrained:
        Console().print(reports.UNTRAINED, style="bold red")
    _print_table(reports.gate_table(one.gates))
    if one.cost is not None:
        _print_table(reports.cost_table(one))
    _print_table(reports.spread_table(one.summary))


def _print_table(table: reports.Table) -> None:
    """For people a table that fits, for files and pipes one that loses nothing."""
    if not sys.stdout.isatty():
        print(reports.markdown_table(table))
        return
    header, rows = table
    shown = Table(*header, box=None, pad_edge=False)
    for row in rows:
        shown.add_row(*row)
    Console().print(shown)


def _say(line: str) -> None:
    if sys.stderr.isatty():
        print(f"… {line}", file=sys.stderr)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise RequestError(f"{file}: {reason}") from error


def _read_ids(file: Path) -> list[int]:
    text = _read(file)
    try:
        ids = json.loads(text)
    except ValueError as error:
        raise RequestError(f"{file}: not JSON: {error}") from error
    if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
        raise RequestError(f"{file}: expected a JSON list of token ids")
    return ids
