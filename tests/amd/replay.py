"""Runs the library's own launches a second time, in the RDNA3 executor.

The library built with the stand-in writes down each launch that an operation makes. The executor then runs the kernel of the
same name from a gfx1100 code object on the same arguments and the same memory. So every kernel is executed as machine code
through the real launcher: grids, packed layouts and scratch are the library's, none is repeated in a test.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.amd.rdna3 import Counts, Machine, Pointer

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Launch:
    """One launch as it was made: a pointer is an address, other arguments are their bytes."""

    kernel: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    lds: int
    arguments: list[tuple[bool, bytes]]


@contextlib.contextmanager
def recording() -> Iterator[Callable[[], list[Launch]]]:
    """Inside, launches of a stand-in library are written down; the function yielded reads what there is so far."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "launches"
        path.touch()

        def launches() -> list[Launch]:
            found = []
            for line in path.read_text().splitlines():
                entry = json.loads(line)
                arguments = [(pointer, bytes.fromhex(text)) for pointer, text in entry["arguments"]]
                sizes = tuple(entry["grid"]), tuple(entry["block"])
                found.append(Launch(entry["kernel"], *sizes, entry["lds"], arguments))
            return found

        os.environ["STANDIN_TRACE"] = str(path)
        try:
            yield launches
        finally:
            del os.environ["STANDIN_TRACE"]


class Snapshot:
    """A copy of regions of memory, to be worked on elsewhere. region: (address, bytes)."""

    def __init__(self, regions: list[tuple[int, int]], read: Callable[[int, int], bytes]) -> None:
        self.parts = [
            (address, np.frombuffer(bytearray(read(address, size)), np.uint8))
            for address, size in regions
        ]

    def pointer(self, address: int) -> Pointer | None:
        """Where an address lies in the copy; null stays null. ValueError for an address in no region."""
        if address == 0:
            return None
        for start, data in self.parts:
            if start <= address < start + max(len(data), 1):
                return Pointer(data, address - start)
        raise ValueError(f"a kernel was given the address {address:#x}, which lies in no known buffer")

    def bytes_at(self, address: int, size: int) -> bytes:
        """Contents."""
        pointer = self.pointer(address)
        assert pointer is not None
        return pointer.array[pointer.offset : pointer.offset + size].tobytes()


def replay_case_limit(kernel: str) -> int | None:
    """The widest matmul needs a hundred workgroups to be chosen, and three show whether it is right."""
    return 3 if kernel.startswith("matmul_wide_") else None


def replay(
    launches: list[Launch],
    memory: Snapshot,
    machine: Machine,
    most_groups: Callable[[str], int | None] = replay_case_limit,
) -> Counts:
    """Runs the launches in order on the copy of memory, and returns the sums of their counts.

    most_groups(kernel): run no more workgroups than that, evenly spread from the first to the last; None: all.
    """
    instructions: Counter[str] = Counter()
    moved: Counter[str] = Counter()
    for launch in launches:
        arguments: list[Any] = []
        for is_pointer, data in launch.arguments:
            arguments.append(memory.pointer(int.from_bytes(data, "little")) if is_pointer else data)
        groups, most = None, most_groups(launch.kernel)
        if most is not None:
            count = int(np.prod(launch.grid))
            groups = [int(i) for i in np.unique(np.linspace(0, count - 1, min(most, count)).astype(int))]
        counts = machine.launch(
            launch.kernel, launch.grid, launch.block, arguments, launch.lds, groups
        )
        instructions += counts.instructions
        moved += counts.bytes
    return Counts(instructions, moved)
