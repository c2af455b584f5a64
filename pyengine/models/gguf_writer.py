"""Writing GGUF files: hyperparameters and tensor names as other engines read them.

Sources: gguf.constants for keys and names; llama.cpp's conversion for what each architecture needs.
What GGUF cannot say of a model is refused: the file is read back, and must say the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter, LlamaFileType

from pyengine.errors import UnsupportedModelError, WeightError
from pyengine.models.checkpoint import Checkpoint, open_checkpoint
from pyengine.models.config import parse_config
from pyengine.models.gguf_config import KEYS, epsilon_key, gguf_families
from pyengine.models.gguf_header import read_header
from pyengine.models.gguf_tensors import (
    LONG_FACTORS,
    ROPE_FACTORS,
    SHORT_FACTORS,
    file_rows,
    is_stacked,
    stored_names,
)
from pyengine.models.loading import widen
from pyengine.models.model_config import ModelConfig
from pyengine.models.positions import frequencies
from pyengine.models.quantized_tensors import Meter, Progress, Quantizer, Target
from pyengine.models.spec import DecoderSpec, GGUFForm
from pyengine.models.weights import plan_weights

Array = np.ndarray[Any, Any]
Metadata = Mapping[str, Any]

MARK = ("general.quantized_by", "okernel-pyengine")
"""What tells a file of ours from others, which are never replaced."""

# Written anew, or about a file that was one of several.
_NOT_COPIED = (
    MARK[0], "general.architecture", "general.alignment", "general.file_type",
    "general.quantization_version",
    "split.no", "split.count", "split.tensors.count",
)  # fmt: skip
# Facts that every file states in its own words.
_NOT_COMPARED = (
    "source", "ignored_fields", "bos_token_id", "eos_token_ids", "pad_token_id",
    "hidden_act",  # words of config.json; `activation` is what they mean
    "linear",  # (out, in) in every GGUF file
)  # fmt: skip


@dataclass(frozen=True)
class _Stored:
    """A tensor of the file: one target, or the norms of a layer's heads, stacked.

    Attributes:
        name: GGUF's.
        role: ours.
        targets: what it is made of, in order.
        shape: outermost axis first.
    """

    name: str
    role: str
    targets: tuple[Target, ...]
    shape: tuple[int, ...]

    @property
    def kind(self) -> str:
        """Its ggml type: other engines want vectors, stacked ones and positions in f32."""
        small = len(self.targets[0].shape) == 1 or self.role == "position_embed"
        return "F32" if small else self.targets[0].kind


def write_gguf(
    file: Path,
    checkpoint: Checkpoint,
    config: ModelConfig,
    spec: DecoderSpec,
    targets: Sequence[Target],
    metadata: Metadata,
    progress: Progress | None = None,
) -> None:
    """Writes a GGUF file whose matrices are q8_0, and reads back what it says of the model.

    Args:
        config, spec: of the model, resolved.
        targets: of targets_of with whole_blocks.
        metadata: the vocabulary's keys; of a GGUF source, all its keys.

    Raises:
        UnsupportedModelError: GGUF has no form for this model, or says something else of it.
    """
    form = _form(checkpoint.path, config, spec)
    writer = GGUFWriter(file, config.model_type)
    keys = {**_hyperparameters(config, spec, form, checkpoint.path.name), **metadata}
    for key, value in keys.items():
        if key not in _NOT_COPIED:
            _add(writer, key, value)
    writer.add_string(*MARK)
    writer.add_file_type(LlamaFileType.MOSTLY_Q8_0)
    writer.add_quantization_version(2)
    divisors, tensors = _rope_divisors(config), _stored_tensors(config, spec, targets)
    for name, values in divisors.items():
        _announce(writer, name, values.shape, "F32")
    for tensor in tensors:
        _announce(writer, tensor.name, tensor.shape, tensor.kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for values in divisors.values():
        writer.write_tensor_data(values)
    meter = Meter(targets, progress)
    with Quantizer(checkpoint, targets) as reader:
        for tensor in tensors:
            rows = np.concatenate([part for t in tensor.targets for part in reader.slices(t)])
            rows = _in_file_order(rows, tensor, config, spec)
            unlike = tensor.kind != tensor.targets[0].kind
            writer.write_tensor_data(widen(rows) if unlike else rows)
            meter.add(sum(target.nbytes for target in tensor.targets))
    writer.close()
    _check_says_the_same(file, config, spec)


def is_ours(file: Path) -> bool:
    """Whether write_gguf has written that file."""
    try:
        return bool(read_header(file).metadata.get(MARK[0]) == MARK[1])
    except (WeightError, UnsupportedModelError):
        return False


def _form(path: Path, config: ModelConfig, spec: DecoderSpec) -> GGUFForm:
    """The family's form. Raises where it, or llama.cpp's loader, has no place for this model."""
    form = spec.gguf
    if form is None:
        *others, last = gguf_families()
        raise UnsupportedModelError(
            f"{path}: model_type {config.model_type!r} cannot be written as GGUF; "
            f"{', '.join(others)} and {last} can"
        )
    rope_type = config.rope.rope_type if config.rope else "default"
    reason = None
    if rope_type not in form.rope_types:
        reason = f"rope_type {rope_type!r}"
    elif config.tie_word_embeddings and not form.tied_head:
        reason = "a tied head"
    elif config.q_width != config.hidden_size and not form.any_head_dim:
        reason = f"{config.num_attention_heads} heads of {config.head_dim} in {config.hidden_size}"
    if reason:
        raise UnsupportedModelError(f"{path}: {config.model_type} in GGUF has no form for {reason}")
    return form


def _stored_tensors(
    config: ModelConfig, spec: DecoderSpec, targets: Sequence[Target]
) -> list[_Stored]:
    names, found = stored_names(spec, config), []
    for (role, name), group in groupby(targets, key=lambda target: names[target.name]):
        parts = tuple(group)
        shape = parts[0].shape
        if is_stacked(spec, role):
            shape = (len(parts), *shape)
        found.append(_Stored(name, role, parts, shape))
    return found


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


def _hyperparameters(
    config: ModelConfig, spec: DecoderSpec, form: GGUFForm, name: str
) -> dict[str, Any]:
    """Keys of the architectures that are written (gguf.constants.Keys)."""
    facts: dict[str, Any] = {key: getattr(config, ours) for key, ours in KEYS.items()}
    facts |= {
        "vocab_size": config.vocab_size,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        epsilon_key(spec.norm): config.norm_eps,
        **form.write(config, spec),
    }
    rope = config.rope
    if rope is not None:
        facts |= {"rope.dimension_count": rope.rotary_dim, "rope.freq_base": rope.rope_theta}
        if rope.rope_type in ("linear", "yarn"):
            facts |= {"rope.scaling.type": rope.rope_type, "rope.scaling.factor": rope.factor}
        if rope.rope_type in ("yarn", "longrope"):
            facts["rope.scaling.original_context_length"] = rope.original_max_position_embeddings
        if rope.rope_type == "yarn":
            facts["rope.scaling.yarn_beta_fast"] = rope.beta_fast
            facts["rope.scaling.yarn_beta_slow"] = rope.beta_slow
        if rope.rope_type == "longrope":  # a type in words would be applied on top of the divisors
            facts["rope.scaling.attn_factor"] = rope.attention_factor
    keys = {f"{config.model_type}.{key}": value for key, value in facts.items()}
    return {"general.name": name, **keys}


def _rope_divisors(config: ModelConfig) -> dict[str, Array]:
    """llama3's and longrope's scaling as GGUF has them: what each frequency is divided by, f32."""
    rope = config.rope
    if rope is not None and rope.rope_type == "llama3":
        exponent = np.arange(0, rope.rotary_dim, 2) / rope.rotary_dim
        return {
            ROPE_FACTORS: np.asarray(rope.rope_theta**-exponent / frequencies(rope), np.float32)
        }
    if rope is not None and rope.rope_type == "longrope":
        return {
            LONG_FACTORS: np.array(rope.long_factor, np.float32),
            SHORT_FACTORS: np.array(rope.short_factor, np.float32),
        }
    return {}


def _in_file_order(rows: Array, tensor: _Stored, config: ModelConfig, spec: DecoderSpec) -> Array:
    """Rows as llama.cpp's conversion lays them."""
    plain = np.arange(len(rows))
    places = file_rows(spec, tensor.role, plain, config.num_attention_heads, config.head_dim)
    if np.array_equal(places, plain):
        return rows
    ordered = np.empty_like(rows)
    ordered[places] = rows
    return ordered


def _check_says_the_same(file: Path, config: ModelConfig, spec: DecoderSpec) -> None:
    """Reads the file's hyperparameters and tensor table back and compares them with the model's."""
    with open_checkpoint(file) as checkpoint:
        found, found_spec = parse_config(checkpoint.config, str(file), turned=True)
        said, meant = _facts(found, found_spec), _facts(config, spec)
        for name, value in meant.items():
            if name not in _NOT_COMPARED and value != said[name]:
                raise UnsupportedModelError(
                    f"{config.source}: {name}={value!r} cannot be said in GGUF, where it becomes "
                    f"{said[name]!r}"
                )
        plan_weights(found_spec, found, checkpoint)


def _facts(config: ModelConfig, spec: DecoderSpec) -> dict[str, Any]:
    """Everything that decides what a model computes: its numbers, and the traits of its spec."""
    traits = {f.name: getattr(spec, f.name) for f in fields(spec)}
    words = {name: v for name, v in traits.items() if isinstance(v, str | bool | None)}
    return {**words, **_in_f32(asdict(config))}


def _in_f32(value: Any) -> Any:
    """The same with every float rounded to float32, as GGUF stores it."""
    if isinstance(value, float):
        return float(np.float32(value))
    if isinstance(value, dict):
        return {key: _in_f32(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_in_f32(item) for item in value]
    return value
