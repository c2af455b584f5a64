"""Launches of the sample kernels with their float64 references, for whatever runs them: stand-in or executor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

Array = np.ndarray[Any, Any]


class Runner(Protocol):
    """Something that launches kernels on numpy arrays."""

    def launch(
        self,
        kernel: str,
        grid: Sequence[int],
        block: Sequence[int],
        arguments: Sequence[Any],
        dynamic_lds: int = 0,
    ) -> Any:
        """Runs the kernel over grid blocks; arrays are changed in place."""


@dataclass(frozen=True)
class Case:
    """One launch: what to run, what comes out, how far it may be from the reference."""

    kernel: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    arguments: list[Any]
    expected: Array
    tolerance: float = 0.0  # of the largest value expected
    dynamic_lds: int = 0

    def run(self, runner: Runner) -> Any:
        """Runs it and returns what the runner does; the output is arguments[0]."""
        return runner.launch(self.kernel, self.grid, self.block, self.arguments, self.dynamic_lds)

    def error(self) -> float:
        """Largest difference of the output from the reference, as a share of the largest value; NaN counts as infinite."""
        got, expected = self.arguments[0].astype(np.float64), self.expected.astype(np.float64)
        difference = np.abs(got - expected)
        return float(
            np.where(np.isnan(difference), np.inf, difference).max() / np.abs(expected).max()
        )

    def holds(self) -> bool:
        """Whether the output is right."""
        return self.error() <= self.tolerance


# f32 sums of some hundred terms in another order than numpy's: a few dozen ulps of the largest.
F32_SUM = 2e-6


def _blank(*shape: int) -> Array:
    return np.full(shape, np.nan, np.float32)


def _normal(rng: np.random.Generator, *shape: int, dtype: Any = np.float32) -> Array:
    return rng.normal(size=shape).astype(dtype)


def _f64(*arrays: Array) -> list[Array]:
    return [a.astype(np.float64) for a in arrays]


def scale_add(rng: np.random.Generator, wave: int) -> Case:
    """A size that is no multiple of the block."""
    x, y = _normal(rng, 1003), _normal(rng, 1003)
    return Case(
        "scale_add", (4,), (256,), [y, x, np.float32(1.5), np.int32(1003)], y + 1.5 * x, 2e-7
    )


def rms_norm(rng: np.random.Generator, wave: int) -> Case:
    """Rows shorter and longer than a block's stride are covered by an odd width."""
    x, weight = _normal(rng, 3, 333), _normal(rng, 333)
    (wide,) = _f64(x)
    expected = wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-5) * weight
    return Case(
        "rms_norm",
        (3,),
        (256,),
        [_blank(3, 333), x, weight, np.int32(333), np.float32(1e-5)],
        expected,
        F32_SUM,
    )


def matvec_dot2(rng: np.random.Generator, wave: int) -> Case:
    """Outputs that do not fill the last block."""
    x, weight = _normal(rng, 130, dtype=np.float16), _normal(rng, 37, 130, dtype=np.float16)
    grid = (37 * wave + 127) // 128
    return Case(
        "matvec_dot2", (grid,), (128,), [_blank(37), x, weight, np.int32(37), np.int32(130)],
        weight.astype(np.float64) @ x.astype(np.float64), F32_SUM,
    )  # fmt: skip


def matvec_q8(rng: np.random.Generator, wave: int) -> Case:
    """Signed bytes of both signs."""
    out, blocks = 45, 5
    qx = rng.integers(-127, 128, (blocks, 32)).astype(np.int8)
    qw = rng.integers(-127, 128, (out, blocks, 32)).astype(np.int8)
    dx = np.abs(_normal(rng, blocks))
    dw = np.abs(_normal(rng, out, blocks, dtype=np.float16))
    dots = np.einsum("bi,obi->ob", *_f64(qx, qw))
    return Case(
        "matvec_q8", (1,), (64,), [_blank(out), qx, dx, qw, dw, np.int32(out), np.int32(blocks)],
        (dots * dx * dw.astype(np.float64)).sum(1), F32_SUM,
    )  # fmt: skip


def matmul_matrix(rng: np.random.Generator, wave: int) -> Case:
    """Two waves a block; more than one tile in each direction."""
    a, b = _normal(rng, 64, 48, dtype=np.float16), _normal(rng, 32, 48, dtype=np.float16)
    wide_a, wide_b = _f64(a, b)
    return Case(
        "matmul_matrix", (2, 2), (2 * wave,), [_blank(64, 32), a, b, np.int32(32), np.int32(48)],
        wide_a @ wide_b.T, F32_SUM,
    )  # fmt: skip


def attend(rng: np.random.Generator, wave: int) -> Case:
    """Scores far above 88, so that a softmax without the maximum overflows."""
    heads, length, dim = 2, 77, 64
    q, k, v = (
        40 * _normal(rng, heads, dim),
        _normal(rng, heads, length, dim),
        _normal(rng, heads, length, dim),
    )
    scores = np.einsum("hd,htd->ht", *_f64(q, k)) * 0.125
    weights = np.exp(scores - scores.max(1, keepdims=True))
    weights /= weights.sum(1, keepdims=True)
    return Case(
        "attend", (heads,), (128,),
        [_blank(heads, dim), q, k, v, np.int32(length), np.int32(dim), np.float32(0.125)],
        np.einsum("ht,htd->hd", weights, v), 2e-5,  # exp of scores of some 100: their f32 rounding alone is 1e-5
        4 * length,
    )  # fmt: skip


def philox(rng: np.random.Generator, wave: int) -> Case:
    """Integers, so exact."""
    n, seed = 300, 0x123456789ABCDEF
    words = [np.arange(n, dtype=np.uint64), *(np.zeros(n, np.uint64) for _ in range(3))]
    key = [seed & 0xFFFFFFFF, seed >> 32]
    mask = np.uint64(0xFFFFFFFF)
    for _ in range(10):
        p0, p1 = np.uint64(0xD2511F53) * words[0], np.uint64(0xCD9E8D57) * words[2]
        high0, high1 = p0 >> np.uint64(32), p1 >> np.uint64(32)
        words = [
            high1 ^ words[1] ^ np.uint64(key[0]),
            p1 & mask,
            high0 ^ words[3] ^ np.uint64(key[1]),
            p0 & mask,
        ]
        key = [key[0] + 0x9E3779B9 & 0xFFFFFFFF, key[1] + 0xBB67AE85 & 0xFFFFFFFF]
    return Case(
        "philox", (2,), (256,), [np.zeros(n, np.uint32), np.uint64(seed), np.int32(n)], words[0]
    )


def histogram(rng: np.random.Generator, wave: int) -> Case:
    """Many lanes meet in the same bin."""
    x = rng.integers(0, 7, 3001).astype(np.uint8)
    return Case(
        "histogram",
        (3,),
        (128,),
        [np.zeros(256, np.uint32), x, np.int32(len(x))],
        np.bincount(x, minlength=256),
    )


CASES: dict[str, Callable[[np.random.Generator, int], Case]] = {
    function.__name__: function
    for function in (
        scale_add,
        rms_norm,
        matvec_dot2,
        matvec_q8,
        matmul_matrix,
        attend,
        philox,
        histogram,
    )
}


def make(kernel: str, wave: int) -> Case:
    """The kernel's case, always with the same numbers."""
    return CASES[kernel](np.random.default_rng(20250101), wave)


# Each seeded mistake of samples.hip, and the kernel whose case shows it.
BUGS = {
    "missing_barrier": (1, "rms_norm"),
    "wrong_bound": (2, "scale_add"),
    "fixed_wave_size": (3, "matvec_dot2"),
    "wrong_fragment_row": (4, "matmul_matrix"),
    "lanes_not_repeated": (5, "matmul_matrix"),
    "softmax_without_max": (6, "attend"),
    "divergent_barrier": (7, "rms_norm"),
    "missing_wave_sum": (8, "matvec_dot2"),
    "barrier_too_early": (9, "matmul_matrix"),
    "signed_as_unsigned": (10, "matvec_q8"),
}
