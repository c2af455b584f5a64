"""models/config.py: spellings, class defaults, refusals by name, and what a family file decides."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyengine.errors import ConfigError, UnsupportedModelError
from pyengine.models.config import describe, eos_token_ids, load_config, parse_config
from pyengine.models.families import families, family_spec
from pyengine.models.model_config import ModelConfig
from pyengine.models.spec import DecoderSpec
from pyengine.models.weights import parameter_count
from pyengine.native import Activation
from tests.conftest import CHECKPOINTS, GOLDEN
from tests.tiny import FAMILIES, VARIANTS, tiny_config

LISTS = {
    "short_factor": [1 + 0.1 * i for i in range(8)],
    "long_factor": [2 + 0.5 * i for i in range(8)],
}


def parse(name: str, *without: str, **changes: Any) -> tuple[ModelConfig, DecoderSpec]:
    """A tiny model's config, parsed, with fields changed or left out."""
    raw = tiny_config(name, **changes)
    return parse_config({k: v for k, v in raw.items() if k not in without}, "config.json")


# ---- families -----------------------------------------------------------------------------------


def test_the_families_are_the_files_with_a_spec() -> None:
    assert families() == ["bloom", "gpt2", "llama", "olmo2", "phi3", "qwen2", "stablelm"]


def test_every_family_has_a_golden() -> None:
    recorded = {load_config(path)[0].model_type for path in CHECKPOINTS.values()}
    assert recorded == set(families())
    assert {path.name for path in GOLDEN.iterdir()} >= set(CHECKPOINTS)


def test_a_file_is_named_after_its_model_type() -> None:
    assert all(family_spec(name).model_type == name for name in families())


@pytest.mark.parametrize("name", ["stablelm_epoch", "config", "decoder", "../llama", "", "Llama"])
def test_an_unknown_family_is_refused_and_the_known_ones_are_listed(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=r"known: bloom, gpt2, .*stablelm"):
        parse_config({"model_type": name}, "config.json")


def test_a_config_without_model_type_is_refused() -> None:
    with pytest.raises(ConfigError, match="config.json: model_type is missing"):
        parse_config({"hidden_size": 64}, "config.json")


# ---- spellings ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*FAMILIES, *VARIANTS])
def test_old_and_new_spellings_mean_the_same(name: str) -> None:
    old = parse_config(tiny_config(name, spelling="v4"), "config.json")
    new = parse_config(tiny_config(name, spelling="v5"), "config.json")
    assert old == new


@pytest.mark.parametrize(
    ("hidden", "heads", "layers"),
    [
        ("n_embed", "num_attention_heads", "n_layer"),
        ("hidden_size", "n_head", "num_hidden_layers"),
    ],
)
def test_bloom_has_three_spellings_of_its_sizes(hidden: str, heads: str, layers: str) -> None:
    config, _ = parse_config(
        {"model_type": "bloom", "vocab_size": 9, hidden: 96, heads: 3, layers: 4}, "config.json"
    )
    sizes = (config.hidden_size, config.num_attention_heads, config.num_hidden_layers)
    assert sizes == (96, 3, 4)
    assert config.intermediate_size == 384


def test_gpt2_reads_hugging_face_names_too() -> None:
    config, _ = parse(
        "gpt2", "n_embd", "n_head", "n_layer", "n_positions",
        hidden_size=32, num_attention_heads=2, num_hidden_layers=3, max_position_embeddings=99,
    )  # fmt: skip
    assert (config.hidden_size, config.num_hidden_layers, config.position_limit) == (32, 3, 99)


def test_two_spellings_that_disagree_are_refused() -> None:
    with pytest.raises(ConfigError, match="n_layer=2 and num_hidden_layers=3 disagree"):
        parse("bloom", num_hidden_layers=3)


def test_rope_scaling_goes_before_rope_parameters() -> None:
    config, _ = parse(
        "llama",
        rope_scaling={"type": "linear", "factor": 2.0},
        rope_parameters={"rope_type": "linear", "factor": 4.0},
    )
    assert config.rope is not None
    assert config.rope.factor == 2.0


def test_a_value_in_the_rope_dict_goes_before_the_top_level() -> None:
    config, _ = parse("llama", rope_theta=1.5e4, rope_parameters={"rope_theta": 2.5e4})
    assert config.rope is not None
    assert config.rope.rope_theta == 2.5e4


@pytest.mark.parametrize(
    ("top", "inner", "length"), [(48, 64, 48), (None, 64, 64), (48, None, 48), (None, None, 256)]
)
def test_the_trained_length_is_looked_for_outside_then_inside(
    top: int | None, inner: int | None, length: int
) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": inner}
    config, _ = parse("qwen2", rope_scaling=scaling, original_max_position_embeddings=top)
    assert config.rope is not None
    assert config.rope.original_max_position_embeddings == length


@pytest.mark.parametrize("word", ["longrope", "su", "yarn"])
def test_phi3_calls_longrope_by_three_names(word: str) -> None:
    config, _ = parse("phi3", rope_scaling={"type": word, **LISTS})
    assert config.rope is not None
    assert config.rope.rope_type == "longrope"
    assert config.rope.switch_length == 256


# ---- what a missing key means -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "key", "field", "default"),
    [
        ("qwen2", "num_key_value_heads", "num_key_value_heads", 32),
        ("stablelm", "num_key_value_heads", "num_key_value_heads", 32),
        ("olmo2", "num_key_value_heads", "num_key_value_heads", 64),
        ("phi3", "num_key_value_heads", "num_key_value_heads", 64),
        ("llama", "num_key_value_heads", "num_key_value_heads", 64),
        ("olmo2", "rms_norm_eps", "norm_eps", 1e-5),
        ("phi3", "rms_norm_eps", "norm_eps", 1e-5),
        ("qwen2", "rms_norm_eps", "norm_eps", 1e-6),
        ("llama", "rms_norm_eps", "norm_eps", 1e-6),
        ("stablelm", "layer_norm_eps", "norm_eps", 1e-5),
        ("bloom", "layer_norm_epsilon", "norm_eps", 1e-5),
        ("gpt2", "layer_norm_epsilon", "norm_eps", 1e-5),
        ("llama", "tie_word_embeddings", "tie_word_embeddings", False),
        ("qwen2", "tie_word_embeddings", "tie_word_embeddings", False),
        ("bloom", "tie_word_embeddings", "tie_word_embeddings", True),
        ("gpt2", "tie_word_embeddings", "tie_word_embeddings", True),
        ("gpt2", "n_inner", "intermediate_size", 4096),
        ("gpt2", "activation_function", "hidden_act", "gelu_new"),
        ("gpt2", "n_positions", "position_limit", 1024),
    ],
)  # fmt: skip
def test_a_missing_key_means_the_class_default(
    family: str, key: str, field: str, default: object
) -> None:
    sizes = {"n_head": 64, "n_embd": 1024, "hidden_size": 1024, "num_attention_heads": 64}
    used = {k: v for k, v in sizes.items() if k in FAMILIES[family]}
    config, _ = parse(family, key, **{"head_dim": 16, "hidden_size": 1024, **used}
                      if family not in ("gpt2", "bloom") else used)  # fmt: skip
    assert getattr(config, field) == default


def test_null_kv_heads_mean_as_many_as_heads() -> None:
    assert parse("qwen2", num_key_value_heads=None)[0].num_key_value_heads == 4


def test_theta_defaults_to_ten_thousand_and_stablelm_rotates_a_quarter() -> None:
    rope = parse("stablelm", "rope_theta", "partial_rotary_factor")[0].rope
    assert rope is not None
    assert (rope.rope_theta, rope.rotary_dim) == (1e4, 4)


def test_models_without_rotation_have_no_rope_whatever_the_config_says() -> None:
    for family in ("bloom", "gpt2"):
        assert parse(family, rope_theta=1e4)[0].rope is None


def test_a_missing_size_is_refused() -> None:
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        with pytest.raises(ConfigError, match=f"config.json: {key} is missing"):
            parse("llama", key)


# ---- windows, scales, traits --------------------------------------------------------------------


def test_qwen2_windows_need_the_switch_and_start_at_a_layer() -> None:
    layers = {"num_hidden_layers": 4, "sliding_window": 8, "max_window_layers": 3}
    assert parse("qwen2", **layers)[0].layer_windows == (0, 0, 0, 0)
    assert parse("qwen2", **layers, use_sliding_window=True)[0].layer_windows == (0, 0, 0, 8)


def test_qwen2_layer_types_go_before_the_rule() -> None:
    config, _ = parse("qwen2-layer-types")
    assert config.layer_windows == (8, 0)


def test_phi3_windows_hold_in_every_layer() -> None:
    assert parse("phi3", sliding_window=2047)[0].layer_windows == (2047, 2047)
    assert parse("phi3")[0].layer_windows == (0, 0)


def test_gpt2_scales_follow_three_options() -> None:
    assert parse("gpt2")[0].attention_scales == (0.25, 0.25)
    assert parse("gpt2", scale_attn_weights=False)[0].attention_scales == (1.0, 1.0)
    assert parse("gpt2-inverse-layer")[0].attention_scales == (0.25, 0.125)


def test_stablelm_is_three_architectures_behind_flags() -> None:
    spec = parse("stablelm", use_qkv_bias=False, qk_layernorm=True, use_parallel_residual=True)[1]
    assert (spec.qkv_bias, spec.qk_norm, spec.parallel_residual) == (False, "per_head", True)
    spec = parse("stablelm")[1]
    assert (spec.qkv_bias, spec.qk_norm, spec.parallel_residual) == (True, None, False)


@pytest.mark.parametrize(
    ("word", "activation"),
    [
        ("silu", Activation.SILU),
        ("gelu", Activation.GELU_ERF),
        ("gelu_new", Activation.GELU_TANH),
        ("gelu_fast", Activation.GELU_TANH),
        ("gelu_pytorch_tanh", Activation.GELU_TANH),
        ("relu", Activation.RELU),
    ],
)
def test_activations_have_several_names(word: str, activation: Activation) -> None:
    assert parse("gpt2", activation_function=word)[0].activation == activation


# ---- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("olmo2", {"clip_qkv": 8.0}, "clip_qkv=8.0"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention=True"),
        ("llama", {"is_encoder_decoder": True}, "is_encoder_decoder=True"),
        ("llama", {"sliding_window": 4096}, "sliding_window=4096"),
        ("llama", {"logit_scale": 0.0625}, "logit_scale"),
        ("llama", {"num_local_experts": 8}, "num_local_experts=8"),
        ("llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ("llama", {"layer_types": ["sliding_attention", "full_attention"]}, "layer_types"),
        ("qwen2", {"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 2}, "without use_sliding_window"),
        ("qwen2", {"use_mrope": True}, "use_mrope"),
        ("bloom", {"slow_but_exact": True, "pretraining_tp": 2}, "slow_but_exact with pretraining"),
        ("llama", {"hidden_act": "xielu"}, "activation 'xielu'"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
        ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type 'linear'"),
        ("llama", {"rope_scaling": {"rope_type": "nope"}}, "rope_type 'nope'"),
        ("qwen2", {"rope_scaling": {"mrope_section": [2, 3, 3]}}, "mrope_section"),
        ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "full_attention"),
        ("stablelm", {"rope_pct": 0.5}, "rope_pct=0.5 is an old spelling"),
        ("stablelm", {"norm_eps": 1e-6}, "norm_eps=1e-06 is an old spelling"),
        ("stablelm", {"partial_rotary_factor": 0.2}, "3 rotary dimensions"),
        ("stablelm", {"head_dim": 32}, "head_dim=32 differs"),
    ],
)
def test_a_field_that_would_change_the_maths_is_refused_by_name(
    name: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        parse(name, **changes)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("olmo2", {"clip_qkv": None}),
        ("llama", {"quantization_config": None, "pretraining_tp": 4, "logit_scale": 1.0}),
        ("bloom", {"slow_but_exact": True, "pretraining_tp": 1, "n_inner": 9, "offset_alibi": 100}),
        ("bloom", {"slow_but_exact": False, "pretraining_tp": 4}),
        ("phi3", {"attention_bias": True, "resid_pdrop": 0.1, "embd_pdrop": 0.1}),
        ("gpt2", {"n_ctx": 7, "intermediate_size": 9, "reorder_and_upcast_attn": True}),
        ("stablelm", {"rope_pct": 0.25, "norm_eps": 1e-5}),
    ],
)
def test_a_field_at_its_neutral_value_changes_nothing(name: str, changes: dict[str, Any]) -> None:
    assert parse(name, **changes) == parse(name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "64"}, "hidden_size='64' is not of type int"),
        ({"hidden_size": 64.0}, "hidden_size=64.0 is not of type int"),
        ({"hidden_size": True}, "hidden_size=True is not of type int"),
        ({"hidden_size": 0}, "hidden_size=0 is out of range"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000 is out of range"),
        ({"hidden_size": 66}, "hidden_size=66 is not a multiple of num_attention_heads=4"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads=3"),
        ({"rms_norm_eps": 0}, "epsilon"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan is out of range"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings=1 is not of type bool"),
        ({"rope_theta": -1.0}, "rope_theta=-1.0"),
        ({"rope_theta": 0.5}, "rotate nothing"),
        ({"rope_scaling": "linear"}, "rope_scaling='linear' is not an object"),
        ({"rope_scaling": {"type": "linear"}}, "lacks factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor=0"),
        ({"rope_scaling": {"type": "yarn"}}, "lacks factor"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "lacks low_freq_factor"),
        ({"rope_scaling": {"type": "longrope", **LISTS, "short_factor": [1.0]}}, "needs 8 entries"),
        ({"eos_token_id": "</s>"}, "eos_token_id='</s>'"),
    ],
)
def test_an_impossible_value_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse("llama", **changes)


_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["", "x", "yarn"])
    | st.just(10**400),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "factor", "rope_theta", "short_factor", "x"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=4,
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(data=st.data(), name=st.sampled_from(sorted(VARIANTS)), value=_JSON)
def test_any_value_is_read_or_refused_in_words(data: st.DataObject, name: str, value: Any) -> None:
    raw = tiny_config(name)
    extra = ["layer_types", "rope_scaling", "rope_parameters", "clip_qkv", "rope_pct"]
    key = data.draw(st.sampled_from(sorted({*raw, *extra} - {"model_type"})))
    with contextlib.suppress(ConfigError, UnsupportedModelError):
        parse_config({**raw, key: value}, "config.json")
    scaling = raw.get("rope_scaling")
    if isinstance(scaling, dict):
        inner = data.draw(st.sampled_from(sorted(scaling)))
        with contextlib.suppress(ConfigError, UnsupportedModelError):
            parse_config({**raw, "rope_scaling": {**scaling, inner: value}}, "config.json")


def test_unread_fields_are_reported() -> None:
    config, _ = parse("llama", what_is_this=3, use_cache=False, initializer_range=0.1)
    assert config.ignored_fields == ("what_is_this",)


# ---- files --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file; is this a model directory"),
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[1]", "expected a JSON object, found list"),
        (b"[" * 100_000, "is not JSON"),
    ],
)
def test_a_broken_config_file_is_named(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=f"config.json.*{message}"):
        load_config(tmp_path)


def test_a_dangling_config_link_names_its_target(tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to("../blobs/abc")
    with pytest.raises(ConfigError, match=r"config.json is a link to ../blobs/abc, which does not"):
        load_config(tmp_path)


def test_generation_config_overrides_the_end_tokens(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("llama")))
    assert load_config(tmp_path)[0].eos_token_ids == (257,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [259, 262, 259]}))
    assert load_config(tmp_path)[0].eos_token_ids == (259, 262)
    (tmp_path / "generation_config.json").write_text("no")
    with pytest.raises(ConfigError, match="generation_config.json is not JSON"):
        load_config(tmp_path)


def test_end_tokens_may_be_an_int_a_list_or_absent() -> None:
    assert eos_token_ids({"eos_token_id": 5}) == (5,)
    assert eos_token_ids({"eos_token_id": [5, 6]}, {"eos_token_id": None}) == (5, 6)
    assert eos_token_ids({}) == ()


# ---- released sizes -----------------------------------------------------------------------------

_OLMO2_32B = {
    "vocab_size": 100352, "hidden_size": 5120, "intermediate_size": 27648,
    "num_hidden_layers": 64, "num_attention_heads": 40, "num_key_value_heads": 8,
}  # fmt: skip
_STABLELM = {"vocab_size": 100352, "tie_word_embeddings": False}
RELEASED: dict[int, dict[str, Any]] = {
    1_644_515_328: {
        "model_type": "stablelm", **_STABLELM, "hidden_size": 2048, "intermediate_size": 5632,
        "num_hidden_layers": 24, "num_attention_heads": 32, "use_qkv_bias": True,
    },
    12_143_185_920: {
        "model_type": "stablelm", **_STABLELM, "hidden_size": 5120, "intermediate_size": 13824,
        "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8,
        "qk_layernorm": True, "use_parallel_residual": True,
    },
    559_214_592: {
        "model_type": "bloom", "vocab_size": 250880, "n_embed": 1024, "n_layer": 24,
        "num_attention_heads": 16,
    },
    32_234_279_936: {"model_type": "olmo2", **_OLMO2_32B},
    494_032_768: {
        "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864,
        "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    3_836_021_760: {
        "model_type": "phi3", "vocab_size": 200064, "hidden_size": 3072, "intermediate_size": 8192,
        "num_hidden_layers": 32, "num_attention_heads": 24, "num_key_value_heads": 8,
        "tie_word_embeddings": True, "partial_rotary_factor": 0.75,
    },
    1_557_611_200: {
        "model_type": "gpt2", "vocab_size": 50257, "n_embd": 1600, "n_layer": 48, "n_head": 25,
    },
    134_515_008: {
        "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
        "tie_word_embeddings": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("count", RELEASED)
def test_released_sizes_give_the_published_parameter_counts(count: int) -> None:
    config, spec = parse_config(RELEASED[count], "config.json")
    assert parameter_count(spec, config) == count


def test_describe_names_the_traits() -> None:
    words = describe(*parse("qwen2-windows"))
    assert words["attention"] == "4 heads, 2 kv heads"
    assert words["window"] == "8 in 2 layers"
    assert words["biases"] == "qkv"
    assert "residual" not in words
