"""Tiny random models: one for every variant that no small trained checkpoint has.

They are written without torch, the same bytes on every machine, so goldens can be committed while
the weights are made anew: a golden holds their SHA-256.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pyengine.evidence.synthetic import write_byte_tokenizer, write_weights

STD = 0.2  # sharp attention and logits of 8 to 30 at these widths, so that every mistake shows
SPECIALS = ("<s>", "</s>", "<pad>", "<u>", "<a>")

_TOKENS = {"vocab_size": 300, "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258}
_ROTARY = {
    **_TOKENS,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "stablelm": {
        **_ROTARY,
        "architectures": ["StableLmForCausalLM"],
        "layer_norm_eps": 1e-5,
        "partial_rotary_factor": 0.25,
        "use_qkv_bias": True,
        "use_parallel_residual": False,
        "qk_layernorm": False,
    },
    "bloom": {
        **_TOKENS,
        "architectures": ["BloomForCausalLM"],
        "hidden_size": 96,
        "n_layer": 2,
        "n_head": 6,
        "layer_norm_epsilon": 1e-5,
        "apply_residual_connection_post_layernorm": False,
    },
    "olmo2": {
        **_ROTARY,
        "architectures": ["Olmo2ForCausalLM"],
        "rms_norm_eps": 1e-6,
        "rope_theta": 500000.0,
        "attention_bias": False,
    },
    "qwen2": {
        **_ROTARY,
        "architectures": ["Qwen2ForCausalLM"],
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "sliding_window": 8,
        "max_window_layers": 2,
    },
    "phi3": {
        **_ROTARY,
        "architectures": ["Phi3ForCausalLM"],
        "rms_norm_eps": 1e-5,
        "original_max_position_embeddings": 256,
        "sliding_window": None,
    },
    "gpt2": {
        **_TOKENS,
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 256,
        "layer_norm_epsilon": 1e-5,
        "activation_function": "gelu_new",
    },
    "llama": {
        **_ROTARY,
        "architectures": ["LlamaForCausalLM"],
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "mlp_bias": False,
    },
}
"""model_type -> config of the plain tiny model of that family, in version 4 spelling."""

_LONGROPE = {
    "type": "longrope",
    "short_factor": [1 + 0.1 * i for i in range(8)],
    "long_factor": [2 + 0.5 * i for i in range(8)],
}
_WIDE = {"hidden_size": 160, "num_attention_heads": 2, "num_key_value_heads": 2}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "stablelm-sequential-d80": ("stablelm", {**_WIDE, "use_qkv_bias": False}),
    "stablelm-qk-norm-bias": ("stablelm", {"qk_layernorm": True}),
    "bloom-1-head": ("bloom", {"hidden_size": 32, "n_head": 1}),
    "bloom-5-heads": ("bloom", {"hidden_size": 80, "n_head": 5}),
    "bloom-6-heads": ("bloom", {}),
    "bloom-12-heads": ("bloom", {"hidden_size": 192, "n_head": 12}),
    "bloom-post-layernorm": ("bloom", {"apply_residual_connection_post_layernorm": True}),
    "olmo2-gqa": ("olmo2", {"num_attention_heads": 8, "num_key_value_heads": 2}),
    "olmo2-mqa": ("olmo2", {"num_key_value_heads": 1}),
    "olmo2-attention-bias": ("olmo2", {"attention_bias": True}),
    "qwen2-yarn": (
        "qwen2",
        {
            "rope_scaling": {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "qwen2-windows": (
        "qwen2",
        {"num_hidden_layers": 3, "use_sliding_window": True, "max_window_layers": 1},
    ),
    "qwen2-layer-types": (
        "qwen2",
        {
            "use_sliding_window": True,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "phi3-longrope": (
        "phi3",
        {"original_max_position_embeddings": 32, "rope_scaling": _LONGROPE},
    ),
    "phi3-partial": ("phi3", {"partial_rotary_factor": 0.75}),
    "phi3-tied": ("phi3", {"tie_word_embeddings": True}),
    "llama-llama3": (
        "llama",
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "llama-attention-bias": ("llama", {"attention_bias": True}),
    "llama-mlp-bias": ("llama", {"mlp_bias": True}),
    "llama-head-dim": ("llama", {"head_dim": 24}),
    "gpt2-inverse-layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
}
"""Variant -> its family and what it changes in that family's config."""


def tiny_config(name: str, *, spelling: str = "v4", **changes: Any) -> dict[str, Any]:
    """config.json of a variant or of a family's plain model.

    Args:
        name: a key of VARIANTS or FAMILIES.
        spelling: "v4" (rope fields at top level) or "v5" (all in `rope_parameters`).
        changes: fields to replace, in version 4 spelling.
    """
    family, variant = VARIANTS.get(name, (name, {}))
    config = {"model_type": family, **FAMILIES[family], **variant, **changes}
    if spelling == "v4":
        return {**config, "torch_dtype": "float32", "transformers_version": "4.44.2"}
    if "rope_theta" in config:
        rope = {"rope_type": "default", **(config.pop("rope_scaling", None) or {})}
        rope["rope_type"] = rope.pop("type", rope["rope_type"])
        rope["rope_theta"] = config.pop("rope_theta")
        if "partial_rotary_factor" in config:
            rope["partial_rotary_factor"] = config.pop("partial_rotary_factor")
        config["rope_parameters"] = rope
    return {**config, "dtype": "float32", "transformers_version": "5.24.0"}


def write_tiny(
    name: str,
    directory: str | Path,
    *,
    seed: int = 0,
    shard_bytes: int | None = None,
    dtype: str = "f32",
    spelling: str = "v4",
    **changes: Any,
) -> Path:
    """Writes a tiny random checkpoint with tokenizer and returns its directory.

    Args:
        name: a key of VARIANTS or FAMILIES.
        directory: made if absent.
        seed: names the weights.
        shard_bytes: split the weights into files of about this size, with an index.
        dtype: type of the stored weights: "f32", "f16" or "bf16".
        spelling: of config.json, "v4" or "v5".
        changes: config fields to replace, in version 4 spelling.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    config = tiny_config(name, spelling=spelling, **changes)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    write_byte_tokenizer(directory, SPECIALS)
    write_weights(
        directory,
        config,
        seed=seed,
        std=lambda tensor, shape: STD,
        dtype=dtype,
        shard_bytes=shard_bytes,
    )
    return directory
