"""ok_quantize_q8_0 writes ggml's blocks, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from pyengine.native import DType
from tests import reference


@pytest.fixture
def quantize(lib, queue, put):
    """quantize(array, dtype): structured blocks and the number of blocks in `overflow`."""

    def quantize(array, dtype=DType.F32):
        rows, cols = array.shape
        blocks = put(np.full((rows, -(-cols // 32) * 17), 0xABCD, np.uint16))
        overflow = put(np.zeros(1, np.int32))
        lib.c.ok_quantize_q8_0(
            queue.handle, blocks.ptr, put(array).ptr, dtype, rows, cols, overflow.ptr
        )
        return (
            blocks.download(queue).view(reference.Q8_0_BLOCK_TYPE).reshape(rows, -1),
            int(overflow.download(queue)[0]),
        )

    return quantize


def same(got, want):
    return (got.view(np.uint8) == want.view(np.uint8)).all()


@pytest.mark.parametrize("cols", [1, 31, 32, 33, 172, 300, 2048, 2100])
@pytest.mark.parametrize("dtype", [DType.F32, DType.F16, DType.BF16])
def test_blocks_are_those_of_the_reference(quantize, cols, dtype):
    x = np.random.default_rng(cols).normal(size=(21, cols)).astype(np.float32)
    x = reference.stored(x * np.logspace(-6, 4, 21, dtype=np.float32)[:, None], dtype)
    source = {DType.F32: x, DType.F16: x.astype(np.float16), DType.BF16: reference.to_bf16(x)}
    blocks, overflow = quantize(source[dtype], dtype)
    assert same(blocks, reference.quantize_q8_0(x)) and overflow == 0


def test_blocks_are_those_of_the_gguf_package(quantize):
    gguf = pytest.importorskip("gguf", reason="the gguf package is not installed")
    x = np.random.default_rng(1).normal(size=(64, 2048)).astype(np.float32)
    x *= np.float32(10) ** np.random.default_rng(2).integers(-9, 5, (64, 1))
    want = gguf.quants.quantize(x, gguf.GGMLQuantizationType.Q8_0)
    assert same(quantize(x)[0], want.view(reference.Q8_0_BLOCK_TYPE))


def test_halves_round_away_from_zero(quantize):
    x = np.zeros((1, 32), np.float32)
    x[0, :9] = [
        127,
        0.5,
        -0.5,
        1.5,
        2.5,
        -2.5,
        np.nextafter(np.float32(0.5), np.float32(0)),
        126.5,
        -126.5,
    ]
    blocks, _ = quantize(x)
    assert blocks["scale"][0, 0] == 1
    assert blocks["quant"][0, 0, :9].tolist() == [127, 1, -1, 2, 3, -3, 0, 127, -127]


def test_zero_blocks_and_short_blocks_are_padded_with_zeros(quantize):
    x = np.zeros((3, 33), np.float32)
    x[1, 32], x[2] = 5, -0.0
    blocks, overflow = quantize(x)
    assert overflow == 0
    assert (blocks["scale"].astype(np.float32) > 0).tolist() == [[0, 0], [0, 1], [0, 0]]
    assert blocks["quant"][1, 1].tolist() == [127] + [0] * 31
    assert not blocks[[0, 2]].view(np.uint8).any()


def test_numbers_below_every_scale_become_zero_blocks_without_nan(quantize):
    blocks, overflow = quantize(np.full((1, 32), 1e-40, np.float32))
    assert blocks["scale"][0, 0] == 0 and overflow == 0


def test_numbers_beyond_every_scale_are_held_at_the_largest_and_counted(quantize):
    x = np.ones((2, 64), np.float32)
    x[0, 0], x[0, 1], x[1, 40] = 3e38, -1e38, 127 * 65504
    blocks, overflow = quantize(x)
    assert overflow == 1  # the second row's scale is f16's largest number, and holds
    assert blocks["scale"][0, 0] == 65504 and blocks["scale"][1, 1] == 65504
    assert blocks["quant"][0, 0, :3].tolist() == [127, -127, 0]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_block_that_is_not_finite_becomes_nan_and_is_counted(quantize, bad):
    x = np.ones((2, 64), np.float32)
    x[1, 33] = bad
    blocks, overflow = quantize(x)
    assert overflow == 1
    assert np.isnan(blocks["scale"]).tolist() == [[False, False], [False, True]]


def test_wrong_arguments_are_refused_by_name(lib, queue, put, refused):
    blocks, src = put(np.zeros((2, 34), np.uint16)), put(np.ones((2, 64), np.float32))
    refused(
        lib.c.ok_quantize_q8_0,
        dict(
            queue=queue.handle,
            blocks=blocks.ptr,
            src=src.ptr,
            src_dtype=DType.F32,
            rows=2,
            cols=64,
            overflow=0,
        ),  # fmt: skip
        {
            "queue is null": {"queue": 0},
            "blocks is null": {"blocks": 0},
            "src is null": {"src": 0},
            "src_dtype=3 must be": {"src_dtype": DType.Q8_0},
            "rows=-1 must be": {"rows": -1},
            "cols=0 must be": {"cols": 0},
        },
    )
