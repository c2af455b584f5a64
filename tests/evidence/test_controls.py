"""Every architectural feature is load-bearing: made wrong once, parity breaks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pyengine.errors import CannotCompare
from pyengine.evidence.altered import Model
from pyengine.evidence.comparison import compare_all, gates, open_engine, summarise
from pyengine.evidence.controls import applicable, run_control, run_controls
from pyengine.evidence.mistakes import CONTROLS, Control
from pyengine.evidence.reference import RecordedReference
from pyengine.generation.source import open_model
from tests.conftest import CHECKPOINTS, GOLDEN

# Traits that no trained checkpoint has are shown on a tiny random model.
ON_TINY = {"longrope-short-only": "tiny-phi3-longrope"}


@pytest.mark.parametrize("name", sorted(CHECKPOINTS))
def test_every_control_that_applies_breaks_parity(name):
    results = run_controls(CHECKPOINTS[name], reference=GOLDEN / name, device="cpu")
    assert len(results) >= 6
    assert not [r for r in results if not r.succeeded]


@pytest.mark.parametrize("control, name", sorted(ON_TINY.items()))
def test_a_trait_of_no_trained_checkpoint_is_shown_on_a_tiny_model(golden_model, control, name):
    (result,) = run_controls(
        golden_model(name), control, reference=GOLDEN / name, device="cpu", untrained=True
    )
    assert result.succeeded, result


def test_every_control_is_shown_somewhere():
    shown = set(ON_TINY)
    for path in CHECKPOINTS.values():
        source = open_model(path)
        shown |= {control.name for control in applicable(source)}
        source.close()
    assert shown == {control.name for control in CONTROLS}


def test_a_degenerate_rotation_is_refused_and_forced_named_as_nan():
    (result,) = run_controls(
        CHECKPOINTS["bloom"], "rotary-on-alibi", reference=GOLDEN / "bloom", device="cpu"
    )
    assert "rope_theta" in result.outcome
    assert "layer 0" in result.outcome
    assert result.to_json()["max_error"] is None


def test_a_control_that_changes_nothing_does_not_succeed():
    source = open_model(CHECKPOINTS["llama"])
    idle = Control("idle", "nothing", "", lambda s, c: True)
    result = run_control(idle, source, RecordedReference(GOLDEN / "llama"), "cpu")
    numeric = run_control(
        replace(idle, numeric=True), source, RecordedReference(GOLDEN / "llama"), "cpu"
    )
    source.close()
    assert not result.succeeded
    assert not numeric.succeeded
    assert result.argmax == 1.0


def test_unknown_and_inapplicable_controls_are_refused_by_name():
    with pytest.raises(CannotCompare, match="no control 'no-such'; known: all, full-rope"):
        run_controls(CHECKPOINTS["llama"], "no-such", reference=GOLDEN / "llama")
    with pytest.raises(CannotCompare, match="no-alibi does not apply, it needs ALiBi"):
        run_controls(CHECKPOINTS["llama"], "no-alibi", reference=GOLDEN / "llama")


# ---- altering a model is exact: what cancels out leaves parity whole -----------------------------


def _missed_gates(name, change):
    """f32 gates that a model misses after a change that should not matter."""
    source = open_model(CHECKPOINTS[name])
    reference = RecordedReference(GOLDEN / name)
    model = Model(source)
    change(model)
    engine = open_engine(model.source(), reference.prompts, dtype="f32", device="cpu")
    summary = summarise(compare_all(engine, reference, "f32"))
    engine.close()
    source.close()
    return [gate for gate in gates(summary, "f32") if not gate.passed]


# Every layout: three tensors, heads interleaved, one tensor, transposed; with and without norms.
LAYOUTS = ["stablelm2", "stablelm2-12b", "olmo2", "bloom", "phi3", "gpt2"]


@pytest.mark.parametrize("name", LAYOUTS)
def test_rewriting_rows_in_their_own_order_changes_nothing(name):
    def change(model):
        order = np.arange(model.config.q_width + 2 * model.config.kv_width)
        model.reorder(order)
        model.reorder_norms(order)

    assert _missed_gates(name, change) == []


@pytest.mark.parametrize("name", ["stablelm2", "olmo2", "phi3", "gpt2"])
def test_heads_may_change_places_where_no_position_bias_tells_them_apart(name):
    def change(model):
        heads = np.roll(np.arange(model.config.num_attention_heads), 1)
        model.reorder_heads(heads, kv=True)

    assert _missed_gates(name, change) == []


def test_query_heads_of_one_group_may_change_places():
    def change(model):
        heads = np.arange(model.config.num_attention_heads).reshape(-1, 2)[:, ::-1].reshape(-1)
        model.reorder_heads(heads, kv=False)

    assert _missed_gates("stablelm2-12b", change) == []


@pytest.mark.parametrize("name, kind", [("olmo2", "full"), ("stablelm2-12b", "per_head")])
def test_reading_qk_norms_as_what_they_are_changes_nothing(name, kind):
    assert _missed_gates(name, lambda model: model.reshape_qk_norm(kind)) == []
