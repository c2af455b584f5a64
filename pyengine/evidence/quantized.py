"""What q8_0 costs, and how much of it is the format's own.

The yardstick is Transformers in float32 on the dequantised weights: no engine can be nearer to the
original than the numbers of the format allow. The rule is written out here in numpy, so that
nothing of ours is held against itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyengine.evidence.comparison import (
    Comparison,
    Gate,
    Summary,
    compare_all,
    open_engine,
    summarise,
)
from pyengine.evidence.prompts import Prompt
from pyengine.evidence.reference import TransformersReference
from pyengine.generation.source import ModelSource
from pyengine.models.config import load_config
from pyengine.models.layouts import Transposed
from pyengine.models.weights import expected_weights

F32 = NDArray[np.float32]

BLOCK = 32

MAX_DISTANCE_RATIO = 3.0
"""Our default path's mean of 1 - cosine over the yardstick's: activations in 8 bits add some."""
MIN_MEAN_COSINE = 0.999
"""Smallest mean cosine with the original."""
MIN_EXACT_COSINE = 0.999999
"""With activations in f32 nothing but the order of sums is left between us and the yardstick."""
MAX_RISE = 0.005
"""Largest rise of the perplexity ..."""
MIN_POSITIONS = 2000
"""... where at least so many next tokens of ordinary language were predicted."""


def round_trip(matrix: F32, block: int | None = BLOCK) -> F32:
    """A matrix (out, in) after quantising and dequantising, by ggml's rule for q8_0.

    For each block along a row d = max|x| / 127, kept as f16, and q = round(x / d), half away from
    zero (ggml's quantize_row_q8_0_ref).

    Args:
        block: values that share a scale; None: a whole row does, which is not q8_0.
    """
    rows, cols = matrix.shape
    size = block or cols
    padded = np.zeros((rows, -(-cols // size) * size), np.float32)
    padded[:, :cols] = matrix
    groups = padded.reshape(rows, -1, size)
    scale = np.abs(groups).max(axis=2, keepdims=True) / np.float32(127)
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    steps = groups * inverse
    whole = np.trunc(steps)
    whole += np.trunc(2 * (steps - whole))
    values: F32 = whole * scale.astype(np.float16).astype(np.float32)
    return values.reshape(rows, -1)[:, :cols]


class DequantizedReference(TransformersReference):
    """Transformers in float32 on dequantised weights, as a reference and as something to compare.

    Which matrices are quantised is the loader's policy: all but norms, biases, position tables.

    Args:
        block: as round_trip has it.
        keep: roles that are left alone.
        further options: as TransformersReference has them.
    """

    def __init__(
        self,
        model: Path,
        prompts: Sequence[Prompt],
        *,
        block: int | None = BLOCK,
        keep: Sequence[str] = (),
        **options: Any,
    ) -> None:
        self._block, self._keep = block, tuple(keep)
        super().__init__(model, prompts, **options)

    def _load(self, dtype: str) -> Any:
        is_new = dtype not in self._loaded
        oracle = super()._load(dtype)
        if is_new:
            self._quantise(oracle)
        return oracle

    def _quantise(self, oracle: Any) -> None:
        config, spec = load_config(self._model)
        parameters = dict(oracle.named_parameters())  # a tied head is there once
        for weight in expected_weights(spec, config, tied=config.tie_word_embeddings):
            if not weight.quantisable or weight.role in self._keep:
                continue
            for source in weight.sources:
                data = parameters[source.name].data
                turned = isinstance(source.layout, Transposed)
                stored = data.float().cpu().numpy()
                values = round_trip(stored.T if turned else stored, self._block)
                data.copy_(self._torch.from_numpy(np.ascontiguousarray(
                    values.T if turned else values)))  # fmt: skip


# ---- what it costs ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """What q8_0 costs a model: of the format itself, and of how we compute with it.

    Attributes:
        yardstick: Transformers in float32 on dequantised weights, against the original.
        exact: ours with activations kept in f32, against the yardstick.
        perplexity: of "original", "yardstick" and "ours" on the natural prompts.
        natural_positions: how many next tokens that is.
    """

    yardstick: Summary
    exact: Summary
    perplexity: Mapping[str, float]
    natural_positions: int

    def gates(self, ours: Summary) -> list[Gate]:
        """What q8_0 has to reach; the perplexity counts where there is enough to measure it on."""
        distance, own = (1.0 - s.spread["cosine"]["mean"] for s in (ours, self.yardstick))
        rise = self.perplexity["ours"] / self.perplexity["original"] - 1.0
        found = [
            Gate("distance ratio", distance / max(own, 1e-16), MAX_DISTANCE_RATIO, False),
            Gate("mean cosine", 1.0 - distance, MIN_MEAN_COSINE, True),
            Gate("exact cosine", self.exact.spread["cosine"]["min"], MIN_EXACT_COSINE, True),
            Gate("exact argmax", self.exact.argmax, 1.0, True),
        ]
        if self.natural_positions >= MIN_POSITIONS:
            found.append(Gate("perplexity rise", rise, MAX_RISE, False))
        return found


def measure_cost(
    source: ModelSource,
    oracle: TransformersReference,
    ours: Sequence[Comparison],
    *,
    device: str = "auto",
    threads: int | None = None,
    batch: int = 1,
) -> Cost:
    """Measures the yardstick, and how exactly ours meets it.

    Args:
        oracle: the original in float32.
        ours: the default path's comparisons with it.
    """
    yardstick = DequantizedReference(source.path, oracle.prompts, untrained=True)
    engine = open_engine(
        source, oracle.prompts, dtype="f32", device=device, threads=threads, batch=batch,
        weights="q8_0", q8_activations=False,
    )  # fmt: skip
    try:
        exact = compare_all(engine, yardstick, "f32", batch=batch)
        own = compare_all(yardstick, oracle, "q8_0")
    finally:
        engine.close()
        yardstick.close()
    original = compare_all(oracle, oracle, "q8_0")
    sets = {"original": original, "yardstick": own, "ours": ours}
    losses = {
        name: np.concatenate([c.loss for c in found if c.prompt.natural] or [np.zeros(1)])
        for name, found in sets.items()
    }
    return Cost(
        yardstick=summarise(own),
        exact=summarise(exact),
        perplexity={name: float(np.exp(np.nanmean(loss))) for name, loss in losses.items()},
        natural_positions=int(np.isfinite(losses["ours"]).sum()),
    )
