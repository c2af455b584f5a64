"""Where the tests find their models: eight small trained checkpoints, and the folder of goldens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

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
