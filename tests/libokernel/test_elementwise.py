"""ok_gather_rows and ok_count_nonfinite."""

from __future__ import annotations

import numpy as np
import pytest

from pyengine.native import ops


@pytest.mark.parametrize("active, expected_rows", [(None, 5), (3, 3), (0, 0), (-2, 0), (99, 5)])
def test_gather_rows_copies_the_active_rows_and_zeros_unknown_ones(
    queue, put, active, expected_rows
):
    x = np.random.default_rng(0).normal(size=(4, 33)).astype(np.float32)
    index = np.array([3, -1, 0, 4, 3], np.int32)
    y = put(np.full((5, 33), 7, np.float32))
    flag = None if active is None else put(np.array([active], np.int32))
    ops.gather_rows(queue, y, put(x), put(index), flag)
    want = np.full((5, 33), 7, np.float32)
    for row in range(expected_rows):
        want[row] = x[index[row]] if 0 <= index[row] < 4 else 0
    assert (y.download(queue) == want).all()


@pytest.mark.parametrize("rows, cols", [(1, 1), (3, 33), (50, 4001)])
def test_count_nonfinite_adds_to_the_count(queue, put, rows, cols):
    rng = np.random.default_rng(cols)
    x = rng.normal(size=(rows, cols)).astype(np.float32)
    x[rng.random(x.shape) < 0.1] = np.nan
    x[rng.random(x.shape) < 0.1] = -np.inf
    x[0, 0] = np.inf
    count = put(np.array([5], np.int32))
    ops.count_nonfinite(queue, count, put(x))
    assert count.download(queue)[0] == 5 + (~np.isfinite(x)).sum()


def test_count_nonfinite_does_not_look_past_the_active_rows(queue, put):
    x = np.full((4, 3), np.nan, np.float32)
    count, active = put(np.zeros(1, np.int32)), put(np.array([2], np.int32))
    ops.count_nonfinite(queue, count, put(x), active)
    assert count.download(queue)[0] == 6


def test_elementwise_wrong_arguments_are_refused_by_name(lib, queue, put, refused):
    x, word = put(np.ones((2, 8), np.float32)), put(np.zeros(2, np.int32))
    y = put(np.ones((2, 8), np.float32))
    sizes = {
        "queue is null": {"queue": 0},
        "x is null": {"x": 0},
        "rows=-1 must be >= 0": {"rows": -1},
        "cols=0 must be >= 1": {"cols": 0},
    }
    gather = dict(
        queue=queue.handle, y=y.ptr, x=x.ptr, index=word.ptr, active=0, rows=2, x_rows=2, cols=8
    )
    refused(
        lib.c.ok_gather_rows,
        gather,
        sizes
        | {
            "y is null": {"y": 0},
            "index is null": {"index": 0},
            "x_rows=-1 must be >= 0": {"x_rows": -1},
        },
    )
    count = dict(queue=queue.handle, count=word.ptr, x=x.ptr, active=0, rows=2, cols=8)
    refused(lib.c.ok_count_nonfinite, count, sizes | {"count is null": {"count": 0}})
