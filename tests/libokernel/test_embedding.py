"""ok_embedding reads rows of a packed matrix exactly."""

from __future__ import annotations

import numpy as np
import pytest

from pyengine.native import DType, ops
from tests import reference

STORED = [DType.F32, DType.F16, DType.BF16, DType.Q8_0]


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("vocab, cols", [(1, 1), (33, 31), (300, 64), (17, 1100)])
def test_embedding_gives_the_stored_rows_bit_for_bit(queue, arena, put, dtype, vocab, cols):
    rng = np.random.default_rng(cols)
    table = rng.normal(size=(vocab, cols)).astype(np.float32)
    ids = np.array([0, vocab - 1, -1, vocab, 2**31 - 1, vocab // 2], np.int32)
    y = put(np.full((len(ids), cols), np.nan, np.float32))
    ops.embedding(queue, y, ops.pack_matrix(queue, arena, table, dtype), put(ids))
    want = reference.embedding(reference.stored(table, dtype), ids)
    assert (y.download(queue) == want).all()


@pytest.mark.parametrize("in_place", [False, True])
def test_embedding_adds_a_residual_even_in_place(queue, arena, put, in_place):
    rng = np.random.default_rng(1)
    table, residual = rng.normal(size=(40, 1300)), rng.normal(size=(40, 1300))
    table, residual = table.astype(np.float32), residual.astype(np.float32)
    ids = rng.integers(-1, 41, 40).astype(np.int32)
    start = put(residual)
    y = start if in_place else put(np.zeros_like(residual))
    ops.embedding(queue, y, ops.pack_matrix(queue, arena, table, DType.F32), put(ids), start)
    want = reference.embedding(table, ids).astype(np.float32) + residual
    assert (y.download(queue) == want).all()


def test_embedding_wrong_arguments_are_refused_by_name(lib, queue, arena, put, refused):
    table = ops.pack_matrix(queue, arena, np.ones((5, 8), np.float32), DType.F32)
    y, ids = put(np.ones((2, 8), np.float32)), put(np.zeros(2, np.int32))
    good = dict(
        queue=queue.handle, y=y.ptr, table=table.ptr, dtype=0, ids=ids.ptr, residual=0,
        rows=2, vocab=5, cols=8,
    )  # fmt: skip
    refused(
        lib.c.ok_embedding,
        good,
        {
            "queue is null": {"queue": 0},
            "y is null": {"y": 0},
            "table is null": {"table": 0},
            "ids is null": {"ids": 0},
            "dtype=4 must be f32, f16, bf16 or q8_0": {"dtype": 4},
            "rows=-1 must be >= 0": {"rows": -1},
            "vocab=0 must be >= 1": {"vocab": 0},
            "cols=0 must be >= 1": {"cols": 0},
        },
    )
