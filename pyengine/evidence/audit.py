"""The linkage audit of this installation: its libraries at rest, and a process of its own at work.

The rules are those of `linkage` (scripts/audit_linkage.py, which also runs alone). At work, a fresh
process generates a few tokens and its map of files is read, so that what the engine brought can be
told from what numpy brought. numpy's wheel carries a BLAS: its code is overwritten with an
undefined instruction from before the engine is loaded until the last token, so that a single call
into it ends the process, and the line of Python that made it is reported.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from pyengine.evidence.linkage import Entry, audit_library, forbidden_words
from pyengine.native.library import BACKENDS, NATIVE_FOLDER

# Who brought a library into the process; "Python": there before numpy, or its own modules.
GROUPS = ("engine", "GPU runtime", "package", "system", "numpy", "Python")
_TIMEOUT_S = 600
_UNDEFINED = {"x86_64": b"\x0f\x0b", "aarch64": b"\0\0\0\0"}  # ud2; udf #0
_CHILD = (
    "import sys; maps = lambda: open('/proc/self/maps').read(); python = maps(); "
    "import numpy; numpys = maps(); "
    "from pyengine.evidence.audit import work_and_report; "
    "work_and_report(python, numpys, *sys.argv[1:])"
)


def installed_libraries() -> list[Path]:
    """The builds of libokernel that this installation may load, whether or not they do load."""
    packaged = [NATIVE_FOLDER / f"libokernel_{backend}.so" for backend in BACKENDS]
    named = os.environ.get("OKERNEL_LIB")
    return [*([Path(named)] if named else []), *(path for path in packaged if path.exists())]


def audit_installed() -> list[Entry]:
    """Audits every installed build of libokernel and all that they need."""
    entries: list[Entry] = []
    for path in installed_libraries():
        entries += audit_library(path)
    if not entries:
        entries = [_problem("libokernel", "no build of it is installed")]
    return entries


def audit_runtime(model: str = "demo", device: str = "auto", prelude: str = "") -> list[Entry]:
    """Watches a process load a model and generate 8 tokens.

    Args:
        prelude: Python that the process runs first, with numpy's BLAS already closed (for tests).

    Returns one entry a library that the process mapped, in the groups of `GROUPS`, and one for
    calls into numpy's BLAS.
    """
    # One thread: a waiting thread of the BLAS itself would stumble over the overwritten code.
    quiet = {"OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-c", _CHILD, model, device, prelude]  # -P: no cwd on the path
    try:
        child = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, env=os.environ | quiet
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return [_problem("process", f"the audited process did not run: {error}")]
    if child.returncode == -4:  # SIGILL
        entry = Entry("numpy's BLAS", "", "numpy", ())
        entry.violations.append(f"called {_caller(child.stderr)}")
        return [entry]
    if child.returncode != 0:
        last = (child.stderr.strip() or "no message").splitlines()[-1]
        return [_problem("process", f"the audited process failed ({child.returncode}): {last}")]
    report = json.loads(child.stdout.splitlines()[-1])
    entries = [_judge(Path(path), group) for path, group in report["mapped"].items()]
    entries.sort(key=lambda entry: GROUPS.index(entry.group))
    return [*entries, _blas_entry(report["closed"], report["problem"])]


def _problem(name: str, text: str) -> Entry:
    return Entry(name, "", "audited", (), problems=[text])


def _caller(traceback: str) -> str:
    """The innermost Python frame of a faulthandler traceback."""
    frame = re.search(r'File "(.+)", line (\d+) in (\S+)', traceback)
    return f"by {frame[1]}:{frame[2]} in {frame[3]}" if frame else "(place unknown)"


def _blas_entry(closed: list[str], problem: str) -> Entry:
    names = ", ".join(Path(path).name for path in closed) or "none"
    entry = Entry(f"calls into numpy's BLAS ({names}): 0", "", "numpy", ())
    if problem:
        entry.name = "calls into numpy's BLAS"
        entry.problems.append(problem)
    return entry


def _judge(path: Path, group: str) -> Entry:
    """One mapped file. What numpy brought is named, not judged: its calls are counted instead."""
    entry = Entry(path.name, str(path), group or _group(path), ())
    if entry.group == "Python":
        return entry
    words = forbidden_words(f"{path.name}\0".encode() + _content(path, entry))
    if entry.group == "numpy":
        # It also brings modules of Python and of the system; what names a BLAS stays its own.
        if not words and not {"numpy", "numpy.libs"} & set(path.parts):
            entry.group = _group(path)
    else:
        entry.violations += [f"names {word}" for word in words]
    return entry


def _content(path: Path, entry: Entry) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        entry.problems.append(f"{path}: {error.strerror}")
        return b""


def _group(path: Path) -> str:
    """Whose a library is that came after numpy."""
    if path in [library.resolve() for library in installed_libraries()]:
        return "engine"
    if "site-packages" in path.parts or "dist-packages" in path.parts:
        return "package"
    if "lib-dynload" in path.parts:
        return "Python"
    return "GPU runtime" if re.match(r"lib(amd|hsa|cuda|nvidia|drm)", path.name) else "system"


# ---- in the audited process ---------------------------------------------------------------------


def mapped_libraries(maps: str) -> list[str]:
    """Shared libraries in the text of /proc/<pid>/maps, in order of appearance."""
    paths = (line.split(maxsplit=5)[5] for line in maps.splitlines() if line.count("/"))
    return list(dict.fromkeys(path for path in paths if re.search(r"\.so(\.|$)", path)))


@contextlib.contextmanager
def _closed_code(maps: str, paths: Sequence[str]) -> Iterator[None]:
    """Overwrites the executable pages of some mapped files, and puts them back at the end."""
    undefined = _UNDEFINED[platform.machine()]
    saved: list[tuple[int, bytes]] = []
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        try:
            for begin, end in _code_ranges(maps, paths):
                code = os.pread(memory.fileno(), end - begin, begin)
                saved.append((begin, code))
                _write_all(memory.fileno(), begin, undefined * (len(code) // len(undefined)))
            yield
        finally:
            for begin, code in saved:
                _write_all(memory.fileno(), begin, code)


def _code_ranges(maps: str, paths: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Addresses of executable pages of the files."""
    for line in maps.splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and "x" in fields[1] and fields[5] in paths:
            begin, end = fields[0].split("-")
            yield int(begin, 16), int(end, 16)


def _write_all(descriptor: int, offset: int, data: bytes) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], offset + done)


def work_and_report(python: str, numpys: str, model: str, device: str, prelude: str) -> None:
    """Generates with numpy's BLAS closed; prints what is mapped and who brought it, as JSON.

    Args:
        python, numpys: the process's map before and after the import of numpy.
    """
    faulthandler.enable()
    groups = dict.fromkeys(mapped_libraries(numpys), "numpy")
    groups |= dict.fromkeys(mapped_libraries(python), "Python")
    blas = [path for path in groups if forbidden_words(f"{Path(path).name}\0".encode())]
    problem = ""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(_closed_code(numpys, blas))
        except (OSError, KeyError) as error:
            problem = f"calls cannot be counted here: {error}"
        exec(prelude, {})
        from pyengine.generation.engine import Engine

        with Engine(model, device=device) as engine:
            engine.generate("Once upon a time", max_new_tokens=8)
            after = mapped_libraries(Path("/proc/self/maps").read_text())
    mapped = {path: groups.get(path, "") for path in after}
    print(json.dumps({"mapped": mapped, "closed": blas, "problem": problem}))
