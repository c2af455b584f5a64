"""Writes full-size checkpoints with random weights, to measure speed, memory and rounding on.

    python scripts/make_synthetic.py stablelm-2-1.6b OUT --dtype f16
    python scripts/make_synthetic.py --list

The sizes are published ones; the weights are noise, scaled so that attention is neither flat nor a
single spike and that the logits' standard deviation is about 3. Torch is not needed, and only a few
chunks of weights are ever in memory. What such a model writes means nothing: its parity is checked
with `--untrained`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pyengine.evidence.synthetic import (  # noqa: E402  (needs the path above)
    Config,
    Std,
    is_norm_weight,
    write_byte_tokenizer,
    write_weights,
)

LOGIT_STD = 3.0
NORM_SPREAD = 0.2  # norm weights are 1 +- this
BIAS_STD = 0.1
QK_GAIN = 1.5  # scores get a standard deviation of its square
OUT_GAIN = 2.0  # what layers add outweighs the embedding, so that no token predicts itself

_TOKENS = {"bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258}
_ROTARY = {**_TOKENS, "hidden_act": "silu", "rope_scaling": None, "tie_word_embeddings": False}

MODELS: dict[str, dict[str, Any]] = {
    "stablelm-2-1.6b": {
        **_ROTARY,
        "architectures": ["StableLmForCausalLM"],
        "model_type": "stablelm",
        "vocab_size": 100352,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 4096,
        "layer_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "use_qkv_bias": True,
        "use_parallel_residual": False,
        "qk_layernorm": False,
    },
    "bloom-560m": {
        **_TOKENS,
        "architectures": ["BloomForCausalLM"],
        "model_type": "bloom",
        "vocab_size": 250880,
        "hidden_size": 1024,
        "n_layer": 24,
        "n_head": 16,
        "seq_length": 2048,
        "layer_norm_epsilon": 1e-5,
        "apply_residual_connection_post_layernorm": False,
        "tie_word_embeddings": True,
    },
    "olmo-2-1b": {
        **_ROTARY,
        "architectures": ["Olmo2ForCausalLM"],
        "model_type": "olmo2",
        "vocab_size": 100352,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 500000.0,
        "attention_bias": False,
    },
    "qwen2.5-1.5b": {
        **_ROTARY,
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "use_sliding_window": False,
        "sliding_window": 32768,
        "max_window_layers": 28,
        "tie_word_embeddings": True,
    },
    "phi-3-mini": {
        **_ROTARY,
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "sliding_window": 2047,
    },
}
"""Name -> config.json of the released model, with the token ids of the byte tokenizer."""

_DTYPE_WORDS = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}


def synthetic_config(
    name: str, *, dtype: str, layers: int | None = None, vocab: int | None = None
) -> dict[str, Any]:
    """config.json of a model of the table, cut to fewer layers or a smaller vocabulary."""
    config = {**MODELS[name], "torch_dtype": _DTYPE_WORDS[dtype], "transformers_version": "4.44.2"}
    key = "n_layer" if "n_layer" in config else "num_hidden_layers"
    config[key] = layers or config[key]
    config["vocab_size"] = vocab or config["vocab_size"]
    return config


def scale_of(config: Config) -> Std:
    """Standard deviation of each tensor: inputs of variance 1 give outputs of a known variance."""
    tied = config["tie_word_embeddings"]

    def std(name: str, shape: tuple[int, ...]) -> float:
        if is_norm_weight(name):
            return NORM_SPREAD
        if name.endswith(".bias"):
            return BIAS_STD
        root = math.sqrt(shape[-1])
        if "embed" in name:
            return LOGIT_STD / root if tied else 1.0
        if name == "lm_head.weight":
            return LOGIT_STD / root
        if any(part in name for part in ("q_proj", "k_proj", "qkv_proj", "query_key_value")):
            return QK_GAIN / root
        if any(part in name for part in ("o_proj", "dense.", "down_proj", "dense_4h_to_h")):
            return OUT_GAIN / root
        return 1.0 / root

    return std


def make_synthetic(
    name: str,
    out: Path,
    *,
    dtype: str = "f16",
    layers: int | None = None,
    vocab: int | None = None,
    seed: int = 0,
    shard_bytes: int = 4 << 30,
    quiet: bool = False,
) -> Path:
    """Writes config.json, a byte-level tokenizer and the weights; returns the directory."""
    out.mkdir(parents=True, exist_ok=True)
    config = synthetic_config(name, dtype=dtype, layers=layers, vocab=vocab)
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    write_byte_tokenizer(out, ("<s>", "</s>", "<pad>"))

    quiet = quiet or not sys.stderr.isatty()

    def progress(done: int, total: int) -> None:
        if not quiet:
            print(f"\r{out}: {done / 1e9:.2f} of {total / 1e9:.2f} GB", end="", file=sys.stderr)

    write_weights(
        out,
        config,
        seed=seed,
        std=scale_of(config),
        dtype=dtype,
        shard_bytes=shard_bytes,
        progress=progress,
    )
    if not quiet:
        print(file=sys.stderr)
    return out


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("name", nargs="?", choices=MODELS, help="whose sizes to take")
    parser.add_argument("out", type=Path, nargs="?", help="folder to write")
    parser.add_argument("--list", action="store_true", help="show the names")
    parser.add_argument("--dtype", choices=_DTYPE_WORDS, default="f16", help="of the weights")
    parser.add_argument("--layers", type=int, help="fewer layers, for a quick test")
    parser.add_argument("--vocab", type=int, help="a smaller vocabulary (at least 259)")
    parser.add_argument("--seed", type=int, default=0, help="names the weights")
    args = parser.parse_args()
    if args.list:
        print("\n".join(MODELS))
    elif args.name is None or args.out is None:
        parser.error("NAME and OUT, or --list")
    else:
        make_synthetic(
            args.name,
            args.out,
            dtype=args.dtype,
            layers=args.layers,
            vocab=args.vocab,
            seed=args.seed,
        )


if __name__ == "__main__":
    main()
