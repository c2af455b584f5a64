#!/usr/bin/env python3
"""What shared libraries link, load and name: proof that no vendor BLAS or the like is inside.

    python audit_linkage.py lib1.so lib2.so       needs Python >= 3.11 and nothing else
    python audit_linkage.py --runtime             needs pyengine: watches a model generate

For each library: (a) everything it needs, and what that needs, against a list of allowed system
libraries; what a GPU runtime brings along is a group of its own, judged by the forbidden names
alone, since it differs from version to version; (b) the names of forbidden libraries and the
symbols of their interfaces inside the file and inside all that it needs, found in strings and
symbol tables alike, so that a library which is opened by name at run time is found too.

Exit status: 0 clean, 1 violation, 2 something could not be looked at.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ALLOWED = re.compile(
    r"(libc|libm|libpthread|libdl|librt|libstdc\+\+|libgcc_s|ld-linux[\w-]*|linux-vdso)\.so(\.\d+)*"
)
GPU_RUNTIME = re.compile(r"lib(amdhip64|hsa-runtime64|amd_comgr\w*|cuda|cudart)\.so(\.\d+)*")

# Math, DNN, FFT, collective and attention libraries. Whole names: "lib" + one of these + ".so" or
# the end of the word. Without regard to case, since one of them is spelled libMIOpen.
_FORBIDDEN_NAMES = (
    r"rocblas|hipblas|hipblaslt|miopen|rocsolver|hipsolver|rocsparse|hipsparse|rocfft|hipfft|hipdnn"
    r"|cublas|cublaslt|cudnn\w*|cufft\w*|cusolver\w*|cusparse|nvblas|cutlass\w*|rccl|nccl|ck_\w+"
    r"|aotriton\w*|composable_kernel\w*|mkl_\w+|dnnl|onednn|(?:scipy_)?openblas[\w-]*|blis(?:-mt)?"
    r"|blas|cblas|gslcblas|lapack\w*|atlas|flame|fftw3\w*|torch\w*|flash_attn\w*"
)
_LIBRARY = re.compile(rb"lib(?i:" + _FORBIDDEN_NAMES.encode() + rb")(?=\.so|[^\w.-]|$)")
# Interfaces. A symbol is one of these prefixes and more; found by prefix, then judged as a word.
_SYMBOL_PREFIXES: tuple[bytes, ...] = (
    *(b"cblas_", b"rocblas_", b"hipblas", b"cublas", b"cudnn", b"miopen", b"nccl", b"mkl_"),
    *(b"scipy_cblas_", b"ck::"),
)
_SYMBOL = re.compile(rb"\w+(?:::\w+)*")
_MANGLED_CK = re.compile(rb"_Z(?:T[VTIS])?N?K?2ck\d\w*")  # ck:: after the compiler
_WORD = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_")

_SYSTEM_FOLDERS = ("/lib64", "/usr/lib64", "/lib", "/usr/lib", "/usr/local/lib")


class Unreadable(Exception):
    """A file that could not be looked at; the text says why."""


@dataclass(frozen=True)
class Elf:
    """What a shared library says about itself.

    Attributes:
        soname: its name to others, or "".
        needed: names it links to.
        search: folders it wants them looked up in (RPATH, RUNPATH), $ORIGIN resolved.
        machine: its processor, as a number.
        data: the whole file.
    """

    soname: str
    needed: tuple[str, ...]
    search: tuple[str, ...]
    machine: int
    data: bytes


_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_NEEDED, _DT_STRTAB, _DT_SONAME, _DT_RPATH, _DT_RUNPATH = 1, 5, 14, 15, 29


def read_elf(path: Path) -> Elf:
    """Reads a 64-bit ELF file's dynamic section. Raises Unreadable."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise Unreadable(f"{path}: {error.strerror}") from None
    if data[:4] != b"\x7fELF":
        raise Unreadable(f"{path}: not an ELF file")
    if data[4] != 2:
        raise Unreadable(f"{path}: a 32-bit file; 64-bit ones are read")
    order = "<" if data[5] == 1 else ">"
    try:
        return _dynamic(path, data, order)
    except (struct.error, ValueError, IndexError):
        raise Unreadable(f"{path}: damaged ELF file") from None


def _dynamic(path: Path, data: bytes, order: str) -> Elf:
    (machine,) = struct.unpack_from(order + "H", data, 18)
    (offset,) = struct.unpack_from(order + "Q", data, 32)
    entry_bytes, count = struct.unpack_from(order + "HH", data, 54)
    loads: list[tuple[int, int, int]] = []  # address, bytes, place in the file
    entries: list[tuple[int, int]] = []  # tag, value
    for i in range(count):
        kind, _, place, address, _, size, _, _ = struct.unpack_from(
            order + "IIQQQQQQ", data, offset + i * entry_bytes
        )
        if kind == _PT_LOAD:
            loads.append((address, size, place))
        elif kind == _PT_DYNAMIC:
            section = data[place : place + size // 16 * 16]
            entries = list(struct.iter_unpack(order + "qQ", section))
    values = dict(reversed(entries))
    strings = values.get(_DT_STRTAB, 0)
    start = next((p + strings - a for a, n, p in loads if a <= strings < a + n), 0)

    def text(at: int) -> str:
        return data[start + at : data.index(b"\0", start + at)].decode("utf-8", "replace")

    folders = [text(value) for tag, value in entries if tag in (_DT_RPATH, _DT_RUNPATH)]
    origin = str(path.resolve().parent)
    return Elf(
        soname=text(values[_DT_SONAME]) if _DT_SONAME in values else "",
        needed=tuple(text(value) for tag, value in entries if tag == _DT_NEEDED),
        search=tuple(
            folder.replace("${ORIGIN}", origin).replace("$ORIGIN", origin)
            for folder in ":".join(folders).split(":")
            if folder
        ),
        machine=machine,
        data=data,
    )


def forbidden_words(data: bytes) -> list[str]:
    """Names of forbidden libraries and of their symbols inside a file, sorted."""
    found = set()
    for match in _LIBRARY.finditer(data):
        if _begins_word(data, match.start()):
            end = match.end()
            suffix = re.match(rb"\.so(?:\.\d+)*", data[end : end + 32])
            found.add(match[0] + (suffix[0] if suffix else b""))
    for prefix in _SYMBOL_PREFIXES:
        at = data.find(prefix)
        while at >= 0:
            word = _SYMBOL.match(data, at)
            if _begins_word(data, at) and word and len(word[0]) > len(prefix):
                found.add(word[0])
            at = data.find(prefix, at + len(prefix))
    at = data.find(b"2ck")
    if at >= 0:
        found.update(match[0] for match in _MANGLED_CK.finditer(data))
    return sorted(word.decode("ascii", "replace") for word in found)


def _begins_word(data: bytes, at: int) -> bool:
    return at == 0 or (data[at - 1] not in _WORD and data[at - 1 : at] != b":")


# ---- from name to file --------------------------------------------------------------------------


def ldd(path: Path) -> dict[str, str]:
    """The loader's own answers, name -> file; empty where there is no ldd or it cannot run this."""
    try:
        result = subprocess.run(
            ["ldd", str(path)],
            capture_output=True,
            text=True,
            timeout=60,
            env=os.environ | {"LC_ALL": "C"},
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(re.findall(r"^\s*(\S+) => (/\S+)", result.stdout, re.MULTILINE))


def find_library(name: str, by: Elf, answers: dict[str, str]) -> Path | None:
    """The file that `by` gets for a name it needs."""
    if name in answers:
        return Path(answers[name])
    if "/" in name:
        return Path(name) if Path(name).exists() else None
    folders = [*by.search, *os.environ.get("LD_LIBRARY_PATH", "").split(":")]
    for folder in _SYSTEM_FOLDERS:
        folders += [folder, *(str(p) for p in sorted(Path(folder).glob("*-linux-gnu")))]
    for folder in folders:
        candidate = Path(folder) / name
        if folder and candidate.is_file() and _machine(candidate) == by.machine:
            return candidate
    return None


def _machine(path: Path) -> int:
    try:
        with open(path, "rb") as file:
            head = file.read(20)
        return int.from_bytes(head[18:20], "little" if head[5] == 1 else "big")
    except (OSError, IndexError):
        return -1


# ---- judging ------------------------------------------------------------------------------------


@dataclass
class Entry:
    """One library of an audit.

    Attributes:
        name: as it is asked for. path: the file, "" if not found here.
        group: "audited", "system", "GPU runtime" or "other".
        needed_by: the chain from the audited library.
        violations, problems: sentences: what is wrong; what could not be looked at.
    """

    name: str
    path: str
    group: str
    needed_by: tuple[str, ...]
    violations: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def audit_library(path: Path, allow: tuple[str, ...] = ()) -> list[Entry]:
    """Audits one library and all that it needs; the first entry is the library itself.

    Args:
        allow: further names that may be needed.
    """
    answers = ldd(path)
    root = Entry(path.name, str(path), "audited", ())
    in_runtime = bool(GPU_RUNTIME.fullmatch(path.name)) or _is_runtime(path)
    entries, queue, seen = [root], [(root, in_runtime)], {path.name}
    while queue:
        entry, runtime = queue.pop(0)
        elf = _look_at(entry)
        if elf is None:
            continue
        for name in elf.needed:
            if name in seen:
                continue
            seen.add(name)
            found = find_library(name, elf, answers)
            chain = (*entry.needed_by, entry.name)
            child = Entry(name, str(found or ""), "other", chain)
            child_runtime = runtime or bool(GPU_RUNTIME.fullmatch(name))
            if ALLOWED.fullmatch(name):
                child.group = "system"
            elif child_runtime:
                child.group = "GPU runtime"
            elif name not in allow:
                child.violations.append(f"{name} is not an allowed system library")
            if found is None and child.group != "system":
                child.problems.append(f"{name} is not found on this machine")
            entries.append(child)
            queue.append((child, child_runtime))
    return entries


def _is_runtime(path: Path) -> bool:
    try:
        return bool(GPU_RUNTIME.fullmatch(read_elf(path).soname))
    except Unreadable:
        return False


def _look_at(entry: Entry) -> Elf | None:
    """Reads an entry's file and judges the words in it and its own names."""
    names = f"{entry.name}\0{Path(entry.path).resolve().name if entry.path else ''}\0"
    elf = None
    try:
        if entry.path:
            elf = read_elf(Path(entry.path))
    except Unreadable as error:
        entry.problems.append(str(error))
    data = elf.data if elf else b""
    needed = "\0".join(elf.needed) if elf else ""
    for word in forbidden_words(f"{names}{needed}\0".encode() + data):
        entry.violations.append(f"names {word}")
    return elf


# ---- report -------------------------------------------------------------------------------------


def exit_status(entries: list[Entry]) -> int:
    """0 clean, 1 violation, 2 could not look everywhere."""
    if any(entry.violations for entry in entries):
        return 1
    return 2 if any(entry.problems for entry in entries) else 0


def as_json(entries: list[Entry]) -> list[dict[str, object]]:
    """The entries as plain data."""
    return [vars(entry) for entry in entries]


def table(entries: list[Entry]) -> str:
    """The entries as text, one line each and what is wrong below it."""
    return "\n".join(_lines(entries))


def _lines(entries: list[Entry]) -> Iterator[str]:
    width = max(len(entry.name) for entry in entries)
    for entry in entries:
        verdict = "VIOLATION" if entry.violations else "unseen" if entry.problems else "ok"
        yield f"{verdict:9}  {entry.group:11}  {entry.name:{width}}  {entry.path or '-'}"
        if entry.violations and entry.needed_by:
            yield f"{'':24}needed by {' -> '.join(entry.needed_by)}"
        shown = entry.violations[:8]
        yield from (f"{'':24}{text}" for text in shown + entry.problems)
        if len(entry.violations) > len(shown):
            yield f"{'':24}and {len(entry.violations) - len(shown)} more"


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("libraries", nargs="*", type=Path)
    parser.add_argument("--allow", action="append", default=[], help="a further name to allow")
    parser.add_argument("--runtime", action="store_true", help="watch pyengine generate, too")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    if not options.libraries and not options.runtime:
        parser.error("name at least one library, or --runtime")
    entries: list[Entry] = []
    for path in options.libraries:
        entries += audit_library(path, tuple(options.allow))
    if options.runtime:
        try:
            from pyengine.evidence.audit import audit_runtime
        except ImportError as error:
            entries.append(Entry("pyengine", "", "audited", (), problems=[str(error)]))
        else:
            entries += [Entry(**vars(entry)) for entry in audit_runtime()]
    print(json.dumps(as_json(entries), indent=1) if options.json else table(entries))
    status = exit_status(entries)
    if not options.json:
        print(("clean", "VIOLATION", "could not look everywhere")[status])
    return status


if __name__ == "__main__":
    sys.exit(main())
