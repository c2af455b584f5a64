"""Mistakes that tests plant in a GPU build, to see that they are found."""

from __future__ import annotations

from typing import Any

import pytest

from pyengine.native import Library


def swap_keys_and_values_of_long_chunks(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on a step of more than 16 rows caches its keys as values and its values as keys."""
    append = library.c.ok_kv_append

    def swapped(queue: int, cache: int, dtype: int, blocks: int, *rest: Any) -> Any:
        k, v, stride, slot, rows, *shape = rest
        if rows > 16:
            k, v = v, k
        return append(queue, cache, dtype, blocks, k, v, stride, slot, rows, *shape)

    monkeypatch.setattr(library.c, "ok_kv_append", swapped)
