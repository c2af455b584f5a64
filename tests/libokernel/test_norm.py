"""ok_rms_norm and ok_layer_norm against float64."""

from __future__ import annotations

import numpy as np
import pytest

from pyengine.native import ops
from tests import reference
from tests.tolerances import F32, assert_close

SHAPES = [(1, 1, 1), (1, 1, 31), (3, 1, 33), (2, 4, 80), (5, 3, 17), (7, 1, 2048), (300, 2, 64)]


def _inputs(rows, groups, cols, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(0.3, 2, (rows, groups * cols)).astype(np.float32)
    weight, bias = rng.normal(1, 0.5, (2, groups * cols)).astype(np.float32)
    return x, weight, bias, rng.normal(size=x.shape).astype(np.float32)


@pytest.mark.parametrize("rows, groups, cols", SHAPES)
@pytest.mark.parametrize("with_residual", [False, True])
def test_rms_norm_matches_float64(queue, put, rows, groups, cols, with_residual):
    x, weight, _, residual = _inputs(rows, groups, cols)
    extra = residual if with_residual else None
    y = put(np.full_like(x, np.nan))
    ops.rms_norm(
        queue, y, put(x), put(weight), eps=1e-5, groups=groups,
        residual=put(residual) if with_residual else None,
    )  # fmt: skip
    assert_close(y.download(queue), reference.rms_norm(x, weight, 1e-5, groups, extra), F32)


@pytest.mark.parametrize("rows, groups, cols", SHAPES)
@pytest.mark.parametrize("with_bias, with_residual", [(True, False), (False, False), (True, True)])
def test_layer_norm_matches_float64(queue, put, rows, groups, cols, with_bias, with_residual):
    x, weight, bias, residual = _inputs(rows, groups, cols, seed=1)
    y = put(np.full_like(x, np.nan))
    ops.layer_norm(
        queue, y, put(x), put(weight), put(bias) if with_bias else None, eps=1e-5, groups=groups,
        residual=put(residual) if with_residual else None,
    )  # fmt: skip
    want = reference.layer_norm(
        x, weight, bias if with_bias else None, 1e-5, groups, residual if with_residual else None
    )
    assert_close(y.download(queue), want, F32)


def test_layer_norm_keeps_its_digits_far_from_zero(queue, put):
    # In one pass, E[x^2] - E[x]^2 would cancel to nothing in f32 here.
    x = (4096 + np.arange(64, dtype=np.float32)[None] / 64).repeat(2, axis=0)
    one = np.ones(64, np.float32)
    y = put(np.zeros_like(x))
    ops.layer_norm(queue, y, put(x), put(one), None, eps=1e-5)
    # The mean is rounded to 2^-12 of 4096's last place: 2.4e-4 of this spread of 0.29 at most.
    assert np.abs(y.download(queue) - reference.layer_norm(x, one, None, 1e-5)).max() < 1e-3


def test_norm_of_zeros_is_zero(queue, put):
    x = np.zeros((2, 40), np.float32)
    one = np.ones(40, np.float32)
    y = put(np.full_like(x, np.nan))
    ops.rms_norm(queue, y, put(x), put(one), eps=1e-6)
    assert not y.download(queue).any()
    ops.layer_norm(queue, y, put(x), put(one), None, eps=1e-6)
    assert not y.download(queue).any()


def test_norm_works_in_place_and_on_columns_of_a_wider_buffer(queue, put):
    x, weight, bias, residual = _inputs(5, 2, 24)
    wide = np.full((5, 100), 7, np.float32)
    wide[:, 10:58] = x
    buffer = put(wide)
    view = buffer.columns(10, 58)
    ops.layer_norm(queue, view, view, put(weight), put(bias), eps=1e-5, groups=2)
    got = buffer.download(queue)
    assert_close(got[:, 10:58], reference.layer_norm(x, weight, bias, 1e-5, 2), F32)
    assert (got[:, :10] == 7).all() and (got[:, 58:] == 7).all()
    stream = put(residual)
    ops.rms_norm(queue, stream, put(x), put(weight), eps=1e-5, residual=stream)
    assert_close(
        stream.download(queue), reference.rms_norm(x, weight, 1e-5, residual=residual), F32
    )


def test_a_row_is_the_same_alone_and_among_others_on_any_number_of_threads(lib, queue, put):
    x, weight, bias, _ = _inputs(129, 3, 50)
    results = []
    for threads in (1, 2, 5) if lib.backend == "cpu" else (1,):
        if lib.backend == "cpu":
            lib.c.ok_set_threads(threads)
        y = put(np.zeros_like(x))
        ops.layer_norm(queue, y, put(x), put(weight), put(bias), eps=1e-5, groups=3)
        results.append(y.download(queue))
    alone = put(np.zeros_like(x[:1]))
    for row in (0, 77, 128):
        ops.layer_norm(
            queue, alone, put(x[row : row + 1]), put(weight), put(bias), eps=1e-5, groups=3
        )
        results.append(results[0].copy())
        results[-1][row] = alone.download(queue)[0]
    for other in results[1:]:
        assert other.tobytes() == results[0].tobytes()


def test_no_rows_is_no_work(queue, put):
    empty = put(np.zeros((0, 8), np.float32))
    ops.rms_norm(queue, empty, empty, put(np.ones(8, np.float32)), eps=1e-5)


@pytest.mark.parametrize("name", ["ok_rms_norm", "ok_layer_norm"])
def test_wrong_arguments_are_refused_by_name(lib, queue, put, refused, name):
    x, weight = put(np.ones((2, 12), np.float32)), put(np.ones(12, np.float32))
    good = dict(
        queue=queue.handle, y=x.ptr, y_stride=12, x=x.ptr, x_stride=12, weight=weight.ptr,
        residual=0, residual_stride=0, rows=2, groups=3, cols=4, eps=1e-5,
    )  # fmt: skip
    if name == "ok_layer_norm":
        good["bias"] = 0
    refused(
        getattr(lib.c, name),
        good,
        {
            "queue is null": {"queue": 0},
            "x is null": {"x": 0},
            "y is null": {"y": 0},
            "weight is null": {"weight": 0},
            "rows=-1 must be >= 0": {"rows": -1},
            "groups=0 must be positive": {"groups": 0},
            "cols=0 must be positive": {"cols": 0},
            "x_stride=11 must be >= groups * cols = 12": {"x_stride": 11},
            "y_stride=11 must be >= groups * cols = 12": {"y_stride": 11},
            "residual_stride=0 must be >= groups * cols = 12": {"residual": x.ptr},
            "eps=-1 must be": {"eps": -1.0},
        },
    )
