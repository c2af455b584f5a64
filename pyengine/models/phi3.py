"""Phi-3, Phi-3.5, Phi-4 and their mini versions. Source: transformers 5.24 models/phi3/."""

from pyengine.models.spec import LLAMA_CONFIG, LLAMA_TENSORS, DecoderSpec, GGUFForm, eps, size

_LAYER = "model.layers.{i}."

SPEC = DecoderSpec(
    model_type="phi3",
    config=LLAMA_CONFIG
    | {
        "norm_eps": eps("rms_norm_eps", 1e-5),
        "max_position_embeddings": size(default=4096),
        "sliding_window": size(default=None),
    },
    tensors=LLAMA_TENSORS
    | {"qkv": _LAYER + "self_attn.qkv_proj", "gate_up": _LAYER + "mlp.gate_up_proj"},
    prefix="model.",
    ignored=frozenset({"attention_bias"}),  # not read by the class
    rope_types={"default": "default", "longrope": "longrope", "su": "longrope", "yarn": "longrope"},
    partial_rotary=1.0,
    original_max_default=4096,
    qkv="concat",
    gate_up="concat",
    windows=lambda c: (c["sliding_window"] or 0,) * c["num_hidden_layers"],
    gguf=GGUFForm(
        keys=frozenset({"attention.sliding_window"}),  # 0 in Phi-4, which has none
        read=lambda facts, _: {"sliding_window": facts.get("attention.sliding_window") or None},
        write=lambda config, _: {"attention.sliding_window": config.layer_windows[0]},
        rope_types=("default", "longrope"),
    ),
)
