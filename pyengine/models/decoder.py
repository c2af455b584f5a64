"""The one forward pass of all families: a list of kernel calls that traits choose, never names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from pyengine.models.loading import Block, Weights
from pyengine.models.memory import activation_shapes, rope_table_shape
from pyengine.models.model_config import ModelConfig
from pyengine.models.positions import RopeConfig, alibi_slopes, rope_rows
from pyengine.models.spec import DecoderSpec
from pyengine.native import Arena, Buffer, DType, NormKind, Queue, ops

Check = Callable[[str, Buffer], None]
_TABLE_SLICE = 4096  # positions of the rotary table made at once


class StepBuffers(Protocol):
    """What a step is about, on the device, filled by the driver before each step.

    R is the most token rows of a step, G the most rows with logits. All int32 but `logits`.

    Attributes:
        ids: (R) token ids.
        position: (R) index in the sequence; -1 for a surplus row.
        rope_row: (R) row of the rotary table: the position, plus max_context for a long sequence.
        slot: (R) where keys and values go: block * block size + offset.
        sequence: (R) row of block_table.
        block_table: (sequences, blocks a sequence).
        logit_index: (G) rows whose logits are wanted. active_logits: (1) how many of them count.
        logits: (G, vocab_size) float32, the result.
    """

    ids: Buffer
    position: Buffer
    rope_row: Buffer
    slot: Buffer
    sequence: Buffer
    block_table: Buffer
    logit_index: Buffer
    active_logits: Buffer
    logits: Buffer


@dataclass(frozen=True)
class _Views:
    """Buffers of one step, cut to its rows; q, k and v are parts of qkv."""

    ids: Buffer
    position: Buffer
    rope_row: Buffer
    slot: Buffer
    sequence: Buffer
    stream: Buffer
    normed: Buffer
    qkv: Buffer
    q: Buffer
    k: Buffer
    v: Buffer
    heads: Buffer
    gate_up: Buffer | None
    inner: Buffer
    picked: Buffer
    logit_index: Buffer
    logits: Buffer


class Decoder:
    """A decoder whose activations and tables lie in an arena.

    Args:
        arena: has room for memory_plan's activations and tables.
        kv: one cache a layer.
        batch: the driver's buffers; ids and logits set the largest step.
        queue: copies the tables to the device.
        max_context: positions of the rotary table.
    """

    def __init__(
        self,
        arena: Arena,
        spec: DecoderSpec,
        config: ModelConfig,
        weights: Weights,
        kv: list[ops.KVLayer],
        batch: StepBuffers,
        *,
        queue: Queue,
        max_context: int,
    ) -> None:
        self.spec = spec
        self.config = config
        self._weights = weights
        self._kv = kv
        self._batch = batch
        shapes = activation_shapes(spec, config, batch.ids.shape[0], batch.logits.shape[0])
        self._buffers = {name: arena.alloc(shape, DType.F32) for name, shape in shapes.items()}
        self._table = _rope_table(queue, arena, config, max_context) if config.rope else None
        self._slopes = None
        if spec.position == "alibi":
            slopes = alibi_slopes(config.num_attention_heads)
            self._slopes = arena.alloc(slopes.shape, DType.F32).upload(queue, slopes)
        self._cut: dict[int, _Views] = {}

    def forward(self, queue: Queue, rows: int, check: Check | None = None) -> None:
        """One step over the first `rows` rows of the batch: runs it, or records it.

        check: called with a name and the residual stream after the embedding ("embedding") and
            each layer ("layer 0", ...), and with the normed stream ("final norm"); for looking.
        """
        at = self._views(rows)
        look = check or _look_away
        self._embed(queue, at)
        look("embedding", at.stream)
        for index, layer in enumerate(self._weights.layers):
            self._attention(queue, at, layer, index)
            self._mlp(queue, at, layer)
            look(f"layer {index}", at.stream)
        self._head(queue, at)
        look("final norm", at.normed)

    # ---- the steps, in order -------------------------------------------------------------------

    def _embed(self, queue: Queue, at: _Views) -> None:
        """stream = table[id] (+ position table[position]) (normed)."""
        model = self._weights.model
        ops.embedding(queue, at.stream, model.matrices["embed"], at.ids)
        if self.spec.position == "learned":
            table = model.matrices["position_embed"]
            ops.embedding(queue, at.stream, table, at.position, residual=at.stream)
        if self.spec.embed_norm:
            self._norm(queue, at.stream, at.stream, model, "embed_norm")

    def _attention(self, queue: Queue, at: _Views, layer: Block, index: int) -> None:
        """Projections of the normed stream, positions, cache, attention; added to the stream."""
        config = self.config
        source, norm = self._input(queue, at, layer, "attn_norm")
        ops.matmul_fused(
            queue, at.qkv, source, layer.matrices["qkv"], layer.vectors.get("qkv.bias"),
            norm=norm, normed=at.normed if norm else None,
        )  # fmt: skip
        if self.spec.qk_norm:
            self._norm_heads(queue, at.q, layer, "q_norm", config.num_attention_heads)
            self._norm_heads(queue, at.k, layer, "k_norm", config.num_key_value_heads)
        if config.rope is not None and self._table is not None:
            ops.rope_append(
                queue, at.qkv, self._kv[index], at.slot, self._table, at.rope_row,
                heads=config.num_attention_heads, rotary_dim=config.rope.rotary_dim,
            )  # fmt: skip
        else:
            ops.kv_append(queue, self._kv[index], at.k, at.v, at.slot)
        ops.attention_paged(
            queue, at.heads, at.q, self._kv[index], self._batch.block_table, at.sequence,
            at.position, heads=config.num_attention_heads, scale=config.attention_scales[index],
            slope=self._slopes, window=config.layer_windows[index],
        )  # fmt: skip
        self._add_sublayer(queue, at, at.heads, layer, "attn_out", "attn_norm")

    def _mlp(self, queue: Queue, at: _Views, layer: Block) -> None:
        """The MLP of the (normed) stream, added to the stream."""
        source, norm = self._input(queue, at, layer, "mlp_norm")
        role = "up" if at.gate_up is None else "gate_up"
        ops.matmul_fused(
            queue, at.inner, source, layer.matrices[role], layer.vectors.get(f"{role}.bias"),
            norm=norm, normed=at.normed if norm else None,
            activation=self.config.activation, product=at.gate_up,
        )  # fmt: skip
        self._add_sublayer(queue, at, at.inner, layer, "down", "mlp_norm")

    def _head(self, queue: Queue, at: _Views) -> None:
        """Logits of the rows that are wanted."""
        model, active = self._weights.model, self._batch.active_logits
        self._norm(queue, at.normed, at.stream, model, "final_norm")
        ops.gather_rows(queue, at.picked, at.normed, at.logit_index, active)
        ops.matmul(queue, at.logits, at.picked, model.matrices["lm_head"], active=active)

    # ---- their parts ---------------------------------------------------------------------------

    def _input(
        self, queue: Queue, at: _Views, layer: Block, role: str
    ) -> tuple[Buffer, ops.Norm | None]:
        """What a sublayer's first projection reads, and the norm that it takes on the way."""
        spec = self.spec
        if spec.norm_placement == "post":
            return at.stream, None
        if spec.parallel_residual and role == "mlp_norm":
            return at.normed, None  # still attention's input
        if spec.parallel_residual or spec.residual_from_norm:  # wanted again
            return self._norm(queue, at.normed, at.stream, layer, role), None
        kind = NormKind.RMS if spec.norm == "rms" else NormKind.LAYER
        bias = layer.vectors.get(f"{role}.bias")
        return at.stream, ops.Norm(kind, layer.vectors[role], bias, self.config.norm_eps)

    def _add_sublayer(
        self, queue: Queue, at: _Views, x: Buffer, layer: Block, role: str, norm: str
    ) -> None:
        """The sublayer's last projection, normed where norms come after, added to the residual."""
        bias = layer.vectors.get(f"{role}.bias")
        if self.spec.norm_placement == "post":
            ops.matmul(queue, at.normed, x, layer.matrices[role], bias)
            self._norm(queue, at.stream, at.normed, layer, norm, residual=at.stream)
            return
        residual = at.normed if self.spec.residual_from_norm else at.stream
        ops.matmul(queue, at.stream, x, layer.matrices[role], bias, residual)

    def _norm(
        self,
        queue: Queue,
        y: Buffer,
        x: Buffer,
        block: Block,
        role: str,
        *,
        groups: int = 1,
        residual: Buffer | None = None,
    ) -> Buffer:
        """y = norm(x) (+ residual), of the family's kind; returns y."""
        weight, eps = block.vectors[role], self.config.norm_eps
        if self.spec.norm == "rms":
            ops.rms_norm(queue, y, x, weight, eps=eps, groups=groups, residual=residual)
        else:
            bias = block.vectors.get(f"{role}.bias")
            ops.layer_norm(queue, y, x, weight, bias, eps=eps, groups=groups, residual=residual)
        return y

    def _norm_heads(self, queue: Queue, x: Buffer, layer: Block, role: str, heads: int) -> None:
        """In place, over all heads together or each head apart."""
        groups = heads if self.spec.qk_norm == "per_head" else 1
        self._norm(queue, x, x, layer, role, groups=groups)

    def _views(self, rows: int) -> _Views:
        """The step's buffers, cut once per number of rows."""
        if rows not in self._cut:
            wanted = min(rows, self._batch.logits.shape[0])
            cut = {
                name: buffer.rows(0, wanted if name == "picked" else rows)
                for name, buffer in self._buffers.items()
            }
            batch, qkv = self._batch, cut["qkv"]
            q, kv = self.config.q_width, self.config.kv_width
            self._cut[rows] = _Views(
                ids=batch.ids.rows(0, rows),
                position=batch.position.rows(0, rows),
                rope_row=batch.rope_row.rows(0, rows),
                slot=batch.slot.rows(0, rows),
                sequence=batch.sequence.rows(0, rows),
                stream=cut["stream"],
                normed=cut["normed"],
                qkv=qkv,
                q=qkv.columns(0, q),
                k=qkv.columns(q, q + kv),
                v=qkv.columns(q + kv, q + 2 * kv),
                heads=cut["heads"],
                gate_up=cut.get("gate_up"),
                inner=cut["inner"],
                picked=cut["picked"],
                logit_index=batch.logit_index.rows(0, wanted),
                logits=batch.logits.rows(0, wanted),
            )
        return self._cut[rows]


def _look_away(_: str, __: Buffer) -> None:
    """The check of a step that nobody looks at."""


def _rope_table(queue: Queue, arena: Arena, config: ModelConfig, max_context: int) -> Buffer:
    """The rotary table: rows [0, max_context) and, where there are long factors, as many more."""
    assert config.rope is not None
    rope: RopeConfig = config.rope
    table = arena.alloc(rope_table_shape(config, max_context), DType.F32)
    for long in (False, True) if rope.switch_length is not None else (False,):
        base = max_context if long else 0
        for first in range(0, max_context, _TABLE_SLICE):
            stop = min(first + _TABLE_SLICE, max_context)
            table.rows(base + first, base + stop).upload(
                queue, rope_rows(rope, first, stop, long=long)
            )
    return table
