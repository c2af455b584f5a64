"""Calls of the library's operations that reach its kernels, with their float64 references.

The sizes are small and awkward: the executor takes some microseconds an instruction. Each buffer lies in an arena of its own
size, outputs start as NaN, and what a case launched is written down, so that the same launches can be run as machine code.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from pyengine.native import Arena, Buffer, DType, Library, NormKind, Queue, ops
from pyengine.native.bindings import Activation, address, uint64_cell
from tests import reference
from tests.amd.launches import Launch, Snapshot, recording
from tests.tolerances import F32, ON_GPU, Tolerance, assert_close

Array = np.ndarray[Any, Any]
FLOATS = (DType.F32, DType.F16, DType.BF16)
MATRICES = (*FLOATS, DType.Q8_0)
BLOCK = ops.KV_BLOCK_SIZE
_TYPES = {"float32": DType.F32, "int32": DType.I32, "uint16": DType.BF16}
_ARRAYS = {DType.F32: np.float32, DType.I32: np.int32, DType.BF16: np.uint16}


class Bench:
    """The buffers of one case; `run` makes the call under test and writes down what it launched."""

    def __init__(self, library: Library, queue: Queue) -> None:
        self.library, self.queue = library, queue
        self.arenas: list[Arena] = []
        self.regions: list[tuple[int, int]] = []
        self.launches: list[Launch] = []
        self.before = Snapshot([], read_memory)

    def close(self) -> None:
        """Gives the memory back."""
        for arena in self.arenas:
            arena.close()

    def arena(self, size_bytes: int) -> Arena:
        """An arena that is one region of memory."""
        arena = Arena(self.library, size_bytes)
        self.arenas.append(arena)
        return arena

    def own(self, pointer: int, size_bytes: int) -> int:
        """Notes that kernels may use these bytes."""
        self.regions.append((pointer, size_bytes))
        return pointer

    def put(self, array: Array) -> Buffer:
        """A buffer with these contents."""
        arena = self.arena(max(array.nbytes, 1))
        buffer = arena.alloc(array.shape, _TYPES[array.dtype.name]).upload(self.queue, array)
        self.own(buffer.ptr, array.nbytes)
        return buffer

    def blank(self, *shape: int) -> Buffer:
        """A buffer of NaN."""
        return self.put(np.full(shape, np.nan, np.float32))

    def matrix(self, values: Array, dtype: DType) -> ops.Matrix:
        """A packed weight matrix."""
        size = ops.matrix_bytes(self.library, dtype, *values.shape)
        matrix = ops.new_matrix(self.arena(size), dtype, *values.shape)
        self.own(matrix.ptr, size)
        with Arena(self.library, values.nbytes) as arena:
            source = arena.alloc(values.shape, DType.F32).upload(self.queue, values)
            ops.pack_rows(self.queue, matrix, 0, source, DType.F32, len(values))
            self.queue.sync()
        return matrix

    def scratch(self, size_bytes: int) -> None:
        """Working memory of exactly the size that an operation asks for."""
        if size_bytes:
            pointer = self.own(self.arena(size_bytes).alloc_bytes(size_bytes), size_bytes)
            self.library.c.ok_queue_set_scratch(self.queue.handle, pointer, size_bytes)

    def run(self, operation: Callable[[], None]) -> None:
        """Makes the call. Cases call it once, when all buffers are there."""
        self.before = Snapshot(self.regions, read_memory)
        with recording() as launches:
            operation()
            self.queue.sync()
            self.launches = launches()


def read_memory(pointer: int, size: int) -> bytes:
    """Bytes of the stand-in's device memory, which is the process's own."""
    return ctypes.string_at(pointer, size)


@dataclass(frozen=True)
class Output:
    """A buffer that the call has written, and what should be in it. No tolerance: exactly that."""

    buffer: Buffer
    expected: Array
    tolerance: Tolerance | None = None

    def check(self, memory: Callable[[int, int], bytes], *, partly: bool = False) -> None:
        """AssertionError where it differs. partly: elements that are still NaN are passed over."""
        kind: Any = _ARRAYS[self.buffer.dtype]
        size = self.expected.size * np.dtype(kind).itemsize
        got = np.frombuffer(memory(self.buffer.ptr, size), kind).reshape(self.expected.shape)
        expected = self.expected
        if partly:
            written = ~np.isnan(got)
            assert written.any(), "nothing was written"
            got, expected = got[written], expected[written]
        if self.tolerance is None:
            np.testing.assert_array_equal(got, expected)
        else:
            assert_close(got, expected, self.tolerance)


Case = Callable[[Bench], list[Output]]
CASES: dict[str, Case] = {}


def _case(name: str) -> Callable[[Case], Case]:
    def register(function: Case) -> Case:
        CASES[name] = function
        return function

    return register


def _normal(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def _integers(*values: int) -> Array:
    return np.array(values, np.int32)


# ---- elementwise operations and norms ------------------------------------------------------------


@_case("rms_norm")
def _rms_norm(bench: Bench) -> list[Output]:
    x, weight, residual = _normal(1, 3, 2 * 70), _normal(2, 2 * 70), _normal(3, 3, 2 * 70)
    y = bench.blank(*x.shape)
    given = bench.put(x), bench.put(weight), bench.put(residual)
    bench.run(
        lambda: ops.rms_norm(bench.queue, y, *given[:2], eps=1e-5, groups=2, residual=given[2])
    )
    return [Output(y, reference.rms_norm(x, weight, 1e-5, 2, residual), F32)]


@_case("layer_norm")
def _layer_norm(bench: Bench) -> list[Output]:
    x, weight, bias = _normal(1, 2, 301), _normal(2, 301), _normal(3, 301)
    y = bench.blank(*x.shape)
    given = bench.put(x), bench.put(weight), bench.put(bias)
    bench.run(lambda: ops.layer_norm(bench.queue, y, *given, eps=1e-5))
    return [Output(y, reference.layer_norm(x, weight, bias, 1e-5), F32)]


@_case("rope")
def _rope(bench: Bench) -> list[Output]:
    heads, head_dim, rotary_dim = 3, 20, 12
    x, table = _normal(1, 4, heads * head_dim), reference.rope_table(9, rotary_dim)
    rows = _integers(0, 8, -1, 9)  # the last two are outside the table: left alone
    buffer, table_buffer, row_buffer = bench.put(x), bench.put(table), bench.put(rows)
    bench.run(
        lambda: ops.rope(
            bench.queue, buffer, table_buffer, row_buffer, heads=heads, head_dim=head_dim,
            rotary_dim=rotary_dim,
        )
    )  # fmt: skip
    return [Output(buffer, reference.rope(x, table, rows, heads, rotary_dim), F32)]


def _register_activations() -> None:
    for kind in Activation:

        def plain(bench: Bench, kind: Activation = kind) -> list[Output]:
            x, y = 3 * _normal(1, 301), bench.blank(301)
            given = bench.put(x)
            bench.run(lambda: ops.activate(bench.queue, y, given, kind))
            return [Output(y, reference.activate(x, kind), F32)]

        def gated(bench: Bench, kind: Activation = kind) -> list[Output]:
            x, y = 3 * _normal(1, 3, 2 * 45), bench.blank(3, 45)
            given = bench.put(x)
            bench.run(lambda: ops.activate_gated(bench.queue, y, given, kind))
            return [Output(y, reference.activate_gated(x, kind), F32)]

        CASES[f"activate-{kind.name.lower()}"] = plain
        CASES[f"activate_gated-{kind.name.lower()}"] = gated


_register_activations()


@_case("gather_rows")
def _gather_rows(bench: Bench) -> list[Output]:
    x, index = _normal(1, 5, 33), _integers(4, -1, 0, 2)
    y = bench.blank(4, 33)
    given = bench.put(x), bench.put(index), bench.put(_integers(3))
    bench.run(lambda: ops.gather_rows(bench.queue, y, *given))
    expected = np.stack([x[4], np.zeros(33), x[0], np.full(33, np.nan)]).astype(np.float32)
    return [Output(y, expected)]


@_case("count_nonfinite")
def _count_nonfinite(bench: Bench) -> list[Output]:
    x = _normal(1, 5, 77)
    x[0, 3], x[2, 76], x[4, 0] = np.nan, -np.inf, np.nan  # the last row is not active
    count = bench.put(_integers(5))
    given = bench.put(x), bench.put(_integers(4))
    bench.run(lambda: ops.count_nonfinite(bench.queue, count, *given))
    return [Output(count, _integers(7))]


@_case("read")
def _read(bench: Bench) -> list[Output]:
    source, total = bench.put(np.arange(640, dtype=np.int32)), bench.put(_integers(0))
    call = bench.library.c.ok_read
    bench.run(lambda: call(bench.queue.handle, total.ptr, source.ptr, 2560))
    return []  # one word that depends on all of them: which word is the backend's business


# ---- matrices ------------------------------------------------------------------------------------


def _register_matrices() -> None:
    for dtype in MATRICES:

        def pack(bench: Bench, dtype: DType = dtype) -> list[Output]:
            values = _normal(1, 19, 45)
            size = ops.matrix_bytes(bench.library, dtype, *values.shape)
            matrix = ops.new_matrix(bench.arena(size), dtype, *values.shape)
            bench.own(matrix.ptr, size)
            source, plain = bench.put(values), bench.blank(*values.shape)
            overflow = bench.put(_integers(3))

            def there_and_back() -> None:
                ops.pack_rows(bench.queue, matrix, 0, source, DType.F32, 19, overflow)
                bench.library.c.ok_matrix_unpack(
                    bench.queue.handle, plain.ptr, DType.F32, matrix.ptr, dtype, 19, 45, 0, 19
                )

            bench.run(there_and_back)
            return [Output(plain, reference.stored(values, dtype)), Output(overflow, _integers(3))]

        def embedding(bench: Bench, dtype: DType = dtype) -> list[Output]:
            table, residual = _normal(1, 23, 45), _normal(2, 4, 45)
            ids = _integers(22, 0, 23, -1)
            y, matrix = bench.blank(4, 45), bench.matrix(table, dtype)
            given = bench.put(ids), bench.put(residual)
            bench.run(lambda: ops.embedding(bench.queue, y, matrix, *given))
            expected = reference.embedding(reference.stored(table, dtype), ids, residual)
            return [Output(y, expected, F32)]

        CASES[f"matrix_pack-{dtype.name.lower()}"] = pack
        CASES[f"embedding-{dtype.name.lower()}"] = embedding


_register_matrices()


def _blocks(values: Array) -> Array:
    return reference.quantize_q8_0(values).view(np.uint8).reshape(len(values), -1)


@_case("quantize_q8_0")
def _quantize(bench: Bench) -> list[Output]:
    values = _normal(1, 2, 70)
    expected = _blocks(values).reshape(-1).view(np.uint16)
    blocks = bench.put(np.zeros(expected.shape, np.uint16))
    source, overflow = bench.put(values), bench.put(_integers(0))
    call = bench.library.c.ok_quantize_q8_0
    bench.run(
        lambda: call(bench.queue.handle, blocks.ptr, source.ptr, DType.F32, 2, 70, overflow.ptr)
    )
    return [Output(blocks, expected), Output(overflow, _integers(0))]


@_case("matrix_unpack-blocks")
def _unpack_blocks(bench: Bench) -> list[Output]:
    values = _normal(1, 5, 70)
    expected = _blocks(values).reshape(-1).view(np.uint16)
    matrix, blocks = (
        bench.matrix(values, DType.Q8_0),
        bench.put(np.zeros(expected.shape, np.uint16)),
    )
    call = bench.library.c.ok_matrix_unpack
    bench.run(
        lambda: call(
            bench.queue.handle, blocks.ptr, DType.Q8_0, matrix.ptr, DType.Q8_0, 5, 70, 0, 5
        )
    )
    return [Output(blocks, expected)]


# rows, outputs, inputs: one for each of the launcher's ways, and awkward.
MATMULS = {
    "vector_one": (1, 37, 130),
    "vector_long": (1, 9, 1170),
    "vector_two": (2, 21, 70),
    "vector_four": (7, 17, 45),
    "tiled": (65, 33, 37),
    "wide": (65, 12170, 33),  # many outputs: it takes many tiles to be wide
}


def _register_matmuls() -> None:
    for dtype in MATRICES:
        for name, (rows, out, inner) in MATMULS.items():

            def matmul(
                bench: Bench,
                dtype: DType = dtype,
                rows: int = rows,
                out: int = out,
                inner: int = inner,
            ) -> list[Output]:
                x, weight = _normal(1, rows, inner), _normal(2, out, inner)
                bias, residual = _normal(3, out), _normal(4, rows, out)
                y, matrix = bench.blank(rows, out), bench.matrix(weight, dtype)
                given = bench.put(x), matrix, bench.put(bias), bench.put(residual)
                bench.scratch(ops.matmul_scratch_bytes(bench.library, dtype, rows, out, inner))
                bench.run(lambda: ops.matmul(bench.queue, y, *given))
                stored = reference.stored(weight, dtype)
                return [Output(y, reference.matmul(x, stored, bias, residual), ON_GPU[dtype])]

            CASES[f"matmul-{name}-{dtype.name.lower()}"] = matmul


_register_matmuls()


@dataclass(frozen=True)
class Fused:
    """A projection with the norm before it and the activation after it."""

    norm: NormKind
    gated: bool
    rows: int
    inner: int


FUSED = {
    "rms-gated": Fused(NormKind.RMS, True, 1, 600),
    "layer-plain": Fused(NormKind.LAYER, False, 2, 70),
}


def _matmul_fused(bench: Bench, dtype: DType, shape: Fused) -> list[Output]:
    x, weight, bias = (
        3 * _normal(1, shape.rows, shape.inner),
        _normal(2, 42, shape.inner),
        _normal(3, 42),
    )
    norm_weight, norm_bias = 1 + _normal(4, shape.inner) / 4, _normal(5, shape.inner)
    y = bench.blank(shape.rows, 21 if shape.gated else 42)
    normed, product = bench.blank(*x.shape), bench.blank(shape.rows, 42)
    matrix, given = bench.matrix(weight, dtype), (bench.put(x), bench.put(bias))
    is_layer = shape.norm == NormKind.LAYER
    norm = ops.Norm(
        shape.norm, bench.put(norm_weight), bench.put(norm_bias) if is_layer else None, 1e-5
    )
    bench.scratch(ops.matmul_scratch_bytes(bench.library, dtype, shape.rows, 42, shape.inner))
    bench.run(
        lambda: ops.matmul_fused(
            bench.queue, y, given[0], matrix, given[1], norm=norm, normed=normed,
            activation=Activation.SILU, product=product if shape.gated else None,
        )
    )  # fmt: skip
    expected = (
        reference.layer_norm(x, norm_weight, norm_bias, 1e-5)
        if is_layer
        else reference.rms_norm(x, norm_weight, 1e-5)
    )
    expected = reference.matmul(expected, reference.stored(weight, dtype), bias)
    activated = reference.activate_gated if shape.gated else reference.activate
    tolerance = ON_GPU[dtype]
    doubled = Tolerance(3 * tolerance.relative, 3 * tolerance.of_largest, tolerance.reason)
    return [Output(y, activated(expected, Activation.SILU), doubled)]


def _register_fused() -> None:
    for dtype in MATRICES:
        for name, shape in FUSED.items():
            CASES[f"matmul-fused-{name}-{dtype.name.lower()}"] = partial(
                _matmul_fused, dtype=dtype, shape=shape
            )


_register_fused()


# ---- attention -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attention:
    """One call: query rows are the last of the sequence's positions."""

    rows: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int = 0
    alibi: bool = False


ATTENTIONS = {
    "span": Attention(2, 70, 4, 2, 20),
    "window": Attention(2, 70, 2, 1, 16, window=33),
    "alibi": Attention(1, 40, 3, 3, 16, alibi=True),
    "split": Attention(1, 300, 2, 1, 32),  # several spans of keys, merged
    "long_head": Attention(1, 40, 1, 1, 300),
    "tile64": Attention(66, 70, 2, 1, 40),
    "tile128": Attention(65, 65, 1, 1, 96),
    "tile256": Attention(65, 65, 1, 1, 160),
}


def _attention(bench: Bench, dtype: DType, shape: Attention) -> list[Output]:
    """Appends keys and values through a shuffled block table, then attends."""
    q = 1.5 * _normal(1, shape.rows, shape.heads * shape.head_dim)
    keys, values = (_normal(seed, shape.length, shape.kv_heads * shape.head_dim) for seed in (2, 3))
    count = -(-shape.length // BLOCK)
    table = np.random.default_rng(4).permutation(count + 1)[None, :count].astype(np.int32)
    position = np.arange(shape.length)
    slot = (table[0, position // BLOCK] * BLOCK + position % BLOCK).astype(np.int32)
    size = ops.kv_cache_bytes(bench.library, dtype, count + 1, shape.kv_heads, shape.head_dim)
    cache = ops.kv_layer(bench.arena(size), dtype, count + 1, shape.kv_heads, shape.head_dim)
    bench.own(cache.ptr, size)
    bench.library.c.ok_fill(bench.queue.handle, cache.ptr, 0xFF, size)
    asked = position[-shape.rows :].astype(np.int32)
    slope = reference.alibi_slopes(shape.heads).astype(np.float32) if shape.alibi else None
    scale = shape.head_dim**-0.5
    y = bench.blank(*q.shape)
    stored = bench.put(keys), bench.put(values), bench.put(slot)
    given = bench.put(q), cache, bench.put(table), bench.put(np.zeros(shape.rows, np.int32))
    at, slopes = bench.put(asked), None if slope is None else bench.put(slope)
    cell = uint64_cell()
    bench.library.c.ok_attention_scratch_bytes(
        shape.rows, shape.heads, shape.head_dim, count * BLOCK, address(cell)
    )
    bench.scratch(cell.value)

    def append_and_attend() -> None:
        ops.kv_append(bench.queue, cache, *stored)
        ops.attention_paged(
            bench.queue,
            y,
            *given,
            at,
            heads=shape.heads,
            scale=scale,
            slope=slopes,
            window=shape.window,
        )

    bench.run(append_and_attend)
    kept = np.zeros((2, (count + 1) * BLOCK, shape.kv_heads * shape.head_dim), np.float32)
    kept[0, slot], kept[1, slot] = (reference.stored(x, dtype) for x in (keys, values))
    heads = kept.reshape(2, -1, shape.kv_heads, shape.head_dim)
    expected = reference.attention_paged(
        q.reshape(shape.rows, shape.heads, -1), heads[0], heads[1], table,
        np.zeros(shape.rows, np.int64), asked, scale=scale, slope=slope, window=shape.window,
    )  # fmt: skip
    return [Output(y, expected.reshape(q.shape), ON_GPU[dtype])]


def _rope_append(bench: Bench, dtype: DType) -> list[Output]:
    """Rotates and stores the rows of a fused projection, then attends with its queries."""
    rows, heads, kv_heads, head_dim, rotary_dim = 5, 4, 2, 20, 12
    fused, table = _normal(1, rows, (heads + 2 * kv_heads) * head_dim), reference.rope_table(9, 12)
    table_row, slot = (
        _integers(0, 8, 3, 9, -1),
        _integers(*range(rows)),
    )  # the last two: as they are
    size = ops.kv_cache_bytes(bench.library, dtype, 1, kv_heads, head_dim)
    cache = ops.kv_layer(bench.arena(size), dtype, 1, kv_heads, head_dim)
    bench.own(cache.ptr, size)
    bench.library.c.ok_fill(bench.queue.handle, cache.ptr, 0xFF, size)
    qkv, y = bench.put(fused), bench.blank(rows, heads * head_dim)
    given = bench.put(slot), bench.put(table), bench.put(table_row)
    blocks, sequence = bench.put(_integers(0)[None]), bench.put(np.zeros(rows, np.int32))
    position = bench.put(np.arange(rows, dtype=np.int32))

    def append_and_attend() -> None:
        ops.rope_append(bench.queue, qkv, cache, *given, heads=heads, rotary_dim=rotary_dim)
        q = qkv.columns(0, heads * head_dim)
        ops.attention_paged(
            bench.queue, y, q, cache, blocks, sequence, position, heads=heads, scale=0.2
        )

    bench.run(append_and_attend)
    split = (heads + kv_heads) * head_dim
    rotated = reference.rope(fused[:, :split], table, table_row, heads + kv_heads, rotary_dim)
    expected = np.hstack([rotated, fused[:, split:]])
    parts = expected.reshape(rows, -1, head_dim)
    kept = np.zeros((2, BLOCK, kv_heads, head_dim), np.float32)
    kept[0, :rows] = reference.stored(parts[:, heads:-kv_heads].astype(np.float32), dtype)
    kept[1, :rows] = reference.stored(parts[:, -kv_heads:].astype(np.float32), dtype)
    attended = reference.attention_paged(
        parts[:, :heads], kept[0], kept[1], _integers(0)[None], np.zeros(rows, np.int64),
        np.arange(rows), scale=0.2, slope=None, window=0,
    )  # fmt: skip
    return [Output(qkv, expected, F32), Output(y, attended.reshape(rows, -1), ON_GPU[dtype])]


def _register_attention() -> None:
    for dtype in FLOATS:
        _case(f"rope_append-{dtype.name.lower()}")(
            lambda bench, dtype=dtype: _rope_append(bench, dtype)
        )
        for name, shape in ATTENTIONS.items():

            def attention(
                bench: Bench, dtype: DType = dtype, shape: Attention = shape
            ) -> list[Output]:
                return _attention(bench, dtype, shape)

            CASES[f"attention-{name}-{dtype.name.lower()}"] = attention


_register_attention()


# ---- sampling ------------------------------------------------------------------------------------


def _sample(bench: Bench, logits: Array, floats: Array, ints: Array) -> list[Output]:
    rows = len(logits)
    counts, bias = np.zeros((2, logits.shape[1]), np.int32), _normal(9, 2, logits.shape[1])
    counts[1, ::3] = 2
    ids, logprobs = bench.put(np.full(rows, -7, np.int32)), bench.blank(rows)
    given = [bench.put(array) for array in (logits, floats, ints, counts, bias)]
    bench.run(lambda: ops.sample(bench.queue, ids, logprobs, *given))
    picks = []
    for row in range(rows):
        slot = ints[row, 4]
        own = (counts[slot].view(np.uint32), bias[slot]) if slot >= 0 else (None, None)
        picks.append(reference.sample_row(logits[row], floats[row], ints[row], *own))
    expected = reference.log_softmax(logits)[np.arange(rows), picks]
    return [Output(ids, _integers(*picks)), Output(logprobs, expected, F32)]


def _parameters(rows: int) -> tuple[Array, Array]:
    """Greedy, no slot, nothing banned."""
    floats = np.zeros((rows, ops.SAMPLE_FLOATS), np.float32)
    ints = np.zeros((rows, ops.SAMPLE_INTS), np.int32)
    floats[:, [1, 3]] = 1
    ints[:, 4] = -1
    ints[:, reference.BANNED_FIRST :] = -1
    return floats, ints


@_case("sample-greedy")
def _sample_greedy(bench: Bench) -> list[Output]:
    return _sample(bench, _normal(1, 2, 301), *_parameters(2))


@_case("sample-filtered")
def _sample_filtered(bench: Bench) -> list[Output]:
    floats, ints = _parameters(2)
    floats[:, :6] = 0.8, 0.9, 0.02, 1.2, 0.3, 0.1
    ints[:, 0], ints[:, 1], ints[:, 3], ints[:, 4] = 40, 1234, (5, 6), (-1, 1)
    return _sample(bench, 2 * _normal(2, 2, 301), floats, ints)


@_case("sample_reset")
def _sample_reset(bench: Bench) -> list[Output]:
    counts, bias = np.full((3, 50), 9, np.int32), _normal(1, 3, 50)
    prompt, ids, values = _integers(3, 49, 3, 50, -1), _integers(7, 60), np.float32([1.5, 2.5])
    table, offsets = bench.put(counts), bench.put(bias)
    given = bench.put(prompt), bench.put(ids), bench.put(values)
    bench.run(lambda: ops.sample_reset(bench.queue, table, offsets, 1, *given))
    expected_counts, expected_bias = counts.copy(), bias.copy()
    expected_counts[1], expected_bias[1] = 0, 0
    expected_counts[1, [3, 49]] = np.int32(-(2**31))
    expected_bias[1, 7] = 1.5
    return [Output(table, expected_counts), Output(offsets, expected_bias)]


@contextmanager
def ran(library: Library, case: str) -> Iterator[tuple[Bench, list[Output]]]:
    """Runs a case in a stand-in library; its memory and launches can be looked at inside."""
    with Queue(library) as queue:
        bench = Bench(library, queue)
        try:
            yield bench, CASES[case](bench)
        finally:
            bench.close()


# What a quick run executes as machine code: each kernel's way once, types where they differ in kind.
_SLOW = ("matmul-wide-", "attention-tile", "attention-long_head")
QUICK = [
    c for c in CASES if not c.startswith(_SLOW) and (c.count("-") < 2 or not c.endswith("-bf16"))
]
QUICK += ["matmul-wide-f16", "attention-tile64-f16", "attention-split-bf16"]
QUICK_RDNA2 = [
    c for c in QUICK if c.startswith(("matmul-", "attention-")) and not c.endswith("-f32")
]
QUICK_RDNA2 += ["rms_norm", "rope", "embedding-q8_0", "matrix_pack-f16", "sample-filtered"]
