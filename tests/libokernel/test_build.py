"""How the CPU library is built: what it asks of a system and a processor, and no builder's path."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from pyengine.evidence.linkage import read_elf
from pyengine.native import Library, library_path

ROOT = Path(__file__).resolve().parents[2]
# Debian 12, Ubuntu 22.04, RHEL 9: a wheel's tag would be manylinux_2_34. Threads are a part of libc
# since then, so a library linked there asks for that version; it must not ask for its builder's.
NEWEST = {"GLIBC": (2, 34)}
BUILDERS_PATH = re.compile(rb"/(?:home|root|tmp|builds?|workspace)/[\w./-]+")
PATHS = ("avx2", "avx512", "avx512vnni")


def _tool(name: str) -> str:
    found = shutil.which(name)
    if not found:
        pytest.skip(f"needs {name}")
    return found


def _output(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


# ---- the installed library ----------------------------------------------------------------------


@pytest.fixture
def release(cpu: Library) -> Path:
    """The library under test, if it is built as it is shipped."""
    if "sanitized" in cpu.build_info:
        pytest.skip("a sanitized build is for its builder alone")
    path = library_path("cpu")
    assert path is not None
    return path


def test_the_library_asks_for_no_newer_libc_than_is_claimed(release: Path) -> None:
    symbols = _output(_tool("objdump"), "-T", release)
    asked = set(re.findall(r"\b(GLIBC|GLIBCXX|CXXABI|GCC)_(\d+(?:\.\d+)*)", symbols))
    assert ("GLIBC", "2.34") in asked or ("GLIBC", "2.17") in asked, "the pattern has gone blind"
    for name, version in asked:
        assert tuple(map(int, version.split("."))) <= NEWEST.get(name, ()), f"{name}_{version}"


def test_the_library_knows_no_folder_of_its_builder(release: Path) -> None:
    elf = read_elf(release)
    assert elf.search == ()  # no RPATH, no RUNPATH
    assert str(ROOT).encode() not in elf.data
    assert not BUILDERS_PATH.search(elf.data)


# ---- the objects it is made of ------------------------------------------------------------------


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Source name -> object file of a release build."""
    if platform.machine() != "x86_64":
        pytest.skip("looks into x86-64 code")
    build = tmp_path_factory.mktemp("build")
    cmake = _tool("cmake")
    subprocess.run(
        [cmake, "-S", ROOT / "libokernel", "-B", build, "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON"],
        check=True, capture_output=True,
    )  # fmt: skip
    jobs = str(len(os.sched_getaffinity(0)))
    subprocess.run([cmake, "--build", build, "--parallel", jobs], check=True, capture_output=True)
    found = {}
    for entry in json.loads((build / "compile_commands.json").read_text()):
        command = shlex.split(entry["command"])
        output = Path(entry["directory"]) / command[command.index("-o") + 1]
        found[Path(entry["file"]).stem] = output
    assert {"norm", "matmul_avx2", "matmul_avx512"} <= set(found)
    return found


def _path_of(stem: str) -> str:
    """The instruction-set path that a source is written for; "" for the baseline."""
    suffix = stem.rpartition("_")[2]
    return suffix if suffix in PATHS else ""


def test_wide_registers_stay_in_the_files_of_their_path(objects: dict[str, Path]) -> None:
    objdump = _tool("objdump")
    seen = set()
    for stem, built in objects.items():
        code = _output(objdump, "-d", "--no-show-raw-insn", built)
        # A VEX or EVEX instruction is spelled with a v; xmm16 and up and masks are EVEX's alone.
        evex = bool(re.search(r"%(zmm|[xy]mm(1[6-9]|2\d|3[01])|k[0-7]\b)", code))
        vex = evex or bool(re.search(r"\tv[a-z0-9]+ .*%[xy]mm", code))
        path = _path_of(stem)
        assert not vex or path, f"{stem} has AVX code"
        assert not evex or path.startswith("avx512"), f"{stem} has AVX-512 code"
        seen.add((path, evex))
    assert ("avx512", True) in seen and ("avx2", False) in seen and ("", False) in seen


def test_no_function_of_a_path_can_be_taken_for_another_files(objects: dict[str, Path]) -> None:
    # An inline function with external linkage is one for the whole library: the linker may choose
    # the copy that was compiled for AVX-512, and every processor would run it.
    nm = _tool("nm")
    shared = {
        stem: re.findall(r"^[0-9a-f]+ [WVu] (.+)$", _output(nm, "-C", built), re.M)
        for stem, built in objects.items()
        if _path_of(stem)
    }
    assert shared and not any(shared.values()), shared


# ---- NVIDIA -------------------------------------------------------------------------------------


def test_every_nvidia_kernel_waits_for_the_one_before(tmp_path: Path) -> None:
    """Kernels are launched ahead (runtime_cuda.cpp); one without begin_kernel would be a race."""
    source, ptx = tmp_path / "kernels.cu", tmp_path / "kernels.ptx"
    gpu = ROOT / "libokernel/src/gpu"
    source.write_text("".join(f'#include "{path}"\n' for path in sorted(gpu.glob("*.hip"))))
    folders = [f"-I{path}" for path in (ROOT / "libokernel/include", gpu.parent, gpu)]
    command = [_tool("nvcc"), "-std=c++17", "-arch=sm_90", "-ptx", '-DOKERNEL_BACKEND="cuda"']
    _output(*command, *folders, source, "-o", ptx)
    kernels = ptx.read_text().split(".entry ")[1:]
    assert len(kernels) > 50
    assert [k.split("(")[0] for k in kernels if "griddepcontrol.wait" not in k] == []
