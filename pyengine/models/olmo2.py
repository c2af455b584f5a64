"""OLMo-2. Source: transformers 5.24 models/olmo2/modeling_olmo2.py; paper arXiv:2501.00656."""

from pyengine.models.spec import LLAMA_CONFIG, LLAMA_TENSORS, DecoderSpec, GGUFForm, eps, flag

_LAYER = "model.layers.{i}."

SPEC = DecoderSpec(
    model_type="olmo2",
    config=LLAMA_CONFIG | {"norm_eps": eps("rms_norm_eps", 1e-5), "attention_bias": flag()},
    tensors=LLAMA_TENSORS
    | {
        # Here "post attention" means: of attention's output. There is no input_layernorm.
        "attn_norm": _LAYER + "post_attention_layernorm",
        "mlp_norm": _LAYER + "post_feedforward_layernorm",
        "q_norm": _LAYER + "self_attn.q_norm",
        "k_norm": _LAYER + "self_attn.k_norm",
    },
    prefix="model.",
    norm_placement="post",
    qk_norm="full",
    decide=lambda c: {"qkv_bias": c["attention_bias"], "attn_out_bias": c["attention_bias"]},
    gguf=GGUFForm(tied_head=False),  # nor biases
)
