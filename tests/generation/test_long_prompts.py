"""Long prompts, in chunks of any size and past a rotary switch, give what one pass gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyengine import Engine
from tests.conftest import is_standin
from tests.tiny import write_tiny
from tests.tolerances import BETWEEN_CUTS, assert_same

Array = np.ndarray[Any, Any]


def ids_of(count: int) -> list[int]:
    return [(37 * i * i + 11 * i + 3) % 256 for i in range(count)]


def most_probable(engine: Engine, ids: list[int]) -> dict[int, float]:
    """Log-probabilities of the 20 likeliest next tokens after a prefill, which keeps only those."""
    (token,) = engine.generate(ids, max_new_tokens=1, logprobs=20).logprobs or []
    return dict(token.top)


@pytest.mark.parametrize("length", [100, 5000])
@pytest.mark.parametrize("family", ["llama", "bloom"])
def test_a_prompt_in_chunks_of_any_size_is_the_prompt(
    tmp_path: Path, device: str, family: str, length: int
) -> None:
    if is_standin(device) and length > 100:
        pytest.skip("5000 tokens in five ways take the stand-in half an hour")
    changes = {} if family == "bloom" else {"max_position_embeddings": length + 8}
    write_tiny(family, tmp_path, **changes)
    ids = ids_of(length)
    options: dict[str, Any] = {"dtype": "f32", "max_batch": 1, "max_context": length + 8}
    with Engine(tmp_path, device="cpu", chunk_rows=64, **options) as engine:
        on_cpu, top_on_cpu = engine.logits(ids), most_probable(engine, ids)
    whole, largest = None, np.abs(on_cpu).max()
    for chunk_rows in (length, 1, 7, 32, 64):
        with Engine(tmp_path, device=device, chunk_rows=chunk_rows, **options) as engine:
            logits, top = engine.logits(ids), most_probable(engine, ids)
        whole = logits if whole is None else whole
        assert_same(device, logits, on_cpu)
        assert_same(device, logits, whole)
        # In one step of chunk_rows rows; above, at most 64 of them can have logits.
        for token in top_on_cpu.keys() & top.keys():
            assert abs(top[token] - top_on_cpu[token]) <= BETWEEN_CUTS * largest
        assert len(top_on_cpu.keys() & top.keys()) >= 19  # the last may be another on a tie


def test_generation_past_the_rotary_switch_is_a_fresh_pass_at_every_length(
    tmp_path: Path, device: str
) -> None:
    """Phi-3's factors change at 32 tokens: what is cached by then is computed again."""
    write_tiny("phi3-longrope", tmp_path)
    prompt = ids_of(30)
    options: dict[str, Any] = {"device": device, "dtype": "f32", "max_batch": 1}
    with Engine(tmp_path, max_context=64, **options) as engine:
        result = engine.generate(prompt, max_new_tokens=10, ignore_eos=True, logprobs=20)
    assert result.completion_tokens == 10 and result.logprobs is not None
    with Engine(tmp_path, max_context=64, chunk_rows=64, **options) as engine:
        for step, token in enumerate(result.logprobs):
            fresh = engine.logits(prompt + result.token_ids[:step])[-1].astype(np.float64)
            largest = np.abs(fresh).max()
            assert token.id == fresh.argmax()
            expected = fresh - fresh.max() - np.log(np.exp(fresh - fresh.max()).sum())
            for other, logprob in token.top:
                assert abs(logprob - expected[other]) <= BETWEEN_CUTS * largest, step


def test_alibi_in_f16_is_the_same_in_decode_as_in_prefill(tmp_path: Path, device: str) -> None:
    """Bloom, 200 tokens one at a time: same choices as in one pass, and near f32 on the CPU.

    That the CPU's f32 is Transformers' the goldens show (tests/models/test_golden.py).
    """
    write_tiny("bloom", tmp_path)
    ids = ids_of(40 if is_standin(device) else 200)
    options: dict[str, Any] = {"max_batch": 1, "max_context": 256}
    with Engine(tmp_path, device="cpu", dtype="f32", **options) as engine:
        exact = engine.logits(ids)
    found: list[Array] = []
    for chunk_rows in (1, 64):
        with Engine(tmp_path, device=device, dtype="f16", chunk_rows=chunk_rows, **options) as e:
            found.append(e.logits(ids))
    one_by_one, at_once = found
    assert (one_by_one.argmax(axis=1) == at_once.argmax(axis=1)).all()
    for logits in found:
        assert np.abs(logits - exact).max() <= 2e-2 * np.abs(exact).max()
