"""scripts/audit_linkage.py: planted libraries are found, honest ones come out clean."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "audit_linkage.py"
COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
SYSTEM = Path("/usr/lib/x86_64-linux-gnu")

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("audit_linkage", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["audit_linkage"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


audit = load_script()


def build(folder: Path, name: str, source: str = "", *needs: str) -> Path:
    """Compiles folder/name, linked to libraries of the folder."""
    assert COMPILER is not None
    (folder / "source.c").write_text(source or "int answer(void) { return 42; }\n")
    path = folder / name
    command = [COMPILER, "-shared", "-fPIC", "-o", str(path), str(folder / "source.c")]
    command += [f"-Wl,-soname,{name}", "-Wl,-rpath,$ORIGIN", "-Wl,--no-as-needed", f"-L{folder}"]
    command += [f"-l:{need}" for need in needs]
    subprocess.run(command, check=True, capture_output=True)
    return path


def verdicts(path: Path, *allow: str) -> dict[str, list[str]]:
    """Name -> violations, of the libraries that have some."""
    return {e.name: e.violations for e in audit.audit_library(path, allow) if e.violations}


@needs_compiler
def test_an_honest_library_is_clean(tmp_path: Path) -> None:
    path = build(tmp_path, "libhonest.so", "", "libm.so.6")
    assert verdicts(path) == {}
    assert audit.main([str(path)]) == 0


@needs_compiler
def test_a_linked_blas_is_caught(tmp_path: Path) -> None:
    build(tmp_path, "librocblas.so.4", "int rocblas_sgemm(void) { return 0; }")
    path = build(tmp_path, "libuser.so", "", "librocblas.so.4")
    found = verdicts(path)
    assert found["libuser.so"] == ["names librocblas.so.4"]
    assert "names rocblas_sgemm" in found["librocblas.so.4"]
    assert "librocblas.so.4 is not an allowed system library" in found["librocblas.so.4"]
    assert audit.main([str(path)]) == 1


@needs_compiler
@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("libhipblaslt.so", "libhipblaslt.so"),
        ("/opt/rocm/lib/libMIOpen.so.1", "libMIOpen.so.1"),
        ("try libmkl_rt.so.2 first", "libmkl_rt.so.2"),
        ("libopenblas64_", "libopenblas64_"),
        ("libcublasLt.so.12", "libcublasLt.so.12"),
        ("cblas_sgemm", "cblas_sgemm"),
        ("ncclAllReduce", "ncclAllReduce"),
        ("ck::tensor_operation", "ck::tensor_operation"),
    ],
)
def test_a_library_opened_by_name_at_run_time_is_caught(
    tmp_path: Path, text: str, word: str
) -> None:
    path = build(tmp_path, "libsly.so", f'const char *name(void) {{ return "{text}"; }}')
    assert verdicts(path) == {"libsly.so": [f"names {word}"]}


@needs_compiler
def test_a_called_symbol_is_caught_without_any_library_name(tmp_path: Path) -> None:
    source = "void cblas_dgemm(void); void f(void) { cblas_dgemm(); }"
    assert verdicts(build(tmp_path, "libcaller.so", source))["libcaller.so"] == [
        "names cblas_dgemm"
    ]


@needs_compiler
def test_one_hidden_two_levels_down_is_caught(tmp_path: Path) -> None:
    build(tmp_path, "libdeep.so", 'const char *name(void) { return "libnccl.so.2"; }')
    build(tmp_path, "libhelper.so", "", "libdeep.so")
    path = build(tmp_path, "libtop.so", "", "libhelper.so")
    assert verdicts(path, "libhelper.so", "libdeep.so") == {"libdeep.so": ["names libnccl.so.2"]}
    deep = next(e for e in audit.audit_library(path) if e.name == "libdeep.so")
    assert deep.needed_by == ("libtop.so", "libhelper.so")


@needs_compiler
def test_a_dependency_that_nobody_allowed_is_caught(tmp_path: Path) -> None:
    build(tmp_path, "libhelper.so")
    path = build(tmp_path, "libtop.so", "", "libhelper.so")
    assert list(verdicts(path)) == ["libhelper.so"]
    assert audit.main([str(path), "--allow", "libhelper.so"]) == 0


@needs_compiler
def test_what_a_gpu_runtime_brings_is_judged_by_the_forbidden_names_alone(tmp_path: Path) -> None:
    build(tmp_path, "libodd.so.1")
    build(tmp_path, "libamdhip64.so.7", "", "libodd.so.1")
    path = build(tmp_path, "libtop.so", "", "libamdhip64.so.7")
    entries = {e.name: e for e in audit.audit_library(path)}
    assert entries["libodd.so.1"].group == "GPU runtime"
    assert verdicts(path) == {}
    build(tmp_path, "libodd.so.1", "int hipblasSgemm(void) { return 0; }")
    assert verdicts(path) == {"libodd.so.1": ["names hipblasSgemm"]}


@needs_compiler
def test_names_that_only_contain_a_forbidden_one_are_left_alone(tmp_path: Path) -> None:
    texts = [
        "libblastoise.so",
        "mylibmkl_rt.so",
        "Block::size",
        "no cublas here",
        "libnccl-like.so",
    ]
    texts += ["notcblas_sgemm", "libckit.so", "miopen", "check::x"]
    array = ", ".join(f'"{text}"' for text in texts)
    path = build(tmp_path, "libquiet.so", f"const char *names[] = {{{array}}};")
    assert verdicts(path) == {}


@pytest.mark.parametrize(
    "name", ["libamdhip64.so.5", "libhsa-runtime64.so.1", "libamd_comgr.so.2", "libstdc++.so.6"]
)
def test_the_distribution_s_own_libraries_are_clean(name: str) -> None:
    path = SYSTEM / name
    if not path.exists():
        pytest.skip(f"{path} is not installed (Debian: hipcc)")
    entries = audit.audit_library(path)
    assert [e.violations for e in entries if e.violations] == []
    assert audit.exit_status(entries) == 0


def test_a_file_that_is_no_library_is_said_with_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.so").write_text("hello")
    (tmp_path / "cut.so").write_bytes(b"\x7fELF\x02\x01\x01" + bytes(20))
    for name, text in (("text.so", "not an ELF"), ("cut.so", "damaged"), ("no.so", "No such file")):
        assert audit.main([str(tmp_path / name)]) == 2
        assert text in capsys.readouterr().out


@needs_compiler
def test_a_needed_file_that_is_missing_is_status_2(tmp_path: Path) -> None:
    helper = build(tmp_path, "libhelper.so")
    path = build(tmp_path, "libtop.so", "", "libhelper.so")
    helper.unlink()
    assert audit.main([str(path), "--allow", "libhelper.so"]) == 2


@needs_compiler
def test_it_runs_alone_and_speaks_json(tmp_path: Path) -> None:
    alone = tmp_path / "copied.py"
    shutil.copy(SCRIPT, alone)
    build(tmp_path, "librccl.so.1")
    path = build(tmp_path, "libuser.so", "", "librccl.so.1")
    command = [sys.executable, "-I", "-S", str(alone), "--json", str(path)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 1, result.stderr
    entries = json.loads(result.stdout)
    assert entries[0]["name"] == "libuser.so"
    assert entries[0]["violations"] == ["names librccl.so.1"]
