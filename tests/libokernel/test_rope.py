"""ok_rope against float64."""

from __future__ import annotations

import numpy as np
import pytest

from pyengine.native import ops
from tests import reference
from tests.tolerances import F32, assert_close


@pytest.mark.parametrize(
    "rows, heads, head_dim, rotary_dim",
    [(1, 1, 2, 2), (3, 2, 80, 20), (5, 4, 64, 64), (31, 3, 33, 6), (200, 8, 16, 16)],
)
def test_rope_rotates_the_first_part_of_each_head_paired_at_half(
    queue, put, rows, heads, head_dim, rotary_dim
):
    rng = np.random.default_rng(rows)
    x = rng.normal(size=(rows, heads * head_dim)).astype(np.float32)
    table = reference.rope_table(50, rotary_dim)
    at = rng.integers(0, 50, rows).astype(np.int32)
    buffer = put(x)
    ops.rope(
        queue, buffer, put(table), put(at), heads=heads, head_dim=head_dim, rotary_dim=rotary_dim
    )
    assert_close(buffer.download(queue), reference.rope(x, table, at, heads, rotary_dim), F32)


def test_rope_leaves_rows_outside_the_table_and_neighbouring_columns_alone(queue, put):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(4, 40)).astype(np.float32)
    table = reference.rope_table(8, 8)
    at = np.array([-1, 8, 2**31 - 1, 7], np.int32)
    buffer = put(x)
    ops.rope(queue, buffer.columns(8, 24), put(table), put(at), heads=2, head_dim=8, rotary_dim=8)
    got = buffer.download(queue)
    assert (got[:3] == x[:3]).all()
    assert (got[:, :8] == x[:, :8]).all() and (got[:, 24:] == x[:, 24:]).all()
    assert_close(got[3:, 8:24], reference.rope(x[3:, 8:24], table, at[3:], 2, 8), F32)


def test_rope_at_position_zero_changes_nothing(queue, put):
    x = np.random.default_rng(2).normal(size=(1, 64)).astype(np.float32)
    buffer = put(x)
    row = put(np.zeros(1, np.int32))
    ops.rope(
        queue, buffer, put(reference.rope_table(1, 64)), row, heads=1, head_dim=64, rotary_dim=64
    )
    assert (buffer.download(queue) == x).all()


def test_rope_wrong_arguments_are_refused_by_name(lib, queue, put, refused):
    x, table, row = (put(np.ones(shape, kind)) for shape, kind in [
        ((2, 128), np.float32), ((4, 64), np.float32), ((2,), np.int32)])  # fmt: skip
    good = dict(
        queue=queue.handle, x=x.ptr, stride=128, table=table.ptr, table_rows=4, table_row=row.ptr,
        rows=2, heads=2, head_dim=64, rotary_dim=64,
    )  # fmt: skip
    refused(
        lib.c.ok_rope,
        good,
        {
            "queue is null": {"queue": 0},
            "x is null": {"x": 0},
            "table is null": {"table": 0},
            "table_row is null": {"table_row": 0},
            "rows=-1 must be >= 0": {"rows": -1},
            "table_rows=0 must be >= 1": {"table_rows": 0},
            "heads=0 must be >= 1": {"heads": 0},
            "head_dim=0 must be >= 1": {"head_dim": 0},
            "rotary_dim=50 must be even, >= 2 and <= head_dim=48": {
                "rotary_dim": 50,
                "head_dim": 48,
            },
            "rotary_dim=7 must be even": {"rotary_dim": 7},
            "rotary_dim=0 must be even": {"rotary_dim": 0},
            "stride=127 must be >= heads * head_dim = 128": {"stride": 127},
        },
    )
