"""A model's tensors in GGUF: the names that llama.cpp gives our roles, and the order of their rows.

Sources: gguf.constants for names, llama.cpp's conversion for rows. What is particular to a family
follows from its spec, and from the GGUFForm there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from gguf.constants import MODEL_TENSOR as T
from gguf.constants import TENSOR_NAMES

from pyengine.models.gguf_header import Array
from pyengine.models.model_config import ModelConfig
from pyengine.models.spec import DecoderSpec, GGUFForm

_TENSORS = {  # our role -> the package's
    "embed": T.TOKEN_EMBD,
    "position_embed": T.POS_EMBD,
    "embed_norm": T.TOKEN_EMBD_NORM,
    "attn_norm": T.ATTN_NORM,
    "qkv": T.ATTN_QKV,
    "q": T.ATTN_Q,
    "k": T.ATTN_K,
    "v": T.ATTN_V,
    "q_norm": T.ATTN_Q_NORM,
    "k_norm": T.ATTN_K_NORM,
    "attn_out": T.ATTN_OUT,
    "mlp_norm": T.FFN_NORM,
    "gate": T.FFN_GATE,
    "up": T.FFN_UP,
    "gate_up": T.FFN_UP,
    "down": T.FFN_DOWN,
    "final_norm": T.OUTPUT_NORM,
    "lm_head": T.OUTPUT,
}
_POST_NORMS = {"attn_norm": T.ATTN_POST_NORM, "mlp_norm": T.FFN_POST_NORM}
_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")

ROPE_FACTORS, SHORT_FACTORS, LONG_FACTORS = (
    f"{TENSOR_NAMES[tensor]}.weight"
    for tensor in (T.ROPE_FREQS, T.ROPE_FACTORS_SHORT, T.ROPE_FACTORS_LONG)
)


def rope_tensors(form: GGUFForm) -> frozenset[str]:
    """Tensors that belong to the hyperparameters: divisors of the rotary frequencies."""
    found = frozenset({ROPE_FACTORS} if "llama3" in form.rope_types else ())
    return found | ({SHORT_FACTORS, LONG_FACTORS} if "longrope" in form.rope_types else set())


# ---- names -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Name:
    """A tensor's name taken apart.

    Attributes:
        role: our role, as `DecoderSpec.tensors` has it.
        layer: digits; "" outside the layers.
        part: "weight" or "bias".
    """

    role: str
    layer: str
    part: str


def gguf_stems(spec: DecoderSpec) -> dict[str, str]:
    """Role -> GGUF's name without ".weight" or ".bias", {bid} for the layer."""
    tensors = _TENSORS | (_POST_NORMS if spec.norm_placement == "post" else {})
    parts = set() if spec.qkv == "split" else {"q", "k", "v"}
    parts |= set() if spec.gate_up == "split" else {"gate", "up"}
    return {role: TENSOR_NAMES[tensors[role]] for role in spec.tensors if role not in parts}


def parse_name(stems: dict[str, str], name: str) -> Name | None:
    """A GGUF name taken apart; None if no role has it."""
    stem, _, part = name.rpartition(".")
    block = _BLOCK.fullmatch(stem)
    layer, template = (block[1], f"blk.{{bid}}.{block[2]}") if block else ("", stem)
    role = next((role for role, known in stems.items() if known == template), None)
    return Name(role, layer, part) if role is not None else None


def stored_names(spec: DecoderSpec, config: ModelConfig) -> dict[str, tuple[str, str]]:
    """Hugging Face's name, with and without the family's prefix -> role, and GGUF's name.

    Norms that each head has one of share a name: GGUF stacks them.
    """
    found = {}
    for role, stem in gguf_stems(spec).items():
        layers = range(config.num_hidden_layers) if "{bid}" in stem else range(1)
        heads = range(config.num_attention_heads) if is_stacked(spec, role) else range(1)
        for layer in layers:
            for head in heads:
                theirs = spec.tensors[role].format(i=layer, h=head)
                for part in ("weight", "bias"):
                    place = (role, f"{stem.format(bid=layer)}.{part}")
                    found[f"{theirs}.{part}"] = place
                    found[f"{theirs.removeprefix(spec.prefix)}.{part}"] = place
    return found


def is_stacked(spec: DecoderSpec, role: str) -> bool:
    """Whether a tensor (heads, head_dim) of GGUF is one tensor a head in Hugging Face's files."""
    return "{h}" in spec.tensors[role]


# ---- rows --------------------------------------------------------------------------------------


def file_rows(spec: DecoderSpec, role: str, rows: Array, heads: int, head_dim: int) -> Array:
    """Where llama.cpp's conversion put rows of a Hugging Face tensor. Both arrays: int64."""
    if spec.gguf and spec.gguf.paired_rows and role in ("q", "k"):
        return paired_row(rows, head_dim)
    if spec.qkv == "per_head" and role == "qkv":
        return concatenated_row(rows, heads, head_dim)
    return rows


def paired_row(rows: Array, head_dim: int) -> Array:
    """Row `r` of a Llama q or k projection.

    Hugging Face orders a head's rows [first halves | second halves] (rotary pairing `half`); the
    conversion reorders them into pairs (`interleaved`): LlamaModel.permute.
    """
    head, within = np.divmod(rows, head_dim)
    half, pair = np.divmod(within, head_dim // 2)
    return np.asarray(head * head_dim + 2 * pair + half)


def concatenated_row(rows: Array, heads: int, head_dim: int) -> Array:
    """Row `r` of Bloom's fused projection: (head, part, dim) becomes (part, head, dim)."""
    head, within = np.divmod(rows, 3 * head_dim)
    part, dim = np.divmod(within, head_dim)
    return np.asarray((part * heads + head) * head_dim + dim)
