"""The library's own kernels for the tests: built with the stand-in, and compiled for AMD's targets.

What was built is kept under build/amd and rebuilt when its sources change, so that a second run costs nothing.
"""

from __future__ import annotations

import functools
import hashlib
import shutil
import subprocess
from pathlib import Path

from tests.amd import rdna2, toolchain
from tests.amd.code_objects import CodeObject, load_code_object, parse_code_object

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "libokernel"
BUILD = ROOT / "build" / "amd"

# The same as libokernel/cmake/gpu.cmake compiles kernels with.
_INCLUDES = [f"-I{SOURCE / folder}" for folder in ("include", "src", "src/gpu")]


def missing_build_tools() -> str:
    """Why the stand-in library cannot be built here; "" if it can."""
    if not shutil.which("cmake"):
        return "cmake is not installed"
    return toolchain.missing_standin_tools()


# Wave size -> the target whose way to multiply matrices a stand-in library uses, where no other is named.
STANDIN_TARGETS = {32: "gfx1100", 64: "gfx90a"}


@functools.cache
def _build_standin(pairs: str, folder: Path) -> Path:
    configure = [
        "cmake",
        "-S",
        SOURCE,
        "-B",
        folder,
        "-DOKERNEL_BACKENDS=standin",
        f"-DOKERNEL_STANDIN={pairs}",
    ]
    if shutil.which("ninja"):
        configure += ["-G", "Ninja"]
    for command in (configure, ["cmake", "--build", folder, "--parallel", "2"]):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stdout[-4000:] + done.stderr[-4000:])
    return folder


def standin_library(wave: int, target: str = "") -> Path:
    """libokernel with its kernels in the stand-in, for a wave size; target: whose matrix unit is modelled."""
    if target in ("", STANDIN_TARGETS[wave]):
        pairs = ";".join(f"{size}:{name}" for size, name in STANDIN_TARGETS.items())
        folder = _build_standin(pairs, BUILD / "standin")
    else:
        folder = _build_standin(f"{wave}:{target}", BUILD / f"standin-{target}")
    return folder / f"libokernel_standin_{wave}.so"


def _kernels() -> list[Path]:
    return sorted((SOURCE / "src" / "gpu").glob("*.hip"))


def _key(target: str) -> str:
    """Changes with anything that the kernels' code depends on."""
    digest = hashlib.sha256(target.encode())
    for path in (
        *_kernels(),
        *sorted(SOURCE.rglob("*.h")),
        Path(toolchain.__file__),
        Path(rdna2.__file__),
    ):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _one_source() -> Path:
    """All kernels as one translation unit, as the library's build compiles them."""
    BUILD.mkdir(parents=True, exist_ok=True)
    text = "".join(f'#include "{path}"\n' for path in _kernels())
    source = BUILD / "kernels.hip"
    if not source.exists() or source.read_text() != text:
        source.write_text(text)
    return source


def _forget(name: str) -> None:
    """Removes what was compiled from older sources."""
    for path in BUILD.glob(f"{name}-*"):
        if path.is_file():
            path.unlink()


@functools.cache
def kernel_code(target: str) -> CodeObject:
    """All kernels of the library, compiled for a target."""
    out = BUILD / f"{target}-{_key(target)}.co"
    if not out.exists():
        _forget(target)
        unfinished = out.with_suffix(".part")
        toolchain.compile_device(target, _one_source(), unfinished, _INCLUDES)
        unfinished.rename(out)
    return load_code_object(out)


@functools.cache
def kernel_code_rdna2() -> CodeObject:
    """All kernels of the library, compiled for gfx1030 and assembled for gfx1100."""
    out = BUILD / f"rdna2-{_key('gfx1030 as gfx1100')}.co"
    if not out.exists():
        _forget("rdna2")
        code = rdna2.compile_rdna2(_one_source(), out.with_suffix(".part"), _INCLUDES)
        out.write_bytes(code.data)
        return code
    return parse_code_object(out.read_bytes())
