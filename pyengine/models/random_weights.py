"""A model without files: weights of any family, drawn at random in memory."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from math import prod, sqrt
from pathlib import Path
from typing import Any

import numpy as np

from pyengine.models.config import parse_config
from pyengine.models.weights import Array, expected_weights


class RandomCheckpoint:
    """A Checkpoint of random float32: every tensor is cut from one list of normal numbers.

    Matrices keep the scale of what they multiply; a norm's weights are spread around 1. Where a
    tensor is cut depends on its name, so that no two are alike; one seed gives one model.

    Args:
        config: config.json as a dict.
        count: of the numbers; larger tensors repeat them.
    """

    def __init__(self, config: Mapping[str, Any], *, seed: int = 0, count: int = 1 << 20) -> None:
        self.path = Path("random weights")
        self.config = dict(config)
        parsed, spec = parse_config(self.config, str(self.path))
        self._shapes = {
            source.name: source.shape
            for weight in expected_weights(spec, parsed, tied=parsed.tie_word_embeddings)
            for source in weight.sources
        }
        self._numbers = np.random.default_rng(seed).standard_normal(count, dtype=np.float32)

    def names(self) -> list[str]:
        """Every tensor of the model."""
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Elements per axis."""
        return self._shapes[name]

    def dtype(self, name: str) -> str:
        """Always "F32"."""
        return "F32"

    stored_as = dtype

    def read(self, name: str, rows: slice | None = None) -> Array:
        """The tensor, or rows of its first axis: float32."""
        shape = self._shapes[name]
        start, stop, _ = (rows or slice(None)).indices(shape[0])
        width = prod(shape[1:])
        first = start * width + zlib.crc32(name.encode())
        at = (np.arange((stop - start) * width) + first) % self._numbers.size
        values = self._numbers[at].reshape(stop - start, *shape[1:])
        if len(shape) > 1:
            return values * np.float32(1 / sqrt(shape[-1]))
        return values * np.float32(0.2) + np.float32(name.endswith("weight"))

    def close(self) -> None:
        """Nothing to close."""

    def __enter__(self) -> RandomCheckpoint:
        return self

    def __exit__(self, *_: object) -> None:
        pass
