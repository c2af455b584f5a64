"""What the AMD tests compile, each once a session; a missing tool is a skip that names it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pyengine.native import Library
from tests.amd import library_code, rdna2, toolchain
from tests.amd.code_objects import CodeObject, load_code_object
from tests.amd.standin_library import SampleLibrary


@pytest.fixture(scope="session")
def device_tools() -> None:
    """Skips where code for AMD's targets cannot be compiled."""
    if reason := toolchain.missing_device_tools():
        pytest.skip(reason)


@pytest.fixture(scope="session")
def sample_code(
    device_tools: None, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., CodeObject]:
    """sample_code(target, bug=0): the sample kernels' code object, optionally with a seeded mistake."""
    folder = tmp_path_factory.mktemp("code")

    @functools.cache
    def code(target: str, bug: int = 0) -> CodeObject:
        out = folder / f"{target}-{bug}.o"
        return load_code_object(
            toolchain.compile_device(target, toolchain.SAMPLES, out, [f"-DBUG={bug}"])
        )

    return code


@pytest.fixture(scope="session")
def sample_code_rdna2(
    device_tools: None, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., CodeObject]:
    """sample_code_rdna2(bug=0): gfx1030's code generation, assembled for gfx1100."""
    folder = tmp_path_factory.mktemp("rdna2")

    @functools.cache
    def code(bug: int = 0) -> CodeObject:
        return rdna2.compile_rdna2(toolchain.SAMPLES, folder / f"{bug}.o", [f"-DBUG={bug}"])

    return code


@pytest.fixture(scope="session")
def _standin_samples(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[int, str], SampleLibrary]:
    if reason := toolchain.missing_standin_tools():
        pytest.skip(reason)
    folder: Path = tmp_path_factory.mktemp("standin")

    @functools.cache
    def build(wave: int, target: str) -> SampleLibrary:
        return SampleLibrary.build(folder, wave=wave, target=target)

    return build


@pytest.fixture
def standin_samples(
    _standin_samples: Callable[[int, str], SampleLibrary],
) -> Iterator[Callable[[int, str], SampleLibrary]]:
    """standin_samples(wave, target): the sample kernels in the stand-in, without mistakes until set_bug."""
    used: list[SampleLibrary] = []

    def build(wave: int, target: str) -> SampleLibrary:
        used.append(_standin_samples(wave, target))
        return used[-1]

    yield build
    for library in used:
        library.set_bug(0)


@pytest.fixture(scope="session")
def standin_library() -> Callable[..., Library]:
    """standin_library(wave, target=""): libokernel itself with its kernels in the stand-in."""
    if reason := library_code.missing_build_tools():
        pytest.skip(reason)

    @functools.cache
    def load(wave: int, target: str = "") -> Library:
        return Library(library_code.standin_library(wave, target))

    return load
