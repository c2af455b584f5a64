"""The built-in prompts: enough of them, varied, within the context, and under a version."""

from __future__ import annotations

import hashlib

import pytest
from tokenizers import Tokenizer

from pyengine.evidence.prompts import (
    TEXTS,
    VERSION,
    Prompt,
    context_of,
    limit,
    make_prompts,
    switch_lengths,
)
from tests.conftest import CHECKPOINTS


@pytest.fixture(params=["stablelm2", "phi3"])
def encode(request):
    tokenizer = Tokenizer.from_file(str(CHECKPOINTS[request.param] / "tokenizer.json"))
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("context", [256, 512, 4096])
def test_they_give_2000_positions_within_the_context(encode, context):
    lengths = [len(prompt.ids) for prompt in make_prompts(encode, max_tokens=context)]
    assert sum(lengths) >= 2000
    assert len(lengths) >= 8
    assert min(lengths) == 1
    assert max(lengths) <= context
    assert max(lengths) >= min(400, context)


def test_a_changed_text_raises_the_version():
    texts = "\0".join(f"{text.name}\0{text.tokens}\0{text.text}" for text in TEXTS)
    digest = hashlib.sha256(texts.encode()).hexdigest()[:16]
    assert {1: "ffd1c379b0173f82"}[VERSION] == digest


def test_a_budget_is_spread_over_all_prompts(encode):
    prompts = make_prompts(encode, max_tokens=512, positions=300)
    lengths = [len(prompt.ids) for prompt in prompts]
    assert 280 <= sum(lengths) <= 300
    assert max(lengths) == 150
    assert len(lengths) == len(TEXTS) + 1


@pytest.mark.parametrize("positions", [0, 1, 2, 7, 40])
def test_a_budget_is_never_exceeded(positions):
    prompts = [Prompt(str(n), "", tuple(range(n))) for n in (1, 3, 9, 30)]
    kept = limit(prompts, positions)
    assert sum(len(prompt.ids) for prompt in kept) <= positions
    assert all(prompt.ids for prompt in kept)


def test_given_lengths_come_on_top(encode):
    prompts = make_prompts(encode, max_tokens=512, positions=100, exact=(31, 32, 33))
    assert [len(prompt.ids) for prompt in prompts[-3:]] == [31, 32, 33]


def test_context_and_switch_are_read_from_a_config():
    longrope = {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
    config = {"max_position_embeddings": 256, "rope_scaling": longrope}
    assert context_of(config) == 256
    assert switch_lengths(config) == ()
    assert switch_lengths({**config, "original_max_position_embeddings": 32}) == (31, 32, 33)
    assert switch_lengths({"max_position_embeddings": 256}) == ()
