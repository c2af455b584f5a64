"""One operation's case from end to end: through the stand-in, then the same launches as machine code; and its counts.

    python -m tests.amd.operations

measures every case again and writes counts.json, the record that tests hold instruction and byte counts to.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pyengine.native import Library, Queue
from tests.amd import library_code, op_cases, toolchain
from tests.amd.op_cases import Bench, Output
from tests.amd.rdna3 import Counts, Machine
from tests.amd.replay import replay

RECORD = Path(__file__).parent / "counts.json"
ALLOWED_GROWTH = 1.02
COUNTED_BYTES = ("global_load", "global_store", "lds_load", "lds_store")


@contextmanager
def ran(library: Library, case: str) -> Iterator[tuple[Bench, list[Output]]]:
    """Runs a case in a stand-in library; its memory and launches can be looked at inside."""
    with Queue(library) as queue:
        bench = Bench(library, queue)
        try:
            yield bench, op_cases.CASES[case](bench)
        finally:
            bench.close()


def run_as_machine_code(library: Library, machine: Machine, case: str) -> Counts:
    """Runs a case's launches in the executor and checks the values. AssertionError, Trap, NotImplementedError."""
    with ran(library, case) as (bench, outputs):
        counts = replay(bench.launches, bench.before, machine)
        partly = any(launch.kernel.startswith("matmul_wide_") for launch in bench.launches)
        for output in outputs:
            output.check(bench.before.bytes_at, partly=partly)
        return counts


def summary(counts: Counts) -> dict[str, int]:
    """What is recorded of a run."""
    return {"instructions": counts.total} | {k: counts.bytes[k] for k in COUNTED_BYTES if counts.bytes[k]}


def growth(counts: Counts, recorded: dict[str, int]) -> list[str]:
    """A sentence for each figure that has grown by more than is allowed."""
    found = []
    for name, now in summary(counts).items():
        before = recorded.get(name, 0)
        if now > before * ALLOWED_GROWTH:
            found.append(f"{name}: {now}, recorded {before}")
    return found


def compiler() -> str:
    """The compiler's version, which the counts depend on."""
    text = subprocess.run([toolchain.CLANG, "--version"], capture_output=True, text=True).stdout
    found = re.search(r"clang version ([\d.]+)", text)
    return found[1] if found else "unknown"


def record() -> dict[str, Any]:
    """The whole record, measured now."""
    library = Library(library_code.standin_library(32))
    codes = {"gfx1030": library_code.kernel_code_rdna2(), "gfx1100": library_code.kernel_code("gfx1100")}
    result: dict[str, Any] = {"compiler": compiler()}
    for target, code in codes.items():
        machine = Machine(code)
        result[target] = {case: summary(run_as_machine_code(library, machine, case)) for case in op_cases.CASES}
    return result


if __name__ == "__main__":
    RECORD.write_text(json.dumps(record(), indent=1, sort_keys=True) + "\n")
    print(f"wrote {RECORD}")
