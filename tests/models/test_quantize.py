"""models/quantize.py: copies hold ggml's blocks, load as strictly as any model, appear whole."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from pyengine.errors import RequestError, UnsupportedModelError, WeightError
from pyengine.models import WeightTypes, load_config, load_weights, open_checkpoint, plan_weights
from pyengine.models.checkpoint import Q8_0_DIRECTORY, Q8_0_SHAPES, main_type
from pyengine.models.gguf_writer import write_gguf
from pyengine.models.quantize import quantize
from pyengine.models.weights import choose_types
from pyengine.native import Arena, DType, Queue, load_library, ops
from tests.conftest import CHECKPOINTS
from tests.models.safetensors_files import edit_config, edit_tensors, write_raw
from tests.models.single import logits_of, single
from tests.reference import Q8_0_BLOCK_TYPE, dequantize_q8_0, quantize_q8_0
from tests.tiny import FAMILIES, tiny_config, write_tiny

# Sizes that no block of 32 fits: case 172 of other engines, one value more than a block, one value.
ODD = {"intermediate_size": 172}
Edit = Callable[[dict[str, Any], dict[str, bytes]], None]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny("llama", tmp_path / "model", **ODD)


def copied(model: Path, name: str = "copy", **options: Any) -> Path:
    """The directory form of a q8_0 copy, beside the model."""
    out = model.parent / name
    quantize(model, out, **options)
    return out


def blocks_of(path: Path, name: str) -> np.ndarray:
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.dtype(name) == "Q8_0"
        return checkpoint.read(name)


def values_of(path: Path, name: str) -> np.ndarray:
    with open_checkpoint(path) as checkpoint:
        return checkpoint.read(name)


def edit_copy(path: Path, edit: Edit) -> Path:
    """Rewrites a copy's model.safetensors with edit(header, name -> bytes)."""
    raw = (path / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    parts = {
        name: raw[8 + length + entry["data_offsets"][0] : 8 + length + entry["data_offsets"][1]]
        for name, entry in header.items()
        if name != "__metadata__"
    }
    edit(header, parts)
    offset = 0
    for name, part in parts.items():
        header[name]["data_offsets"] = [offset, offset + len(part)]
        offset += len(part)
    write_raw(path / "model.safetensors", header, b"".join(parts.values()))
    return path


def shapes_in(header: dict[str, Any]) -> dict[str, list[int]]:
    return json.loads(header["__metadata__"][Q8_0_SHAPES])


def with_shapes(header: dict[str, Any], shapes: dict[str, list[int]]) -> None:
    header["__metadata__"][Q8_0_SHAPES] = json.dumps(shapes)


def refusal(path: Path) -> str:
    """What planning says of a copy that cannot be loaded."""
    with pytest.raises(WeightError) as caught:
        config, spec = load_config(path)
        with open_checkpoint(path) as checkpoint:
            plan_weights(spec, config, checkpoint)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- what a copy holds --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_matrices_become_ggmls_blocks_and_the_rest_stays_as_it_is(
    dtype: str, tmp_path: Path
) -> None:
    model = write_tiny("llama", tmp_path / "model", dtype=dtype, **ODD)
    copy = copied(model)
    from pyengine.models.loading import widen

    with open_checkpoint(model) as old, open_checkpoint(copy) as new:
        assert sorted(old.names()) == sorted(new.names())
        for name in old.names():
            assert new.shape(name) == old.shape(name)
            if len(old.shape(name)) == 1:
                assert new.dtype(name) == old.dtype(name)
                assert np.array_equal(new.read(name), old.read(name))
            else:
                expected = quantize_q8_0(widen(old.read(name)))
                assert np.array_equal(new.read(name), expected.view(np.uint8)), name
    config = json.loads((copy / "config.json").read_text())
    assert config.pop("quantization_config") == Q8_0_DIRECTORY
    assert config == json.loads((model / "config.json").read_text())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (copy / name).read_bytes() == (model / name).read_bytes()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_copy_computes_what_quantising_at_load_computes(family: str, tmp_path: Path) -> None:
    model = write_tiny(family, tmp_path / "model")
    types = WeightTypes(DType.F32, "q8_0")
    assert np.array_equal(logits_of(copied(model), types), logits_of(model, types))


def test_a_matrix_stored_in_out_is_turned_so_that_blocks_run_along_the_input(
    tmp_path: Path,
) -> None:
    model = write_tiny("gpt2", tmp_path / "model", n_inner=172)
    copy, name = copied(model), "transformer.h.0.mlp.c_fc.weight"
    stored = values_of(model, name)
    assert stored.shape == (64, 172)
    expected = quantize_q8_0(np.ascontiguousarray(stored.T))
    assert np.array_equal(blocks_of(copy, name), expected.view(np.uint8))
    assert load_config(copy)[1].linear == "out_in"


@pytest.mark.parametrize("width", [172, 33, 1])
def test_rows_that_end_inside_a_block_are_padded_with_zeros(width: int, tmp_path: Path) -> None:
    model = write_tiny("llama", tmp_path / "model", intermediate_size=width)
    blocks = blocks_of(copied(model), "model.layers.0.mlp.down_proj.weight")
    assert blocks.shape == (64, -(-width // 32) * 34)
    tail = blocks.view(Q8_0_BLOCK_TYPE)["quant"][:, -1, width % 32 :]
    assert not tail.any()


def test_zero_rows_outliers_and_huge_values_come_back_without_nan(tmp_path: Path) -> None:
    def extreme(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        weight = tensors["model.layers.0.mlp.down_proj.weight"].copy()
        weight[0] = 0.0  # an all-zero row
        weight[:, 7] = 8.0  # an outlier column
        weight[3, 40] = 127 * 65504.0  # the largest value that q8_0 has
        weight[4, 40] = 1e-38
        return {**tensors, "model.layers.0.mlp.down_proj.weight": weight}

    model = edit_tensors(write_tiny("llama", tmp_path / "model", **ODD), extreme)
    name = "model.layers.0.mlp.down_proj.weight"
    blocks = blocks_of(copied(model), name).view(Q8_0_BLOCK_TYPE)
    values, original = dequantize_q8_0(blocks, 172), values_of(model, name)
    assert np.isfinite(values).all()
    assert values[0, 7] == np.float32(np.float16(8.0 / 127)) * 127  # zeros beside it stay zeros
    assert not np.delete(values[0], 7).any()
    assert values[3, 40] == 127 * 65504.0
    # Blocks without the outlier keep their own scale: half a step of max / 127, f16's rounding on
    # top (2^-11 of the value).
    plain, got = original[10:, 64:160], values[10:, 64:160]
    step = np.abs(plain.reshape(-1, 3, 32)).max(axis=2).repeat(32, axis=1) / 127
    assert (np.abs(got - plain) <= step * (0.5 + 127 * 2**-11)).all()


def test_values_beyond_the_format_are_refused_by_name(model: Path) -> None:
    name = "model.layers.1.self_attn.o_proj.weight"

    def broken(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        weight = tensors[name].copy()
        weight[2, 5] = np.inf
        return {**tensors, name: weight}

    edit_tensors(model, broken)
    with pytest.raises(WeightError, match=rf"{name}.*1 blocks.*--keep attn_out"):
        copied(model)
    assert not (model.parent / "copy").exists()
    copied(model, keep=["attn_out"])


def test_a_vocabulary_of_301_and_its_last_row_are_right(tmp_path: Path) -> None:
    model = write_tiny("qwen2", tmp_path / "model", vocab_size=301)
    name = "model.embed_tokens.weight"
    copy = copied(model)
    expected = quantize_q8_0(values_of(model, name)).view(np.uint8)
    assert np.array_equal(blocks_of(copy, name)[300], expected[300])
    dequantised = edit_tensors(
        write_tiny("qwen2", tmp_path / "dequantised", vocab_size=301),
        lambda tensors: {
            n: dequantize_q8_0(quantize_q8_0(a), a.shape[1]) if a.ndim == 2 else a
            for n, a in tensors.items()
        },
    )
    # With f32 activations q8_0 is those very weights in f32; only the order of a sum differs.
    exact = logits_of(dequantised)
    got = logits_of(copy, WeightTypes(DType.F32, "q8_0"), q8_activations=False)
    assert got.shape == (6, 301)
    assert np.abs(got - exact).max() <= 1e-5 * np.abs(exact).max()


def test_a_tied_matrix_is_stored_once(tmp_path: Path) -> None:
    model = write_tiny("qwen2", tmp_path / "model")
    edit_tensors(model, lambda t: {**t, "lm_head.weight": t["model.embed_tokens.weight"]})
    with open_checkpoint(copied(model)) as checkpoint:
        assert "lm_head.weight" not in checkpoint.names()
        assert "model.embed_tokens.weight" in checkpoint.names()


def test_a_kept_role_stays_as_it_is_stored(tmp_path: Path) -> None:
    model = write_tiny("llama", tmp_path / "model", dtype="bf16")
    copy = copied(model, keep=["lm_head", "qkv"])
    with open_checkpoint(copy) as checkpoint:
        config, spec = load_config(copy)
        plan = plan_weights(spec, config, checkpoint)
        assert checkpoint.dtype("lm_head.weight") == "BF16"
        assert checkpoint.dtype("model.layers.1.self_attn.k_proj.weight") == "BF16"
        assert checkpoint.dtype("model.embed_tokens.weight") == "Q8_0"
        assert choose_types(plan, checkpoint, DType.BF16) == WeightTypes(
            DType.BF16, "q8_0", {"qkv": DType.BF16, "lm_head": DType.BF16}
        )


def test_the_heads_name_keeps_a_tied_embedding(tmp_path: Path) -> None:
    copy = copied(write_tiny("qwen2", tmp_path / "model"), keep=["lm_head"])
    with open_checkpoint(copy) as checkpoint:
        assert checkpoint.dtype("model.embed_tokens.weight") == "F32"


def test_a_copy_of_a_copy_is_the_same(model: Path) -> None:
    copy = copied(model)
    again = copied(copy, "again")
    for name in ("model.safetensors", "config.json"):
        assert (again / name).read_bytes() == (copy / name).read_bytes()


def test_a_large_matrix_passes_in_slices_with_the_same_bytes(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = (copied(model) / "model.safetensors").read_bytes()
    monkeypatch.setattr("pyengine.models.quantized_tensors.SLICE_BYTES", 1000)
    assert (copied(model, "sliced") / "model.safetensors").read_bytes() == whole


# ---- loading it: the same strict accounting -----------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom"])
def test_every_single_missing_tensor_of_a_copy_is_named(family: str, tmp_path: Path) -> None:
    layers = "n_layer" if "n_layer" in FAMILIES[family] else "num_hidden_layers"
    copy = copied(write_tiny(family, tmp_path / "model", **{layers: 1}))
    with open_checkpoint(copy) as checkpoint:
        names = checkpoint.names()
    whole = (copy / "model.safetensors").read_bytes()
    for gone in names:

        def drop(header: dict[str, Any], parts: dict[str, bytes], gone: str = gone) -> None:
            del header[gone], parts[gone]

        assert gone in refusal(edit_copy(copy, drop))
        (copy / "model.safetensors").write_bytes(whole)


def test_an_unknown_tensor_of_a_copy_is_refused(model: Path) -> None:
    def add(header: dict[str, Any], parts: dict[str, bytes]) -> None:
        header["model.layers.0.extra.weight"] = {"dtype": "U8", "shape": [2, 34]}
        parts["model.layers.0.extra.weight"] = bytes(68)
        with_shapes(header, {**shapes_in(header), "model.layers.0.extra.weight": [2, 32]})

    message = refusal(edit_copy(copied(model), add))
    assert "model.layers.0.extra.weight is not known to llama" in message


def test_every_wrong_shape_of_a_copy_is_named_with_both_shapes(model: Path) -> None:
    copy = copied(model)
    whole = (copy / "model.safetensors").read_bytes()
    with open_checkpoint(copy) as checkpoint:
        shapes = {name: list(checkpoint.shape(name)) for name in checkpoint.names()}
    for name, shape in shapes.items():

        def add_row(header: dict[str, Any], parts: dict[str, bytes], name: str = name) -> None:
            rows = header[name]["shape"][0]
            parts[name] += parts[name][: len(parts[name]) // rows]
            header[name]["shape"][0] += 1
            if name in (table := shapes_in(header)):
                table[name][0] += 1
                with_shapes(header, table)

        message = refusal(edit_copy(copy, add_row))
        wrong = [shape[0] + 1, *shape[1:]]
        assert f"{name} has shape {wrong}" in message and f"makes it {shape}" in message
        (copy / "model.safetensors").write_bytes(whole)


@pytest.mark.parametrize(
    ("shape", "complaint"),
    [
        ([64, 64], "which are not q8_0 blocks of shape [64, 64]"),
        ([63, 172], "which are not q8_0 blocks of shape [63, 172]"),
        ([64, 0], "which are not q8_0 blocks"),
        ([64], "is not a table of shapes"),
        ("64x172", "is not a table of shapes"),
    ],
)
def test_recorded_shapes_must_fit_the_blocks(model: Path, shape: Any, complaint: str) -> None:
    def record(header: dict[str, Any], parts: dict[str, bytes]) -> None:
        table = {**shapes_in(header), "model.layers.0.mlp.down_proj.weight": shape}
        with_shapes(header, table)

    assert complaint in refusal(edit_copy(copied(model), record))


@pytest.mark.parametrize("text", [None, "", "{", "[1]"])
def test_a_damaged_table_of_shapes_is_refused(model: Path, text: str | None) -> None:
    def damage(header: dict[str, Any], parts: dict[str, bytes]) -> None:
        del header["__metadata__"][Q8_0_SHAPES]
        if text is not None:
            header["__metadata__"][Q8_0_SHAPES] = text

    assert "is not a table of shapes" in refusal(edit_copy(copied(model), damage))


def test_blocks_without_the_mark_in_config_json_are_refused(model: Path) -> None:
    copy = edit_config(copied(model), quantization_config=None)
    assert "has shape [300, 68], config.json makes it [300, 64]" in refusal(copy)


@pytest.mark.parametrize(
    "value",
    [{"quant_method": "q8_0"}, {"quant_method": "gptq", "bits": 8}, {**Q8_0_DIRECTORY, "x": 1}],
)
def test_other_kinds_of_quantisation_stay_refused(model: Path, value: dict[str, Any]) -> None:
    edit_config(model, quantization_config=value)
    with pytest.raises(UnsupportedModelError, match="quantization_config"):
        load_config(model)


@pytest.mark.parametrize("change", [-100, 4])
def test_a_copy_cut_short_or_grown_is_refused(model: Path, change: int) -> None:
    file = copied(model) / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:change] if change < 0 else data + bytes(change))
    assert str(file) in refusal(file.parent)


def test_a_copy_cut_while_loading_is_an_error_not_a_signal(model: Path) -> None:
    copy = copied(model)
    library = load_library("cpu")
    config, spec = load_config(copy)
    with (
        open_checkpoint(copy) as checkpoint,
        Arena(library, 16 << 20) as arena,
        Queue(library) as queue,
    ):
        os.truncate(copy / "model.safetensors", 50_000)
        with pytest.raises(WeightError, match="cut short"):
            load_weights(queue, arena, spec, config, checkpoint, WeightTypes(DType.F16, "q8_0"))


# ---- what is chosen at load ---------------------------------------------------------------------


def chosen(path: Path, weights: str | None = None, keep: tuple[str, ...] = ()) -> WeightTypes:
    config, spec = load_config(path)
    with open_checkpoint(path) as checkpoint:
        plan = plan_weights(spec, config, checkpoint)
        return choose_types(plan, checkpoint, DType.F16, weights, keep)


def test_a_copy_stays_q8_0_unless_floats_are_asked_for(model: Path) -> None:
    copy = copied(model)
    assert chosen(copy).weights == "q8_0"
    assert chosen(copy, "float").weights is None
    assert chosen(model).weights is None
    assert chosen(model, "q8_0").weights == "q8_0"


def test_roles_to_keep_are_checked(model: Path) -> None:
    assert chosen(model, "q8_0", ("down",)).keep == {"down": DType.F16}
    assert chosen(model, "q8_0", ("down=f32", "qkv")).keep == {"down": DType.F32, "qkv": DType.F16}
    with pytest.raises(RequestError, match="keep='down=q4': expected a role, or down="):
        chosen(model, "q8_0", ("down=q4",))
    with pytest.raises(RequestError, match="keep='down=f16': a copy keeps a role as it is stored"):
        copied(model, keep=["down=f16"])
    with pytest.raises(RequestError, match="keep='head': expected some of embed, qkv, attn_out"):
        chosen(model, "q8_0", ("head",))
    with pytest.raises(RequestError, match="weights='int4'"):
        chosen(model, "int4")


def test_norms_biases_and_position_tables_are_never_quantised(tmp_path: Path) -> None:
    copy = copied(write_tiny("gpt2", tmp_path / "model"))
    with open_checkpoint(copy) as checkpoint:
        plain = {name for name in checkpoint.names() if checkpoint.dtype(name) != "Q8_0"}
    assert all(name.endswith((".bias", "ln_1.weight", "ln_2.weight", "ln_f.weight", "wpe.weight"))
               for name in plain)  # fmt: skip
    assert "transformer.wpe.weight" in plain


# ---- GGUF ---------------------------------------------------------------------------------------


def as_gguf(model: Path, **options: Any) -> Path:
    out = model.parent / "copy.gguf"
    quantize(model, out, **options)
    return out


SAID = [*FAMILIES, "stablelm-sequential-d80", "stablelm-qk-norm-bias", "bloom-1-head",
        "bloom-12-heads", "olmo2-gqa", "olmo2-mqa", "phi3-partial", "phi3-tied",
        "llama-attention-bias", "llama-mlp-bias"]  # fmt: skip


@pytest.mark.parametrize("variant", SAID)
def test_a_gguf_copy_holds_the_same_blocks_and_computes_the_same(
    variant: str, tmp_path: Path
) -> None:
    model = write_tiny(variant, tmp_path / "model", intermediate_size=96)
    copy, directory = as_gguf(model), copied(model)
    with open_checkpoint(directory) as old, open_checkpoint(copy) as new:
        assert sorted(old.names()) == sorted(new.names())
        for name in old.names():
            assert np.array_equal(new.read(name), old.read(name)), name
    types = WeightTypes(DType.F32, "q8_0")
    expected = logits_of(model, types)
    assert np.array_equal(logits_of(copy, types), expected)
    again = tmp_path / "again.gguf"
    quantize(copy, again)
    assert np.array_equal(logits_of(again, types), expected)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_trained_checkpoint_says_the_same_as_gguf_past_its_window(
    name: str, tmp_path: Path
) -> None:
    copy = tmp_path / "copy.gguf"
    kept = quantize(CHECKPOINTS[name], copy).kept
    gated = any("down_proj" in tensor for tensor in kept)  # of 344, which no block of 32 fits
    assert len(kept) == (3 if gated else name == "gpt2")  # whose position table is never q8_0
    types = WeightTypes(DType.F32, "q8_0", {"down": DType.F32} if gated else {})
    ids = np.random.default_rng(0).integers(3, 2048, 100).tolist()
    found = []
    for path in (CHECKPOINTS[name], copy):
        with single(path, rows=len(ids), max_context=112, types=types) as loaded:
            found.append(loaded.logits(ids))
    assert np.array_equal(*found)


def test_a_checkpoint_saved_from_the_base_class_gets_the_same_names(tmp_path: Path) -> None:
    model = write_tiny("gpt2", tmp_path / "model")
    edit_tensors(model, lambda tensors: {
        name.removeprefix("transformer."): array for name, array in tensors.items()
    })  # fmt: skip
    with open_checkpoint(as_gguf(model)) as checkpoint:
        assert "transformer.h.1.mlp.c_fc.weight" in checkpoint.names()


def test_positions_and_stacked_norms_are_f32_in_gguf(tmp_path: Path) -> None:
    kinds: dict[str, tuple[list[int], str]] = {}
    for variant in ("gpt2", "stablelm-qk-norm-bias"):
        model = write_tiny(variant, tmp_path / variant / "model", dtype="f16")
        for tensor in gguf.GGUFReader(as_gguf(model)).tensors:
            kinds[tensor.name] = (tensor.shape.tolist(), tensor.tensor_type.name)
    assert kinds["position_embd.weight"] == ([64, 256], "F32")
    assert kinds["blk.1.attn_q_norm.weight"] == ([16, 4], "F32")
    assert kinds["blk.1.attn_k_norm.weight"] == ([16, 2], "F32")


def test_a_gguf_copy_is_what_the_gguf_package_reads(tmp_path: Path) -> None:
    model = write_tiny("qwen2", tmp_path / "model", intermediate_size=96)
    reader = gguf.GGUFReader(as_gguf(model))
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.architecture"] == "qwen2"
    assert fields["general.file_type"] == gguf.LlamaFileType.MOSTLY_Q8_0
    assert fields["general.quantization_version"] == 2
    assert fields["qwen2.attention.head_count_kv"] == 2
    kinds = {t.name: t.tensor_type for t in reader.tensors}
    assert kinds["blk.1.ffn_down.weight"] == gguf.GGMLQuantizationType.Q8_0
    assert kinds["blk.1.attn_q.bias"] == gguf.GGMLQuantizationType.F32
    expected = gguf.quants.quantize(
        values_of(model, "model.layers.1.mlp.down_proj.weight"), gguf.GGMLQuantizationType.Q8_0
    )
    [down] = [t for t in reader.tensors if t.name == "blk.1.ffn_down.weight"]
    assert np.array_equal(down.data, expected)


def test_blocks_of_a_gguf_file_reach_the_arena_bit_for_bit(tmp_path: Path) -> None:
    copy = as_gguf(write_tiny("llama", tmp_path / "model", intermediate_size=96))
    library = load_library("cpu")
    config, spec = load_config(copy)
    with (
        open_checkpoint(copy) as checkpoint,
        Arena(library, 16 << 20) as arena,
        Queue(library) as queue,
    ):
        plan = plan_weights(spec, config, checkpoint)
        types = choose_types(plan, checkpoint, DType.F16)
        weights = load_weights(queue, arena, spec, config, checkpoint, types, plan=plan)
        layer = weights.layers[1].matrices
        down = ops.unpack_q8_0(queue, layer["down"])
        assert np.array_equal(down, checkpoint.read("model.layers.1.mlp.down_proj.weight"))
        qkv = ops.unpack_q8_0(queue, layer["qkv"])
        parts = [f"model.layers.1.self_attn.{p}_proj.weight" for p in "qkv"]
        assert np.array_equal(qkv, np.concatenate([checkpoint.read(name) for name in parts]))


def test_rows_that_are_not_whole_blocks_stay_as_stored_in_gguf(tmp_path: Path) -> None:
    model = write_tiny("llama", tmp_path / "model", dtype="bf16", **ODD)
    copy = as_gguf(model)
    name = "model.layers.0.mlp.down_proj.weight"
    with open_checkpoint(copy) as checkpoint:
        assert checkpoint.stored_as(name) == "BF16"
        assert main_type(checkpoint) == "Q8_0"
    assert np.array_equal(values_of(copy, name), values_of(model, name))
    assert chosen(copy) == WeightTypes(DType.F16, "q8_0", {"down": DType.F16})


@pytest.mark.parametrize(
    "variant", ["llama-llama3", "qwen2-yarn", "llama-head-dim", "phi3-longrope", "longrope-factor"]
)
def test_rotary_scaling_and_head_sizes_are_said_in_gguf(variant: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {}
    if variant == "llama-llama3":  # GGUF holds the factors alone; all published models have 8192
        scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
        scaling |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
        changes["rope_scaling"] = scaling
    if variant == "longrope-factor":
        scaling = tiny_config("phi3-longrope")["rope_scaling"]
        variant, changes["rope_scaling"] = "phi3-longrope", {**scaling, "attention_factor": 1.5}
    model = write_tiny(variant, tmp_path / "model", **changes)
    types = WeightTypes(DType.F32, "q8_0")
    got, expected = logits_of(as_gguf(model), types), logits_of(model, types)
    # Frequencies that went through f32 differ by 2^-24.
    assert np.abs(got - expected).max() <= 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("variant", "changes", "named"),
    [
        ("qwen2-windows", {}, "layer_windows=.*cannot be said in GGUF"),
        ("bloom-post-layernorm", {}, "residual_from_norm=True cannot be said in GGUF"),
        ("gpt2-inverse-layer", {}, "attention_scales=.*cannot be said in GGUF"),
        ("gpt2", {"activation_function": "gelu"}, "activation=.*cannot be said in GGUF"),
        ("olmo2-attention-bias", {}, "qkv_bias=True cannot be said in GGUF"),
        ("olmo2", {"tie_word_embeddings": True}, "olmo2 in GGUF has no form for a tied head"),
        ("stablelm", {"tie_word_embeddings": True}, "no form for a tied head"),
        ("phi3", {"head_dim": 24}, "no form for 4 heads of 24 in 64"),
        ("qwen2", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0}}, "no form for rope_type 'llama3'"),
    ],
)  # fmt: skip
def test_what_gguf_cannot_say_is_refused_by_name(
    variant: str, changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    model = write_tiny(variant, tmp_path / "model", **changes)
    with pytest.raises(UnsupportedModelError, match=named):
        as_gguf(model)
    assert not list(tmp_path.glob("*.gguf")) and not list(tmp_path.glob(".*"))


def test_a_family_without_a_form_is_refused_by_name(model: Path, tmp_path: Path) -> None:
    config, spec = load_config(model)
    with (
        open_checkpoint(model) as checkpoint,
        pytest.raises(
            UnsupportedModelError, match="'llama' cannot be written as GGUF; bloom, gpt2, .* can"
        ),
    ):
        write_gguf(tmp_path / "m.gguf", checkpoint, config, replace(spec, gguf=None), [], {})


def test_a_gguf_file_is_copied_with_its_vocabulary(tmp_path: Path) -> None:
    model = write_tiny("llama", tmp_path / "model", intermediate_size=96)
    keys = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "b"], "x.flag": True}
    first = as_gguf(model, vocabulary=keys, keep=["lm_head"])
    second = tmp_path / "second.gguf"
    quantize(first, second)
    fields = {n: f.contents() for n, f in gguf.GGUFReader(second).fields.items()}
    assert {key: fields[key] for key in keys} == keys
    with open_checkpoint(second) as checkpoint:
        assert checkpoint.dtype("lm_head.weight") == "Q8_0"
    with pytest.raises(RequestError, match=r"name it \*.gguf"):
        quantize(first, tmp_path / "directory")


# ---- whole or not at all ------------------------------------------------------------------------


def test_an_existing_result_is_replaced_only_when_asked(model: Path) -> None:
    copy = copied(model)
    before = (copy / "model.safetensors").read_bytes()
    with pytest.raises(RequestError, match="exists; force"):
        copied(model)
    copied(model, force=True, keep=["embed"])
    assert (copy / "model.safetensors").read_bytes() != before
    assert sorted(path.name for path in model.parent.iterdir()) == ["copy", "model"]


def test_nothing_but_a_quantised_model_is_ever_replaced(model: Path) -> None:
    precious = model.parent / "copy"
    precious.mkdir()
    (precious / "diary").write_text("dear")
    with pytest.raises(RequestError, match="is not a quantised copy of ours"):
        copied(model, force=True)
    with pytest.raises(RequestError, match="is the model itself"):
        quantize(model, model, force=True)
    assert (precious / "diary").read_text() == "dear"
    file = model.parent / "copy.gguf"
    quantize(model, file, vocabulary={"general.quantized_by": "someone"})
    quantize(model, file, force=True)  # ours, whatever it was made from
    file.write_bytes(b"GGUF, my notes")
    with pytest.raises(RequestError, match="is not a quantised copy of ours"):
        quantize(model, file, force=True)
    assert file.read_bytes() == b"GGUF, my notes"


def test_a_quantised_directory_becomes_a_gguf_file_whatever_its_rows(tmp_path: Path) -> None:
    model = write_tiny("llama", tmp_path / "model", intermediate_size=172)
    quantize(model, tmp_path / "copy")
    report = quantize(tmp_path / "copy", tmp_path / "copy.gguf")
    assert set(report.kept.values()) == {"F32"}  # 172 are no whole blocks: the same numbers
    types = WeightTypes(DType.F32, "q8_0", {"down": DType.F32})
    got = [logits_of(tmp_path / name, types) for name in ("copy", "copy.gguf")]
    assert np.array_equal(got[0], got[1])


_KILLED = """
import os, signal, sys
from pathlib import Path
from pyengine.models.quantize import quantize
def stop(done, total):
    if done > total // 2:
        os.kill(os.getpid(), signal.SIGKILL)
quantize(Path(sys.argv[1]), Path(sys.argv[2]), progress=stop)
"""


@pytest.mark.parametrize("name", ["copy", "copy.gguf"])
def test_a_killed_run_leaves_nothing_and_the_next_succeeds(model: Path, name: str) -> None:
    out = model.parent / name
    done = subprocess.run([sys.executable, "-c", _KILLED, str(model), str(out)], timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert not out.exists()
    assert (model.parent / f".{name}.partial").exists()
    quantize(model, out)
    assert sorted(path.name for path in model.parent.iterdir()) == sorted([name, "model"])
    assert logits_of(out, WeightTypes(DType.F32, "q8_0")).shape == (6, 300)


def test_a_failed_run_leaves_nothing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pyengine.models.quantize.shutil.copyfile", full)
    with pytest.raises(RequestError, match="copy cannot be written: No space left on device"):
        copied(model)
    assert [path.name for path in model.parent.iterdir()] == ["model"]


def test_two_runs_do_not_write_the_same_result(model: Path) -> None:
    def second(done: int, total: int) -> None:
        with pytest.raises(RequestError, match="another run is writing"):
            copied(model)

    copied(model, progress=second)


def test_progress_counts_every_byte(model: Path) -> None:
    seen: list[tuple[int, int]] = []
    quantize(model, model.parent / "copy", progress=lambda *counts: seen.append(counts))
    assert seen[-1][0] == seen[-1][1] == seen[0][1]
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
