"""GGUF copies of the trained checkpoints in the engine: logits and text of the q8_0 directory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pyengine import Engine
from pyengine.generation.gguf_vocabulary import gguf_vocabulary
from pyengine.models.quantize import quantize
from tests.conftest import CHECKPOINTS
from tests.tiny import write_tiny

PROMPTS = ("In the beginning", "def fibonacci(n):\n", "It's 1234 files; Ünïcode")


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_and_text_are_those_of_the_directory(name: str, tmp_path: Path) -> None:
    model, file, directory = CHECKPOINTS[name], tmp_path / "copy.gguf", tmp_path / "copy"
    vocabulary = gguf_vocabulary(model, pre="llama-bpe")  # the word nearest to all but phi3's
    kept = quantize(model, file, vocabulary=vocabulary).kept
    quantize(model, directory, keep=["down"] if any("down_proj" in n for n in kept) else [])
    found = []
    for path in (file, directory):
        with Engine(path, device="cpu", max_context=128, max_batch=1) as engine:
            assert engine.weights == "q8_0"
            ids = [engine.tokenize(prompt) for prompt in PROMPTS]
            texts = [engine.generate(prompt, max_new_tokens=24).text for prompt in PROMPTS]
            found.append((ids, texts, [engine.logits(prompt) for prompt in ids]))
    (ids, texts, logits), (expected_ids, expected_texts, expected_logits) = found
    assert ids == expected_ids and texts == expected_texts
    assert all(map(np.array_equal, logits, expected_logits))


def test_a_vocabulary_of_single_bytes_needs_no_merges(tmp_path: Path) -> None:
    """GGUF has no empty lists, so none is stored."""
    model = write_tiny("llama", tmp_path / "model")
    vocabulary = gguf_vocabulary(model, pre="gpt-2")
    quantize(model, tmp_path / "m.gguf", vocabulary=vocabulary)
    with Engine(tmp_path / "m.gguf", device="cpu") as engine:
        assert engine.detokenize(engine.tokenize("hi")) == "hi"
