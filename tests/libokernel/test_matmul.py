"""ok_matmul against float64, and the promise: a row of output depends on its own inputs alone."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from pyengine.errors import InvalidArgument, Unavailable, Unsupported
from pyengine.native import DType, ops
from pyengine.native.bindings import address, uint64_cell
from tests import reference
from tests.tolerances import F32, ON_CPU, ON_GPU, assert_close

AWKWARD = [1, 2, 15, 16, 17, 31, 33, 111, 113, 172, 300, 301]
# Each size once as outputs and once as inputs, never both at the same place of the list.
SHAPES = list(zip(AWKWARD, AWKWARD[5:] + AWKWARD[:5], strict=True)) + [(64, 1100)]
# Weights, and whether the activations become int16.
KINDS = [
    pytest.param(DType.F32, False, id="f32"),
    pytest.param(DType.F16, False, id="f16"),
    pytest.param(DType.BF16, False, id="bf16"),
    pytest.param(DType.Q8_0, False, id="q8_0-f32"),
    pytest.param(DType.Q8_0, True, id="q8_0-int16"),
]


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def scratch_bytes(lib, dtype, rows, out, inner):
    cell = uint64_cell()
    lib.c.ok_matmul_scratch_bytes(dtype, rows, out, inner, address(cell))
    return cell.value


def round_activations(queue, on):
    """Chooses how q8_0 meets activations; skips what a build cannot do."""
    try:
        queue.set_quantized_activations(on)
    except Unsupported as error:
        pytest.skip(str(error))


@pytest.fixture
def queue(queue, arena):
    """A queue with scratch for every case here."""
    queue.set_scratch(arena, 8 << 20)
    return queue


@pytest.fixture
def product(queue, arena, put):
    """product(x, matrix, bias, residual): y as numpy, through buffers that start as NaN."""

    def product(x, matrix, bias=None, residual=None):
        with arena.scope():
            y = put(np.full((len(x), matrix.out), np.nan, np.float32))
            given = [None if a is None else put(a) for a in (bias, residual)]
            ops.matmul(queue, y, put(x), matrix, *given)
            return y.download(queue)

    return product


def int16_oracle(x, blocks):
    """What the CPU's integer dots promise, to the last bit: x rounded per row and 32 to nearest
    even in float32, exact integer sums, sum * weight scale * activation scale added in float32."""
    rows, count = len(x), blocks.shape[1]
    padded = np.zeros((rows, count * 32), np.float32)
    padded[:, : x.shape[1]] = x
    groups = padded.reshape(rows, count, 32)
    scale = np.abs(groups).max(axis=2) / np.float32(32639)
    with np.errstate(divide="ignore"):
        inverse = np.where(scale > 0, np.float32(1) / scale, np.float32(0))
    quants = np.rint(groups * inverse[..., None]).astype(np.int32)
    y = np.zeros((rows, len(blocks)), np.float32)
    for block in range(count):
        dots = quants[:, block] @ blocks["quant"][:, block].astype(np.int32).T
        weight_scale = blocks["scale"][:, block].astype(np.float32)
        y += dots.astype(np.float32) * weight_scale * scale[:, block, None]
    return y


def rounding_bound(x, weight):
    """What rounding x to int16 may cost: half a step of its block, times the weights it meets."""
    rows, inner = x.shape
    padded = np.zeros((rows, -(-inner // 32) * 32))
    padded[:, :inner] = np.abs(x)
    step = padded.reshape(rows, -1, 32).max(axis=2).repeat(32, axis=1)[:, :inner] / 32639
    return step / 2 @ np.abs(weight).astype(np.float64).T


@pytest.mark.parametrize("dtype, quantized", KINDS)
@pytest.mark.parametrize("out, inner", SHAPES)
def test_matmul_matches_float64_at_awkward_sizes(
    lib, queue, arena, product, dtype, quantized, out, inner
):
    round_activations(queue, quantized)
    weight, bias = normal(1, out, inner), normal(2, out)
    matrix = ops.pack_matrix(queue, arena, weight, dtype)
    weight = reference.stored(weight, dtype)
    for rows in (1, 3, 17):
        x, residual = normal(3, rows, inner), normal(4, rows, out)
        for added in ((None, None), (bias, None), (bias, residual)):
            got, want = product(x, matrix, *added), reference.matmul(x, weight, *added)
            if quantized:
                allowed = rounding_bound(x, weight) + 1e-5 * np.abs(want).max()
                assert (np.abs(got - want) <= allowed).all()
            else:
                table = ON_CPU if lib.backend == "cpu" else ON_GPU
                assert_close(got, want, F32 if dtype == DType.Q8_0 else table[dtype])


@pytest.mark.parametrize("dtype, quantized", KINDS)
@pytest.mark.parametrize("out, inner", [(301, 172), (48, 3000)])
def test_a_row_is_the_same_alone_and_among_others(
    lib, queue, arena, product, dtype, quantized, out, inner
):
    round_activations(queue, quantized)
    matrix = ops.pack_matrix(queue, arena, normal(1, out, inner), dtype)
    x = normal(2, 150, inner)
    whole = product(x, matrix)
    for rows in (1, 2, 3, 4, 5, 6, 7, 12, 13, 64, 129):
        for first in {0, 150 - rows}:
            got, want = product(x[first : first + rows], matrix), whole[first : first + rows]
            if lib.backend == "cpu":
                assert (got == want).all()
            else:
                assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()


@pytest.mark.parametrize("dtype", [DType.F32, DType.F16, DType.BF16, DType.Q8_0])
@pytest.mark.parametrize("out, inner", [(301, 172), (48, 3000), (33, 45)])
def test_a_deterministic_row_is_the_same_bits_in_any_company(
    queue, arena, product, dtype, out, inner
):
    queue.set_deterministic(True)
    matrix, x = ops.pack_matrix(queue, arena, normal(1, out, inner), dtype), normal(2, 150, inner)
    bias, residual = normal(3, out), normal(4, 150, out)
    whole = product(x, matrix, bias, residual)
    for rows in (1, 2, 7, 16, 17, 64, 65, 130):
        for first in {0, 3, 150 - rows}:
            part = slice(first, first + rows)
            assert (product(x[part], matrix, bias, residual[part]) == whole[part]).all()


@pytest.mark.parametrize("dtype, quantized", KINDS)
@pytest.mark.parametrize("rows", [1, 7, 150])
def test_threads_change_no_bit(lib, queue, arena, product, dtype, quantized, rows):
    if lib.backend != "cpu":
        pytest.skip("threads are the CPU build's")
    round_activations(queue, quantized)
    matrix = ops.pack_matrix(queue, arena, normal(1, 301, 333), dtype)
    x, results = normal(2, rows, 333), []
    for threads in (1, 2, 3, 16):
        lib.c.ok_set_threads(threads)
        results.append(product(x, matrix))
    assert all((result == results[0]).all() for result in results)


@pytest.mark.parametrize("dtype, quantized", KINDS)
def test_every_path_with_fused_multiply_add_gives_the_same_bits(
    lib, queue, arena, product, dtype, quantized
):
    if lib.backend != "cpu":
        pytest.skip("paths are the CPU build's")
    round_activations(queue, quantized)
    matrix = ops.pack_matrix(queue, arena, normal(1, 113, 600), dtype)
    x = normal(2, 20, 600)
    got = product(x, matrix)
    if lib.c.ok_path() == b"portable" and not quantized:
        return  # rounds the product and the sum apart; integer dots have nothing to fuse
    for path in lib.targets:
        if path == "portable" and not quantized:
            continue
        with contextlib.suppress(Unavailable):  # this CPU has no such instructions
            lib.c.ok_set_path(path.encode())
        assert (product(x, matrix) == got).all(), path


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("out, inner", [(17, 33), (300, 301), (33, 1)])
def test_int16_products_are_those_of_the_oracle(queue, arena, put, product, rows, out, inner):
    blocks = reference.quantize_q8_0(normal(1, out, inner))
    blocks["quant"][:, 0, :4] = -128  # no quantizer writes it, yet a file may hold it
    blocks["quant"][0, 0, :] = -128
    matrix = ops.new_matrix(arena, DType.Q8_0, out, inner)
    source = put(blocks.view(np.uint16).reshape(out, -1))
    ops.pack_rows(queue, matrix, 0, source, DType.Q8_0, out)
    x = normal(2, rows, inner)
    x[0] = np.sign(x[0]) + (x[0] == 0)  # quantised, all of it is 32639 or -32639
    blocks["quant"].reshape(out, -1)[:, inner:] = 0
    round_activations(queue, True)
    assert (product(x, matrix) == int16_oracle(x, blocks)).all()


@pytest.mark.parametrize("dtype, quantized", KINDS)
def test_residual_may_be_the_output(queue, arena, put, dtype, quantized, product):
    round_activations(queue, quantized)
    matrix = ops.pack_matrix(queue, arena, normal(1, 113, 1100), dtype)
    x, residual = normal(2, 150, 1100), normal(3, 150, 113)
    y = put(residual)
    ops.matmul(queue, y, put(x), matrix, residual=y)
    assert (y.download(queue) == product(x, matrix, residual=residual)).all()


@pytest.mark.parametrize("dtype, quantized", KINDS)
def test_rows_past_active_are_neither_read_nor_written(
    queue, arena, put, product, dtype, quantized
):
    round_activations(queue, quantized)
    matrix = ops.pack_matrix(queue, arena, normal(1, 40, 70), dtype)
    x = normal(2, 9, 70)
    y, active, rows = put(np.full((9, 40), 7, np.float32)), put(np.array([9], np.int32)), put(x)
    with queue.record() as program:
        ops.matmul(queue, y, rows, matrix, active=active)
    whole = product(x, matrix)
    for count in (9, 4, 1, 0, -5, 100):
        y.upload(queue, np.full((9, 40), 7, np.float32))
        active.upload(queue, np.array([count], np.int32))
        program.replay()
        got, kept = y.download(queue), min(max(count, 0), 9)
        np.testing.assert_allclose(got[:kept], whole[:kept], rtol=0, atol=1e-5 * abs(whole).max())
        assert (got[kept:] == 7).all()
    program.close()


def test_partial_sums_beyond_f16_are_held(lib, queue, arena, product):
    weight = np.array([[200] * 1024 + [-200] * 1024 + [1]], np.float32)
    matrix = ops.pack_matrix(queue, arena, weight, DType.F16)
    for rows in (1, 2, 4, 5, 12, 13, 64, 130):
        assert (product(np.ones((rows, 2049), np.float32), matrix) == 1).all()
    if lib.backend != "cpu":  # as many rows and outputs as its widest tiles ask for
        wide = ops.pack_matrix(queue, arena, np.repeat(weight, 2816, axis=0), DType.F16)
        assert (product(np.ones((257, 2049), np.float32), wide) == 1).all()


@pytest.mark.parametrize("dtype, quantized", KINDS)
@pytest.mark.parametrize("inner", [1, 33, 172])
def test_zeros_give_zeros(queue, arena, product, dtype, quantized, inner):
    round_activations(queue, quantized)
    weight, x = normal(1, 40, inner), normal(2, 6, inner)
    weight[7], x[3] = 0, 0
    y = product(x, ops.pack_matrix(queue, arena, weight, dtype))
    assert (y[:, 7] == 0).all() and (y[3] == 0).all() and np.isfinite(y).all()


@pytest.mark.parametrize("rows", [3, 17, 150])
def test_q8_0_keeps_what_rows_and_blocks_of_any_size_hold(queue, arena, product, rows):
    """Each row is judged by its own largest; rows lie 2^-100 to 2^100 apart, blocks up to 2^10."""
    round_activations(queue, False)
    weight, x = normal(1, 40, 160), normal(2, rows, 160)
    x *= np.exp2(np.random.default_rng(3).integers(-100, 100, (rows, 1))).astype(np.float32)
    x *= np.exp2(np.random.default_rng(4).integers(0, 10, 5).repeat(32)).astype(np.float32)
    want = reference.matmul(x, reference.stored(weight, DType.Q8_0))
    got = product(x, ops.pack_matrix(queue, arena, weight, DType.Q8_0))
    assert (np.abs(got - want).max(axis=1) <= 2e-6 * np.abs(want).max(axis=1)).all()


@pytest.mark.parametrize("quantized", [False, True])
def test_huge_weights_and_activations_give_no_nan_in_q8_0(queue, arena, product, quantized):
    round_activations(queue, quantized)
    weight, x = normal(1, 20, 64), normal(2, 3, 64)
    weight[0, 5], weight[1] = 3e38, 1e30 * weight[1]  # beyond the range of f16 scales
    x[1] *= 1e-40  # scales are subnormal
    x[2] = 0
    assert np.isfinite(product(x, ops.pack_matrix(queue, arena, weight, DType.Q8_0))).all()
    weight[:2] = 1
    x[2] = 3e34
    assert np.isfinite(product(x, ops.pack_matrix(queue, arena, weight, DType.Q8_0))).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("rows", [8, 40, 150])
@pytest.mark.parametrize("dtype, quantized", KINDS)
def test_what_is_not_finite_stays_in_its_row(queue, arena, product, dtype, quantized, rows, bad):
    round_activations(queue, quantized)
    x = normal(2, rows, 100)
    x[5, 99] = bad
    y = product(x, ops.pack_matrix(queue, arena, normal(1, 33, 100), dtype))
    assert (~np.isfinite(y)).all(axis=1).tolist() == [r == 5 for r in range(rows)]
    assert np.isfinite(np.delete(y, 5, axis=0)).all()


@pytest.mark.parametrize("dtype, quantized", KINDS)
def test_nothing_past_a_row_is_data(queue, arena, put, dtype, quantized):
    round_activations(queue, quantized)
    weight, x = normal(1, 17, 33), normal(2, 1, 33)
    if dtype == DType.Q8_0:  # a short last block whose padding holds rubbish
        blocks = reference.quantize_q8_0(weight)
        blocks["quant"][:, 1, 1:] = 99
        source = put(blocks.view(np.uint16).reshape(17, -1))
        matrix = ops.new_matrix(arena, DType.Q8_0, 17, 33)
        ops.pack_rows(queue, matrix, 0, source, DType.Q8_0, 17)
    else:
        matrix = ops.pack_matrix(queue, arena, weight, dtype)
    y = put(np.full((2, 17), 7, np.float32))
    ops.matmul(queue, y.rows(0, 1), put(np.vstack([x, np.full_like(x, np.nan)])).rows(0, 1), matrix)
    got = y.download(queue)
    want = reference.matmul(x, reference.stored(weight, dtype))
    assert np.abs(got[:1] - want).max() < 0.02 * np.abs(want).max()  # q8_0's and bf16's own error
    assert (got[1] == 7).all()


def test_a_block_contains_the_damage_of_an_outlier(queue, arena, product):
    # One huge column that meets a zero: with one scale a row it costs most of the rest.
    queue.set_quantized_activations(False)
    weight, x = np.float32(0.02) * normal(1, 64, 172), normal(2, 32, 172)
    weight[:, 7], x[:, 7] = 8, 0
    want = reference.matmul(x, weight)

    def error(y):
        return np.linalg.norm(y - want) / np.linalg.norm(want)

    scale = np.abs(weight).max(axis=1, keepdims=True) / 127
    by_row = error(reference.matmul(x, np.rint(weight / scale) * scale))
    by_block = error(product(x, ops.pack_matrix(queue, arena, weight, DType.Q8_0)))
    assert by_block < 0.5 and by_row > 0.75


def test_no_rows_do_nothing(queue, arena, put):
    matrix = ops.pack_matrix(queue, arena, normal(1, 5, 8), DType.F32)
    empty = put(np.zeros((1, 8), np.float32)).rows(0, 0)
    ops.matmul(queue, put(np.zeros((1, 5), np.float32)).rows(0, 0), empty, matrix)


def test_wrong_arguments_are_refused_by_name(lib, queue, arena, put, refused):
    matrix = ops.pack_matrix(queue, arena, np.ones((5, 8), np.float32), DType.F32)
    x, y = put(np.ones((3, 8), np.float32)), put(np.ones((3, 5), np.float32))
    good = dict(
        queue=queue.handle, y=y.ptr, x=x.ptr, weight=matrix.ptr, dtype=DType.F32, bias=0,
        residual=0, active=0, rows=3, out=5, **{"in": 8},
    )  # fmt: skip
    refused(
        lib.c.ok_matmul,
        good,
        {
            "queue is null": {"queue": 0},
            "y is null": {"y": 0},
            "x is null": {"x": 0},
            "weight is null": {"weight": 0},
            "dtype=4 must be": {"dtype": DType.I32},
            "rows=-1 must be": {"rows": -1},
            "out=0 must be": {"out": 0},
            "in=0 must be": {"in": 0},
            "x and y must not overlap": {"y": x.ptr},
        },
    )


def test_too_little_scratch_is_refused_with_both_sizes(lib, arena, queue, put):
    matrix = ops.pack_matrix(queue, arena, np.ones((5, 64), np.float32), DType.Q8_0)
    needed = scratch_bytes(lib, DType.Q8_0, 20, 5, 64)
    if needed == 0:
        pytest.skip("this build needs no scratch")
    with arena.scope():
        x, y = put(np.ones((20, 64), np.float32)), put(np.zeros((20, 5), np.float32))
        lib.c.ok_queue_set_scratch(queue.handle, y.ptr, 16)
        with pytest.raises(InvalidArgument, match=r"scratch of 16 bytes must be >= \d+"):
            ops.matmul(queue, y, x, matrix)
        lib.c.ok_queue_set_scratch(queue.handle, arena.alloc_bytes(needed), needed)
        ops.matmul(queue, y, x, matrix)
        assert (np.abs(y.download(queue) - 64) < 0.1).all()
