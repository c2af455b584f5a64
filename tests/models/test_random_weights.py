"""models/random_weights.py: a whole model of any family, the same however it is read."""

from __future__ import annotations

import numpy as np
import pytest

from pyengine import Engine
from pyengine.generation.source import source_of
from pyengine.models.random_weights import RandomCheckpoint
from tests.tiny import FAMILIES, tiny_config


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_runs(family: str) -> None:
    with (
        RandomCheckpoint(tiny_config(family)) as checkpoint,
        Engine(source_of(checkpoint), device="cpu", max_batch=1, max_context=16) as engine,
    ):
        logits = engine.logits(range(12))
    assert np.isfinite(logits).all() and 0.1 < logits.std() < 10


def test_rows_are_those_of_the_whole_and_tensors_differ() -> None:
    checkpoint = RandomCheckpoint(tiny_config("llama"), count=1000)
    names = [f"model.layers.{i}.self_attn.{n}_proj.weight" for i in (0, 1) for n in "kv"]
    whole = [checkpoint.read(name) for name in names]
    assert np.array_equal(checkpoint.read(names[0], slice(5, 9)), whole[0][5:9])
    for i, one in enumerate(whole):
        assert not any(np.array_equal(one, other) for other in whole[i + 1 :])
    norm = checkpoint.read("model.norm.weight")
    assert abs(norm.mean() - 1) < 0.1


def test_a_seed_names_the_model() -> None:
    config = tiny_config("llama")
    a, b, c = (RandomCheckpoint(config, seed=seed).read("lm_head.weight") for seed in (1, 1, 2))
    assert np.array_equal(a, b) and not np.array_equal(a, c)
