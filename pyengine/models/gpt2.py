"""GPT-2. Source: transformers 5.24 models/gpt2/modeling_gpt2.py."""

import math

from pyengine.models.spec import DecoderSpec, Field, GGUFForm, Values, eps, flag, layers, size

_LAYER = "transformer.h.{i}."


def _attention_scale(c: Values, layer: int) -> float:
    """head_dim^-1/2 unless switched off; divided by layer + 1 where the config asks for it."""
    scale = 1.0 / math.sqrt(c["head_dim"]) if c["scale_attn_weights"] else 1.0
    return scale / (layer + 1) if c["scale_attn_by_inverse_layer_idx"] else scale


SPEC = DecoderSpec(
    model_type="gpt2",
    config={
        "vocab_size": size(),
        "hidden_size": size("n_embd", "hidden_size"),
        "intermediate_size": size("n_inner", default=None),
        "num_hidden_layers": layers("n_layer", "num_hidden_layers"),
        "num_attention_heads": size("n_head", "num_attention_heads"),
        "max_position_embeddings": size("n_positions", "max_position_embeddings", default=1024),
        "norm_eps": eps("layer_norm_epsilon", 1e-5),
        "hidden_act": Field(str, "gelu_new", ("activation_function",)),
        "tie_word_embeddings": flag(True),
        "scale_attn_weights": flag(True),
        "scale_attn_by_inverse_layer_idx": flag(),
    },
    tensors={
        "embed": "transformer.wte",
        "position_embed": "transformer.wpe",
        "attn_norm": _LAYER + "ln_1",
        "qkv": _LAYER + "attn.c_attn",
        "attn_out": _LAYER + "attn.c_proj",
        "mlp_norm": _LAYER + "ln_2",
        "up": _LAYER + "mlp.c_fc",
        "down": _LAYER + "mlp.c_proj",
        "final_norm": "transformer.ln_f",
        "lm_head": "lm_head",
    },
    prefix="transformer.",
    ignored=frozenset({"n_ctx", "intermediate_size", "reorder_and_upcast_attn"}),
    norm="layer",
    norm_bias=True,
    position="learned",
    qkv="concat",
    linear="in_out",
    mlp="plain",
    qkv_bias=True,
    attn_out_bias=True,
    mlp_bias=True,
    attention_scale=_attention_scale,
    gguf=GGUFForm(),
)
