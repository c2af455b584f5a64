"""What travels to the device and back in one step: an inbox, an outbox, the logits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pyengine.native import Arena, Buffer, DType, Queue, ops
from pyengine.native.memory import Array

_ALIGN = 64  # int32 words: every field starts on a 256-byte boundary


@dataclass(frozen=True)
class StepShape:
    """Capacities of a step.

    Attributes:
        rows: token rows. logit_rows: rows whose logits can be wanted. sequences: lanes of the
            batch.
        blocks_per_sequence: KV blocks of the longest sequence. vocab_size: width of the logits.
    """

    rows: int
    logit_rows: int
    sequences: int
    blocks_per_sequence: int
    vocab_size: int

    def inbox(self) -> dict[str, tuple[int, ...]]:
        """Field -> shape of what the host sends, all 32-bit words."""
        rows, logits = self.rows, self.logit_rows
        return {
            "ids": (rows,),
            "position": (rows,),  # -1: a surplus row
            "rope_row": (rows,),
            "slot": (rows,),  # block * KV_BLOCK_SIZE + offset; -1: not stored
            "sequence": (rows,),
            "logit_index": (logits,),
            "active_logits": (1,),
            "sample_ints": (logits, ops.SAMPLE_INTS),
            "sample_floats": (logits, ops.SAMPLE_FLOATS),
            "block_table": (self.sequences, self.blocks_per_sequence),
        }

    def outbox(self) -> dict[str, tuple[int, ...]]:
        """Field -> shape of what the device answers, all 32-bit words."""
        return {
            "token_ids": (self.logit_rows,),
            "logprobs": (self.logit_rows,),
            "nonfinite": (1,),
        }

    def device_bytes(self) -> int:
        """Arena bytes that StepBuffers carves on the device."""
        words = _words(self.inbox()) + _words(self.outbox())
        return words * 4 + self.logit_rows * self.vocab_size * 4 + 4096

    def host_bytes(self) -> int:
        """Arena bytes that StepBuffers carves in host memory."""
        return self.device_bytes()


_FLOAT_FIELDS = ("sample_floats", "logprobs")


def _padded(shape: tuple[int, ...]) -> int:
    return -(-int(np.prod(shape)) // _ALIGN) * _ALIGN


def _words(fields: dict[str, tuple[int, ...]]) -> int:
    return sum(_padded(shape) for shape in fields.values())


class _Block:
    """One region carved into named fields, in the order given."""

    def __init__(self, arena: Arena, fields: dict[str, tuple[int, ...]]) -> None:
        self.whole = arena.alloc((_words(fields),), DType.I32)
        self.fields: dict[str, Buffer] = {}
        offset = 0
        for name, shape in fields.items():
            dtype = DType.F32 if name in _FLOAT_FIELDS else DType.I32
            stride = int(np.prod(shape[1:]))
            self.fields[name] = Buffer(self.whole.ptr + 4 * offset, shape, dtype, stride, arena)
            offset += _padded(shape)


class StepBuffers:
    """The device's side (Buffers, by field name) and the host's side (numpy views) of a step."""

    def __init__(self, arena: Arena, host: Arena, shape: StepShape) -> None:
        self.shape = shape
        self._inbox, self._host_inbox = _Block(arena, shape.inbox()), _Block(host, shape.inbox())
        self._outbox, self._host_outbox = (
            _Block(arena, shape.outbox()),
            _Block(host, shape.outbox()),
        )
        device = self._inbox.fields | self._outbox.fields
        self.ids, self.position, self.rope_row = (
            device[n] for n in ("ids", "position", "rope_row")
        )
        self.slot, self.sequence = device["slot"], device["sequence"]
        self.block_table = device["block_table"]
        self.logit_index, self.active_logits = device["logit_index"], device["active_logits"]
        self._sample_ints, self._sample_floats = device["sample_ints"], device["sample_floats"]
        self._token_ids, self._logprobs = device["token_ids"], device["logprobs"]
        self._nonfinite = device["nonfinite"]
        self.logits = arena.alloc((shape.logit_rows, shape.vocab_size), DType.F32)
        # Where the host can read device memory, the logits need no second place.
        self._logits_copy = (
            self.logits if arena.host_readable else host.alloc(self.logits.shape, DType.F32)
        )
        self.host: dict[str, Array] = {
            name: buffer.numpy()
            for name, buffer in (self._host_inbox.fields | self._host_outbox.fields).items()
        }
        self.host_logits = self._logits_copy.numpy()
        for name in shape.inbox():
            self.host[name].fill(0)
        self._used = shape.rows
        self.use(0)

    def use(self, rows: int) -> None:
        """Declares the inbox's first `rows` rows as used: those used before are surplus now.

        Whoever calls it writes these rows; surplus rows keep ids and sequences of earlier steps.
        """
        for name in ("position", "slot", "rope_row"):
            self.host[name][rows : self._used] = -1
        self._used = rows

    def send(self, queue: Queue) -> None:
        """Copies the inbox to the device: a step's first operation."""
        whole, source = self._inbox.whole, self._host_inbox.whole
        queue.library.c.ok_copy(queue.handle, whole.ptr, source.ptr, whole.nbytes)
        queue.library.c.ok_fill(queue.handle, self._nonfinite.ptr, 0, 4)

    def sample(self, queue: Queue, rows: int, counts: Buffer | None, bias: Buffer | None) -> None:
        """Checks the wanted logits for infinities and picks a token for each."""
        n = min(rows, self.shape.logit_rows)
        logits = self.logits.rows(0, n)
        ops.count_nonfinite(queue, self._nonfinite, logits, self.active_logits)
        ops.sample(
            queue, self._token_ids.rows(0, n), self._logprobs.rows(0, n), logits,
            self._sample_floats.rows(0, n), self._sample_ints.rows(0, n), counts, bias,
            self.active_logits,
        )  # fmt: skip

    def receive(self, queue: Queue, rows: int, *, logits: bool) -> None:
        """Copies the outbox, and on request the logits, to the host: a step's last operations."""
        whole, target = self._outbox.whole, self._host_outbox.whole
        queue.library.c.ok_copy(queue.handle, target.ptr, whole.ptr, whole.nbytes)
        if logits and self._logits_copy is not self.logits:
            wanted = self.logits.rows(0, min(rows, self.shape.logit_rows))
            queue.library.c.ok_copy(queue.handle, self._logits_copy.ptr, wanted.ptr, wanted.nbytes)
