"""Which tensors of a checkpoint become q8_0 in a copy, and their rows as the copy has them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from pyengine.errors import WeightError
from pyengine.models.checkpoint import Checkpoint
from pyengine.models.layouts import Transposed
from pyengine.models.weights import SLICE_BYTES, Source, WeightPlan, WeightTypes
from pyengine.native import Arena, DType, Queue, load_library, ops
from pyengine.native.memory import row_bytes

Array = np.ndarray[Any, Any]
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Target:
    """One tensor of a copy.

    Attributes:
        source: where it comes from; its name is kept.
        role: of the weight it belongs to.
        shape: (out, in) or (n); of a matrix stored (in, out) the other way round.
        kind: "Q8_0", or the type it has already; "F32" of what is stored in q8_0 and cannot be in
            the copy.
    """

    source: Source
    role: str
    shape: tuple[int, ...]
    kind: str

    @property
    def name(self) -> str:
        """Name in the checkpoint."""
        return self.source.name

    @property
    def lies(self) -> tuple[int, ...]:
        """Shape of the array that is written: of q8_0 bytes, else of values."""
        if self.kind != "Q8_0":
            return self.shape
        return (self.shape[0], row_bytes(DType.Q8_0, self.shape[1]))

    @property
    def nbytes(self) -> int:
        """Bytes in the copy."""
        size = 1 if self.kind == "Q8_0" else row_bytes(DType[self.kind], 1)
        return prod(self.lies) * size


def targets_of(
    plan: WeightPlan, checkpoint: Checkpoint, types: WeightTypes, *, whole_blocks: bool = False
) -> list[Target]:
    """Every tensor of a copy, each once: a tied head is not repeated.

    Args:
        types: which matrices become q8_0. All else keeps the type it has.
        whole_blocks: matrices whose rows are not whole blocks keep theirs too (a rule of GGUF).
    """
    found = []
    for weight in plan.weights:
        for source in weight.sources:
            turned = isinstance(source.layout, Transposed)
            shape = source.shape[::-1] if turned else source.shape
            quantised = weight.storage(types) == DType.Q8_0
            if whole_blocks and shape[-1] % 32:
                quantised = False
            kind = "Q8_0" if quantised else checkpoint.dtype(source.name)
            if kind == "Q8_0" and whole_blocks and (shape[-1] % 32 or not weight.quantisable):
                kind = "F32"
            found.append(Target(source, weight.role, shape, kind))
    return found


class Quantizer:
    """Reads tensors of a checkpoint and hands them out as a copy has them, in slices.

    The library does the arithmetic (ok_quantize_q8_0).
    """

    def __init__(self, checkpoint: Checkpoint, targets: Iterable[Target]) -> None:
        self._checkpoint = checkpoint
        widest = max((4 * t.shape[-1] for t in targets if t.kind == "Q8_0"), default=0)
        self._library = load_library("cpu")
        self._arena = Arena(self._library, 2 * max(SLICE_BYTES, widest) + (1 << 16))
        self._queue = Queue(self._library)

    def slices(self, target: Target) -> Iterator[Array]:
        """Rows of a target in order: uint8 blocks, or values as they are stored."""
        stored = DType[self._checkpoint.dtype(target.name)]
        for rows in self._rows(target):
            if stored == DType.Q8_0 and target.kind == "F32":
                yield dequantize(rows, GGMLQuantizationType.Q8_0)[:, : target.shape[1]]
                continue
            if target.kind != "Q8_0" or stored == DType.Q8_0:
                yield rows
                continue
            blocks, failed = ops.quantize_q8_0(self._queue, self._arena, rows, stored)
            if failed:
                raise WeightError(
                    f"{self._checkpoint.path}: {target.name} holds values that are not finite, or "
                    f"beyond q8_0's range, in {failed} blocks; keep its role as it is: "
                    f"--keep {target.role}"
                )
            yield blocks

    def _rows(self, target: Target) -> Iterator[Array]:
        source = target.source
        if isinstance(source.layout, Transposed):
            whole = self._checkpoint.read(source.name)
            step = max(SLICE_BYTES // (4 * len(whole)), 1)
            for start in range(0, whole.shape[1], step):
                yield np.ascontiguousarray(whole[:, start : start + step].T)
        else:
            for part in source.slices(SLICE_BYTES):
                yield self._checkpoint.read(source.name, part)

    def close(self) -> None:
        """Gives memory back."""
        self._queue.close()
        self._arena.close()

    def __enter__(self) -> Quantizer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Meter:
    """Counts bytes written for a progress callback."""

    def __init__(self, targets: Iterable[Target], progress: Progress | None) -> None:
        self._progress = progress
        self._done, self._total = 0, sum(target.nbytes for target in targets)

    def add(self, count: int) -> None:
        """`count` further bytes are written."""
        self._done += count
        if self._progress:
            self._progress(self._done, self._total)
