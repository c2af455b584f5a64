"""How far a kernel may be from the float64 reference: one table, with a reason for each number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pyengine.native import DType

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Tolerance:
    """|got - want| <= relative * |want| + of_largest * max|want|."""

    relative: float
    of_largest: float
    reason: str


F32 = Tolerance(
    2e-6, 2e-6, "f32 arithmetic, 2^-24 an operation; sums of some thousand terms lose about 2^-19"
)

# Matrix products and attention, by type of weights or cache. The reference sees rounded weights.
ON_CPU = {
    DType.F32: F32,
    DType.F16: F32,  # inputs stay f32 on the CPU
    DType.BF16: F32,  # likewise
    DType.Q8_0: Tolerance(0, 1e-4, "activations rounded to 1/65278 of the largest of 32"),
}
ON_GPU = {
    DType.F32: Tolerance(1e-5, 1e-5, "f32 throughout, split sums in an order of the card's own"),
    DType.F16: Tolerance(1e-3, 1e-3, "inputs rounded to f16, 2^-11 each"),
    DType.BF16: Tolerance(8e-3, 8e-3, "inputs rounded to bf16, 2^-8 each"),
    DType.Q8_0: Tolerance(1e-5, 1e-5, "inputs in f32 or two f16 terms, 2^-22 each; split sums"),
}
# Elementwise operations have no long sums: a few roundings, and exp within 2 in the last place.
ELEMENTWISE = Tolerance(1e-6, 0, "about eight roundings of 2^-24")


# One row, one result: bit for bit on the CPU; a GPU takes other kernels for other numbers of rows.
BETWEEN_CUTS = 1e-5


def assert_same(device: str, got: Array, want: Array) -> None:
    """Logits of the same f32 model, however the work was cut: equal, or close on a GPU."""
    if device == "cpu":
        assert np.array_equal(got, want)
        return
    error = np.abs(got - want).max() / np.abs(want).max()
    assert error <= BETWEEN_CUTS, f"{error:.1e} of the largest logit"


def assert_close(got: Array, want: Array, tolerance: Tolerance, *, tiny: float = 1e-37) -> None:
    """Raises AssertionError that names the worst element. `tiny`: slack around f32's smallest."""
    assert got.shape == want.shape
    assert np.isfinite(got).all(), "the result is not finite"
    largest = float(np.abs(want).max(initial=0.0))
    allowed = tolerance.relative * np.abs(want) + tolerance.of_largest * largest + tiny
    excess = np.abs(got.astype(np.float64) - want) / allowed
    if excess.size and excess.max() > 1:
        at = np.unravel_index(int(excess.argmax()), excess.shape)
        raise AssertionError(
            f"at {tuple(map(int, at))}: got {got[at]!r}, want {want[at]!r}, "
            f"{excess.max():.2f} times the allowed error ({tolerance.reason})"
        )
