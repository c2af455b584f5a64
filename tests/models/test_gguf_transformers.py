"""Float GGUF files against Transformers' own GGUF reader, for the architectures that it knows.

It knows no olmo2, leaves out the norms of stablelm2-12b's heads, and takes GPT-2 for one of 1024
positions. Needs torch, transformers and accelerate.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pyengine.generation.gguf_vocabulary import gguf_vocabulary
from pyengine.models import load_config, open_checkpoint, plan_weights
from pyengine.models.quantize import quantize
from tests.conftest import CHECKPOINTS
from tests.models.single import single
from tests.tiny import write_tiny

TOKENS = 60  # within phi3's window, which Transformers does not read


def float_copy(model: Path, out: Path) -> Path:
    """A GGUF file whose matrices stay as they are stored. The vocabulary tells GPT-2's size."""
    config, spec = load_config(model)
    with open_checkpoint(model) as checkpoint:
        weights = plan_weights(spec, config, checkpoint).weights
    roles = sorted({weight.role for weight in weights if weight.quantisable})
    quantize(model, out, keep=roles, vocabulary=gguf_vocabulary(model, pre="llama-bpe"))
    return out


@pytest.mark.parametrize("name", ["llama", "qwen2", "stablelm2", "phi3", "bloom", "gpt2"])
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    model = CHECKPOINTS[name]
    if name == "gpt2":
        model = write_tiny("gpt2", tmp_path / "model", n_positions=1024)
    file = float_copy(model, tmp_path / "copy.gguf")
    oracle = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=file.name, dtype=torch.float32
    )
    ids = np.random.default_rng(0).integers(3, 300, TOKENS).tolist()
    with torch.no_grad():
        expected = oracle(torch.tensor([ids])).logits[0].numpy()
    with single(file, rows=TOKENS, max_context=64) as loaded:
        got = loaded.logits(ids)
    # f32 on both sides; logits to 18 leave about 2e-5.
    assert np.abs(got - expected).max() <= 1e-4
    assert (got.argmax(axis=1) == expected.argmax(axis=1)).all()
