"""Buffers know their shape, views their stride, and owners that they are still open."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from pyengine.errors import InvalidArgument, OutOfMemory
from pyengine.native import Arena, Buffer, DType, Queue, Stopwatch, load_library, ops


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena(load_library("cpu"), 1 << 20) as arena:
        yield arena


@pytest.fixture
def queue() -> Iterator[Queue]:
    with Queue(load_library("cpu")) as queue:
        yield queue


def matrix(arena: Arena, queue: Queue) -> tuple[Buffer, np.ndarray]:
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    return arena.alloc((3, 4), DType.F32).upload(queue, values), values


def test_views_read_the_rows_and_columns_they_name(arena: Arena, queue: Queue) -> None:
    buffer, values = matrix(arena, queue)
    view = buffer.rows(1, 3).columns(1, 3)
    assert (view.shape, view.stride, view.contiguous) == ((2, 2), 4, False)
    assert np.array_equal(view.download(queue), values[1:3, 1:3])
    assert np.array_equal(view.numpy(), values[1:3, 1:3])
    assert np.array_equal(buffer.reshape(2, 6).numpy(), values.reshape(2, 6))


def test_views_outside_the_buffer_are_refused(arena: Arena, queue: Queue) -> None:
    buffer, _ = matrix(arena, queue)
    for bad in (
        lambda: buffer.rows(0, 4),
        lambda: buffer.rows(-1, 2),
        lambda: buffer.columns(2, 2),
        lambda: buffer.reshape(5, 2),
        lambda: buffer.columns(0, 2).reshape(6, 1),
        lambda: buffer.upload(queue, np.zeros((4, 3))),
    ):
        with pytest.raises(InvalidArgument):
            bad()


def test_every_dtype_travels_both_ways(arena: Arena, queue: Queue) -> None:
    for dtype, array in (
        (DType.F32, np.array([1.5, -2.0], np.float32)),
        (DType.F16, np.array([1.5, -2.0], np.float16)),
        (DType.BF16, np.array([0x3FC0, 0xC000], np.uint16)),
        (DType.I32, np.array([7, -9], np.int32)),
    ):
        buffer = arena.alloc((2,), dtype).upload(queue, array)
        assert np.array_equal(buffer.download(queue), array)
        assert buffer.ptr % 256 == 0


def test_a_scope_gives_its_memory_back(arena: Arena) -> None:
    before = arena.used_bytes
    with arena.scope():
        arena.alloc((1000,), DType.F32)
        assert arena.used_bytes > before
    assert arena.used_bytes == before


def test_a_full_arena_says_how_much_was_missing(arena: Arena) -> None:
    with pytest.raises(OutOfMemory, match="2097152"):
        arena.alloc((1 << 19,), DType.F32)


def test_a_failed_recording_leaves_the_queue_immediate(arena: Arena, queue: Queue) -> None:
    buffer, values = matrix(arena, queue)
    with pytest.raises(InvalidArgument), queue.record():
        ops.gather_rows(queue, buffer, buffer, buffer)
    buffer.upload(queue, values + 1)
    assert np.array_equal(buffer.numpy(), values + 1)


def test_what_was_not_closed_warns() -> None:
    library = load_library("cpu")
    arena, queue = Arena(library, 4096), Queue(library)
    for owner in (arena, queue):
        with pytest.warns(ResourceWarning, match="was not closed"):
            owner.__del__()
    queue.close()
    arena.close()


def test_a_stopwatch_measures_milliseconds(arena: Arena, queue: Queue) -> None:
    watch = Stopwatch(queue)
    watch.start()
    first = watch.stop_ms()
    again = watch.stop_ms()
    watch.close()
    assert 0 <= first <= again < 60_000


def test_operations_check_shapes_before_the_library_is_called(arena: Arena, queue: Queue) -> None:
    x, _ = matrix(arena, queue)
    weight = ops.pack_matrix(queue, arena, np.ones((5, 3), np.float32), DType.F32)
    with pytest.raises(InvalidArgument, match=r"matmul: x is F32 \(3, 4\), expected F32 \(\*, 3\)"):
        ops.matmul(queue, x, x, weight)
    with pytest.raises(InvalidArgument, match="groups=3 must divide cols=4"):
        ops.rms_norm(queue, x, x, x.rows(0, 1).reshape(4), eps=1e-5, groups=3)
