"""models/weights.py: every tensor is used or named, and the head is found."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pyengine.errors import WeightError
from pyengine.models import (
    load_config,
    open_checkpoint,
    plan_weights,
)
from pyengine.models.weights import WeightPlan, expected_weights
from pyengine.native import load_library
from tests.models.safetensors_files import Tensors, edit_config, edit_tensors, read_tensors
from tests.models.single import logits_of
from tests.tiny import FAMILIES, VARIANTS, tiny_config, write_tiny


def planned(path: Path) -> WeightPlan:
    config, spec = load_config(path)
    with open_checkpoint(path) as checkpoint:
        return plan_weights(spec, config, checkpoint)


def refusal(path: Path) -> str:
    with pytest.raises(WeightError) as caught:
        planned(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def renamed(change: Callable[[str], str]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {change(name): array for name, array in tensors.items()}


# ---- accounting ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*FAMILIES, *VARIANTS])
def test_every_tensor_that_transformers_writes_is_used(name: str, tmp_path: Path) -> None:
    path = write_tiny(name, tmp_path)
    plan = planned(path)
    used = [source.name for weight in plan.weights for source in weight.sources]
    assert sorted(used) == sorted(read_tensors(path / "model.safetensors"))
    assert plan.ignored == ()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_single_missing_tensor_is_named(family: str, tmp_path: Path) -> None:
    layers = "n_layer" if "n_layer" in FAMILIES[family] else "num_hidden_layers"
    path = write_tiny(family, tmp_path, **{layers: 1})
    whole = read_tensors(path / "model.safetensors")
    for gone in whole:
        edit_tensors(path, lambda _, gone=gone: {n: a for n, a in whole.items() if n != gone})
        assert gone in refusal(path)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_wrong_shape_is_named_with_both_shapes(family: str, tmp_path: Path) -> None:
    path = write_tiny(family, tmp_path)
    whole = read_tensors(path / "model.safetensors")
    for name, array in whole.items():
        if not name.split(".")[-3:-1] == ["layers", "1"]:
            wrong = np.concatenate([array, array[:1]])
            edit_tensors(path, lambda _, n=name, w=wrong: {**whole, n: w})
            message = refusal(path)
            assert f"{name} has shape {list(wrong.shape)}" in message
            assert f"makes it {list(array.shape)}" in message


def test_an_unknown_tensor_is_refused(tmp_path: Path) -> None:
    path = write_tiny("llama", tmp_path)
    extra = np.ones(3, np.float32)
    edit_tensors(path, lambda tensors: {**tensors, "model.layers.0.self_attn.q_norm.weight": extra})
    assert "model.layers.0.self_attn.q_norm.weight is not known to llama" in refusal(path)


def test_a_flag_and_the_file_must_agree(tmp_path: Path) -> None:
    path = write_tiny("stablelm", tmp_path)
    assert "post_attention_layernorm" in refusal(edit_config(path, use_parallel_residual=True))
    edit_config(path, use_parallel_residual=False, use_qkv_bias=False)
    assert "self_attn.k_proj.bias and 5 more are not known" in refusal(path)


def test_a_missing_head_of_an_untied_model_is_refused(tmp_path: Path) -> None:
    path = write_tiny("llama", tmp_path)
    edit_tensors(path, lambda t: {n: a for n, a in t.items() if n != "lm_head.weight"})
    assert "lm_head.weight is missing (tie_word_embeddings is false)" in refusal(path)


def test_a_doubly_prefixed_file_is_refused_with_what_it_holds(tmp_path: Path) -> None:
    path = write_tiny("gpt2", tmp_path)
    edit_tensors(path, renamed(lambda name: f"transformer.{name}"))
    message = refusal(path)
    assert "transformer.wte.weight" in message
    assert "transformer.transformer." in message


def test_a_half_prefixed_file_is_refused(tmp_path: Path) -> None:
    path = write_tiny("gpt2", tmp_path)
    edit_tensors(path, renamed(lambda n: n if ".h.1." in n else n.removeprefix("transformer.")))
    message = refusal(path)
    assert "some tensors have the prefix 'transformer.'" in message
    assert "some lack it (wte.weight)" in message


def test_a_stored_type_that_is_not_read_is_refused(tmp_path: Path) -> None:
    path = write_tiny("llama", tmp_path)
    raw = (path / "model.safetensors").read_bytes()
    assert raw.count(b'"dtype":"F32"') > 0
    (path / "model.safetensors").write_bytes(raw.replace(b'"dtype":"F32"', b'"dtype":"I32"'))
    assert "is stored as I32; supported: F32, F16, BF16" in refusal(path)


def test_stablelm_head_norms_are_taken_in_head_order() -> None:
    from pyengine.models.config import parse_config

    raw = tiny_config("stablelm", qk_layernorm=True, num_attention_heads=16, hidden_size=128)
    config, spec = parse_config(raw, "config.json")
    weights = expected_weights(spec, config, tied=False)
    norm = next(weight for weight in weights if weight.role == "q_norm" and weight.layer == 0)
    heads = [int(source.name.split(".")[-2]) for source in norm.sources]
    assert heads == list(range(16))
    assert [source.row for source in norm.sources] == [8 * head for head in range(16)]


# ---- the same weights, stored in other ways -----------------------------------------------------


@pytest.mark.parametrize("family", ["gpt2", "bloom"])
def test_a_file_of_the_base_class_gives_the_same_logits(family: str, tmp_path: Path) -> None:
    path = write_tiny(family, tmp_path)
    before = logits_of(path)
    edit_tensors(path, renamed(lambda name: name.removeprefix("transformer.")))
    assert np.array_equal(logits_of(path), before)


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_masks_empty_tensors_and_scalars_are_left_out(prefix: str, tmp_path: Path) -> None:
    path = write_tiny("gpt2", tmp_path)
    before = logits_of(path)
    buffers = {
        f"{prefix}h.0.attn.bias": np.ones((1, 1, 4, 4), np.float32),
        f"{prefix}h.0.attn.masked_bias": np.float32(-1e4).reshape(()),
        "z": np.zeros((0, 4), np.float32),
        "s": np.float32(1).reshape(()),
    }
    edit_tensors(path, lambda tensors: {**buffers, **tensors})
    assert set(planned(path).ignored) == set(buffers)
    assert np.array_equal(logits_of(path), before)


def test_shards_give_the_same_bits_as_one_file(tmp_path: Path) -> None:
    for family in FAMILIES:
        one = write_tiny(family, tmp_path / f"{family}-1")
        many = write_tiny(family, tmp_path / f"{family}-n", shard_bytes=30_000)
        assert (many / "model.safetensors.index.json").exists()
        assert np.array_equal(logits_of(one), logits_of(many)), family


def test_an_equal_head_beside_a_tied_embedding_is_stored_once(tmp_path: Path) -> None:
    path = write_tiny("qwen2", tmp_path)
    before = logits_of(path)
    edit_tensors(path, lambda t: {**t, "lm_head.weight": t["model.embed_tokens.weight"]})
    plan = planned(path)
    assert plan.tied
    assert "lm_head" not in {weight.role for weight in plan.weights}
    assert np.array_equal(logits_of(path), before)


def test_another_head_beside_a_tied_embedding_is_used(tmp_path: Path) -> None:
    path = write_tiny("qwen2", tmp_path)
    before = logits_of(path)
    edit_tensors(path, lambda t: {**t, "lm_head.weight": 2 * t["model.embed_tokens.weight"]})
    assert not planned(path).tied
    assert np.array_equal(logits_of(path), 2 * before)


def test_an_index_without_its_shard_is_refused_before_memory_is_reserved(tmp_path: Path) -> None:
    path = write_tiny("llama", tmp_path, shard_bytes=60_000)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    gone = sorted(set(index["weight_map"].values()))[1]
    (path / gone).unlink()
    before = load_library("cpu").c.ok_allocation_count()
    assert gone in refusal(path)
    assert load_library("cpu").c.ok_allocation_count() == before
