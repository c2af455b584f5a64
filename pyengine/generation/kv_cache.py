"""The pool of KV blocks: who owns which, and how many are free."""

from __future__ import annotations

from pyengine.errors import RequestError
from pyengine.native.ops import KV_BLOCK_SIZE


def blocks_for(tokens: int) -> int:
    """Blocks that hold `tokens` tokens."""
    return -(-tokens // KV_BLOCK_SIZE)


class BlockPool:
    """Hands out block numbers 0 .. count - 1."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free: list[int] = []
        self.take_all_back()

    @property
    def free(self) -> int:
        """Blocks nobody owns."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` blocks; the caller has checked `free`."""
        if count > len(self._free):
            raise RequestError(f"{count} KV blocks wanted, {len(self._free)} free")
        return [self._free.pop() for _ in range(count)]

    def take_all_back(self) -> None:
        """Makes every block free: nobody owns one any more."""
        self._free = list(range(self.count - 1, -1, -1))

    def give_back(self, blocks: list[int]) -> None:
        """Returns blocks to the pool and empties the list."""
        self._free.extend(reversed(blocks))
        blocks.clear()
