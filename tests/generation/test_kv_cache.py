"""The block pool gives each block to one owner and takes all of them back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyengine.errors import RequestError
from pyengine.generation.kv_cache import BlockPool, blocks_for
from pyengine.native.ops import KV_BLOCK_SIZE


@given(st.lists(st.integers(0, 5), max_size=30))
def test_no_block_has_two_owners(sizes: list[int]) -> None:
    pool = BlockPool(20)
    owners: list[list[int]] = []
    for size in sizes:
        if size > pool.free:
            with pytest.raises(RequestError):
                pool.take(size)
            if owners:
                pool.give_back(owners.pop(0))
            continue
        owners.append(pool.take(size))
    held = [block for owner in owners for block in owner]
    assert len(held) == len(set(held)) == 20 - pool.free
    assert set(held) <= set(range(20))


def test_blocks_for_rounds_up() -> None:
    assert [blocks_for(n) for n in (0, 1, KV_BLOCK_SIZE, KV_BLOCK_SIZE + 1)] == [0, 1, 1, 2]
