"""Loading: reads a checkpoint in slices, a few ahead, and packs them into the arena."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from pyengine.errors import WeightError
from pyengine.models.checkpoint import Checkpoint
from pyengine.models.model_config import ModelConfig
from pyengine.models.spec import DecoderSpec
from pyengine.models.weights import (
    SLICE_BYTES,
    Source,
    Weight,
    WeightPlan,
    WeightTypes,
    plan_weights,
)
from pyengine.native import Arena, Buffer, DType, Queue, ops

Array = np.ndarray[Any, Any]
Progress = Callable[[int, int], None]

_READS_AHEAD = 4  # slices in host memory at once


@dataclass
class Block:
    """Weights of one layer (or of what surrounds the layers) by role."""

    matrices: dict[str, ops.Matrix] = field(default_factory=dict)
    vectors: dict[str, Buffer] = field(default_factory=dict)


@dataclass
class Weights:
    """All weights on the device: `model` has embed, final_norm, lm_head, ...; `layers` the rest."""

    model: Block
    layers: list[Block]


def load_weights(
    queue: Queue,
    arena: Arena,
    spec: DecoderSpec,
    config: ModelConfig,
    checkpoint: Checkpoint,
    types: WeightTypes,
    *,
    plan: WeightPlan | None = None,
    progress: Progress | None = None,
) -> Weights:
    """Reads a checkpoint into the arena, tensor by tensor, in slices read ahead by a few threads.

    Args:
        types: how matrices are stored; vectors are always f32.
        plan: of plan_weights, which is called if it is not given.
        progress: called with (bytes read, bytes in all) after each slice.

    Raises:
        WeightError: see plan_weights; or the file was cut while loading; or values overflow f16.
        OutOfMemory: the arena is too small (see memory_plan).
    """
    plan = plan or plan_weights(spec, config, checkpoint)
    weights = Weights(Block(), [Block() for _ in range(config.num_hidden_layers)])
    matrices: list[tuple[Weight, ops.Matrix]] = []
    vectors: list[tuple[Weight, Buffer]] = []
    for weight in plan.weights:
        block = weights.model if weight.layer is None else weights.layers[weight.layer]
        if len(weight.shape) == 2:
            matrix = ops.new_matrix(arena, weight.storage(types), *weight.shape)
            block.matrices[weight.role] = matrix
            matrices.append((weight, matrix))
        else:
            buffer = arena.alloc(weight.shape, DType.F32)
            block.vectors[weight.role] = buffer
            vectors.append((weight, buffer))
    if plan.tied:
        weights.model.matrices["lm_head"] = weights.model.matrices["embed"]
    meter = _Meter(plan, checkpoint, progress)
    with arena.scope():
        packer = _Packer(queue, arena, len(matrices))
        sources = [
            (index, source)
            for index, (weight, _) in enumerate(matrices)
            for source in weight.sources
        ]
        for index, source, first, stored in _read_ahead(checkpoint, sources):
            for row, piece in source.layout.place(stored, first):
                packer.pack(index, matrices[index][1], source.row + row, piece,
                            DType[checkpoint.dtype(source.name)])  # fmt: skip
            meter.add(stored.nbytes)
        for weight, buffer in vectors:
            buffer.upload(queue, _read_vector(weight, checkpoint, meter))
        queue.sync()
        packer.check([weight for weight, _ in matrices])
    return weights


class _Meter:
    """Counts bytes for a progress callback."""

    def __init__(self, plan: WeightPlan, checkpoint: Checkpoint, progress: Progress | None) -> None:
        item_bytes = {"F32": 4.0, "F16": 2.0, "BF16": 2.0, "Q8_0": 34 / 32}
        self._progress = progress
        self._done = 0
        self._total = int(
            sum(
                prod(source.shape) * item_bytes[checkpoint.dtype(source.name)]
                for weight in plan.weights
                for source in weight.sources
            )
        )

    def add(self, count: int) -> None:
        self._done += count
        if self._progress:
            self._progress(self._done, max(self._total, self._done))


class _Packer:
    """Packs host rows into matrices, through a staging area where the host cannot be read.

    Counts, for each matrix, the values that left the range of its type.
    """

    def __init__(self, queue: Queue, arena: Arena, matrices: int) -> None:
        self._queue = queue
        self._arena = arena
        counters = np.zeros(max(matrices, 1), np.int32)
        self._overflow = arena.alloc(counters.shape, DType.I32).upload(queue, counters)
        self._staging = (
            None if arena.host_readable else arena.alloc((SLICE_BYTES // 2,), DType.BF16)
        )

    def pack(
        self, index: int, matrix: ops.Matrix, row: int, piece: Array, source_dtype: DType
    ) -> None:
        """Packs `piece` (rows, ...) at `row`; its memory may be reused afterwards."""
        row_bytes = piece.nbytes // len(piece)
        step = len(piece) if self._staging is None else max(SLICE_BYTES // row_bytes, 1)
        for start in range(0, len(piece), step):
            part = piece[start : start + step]
            ops.pack_rows(
                self._queue, matrix, row + start, self._on_device(part), source_dtype, len(part),
                self._overflow.rows(index, index + 1),
            )  # fmt: skip

    def _on_device(self, part: Array) -> Buffer:
        """The bytes of `part` as a buffer of 16-bit words that a kernel can read."""
        words = np.ascontiguousarray(part).reshape(-1).view(np.uint16)
        if self._staging is None:
            return Buffer(ops.data_address(words), words.shape, DType.BF16, 1, self._arena)
        return self._staging.rows(0, words.size).upload(self._queue, words)

    def check(self, weights: Sequence[Weight]) -> None:
        """Raises WeightError naming the first tensor with overflows."""
        counts = self._overflow.download(self._queue)
        for weight, count in zip(weights, counts, strict=False):
            if count:
                raise WeightError(
                    f"{weight.sources[0].name}: {count} values exceed the range of the chosen "
                    "type; use dtype='bf16' or 'f32'"
                )


def _read_ahead(
    checkpoint: Checkpoint, sources: Sequence[tuple[int, Source]]
) -> Iterator[tuple[int, Source, int, Array]]:
    """Yields (index, source, first row, rows) in order while a few threads read what follows."""
    waiting: deque[tuple[int, Source, int, Future[Array]]] = deque()
    with ThreadPoolExecutor(min(_READS_AHEAD, os.cpu_count() or 1), "pyengine-read") as pool:
        try:
            for index, source in sources:
                for rows in source.slices(SLICE_BYTES):
                    future = pool.submit(checkpoint.read, source.name, rows)
                    waiting.append((index, source, rows.start, future))
                    if len(waiting) >= _READS_AHEAD:
                        index_, source_, first, future = waiting.popleft()
                        yield index_, source_, first, future.result()
            while waiting:
                index_, source_, first, future = waiting.popleft()
                yield index_, source_, first, future.result()
        finally:
            for *_, future in waiting:
                future.cancel()


def _read_vector(weight: Weight, checkpoint: Checkpoint, meter: _Meter) -> Array:
    """A vector as float32 (n), put together from its sources."""
    vector = np.empty(weight.shape, np.float32)
    for source in weight.sources:
        stored = checkpoint.read(source.name)
        meter.add(stored.nbytes)
        for row, piece in source.layout.place(stored, 0):
            start = source.row + row
            vector[start : start + len(piece)] = widen(piece)
    return vector


def widen(array: Array) -> Array:
    """float32 of float32, float16, or bf16 held as uint16 (its upper half)."""
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)
