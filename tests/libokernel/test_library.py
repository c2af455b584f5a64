"""What a build is: its exports, dependencies and names, and that one file alone allocates."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from pyengine.errors import InvalidArgument, Unavailable
from pyengine.native import library_path
from pyengine.native.bindings import Status
from pyengine.native.library import BACKENDS

ROOT = Path(__file__).resolve().parents[2]
HEADER = ROOT / "libokernel" / "include" / "okernel.h"
MEMORY_SOURCE = "memory.cpp"
BUILT = [backend for backend in BACKENDS if library_path(backend)]
ALLOCATION = re.compile(
    r"\b(malloc|calloc|realloc|aligned_alloc|posix_memalign|memalign|valloc|strdup|mmap|mmap64|sbrk"
    r"|operator new|_Znwm|_Znam|free|munmap)\b"
)


def _tool(name: str) -> str:
    found = shutil.which(name)
    if not found:
        pytest.skip(f"needs {name} (binutils)")
    return found


def _lines(*command: str) -> list[str]:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


@pytest.mark.parametrize("backend", BUILT)
def test_a_build_exports_the_headers_names_and_no_others(backend):
    declared = set(re.findall(r"^OK_API [^(]*?\b(ok_\w+)\(", HEADER.read_text(), re.M))
    exported = _lines(_tool("nm"), "-D", "--defined-only", str(library_path(backend)))
    assert {line.split()[-1] for line in exported} == declared


def test_the_cpu_build_needs_libc_and_libm_only():
    dynamic = _lines(_tool("readelf"), "-d", str(library_path("cpu")))
    needed = set(re.findall(r"\(NEEDED\).*\[(.+?)\]", "\n".join(dynamic)))
    allowed = re.compile(r"(libc|libm|libpthread|ld-linux-[\w-]+)\.so\.\d+")
    sanitizers = re.compile(r"lib(clang_rt\.)?(asan|ubsan).*|libstdc\+\+\.so\.6|libgcc_s\.so\.1")
    sanitized = any(name.startswith(("libasan", "libclang_rt")) for name in needed)
    for name in needed:
        assert allowed.fullmatch(name) or (sanitized and sanitizers.fullmatch(name)), name


@pytest.mark.parametrize(
    "source",
    sorted(
        p for folder in ("src", "src/cpu") for p in (ROOT / "libokernel" / folder).glob("*.cpp")
    ),
    ids=lambda path: path.name,
)
def test_only_one_object_knows_the_allocator(source, tmp_path):
    compiler = shutil.which("c++")
    if not compiler:
        pytest.skip("needs a C++ compiler")
    flags = _path_flags(source.stem)
    if flags is None:
        pytest.skip("written for another architecture")
    built = tmp_path / "object.o"
    subprocess.run(
        [compiler, "-std=c++17", "-O0", "-fPIC", "-fno-exceptions", "-fno-rtti", "-w", "-c", *flags,
         "-DOK_BUILDING", '-DOKERNEL_VERSION="0"', '-DOKERNEL_BUILD_FLAGS=""',
         f"-I{ROOT}/libokernel/include", f"-I{ROOT}/libokernel/src", str(source), "-o", str(built)],
        check=True,
    )  # fmt: skip
    undefined = _lines(_tool("nm"), "-uC", str(built))
    calls = [line.split(maxsplit=1)[-1] for line in undefined if ALLOCATION.search(line)]
    if source.name == MEMORY_SOURCE:
        assert calls, "the pattern no longer finds the one caller: this test has gone blind"
    else:
        assert not calls


def _path_flags(stem: str) -> list[str] | None:
    """Compiler flags of <op>_<path>, read from CMakeLists.txt; None for another architecture."""
    text = (ROOT / "libokernel" / "CMakeLists.txt").read_text()
    flags: dict[str, list[str]] = {}
    for name, value in re.findall(r"set\(flags_(\w+) (.*?)\)", text):
        expanded = re.sub(r"\$\{flags_(\w+)\}", lambda m: " ".join(flags[m[1]]), value)
        flags[name] = expanded.replace('""', "").split()
    path = stem.rpartition("_")[2]
    if path not in flags:
        return []
    return flags[path] if path.startswith("neon") == (os.uname().machine == "aarch64") else None


def test_a_build_says_what_it_is(lib):
    assert lib.backend in BACKENDS
    assert lib.targets
    assert "okernel 0." in lib.build_info
    name, arch = lib.device_name()
    assert name and arch
    free, total = lib.device_memory()
    assert 0 < free <= total
    assert lib.device_count() >= 1


PROGRAM = r"""
#include <stdio.h>
#include "okernel.h"
int main(void) {
    static float x[64], w[64];
    ok_queue *queue;
    for (int i = 0; i < 64; i++) x[i] = i - 32, w[i] = 1;
    if (ok_queue_create(&queue, 0, NULL)) return 1;
    if (ok_rms_norm(queue, x, 64, x, 64, w, NULL, 0, 1, 1, 64, 1e-5f)) return 2;
    if (ok_activate(queue, x, x, OK_SILU, 64)) return 3;
    printf("%s %.4f\n", ok_path(), x[63]);
    return 0;
}
"""


@pytest.mark.parametrize("model, path", [("Nehalem", "portable"), ("Haswell", "avx2")])
def test_an_older_cpu_takes_the_path_it_has(tmp_path, model, path):
    emulator, compiler = shutil.which("qemu-x86_64"), shutil.which("cc")
    if os.uname().machine != "x86_64" or not emulator or not compiler:
        pytest.skip("needs x86-64, qemu-x86_64 and a C compiler")
    library = library_path("cpu")
    (tmp_path / "program.c").write_text(PROGRAM)
    built = str(tmp_path / "program")
    subprocess.run(
        [compiler, f"-I{HEADER.parent}", str(tmp_path / "program.c"), "-o", built, str(library),
         f"-Wl,-rpath,{library.parent}"],
        check=True,
    )  # fmt: skip
    # x[63] = 31 / sqrt(mean square 341.5) = 1.6775; silu of it is 1.4134.
    assert _lines(emulator, "-cpu", model, built) == [f"{path} 1.4134"]


def test_status_names_follow_the_header(lib):
    for status in Status:
        name = "OK_SUCCESS" if status == 0 else f"OK_{status.name}"
        assert lib.c.ok_status_name(status) == name.encode()
    assert lib.c.ok_status_name(77) == b"unknown"


def test_other_devices_than_the_cpu_are_refused(cpu):
    for call in (cpu.check_device, cpu.device_name, cpu.device_memory):
        with pytest.raises(InvalidArgument, match="device=1 must be 0"):
            call(1)


def test_a_path_can_be_pinned_and_unpinned(cpu):
    best = cpu.c.ok_path()
    try:
        cpu.c.ok_set_path(b"portable")
        assert cpu.c.ok_path() == b"portable"
        with pytest.raises(InvalidArgument, match="host_name=sse9 must be one of: portable"):
            cpu.c.ok_set_path(b"sse9")
        assert cpu.c.ok_path() == b"portable"
    finally:
        cpu.c.ok_set_path(b"")
    assert cpu.c.ok_path() == best


def test_the_path_variable_is_honoured_or_refused(run_python):
    show = "from pyengine.native import *; l = load_library(); {}"
    pinned = run_python(show.format("print(l.c.ok_path().decode())"), OKERNEL_PATH="portable")
    assert pinned == "portable"
    try_queue = """
try:
    Queue(l)
except Exception as error:
    print(type(error).__name__, error)
"""
    text = run_python(show.format("") + try_queue, OKERNEL_PATH="mmx")
    assert text.startswith("InvalidArgument ok_device_usable: OKERNEL_PATH=mmx must be one of")


def test_a_path_this_cpu_lacks_is_unavailable(cpu):
    missing = []
    for path in cpu.targets:
        try:
            cpu.c.ok_set_path(path.encode())
        except Unavailable as error:
            missing.append(path)
            assert f"{path}: this CPU has no such instructions" in str(error)
    cpu.c.ok_set_path(b"")
    assert "portable" not in missing
