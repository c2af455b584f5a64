"""Run language models with kernels of our own.

    from pyengine import Engine, SamplingParams

    with Engine("demo") as engine:
        print(engine.generate("In the beginning", max_new_tokens=20).text)

Importing does nothing but define names: no handlers, threads, GPU runtime or output. Messages go to
the logger "pyengine".
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

from pyengine.errors import EngineError

if TYPE_CHECKING:
    from pyengine.generation.completion import Chunk, Completion
    from pyengine.generation.engine import Engine
    from pyengine.generation.sampling import SamplingParams
    from pyengine.generation.scheduler import Token
    from pyengine.generation.source import open_model

try:
    __version__ = importlib.metadata.version("okernel-pyengine")
except importlib.metadata.PackageNotFoundError:  # run from a source tree
    __version__ = "0+unknown"

# Loaded at first use, so that `import pyengine` costs no numpy and no tokenizers.
_LAZY = {
    "Chunk": "pyengine.generation.completion",
    "Completion": "pyengine.generation.completion",
    "Engine": "pyengine.generation.engine",
    "SamplingParams": "pyengine.generation.sampling",
    "Token": "pyengine.generation.scheduler",
    "open_model": "pyengine.generation.source",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'pyengine' has no attribute {name!r}")


__all__ = [
    "Chunk",
    "Completion",
    "Engine",
    "EngineError",
    "SamplingParams",
    "Token",
    "__version__",
    "open_model",
]
