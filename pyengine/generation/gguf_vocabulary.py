"""The vocabulary keys of a GGUF file, from the tokenizer.json of a directory.

Byte-level BPE: how text is split before merging has only a word in GGUF (tokenizer.ggml.pre). A
tokenizer is written under a word that gguf_tokenizer.py turns back into the same pipeline; where
there is none, the caller has to name the nearest.

SentencePiece's BPE: other engines merge by score, so the first merge that makes a token gives it
one. The merges are written too, and read here, for a token that could be made in several ways.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pyengine.errors import RequestError, UnsupportedModelError
from pyengine.generation.gguf_tokenizer import (
    BLOOM_SPLIT,
    CONTROL,
    PHI3,
    SPLITS,
    UNKNOWN,
    USER_DEFINED,
    byte_level,
    drops_space,
    sentencepiece,
)
from pyengine.generation.tokenizer_files import load_tokenizer
from pyengine.models.checkpoint import read_json
from pyengine.models.config import load_config

_NORMAL, _UNUSED, _BYTE = 1, 5, 6  # tokenizer.ggml.token_type
# One for each way of splitting.
_WORDS = ("gpt-2", "smollm", "llama-bpe", "dbrx", "qwen2", "tekken", "bloom")
_NEVER_MERGED = -1e4  # score of tokens that no merge makes
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_NAMED_KEYS = {
    "bos_token": "bos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def gguf_vocabulary(folder: Path, *, pre: str | None = None) -> dict[str, Any]:
    """Keys tokenizer.* and general.name of a GGUF copy; none for a model without a tokenizer.

    Args:
        folder: with config.json and tokenizer.json.
        pre: a word for how text is split, where no word stands for exactly that.

    Raises:
        UnsupportedModelError: another kind of tokenizer; or no word fits and none is given.
        RequestError: `pre` is not a word that is known.
    """
    tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        return {}
    if pre is not None and pre not in SPLITS:
        raise RequestError(f"pre={pre!r}: expected one of {', '.join(SPLITS)}")
    file = folder / "tokenizer.json"
    data = read_json(file)
    model = data["model"]
    decoder = (data.get("decoder") or {}).get("type")
    pieces = model.get("type") == "BPE" and model.get("byte_fallback")
    if not pieces and (model.get("type") != "BPE" or decoder != "ByteLevel"):
        raise UnsupportedModelError(f"{file}: only BPE, of bytes or SentencePiece's, is written")
    config, _ = load_config(folder)
    ids = {**model["vocab"], **{t["content"]: t["id"] for t in data["added_tokens"]}}
    types = {t["content"]: CONTROL if t["special"] else USER_DEFINED for t in data["added_tokens"]}
    if pieces:
        types = {f"<0x{byte:02X}>": _BYTE for byte in range(256)} | types
        types[model.get("unk_token")] = UNKNOWN
    by_id = {index: token for token, index in ids.items()}
    listed = [by_id.get(index) for index in range(max(config.vocab_size, 1 + max(by_id)))]
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    encoded = tokenizer.encode("a")
    keys: dict[str, Any] = {
        "model": "llama" if pieces else "gpt2",
        "pre": "default" if pieces else pre or _word(file, data),
        "tokens": [f"[PAD{i}]" if token is None else token for i, token in enumerate(listed)],
        "token_type": [_UNUSED if t is None else types.get(t, _NORMAL) for t in listed],
        "merges": merges,
        "add_bos_token": encoded[:1] == [tokenizer.bos_token_id],
        "add_eos_token": len(encoded) > 1 and encoded[-1] in tokenizer.eos_token_ids,
    }
    if pieces:
        keys["scores"] = _scores(keys["tokens"], merges)
        rebuilt = sentencepiece(file, keys, keys["tokens"], keys["token_type"])
        if _pipeline(json.loads(rebuilt.to_str())) != _pipeline(data):
            raise UnsupportedModelError(
                f"{file}: GGUF has no word for the way this tokenizer treats spaces"
            )
    for name, key in _NAMED_KEYS.items():
        token = tokenizer.special_tokens.get(name)
        if token in ids:
            keys[key] = ids[token]
    ends = dict.fromkeys([*config.eos_token_ids, *sorted(tokenizer.eos_token_ids)])
    keys |= dict(zip(_END_KEYS, ends, strict=False))
    templates = {
        "tokenizer.chat_template" + ("" if name == "default" else f".{name}"): text
        for name, text in tokenizer.chat_templates.items()
    }
    return {
        "general.name": _name(folder, data),
        **{f"tokenizer.ggml.{key}": value for key, value in keys.items()},
        **templates,
    }


def _name(folder: Path, data: dict[str, Any]) -> str:
    """A name under which special tokens drop the white space after them as these do."""
    name = folder.resolve().name
    plain = PHI3.sub("phi 3", name)
    for candidate in (name, plain, f"{name} phi-3"):
        if all(_is_said(candidate, token) for token in data["added_tokens"]):
            return candidate
    odd = next(t["content"] for t in data["added_tokens"] if not _is_said(plain, t))
    raise UnsupportedModelError(
        f"{folder / 'tokenizer.json'}: GGUF cannot say how {odd} treats the text around it"
    )


def _is_said(name: str, token: dict[str, Any]) -> bool:
    """Whether an added token is what the reader makes of it in a file of that name."""
    strips = drops_space(name, token["content"])
    return bool(token["rstrip"] == strips and not token["lstrip"] and not token["single_word"])


def _scores(tokens: list[str], merges: list[str]) -> list[float]:
    """The earlier a token's first merge, the higher its score."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault(merge.replace(" ", "", 1), rank)
    return [float(-ranks[token]) if token in ranks else _NEVER_MERGED for token in tokens]


def _word(file: Path, data: dict[str, Any]) -> str:
    """The word that stands for exactly this pipeline."""
    for word in _WORDS:
        rebuilt, _ = byte_level(file, {"pre": word, "merges": []}, ["a"])
        if _pipeline(json.loads(rebuilt.to_str())) == _pipeline(data):
            return word
    raise UnsupportedModelError(
        f"{file}: GGUF has no word for the way this tokenizer splits text. --pre gpt-2, or "
        f"another of {', '.join(_WORDS)}, writes that word instead: other engines then split some "
        "texts differently"
    )


def _pipeline(data: dict[str, Any]) -> tuple[Any, ...]:
    """What decides how text is split and merged."""

    def essence(part: Any) -> Any:
        if isinstance(part, dict):
            steps = part.get("pretokenizers", [])
            if len(steps) == 1:
                return essence(steps[0])
            inverted = part.get("behavior") == "Removed" and part.get("invert")
            if inverted and part.get("pattern") != {"Regex": BLOOM_SPLIT}:
                # What the expression leaves over is dropped; but for Bloom's, ours leave nothing.
                part = {**part, "behavior": "Isolated", "invert": False}
            return {k: essence(v) for k, v in part.items() if k != "trim_offsets"}
        return [essence(item) for item in part] if isinstance(part, list) else part

    ignores_merges = bool(data["model"].get("ignore_merges"))
    return essence(data.get("normalizer")), essence(data.get("pre_tokenizer")), ignores_merges
