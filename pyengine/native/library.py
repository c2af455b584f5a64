"""Which build of libokernel is used, on which device, and why."""

from __future__ import annotations

import importlib.metadata
import logging
import os
from dataclasses import dataclass
from pathlib import Path

from pyengine.errors import EngineError, LibraryError, RequestError, Unavailable
from pyengine.native.bindings import Functions, address, int32_cell, text_cell, uint64_cell

BACKENDS = ("cpu", "hip", "cuda")
GPU_NODES = ("/dev/kfd", "/dev/nvidiactl")
NATIVE_FOLDER = Path(__file__).resolve().parent

_log = logging.getLogger("pyengine")
_loaded: dict[str, Library] = {}


class Library:
    """One loaded build of libokernel.

    Attributes:
        c: its functions, by their names in okernel.h.
        path: the file.
        backend: "cpu", "hip" or "cuda".
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.c = Functions(str(path))
        self.backend: str = self.c.ok_backend().decode()

    @property
    def targets(self) -> list[str]:
        """Instruction sets or GPU architectures inside the build."""
        return str(self.c.ok_targets().decode()).split()

    @property
    def build_info(self) -> str:
        """Version, compiler and flags, one line."""
        return str(self.c.ok_build_info().decode())

    def device_count(self) -> int:
        """Devices that can be seen. Raises Unavailable with the reason when there is no runtime."""
        cell = int32_cell()
        self.c.ok_device_count(address(cell))
        return cell.value

    def device_name(self, device: int = 0) -> tuple[str, str]:
        """(marketing name, architecture) of a device."""
        name, arch = text_cell(256), text_cell(256)
        self.c.ok_device_name(device, address(name), address(arch), 256)
        return name.value.decode(errors="replace"), arch.value.decode(errors="replace")

    def device_memory(self, device: int = 0) -> tuple[int, int]:
        """(free, total) bytes."""
        free, total = uint64_cell(), uint64_cell()
        self.c.ok_device_memory(device, address(free), address(total))
        return free.value, total.value

    def check_device(self, device: int) -> None:
        """Raises Unavailable ("built for X, found Y") if this build has no code for the device."""
        self.c.ok_device_usable(device)

    def runtime(self) -> tuple[int, str]:
        """(version, path) of the GPU runtime in use; (0, "") on the CPU."""
        version, path = int32_cell(), text_cell(4096)
        self.c.ok_runtime_info(address(version), address(path), 4096)
        return version.value, path.value.decode(errors="replace")


def library_path(backend: str) -> Path | None:
    """Where a backend's build lies: OKERNEL_LIB if it is that build, else beside this file."""
    named = os.environ.get("OKERNEL_LIB")
    if named and _backend_of(Path(named)) == backend:
        return Path(named)
    name = f"libokernel_{backend}.so"
    packaged = NATIVE_FOLDER / name
    return packaged if packaged.exists() else _of_editable_install(name)


def _of_editable_install(name: str) -> Path | None:
    """The library of an editable install, which lies in site-packages while this file does not."""
    try:
        distribution = importlib.metadata.distribution("okernel-pyengine")
    except importlib.metadata.PackageNotFoundError:
        return None
    path = Path(str(distribution.locate_file(f"pyengine/native/{name}")))
    return path if path.exists() else None


def _backend_of(path: Path) -> str:
    return _open(path).backend


def _open(path: Path) -> Library:
    key = str(path.resolve())
    if key not in _loaded:
        if not path.exists():
            raise LibraryError(f"{path}: no such library (named by OKERNEL_LIB)")
        _loaded[key] = Library(path)
    return _loaded[key]


def load_library(backend: str = "cpu") -> Library:
    """The build for a backend, loaded once per process.

    Raises:
        LibraryError: there is none, or it does not load.
    """
    path = library_path(backend)
    if path is None:
        raise LibraryError(
            f"no libokernel_{backend}.so: not in {NATIVE_FOLDER}, and OKERNEL_LIB names none; "
            f"build one with pip install . -Ccmake.define.OKERNEL_BACKENDS='cpu;{backend}'"
            if backend != "cpu"
            else f"no libokernel_cpu.so in {NATIVE_FOLDER}: install the package with pip install ."
        )
    return _open(path)


@dataclass(frozen=True)
class Device:
    """A device that was chosen, and why.

    Attributes:
        library: the build that drives it.
        index: the device's number within that build.
        name: marketing name.
        arch: "x86-64", "gfx1030", "sm_90".
        notice: one line to tell the user about the choice; empty when it needs no words.
    """

    library: Library
    index: int
    name: str
    arch: str
    notice: str = ""

    @property
    def label(self) -> str:
        """The device as a user writes it: "cpu", "hip:0"."""
        backend = self.library.backend
        return backend if backend == "cpu" else f"{backend}:{self.index}"


def _describe(library: Library, index: int, notice: str = "") -> Device:
    return Device(library, index, *library.device_name(index), notice)


def _choose_gpu(backend: str, index: int | None) -> Device:
    """The asked-for or first usable device of a GPU build; raises with the reason."""
    library = load_library(backend)
    count = library.device_count()
    if count == 0:
        raise Unavailable(
            f"{backend}: the runtime sees no device (HIP_VISIBLE_DEVICES hides some?)"
        )
    if index is not None:
        if index >= count:
            raise Unavailable(
                f"device {backend}:{index} does not exist: {count} found, numbered from 0"
            )
        library.check_device(index)
        return _describe(library, index)
    skipped: list[str] = []
    for candidate in range(count):
        try:
            library.check_device(candidate)
        except Unavailable as error:
            skipped.append(f"{backend}:{candidate}: {error}")
            continue
        notice = f"using {backend}:{candidate}; skipped " + "; ".join(skipped) if skipped else ""
        return _describe(library, candidate, notice)
    raise Unavailable("; ".join(skipped))


def choose_device(device: str = "auto") -> Device:
    """Resolves "auto", "cpu", "hip", "hip:1", "cuda", "cuda:0".

    "auto" takes the first GPU build whose device works, else the CPU; falling back past a GPU
    build, or past a GPU that is plainly there, is said in `notice`. An explicit choice is never
    replaced.

    Raises:
        RequestError: not a device name.
        LibraryError, Unavailable: an explicit choice cannot be had; the message says why.
    """
    if device == "cpu":
        return _describe(load_library("cpu"), 0)
    if device == "auto":
        reasons = []
        for backend in ("hip", "cuda"):
            if library_path(backend) is None:
                continue
            try:
                return _choose_gpu(backend, None)
            except EngineError as error:
                reasons.append(str(error))
        if not reasons and any(Path(node).exists() for node in GPU_NODES):
            reasons.append("a GPU is present, but no GPU build of libokernel is installed")
        notice = f"using the CPU: {'; '.join(reasons)}" if reasons else ""
        return _describe(load_library("cpu"), 0, notice)
    backend, _, number = device.partition(":")
    if (
        backend not in ("hip", "cuda")
        or (number and not number.isdecimal())
        or device.endswith(":")
    ):
        raise RequestError(f"device={device!r}: expected auto, cpu, hip, hip:N, cuda or cuda:N")
    return _choose_gpu(backend, int(number) if number else None)
