"""`pyengine quantize`: writes a copy of a model whose matrices are q8_0."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from pyengine.cli import options
from pyengine.generation.gguf_vocabulary import gguf_vocabulary
from pyengine.models import quantize as models
from pyengine.models.hub import resolve_model
from pyengine.models.quantized_tensors import Progress as Callback


def quantize(
    model: options.Model,
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="A directory to make, or a file ending in .gguf.")
    ],
    keep: Annotated[
        list[str],
        typer.Option(help="A role that stays as it is stored, e.g. lm_head. May be repeated."),
    ] = [],
    gguf: Annotated[
        bool, typer.Option("--gguf", help="Write OUT.gguf, which other engines open too.")
    ] = False,
    pre: Annotated[
        str | None,
        typer.Option(
            help="GGUF's word for how text is split, where none fits exactly: gpt-2, llama-bpe, ..."
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a quantised model that is there.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Write a copy with matrices in 8 bits, which loads directly: a directory, or a GGUF file.

    Norms, biases and position tables are never quantised. OUT appears when it is complete; what a
    killed run left behind is cleared away by the next.
    """
    path = resolve_model(model)
    if gguf and out.suffix != ".gguf":
        out = out.with_name(out.name + ".gguf")
    vocabulary = None
    if out.suffix == ".gguf" and path.is_dir():
        vocabulary = gguf_vocabulary(path, pre=pre)
    with _progress() as callback:
        report = models.quantize(
            path, out, keep=keep, force=force, vocabulary=vocabulary, progress=callback
        )
    if as_json:
        print(json.dumps({**asdict(report), "path": str(report.path)}))
        return
    share = report.q8_0_bytes / report.bytes
    print(f"{report.path}: {report.bytes / 1e6:.1f} MB, {share:.0%} of it q8_0")
    for name, kind in report.kept.items():
        print(f"  {name} stays {kind.lower()}")


@contextmanager
def _progress() -> Iterator[Callback | None]:
    """A bar on a terminal's standard error."""
    if not sys.stderr.isatty():
        yield None
        return
    with Progress(
        TextColumn("quantising"), BarColumn(), DownloadColumn(), TimeRemainingColumn(),
        console=Console(stderr=True), transient=True,
    ) as bar:  # fmt: skip
        task = bar.add_task("quantising", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
