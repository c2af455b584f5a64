"""Model files: what every reader of a checkpoint offers, and the reader of safetensors.

Nothing is mapped into memory: headers are validated, then bytes are read by offset, so that a file
cut short while loading is an error and never a signal.
"""

from __future__ import annotations

import json
import logging
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import safetensors

from pyengine.errors import ConfigError, WeightError
from pyengine.native import DType
from pyengine.native.memory import row_bytes

Array = np.ndarray[Any, Any]
_log = logging.getLogger("pyengine")

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
# Masks and tables that old files carry; whole suffixes, since `attn.c_attn.bias` is a weight.
IGNORABLE_SUFFIXES = (
    ".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias",
    ".rotary_emb.inv_freq",
)  # fmt: skip
Q8_0_DIRECTORY = {"quant_method": "q8_0", "version": 1}
"""config.json's quantization_config of a directory whose matrices lie as (out, in) blocks."""
Q8_0_SHAPES = "q8_0_shapes"  # in a safetensors header's __metadata__: JSON, name -> [out, in]
_MAX_HEADER_BYTES = 100_000_000  # what the safetensors package accepts
_NUMPY = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "Q8_0": "u1"}
_ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2,
    "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "F64": 8, "I64": 8, "U64": 8, "C64": 8,
}  # fmt: skip


class Checkpoint(Protocol):
    """Named tensors under Hugging Face's names, whatever the file format (directory, GGUF).

    Attributes:
        path: what was opened; messages name it.
        config: the model's configuration as a config.json dict.
    """

    path: Path
    config: dict[str, Any]

    def names(self) -> list[str]:
        """Every tensor in the checkpoint."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Elements per axis, as Hugging Face stores the tensor ((out, in) for a linear layer)."""

    def dtype(self, name: str) -> str:
        """Storage type in safetensors' words ("F32", "F16", "BF16", ...), or "Q8_0"."""

    def stored_as(self, name: str) -> str:
        """Its type in the file, in the format's words; `dtype` is what `read` gives."""

    def read(self, name: str, rows: slice | None = None) -> Array:
        """The tensor, or rows [start, stop) of its first axis: a new array.

        float32, float16, or uint16 for bf16, in the stored shape. Q8_0: uint8, ggml's blocks,
        (rows, 34 * ceil(in / 32)). May be called from several threads.

        Raises:
            WeightError: the bytes cannot be read (any more), or the dtype is none of these.
        """

    def close(self) -> None:
        """Closes the files."""

    def __enter__(self) -> Checkpoint: ...

    def __exit__(self, *_: object) -> None: ...


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Opens a Hugging Face directory or a .gguf file; all headers are read and checked here.

    Raises:
        WeightError: a file is missing, damaged, or contradicts the index; names it.
        ConfigError: config.json cannot be read.
    """
    if Path(path).suffix == ".gguf":
        from pyengine.models.gguf import GGUFCheckpoint

        return GGUFCheckpoint(Path(path))
    return SafetensorsCheckpoint(Path(path))


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ConfigError naming the file (of a link, its target)."""
    try:
        loaded = json.loads(file.read_bytes())
    except FileNotFoundError as error:
        if file.is_symlink():
            raise ConfigError(
                f"{file} is a link to {os.readlink(file)}, which does not exist: "
                "incomplete download?"
            ) from error
        raise ConfigError(f"{file}: no such file; is this a model directory?") from error
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"{file}: expected a JSON object, found {type(loaded).__name__}")
    return loaded


def main_type(checkpoint: Checkpoint) -> str:
    """The type in the file that most weights have: "F32", "F16", "BF16", "Q8_0", "Q4_1", ..."""
    weights: dict[str, int] = {}
    for name in checkpoint.names():
        stored = checkpoint.stored_as(name)
        weights[stored] = weights.get(stored, 0) + prod(checkpoint.shape(name))
    return max(weights, key=lambda stored: weights[stored], default="F32")


def is_ignorable(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor that no role asks for may be left out: a known buffer, empty, a scalar."""
    return name.endswith(IGNORABLE_SUFFIXES) or prod(shape) == 0 or shape == ()


@dataclass(frozen=True)
class _Entry:
    """Where a tensor lies: file, absolute byte offset and length, and what its bytes are.

    Attributes:
        shape: in weights. lies: of the array that is read, which differs for q8_0.
    """

    file: Path
    descriptor: int
    offset: int
    dtype: str
    shape: tuple[int, ...]
    lies: tuple[int, ...]
    nbytes: int


class SafetensorsCheckpoint:
    """A directory with config.json and one or many safetensors files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = read_json(path / "config.json")
        self._entries: dict[str, _Entry] = {}
        self._descriptors: list[int] = []
        try:
            if os.path.lexists(path / INDEX_NAME):
                self._open_sharded(_read_index(path / INDEX_NAME))
            else:
                self._open_single()
        except BaseException:
            self.close()
            raise

    def _open_single(self) -> None:
        file = self.path / SINGLE_NAME
        if not os.path.lexists(file):
            others = sorted(
                p.name for p in self.path.iterdir() if p.suffix in (".safetensors", ".bin")
            )
            beside = f"; {', '.join(others[:3])} beside it cannot be used alone" if others else ""
            raise WeightError(f"{self.path} has neither {SINGLE_NAME} nor {INDEX_NAME}{beside}")
        self._entries = self._open_file(file)

    def _open_sharded(self, weight_map: Mapping[str, str]) -> None:
        shards: dict[str, list[str]] = {}
        for name, shard in weight_map.items():
            shards.setdefault(shard, []).append(name)
        if SINGLE_NAME not in shards and os.path.lexists(self.path / SINGLE_NAME):
            _log.warning(
                "%s is not named by %s and is ignored", self.path / SINGLE_NAME, INDEX_NAME
            )
        for shard in sorted(shards):
            if not os.path.lexists(self.path / shard):
                raise WeightError(
                    f"{self.path / shard} is missing, but {INDEX_NAME} names it for "
                    f"{len(shards[shard])} tensors: incomplete download?"
                )
        for shard in sorted(shards):
            entries = self._open_file(self.path / shard)
            for name in shards[shard]:
                if name not in entries:
                    raise WeightError(
                        f"{INDEX_NAME} places {name} in {self.path / shard}, which lacks it"
                    )
            for name, entry in entries.items():
                if weight_map.get(name) != shard and not is_ignorable(name, entry.shape):
                    raise WeightError(
                        f"{self.path / shard} holds {name}, which {INDEX_NAME} does not place there"
                    )
                self._entries.setdefault(name, entry)

    def _open_file(self, file: Path) -> dict[str, _Entry]:
        descriptor = _open_descriptor(file)
        self._descriptors.append(descriptor)
        quantised = self.config.get("quantization_config") == Q8_0_DIRECTORY
        return _read_header(file, descriptor, quantised)

    def names(self) -> list[str]:
        """Every tensor, in file order."""
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """Elements per axis."""
        return self._entries[name].shape

    def dtype(self, name: str) -> str:
        """Storage type in safetensors' words."""
        return self._entries[name].dtype

    def stored_as(self, name: str) -> str:
        """As `dtype`: nothing is converted."""
        return self.dtype(name)

    def read(self, name: str, rows: slice | None = None) -> Array:
        """See Checkpoint.read."""
        entry = self._entries[name]
        if entry.dtype not in _NUMPY:
            raise WeightError(f"{name} in {entry.file} is stored as {entry.dtype}, cannot be read")
        shape, offset, item_bytes = entry.lies, entry.offset, _ITEM_BYTES.get(entry.dtype, 1)
        if rows is not None:
            start, stop, step = rows.indices(shape[0])
            if step != 1:
                raise ValueError(f"rows of {name} must be contiguous, not step {step}")
            offset += start * prod(shape[1:]) * item_bytes
            shape = (max(stop - start, 0), *shape[1:])
        array = np.empty(shape, _NUMPY[entry.dtype])
        if array.size:
            _read_into(array, entry.descriptor, offset, entry.file)
        return array

    def close(self) -> None:
        """Closes the files."""
        while self._descriptors:
            os.close(self._descriptors.pop())

    def __enter__(self) -> SafetensorsCheckpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _read_into(array: Array, descriptor: int, offset: int, file: Path) -> None:
    """Fills the array from the file at `offset`."""
    view = array.reshape(-1).view(np.uint8).data
    while view:
        try:
            count = os.preadv(descriptor, [view], offset)
        except OSError as error:
            raise WeightError(
                f"{file}: reading at byte {offset} failed: {error.strerror}"
            ) from error
        if count == 0:
            raise WeightError(f"{file} ended at byte {offset}: it was cut short while loading")
        view, offset = view[count:], offset + count


def _open_descriptor(file: Path) -> int:
    """Opens a regular file. Raises WeightError that names a dangling link and its target."""
    try:
        if not file.is_file() and file.exists():
            raise WeightError(f"{file} is not a file")
        return os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        if file.is_symlink():
            raise WeightError(
                f"{file} is a link to {os.readlink(file)}, which does not exist: "
                "incomplete download?"
            ) from error
        raise WeightError(f"{file}: no such file") from error
    except OSError as error:
        raise WeightError(f"{file}: {error.strerror}") from error


def _read_index(file: Path) -> dict[str, str]:
    """weight_map of an index: tensor name -> shard file beside the index."""
    try:
        weight_map = read_json(file).get("weight_map")
    except ConfigError as error:
        raise WeightError(str(error)) from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightError(f"{file}: weight_map is missing or empty")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or not shard:
            raise WeightError(f"{file} places {name} in {shard!r}, which is not a file name")
    return weight_map


# ---- safetensors headers -----------------------------------------------------------------------


def _read_header(file: Path, descriptor: int, quantised: bool) -> dict[str, _Entry]:
    """Tensors of one file. The safetensors package validates; the offsets are our own reading."""
    size = os.fstat(descriptor).st_size
    start = os.pread(descriptor, 512, 0)
    _recognise_other_content(file, size, start)
    try:
        with safetensors.safe_open(file, framework="numpy"):
            pass
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise WeightError(f"{file} is damaged or incomplete ({size} bytes): {error}") from error
    (length,) = struct.unpack("<Q", start[:8])
    header = bytearray(length)
    _read_into(np.frombuffer(header, np.uint8), descriptor, 8, file)
    fields = json.loads(header, object_pairs_hook=lambda pairs: _unique(pairs, file))
    metadata = fields.pop("__metadata__", None) or {}
    entries = {
        name: _checked_entry(file, descriptor, name, value, 8 + length, size)
        for name, value in fields.items()
    }
    end = max((e.offset + e.nbytes for e in entries.values()), default=8 + length)
    if end != size:
        raise WeightError(f"{file} has {size} bytes, its header describes {end}: damaged download?")
    if quantised:
        entries |= _q8_0_entries(file, entries, metadata.get(Q8_0_SHAPES))
    return entries


def _q8_0_entries(
    file: Path, entries: Mapping[str, _Entry], shapes_text: str | None
) -> dict[str, _Entry]:
    """The tensors of a file that are q8_0 blocks, under the shapes that its header records."""
    try:
        shapes: dict[str, Any] = json.loads(shapes_text or "")
        sizes = {name: (int(out), int(inner)) for name, (out, inner) in shapes.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise WeightError(
            f"{file}: {Q8_0_SHAPES} in its header is not a table of shapes: {error}"
        ) from None
    found = {}
    for name, (out, inner) in sizes.items():
        entry = entries.get(name)
        if entry is None:  # missing: said where tensors are accounted for
            continue
        if inner < 1 or entry.dtype != "U8" or entry.lies != (out, row_bytes(DType.Q8_0, inner)):
            raise WeightError(
                f"{file}: {name} is {entry.dtype} {list(entry.lies)}, "
                f"which are not q8_0 blocks of shape {[out, inner]}"
            )
        found[name] = replace(entry, dtype="Q8_0", shape=(out, inner))
    return found


def _unique(pairs: list[tuple[str, Any]], file: Path) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise WeightError(f"{file}: its header has {twice} twice")
    return found


def _checked_entry(
    file: Path, descriptor: int, name: str, value: Any, data_start: int, size: int
) -> _Entry:
    """One header entry, its byte range compared with shape, dtype and file."""
    begin, end = value["data_offsets"]
    dtype, shape = value["dtype"], tuple(value["shape"])
    item_bytes = _ITEM_BYTES.get(dtype)  # None: a type that is validated, but never read here
    sized = item_bytes is None or end - begin == prod(shape) * item_bytes
    if not (0 <= begin <= end <= size - data_start and sized):
        raise WeightError(
            f"{file}: {name} is {dtype} {list(shape)}, but its bytes are "
            f"[{begin}, {end}) of {size - data_start}"
        )
    return _Entry(file, descriptor, data_start + begin, dtype, shape, shape, end - begin)


def _recognise_other_content(file: Path, size: int, start: bytes) -> None:
    """Raises with a plain word for what is often found in place of weights.

    A file begins with its header's length, which may look like any byte; so the content is judged
    only where that length cannot be one.
    """
    if size == 0:
        raise WeightError(f"{file} is empty: incomplete download")
    if size < 8:
        raise WeightError(f"{file} has {size} bytes: incomplete download")
    (length,) = struct.unpack("<Q", start[:8])
    if length <= min(size - 8, _MAX_HEADER_BYTES):
        return
    if start.startswith(b"version https://git-lfs"):
        raise WeightError(
            f"{file} is a git LFS pointer, not the weights: incomplete download; run git lfs pull"
        )
    if start.lstrip()[:1] == b"<":
        raise WeightError(f"{file} is an HTML page, not weights: the download failed")
    if start.startswith(b"GGUF"):
        raise WeightError(f"{file} is a GGUF file; give its own path, ending in .gguf")
    raise WeightError(
        f"{file} has {size} bytes, but its header alone should have {length}: "
        "incomplete download, or not a safetensors file"
    )
