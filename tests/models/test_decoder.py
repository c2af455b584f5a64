"""models/decoder.py: every family and variant against recorded Transformers, and its invariants."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyengine.evidence.reference import RecordedReference, known_entries, relative_errors
from pyengine.models import WeightTypes
from pyengine.native import Buffer, DType, Library
from tests.conftest import CHECKPOINTS, GOLDEN
from tests.models.safetensors_files import edit_config, edit_tensors
from tests.models.single import single
from tests.tiny import write_tiny
from tests.tolerances import assert_same

# Both sides sum in float32 in their own order; a wrong model is off by 1e-3 to 1 (T15: wrong GELU).
TOLERANCE = 1e-4
GOLDENS = sorted(path.name for path in GOLDEN.iterdir() if (path / "reference.npz").exists())


def checkpoint_of(name: str, directory: Path) -> Path:
    """A golden's model: a trained one, or a tiny one made anew."""
    if name in CHECKPOINTS:
        return CHECKPOINTS[name]
    return write_tiny(name.removeprefix("tiny-"), directory)


def random_ids(count: int, vocab_size: int = 256) -> list[int]:
    return np.random.default_rng(count).integers(0, vocab_size, count).tolist()


def logits(
    path: Path, ids: list[int], rows: int | None = None, step: int | None = None, **options: Any
) -> np.ndarray:
    with single(path, rows=rows or len(ids), max_context=128, **options) as model:
        return model.logits(ids, step)


@pytest.mark.parametrize("name", GOLDENS)
def test_float32_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    reference = RecordedReference(GOLDEN / name)
    longest = max(len(prompt.ids) for prompt in reference.prompts)
    path = checkpoint_of(name, tmp_path)
    with single(path, rows=longest, max_context=longest) as model:
        for index, prompt in enumerate(reference.prompts):
            expected = reference.expected(index, "f32")
            found = model.logits(prompt.ids)
            assert np.array_equal(found.argmax(axis=1), expected.argmax), prompt.name
            right = np.concatenate([expected.logits, expected.top_logits], axis=1)
            error = known_entries(found[expected.rows], expected) - right
            assert relative_errors(error, expected.largest)[:, 1].max() <= TOLERANCE, prompt.name


@pytest.mark.parametrize("name", sorted(CHECKPOINTS))
@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16])
def test_chunks_of_any_size_give_the_same_bits(name: str, dtype: DType) -> None:
    ids = random_ids(70)
    with single(CHECKPOINTS[name], rows=70, max_context=96, types=WeightTypes(dtype)) as model:
        whole = model.logits(ids)
        for rows in (1, 7, 64):
            assert np.array_equal(model.logits(ids, rows), whole), rows


def test_a_window_of_eight_sees_eight_keys(tmp_path: Path, device: str, library: Library) -> None:
    ids = random_ids(20)
    full = logits(write_tiny("phi3", tmp_path / "full"), ids, library=library)
    windowed = write_tiny("phi3", tmp_path / "window", sliding_window=8)
    window = logits(windowed, ids, library=library)
    one_by_one = logits(windowed, ids, library=library, step=1)
    assert_same(device, window[:8], full[:8])
    assert_same(device, one_by_one, window)
    assert np.abs(full[8] - window[8]).max() > 1e-3 * np.abs(full).max()


def test_a_window_that_is_switched_off_changes_nothing(tmp_path: Path, library: Library) -> None:
    ids = random_ids(20)
    plain = logits(write_tiny("qwen2", tmp_path / "a", sliding_window=None), ids, library=library)
    off = logits(write_tiny("qwen2", tmp_path / "b", sliding_window=8), ids, library=library)
    assert np.array_equal(plain, off)


def test_full_rotation_is_another_model_than_a_quarter(tmp_path: Path) -> None:
    path, ids = write_tiny("stablelm", tmp_path), random_ids(20)
    quarter = logits(path, ids)
    full = logits(edit_config(path, partial_rotary_factor=1.0), ids)
    assert np.abs(full - quarter).max() > 0.1 * np.abs(quarter).max()


def test_longrope_turns_to_the_long_table_one_past_the_trained_length(tmp_path: Path) -> None:
    path, ids = write_tiny("phi3-longrope", tmp_path), random_ids(33)
    with single(path, rows=33, max_context=64) as model:
        short, long = model.logits(ids[:32]), model.logits(ids)
    assert np.abs(short[1:] - long[1:32]).max() > 0.01 * np.abs(short).max()


def test_old_and_new_spellings_give_the_same_bits(tmp_path: Path) -> None:
    ids = random_ids(20)
    for name in ("qwen2-yarn", "stablelm", "phi3-longrope"):
        old = logits(write_tiny(name, tmp_path / f"{name}-4", spelling="v4"), ids)
        new = logits(write_tiny(name, tmp_path / f"{name}-5", spelling="v5"), ids)
        assert np.array_equal(old, new), name


def test_surplus_rows_change_nothing(tmp_path: Path) -> None:
    path, ids = write_tiny("bloom", tmp_path), random_ids(9)
    assert np.array_equal(logits(path, ids), logits(path, ids, rows=16))


def test_a_recorded_step_gives_the_same_bits(tmp_path: Path) -> None:
    ids = random_ids(12)
    with single(write_tiny("stablelm", tmp_path), rows=12, max_context=32) as model:
        immediate = model.logits(ids)
        with model.queue.record() as program:
            model.decoder.forward(model.queue, 12)
        model.fill(ids, 0, 12)
        program.replay()
        recorded = model.batch.logits.download(model.queue)
        program.close()
    assert np.array_equal(recorded, immediate)


def test_bfloat16_positions_stay_exact_far_out(tmp_path: Path, library: Library) -> None:
    """Rotation by position 4095, not by its bf16 neighbour 4096: the last row tells them apart."""
    path = write_tiny("llama", tmp_path, max_position_embeddings=4200)
    ids = random_ids(4)
    rows = []
    for start in (4091, 4092):
        types = WeightTypes(DType.BF16)
        with single(path, rows=4, max_context=4100, types=types, library=library) as model:
            model.fill(ids, 0, 4)
            at = np.arange(4, dtype=np.int32) + start
            at[0] = 0  # the first key stays, the others move away from it
            model.batch.rope_row.upload(model.queue, at)
            model.decoder.forward(model.queue, 4)
            rows.append(model.batch.logits.download(model.queue)[3])
    assert not np.array_equal(*rows)


def test_check_sees_every_stage_and_names_the_first_bad_one(tmp_path: Path) -> None:
    def poison(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        weight = tensors["model.layers.1.mlp.down_proj.weight"].copy()
        weight[3, 4] = np.nan
        return {**tensors, "model.layers.1.mlp.down_proj.weight": weight}

    path = edit_tensors(write_tiny("qwen2", tmp_path, num_hidden_layers=3), poison)
    finite: dict[str, bool] = {}
    with single(path, rows=4, max_context=32) as model:
        model.fill(random_ids(4), 0, 4)

        def check(name: str, values: Buffer) -> None:
            finite[name] = bool(np.isfinite(values.download(model.queue)).all())

        model.decoder.forward(model.queue, 4, check)
    assert list(finite) == ["embedding", "layer 0", "layer 1", "layer 2", "final norm"]
    assert [name for name, good in finite.items() if good] == ["embedding", "layer 0"]


def test_the_decoder_never_asks_which_family_it_runs() -> None:
    import pyengine.models.decoder as module

    assert module.__file__ is not None
    assert "model_type" not in Path(module.__file__).read_text()
