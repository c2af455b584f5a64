"""Hand-made safetensors files, good and bad, and edits of checkpoints on disk."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

Tensors = dict[str, np.ndarray]
_WORDS = {"float32": "F32", "float16": "F16", "uint16": "BF16", "int64": "I64"}


def write_raw(
    path: Path, header: dict[str, Any] | bytes, data: bytes = b"", length: int | None = None
) -> Path:
    """A file of these parts, however wrong: `length` stands in the first eight bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def write_tensors(path: Path, tensors: Tensors) -> Path:
    """A good file; uint16 arrays are bf16."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, array in tensors.items():
        end = offset + array.nbytes
        header[name] = {
            "dtype": _WORDS[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    return write_raw(path, header, b"".join(array.tobytes() for array in tensors.values()))


def read_tensors(path: Path) -> Tensors:
    """The tensors of a good file of f32, f16 and bf16."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__", None)
    kinds = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
    found = {}
    for name, entry in header.items():
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        found[name] = np.frombuffer(raw[begin:end], kinds[entry["dtype"]]).reshape(entry["shape"])
    return found


def edit_tensors(directory: Path, change: Any) -> Path:
    """Rewrites model.safetensors with change(tensors)."""
    file = directory / "model.safetensors"
    write_tensors(file, change(read_tensors(file)))
    return directory


def edit_config(directory: Path, **changes: Any) -> Path:
    """Rewrites config.json with some fields replaced."""
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return directory
