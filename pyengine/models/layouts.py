"""How stored tensors become rows of the decoder's matrices: pure functions, each chosen by a word.

A layout takes consecutive rows of a stored tensor, from row `first` on, and gives pieces (target
row, rows). Stored rows come in multiples of `unit`, so that a big tensor can pass in slices.
Vectors (biases) pass the same way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Pieces = list[tuple[int, Array]]


@dataclass(frozen=True)
class Rows:
    """The rows as they are: "split" and "concat" tensors, whose place is a matter of the offset."""

    unit: int = 1

    def place(self, stored: Array, first: int) -> Pieces:
        """stored: (rows, ...). One piece, same rows."""
        return [(first, stored)]


@dataclass(frozen=True)
class PerHead:
    """Rows ordered (head, part, dim) -> (part, head, dim), parts q, k, v: Bloom's fused projection.

    Attributes:
        heads: query heads; as many key and value heads.
        head_dim: rows of one head's part.
    """

    heads: int
    head_dim: int

    @property
    def unit(self) -> int:
        """Rows of one head: its q, k and v."""
        return 3 * self.head_dim

    def place(self, stored: Array, first: int) -> Pieces:
        """stored: (whole heads * unit, ...). Three pieces: rows of q, of k, of v."""
        head = first // self.unit
        split = stored.reshape(-1, 3, self.head_dim, *stored.shape[1:])
        return [
            (
                (part * self.heads + head) * self.head_dim,
                np.ascontiguousarray(split[:, part]).reshape(-1, *stored.shape[1:]),
            )
            for part in range(3)
        ]


@dataclass(frozen=True)
class Transposed:
    """A matrix stored (in, out), as GPT-2's Conv1D is: rows become columns, so it passes whole.

    Attributes:
        unit: stored rows, all of them.
    """

    unit: int

    def place(self, stored: Array, first: int) -> Pieces:
        """stored: (in, out). One piece: (out, in)."""
        return [(0, np.ascontiguousarray(stored.T))]


Layout = Rows | PerHead | Transposed
