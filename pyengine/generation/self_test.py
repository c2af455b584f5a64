"""The start-up self-test: a GPU must compute what the CPU computes before an engine uses it.

Cards and runtimes have been seen that answer without an error and wrongly, for long prompts only.
So small random models are run on both, in chunks of several sizes, once for each card, library,
runtime and type of weights; a pass is remembered in the user's cache.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import json
import logging
import os
import platform
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from pyengine.errors import KernelError, LibraryError, OutOfMemory, RequestError, SelfTestError
from pyengine.models.checkpoint import Checkpoint
from pyengine.models.hub import cache_folder
from pyengine.models.random_weights import RandomCheckpoint
from pyengine.models.weights import WeightTypes
from pyengine.native import Device, choose_device
from pyengine.native.memory import Array

_log = logging.getLogger("pyengine")

REPORT = "report it with the output of pyengine doctor --json"
VERSION = 1  # of what is tested: another one tests again
TOKENS = 100
_VOCABULARY = 300

_SIZES = {"vocab_size": _VOCABULARY, "max_position_embeddings": 128, "tie_word_embeddings": False}
_LLAMA = _SIZES | {"model_type": "llama", "num_hidden_layers": 2, "rms_norm_eps": 1e-5}


class Trial(NamedTuple):
    """A model, and the sizes of chunks it is run in; each reaches kernels that others do not."""

    config: dict[str, Any]
    chunks: tuple[int, ...]


TRIALS = {
    "rotary": Trial(  # with RMS norms, grouped queries, a gated MLP; keys enough to be shared out
        _LLAMA
        | {"hidden_size": 64, "intermediate_size": 112}
        | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128},
        (1, 7, 32, 64, TOKENS),
    ),
    "alibi": Trial(  # with layer norms, biases and sizes that are no powers of two
        {"model_type": "bloom", "vocab_size": _VOCABULARY, "hidden_size": 96, "n_layer": 2}
        | {"n_head": 6, "layer_norm_epsilon": 1e-5},
        (7, TOKENS),
    ),
    "wide": Trial(  # as wide as the largest tiles of matrix products need it
        _LLAMA
        | {"hidden_size": 32, "intermediate_size": 4096}
        | {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64},
        (TOKENS,),
    ),
}
"""Name -> what is run in every precision."""


class Precision(NamedTuple):
    """Types of a run, and how far its logits may be off, as a share of the largest."""

    dtype: str
    weights: str | None
    tolerance: float


PRECISIONS = {
    # f32 on both sides; sums in another order (2e-6 seen).
    "f32": Precision("f32", None, 1e-5),
    # The GPU rounds what enters a product to 11 bits, the CPU does not (1e-3 seen).
    "f16": Precision("f16", None, 1e-2),
    # The same with 8 bits (1e-2 seen).
    "bf16": Precision("bf16", None, 8e-2),
    # The CPU rounds activations to 16 bits, the GPU keeps them; a cache in f16 on both (4e-4 seen).
    "q8_0": Precision("f16", "q8_0", 5e-3),
}


class Compute(Protocol):
    """Logits after each token, (T, vocab_size), computed on a device without testing it first."""

    def __call__(
        self,
        device: Device,
        checkpoint: Checkpoint,
        token_ids: list[int],
        *,
        chunk_rows: int,
        dtype: str,
        weights: str | None,
    ) -> Array: ...


@dataclass(frozen=True)
class Verdict:
    """What came of a test.

    Attributes:
        precision: a key of PRECISIONS. state: "passed", "failed" or "not run".
        when: in UTC, ISO 8601. seconds: it took. largest_error: as a share of the largest logit.
        message: why it failed.
    """

    precision: str
    state: str = "not run"
    when: str = ""
    seconds: float = 0.0
    largest_error: float = 0.0
    message: str = ""


_passed: set[str] = set()  # file names, for a process that cannot write its cache


def tested(device: Device, types: WeightTypes, compute: Compute, *, fall_back: bool) -> Device:
    """The device, if it computes rightly in these types; tested unless that is known.

    OKERNEL_SELF_TEST: "auto" (default) tests what has not passed, "1" always, "0" never.

    Args:
        compute: runs a model on a device.
        fall_back: the CPU takes the place of a device that fails, and a warning says so.

    Raises:
        SelfTestError: it fails; what was seen and expected.
        RequestError: OKERNEL_SELF_TEST has another value.
    """
    if device.library.backend == "cpu":
        return device
    wish = os.environ.get("OKERNEL_SELF_TEST") or "auto"
    if wish not in ("0", "1", "auto"):
        raise RequestError(f"OKERNEL_SELF_TEST={wish}: expected 0, 1 or auto")
    if wish == "0":
        _log.warning("%s is used without a self-test: OKERNEL_SELF_TEST=0", device.label)
        return device
    for precision in _needed(types):
        if wish == "auto" and recall(device, precision).state == "passed":
            continue
        verdict = run(device, precision, compute)
        if verdict.state == "not run":
            _log.warning("%s is used without a self-test: %s", device.label, verdict.message)
        elif verdict.state == "failed":
            if not fall_back:
                raise SelfTestError(f'{verdict.message}; use device="cpu", and {REPORT}')
            _log.warning("using the CPU: %s; please %s", verdict.message, REPORT)
            return choose_device("cpu")
    return device


def _needed(types: WeightTypes) -> list[str]:
    """The precisions that an engine of these types computes in, f32 always among them."""
    needed = ["f32", types.dtype.name.lower()]
    if types.weights is not None:
        needed.append(types.weights)
    return list(dict.fromkeys(needed))


def run(device: Device, precision: str, compute: Compute) -> Verdict:
    """Tests a device in one precision and remembers what came of it.

    Raises:
        OutOfMemory: there is no room for the test, some MiB.
    """
    begin = time.perf_counter()
    state, message, largest = "passed", "", 0.0
    try:
        cpu = choose_device("cpu")
    except LibraryError as error:
        return Verdict(precision, message=str(error))
    try:
        for seen in _compare(device, cpu, precision, compute):
            largest = max(largest, seen)
    except OutOfMemory:
        raise
    except (SelfTestError, KernelError) as error:
        state = "failed"
        where = f"{device.label} ({device.name}, {device.arch})"
        message = f"{where} failed the start-up self-test: {error}"
    verdict = Verdict(
        precision,
        state,
        datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        round(time.perf_counter() - begin, 3),
        largest,
        message,
    )
    _remember(device, verdict)
    return verdict


def _compare(device: Device, cpu: Device, precision: str, compute: Compute) -> Iterator[float]:
    """Errors of every run; raises SelfTestError for the first that is too large."""
    dtype, weights, tolerance = PRECISIONS[precision]
    ids = [(37 * i * i + 11 * i + 3) % _VOCABULARY for i in range(TOKENS)]
    for name, (config, chunks) in TRIALS.items():
        with RandomCheckpoint(config, count=1 << 17) as checkpoint:
            wanted = compute(cpu, checkpoint, ids, chunk_rows=TOKENS, dtype=dtype, weights=weights)
            others = {"the CPU": wanted}
            for chunk in chunks:
                logits = compute(
                    device, checkpoint, ids, chunk_rows=chunk, dtype=dtype, weights=weights
                )
                for whose, other in others.items():
                    error = np.abs(logits - other).max(axis=1) / np.abs(wanted).max()
                    wrong = ~(error <= tolerance)  # NaN is wrong
                    if wrong.any():
                        raise SelfTestError(
                            f"{name} model in {precision}, {TOKENS} tokens in chunks of {chunk}: "
                            f"logits differ from those of {whose} by {error.max():.1e} of the "
                            f"largest, {wrong.sum()} positions are off, the first is "
                            f"{int(wrong.argmax())}; expected at most {tolerance:.0e}"
                        )
                    yield float(error.max())
                others.setdefault(f"its own chunks of {chunk}", logits)


# ---- what is remembered -------------------------------------------------------------------------


def recall(device: Device, precision: str) -> Verdict:
    """What is known of a device in one precision; damaged records mean nothing is."""
    key = _key(device, precision)
    nothing = Verdict(precision)
    if _file_name(key) in _passed:
        nothing = Verdict(precision, "passed")
    try:
        record = json.loads((_folder() / _file_name(key)).read_bytes())
        verdict = Verdict(**record["verdict"])
        known = record["key"] == key and verdict.precision == precision
    except (OSError, RuntimeError, ValueError, KeyError, TypeError):
        return nothing
    types = [[type(v) for v in dataclasses.astuple(each)] for each in (verdict, nothing)]
    well_formed = types[0] == types[1] and verdict.state in ("passed", "failed")
    return verdict if known and well_formed else nothing


def _remember(device: Device, verdict: Verdict) -> None:
    """Writes a verdict; where it cannot be written, the next process tests again."""
    key = _key(device, verdict.precision)
    name = _file_name(key)
    _passed.discard(name)
    if verdict.state == "passed":
        _passed.add(name)
    text = json.dumps({"key": key, "verdict": dataclasses.asdict(verdict)}, indent=1)
    with contextlib.suppress(OSError, RuntimeError):
        folder = _folder()
        folder.mkdir(parents=True, exist_ok=True)
        handle, unfinished = tempfile.mkstemp(dir=folder, prefix=".")
        try:
            with open(handle, "w") as file:
                file.write(text)
            os.replace(unfinished, folder / name)
        except OSError:
            os.unlink(unfinished)
            raise


def _folder() -> Path:
    return cache_folder() / "self-test"


def _file_name(key: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return f"{key['arch']}-{key['precision']}-{digest[:16]}.json"


def _key(device: Device, precision: str) -> dict[str, Any]:
    """All that a verdict holds for: another card, build, runtime or driver is another key."""
    library = device.library
    try:
        runtime = list(library.runtime())
    except KernelError:
        runtime = []
    try:
        file = library.path.stat()
        build = [str(library.path.resolve()), file.st_size, file.st_mtime_ns]
    except OSError:
        build = [str(library.path)]
    return {
        "test": VERSION,
        "precision": precision,
        "index": device.index,
        "name": device.name,
        "arch": device.arch,
        "library": [*build, library.build_info],
        "runtime": runtime,
        "driver": [platform.release(), *_driver_versions()],
        "ways": [os.environ.get(name, "") for name in ("OKERNEL_GRAPH", "OKERNEL_FUSED")],
    }


def _driver_versions() -> Iterator[str]:
    for module in ("amdgpu", "nvidia"):
        with contextlib.suppress(OSError):
            yield Path(f"/sys/module/{module}/version").read_text().strip()
