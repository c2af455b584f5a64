"""models/weights.py: every tensor is used or named, heads found, loading exact and bounded."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pyengine.errors import WeightError
from pyengine.models import (
    Weights,
    WeightTypes,
    load_config,
    load_weights,
    open_checkpoint,
    plan_weights,
)
from pyengine.models.weights import SLICE_BYTES, WeightPlan, expected_weights, widen
from pyengine.native import Arena, DType, Queue, load_library, ops
from tests.models.safetensors_files import Tensors, edit_config, edit_tensors, read_tensors
from tests.models.single import single
from tests.tiny import FAMILIES, VARIANTS, tiny_config, write_tiny

IDS = [5, 17, 250, 3, 3, 99]


def planned(path: Path) -> WeightPlan:
    config, spec = load_config(path)
    with open_checkpoint(path) as checkpoint:
        return plan_weights(spec, config, checkpoint)


def refusal(path: Path) -> str:
    with pytest.raises(WeightError) as caught:
        planned(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def logits(path: Path, types: WeightTypes | None = None) -> np.ndarray:
    with single(path, rows=len(IDS), max_context=32, types=types) as model:
        return model.logits(IDS)


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
    before = logits(path)
    edit_tensors(path, renamed(lambda name: name.removeprefix("transformer.")))
    assert np.array_equal(logits(path), before)


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_masks_empty_tensors_and_scalars_are_left_out(prefix: str, tmp_path: Path) -> None:
    path = write_tiny("gpt2", tmp_path)
    before = logits(path)
    buffers = {
        f"{prefix}h.0.attn.bias": np.ones((1, 1, 4, 4), np.float32),
        f"{prefix}h.0.attn.masked_bias": np.float32(-1e4).reshape(()),
        "z": np.zeros((0, 4), np.float32),
        "s": np.float32(1).reshape(()),
    }
    edit_tensors(path, lambda tensors: {**buffers, **tensors})
    assert set(planned(path).ignored) == set(buffers)
    assert np.array_equal(logits(path), before)


def test_shards_give_the_same_bits_as_one_file(tmp_path: Path) -> None:
    for family in FAMILIES:
        one = write_tiny(family, tmp_path / f"{family}-1")
        many = write_tiny(family, tmp_path / f"{family}-n", shard_bytes=30_000)
        assert (many / "model.safetensors.index.json").exists()
        assert np.array_equal(logits(one), logits(many)), family


def test_an_equal_head_beside_a_tied_embedding_is_stored_once(tmp_path: Path) -> None:
    path = write_tiny("qwen2", tmp_path)
    before = logits(path)
    edit_tensors(path, lambda t: {**t, "lm_head.weight": t["model.embed_tokens.weight"]})
    plan = planned(path)
    assert plan.tied
    assert "lm_head" not in {weight.role for weight in plan.weights}
    assert np.array_equal(logits(path), before)


def test_another_head_beside_a_tied_embedding_is_used(tmp_path: Path) -> None:
    path = write_tiny("qwen2", tmp_path)
    before = logits(path)
    edit_tensors(path, lambda t: {**t, "lm_head.weight": 2 * t["model.embed_tokens.weight"]})
    assert not planned(path).tied
    assert np.array_equal(logits(path), 2 * before)


def test_a_tied_embedding_is_one_matrix(tmp_path: Path) -> None:
    def same(_: Queue, weights: Weights) -> None:
        assert weights.model.matrices["lm_head"] is weights.model.matrices["embed"]

    with_loaded(write_tiny("qwen2", tmp_path), same)


# ---- loading ------------------------------------------------------------------------------------


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
        whole = logits(path)
        with monkeypatch.context() as patch:
            patch.setattr("pyengine.models.weights.SLICE_BYTES", 1000)
            assert np.array_equal(logits(path), whole), family


def test_memory_the_host_cannot_read_is_filled_through_a_staging_area(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU build does, on the CPU build: the same packed rows by way of copies."""
    monkeypatch.setattr("pyengine.models.weights.SLICE_BYTES", 4096)
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
    with_loaded(path, types, WeightTypes(DType.F16, "q8_0", keep=("lm_head",)))


def test_accounting_is_as_strict_for_quantised_weights(tmp_path: Path) -> None:
    path = write_tiny("llama", tmp_path)
    edit_tensors(path, lambda t: {n: a for n, a in t.items() if "layers.1.mlp.up" not in n})
    with pytest.raises(WeightError, match=r"layers\.1\.mlp\.up_proj\.weight is missing"):
        with_loaded(path, lambda *_: None, WeightTypes(DType.F32, "q8_0"))


def test_an_index_without_its_shard_is_refused_before_memory_is_reserved(tmp_path: Path) -> None:
    path = write_tiny("llama", tmp_path, shard_bytes=60_000)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    gone = sorted(set(index["weight_map"].values()))[1]
    (path / gone).unlink()
    before = load_library("cpu").c.ok_allocation_count()
    assert gone in refusal(path)
    assert load_library("cpu").c.ok_allocation_count() == before
