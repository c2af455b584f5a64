"""How the HIP build finds a runtime of any version, and what it says where there is none.

The runtimes are stubs (hip_runtime_stub.c): one library of each number, without a card. Each case
is a fresh interpreter, since a library looks once.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pyengine.native import library_path, load_library

ROOT = Path(__file__).resolve().parents[2]
STUB = Path(__file__).with_name("hip_runtime_stub.c")
NO_PERMISSION = "/proc/sys/kernel/ostype"  # read-only even to root

PROBE = """
import sys
from pyengine.errors import EngineError
from pyengine.native import load_library
try:
    library = load_library("hip")
    {code}
except EngineError as error:
    print(type(error).__name__, error)
"""


@pytest.fixture(scope="module")
def hip_build() -> Path:
    """The HIP library itself, not its stand-in."""
    path = library_path("hip")
    if path is None:
        pytest.skip("libokernel_hip.so is not built")
    if "stand-in" in load_library("hip").build_info:
        pytest.skip("the HIP library under test is the stand-in")
    return path


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """stub(6, 10): a folder with a runtime of each of these versions."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")

    @functools.cache
    def make(*versions: int, flags: tuple[str, ...] = ()) -> Path:
        folder = tmp_path_factory.mktemp("rocm")
        for version in versions:
            out = folder / f"libamdhip64.so.{version}"
            command = [compiler, "-shared", "-fPIC", f"-DSTUB_VERSION={version}", *flags]
            subprocess.run([*command, str(STUB), "-o", str(out)], check=True)
        return folder

    return make


@pytest.fixture
def probe(hip_build: Path, tmp_path: Path) -> Callable[..., str]:
    """probe(code, folder, devices=...): what a fresh interpreter prints that runs `code`."""

    def run(code: str, folder: Path, devices: str = "gfx1030", **variables: str) -> str:
        environment = os.environ | {
            "OKERNEL_LIB": str(hip_build),
            "OKERNEL_HIP_SEARCH": str(folder),
            "STUB_DEVICES": devices,
            "STUB_LOG": str(tmp_path / "log"),
        }
        done = subprocess.run(
            [sys.executable, "-c", PROBE.format(code=code)],
            env=environment | variables,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run


@pytest.mark.parametrize("versions, chosen", [((5,), 5), ((6,), 6), ((5, 6, 7), 7), ((7, 10), 10)])
def test_the_runtime_with_the_highest_number_is_used(probe, stub, versions, chosen):
    folder = stub(*versions)
    said = probe("print(*library.runtime())", folder)
    assert said == f"{chosen * 10000000 + 200000} {folder}/libamdhip64.so.{chosen}"


@pytest.mark.parametrize("version", [5, 6, 7, 10])
def test_the_architecture_is_read_from_either_layout(probe, stub, version):
    assert probe("print(*library.device_name())", stub(version)) == "stub 0 gfx1030"


def test_without_a_runtime_the_library_loads_and_says_what_it_looked_for(probe, tmp_path):
    said = probe("print(len(library.targets) > 0); library.device_count()", tmp_path)
    assert said.startswith("True\nUnavailable ok_device_count: no HIP runtime: libamdhip64.so.5 to")
    assert str(tmp_path) in said and "ROCm 5 and later" in said and "ROCM_PATH" in said


def test_a_runtime_that_lacks_a_function_is_named(probe, stub):
    folder = stub(7, flags=("-DSTUB_INCOMPLETE",))
    said = probe("library.device_count()", folder)
    assert said.endswith(f"HIP runtime {folder}/libamdhip64.so.7 has no hipRuntimeGetVersion")


def test_a_runtime_in_the_process_is_taken(probe, stub):
    here, other = stub(6), stub(5)
    code = f"import ctypes; ctypes.CDLL('{here}/libamdhip64.so.6'); print(library.runtime()[1])"
    said = probe(code, other, OKERNEL_HIP_SEARCH="", LD_LIBRARY_PATH=str(other))
    assert said == f"{here}/libamdhip64.so.6"


def test_a_card_without_code_is_a_sentence(probe, stub):
    said = probe("print(library.device_count()); library.check_device(0)", stub(6), "gfx1103")
    targets = " ".join(load_library("hip").targets)
    assert said.startswith("1\nUnavailable ok_device_usable: device 0: ")
    assert f"built for {targets}; found gfx1103" in said


def test_a_second_card_may_be_the_usable_one(probe, stub):
    code = "print(library.device_count()); library.check_device(1); library.check_device(0)"
    said = probe(code, stub(6), "gfx1103,gfx1030")
    assert said.startswith("2\nUnavailable") and "device 0" in said


@pytest.mark.parametrize(
    "node, message",
    [
        ("/nowhere/kfd", "device node /nowhere/kfd is absent"),
        (NO_PERMISSION, f"no permission on device node {NO_PERMISSION}"),
        ("/dev/null", "sees no device: no ROCm-capable device is detected"),
    ],
)
def test_why_there_is_no_device_is_told_apart(probe, stub, node, message):
    said = probe("library.device_count()", stub(6), "", OKERNEL_KFD=node)
    assert said.startswith("Unavailable ok_device_count: ") and message in said


def test_a_kernel_of_the_cards_code_object_is_launched(probe, stub, tmp_path):
    code = """
    from pyengine.native import Arena, DType, Queue, ops
    import numpy as np
    with Arena(library, 1 << 20) as arena, Queue(library) as queue:
        x, w = arena.alloc((3, 8), DType.F32), arena.alloc((1, 8), DType.F32)
        ops.rms_norm(queue, x, x, w.reshape(8), eps=1e-5)
        with queue.record() as program:
            ops.rms_norm(queue, x, x, w.reshape(8), eps=1e-5)
        program.replay(); program.replay(); program.close()
        print("done")
"""
    assert probe(code, stub(6)) == "done"
    log = (tmp_path / "log").read_text().splitlines()
    assert log[0] == "load 0x36"  # EF_AMDGPU_MACH_AMDGCN_GFX1030
    assert log[1:] == ["function rms_norm_kernel"] + 3 * ["launch rms_norm_kernel 3,1,1 x 64,1,1"]


def test_too_much_memory_is_refused_with_numbers(probe, stub):
    said = probe("from pyengine.native import Arena; Arena(library, 1 << 40)", stub(6))
    assert said.startswith("OutOfMemory ok_arena_create: ")
    assert f"needed={1 << 40} free={3 << 30} total={4 << 30}" in said


def test_a_graph_that_fails_its_self_test_is_refused(probe, stub):
    # The stub launches nothing, so that no replay can give the right numbers.
    code = """
    from pyengine.native import Queue, Replay
    with Queue(library) as queue:
        with queue.record() as program:
            pass
        try:
            program.set_replay(Replay.GRAPH)
        finally:
            program.close()
"""
    assert "captured graphs fail the self-test" in probe(code, stub(6))
    assert "OKERNEL_GRAPH=0" in probe(code, stub(6), OKERNEL_GRAPH="0")


def test_a_child_of_fork_is_told_so(probe, stub):
    code = """
    import os
    library.device_count()
    sys.stdout.flush()
    if os.fork() == 0:
        library.device_count()
    else:
        os.wait(); print("parent"); library.check_device(0)
"""
    said = probe(code, stub(6)).splitlines()
    assert said[0].startswith("Unavailable") and "before fork" in said[0] and said[-1] == "parent"
