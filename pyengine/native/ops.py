"""One typed function a kernel: checks shapes and dtypes of buffers, then records or runs.

Shapes are written (rows, cols); a buffer may be a strided view where the header takes a stride.
Values that only the device knows (ids, slots, positions) are checked by the kernels themselves.
Every function raises InvalidArgument for what does not fit, and the exception of the C status
otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pyengine.errors import InvalidArgument
from pyengine.native.bindings import (
    Activation,
    Constant,
    DType,
    Epilogue,
    NormKind,
    address,
    uint64_cell,
)
from pyengine.native.library import Library
from pyengine.native.memory import Arena, Array, Buffer, Queue, data_address, row_bytes

KV_BLOCK_SIZE = int(Constant.KV_BLOCK_SIZE)
SAMPLE_FLOATS = int(Constant.SAMPLE_FLOATS)
SAMPLE_INTS = int(Constant.SAMPLE_INTS)
SAMPLE_MAX_BANNED = int(Constant.SAMPLE_MAX_BANNED)
FLOAT_DTYPES = (DType.F32, DType.F16, DType.BF16)


@dataclass(frozen=True, slots=True)
class Matrix:
    """A packed (out, in) weight matrix, in a layout of the backend's own."""

    ptr: int
    dtype: DType
    out: int
    inner: int
    arena: Arena


@dataclass(frozen=True, slots=True)
class KVLayer:
    """One layer's paged cache of keys and values: `blocks` blocks of KV_BLOCK_SIZE tokens."""

    ptr: int
    dtype: DType
    blocks: int
    kv_heads: int
    head_dim: int
    arena: Arena


def _require(condition: bool, function: str, text: str) -> None:
    if not condition:
        raise InvalidArgument(f"{function}: {text}", function=function)


def _expect(function: str, name: str, buffer: Buffer, dtype: DType, *shape: int | None) -> None:
    """dtype and shape (None: any length) of a buffer."""
    fits = len(buffer.shape) == len(shape) and all(
        want is None or want == got for want, got in zip(shape, buffer.shape, strict=True)
    )
    if buffer.dtype != dtype or not fits:
        wanted = ", ".join("*" if s is None else str(s) for s in shape)
        raise InvalidArgument(
            f"{function}: {name} is {buffer.dtype.name} {buffer.shape}, "
            f"expected {dtype.name} ({wanted})",
            function=function,
        )


def _optional(
    function: str, name: str, buffer: Buffer | None, dtype: DType, *shape: int | None
) -> int:
    """Address of an optional contiguous buffer; 0 when absent."""
    if buffer is None:
        return 0
    _expect(function, name, buffer, dtype, *shape)
    _require(buffer.contiguous, function, f"{name} must be contiguous")
    return buffer.ptr


# ---- weight matrices -----------------------------------------------------------------------------


def matrix_bytes(library: Library, dtype: DType, out: int, inner: int) -> int:
    """Bytes of a packed (out, inner) matrix."""
    cell = uint64_cell()
    library.c.ok_matrix_bytes(dtype, out, inner, address(cell))
    return cell.value


def new_matrix(arena: Arena, dtype: DType, out: int, inner: int) -> Matrix:
    """Carves room for a packed matrix, to be filled by pack_rows."""
    size = matrix_bytes(arena.library, dtype, out, inner)
    return Matrix(arena.alloc_bytes(size), dtype, out, inner, arena)


def pack_rows(
    queue: Queue,
    matrix: Matrix,
    first_row: int,
    source: Buffer,
    source_dtype: DType,
    rows: int,
    overflow: Buffer | None = None,
) -> None:
    """Converts and packs `rows` plain rows into rows [first_row, first_row + rows) of `matrix`.

    source: a device buffer of at least rows * row_bytes(source_dtype, matrix.inner) bytes.
    overflow: I32 (1), increased by the number of finite values that became infinite.
    """
    _require(
        source.nbytes >= rows * row_bytes(source_dtype, matrix.inner),
        "pack_rows",
        f"source holds {source.nbytes} bytes, too few for {rows} rows of {matrix.inner}",
    )
    flag = _optional("pack_rows", "overflow", overflow, DType.I32, 1)
    queue.library.c.ok_matrix_pack(
        queue.handle, matrix.ptr, matrix.dtype, matrix.out, matrix.inner, first_row,
        source.ptr, source_dtype, rows, flag,
    )  # fmt: skip


def pack_matrix(
    queue: Queue, arena: Arena, array: Array, dtype: DType, source_dtype: DType = DType.F32
) -> Matrix:
    """Packs a whole host array (out, inner); bf16 sources as uint16. Waits until it is done."""
    out, inner = array.shape
    matrix = new_matrix(arena, dtype, out, inner)
    with arena.scope():
        source = arena.alloc((out, inner), source_dtype).upload(queue, array)
        pack_rows(queue, matrix, 0, source, source_dtype, out)
        queue.sync()
    return matrix


def unpack_matrix(
    queue: Queue, matrix: Matrix, first_row: int = 0, rows: int | None = None
) -> Array:
    """Rows of a packed matrix as float32 (rows, inner), exactly widened."""
    count = matrix.out - first_row if rows is None else rows
    with matrix.arena.scope():
        plain = matrix.arena.alloc((count, matrix.inner), DType.F32)
        queue.library.c.ok_matrix_unpack(
            queue.handle, plain.ptr, DType.F32, matrix.ptr, matrix.dtype,
            matrix.out, matrix.inner, first_row, count,
        )  # fmt: skip
        return plain.download(queue)


def unpack_q8_0(queue: Queue, matrix: Matrix, first_row: int = 0, rows: int | None = None) -> Array:
    """Rows of a q8_0 matrix as ggml's blocks: uint8 (rows, ceil(inner / 32) * 34)."""
    count = matrix.out - first_row if rows is None else rows
    width = row_bytes(DType.Q8_0, matrix.inner)
    with matrix.arena.scope():
        plain = matrix.arena.alloc((-(-count * width // 2),), DType.BF16)
        queue.library.c.ok_matrix_unpack(
            queue.handle, plain.ptr, DType.Q8_0, matrix.ptr, matrix.dtype,
            matrix.out, matrix.inner, first_row, count,
        )  # fmt: skip
        return plain.download(queue).view(np.uint8)[: count * width].reshape(count, width)


def quantize_q8_0(
    queue: Queue, arena: Arena, array: Array, dtype: DType = DType.F32
) -> tuple[Array, int]:
    """A host array (rows, cols) as ggml's blocks, by way of the device.

    dtype: of `array`: F32, F16, or BF16 as uint16.

    Returns:
        uint8 (rows, ceil(cols / 32) * 34), and how many blocks cannot hold their values (not
        finite, or beyond 127 * 65504).
    """
    rows, cols = array.shape
    width = row_bytes(DType.Q8_0, cols)
    with arena.scope():
        source = arena.alloc(array.shape, dtype).upload(queue, array)
        blocks = arena.alloc((rows, width // 2), DType.BF16)  # 16-bit words
        failed = arena.alloc((1,), DType.I32).upload(queue, np.zeros(1, np.int32))
        queue.library.c.ok_quantize_q8_0(
            queue.handle, blocks.ptr, source.ptr, dtype, rows, cols, failed.ptr
        )
        return blocks.download(queue).view(np.uint8), int(failed.download(queue)[0])


def matmul(
    queue: Queue,
    y: Buffer,
    x: Buffer,
    weight: Matrix,
    bias: Buffer | None = None,
    residual: Buffer | None = None,
    active: Buffer | None = None,
) -> None:
    """y (rows, out) = x (rows, inner) weight^T (+ bias (out)) (+ residual (rows, out)).

    active: I32 (1); rows at and past its value are neither read nor written.
    """
    rows = x.shape[0]
    _expect("matmul", "x", x, DType.F32, None, weight.inner)
    _expect("matmul", "y", y, DType.F32, rows, weight.out)
    _require(x.contiguous and y.contiguous, "matmul", "x and y must be contiguous")
    queue.library.c.ok_matmul(
        queue.handle, y.ptr, x.ptr, weight.ptr, weight.dtype,
        _optional("matmul", "bias", bias, DType.F32, weight.out),
        _optional("matmul", "residual", residual, DType.F32, rows, weight.out),
        _optional("matmul", "active", active, DType.I32, 1),
        rows, weight.out, weight.inner,
    )  # fmt: skip


@dataclass(frozen=True)
class Norm:
    """A norm of whole rows: weight, and for LayerNorm bias, F32 (cols)."""

    kind: NormKind
    weight: Buffer
    bias: Buffer | None
    eps: float


def matmul_fused(
    queue: Queue,
    y: Buffer,
    x: Buffer,
    weight: Matrix,
    bias: Buffer | None = None,
    *,
    norm: Norm | None = None,
    normed: Buffer | None = None,
    activation: Activation | None = None,
    product: Buffer | None = None,
) -> None:
    """y = activation(norm(x) weight^T (+ bias)), in one launch where the build can.

    Args:
        y: (rows, out); with a product: (rows, out / 2), as activate_gated has it.
        norm: of x (rows, inner), which is plain without one.
        normed: room for (rows, inner), with a norm.
        activation: None: none.
        product: room for (rows, out): the activation is gated.
    """
    rows, gated = x.shape[0], product is not None
    _expect("matmul_fused", "x", x, DType.F32, None, weight.inner)
    _expect("matmul_fused", "y", y, DType.F32, rows, weight.out // 2 if gated else weight.out)
    _require(x.contiguous and y.contiguous, "matmul_fused", "x and y must be contiguous")
    kind, eps, norm_weight, norm_bias = NormKind.NONE, 0.0, None, None
    if norm is not None:
        kind, eps, norm_weight, norm_bias = norm.kind, norm.eps, norm.weight, norm.bias
    epilogue = Epilogue.NONE
    if activation is not None:
        epilogue = Epilogue.GATED if gated else Epilogue.ACTIVATE
    queue.library.c.ok_matmul_fused(
        queue.handle, y.ptr, x.ptr, kind,
        _optional("matmul_fused", "norm.weight", norm_weight, DType.F32, weight.inner),
        _optional("matmul_fused", "norm.bias", norm_bias, DType.F32, weight.inner),
        eps,
        _optional("matmul_fused", "normed", normed, DType.F32, rows, weight.inner),
        weight.ptr, weight.dtype,
        _optional("matmul_fused", "bias", bias, DType.F32, weight.out),
        epilogue, Activation.SILU if activation is None else activation,
        _optional("matmul_fused", "product", product, DType.F32, rows, weight.out),
        rows, weight.out, weight.inner,
    )  # fmt: skip


def matmul_scratch_bytes(library: Library, dtype: DType, rows: int, out: int, inner: int) -> int:
    """Queue scratch that such a matmul needs."""
    cell = uint64_cell()
    library.c.ok_matmul_scratch_bytes(dtype, rows, out, inner, address(cell))
    return cell.value


def embedding(
    queue: Queue, y: Buffer, table: Matrix, ids: Buffer, residual: Buffer | None = None
) -> None:
    """y (rows, inner) = table[ids] (+ residual); ids: I32 (rows), outside the table: zeros."""
    rows = ids.shape[0]
    _expect("embedding", "ids", ids, DType.I32, None)
    _expect("embedding", "y", y, DType.F32, rows, table.inner)
    _require(y.contiguous, "embedding", "y must be contiguous")
    queue.library.c.ok_embedding(
        queue.handle, y.ptr, table.ptr, table.dtype, ids.ptr,
        _optional("embedding", "residual", residual, DType.F32, rows, table.inner),
        rows, table.out, table.inner,
    )  # fmt: skip


# ---- norms, rotary, activations ------------------------------------------------------------------


def rms_norm(
    queue: Queue,
    y: Buffer,
    x: Buffer,
    weight: Buffer,
    *,
    eps: float,
    groups: int = 1,
    residual: Buffer | None = None,
) -> None:
    """RMSNorm of each of `groups` vectors a row; x, y, residual: (rows, groups * cols), strided."""
    rows, cols = _check_norm("rms_norm", y, x, weight, groups, residual)
    queue.library.c.ok_rms_norm(
        queue.handle, y.ptr, y.stride, x.ptr, x.stride, weight.ptr,
        residual.ptr if residual else 0, residual.stride if residual else 0,
        rows, groups, cols, eps,
    )  # fmt: skip


def layer_norm(
    queue: Queue,
    y: Buffer,
    x: Buffer,
    weight: Buffer,
    bias: Buffer | None,
    *,
    eps: float,
    groups: int = 1,
    residual: Buffer | None = None,
) -> None:
    """LayerNorm of each of `groups` vectors a row; shapes as rms_norm."""
    rows, cols = _check_norm("layer_norm", y, x, weight, groups, residual)
    queue.library.c.ok_layer_norm(
        queue.handle, y.ptr, y.stride, x.ptr, x.stride, weight.ptr,
        _optional("layer_norm", "bias", bias, DType.F32, groups * cols),
        residual.ptr if residual else 0, residual.stride if residual else 0,
        rows, groups, cols, eps,
    )  # fmt: skip


def _check_norm(
    function: str, y: Buffer, x: Buffer, weight: Buffer, groups: int, residual: Buffer | None
) -> tuple[int, int]:
    """(rows, cols of one group)."""
    _expect(function, "x", x, DType.F32, None, None)
    rows, width = x.shape
    _require(
        groups >= 1 and width % groups == 0, function, f"groups={groups} must divide cols={width}"
    )
    _expect(function, "y", y, DType.F32, rows, width)
    _expect(function, "weight", weight, DType.F32, width)
    if residual is not None:
        _expect(function, "residual", residual, DType.F32, rows, width)
    return rows, width // groups


def rope(
    queue: Queue,
    x: Buffer,
    table: Buffer,
    table_row: Buffer,
    *,
    heads: int,
    head_dim: int,
    rotary_dim: int,
) -> None:
    """Rotates in place, pairing j with j + rotary_dim / 2; x (rows, heads * head_dim), strided.

    table: F32 (table_rows, rotary_dim), cos then sin. table_row: I32 (rows); out of range:
        untouched.
    """
    _expect("rope", "x", x, DType.F32, None, heads * head_dim)
    _expect("rope", "table", table, DType.F32, None, rotary_dim)
    _expect("rope", "table_row", table_row, DType.I32, x.shape[0])
    queue.library.c.ok_rope(
        queue.handle, x.ptr, x.stride, table.ptr, table.shape[0], table_row.ptr,
        x.shape[0], heads, head_dim, rotary_dim,
    )  # fmt: skip


def activate(queue: Queue, y: Buffer, x: Buffer, kind: Activation) -> None:
    """y = kind(x), elementwise; y may be x."""
    _expect("activate", "y", y, DType.F32, *x.shape)
    _require(x.contiguous and y.contiguous, "activate", "x and y must be contiguous")
    count = x.nbytes // 4
    queue.library.c.ok_activate(queue.handle, y.ptr, x.ptr, kind, count)


def activate_gated(queue: Queue, y: Buffer, x: Buffer, kind: Activation) -> None:
    """y (rows, cols) = kind(x[:, :cols]) * x[:, cols:]; x (rows, 2 cols): gate, then up."""
    rows, cols = y.shape
    _expect("activate_gated", "y", y, DType.F32, rows, cols)
    _expect("activate_gated", "x", x, DType.F32, rows, 2 * cols)
    _require(x.contiguous and y.contiguous, "activate_gated", "x and y must be contiguous")
    queue.library.c.ok_activate_gated(queue.handle, y.ptr, x.ptr, kind, rows, cols)


def gather_rows(
    queue: Queue, y: Buffer, x: Buffer, index: Buffer, active: Buffer | None = None
) -> None:
    """y[r] = x[index[r]] for r < active; index: I32 (rows); out of range: zeros."""
    rows, cols = y.shape
    _expect("gather_rows", "y", y, DType.F32, rows, cols)
    _expect("gather_rows", "x", x, DType.F32, None, cols)
    _expect("gather_rows", "index", index, DType.I32, rows)
    _require(x.contiguous and y.contiguous, "gather_rows", "x and y must be contiguous")
    queue.library.c.ok_gather_rows(
        queue.handle, y.ptr, x.ptr, index.ptr,
        _optional("gather_rows", "active", active, DType.I32, 1),
        rows, x.shape[0], cols,
    )  # fmt: skip


def count_nonfinite(queue: Queue, count: Buffer, x: Buffer, active: Buffer | None = None) -> None:
    """count += NaN and infinite values in the first `active` rows of x (rows, cols)."""
    _expect("count_nonfinite", "count", count, DType.I32, 1)
    _expect("count_nonfinite", "x", x, DType.F32, None, None)
    _require(x.contiguous, "count_nonfinite", "x must be contiguous")
    queue.library.c.ok_count_nonfinite(
        queue.handle, count.ptr, x.ptr,
        _optional("count_nonfinite", "active", active, DType.I32, 1),
        *x.shape,
    )  # fmt: skip


# ---- attention -----------------------------------------------------------------------------------


def kv_cache_bytes(
    library: Library, dtype: DType, blocks: int, kv_heads: int, head_dim: int
) -> int:
    """Bytes of one layer's cache."""
    cell = uint64_cell()
    library.c.ok_kv_cache_bytes(dtype, blocks, kv_heads, head_dim, address(cell))
    return cell.value


def kv_layer(arena: Arena, dtype: DType, blocks: int, kv_heads: int, head_dim: int) -> KVLayer:
    """Carves one layer's cache; its contents are undefined until appended."""
    size = kv_cache_bytes(arena.library, dtype, blocks, kv_heads, head_dim)
    return KVLayer(arena.alloc_bytes(size), dtype, blocks, kv_heads, head_dim, arena)


def kv_append(queue: Queue, cache: KVLayer, k: Buffer, v: Buffer, slot: Buffer) -> None:
    """Stores keys and values (rows, kv_heads * head_dim), same stride, at slot[r] (I32 (rows))."""
    width = cache.kv_heads * cache.head_dim
    rows = k.shape[0]
    _expect("kv_append", "k", k, DType.F32, None, width)
    _expect("kv_append", "v", v, DType.F32, rows, width)
    _expect("kv_append", "slot", slot, DType.I32, rows)
    _require(k.stride == v.stride, "kv_append", f"strides differ: k {k.stride}, v {v.stride}")
    queue.library.c.ok_kv_append(
        queue.handle, cache.ptr, cache.dtype, cache.blocks, k.ptr, v.ptr, k.stride, slot.ptr,
        rows, cache.kv_heads, cache.head_dim,
    )  # fmt: skip


def rope_append(
    queue: Queue,
    qkv: Buffer,
    cache: KVLayer,
    slot: Buffer,
    table: Buffer,
    table_row: Buffer,
    *,
    heads: int,
    rotary_dim: int,
) -> None:
    """rope on the queries and keys of qkv, then kv_append of its keys and values, in one launch.

    qkv: F32 (rows, (heads + 2 kv_heads) * head_dim), strided; queries and keys are rotated in
        place. The rest as rope and kv_append have it.
    """
    rows = qkv.shape[0]
    _expect(
        "rope_append", "qkv", qkv, DType.F32, None, (heads + 2 * cache.kv_heads) * cache.head_dim
    )
    _expect("rope_append", "slot", slot, DType.I32, rows)
    _expect("rope_append", "table", table, DType.F32, None, rotary_dim)
    _expect("rope_append", "table_row", table_row, DType.I32, rows)
    queue.library.c.ok_rope_append(
        queue.handle, qkv.ptr, qkv.stride, table.ptr, table.shape[0], table_row.ptr, cache.ptr,
        cache.dtype, cache.blocks, slot.ptr, rows, heads, cache.kv_heads, cache.head_dim,
        rotary_dim,
    )  # fmt: skip


def attention_paged(
    queue: Queue,
    y: Buffer,
    q: Buffer,
    cache: KVLayer,
    block_table: Buffer,
    sequence: Buffer,
    position: Buffer,
    *,
    heads: int,
    scale: float,
    slope: Buffer | None = None,
    window: int = 0,
) -> None:
    """Causal attention of ragged rows over a paged cache.

    y, q: F32 (rows, heads * head_dim), q may be strided. block_table: I32 (sequences, blocks a
        sequence).
    sequence, position: I32 (rows); position < 0 gives a row of zeros. slope: F32 (heads), ALiBi.
    window: keys seen including the row's own; 0 = all.
    """
    rows = q.shape[0]
    _expect("attention_paged", "q", q, DType.F32, None, heads * cache.head_dim)
    _expect("attention_paged", "y", y, DType.F32, rows, heads * cache.head_dim)
    _expect("attention_paged", "block_table", block_table, DType.I32, None, None)
    _expect("attention_paged", "sequence", sequence, DType.I32, rows)
    _expect("attention_paged", "position", position, DType.I32, rows)
    _require(y.contiguous, "attention_paged", "y must be contiguous")
    queue.library.c.ok_attention_paged(
        queue.handle, y.ptr, q.ptr, q.stride, cache.ptr, cache.dtype, cache.blocks,
        block_table.ptr, *block_table.shape, sequence.ptr, position.ptr,
        _optional("attention_paged", "slope", slope, DType.F32, heads),
        rows, heads, cache.kv_heads, cache.head_dim, window, scale,
    )  # fmt: skip


def attention_scratch_bytes(
    library: Library, rows: int, heads: int, head_dim: int, max_context: int
) -> int:
    """Queue scratch that such an attention call needs."""
    cell = uint64_cell()
    library.c.ok_attention_scratch_bytes(rows, heads, head_dim, max_context, address(cell))
    return cell.value


# ---- sampling ------------------------------------------------------------------------------------


def sample(
    queue: Queue,
    ids: Buffer,
    logprobs: Buffer | None,
    logits: Buffer,
    floats: Buffer,
    ints: Buffer,
    counts: Buffer | None = None,
    bias: Buffer | None = None,
    active: Buffer | None = None,
) -> None:
    """Picks one token a row; parameters as ok_sample in okernel.h.

    ids: I32 (rows). logprobs: F32 (rows). logits: F32 (rows, vocab). floats: F32 (rows,
        SAMPLE_FLOATS).
    ints: I32 (rows, SAMPLE_INTS). counts: I32 (slots, vocab). bias: F32 (slots, vocab).
    """
    rows, vocab = logits.shape
    table = counts if counts is not None else bias
    slots = table.shape[0] if table is not None else 0
    _expect("sample", "ids", ids, DType.I32, rows)
    _expect("sample", "logits", logits, DType.F32, rows, vocab)
    _expect("sample", "floats", floats, DType.F32, rows, SAMPLE_FLOATS)
    _expect("sample", "ints", ints, DType.I32, rows, SAMPLE_INTS)
    queue.library.c.ok_sample(
        queue.handle, ids.ptr,
        _optional("sample", "logprobs", logprobs, DType.F32, rows),
        logits.ptr, floats.ptr, ints.ptr,
        _optional("sample", "counts", counts, DType.I32, slots, vocab),
        _optional("sample", "bias", bias, DType.F32, slots, vocab),
        _optional("sample", "active", active, DType.I32, 1),
        slots, rows, vocab,
    )  # fmt: skip


def sample_reset(
    queue: Queue,
    counts: Buffer | None,
    bias: Buffer | None,
    slot: int,
    prompt: Buffer,
    bias_ids: Buffer | None = None,
    bias_values: Buffer | None = None,
) -> None:
    """Clears a slot's counts and bias, marks the prompt's ids (I32 (length)), and sets its bias."""
    table = counts if counts is not None else bias
    _require(table is not None, "sample_reset", "counts or bias must be given")
    assert table is not None
    slots, vocab = table.shape
    length = bias_ids.shape[0] if bias_ids is not None else 0
    queue.library.c.ok_sample_reset(
        queue.handle,
        _optional("sample_reset", "counts", counts, DType.I32, slots, vocab),
        _optional("sample_reset", "bias", bias, DType.F32, slots, vocab),
        slot, slots, vocab, prompt.ptr, prompt.shape[0],
        _optional("sample_reset", "bias_ids", bias_ids, DType.I32, length),
        _optional("sample_reset", "bias_values", bias_values, DType.F32, length),
        length,
    )  # fmt: skip


def read_probe(queue: Queue, word: Buffer, source: Buffer) -> None:
    """Reads all of `source` and writes one word (I32 (1)) that depends on it: a bandwidth probe."""
    _expect("read_probe", "word", word, DType.I32, 1)
    queue.library.c.ok_read(queue.handle, word.ptr, source.ptr, source.nbytes // 64 * 64)


__all__ = [
    "FLOAT_DTYPES", "KV_BLOCK_SIZE", "KVLayer", "Matrix", "SAMPLE_FLOATS", "SAMPLE_INTS",
    "SAMPLE_MAX_BANNED", "activate", "activate_gated", "attention_paged", "attention_scratch_bytes",
    "count_nonfinite", "data_address", "embedding", "gather_rows", "kv_append", "kv_cache_bytes",
    "kv_layer", "layer_norm", "matmul", "matmul_scratch_bytes", "matrix_bytes", "new_matrix",
    "pack_matrix", "pack_rows", "read_probe", "rms_norm", "rope", "sample", "sample_reset",
    "unpack_matrix", "unpack_q8_0",
]  # fmt: skip
