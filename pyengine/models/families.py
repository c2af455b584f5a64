"""The families: files of this folder that hold a SPEC."""

from __future__ import annotations

import importlib
import pkgutil
import re

import pyengine.models
from pyengine.errors import UnsupportedModelError
from pyengine.models.spec import DecoderSpec


def families() -> list[str]:
    """The model types that can be run: files of this folder that hold a SPEC, sorted."""
    names = (module.name for module in pkgutil.iter_modules(pyengine.models.__path__))
    return sorted(name for name in names if _find_spec(name))


def family_spec(model_type: str) -> DecoderSpec:
    """The spec of a family.

    Raises:
        UnsupportedModelError: there is no such family; the message lists those there are.
    """
    spec = _find_spec(model_type) if re.fullmatch(r"[a-z][a-z0-9_]*", model_type) else None
    if spec is None:
        known = ", ".join(families())
        raise UnsupportedModelError(f"model_type {model_type!r} is not supported; known: {known}")
    return spec


def _find_spec(name: str) -> DecoderSpec | None:
    full_name = f"pyengine.models.{name}"
    try:
        module = importlib.import_module(full_name)
    except ModuleNotFoundError as error:
        if error.name != full_name:
            raise
        return None
    spec = getattr(module, "SPEC", None)
    return spec if isinstance(spec, DecoderSpec) else None
