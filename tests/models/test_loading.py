"""models/loading.py: weights arrive exactly, in bounded memory; damage on the way is an error."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pyengine.errors import WeightError
from pyengine.models import Weights, WeightTypes, load_config, load_weights, open_checkpoint
from pyengine.models.loading import widen
from pyengine.models.weights import SLICE_BYTES
from pyengine.native import Arena, DType, Queue, load_library, ops
from tests.models.safetensors_files import Tensors, edit_tensors, read_tensors
from tests.models.single import logits_of
from tests.tiny import FAMILIES, write_tiny


def with_loaded(
    path: Path, use: Callable[[Queue, Weights], None], types: WeightTypes | None = None
) -> None:
    """Loads into an arena of 64 MiB and calls use(queue, weights)."""
    library = load_library("cpu")
    config, spec = load_config(path)
    with (
        open_checkpoint(path) as checkpoint,
        Arena(library, 64 << 20) as arena,
        Queue(library) as queue,
    ):
        chosen = types or WeightTypes(DType.F32)
        use(queue, load_weights(queue, arena, spec, config, checkpoint, chosen))


def test_a_tied_embedding_is_one_matrix(tmp_path: Path) -> None:
    def same(_: Queue, weights: Weights) -> None:
        assert weights.model.matrices["lm_head"] is weights.model.matrices["embed"]

    with_loaded(write_tiny("qwen2", tmp_path), same)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_matrices_hold_what_the_file_holds(dtype: str, tmp_path: Path) -> None:
    path = write_tiny("bloom", tmp_path, dtype=dtype)
    tensors = {n: widen(a) for n, a in read_tensors(path / "model.safetensors").items()}
    stem = "transformer.h.1.self_attention.query_key_value."

    def exact(queue: Queue, weights: Weights) -> None:
        layer = weights.layers[1]
        found = ops.unpack_matrix(queue, layer.matrices["qkv"])
        fused = tensors[stem + "weight"].reshape(6, 3, 16, 96)
        assert np.array_equal(found, fused.transpose(1, 0, 2, 3).reshape(288, 96))
        bias = tensors[stem + "bias"].reshape(6, 3, 16).transpose(1, 0, 2).reshape(288)
        assert np.array_equal(layer.vectors["qkv.bias"].download(queue), bias)
        table = ops.unpack_matrix(queue, weights.model.matrices["embed"])
        assert np.array_equal(table, tensors["transformer.word_embeddings.weight"])

    with_loaded(path, exact)


def test_loading_in_small_slices_gives_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for family in FAMILIES:
        path = write_tiny(family, tmp_path / family)
        whole = logits_of(path)
        with monkeypatch.context() as patch:
            patch.setattr("pyengine.models.loading.SLICE_BYTES", 1000)
            assert np.array_equal(logits_of(path), whole), family


def test_memory_the_host_cannot_read_is_filled_through_a_staging_area(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU build does, on the CPU build: the same packed rows by way of copies."""
    monkeypatch.setattr("pyengine.models.loading.SLICE_BYTES", 4096)
    library = load_library("cpu")
    for family in ("bloom", "gpt2", "qwen2"):
        path = write_tiny(family, tmp_path / family)
        config, spec = load_config(path)
        found = []
        for readable in (True, False):
            with (
                open_checkpoint(path) as checkpoint,
                Arena(library, 16 << 20) as arena,
                Queue(library) as queue,
            ):
                arena.host_readable = readable
                types = WeightTypes(DType.F16)
                weights = load_weights(queue, arena, spec, config, checkpoint, types)
                blocks = [weights.model, *weights.layers]
                found.append(
                    [ops.unpack_matrix(queue, m) for b in blocks for m in b.matrices.values()]
                )
        assert all(np.array_equal(a, b) for a, b in zip(*found, strict=True)), family


def test_host_memory_stays_at_a_few_slices(tmp_path: Path) -> None:
    rows = 6 * SLICE_BYTES // (4 * 64)  # an embedding of six slices
    path = write_tiny("llama", tmp_path, vocab_size=rows, tie_word_embeddings=True)
    size = (path / "model.safetensors").stat().st_size
    library = load_library("cpu")
    config, spec = load_config(path)
    with (
        open_checkpoint(path) as checkpoint,
        Arena(library, size + (8 << 20)) as arena,
        Queue(library) as queue,
    ):
        tracemalloc.start()
        load_weights(queue, arena, spec, config, checkpoint, WeightTypes(DType.F32))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    # Four slices are read ahead, one is being packed; the arena is not Python's memory.
    assert peak <= 5 * SLICE_BYTES + (1 << 20)


def test_progress_counts_every_byte_once(tmp_path: Path) -> None:
    path = write_tiny("olmo2", tmp_path, dtype="bf16")
    seen: list[tuple[int, int]] = []
    library = load_library("cpu")
    config, spec = load_config(path)
    with (
        open_checkpoint(path) as checkpoint,
        Arena(library, 16 << 20) as arena,
        Queue(library) as queue,
    ):
        load_weights(
            queue, arena, spec, config, checkpoint, WeightTypes(DType.F32),
            progress=lambda done, total: seen.append((done, total)),
        )  # fmt: skip
    stored = sum(a.nbytes for a in read_tensors(path / "model.safetensors").values())
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (stored, stored)
    assert {total for _, total in seen} == {stored}


def test_a_file_cut_while_loading_is_an_error_not_a_signal(tmp_path: Path) -> None:
    path = write_tiny("llama", tmp_path)
    file = path / "model.safetensors"
    size = file.stat().st_size
    library = load_library("cpu")
    config, spec = load_config(path)
    with (
        open_checkpoint(path) as checkpoint,
        Arena(library, 16 << 20) as arena,
        Queue(library) as queue,
    ):
        os.truncate(file, size // 2)
        with pytest.raises(WeightError, match=r"model\.safetensors ended at byte .* cut short"):
            load_weights(queue, arena, spec, config, checkpoint, WeightTypes(DType.F32))


def test_values_beyond_float16_are_refused_by_name(tmp_path: Path) -> None:
    def huge(tensors: Tensors) -> Tensors:
        weight = tensors["model.layers.1.mlp.up_proj.weight"].copy()
        weight[0, :3] = 70000.0
        return {**tensors, "model.layers.1.mlp.up_proj.weight": weight}

    path = edit_tensors(write_tiny("llama", tmp_path), huge)
    with_loaded(path, lambda *_: None, WeightTypes(DType.BF16))
    with pytest.raises(WeightError, match=r"layers\.1\.mlp\.\w+_proj\.weight.*3 values exceed"):
        with_loaded(path, lambda *_: None, WeightTypes(DType.F16))


def test_q8_0_keeps_what_it_is_told_to_keep(tmp_path: Path) -> None:
    def types(_: Queue, weights: Weights) -> None:
        assert weights.layers[0].matrices["qkv"].dtype == DType.Q8_0
        assert weights.model.matrices["embed"].dtype == DType.Q8_0
        assert weights.model.matrices["lm_head"].dtype == DType.F16

    path = write_tiny("llama", tmp_path)
    with_loaded(path, types, WeightTypes(DType.F16, "q8_0", keep={"lm_head": DType.F16}))


def test_accounting_is_as_strict_for_quantised_weights(tmp_path: Path) -> None:
    path = write_tiny("llama", tmp_path)
    edit_tensors(path, lambda t: {n: a for n, a in t.items() if "layers.1.mlp.up" not in n})
    with pytest.raises(WeightError, match=r"layers\.1\.mlp\.up_proj\.weight is missing"):
        with_loaded(path, lambda *_: None, WeightTypes(DType.F32, "q8_0"))
