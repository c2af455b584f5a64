"""The tokenizer inside a GGUF file, built anew as the `tokenizers` pipeline it was converted from.

A GGUF file has no tokenizer.json: it holds a vocabulary, merges or scores, and for byte-level BPE a
word (tokenizer.ggml.pre) for how text is split before merging, which names the original's pipeline.
Sources: llama.cpp's src/llama-vocab.cpp for the words, the tokenizer.json files of the models they
stand for; of Llama 2 and Phi-3 for SentencePiece vocabularies.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from pyengine.errors import ConfigError, UnsupportedModelError
from pyengine.generation.tokenizer import Tokenizer, set_added_ends
from pyengine.models.gguf_config import end_token_ids
from pyengine.models.gguf_header import read_header

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # tokenizer.ggml.token_type
PHI3 = re.compile("phi-?3", re.IGNORECASE)
_SPACE = "\u2581"

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BLOOM_SPLIT = r" ?[^(\s|[.,!?…。，、।۔،])]+"
_GPT2 = ""  # ByteLevel's own expression
_DIGITS = "digits"  # the same after setting every digit apart

# tokenizer.ggml.pre -> how text is split. Files from before that key was written are GPT-2's kind.
SPLITS = {
    **dict.fromkeys(("default", "gpt-2", "mpt", "olmo", "jais", "phi-2"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), _DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "smaug-bpe", "dbrx"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2"), _QWEN2),
    "tekken": _TEKKEN,
    "bloom": BLOOM_SPLIT,
}
# Made by tiktoken or as by it, yet with merges and without BOS.
_WITHOUT_BOS = ("dbrx",)


def load_gguf_tokenizer(path: Path) -> Tokenizer | None:
    """The tokenizer of a GGUF file; None if it holds none.

    Raises:
        UnsupportedModelError: a kind of tokenizer, or a way of splitting text, that is not known.
        ConfigError: its lists contradict each other.
    """
    metadata = read_header(path).metadata
    facts = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in metadata.items()
        if key.startswith("tokenizer.ggml.")
    }
    kind = facts.get("model")
    if kind is None or kind == "none":
        return None
    tokens = facts.get("tokens", [])
    types = facts.get("token_type", [1] * len(tokens))
    if not tokens or len(types) != len(tokens):
        raise ConfigError(f"{path}: {len(tokens)} tokens, {len(types)} token types")
    if kind == "gpt2":
        backend, adds_bos = byte_level(path, facts, tokens)
    elif kind == "llama":
        backend, adds_bos = sentencepiece(path, facts, tokens, types), True
    else:
        raise UnsupportedModelError(f"{path}: tokenizer.ggml.model {kind!r} is not supported")

    name = str(metadata.get("general.name", ""))
    added = [
        AddedToken(t, normalized=False, special=k != USER_DEFINED, rstrip=drops_space(name, t))
        for t, k in zip(tokens, types, strict=True)
        if k in (CONTROL, UNKNOWN, USER_DEFINED)
    ]
    backend.add_special_tokens([token for token in added if token.special])
    backend.add_tokens([token for token in added if not token.special])
    named = {
        "bos_token": facts.get("bos_token_id"),
        "eos_token": facts.get("eos_token_id"),
        "unk_token": facts.get("unknown_token_id"),
        "pad_token": facts.get("padding_token_id"),
    }
    special = {
        name: tokens[i] for name, i in named.items() if i is not None and 0 <= i < len(tokens)
    }
    set_added_ends(
        backend,
        special.get("bos_token") if facts.get("add_bos_token", adds_bos) else None,
        special.get("eos_token") if facts.get("add_eos_token", False) else None,
    )
    templates = {
        key.removeprefix("tokenizer.chat_template").removeprefix(".") or "default": value
        for key, value in metadata.items()
        if key.startswith("tokenizer.chat_template") and isinstance(value, str)
    }
    return Tokenizer(
        backend,
        special_tokens=special,
        chat_templates=templates,
        source=str(path),
        eos_token_ids=end_token_ids(metadata),
    )


def drops_space(name: str, token: str) -> bool:
    """Whether white space after a special token is dropped.

    GGUF has no key for it: other engines go by general.name, since Phi-3 does so.
    """
    return bool(PHI3.search(name)) and token not in ("<unk>", "<s>", "<|endoftext|>")


def byte_level(path: Path, facts: dict[str, Any], tokens: list[str]) -> tuple[Backend, bool]:
    """Byte-level BPE, and whether such a text begins with BOS unless the file says otherwise."""
    word = facts.get("pre", "default")
    if word not in SPLITS:
        raise UnsupportedModelError(
            f"{path}: text split {word!r} (tokenizer.ggml.pre) is not known; "
            f"known: {', '.join(SPLITS)}"
        )
    split = SPLITS[word]
    from_tiktoken = split in (_LLAMA3, _TEKKEN) and word not in _WITHOUT_BOS
    types = facts.get("token_type", ())
    made = (t for t, kind in zip(tokens, types, strict=False) if kind == NORMAL and len(t) > 1)
    if "merges" not in facts and any(made):  # an empty list is not stored
        raise ConfigError(f"{path}: tokenizer.ggml.merges is missing")
    merges = [_pair(path, merge) for merge in facts.get("merges", ())]
    backend = _bpe(path, _vocabulary(tokens), merges, ignore_merges=from_tiktoken)
    own_split = split in (_GPT2, _DIGITS)
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=own_split)
    if split == _DIGITS:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), to_bytes]
        )
    elif own_split:
        backend.pre_tokenizer = to_bytes
    else:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(split), behavior="isolated"), to_bytes]
        )
    if split == _QWEN2:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend, from_tiktoken


def sentencepiece(
    path: Path, facts: dict[str, Any], tokens: list[str], types: list[int]
) -> Backend:
    """SentencePiece's BPE: merges are the splits of each token, the best-scored token first.

    Like SentencePiece, and llama.cpp, it puts a space before every text, one that begins with a
    space or follows a special token too.
    """
    vocabulary = _vocabulary(tokens)
    scores = facts.get("scores", [])
    if len(scores) != len(tokens):
        raise ConfigError(f"{path}: {len(tokens)} tokens, {len(scores)} scores")
    if "merges" in facts:
        merges = [_pair(path, merge) for merge in facts["merges"]]
    else:
        merges = _merges_from_scores(vocabulary, scores)
    unknown = next((t for t, kind in zip(tokens, types, strict=True) if kind == UNKNOWN), None)
    backend = _bpe(path, vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    prefix = facts.get("add_space_prefix", True)
    spaces = normalizers.Replace(" ", _SPACE)
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend(_SPACE), spaces] if prefix else [spaces]
    )
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def _bpe(
    path: Path, vocabulary: dict[str, int], merges: list[tuple[str, str]], **options: Any
) -> Backend:
    try:
        return Backend(models.BPE(vocab=vocabulary, merges=merges, **options))
    except Exception as error:  # tokenizers raises plain Exception
        raise ConfigError(f"{path}: vocabulary and merges do not fit: {error}") from error


def _vocabulary(tokens: list[str]) -> dict[str, int]:
    """Token -> id; of a token listed twice the first id."""
    return {token: i for i, token in reversed(list(enumerate(tokens)))}


def _pair(path: Path, merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if not left or not right:
        raise ConfigError(f"{path}: merge {merge!r} is not two tokens")
    return left, right


_LONGEST_TOKEN = 4096


def _merges_from_scores(vocabulary: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Transformers' generate_merges: by falling score, then by falling lengths of the halves."""
    ranked, longest = [], max(map(len, vocabulary), default=0)
    if longest > _LONGEST_TOKEN:
        raise ConfigError(f"a token of {longest} characters; at most {_LONGEST_TOKEN} are read")
    for token, index in vocabulary.items():
        cuts = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        pairs = [(a, b) for a, b in cuts if a in vocabulary and b in vocabulary]
        pairs.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        ranked += [(scores[index], len(a), len(b), a, b) for a, b in pairs]
    ranked.sort(key=lambda entry: entry[:3], reverse=True)
    return [(a, b) for *_, a, b in ranked]
