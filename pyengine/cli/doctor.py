"""`pyengine doctor`: what this machine and installation offer, and what to do about problems."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from pyengine.cli import options
from pyengine.evidence.doctor import examine


def doctor(
    as_json: options.Json = False,
    self_test: Annotated[
        bool, typer.Option("--self-test", help="Compare every GPU with the CPU, now.")
    ] = False,
) -> None:
    """Show libraries, devices, permissions, memory and linkage, with a remedy for each problem.

    Exit status: 0 healthy, 1 something that looks meant to work does not.
    """
    facts = examine(run_self_test=self_test)
    print(json.dumps(facts.to_json()) if as_json else facts.to_text())
    if self_test and not any(d.self_tests for library in facts.libraries for d in library.devices):
        print("self-test: not run: there is no usable GPU", file=sys.stderr)
    raise typer.Exit(0 if facts.healthy else 1)
