"""A live oracle has to be sane before anything is compared with it."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from pyengine.errors import CannotCompare
from pyengine.evidence.parity import run_parity
from pyengine.evidence.prompts import Prompt
from pyengine.evidence.reference import (
    RecordedReference,
    TransformersReference,
    record,
)
from tests.conftest import CHECKPOINTS
from tests.models.safetensors_files import edit_tensors

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

pytestmark = pytest.mark.filterwarnings("ignore")  # of libraries that stand in for the reference


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Small models gain nothing from torch's threads, which would fight with ours."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def olmo2(tmp_path):
    shutil.copytree(CHECKPOINTS["olmo2"], tmp_path / "olmo2")
    return tmp_path / "olmo2"


def _shuffle(tensors):
    """Every matrix with its rows in another order: the right numbers in the wrong places."""
    rng = np.random.default_rng(0)
    return {name: rng.permutation(a) if a.ndim == 2 else a for name, a in tensors.items()}


def test_shuffled_weights_are_refused_as_an_oracle(olmo2):
    edit_tensors(olmo2, _shuffle)
    with pytest.raises(CannotCompare, match="not what was trained"):
        run_parity(olmo2, device="cpu", positions=200)


def test_untrained_waives_the_loss_check_and_says_so(olmo2):
    edit_tensors(olmo2, _shuffle)
    report = run_parity(olmo2, device="cpu", positions=200, untrained=True)
    assert report.passed  # both compute the same nonsense
    assert report.untrained
    assert report.reference["loss_nats"] > report.reference["loss_limit_nats"]


def test_an_oracle_that_would_make_weights_up_is_refused(olmo2):
    edit_tensors(olmo2, lambda t: {k: v for k, v in t.items() if "layers.1.mlp.up_proj" not in k})
    with pytest.raises(CannotCompare, match="missing keys"):
        TransformersReference(olmo2, [Prompt("p", "", (1, 2, 3))], device="cpu")


def test_an_oracle_with_nan_is_refused(olmo2):
    def spoil(tensors):
        return {**tensors, "model.norm.weight": np.full_like(tensors["model.norm.weight"], np.nan)}

    edit_tensors(olmo2, spoil)
    with pytest.raises(CannotCompare, match="not finite"):
        run_parity(olmo2, device="cpu", positions=60)


def test_a_recording_gives_back_what_was_asked(tmp_path):
    prompts = [Prompt("a", "x", (1, 2, 3)), Prompt("b", "y", tuple(range(4, 24)))]
    live = TransformersReference(
        CHECKPOINTS["llama"], prompts, untrained=True, device="cpu", row_stride=8
    )
    record(live, tmp_path, {"note": "mine"})
    recorded = RecordedReference(tmp_path)
    assert recorded.prompts == prompts
    assert recorded.info["note"] == "mine"
    for index in range(2):
        mine, theirs = recorded.expected(index, "bf16"), live.expected(index, "bf16")
        np.testing.assert_array_equal(mine.argmax, theirs.argmax)
        np.testing.assert_array_equal(mine.rows, theirs.rows)
        np.testing.assert_array_equal(mine.logits, theirs.logits)
        np.testing.assert_array_equal(mine.top_ids, theirs.top_ids)
        np.testing.assert_allclose(mine.own["bf16"], theirs.own["bf16"], rtol=1e-6)
