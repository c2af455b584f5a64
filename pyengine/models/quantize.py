"""Quantised copies of a model: a directory of q8_0 blocks (docs/quantization.md), or a GGUF file.

A copy is streamed, so that memory stays at a few slices, and appears whole or not at all.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pyengine.errors import RequestError
from pyengine.models.atomic import put_in_place
from pyengine.models.checkpoint import (
    Q8_0_DIRECTORY,
    Q8_0_SHAPES,
    Checkpoint,
    open_checkpoint,
    read_json,
)
from pyengine.models.config import load_config
from pyengine.models.gguf import GGUFCheckpoint
from pyengine.models.gguf_writer import is_ours, write_gguf
from pyengine.models.quantized_tensors import Meter, Progress, Quantizer, Target, targets_of
from pyengine.models.weights import choose_types, plan_weights
from pyengine.native import DType

# What is copied beside the weights, where it exists.
_COMPANIONS = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "chat_template.jinja", "LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE",
)  # fmt: skip


@dataclass(frozen=True)
class Report:
    """What was written.

    Attributes:
        path: the directory or .gguf file.
        bytes: of all tensors. q8_0_bytes: of those in 8 bits.
        kept: name -> type of the matrices that are not in 8 bits.
    """

    path: Path
    bytes: int
    q8_0_bytes: int
    kept: Mapping[str, str]


def quantize(
    model: Path,
    out: Path,
    *,
    keep: Sequence[str] = (),
    force: bool = False,
    vocabulary: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Report:
    """Writes a copy of a model whose matrices are q8_0.

    Args:
        model: a Hugging Face directory or a GGUF file.
        out: a directory, or a file if it ends in .gguf.
        keep: roles whose matrices stay as they are stored, e.g. ("lm_head",).
        force: replace a quantised model that is there already.
        vocabulary: keys that a GGUF copy of a directory needs beside the hyperparameters
            (generation.gguf_tokenizer.gguf_vocabulary).
        progress: called with (bytes written, bytes in all).

    Raises:
        RequestError: `out` is taken or cannot be written, a role is not known, or the directory
            form is wanted of a GGUF file.
        EngineError: what loading the model would raise; or values that q8_0 cannot hold.
    """
    as_gguf = out.suffix == ".gguf"
    for item in keep:
        if "=" in item:
            role = item.partition("=")[0]
            raise RequestError(f"keep={item!r}: a copy keeps a role as it is stored: keep={role!r}")
    if model.suffix == ".gguf" and not as_gguf:
        raise RequestError(f"{model} is a GGUF file, so {out} must be one too: name it *.gguf")
    if out.resolve() == model.resolve():
        raise RequestError(f"{out} is the model itself")
    config, spec = load_config(model)
    _check_free(out, force)
    with open_checkpoint(model) as checkpoint, put_in_place(out) as part:
        plan = plan_weights(spec, config, checkpoint)
        types = choose_types(plan, checkpoint, DType.F32, "q8_0", keep)
        targets = targets_of(plan, checkpoint, types, whole_blocks=as_gguf)
        if as_gguf:
            keys = vocabulary or {}
            if isinstance(checkpoint, GGUFCheckpoint):
                keys = checkpoint.header.metadata
            write_gguf(part, checkpoint, config, spec, targets, keys, progress)
        else:
            part.mkdir()
            _write_directory(model, part, checkpoint, targets, progress)
    matrices = [target for target in targets if len(target.shape) == 2]
    return Report(
        path=out,
        bytes=sum(target.nbytes for target in targets),
        q8_0_bytes=sum(target.nbytes for target in matrices if target.kind == "Q8_0"),
        kept={target.name: target.kind for target in matrices if target.kind != "Q8_0"},
    )


def _check_free(out: Path, force: bool) -> None:
    """Raises unless `out` is absent, or a quantised model that may be replaced."""
    if not os.path.lexists(out):
        return
    if not force:
        raise RequestError(f"{out} exists; force (--force) replaces a quantised copy, nothing else")
    if out.suffix == ".gguf":
        ours = out.is_file() and is_ours(out)
    else:
        config = out / "config.json"
        ours = config.is_file() and read_json(config).get("quantization_config") == Q8_0_DIRECTORY
    if not ours or out.is_symlink():
        raise RequestError(f"{out} is not a quantised copy of ours, so it is not replaced")


# ---- the directory form ------------------------------------------------------------------------


def _write_directory(
    source: Path,
    folder: Path,
    checkpoint: Checkpoint,
    targets: Sequence[Target],
    progress: Progress | None = None,
) -> None:
    """Writes a q8_0 directory: weights, config.json with its mark, and the companions of `source`.

    folder: an empty directory.
    """
    config = {**checkpoint.config, "quantization_config": Q8_0_DIRECTORY}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name in _COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    # Wide types first, so that every tensor begins at a multiple of its type's size.
    ordered = sorted(targets, key=lambda t: (t.kind == "Q8_0", t.kind != "F32"))
    meter = Meter(targets, progress)
    with open(folder / "model.safetensors", "wb") as out, Quantizer(checkpoint, targets) as reader:
        _write_header(out, ordered)
        for target in ordered:
            for rows in reader.slices(target):
                out.write(rows.data)
                meter.add(rows.nbytes)


def _write_header(out: BinaryIO, targets: Sequence[Target]) -> None:
    shapes = {t.name: list(t.shape) for t in targets if t.kind == "Q8_0"}
    header: dict[str, Any] = {
        "__metadata__": {"format": "pt", Q8_0_SHAPES: json.dumps(shapes, separators=(",", ":"))}
    }
    offset = 0
    for target in targets:
        header[target.name] = {
            "dtype": "U8" if target.kind == "Q8_0" else target.kind,
            "shape": list(target.lies),
            "data_offsets": [offset, offset + target.nbytes],
        }
        offset += target.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    out.write(struct.pack("<Q", len(text)) + text)
