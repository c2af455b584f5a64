"""Which token rows of which sequences go into the next step, and what comes of them.

A step mixes decodes (one row a sequence) and chunks of prefill, up to a budget of rows. A sequence
holds a lane (a row of the block table) and all the KV blocks it can come to need from admission to
its end.
"""

from __future__ import annotations

import itertools
import secrets
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from pyengine.errors import EngineError, RequestError
from pyengine.generation.kv_cache import BlockPool, blocks_for
from pyengine.generation.sampling import SampleRow, SamplingParams
from pyengine.generation.step import StepBuffers
from pyengine.native.memory import Array
from pyengine.native.ops import KV_BLOCK_SIZE, SAMPLE_MAX_BANNED

_GREEDY = SamplingParams()
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token.

    Attributes:
        id: token id.
        logprob: its natural-log probability under the model's own distribution.
        top: (id, logprob) of the most probable ones, as many as SamplingParams.logprobs asks for.
    """

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(eq=False)
class Sequence:
    """One request in flight.

    With `params` it is continued; without, the logits of every given token are collected.
    """

    tokens: list[int]
    params: SamplingParams | None
    eos_token_ids: frozenset[int] = frozenset()
    number: int = field(default_factory=lambda: next(_numbers))
    prompt_length: int = 0
    computed: int = 0  # tokens whose keys and values are in the cache
    rope_offset: int = 0  # first row of the rotary table this sequence uses
    lane: int = -1
    blocks: list[int] = field(default_factory=list)
    seed: int = 0
    sample: SampleRow | None = None  # its sampling parameters, packed when first needed
    fresh: deque[Token] = field(default_factory=deque)  # generated and not yet taken by the reader
    logits: list[Array] = field(default_factory=list)
    logit_row: int = -1  # where its last token's logits lie on the device, until the next step
    finish_reason: str = ""  # "stop" (end-of-text), "length", "abort"; empty while running
    error: EngineError | None = None

    def __post_init__(self) -> None:
        self.prompt_length = len(self.tokens)
        if self.params is not None:
            seed = self.params.seed
            self.seed = secrets.randbits(64) if seed is None else int(seed) % 2**64

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.prompt_length

    @property
    def done(self) -> bool:
        """Whether nothing more will come."""
        return bool(self.finish_reason) or self.error is not None


class Runner(Protocol):
    """What the scheduler needs of the thing that runs steps."""

    buffers: StepBuffers

    def run(self, rows: int, *, logits: bool) -> None:
        """Runs one step over the inbox's first `rows` rows."""

    def reset_history(self, lane: int, sequence: Sequence) -> None:
        """Clears the lane's counts and bias, and marks the prompt."""

    def diagnose(self, rows: int) -> EngineError:
        """Says which layer of the last step was the first with NaN or infinity."""


class Scheduler:
    """Admits sequences, builds steps, hands out results; used by one thread at a time.

    Args:
        runner: runs the steps.
        pool: KV blocks.
        max_context: most tokens of a sequence.
        chunk_rows: most token rows of a step.
        rope_switch: longest sequence that uses the first set of rotary frequencies, if there are
            two.
    """

    def __init__(
        self,
        runner: Runner,
        pool: BlockPool,
        *,
        max_context: int,
        chunk_rows: int,
        rope_switch: int | None = None,
    ) -> None:
        self._runner = runner
        self._pool = pool
        self._max_context = max_context
        self.chunk_rows = chunk_rows
        self._rope_switch = rope_switch
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self._waiting and not self._running

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence.

        Raises:
            RequestError: it is longer than the context or the whole KV cache; with both numbers.
        """
        length = len(sequence.tokens)
        if length > self._max_context:
            raise RequestError(
                f"{length} tokens do not fit the context of {self._max_context} (max_context)"
            )
        if blocks_for(self._reach(sequence)) > self._pool.count:
            raise RequestError(
                f"{self._reach(sequence)} tokens do not fit the KV cache of "
                f"{self._pool.count * KV_BLOCK_SIZE} (kv_tokens)"
            )
        if sequence.params is not None and self._at_end(sequence):
            sequence.finish_reason = "length"
            return
        self._waiting.append(sequence)

    def finish(self, sequence: Sequence, reason: str) -> None:
        """Ends a sequence and frees what it holds; harmless if it has ended."""
        sequence.finish_reason = sequence.finish_reason or reason
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        if sequence in self._running:
            self._running.remove(sequence)
            self._pool.give_back(sequence.blocks)

    def step(self) -> None:
        """Runs one step; results are left in the sequences.

        An exception ends every sequence of the step, with an error of its own: what was in the
        step cannot be continued.
        """
        self._admit()
        plan = self._plan()
        if not plan:
            return
        try:
            rows, wanted = self._fill(plan)
            detailed = any(s.params is None or s.params.logprobs for s, _ in wanted)
            self._runner.run(rows, logits=detailed)
            self._collect(plan, wanted, rows)
        except BaseException as error:
            for sequence, _ in plan:
                if not sequence.done:
                    sequence.error = EngineError(
                        f"the step that held this request failed: {error!r}"
                    )
                self.finish(sequence, "abort")
            raise

    def _reach(self, sequence: Sequence) -> int:
        """Most tokens the sequence can come to hold."""
        if sequence.params is None:
            return len(sequence.tokens)
        return min(sequence.prompt_length + sequence.params.max_new_tokens, self._max_context)

    def _at_end(self, sequence: Sequence) -> bool:
        return len(sequence.tokens) >= self._reach(sequence)

    def _admit(self) -> None:
        """First come, first served, while lanes and blocks last."""
        if not self._waiting:
            return
        if not self._running:
            self._pool.take_all_back()  # an interrupt may have lost some
        lanes = set(range(self._runner.buffers.shape.sequences)) - {s.lane for s in self._running}
        while self._waiting and lanes:
            sequence = self._waiting[0]
            needed = blocks_for(self._reach(sequence))
            if needed > self._pool.free:
                return
            self._waiting.popleft()
            sequence.lane = min(lanes)
            lanes.remove(sequence.lane)
            sequence.blocks = self._pool.take(needed)
            self._runner.buffers.host["block_table"][sequence.lane, :needed] = sequence.blocks
            self._running.append(sequence)
            if sequence.params is not None and sequence.params.needs_history:
                self._runner.reset_history(sequence.lane, sequence)

    def _plan(self) -> list[tuple[Sequence, int]]:
        """(sequence, rows it gets): decodes first, then prefill in order of arrival."""
        shape = self._runner.buffers.shape
        budget, logit_budget = min(self.chunk_rows, shape.rows), shape.logit_rows
        for sequence in self._running:
            self._choose_rope(sequence)
        by_need = sorted(self._running, key=lambda s: (len(s.tokens) - s.computed > 1, s.number))
        plan = []
        for sequence in by_need:
            rows = min(len(sequence.tokens) - sequence.computed, budget)
            if sequence.params is None:
                rows = min(rows, logit_budget)
            logit_rows = self._logit_rows(sequence, rows)
            if rows <= 0 or logit_rows > logit_budget:
                continue
            plan.append((sequence, rows))
            budget -= rows
            logit_budget -= logit_rows
        return plan

    @staticmethod
    def _logit_rows(sequence: Sequence, rows: int) -> int:
        """How many of its next `rows` rows have logits that are wanted: the last of them."""
        if sequence.params is None:
            return rows
        return int(sequence.computed + rows == len(sequence.tokens))

    def _choose_rope(self, sequence: Sequence) -> None:
        """Which rotary table; on crossing the switch everything cached is computed again."""
        if self._rope_switch is None:
            return
        offset = self._max_context if len(sequence.tokens) > self._rope_switch else 0
        if offset != sequence.rope_offset:
            sequence.rope_offset = offset
            sequence.computed = 0

    def _fill(self, plan: list[tuple[Sequence, int]]) -> tuple[int, list[tuple[Sequence, int]]]:
        """Writes the inbox; returns (rows, [(sequence, first logit row)] in the logits' order)."""
        buffers = self._runner.buffers
        host = buffers.host
        ids: list[int] = []
        positions: list[int] = []
        rope_rows: list[int] = []
        lanes: list[int] = []
        logit_index: list[int] = []
        wanted = []
        for sequence, count in plan:
            start, end = sequence.computed, sequence.computed + count
            ids += sequence.tokens[start:end]
            positions += range(start, end)
            rope_rows += range(sequence.rope_offset + start, sequence.rope_offset + end)
            lanes += [sequence.lane] * count
            logit_rows = self._logit_rows(sequence, count)
            if logit_rows:
                first = len(logit_index)
                wanted.append((sequence, first))
                logit_index += range(len(ids) - logit_rows, len(ids))
                self._write_sample(sequence, slice(first, first + logit_rows))
        rows = len(ids)
        buffers.use(rows)
        host["ids"][:rows] = ids
        host["position"][:rows] = positions
        host["rope_row"][:rows] = rope_rows
        host["sequence"][:rows] = lanes
        position = host["position"][:rows]
        block = host["block_table"][host["sequence"][:rows], position // KV_BLOCK_SIZE]
        host["slot"][:rows] = block * KV_BLOCK_SIZE + position % KV_BLOCK_SIZE
        host["logit_index"][: len(logit_index)] = logit_index
        host["active_logits"][0] = len(logit_index)
        return rows, wanted

    def _write_sample(self, sequence: Sequence, where: slice) -> None:
        """The sampler's parameters for a sequence's logit rows."""
        if sequence.sample is None:
            sequence.sample = self._sample_row(sequence)
        host = self._runner.buffers.host
        sequence.sample.write(
            host["sample_floats"][where],
            host["sample_ints"][where],
            position=len(sequence.tokens),
            banning=sequence.params is not None
            and sequence.generated < sequence.params.min_new_tokens,
        )

    @staticmethod
    def _sample_row(sequence: Sequence) -> SampleRow:
        params = sequence.params
        if params is None:
            return SampleRow(_GREEDY, seed=0, slot=-1)
        slot = sequence.lane if params.needs_history else -1
        banned = sorted(sequence.eos_token_ids)[:SAMPLE_MAX_BANNED]
        return SampleRow(params, seed=sequence.seed, slot=slot, banned=banned)

    def _collect(
        self, plan: list[tuple[Sequence, int]], wanted: list[tuple[Sequence, int]], rows: int
    ) -> None:
        """Takes the outbox apart."""
        buffers = self._runner.buffers
        first_logit_row = dict(wanted)
        bad = bool(buffers.host["nonfinite"][0])
        picked = buffers.host["token_ids"]
        error = self._runner.diagnose(rows) if bad else None
        for sequence, count in plan:
            sequence.computed += count
            logit_row = first_logit_row.get(sequence)
            if logit_row is None:
                continue
            if error is not None and self._row_is_bad(sequence, logit_row, count, wanted):
                sequence.error = error
                self.finish(sequence, "abort")
            elif sequence.params is None:
                sequence.logits.append(buffers.host_logits[logit_row : logit_row + count].copy())
                if sequence.computed == len(sequence.tokens):
                    self.finish(sequence, "stop")
            else:
                sequence.logit_row = logit_row
                self._accept(sequence, sequence.params, int(picked[logit_row]), logit_row)

    def _row_is_bad(
        self, sequence: Sequence, row: int, count: int, wanted: list[tuple[Sequence, int]]
    ) -> bool:
        """Whether this sequence's own logits are not finite (its neighbours go on)."""
        buffers = self._runner.buffers
        if len(wanted) == 1:
            return True
        if sequence.params is None:
            return not np.isfinite(buffers.host_logits[row : row + count]).all()
        # -infinity alone is not marked by the sampler: then no row can be told apart.
        marked = any(buffers.host["token_ids"][r] < 0 for s, r in wanted if s.params is not None)
        return buffers.host["token_ids"][row] < 0 or not marked

    def _accept(self, sequence: Sequence, params: SamplingParams, token: int, row: int) -> None:
        """Appends a picked token and ends the sequence where it ends."""
        if token < 0:
            sequence.error = RequestError(
                "no token is left to pick: logit_bias and min_new_tokens exclude all of them"
            )
            self.finish(sequence, "abort")
            return
        buffers = self._runner.buffers
        top: tuple[tuple[int, float], ...] = ()
        if params.logprobs:
            top = _most_probable(buffers.host_logits[row], params.logprobs)
        sequence.tokens.append(token)
        sequence.fresh.append(Token(token, float(buffers.host["logprobs"][row]), top))
        if token in sequence.eos_token_ids and not params.ignore_eos:
            self.finish(sequence, "stop")
        elif self._at_end(sequence):
            self.finish(sequence, "length")


def _most_probable(logits: Array, count: int) -> tuple[tuple[int, float], ...]:
    """(id, log-probability) of the largest logits, largest first, the lower id first on a tie."""
    exact = logits.astype(np.float64)
    order = np.lexsort((np.arange(len(exact)), -exact))[:count]
    total = exact.max() + np.log(np.exp(exact - exact.max()).sum())
    return tuple((int(i), float(exact[i] - total)) for i in order)
