"""Operations as machine code: what they launch in the stand-in is launched again in the executor, and counted.

Grids, packed layouts and scratch are the library's own launcher's; no test repeats them.

    python -m tests.amd.operations

measures every case again and writes counts.json, the record that tests hold instruction and byte counts to.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from pyengine.native import Library
from tests.amd import library_code, op_cases, toolchain
from tests.amd.launches import Launch, Snapshot
from tests.amd.rdna3 import Counts, Machine

RECORD = Path(__file__).parent / "counts.json"
ALLOWED_GROWTH = 1.02
COUNTED_BYTES = ("global_load", "global_store", "lds_load", "lds_store")


def _groups(launch: Launch) -> list[int] | None:
    """Workgroups to run. The widest matmul needs a hundred to be chosen, and three show whether it is right."""
    if not launch.kernel.startswith("matmul_wide_"):
        return None
    last = int(np.prod(launch.grid)) - 1
    return [0, last // 2, last]


def replay(launches: list[Launch], memory: Snapshot, machine: Machine) -> Counts:
    """Runs the launches in order on the copy of memory, and returns the sums of their counts."""
    instructions: Counter[str] = Counter()
    moved: Counter[str] = Counter()
    for launch in launches:
        arguments: list[Any] = []
        for is_pointer, data in launch.arguments:
            arguments.append(memory.pointer(int.from_bytes(data, "little")) if is_pointer else data)
        counts = machine.launch(
            launch.kernel, launch.grid, launch.block, arguments, launch.lds, _groups(launch)
        )
        instructions += counts.instructions
        moved += counts.bytes
    return Counts(instructions, moved)


def run_as_machine_code(library: Library, machine: Machine, case: str) -> Counts:
    """Runs a case's launches in the executor and checks the values. AssertionError, Trap, NotImplementedError."""
    with op_cases.ran(library, case) as (bench, outputs):
        counts = replay(bench.launches, bench.before, machine)
        partly = any(launch.kernel.startswith("matmul_wide_") for launch in bench.launches)
        for output in outputs:
            output.check(bench.before.bytes_at, partly=partly)
        return counts


def summary(counts: Counts) -> dict[str, int]:
    """What is recorded of a run."""
    return {"instructions": counts.total} | {
        k: counts.bytes[k] for k in COUNTED_BYTES if counts.bytes[k]
    }


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
    codes = {
        "gfx1030": library_code.kernel_code_rdna2(),
        "gfx1100": library_code.kernel_code("gfx1100"),
    }
    result: dict[str, Any] = {"compiler": compiler()}
    for target, code in codes.items():
        machine = Machine(code)
        result[target] = {
            case: summary(run_as_machine_code(library, machine, case)) for case in op_cases.CASES
        }
    return result


if __name__ == "__main__":
    RECORD.write_text(json.dumps(record(), indent=1, sort_keys=True) + "\n")
    print(f"wrote {RECORD}")
