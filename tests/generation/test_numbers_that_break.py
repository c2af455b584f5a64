"""Overflow and damage end in finite numbers or an error that names the layer, never in a token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyengine import Engine
from pyengine.errors import NonFiniteError, WeightError
from tests.models.safetensors_files import Tensors, edit_tensors
from tests.tiny import write_tiny


def changed(folder: Path, name: str, change: Any, family: str = "qwen2") -> Path:
    """A tiny model with one tensor changed."""
    write_tiny(family, folder)

    def edit(tensors: Tensors) -> Tensors:
        array = tensors[name].copy()
        change(array)
        return tensors | {name: array}

    return edit_tensors(folder, edit)


def test_scores_far_beyond_f16_stay_finite(tmp_path: Path, device: str) -> None:
    write_tiny("qwen2", tmp_path)

    def steep(tensors: Tensors) -> Tensors:
        biases = [n for n in tensors if n.endswith(("q_proj.bias", "k_proj.bias"))]
        return tensors | {n: np.full_like(tensors[n], 300.0) for n in biases}

    edit_tensors(tmp_path, steep)
    for length in (1, 40, 200):
        ids = list(range(length))
        with Engine(tmp_path, device=device, dtype="f16") as engine:
            half = engine.logits(ids)
        with Engine(tmp_path, device=device, dtype="f32") as engine:
            full = engine.logits(ids)
        assert np.isfinite(half).all()
        assert np.abs(half - full).max() <= 2e-2 * np.abs(full).max()


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("model.embed_tokens.weight", "embedding"),
        ("model.layers.1.mlp.down_proj.weight", "layer 1"),
        ("model.norm.weight", "final norm"),
    ],
)
def test_a_damaged_weight_is_found_by_layer(
    tmp_path: Path, device: str, name: str, place: str, value: float
) -> None:
    def damage(array: np.ndarray) -> None:
        array.reshape(-1)[: array.shape[-1]] = value

    folder = changed(tmp_path, name, damage)
    with Engine(folder, device=device, dtype="f32") as engine:
        for work in (
            lambda: engine.generate([0, 5, 6], max_new_tokens=4),
            lambda: engine.logits([0, 5, 6]),
            lambda: list(engine.stream([0, 5, 6], max_new_tokens=4)),
        ):
            with pytest.raises(NonFiniteError, match=f"first after {place}.*dtype"):
                work()


def test_a_neighbour_in_the_batch_is_not_harmed(tmp_path: Path, device: str) -> None:
    def damage(array: np.ndarray) -> None:
        array[7] = np.nan  # the embedding of one token

    folder = changed(tmp_path, "model.embed_tokens.weight", damage, family="llama")
    with Engine(folder, device=device, dtype="f32") as engine:
        alone = engine.generate([1, 2, 3], max_new_tokens=5)
        good = engine.stream([1, 2, 3], max_new_tokens=5)
        bad = engine.stream([1, 7], max_new_tokens=5)
        with pytest.raises(NonFiniteError):
            list(bad)
        assert list(good)[-1].completion == alone


def test_weights_that_leave_the_range_of_f16_are_refused_by_name(tmp_path: Path) -> None:
    def grow(array: np.ndarray) -> None:
        array[0, 0] = 1e6

    folder = changed(tmp_path, "model.layers.0.self_attn.o_proj.weight", grow)
    with pytest.raises(WeightError, match="layers.0.*o_proj|attn_out.*f16"):
        Engine(folder, device="cpu", dtype="f16")
    with Engine(folder, device="cpu", dtype="bf16") as engine:
        assert np.isfinite(engine.logits([1, 2, 3])).all()


def test_when_nothing_is_left_to_pick_that_is_said(tmp_path: Path) -> None:
    write_tiny("gpt2", tmp_path)
    with Engine(tmp_path, device="cpu") as engine:
        everything = dict.fromkeys(range(300), -1e29)
        text = engine.generate([1], max_new_tokens=2, logit_bias=everything)
        assert text.completion_tokens == 2  # far down is still finite
