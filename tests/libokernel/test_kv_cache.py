"""kv_append: what is stored can be read back by attention, and nothing else is touched."""

from __future__ import annotations

import numpy as np
import pytest

from pyengine.errors import InvalidArgument
from pyengine.native import Buffer, DType, ops
from tests.reference import rope_table, stored

BLOCK = ops.KV_BLOCK_SIZE
DTYPES = [DType.F32, DType.F16, DType.BF16]


def memory_of(cache, arena):
    """The whole cache as int32 words."""
    size = ops.kv_cache_bytes(
        arena.library, cache.dtype, cache.blocks, cache.kv_heads, cache.head_dim
    )
    return Buffer(cache.ptr, (size // 4,), DType.I32, 1, arena)


def read_values(put, queue, arena, cache, count):
    """The first `count` cached values: a row that sees one key alone returns its value as it is."""
    width = cache.kv_heads * cache.head_dim
    y = arena.alloc((count, width), DType.F32)
    ops.attention_paged(
        queue, y, put(np.zeros((count, width), np.float32)), cache,
        put(np.arange(cache.blocks, dtype=np.int32)[None]), put(np.zeros(count, np.int32)),
        put(np.arange(count, dtype=np.int32)),
        heads=cache.kv_heads, scale=1.0, window=1,
    )  # fmt: skip
    return y.download(queue)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_heads, head_dim", [(1, 1), (2, 20), (3, 33), (2, 64), (1, 160)])
def test_stored_values_come_back_rounded_to_the_cache_type(
    arena, queue, put, dtype, kv_heads, head_dim
):
    rng = np.random.default_rng(head_dim)
    rows, blocks = 45, 2
    v = rng.normal(size=(rows, kv_heads * head_dim)).astype(np.float32)
    v.reshape(-1)[:4] = [0.0, -0.0, 1e-7, 60000.0]  # among them a subnormal f16
    cache = ops.kv_layer(arena, dtype, blocks, kv_heads, head_dim)
    ops.kv_append(queue, cache, put(np.zeros_like(v)), put(v), put(np.arange(rows, dtype=np.int32)))
    got = read_values(put, queue, arena, cache, rows)
    np.testing.assert_array_equal(got, stored(v, dtype))


def test_keys_and_values_may_be_columns_of_a_fused_projection(arena, queue, put):
    rng = np.random.default_rng(1)
    fused = rng.normal(size=(5, 4 * 24)).astype(np.float32)
    apart, together = (ops.kv_layer(arena, DType.F16, 1, 2, 12) for _ in range(2))
    slot = put(np.array([3, 0, 31, 7, 8], np.int32))
    for cache in (apart, together):
        memory_of(cache, arena).upload(queue, np.zeros(memory_of(cache, arena).shape, np.int32))
    ops.kv_append(queue, apart, put(fused[:, 48:72]), put(fused[:, 72:]), slot)
    rows = put(fused)
    ops.kv_append(queue, together, rows.columns(48, 72), rows.columns(72, 96), slot)
    np.testing.assert_array_equal(
        memory_of(apart, arena).download(queue), memory_of(together, arena).download(queue)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "heads, kv_heads, head_dim, rotary_dim",
    [(1, 1, 2, 2), (4, 2, 20, 12), (6, 3, 33, 32), (2, 1, 160, 64)],
)
def test_rope_append_is_rope_and_then_append(
    arena, queue, put, dtype, heads, kv_heads, head_dim, rotary_dim
):
    rng = np.random.default_rng(head_dim)
    rows, q, kv = 40, heads * head_dim, kv_heads * head_dim
    fused = rng.normal(size=(rows, q + 2 * kv)).astype(np.float32)
    table = put(rope_table(50, rotary_dim))
    at = rng.integers(-2, 52, rows).astype(np.int32)  # some outside the table
    slot = rng.permutation(3 * BLOCK)[:rows].astype(np.int32)
    slot[[3, 7]] = -1, 3 * BLOCK
    given = put(slot), table, put(at)
    results = []
    for together in (False, True):
        cache, qkv = ops.kv_layer(arena, dtype, 3, kv_heads, head_dim), put(fused)
        memory = memory_of(cache, arena)
        memory.upload(queue, np.zeros(memory.shape, np.int32))
        if together:
            ops.rope_append(queue, qkv, cache, *given, heads=heads, rotary_dim=rotary_dim)
        else:
            ops.rope(
                queue, qkv.columns(0, q + kv), *given[1:], heads=heads + kv_heads,
                head_dim=head_dim, rotary_dim=rotary_dim,
            )  # fmt: skip
            k, v = qkv.columns(q, q + kv), qkv.columns(q + kv, q + 2 * kv)
            ops.kv_append(queue, cache, k, v, given[0])
        results.append((qkv.download(queue), memory.download(queue)))
    for apart, fused_result in zip(*results, strict=True):
        np.testing.assert_array_equal(apart, fused_result)


@pytest.mark.parametrize("dtype", DTYPES)
def test_slots_outside_the_cache_are_dropped(arena, queue, put, dtype):
    blocks, width = 2, 2 * 20
    before = put(np.full(64, 7, np.int32))
    cache = ops.kv_layer(arena, dtype, blocks, 2, 20)
    after = put(np.full(64, 7, np.int32))
    memory = memory_of(cache, arena)
    pattern = np.arange(memory.shape[0], dtype=np.int32)
    memory.upload(queue, pattern)
    outside = np.array([-1, -BLOCK, blocks * BLOCK, 2**31 - 1, -(2**31)], np.int32)
    x = put(np.ones((len(outside), width), np.float32))
    ops.kv_append(queue, cache, x, x, put(outside))
    np.testing.assert_array_equal(memory.download(queue), pattern)
    for guard in (before, after):
        np.testing.assert_array_equal(guard.download(queue), np.full(64, 7))


def test_a_row_changes_its_own_token_alone(arena, queue, put):
    rng = np.random.default_rng(2)
    v = rng.normal(size=(2 * BLOCK, 2 * 16)).astype(np.float32)
    cache = ops.kv_layer(arena, DType.F32, 2, 2, 16)
    every = put(np.arange(2 * BLOCK, dtype=np.int32))
    ops.kv_append(queue, cache, put(v), put(v), every)
    new = rng.normal(size=(1, 32)).astype(np.float32)
    ops.kv_append(queue, cache, put(new), put(new), put(np.array([40], np.int32)))
    v[40] = new[0]
    np.testing.assert_array_equal(read_values(put, queue, arena, cache, len(v)), v)


def test_a_cache_holds_all_keys_and_values(cpu):
    for dtype, item in ((DType.F32, 4), (DType.F16, 2), (DType.BF16, 2)):
        for head_dim in (1, 20, 64, 96):
            needed = 3 * BLOCK * 5 * head_dim * 2 * item
            size = ops.kv_cache_bytes(cpu, dtype, 3, 5, head_dim)
            assert size >= needed
            if head_dim % 16 == 0:
                assert size == needed


def test_wrong_arguments_are_refused(arena, queue, put, refused):
    cache = ops.kv_layer(arena, DType.F16, 2, 2, 8)
    x = put(np.zeros((3, 16), np.float32))
    good = {
        "queue": queue.handle, "cache": cache.ptr, "dtype": DType.F16, "blocks": 2, "k": x.ptr,
        "v": x.ptr, "stride": 16, "slot": put(np.zeros(3, np.int32)).ptr, "rows": 3, "kv_heads": 2,
        "head_dim": 8,
    }  # fmt: skip
    refused(
        queue.library.c.ok_kv_append,
        good,
        {
            "queue is null": {"queue": 0},
            "cache is null": {"cache": 0},
            "k is null": {"k": 0},
            "v is null": {"v": 0},
            "slot is null": {"slot": 0},
            "dtype=3 must be f32, f16 or bf16": {"dtype": DType.Q8_0},
            "blocks=0": {"blocks": 0},
            "rows=-1": {"rows": -1},
            "kv_heads=0": {"kv_heads": 0},
            "head_dim=0": {"head_dim": 0},
            "head_dim=1025": {"head_dim": 1025},
            "stride=15 must be >= kv_heads * head_dim = 16": {"stride": 15},
        },
    )
    queue.library.c.ok_kv_append(**(good | {"rows": 0}))
    with pytest.raises(InvalidArgument, match="blocks=-1"):
        ops.kv_cache_bytes(queue.library, DType.F16, -1, 2, 8)


def test_wrong_arguments_of_rope_append_are_refused(arena, queue, put, refused):
    cache = ops.kv_layer(arena, DType.F16, 2, 2, 8)
    qkv, table = put(np.zeros((3, 64), np.float32)), put(np.zeros((4, 8), np.float32))
    good = {
        "queue": queue.handle, "qkv": qkv.ptr, "stride": 64, "table": table.ptr, "table_rows": 4,
        "table_row": put(np.zeros(3, np.int32)).ptr, "cache": cache.ptr, "dtype": DType.F16,
        "blocks": 2, "slot": put(np.zeros(3, np.int32)).ptr, "rows": 3, "heads": 4, "kv_heads": 2,
        "head_dim": 8, "rotary_dim": 8,
    }  # fmt: skip
    refused(
        queue.library.c.ok_rope_append,
        good,
        {
            "queue is null": {"queue": 0},
            "qkv is null": {"qkv": 0},
            "table is null": {"table": 0},
            "table_row is null": {"table_row": 0},
            "cache is null": {"cache": 0},
            "slot is null": {"slot": 0},
            "dtype=3 must be f32, f16 or bf16": {"dtype": DType.Q8_0},
            "rows=-1": {"rows": -1},
            "heads=3 must be a positive multiple of kv_heads=2": {"heads": 3},
            "head_dim=1025": {"head_dim": 1025},
            "rotary_dim=10 must be even, >= 2 and <= head_dim=8": {"rotary_dim": 10},
            "heads=4611686018427387904 must be <= 2^31": {"heads": 2**62},
            "stride=63 must be >= (heads + 2 kv_heads) * head_dim = 64": {"stride": 63},
        },
    )
    queue.library.c.ok_rope_append(**(good | {"rows": 0}))
