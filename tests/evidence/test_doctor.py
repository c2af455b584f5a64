"""evidence/doctor.py: facts of the machine, and one piece of advice a problem."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import types
from pathlib import Path

import pytest

from pyengine.errors import OutOfMemory
from pyengine.evidence import doctor
from pyengine.evidence.doctor import DeviceFacts, Doctor, LibraryFacts, Places, examine
from pyengine.generation.self_test import PRECISIONS, Verdict
from pyengine.native import Device, load_library


@pytest.fixture
def places(tmp_path: Path) -> Places:
    """A machine with an AMD card, its driver loaded, and every permission given."""
    card = tmp_path / "pci" / "0000:03:00.0"
    card.mkdir(parents=True)
    (card / "vendor").write_text("0x1002\n")
    (card / "class").write_text("0x030000\n")
    (tmp_path / "dri").mkdir()
    (tmp_path / "dri" / "renderD128").touch()
    (tmp_path / "kfd").touch()
    (tmp_path / "cpuinfo").write_text(
        "processor : 0\nmodel name : Some CPU\nflags : fpu avx avx2 fma avx2x\n"
    )
    return Places(
        kfd=tmp_path / "kfd",
        dri=tmp_path / "dri",
        pci=tmp_path / "pci",
        cpuinfo=tmp_path / "cpuinfo",
        may_open=lambda path: True,
    )


def problems(facts: Doctor) -> str:
    return "\n".join(f"{a.problem} -> {a.remedy}" for a in facts.advice if a.serious)


def with_library(facts: Doctor, library: LibraryFacts) -> Doctor:
    """The facts, with another build in the place of its backend's, and advice given anew."""
    others = [library if old.backend == library.backend else old for old in facts.libraries]
    changed = dataclasses.replace(facts, libraries=tuple(others))
    return dataclasses.replace(changed, advice=tuple(doctor._advice(changed)))


def test_this_machine_is_described_and_json_and_text_say_the_same() -> None:
    facts = examine()
    data = json.loads(json.dumps(facts.to_json()))
    assert data["versions"]["numpy"] and data["cpu_path"] in facts.libraries[0].targets
    assert data["threads"] >= 1
    assert 0 < data["memory_free_bytes"] <= data["memory_total_bytes"]
    assert data["linkage"] == "clean"
    cpu = data["libraries"][0]
    assert cpu["backend"] == "cpu" and cpu["devices"][0]["usable"]
    text = facts.to_text()
    for value in (cpu["path"], cpu["build"], data["cpu_path"], data["system"], data["auto_device"]):
        assert value in text


def test_cpu_features_are_whole_words(places: Places) -> None:
    facts = examine(places)
    assert facts.cpu == "Some CPU"
    assert facts.cpu_features == ("avx", "fma", "avx2")


def test_a_gpu_without_its_library_is_said(places: Places) -> None:
    facts = examine(places)
    assert facts.amd_gpus == ("0000:03:00.0",)
    facts = with_library(facts, LibraryFacts("hip"))
    assert "0000:03:00.0" in problems(facts) and "build_hip.sh" in problems(facts)


def test_absent_forbidden_and_wrongly_grouped_nodes_get_three_remedies(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    kfd = str(places.kfd)
    shut = dataclasses.replace(places, may_open=lambda path: path != places.kfd)

    in_group = problems(examine(shut))
    assert f"{kfd} may not be opened" in in_group and f"chmod g+rw {kfd}" in in_group

    monkeypatch.setattr(os, "getegid", lambda: 4_000_000)
    monkeypatch.setattr(os, "getgroups", lambda: [])
    outside = problems(examine(shut))
    assert f"{kfd} may not be opened" in outside and "usermod -aG" in outside

    places.kfd.unlink()
    absent = problems(examine(places))
    assert f"{kfd} does not exist" in absent and "modprobe amdgpu" in absent


def test_a_machine_without_gpu_needs_no_nodes(places: Places, tmp_path: Path) -> None:
    bare = dataclasses.replace(places, pci=tmp_path / "none", kfd=tmp_path / "none")
    facts = with_library(examine(bare), LibraryFacts("hip"))
    assert problems(facts) == "" and facts.healthy


def test_a_card_that_the_build_has_no_code_for_is_said_with_both(places: Places) -> None:
    card = DeviceFacts(0, "Radeon", "gfx1103", False, "built for gfx1030, found gfx1103", 0, 0)
    hip = LibraryFacts("hip", "/lib/libokernel_hip.so", targets=("gfx1030",), devices=(card,))
    facts = with_library(examine(places), hip)
    assert "built for gfx1030, found gfx1103 -> build libokernel_hip for gfx1103" in problems(facts)
    usable = DeviceFacts(1, "Radeon", "gfx1030", True, "", 1, 2)
    both = dataclasses.replace(hip, devices=(card, usable))
    assert problems(with_library(facts, both)) == ""


def test_what_the_self_test_found_is_told(places: Places) -> None:
    known = (
        Verdict("f32", "passed", "2026-01-02T03:04:05+00:00", 0.31, 2e-6),
        Verdict("f16", "failed", "2026-01-02T03:04:06+00:00", 0.2, 0.5, "hip:0 failed: off by 0.5"),
        Verdict("bf16"),
        Verdict("q8_0", message="needed 5 bytes, free 4"),
    )
    card = DeviceFacts(0, "Radeon", "gfx1030", True, "", 1, 2, known)
    hip = LibraryFacts("hip", "/lib/libokernel_hip.so", targets=("gfx1030",), devices=(card,))
    facts = with_library(examine(places), hip)
    assert not facts.healthy
    assert 'hip:0 failed: off by 0.5 -> use device="cpu", and report it' in problems(facts)
    assert (
        "self-test: f32 passed (2026-01-02T03:04:05+00:00, 0.3 s, error 2.0e-06); "
        "f16 failed (2026-01-02T03:04:06+00:00, 0.2 s, error 5.0e-01); bf16 not run; "
        "q8_0 not run (needed 5 bytes, free 4)"
    ) in facts.to_text()
    told = facts.to_json()["libraries"][1]["devices"][0]["self_tests"]
    assert [verdict["state"] for verdict in told] == ["passed", "failed", "not run", "not run"]


@pytest.mark.parametrize("now", [False, True])
def test_the_self_test_runs_only_when_asked_for(now: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def run(device: Device, precision: str, compute: object) -> Verdict:
        ran.append(precision)
        if precision == "bf16":
            raise OutOfMemory("needed 5 bytes, free 4")
        return Verdict(precision, "passed")

    cpu = load_library("cpu")
    monkeypatch.setattr(cpu, "backend", "hip")
    monkeypatch.setattr(doctor.self_test, "run", run)
    facts = doctor._device_facts(cpu, 0, now)
    states = {verdict.precision: verdict.state for verdict in facts.self_tests}
    assert list(states) == list(PRECISIONS)
    assert ran == (list(PRECISIONS) if now else [])
    assert states["f32"] == ("passed" if now else "not run")
    assert states["bf16"] == "not run"


def test_a_missing_runtime_and_hidden_devices_are_said(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    hip = LibraryFacts("hip", "/lib/libokernel_hip.so", device_error="no HIP runtime: tried .so.5")
    assert "tried .so.5 -> install the GPU's runtime" in problems(
        with_library(examine(places), hip)
    )
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "7")
    assert "HIP_VISIBLE_DEVICES=7" in problems(with_library(examine(places), hip))


def test_a_library_that_does_not_load_is_said(
    places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "libokernel_hip.so"
    broken.write_text("not a library")
    monkeypatch.setenv("OKERNEL_LIB", str(broken))
    facts = examine(places)
    assert not facts.healthy
    assert problems(facts).count("cannot load") == 1
    assert f"unset OKERNEL_LIB={broken}" in problems(facts)


class FakeHip:
    """As much of hip-python as doctor asks; the second device does not answer."""

    class hipError_t:
        hipSuccess, hipErrorNoDevice = 0, 100

    class hipDeviceProp_t:
        name = gcnArchName = b""
        pciDomainID = pciBusID = pciDeviceID = multiProcessorCount = warpSize = totalGlobalMem = 0
        l2CacheSize = memoryBusWidth = clockRate = memoryClockRate = 0

    def __init__(self, count: int, status: int = 0) -> None:
        self.count, self.status = count, status

    def hipGetDeviceCount(self) -> tuple[int, int]:
        return self.status, self.count

    def hipGetDeviceProperties(self, found: FakeHip.hipDeviceProp_t, index: int) -> tuple[int]:
        if index:
            return (101,)
        found.name, found.gcnArchName, found.pciBusID = b"Radeon", b"gfx1030", 3
        found.multiProcessorCount, found.warpSize, found.clockRate = 40, 32, 2_250_000
        found.totalGlobalMem, found.memoryBusWidth, found.memoryClockRate = 2**34, 256, 1_000_000
        return (0,)


@pytest.mark.parametrize(
    ("hip", "seen"),
    [(FakeHip(2), 1), (FakeHip(0), 0), (FakeHip(3, status=100), 0), (None, 0)],
    ids=["one answers", "no device", "no runtime", "not installed"],
)
def test_hip_python_describes_the_devices_where_it_can(
    monkeypatch: pytest.MonkeyPatch, hip: FakeHip | None, seen: int
) -> None:
    package = types.SimpleNamespace(hip=hip) if hip else None  # None: importing it fails
    monkeypatch.setitem(sys.modules, "hip", package)
    found = tuple(doctor._hip_devices())
    assert len(found) == seen
    if seen:
        facts = dataclasses.replace(examine(), hip_devices=found)
        assert "Radeon (gfx1030) at 0000:03:00.0: 40 units of 32 lanes, 2250 MHz" in facts.to_text()
        assert facts.to_json()["hip_devices"][0]["memory_bytes"] == 2**34
