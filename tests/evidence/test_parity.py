"""The comparison itself: figures on hand-made arrays, gates, and that broken things are noticed."""

from __future__ import annotations

import json
import math
import shutil

import numpy as np
import pytest

from pyengine.errors import CannotCompare
from pyengine.evidence.comparison import Gate, compare, gates, summarise
from pyengine.evidence.parity import run_parity
from pyengine.evidence.prompts import Prompt
from pyengine.evidence.reference import (
    Expected,
    RecordedReference,
    log_probabilities,
)
from pyengine.evidence.suite import run_suite, suite_exit_code
from pyengine.models import decoder
from tests.conftest import CHECKPOINTS, GOLDEN

VOCAB = 40


def _expected(logits, rows=None, stride=1, own=None):
    """What a reference of these logits says, knowing some rows and columns."""
    rows = np.arange(len(logits)) if rows is None else np.asarray(rows)
    columns = np.arange(0, logits.shape[1], stride)
    wide = logits[rows].astype(np.float64)
    top = np.argsort(-wide, axis=1)[:, :8]
    return Expected(
        argmax=logits.argmax(axis=1),
        rows=rows,
        columns=columns,
        logits=logits[rows][:, columns],
        top_ids=top,
        top_logits=np.take_along_axis(logits[rows], top, axis=1),
        largest=np.abs(wide).max(axis=1),
        norm=np.linalg.norm(wide, axis=1),
        logsumexp=np.log(np.exp(wide).sum(axis=1)),
        own={} if own is None else own,
    )


@pytest.fixture
def logits():
    return np.random.default_rng(0).normal(0, 3, (12, VOCAB)).astype(np.float32)


def _prompt(length=12):
    return Prompt("p", "test", tuple(range(length)))


@pytest.mark.parametrize("stride", [1, 7])
def test_equal_logits_are_equal_in_every_figure(logits, stride):
    found = compare(_prompt(), logits, _expected(logits, stride=stride), "f32")
    assert found.same_argmax.all()
    np.testing.assert_allclose(found.cosine, 1.0, atol=1e-14)
    np.testing.assert_array_equal(found.top5, 1.0)
    np.testing.assert_array_equal(found.max, 0.0)
    np.testing.assert_allclose(found.kl, 0.0, atol=1e-6)  # logits are float32
    np.testing.assert_allclose(found.norm, 0.0, atol=1e-15)


def test_figures_follow_their_definitions(logits):
    ours = logits + np.random.default_rng(1).normal(0, 0.1, logits.shape).astype(np.float32)
    found = compare(_prompt(), ours, _expected(logits), "f32")
    a, b = ours.astype(np.float64), logits.astype(np.float64)
    largest = np.abs(b).max(axis=1)
    cosine = (a * b).sum(axis=1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    np.testing.assert_allclose(found.cosine, cosine, rtol=1e-13)
    np.testing.assert_allclose(found.max, np.abs(a - b).max(axis=1) / largest, rtol=1e-13)
    p, q = log_probabilities(b), log_probabilities(a)
    np.testing.assert_allclose(found.kl, (np.exp(p) * (p - q)).sum(axis=1), rtol=1e-9)
    five = [
        len(set(np.argsort(-x)[:5]) & set(np.argsort(-y)[:5])) / 5
        for x, y in zip(a, b, strict=True)
    ]
    np.testing.assert_allclose(found.top5, five)


def test_one_wrong_logit_is_seen_where_it_is():
    logits = np.tile(np.linspace(-1, 4, VOCAB, dtype=np.float32), (3, 1))
    ours = logits.copy()
    ours[1, 5] += 2.0
    found = compare(_prompt(3), ours, _expected(logits), "f32")
    np.testing.assert_allclose(found.max, [0, 0.5, 0], atol=1e-7)
    np.testing.assert_allclose(found.rms, [0, 0.5 / math.sqrt(VOCAB + 8), 0], atol=1e-7)


@pytest.mark.parametrize(("gap", "dtype", "same"), [
    (2.0**-23, "f32", True), (2.0**-21, "f32", False), (2.0**-23, "q8_0", False),
])  # fmt: skip
def test_either_of_two_counts_where_float32_cannot_tell_them_apart(gap, dtype, same):
    logits = np.tile(np.linspace(-1, 1, VOCAB, dtype=np.float32), (3, 1))
    logits[:, 3], logits[:, 7] = 4.0, 4.0 - 4.0 * gap
    ours = logits.copy()
    ours[1, 7] = np.nextafter(np.float32(4), np.float32(5))
    found = compare(_prompt(3), ours, _expected(logits), dtype)
    assert found.same_argmax.tolist() == [True, same, True]
    assert summarise([found]).ties == int(same)
    ours[2, 9] = 4.1  # one that is neither is wrong
    found = compare(_prompt(3), ours, _expected(logits), dtype)
    assert not found.same_argmax[2]


def test_a_wrong_largest_logit_counts_even_in_rows_whose_logits_are_unknown(logits):
    ours = logits.copy()
    ours[5, (logits[5].argmax() + 1) % VOCAB] = 99.0
    found = compare(_prompt(), ours, _expected(logits, rows=[0, 8]), "f32")
    assert summarise([found]).argmax == pytest.approx(11 / 12)
    assert found.max.max() == 0.0


def test_an_error_in_an_unknown_column_shows_in_the_norm(logits):
    expected = _expected(logits, stride=7)
    hidden = next(i for i in range(VOCAB) if i % 7 and i not in expected.top_ids[3])
    ours = logits.copy()
    ours[3, hidden] -= 5.0
    found = compare(_prompt(), ours, expected, "f32")
    assert found.max[3] == 0.0
    assert found.norm[3] > 1e-3


def test_what_a_thinned_reference_says_of_kl_is_a_lower_bound(logits):
    ours = logits + np.random.default_rng(1).normal(0, 0.5, logits.shape).astype(np.float32)
    whole = compare(_prompt(), ours, _expected(logits), "f32").kl
    thinned = compare(_prompt(), ours, _expected(logits, stride=7), "f32").kl
    assert (thinned <= whole + 1e-9).all()
    assert (thinned > 0).any()


def test_only_a_gap_wider_than_both_errors_is_decided(logits):
    own = {"f16": np.full((12, 2), 0.02)}
    close = logits.copy()
    order = np.argsort(-close[4])
    close[4, order[1]] = close[4, order[0]] - 0.01
    found = compare(_prompt(), close, _expected(close, own=own), "f16")
    assert not found.decided[4]
    assert found.decided.any()


def test_logits_of_another_shape_cannot_be_compared(logits):
    with pytest.raises(CannotCompare, match="do not fit"):
        compare(_prompt(), logits[:5], _expected(logits), "f32")


def _summary(logits, ours=None, own=None, dtype="f32"):
    ours = logits if ours is None else ours
    return summarise([compare(_prompt(), ours, _expected(logits, own=own), dtype)])


def test_a_gate_on_nan_does_not_hold():
    assert not Gate("x", math.nan, 1.0, at_least=True).passed
    assert not Gate("x", math.nan, 1.0, at_least=False).passed


def test_float32_has_fixed_bars(logits):
    assert all(gate.passed for gate in gates(_summary(logits), "f32"))
    ours = logits * np.float32(1 + 3e-4)
    assert {g.name for g in gates(_summary(logits, ours), "f32") if not g.passed} == {
        "largest error",
        "norm",
    }
    noisy = logits + np.random.default_rng(1).normal(0, 0.1, logits.shape).astype(np.float32)
    assert "cosine" in {g.name for g in gates(_summary(logits, noisy), "f32") if not g.passed}


@pytest.mark.parametrize("factor, passed", [(0.5, True), (0.7, True), (0.9, False), (2.0, False)])
def test_16_bits_are_held_against_transformers_in_16_bits(logits, factor, passed):
    noise = np.random.default_rng(1).normal(0, 0.01, logits.shape).astype(np.float32)
    theirs = compare(_prompt(), logits + noise, _expected(logits), "f16")
    own = {"f16": np.stack([theirs.rms, theirs.max], axis=1)}
    ours = logits + noise * np.float32(factor)
    found = gates(_summary(logits, ours, own, "f16"), "f16")
    assert {gate.name for gate in found} == {"rms ratio", "max ratio"}
    assert all(gate.passed for gate in found) == passed


def test_16_bits_without_a_yardstick_cannot_be_compared(logits):
    with pytest.raises(CannotCompare, match="no bf16 of its own"):
        gates(_summary(logits), "bf16")


def test_q8_0_is_reported_and_judged_only_by_bars_that_are_asked_for(logits):
    noisy = logits + np.random.default_rng(1).normal(0, 0.5, logits.shape).astype(np.float32)
    summary = _summary(logits, noisy)
    assert gates(summary, "q8_0") == []
    assert not all(g.passed for g in gates(summary, "q8_0", min_cosine=0.9999))
    assert all(g.passed for g in gates(summary, "q8_0", min_cosine=0.8, min_argmax=0.3))


# ---- with an engine -----------------------------------------------------------------------------


def _run(name="llama", **options):
    return run_parity(CHECKPOINTS[name], reference=GOLDEN / name, device="cpu", **options)


@pytest.mark.parametrize("kernel", ["rms_norm", "matmul_fused", "attention_paged"])
def test_a_kernel_off_by_one_per_cent_fails_the_gate(monkeypatch, kernel):
    right = getattr(decoder.ops, kernel)

    def wrong(queue, y, *args, **options):
        right(queue, y, *args, **options)
        view = y.numpy()
        view[: len(view) // 2 + 1] *= np.float32(1.01)

    monkeypatch.setattr(decoder.ops, kernel, wrong)
    report = _run()
    assert report.exit_code == 1
    assert not report.passed
    assert report.summary.max > 1e-4


def test_batched_and_cached_gives_the_same_figures_as_alone():
    alone, batched = _run(), _run(batch=5)
    assert batched.passed
    assert batched.summary == alone.summary


def test_repeated_runs_give_the_same_bits():
    report = _run(repeat=2)
    assert report.repeats == 2
    assert report.identical
    assert report.repeat_rms[0] == report.repeat_rms[1]


def test_a_report_says_what_is_needed_to_repeat_it():
    values = json.loads(json.dumps(_run(command="pyengine parity llama").to_json()))
    assert values["passed"] is True
    assert values["environment"]["command"] == "pyengine parity llama"
    assert values["reference"]["versions"]["transformers"]
    assert values["reference"]["attention"] == "sdpa"
    assert set(values["sha256"]) == {"config.json", "model.safetensors"}
    assert values["environment"]["library"]
    assert values["summary"]["positions"] == 1000


def test_a_reference_of_other_weights_is_refused():
    with pytest.raises(CannotCompare, match=r"config\.json is not the file"):
        run_parity(CHECKPOINTS["llama"], reference=GOLDEN / "qwen2", device="cpu")


@pytest.mark.parametrize(
    "options", [{"positions": 10}, {"text": "x"}, {"ids": [1]}, {"repeat": 0}, {"dtype": "f64"}]
)
def test_options_that_make_no_sense_together_are_refused(options):
    with pytest.raises(CannotCompare):
        _run(**options)


def test_a_recording_of_another_format_is_refused(tmp_path):
    shutil.copytree(GOLDEN / "llama", tmp_path / "golden")
    file = tmp_path / "golden" / "reference.json"
    file.write_text(file.read_text().replace('"format": 1', '"format": 99'))
    with pytest.raises(CannotCompare, match="format 99"):
        RecordedReference(tmp_path / "golden")
    with pytest.raises(CannotCompare, match="not a recorded reference"):
        RecordedReference(tmp_path)


def test_untrained_recordings_must_be_asked_for(golden_model):
    name = "tiny-llama-head-dim"
    with pytest.raises(CannotCompare, match="--untrained"):
        run_parity(golden_model(name), reference=GOLDEN / name, device="cpu")
    report = run_parity(golden_model(name), reference=GOLDEN / name, device="cpu", untrained=True)
    assert report.untrained


def test_a_suite_has_a_row_for_each_model_and_a_reason_for_what_it_cannot_do(tmp_path):
    for name in ("llama", "bloom"):
        (tmp_path / name).symlink_to(CHECKPOINTS[name])
    rows = run_suite(tmp_path, dtypes=["f32", "f16"], controls=False, references=GOLDEN,
                     device="cpu")  # fmt: skip
    assert [row.name for row in rows] == ["bloom", "llama"]
    assert all(set(row.reports) == {"f32", "f16"} for row in rows)
    assert suite_exit_code(rows) == 0
    (tmp_path / "other").symlink_to(CHECKPOINTS["qwen2"])
    rows = run_suite(tmp_path, dtypes=["f32"], controls=False, references=GOLDEN, device="cpu")
    assert "not a recorded reference" in rows[2].error
    assert suite_exit_code(rows) == 2
    with pytest.raises(CannotCompare, match="no model directories"):
        run_suite(tmp_path / "nothing")


def test_q8_0_beside_a_recording_is_not_judged_without_a_bar():
    report = _run(dtype="q8_0")
    assert (report.verdict, report.exit_code, report.gates) == ("not judged", 2, [])
    assert _run(dtype="q8_0", min_cosine=0.99).verdict == "passed"
