"""GGUF files as checkpoints: hyperparameters in Hugging Face spelling, tensors under its names.

gguf_config.py reads the hyperparameters, gguf_tensors.py knows names and the order of rows; the
`gguf` package dequantizes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from pyengine.errors import ConfigError, EngineError, UnsupportedModelError, WeightError
from pyengine.models.gguf_config import as_config_json, family_of, read_values
from pyengine.models.gguf_header import Array, Header, TensorInfo, read_header, read_rows
from pyengine.models.gguf_tensors import (
    file_rows,
    gguf_stems,
    is_stacked,
    parse_name,
    rope_tensors,
)
from pyengine.models.spec import DecoderSpec, GGUFForm

# Types handed out as they lie in the file; all others are dequantized to f32.
_STORED = {
    GGMLQuantizationType.F32: ("F32", "<f4"),
    GGMLQuantizationType.F16: ("F16", "<f2"),
    GGMLQuantizationType.BF16: ("BF16", "<u2"),
    GGMLQuantizationType.Q8_0: ("Q8_0", "u1"),
}
_FAR_ROWS = 256  # rows further apart than this are read alone


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies.

    Attributes:
        stored: its name in the file.
        info: of it, or of the head's part of a stacked one.
        role: ours; "" of a name that has none, which is kept, and refused at loading.
    """

    stored: str
    info: TensorInfo
    role: str = ""


def _places(header: Header, spec: DecoderSpec, form: GGUFForm) -> dict[str, _Place]:
    """Hugging Face's name -> place, of all tensors but those of the hyperparameters."""
    stems, found, unknown = gguf_stems(spec), {}, {}
    for stored, info in header.tensors.items():
        name = parse_name(stems, stored)
        if stored in rope_tensors(form):
            continue
        if name is None:
            unknown[stored] = _Place(stored, info)
            continue
        template = f"{spec.tensors[name.role]}.{name.part}"
        parts = [info]
        if is_stacked(spec, name.role) and len(info.shape) == 2:
            part = replace(info, shape=info.shape[1:])
            starts = range(info.offset, info.offset + info.rows * info.row_bytes, info.row_bytes)
            parts = [replace(part, offset=start) for start in starts]
        for head, part in enumerate(parts):
            found[template.format(i=name.layer, h=head)] = _Place(stored, part, name.role)
    for stray in unknown.keys() & found.keys():
        raise WeightError(
            f"{header.path}: tensor {stray} is not a name of GGUF, which has {found[stray].stored}"
        )
    return found | unknown


class GGUFCheckpoint:
    """A GGUF file as a checkpoint: Hugging Face's config, tensor names and order of rows.

    Matrices lie (out, in), GPT-2's too.

    Attributes:
        path: the file.
        config: hyperparameters, spelled as in config.json.
        header: metadata and tensor table.

    Raises (at construction):
        WeightError: not a GGUF file, damaged or cut.
        UnsupportedModelError: architecture, hyperparameter or quantisation not supported; named.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header = read_header(path)
        try:
            self._spec, form = family_of(self.header)
            values = read_values(self.header)
            self.config = as_config_json(self.header, values)
        except EngineError:
            raise
        except (
            AttributeError,
            IndexError,
            KeyError,
            ArithmeticError,
            TypeError,
            ValueError,
        ) as error:
            raise ConfigError(f"{path}: its metadata is malformed: {error!r}") from error
        self._heads, self._head_dim = values["num_attention_heads"], values["head_dim"]
        self._tensors = _places(self.header, self._spec, form)
        for kind in {place.info.kind for place in self._tensors.values()} - set(_STORED):
            try:
                dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
            except NotImplementedError:
                raise UnsupportedModelError(
                    f"{path}: holds {kind.name} tensors, which the gguf package does not dequantize"
                ) from None
        for name, info in self.header.tensors.items():
            if len(info.shape) > 2:
                raise UnsupportedModelError(f"{path}: {name} has {len(info.shape)} dimensions")
        self._file = open(path, "rb")

    def names(self) -> list[str]:
        """Tensor names, in the file's order."""
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape in weights. Raises WeightError if there is no such tensor."""
        return self._find(name).info.shape

    def dtype(self, name: str) -> str:
        """What `read` gives: "F32", "F16", "BF16", "Q8_0" as stored; "F32" for other types."""
        info = self._find(name).info
        if info.kind == GGMLQuantizationType.Q8_0 and len(info.shape) == 1:
            return "F32"
        return _STORED[info.kind][0] if info.kind in _STORED else "F32"

    def stored_as(self, name: str) -> str:
        """Its ggml type: "Q4_1", "F16", ..."""
        return self._find(name).info.kind.name

    def read(self, name: str, rows: slice | None = None) -> Array:
        """Rows of a tensor (all without `rows`), as `dtype` says.

        Returns float32, float16 or uint16 (bf16) of the tensor's shape, or for Q8_0 uint8 (rows,
        blocks * 34): ggml's blocks. Raises WeightError if the file ends early, as one cut while it
        is open does.
        """
        place = self._find(name)
        info = place.info
        start, stop, _ = (rows or slice(None)).indices(info.shape[0])
        wanted = file_rows(
            self._spec, place.role, np.arange(start, stop), self._heads, self._head_dim
        )
        if len(info.shape) == 1:
            values = self._values(info.kind, self._rows(place, 0, 1))
            return np.asarray(values[0, wanted])
        if not wanted.size:
            return self._values(info.kind, np.empty((0, info.row_bytes), np.uint8))
        data = self._gather(place, wanted)
        return data if self.dtype(name) == "Q8_0" else self._values(info.kind, data)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def __enter__(self) -> GGUFCheckpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _find(self, name: str) -> _Place:
        try:
            return self._tensors[name]
        except KeyError:
            raise WeightError(f"{self.path}: tensor {name} is missing") from None

    def _rows(self, place: _Place, start: int, stop: int) -> Array:
        return read_rows(self._file, self.path, place.stored, place.info, start, stop)

    def _gather(self, place: _Place, wanted: Array) -> Array:
        """Rows in any order; those that lie close together are read at once."""
        ordered = np.sort(wanted)
        breaks = np.flatnonzero(np.diff(ordered) > _FAR_ROWS) + 1
        runs = [(int(run[0]), int(run[-1]) + 1) for run in np.split(ordered, breaks)]
        data = [self._rows(place, start, stop) for start, stop in runs]
        starts = np.array([start for start, _ in runs])
        before = np.cumsum([0, *(len(rows) for rows in data[:-1])])
        run = np.searchsorted(starts, wanted, side="right") - 1
        index = wanted - starts[run] + before[run]
        whole = data[0] if len(data) == 1 else np.concatenate(data)
        return whole if np.array_equal(index, np.arange(len(whole))) else whole[index]

    @staticmethod
    def _values(kind: GGMLQuantizationType, data: Array) -> Array:
        """Raw rows of bytes as rows of numbers."""
        if kind in _STORED and kind != GGMLQuantizationType.Q8_0:
            return data.view(_STORED[kind][1])
        return np.asarray(dequantize(data, kind))
