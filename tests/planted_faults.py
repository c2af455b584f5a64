"""Mistakes that tests plant in a GPU build, to see that they are found."""

from __future__ import annotations

from typing import Any

import pytest

from pyengine.native import Library


def rotate_half_of_long_chunks(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on a step of more than 16 rows rotates half of what it should."""
    append = library.c.ok_rope_append

    def halved(*arguments: Any) -> Any:
        *before, rows, heads, kv_heads, head_dim, rotary_dim = arguments
        if rows > 16:
            rotary_dim //= 2
        return append(*before, rows, heads, kv_heads, head_dim, rotary_dim)

    monkeypatch.setattr(library.c, "ok_rope_append", halved)
