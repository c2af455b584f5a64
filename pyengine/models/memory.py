"""What a model needs on its device, in bytes by kind, so that one arena is reserved up front."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from pyengine.models.model_config import ModelConfig
from pyengine.models.spec import DecoderSpec
from pyengine.models.weights import SLICE_BYTES, WeightTypes, expected_weights
from pyengine.native import DType, Library, ops

_ALIGNMENT = 256  # of everything carved from an arena


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by kind, each allocation rounded up as the arena does.

    Attributes:
        weights: packed matrices and vectors.
        kv_cache: all layers' paged caches.
        activations: the decoder's working buffers.
        tables: rotary table or ALiBi slopes.
        scratch: working memory of the queue (Queue.set_scratch).
        loading: needed only while weights are loaded, before the rest is carved.
    """

    weights: int
    kv_cache: int
    activations: int
    tables: int
    scratch: int
    loading: int

    @property
    def total(self) -> int:
        """Bytes to reserve, the driver's own step buffers not counted."""
        rest = self.kv_cache + self.activations + self.tables + self.scratch
        return self.weights + max(self.loading, rest)


def aligned(size_bytes: int) -> int:
    """Bytes that an allocation takes in an arena."""
    return -(-max(size_bytes, 1) // _ALIGNMENT) * _ALIGNMENT


def activation_shapes(
    spec: DecoderSpec, config: ModelConfig, max_rows: int, max_logit_rows: int
) -> dict[str, tuple[int, int]]:
    """The decoder's f32 buffers by name.

    stream: the residual stream. normed: a norm's output, or a sublayer's before its norm.
    qkv: fused projections. heads: attention's output, heads side by side. gate_up: fused, of gated
    MLPs. inner: input of the down projection. picked: the rows whose logits are wanted.
    """
    hidden, width = config.hidden_size, config.intermediate_size
    shapes = {
        "stream": (max_rows, hidden),
        "normed": (max_rows, hidden),
        "qkv": (max_rows, config.q_width + 2 * config.kv_width),
        "heads": (max_rows, config.q_width),
        "inner": (max_rows, width),
        "picked": (max_logit_rows, hidden),
    }
    if spec.mlp == "gated":
        shapes["gate_up"] = (max_rows, 2 * width)
    return shapes


def rope_table_shape(config: ModelConfig, max_context: int) -> tuple[int, int]:
    """(rows, rotary_dim): one set of positions, or two where long sequences have their own."""
    rope = config.rope
    if rope is None:
        return (0, 0)
    return (max_context * (1 if rope.switch_length is None else 2), rope.rotary_dim)


def memory_plan(
    library: Library,
    spec: DecoderSpec,
    config: ModelConfig,
    types: WeightTypes,
    kv_dtype: DType,
    *,
    max_rows: int,
    max_context: int,
    blocks: int,
    max_logit_rows: int | None = None,
    tied: bool | None = None,
) -> MemoryPlan:
    """Bytes a model needs.

    Args:
        types: how matrices are stored. kv_dtype: the cache's type.
        max_rows: most token rows in one step. max_logit_rows: most rows with logits (default all).
        max_context: most tokens of one sequence.
        blocks: KV blocks, scratch block included.
        tied: whether the head is the embedding (WeightPlan.tied; default as the config says).
    """
    tied = config.tie_word_embeddings if tied is None else tied
    weights = expected_weights(spec, config, tied=tied)
    matrices = [(w.storage(types), *w.shape) for w in weights if len(w.shape) == 2]
    vectors = [w.shape[0] for w in weights if len(w.shape) == 1]
    heads, head_dim = config.num_attention_heads, config.head_dim
    layer_cache = ops.kv_cache_bytes(
        library, kv_dtype, blocks, config.num_key_value_heads, head_dim
    )
    shapes = activation_shapes(spec, config, max_rows, max_logit_rows or max_rows)
    table = 4 * prod(rope_table_shape(config, max_context))
    slopes = 4 * heads if spec.position == "alibi" else 0
    scratch = [ops.attention_scratch_bytes(library, max_rows, heads, head_dim, max_context)]
    scratch += [
        ops.matmul_scratch_bytes(library, kind, max_rows, out, inner)
        for kind, out, inner in dict.fromkeys(matrices)
    ]
    staging = 0 if library.backend == "cpu" else SLICE_BYTES
    return MemoryPlan(
        weights=sum(aligned(ops.matrix_bytes(library, *matrix)) for matrix in matrices)
        + sum(aligned(4 * count) for count in vectors),
        kv_cache=config.num_hidden_layers * aligned(layer_cache),
        activations=sum(aligned(4 * prod(shape)) for shape in shapes.values()),
        tables=sum(aligned(size) for size in (table, slopes) if size),
        scratch=aligned(max(scratch)),
        loading=aligned(4 * len(matrices)) + aligned(staging),
    )
