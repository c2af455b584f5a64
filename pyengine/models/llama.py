"""Llama and SmolLM2. Source: transformers 5.24 models/llama/modeling_llama.py."""

from pyengine.models.spec import LLAMA_CONFIG, LLAMA_TENSORS, DecoderSpec, GGUFForm, flag

SPEC = DecoderSpec(
    model_type="llama",
    config=LLAMA_CONFIG | {"attention_bias": flag(), "mlp_bias": flag()},
    tensors=LLAMA_TENSORS,
    prefix="model.",
    ignored=frozenset({"pretraining_tp"}),  # slices the same products; no change beyond rounding
    decide=lambda c: {
        "qkv_bias": c["attention_bias"],
        "attn_out_bias": c["attention_bias"],
        "mlp_bias": c["mlp_bias"],
    },
    gguf=GGUFForm(
        read=lambda _, roles: {
            "attention_bias": "q.bias" in roles,
            "mlp_bias": "up.bias" in roles,
        },
        rope_types=("default", "linear", "yarn", "llama3"),
        paired_rows=True,
        any_head_dim=True,
    ),
)
