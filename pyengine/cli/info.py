"""`pyengine info`: what a model is and what it needs, without reading its weights."""

from __future__ import annotations

import json
from typing import Any

from pyengine.cli import options
from pyengine.generation.budget import Request, make_budget
from pyengine.generation.source import open_model, parse_dtype
from pyengine.models.checkpoint import main_type
from pyengine.models.config import describe
from pyengine.models.weights import choose_types, parameter_count, plan_weights
from pyengine.native import choose_device


def info(
    model: options.Model,
    as_json: options.Json = False,
    device: options.Device = "cpu",
    dtype: options.Dtype = "auto",
    weights: options.Weights = None,
    max_context: options.MaxContext = None,
    max_batch: options.MaxBatch = 8,
    kv_tokens: options.KvTokens = None,
) -> None:
    """Show family, traits, parameters, memory by kind, and fields that were not used.

    The config and the weight files' headers are checked just as when the model is loaded.
    """
    source = open_model(model)
    try:
        config, spec = source.config, source.spec
        kind = parse_dtype("dtype", dtype, source.checkpoint)
        plan = plan_weights(spec, config, source.checkpoint)
        types = choose_types(plan, source.checkpoint, kind, weights)
        budget = make_budget(
            choose_device(device),
            spec,
            config,
            types,
            kind,
            Request(max_context=max_context, max_batch=max_batch, kv_tokens=kv_tokens),
            tied=plan.tied,
        )
        facts: dict[str, Any] = {
            "model": str(source.path),
            "family": config.model_type,
            **describe(config, spec),
            "parameters": parameter_count(spec, config),
            "stored_dtype": main_type(source.checkpoint).lower(),
            "dtype": kind.name.lower(),
            "weights": types.weights or kind.name.lower(),
            "max_context": budget.max_context,
            "memory_bytes": budget.by_kind(),
            "eos_token_ids": list(config.eos_token_ids),
            "chat_template": source.tokenizer is not None and source.tokenizer.has_chat_template,
            "ignored_fields": list(config.ignored_fields),
            "ignored_tensors": list(plan.ignored),
        }
    finally:
        source.close()
    if as_json:
        print(json.dumps(facts))
        return
    for name, value in facts.items():
        print(f"{name:<20} {_shown(name, value)}")


def _shown(name: str, value: Any) -> str:
    """A value as a person reads it."""
    if name == "parameters":
        return f"{value:,}"
    if name == "memory_bytes":
        parts = (f"{kind} {size / 1e6:,.1f} MB" for kind, size in value.items())
        return ", ".join(parts)
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return str(value)
