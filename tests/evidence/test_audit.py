"""evidence/audit.py: this installation's libraries, and a process at work."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from pyengine.evidence.audit import GROUPS, audit_installed, audit_runtime, mapped_libraries
from pyengine.evidence.linkage import Entry, exit_status


def by_name(entries: list[Entry], name: str) -> Entry:
    return next(entry for entry in entries if entry.name == name)


def test_every_installed_library_is_clean() -> None:
    entries = audit_installed()
    assert any(entry.name == "libokernel_cpu.so" for entry in entries)
    assert exit_status(entries) == 0


def test_a_generating_process_maps_nothing_forbidden_and_calls_no_blas() -> None:
    entries = audit_runtime(device="cpu")
    assert [entry.violations for entry in entries if entry.violations] == []
    assert exit_status(entries) == 0
    assert by_name(entries, "libokernel_cpu.so").group == "engine"
    assert {entry.group for entry in entries} <= set(GROUPS)
    blas = [e for e in entries if e.group == "numpy" and "blas" in e.name.lower() and e.path]
    assert entries[-1].name.startswith("calls into numpy's BLAS")
    assert not blas or blas[0].name in entries[-1].name


def test_a_call_into_numpy_s_blas_is_caught_with_its_place() -> None:
    entries = audit_runtime(prelude="import numpy\nnumpy.ones((9, 9)) @ numpy.ones((9, 9))")
    assert entries[0].violations == ["called by <string>:2 in <module>"]
    assert exit_status(entries) == 1


def test_arithmetic_without_blas_is_let_through() -> None:
    prelude = "import numpy\nassert (numpy.ones((9, 9)) * 2).sum() == 162"
    assert exit_status(audit_runtime(device="cpu", prelude=prelude)) == 0


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_forbidden_library_in_the_process_is_caught(tmp_path: Path) -> None:
    (tmp_path / "empty.c").touch()
    planted = tmp_path / "libnccl.so.2"
    subprocess.run(["cc", "-shared", "-o", str(planted), str(tmp_path / "empty.c")], check=True)
    prelude = f"import ctypes; kept = ctypes.CDLL({str(planted)!r})"
    entries = audit_runtime(device="cpu", prelude=prelude)
    assert by_name(entries, "libnccl.so.2").violations == ["names libnccl.so.2"]
    assert exit_status(entries) == 1


def test_a_process_that_fails_is_said() -> None:
    entries = audit_runtime(model="no-such-model")
    assert exit_status(entries) == 2
    assert "no-such-model" in entries[0].problems[0]


def test_the_map_of_a_process_is_read() -> None:
    maps = (
        "7f00-7f01 r-xp 0 fe:00 1  /usr/lib/lib one.so.1\n"
        "7f01-7f02 rw-p 0 fe:00 1  /usr/lib/lib one.so.1\n"
        "7f02-7f03 rw-p 0 00:00 0  [heap]\n"
        "7f03-7f04 r--p 0 fe:00 2  /usr/share/text.sort\n"
        "7f04-7f05 rw-p 0 00:00 0\n"
    )
    assert mapped_libraries(maps) == ["/usr/lib/lib one.so.1"]
