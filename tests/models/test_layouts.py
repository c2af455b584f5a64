"""models/layouts.py: re-layouts on tensors small enough to read."""

from __future__ import annotations

import numpy as np

from pyengine.models.layouts import Layout, PerHead, Rows, Transposed


def laid_out(layout: Layout, stored: np.ndarray, step: int | None = None) -> list[object]:
    """The target's rows, from the stored tensor passed whole or in slices of `step` rows."""
    step = step or len(stored)
    target: dict[int, object] = {}
    for first in range(0, len(stored), step):
        for row, piece in layout.place(stored[first : first + step], first):
            target.update({row + i: value for i, value in enumerate(piece.tolist())})
    return [target[row] for row in sorted(target)]


# Two heads of two dimensions, as Bloom stores them.
FUSED = np.array([[1, 0], [1, 1], [2, 0], [2, 1], [3, 0], [3, 1],
                  [10, 0], [10, 1], [20, 0], [20, 1], [30, 0], [30, 1]])  # fmt: skip
SPLIT = [[1, 0], [1, 1], [10, 0], [10, 1],
         [2, 0], [2, 1], [20, 0], [20, 1],
         [3, 0], [3, 1], [30, 0], [30, 1]]  # fmt: skip


def test_per_head_rows_become_all_q_then_all_k_then_all_v() -> None:
    assert laid_out(PerHead(2, 2), FUSED) == SPLIT


def test_a_bias_is_permuted_like_its_matrix() -> None:
    assert laid_out(PerHead(2, 2), FUSED[:, 0]) == [row[0] for row in SPLIT]


def test_heads_may_pass_one_at_a_time() -> None:
    layout = PerHead(2, 2)
    assert laid_out(layout, FUSED, layout.unit) == SPLIT


def test_conv1d_is_transposed() -> None:
    stored = np.array([[1, 2, 3], [4, 5, 6]])
    assert laid_out(Transposed(2), stored) == [[1, 4], [2, 5], [3, 6]]


def test_plain_rows_stay_in_place_in_any_slices() -> None:
    stored = np.arange(10).reshape(5, 2)
    assert laid_out(Rows(), stored, 2) == stored.tolist()


def test_pieces_are_contiguous() -> None:
    for layout, stored in ((PerHead(2, 2), FUSED), (Transposed(12), FUSED)):
        assert all(piece.flags.c_contiguous for _, piece in layout.place(stored, 0))
