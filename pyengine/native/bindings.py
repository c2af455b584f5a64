"""GENERATED from libokernel/include/okernel.h by scripts/gen_bindings.py: do not edit.

The only module that knows ctypes: enums, prototypes, loading, and status -> exception. Pointers
are plain integers (addresses) on the Python side; out-parameters take the address of a cell.
"""

# ruff: noqa: E501
# fmt: off

from __future__ import annotations

import ctypes
from ctypes import (
    CFUNCTYPE,
    c_char_p,
    c_float,
    c_int32,
    c_int64,
    c_uint8,
    c_uint64,
    c_void_p,
)
from enum import IntEnum
from typing import Any

from pyengine import errors


class Status(IntEnum):
    """`ok_status` of the header."""

    SUCCESS = 0
    ERR_INVALID_ARGUMENT = 1
    ERR_OUT_OF_MEMORY = 2
    ERR_DEVICE = 3
    ERR_UNAVAILABLE = 4
    ERR_UNSUPPORTED = 5


class DType(IntEnum):
    """`ok_dtype` of the header."""

    F32 = 0
    F16 = 1
    BF16 = 2
    Q8_0 = 3
    I32 = 4


class Memory(IntEnum):
    """`ok_memory` of the header."""

    DEVICE = 0
    HOST = 1


class Activation(IntEnum):
    """`ok_activation` of the header."""

    SILU = 0
    GELU_TANH = 1
    GELU_ERF = 2
    RELU = 3


class NormKind(IntEnum):
    """`ok_norm` of the header."""

    NONE = 0
    RMS = 1
    LAYER = 2


class Epilogue(IntEnum):
    """`ok_epilogue` of the header."""

    NONE = 0
    ACTIVATE = 1
    GATED = 2


class Replay(IntEnum):
    """`ok_replay` of the header."""

    LOOP = 0
    GRAPH = 1


class Constant(IntEnum):
    """`ok_constant` of the header."""

    ABI_VERSION = 1
    KV_BLOCK_SIZE = 32
    SAMPLE_FLOATS = 8
    SAMPLE_INTS = 16
    SAMPLE_MAX_BANNED = 8


_EXCEPTIONS: dict[int, type[errors.KernelError]] = {
    Status.ERR_INVALID_ARGUMENT: errors.InvalidArgument,
    Status.ERR_OUT_OF_MEMORY: errors.OutOfMemory,
    Status.ERR_DEVICE: errors.DeviceError,
    Status.ERR_UNAVAILABLE: errors.Unavailable,
    Status.ERR_UNSUPPORTED: errors.Unsupported,
}


def int32_cell() -> c_int32:
    """An int32 that C can write; read `.value`."""
    return c_int32()


def int64_cell() -> c_int64:
    """An int64 that C can write; read `.value`."""
    return c_int64()


def uint64_cell() -> c_uint64:
    """A uint64 that C can write; read `.value`."""
    return c_uint64()


def float_cell() -> c_float:
    """A float that C can write; read `.value`."""
    return c_float()


def pointer_cell() -> c_void_p:
    """A pointer that C can write; read `.value` (None when null)."""
    return c_void_p()


def address(cell: Any) -> int:
    """Address of a cell, to pass where the header takes a pointer."""
    return ctypes.addressof(cell)


def text_cell(size: int) -> Any:
    """A char buffer of `size` bytes that C can write; read `.value` (bytes)."""
    return ctypes.create_string_buffer(size)


class _DLTensor(ctypes.Structure):
    """DLTensor of dlpack.h, version 0.8."""

    _fields_ = [
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("type_code", c_uint8),
        ("type_bits", c_uint8),
        ("type_lanes", ctypes.c_uint16),
        ("shape", c_void_p),
        ("strides", c_void_p),  # null: row-major without gaps
        ("byte_offset", c_uint64),
    ]


class _DLManagedTensor(ctypes.Structure):
    """DLManagedTensor of dlpack.h, version 0.8."""

    _fields_ = [("tensor", _DLTensor), ("manager_context", c_void_p), ("deleter", c_void_p)]


_FLOAT_CODE = 2  # kDLFloat
_CAPSULE_NAME = b"dltensor"
# Address of a managed tensor that somebody holds -> what it needs to stay alive.
_lent: dict[int, tuple[Any, ...]] = {}


def _take_back(managed: int) -> None:
    """The deleter, called by whoever took the tensor out of its capsule."""
    _lent.pop(managed, None)


def _drop_capsule(capsule: int) -> None:
    """The capsule's end; its name is another one if its tensor was taken out."""
    if _capsule_is_valid(capsule, _CAPSULE_NAME):
        _lent.pop(_capsule_pointer(capsule, _CAPSULE_NAME), None)


_deleter: Any = CFUNCTYPE(None, c_void_p)(_take_back)
_destructor: Any = ctypes.PYFUNCTYPE(None, c_void_p)(_drop_capsule)
_new_capsule: Any = ctypes.PYFUNCTYPE(ctypes.py_object, c_void_p, c_char_p, c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
_capsule_is_valid: Any = ctypes.PYFUNCTYPE(c_int32, c_void_p, c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_capsule_pointer: Any = ctypes.PYFUNCTYPE(c_void_p, c_void_p, c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def dlpack_capsule(
    pointer: int, shape: tuple[int, ...], device: tuple[int, int], owner: object
) -> Any:
    """A "dltensor" capsule of contiguous float32 memory, which keeps `owner` alive.

    device: (type, number) as dlpack.h has them.
    """
    sizes = (c_int64 * len(shape))(*shape)
    tensor = _DLTensor(
        pointer, *device, len(shape), _FLOAT_CODE, 32, 1, ctypes.addressof(sizes), None, 0
    )
    managed = _DLManagedTensor(tensor, None, ctypes.cast(_deleter, c_void_p))
    place = ctypes.addressof(managed)
    _lent[place] = (managed, sizes, owner)
    return _new_capsule(place, _CAPSULE_NAME, ctypes.cast(_destructor, c_void_p))


class Functions:
    """Every function of the header, bound to one loaded build; a failed status raises.

    Raises:
        errors.LibraryError: the file cannot be loaded, lacks a function, or has another ABI.
    """

    def __init__(self, path: str) -> None:
        try:
            library = ctypes.CDLL(path)
        except OSError as error:
            raise errors.LibraryError(f"cannot load {path}: {error}") from error
        try:
            abi = CFUNCTYPE(c_int32)(("ok_abi_version", library))()
            if abi != Constant.ABI_VERSION:
                raise errors.LibraryError(
                    f"{path} has ABI version {abi}; this package needs "
                    f"{int(Constant.ABI_VERSION)}: install a library of the same release"
                )
            for name, prototype, names, fallible in _prototypes():
                function: Any = prototype((name, library), tuple((1, n) for n in names))
                if fallible:
                    function.errcheck = self._check
                    function.ok_name = name
                setattr(self, name, function)
        except AttributeError as error:
            raise errors.LibraryError(
                f"{path} is not a libokernel of this release: {error}"
            ) from error

    def _check(self, status: int, function: Any, _arguments: Any) -> int:
        if status != Status.SUCCESS:
            message = (self.ok_last_error() or b"").decode(errors="replace")
            name = function.ok_name
            kind = _EXCEPTIONS.get(status, errors.KernelError)
            message = message or f"{name} failed with status {status}"
            raise kind(message, status=status, function=name)
        return status

    ok_abi_version: Any
    ok_backend: Any
    ok_build_info: Any
    ok_targets: Any
    ok_status_name: Any
    ok_last_error: Any
    ok_device_count: Any
    ok_device_name: Any
    ok_device_memory: Any
    ok_device_usable: Any
    ok_runtime_info: Any
    ok_set_threads: Any
    ok_threads: Any
    ok_path: Any
    ok_set_path: Any
    ok_arena_create: Any
    ok_arena_destroy: Any
    ok_arena_alloc: Any
    ok_arena_mark: Any
    ok_arena_release: Any
    ok_allocation_count: Any
    ok_fail_allocation: Any
    ok_queue_create: Any
    ok_queue_destroy: Any
    ok_queue_set_scratch: Any
    ok_queue_sync: Any
    ok_record_begin: Any
    ok_record_end: Any
    ok_record_abort: Any
    ok_program_destroy: Any
    ok_program_replay: Any
    ok_program_launches: Any
    ok_program_set_replay: Any
    ok_event_create: Any
    ok_event_destroy: Any
    ok_event_record: Any
    ok_event_elapsed: Any
    ok_copy: Any
    ok_fill: Any
    ok_read: Any
    ok_matrix_bytes: Any
    ok_matrix_pack: Any
    ok_matrix_unpack: Any
    ok_quantize_q8_0: Any
    ok_matmul: Any
    ok_matmul_scratch_bytes: Any
    ok_queue_set_quantized_activations: Any
    ok_queue_set_deterministic: Any
    ok_matmul_fused: Any
    ok_embedding: Any
    ok_rms_norm: Any
    ok_layer_norm: Any
    ok_rope: Any
    ok_activate: Any
    ok_activate_gated: Any
    ok_gather_rows: Any
    ok_count_nonfinite: Any
    ok_kv_cache_bytes: Any
    ok_kv_append: Any
    ok_rope_append: Any
    ok_attention_paged: Any
    ok_attention_scratch_bytes: Any
    ok_sample: Any
    ok_sample_reset: Any


def _prototypes() -> list[tuple[str, Any, tuple[str, ...], bool]]:
    """(name, prototype, argument names, whether it returns a status) of every function."""
    return [
        ("ok_abi_version", CFUNCTYPE(c_int32), (), False),
        ("ok_backend", CFUNCTYPE(c_char_p), (), False),
        ("ok_build_info", CFUNCTYPE(c_char_p), (), False),
        ("ok_targets", CFUNCTYPE(c_char_p), (), False),
        ("ok_status_name", CFUNCTYPE(c_char_p, c_int32), ("status",), False),
        ("ok_last_error", CFUNCTYPE(c_char_p), (), False),
        ("ok_device_count", CFUNCTYPE(c_int32, c_void_p), ("host_count",), True),
        ("ok_device_name", CFUNCTYPE(c_int32, c_int32, c_void_p, c_void_p, c_int64), ("device", "host_name", "host_arch", "size",), True),
        ("ok_device_memory", CFUNCTYPE(c_int32, c_int32, c_void_p, c_void_p), ("device", "host_free", "host_total",), True),
        ("ok_device_usable", CFUNCTYPE(c_int32, c_int32), ("device",), True),
        ("ok_runtime_info", CFUNCTYPE(c_int32, c_void_p, c_void_p, c_int64), ("host_version", "host_path", "size",), True),
        ("ok_set_threads", CFUNCTYPE(c_int32, c_int32), ("n",), True),
        ("ok_threads", CFUNCTYPE(c_int32), (), False),
        ("ok_path", CFUNCTYPE(c_char_p), (), False),
        ("ok_set_path", CFUNCTYPE(c_int32, c_void_p), ("host_name",), True),
        ("ok_arena_create", CFUNCTYPE(c_int32, c_void_p, c_int32, c_int32, c_uint64), ("host_out", "device", "memory", "bytes",), True),
        ("ok_arena_destroy", CFUNCTYPE(None, c_void_p), ("arena",), False),
        ("ok_arena_alloc", CFUNCTYPE(c_int32, c_void_p, c_uint64, c_void_p), ("arena", "bytes", "host_out",), True),
        ("ok_arena_mark", CFUNCTYPE(c_int32, c_void_p, c_void_p), ("arena", "host_mark",), True),
        ("ok_arena_release", CFUNCTYPE(c_int32, c_void_p, c_uint64), ("arena", "mark",), True),
        ("ok_allocation_count", CFUNCTYPE(c_int64), (), False),
        ("ok_fail_allocation", CFUNCTYPE(None, c_int64), ("n",), False),
        ("ok_queue_create", CFUNCTYPE(c_int32, c_void_p, c_int32, c_void_p), ("host_out", "device", "native_stream",), True),
        ("ok_queue_destroy", CFUNCTYPE(None, c_void_p), ("queue",), False),
        ("ok_queue_set_scratch", CFUNCTYPE(c_int32, c_void_p, c_void_p, c_uint64), ("queue", "scratch", "bytes",), True),
        ("ok_queue_sync", CFUNCTYPE(c_int32, c_void_p), ("queue",), True),
        ("ok_record_begin", CFUNCTYPE(c_int32, c_void_p), ("queue",), True),
        ("ok_record_end", CFUNCTYPE(c_int32, c_void_p, c_void_p), ("queue", "host_out",), True),
        ("ok_record_abort", CFUNCTYPE(c_int32, c_void_p), ("queue",), True),
        ("ok_program_destroy", CFUNCTYPE(None, c_void_p), ("program",), False),
        ("ok_program_replay", CFUNCTYPE(c_int32, c_void_p), ("program",), True),
        ("ok_program_launches", CFUNCTYPE(c_int32, c_void_p, c_void_p), ("program", "host_launches",), True),
        ("ok_program_set_replay", CFUNCTYPE(c_int32, c_void_p, c_int32), ("program", "replay",), True),
        ("ok_event_create", CFUNCTYPE(c_int32, c_void_p, c_int32), ("host_out", "device",), True),
        ("ok_event_destroy", CFUNCTYPE(None, c_void_p), ("event",), False),
        ("ok_event_record", CFUNCTYPE(c_int32, c_void_p, c_void_p), ("event", "queue",), True),
        ("ok_event_elapsed", CFUNCTYPE(c_int32, c_void_p, c_void_p, c_void_p), ("begin", "end", "host_milliseconds",), True),
        ("ok_copy", CFUNCTYPE(c_int32, c_void_p, c_void_p, c_void_p, c_uint64), ("queue", "dst", "src", "bytes",), True),
        ("ok_fill", CFUNCTYPE(c_int32, c_void_p, c_void_p, c_uint8, c_uint64), ("queue", "dst", "value", "bytes",), True),
        ("ok_read", CFUNCTYPE(c_int32, c_void_p, c_void_p, c_void_p, c_uint64), ("queue", "sum", "src", "bytes",), True),
        ("ok_matrix_bytes", CFUNCTYPE(c_int32, c_int32, c_int64, c_int64, c_void_p), ("dtype", "out", "in", "host_bytes",), True),
        ("ok_matrix_pack", CFUNCTYPE(c_int32, c_void_p, c_void_p, c_int32, c_int64, c_int64, c_int64, c_void_p, c_int32, c_int64, c_void_p), ("queue", "packed", "dtype", "out", "in", "first_row", "src", "src_dtype", "rows", "overflow",), True),
        ("ok_matrix_unpack", CFUNCTYPE(c_int32, c_void_p, c_void_p, c_int32, c_void_p, c_int32, c_int64, c_int64, c_int64, c_int64), ("queue", "dst", "dst_dtype", "packed", "dtype", "out", "in", "first_row", "rows",), True),
        ("ok_quantize_q8_0", CFUNCTYPE(c_int32, c_void_p, c_void_p, c_void_p, c_int32, c_int64, c_int64, c_void_p), ("queue", "blocks", "src", "src_dtype", "rows", "cols", "overflow",), True),
        ("ok_matmul", CFUNCTYPE(c_int32, c_void_p, c_void_p, c_void_p, c_void_p, c_int32, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64), ("queue", "y", "x", "weight", "dtype", "bias", "residual", "active", "rows", "out", "in",), True),
        ("ok_matmul_scratch_bytes", CFUNCTYPE(c_int32, c_int32, c_int64, c_int64, c_int64, c_void_p), ("dtype", "rows", "out", "in", "host_bytes",), True),
        ("ok_queue_set_quantized_activations", CFUNCTYPE(c_int32, c_void_p, c_int32), ("queue", "on",), True),
        ("ok_queue_set_deterministic", CFUNCTYPE(c_int32, c_void_p, c_int32), ("queue", "on",), True),
        ("ok_matmul_fused", CFUNCTYPE(c_int32, c_void_p, c_void_p, c_void_p, c_int32, c_void_p, c_void_p, c_float, c_void_p, c_void_p, c_int32, c_void_p, c_int32, c_int32, c_void_p, c_int64, c_int64, c_int64), ("queue", "y", "x", "norm", "norm_weight", "norm_bias", "eps", "normed", "weight", "dtype", "bias", "epilogue", "activation", "product", "rows", "out", "in",), True),
        ("ok_embedding", CFUNCTYPE(c_int32, c_void_p, c_void_p, c_void_p, c_int32, c_void_p, c_void_p, c_int64, c_int64, c_int64), ("queue", "y", "table", "dtype", "ids", "residual", "rows", "vocab", "cols",), True),
        ("ok_rms_norm", CFUNCTYPE(c_int32, c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int64, c_float), ("queue", "y", "y_stride", "x", "x_stride", "weight", "residual", "residual_stride", "rows", "groups", "cols", "eps",), True),
        ("ok_layer_norm", CFUNCTYPE(c_int32, c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int64, c_float), ("queue", "y", "y_stride", "x", "x_stride", "weight", "bias", "residual", "residual_stride", "rows", "groups", "cols", "eps",), True),
        ("ok_rope", CFUNCTYPE(c_int32, c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_int64, c_int64, c_int64, c_int64), ("queue", "x", "stride", "table", "table_rows", "table_row", "rows", "heads", "head_dim", "rotary_dim",), True),
        ("ok_activate", CFUNCTYPE(c_int32, c_void_p, c_void_p, c_void_p, c_int32, c_int64), ("queue", "y", "x", "activation", "n",), True),
        ("ok_activate_gated", CFUNCTYPE(c_int32, c_void_p, c_void_p, c_void_p, c_int32, c_int64, c_int64), ("queue", "y", "x", "activation", "rows", "cols",), True),
        ("ok_gather_rows", CFUNCTYPE(c_int32, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64), ("queue", "y", "x", "index", "active", "rows", "x_rows", "cols",), True),
        ("ok_count_nonfinite", CFUNCTYPE(c_int32, c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64), ("queue", "count", "x", "active", "rows", "cols",), True),
        ("ok_kv_cache_bytes", CFUNCTYPE(c_int32, c_int32, c_int64, c_int64, c_int64, c_void_p), ("dtype", "blocks", "kv_heads", "head_dim", "host_bytes",), True),
        ("ok_kv_append", CFUNCTYPE(c_int32, c_void_p, c_void_p, c_int32, c_int64, c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_int64, c_int64), ("queue", "cache", "dtype", "blocks", "k", "v", "stride", "slot", "rows", "kv_heads", "head_dim",), True),
        ("ok_rope_append", CFUNCTYPE(c_int32, c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_void_p, c_int32, c_int64, c_void_p, c_int64, c_int64, c_int64, c_int64, c_int64), ("queue", "qkv", "stride", "table", "table_rows", "table_row", "cache", "dtype", "blocks", "slot", "rows", "heads", "kv_heads", "head_dim", "rotary_dim",), True),
        ("ok_attention_paged", CFUNCTYPE(c_int32, c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_int32, c_int64, c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int64, c_int64, c_float), ("queue", "y", "q", "q_stride", "cache", "dtype", "blocks", "block_table", "sequences", "blocks_per_sequence", "sequence", "position", "slope", "rows", "heads", "kv_heads", "head_dim", "window", "scale",), True),
        ("ok_attention_scratch_bytes", CFUNCTYPE(c_int32, c_int64, c_int64, c_int64, c_int64, c_void_p), ("rows", "heads", "head_dim", "max_context", "host_bytes",), True),
        ("ok_sample", CFUNCTYPE(c_int32, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64), ("queue", "ids", "logprobs", "logits", "floats", "ints", "counts", "bias", "active", "slots", "rows", "vocab",), True),
        ("ok_sample_reset", CFUNCTYPE(c_int32, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int64, c_void_p, c_void_p, c_int64), ("queue", "counts", "bias", "slot", "slots", "vocab", "prompt", "prompt_length", "bias_ids", "bias_values", "bias_length",), True),
    ]
