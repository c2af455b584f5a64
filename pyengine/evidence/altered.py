"""A model that may be changed on its way into an engine: its spec, its config, its tensors.

Everything here is lazy: tensors are altered when the loader reads them, so that full-size models
can be changed too. Nothing of the original is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pyengine.evidence.quantized import round_trip
from pyengine.generation.source import ModelSource
from pyengine.models.checkpoint import Checkpoint
from pyengine.models.layouts import Transposed
from pyengine.models.loading import widen
from pyengine.models.model_config import ModelConfig
from pyengine.models.positions import RopeConfig, frequencies
from pyengine.models.spec import DecoderSpec
from pyengine.models.weights import expected_weights

Array = NDArray[Any]
Order = NDArray[np.int64]


@dataclass(frozen=True)
class Tensor:
    """A tensor that stands in for a stored one, or is added."""

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[slice], Array]


class AlteredCheckpoint:
    """A Checkpoint (models.checkpoint) with some tensors hidden, replaced or added."""

    def __init__(self, base: Checkpoint) -> None:
        self.path = base.path
        self.config = base.config
        self._base = base
        self._changed: dict[str, Tensor | None] = {}

    def actual(self, name: str, prefix: str) -> str:
        """The name a tensor has in this file, which may lack the base model's prefix."""
        names = set(self._base.names())
        bare = name.removeprefix(prefix)
        return bare if name not in names and bare in names else name

    def hide(self, *names: str) -> None:
        """Takes tensors away; those that are not there do not matter."""
        self._changed.update(dict.fromkeys(names))

    def put(self, name: str, tensor: Tensor) -> None:
        """Adds or replaces a tensor."""
        self._changed[name] = tensor

    def tensor(self, name: str) -> Tensor:
        """A tensor as it is by now, whatever becomes of it later."""
        base = self._base
        return self._changed.get(name) or Tensor(
            base.shape(name), base.dtype(name), lambda rows: base.read(name, rows)
        )

    def names(self) -> list[str]:
        """Every tensor."""
        kept = [name for name in self._base.names() if name not in self._changed]
        return kept + [name for name, tensor in self._changed.items() if tensor is not None]

    def shape(self, name: str) -> tuple[int, ...]:
        """Elements per axis."""
        tensor = self._changed.get(name)
        return tensor.shape if tensor else self._base.shape(name)

    def dtype(self, name: str) -> str:
        """Storage type in safetensors' words."""
        tensor = self._changed.get(name)
        return tensor.dtype if tensor else self._base.dtype(name)

    def stored_as(self, name: str) -> str:
        """The type it has in the file; of a changed tensor, `dtype`."""
        tensor = self._changed.get(name)
        return tensor.dtype if tensor else self._base.stored_as(name)

    def read(self, name: str, rows: slice | None = None) -> Array:
        """Stored or changed values."""
        tensor = self._changed.get(name)
        if tensor is None:
            return self._base.read(name, rows)
        start, stop, _ = (rows or slice(None)).indices(tensor.shape[0])
        return np.ascontiguousarray(tensor.read(slice(start, stop)))

    def close(self) -> None:
        """The original stays open: its owner closes it."""

    def __enter__(self) -> AlteredCheckpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Model:
    """A model that a control may change: spec, config and tensors, none of them the original's."""

    def __init__(self, source: ModelSource) -> None:
        self.spec: DecoderSpec = source.spec
        self.config: ModelConfig = source.config
        self.checkpoint = AlteredCheckpoint(source.checkpoint)
        self._original = source.checkpoint
        self._source = source

    def source(self) -> ModelSource:
        """What an Engine loads."""
        return replace(self._source, spec=self.spec, config=self.config, checkpoint=self.checkpoint)

    def name(self, role: str, layer: int | None = None, head: int = 0, part: str = "weight") -> str:
        """Name in the file of a role's tensor."""
        full = f"{self._source.spec.tensors[role].format(i=layer, h=head)}.{part}"
        return self.checkpoint.actual(full, self.spec.prefix)

    @property
    def layers(self) -> range:
        """Layer numbers."""
        return range(self.config.num_hidden_layers)

    @property
    def rope(self) -> RopeConfig:
        """Rotary parameters of a model that has them."""
        assert self.config.rope is not None
        return self.config.rope

    def set_rope(self, **changes: Any) -> None:
        """Changes rotary parameters."""
        self.config = replace(self.config, rope=replace(self.rope, **changes))

    def hide(self, role: str) -> None:
        """Takes away every tensor of a role, weights and biases, in all layers and heads."""
        for layer in self.layers:
            for head in range(self.config.num_attention_heads):
                for part in ("weight", "bias"):
                    self.checkpoint.hide(self.name(role, layer, head, part))

    def change_rows(self, name: str, change: Callable[[Array, int], Array]) -> None:
        """Rows of a matrix or vector become change(rows as float32, index of the first)."""
        before = self.checkpoint.tensor(name)

        def read(rows: slice) -> Array:
            return change(widen(before.read(rows)), rows.start)

        self.checkpoint.put(name, Tensor(before.shape, "F32", read))

    def raise_inner_column(self, column: int, factor: float) -> None:
        """One column of every down projection of a gated MLP grows, its input shrinks as much.

        With a power of two as factor the model computes the same to the last bit: it only has an
        outlier now, as trained models often do.
        """
        assert self.spec.mlp == "gated"
        fused = self.spec.gate_up == "concat"
        row = column + (self.config.intermediate_size if fused else 0)

        def shrink(rows: Array, first: int) -> Array:
            if first <= row < first + len(rows):
                rows[row - first] /= factor
            return rows

        def grow(rows: Array, first: int) -> Array:
            rows[:, column] *= factor
            return rows

        stored = set(self._original.names())
        for layer in self.layers:
            for part in ("weight", "bias"):
                name = self.name("gate_up" if fused else "up", layer, part=part)
                if name in stored:
                    self.change_rows(name, shrink)
            self.change_rows(self.name("down", layer), grow)

    def quantise(self, block: int | None) -> None:
        """Every matrix that q8_0 would store takes a trip through 8 bits: quantized.round_trip."""
        tied = self.config.tie_word_embeddings
        for weight in expected_weights(self.spec, self.config, tied=tied):
            for source in weight.sources if weight.quantisable else ():
                name = self.checkpoint.actual(source.name, self.spec.prefix)
                if isinstance(source.layout, Transposed):  # read whole; blocks run along the input
                    self.change_rows(name, lambda rows, _: round_trip(rows.T, block).T)
                else:
                    self.change_rows(name, lambda rows, _: round_trip(rows, block))

    def copy(self, source_role: str, target_role: str) -> None:
        """Every layer's target tensors become the source's."""
        stored = set(self._original.names())
        for layer in self.layers:
            for part in ("weight", "bias"):
                source = self.name(source_role, layer, part=part)
                if source in stored:
                    target = self.name(target_role, layer, part=part)
                    self.checkpoint.put(target, self._stored(source))

    def _stored(self, name: str) -> Tensor:
        base = self._original
        return Tensor(base.shape(name), base.dtype(name), lambda rows: base.read(name, rows))

    # ---- rows of the attention projections ------------------------------------------------------

    def reorder(self, order: Order) -> None:
        """New row i of [q | k | v] is old row order[i], in every layer, weights and biases.

        Whatever the file's layout: three tensors, one, one with heads interleaved, or transposed.
        """
        split = self.spec.qkv == "split"
        roles = ("q", "k", "v") if split else ("qkv",)
        place = self._places()
        moved = np.arange(len(order))
        moved[place] = place[order]
        stored = set(self._original.names())
        for layer in self.layers:
            for part in ("weight", "bias"):
                names = [self.name(role, layer, part=part) for role in roles]
                if names[0] in stored:
                    turned = part == "weight" and self.spec.linear == "in_out"
                    self._reorder_tensors(names, moved, turned)

    def _places(self) -> Order:
        """Where row i of [q | k | v] lies in the file (tensors taken one after the other)."""
        q, kv, d = self.config.q_width, self.config.kv_width, self.config.head_dim
        rows = np.arange(q + 2 * kv)
        if self.spec.qkv != "per_head":
            return rows
        part, head, column = rows // q, rows % q // d, rows % d
        return head * 3 * d + part * d + column

    def _reorder_tensors(self, names: Sequence[str], moved: Order, turned: bool) -> None:
        """Tensors whose rows, stacked, become the old ones at `moved` (columns if `turned`)."""
        base = self._original
        axis = 1 if turned else 0
        sizes = [base.shape(name)[axis] for name in names]
        stops = np.cumsum(sizes)

        def read(start: int, stop: int, rows: slice) -> Array:
            stacked = np.concatenate([base.read(name) for name in names], axis=axis)
            return np.take(stacked, moved[start:stop], axis=axis)[rows]

        for name, size, stop in zip(names, sizes, stops, strict=True):
            rows_of = partial(read, int(stop) - size, int(stop))
            self.checkpoint.put(name, Tensor(base.shape(name), base.dtype(name), rows_of))

    def reorder_norms(self, order: Order) -> None:
        """The per-value weights of q and k norms follow reordered rows (of q and k alone)."""
        if self.spec.qk_norm is None:
            return
        q, kv = self.config.q_width, self.config.kv_width
        for role, mine in (("q_norm", order[:q]), ("k_norm", order[q : q + kv] - q)):
            for layer in self.layers:
                whole, pieces = self._norm_tensors(role, layer)
                moved = whole[mine]
                start = 0
                for name, size in pieces:
                    self._put_values(name, moved[start : start + size])
                    start += size

    def _norm_tensors(self, role: str, layer: int) -> tuple[Array, list[tuple[str, int]]]:
        """A q or k norm's weights in one row, and the tensors they come from."""
        query_heads, key_heads = self.config.num_attention_heads, self.config.num_key_value_heads
        heads = range(query_heads if role == "q_norm" else key_heads)
        names = list(dict.fromkeys(self.name(role, layer, head) for head in heads))
        values = [widen(self._original.read(name)) for name in names]
        pieces = [(name, len(value)) for name, value in zip(names, values, strict=True)]
        return np.concatenate(values), pieces

    def _put_values(self, name: str, values: Array) -> None:
        kept = values.astype(np.float32)
        self.checkpoint.put(name, Tensor(kept.shape, "F32", lambda rows: kept[rows]))

    def reorder_heads(self, heads: Order, *, kv: bool) -> None:
        """Head i becomes old head heads[i], output columns too; k and v only with `kv`."""
        d, q, width = self.config.head_dim, self.config.q_width, self.config.kv_width
        columns = (heads[:, None] * d + np.arange(d)).reshape(-1)
        rest = np.arange(q, q + 2 * width)
        order = np.concatenate([columns, columns + q, columns + 2 * q] if kv else [columns, rest])
        self.reorder(order)
        self.reorder_norms(order)
        for layer in self.layers:
            turned = self.spec.linear == "out_in"
            self._reorder_tensors([self.name("attn_out", layer)], columns, turned)

    def reshape_qk_norm(self, kind: Literal["full", "per_head"]) -> None:
        """Reads q and k norms as "full" or "per_head" whatever the file has."""
        tensors = dict(self.spec.tensors)
        for role, heads in (
            ("q_norm", self.config.num_attention_heads),
            ("k_norm", self.config.num_key_value_heads),
        ):
            tensors[role] = f"{self._source.spec.tensors[role].replace('.{h}', '')}.as_{kind}"
            tensors[role] += ".{h}" if kind == "per_head" else ""
            for layer in self.layers:
                whole, pieces = self._norm_tensors(role, layer)
                self.checkpoint.hide(*(name for name, _ in pieces))
                parts = np.split(whole, heads) if kind == "per_head" else [whole]
                for head, values in enumerate(parts):
                    full = f"{tensors[role].format(i=layer, h=head)}.weight"
                    bare = pieces[0][0].startswith(self.spec.prefix)
                    self._put_values(full if bare else full.removeprefix(self.spec.prefix), values)
        self.spec = replace(self.spec, tensors=tensors, qk_norm=kind)

    def rotate_queries(self) -> None:
        """Queries stand one position further on than they say; keys stay.

        A rotation by one position is linear, so it can be done to the projection's rows.
        """
        q = self.config.q_width
        place = self._places()[:q]
        angle = frequencies(self.rope)
        cos, sin = np.cos(angle), np.sin(angle)
        half, d = self.rope.rotary_dim // 2, self.config.head_dim
        role = "q" if self.spec.qkv == "split" else "qkv"
        stored = set(self._original.names())
        for layer in self.layers:
            for part in ("weight", "bias"):
                name = self.name(role, layer, part=part)
                if name not in stored:
                    continue

                def read(rows: slice, name: str = name) -> Array:
                    values = widen(self._original.read(name))
                    heads = values[place].astype(np.float64).reshape(-1, d, *values.shape[1:])
                    shape = (1, half, *(1,) * (values.ndim - 1))
                    c, s = cos.reshape(shape), sin.reshape(shape)
                    first, second = heads[:, :half].copy(), heads[:, half : 2 * half].copy()
                    heads[:, :half] = first * c - second * s
                    heads[:, half : 2 * half] = second * c + first * s
                    values[place] = heads.reshape(-1, *values.shape[1:])
                    return values[rows]

                self.checkpoint.put(name, Tensor(self._original.shape(name), "F32", read))

    def shift_rows(self, role: str, target: str) -> None:
        """`target` becomes the matrix of `role` with every row replaced by the one after it."""
        name, base = self.name(role), self._original
        count = base.shape(name)[0]

        def read(rows: slice) -> Array:
            after = base.read(name, slice(rows.start + 1, min(rows.stop + 1, count)))
            missing = (rows.stop - rows.start) - len(after)
            return np.concatenate([after, base.read(name, slice(0, 1))]) if missing else after

        self.checkpoint.put(self.name(target), Tensor(base.shape(name), base.dtype(name), read))
