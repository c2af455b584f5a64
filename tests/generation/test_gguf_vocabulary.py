"""generation/gguf_vocabulary.py: a GGUF copy's tokenizer gives the ids of the original's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from pyengine.errors import RequestError, UnsupportedModelError
from pyengine.generation.gguf_vocabulary import gguf_vocabulary
from pyengine.generation.tokenizer import Tokenizer
from pyengine.generation.tokenizer_files import load_tokenizer
from pyengine.models.quantize import quantize
from tests.conftest import CHECKPOINTS
from tests.generation.test_tokenizer import AWKWARD, LLAMA3_SPLIT, MERGES
from tests.generation.tokenizers_for_tests import (
    BOS,
    EOS,
    PAD,
    TEMPLATE,
    add_bos,
    byte_backend,
    load,
    spaced_backend,
)
from tests.tiny import write_tiny

QWEN2_SPLIT = LLAMA3_SPLIT.replace("{1,3}", "")


def splitting(
    split: str, behavior: str = "isolated", *, invert: bool = False
) -> pre_tokenizers.Sequence:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(split), behavior, invert=invert), byte_level]
    )


def backend_of(word: str) -> Backend:
    """A pipeline as the model that gave the word its name has it."""
    backend = byte_backend(MERGES)
    if word == "smollm":
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), backend.pre_tokenizer]
        )
    elif word == "llama-bpe":
        backend.pre_tokenizer = splitting(LLAMA3_SPLIT)
        backend.model.ignore_merges = True
    elif word == "dbrx":  # OLMo-2 and Phi-4 too: converted from tiktoken, what matches is kept
        backend.pre_tokenizer = splitting(LLAMA3_SPLIT, "removed", invert=True)
    elif word == "bloom":
        backend.pre_tokenizer = splitting(r" ?[^(\s|[.,!?…。，、।۔،])]+")
    elif word == "qwen2":
        backend.pre_tokenizer = splitting(QWEN2_SPLIT)
        backend.normalizer = normalizers.NFC()
    return backend


def original(tmp_path: Path, backend: Backend, **config: Any) -> tuple[Path, Tokenizer]:
    """A model with that tokenizer, and the tokenizer as a directory's."""
    model = write_tiny("llama", tmp_path / "model", vocab_size=300)
    return model, load(model, backend, **config)


def copied(model: Path, **options: Any) -> Tokenizer:
    """The tokenizer of a GGUF copy."""
    out = model.parent / "copy.gguf"
    quantize(model, out, vocabulary=gguf_vocabulary(model, **options))
    tokenizer = load_tokenizer(out)
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize("word", ["gpt-2", "smollm", "llama-bpe", "dbrx", "qwen2", "bloom"])
def test_the_word_is_found_and_the_copy_gives_the_same_ids(word: str, tmp_path: Path) -> None:
    model, ours = original(tmp_path, backend_of(word))
    assert gguf_vocabulary(model)["tokenizer.ggml.pre"] == word
    theirs = copied(model)
    for text in [*AWKWARD, "hi 12345 don't", "a.. b,c (d) e|f", "<s>a</s>"]:
        assert theirs.encode(text) == ours.encode(text), text
        assert theirs.decode(ours.encode(text)) == ours.decode(ours.encode(text))


def test_named_tokens_template_and_padding_are_kept(tmp_path: Path) -> None:
    backend = byte_backend(MERGES)
    backend.add_tokens([AddedToken("<tool>", normalized=False)])
    model, ours = original(tmp_path, add_bos(backend), chat_template=TEMPLATE)
    keys = gguf_vocabulary(model)
    assert keys["tokenizer.ggml.bos_token_id"] == BOS
    assert keys["tokenizer.ggml.padding_token_id"] == PAD
    assert keys["tokenizer.ggml.add_bos_token"] is True
    assert len(keys["tokenizer.ggml.tokens"]) == 300
    assert keys["tokenizer.ggml.tokens"][299] == "[PAD299]"
    assert keys["tokenizer.ggml.token_type"][299] == 5
    theirs = copied(model)
    assert theirs.encode("a<tool>b") == ours.encode("a<tool>b")
    assert theirs.encode("a")[0] == BOS
    messages = [{"role": "user", "content": "hi </s>"}]
    assert theirs.chat_ids(messages) == ours.chat_ids(messages)
    assert theirs.eos_token_ids == ours.eos_token_ids | {257}
    assert EOS in theirs.eos_token_ids


def test_a_split_without_a_word_is_refused_unless_one_is_named(tmp_path: Path) -> None:
    backend = byte_backend(MERGES)
    backend.pre_tokenizer = splitting(r"\p{L}+|\p{N}")
    model, _ = original(tmp_path, backend)
    with pytest.raises(UnsupportedModelError, match="no word for the way this tokenizer splits"):
        gguf_vocabulary(model)
    assert gguf_vocabulary(model, pre="qwen2")["tokenizer.ggml.pre"] == "qwen2"
    with pytest.raises(RequestError, match="pre='gpt-9'"):
        gguf_vocabulary(model, pre="gpt-9")


def test_a_sentencepiece_vocabulary_gives_the_same_ids(tmp_path: Path) -> None:
    model, ours = original(tmp_path, spaced_backend(metaspace=False))
    keys = gguf_vocabulary(model)
    assert keys["tokenizer.ggml.model"] == "llama"
    kinds = dict(zip(keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"], strict=True))
    assert [kinds[t] for t in ("<s>", "<0x00>", "<0xFF>", "▁h", "[PAD299]")] == [3, 6, 6, 1, 5]
    scores = dict(zip(keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.scores"], strict=True))
    assert scores["▁h"] > scores["▁hi"] > scores["h"]
    theirs = copied(model)
    for text in [*AWKWARD, "", " ", "  hi", "hi</s> hi", "</s>hi\n", "hihi hi"]:
        assert theirs.encode(text) == ours.encode(text), text
        ids = ours.encode(text, allow_special=True)
        assert theirs.encode(text, allow_special=True) == ids, text
        assert theirs.decode(ours.encode(text)) == ours.decode(ours.encode(text))


def spaced_with(folder: Path, **flags: bool) -> tuple[Path, Tokenizer]:
    """A model whose token "<|end|>" has these flags."""
    backend = spaced_backend(metaspace=False)
    backend.add_special_tokens([AddedToken("<|end|>", normalized=False, **flags)])
    return original(folder, backend)


@pytest.mark.parametrize("name", ["model", "Phi-3-mini"])
@pytest.mark.parametrize("strips", [True, False])
def test_the_name_says_whether_white_space_after_special_tokens_counts(
    name: str, strips: bool, tmp_path: Path
) -> None:
    model, _ = spaced_with(tmp_path / "x", rstrip=strips)
    model = model.rename(model.parent / name)
    data = json.loads((model / "tokenizer.json").read_text())
    for token in data["added_tokens"]:  # as Phi-3 has it: of all but a few
        token["rstrip"] = strips and token["content"] != "<s>"
    (model / "tokenizer.json").write_text(json.dumps(data))
    ours = load_tokenizer(model)
    theirs = copied(model)
    assert ours is not None
    text = "hi<|end|>\n hi<s> hi</s> hi"
    ids = ours.encode(text, allow_special=True)
    assert theirs.encode(text, allow_special=True) == ids
    written = gguf_vocabulary(model)["general.name"]
    known = {("model", False): "model", ("model", True): "model phi-3"}
    known |= {("Phi-3-mini", False): "phi 3-mini", ("Phi-3-mini", True): "Phi-3-mini"}
    assert written == known[name, strips]


def test_special_tokens_that_gguf_cannot_describe_are_refused(tmp_path: Path) -> None:
    model, _ = spaced_with(tmp_path, lstrip=True)
    with pytest.raises(UnsupportedModelError, match=r"cannot say how <\|end\|> treats the text"):
        gguf_vocabulary(model)


def test_a_token_of_two_merges_is_made_as_the_original_makes_it(tmp_path: Path) -> None:
    """By scores alone "▁" and "hi" would become "▁hi" too, which only "▁h" and "i" do here."""
    backend = spaced_backend(metaspace=False)
    data = json.loads(backend.to_str())
    data["model"]["vocab"]["hi"] = len(data["model"]["vocab"])
    data["model"]["merges"] = [["h", "i"], ["▁", "h"], ["▁h", "i"]]
    model, ours = original(tmp_path, Backend.from_str(json.dumps(data)))
    assert len(ours.encode("hi")) == 2
    assert copied(model).encode("hi") == ours.encode("hi")


def test_other_kinds_are_refused(tmp_path: Path) -> None:
    model, _ = original(tmp_path, spaced_backend(metaspace=True))
    with pytest.raises(UnsupportedModelError, match="the way this tokenizer treats spaces"):
        gguf_vocabulary(model)
    words = Backend(models.WordLevel({"a": 0}, unk_token="a"))
    words.decoder = decoders.ByteLevel()
    model, _ = original(tmp_path, words)
    with pytest.raises(UnsupportedModelError, match="only BPE, of bytes or SentencePiece's"):
        gguf_vocabulary(model)


def test_a_model_without_a_tokenizer_has_no_vocabulary(tmp_path: Path) -> None:
    model = write_tiny("llama", tmp_path / "model")
    (model / "tokenizer.json").unlink()
    assert gguf_vocabulary(model) == {}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_trained_checkpoint_speaks_as_before_under_the_nearest_word(
    name: str, tmp_path: Path
) -> None:
    out = tmp_path / "copy.gguf"
    quantize(CHECKPOINTS[name], out, vocabulary=gguf_vocabulary(CHECKPOINTS[name], pre="llama-bpe"))
    ours, theirs = load_tokenizer(CHECKPOINTS[name]), load_tokenizer(out)
    assert ours is not None and theirs is not None
    text = "In the beginning there were 1234 files;\n\nreturn x + 1  # it's done"
    assert theirs.encode(text) == ours.encode(text)
    if ours.chat_templates:
        messages = [{"role": "user", "content": text}]
        assert theirs.chat_ids(messages) == ours.chat_ids(messages)
