"""models/gguf.py: header, hyperparameters and tensors of GGUF files."""

from __future__ import annotations

import os
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pyengine.errors import ConfigError, EngineError, UnsupportedModelError, WeightError
from pyengine.models.gguf import GGUFCheckpoint
from pyengine.models.gguf_header import read_header
from tests.gguf_files import HEAD_DIM, HIDDEN, Weights, gguf_name, random_weights, write_gguf

Kind = gguf.GGMLQuantizationType
QUANTISED = (Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0)
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
UP_PROJ = "model.layers.0.mlp.up_proj.weight"


def config_of(path: Path) -> dict[str, object]:
    with GGUFCheckpoint(path) as checkpoint:
        return checkpoint.config


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "plain.gguf")


def test_header_agrees_with_the_packages_reader_field_by_field(tmp_path: Path) -> None:
    metadata = {
        "tokenizer.ggml.tokens": ["a", "Ġb", "ü"],
        "tokenizer.ggml.token_type": [1, 3, 4],
        "tokenizer.ggml.scores": [0.5, -1.0, 2.0],
        "tokenizer.ggml.add_bos_token": True,
    }
    path = write_gguf(tmp_path / "m.gguf", kind=Kind.Q4_1, metadata=metadata)
    ours, theirs = read_header(path), gguf.GGUFReader(path)
    for name, field in theirs.fields.items():
        if not name.startswith("GGUF."):
            assert ours.metadata[name] == field.contents(), name
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        info = ours.tensors[tensor.name]
        assert info.shape == tuple(reversed(tensor.shape.tolist()))
        assert (info.offset, info.kind) == (tensor.data_offset, tensor.tensor_type)
        assert info.rows * info.row_bytes == tensor.n_bytes


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_weights_come_back_under_their_hugging_face_names_and_row_order(
    tmp_path: Path, architecture: str
) -> None:
    weights = random_weights(biases=True)
    path = write_gguf(tmp_path / "m.gguf", weights, architecture=architecture)
    checkpoint = GGUFCheckpoint(path)
    assert sorted(checkpoint.names()) == sorted(weights)
    for name, weight in weights.items():
        assert checkpoint.shape(name) == weight.shape
        np.testing.assert_array_equal(checkpoint.read(name), weight, err_msg=name)
    checkpoint.close()


def test_any_run_of_rows_is_read_alone(tmp_path: Path) -> None:
    weights = random_weights(biases=True)
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", weights))
    for name in (Q_PROJ, UP_PROJ, Q_PROJ.replace("weight", "bias")):
        rows = weights[name].shape[0]
        for start, stop in ((0, 1), (3, 3 + HEAD_DIM), (HEAD_DIM // 2, rows), (rows, rows)):
            part = checkpoint.read(name, slice(start, stop))
            np.testing.assert_array_equal(part, weights[name][start:stop])
    checkpoint.close()


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
def test_quantised_matrices_are_what_the_package_dequantizes(tmp_path: Path, kind: Kind) -> None:
    weights = random_weights()
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", weights, kind=kind))
    for name in (Q_PROJ, UP_PROJ):
        expected = gguf.quants.dequantize(gguf.quants.quantize(weights[name], kind), kind)
        got = checkpoint.read(name, slice(1, 21))
        if kind == Kind.Q8_0:
            assert checkpoint.dtype(name) == "Q8_0"
            assert (got.dtype, got.shape) == (np.uint8, (20, 34 * weights[name].shape[1] // 32))
            got = gguf.quants.dequantize(got, kind)
        else:
            assert (checkpoint.dtype(name), got.dtype) == ("F32", np.float32)
        np.testing.assert_array_equal(got, expected[1:21])
    checkpoint.close()


@pytest.mark.parametrize("kind", [Kind.Q6_K, Kind.Q4_K, Kind.Q2_K, Kind.IQ4_XS, Kind.TQ1_0])
def test_types_of_256_weights_a_block_are_read_too(tmp_path: Path, kind: Kind) -> None:
    raw = np.random.default_rng(0).integers(0, 60, (4, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8)
    path = write_gguf(tmp_path / "m.gguf", extra={"blk.9.ffn_up.weight": raw}, extra_kind=kind)
    checkpoint = GGUFCheckpoint(path)
    name = "model.layers.9.mlp.up_proj.weight"
    assert checkpoint.shape(name) == (4, 256)
    expected = gguf.quants.dequantize(raw, kind)
    np.testing.assert_array_equal(checkpoint.read(name, slice(1, 3)), expected[1:3])
    checkpoint.close()


def test_bf16_and_f16_are_handed_out_as_stored(tmp_path: Path) -> None:
    weights = random_weights()
    for kind, dtype in ((Kind.BF16, "BF16"), (Kind.F16, "F16")):
        checkpoint = GGUFCheckpoint(write_gguf(tmp_path / kind.name, weights, kind=kind))
        got = checkpoint.read(UP_PROJ)
        expected = gguf.quants.quantize(weights[UP_PROJ], kind).view(got.dtype)
        assert (checkpoint.dtype(UP_PROJ), got.dtype.itemsize) == (dtype, 2)
        np.testing.assert_array_equal(got, expected)
        checkpoint.close()


def test_the_config_is_spelled_as_hugging_face_does(plain: Path) -> None:
    config = config_of(plain)
    assert config["model_type"] == "llama"
    assert (config["num_hidden_layers"], config["num_key_value_heads"]) == (2, 2)
    assert (config["head_dim"], config["vocab_size"]) == (HEAD_DIM, 300)
    assert config["rms_norm_eps"] == float(np.float32(1e-5))
    assert config["tie_word_embeddings"] is True and config["attention_bias"] is False


def test_an_output_matrix_unties_the_head(tmp_path: Path) -> None:
    weights = random_weights() | {"lm_head.weight": np.ones((300, 64), np.float32)}
    with GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", weights)) as checkpoint:
        assert checkpoint.config["tie_word_embeddings"] is False
        assert "lm_head.weight" in checkpoint.names()


def test_every_end_of_answer_token_is_kept(tmp_path: Path) -> None:
    metadata = {"tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.eot_token_id": 5}
    path = write_gguf(tmp_path / "m.gguf", metadata=metadata)
    assert config_of(path)["eos_token_id"] == [2, 5]


def test_yarn_and_linear_rope_scaling_are_translated(tmp_path: Path) -> None:
    yarn = {
        "qwen2.rope.scaling.type": "yarn",
        "qwen2.rope.scaling.factor": 4.0,
        "qwen2.rope.scaling.original_context_length": 64,
    }
    path = write_gguf(tmp_path / "yarn", architecture="qwen2", metadata=yarn)
    assert config_of(path)["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    path = write_gguf(tmp_path / "linear", metadata={"llama.rope.scale_linear": 2.0})
    assert config_of(path)["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}


def test_llama3_scaling_is_recovered_from_the_stored_factors(tmp_path: Path) -> None:
    wavelength = 2 * np.pi * 500000.0 ** (np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    smooth = (8192 / wavelength - 1) / 3
    factors = np.where(smooth > 1, 1, np.where(smooth < 0, 32, 1 / ((1 - smooth) / 32 + smooth)))
    base = {"llama.rope.freq_base": 500000.0}
    extra = {"rope_freqs.weight": factors.astype(np.float32)}
    path = write_gguf(tmp_path / "a", metadata=base, extra=extra)
    assert config_of(path)["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    with GGUFCheckpoint(path) as checkpoint:
        assert "rope_freqs.weight" not in checkpoint.names()
    extra["rope_freqs.weight"][3] *= 1.5
    with pytest.raises(UnsupportedModelError, match="rope_freqs"):
        GGUFCheckpoint(write_gguf(tmp_path / "b", metadata=base, extra=extra))


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"llama.expert_count": 8}, "llama.expert_count"),
        ({"llama.logit_scale": 0.5}, "llama.logit_scale"),
        ({"llama.attention.sliding_window": 4096}, "llama.attention.sliding_window"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count"),
        ({"llama.feed_forward_length": [96, 64]}, "feed_forward_length"),
    ],
)
def test_what_changes_the_maths_and_is_not_computed_is_refused_by_name(
    tmp_path: Path, metadata: dict[str, object], named: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", metadata=metadata))


def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="'gemma' is not supported; bloom, .*stablelm"):
        GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", architecture="gemma"))


# ---- other architectures, as llama.cpp's converter writes them -----------------------------------


def converted(path: Path, architecture: str, tensors: Weights, **facts: object) -> Path:
    """A file of that architecture: LayerNorm, no rotary base, `facts` of more than an identifier.

    tensors: beside the embedding, by GGUF name.
    """
    keys = {f"{architecture}.{key.replace('__', '.')}": value for key, value in facts.items()}
    keys[f"{architecture}.attention.layer_norm_epsilon"] = 1e-5
    left_out = ("attention.layer_norm_rms_epsilon", "attention.head_count_kv", "rope.freq_base")
    return write_gguf(
        path,
        {"model.embed_tokens.weight": np.zeros((300, HIDDEN), np.float32)},
        architecture=architecture,
        metadata=keys,
        without=tuple(f"{architecture}.{key}" for key in left_out),
        extra=tensors,
    )


def test_blooms_fused_rows_come_back_head_by_head(tmp_path: Path) -> None:
    part, head, dim = np.meshgrid(range(3), range(4), range(HEAD_DIM), indexing="ij")
    rows = (100 * part + 10 * head + dim / 100).reshape(-1).astype(np.float32)
    stored = {"blk.0.attn_qkv.weight": np.repeat(rows[:, None], HIDDEN, axis=1)}
    stored["blk.0.attn_qkv.bias"] = rows
    path = converted(tmp_path / "m.gguf", "bloom", stored, feed_forward_length=4 * HIDDEN)
    with GGUFCheckpoint(path) as checkpoint:
        name = "transformer.h.0.self_attention.query_key_value"
        bias = checkpoint.read(f"{name}.bias")
        weight = checkpoint.read(f"{name}.weight")
        for start, stop in ((0, 48), (17, 50), (191, 192)):
            got = checkpoint.read(f"{name}.weight", slice(start, stop))
            np.testing.assert_array_equal(got, weight[start:stop])
    np.testing.assert_array_equal(weight[:, 0], bias)
    heads = bias.reshape(4, 3, HEAD_DIM)
    assert heads[2, 1, 5] == np.float32(100 + 20 + 0.05)  # k of head 2


def test_rows_that_lie_far_apart_are_read_by_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = np.random.default_rng(0).standard_normal((3 * HIDDEN, HIDDEN), np.float32)
    path = converted(
        tmp_path / "m.gguf", "bloom", {"blk.0.attn_qkv.weight": rows}, feed_forward_length=256
    )
    name = "transformer.h.0.self_attention.query_key_value.weight"
    with GGUFCheckpoint(path) as checkpoint:
        expected = checkpoint.read(name)
        monkeypatch.setattr("pyengine.models.gguf._FAR_ROWS", 1)
        for start, stop in ((0, 192), (0, 48), (20, 100)):
            got = checkpoint.read(name, slice(start, stop))
            np.testing.assert_array_equal(got, expected[start:stop])


def test_stacked_norms_come_back_one_a_head_and_decide_the_kind_of_stablelm(
    tmp_path: Path,
) -> None:
    norms = np.arange(4 * HEAD_DIM, dtype=np.float32).reshape(4, HEAD_DIM)
    facts = {"rope__dimension_count": 4, "use_parallel_residual": True}
    path = converted(tmp_path / "12b", "stablelm", {"blk.0.attn_q_norm.weight": norms}, **facts)
    with GGUFCheckpoint(path) as checkpoint:
        name = "model.layers.0.self_attn.q_layernorm.norms.2.weight"
        assert checkpoint.shape(name) == (HEAD_DIM,)
        np.testing.assert_array_equal(checkpoint.read(name), norms[2])
        config = checkpoint.config
    assert config["qk_layernorm"] and config["use_parallel_residual"]
    assert not config["use_qkv_bias"] and config["layer_norm_eps"] == float(np.float32(1e-5))
    assert int(config["partial_rotary_factor"] * HEAD_DIM) == 4
    assert config["rope_theta"] == 10000.0
    # Converters say a parallel residual of the sequential kind too; its second norm tells.
    sequential = {"blk.0.ffn_norm.weight": norms[0], "blk.0.attn_q.bias": norms.reshape(-1)}
    config = config_of(converted(tmp_path / "1b", "stablelm", sequential, **facts))
    assert not config["qk_layernorm"] and not config["use_parallel_residual"]
    assert config["use_qkv_bias"]


@pytest.mark.parametrize("rotary", range(2, 162, 2))
def test_every_partial_rotation_comes_back_whole(tmp_path: Path, rotary: int) -> None:
    facts = {"attention__key_length": 160, "rope__dimension_count": rotary}
    config = config_of(converted(tmp_path / "m", "stablelm", {}, **facts))
    assert int(160 * config["partial_rotary_factor"]) == rotary
    assert 0 < config["partial_rotary_factor"] <= 1


def phi3(path: Path, tensors: Weights | None = None, **facts: object) -> Path:
    keys = {f"phi3.{key.replace('__', '.')}": value for key, value in facts.items()}
    return write_gguf(path, architecture="phi3", metadata=keys, extra=tensors)


def test_phi3s_window_is_read_and_zero_means_none(tmp_path: Path) -> None:
    window = {"attention__sliding_window": 63}
    assert config_of(phi3(tmp_path / "a", **window))["sliding_window"] == 63
    assert config_of(phi3(tmp_path / "b", attention__sliding_window=0))["sliding_window"] is None
    assert config_of(phi3(tmp_path / "c"))["sliding_window"] is None


def test_longrope_is_read_from_its_two_tensors(tmp_path: Path) -> None:
    divisors = {
        "rope_factors_long.weight": np.linspace(1, 8, HEAD_DIM // 2, dtype=np.float32),
        "rope_factors_short.weight": np.ones(HEAD_DIM // 2, np.float32),
    }
    facts = {"rope__scaling__original_context_length": 64}
    usual = float(np.sqrt(1 + np.log(256 / 64) / np.log(64)))
    facts["rope__scaling__attn_factor"] = usual
    path = phi3(tmp_path / "a", divisors, **facts)
    config = config_of(path)
    assert config["original_max_position_embeddings"] == 64
    assert config["rope_scaling"] == {
        "rope_type": "longrope",
        "short_factor": [1.0] * 8,
        "long_factor": divisors["rope_factors_long.weight"].tolist(),
    }
    with GGUFCheckpoint(path) as checkpoint:
        assert not any("rope" in name for name in checkpoint.names())
    config = config_of(phi3(tmp_path / "b", divisors, **{**facts, "rope__scaling__attn_factor": 2}))
    assert config["rope_scaling"]["attention_factor"] == 2.0
    divisors["rope_factors_long.weight"][3] = np.nan
    with pytest.raises(WeightError, match=r"rope_factors_long\.weight holds .* not finite"):
        config_of(phi3(tmp_path / "nan", divisors))
    del divisors["rope_factors_short.weight"]
    with pytest.raises(WeightError, match=r"rope_factors_short\.weight is missing"):
        config_of(phi3(tmp_path / "c", divisors))


@pytest.mark.parametrize(
    ("architecture", "facts", "named"),
    [
        ("bloom", {"feed_forward_length": 100}, "intermediate_size=100 where bloom has 256"),
        ("gpt2", {"attention__key_length": 8}, "head_dim=8 where gpt2 has 16"),
        ("gpt2", {"rope__dimension_count": 16}, "gpt2.rope.dimension_count"),
        ("bloom", {"attention__clamp_kqv": 8.0}, "bloom.attention.clamp_kqv"),
        ("stablelm", {"rope__dimension_count": 18}, "rope.dimension_count=18, heads have 16"),
    ],
)
def test_what_a_family_does_not_compute_is_refused_by_name(
    tmp_path: Path, architecture: str, facts: dict[str, object], named: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        config_of(converted(tmp_path / "m", architecture, {}, **facts))
    with pytest.raises(UnsupportedModelError, match="'linear' is not supported for phi3"):
        config_of(phi3(tmp_path / "phi3", rope__scale_linear=2.0))


def test_a_type_the_package_does_not_dequantize_is_refused_by_name(tmp_path: Path) -> None:
    raw = np.zeros((1, gguf.GGML_QUANT_SIZES[Kind.Q8_K][1]), np.uint8)
    path = write_gguf(tmp_path / "m", extra={"blk.1.x.weight": raw}, extra_kind=Kind.Q8_K)
    with pytest.raises(UnsupportedModelError, match="Q8_K"):
        GGUFCheckpoint(path)


def test_a_missing_hyperparameter_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", without=("llama.embedding_length",))
    with pytest.raises(ConfigError, match="llama.embedding_length is missing"):
        GGUFCheckpoint(path)


def test_a_file_cut_before_it_is_opened_names_the_tensor(plain: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(plain.read_bytes()[:-1])
    with pytest.raises(WeightError, match=r"cut short: .*weight ends at byte \d+, the file at"):
        GGUFCheckpoint(cut)


def test_a_file_cut_while_it_is_open_is_an_error_not_a_signal(plain: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(plain.read_bytes())
    checkpoint = GGUFCheckpoint(path)
    os.truncate(path, checkpoint.header.tensors[gguf_name(Q_PROJ)].offset + 100)
    with pytest.raises(WeightError, match="cut short while being read"):
        checkpoint.read(Q_PROJ)
    checkpoint.close()


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello, world")
    with pytest.raises(WeightError, match="not a GGUF file"):
        read_header(tmp_path / "text")
    with pytest.raises(WeightError, match="No such file"):
        read_header(tmp_path / "absent")
    (tmp_path / "big").write_bytes(b"GGUF\x00\x00\x00\x03" + bytes(16))
    with pytest.raises(UnsupportedModelError, match="big-endian"):
        read_header(tmp_path / "big")


@settings(
    max_examples=300,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_damaged_headers_raise_only_our_errors(
    plain: Path, tmp_path: Path, data: st.DataObject
) -> None:
    content = bytearray(plain.read_bytes())
    header_bytes = min(info.offset for info in read_header(plain).tensors.values())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, header_bytes - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        checkpoint = GGUFCheckpoint(path)
    except EngineError:
        return
    for name in checkpoint.names():
        checkpoint.dtype(name)
    checkpoint.close()
