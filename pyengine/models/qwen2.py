"""Qwen2 and Qwen2.5. Source: transformers 5.24 models/qwen2/{configuration,modeling}_qwen2.py."""

from pyengine.models.spec import (
    LLAMA_CONFIG,
    LLAMA_TENSORS,
    DecoderSpec,
    Field,
    GGUFForm,
    Values,
    flag,
    size,
)


def _windows(c: Values) -> tuple[int, ...]:
    """A window only with use_sliding_window, in the layers named or from max_window_layers on."""
    layers = c["num_hidden_layers"]
    window = (c["sliding_window"] or 0) if c["use_sliding_window"] else 0
    types = c["layer_types"] or [
        "sliding_attention" if i >= c["max_window_layers"] else "full_attention"
        for i in range(layers)
    ]
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)


def _refuse(c: Values) -> str | None:
    """layer_types that ask for a window which the other fields deny."""
    if "sliding_attention" in (c["layer_types"] or ()) and not any(_windows(c)):
        return "layer_types with sliding_attention, but without use_sliding_window,"
    return None


SPEC = DecoderSpec(
    model_type="qwen2",
    config=LLAMA_CONFIG
    | {
        "num_key_value_heads": size(default=32, null=None),
        "max_position_embeddings": size(default=32768),
        "use_sliding_window": flag(),
        "sliding_window": size(default=4096, null=None),
        "max_window_layers": Field(int, 28, minimum=0),
        "layer_types": Field(list, None),
    },
    tensors=LLAMA_TENSORS,
    prefix="model.",
    ignored=frozenset({"attention_bias"}),  # the class has q, k and v biases whatever it says
    qkv_bias=True,
    windows=_windows,
    refuse=_refuse,
    gguf=GGUFForm(),  # windows by layer have no key
)
