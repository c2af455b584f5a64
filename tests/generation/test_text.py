"""generation/text.py: bytes of tokens, streams of text, stop strings."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from pyengine.errors import RequestError, UnsupportedModelError
from pyengine.generation.text import Detokenizer, StopStrings, StreamDecoder
from tests.generation.tokenizers_for_tests import EOS, byte_backend, spaced_backend

BYTES = byte_backend()
MERGED = byte_backend([("D", "E"), ("DE", "F"), (" ", "P")])
SPACED = spaced_backend(metaspace=False)
METASPACE = spaced_backend(metaspace=True)


def pieces(backend: Backend, ids: list[int]) -> list[str]:
    stream = StreamDecoder(Detokenizer(backend, "test"))
    return [piece for piece in [*map(stream.push, ids), stream.finish()] if piece]


# ---- streams ------------------------------------------------------------------------------------


def test_a_character_comes_whole_with_its_last_byte() -> None:
    assert pieces(BYTES, list("a€😀b".encode())) == ["a", "€", "😀", "b"]


@pytest.mark.parametrize("byte", range(256))
def test_every_single_byte_is_one_character_at_the_end(byte: int) -> None:
    text = "".join(pieces(BYTES, [byte]))
    assert text == BYTES.decode([byte])
    assert len(text) == 1


def test_a_lone_lead_byte_before_the_end_of_text_becomes_one_replacement_character() -> None:
    assert "".join(pieces(BYTES, [*b"ok", 0xE2, EOS])) == "ok\ufffd"
    assert "".join(pieces(BYTES, [0xF0, 0x9F, 0x98])) == "\ufffd"


@settings(max_examples=500, deadline=None, derandomize=True)
@given(ids=st.lists(st.integers(0, 300), max_size=40))
def test_pieces_add_up_to_what_tokenizers_decodes(ids: list[int]) -> None:
    for backend in (BYTES, MERGED):
        assert "".join(pieces(backend, ids)) == backend.decode(ids)
        assert Detokenizer(backend, "test").decode(ids) == backend.decode(ids)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_each_piece_of_a_valid_text_is_one_character_of_it(text: str) -> None:
    assert pieces(BYTES, list(text.encode())) == list(text)


def test_words_keep_the_space_between_them() -> None:
    for backend in (SPACED, METASPACE):
        ids = backend.encode("hi hi").ids
        assert pieces(backend, ids) == ["hi", " hi"], backend.decoder


def test_a_control_token_at_the_start_does_not_cost_the_first_word_its_space() -> None:
    for backend in (SPACED, METASPACE):
        hi = backend.token_to_id("▁hi")
        assert pieces(backend, [0, hi, 1, hi]) == ["hi", " hi"]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(text=st.text("hi €😀x", max_size=12))
def test_spaces_and_byte_fallback_come_back_as_tokenizers_gives_them(text: str) -> None:
    for backend in (SPACED, METASPACE):
        ids = backend.encode(text).ids
        assert "".join(pieces(backend, ids)) == backend.decode(ids)


def test_leading_spaces_of_a_text_are_kept() -> None:
    assert "".join(pieces(SPACED, SPACED.encode("  hi").ids)) == "  hi"


def test_malformed_byte_tokens_do_not_spoil_the_characters_before_them() -> None:
    byte = SPACED.token_to_id("<0x00>")
    ids = [byte + b for b in (*"€".encode(), 0xFF, ord("A"))]
    assert pieces(SPACED, ids) == ["€", "\ufffd", "A"]


def test_ids_beyond_the_tokenizer_have_no_text() -> None:
    assert pieces(BYTES, [310, ord("a"), -1, 2**40]) == ["a"]


def test_a_token_has_the_bytes_it_stands_for() -> None:
    detokenizer = Detokenizer(MERGED, "test")
    assert detokenizer.token_bytes(262) == b"DEF"
    assert detokenizer.token_bytes(0xE2) == b"\xe2"
    assert detokenizer.token_bytes(EOS) == b"</s>"
    assert Detokenizer(SPACED, "test").token_bytes(2 + 0xE2) == b"\xe2"


def test_an_unknown_decoder_is_refused_by_name() -> None:
    backend = Backend(models.BPE(vocab={"a": 0}, merges=[]))
    with pytest.raises(UnsupportedModelError, match="x.json: decoder None"):
        Detokenizer(backend, "x.json")
    backend.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedModelError, match="decoder 'WordPiece'"):
        Detokenizer(backend, "x.json")


# ---- stop strings -------------------------------------------------------------------------------


def run(stops: list[str], *fed: str) -> tuple[list[str], bool]:
    """What comes out piece by piece, the rest at the end, and whether a stop string was met."""
    matcher = StopStrings(stops)
    out, stopped = [], False
    for piece in fed:
        text, stopped = matcher.push(piece)
        out.append(text)
    return [*out, matcher.finish()], stopped


def test_a_stop_string_inside_a_token_ends_the_text_before_it() -> None:
    assert run(["DE"], "A", "B", "C", "DEF", "G") == (["A", "B", "C", "", "", ""], True)
    assert run(["Pari"], "is", " Paris") == (["is", " ", ""], True)


def test_what_may_become_a_stop_string_is_held_back() -> None:
    assert run(["xyz"], "ab", "x", "y", "z") == (["ab", "", "", "", ""], True)
    assert run(["xyz"], "ab", "x", "q") == (["ab", "", "xq", ""], False)


def test_held_text_comes_out_at_the_end() -> None:
    assert run(["assistant"], "ple", "as") == (["ple", "", "as"], False)


def test_a_stop_string_can_begin_inside_a_failed_one() -> None:
    assert run(["aab"], "a", "a", "a", "b") == (["", "", "a", "", ""], True)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(RequestError, match="empty"):
        StopStrings(["a", ""])


SHORT = st.text("ab", min_size=1, max_size=3)


@settings(max_examples=500, deadline=None, derandomize=True)
@given(text=st.text("abc", max_size=12), stops=st.lists(SHORT, max_size=3), data=st.data())
def test_the_split_into_pieces_does_not_matter(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    fed = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    out, stopped = run(stops, *fed)
    # By definition: the first character at which any stop string is complete, then the longest one.
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(s) for s in stops)]
    if ends:
        longest = max(len(s) for s in stops if text[: ends[0]].endswith(s))
        assert ("".join(out), stopped) == (text[: ends[0] - longest], True)
    else:
        assert ("".join(out), stopped) == (text, False)


def test_nothing_piles_up_in_an_endless_stream() -> None:
    stream = StreamDecoder(Detokenizer(BYTES, "test"))
    matcher = StopStrings(["b" * 8])
    for _ in range(1000):
        assert stream.push(0x80) == "\ufffd"  # malformed for ever
        text, stopped = matcher.push("b" * 7 + "a")  # almost a stop string for ever
        assert (text, stopped) == ("b" * 7 + "a", False)
