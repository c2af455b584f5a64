"""Queues and programs: recording, replay, events, and the transfers that come with them."""

from __future__ import annotations

import numpy as np
import pytest

from pyengine.errors import InvalidArgument, Unsupported
from pyengine.native import Activation, DType, Queue, Replay, Stopwatch, ops
from pyengine.native.bindings import address, int32_cell


def _chain(queue, y, x, weight):
    """Three operations, the last of which reads what the others wrote."""
    ops.rms_norm(queue, y, x, weight, eps=1e-5)
    ops.activate(queue, y, y, Activation.SILU)
    ops.layer_norm(queue, y, y, weight, None, eps=1e-5, residual=x)


def test_a_recording_runs_nothing_and_replays_the_same_bits(queue, put):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(9, 77)).astype(np.float32)
    weight = put(rng.normal(size=77).astype(np.float32))
    start, y, recorded = put(x), put(np.zeros_like(x)), put(np.zeros_like(x))
    with queue.record() as program:
        _chain(queue, recorded, start, weight)
    assert not recorded.download(queue).any()
    assert program.launches == 3
    for scale in (1, -3):  # a replay reads its inputs anew
        start.upload(queue, x * scale)
        _chain(queue, y, start, weight)
        program.replay()
        assert recorded.download(queue).tobytes() == y.download(queue).tobytes()
    program.close()


def test_arguments_are_checked_while_recording(queue, put):
    x = put(np.zeros((1, 8), np.float32))
    with pytest.raises(InvalidArgument), queue.record():
        queue.library.c.ok_activate(queue.handle, x.ptr, x.ptr, 9, 8)
    ops.activate(queue, x, x, Activation.RELU)  # the queue is immediate again


def test_a_long_recording_keeps_every_launch_in_order(queue, put):
    values = np.arange(1, 1001, dtype=np.float32)
    numbers, x = put(values.reshape(1000, 1)), put(np.zeros((1, 1), np.float32))
    log = put(np.zeros((1000, 1), np.float32))
    c = queue.library.c
    with queue.record() as program:
        for i in range(1000):
            c.ok_copy(queue.handle, x.ptr, numbers.rows(i, i + 1).ptr, 4)
            c.ok_copy(queue.handle, log.rows(i, i + 1).ptr, x.ptr, 4)
    assert program.launches == 2000
    program.replay()
    assert (log.download(queue)[:, 0] == values).all()
    program.close()


def test_replays_allocate_nothing(lib, queue, put):
    x = put(np.ones((300, 512), np.float32))
    weight = put(np.ones(512, np.float32))
    with queue.record() as program:
        _chain(queue, x, x, weight)
    program.replay()
    before = lib.c.ok_allocation_count()
    for _ in range(100):
        program.replay()
    assert lib.c.ok_allocation_count() == before
    program.close()


def test_recording_is_a_state_that_can_only_be_entered_once(lib, queue, put):
    c = lib.c
    with pytest.raises(InvalidArgument, match="ok_record_end: the queue is not recording"):
        c.ok_record_end(queue.handle, address(int32_cell()) & ~7)
    c.ok_record_begin(queue.handle)
    with pytest.raises(InvalidArgument, match="ok_record_begin: the queue is recording already"):
        c.ok_record_begin(queue.handle)
    with pytest.raises(InvalidArgument, match="ok_queue_sync: the queue is recording"):
        queue.sync()
    c.ok_record_abort(queue.handle)
    queue.sync()


def test_a_queue_may_be_closed_in_the_middle_of_a_recording(lib, put):
    x = put(np.ones((1, 8), np.float32))
    with Queue(lib) as queue:
        lib.c.ok_record_begin(queue.handle)
        ops.activate(queue, x, x, Activation.RELU)


def test_the_cpu_has_no_graphs_and_says_so(cpu):
    with Queue(cpu) as queue:
        with queue.record() as program:
            pass
        assert program.launches == 0
        program.replay()
        program.set_replay(Replay.LOOP)
        with pytest.raises(Unsupported, match="the CPU build replays programs in a loop"):
            program.set_replay(Replay.GRAPH)
        with pytest.raises(InvalidArgument, match="replay=5 must be 0"):
            cpu.c.ok_program_set_replay(program._handle, 5)
        program.close()


def test_the_cpu_has_no_streams_and_says_so(cpu):
    with pytest.raises(InvalidArgument, match="native_stream=0x10 must be null"):
        Queue(cpu, stream=16)


@pytest.mark.parametrize("size", [1, 100, 3 << 20])
def test_copy_and_fill_reach_exactly_their_bytes(queue, put, size):
    source = np.random.default_rng(size).integers(0, 2**16, size // 2 + 9).astype(np.uint16)
    src, dst = put(source), put(np.zeros_like(source))
    c = queue.library.c
    c.ok_copy(queue.handle, dst.ptr, src.ptr, size)
    got = dst.download(queue).view(np.uint8)
    assert (got[:size] == source.view(np.uint8)[:size]).all() and not got[size:].any()
    c.ok_fill(queue.handle, dst.ptr, 0xA5, size)
    got = dst.download(queue).view(np.uint8)
    assert (got[:size] == 0xA5).all() and not got[size:].any()


def test_read_depends_on_every_byte(queue, put):
    data = np.random.default_rng(4).integers(0, 2**16, 1_500_000).astype(np.uint16)[: 96 << 13]
    word = put(np.zeros(1, np.int32))
    src = put(data)
    ops.read_probe(queue, word, src)
    first = word.download(queue)[0]
    for at in (0, 31, len(data) - 1):
        changed = data.copy()
        changed[at] ^= 0x100
        src.upload(queue, changed)
        ops.read_probe(queue, word, src)
        assert word.download(queue)[0] != first


def test_transfer_arguments_are_refused_by_name(lib, queue, put, refused):
    x, y = put(np.ones(64, np.float32)), put(np.ones(64, np.float32))
    copy = dict(queue=queue.handle, dst=y.ptr, src=x.ptr, bytes=64)
    nulls = {"queue is null": {"queue": 0}, "src is null": {"src": 0}}
    refused(lib.c.ok_copy, copy, nulls | {"dst is null": {"dst": 0}})
    fill = dict(queue=queue.handle, dst=y.ptr, value=1, bytes=64)
    refused(lib.c.ok_fill, fill, {"queue is null": {"queue": 0}, "dst is null": {"dst": 0}})
    read = dict(queue=queue.handle, sum=y.ptr, src=x.ptr, bytes=64)
    changes = {"sum is null": {"sum": 0}, "bytes=63 must be a positive multiple": {"bytes": 63}}
    refused(lib.c.ok_read, read, nulls | changes)
    lib.c.ok_copy(queue.handle, 0, 0, 0)


def test_events_measure_work_in_order(queue, put):
    x = put(np.ones((64, 4096), np.float32))
    watch = Stopwatch(queue)
    watch.start()
    for _ in range(5):
        ops.activate(queue, x, x, Activation.SILU)
    assert 0 < watch.stop_ms() < 60_000
    watch.close()


def test_an_event_that_was_not_recorded_has_no_time(lib, queue):
    watch = Stopwatch(queue)
    with pytest.raises(InvalidArgument, match="both events must have been recorded"):
        watch.stop_ms()
    watch.close()


def test_the_last_error_belongs_to_its_thread(lib):
    import threading

    with pytest.raises(InvalidArgument):
        lib.c.ok_record_begin(0)
    assert lib.c.ok_last_error() == b"ok_record_begin: queue is null"
    seen = []
    thread = threading.Thread(target=lambda: seen.append(lib.c.ok_last_error()))
    thread.start()
    thread.join()
    assert seen == [b""]


def test_dtype_sizes_are_those_the_library_uses(lib):
    from pyengine.native.memory import row_bytes

    widths = {DType.F32: 128, DType.F16: 64, DType.BF16: 64, DType.Q8_0: 34, DType.I32: 128}
    assert {dtype: row_bytes(dtype, 32) for dtype in DType} == widths
