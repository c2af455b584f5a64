"""The same comparison against Transformers as it is installed here, on prompts of the day.

Goldens age with the Transformers they were made by; this test does not. Every precision of a model
meets the same oracle.
"""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from pyengine.evidence.parity import collect_prompts, compare_model, open_reference
from pyengine.generation.source import open_model
from tests.conftest import CHECKPOINTS, GOLDEN
from tests.tiny import VARIANTS, write_tiny

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

# Warnings of libraries that only stand in for the reference.
pytestmark = pytest.mark.filterwarnings("ignore")

POSITIONS = {"trained": 600, "tiny": 240}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Small models gain nothing from torch's threads, which would fight with ours."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", [path.name for path in sorted(GOLDEN.iterdir())])
def test_logits_are_those_of_transformers_installed_here(golden_model, name):
    tiny = name.startswith("tiny-")
    missed = _missed_gates(golden_model(name), POSITIONS["tiny" if tiny else "trained"], tiny)
    assert not missed, missed


@pytest.mark.parametrize("name", ["stablelm-qk-norm-bias", "phi3-longrope", "qwen2-yarn"])
def test_the_spelling_of_transformers_5_means_the_same(tmp_path, name):
    assert name in VARIANTS
    model = write_tiny(name, tmp_path, spelling="v5", shard_bytes=60_000)
    missed = _missed_gates(model, POSITIONS["tiny"], untrained=True)
    assert not missed, missed


def test_a_file_in_bf16_is_read_as_transformers_reads_it(tmp_path):
    missed = _missed_gates(write_tiny("llama", tmp_path, dtype="bf16"), 100, untrained=True)
    assert not missed, missed


def _missed_gates(model, positions, untrained):
    with ExitStack() as closing:
        source = open_model(model)
        closing.callback(source.close)
        prompts = collect_prompts(source, positions=positions)
        oracle = open_reference(
            "transformers", source, prompts=prompts, untrained=untrained, oracle_device="cpu"
        )
        closing.callback(oracle.close)
        reports = [
            compare_model(source, oracle, name=str(model), dtype=dtype, device="cpu",
                          untrained=untrained)
            for dtype in ("f32", "f16", "bf16")
        ]  # fmt: skip
    assert all(len(report.gates) >= 2 for report in reports)
    return [(r.dtype, gate) for r in reports for gate in r.gates if not gate.passed]


def test_there_are_trained_checkpoints_among_them():
    assert set(CHECKPOINTS) <= {path.name for path in GOLDEN.iterdir()}
