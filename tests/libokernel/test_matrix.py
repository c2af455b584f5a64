"""Packed matrices: conversions to the last bit, any order of filling, and the way back."""

from __future__ import annotations

import numpy as np
import pytest

from pyengine.native import DType, ops
from pyengine.native.bindings import address, uint64_cell
from tests import reference

FLOATS = [DType.F32, DType.F16, DType.BF16]
STORED = [*FLOATS, DType.Q8_0]


def plain(x, dtype):
    """float32 (rows, cols) as the array that holds it in a storage type."""
    if dtype == DType.F16:
        return x.astype(np.float16)
    if dtype == DType.BF16:
        return reference.to_bf16(x)
    if dtype == DType.Q8_0:
        return reference.quantize_q8_0(x).view(np.uint16).reshape(len(x), -1)
    return x


def hard_floats():
    """Every f16 and bf16 number, the middles between neighbours, and one step either side."""
    halves = np.arange(0x7C01, dtype=np.uint16).view(np.float16).astype(np.float64)
    halves[-1] = 65536  # what would follow 65504
    bfloats = reference.from_bf16(np.arange(0x7F80, dtype=np.uint16)).astype(np.float64)
    exact = np.concatenate([halves, (halves[1:] + halves[:-1]) / 2])
    exact = np.concatenate([exact, bfloats, (bfloats[1:] + bfloats[:-1]) / 2]).astype(np.float32)
    near = [np.nextafter(exact, np.float32(to)) for to in (-np.inf, np.inf)]
    values = np.concatenate([exact, *near, [np.inf, np.nan, 3.4e38, 1e-45]]).astype(np.float32)
    values = np.concatenate([values, -values])
    return np.resize(values, (320, -(-len(values) // 320)))


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16])
def test_narrowing_rounds_to_nearest_even_for_every_hard_number(queue, arena, dtype):
    x = hard_floats()
    got = ops.unpack_matrix(queue, ops.pack_matrix(queue, arena, x, dtype))
    with np.errstate(over="ignore"):
        want = reference.stored(x, dtype)
    assert (np.isnan(got) == np.isnan(x)).all()
    keep = ~np.isnan(x)
    assert (got.view(np.uint32)[keep] == want.view(np.uint32)[keep]).all()


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16])
def test_widening_is_exact_for_every_number(queue, arena, dtype):
    bits = np.arange(0x10000, dtype=np.uint16).reshape(64, 1024)
    source = bits.view(np.float16) if dtype == DType.F16 else bits
    with np.errstate(invalid="ignore"):
        want = source.astype(np.float32) if dtype == DType.F16 else reference.from_bf16(bits)
    for packed in (dtype, DType.F32):
        got = ops.unpack_matrix(queue, ops.pack_matrix(queue, arena, source, packed, dtype))
        assert (np.isnan(got) == np.isnan(want)).all()
        keep = ~np.isnan(want)
        assert (got.view(np.uint32)[keep] == want.view(np.uint32)[keep]).all()


@pytest.mark.parametrize("source", STORED)
@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("out, inner", [(1, 1), (33, 31), (17, 300), (40, 64)])
def test_every_source_packs_into_every_dtype(queue, arena, put, source, dtype, out, inner):
    x = np.random.default_rng(out).normal(size=(out, inner)).astype(np.float32)
    matrix = ops.new_matrix(arena, dtype, out, inner)
    ops.pack_rows(queue, matrix, 0, put(plain(x, source)), source, out)
    want = reference.stored(x, source)
    if source != DType.Q8_0 or dtype != DType.Q8_0:
        want = reference.stored(want, dtype)
    got = ops.unpack_matrix(queue, matrix)
    assert (got == want).all()
    assert (ops.unpack_matrix(queue, matrix, out // 2, out - out // 2) == want[out // 2 :]).all()


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("out", [37, 48])
def test_a_matrix_may_be_filled_in_any_order_and_pieces(lib, queue, arena, put, dtype, out):
    inner = 70
    x = np.random.default_rng(3).normal(size=(out, inner)).astype(np.float32)
    size = ops.matrix_bytes(lib, dtype, out, inner)
    contents = []
    for starts in ([0], [0, 5, 16, 21], [30, 32, 0, 1, 17]):
        room = put(np.full((size // 4,), -1, np.int32))
        matrix = ops.Matrix(room.ptr, dtype, out, inner, arena)
        for first in starts:
            stop = min([s for s in starts if s > first], default=out)
            ops.pack_rows(queue, matrix, first, put(x[first:stop]), DType.F32, stop - first)
        contents.append(room.download(queue))
    assert (contents[1] == contents[0]).all() and (contents[2] == contents[0]).all()


@pytest.mark.parametrize("cols", [32, 300])
def test_q8_0_blocks_come_back_bit_for_bit(queue, arena, put, cols):
    rng = np.random.default_rng(5)
    blocks = rng.integers(0, 1 << 16, (37, -(-cols // 32) * 17), dtype=np.uint16)  # any 34 bytes
    matrix = ops.new_matrix(arena, DType.Q8_0, 37, cols)
    ops.pack_rows(queue, matrix, 0, put(blocks), DType.Q8_0, 37)
    assert (ops.unpack_q8_0(queue, matrix) == blocks.view(np.uint8)).all()
    assert (ops.unpack_q8_0(queue, matrix, 20, 5) == blocks[20:25].view(np.uint8)).all()


@pytest.mark.parametrize("dtype, finite", [(DType.F32, 0), (DType.F16, 3), (DType.BF16, 1)])
def test_overflow_counts_finite_numbers_that_became_infinite(queue, arena, put, dtype, finite):
    x = np.zeros((20, 300), np.float32)
    x[0, 0], x[19, 299], x[7, 33] = 65520, -1e6, 3.4e38  # of these bf16 holds all but the last
    x[3, 3], x[4, 4], x[5, 5], x[6, 6] = np.inf, -np.inf, np.nan, 65519
    overflow = put(np.array([10], np.int32))
    matrix = ops.new_matrix(arena, dtype, 20, 300)
    ops.pack_rows(queue, matrix, 0, put(x), DType.F32, 20, overflow)
    assert overflow.download(queue).tolist() == [10 + finite]


def test_packing_is_recorded_like_any_operation(queue, arena, put):
    source = put(np.zeros((5, 40), np.float32))
    matrix = ops.new_matrix(arena, DType.F16, 5, 40)
    with queue.record() as program:
        ops.pack_rows(queue, matrix, 0, source, DType.F32, 5)
    x = np.random.default_rng(1).normal(size=(5, 40)).astype(np.float32)
    source.upload(queue, x)
    program.replay()
    assert (ops.unpack_matrix(queue, matrix) == reference.stored(x, DType.F16)).all()
    program.close()


def test_q8_0_takes_34_bytes_for_32_weights(lib):
    if lib.backend == "cpu":
        assert ops.matrix_bytes(lib, DType.Q8_0, 48, 320) == 48 * 320 // 32 * 34
        assert ops.matrix_bytes(lib, DType.Q8_0, 33, 33) == 48 * 2 * 34  # padded to 16 and 32
        assert ops.matrix_bytes(lib, DType.F16, 33, 33) == 48 * 33 * 2


def test_wrong_arguments_are_refused_by_name(lib, queue, arena, put, refused):
    cell = uint64_cell()
    refused(
        lib.c.ok_matrix_bytes,
        {"dtype": DType.F16, "out": 5, "in": 8, "host_bytes": address(cell)},
        {
            "dtype=4 must be": {"dtype": DType.I32},
            "out=0 must be": {"out": 0},
            "in=-1 must be": {"in": -1},
            "host_bytes is null": {"host_bytes": 0},
        },
    )
    matrix = ops.new_matrix(arena, DType.F16, 5, 8)
    plain_rows = put(np.ones((5, 8), np.float32))
    pack = {
        "queue": queue.handle, "packed": matrix.ptr, "dtype": DType.F16, "out": 5, "in": 8,
        "first_row": 0, "src": plain_rows.ptr, "src_dtype": DType.F32, "rows": 5, "overflow": 0,
    }  # fmt: skip
    rows = {
        "first_row=-1 and rows=5 must lie within out=5": {"first_row": -1},
        "first_row=1 and rows=5 must lie within out=5": {"first_row": 1},
        "first_row=0 and rows=-1 must lie within out=5": {"rows": -1},
    }
    refused(
        lib.c.ok_matrix_pack,
        pack,
        rows
        | {
            "queue is null": {"queue": 0},
            "packed is null": {"packed": 0},
            "src is null": {"src": 0},
            "dtype=7 must be": {"dtype": 7},
            "src_dtype=4 must be": {"src_dtype": DType.I32},
            "in=0 must be": {"in": 0},
        },
    )
    unpack = {
        "queue": queue.handle, "dst": plain_rows.ptr, "dst_dtype": DType.F32, "packed": matrix.ptr,
        "dtype": DType.F16, "out": 5, "in": 8, "first_row": 0, "rows": 5,
    }  # fmt: skip
    refused(
        lib.c.ok_matrix_unpack,
        unpack,
        rows
        | {
            "dst is null": {"dst": 0},
            "packed is null": {"packed": 0},
            "dst_dtype=1 must be": {"dst_dtype": DType.F16},
            "dst_dtype=3 must be": {"dst_dtype": DType.Q8_0},
        },
    )
