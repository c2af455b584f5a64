"""Every way in which decoder families differ: traits that a family sets and the decoder reads."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from pyengine.errors import ConfigError

if TYPE_CHECKING:
    from pyengine.models.model_config import ModelConfig

Values = Mapping[str, Any]
REQUIRED = object()


@dataclass(frozen=True)
class Field:
    """One config field under our (Hugging Face's) name.

    Attributes:
        kind: int, float, bool, str or list; a float field takes ints too.
        default: value when the key is absent: the class default of Transformers. REQUIRED refuses.
        spellings: accepted keys of config.json; None: our own name; empty: not read, a constant.
        null: value when the key is there but null; REQUIRED (the default) means as when absent.
        minimum, maximum: bounds of a number, both allowed.
    """

    kind: type
    default: Any = REQUIRED
    spellings: tuple[str, ...] | None = None
    null: Any = REQUIRED
    minimum: float | None = None
    maximum: float = float(2**31 - 1)

    def check(self, value: Any, key: str, source: str) -> Any:
        """The value, if of the right kind and within bounds. Raises ConfigError naming the key."""
        kinds = (int, float) if self.kind is float else (self.kind,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and self.kind is not bool):
            raise ConfigError(f"{source}: {key}={value!r} is not of type {self.kind.__name__}")
        checked: Any = value
        if self.kind is float:
            checked = float(min(checked, 1e300))  # an int of hundreds of digits is no float
        if self.minimum is not None and not self.minimum <= checked <= self.maximum:
            bounds = f"{self.minimum:g} to {self.maximum:g}"
            raise ConfigError(f"{source}: {key}={value!r} is out of range ({bounds})")
        return checked


def size(*spellings: str, default: Any = REQUIRED, null: Any = REQUIRED) -> Field:
    """A positive integer field."""
    return Field(int, default, spellings or None, null, 1)


def layers(*spellings: str) -> Field:
    """The number of layers; bounded, since much is counted out by it before memory is reserved."""
    return Field(int, REQUIRED, spellings or None, minimum=1, maximum=4096)


def flag(default: bool = False) -> Field:
    """A boolean field."""
    return Field(bool, default)


def constant(value: Any) -> Field:
    """A value that the family fixes and config.json does not say."""
    return Field(type(value), value, ())


def eps(key: str, default: float) -> Field:
    """The epsilon of all norms, spelled `key`."""
    return Field(float, default, (key,), minimum=0.0)


def _nothing(_: Values) -> Mapping[str, Any]:
    return {}


def _no_reason(_: Values) -> str | None:
    return None


def _no_windows(values: Values) -> tuple[int, ...]:
    return (0,) * int(values["num_hidden_layers"])


def _inverse_root(values: Values, _: int) -> float:
    return 1.0 / math.sqrt(values["head_dim"])


def _no_fields(_: Values, __: Collection[str]) -> Mapping[str, Any]:
    return {}


def _no_keys(_: ModelConfig, __: DecoderSpec) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True)
class GGUFForm:
    """What GGUF says of a family in its own way, as llama.cpp converts and loads it.

    The architecture is our model_type; names and rows follow from the spec (gguf_tensors.py).

    Attributes:
        keys: hyperparameters that other families lack, after "<architecture>.".
        read: config fields that hyperparameters and layer 0's roles ("q.bias") decide.
        write: values of `keys`, given a config and its resolved spec.
        rope_types: frequency rules that it can say.
        paired_rows: rows of q and k lie in rotary pairs (LlamaModel.permute), not in halves.
        tied_head: a head may be left out, to mean the embedding.
        any_head_dim: heads need not make up hidden_size.
    """

    keys: frozenset[str] = frozenset()
    read: Callable[[Values, Collection[str]], Mapping[str, Any]] = _no_fields
    write: Callable[[ModelConfig, DecoderSpec], Mapping[str, Any]] = _no_keys
    rope_types: tuple[str, ...] = ("default", "linear", "yarn")
    paired_rows: bool = False
    tied_head: bool = True
    any_head_dim: bool = False


@dataclass(frozen=True)
class DecoderSpec:
    """A family, and after `resolve` one model of it: what the decoder and the loader go by.

    Attributes:
        model_type: config.json's word, and the name of the family's file.
        config: our field name -> how config.json says it.
        ignored: keys known to change nothing (beside those that hold for every family).
        obsolete: keys that Transformers does not read -> our name; refused when they disagree.
        tensors: our role -> checkpoint name without ".weight"/".bias"; {i} layer, {h} head.
        prefix: leading part of tensor names that files saved from the base class lack.
        rope_types: config's rope_type -> the frequency rule of positions.py.
        partial_rotary: default share of a head that rotates; None: the family reads no such field.
        original_max_default: class default of a top-level original_max_position_embeddings.
        norm: "rms" or "layer"; norm_bias: whether norms have one.
        norm_placement: "pre": sublayer(norm(x)); "post": norm(sublayer(x)).
        position: "rope", "alibi" or "learned".
        qkv: how q, k and v lie in the file: "split" tensors, "concat" [q | k | v], or "per_head"
            (q, k, v of head 0, then of head 1, ...).
        gate_up: "split" or "concat" [gate | up].
        linear: matrices stored "out_in" (y = x W^T) or "in_out" (y = x W).
        mlp: "gated": down(act(gate) * up), or "plain": down(act(up)).
        qk_norm: None; "full": over all heads together; "per_head": each head by its own weight.
            Always before the rotation, never with a bias.
        qkv_bias, attn_out_bias, mlp_bias: whether these linear layers have one.
        embed_norm: a norm between embedding and first block.
        parallel_residual: y = x + attention(a) + mlp(a), a = norm(x).
        residual_from_norm: the normed input, not the stream, is added back.
        decide: traits that depend on the config, given its values.
        windows: keys each layer sees, own included, 0 = all.
        attention_scale: factor on q.k of layer i, given values and i.
        refuse: a sentence about a value that is not computed, or None.
        gguf: its form in GGUF files; None: it has none.
    """

    model_type: str
    config: Mapping[str, Field]
    tensors: Mapping[str, str]
    prefix: str
    ignored: frozenset[str] = frozenset()
    obsolete: Mapping[str, str] = field(default_factory=dict)
    rope_types: Mapping[str, str] = field(
        default_factory=lambda: {
            name: name for name in ("default", "linear", "llama3", "yarn", "longrope")
        }
    )
    partial_rotary: float | None = None
    original_max_default: int | None = None
    norm: Literal["rms", "layer"] = "rms"
    norm_bias: bool = False
    norm_placement: Literal["pre", "post"] = "pre"
    position: Literal["rope", "alibi", "learned"] = "rope"
    qkv: Literal["split", "concat", "per_head"] = "split"
    gate_up: Literal["split", "concat"] = "split"
    linear: Literal["out_in", "in_out"] = "out_in"
    mlp: Literal["gated", "plain"] = "gated"
    qk_norm: Literal["full", "per_head"] | None = None
    qkv_bias: bool = False
    attn_out_bias: bool = False
    mlp_bias: bool = False
    embed_norm: bool = False
    parallel_residual: bool = False
    residual_from_norm: bool = False
    decide: Callable[[Values], Mapping[str, Any]] = _nothing
    windows: Callable[[Values], tuple[int, ...]] = _no_windows
    attention_scale: Callable[[Values, int], float] = _inverse_root
    refuse: Callable[[Values], str | None] = _no_reason
    gguf: GGUFForm | None = None

    def resolve(self, values: Values) -> DecoderSpec:
        """This spec with the traits that `values` decide."""
        return replace(self, **self.decide(values))


LLAMA_CONFIG: dict[str, Field] = {
    "vocab_size": size(),
    "hidden_size": size(),
    "intermediate_size": size(),
    "num_hidden_layers": layers(),
    "num_attention_heads": size(),
    "num_key_value_heads": size(default=None),
    "head_dim": size(default=None),
    "max_position_embeddings": size(default=2048),
    "norm_eps": eps("rms_norm_eps", 1e-6),
    "hidden_act": Field(str, "silu"),
    "tie_word_embeddings": flag(),
}

_LAYER = "model.layers.{i}."
LLAMA_TENSORS: dict[str, str] = {
    "embed": "model.embed_tokens",
    "attn_norm": _LAYER + "input_layernorm",
    "q": _LAYER + "self_attn.q_proj",
    "k": _LAYER + "self_attn.k_proj",
    "v": _LAYER + "self_attn.v_proj",
    "attn_out": _LAYER + "self_attn.o_proj",
    "mlp_norm": _LAYER + "post_attention_layernorm",
    "gate": _LAYER + "mlp.gate_proj",
    "up": _LAYER + "mlp.up_proj",
    "down": _LAYER + "mlp.down_proj",
    "final_norm": "model.norm",
    "lm_head": "lm_head",
}
