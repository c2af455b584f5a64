"""Bloom. Source: transformers 5.24 models/bloom/modeling_bloom.py; ALiBi: arXiv:2108.12409."""

from pyengine.models.spec import DecoderSpec, GGUFForm, Values, constant, eps, flag, layers, size

_LAYER = "transformer.h.{i}."


def _refuse(c: Values) -> str | None:
    """Tensor-parallel emulation, in which Transformers drops two biases."""
    if c["slow_but_exact"] and c["pretraining_tp"] > 1:
        return f"slow_but_exact with pretraining_tp={c['pretraining_tp']}"
    return None


SPEC = DecoderSpec(
    model_type="bloom",
    config={
        "vocab_size": size(),
        "hidden_size": size("n_embed", "hidden_size"),
        "num_hidden_layers": layers("n_layer", "num_hidden_layers"),
        "num_attention_heads": size("n_head", "num_attention_heads"),
        # Trained length; ALiBi sets no limit, and the leftover seq_length says nothing.
        "max_position_embeddings": size(default=2048),
        "norm_eps": eps("layer_norm_epsilon", 1e-5),
        "hidden_act": constant("gelu_pytorch_tanh"),
        "tie_word_embeddings": flag(True),
        "apply_residual_connection_post_layernorm": flag(),
        "slow_but_exact": flag(),
        "pretraining_tp": size(default=1),
    },
    tensors={
        "embed": "transformer.word_embeddings",
        "embed_norm": "transformer.word_embeddings_layernorm",
        "attn_norm": _LAYER + "input_layernorm",
        "qkv": _LAYER + "self_attention.query_key_value",
        "attn_out": _LAYER + "self_attention.dense",
        "mlp_norm": _LAYER + "post_attention_layernorm",
        "up": _LAYER + "mlp.dense_h_to_4h",
        "down": _LAYER + "mlp.dense_4h_to_h",
        "final_norm": "transformer.ln_f",
        "lm_head": "lm_head",
    },
    prefix="transformer.",
    ignored=frozenset(
        "seq_length offset_alibi skip_bias_add skip_bias_add_qkv masked_softmax_fusion"
        " bias_dropout_fusion attention_softmax_in_fp32 n_inner".split()
    ),
    norm="layer",
    norm_bias=True,
    position="alibi",
    qkv="per_head",
    mlp="plain",
    qkv_bias=True,
    attn_out_bias=True,
    mlp_bias=True,
    embed_norm=True,
    decide=lambda c: {"residual_from_norm": c["apply_residual_connection_post_layernorm"]},
    refuse=_refuse,
    gguf=GGUFForm(),  # a residual taken from the norm has no key
)
