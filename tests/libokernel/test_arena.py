"""Arenas: alignment, marks, errors with numbers, and failures that leave nothing behind."""

from __future__ import annotations

import re

import numpy as np
import pytest

from pyengine.errors import InvalidArgument, OutOfMemory
from pyengine.native import Arena, DType, Memory, Queue, ops
from pyengine.native.bindings import address, pointer_cell, uint64_cell


@pytest.mark.parametrize("memory", Memory)
def test_allocations_are_aligned_and_do_not_overlap(lib, memory):
    with Arena(lib, 1 << 20, memory=memory) as arena:
        first, second, third = (arena.alloc_bytes(n) for n in (1, 257, 256))
        assert first % 256 == 0
        assert (second - first, third - second) == (256, 512)
        assert arena.used_bytes == 1024


def test_a_full_arena_says_needed_free_and_total(lib):
    with Arena(lib, 1000) as arena:
        arena.alloc_bytes(300)
        message = "ok_arena_alloc: out of memory: needed=600 free=488 total=1000 bytes"
        with pytest.raises(OutOfMemory, match=message):
            arena.alloc_bytes(600)
        arena.alloc_bytes(488)  # an arena can be used to its last byte
        with pytest.raises(OutOfMemory, match="free=0"):
            arena.alloc_bytes(1)


def test_a_scope_gives_back_what_was_carved_inside(lib):
    with Arena(lib, 4096) as arena:
        kept = arena.alloc_bytes(256)
        with arena.scope():
            inside = arena.alloc_bytes(3000)
        assert arena.alloc_bytes(3000) == inside == kept + 256


def test_wrong_arguments_are_refused_by_name(lib, refused):
    cell, mark = pointer_cell(), uint64_cell()
    c = lib.c
    with Arena(lib, 4096) as arena:
        good = dict(arena=arena._handle, bytes=16, host_out=address(cell))
        changes = {
            "arena is null": {"arena": 0},
            "host_out is null": {"host_out": 0},
            "bytes=0 must be positive": {"bytes": 0},
        }
        refused(c.ok_arena_alloc, good, changes)
        good = dict(arena=arena._handle, host_mark=address(mark))
        refused(c.ok_arena_mark, good, {"arena is null": {"arena": 0}})
        good = dict(arena=arena._handle, mark=256)
        changes = {
            "arena is null": {"arena": 0},
            "mark=257 must be <= the 256 bytes": {"mark": 257},
        }
        refused(c.ok_arena_release, good, changes)
    for message, change in {
        "bytes=0 must be positive": {"bytes": 0},
        "memory=2 must be 0": {"memory": 2},
        "host_out is null": {"host_out": 0},
        "device=99": {"device": 99},
    }.items():
        good = dict(host_out=address(cell), device=0, memory=0, bytes=4096)
        with pytest.raises(InvalidArgument, match=f"ok_arena_create: {message}"):
            c.ok_arena_create(**(good | change))
        assert not cell.value
    c.ok_arena_destroy(0)


def test_a_reservation_beyond_memory_is_refused_with_numbers(lib):
    free, total = lib.device_memory()
    with pytest.raises(OutOfMemory) as caught:
        Arena(lib, 1 << 50)
    numbers = re.search(r"needed=(\d+) free=(\d+) total=(\d+) bytes", str(caught.value))
    assert numbers and int(numbers[1]) == 1 << 50 and int(numbers[3]) == total
    with pytest.raises(OutOfMemory):
        Arena(lib, 2**64 - 1)
    with Arena(lib, 1 << 20) as arena:  # and nothing is broken afterwards
        arena.alloc_bytes(1 << 20)


def _session(lib):
    """Everything that allocates, once."""
    x = np.ones((1, 64), np.float32)
    with Arena(lib, 1 << 20) as arena, Queue(lib) as queue:
        buffer = arena.alloc(x.shape, DType.F32).upload(queue, x)
        with queue.record() as program:
            for _ in range(100):
                ops.rms_norm(queue, buffer, buffer, buffer.reshape(64), eps=1e-5)
        program.replay()
        program.close()


def test_every_allocation_may_fail_and_leaves_nothing_behind(lib):
    before = lib.c.ok_allocation_count()
    _session(lib)
    count = lib.c.ok_allocation_count() - before
    assert count >= 4  # arena and its memory, queue, program and its list
    for n in range(1, count + 1):
        lib.c.ok_fail_allocation(n)
        with pytest.raises(OutOfMemory, match=r"needed=\d+ free=\d+ total=\d+ bytes"):
            _session(lib)
        lib.c.ok_fail_allocation(0)
        _session(lib)  # the failure was cleaned up: everything works again


def test_large_memory_comes_back_after_close(cpu):
    with open("/proc/self/status") as status:
        peak_before = _rss_bytes(status.read())
    for _ in range(3):
        with Arena(cpu, 96 << 20) as arena:
            arena.alloc((96 << 18,), DType.F32).numpy()[::1024] = 1
    with open("/proc/self/status") as status:
        assert _rss_bytes(status.read()) - peak_before < 16 << 20


def _rss_bytes(status: str) -> int:
    return int(re.search(r"RssAnon:\s+(\d+) kB", status)[1]) * 1024
