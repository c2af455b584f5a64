"""The real SmolLM2-135M-Instruct, from its GGUF, against Transformers reading the same file.

Runs where `pyengine pull smollm2` has been run; the comparison needs torch, transformers and
accelerate besides.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyengine import Engine
from pyengine.evidence.prompts import make_prompts
from pyengine.models.hub import WHEELS, cache_folder

FILE = cache_folder() / "smollm2" / Path(WHEELS["smollm2"].member).name
PROMPTS = (
    "The capital of France is",
    "Once upon a time, there was a small village",
    "def fibonacci(n):",
    "The three primary colours are",
    "Water boils at",
)
pytestmark = pytest.mark.skipif(
    not FILE.exists(), reason="the model is not here: pyengine pull smollm2"
)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine("smollm2", device="cpu", dtype="f32", max_context=512) as engine:
        yield engine


@pytest.fixture(scope="module")
def oracle() -> Any:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    torch.set_num_threads(2)
    return transformers.AutoModelForCausalLM.from_pretrained(
        FILE.parent, gguf_file=FILE.name, dtype=torch.float32
    )


def test_it_answers(engine: Engine) -> None:
    assert "Paris" in engine.generate(PROMPTS[0], max_new_tokens=16).text
    question = [{"role": "user", "content": "What is the capital of France?"}]
    answer = engine.chat(question, max_new_tokens=32)
    assert "Paris" in answer.text and answer.finish_reason == "stop"


def test_logits_are_those_of_transformers(engine: Engine, oracle: Any) -> None:
    import torch

    prompts = make_prompts(lambda text: engine.tokenize(text), max_tokens=128, positions=300)
    positions = 0
    for prompt in prompts:
        ours = engine.logits(prompt.ids).astype(np.float64)
        with torch.no_grad():
            theirs = oracle(torch.tensor([list(prompt.ids)])).logits[0].numpy().astype(np.float64)
        norms = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
        # f32 on both sides; 30 layers leave about 3e-7.
        assert ((ours * theirs).sum(axis=1) / norms).min() >= 0.999999
        assert (ours.argmax(axis=1) == theirs.argmax(axis=1)).all()
        positions += len(ours)
    assert positions >= 200


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_text_is_that_of_transformers(engine: Engine, oracle: Any, prompt: str) -> None:
    import torch

    ids = engine.tokenize(prompt)
    ours = engine.generate(ids, max_new_tokens=64).token_ids
    with torch.no_grad():
        theirs = oracle.generate(
            torch.tensor([ids]), max_new_tokens=64, do_sample=False, pad_token_id=0
        )[0].tolist()[len(ids) :]
    assert ours == theirs
