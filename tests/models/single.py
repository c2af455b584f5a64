"""Runs a decoder over one sequence, without the engine: what the tests of this folder stand on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from pyengine.models import (
    Decoder,
    WeightTypes,
    load_config,
    load_weights,
    memory_plan,
    open_checkpoint,
    plan_weights,
)
from pyengine.native import Arena, Buffer, DType, Library, Queue, load_library, ops

Array = np.ndarray[Any, Any]


@dataclass
class Single:
    """A loaded model with room for one sequence of `max_context` tokens, `rows` a step."""

    decoder: Decoder
    queue: Queue
    batch: SimpleNamespace
    rows: int
    max_context: int

    def logits(self, ids: Sequence[int], rows: int | None = None) -> Array:
        """float32 (T, vocab) of a sequence from its start, in steps of `rows` token rows."""
        step = rows or self.rows
        return np.concatenate([self._step(ids, first, step) for first in range(0, len(ids), step)])

    def _step(self, ids: Sequence[int], first: int, rows: int) -> Array:
        self.fill(ids, first, rows)
        self.decoder.forward(self.queue, rows)
        return self.batch.logits.download(self.queue)[: len(ids[first : first + rows])]

    def _slot(self, position: Array) -> Array:
        blocks = self.batch.block_table.shape[1]
        block, offset = np.divmod(position, ops.KV_BLOCK_SIZE)
        return (blocks - 1 - block) * ops.KV_BLOCK_SIZE + offset

    def fill(self, ids: Sequence[int], first: int, rows: int) -> None:
        """Sets the batch to tokens [first, first + rows) of `ids`; past the end: surplus."""
        taken = list(ids[first : first + rows])
        position = np.full(self.rows, -1, np.int32)
        position[: len(taken)] = np.arange(first, first + len(taken))
        rope = self.decoder.config.rope
        switch = rope.switch_length if rope is not None else None
        long = self.max_context if switch is not None and len(ids) > switch else 0
        padded = np.zeros(self.rows, np.int32)
        padded[: len(taken)] = taken
        values = {
            "ids": padded,
            "position": position,
            "rope_row": np.where(position < 0, -1, position + long),
            "slot": np.where(position < 0, -1, self._slot(position)),
            "sequence": np.zeros(self.rows),
            "logit_index": np.arange(self.rows),
            "active_logits": np.array([len(taken)]),
        }
        for name, array in values.items():
            buffer: Buffer = getattr(self.batch, name)
            buffer.upload(self.queue, array.astype(np.int32))


@contextmanager
def single(
    path: Path,
    *,
    rows: int,
    max_context: int,
    types: WeightTypes | None = None,
    q8_activations: bool | None = None,
    library: Library | None = None,
) -> Iterator[Single]:
    """Loads a checkpoint, on the CPU by default; an arena of exactly the planned size."""
    library = library or load_library("cpu")
    types = types or WeightTypes(DType.F32)
    config, spec = load_config(path)
    blocks = -(-max_context // ops.KV_BLOCK_SIZE)
    with open_checkpoint(path) as checkpoint:
        plan = plan_weights(spec, config, checkpoint)
        memory = memory_plan(
            library, spec, config, types, types.dtype,
            max_rows=rows, max_context=max_context, blocks=blocks, tied=plan.tied,
        )  # fmt: skip
        with (
            Arena(library, memory.total) as arena,
            Arena(library, 4 * rows * (config.vocab_size + 8) + (1 << 16)) as step,
            Queue(library) as queue,
        ):
            if q8_activations is not None:
                queue.set_quantized_activations(q8_activations)
            weights = load_weights(queue, arena, spec, config, checkpoint, types, plan=plan)
            queue.set_scratch(arena, memory.scratch)
            kv = [
                ops.kv_layer(
                    arena, types.dtype, blocks, config.num_key_value_heads, config.head_dim
                )
                for _ in range(config.num_hidden_layers)
            ]
            names = ("ids", "position", "rope_row", "slot", "sequence", "logit_index")
            batch = SimpleNamespace(
                **{name: step.alloc((rows,), DType.I32) for name in names},
                active_logits=step.alloc((1,), DType.I32),
                block_table=step.alloc((1, blocks), DType.I32),
                logits=step.alloc((rows, config.vocab_size), DType.F32),
            )
            # Blocks in reverse order, so that a cache read as if it were contiguous shows.
            table = np.arange(blocks, dtype=np.int32)[::-1]
            batch.block_table.upload(queue, np.ascontiguousarray(table)[None])
            decoder = Decoder(
                arena, spec, config, weights, kv, batch, queue=queue, max_context=max_context
            )
            assert arena.used_bytes <= memory.total
            yield Single(decoder, queue, batch, rows, max_context)


def logits_of(
    path: Path, types: WeightTypes | None = None, *, q8_activations: bool | None = None
) -> Array:
    """float32 (6, vocab) of six fixed tokens."""
    ids = [5, 17, 250, 3, 3, 99]
    with single(
        path, rows=len(ids), max_context=32, types=types, q8_activations=q8_activations
    ) as model:
        return model.logits(ids)
