"""Models whose sizes are no multiple of a vector: the whole engine against float64, sampling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from pyengine import Engine
from pyengine.native import Activation
from tests import reference
from tests.conftest import is_standin
from tests.tiny import write_tiny
from tests.tolerances import Tolerance, assert_close

Array = np.ndarray[Any, Any]

IDS = [(37 * i * i + 11 * i + 3) % 256 for i in range(40)]
SIZES = [(259, 111), (300, 113), (301, 111), (303, 113)]  # vocabulary, intermediate
SAMPLES = 1000
# Two layers of f32, each some hundred roundings deep, of random weights that do not shrink them.
WHOLE_MODEL = Tolerance(0, 2e-5, "f32 through two layers")


@pytest.fixture(params=SIZES, ids=lambda size: f"vocab{size[0]}-intermediate{size[1]}")
def odd(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A tiny llama of odd sizes, its token ids used directly."""
    vocab, intermediate = request.param
    folder = write_tiny("llama", tmp_path, vocab_size=vocab, intermediate_size=intermediate)
    (folder / "tokenizer.json").unlink()
    return folder


def llama_logits(folder: Path, ids: list[int]) -> Array:
    """The Llama forward pass in float64, from the formulas: (T, vocab)."""
    config = json.loads((folder / "config.json").read_text())
    tensors = {k: v.astype(np.float64) for k, v in load_file(folder / "model.safetensors").items()}
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim, eps = config["hidden_size"] // heads, config["rms_norm_eps"]
    length = len(ids)
    table = reference.rope_table(length, dim, config["rope_theta"])
    rows = np.arange(length)
    # One sequence in an unpaged cache: block i of its table is block i.
    blocks = np.arange(-(-length // reference.KV_BLOCK_SIZE))[None]
    padding = ((0, blocks.size * reference.KV_BLOCK_SIZE - length), (0, 0), (0, 0))
    x = tensors["model.embed_tokens.weight"][ids]
    for layer in range(config["num_hidden_layers"]):
        w = {
            name.split(".")[-2]: value
            for name, value in tensors.items()
            if name.startswith(f"model.layers.{layer}.")
        }
        h = reference.rms_norm(x, w["input_layernorm"], eps)
        q = reference.rope(h @ w["q_proj"].T, table, rows, heads, dim)
        k = reference.rope(h @ w["k_proj"].T, table, rows, kv_heads, dim)
        v = h @ w["v_proj"].T
        cache = (np.pad(c.reshape(length, kv_heads, dim), padding) for c in (k, v))
        attended = reference.attention_paged(
            q.reshape(length, heads, dim), *cache, blocks, np.zeros(length, int), rows,
            scale=dim**-0.5,
        )  # fmt: skip
        x = x + attended.reshape(length, -1) @ w["o_proj"].T
        h = reference.rms_norm(x, w["post_attention_layernorm"], eps)
        gate_up = np.concatenate([h @ w["gate_proj"].T, h @ w["up_proj"].T], axis=1)
        x = x + reference.activate_gated(gate_up, Activation.SILU) @ w["down_proj"].T
    return reference.rms_norm(x, tensors["model.norm.weight"], eps) @ tensors["lm_head.weight"].T


def test_logits_of_odd_sizes_are_those_of_float64(odd: Path, device: str) -> None:
    with Engine(odd, device=device) as engine:
        assert_close(engine.logits(IDS), llama_logits(odd, IDS), WHOLE_MODEL)


def test_a_thousand_samples_of_an_odd_vocabulary_stay_inside_it_and_reach_its_end(
    odd: Path, device: str
) -> None:
    if is_standin(device):
        pytest.skip("a thousand steps take the stand-in minutes")
    drawn: list[int] = []
    with Engine(odd, device=device) as engine:
        vocab = engine.config.vocab_size
        for seed in range(8):  # so hot that all tokens are about as likely
            drawn += engine.generate(
                IDS, temperature=1000.0, max_new_tokens=SAMPLES // 8, ignore_eos=True, seed=seed
            ).token_ids
    assert len(drawn) == SAMPLES
    assert min(drawn) >= 0 and max(drawn) < vocab
    assert max(drawn) >= vocab - vocab % 16, "no token of the last, incomplete vector"
    assert len(set(drawn)) > 0.9 * vocab  # of 303, 96 % are expected to come
