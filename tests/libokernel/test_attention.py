"""ok_attention_paged against float64, and the promise: a row depends on its own inputs alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from pyengine.errors import InvalidArgument
from pyengine.native import DType, ops
from tests import reference
from tests.tolerances import ON_CPU, ON_GPU, assert_close

BLOCK = ops.KV_BLOCK_SIZE
DTYPES = [DType.F32, DType.F16, DType.BF16]


@dataclass
class Text:
    """One sequence's inputs: q (n, heads * d), k and v (n, kv_heads * d)."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray

    def __len__(self):
        return len(self.q)


def make_text(rng, n, heads, kv_heads, head_dim):
    """Random text whose scores spread widely enough that softmax is neither flat nor one-hot."""
    q, k, v = (rng.normal(size=(n, h * head_dim)) for h in (heads, kv_heads, kv_heads))
    return Text(*(x.astype(np.float32) for x in (1.5 * q, k, v)))


class Paged:
    """A cache with a shuffled block table for some sequences; calls the two kernels."""

    def __init__(self, queue, arena, put, dtype, heads, kv_heads, head_dim, lengths, seed=0):
        self.queue, self.arena, self.put, self.heads = queue, arena, put, heads
        self.width = max(-(-n // BLOCK) for n in lengths)
        used = sum(-(-n // BLOCK) for n in lengths)
        self.cache = ops.kv_layer(arena, dtype, used + 1, kv_heads, head_dim)
        order = np.random.default_rng(seed).permutation(used + 1)
        self.table = np.full((len(lengths), self.width), -1, np.int32)
        for sequence, n in enumerate(lengths):
            count = -(-n // BLOCK)
            self.table[sequence, :count], order = order[:count], order[count:]
        self.device_table = put(self.table)

    def slots(self, sequence, position):
        return (self.table[sequence, position // BLOCK] * BLOCK + position % BLOCK).astype(np.int32)

    def append(self, sequence, text, start, stop):
        slot = self.put(self.slots(sequence, np.arange(start, stop)))
        ops.kv_append(
            self.queue, self.cache, self.put(text.k[start:stop]), self.put(text.v[start:stop]), slot
        )

    def attend(self, q, sequence, position, scale=None, slope=None, window=0):
        with self.arena.scope():
            y = self.put(np.full(q.shape, np.nan, np.float32))
            ops.attention_paged(
                self.queue, y, self.put(q), self.cache, self.device_table,
                self.put(np.asarray(sequence, np.int32)), self.put(np.asarray(position, np.int32)),
                heads=self.heads, scale=scale or self.cache.head_dim**-0.5,
                slope=None if slope is None else self.put(slope.astype(np.float32)), window=window,
            )  # fmt: skip
            return y.download(self.queue)


def want_of(paged, texts, q, sequence, position, scale=None, slope=None, window=0):
    """The float64 reference on the same cache, rounded as stored."""
    cache = paged.cache
    keys, values = np.zeros((2, cache.blocks * BLOCK, cache.kv_heads * cache.head_dim), np.float32)
    for number, text in enumerate(texts):
        slot = paged.slots(number, np.arange(len(text)))
        keys[slot] = reference.stored(text.k, cache.dtype)
        values[slot] = reference.stored(text.v, cache.dtype)
    shape = (len(keys), cache.kv_heads, cache.head_dim)
    y = reference.attention_paged(
        q.reshape(len(q), paged.heads, -1), keys.reshape(shape), values.reshape(shape), paged.table,
        np.asarray(sequence, np.int64), np.asarray(position), scale=scale or cache.head_dim**-0.5,
        slope=slope, window=window,
    )  # fmt: skip
    return y.reshape(q.shape)


def tolerance(lib, dtype):
    return (ON_CPU if lib.backend == "cpu" else ON_GPU)[dtype]


def assert_same(lib, got, want):
    """Bit for bit on the CPU; GPUs may use another variant, within 1e-5 of the largest."""
    if lib.backend == "cpu":
        np.testing.assert_array_equal(got, want)
    else:
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "heads, kv_heads, head_dim, length",
    [
        (1, 1, 1, 33),
        (4, 1, 20, 70),
        (8, 2, 32, 300),
        (9, 3, 80, 65),
        (6, 6, 96, 31),
        (2, 2, 160, 300),
        (3, 1, 33, 40),
        (14, 2, 64, 64),
        (40, 2, 16, 36),
        (2, 1, 256, 50),
        (1, 1, 1000, 40),
    ],
)
def test_attention_matches_float64(
    lib, queue, arena, put, dtype, heads, kv_heads, head_dim, length
):
    rng = np.random.default_rng(head_dim)
    text = make_text(rng, length, heads, kv_heads, head_dim)
    paged = Paged(queue, arena, put, dtype, heads, kv_heads, head_dim, [length])
    paged.append(0, text, 0, length)
    rows = (text.q, np.zeros(length), np.arange(length))
    assert_close(paged.attend(*rows), want_of(paged, [text], *rows), tolerance(lib, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [20, 64, 300])
@pytest.mark.parametrize("window", [0, 90])
def test_a_deterministic_row_is_the_same_bits_in_any_company(
    queue, arena, put, dtype, head_dim, window
):
    """Alone or inside a prefill, beside other texts, with or without scratch, in any context."""
    queue.set_deterministic(True)
    rng = np.random.default_rng(head_dim)
    texts = [make_text(rng, n, 2, 1, head_dim) for n in (330, 70)]
    paged = Paged(queue, arena, put, dtype, 2, 1, head_dim, [330, 70])
    for number, text in enumerate(texts):
        paged.append(number, text, 0, len(text))
    q = np.vstack([text.q for text in texts])
    sequence = np.repeat([0, 1], [330, 70])
    position = np.concatenate([np.arange(330), np.arange(70)])
    whole = paged.attend(q, sequence, position, window=window)
    wide = paged.device_table
    for scratch in (0, 1 << 20):
        if scratch:
            queue.set_scratch(arena, scratch)
        for rows in ([329], [399], [200, 330], list(range(320, 390)), list(range(64))):
            got = paged.attend(q[rows], sequence[rows], position[rows], window=window)
            np.testing.assert_array_equal(got, whole[rows])
        # The same row where fewer blocks are foreseen: its own three only.
        paged.device_table = put(np.ascontiguousarray(paged.table[1:, :3]))
        got = paged.attend(q[399:], [0], [69], window=window)
        np.testing.assert_array_equal(got, whole[399:])
        paged.device_table = wide


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 2, 31, 32, 33, 100, 257, 1000])
def test_a_window_sees_exactly_that_many_keys(lib, queue, arena, put, dtype, window):
    rng = np.random.default_rng(window)
    text = make_text(rng, 330, 4, 2, 24)
    paged = Paged(queue, arena, put, dtype, 4, 2, 24, [330])
    paged.append(0, text, 0, 330)
    rows = (text.q, np.zeros(330), np.arange(330))
    want = want_of(paged, [text], *rows, window=window)
    assert_close(paged.attend(*rows, window=window), want, tolerance(lib, dtype))


@pytest.mark.parametrize("heads, length", [(6, 40), (12, 300), (1, 700)])
def test_alibi_adds_slope_times_distance(lib, queue, arena, put, heads, length):
    rng = np.random.default_rng(heads)
    text = make_text(rng, length, heads, heads, 32)
    paged = Paged(queue, arena, put, DType.F16, heads, heads, 32, [length])
    paged.append(0, text, 0, length)
    rows = (text.q, np.zeros(length), np.arange(length))
    slope = reference.alibi_slopes(heads)
    want = want_of(paged, [text], *rows, slope=slope)
    assert_close(paged.attend(*rows, slope=slope), want, tolerance(lib, DType.F16))


@pytest.mark.parametrize("dtype", DTYPES)
def test_ragged_rows_in_any_order_with_surplus_rows(lib, queue, arena, put, dtype):
    rng = np.random.default_rng(5)
    lengths = [1, 32, 33, 300, 64, 520, 7, 100]
    texts = [make_text(rng, n, 8, 2, 40) for n in lengths]
    paged = Paged(queue, arena, put, dtype, 8, 2, 40, lengths)
    for number, text in enumerate(texts):
        paged.append(number, text, 0, len(text))
    # Decode rows, a chunk of a prompt, rows of one sequence apart, and rows of nobody.
    sequence = [0, 1, 2, 3, 4, 5, 6, 7] + [5] * 40 + [3, -1, 5, 8, 3, 0]
    position = [n - 1 for n in lengths] + list(range(230, 270)) + [299, 3, 511, 0, 0, -1]
    q = rng.normal(size=(len(sequence), 8 * 40)).astype(np.float32)
    got = paged.attend(q, sequence, position)
    nobody = [len(q) - 5, len(q) - 3, len(q) - 1]
    assert not got[nobody].any(), "rows of no sequence or no position are zeros"
    known = np.setdiff1d(np.arange(len(q)), nobody)
    rows = (q[known], np.array(sequence)[known], np.array(position)[known])
    assert_close(got[known], want_of(paged, texts, *rows), tolerance(lib, dtype))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window, alibi", [(0, False), (100, False), (0, True)])
def test_a_row_is_the_same_in_any_chunk_batch_and_number_of_threads(
    lib, queue, arena, put, dtype, threads, window, alibi
):
    heads, kv_heads, head_dim, length = 8, 2, 48, 300
    rng = np.random.default_rng(3)
    texts = [make_text(rng, length, heads, kv_heads, head_dim) for _ in range(8)]
    slope = reference.alibi_slopes(heads) if alibi else None
    options = {"window": window, "slope": slope}

    def fresh(lengths):
        return Paged(queue, arena, put, dtype, heads, kv_heads, head_dim, lengths)

    if lib.backend == "cpu":
        lib.c.ok_set_threads(1)
    whole = fresh([length])
    whole.append(0, texts[0], 0, length)
    want = whole.attend(texts[0].q, np.zeros(length), np.arange(length), **options)

    if lib.backend == "cpu":
        lib.c.ok_set_threads(threads)
    # From here a few rows may be shared out by spans of keys.
    queue.set_scratch(arena, ops.attention_scratch_bytes(lib, length, heads, head_dim, length))
    for chunk in (1, 7, 64, length):
        alone = fresh([length])
        for start in range(0, length, chunk):
            stop = min(start + chunk, length)
            alone.append(0, texts[0], start, stop)
            got = alone.attend(
                texts[0].q[start:stop], np.zeros(stop - start), np.arange(start, stop), **options
            )
            assert_same(lib, got, want[start:stop])

    crowd = fresh([length] * 8)
    for number in range(8):
        crowd.append(number, texts[number], 0, length)
    for at in (0, 31, 255, 256, length - 1):
        position = rng.integers(0, length, 8)
        position[3] = at
        number = np.array([5, 1, 2, 0, 4, 3, 6, 7])
        q = np.stack([texts[s].q[p] for s, p in zip(number, position, strict=True)])
        got = crowd.attend(q, number, position, **options)
        assert_same(lib, got[3:4], want[at : at + 1])


@pytest.mark.parametrize("threads", [1, 4])  # four have too few heads here, and share spans
@pytest.mark.parametrize("window", [0, 300])
def test_a_long_row_is_the_same_with_and_without_scratch(lib, queue, arena, put, threads, window):
    rng = np.random.default_rng(4)
    lengths = [1500, 257, 40]
    texts = [make_text(rng, n, 5, 5, 64) for n in lengths]
    paged = Paged(queue, arena, put, DType.BF16, 5, 5, 64, lengths)
    for number, text in enumerate(texts):
        paged.append(number, text, 0, len(text))
    q = rng.normal(size=(4, 5 * 64)).astype(np.float32)
    rows = (q, [0, 1, 2, 0], [1499, 256, 39, -1])
    if lib.backend == "cpu":
        lib.c.ok_set_threads(threads)
        without = paged.attend(*rows, window=window)
    size = ops.attention_scratch_bytes(lib, 4, 5, 64, 1500)
    scratch = put(np.full(size // 4, -1, np.int32))  # what was in it must not matter: NaN
    lib.c.ok_queue_set_scratch(queue.handle, scratch.ptr, size)
    got = paged.attend(*rows, window=window)
    if lib.backend == "cpu":
        np.testing.assert_array_equal(got, without)
    want = want_of(paged, texts, q[:3], *([0, 1, 2], [1499, 256, 39]), window=window)
    assert_close(got[:3], want, tolerance(lib, DType.BF16))
    assert not got[3].any()


def test_a_recorded_call_reads_its_inputs_at_replay(lib, queue, arena, put):
    rng = np.random.default_rng(6)
    text = make_text(rng, 50, 2, 1, 16)
    paged = Paged(queue, arena, put, DType.F16, 2, 1, 16, [50])
    paged.append(0, text, 0, 50)
    want = paged.attend(text.q[40:42], [0, 0], [40, 41])
    q, y = put(np.zeros((2, 32), np.float32)), put(np.zeros((2, 32), np.float32))
    sequence, position = put(np.zeros(2, np.int32)), put(np.full(2, -1, np.int32))
    with queue.record() as program:
        ops.attention_paged(
            queue, y, q, paged.cache, paged.device_table, sequence, position, heads=2, scale=0.25
        )
    q.upload(queue, text.q[40:42])
    position.upload(queue, np.array([40, 41]))
    program.replay()
    assert_same(lib, y.download(queue), want)
    program.close()


def test_blocks_outside_the_cache_hold_no_keys(lib, queue, arena, put):
    rng = np.random.default_rng(7)
    text = make_text(rng, 3 * BLOCK, 2, 2, 16)
    paged = Paged(queue, arena, put, DType.F32, 2, 2, 16, [3 * BLOCK])
    paged.append(0, text, 0, 3 * BLOCK)
    hole = paged.table.copy()
    hole[0, 1] = paged.cache.blocks
    paged.device_table = put(hole)
    got = paged.attend(text.q[-1:], [0], [3 * BLOCK - 1])
    # The same keys without the hole: sequence 0 of two blocks, seen from its last position.
    paged.device_table = put(paged.table[:, [0, 2]])
    assert_same(lib, got, paged.attend(text.q[-1:], [0], [2 * BLOCK - 1]))
    paged.device_table = put(np.full_like(hole, -(2**31)))
    assert not paged.attend(text.q[-1:], [0], [3 * BLOCK - 1]).any(), "no keys: zeros, not NaN"
    # A position beyond the table sees what the table has.
    paged.device_table = put(paged.table)
    beyond = paged.attend(text.q[-1:], [0], [2**31 - 1])
    assert_same(lib, beyond, paged.attend(text.q[-1:], [0], [3 * BLOCK - 1]))


def test_memory_that_was_never_written_is_never_used(lib, queue, arena, put):
    rng = np.random.default_rng(8)
    text = make_text(rng, 40, 4, 2, 20)
    for dtype in DTYPES:
        paged = Paged(queue, arena, put, dtype, 4, 2, 20, [40])
        size = ops.kv_cache_bytes(lib, dtype, paged.cache.blocks, 2, 20)
        queue.library.c.ok_fill(queue.handle, paged.cache.ptr, 0xFF, size)  # NaN in every type
        paged.append(0, text, 0, 40)
        rows = (text.q, np.zeros(40), np.arange(40))
        for window in (0, 5):
            want = want_of(paged, [text], *rows, window=window)
            assert_close(paged.attend(*rows, window=window), want, tolerance(lib, dtype))


def test_large_scores_neither_overflow_nor_lose_the_largest(lib, queue, arena, put):
    # One score is 3e5 above all others: softmax without its maximum subtracted would overflow.
    text = Text(*(np.ones((300, 16), np.float32) for _ in range(3)))
    text.q[:] = 500
    text.k[:] = -40
    text.k[77] = 40
    text.v[:] = np.arange(300)[:, None]
    paged = Paged(queue, arena, put, DType.F16, 1, 1, 16, [300])
    paged.append(0, text, 0, 300)
    got = paged.attend(text.q[:2], [0, 0], [76, 299])
    np.testing.assert_allclose(got[0], np.arange(77).mean(), rtol=1e-6)  # all scores equal
    np.testing.assert_array_equal(got[1], np.full(16, 77))


def test_a_nan_in_the_query_reaches_the_output(queue, arena, put):
    text = make_text(np.random.default_rng(9), 40, 2, 2, 16)
    paged = Paged(queue, arena, put, DType.F16, 2, 2, 16, [40])
    paged.append(0, text, 0, 40)
    q = text.q[-2:].copy()
    q[1, 3] = np.nan
    got = paged.attend(q, [0, 0], [39, 39])
    assert np.isnan(got[1, :16]).all() and np.isfinite(got[1, 16:]).all()
    assert np.isfinite(got[0]).all()


def test_wrong_arguments_are_refused(queue, arena, put, refused):
    paged = Paged(queue, arena, put, DType.F16, 4, 2, 8, [40])
    q, y = put(np.zeros((3, 32), np.float32)), put(np.zeros((3, 32), np.float32))
    rows = put(np.full(3, -1, np.int32))
    good = {
        "queue": queue.handle, "y": y.ptr, "q": q.ptr, "q_stride": 32, "cache": paged.cache.ptr,
        "dtype": DType.F16, "blocks": paged.cache.blocks, "block_table": paged.device_table.ptr,
        "sequences": 1, "blocks_per_sequence": paged.width, "sequence": rows.ptr,
        "position": rows.ptr, "slope": 0, "rows": 3, "heads": 4, "kv_heads": 2, "head_dim": 8,
        "window": 0, "scale": 1.0,
    }  # fmt: skip
    refused(
        queue.library.c.ok_attention_paged,
        good,
        {
            "queue is null": {"queue": 0},
            "y is null": {"y": 0},
            "q is null": {"q": 0},
            "cache is null": {"cache": 0},
            "block_table is null": {"block_table": 0},
            "sequence is null": {"sequence": 0},
            "position is null": {"position": 0},
            "dtype=4 must be f32, f16 or bf16": {"dtype": DType.I32},
            "blocks=0": {"blocks": 0},
            "rows=-1": {"rows": -1},
            "heads=3 must be a positive multiple of kv_heads=2": {"heads": 3},
            "heads=0": {"heads": 0},
            "kv_heads=0": {"kv_heads": 0},
            "head_dim=0": {"head_dim": 0},
            "q_stride=31 must be >= heads * head_dim = 32": {"q_stride": 31},
            "sequences=0": {"sequences": 0},
            "blocks_per_sequence=0": {"blocks_per_sequence": 0},
            "window=-1": {"window": -1},
            "scale=nan must be finite": {"scale": float("nan")},
        },
    )
    queue.library.c.ok_attention_paged(**(good | {"rows": 0}))
    with pytest.raises(InvalidArgument, match="max_context=0"):
        ops.attention_scratch_bytes(queue.library, 1, 1, 1, 0)
