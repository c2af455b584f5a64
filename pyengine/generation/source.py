"""Models that are found and understood, before their weights are read."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from pyengine.errors import RequestError
from pyengine.generation.tokenizer import Tokenizer
from pyengine.generation.tokenizer_files import load_tokenizer
from pyengine.models.checkpoint import Checkpoint, main_type, open_checkpoint
from pyengine.models.config import load_config, parse_config
from pyengine.models.hub import resolve_model
from pyengine.models.model_config import ModelConfig
from pyengine.models.spec import DecoderSpec
from pyengine.models.weights import FLOATS
from pyengine.native import DType


@dataclass(frozen=True)
class ModelSource:
    """A model that is found and understood, its weights not yet read.

    Attributes:
        config, spec: its numbers and traits. checkpoint: its open weight files.
        tokenizer: None for a model without one (token ids only).
    """

    config: ModelConfig
    spec: DecoderSpec
    checkpoint: Checkpoint
    tokenizer: Tokenizer | None
    path: Path

    def close(self) -> None:
        """Closes the weight files."""
        self.checkpoint.close()


def open_model(model: str | os.PathLike[str]) -> ModelSource:
    """Finds a model by path or name, fetching it if need be, and reads all but its weights."""
    path = resolve_model(model)
    config, spec = load_config(path)
    checkpoint = open_checkpoint(path)
    try:
        return ModelSource(config, spec, checkpoint, load_tokenizer(path), path)
    except BaseException:
        checkpoint.close()
        raise


def source_of(checkpoint: Checkpoint) -> ModelSource:
    """A model of nothing but an open checkpoint, without tokenizer."""
    config, spec = parse_config(checkpoint.config, str(checkpoint.path))
    return ModelSource(config, spec, checkpoint, None, checkpoint.path)


def parse_dtype(option: str, word: str, checkpoint: Checkpoint | None = None) -> DType:
    """The type an option names; "auto": what most weights are stored in, f16 if quantised."""
    if word == "auto" and checkpoint is not None:
        return FLOATS.get(main_type(checkpoint).lower(), DType.F16)
    if word not in FLOATS:
        expected = ", ".join((["auto"] if checkpoint else []) + list(FLOATS))
        raise RequestError(f"{option}={word!r}: expected one of {expected}")
    return FLOATS[word]
