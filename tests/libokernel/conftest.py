"""Every operation test runs on every library that is built, and on the CPU on every path."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyengine.errors import InvalidArgument, Unavailable
from pyengine.native import Arena, Buffer, DType, Library, Queue, library_path, load_library

ROOT = Path(__file__).resolve().parents[2]
Array = np.ndarray[Any, Any]
_DTYPES = {"float32": DType.F32, "float16": DType.F16, "uint16": DType.BF16, "int32": DType.I32}


def _builds() -> list[str]:
    """What is built, whether or not it runs here: cpu-portable, cpu-avx2, ..., hip, cuda."""
    names = [f"cpu-{path}" for path in load_library("cpu").targets]
    return names + [backend for backend in ("hip", "cuda") if library_path(backend)]


@pytest.fixture(params=_builds())
def lib(request: pytest.FixtureRequest) -> Iterator[Library]:
    """A library, with one CPU path pinned and its default number of threads."""
    backend, _, path = request.param.partition("-")
    try:
        library = load_library(backend)
        if path:
            library.c.ok_set_path(path.encode())
        else:
            library.check_device(0)
    except Unavailable as error:
        pytest.skip(str(error))
    threads = library.c.ok_threads()
    yield library
    if path:
        library.c.ok_set_path(b"")
        library.c.ok_set_threads(threads)


@pytest.fixture
def cpu() -> Library:
    """The CPU build, on its best path: for what has nothing to do with instruction sets."""
    return load_library("cpu")


@pytest.fixture
def arena(lib: Library) -> Iterator[Arena]:
    """64 MiB of device memory."""
    with Arena(lib, 64 << 20) as arena:
        yield arena


@pytest.fixture
def queue(lib: Library) -> Iterator[Queue]:
    """An immediate queue."""
    with Queue(lib) as queue:
        yield queue


@pytest.fixture
def put(arena: Arena, queue: Queue) -> Callable[[Array], Buffer]:
    """put(array): a device buffer with these contents; uint16 means bf16."""

    def put(array: Array) -> Buffer:
        return arena.alloc(array.shape, _DTYPES[array.dtype.name]).upload(queue, array)

    return put


@pytest.fixture
def refused() -> Callable[[Callable[..., Any], dict[str, Any], dict[str, dict[str, Any]]], None]:
    """refused(function, good, {message: change}): `good` passes, and is refused with a change.

    The message (a literal) must stand in InvalidArgument's text, after the function's name.
    """

    def check(
        function: Callable[..., Any], good: dict[str, Any], changes: dict[str, dict[str, Any]]
    ) -> None:
        function(**good)
        for message, change in changes.items():
            with pytest.raises(InvalidArgument) as caught:
                function(**(good | change))
            assert f"{caught.value.function}: {message}" in str(caught.value)

    return check


@pytest.fixture
def run_python() -> Callable[..., str]:
    """run_python(code, prefix=[...], VARIABLE="..."): what a fresh interpreter prints, stripped."""

    def run(code: str, prefix: list[str] | None = None, **variables: str) -> str:
        done = subprocess.run(
            [*(prefix or []), sys.executable, "-c", code],
            env=os.environ | variables,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run
