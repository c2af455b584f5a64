"""generation/gguf_tokenizer.py: tokenizers built from the metadata of GGUF files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers
from tokenizers import Tokenizer as Backend

from pyengine.errors import ConfigError, UnsupportedModelError
from pyengine.generation.text import byte_level_alphabet
from pyengine.generation.tokenizer import Tokenizer
from pyengine.generation.tokenizer_files import load_tokenizer
from tests.generation.test_tokenizer import AWKWARD, LLAMA3_SPLIT, MERGES
from tests.generation.tokenizers_for_tests import (
    ASSISTANT,
    BOS,
    CONTROL,
    EOS,
    TEMPLATE,
    USER,
    byte_backend,
    spaced_backend,
)
from tests.gguf_files import write_gguf

NORMAL, UNKNOWN, CONTROL_TYPE, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
LETTER = {byte: character for character, byte in byte_level_alphabet().items()}


def letters(text: str) -> str:
    return "".join(LETTER[byte] for byte in text.encode())


def byte_level_metadata(pre: str | None, **changes: Any) -> dict[str, Any]:
    """The tokenizer of `byte_backend(MERGES)` as GGUF metadata."""
    merged = [letters(a + b) for a, b in MERGES]
    facts = {
        "model": "gpt2",
        "pre": pre,
        "tokens": [*(LETTER[byte] for byte in range(256)), *CONTROL, *merged],
        "token_type": [NORMAL] * 256 + [CONTROL_TYPE] * len(CONTROL) + [NORMAL] * len(merged),
        "merges": [f"{letters(a)} {letters(b)}" for a, b in MERGES],
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    }
    facts |= changes
    return {f"tokenizer.ggml.{k}": v for k, v in facts.items() if v is not None}


def load(path: Path, metadata: dict[str, Any]) -> Tokenizer:
    tokenizer = load_tokenizer(write_gguf(path / "m.gguf", metadata=metadata))
    assert tokenizer is not None
    return tokenizer


def reference(pre: str) -> Backend:
    """The pipeline of the tokenizer.json that a word of tokenizer.ggml.pre stands for."""
    backend = byte_backend(MERGES)
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    steps: dict[str, list[Any]] = {
        "default": [gpt2],
        "smollm": [pre_tokenizers.Digits(individual_digits=True), gpt2],
        "llama-bpe": [pre_tokenizers.Split(Regex(LLAMA3_SPLIT), "isolated"), whole],
        "qwen2": [
            pre_tokenizers.Split(Regex(LLAMA3_SPLIT.replace("{1,3}", "")), "isolated"),
            whole,
        ],
    }
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps[pre])
    return backend


@pytest.mark.parametrize("pre", ["default", "smollm", "llama-bpe", "qwen2"])
def test_text_is_split_as_by_the_tokenizer_that_was_converted(pre: str, tmp_path: Path) -> None:
    expected = reference(pre)
    tokenizer = load(tmp_path, byte_level_metadata(pre, add_bos_token=False))

    @settings(max_examples=300, deadline=None, derandomize=True)
    @given(st.text("th1234 x->\n\t'é€😀", max_size=20))
    def same(text: str) -> None:
        ids = expected.encode(text).ids
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == expected.decode(ids)

    for text in AWKWARD:
        if pre != "qwen2" or text.isascii():  # its NFC has a test of its own
            assert tokenizer.encode(text) == expected.encode(text).ids, text
    same()


def test_qwen2_texts_are_composed_first(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, byte_level_metadata("qwen2"))
    assert tokenizer.encode("e\u0301") == list("é".encode())


def test_a_split_that_is_not_known_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="'grok-2'.*tokenizer.ggml.pre.*smollm"):
        load(tmp_path, byte_level_metadata("grok-2"))
    with pytest.raises(UnsupportedModelError, match="tokenizer.ggml.model 'bert'"):
        load(tmp_path, byte_level_metadata("default", model="bert"))


def test_bos_is_added_as_the_file_or_the_kind_says(tmp_path: Path) -> None:
    for pre, flag, expected in (
        ("default", None, [97]),
        ("default", True, [BOS, 97]),
        ("llama-bpe", None, [BOS, 97]),
        ("llama-bpe", False, [97]),
    ):
        tokenizer = load(tmp_path, byte_level_metadata(pre, add_bos_token=flag))
        assert tokenizer.encode("a") == expected


def test_chat_template_and_end_tokens_come_from_the_file(tmp_path: Path) -> None:
    metadata = byte_level_metadata("default", eot_token_id=ASSISTANT)
    tokenizer = load(tmp_path, metadata | {"tokenizer.chat_template": TEMPLATE})
    assert tokenizer.eos_token_ids == {EOS, ASSISTANT}
    ids = tokenizer.chat_ids([{"role": "user", "content": "h<a>"}])
    assert ids == [BOS, USER, *b"h<a>", ASSISTANT]


def test_user_defined_tokens_are_found_in_text_and_shown(tmp_path: Path) -> None:
    metadata = byte_level_metadata("default")
    metadata["tokenizer.ggml.token_type"][USER] = USER_DEFINED
    tokenizer = load(tmp_path, metadata)
    assert tokenizer.encode("a<u>") == [97, USER]
    assert tokenizer.decode([97, USER, EOS]) == "a<u>"


SPACED = spaced_backend(metaspace=False)


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    """The tokenizer of `spaced_backend`, its merges left to the scores."""
    tokens = [SPACED.id_to_token(i) for i in range(SPACED.get_vocab_size())]
    order = ["▁h", "▁hi"]  # merged first, next
    facts = {
        "model": "llama",
        "tokens": tokens,
        "token_type": [CONTROL_TYPE] * 2 + [BYTE] * 256 + [NORMAL] * 5,
        "scores": [-1.0 - order.index(t) if t in order else -99.0 for t in tokens],
        "bos_token_id": 0,
        "eos_token_id": 1,
    } | changes
    return {f"tokenizer.ggml.{k}": v for k, v in facts.items() if v is not None}


def test_sentencepiece_merges_follow_from_the_scores(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, sentencepiece_metadata(add_bos_token=False))
    for text in ("hi hi", "h  i", "é hi", "hihi", " ", "  hi", "hi<s>hi"):
        ids = SPACED.encode(text).ids
        assert tokenizer.encode(text, allow_special=True) == ids, text
        assert tokenizer.decode(ids) == SPACED.decode(ids)


def test_sentencepiece_texts_begin_with_bos_unless_the_file_says_otherwise(tmp_path: Path) -> None:
    assert load(tmp_path, sentencepiece_metadata()).encode("hi")[0] == 0


def test_no_space_is_put_first_where_the_file_forbids_it(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, sentencepiece_metadata(add_space_prefix=False, add_bos_token=False))
    ids = tokenizer.encode("hi")
    assert [tokenizer.token_bytes(i) for i in ids] == [b"h", b"i"]
    assert tokenizer.decode(tokenizer.encode(" hi")) == " hi"


def test_a_file_without_a_tokenizer_gives_none(tmp_path: Path) -> None:
    assert load_tokenizer(write_gguf(tmp_path / "m.gguf")) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"token_type": [1, 2]},
        {"merges": None},
        {"merges": ["ab"]},
        {"merges": ["zz yy"]},
        {"model": "llama", "scores": [1.0]},
    ],
)
def test_lists_that_contradict_each_other_are_said(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="m.gguf"):
        load(tmp_path, byte_level_metadata("default", **changes))
