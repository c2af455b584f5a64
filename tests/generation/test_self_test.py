"""generation/self_test.py: what passes is remembered, what fails is refused in words."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyengine import Engine
from pyengine.errors import DeviceError, LibraryError, OutOfMemory, RequestError, SelfTestError
from pyengine.generation import self_test
from pyengine.generation.engine import compute_logits
from pyengine.generation.source import ModelSource, source_of
from pyengine.models.random_weights import RandomCheckpoint
from pyengine.models.weights import WeightTypes
from pyengine.native import Device, DType, load_library
from tests.planted_faults import rotate_half_of_long_chunks

Array = np.ndarray[Any, Any]
F32 = WeightTypes(DType.F32)


@dataclass
class FakeLibrary:
    """As much of a GPU build as the self-test asks."""

    path: Path
    backend: str = "hip"
    build_info: str = "build 1"
    version: int = 60_000

    def runtime(self) -> tuple[int, str]:
        return self.version, "/opt/libamdhip64.so"


@dataclass
class FakeCompute:
    """Logits out of thin air; `fault` changes those of the GPU."""

    fault: Callable[[Array, int], Any] = lambda logits, chunk_rows: None
    runs: list[tuple[str, int]] = field(default_factory=list)

    def __call__(
        self, device: Device, checkpoint: Any, token_ids: list[int], *,
        chunk_rows: int, dtype: str, weights: str | None,
    ) -> Array:  # fmt: skip
        size = (len(token_ids), checkpoint.config["vocab_size"])
        logits = np.random.default_rng(0).standard_normal(size).astype(np.float32)
        if device.library.backend != "cpu":
            self.runs.append((f"{weights or dtype}", chunk_rows))
            self.fault(logits, chunk_rows)
        return logits


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test's own, in a process that has tested nothing."""
    monkeypatch.delenv("OKERNEL_SELF_TEST")
    monkeypatch.setenv("PYENGINE_CACHE", str(tmp_path / "cache"))
    forget(monkeypatch)
    return tmp_path / "cache" / "self-test"


@pytest.fixture
def card(tmp_path: Path) -> Device:
    library = tmp_path / "libokernel_hip.so"
    library.write_text("machine code")
    return Device(FakeLibrary(library), 0, "Radeon", "gfx1151")  # type: ignore[arg-type]


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another process would know: nothing but the cache."""
    monkeypatch.setattr(self_test, "_passed", set())


def late_rows(logits: Array, chunk_rows: int) -> None:
    """A fault that only chunks of 64 show, and only in their second half."""
    if chunk_rows == 64:
        logits[40:] += 0.01


def use(
    card: Device, compute: FakeCompute, types: WeightTypes = F32, *, fall_back: bool = False
) -> Device:
    return self_test.tested(card, types, compute, fall_back=fall_back)


def test_a_pass_is_remembered_by_this_process_and_by_the_next(
    card: Device, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = FakeCompute()
    assert use(card, compute) is card
    once = len(compute.runs)
    assert {1, 7, 32, 64, 100} <= {chunk for _, chunk in compute.runs}
    use(card, compute)
    forget(monkeypatch)
    use(card, compute)
    assert len(compute.runs) == once
    verdict = self_test.recall(card, "f32")
    assert verdict.state == "passed" and verdict.when.endswith("+00:00")
    (file,) = os.listdir(cache)
    assert file.startswith("gfx1151-f32-")


@pytest.mark.parametrize(
    ("types", "precisions"),
    [
        (F32, {"f32"}),
        (WeightTypes(DType.BF16), {"f32", "bf16"}),
        (WeightTypes(DType.F16, "q8_0"), {"f32", "f16", "q8_0"}),
    ],
)
def test_f32_and_the_engines_own_types_are_tested(
    card: Device, types: WeightTypes, precisions: set[str]
) -> None:
    compute = FakeCompute()
    use(card, compute, types)
    assert {precision for precision, _ in compute.runs} == precisions
    states = {name: self_test.recall(card, name).state for name in self_test.PRECISIONS}
    assert {name for name, state in states.items() if state == "passed"} == precisions


def newer_file(card: Device) -> Device:
    path = card.library.path
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 10**6))
    return card


def with_library(card: Device, **changes: Any) -> Device:
    return replace(card, library=replace(card.library, **changes))  # type: ignore[type-var]


@pytest.mark.parametrize(
    "change",
    [
        lambda card: replace(card, arch="gfx1100"),
        lambda card: replace(card, name="Radeon Pro"),
        lambda card: with_library(card, version=70_000),
        lambda card: with_library(card, build_info="build 2"),
        newer_file,
    ],
    ids=["architecture", "card", "runtime", "build", "file"],
)
def test_another_card_build_or_runtime_is_tested_again(
    card: Device, change: Callable[[Device], Device]
) -> None:
    compute = FakeCompute()
    use(card, compute)
    once = len(compute.runs)
    use(change(card), compute)
    assert len(compute.runs) == 2 * once


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: '{"verdict": {}}',
        lambda text: json.dumps(json.loads(text) | {"key": {}}),
        lambda text: text.replace('"passed"', '"fine"'),
        lambda text: text.replace('"message": ""', '"message": null'),
        lambda text: text.replace('"precision"', '"accuracy"'),
        lambda text: "[" * 100_000,
    ],
    ids=["empty", "cut", "list", "bare", "foreign", "state", "type", "field", "deep"],
)
def test_a_damaged_record_only_means_testing_again(
    card: Device, cache: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[str], str]
) -> None:
    compute = FakeCompute()
    use(card, compute)
    once = len(compute.runs)
    (file,) = cache.iterdir()
    file.write_text(damage(file.read_text()))
    forget(monkeypatch)
    use(card, compute)
    assert len(compute.runs) == 2 * once
    forget(monkeypatch)
    assert self_test.recall(card, "f32").state == "passed"  # written anew


def test_a_cache_that_cannot_be_written_only_means_testing_again(
    card: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PYENGINE_CACHE", str(tmp_path / "file"))
    compute = FakeCompute()
    for _ in range(2):
        use(card, compute)
    once = len(compute.runs)
    forget(monkeypatch)
    use(card, compute)
    assert len(compute.runs) == 2 * once


def test_an_explicit_device_that_fails_is_refused_and_tested_again(
    card: Device, cache: Path
) -> None:
    compute = FakeCompute(late_rows)
    with pytest.raises(SelfTestError) as caught:
        use(card, compute)
    for part in (
        "hip:0 (Radeon, gfx1151) failed the start-up self-test: rotary model in f32",
        "100 tokens in chunks of 64: logits differ from those of the CPU by",
        "of the largest, 60 positions are off, the first is 40; expected at most 1e-05",
        'use device="cpu", and report it with the output of pyengine doctor --json',
    ):
        assert part in str(caught.value)
    assert self_test.recall(card, "f32").state == "failed"
    compute.fault = FakeCompute.fault
    assert use(card, compute) is card
    assert self_test.recall(card, "f32").state == "passed"
    assert len(os.listdir(cache)) == 1


def test_auto_falls_back_to_the_cpu_aloud(card: Device, caplog: pytest.LogCaptureFixture) -> None:
    device = use(card, FakeCompute(late_rows), fall_back=True)
    assert device.label == "cpu"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "\n" not in record.message
    assert record.message.startswith("using the CPU: hip:0 (Radeon, gfx1151) failed the start-up")


def nan(logits: Array, chunk_rows: int) -> None:
    logits[50, 7] = np.nan


def broken(logits: Array, chunk_rows: int) -> None:
    raise DeviceError("the runtime says: invalid device function")


@pytest.mark.parametrize(
    ("fault", "message"), [(nan, "1 positions are off, the first is 50"), (broken, "says: invalid")]
)
def test_nan_and_errors_of_the_device_are_failures(
    card: Device, fault: Callable[[Array, int], Any], message: str
) -> None:
    with pytest.raises(SelfTestError, match=message):
        use(card, FakeCompute(fault))


def test_chunks_must_agree_with_each_other_too(card: Device) -> None:
    signs = {1: 1, 7: -1}

    def apart(logits: Array, chunk_rows: int) -> None:
        logits += signs.get(chunk_rows, 0) * 0.7e-5 * np.abs(logits).max()

    with pytest.raises(SelfTestError, match="chunks of 7: .* those of its own chunks of 1 by 1.4e"):
        use(card, FakeCompute(apart))


def test_too_little_memory_is_no_verdict(card: Device) -> None:
    def full(logits: Array, chunk_rows: int) -> None:
        raise OutOfMemory("needed 5 bytes, free 4")

    with pytest.raises(OutOfMemory):
        use(card, FakeCompute(full), fall_back=True)
    assert self_test.recall(card, "f32").state == "not run"


def test_without_a_cpu_build_the_device_is_used_untested_and_that_is_said(
    card: Device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(name: str) -> Device:
        raise LibraryError("no libokernel_cpu.so")

    monkeypatch.setattr(self_test, "choose_device", missing)
    assert use(card, FakeCompute()) is card
    assert "hip:0 is used without a self-test: no libokernel_cpu.so" in caplog.text


def test_the_environment_forbids_or_forces_it(
    card: Device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compute = FakeCompute()
    monkeypatch.setenv("OKERNEL_SELF_TEST", "0")
    assert use(card, compute) is card
    assert compute.runs == [] and "without a self-test: OKERNEL_SELF_TEST=0" in caplog.text
    monkeypatch.setenv("OKERNEL_SELF_TEST", "1")
    use(card, compute)
    once = len(compute.runs)
    use(card, compute)
    assert len(compute.runs) == 2 * once
    monkeypatch.setenv("OKERNEL_SELF_TEST", "yes")
    with pytest.raises(RequestError, match="OKERNEL_SELF_TEST=yes: expected 0, 1 or auto"):
        use(card, compute)


def test_the_cpu_is_not_tested_against_itself(cache: Path) -> None:
    compute = FakeCompute(late_rows)
    cpu = Device(load_library("cpu"), 0, "", "")
    assert use(cpu, compute) is cpu
    assert compute.runs == [] and not cache.exists()


# ---- with a GPU ---------------------------------------------------------------------------------


@pytest.fixture
def model() -> Iterator[ModelSource]:
    with RandomCheckpoint(self_test.TRIALS["rotary"].config) as checkpoint:
        yield source_of(checkpoint)


def test_a_gpu_passes_before_its_first_engine(
    gpu: str, model: ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(model, device=gpu, dtype="f32", max_batch=1) as engine:
        chosen = engine.device
    verdict = self_test.recall(chosen, "f32")
    assert verdict.state == "passed" and 0 < verdict.largest_error <= 1e-5
    assert self_test.recall(chosen, "f16").state == "not run"
    forget(monkeypatch)
    monkeypatch.setattr(self_test, "run", None)  # it would be called
    with Engine(model, device=gpu, dtype="f32", max_batch=1):
        pass


@pytest.mark.parametrize("precision", self_test.PRECISIONS)
def test_a_gpu_passes_in_every_precision(gpu: str, precision: str) -> None:
    device = Device(load_library(gpu), 0, *load_library(gpu).device_name())
    verdict = self_test.run(device, precision, compute_logits)
    print(f"\n{verdict}")
    assert verdict.state == "passed", verdict.message


def test_a_fault_of_long_chunks_is_found_by_auto_and_by_name(
    gpu: str,
    model: ModelSource,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rotate_half_of_long_chunks(load_library(gpu), monkeypatch)
    with pytest.raises(SelfTestError, match="rotary model in f32, 100 tokens in chunks of 32"):
        Engine(model, device=gpu, dtype="f32")
    with Engine(model, device="auto", dtype="f32", max_batch=1) as engine:
        assert engine.device.label == "cpu"
        assert engine.generate([1, 2, 3], max_new_tokens=2).completion_tokens == 2
    assert sum("using the CPU" in record.message for record in caplog.records) == 1
