"""The scheduler over a fake runner: who gets rows, who waits, and what a step's inbox says."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from pyengine import SamplingParams
from pyengine.errors import EngineError, NonFiniteError, RequestError
from pyengine.generation.kv_cache import BlockPool, blocks_for
from pyengine.generation.scheduler import Scheduler, Sequence
from pyengine.generation.step import StepBuffers, StepShape
from pyengine.native import Arena, load_library

VOCAB = 50


class FakeRunner:
    """Answers each step with id = 1 + the last wanted row's token, and keeps what it was asked."""

    def __init__(self, buffers: StepBuffers) -> None:
        self.buffers = buffers
        self.steps: list[dict[str, np.ndarray]] = []
        self.resets: list[int] = []
        self.broken: set[int] = set()  # logit rows that come out as NaN

    def run(self, rows: int, *, logits: bool) -> None:
        host = self.buffers.host
        used = {
            n: host[n][:rows].copy() for n in ("ids", "position", "slot", "sequence", "rope_row")
        }
        self.steps.append(used)
        active = int(host["active_logits"][0])
        self.buffers.host_logits[:] = 0.0
        host["nonfinite"][0] = len(self.broken)
        for row in range(active):
            token = int(host["ids"][host["logit_index"][row]]) + 1
            host["token_ids"][row] = token % VOCAB
            self.buffers.host_logits[row, token % VOCAB] = 1.0
            if row in self.broken:
                host["token_ids"][row] = -1
                self.buffers.host_logits[row] = np.nan

    def reset_history(self, lane: int, sequence: Sequence) -> None:
        self.resets.append(lane)

    def diagnose(self, rows: int) -> EngineError:
        return NonFiniteError("broken")


@pytest.fixture
def runner() -> Iterator[FakeRunner]:
    shape = StepShape(16, 8, 3, 8, VOCAB)
    library = load_library("cpu")
    with Arena(library, shape.device_bytes()) as device, Arena(library, 1 << 20) as host:
        yield FakeRunner(StepBuffers(device, host, shape))


def scheduler_of(
    runner: FakeRunner, blocks: int = 24, switch: int | None = None
) -> tuple[Scheduler, BlockPool]:
    pool = BlockPool(blocks)
    return Scheduler(runner, pool, max_context=256, chunk_rows=16, rope_switch=switch), pool


def test_a_long_prompt_is_cut_into_chunks_and_then_decodes(runner: FakeRunner) -> None:
    scheduler, pool = scheduler_of(runner)
    sequence = Sequence(list(range(40)), SamplingParams(max_new_tokens=3))
    scheduler.add(sequence)
    while not sequence.done:
        scheduler.step()
    assert [len(step["ids"]) for step in runner.steps] == [16, 16, 8, 1, 1]
    assert np.concatenate([s["position"] for s in runner.steps]).tolist() == list(range(42))
    assert sequence.tokens[40:] == [40, 41, 42] and sequence.finish_reason == "length"
    assert pool.free == pool.count and scheduler.idle


def test_decodes_go_before_prefill_and_share_a_step(runner: FakeRunner) -> None:
    scheduler, _ = scheduler_of(runner)
    first = Sequence([5], SamplingParams(max_new_tokens=8))
    scheduler.add(first)
    scheduler.step()
    scheduler.add(Sequence(list(range(30)), SamplingParams(max_new_tokens=1)))
    scheduler.step()
    assert runner.steps[-1]["ids"].tolist() == [6, *range(15)]
    assert runner.steps[-1]["position"].tolist() == [1, *range(15)]


def test_slots_never_overlap_between_sequences(runner: FakeRunner) -> None:
    scheduler, _ = scheduler_of(runner)
    sequences = [Sequence([i] * (20 + 7 * i), None) for i in range(3)]
    for sequence in sequences:
        scheduler.add(sequence)
    while not all(s.done for s in sequences):
        scheduler.step()
    slots = np.concatenate([s["slot"] for s in runner.steps])
    assert len(set(slots.tolist())) == len(slots) == sum(len(s.tokens) for s in sequences)
    assert [sum(map(len, s.logits)) for s in sequences] == [20, 27, 34]


def test_who_does_not_fit_waits_and_is_served_in_order(runner: FakeRunner) -> None:
    scheduler, pool = scheduler_of(runner, blocks=3)
    sequences = [Sequence([i] * 40, SamplingParams(max_new_tokens=2)) for i in range(4)]
    for sequence in sequences:
        scheduler.add(sequence)
    scheduler.step()
    assert pool.free == 3 - blocks_for(42)
    finished: list[int] = []
    while not scheduler.idle:
        scheduler.step()
        finished += [i for i, s in enumerate(sequences) if s.done and i not in finished]
    assert finished == [0, 1, 2, 3]


def test_what_can_never_fit_is_refused_with_both_numbers(runner: FakeRunner) -> None:
    scheduler, _ = scheduler_of(runner, blocks=2)
    with pytest.raises(RequestError, match="257 tokens do not fit the context of 256"):
        scheduler.add(Sequence([1] * 257, SamplingParams()))
    with pytest.raises(RequestError, match="100 tokens do not fit the KV cache of 64"):
        scheduler.add(Sequence([1] * 50, SamplingParams(max_new_tokens=50)))
    assert scheduler.idle


def test_crossing_the_rope_switch_computes_everything_again(runner: FakeRunner) -> None:
    scheduler, _ = scheduler_of(runner, switch=8)
    sequence = Sequence(list(range(6)), SamplingParams(max_new_tokens=5))
    scheduler.add(sequence)
    while not sequence.done:
        scheduler.step()
    rows = [step["rope_row"].tolist() for step in runner.steps]
    assert rows[:3] == [[0, 1, 2, 3, 4, 5], [6], [7]]
    assert rows[3] == [256 + i for i in range(9)]  # nine tokens: the long table, from the start
    assert rows[4] == [256 + 9]


def test_a_broken_row_fails_its_own_sequence_alone(runner: FakeRunner) -> None:
    scheduler, pool = scheduler_of(runner)
    good, bad = (Sequence([i], SamplingParams(max_new_tokens=2)) for i in (1, 2))
    scheduler.add(good)
    scheduler.add(bad)
    runner.broken = {1}
    scheduler.step()
    runner.broken = set()
    while not good.done:
        scheduler.step()
    assert isinstance(bad.error, NonFiniteError) and bad.finish_reason == "abort"
    assert good.error is None and good.tokens == [1, 2, 3]
    assert pool.free == pool.count


def test_an_end_of_text_token_ends_unless_it_is_ignored(runner: FakeRunner) -> None:
    for ignore, expected in ((False, [7]), (True, [7, 8, 9])):
        scheduler, _ = scheduler_of(runner)
        params = SamplingParams(max_new_tokens=3, ignore_eos=ignore)
        sequence = Sequence([6], params, frozenset({7}))
        scheduler.add(sequence)
        while not sequence.done:
            scheduler.step()
        assert sequence.tokens[1:] == expected
        assert sequence.finish_reason == ("length" if ignore else "stop")


def test_end_of_text_is_banned_until_min_new_tokens(runner: FakeRunner) -> None:
    scheduler, _ = scheduler_of(runner)
    params = SamplingParams(max_new_tokens=4, min_new_tokens=2)
    sequence = Sequence([1], params, frozenset({40, 41}))
    scheduler.add(sequence)
    banned = []
    while not sequence.done:
        scheduler.step()
        banned.append(runner.buffers.host["sample_ints"][0, 8:10].tolist())
    assert banned == [[40, 41], [40, 41], [-1, -1], [-1, -1]]


def test_history_is_reset_only_for_those_who_need_it(runner: FakeRunner) -> None:
    scheduler, _ = scheduler_of(runner)
    scheduler.add(Sequence([1], SamplingParams(max_new_tokens=1)))
    scheduler.add(Sequence([1], SamplingParams(max_new_tokens=1, repetition_penalty=1.1)))
    scheduler.step()
    assert runner.resets == [1]
    assert runner.buffers.host["sample_ints"][:2, 4].tolist() == [-1, 1]


def test_a_failing_step_leaves_nobody_running(runner: FakeRunner) -> None:
    scheduler, pool = scheduler_of(runner)
    sequence = Sequence([1, 2], SamplingParams())
    scheduler.add(sequence)
    runner.run = None  # type: ignore[assignment]
    with pytest.raises(TypeError):
        scheduler.step()
    assert sequence.finish_reason == "abort" and scheduler.idle and pool.free == pool.count
