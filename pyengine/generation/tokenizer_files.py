"""Where a model keeps its tokenizer: tokenizer.json and its companions, or inside a GGUF file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from pyengine.errors import ConfigError, EngineError
from pyengine.generation.gguf_tokenizer import load_gguf_tokenizer
from pyengine.generation.tokenizer import Tokenizer, set_added_ends

_MALFORMED = (
    AttributeError, IndexError, KeyError, OverflowError, RecursionError, TypeError, ValueError,
)  # fmt: skip
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")


def load_tokenizer(path: Path) -> Tokenizer | None:
    """The tokenizer of a Hugging Face directory or a .gguf file; None if it has none.

    Raises:
        ConfigError: a file is damaged or a link dangles; named.
        UnsupportedModelError: a kind of tokenizer that is not known; named.
    """
    try:
        return load_gguf_tokenizer(path) if path.suffix == ".gguf" else _load_directory(path)
    except EngineError:
        raise
    except _MALFORMED as error:  # values of a type that nothing else says
        raise ConfigError(f"{path}: its tokenizer is malformed: {error!r}") from error


def _read_text(path: Path) -> str | None:
    """A file's text, None if there is none. A dangling link is an error that names its target."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        if path.is_symlink():
            raise ConfigError(
                f"{path} is a link to {os.readlink(path)}, which does not exist: "
                "incomplete download?"
            ) from None
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error


def _load_directory(folder: Path) -> Tokenizer | None:
    file = folder / "tokenizer.json"
    text = _read_text(file)
    if text is None:
        return None
    try:
        backend = Backend.from_str(text)
    except Exception as error:  # tokenizers raises plain Exception
        raise ConfigError(
            f"{file}: not a tokenizer that can be read ({error}); {_kinds(text)}"
        ) from error
    config = _tokenizer_config(folder / "tokenizer_config.json")
    tokens = {
        name: value if isinstance(value, str) else value["content"]
        for name in _NAMED_TOKENS
        if isinstance(value := config.get(name), str)
        or (isinstance(value, dict) and isinstance(value.get("content"), str))
    }
    _apply_added_tokens(backend, config, tokens)
    if "add_bos_token" in config or "add_eos_token" in config:
        set_added_ends(
            backend,
            tokens.get("bos_token") if config.get("add_bos_token") else None,
            tokens.get("eos_token") if config.get("add_eos_token") else None,
        )
    return Tokenizer(
        backend,
        special_tokens=tokens,
        chat_templates=_chat_templates(folder, config),
        source=str(file),
    )


def _kinds(text: str) -> str:
    """The kinds of parts a tokenizer.json asks for, for a message."""
    try:
        data = json.loads(text)
        parts = data["pre_tokenizer"] or {}
        names = [part.get("type") for part in parts.get("pretokenizers", [parts])]
        return f"model {data['model'].get('type')!r}, pre_tokenizer {names}"
    except (ValueError, KeyError, AttributeError, TypeError):
        return "it is damaged"


def _tokenizer_config(file: Path) -> dict[str, Any]:
    text = _read_text(file)
    if text is None:
        return {}
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{file}: not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{file}: not a JSON object")
    return config


def _apply_added_tokens(backend: Backend, config: dict[str, Any], named: dict[str, str]) -> None:
    """Properties that tokenizer_config.json gives to tokens, over those of tokenizer.json."""
    known = backend.get_added_tokens_decoder()
    added: list[AddedToken] = []
    for token_id, fields in (config.get("added_tokens_decoder") or {}).items():
        if backend.token_to_id(fields["content"]) == int(token_id):
            added.append(AddedToken(**{k: v for k, v in fields.items() if k != "__type"}))
    contents = {token.content for token in [*known.values(), *added]}
    for content in named.values():
        if content not in contents and backend.token_to_id(content) is not None:
            added.append(AddedToken(content, normalized=False, special=True))
    backend.add_special_tokens([token for token in added if token.special])
    backend.add_tokens([token for token in added if not token.special])


def _chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Name -> template. The file chat_template.jinja goes before tokenizer_config.json."""
    value = config.get("chat_template")
    templates: dict[str, str] = {}
    if isinstance(value, str):
        templates["default"] = value
    elif isinstance(value, list):
        templates = {entry["name"]: entry["template"] for entry in value}
    text = _read_text(folder / "chat_template.jinja")
    return templates if text is None else templates | {"default": text}
