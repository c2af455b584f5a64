"""How much is reserved and for what: context, KV blocks, step sizes, bytes by kind."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from pyengine.errors import OutOfMemory, RequestError
from pyengine.generation.kv_cache import blocks_for
from pyengine.generation.runner import StepRunner
from pyengine.generation.step import StepShape
from pyengine.models.memory import MemoryPlan, memory_plan
from pyengine.models.model_config import ModelConfig
from pyengine.models.spec import DecoderSpec
from pyengine.models.weights import WeightTypes
from pyengine.native import Device, DType
from pyengine.native.ops import KV_BLOCK_SIZE

_log = logging.getLogger("pyengine")

CHUNK_ROWS = {"cpu": 256, "hip": 512, "cuda": 512}  # token rows of a step, at most
ALL_LOGITS_ROWS = 64  # rows of a step whose logits can all be wanted
MAX_BATCH = 256
KV_SHARE = 0.8  # of free memory, at most, for the KV cache by default
SMALLEST_CONTEXT = 256  # tokens below which a context is not worth shrinking to


@dataclass(frozen=True)
class Request:
    """What a user asked for; None: our choice."""

    max_context: int | None = None
    max_batch: int = 8
    kv_tokens: int | None = None
    memory_fraction: float = 0.9
    chunk_rows: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.max_batch <= MAX_BATCH:
            raise RequestError(f"max_batch={self.max_batch}: must be between 1 and {MAX_BATCH}")
        for name in ("max_context", "kv_tokens", "chunk_rows"):
            value = getattr(self, name)
            if value is not None and not 1 <= value < 2**31:
                raise RequestError(f"{name}={value}: must be at least 1 and less than 2^31")
        if not 0.0 < self.memory_fraction <= 1.0:
            raise RequestError(f"memory_fraction={self.memory_fraction}: must be > 0 and <= 1")


@dataclass(frozen=True)
class Budget:
    """What is reserved on the device.

    Attributes:
        max_context: most tokens of a sequence. blocks: KV blocks in all.
        shape: sizes of a step. memory: bytes by kind, of the model. step_bytes: of what runs steps.
    """

    max_context: int
    blocks: int
    shape: StepShape
    memory: MemoryPlan
    step_bytes: int

    @property
    def total_bytes(self) -> int:
        """Size of the arena."""
        return self.memory.total + self.step_bytes

    def by_kind(self) -> dict[str, int]:
        """Bytes of each kind, for people."""
        plan = self.memory
        return {
            "weights": plan.weights,
            "kv_cache": plan.kv_cache,
            "activations": plan.activations + plan.tables + plan.scratch,
            "step": self.step_bytes,
        }


def make_budget(
    device: Device,
    spec: DecoderSpec,
    config: ModelConfig,
    types: WeightTypes,
    kv_dtype: DType,
    request: Request,
    *,
    tied: bool,
) -> Budget:
    """Sizes everything for a device's free memory.

    tied: whether the head is stored as the embedding. max_context is lowered, and said aloud, only
        where the user did not ask for one.

    Raises:
        RequestError: more context than the model has positions for; with both numbers.
        OutOfMemory: it does not fit; says needed, free and total bytes and what to change.
    """
    context = _context(config, request.max_context)
    backend = device.library.backend

    def plan(context: int, blocks: int) -> Budget:
        rows = min(request.chunk_rows or CHUNK_ROWS[backend], max(context, request.max_batch))
        rows = max(rows, request.max_batch)
        logit_rows = max(request.max_batch, min(rows, ALL_LOGITS_ROWS))
        per_sequence = blocks_for(context)
        shape = StepShape(rows, logit_rows, request.max_batch, per_sequence, config.vocab_size)
        return Budget(
            context,
            blocks,
            shape,
            memory_plan(
                device.library, spec, config, types, kv_dtype, max_rows=rows, max_context=context,
                blocks=blocks, max_logit_rows=logit_rows, tied=tied,
            ),
            shape.device_bytes()
            + StepRunner.device_bytes(request.max_batch, per_sequence, config.vocab_size),
        )  # fmt: skip

    free, total = device.library.device_memory(device.index)
    one = plan(context, 1)
    block_bytes = one.memory.kv_cache
    fixed_bytes = one.total_bytes - block_bytes
    allowed = int(free * request.memory_fraction)
    room = max(min(int(free * KV_SHARE), allowed - fixed_bytes) // block_bytes, 0)
    if request.kv_tokens is not None:
        blocks = needed = blocks_for(request.kv_tokens)
        fits = fixed_bytes + blocks * block_bytes <= allowed
    else:
        blocks, needed = min(request.max_batch * blocks_for(context), room), blocks_for(context)
        fits = blocks >= needed
    if not fits and request.max_context is None and room * KV_BLOCK_SIZE >= SMALLEST_CONTEXT:
        context, blocks = min(context, room * KV_BLOCK_SIZE), min(blocks, room)
        _log.warning("max_context lowered to %d tokens: memory is short", context)
    elif not fits:
        raise OutOfMemory(
            f"not enough memory on {device.label}: needed {fixed_bytes + needed * block_bytes} "
            f"bytes, free {free}, total {total}, of the free {request.memory_fraction:.0%} may be "
            f"used; lower max_context ({context}) or kv_tokens, take a smaller dtype, or "
            "weights='q8_0'"
        )
    return plan(context, blocks)


def _context(config: ModelConfig, asked: int | None) -> int:
    limit = config.position_limit
    if asked is None:
        return config.max_position_embeddings
    if limit is not None and asked > limit:
        raise RequestError(f"max_context={asked}: this model has positions for {limit} tokens")
    return asked
