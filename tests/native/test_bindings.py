"""The bindings are the header, no more, and turn every failed status into its exception."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from pyengine import errors
from pyengine.native import load_library
from pyengine.native.bindings import Functions

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gen_bindings", ROOT / "scripts/gen_bindings.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_committed_bindings_are_what_the_header_gives() -> None:
    script = ROOT / "scripts/gen_bindings.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("OK_API ok_status ok_x(long n);", "outside the header's grammar"),
        ("OK_API ok_status ok_x(int32_t);", "cannot read argument"),
        ("typedef enum ok_e { OK_A, OK_B = 2 } ok_e;", "has no explicit value"),
    ],
)
def test_what_is_outside_the_grammar_stops_the_generator(
    generator: ModuleType, tmp_path: Path, text: str, message: str
) -> None:
    header = tmp_path / "okernel.h"
    header.write_text(text)
    generator.HEADER = header
    with pytest.raises(SystemExit) as caught:
        generator.render()
    assert message in str(caught.value)


def test_only_the_bindings_know_ctypes() -> None:
    sources = [p for p in (ROOT / "pyengine").rglob("*.py") if "ctypes" in p.read_text().split()]
    importing = [p.name for p in sources if "import ctypes" in p.read_text()]
    assert importing == ["bindings.py"]


def test_a_failed_call_raises_with_status_function_and_the_librarys_words() -> None:
    functions = load_library("cpu").c
    with pytest.raises(errors.InvalidArgument, match="ok_rms_norm") as caught:
        functions.ok_rms_norm(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1e-5)
    assert caught.value.status == 1
    assert caught.value.function == "ok_rms_norm"


def test_a_wrong_number_of_arguments_is_a_type_error() -> None:
    functions = load_library("cpu").c
    with pytest.raises(TypeError):
        functions.ok_status_name(1, 2)
    with pytest.raises(TypeError):
        functions.ok_status_name()


def test_a_library_of_another_version_is_refused_with_both_numbers(tmp_path: Path) -> None:
    source, library = tmp_path / "old.c", tmp_path / "libokernel_cpu.so"
    source.write_text("int ok_abi_version(void) { return 99; }")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    with pytest.raises(errors.LibraryError, match="ABI version 99; this package needs 1"):
        Functions(str(library))


def test_a_file_that_is_no_library_is_said(tmp_path: Path) -> None:
    (tmp_path / "x.so").write_text("not an ELF file")
    with pytest.raises(errors.LibraryError, match="cannot load"):
        Functions(str(tmp_path / "x.so"))
    other = tmp_path / "other.so"
    subprocess.run(["cc", "-shared", "-o", other, "-x", "c", "/dev/null"], check=True)
    with pytest.raises(errors.LibraryError, match="not a libokernel"):
        Functions(str(other))
