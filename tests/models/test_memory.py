"""models/memory.py: the plan is what loading and the decoder carve, byte for byte."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from pyengine.models import (
    Decoder,
    WeightTypes,
    load_config,
    load_weights,
    memory_plan,
    open_checkpoint,
)
from pyengine.models.memory import aligned
from pyengine.native import Arena, DType, Queue, load_library, ops
from tests.models.single import single
from tests.tiny import FAMILIES, write_tiny

TYPES = [
    WeightTypes(DType.F32),
    WeightTypes(DType.BF16),
    WeightTypes(DType.F16, "q8_0", keep={"lm_head": DType.F16}),
]


@pytest.mark.parametrize("types", TYPES, ids=["f32", "bf16", "q8_0"])
@pytest.mark.parametrize("name", [*FAMILIES, "phi3-longrope"])
def test_the_plan_is_what_is_carved(name: str, types: WeightTypes, tmp_path: Path) -> None:
    path = write_tiny(name, tmp_path)
    library = load_library("cpu")
    config, spec = load_config(path)
    rows, blocks, context = 5, 3, 70
    plan = memory_plan(
        library, spec, config, types, DType.F16,
        max_rows=rows, max_logit_rows=2, max_context=context, blocks=blocks,
    )  # fmt: skip
    with (
        open_checkpoint(path) as checkpoint,
        Arena(library, plan.total + (1 << 20)) as arena,
        Queue(library) as queue,
    ):
        weights = load_weights(queue, arena, spec, config, checkpoint, types)
        assert arena.used_bytes == plan.weights
        queue.set_scratch(arena, plan.scratch)
        assert arena.used_bytes == plan.weights + plan.scratch
        heads, head_dim = config.num_key_value_heads, config.head_dim
        kv = [
            ops.kv_layer(arena, DType.F16, blocks, heads, head_dim)
            for _ in range(config.num_hidden_layers)
        ]
        before = plan.weights + plan.scratch + plan.kv_cache
        assert arena.used_bytes == before
        batch = SimpleNamespace(
            ids=arena.alloc((rows,), DType.I32),
            logits=arena.alloc((2, config.vocab_size), DType.F32),
        )
        before = arena.used_bytes
        Decoder(arena, spec, config, weights, kv, batch, queue=queue, max_context=context)
        carved = arena.used_bytes - before
    assert carved == plan.activations + plan.tables


def test_memory_is_enough_with_nothing_to_spare(tmp_path: Path) -> None:
    """`single` reserves exactly the planned total, loading included."""
    for family in FAMILIES:
        with single(write_tiny(family, tmp_path / family), rows=3, max_context=32) as model:
            assert np.isfinite(model.logits([1, 2, 3])).all()


def test_allocations_are_rounded_as_the_arena_rounds() -> None:
    with Arena(load_library("cpu"), 1 << 16) as arena:
        for size in (0, 1, 255, 256, 257):
            before = arena.used_bytes
            arena.alloc_bytes(size)
            assert arena.used_bytes - before == aligned(size)
