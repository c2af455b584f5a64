"""Files and directories that appear whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from pyengine.errors import EngineError, RequestError


@contextlib.contextmanager
def put_in_place(out: Path) -> Iterator[Path]:
    """A path to write to (a file, or a directory to make), which becomes `out` when all went well.

    It lies in .NAME.partial beside `out`. What a killed run left there is cleared away by the next;
    a run that is still alive is not disturbed. Everything is on disk before the name appears. A
    file or directory of that name is replaced.

    Raises:
        RequestError: another run writes `out`, or the file system refuses.
    """
    work = out.with_name(f".{out.name}.partial")
    try:
        work.mkdir(parents=True, exist_ok=True)
        with _locked(work, out):
            _clear(work)
            yield work / out.name
            _sync(work / out.name)
            _swap(work / out.name, out, work / "replaced")
            _sync(out.parent, recurse=False)
            shutil.rmtree(work)
    except EngineError:
        raise
    except OSError as error:
        raise RequestError(f"{out} cannot be written: {error.strerror or error}") from error


@contextlib.contextmanager
def _locked(work: Path, out: Path) -> Iterator[None]:
    """Holds the working directory for this run; a lock goes with its process."""
    descriptor = os.open(work, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RequestError(f"another run is writing {out}") from None
        try:
            yield
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
    finally:
        os.close(descriptor)


def _swap(new: Path, out: Path, aside: Path) -> None:
    """Gives `new` the name `out`. A directory of that name is first put aside: none replaces it."""
    if not out.is_dir():
        os.replace(new, out)
        return
    os.rename(out, aside)
    try:
        os.rename(new, out)
    except OSError:
        os.rename(aside, out)
        raise


def _clear(work: Path) -> None:
    for left in work.iterdir():
        if left.is_dir():
            shutil.rmtree(left)
        else:
            left.unlink()


def _sync(path: Path, *, recurse: bool = True) -> None:
    """Waits until a file, or a directory and what lies directly in it, is on disk."""
    if recurse and path.is_dir():
        for inner in path.iterdir():
            _sync(inner, recurse=False)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
