"""Which build is found, and how a device is chosen or refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pyengine.errors import LibraryError, RequestError, Unavailable
from pyengine.native import Library, choose_device, library, load_library


class FakeGpu:
    """Stands for a GPU build: devices by architecture, code for some of them."""

    def __init__(self, archs: list[str], built_for: set[str]) -> None:
        self.archs, self.built_for = archs, built_for
        self.backend = "hip"

    def device_count(self) -> int:
        return len(self.archs)

    def device_name(self, device: int) -> tuple[str, str]:
        return "card", self.archs[device]

    def check_device(self, device: int) -> None:
        if self.archs[device] not in self.built_for:
            raise Unavailable(f"built for {sorted(self.built_for)}, found {self.archs[device]}")


def use_gpu(monkeypatch: pytest.MonkeyPatch, gpu: FakeGpu) -> None:
    paths, cpu = {"cpu": Path("cpu"), "hip": Path("hip")}, load_library("cpu")
    monkeypatch.setattr(library, "library_path", paths.get)
    monkeypatch.setattr(library, "load_library", {"cpu": cpu, "hip": gpu}.__getitem__)


def test_the_cpu_build_is_beside_the_package() -> None:
    found = load_library("cpu")
    assert isinstance(found, Library) and found.backend == "cpu"
    assert "portable" in found.targets
    assert found.device_count() == 1
    free, total = found.device_memory()
    assert 0 < free <= total
    assert found.runtime() == (0, "")


def test_a_named_library_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere.so"
    shutil.copy(load_library("cpu").path, copy)
    monkeypatch.setenv("OKERNEL_LIB", str(copy))
    assert load_library("cpu").path == copy


def test_a_named_library_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OKERNEL_LIB", "/nowhere/libokernel.so")
    with pytest.raises(LibraryError, match="/nowhere/libokernel.so: no such library"):
        load_library("cpu")


@pytest.mark.parametrize("name", ["gpu", "hip:", "hip:x", "cpu:0", "", "hip:-1", "cuda:1:2"])
def test_device_names_that_mean_nothing_are_refused(name: str) -> None:
    with pytest.raises(RequestError, match="expected auto, cpu, hip, hip:N"):
        choose_device(name)


def test_the_first_device_with_code_is_chosen_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    use_gpu(monkeypatch, FakeGpu(["gfx1103", "gfx1201"], {"gfx1201"}))
    for name in ("auto", "hip"):
        device = choose_device(name)
        assert (device.label, device.arch) == ("hip:1", "gfx1201")
        assert "skipped hip:0: built for ['gfx1201'], found gfx1103" in device.notice


def test_an_explicit_device_is_never_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    use_gpu(monkeypatch, FakeGpu(["gfx1103", "gfx1201"], {"gfx1201"}))
    with pytest.raises(Unavailable, match="found gfx1103"):
        choose_device("hip:0")
    with pytest.raises(Unavailable, match="hip:7 does not exist: 2 found"):
        choose_device("hip:7")


def test_only_auto_falls_back_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    use_gpu(monkeypatch, FakeGpu([], set()))
    device = choose_device("auto")
    assert device.label == "cpu"
    assert device.notice.startswith("using the CPU: hip: the runtime sees no device")
    with pytest.raises(Unavailable, match="sees no device"):
        choose_device("hip")


def test_auto_without_any_gpu_build_is_the_cpu_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "GPU_NODES", ())
    paths = {"cpu": load_library("cpu").path}
    monkeypatch.setattr(library, "library_path", paths.get)
    device = choose_device("auto")
    assert (device.label, device.notice) == ("cpu", "")
