"""What the logits should be: from Transformers in float32, live or recorded in a file.

The yardstick of every comparison is Transformers in float32 on the checkpoint's own weights. Next
to it stands Transformers' own error in f16 and bf16, against which ours is judged. Only this module
imports torch, and only where a live reference is asked for.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pyengine.errors import CannotCompare
from pyengine.evidence import prompts as prompt_set
from pyengine.evidence.prompts import Prompt
from pyengine.models.config import load_config

FORMAT = 1
"""Version of the recorded form; a file of another version is refused."""

SANE_LOSS = 0.75
"""An oracle's loss on ordinary language must stay below this share of ln(vocab_size)."""

TOP = 8
"""Largest logits that a recorded row keeps with their ids."""

OWN_DTYPES = ("f16", "bf16")

_KEPT = 1 << 30
"""Bytes of float32 logits that a live reference keeps, since every precision asks for them."""

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
Int = NDArray[np.int64]


@dataclass(frozen=True)
class Expected:
    """What the reference knows about one prompt of T tokens.

    Attributes:
        argmax: int64 (T); the largest logit of every position.
        rows: int64 (R); the positions whose logits are known.
        columns: int64 (C); the vocabulary entries known in each of those rows, ascending.
        logits: float32 (R, C).
        top_ids: int64 (R, K); the K largest logits' entries, largest first.
        top_logits: float32 (R, K).
        largest: float64 (R); largest absolute logit of the whole row: what errors are relative to.
        norm: float64 (R); Euclidean norm of the whole row.
        logsumexp: float64 (R).
        own: dtype -> float64 (R, 2): root mean square and largest error of Transformers in that
            precision, over `columns` and top entries, relative to `largest`.
    """

    argmax: Int
    rows: Int
    columns: Int
    logits: F32
    top_ids: Int
    top_logits: F32
    largest: F64
    norm: F64
    logsumexp: F64
    own: Mapping[str, F64] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.rows) != len(self.logits) or self.logits.shape[1] != len(self.columns):
            raise CannotCompare("reference: rows, columns and logits do not fit together")


class Reference(Protocol):
    """A source of expected logits for a list of prompts.

    Attributes:
        vocab_size: width of a whole row.
    """

    vocab_size: int

    @property
    def prompts(self) -> Sequence[Prompt]:
        """What it can be asked about."""
        ...

    @property
    def info(self) -> Mapping[str, Any]:
        """Who made it: versions, dtype, attention implementation, loss, hashes; plain JSON."""
        ...

    def expected(self, index: int, dtype: str) -> Expected:
        """Logits for prompt `index`; with `own[dtype]` where `dtype` is a 16-bit type."""
        ...

    def close(self) -> None:
        """Gives memory back."""
        ...


# ---- identity -----------------------------------------------------------------------------------


def sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checkpoint_hashes(model: Path) -> dict[str, str]:
    """File name -> SHA-256 of what determines a checkpoint's logits: config, index and weights."""
    if model.is_file():
        return {model.name: sha256(model)}
    names = ["config.json", "model.safetensors.index.json"]
    files = [model / name for name in names if (model / name).exists()]
    files += sorted(model.glob("*.safetensors"))
    return {path.name: sha256(path) for path in files}


def check_same_model(info: Mapping[str, Any], model: Path) -> None:
    """Raises CannotCompare if a recorded reference was made from other files than `model`'s."""
    recorded: Mapping[str, str] = info.get("sha256", {})
    found = checkpoint_hashes(model)
    for name in sorted(recorded.keys() | found.keys()):
        if recorded.get(name) != found.get(name):
            raise CannotCompare(
                f"{model}: {name} is not the file the reference was recorded from "
                f"(SHA-256 {found.get(name, 'absent')[:16]}, recorded "
                f"{recorded.get(name, 'absent')[:16]})"
            )


# ---- reductions ---------------------------------------------------------------------------------


def relative_errors(error: F64, largest: F64) -> F64:
    """(R, 2): root mean square and largest of |error| (R, C), each over largest (R)."""
    rms = np.sqrt(np.mean(error**2, axis=1))
    return np.stack([rms, np.abs(error).max(axis=1)], axis=1) / largest[:, None]


def known_entries(logits: F32, expected: Expected) -> F64:
    """Whole rows (R, V) cut to the entries a reference knows: columns, then top entries."""
    top = np.take_along_axis(logits, expected.top_ids, axis=1)
    return np.concatenate([logits[:, expected.columns], top], axis=1).astype(np.float64)


def _thin(logits: F32, rows: Int, columns: Int) -> Expected:
    """The summary that a recorded row keeps of whole rows (T, V)."""
    picked = logits[rows]
    top_ids = np.argsort(-picked, axis=1, kind="stable")[:, :TOP].astype(np.int64)
    wide = picked.astype(np.float64)
    peak = wide.max(axis=1)
    return Expected(
        argmax=logits.argmax(axis=1).astype(np.int64),
        rows=rows,
        columns=columns,
        logits=picked[:, columns],
        top_ids=top_ids,
        top_logits=np.take_along_axis(picked, top_ids, axis=1),
        largest=np.abs(wide).max(axis=1),
        norm=np.sqrt((wide**2).sum(axis=1)),
        logsumexp=peak + np.log(np.exp(wide - peak[:, None]).sum(axis=1)),
    )


# ---- live: Transformers -------------------------------------------------------------------------


class TransformersReference:
    """Transformers in float32, loaded and checked; next to it, at need, in f16 or bf16.

    Args:
        model: a Hugging Face directory, or a GGUF file that Transformers reads (it dequantizes it).
        prompts: what will be asked.
        untrained: waive the loss check, for random weights; `info` says so.
        row_stride, column_stride: keep every n-th position and vocabulary entry.
        device: torch's name of a device; "auto" takes a GPU where there is one.

    Raises:
        CannotCompare: torch or transformers is missing, or the oracle is not sane.
    """

    def __init__(
        self,
        model: Path,
        prompts: Sequence[Prompt],
        *,
        untrained: bool = False,
        row_stride: int = 1,
        column_stride: int = 1,
        device: str = "auto",
    ) -> None:
        try:
            import torch
            import transformers
        except ImportError as error:
            raise CannotCompare(
                f"a live reference needs torch and transformers ({error}); "
                "pip install torch transformers, or give a recorded one with --reference FILE"
            ) from error
        self._torch: Any = torch
        self._transformers: Any = transformers
        self._model, self.prompts = model, list(prompts)
        self._strides = row_stride, column_stride
        self._device = device
        if device == "auto":
            self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._loaded: dict[str, Any] = {}
        self._kept: dict[tuple[int, ...], F32] = {}
        oracle = self._load("f32")
        self.vocab_size = int(oracle.config.vocab_size)
        loss = self._check_sane(untrained)
        self.info: dict[str, Any] = {
            "reference": "transformers",
            "dtype": "float32",
            "attention": oracle.config._attn_implementation,
            "device": self._device,
            "versions": {
                "transformers": transformers.__version__,
                "torch": torch.__version__,
                "numpy": np.__version__,
                "python": platform.python_version(),
            },
            "untrained": untrained,
            "loss_nats": loss,
            "loss_limit_nats": SANE_LOSS * math.log(self.vocab_size),
            "sha256": checkpoint_hashes(model),
        }

    def _load(self, dtype: str) -> Any:
        """The model in one precision, in evaluation mode, with nothing left to chance."""
        if dtype in self._loaded:
            return self._loaded[dtype]
        torch = self._torch
        types = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
        folder, options = self._model, {}
        if self._model.is_file():
            folder, options = self._model.parent, {"gguf_file": self._model.name}
        try:
            oracle, report = self._transformers.AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=types[dtype],
                output_loading_info=True,
                local_files_only=True,
                **options,
            )
        except Exception as error:
            raise CannotCompare(f"{self._model}: transformers cannot load it: {error}") from error
        for what in ("missing_keys", "mismatched_keys", "error_msgs"):
            if report.get(what):
                raise CannotCompare(
                    f"{self._model}: transformers reports {what.replace('_', ' ')} "
                    f"{sorted(map(str, report[what]))[:3]}: it would make up what the file lacks"
                )
        if torch.backends.cuda.matmul.allow_tf32:
            raise CannotCompare("torch is set to TF32: its float32 is not a yardstick")
        if self._model.is_file():
            self._check_reads_the_same(oracle.config)
        self._loaded[dtype] = oracle.to(self._device).eval()
        return self._loaded[dtype]

    def _check_reads_the_same(self, theirs: Any) -> None:
        """Its GGUF reader drops some traits without a word: no oracle for a model that has them."""
        config, spec = load_config(self._model)
        dropped = {
            "the sliding window": any(config.layer_windows)
            and not getattr(theirs, "sliding_window", None),
            "the norms of heads": spec.qk_norm == "per_head"
            and not getattr(theirs, "qk_layernorm", False),
        }
        for trait, is_dropped in dropped.items():
            if is_dropped:
                raise CannotCompare(
                    f"{self._model}: transformers' GGUF reader ignores {trait}: "
                    "compare the original directory"
                )

    def logits(self, ids: Sequence[int], dtype: str = "f32") -> F32:
        """float32 (T, vocab_size) as Transformers computes them in `dtype`."""
        key = tuple(ids)
        if dtype == "f32" and key in self._kept:
            return self._kept[key]
        torch = self._torch
        with torch.inference_mode():
            tokens = torch.tensor([list(ids)], device=self._device)
            rows = self._load(dtype)(input_ids=tokens, use_cache=False).logits[0]
            found: F32 = rows.float().cpu().numpy()
        if dtype == "f32" and sum(a.nbytes for a in self._kept.values()) + found.nbytes < _KEPT:
            self._kept[key] = found
        return found

    def logits_batch(self, batch: Sequence[Sequence[int]]) -> list[F32]:
        """float32 (T, vocab_size) of each sequence: what an Engine would be asked."""
        return [self.logits(ids) for ids in batch]

    def _check_sane(self, untrained: bool) -> float | None:
        """The oracle's own loss in nats a token on ordinary language; None if it was not asked."""
        total, count = 0.0, 0
        for prompt in self.prompts:
            if not prompt.natural or len(prompt.ids) < 2:
                continue
            rows = self.logits(prompt.ids).astype(np.float64)
            if not np.isfinite(rows).all():
                raise CannotCompare(f"{self._model}: the oracle's logits are not finite")
            loss = -log_probabilities(rows[:-1])[np.arange(len(rows) - 1), prompt.ids[1:]]
            total, count = total + float(loss.sum()), count + len(loss)
        if untrained or not count:
            return total / count if count else None
        limit = SANE_LOSS * math.log(self.vocab_size)
        if total / count > limit:
            raise CannotCompare(
                f"{self._model}: the oracle's loss on ordinary language is {total / count:.2f} "
                f"nats a token, more than {limit:.2f} ({SANE_LOSS:.0%} of a uniform guess): "
                "its weights are not what was trained; --untrained waives this check"
            )
        return total / count

    def expected(self, index: int, dtype: str) -> Expected:
        """See Reference."""
        ids = self.prompts[index].ids
        row_stride, column_stride = self._strides
        rows = np.arange(0, len(ids), row_stride)
        columns = np.arange(0, self.vocab_size, column_stride)
        exact = self.logits(ids)
        if not np.isfinite(exact).all():
            raise CannotCompare(f"{self._model}: the oracle's logits are not finite")
        thin = _thin(exact, rows, columns)
        own = {name: self._own_error(ids, name, thin) for name in OWN_DTYPES if name == dtype}
        return Expected(**{**thin.__dict__, "own": own})

    def _own_error(self, ids: Sequence[int], dtype: str, thin: Expected) -> F64:
        found = known_entries(self.logits(ids, dtype)[thin.rows], thin)
        exact = np.concatenate([thin.logits, thin.top_logits], axis=1).astype(np.float64)
        return relative_errors(found - exact, thin.largest)

    def greedy(self, ids: Sequence[int], count: int) -> tuple[list[int], float]:
        """The next `count` ids of greatest logit, and the smallest lead any of them had.

        Every step computes the whole sequence anew: no cache whose faults could be imitated.
        """
        sequence, lead = list(ids), math.inf
        for _ in range(count):
            row = self.logits(sequence)[-1]
            second, first = np.sort(row)[-2:]
            lead = min(lead, float(first - second))
            sequence.append(int(row.argmax()))
        return sequence[len(ids) :], lead

    def close(self) -> None:
        """Drops the models."""
        self._loaded.clear()
        self._kept.clear()


def log_probabilities(logits: F64) -> F64:
    """Logarithm of the softmax over the last axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    result: F64 = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


# ---- recorded -----------------------------------------------------------------------------------

_ARRAYS: Mapping[str, Any] = {
    "logits": np.float32,
    "top_ids": np.int32,
    "top_logits": np.float32,
    "largest": np.float64,
    "norm": np.float64,
    "logsumexp": np.float64,
}


def record(
    reference: TransformersReference,
    directory: Path,
    extra: Mapping[str, Any] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> None:
    """Writes reference.json and reference.npz: what RecordedReference reads.

    reference.json: `format`, everything of `info`, `vocab_size`, `prompts` (name, kind, tokens,
    natural), `prompt_set` (version of the built-in texts), and `extra`.
    reference.npz: `ids` and `argmax` of all prompts in a row (int32); `rows` (int32), positions in
    that row whose logits follow; `columns` (int32); for each such row `logits`, `top_ids`,
    `top_logits`, `largest`, `norm`, `logsumexp` and `own_f16`, `own_bf16` as in Expected.
    """
    parts: dict[str, list[NDArray[Any]]] = {name: [] for name in (*_ARRAYS, "argmax", "rows")}
    parts |= {f"own_{dtype}": [] for dtype in OWN_DTYPES}
    columns, start = np.zeros(0, np.int64), 0
    for index, prompt in enumerate(reference.prompts):
        progress(f"{prompt.name}: {len(prompt.ids)} tokens")
        found = [reference.expected(index, dtype) for dtype in OWN_DTYPES]
        for name in _ARRAYS:
            parts[name].append(getattr(found[0], name))
        parts["argmax"].append(found[0].argmax)
        parts["rows"].append(found[0].rows + start)
        for dtype, expected in zip(OWN_DTYPES, found, strict=True):
            parts[f"own_{dtype}"].append(expected.own[dtype].astype(np.float32))
        columns, start = found[0].columns, start + len(prompt.ids)

    types = {**_ARRAYS, "argmax": np.int32, "rows": np.int32}
    arrays: dict[str, Any] = {name: np.concatenate(part) for name, part in parts.items()}
    arrays = {name: a.astype(types.get(name, a.dtype)) for name, a in arrays.items()}
    arrays["ids"] = np.array([i for prompt in reference.prompts for i in prompt.ids], np.int32)
    arrays["columns"] = columns.astype(np.int32)
    description = {
        "format": FORMAT,
        **reference.info,
        "vocab_size": reference.vocab_size,
        "prompt_set": prompt_set.VERSION,
        "prompts": [
            {"name": p.name, "kind": p.kind, "tokens": len(p.ids), "natural": p.natural}
            for p in reference.prompts
        ],
        **(extra or {}),
    }
    directory.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(directory / "reference.npz", **arrays)
    text = json.dumps(description, indent=1, ensure_ascii=False) + "\n"
    (directory / "reference.json").write_text(text, encoding="utf-8")


class RecordedReference:
    """A reference written by `record`; needs neither torch nor the network.

    Args:
        path: the directory, or either file in it.

    Raises:
        CannotCompare: not such a recording, or of another format.
    """

    def __init__(self, path: Path) -> None:
        directory = path.parent if path.name == "reference.json" else path
        try:
            text = (directory / "reference.json").read_text(encoding="utf-8")
            info: dict[str, Any] = json.loads(text)
            if info["format"] != FORMAT:
                raise CannotCompare(
                    f"{directory}: format {info['format']}, this version reads {FORMAT}"
                )
            with np.load(directory / "reference.npz", allow_pickle=False) as file:
                self._arrays: dict[str, NDArray[Any]] = dict(file)
            self.prompts = list(_prompts(info["prompts"], self._arrays["ids"]))
        except (OSError, ValueError, KeyError) as error:
            raise CannotCompare(f"{directory}: not a recorded reference: {error}") from error
        self.vocab_size = int(info["vocab_size"])
        self.info = info

    def expected(self, index: int, dtype: str) -> Expected:
        """See Reference."""
        start = sum(len(prompt.ids) for prompt in self.prompts[:index])
        stop = start + len(self.prompts[index].ids)
        arrays = self._arrays
        here = (arrays["rows"] >= start) & (arrays["rows"] < stop)
        own = f"own_{dtype}"
        return Expected(
            argmax=arrays["argmax"][start:stop].astype(np.int64),
            rows=arrays["rows"][here].astype(np.int64) - start,
            columns=arrays["columns"].astype(np.int64),
            logits=arrays["logits"][here],
            top_ids=arrays["top_ids"][here].astype(np.int64),
            top_logits=arrays["top_logits"][here],
            largest=arrays["largest"][here],
            norm=arrays["norm"][here],
            logsumexp=arrays["logsumexp"][here],
            own={dtype: arrays[own][here].astype(np.float64)} if own in arrays else {},
        )

    def close(self) -> None:
        """Nothing to give back."""


def _prompts(records: Iterable[Mapping[str, Any]], ids: NDArray[Any]) -> Iterable[Prompt]:
    start = 0
    for item in records:
        stop = start + int(item["tokens"])
        yield Prompt(item["name"], item["kind"], tuple(ids[start:stop].tolist()), item["natural"])
        start = stop
    if start != len(ids):
        raise ValueError(f"{len(ids)} ids, but the prompts say {start}")
