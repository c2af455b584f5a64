"""ok_sample and ok_sample_reset against a sorting reference, itself held to Transformers."""

from __future__ import annotations

import mmap
import tempfile

import numpy as np
import pytest

from pyengine.native import Buffer, DType, ops
from tests import reference

SIZES = [1, 2, 259, 300, 301, 303, 40000, 40001]
FLOATS = {"temperature": 0, "top_p": 1, "min_p": 2, "repetition": 3, "presence": 4, "frequency": 5}
INTS = {"top_k": 0, "position": 3, "slot": 4}


def parameters(rows, *, seed=0, banned=(), **values):
    """floats and ints of `rows` equal rows; greedy unless told otherwise, no slot."""
    floats = np.zeros((rows, ops.SAMPLE_FLOATS), np.float32)
    ints = np.zeros((rows, ops.SAMPLE_INTS), np.int32)
    floats[:, [FLOATS["top_p"], FLOATS["repetition"]]] = 1
    ints[:, INTS["slot"]] = -1
    ints[:, 1], ints[:, 2] = np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32).view(np.int32)
    ints[:, reference.BANNED_FIRST :] = -1
    ints[:, reference.BANNED_FIRST : reference.BANNED_FIRST + len(banned)] = banned
    for name, value in values.items():
        if name in FLOATS:
            floats[:, FLOATS[name]] = value
        else:
            ints[:, INTS[name]] = value
    return floats, ints


@pytest.fixture
def sample(arena, queue, put):
    """sample(logits, (floats, ints), counts=, bias=, active=) -> ids, logprobs, counts."""

    def sample(logits, params, counts=None, bias=None, active=None):
        logits = np.ascontiguousarray(logits, np.float32)
        with arena.scope():
            ids = put(np.full(len(logits), -7, np.int32))
            logprobs = put(np.full(len(logits), 7, np.float32))
            table = None if counts is None else put(counts.view(np.int32))
            ops.sample(
                queue, ids, logprobs, put(logits), *map(put, params), table,
                None if bias is None else put(bias),
                None if active is None else put(np.array([active], np.int32)),
            )  # fmt: skip
            after = None if table is None else table.download(queue).view(np.uint32)
            return ids.download(queue), logprobs.download(queue), after

    return sample


def assert_pick(p, u, got):
    """The pick's share of the cumulative probability holds u, up to f32's rounding of weights."""
    cumulative = np.cumsum(p) / p.sum()
    low = cumulative[got - 1] if got else 0.0
    assert p[got] > 0
    assert low - 1e-6 <= u <= cumulative[got] + 1e-6


@pytest.mark.parametrize("vocab", SIZES)
def test_greedy_takes_the_lowest_of_the_largest(sample, vocab):
    rng = np.random.default_rng(vocab)
    logits = np.round(rng.normal(size=(6, vocab)), 1).astype(np.float32)  # many ties
    logits[1] = 0
    logits[2] = np.linspace(0, 1, vocab)
    logits[3, : vocab // 2] = -np.inf
    logits[4] = -1e38
    ids, logprobs, _ = sample(logits, parameters(6, top_k=3, top_p=0.5, seed=9))
    np.testing.assert_array_equal(ids, logits.argmax(axis=1))
    want = reference.log_softmax(logits)[np.arange(6), ids]
    np.testing.assert_allclose(
        logprobs, want, rtol=1e-6, atol=1e-6
    )  # one rounding to f32, and exp's


@pytest.mark.parametrize("vocab", SIZES)
def test_sampling_matches_the_sorting_reference(sample, vocab):
    rng = np.random.default_rng(vocab)
    rows = 24 if vocab > 1000 else 200
    logits = rng.normal(0, 3, (rows, vocab)).astype(np.float32)
    floats, ints = parameters(rows)
    floats[:, :6] = np.stack(
        [
            rng.choice([0.0, 0.3, 1.0, 1.7], rows), rng.choice([0.1, 0.7, 0.95, 1.0], rows),
            rng.choice([0.0, 0.02, 0.3], rows), rng.choice([0.8, 1.0, 1.5], rows),
            rng.choice([0.0, 0.5, -0.5], rows), rng.choice([0.0, 0.25, -0.1], rows),
        ],
        axis=1,
    )  # fmt: skip
    ints[:, 0] = rng.choice([0, 1, 2, 40, 300], rows)
    ints[:, 1:3] = rng.integers(-(2**31), 2**31, (rows, 2))
    ints[:, 3] = rng.integers(0, 2**31, rows)
    ints[:, 4] = np.where(rng.random(rows) < 0.8, np.arange(rows), -1)
    ints[:, 8:11] = rng.integers(-1, vocab + 3, (rows, 3)) if vocab > 2 else -1
    counts = (rng.integers(0, 4, (rows, vocab)) * (rng.random((rows, vocab)) < 0.3)).astype(
        np.uint32
    )
    counts |= np.where(rng.random((rows, vocab)) < 0.2, reference.PROMPT_BIT, 0).astype(np.uint32)
    bias = (rng.normal(size=(rows, vocab)) * (rng.random((rows, vocab)) < 0.1)).astype(np.float32)
    ids, logprobs, after = sample(logits, (floats, ints), counts, bias)
    logs = reference.log_softmax(logits)
    for row, got in enumerate(ids):
        slot = ints[row, 4]
        own = (None, None) if slot < 0 else (counts[slot], bias[slot])
        p = reference.sample_distribution(logits[row], floats[row], ints[row], *own)
        seed = (int(ints[row, 1]) & 0xFFFFFFFF) | (int(ints[row, 2]) & 0xFFFFFFFF) << 32
        assert_pick(p, reference.uniform(seed, int(ints[row, 3])), got)
        np.testing.assert_allclose(logprobs[row], logs[row, got], rtol=1e-6, atol=1e-6)
        if slot >= 0:
            counts[slot, got] += 1
    np.testing.assert_array_equal(after, counts)


def test_the_reference_filters_as_transformers_does():
    torch = pytest.importorskip("torch", reason="needs torch")
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    from transformers.generation import logits_process as hf

    assert transformers.__version__
    rng = np.random.default_rng(0)
    for case in range(200):
        vocab = int(rng.integers(2, 60))
        logits = rng.normal(0, 3, vocab).astype(np.float32)
        temperature, top_p, min_p, repetition = (
            float(rng.choice(v))
            for v in ([0.4, 1.0, 1.9], [0.3, 0.8, 1.0], [0.0, 0.1, 0.6], [0.7, 1.0, 1.4])
        )
        top_k = int(rng.choice([0, 1, 5, 100]))
        seen = rng.integers(0, vocab, 6)
        floats, ints = parameters(
            1, temperature=temperature, top_p=top_p, min_p=min_p, repetition=repetition, top_k=top_k
        )
        counts = np.zeros(vocab, np.uint32)
        counts[seen[:3]] = reference.PROMPT_BIT
        counts[seen[3:]] += 1
        p = reference.sample_distribution(logits, floats[0], ints[0], counts, None)
        steps = [
            hf.RepetitionPenaltyLogitsProcessor(repetition),
            hf.TemperatureLogitsWarper(temperature),
        ]
        steps += [hf.TopKLogitsWarper(top_k)] if top_k else []
        steps += [hf.TopPLogitsWarper(top_p)] if top_p < 1 else []
        steps += [hf.MinPLogitsWarper(min_p)] if min_p else []
        scores = torch.tensor(logits)[None]
        for step in steps:
            scores = step(torch.tensor(seen)[None], scores)
        want = torch.softmax(scores.double(), -1)[0].numpy()
        np.testing.assert_allclose(p / p.sum(), want, atol=1e-6, err_msg=f"case {case}")


def test_philox_matches_its_published_vectors():
    # Random123 1.14, kat_vectors: philox4x32 10.
    assert reference.philox4x32((0, 0), (0, 0, 0, 0)) == (
        0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8,
    )  # fmt: skip
    ones = 0xFFFFFFFF
    assert reference.philox4x32((ones, ones), (ones,) * 4) == (
        0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD,
    )  # fmt: skip


@pytest.mark.parametrize("top_k", [0, -1, 1, 300, 301, 10**9])
def test_top_k_takes_any_size_and_leaves_greedy_neighbours_alone(sample, top_k):
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(64, 301)).astype(np.float32)
    floats, ints = parameters(64, temperature=1, top_k=top_k, seed=5)
    ints[:, 3] = np.arange(64)
    floats[::2, 0] = 0
    ids, _, _ = sample(logits, (floats, ints))
    np.testing.assert_array_equal(ids[::2], logits[::2].argmax(axis=1))
    if top_k == 1:
        np.testing.assert_array_equal(ids, logits.argmax(axis=1))
    else:
        all_ids, _, _ = sample(logits, parameters_like(floats, ints, top_k=0))
        if top_k != 300:
            np.testing.assert_array_equal(ids, all_ids)
        assert (ids[1::2] != logits[1::2].argmax(axis=1)).any()


def parameters_like(floats, ints, **changes):
    floats, ints = floats.copy(), ints.copy()
    for name, value in changes.items():
        (floats if name in FLOATS else ints)[:, (FLOATS | INTS)[name]] = value
    return floats, ints


def picked(sample, logits, draws=400, **values):
    """The set of ids that `draws` positions give."""
    floats, ints = parameters(draws, seed=3, **values)
    ints[:, 3] = np.arange(draws)
    ids, _, _ = sample(np.tile(np.float32(logits), (draws, 1)), (floats, ints))
    return set(ids.tolist())


def test_ties_stay_together(sample):
    logits = [1, 2, 0, 2, -0.0, 2, 1, 0]
    assert picked(sample, logits, temperature=1, top_k=1) == {1, 3, 5}
    assert picked(sample, logits, temperature=1, top_k=3) == {1, 3, 5}
    assert picked(sample, logits, temperature=1, top_k=4) == {0, 1, 3, 5, 6}
    assert picked(sample, logits, temperature=9, top_k=6) == {0, 1, 2, 3, 4, 5, 6, 7}
    assert picked(sample, logits, temperature=1, top_p=1e-9) == {1, 3, 5}
    assert picked(sample, logits, temperature=1, top_p=0.0) == {1, 3, 5}
    assert picked(sample, logits, temperature=1, min_p=1.0) == {1, 3, 5}


def test_top_p_keeps_the_smallest_sufficient_set(sample):
    logits = np.log([0.1, 0.4, 0.3, 0.15, 0.05])
    assert picked(sample, logits, temperature=1, top_p=0.39) == {1}
    assert picked(sample, logits, temperature=1, top_p=0.41) == {1, 2}
    assert picked(sample, logits, temperature=1, top_p=0.69) == {1, 2}
    assert picked(sample, logits, temperature=1, top_p=0.71) == {1, 2, 3}
    assert picked(sample, logits, temperature=1, top_p=0.99) == {0, 1, 2, 3, 4}
    # After top_k = 2 the two are 4/7 and 3/7 of what is left.
    assert picked(sample, logits, temperature=1, top_p=0.57, top_k=2) == {1}
    assert picked(sample, logits, temperature=1, top_p=0.58, top_k=2) == {1, 2}


def test_min_p_is_a_share_of_the_largest(sample):
    logits = np.log([0.1, 0.4, 0.3, 0.15, 0.05])
    assert picked(sample, logits, temperature=1, min_p=0.24) == {0, 1, 2, 3}
    assert picked(sample, logits, temperature=1, min_p=0.26) == {1, 2, 3}
    assert picked(sample, logits, temperature=1, min_p=0.76) == {1}
    assert picked(sample, logits, temperature=2, min_p=0.49) == {
        0,
        1,
        2,
        3,
    }  # after the temperature


def test_repetition_penalty_never_encourages(sample):
    # [2, -2, 1] with {0, 1} seen and 1.5 becomes [1.333, -3, 1].
    counts = np.array([[reference.PROMPT_BIT, 1, 0, 0]], np.uint32)
    params = parameters(1, repetition=1.5, slot=0)
    for probe, expected in ((1.33, 0), (1.34, 3)):
        ids, _, _ = sample([[2, -2, 1, probe]], params, counts)
        assert ids[0] == expected
    for probe, expected in ((-3.01, 1), (-2.99, 3)):
        ids, _, _ = sample([[-np.inf, -2, -np.inf, probe]], params, counts)
        assert ids[0] == expected
    ids, _, _ = sample([[2, -2, 1, 1.34]], parameters(1, repetition=1.5), counts)
    assert ids[0] == 0, "a row without a slot has no history"


def test_presence_and_frequency_count_the_output_alone(sample):
    counts = np.array([[reference.PROMPT_BIT, reference.PROMPT_BIT | 3, 1, 0]], np.uint32)
    for logits, values, expected in (
        ([1, 0, 0, 0.9], {"presence": 5}, 0),  # in the prompt only
        ([0, 1, 0, 0.51], {"presence": 0.5}, 3),
        ([0, 1, 0, 0.49], {"presence": 0.5}, 1),
        ([0, 1, 0, 0.26], {"frequency": 0.25}, 3),  # three times
        ([0, 1, 0, 0.24], {"frequency": 0.25}, 1),
        ([0, 1, 0.4, 0], {"frequency": 0.25}, 1),
        ([0, 1, 0.6, 0], {"frequency": 0.25}, 2),
        ([0, 1, 0, 1.2], {"presence": -0.5}, 1),
    ):
        ids, _, after = sample([logits], parameters(1, slot=0, **values), counts)
        assert ids[0] == expected
        want = counts.copy()
        want[0, expected] += 1
        np.testing.assert_array_equal(after, want)


def test_bias_and_bans(sample):
    logits = np.zeros((3, 5), np.float32)
    bias = np.zeros((2, 5), np.float32)
    bias[1, 3] = 2
    floats, ints = parameters(3)
    ints[:, 4] = [1, 0, 1]
    ints[2, 8:] = [3, 0, -1, 5, 99, 1, -5, 0]
    ids, logprobs, _ = sample(logits, (floats, ints), bias=bias)
    np.testing.assert_array_equal(ids, [3, 0, 2])
    # The unchanged logits are all equal. 1e-6: f32.
    np.testing.assert_allclose(logprobs, np.log(1 / 5), rtol=1e-6)
    bias[1, :] = [-np.inf, 0, -np.inf, 0, -np.inf]
    ids, _, _ = sample(logits[:1], parameters(1, slot=1, temperature=1, banned=[1]), bias=bias)
    assert ids[0] == 3


def test_minus_one_where_nothing_can_be_picked(sample):
    logits = np.zeros((8, 700), np.float32)
    logits[0, 699] = np.nan
    logits[1, 0] = np.inf
    logits[2] = -np.inf
    logits[3, :] = -np.inf
    logits[3, 5] = 0  # banned below
    logits[4, 3:] = -np.inf
    logits[6, 650] = np.nan
    floats, ints = parameters(8, temperature=1, seed=1)
    ints[3, 8] = 5
    ints[:, 3] = np.arange(8)
    floats[6:, 0] = 0
    counts = np.zeros((8, 700), np.uint32)
    ints[:, 4] = np.arange(8)
    ids, logprobs, after = sample(logits, (floats, ints), counts)
    np.testing.assert_array_equal(ids[[0, 1, 2, 3, 6]], -1)
    np.testing.assert_array_equal(logprobs[[0, 1, 2, 3, 6]], -np.inf)
    assert 0 <= ids[4] < 3 and 0 <= ids[5] < 700 and ids[7] >= 0
    assert after.sum() == 3, "what is not picked is not counted"
    assert (sample(np.zeros((1, 1)), parameters(1, banned=[0]))[0] == -1).all()


def test_impossible_tokens_are_never_picked(sample):
    logits = np.full(50, -np.inf)
    logits[[3, 17]] = [-1e30, -1e30]
    assert picked(sample, logits, temperature=1) == {3, 17}
    assert picked(sample, logits, temperature=100, top_k=40) == {3, 17}
    assert picked(sample, logits, temperature=1, top_p=0.99) == {3, 17}


@pytest.mark.parametrize("temperature", [1e-45, 1e-6, 1e6, 3e38])
def test_extreme_temperatures_stay_finite(sample, temperature):
    logits = [0, 80, -80, 79, -np.inf]
    got = picked(sample, logits, temperature=temperature)
    assert got == ({1} if temperature < 1 else {0, 1, 2, 3})


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 1},
        {"temperature": 0.7, "top_k": 9},
        {"temperature": 1.5, "top_p": 0.8},
        {"temperature": 1, "min_p": 0.2},
    ],
)
def test_draws_follow_the_distribution(sample, values):
    vocab, draws = 20, 20000
    logits = np.random.default_rng(2).normal(0, 1, vocab).astype(np.float32)
    floats, ints = parameters(draws, seed=0x123456789ABCDEF, **values)
    ints[:, 3] = np.arange(draws)
    ids, _, _ = sample(np.tile(logits, (draws, 1)), (floats, ints))
    p = reference.sample_distribution(logits, floats[0], ints[0], None, None)
    expected = p / p.sum() * draws
    kept = expected > 0
    seen = np.bincount(ids, minlength=vocab)
    assert not seen[~kept].any()
    chi_square = ((seen - expected)[kept] ** 2 / expected[kept]).sum()
    freedom = kept.sum() - 1
    # Mean n, standard deviation sqrt(2 n): five of them is one in a million, and the seed is fixed.
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom)


def test_a_seed_gives_the_same_pick_in_any_batch_and_number_of_threads(lib, sample):
    rng = np.random.default_rng(3)
    logits = rng.normal(0, 2, (16, 1000)).astype(np.float32)
    floats, ints = parameters(16, temperature=1, top_p=0.9, top_k=50, seed=77)
    ints[:, 3] = np.arange(16) % 5
    alone = [sample(logits[r : r + 1], (floats[r : r + 1], ints[r : r + 1])) for r in range(16)]
    for threads in (1, 2):
        if lib.backend == "cpu":
            lib.c.ok_set_threads(threads)
        order = rng.permutation(16)
        ids, logprobs, _ = sample(logits[order], (floats[order], ints[order]))
        np.testing.assert_array_equal(ids, np.array([a[0][0] for a in alone])[order])
        np.testing.assert_array_equal(logprobs, np.array([a[1][0] for a in alone])[order])


def test_rows_past_active_are_left_alone(sample):
    logits = np.eye(4, dtype=np.float32)
    for active, want in ((2, [0, 1, -7, -7]), (0, [-7] * 4), (9, [0, 1, 2, 3]), (-1, [-7] * 4)):
        ids, logprobs, _ = sample(logits, parameters(4), active=active)
        np.testing.assert_array_equal(ids, want)
        np.testing.assert_array_equal(logprobs == 7, np.array(want) == -7)


def test_slots_outside_the_tables_mean_no_slot(sample):
    counts = np.full((1, 3), 5, np.uint32)
    floats, ints = parameters(2, frequency=10)
    ints[:, 4] = [1, -2]
    ids, _, after = sample([[1, 2, 3], [3, 2, 1]], (floats, ints), counts)
    np.testing.assert_array_equal(ids, [2, 0])
    np.testing.assert_array_equal(after, counts)


@pytest.mark.parametrize("vocab", SIZES)
def test_not_a_byte_past_the_logits_is_read(lib, arena, queue, put, vocab):
    if lib.backend != "cpu":
        pytest.skip("guard pages need host memory")
    size = vocab * 4
    pages = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    with tempfile.TemporaryFile() as file:
        file.truncate(pages + mmap.PAGESIZE)
        mapped = mmap.mmap(file.fileno(), pages + mmap.PAGESIZE)
        file.truncate(pages)  # from here on the last page is one that kills the process
        memory = np.frombuffer(mapped, np.float32, vocab, pages - size)
        memory[:] = np.random.default_rng(vocab).normal(size=vocab)
        logits = Buffer(memory.__array_interface__["data"][0], (1, vocab), DType.F32, vocab, arena)
        for values in ({}, {"temperature": 1, "top_k": 40, "top_p": 0.9, "min_p": 0.01}):
            ids, logprobs = put(np.zeros(1, np.int32)), put(np.zeros(1, np.float32))
            ops.sample(queue, ids, logprobs, logits, *map(put, parameters(1, **values)))
            assert 0 <= ids.download(queue)[0] < vocab
        del memory
        mapped.close()


def test_a_recorded_sampler_reads_its_parameters_at_replay(arena, queue, put):
    ids = put(np.zeros(1, np.int32))
    logits = put(np.float32([[0, 5, 1, 2]]))
    floats, ints = map(put, parameters(1))
    with queue.record() as program:
        ops.sample(queue, ids, None, logits, floats, ints)
    program.replay()
    assert ids.download(queue)[0] == 1
    ints.upload(queue, parameters(1, banned=[1])[1])
    program.replay()
    assert ids.download(queue)[0] == 3
    program.close()


def test_reset_clears_one_slot_and_marks_its_prompt(queue, put):
    counts, bias = put(np.full((3, 6), 9, np.int32)), put(np.full((3, 6), 9, np.float32))
    ops.sample_reset(
        queue, counts, bias, 1, put(np.array([4, 2, 4, -1, 6, 2**31 - 1], np.int32)),
        put(np.array([0, 6, 3, -1], np.int32)), put(np.float32([0.5, 1, -100, 1])),
    )  # fmt: skip
    want = np.full((3, 6), 9, np.uint32)
    want[1] = np.array([0, 0, 1, 0, 1, 0]) * np.uint32(reference.PROMPT_BIT)
    np.testing.assert_array_equal(counts.download(queue).view(np.uint32), want)
    want_bias = np.full((3, 6), 9.0)
    want_bias[1] = [0.5, 0, 0, -100, 0, 0]
    np.testing.assert_array_equal(bias.download(queue), want_bias)
    ops.sample_reset(queue, counts, None, 2, put(np.zeros(1, np.int32)))
    np.testing.assert_array_equal(counts.download(queue)[2], [-(2**31), 0, 0, 0, 0, 0])


def test_wrong_arguments_are_refused(queue, put, refused):
    ids, logits = put(np.zeros(2, np.int32)), put(np.zeros((2, 5), np.float32))
    floats, ints = map(put, parameters(2))
    table = put(np.zeros((2, 5), np.int32))
    good = {
        "queue": queue.handle, "ids": ids.ptr, "logprobs": 0, "logits": logits.ptr,
        "floats": floats.ptr, "ints": ints.ptr, "counts": 0, "bias": 0, "active": 0, "slots": 0,
        "rows": 2, "vocab": 5,
    }  # fmt: skip
    refused(
        queue.library.c.ok_sample,
        good,
        {
            "queue is null": {"queue": 0},
            "ids is null": {"ids": 0},
            "logits is null": {"logits": 0},
            "floats is null": {"floats": 0},
            "ints is null": {"ints": 0},
            "rows=-1": {"rows": -1},
            "vocab=0": {"vocab": 0},
            "slots=-1": {"slots": -1},
        },
    )
    queue.library.c.ok_sample(**(good | {"rows": 0}))
    reset = {
        "queue": queue.handle, "counts": table.ptr, "bias": 0, "slot": 1, "slots": 2, "vocab": 5,
        "prompt": ids.ptr, "prompt_length": 2, "bias_ids": 0, "bias_values": 0, "bias_length": 0,
    }  # fmt: skip
    refused(
        queue.library.c.ok_sample_reset,
        reset,
        {
            "queue is null": {"queue": 0},
            "slot=2": {"slot": 2},
            "slot=-1": {"slot": -1},
            "vocab=0": {"vocab": 0},
            "prompt is null": {"prompt": 0},
            "prompt_length=-1": {"prompt_length": -1},
            "bias_ids is null": {"bias_length": 1},
        },
    )
