"""ok_matmul_fused against float64, and against the single operations that it stands for."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from pyengine.errors import InvalidArgument
from pyengine.native import Activation, DType, NormKind, ops
from tests import reference
from tests.tolerances import F32, ON_CPU, ON_GPU, Tolerance, assert_close

EPS = 1e-5
DTYPES = [DType.F32, DType.F16, DType.BF16, DType.Q8_0]
NORMS = [None, "rms", "layer", "layer without bias"]
EPILOGUES = [None, "activate", "gated"]


def product_of_two(tolerance):
    """A gate and what it gates are both off, and large where they meet."""
    return Tolerance(3 * tolerance.relative, 3 * tolerance.of_largest, tolerance.reason)


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.fixture(autouse=True)
def in_one_launch(monkeypatch):
    """Also where a GPU build would launch the operations apart."""
    monkeypatch.setenv("OKERNEL_FUSED", "1")


@pytest.fixture
def queue(queue, arena):
    """A queue with scratch for every case here."""
    queue.set_scratch(arena, 8 << 20)
    return queue


class Case:
    """One call: its numbers, what float64 makes of them, and its results."""

    def __init__(self, norm, epilogue, dtype, rows, out, inner, activation=Activation.SILU):
        self.norm, self.epilogue, self.activation = norm, epilogue, activation
        self.dtype, self.rows, self.out, self.inner = dtype, rows, out, inner
        self.x, self.weight, self.bias = (
            3 * normal(1, rows, inner), normal(2, out, inner), normal(3, out)
        )  # fmt: skip
        self.x[0] += 5  # a mean far from zero
        self.norm_weight, self.norm_bias = 1 + normal(4, inner) / 4, normal(5, inner)
        if norm != "layer":
            self.norm_bias = None

    def expected(self):
        """float64 (rows, out) or (rows, out / 2)."""
        x = self.x.astype(np.float64)
        if self.norm == "rms":
            x = reference.rms_norm(self.x, self.norm_weight, EPS)
        elif self.norm:
            x = reference.layer_norm(self.x, self.norm_weight, self.norm_bias, EPS)
        y = reference.matmul(x, reference.stored(self.weight, self.dtype), self.bias)
        if self.epilogue == "gated":
            gate, up = np.split(y, 2, axis=1)
            return reference.activate(gate, self.activation) * up
        return reference.activate(y, self.activation) if self.epilogue else y

    def run(self, queue, arena, put, *, fused):
        """What the library makes of them."""
        matrix = ops.pack_matrix(queue, arena, self.weight, self.dtype)
        gated = self.epilogue == "gated"
        blank = np.full((self.rows, self.out), np.nan, np.float32)
        y, product = put(blank[:, : self.out // 2 if gated else self.out]), put(blank)
        x, bias = put(self.x), put(self.bias)
        normed = put(np.full_like(self.x, np.nan))
        weight = put(self.norm_weight)
        norm_bias = None if self.norm_bias is None else put(self.norm_bias)
        kind = NormKind.RMS if self.norm == "rms" else NormKind.LAYER
        if fused:
            ops.matmul_fused(
                queue, y, x, matrix, bias,
                norm=ops.Norm(kind, weight, norm_bias, EPS) if self.norm else None,
                normed=normed if self.norm else None,
                activation=self.activation if self.epilogue else None,
                product=product if gated else None,
            )  # fmt: skip
            return y.download(queue)
        if self.norm == "rms":
            ops.rms_norm(queue, normed, x, weight, eps=EPS)
        elif self.norm:
            ops.layer_norm(queue, normed, x, weight, norm_bias, eps=EPS)
        ops.matmul(queue, product if gated else y, normed if self.norm else x, matrix, bias)
        if gated:
            ops.activate_gated(queue, y, product, self.activation)
        elif self.epilogue:
            ops.activate(queue, y, y, self.activation)
        return y.download(queue)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm, epilogue", list(itertools.product(NORMS, EPILOGUES)))
def test_it_is_what_the_single_operations_are(lib, queue, arena, put, norm, epilogue, dtype):
    for rows, out, inner in [(1, 2, 1), (2, 66, 33), (3, 300, 172), (16, 34, 301), (17, 64, 96)]:
        with arena.scope():
            case = Case(norm, epilogue, dtype, rows, out, inner)
            got = case.run(queue, arena, put, fused=True)
            if lib.backend == "cpu":
                assert (got == case.run(queue, arena, put, fused=False)).all()
            table = ON_CPU if lib.backend == "cpu" else ON_GPU
            assert_close(got, case.expected(), product_of_two(table[dtype]))


@pytest.mark.parametrize("activation", list(Activation))
@pytest.mark.parametrize("epilogue", ["activate", "gated"])
def test_every_activation(queue, arena, put, epilogue, activation):
    case = Case("rms", epilogue, DType.F32, 5, 50, 70, activation)
    assert_close(case.run(queue, arena, put, fused=True), case.expected(), product_of_two(F32))


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("rows", [1, 4])
def test_long_rows_are_normed_whole(queue, arena, put, norm, rows):
    case = Case(norm, "gated", DType.F32, rows, 18, 9000)
    assert_close(case.run(queue, arena, put, fused=True), case.expected(), product_of_two(F32))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("norm", [None, "rms", "layer"])
def test_what_is_not_finite_stays_in_its_row(queue, arena, put, norm, bad):
    case = Case(norm, "gated", DType.F16, 4, 66, 100)
    case.x[2, 99] = bad
    y = case.run(queue, arena, put, fused=True)
    assert (~np.isfinite(y)).any(axis=1).tolist() == [r == 2 for r in range(4)]


def test_no_rows_do_nothing(queue, arena, put):
    matrix = ops.pack_matrix(queue, arena, normal(1, 6, 8), DType.F32)
    empty = put(np.zeros((1, 8), np.float32)).rows(0, 0)
    ops.matmul_fused(queue, put(np.zeros((1, 6), np.float32)).rows(0, 0), empty, matrix)


def test_wrong_arguments_are_refused_by_name(lib, queue, arena, put, refused):
    matrix = ops.pack_matrix(queue, arena, np.ones((6, 8), np.float32), DType.F32)
    x, y, normed, product = (put(np.ones((3, n), np.float32)) for n in (8, 3, 8, 6))
    weight = put(np.ones(8, np.float32))
    good = dict(
        queue=queue.handle, y=y.ptr, x=x.ptr, norm=NormKind.RMS, norm_weight=weight.ptr,
        norm_bias=0, eps=1e-5, normed=normed.ptr, weight=matrix.ptr, dtype=DType.F32, bias=0,
        epilogue=2, activation=0, product=product.ptr, rows=3, out=6, **{"in": 8},
    )  # fmt: skip
    refused(
        lib.c.ok_matmul_fused,
        good,
        {
            "queue is null": {"queue": 0},
            "y is null": {"y": 0},
            "x is null": {"x": 0},
            "weight is null": {"weight": 0},
            "normed is null": {"normed": 0},
            "product is null": {"product": 0},
            "norm=3 must be between 0 and 2": {"norm": 3},
            "epilogue=-1 must be between 0 and 2": {"epilogue": -1},
            "activation=4 must be between 0 and 3": {"activation": 4},
            "dtype=4 must be": {"dtype": DType.I32},
            "rows=-1 must be": {"rows": -1},
            "out=5 must be even": {"out": 5},
            "in=0 must be": {"in": 0},
            "eps=-1 must be finite": {"eps": -1.0},
            "x and y must not overlap": {"y": x.ptr},
            "x and normed must not overlap": {"normed": x.ptr + 32},
            "y and product must not overlap": {"product": y.ptr},
            "normed and product must not overlap": {"product": normed.ptr},
            "norm_weight is null": {"norm_weight": 0},
        },
    )
    lib.c.ok_matmul_fused(**(good | {"rows": 0, "y": 0, "x": 0, "normed": 0, "product": 0}))


def test_too_little_scratch_is_refused_before_anything_is_done(lib, queue, arena, put):
    case = Case("rms", "gated", DType.Q8_0, 130, 34, 64)
    lib.c.ok_queue_set_scratch(queue.handle, 0, 0)
    with pytest.raises(InvalidArgument, match="ok_matmul_fused: the queue's scratch of 0 bytes"):
        case.run(queue, arena, put, fused=True)
    with pytest.raises(InvalidArgument), queue.record():
        case.run(queue, arena, put, fused=True)
