"""`pyengine audit`: proves what is linked and loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from pyengine.cli import options
from pyengine.evidence import linkage
from pyengine.evidence.audit import audit_installed, audit_runtime


def audit(
    libraries: Annotated[
        list[Path] | None,
        typer.Argument(help="Libraries to look at; none: those of this installation."),
    ] = None,
    runtime: Annotated[
        bool, typer.Option("--runtime", help="Also watch a process generate a few tokens.")
    ] = False,
    model: Annotated[str, typer.Option(help="With --runtime: the model.")] = "demo",
    device: options.Device = "auto",
    allow: Annotated[
        list[str], typer.Option(help="A further library to allow. May be repeated.")
    ] = [],
    as_json: options.Json = False,
) -> None:
    """Prove that no vendor BLAS, DNN or collective library is linked, named or loaded.

    Exit status: 0 clean, 1 a violation, 2 could not look everywhere. scripts/audit_linkage.py does
    the same for any library with nothing but Python.
    """
    entries = [] if libraries else audit_installed()
    for path in libraries or []:
        entries += linkage.audit_library(path, tuple(allow))
    if runtime:
        entries += audit_runtime(model, device)
    status = linkage.exit_status(entries)
    if as_json:
        print(json.dumps({"status": status, "entries": linkage.as_json(entries)}))
    else:
        print(linkage.table(entries))
        print(("clean", "VIOLATION", "could not look everywhere")[status])
    raise typer.Exit(status)
