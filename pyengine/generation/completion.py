"""What comes of a prompt: the text as it grows, and the whole of it in the end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pyengine.generation.sampling import SamplingParams
from pyengine.generation.scheduler import Sequence, Token
from pyengine.generation.text import StopStrings, StreamDecoder
from pyengine.generation.tokenizer import Tokenizer


@dataclass(frozen=True)
class Completion:
    """What came of one prompt.

    Attributes:
        text: the continuation, without the prompt, stop string or end-of-text token.
        token_ids: the generated ids, the end-of-text token included.
        prompt_token_ids: what the model was given.
        finish_reason: "stop" (end of text or a stop string) or "length".
        logprobs: one Token a generated id (id, logprob, most probable ones); None unless asked for.
    """

    text: str
    token_ids: list[int]
    prompt_token_ids: list[int]
    finish_reason: str
    logprobs: list[Token] | None = None

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens."""
        return len(self.prompt_token_ids)

    @property
    def completion_tokens(self) -> int:
        """Number of generated tokens."""
        return len(self.token_ids)

    def to_json(self) -> dict[str, Any]:
        """Plain values for json.dumps."""
        values: dict[str, Any] = {
            "text": self.text,
            "finish_reason": self.finish_reason,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "token_ids": self.token_ids,
        }
        if self.logprobs is not None:
            values["logprobs"] = [
                {"id": t.id, "logprob": t.logprob, "top": [list(pair) for pair in t.top]}
                for t in self.logprobs
            ]
        return values


@dataclass(frozen=True)
class Chunk:
    """A piece of a streamed continuation.

    Attributes:
        text: new text; whole characters only; may be empty in the last chunk.
        finish_reason: empty until the last chunk.
        completion: the whole result, in the last chunk.
    """

    text: str
    finish_reason: str = ""
    completion: Completion | None = None


class Continuation:
    """A sequence and the text that has come of it."""

    def __init__(
        self,
        sequence: Sequence,
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        *,
        continues: bool,
    ) -> None:
        self.sequence = sequence
        self._params = params
        self._decoder = None  # without a tokenizer: ids alone
        if tokenizer is not None:
            self._decoder = StreamDecoder(tokenizer, continues=continues)
        self._stops = StopStrings(params.stop_strings)
        self._text = ""
        self._tokens: list[Token] = []
        self.stopped = False  # by a stop string
        self.finished = False

    def pump(self) -> str:
        """New text since the last call; at the end, all that was held back."""
        text, sequence = "", self.sequence
        while sequence.fresh and not self.stopped:
            token = sequence.fresh.popleft()
            self._tokens.append(token)
            ends = sequence.done and not sequence.fresh and sequence.finish_reason == "stop"
            if self._decoder and not ends:  # the end-of-text token is not text
                text += self._cut(self._decoder.push(token.id))
        if (sequence.done or self.stopped) and not self.finished:
            self.finished = True
            if self._decoder and not self.stopped:
                text += self._cut(self._decoder.finish())
            text += self._stops.finish()
        self._text += text
        return text

    def _cut(self, piece: str) -> str:
        text, self.stopped = self._stops.push(piece)
        return text

    def completion(self) -> Completion:
        """The result so far."""
        sequence = self.sequence
        return Completion(
            text=self._text,
            token_ids=[t.id for t in self._tokens],
            prompt_token_ids=sequence.tokens[: sequence.prompt_length],
            finish_reason="stop" if self.stopped else sequence.finish_reason,
            logprobs=self._tokens if self._params.logprobs is not None else None,
        )
