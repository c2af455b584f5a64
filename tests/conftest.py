"""Where the tests find their models: eight small trained checkpoints, and the folder of goldens."""

from __future__ import annotations

from pathlib import Path

import pytest

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


@pytest.fixture(scope="session")
def checkpoints() -> dict[str, Path]:
    """Checkpoint name -> directory in the layout people publish (read only)."""
    return CHECKPOINTS
