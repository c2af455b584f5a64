"""Where the tests find their models (eight small trained checkpoints, the goldens) and devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pyengine.errors import Unavailable
from pyengine.native import Library, library_path, load_library
from tests.tiny import write_tiny

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
GOLDEN = TESTS / "golden"

# The package ships one checkpoint, so the tests read that one from where users get it.
CHECKPOINTS: dict[str, Path] = {
    "stablelm2": ROOT / "pyengine" / "data" / "demo",
    "stablelm2-12b": TESTS / "checkpoints" / "stablelm2-12b",
    "bloom": TESTS / "checkpoints" / "bloom",
    "olmo2": TESTS / "checkpoints" / "olmo2",
    "qwen2": TESTS / "checkpoints" / "qwen2",
    "phi3": TESTS / "checkpoints" / "phi3",
    "gpt2": TESTS / "checkpoints" / "gpt2",
    "llama": TESTS / "checkpoints" / "llama",
}


GPUS = [backend for backend in ("hip", "cuda") if library_path(backend)]
"""GPU builds that are here, beside the package or named by OKERNEL_LIB, usable or not."""
_NO_GPU = pytest.param("gpu", marks=pytest.mark.skip(reason="no GPU build of libokernel is here"))


def _usable(backend: str) -> str:
    try:
        load_library(backend).check_device(0)
    except Unavailable as error:
        pytest.skip(str(error))
    return backend


@pytest.fixture(scope="session", params=["cpu", *GPUS])
def device(request: pytest.FixtureRequest) -> str:
    """The CPU, and every kind of GPU that a build is here for: "cpu", "hip", "cuda"."""
    return _usable(request.param)


@pytest.fixture(scope="session", params=GPUS or [_NO_GPU])
def gpu(request: pytest.FixtureRequest) -> str:
    """Every kind of GPU that a build is here for."""
    return _usable(request.param)


@pytest.fixture
def library(device: str) -> Library:
    """The build that drives `device`."""
    return load_library(device)


def is_standin(device: str) -> bool:
    """Whether the device is no GPU but the CPU in its clothes, some thousand times slower."""
    return device != "cpu" and "stand-in" in load_library(device).build_info


@pytest.fixture(scope="session", autouse=True)
def no_self_test() -> Iterator[None]:
    """Engines of the tests start without the self-test, which has tests of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OKERNEL_SELF_TEST", "0")
        yield


@pytest.fixture(scope="session")
def checkpoints() -> dict[str, Path]:
    """Checkpoint name -> directory in the layout people publish (read only)."""
    return CHECKPOINTS


@pytest.fixture(scope="session")
def golden_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a golden ("llama", "tiny-bloom-5-heads") -> its model; tiny ones are made once."""
    made: dict[str, Path] = {}

    def find(name: str) -> Path:
        if name in CHECKPOINTS:
            return CHECKPOINTS[name]
        if name not in made:
            variant = name.removeprefix("tiny-")
            made[name] = write_tiny(variant, tmp_path_factory.mktemp(variant))
        return made[name]

    return find
