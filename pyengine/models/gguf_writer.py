"""Writing GGUF files: hyperparameters and tensor names as other engines read them.

Sources: gguf.constants for keys and names; llama.cpp's conversion for what each architecture needs.
What GGUF cannot say of a model is refused: the file is read back, and must say the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter, LlamaFileType

from pyengine.errors import UnsupportedModelError
from pyengine.models.checkpoint import Checkpoint, open_checkpoint
from pyengine.models.config import ModelConfig, parse_config
from pyengine.models.gguf import ARCHITECTURES, ROPE_FACTORS, gguf_name, interleaved_row
from pyengine.models.loading import widen
from pyengine.models.positions import frequencies
from pyengine.models.quantized_tensors import Meter, Progress, Quantizer, Target
from pyengine.models.weights import plan_weights

Array = np.ndarray[Any, Any]
Metadata = Mapping[str, Any]

# Written anew, or about a file that was one of several.
_NOT_COPIED = (
    "general.architecture", "general.file_type", "general.quantization_version",
    "split.no", "split.count", "split.tensors.count",
)  # fmt: skip
# Facts that every file states in its own words.
_NOT_COMPARED = ("source", "ignored_fields", "bos_token_id", "eos_token_ids", "pad_token_id")


def write_gguf(
    file: Path,
    checkpoint: Checkpoint,
    config: ModelConfig,
    targets: Sequence[Target],
    metadata: Metadata,
    progress: Progress | None = None,
) -> None:
    """Writes a GGUF file whose matrices are q8_0, and reads back what it says of the model.

    Args:
        targets: of targets_of with whole_blocks.
        metadata: the vocabulary's keys; of a GGUF source, all its keys.

    Raises:
        UnsupportedModelError: GGUF has no form for this model, or says something else of it.
    """
    architecture = config.model_type
    if architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{checkpoint.path}: model_type {architecture!r} cannot be written as GGUF; "
            f"{' and '.join(ARCHITECTURES)} can"
        )
    writer = GGUFWriter(file, architecture)
    keys = {**_hyperparameters(config, checkpoint.path.name), **metadata}
    for key, value in keys.items():
        if key not in _NOT_COPIED:
            _add(writer, key, value)
    writer.add_file_type(LlamaFileType.MOSTLY_Q8_0)
    writer.add_quantization_version(2)
    factors = _rope_factors(config)
    if factors is not None:
        _announce(writer, ROPE_FACTORS, factors.shape, "F32")
    for target in targets:
        _announce(writer, gguf_name(target.name), target.shape, _stored_as(target))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    if factors is not None:
        writer.write_tensor_data(factors)
    meter = Meter(targets, progress)
    with Quantizer(checkpoint, targets) as reader:
        for target in targets:
            rows = _in_file_order(np.concatenate(list(reader.slices(target))), target, config)
            writer.write_tensor_data(widen(rows) if len(target.shape) == 1 else rows)
            meter.add(target.nbytes)
    writer.close()
    _check_says_the_same(file, config)


def _stored_as(target: Target) -> str:
    """ggml type of a tensor: other engines want vectors in f32."""
    return "F32" if len(target.shape) == 1 else target.kind


def _announce(writer: GGUFWriter, name: str, shape: tuple[int, ...], kind: str) -> None:
    item_bytes = {"F32": 4, "F16": 2, "BF16": 2, "Q8_0": 34 / 32}[kind]
    size = int(prod(shape) * item_bytes)
    # With another dtype than uint8 the shape is taken as it is; the type is `raw_dtype`.
    values = np.dtype(np.float32)
    writer.add_tensor_info(name, shape, values, size, raw_dtype=GGMLQuantizationType[kind])


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    """A key with the type that other engines expect of such a value; empty lists have none."""
    if isinstance(value, list):
        if value:
            writer.add_key_value(key, value, GGUFValueType.ARRAY)
        return
    kind = GGUFValueType.get_type(value)
    if kind == GGUFValueType.INT32 and value >= 0:
        kind = GGUFValueType.UINT32 if value < 1 << 32 else GGUFValueType.UINT64
    writer.add_key_value(key, value, kind)


def _hyperparameters(config: ModelConfig, name: str) -> dict[str, Any]:
    """Keys of the architectures that are written (gguf.constants.Keys)."""
    facts: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
    }
    rope = config.rope
    if rope is not None:
        facts |= {"rope.dimension_count": rope.rotary_dim, "rope.freq_base": rope.rope_theta}
        if rope.rope_type in ("linear", "yarn"):
            facts |= {"rope.scaling.type": rope.rope_type, "rope.scaling.factor": rope.factor}
        if rope.rope_type == "yarn":
            facts["rope.scaling.original_context_length"] = rope.original_max_position_embeddings
            facts["rope.scaling.yarn_beta_fast"] = rope.beta_fast
            facts["rope.scaling.yarn_beta_slow"] = rope.beta_slow
    keys = {f"{config.model_type}.{key}": value for key, value in facts.items()}
    return {"general.name": name, **keys}


def _rope_factors(config: ModelConfig) -> Array | None:
    """llama3's rope scaling as GGUF has it: what each frequency is divided by, f32."""
    rope = config.rope
    if rope is None or rope.rope_type != "llama3":
        return None
    exponent = np.arange(0, rope.rotary_dim, 2) / rope.rotary_dim
    return np.asarray(rope.rope_theta**-exponent / frequencies(rope), np.float32)


def _in_file_order(rows: Array, target: Target, config: ModelConfig) -> Array:
    """Rows of q and k of a Llama lie in pairs."""
    module = target.name.split(".")[-2]
    if config.model_type != "llama" or module not in ("q_proj", "k_proj"):
        return rows
    ordered = np.empty_like(rows)
    ordered[interleaved_row(np.arange(len(rows)), config.head_dim)] = rows
    return ordered


def _check_says_the_same(file: Path, config: ModelConfig) -> None:
    """Reads the file's hyperparameters and tensor table back and compares them with the model's."""
    with open_checkpoint(file) as checkpoint:
        found, spec = parse_config(checkpoint.config, str(file))
        plan_weights(spec, found, checkpoint)
    for name, value in _in_f32(asdict(config)).items():
        other = _in_f32(asdict(found))[name]
        if name not in _NOT_COMPARED and value != other:
            raise UnsupportedModelError(
                f"{config.source}: {name}={value!r} cannot be said in GGUF, where it becomes "
                f"{other!r}"
            )


def _in_f32(value: Any) -> Any:
    """The same with every float rounded to float32, as GGUF stores it."""
    if isinstance(value, float):
        return float(np.float32(value))
    if isinstance(value, dict):
        return {key: _in_f32(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_in_f32(item) for item in value]
    return value
