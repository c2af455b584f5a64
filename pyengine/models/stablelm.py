"""StableLM-2 (1.6B, 12B) and StableLM-3B-4E1T. Source: transformers 5.24 models/stablelm/."""

from pyengine.models.spec import (
    LLAMA_CONFIG,
    LLAMA_TENSORS,
    DecoderSpec,
    GGUFForm,
    Values,
    eps,
    flag,
    size,
)

_ATTENTION = "model.layers.{i}.self_attn."


def _refuse(c: Values) -> str | None:
    """A head size that the class would not read."""
    if c["head_dim"] * c["num_attention_heads"] != c["hidden_size"]:
        return f"head_dim={c['head_dim']} differs from hidden_size / num_attention_heads"
    return None


SPEC = DecoderSpec(
    model_type="stablelm",
    config=LLAMA_CONFIG
    | {
        "num_key_value_heads": size(default=32, null=None),
        "max_position_embeddings": size(default=4096),
        "norm_eps": eps("layer_norm_eps", 1e-5),
        "use_qkv_bias": flag(),
        "qk_layernorm": flag(),
        "use_parallel_residual": flag(),
    },
    tensors=LLAMA_TENSORS
    | {
        "q_norm": _ATTENTION + "q_layernorm.norms.{h}",
        "k_norm": _ATTENTION + "k_layernorm.norms.{h}",
    },
    prefix="model.",
    obsolete={"rope_pct": "partial_rotary_factor", "norm_eps": "norm_eps"},  # stablelm_epoch's
    partial_rotary=0.25,
    norm="layer",
    norm_bias=True,
    decide=lambda c: {
        "qkv_bias": c["use_qkv_bias"],
        "qk_norm": "per_head" if c["qk_layernorm"] else None,
        "parallel_residual": c["use_parallel_residual"],
    },
    refuse=_refuse,
    gguf=GGUFForm(
        keys=frozenset({"use_parallel_residual"}),  # converters say true of both kinds
        read=lambda _, roles: {
            "use_qkv_bias": "q.bias" in roles,
            "qk_layernorm": "q_norm" in roles,
            "use_parallel_residual": "mlp_norm" not in roles,
        },
        write=lambda _, spec: {"use_parallel_residual": spec.parallel_residual},
        tied_head=False,
    ),
)
