"""Our logits against what Transformers computed in float32, recorded: no torch, no network."""

from __future__ import annotations

import json

import pytest

from pyengine.evidence.parity import run_parity
from pyengine.evidence.reference import RecordedReference
from pyengine.generation.engine import Engine
from pyengine.models.config import load_config
from pyengine.models.families import families
from tests.conftest import CHECKPOINTS, GOLDEN, ROOT
from tests.tiny import VARIANTS

NAMES = sorted(path.name for path in GOLDEN.iterdir())
TINY = [name for name in NAMES if name.startswith("tiny-")]
DATA_LIMIT_BYTES = 20 << 20


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(golden_model, name, dtype):
    report = run_parity(
        golden_model(name), reference=GOLDEN / name, dtype=dtype, device="cpu",
        untrained=name.startswith("tiny-"),
    )  # fmt: skip
    missed = [gate for gate in report.gates if not gate.passed]
    assert not missed, missed
    assert len(report.gates) >= 2


@pytest.mark.parametrize("name", TINY)
def test_logits_of_tiny_models_on_a_gpu_are_those_of_transformers(golden_model, gpu, name):
    """The trained ones meet Transformers there in all types: `pyengine parity --suite`."""
    report = run_parity(
        golden_model(name), reference=GOLDEN / name, dtype="f32", device=gpu, untrained=True
    )
    missed = [gate for gate in report.gates if not gate.passed]
    assert not missed, missed
    assert len(report.gates) >= 2


@pytest.mark.parametrize("name", sorted(CHECKPOINTS))
def test_greedy_text_is_the_same_byte_for_byte(name):
    golden = json.loads((GOLDEN / name / "reference.json").read_text())["greedy"]
    with Engine(CHECKPOINTS[name], device="cpu", dtype="f32", max_context=128) as engine:
        found = engine.generate(golden["prompt"], max_new_tokens=len(golden["ids"]), temperature=0)
    assert found.prompt_token_ids == golden["prompt_ids"]
    assert found.token_ids == golden["ids"]
    assert found.text == golden["text"]


@pytest.mark.parametrize("name", sorted(CHECKPOINTS))
def test_a_checkpoint_is_compared_on_short_and_long_prompts(name):
    reference = RecordedReference(GOLDEN / name)
    lengths = [len(prompt.ids) for prompt in reference.prompts]
    context = load_config(CHECKPOINTS[name])[0].max_position_embeddings
    assert min(lengths) == 1
    assert max(lengths) >= min(400, context)
    assert len(lengths) >= 8
    assert sum(lengths) >= 200


def test_every_family_and_every_variant_has_a_golden():
    assert {load_config(path)[0].model_type for path in CHECKPOINTS.values()} == set(families())
    assert set(NAMES) == set(CHECKPOINTS) | {f"tiny-{name}" for name in VARIANTS}


def test_longrope_is_compared_below_at_and_above_its_switch():
    lengths = {len(p.ids) for p in RecordedReference(GOLDEN / "tiny-phi3-longrope").prompts}
    assert {31, 32, 33} <= lengths
    assert max(lengths) > 64


def test_all_data_of_the_project_stays_small():
    folders = (ROOT / "tests" / "checkpoints", GOLDEN, ROOT / "pyengine" / "data")
    files = [
        p for folder in folders for p in folder.rglob("*") if p.is_file() and not p.is_symlink()
    ]
    total = sum(path.stat().st_size for path in files)
    assert total < DATA_LIMIT_BYTES, f"{total} bytes of data"
