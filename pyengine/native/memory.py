"""Arenas, buffers, queues and programs: Python owners of libokernel's handles."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from pyengine.errors import InvalidArgument
from pyengine.native.bindings import (
    DType,
    Memory,
    Replay,
    address,
    float_cell,
    int64_cell,
    pointer_cell,
    uint64_cell,
)
from pyengine.native.library import Library

Array = np.ndarray[Any, Any]

_ITEM_BYTES = {DType.F32: 4, DType.F16: 2, DType.BF16: 2, DType.I32: 4}
# numpy has no bfloat16: such arrays travel as uint16.
_NUMPY = {DType.F32: "<f4", DType.F16: "<f2", DType.BF16: "<u2", DType.I32: "<i4"}
Q8_0_BLOCK = 32  # weights in one q8_0 block
Q8_0_BLOCK_BYTES = 34  # 32 int8 and one f16 scale


def row_bytes(dtype: DType, cols: int) -> int:
    """Bytes of one plain row of `cols` values; q8_0 rows are whole blocks."""
    if dtype == DType.Q8_0:
        return -(-cols // Q8_0_BLOCK) * Q8_0_BLOCK_BYTES
    return cols * _ITEM_BYTES[dtype]


@dataclass(frozen=True, slots=True)
class Buffer:
    """A typed region of an arena.

    Attributes:
        ptr: address on the device.
        shape: elements per axis; the last axis is contiguous.
        dtype: storage type (q8_0 buffers count bytes of ggml blocks in their last axis).
        stride: elements between rows (first axis) of a two-dimensional view.
        arena: the arena that owns the memory.
    """

    ptr: int
    shape: tuple[int, ...]
    dtype: DType
    stride: int
    arena: Arena

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, gaps between strided rows not counted."""
        return prod(self.shape) * _ITEM_BYTES[self.dtype]

    @property
    def contiguous(self) -> bool:
        """Whether rows follow each other without a gap."""
        return len(self.shape) < 2 or self.stride == prod(self.shape[1:])

    def rows(self, start: int, stop: int) -> Buffer:
        """The view of rows [start, stop) of the first axis."""
        if not 0 <= start <= stop <= self.shape[0]:
            raise InvalidArgument(f"Buffer.rows: [{start}, {stop}) is outside {self.shape}")
        step = self.stride if len(self.shape) > 1 else 1
        offset = start * step * _ITEM_BYTES[self.dtype]
        return replace(self, ptr=self.ptr + offset, shape=(stop - start, *self.shape[1:]))

    def columns(self, start: int, stop: int) -> Buffer:
        """The strided view of columns [start, stop) of a (rows, cols) buffer."""
        if len(self.shape) != 2 or not 0 <= start < stop <= self.shape[1]:
            raise InvalidArgument(f"Buffer.columns: [{start}, {stop}) is outside {self.shape}")
        offset = start * _ITEM_BYTES[self.dtype]
        return replace(self, ptr=self.ptr + offset, shape=(self.shape[0], stop - start))

    def reshape(self, *shape: int) -> Buffer:
        """The same elements under another shape."""
        if prod(shape) != prod(self.shape) or not self.contiguous:
            raise InvalidArgument(f"Buffer.reshape: {self.shape} cannot become {shape}")
        return replace(self, shape=shape, stride=prod(shape[1:]))

    def numpy(self) -> Array:
        """The memory itself as an array, without a copy; valid until the arena is closed.

        Raises:
            InvalidArgument: the memory is not readable by the host.
        """
        if not self.arena.host_readable:
            raise InvalidArgument("Buffer.numpy: device memory; use download(queue)")
        if not self.contiguous:
            return np.asarray(_Exposed(replace(self, shape=(self.shape[0], self.stride))))[
                :, : self.shape[1]
            ]
        return np.asarray(_Exposed(self))

    def upload(self, queue: Queue, array: Array) -> Buffer:
        """Copies `array` (same shape; converted to this dtype's numpy type) in; returns itself."""
        source = np.ascontiguousarray(array, dtype=_NUMPY[self.dtype])
        if source.shape != self.shape or not self.contiguous:
            raise InvalidArgument(f"Buffer.upload: array {source.shape} into buffer {self.shape}")
        if source.nbytes:
            queue.library.c.ok_copy(queue.handle, self.ptr, data_address(source), source.nbytes)
        return self

    def download(self, queue: Queue) -> Array:
        """A host copy, after waiting for the queue: the buffer's shape, bf16 as uint16."""
        rows, width = self.shape[0], prod(self.shape[1:])
        pitch = width if self.contiguous else self.stride
        out = np.empty((rows, pitch), _NUMPY[self.dtype])
        wanted = ((rows - 1) * pitch + width) * _ITEM_BYTES[self.dtype] if rows else 0
        if wanted:
            queue.library.c.ok_copy(queue.handle, data_address(out), self.ptr, wanted)
            queue.sync()
        return np.ascontiguousarray(out[:, :width]).reshape(self.shape)


class _Exposed:
    """Numpy's array interface over a buffer; keeps the arena object alive."""

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self.__array_interface__ = {
            "data": (buffer.ptr, False),
            "shape": buffer.shape,
            "typestr": _NUMPY[buffer.dtype],
            "version": 3,
        }


def data_address(array: Array) -> int:
    """Address of an array's first element."""
    return int(array.__array_interface__["data"][0])


class Arena:
    """One reservation from the backend, carved from the front.

    Raises:
        OutOfMemory: the reservation does not fit; the message has needed, free and total bytes.
    """

    def __init__(
        self, library: Library, size_bytes: int, *, device: int = 0, memory: Memory = Memory.DEVICE
    ) -> None:
        self.library = library
        self.size_bytes = size_bytes
        self.host_readable = memory == Memory.HOST or library.backend == "cpu"
        self._handle = 0
        cell = pointer_cell()
        library.c.ok_arena_create(address(cell), device, memory, size_bytes)
        self._handle = cell.value or 0

    def alloc(self, shape: tuple[int, ...], dtype: DType) -> Buffer:
        """Carves a buffer (256-byte aligned, not cleared). Raises OutOfMemory when full."""
        size = prod(shape) * _ITEM_BYTES[dtype]
        return Buffer(self.alloc_bytes(size), shape, dtype, prod(shape[1:]), self)

    def alloc_bytes(self, size_bytes: int) -> int:
        """Carves raw bytes; returns their address."""
        cell = pointer_cell()
        self.library.c.ok_arena_alloc(self._handle, max(size_bytes, 1), address(cell))
        return cell.value or 0

    @property
    def used_bytes(self) -> int:
        """Bytes carved so far, rounding included."""
        cell = uint64_cell()
        self.library.c.ok_arena_mark(self._handle, address(cell))
        return cell.value

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """What is carved inside is given back at the end."""
        mark = self.used_bytes
        try:
            yield
        finally:
            self.library.c.ok_arena_release(self._handle, mark)

    def close(self) -> None:
        """Gives the memory back; buffers and arrays over it must not be used any more."""
        handle, self._handle = self._handle, 0
        if handle:
            self.library.c.ok_arena_destroy(handle)

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_handle", 0):
            warnings.warn("an Arena was not closed", ResourceWarning, stacklevel=2)


class Queue:
    """An order of execution on one device; runs operations now unless recording."""

    def __init__(self, library: Library, *, device: int = 0, stream: int = 0) -> None:
        self.library = library
        self.handle = 0
        cell = pointer_cell()
        library.c.ok_queue_create(address(cell), device, stream)
        self.handle = cell.value or 0

    def set_scratch(self, arena: Arena, size_bytes: int) -> None:
        """Gives the queue working memory carved from `arena`."""
        pointer = arena.alloc_bytes(size_bytes)
        self.library.c.ok_queue_set_scratch(self.handle, pointer, size_bytes)

    def set_quantized_activations(self, on: bool) -> None:
        """q8_0 matmuls queued from now on round activations to 16 bits (True) or keep f32 (False).

        Raises Unsupported for True on GPUs, which always keep 22 bits or more.
        """
        self.library.c.ok_queue_set_quantized_activations(self.handle, int(on))

    def set_deterministic(self, on: bool) -> None:
        """Operations queued from now on give a row the same bits in any company (True)."""
        self.library.c.ok_queue_set_deterministic(self.handle, int(on))

    def sync(self) -> None:
        """Waits for all queued work; raises DeviceError if some of it failed."""
        self.library.c.ok_queue_sync(self.handle)

    @contextlib.contextmanager
    def record(self) -> Iterator[Program]:
        """Operations inside are recorded, not run; the yielded program is usable afterwards."""
        program = Program(self)
        self.library.c.ok_record_begin(self.handle)
        try:
            yield program
        except BaseException:
            self.library.c.ok_record_abort(self.handle)
            raise
        program._finish()

    def close(self) -> None:
        """Destroys the queue; programs recorded on it must be closed before."""
        handle, self.handle = self.handle, 0
        if handle:
            self.library.c.ok_queue_destroy(handle)

    def __enter__(self) -> Queue:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "handle", 0):
            warnings.warn("a Queue was not closed", ResourceWarning, stacklevel=2)


class Program:
    """A recorded list of launches (made by Queue.record)."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._c = queue.library.c
        self._handle = 0

    def _finish(self) -> None:
        cell = pointer_cell()
        self._c.ok_record_end(self._queue.handle, address(cell))
        self._handle = cell.value or 0

    def replay(self) -> None:
        """Runs the whole list; returns when its results are there."""
        self._c.ok_program_replay(self._handle)

    @property
    def launches(self) -> int:
        """Number of recorded launches."""
        cell = int64_cell()
        self._c.ok_program_launches(self._handle, address(cell))
        return cell.value

    def set_replay(self, replay: Replay) -> None:
        """Chooses the loop or a captured graph; Unsupported where there are no graphs."""
        self._c.ok_program_set_replay(self._handle, replay)

    def close(self) -> None:
        """Frees the list."""
        handle, self._handle = self._handle, 0
        if handle:
            self._c.ok_program_destroy(handle)

    def __del__(self) -> None:
        if getattr(self, "_handle", 0):
            warnings.warn("a Program was not closed", ResourceWarning, stacklevel=2)


class Stopwatch:
    """Time between two points of a queue, by the device's own clock."""

    def __init__(self, queue: Queue, *, device: int = 0) -> None:
        self._queue = queue
        self._c = queue.library.c
        self._events: list[int] = []
        for _ in range(2):
            cell = pointer_cell()
            self._c.ok_event_create(address(cell), device)
            self._events.append(cell.value or 0)

    def start(self) -> None:
        """Marks the beginning."""
        self._c.ok_event_record(self._events[0], self._queue.handle)

    def stop_ms(self) -> float:
        """Marks the end, waits for it, and returns the milliseconds between."""
        self._c.ok_event_record(self._events[1], self._queue.handle)
        cell = float_cell()
        self._c.ok_event_elapsed(self._events[0], self._events[1], address(cell))
        return cell.value

    def close(self) -> None:
        """Destroys both events."""
        while self._events:
            self._c.ok_event_destroy(self._events.pop())
