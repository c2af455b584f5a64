"""A model's weights: which tensors it must have, and the strict accounting of a checkpoint.

`plan_weights` compares names, shapes and types with what the spec asks for, before device memory is
reserved; loading.py then reads. File formats are readers behind checkpoint.py's `Checkpoint`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from pyengine.errors import RequestError, WeightError
from pyengine.models.checkpoint import Checkpoint, is_ignorable, main_type
from pyengine.models.layouts import Layout, PerHead, Rows, Transposed
from pyengine.models.model_config import ModelConfig
from pyengine.models.spec import DecoderSpec
from pyengine.native import DType

Array = np.ndarray[Any, Any]

SLICE_BYTES = 8 << 20  # one read; also the staging area of a GPU
_READABLE = ("F32", "F16", "BF16", "Q8_0")


@dataclass(frozen=True)
class Source:
    """A stored tensor, or part of a fused one, that a weight is made of.

    Attributes:
        name: in the checkpoint.
        shape: as stored.
        row: first target row.
        layout: how its rows lie among the target's.
    """

    name: str
    shape: tuple[int, ...]
    row: int = 0
    layout: Layout = Rows()

    def slices(self, limit_bytes: int) -> Iterator[slice]:
        """The stored rows in slices of at most about that many bytes, whole units of the layout."""
        unit = self.layout.unit
        unit_bytes = 4 * unit * prod(self.shape[1:])
        step = max(limit_bytes // max(unit_bytes, 1), 1) * unit
        rows = self.shape[0]
        return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


FLOATS = {"f32": DType.F32, "f16": DType.F16, "bf16": DType.BF16}
"""Words for the types of weights that are not quantised."""


@dataclass(frozen=True)
class WeightTypes:
    """How matrices are stored.

    Attributes:
        dtype: F32, F16 or BF16.
        weights: "q8_0" to store them quantised; None: in dtype.
        keep: roles that stay floats all the same, and their types, e.g. {"lm_head": DType.F16}.
    """

    dtype: DType
    weights: str | None = None
    keep: Mapping[str, DType] = field(default_factory=dict)


@dataclass(frozen=True)
class Weight:
    """A matrix (out, in) or vector (n) of the decoder.

    Attributes:
        role: "qkv", "qkv.bias", "attn_norm", ...
        layer: None outside the layers.
    """

    role: str
    layer: int | None
    shape: tuple[int, ...]
    sources: tuple[Source, ...]

    @property
    def quantisable(self) -> bool:
        """Whether 8 bits are an option: vectors and the small position table are always f32."""
        return len(self.shape) == 2 and self.role != "position_embed"

    def storage(self, types: WeightTypes) -> DType:
        """Type it is kept in."""
        if not self.quantisable:
            return DType.F32
        if types.weights is None:
            return types.dtype
        return types.keep.get(self.role, DType[types.weights.upper()])


@dataclass(frozen=True)
class WeightPlan:
    """What will be loaded from a checkpoint; every tensor is accounted for.

    Attributes:
        weights: in the order of the forward pass.
        tied: the head is the embedding matrix.
        ignored: tensors left out.
    """

    weights: tuple[Weight, ...]
    tied: bool
    ignored: tuple[str, ...] = ()


def choose_types(
    plan: WeightPlan,
    checkpoint: Checkpoint,
    dtype: DType,
    weights: str | None = None,
    keep: Sequence[str] = (),
) -> WeightTypes:
    """How a checkpoint's matrices will be stored.

    Args:
        dtype: of what is not quantised.
        weights: "q8_0"; "float": in dtype, whatever the file has; None: as the file has them, so
            that a q8_0 file stays what it is, and any other is stored in dtype.
        keep: roles that stay in dtype ("lm_head") or another type ("lm_head=f16"). The head's name
            stands for a tied embedding too.

    Raises:
        RequestError: another word, or a role that this model has no matrix of, or a type.
    """
    if weights not in (None, "q8_0", "float"):
        raise RequestError(f"weights={weights!r}: expected q8_0 or float")
    matrices = [weight for weight in plan.weights if weight.quantisable]
    roles = list(dict.fromkeys(weight.role for weight in matrices))
    kept: dict[str, DType] = {}
    for item in keep:
        role, _, word = item.partition("=")
        role = "embed" if plan.tied and role == "lm_head" else role
        if role not in roles:
            raise RequestError(f"keep={item!r}: expected some of {', '.join(roles)}")
        if "=" in item and word not in FLOATS:
            raise RequestError(f"keep={item!r}: expected a role, or {role}={'|'.join(FLOATS)}")
        kept[role] = FLOATS.get(word, dtype)
    if weights is None and main_type(checkpoint) == "Q8_0":
        weights = "q8_0"
        for weight in matrices:
            if any(checkpoint.stored_as(source.name) != "Q8_0" for source in weight.sources):
                kept.setdefault(weight.role, dtype)
    quantised = "q8_0" if weights == "q8_0" else None
    if keep and not quantised:
        raise RequestError(f"keep={keep[0]!r}: nothing is quantised; it goes with weights='q8_0'")
    return WeightTypes(dtype, quantised, kept if quantised else {})


# ---- what a model must have --------------------------------------------------------------------


def expected_weights(spec: DecoderSpec, config: ModelConfig, *, tied: bool) -> list[Weight]:
    """Every weight of a model under full checkpoint names, in the order of the forward pass."""
    hidden, width = config.hidden_size, config.intermediate_size
    q, kv = config.q_width, config.kv_width
    found: list[Weight] = []

    def name(role: str, layer: int | None, head: int = 0) -> str:
        return spec.tensors[role].format(i=layer, h=head)

    def table(role: str, rows: int) -> None:
        source = Source(f"{name(role, None)}.weight", (rows, hidden))
        found.append(Weight(role, None, (rows, hidden), (source,)))

    def norm(role: str, layer: int | None, bias: bool = spec.norm_bias, cols: int = hidden) -> None:
        for part in ("weight", "bias") if bias else ("weight",):
            source = Source(f"{name(role, layer)}.{part}", (cols,))
            found.append(Weight(_role(role, part), layer, (cols,), (source,)))

    def head_norms(role: str, layer: int, heads: int) -> None:
        if spec.qk_norm == "full":
            norm(role, layer, bias=False, cols=heads * config.head_dim)
            return
        sources = tuple(
            Source(f"{name(role, layer, h)}.weight", (config.head_dim,), h * config.head_dim)
            for h in range(heads)
        )
        found.append(Weight(role, layer, (heads * config.head_dim,), sources))

    def linear(
        role: str, layer: int, parts: Sequence[tuple[str, int]], inner: int, bias: bool
    ) -> None:
        rows = sum(count for _, count in parts)
        interleaved = role == "qkv" and spec.qkv == "per_head"
        plain: Layout = (
            PerHead(config.num_attention_heads, config.head_dim) if interleaved else Rows()
        )
        for part in ("weight", "bias") if bias else ("weight",):
            sources, row = [], 0
            for part_role, count in parts:
                shape: tuple[int, ...] = (count, inner) if part == "weight" else (count,)
                layout = plain
                if part == "weight" and spec.linear == "in_out":
                    shape, layout = shape[::-1], Transposed(inner)
                sources.append(Source(f"{name(part_role, layer)}.{part}", shape, row, layout))
                row += count
            shape = (rows, inner) if part == "weight" else (rows,)
            found.append(Weight(_role(role, part), layer, shape, tuple(sources)))

    table("embed", config.vocab_size)
    if spec.position == "learned":
        table("position_embed", config.max_position_embeddings)
    if spec.embed_norm:
        norm("embed_norm", None)
    qkv = [("q", q), ("k", kv), ("v", kv)] if spec.qkv == "split" else [("qkv", q + 2 * kv)]
    gate_up = [("gate", width), ("up", width)]
    if spec.gate_up == "concat":
        gate_up = [("gate_up", 2 * width)]
    for layer in range(config.num_hidden_layers):
        norm("attn_norm", layer)
        linear("qkv", layer, qkv, hidden, spec.qkv_bias)
        if spec.qk_norm:
            head_norms("q_norm", layer, config.num_attention_heads)
            head_norms("k_norm", layer, config.num_key_value_heads)
        linear("attn_out", layer, [("attn_out", hidden)], q, spec.attn_out_bias)
        if not spec.parallel_residual:
            norm("mlp_norm", layer)
        if spec.mlp == "gated":
            linear("gate_up", layer, gate_up, hidden, spec.mlp_bias)
        else:
            linear("up", layer, [("up", width)], hidden, spec.mlp_bias)
        linear("down", layer, [("down", hidden)], width, spec.mlp_bias)
    norm("final_norm", None)
    if not tied:
        table("lm_head", config.vocab_size)
    return found


def _role(role: str, part: str) -> str:
    return role if part == "weight" else f"{role}.bias"


def parameter_count(spec: DecoderSpec, config: ModelConfig) -> int:
    """Parameters as the model's class counts them: a tied head once."""
    weights = expected_weights(spec, config, tied=config.tie_word_embeddings)
    return sum(prod(source.shape) for weight in weights for source in weight.sources)


# ---- strict accounting -------------------------------------------------------------------------


def plan_weights(spec: DecoderSpec, config: ModelConfig, checkpoint: Checkpoint) -> WeightPlan:
    """Compares a checkpoint with what the model must have; reads no weights but a redundant head.

    The head is `lm_head` where the checkpoint has one (even if the config ties it, as in
    transformers 5; stored once when equal to the embedding), else the embedding if tied.

    Raises:
        WeightError: a tensor is missing, of the wrong shape or type, or unknown; names it.
    """
    names = set(checkpoint.names())
    head, embed = (f"{spec.tensors[role]}.weight" for role in ("lm_head", "embed"))
    tied = config.tie_word_embeddings and head not in names
    weights = expected_weights(spec, config, tied=tied)
    if not _has_prefix(spec, weights, names, checkpoint):
        weights = [_without_prefix(weight, spec.prefix) for weight in weights]
        embed = embed.removeprefix(spec.prefix)
    _check_names(spec, weights, names, checkpoint)
    for weight in weights:
        for source in weight.sources:
            _check_tensor(source, checkpoint)
    used = {source.name for weight in weights for source in weight.sources}
    if config.tie_word_embeddings and not tied and _same_tensor(checkpoint, head, embed):
        tied = True
        weights = [weight for weight in weights if weight.role != "lm_head"]
    return WeightPlan(tuple(weights), tied, tuple(sorted(names - used)))


def _has_prefix(
    spec: DecoderSpec, weights: Sequence[Weight], names: set[str], checkpoint: Checkpoint
) -> bool:
    """Whether names carry the prefix; files saved from the base class lack it, as a whole."""
    full = [s.name for w in weights for s in w.sources if s.name.startswith(spec.prefix)]
    having = [name for name in full if name in names]
    lacking = [bare for name in full if (bare := name.removeprefix(spec.prefix)) in names]
    if having and lacking:
        raise WeightError(
            f"{checkpoint.path}: some tensors have the prefix {spec.prefix!r} ({having[0]}) "
            f"and some lack it ({lacking[0]})"
        )
    return not lacking


def _without_prefix(weight: Weight, prefix: str) -> Weight:
    sources = tuple(
        Source(s.name.removeprefix(prefix), s.shape, s.row, s.layout) for s in weight.sources
    )
    return Weight(weight.role, weight.layer, weight.shape, sources)


def _check_names(
    spec: DecoderSpec, weights: Sequence[Weight], names: set[str], checkpoint: Checkpoint
) -> None:
    """Raises for a missing tensor, or for one that nothing asks for."""
    wanted = [source.name for weight in weights for source in weight.sources]
    missing = [name for name in wanted if name not in names]
    unknown = sorted(
        name for name in names - set(wanted) if not is_ignorable(name, checkpoint.shape(name))
    )
    if missing:
        head = f"{spec.tensors['lm_head']}.weight" in missing
        raise WeightError(
            f"{checkpoint.path}: {_and_more(missing)} missing"
            + (" (tie_word_embeddings is false)" if head else "")
            + (f"; {_and_more(unknown)} not known to {spec.model_type}" if unknown else "")
        )
    if unknown:
        raise WeightError(
            f"{checkpoint.path}: {_and_more(unknown)} not known to {spec.model_type} "
            "with this config.json; every tensor must be used"
        )


def _and_more(names: Sequence[str]) -> str:
    return f"{names[0]} is" if len(names) == 1 else f"{names[0]} and {len(names) - 1} more are"


def _check_tensor(source: Source, checkpoint: Checkpoint) -> None:
    """Raises for a wrong shape or a type that cannot be read."""
    shape, dtype = checkpoint.shape(source.name), checkpoint.dtype(source.name)
    if shape != source.shape:
        raise WeightError(
            f"{checkpoint.path}: {source.name} has shape {list(shape)}, "
            f"config.json makes it {list(source.shape)}"
        )
    if dtype not in _READABLE:
        raise WeightError(
            f"{checkpoint.path}: {source.name} is stored as {dtype}; "
            f"supported: {', '.join(_READABLE)}"
        )


def _same_tensor(checkpoint: Checkpoint, name: str, other: str) -> bool:
    """Whether two matrices hold the same bytes."""
    if checkpoint.dtype(name) != checkpoint.dtype(other):
        return False
    source = Source(name, checkpoint.shape(name))
    return all(
        np.array_equal(
            checkpoint.read(name, rows).view(np.uint8), checkpoint.read(other, rows).view(np.uint8)
        )
        for rows in source.slices(SLICE_BYTES)
    )
