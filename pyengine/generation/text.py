"""Text out of token ids: the bytes of a token, streamed UTF-8, and stop strings.

A token stands for bytes, not characters; a text is the UTF-8 decoding of all its tokens' bytes,
where each malformed sequence becomes one U+FFFD (Unicode's "maximal subpart", as in `tokenizers`).
Decoding byte by byte makes the pieces of a stream add up to the whole text by construction.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer as Backend

from pyengine.errors import RequestError, UnsupportedModelError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable characters for bytes: character -> byte (encoder.py, bytes_to_unicode)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {chr(byte): byte for byte in printable}
    return characters | {chr(256 + i): byte for i, byte in enumerate(others)}


class Detokenizer:
    """What each token id stands for, as the decoder of a tokenizer.json says.

    Attributes:
        strip_spaces: how many leading spaces of a text are not its own.

    Raises (at construction):
        UnsupportedModelError: a decoder that is not known; named.
    """

    def __init__(self, backend: Backend, source: str) -> None:
        self._backend = backend
        self._bytes: dict[int, bytes] = {}
        self._special = {i for i, t in backend.get_added_tokens_decoder().items() if t.special}
        self.strip_spaces = 0
        self._space: str | None = None  # the character that stands for a space
        self._drops_first_space = False
        self._byte_fallback = False
        self._alphabet: dict[str, int] | None = None
        decoder: Any = backend.decoder
        state: dict[str, Any] = json.loads(decoder.__getstate__()) if decoder else {"type": None}
        for step in state.get("decoders", [state]):
            self._configure(step, source)

    def _configure(self, step: dict[str, Any], source: str) -> None:
        match step:
            case {"type": "ByteLevel"}:
                self._alphabet = byte_level_alphabet()
            case {"type": "ByteFallback"}:
                self._byte_fallback = True
            case {"type": "Fuse"}:
                pass
            case {"type": "Replace", "pattern": {"String": str(mark)}, "content": " "}:
                self._space = mark
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0}:
                self.strip_spaces = start
            case {"type": "Metaspace", "replacement": str(mark)}:
                self._space = mark
                self._drops_first_space = step.get("prepend_scheme", "always") != "never"
            case _:
                raise UnsupportedModelError(f"{source}: decoder {step['type']!r} is not supported")

    def is_special(self, token_id: int) -> bool:
        """Whether the id is a control token, which is not part of a text."""
        return token_id in self._special

    def token_bytes(self, token_id: int, *, first: bool = False) -> bytes:
        """The bytes of a token (a control token's name), b"" for ids beyond the tokenizer.

        Args:
            first: it begins a text, where some tokenizers drop the space they put there.
        """
        if first and self._drops_first_space and self._space:
            token = self._backend.id_to_token(token_id) or ""
            return self._as_bytes(token.replace(self._space, ""))
        known = self._bytes.get(token_id)
        if known is None:
            in_range = 0 <= token_id < 2**32
            token = (self._backend.id_to_token(token_id) if in_range else None) or ""
            text = token.replace(self._space, " ") if self._space else token
            known = self._bytes[token_id] = self._as_bytes(text)
        return known

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; control tokens and ids beyond the tokenizer give none."""
        stream = StreamDecoder(self)
        return "".join(map(stream.push, ids)) + stream.finish()

    def _as_bytes(self, token: str) -> bytes:
        if self._alphabet is not None:
            try:
                return bytes([self._alphabet[character] for character in token])
            except KeyError:  # an added token, spelled as it is
                return token.encode()
        if self._byte_fallback and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(byte[1])
        return token.encode()


class StreamDecoder:
    """Turns ids into pieces of text; a character comes as soon as its last byte is there.

    The pieces and what `finish` returns add up to the text of all ids; control tokens and ids
    beyond the tokenizer give no text. Constant time a token.

    Args:
        continues: text stands before the first id, so that no space is stripped there.
    """

    def __init__(self, detokenizer: Detokenizer, *, continues: bool = False) -> None:
        self._detokenizer = detokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._spaces_to_strip = 0 if continues else detokenizer.strip_spaces
        self._first = not continues

    def push(self, token_id: int) -> str:
        """The text that this id completes; "" while a character is incomplete."""
        if self._detokenizer.is_special(token_id):
            return ""
        data = self._detokenizer.token_bytes(token_id, first=self._first)
        if self._first and self._detokenizer.token_bytes(token_id):
            self._first = False
        if self._spaces_to_strip and data:
            kept = data.lstrip(b" ")
            stripped = min(len(data) - len(kept), self._spaces_to_strip)
            self._spaces_to_strip = 0 if kept else self._spaces_to_strip - stripped
            data = data[stripped:]
        return self._utf8.decode(data)

    def finish(self) -> str:
        """What is left at the end: one U+FFFD for an incomplete character, else ""."""
        return self._utf8.decode(b"", final=True)


class StopStrings:
    """Cuts a stream of text before the first stop string, across pieces of any size.

    Text that may yet become a stop string is held back. The stop string complete first wins;
    of those complete at the same character, the longest.

    Raises (at construction):
        RequestError: a stop string is empty.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(dict.fromkeys(stops))
        if "" in self._stops:
            raise RequestError("stop: a stop string must not be empty")
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self._stopped = False

    def push(self, piece: str) -> tuple[str, bool]:
        """The text that may be shown now, and whether a stop string has ended it."""
        if self._stopped:
            return "", True
        text = self._held + piece
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, start = min(found)
            self._stopped, self._held = True, ""
            return text[:start], True
        ready = len(text) - self._holdable(text)
        self._held = text[ready:]
        return text[:ready], False

    def finish(self) -> str:
        """The text still held back, at the end of a stream."""
        held, self._held = self._held, ""
        return held

    def _holdable(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
