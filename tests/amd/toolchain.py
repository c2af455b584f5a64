"""Compiling kernels for the tests: clang for AMD's targets and for the stand-in.

Debian's packages are enough: clang-19, lld-19, llvm-19, hipcc and rocm-device-libs.
"""

from __future__ import annotations

import functools
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

HERE = Path(__file__).parent
SAMPLES = HERE / "samples" / "samples.hip"
STANDIN_INCLUDE = HERE / "standin"

CLANG = os.environ.get("OKERNEL_CLANG", "clang-19")
CLANGXX = os.environ.get("OKERNEL_CLANGXX", "clang++-19")
OBJDUMP = os.environ.get("OKERNEL_OBJDUMP", "llvm-objdump-19")
LINKER = "ld.lld-19"
DEVICE_LIBS = Path("/usr/lib/x86_64-linux-gnu/amdgcn/bitcode")
HIP_HEADERS = Path("/usr/include/hip/hip_runtime.h")

# Architectures newer than Debian's device libraries lack one file each, which holds one constant.
_ISA_VERSIONS = {
    "1100": 11000, "1101": 11001, "1102": 11002, "1103": 11003, "1150": 11500, "1151": 11501,
    "1200": 12000, "1201": 12001, "942": 9402,
}  # fmt: skip
_ISA_SOURCE = """target triple = "amdgcn-amd-amdhsa"
@__oclc_ISA_version = linkonce_odr protected local_unnamed_addr addrspace(4) constant i32 {}, align 4
"""

TARGETS = (
    "gfx1030", "gfx1100", "gfx1101", "gfx1102", "gfx1151", "gfx1200", "gfx1201", "gfx90a", "gfx942",
)  # fmt: skip


def full_set() -> bool:
    """Whether everything is to be checked (CI_FULL=1) or what fits a quick run."""
    return os.environ.get("CI_FULL", "0") not in ("", "0")


def missing_device_tools() -> str:
    """Why code for AMD's targets cannot be compiled and read here; "" if it can."""
    for tool in (CLANG, OBJDUMP, LINKER):
        if not shutil.which(tool):
            return f"{tool} is not installed"
    for path, package in ((DEVICE_LIBS, "rocm-device-libs"), (HIP_HEADERS, "hipcc")):
        if not path.exists():
            return f"{path} is missing (package {package})"
    return ""


def missing_standin_tools() -> str:
    """Why the stand-in cannot be built here; "" if it can."""
    if platform.machine() != "x86_64":
        return "the stand-in switches fibers with x86-64 code"
    return "" if shutil.which(CLANGXX) else f"{CLANGXX} is not installed"


def _run(command: Sequence[str | Path]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stderr[:4000]}")
    return done.stdout


@functools.cache
def device_libs() -> Path:
    """A folder of device libraries that serves every target of TARGETS."""
    folder = Path(tempfile.mkdtemp(prefix="okernel-device-libs-"))
    for file in DEVICE_LIBS.glob("*.bc"):
        (folder / file.name).symlink_to(file)
    for name, version in _ISA_VERSIONS.items():
        out = folder / f"oclc_isa_version_{name}.bc"
        if out.exists():
            continue
        source = folder / "isa.ll"
        source.write_text(_ISA_SOURCE.format(version))
        target = ("-target", "amdgcn-amd-amdhsa", "-nogpulib")
        _run((CLANG, *target, "-x", "ir", "-emit-llvm", "-c", source, "-o", out))
    return folder


def device_command(target: str, source: Path, flags: Iterable[str] = ()) -> list[str | Path]:
    """The compiler call for one source and target, up to the kind of output and -o."""
    return [
        CLANG, "-x", "hip", f"--offload-arch={target}", "--offload-device-only",
        "--no-gpu-bundle-output", "-mcode-object-version=4", "-O3", "-std=c++17",
        "-ffp-contract=off", "-fno-exceptions", "-fno-rtti", "--hip-path=/usr",
        f"--rocm-device-lib-path={device_libs()}", *flags, source,
    ]  # fmt: skip


def compile_device(target: str, source: Path, out: Path, flags: Iterable[str] = ()) -> Path:
    """Compiles one .hip file to one raw code object."""
    _run([*device_command(target, source, flags), "-c", "-o", out])
    return out


def compile_standin(
    sources: Sequence[Path], out: Path, *, wave: int, target: str, flags: Iterable[str] = ()
) -> Path:
    """Compiles .hip or .cpp files with the stand-in header to a shared library.

    target: whose matrix unit and dot products the kernels are to use, e.g. "gfx1100".
    """
    _run([
        CLANGXX, "-std=c++17", "-O2", "-march=native", "-fPIC", "-shared", "-fno-exceptions",
        "-fno-rtti", "-fvisibility=hidden", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror",
        f"-D__{target}__", f"-DSTANDIN_WAVE_SIZE={wave}", "-I", STANDIN_INCLUDE, *flags,
        "-x", "c++", *sources, "-pthread", "-o", out,
    ])  # fmt: skip
    return out


def assemble(source: Path, target: str, out: Path) -> Path:
    """Assembles and links AMD assembly text to a code object."""
    _run((CLANG, "-target", "amdgcn-amd-amdhsa", f"-mcpu={target}", "-x", "assembler", source,
          "-o", out))  # fmt: skip
    return out


def disassemble(code_object: Path, target: str) -> str:
    """llvm-objdump's text of a code object, without the instructions' bytes."""
    return _run((OBJDUMP, "-d", "--no-show-raw-insn", f"--mcpu={target}", code_object))
