"""ok_activate and ok_activate_gated against float64."""

from __future__ import annotations

import numpy as np
import pytest

from pyengine.native import Activation, ops
from tests import reference
from tests.tolerances import ELEMENTWISE, Tolerance, assert_close

# In the tails exp's argument is rounded before exp sees it: |u| * 2^-24, |u| up to 88.
TAIL = Tolerance(2e-5, 0, "exp of an argument near -88, itself rounded to 2^-24")


@pytest.mark.parametrize("kind", Activation)
def test_activation_matches_float64_near_zero(queue, put, kind):
    x = np.linspace(-2, 2, 4001, dtype=np.float32)
    y = put(np.zeros_like(x))
    ops.activate(queue, y, put(x), kind)
    assert_close(y.download(queue), reference.activate(x, kind), ELEMENTWISE)


@pytest.mark.parametrize("kind", Activation)
def test_activation_keeps_its_digits_in_the_tails(queue, put, kind):
    x = np.concatenate([np.linspace(-110, 110, 8191), [-1e30, 1e30, -0.0, 1e-40]]).astype(
        np.float32
    )
    y = put(np.zeros_like(x))
    ops.activate(queue, y, put(x), kind)
    assert_close(y.download(queue), reference.activate(x, kind), TAIL)


@pytest.mark.parametrize("kind", Activation)
def test_activation_lets_nan_and_infinity_through(queue, put, kind):
    x = np.array([np.nan, np.inf, 1.0], np.float32)
    y = put(np.zeros_like(x))
    ops.activate(queue, y, put(x), kind)
    got = y.download(queue)
    assert np.isnan(got[0]) and got[1] == np.inf and np.isfinite(got[2])


@pytest.mark.parametrize("n", [1, 3, 15, 16, 17, 31, 33])
def test_the_last_few_values_are_treated_like_all(queue, put, n):
    x = np.full(n, 0.7, np.float32)
    guarded = put(np.full(64, 9, np.float32))
    ops.activate(queue, guarded.rows(0, n), put(x), Activation.SILU)
    got = guarded.download(queue)
    assert len(set(got[:n].tolist())) == 1 and (got[n:] == 9).all()


@pytest.mark.parametrize("kind", Activation)
@pytest.mark.parametrize("rows, cols", [(1, 1), (3, 33), (2, 112), (65, 300)])
def test_gated_activation_multiplies_the_second_half(queue, put, kind, rows, cols):
    x = np.random.default_rng(cols).normal(0, 2, (rows, 2 * cols)).astype(np.float32)
    y = put(np.full((rows, cols), np.nan, np.float32))
    ops.activate_gated(queue, y, put(x), kind)
    assert_close(y.download(queue), reference.activate_gated(x, kind), TAIL)


def test_activation_works_in_place_with_the_same_bits_on_any_number_of_threads(lib, queue, put):
    x = np.random.default_rng(3).normal(0, 3, 40001).astype(np.float32)
    results = set()
    for threads in (1, 2, 3) if lib.backend == "cpu" else (1,):
        if lib.backend == "cpu":
            lib.c.ok_set_threads(threads)
        buffer = put(x)
        ops.activate(queue, buffer, buffer, Activation.GELU_TANH)
        results.add(buffer.download(queue).tobytes())
    assert len(results) == 1


def test_activation_wrong_arguments_are_refused_by_name(lib, queue, put, refused):
    x = put(np.ones((2, 8), np.float32))
    common = {
        "queue is null": {"queue": 0},
        "y is null": {"y": 0},
        "x is null": {"x": 0},
        "activation=4 must be between 0 and 3": {"activation": 4},
    }
    plain = dict(queue=queue.handle, y=x.ptr, x=x.ptr, activation=0, n=8)
    refused(lib.c.ok_activate, plain, common | {"n=-1 must be >= 0": {"n": -1}})
    y = put(np.ones((2, 4), np.float32))
    gated = dict(queue=queue.handle, y=y.ptr, x=x.ptr, activation=0, rows=2, cols=4)
    refused(
        lib.c.ok_activate_gated,
        gated,
        common | {"rows=-1 must be >= 0": {"rows": -1}, "cols=0 must be >= 1": {"cols": 0}},
    )
