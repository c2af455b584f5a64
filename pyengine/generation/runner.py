"""Runs steps: one recorded program for each number of rows, and the search for a broken layer."""

from __future__ import annotations

import contextlib

import numpy as np

from pyengine.errors import EngineError, NonFiniteError, Unsupported
from pyengine.generation.scheduler import Sequence
from pyengine.generation.step import StepBuffers
from pyengine.models.decoder import Decoder
from pyengine.native import Arena, Buffer, DType, Program, Queue, Replay, ops


def program_rows(rows: int, largest: int) -> int:
    """Rows of the program that runs `rows` rows: the next power of two up to 64, then `largest`."""
    if rows > 64:
        return largest
    return min(1 << (rows - 1).bit_length(), largest)


class StepRunner:
    """The forward pass and the sampler over one set of step buffers.

    Args:
        exact_rows: past this many rows a step runs immediate with just its own rows (on the CPU,
            where a launch costs nothing and surplus rows cost time); None: always a program.
        record: False runs every step immediate.
    """

    def __init__(
        self,
        decoder: Decoder,
        buffers: StepBuffers,
        queue: Queue,
        arena: Arena,
        *,
        exact_rows: int | None,
        record: bool = True,
    ) -> None:
        self.buffers = buffers
        self._decoder = decoder
        self._queue = queue
        self._arena = arena
        self._exact_rows = exact_rows
        self._record = record
        self._programs: dict[tuple[int, bool], Program] = {}
        shape = buffers.shape
        self._counts = arena.alloc((shape.sequences, shape.vocab_size), DType.I32)
        self._bias = arena.alloc((shape.sequences, shape.vocab_size), DType.F32)
        self._history = arena.alloc(
            (_history_words(shape.blocks_per_sequence, shape.vocab_size),), DType.I32
        )

    @staticmethod
    def device_bytes(sequences: int, blocks_per_sequence: int, vocab_size: int) -> int:
        """Arena bytes that a runner carves."""
        words = 2 * sequences * vocab_size + _history_words(blocks_per_sequence, vocab_size)
        return 4 * words + 4096

    def run(self, rows: int, *, logits: bool) -> None:
        """Runs the inbox's first `rows` rows; returns when outbox (and logits) are there."""
        if not self._record or (self._exact_rows is not None and rows > self._exact_rows):
            self._issue(rows, logits=logits)
            self._queue.sync()
        else:
            self.program(program_rows(rows, self.buffers.shape.rows), logits=logits).replay()

    def program(self, rows: int, *, logits: bool) -> Program:
        """The recorded step of that many rows; recorded when first asked for."""
        key = (rows, logits)
        if key not in self._programs:
            with self._queue.record() as program:
                self._issue(rows, logits=logits)
            if self._queue.library.backend != "cpu":
                # The library says no where graphs are off or fail its self-test: then it loops.
                with contextlib.suppress(Unsupported):
                    program.set_replay(Replay.GRAPH)
            self._programs[key] = program
        return self._programs[key]

    def record_decodes(self) -> None:
        """Records the programs of all steps that only decode, so that none waits for it later."""
        rows, most = 1, self.buffers.shape.sequences
        while self._record:
            self.program(program_rows(rows, self.buffers.shape.rows), logits=False)
            if rows >= most:
                return
            rows *= 2

    def _issue(self, rows: int, *, logits: bool) -> None:
        self.buffers.send(self._queue)
        self._decoder.forward(self._queue, rows)
        self.buffers.sample(self._queue, rows, self._counts, self._bias)
        self.buffers.receive(self._queue, rows, logits=logits)

    def reset_history(self, lane: int, sequence: Sequence) -> None:
        """Clears the lane's counts and bias; marks the prompt and sets logit_bias."""
        assert sequence.params is not None
        prompt = np.array(sequence.tokens, np.int32)
        vocab = self.buffers.shape.vocab_size
        chosen = {i: v for i, v in sequence.params.logit_bias.items() if 0 <= i < vocab}
        self._history.rows(0, len(prompt)).upload(self._queue, prompt)
        ids = values = None
        if chosen:
            start = len(prompt)
            ids = self._history.rows(start, start + len(chosen))
            ids.upload(self._queue, np.array(list(chosen), np.int32))
            tail = self._history.rows(start + len(chosen), start + 2 * len(chosen))
            values = Buffer(tail.ptr, tail.shape, DType.F32, tail.stride, tail.arena)
            values.upload(self._queue, np.array(list(chosen.values()), np.float32))
        ops.sample_reset(
            self._queue, self._counts, self._bias, lane,
            self._history.rows(0, len(prompt)), ids, values,
        )  # fmt: skip
        self._queue.sync()

    def diagnose(self, rows: int) -> EngineError:
        """Runs the last step again, counting after every layer, and names the first that breaks."""
        count = self._history.rows(0, 1)
        culprits: list[str] = []

        def check(stage: str, values: Buffer) -> None:
            if not culprits:
                count.upload(self._queue, np.zeros(1, np.int32))
                ops.count_nonfinite(self._queue, count, values)
                if count.download(self._queue)[0]:
                    culprits.append(stage)

        self.buffers.send(self._queue)
        self._decoder.forward(self._queue, rows, check)
        where = f"first after {culprits[0]}" if culprits else "only in the logits themselves"
        return NonFiniteError(
            f"NaN or infinity in the logits, {where}: the weights are damaged, or a value left the "
            'range of f16; try dtype="bf16" or dtype="f32"'
        )

    def close(self) -> None:
        """Frees the programs."""
        for program in self._programs.values():
            program.close()
        self._programs.clear()


def _history_words(blocks_per_sequence: int, vocab_size: int) -> int:
    """Room for a prompt and a bias on every token."""
    return blocks_per_sequence * ops.KV_BLOCK_SIZE + 2 * vocab_size
