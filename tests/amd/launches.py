"""The launches that an operation makes in the stand-in, written down to be made again elsewhere, and memory copied for it."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Pointer:
    """A kernel argument that points into an array, `offset` bytes from its start."""

    array: Array
    offset: int = 0


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
        raise ValueError(
            f"a kernel was given the address {address:#x}, which lies in no known buffer"
        )

    def bytes_at(self, address: int, size: int) -> bytes:
        """Contents."""
        pointer = self.pointer(address)
        assert pointer is not None
        return pointer.array[pointer.offset : pointer.offset + size].tobytes()
