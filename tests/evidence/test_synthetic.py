"""Random checkpoints: the same bytes everywhere, complete, and of a sensible scale."""

from __future__ import annotations

import hashlib
import importlib.util
import json

import numpy as np
import pytest

from pyengine.evidence.reference import checkpoint_hashes
from pyengine.evidence.synthetic import encode, is_norm_weight, random_chunks, tensor_shapes
from pyengine.generation.engine import Engine
from tests.conftest import ROOT
from tests.tiny import FAMILIES, tiny_config, write_tiny


@pytest.fixture(scope="module")
def make_synthetic():
    path = ROOT / "scripts" / "make_synthetic.py"
    spec = importlib.util.spec_from_file_location("make_synthetic", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _values(name, shape, seed=0, std=1.0):
    return np.concatenate(list(random_chunks(name, shape, seed, std)))


def test_a_seed_gives_the_same_bytes_on_every_machine():
    values = _values("model.embed_tokens.weight", (100, 7), seed=3, std=0.2)
    digest = hashlib.sha256(values.astype("<f4").tobytes()).hexdigest()
    assert digest[:16] == "7a9221b93e502ec7"


def test_the_numbers_are_spread_as_asked():
    values = _values("a.weight", (300, 1000), std=0.2)  # 300,000 numbers: more than one chunk
    assert abs(values.mean()) < 2e-3  # five standard errors
    assert values.std() == pytest.approx(0.2, rel=0.01)
    assert len(np.unique(values)) > 100_000
    other = _values("b.weight", (300, 1000), std=0.2)
    assert abs(np.corrcoef(values, other)[0, 1]) < 0.01
    norm = _values("model.norm.weight", (10_000,), std=0.2)
    assert norm.mean() == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize(
    "name, norm",
    [
        ("model.layers.0.input_layernorm.weight", True),
        ("model.layers.0.self_attn.q_layernorm.norms.3.weight", True),
        ("transformer.h.1.ln_2.weight", True),
        ("transformer.ln_f.bias", False),
        ("transformer.word_embeddings.weight", False),
        ("transformer.word_embeddings_layernorm.weight", True),
        ("model.layers.0.self_attn.q_norm.weight", True),
        ("lm_head.weight", False),
    ],
)
def test_norm_weights_are_told_apart(name, norm):
    assert is_norm_weight(name) == norm


def test_bf16_rounds_to_nearest_even():
    values = np.array([1.0, 1.00390625, 1.01171875, 1.0045, -3.14159265, 0.0], np.float32)
    found = np.frombuffer(encode(values, "bf16"), "<u2")
    # 1 + 2^-8 is half way to the next bf16 and goes down to even; 1 + 3 * 2^-8 goes up.
    assert found.tolist() == [0x3F80, 0x3F80, 0x3F82, 0x3F81, 0xC049, 0x0000]


def test_shards_hold_every_tensor_once(tmp_path):
    model = write_tiny("llama", tmp_path, shard_bytes=60_000)
    index = json.loads((model / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(index) == set(tensor_shapes(tiny_config("llama")))
    assert len(set(index.values())) > 2
    assert set(index.values()) == {path.name for path in model.glob("*.safetensors")}


def test_sharding_changes_no_weight(tmp_path):
    whole = write_tiny("olmo2", tmp_path / "whole")
    shards = write_tiny("olmo2", tmp_path / "shards", shard_bytes=50_000)
    assert len(checkpoint_hashes(shards)) > len(checkpoint_hashes(whole))
    with Engine(whole, device="cpu") as one, Engine(shards, device="cpu") as other:
        ids = list(range(20))
        np.testing.assert_array_equal(one.logits(ids), other.logits(ids))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_both_spellings_of_a_config_mean_the_same(tmp_path, family):
    old = write_tiny(family, tmp_path / "v4", spelling="v4")
    new = write_tiny(family, tmp_path / "v5", spelling="v5")
    with Engine(old, device="cpu") as one, Engine(new, device="cpu") as other:
        ids = list(range(5, 40))
        np.testing.assert_array_equal(one.logits(ids), other.logits(ids))


@pytest.mark.parametrize(
    "name",
    ["bloom-560m", "qwen2.5-1.5b"],  # one of each way; the others take seconds longer
)
def test_logits_of_synthetic_models_are_of_a_real_models_size(make_synthetic, tmp_path, name):
    model = make_synthetic.make_synthetic(name, tmp_path, layers=1, vocab=512, quiet=True)
    with Engine(model, device="cpu", max_context=64) as engine:
        logits = engine.logits(list(range(3, 35)))
    assert 2.0 < logits.std() < 4.0
    assert np.isfinite(logits).all()


@pytest.mark.parametrize(
    "name, parameters",
    [
        ("stablelm-2-1.6b", 1_644_515_328),
        ("bloom-560m", 559_214_592),
        ("olmo-2-1b", 1_484_916_736),
        ("qwen2.5-1.5b", 1_543_714_304),
        ("phi-3-mini", 3_821_079_552),
    ],
)
def test_sizes_are_the_published_ones(make_synthetic, name, parameters):
    shapes = tensor_shapes(make_synthetic.synthetic_config(name, dtype="f16"))
    assert sum(int(np.prod(shape)) for shape in shapes.values()) == parameters
