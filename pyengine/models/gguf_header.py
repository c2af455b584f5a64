"""The GGUF format: metadata and tensor table of a file, and rows of its tensors as bytes.

The `gguf` package gives the format's constants; files are read here with plain reads. The package's
own reader maps the file, so that one cut short while it is being opened would end the process by
SIGBUS, and takes 2.0 s for SmolLM2's vocabulary where this takes 0.04 s; a test holds this one
to that, field by field. Source: ggml's docs/gguf.md, versions 2 and 3.
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from pyengine.errors import UnsupportedModelError, WeightError

Array = np.ndarray[Any, Any]

_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4
_SCALARS = {  # GGUF value type -> little-endian struct code
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.FLOAT64: "d",
    GGUFValueType.BOOL: "?",
}


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies.

    Attributes:
        shape: outermost axis first, as in Hugging Face checkpoints (GGUF writes it reversed).
        kind: its ggml type.
        offset: bytes from the start of the file.
        row_bytes: bytes of one row (last axis).
    """

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    row_bytes: int

    @property
    def rows(self) -> int:
        """Number of rows: the product of all axes but the last."""
        return math.prod(self.shape[:-1])


@dataclass(frozen=True)
class Header:
    """Everything a GGUF file holds but the weights.

    Attributes:
        path: the file.
        metadata: key -> int, float, bool, str or list of these.
        tensors: GGUF name -> place.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


class _Reader:
    """Typed reads from an open file that fail with its name when it ends early."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file = file
        self._path = path
        self.size = os.fstat(file.fileno()).st_size

    def fail(self, text: str) -> WeightError:
        return WeightError(f"{self._path}: damaged GGUF file: {text}")

    def take(self, count: int) -> bytes:
        data = self._file.read(count) if count <= self.size else b""
        if len(data) != count:
            raise self.fail(f"{count} bytes of header expected at {self._file.tell()}, file ends")
        return data

    def unpack(self, code: str) -> Any:
        (value,) = struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))
        return value

    def string(self) -> str:
        try:
            return self.take(self.unpack("Q")).decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail(f"a string before byte {self._file.tell()} is not UTF-8") from None

    def strings(self, count: int) -> list[str]:
        """Many strings: vocabularies have 100000s, so that calls saved here are felt at load."""
        read, length, found = self._file.read, struct.Struct("<Q").unpack, []
        try:
            for _ in range(count):
                (size,) = length(read(8))
                data = read(size) if size <= self.size else b""
                if len(data) != size:
                    raise self.fail(f"{size} bytes of text expected, file ends")
                found.append(data.decode("utf-8"))
        except (struct.error, UnicodeDecodeError):
            raise self.fail(f"a list of strings is broken at byte {self.position}") from None
        return found

    def value(self, kind: int) -> Any:
        if kind == GGUFValueType.STRING:
            return self.string()
        if kind == GGUFValueType.ARRAY:
            element, count = self.unpack("I"), self.unpack("Q")
            if element == GGUFValueType.STRING:
                return self.strings(count)
            code = self._scalar(element)
            return np.frombuffer(
                self.take(count * struct.calcsize("<" + code)), "<" + code
            ).tolist()
        return self.unpack(self._scalar(kind))

    def _scalar(self, kind: int) -> str:
        try:
            return _SCALARS[GGUFValueType(kind)]
        except (ValueError, KeyError):
            raise self.fail(f"metadata value of unknown type {kind}") from None

    @property
    def position(self) -> int:
        return self._file.tell()


def read_header(path: Path) -> Header:
    """Reads metadata and tensor table of a GGUF file; touches no weights.

    Raises:
        WeightError: not a GGUF file, or a damaged or cut one.
        UnsupportedModelError: a version, byte order or tensor type that is not read.
    """
    try:
        with open(path, "rb") as file:
            return _parse(_Reader(file, path), path)
    except OSError as error:
        raise WeightError(f"{path}: {error.strerror}") from None


def _parse(reader: _Reader, path: Path) -> Header:
    if reader.take(4) != b"GGUF":
        raise WeightError(f"{path}: not a GGUF file (it does not begin with the letters GGUF)")
    version = reader.unpack("I")
    if version not in (2, 3):
        order = " (big-endian)" if version & 0xFFFF == 0 else ""
        raise UnsupportedModelError(
            f"{path}: GGUF version {version}{order}; versions 2 and 3 are read"
        )
    tensor_count, metadata_count = reader.unpack("Q"), reader.unpack("Q")
    metadata: dict[str, Any] = {}
    for _ in range(metadata_count):
        key = reader.string()
        if key in metadata:
            raise reader.fail(f"{key} is listed twice")
        metadata[key] = reader.value(reader.unpack("I"))
    entries = [_tensor_entry(reader) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise reader.fail(f"general.alignment={alignment!r} is not a power of two")
    start = -(-reader.position // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for name, shape, kind, offset in entries:
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if shape[-1] % block:
            raise reader.fail(
                f"{name}: rows of {shape[-1]} are not whole {kind.name} blocks of {block}"
            )
        info = TensorInfo(shape, kind, start + offset, shape[-1] // block * block_bytes)
        end = info.offset + info.rows * info.row_bytes
        if name in tensors:
            raise reader.fail(f"tensor {name} is listed twice")
        if offset % alignment:
            raise reader.fail(f"{name} begins at byte {offset}, no multiple of {alignment}")
        if end > reader.size:
            raise WeightError(
                f"{path}: cut short: {name} ends at byte {end}, the file at {reader.size}"
            )
        tensors[name] = info
    by_place = sorted(tensors.items(), key=lambda item: item[1].offset)
    for (name, info), (other, following) in pairwise(by_place):
        if info.offset + info.rows * info.row_bytes > following.offset:
            raise reader.fail(f"{name} and {other} lie in the same bytes")
    return Header(path, metadata, tensors)


def _tensor_entry(reader: _Reader) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
    name = reader.string()
    dimensions = reader.unpack("I")
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise reader.fail(f"{name} has {dimensions} dimensions")
    shape = tuple(reader.unpack("Q") for _ in range(dimensions))[::-1]
    kind, offset = reader.unpack("I"), reader.unpack("Q")
    if not all(shape):
        raise reader.fail(f"{name} has shape {shape}")
    try:
        return name, shape, GGMLQuantizationType(kind), offset
    except ValueError:
        raise UnsupportedModelError(f"{name}: ggml type {kind} is not known") from None


def read_rows(
    file: BinaryIO, path: Path, name: str, info: TensorInfo, start: int, stop: int
) -> Array:
    """Rows [start, stop) as bytes, uint8 (rows, row_bytes)."""
    data = np.empty((stop - start, info.row_bytes), np.uint8)
    view = data.data.cast("B")
    done, offset = 0, info.offset + start * info.row_bytes
    while done < len(view):
        count = os.preadv(file.fileno(), [view[done:]], offset + done)
        if count == 0:
            raise WeightError(
                f"{path}: cut short while being read: {name} expected at byte {offset + done}"
            )
        done += count
    return data
