"""Text into token ids, and conversations into prompts; `tokenizers` does all encoding.

Control tokens that a user typed stay text. Before encoding, the first character of each control
token's name in a user's string is exchanged for a stand-in, so that it is not recognised, and the
tokenizer's normalizer exchanges it back before the text is split. The same serves whole prompts and
the strings inside a chat template, which may cut, trim and test them as it likes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, normalizers, processors
from tokenizers import Tokenizer as Backend

from pyengine.errors import RequestError
from pyengine.generation.chat_template import ChatTemplate, Message
from pyengine.generation.text import Detokenizer

# Stand-ins are taken downwards from Unicode's last code points: noncharacters and private use.
_LAST_CODE_POINT = 0x10FFFF
_REPLACEMENT = "\ufffd"


class Tokenizer(Detokenizer):
    """A model's tokenizer: texts and conversations to ids, ids to text.

    Attributes:
        size: ids are 0 .. size - 1; a model may have more rows than that.
        special_tokens: "bos_token", "eos_token", ... -> the token's text.
        chat_templates: name ("default", "tool_use", ...) -> Jinja text.
        bos_token_id: id that begins a text, or None.
        eos_token_ids: ids that end one, as far as the tokenizer's files say.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        special_tokens: Mapping[str, str],
        chat_templates: Mapping[str, str],
        source: str,
        eos_token_ids: Iterable[int] = (),
    ) -> None:
        """Takes over `backend`.

        Args:
            special_tokens: the named ones.
            chat_templates: name ("default", "tool_use", ...) -> Jinja text.
            source: file for messages.
            eos_token_ids: further ids that end a text.

        Raises:
            UnsupportedModelError: the tokenizer's decoder is not known.
        """
        backend.no_truncation()
        backend.no_padding()
        super().__init__(backend, source)
        self.chat_templates = dict(chat_templates)
        self._compiled: dict[str, ChatTemplate] = {}
        self._source = source
        self.size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self.special_tokens = dict(special_tokens)
        self.bos_token_id = self._id("bos_token")
        eos = self._id("eos_token")
        self.eos_token_ids = frozenset(eos_token_ids) | (frozenset() if eos is None else {eos})
        self._protect_control_tokens()

    def _id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)

    def _protect_control_tokens(self) -> None:
        """Makes the stand-ins, and the normalizer that exchanges them back."""
        control = [t for t in self._backend.get_added_tokens_decoder().values() if t.special]
        # Were they looked for after normalization too, that would undo the protection.
        self._backend.add_special_tokens([_unnormalized(t) for t in control if t.normalized])
        first = sorted({token.content[0] for token in control})
        self._stand_in = {c: chr(_LAST_CODE_POINT - i) for i, c in enumerate(first)}
        restore = [normalizers.Replace(mark, c) for c, mark in self._stand_in.items()]
        own = [] if self._backend.normalizer is None else [self._backend.normalizer]
        self._backend.normalizer = normalizers.Sequence(restore + own)
        names = "|".join(re.escape(token.content) for token in control)
        # Every place where a name begins, overlapping ones too: the name itself is looked ahead at.
        self._control = re.compile(f"(?=(?:{names}))." if control else "(?!)", re.DOTALL)
        self._forbidden = str.maketrans(dict.fromkeys(self._stand_in.values(), _REPLACEMENT))
        self._restored = str.maketrans({mark: c for c, mark in self._stand_in.items()})

    def _as_text(self, text: str) -> str:
        """`text` with no control token in it; a stand-in that was typed becomes U+FFFD."""
        text = text.translate(self._forbidden)
        return self._control.sub(lambda match: self._stand_in[match[0]], text)

    # ---- encoding -------------------------------------------------------------------------------

    def encode(
        self, text: str, *, add_special_tokens: bool = True, allow_special: bool = False
    ) -> list[int]:
        """Token ids of a text.

        Args:
            add_special_tokens: begin with BOS (and whatever else the tokenizer adds), as trained.
            allow_special: names of control tokens in the text become control tokens.

        Raises:
            RequestError: the text is not valid Unicode (a lone surrogate).
        """
        ids = self._encode(text if allow_special else self._as_text(text), add_special_tokens)
        bos = self.bos_token_id
        if allow_special and bos is not None and ids[:2] == [bos, bos]:
            typed = text.startswith(self.special_tokens["bos_token"] * 2)
            return ids if typed else ids[1:]
        return ids

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text is not valid Unicode: lone surrogate U+{ord(text[error.start]):04X} "
                f"at character {error.start}"
            ) from None
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be encoded."""
        return "default" in self.chat_templates

    def chat_ids(
        self, messages: Sequence[Message], *, allow_special: bool = False, **variables: Any
    ) -> list[int]:
        """Token ids of a conversation, as the model's chat template writes it.

        The template is the whole prompt: no BOS is added to what it writes. Control tokens come
        from the template alone; in the messages (and tools) they stay text.

        Args:
            messages: mappings with "role" and "content".
            allow_special: control tokens inside the messages count too (as in Transformers).
            variables: for the template; add_generation_prompt is true unless given.

        Raises:
            RequestError: no chat template, or it refuses the conversation.
        """
        return self._encode(self._render(messages, allow_special, variables), False)

    def render_chat(
        self, messages: Sequence[Message], *, allow_special: bool = False, **variables: Any
    ) -> str:
        """The prompt that `chat_ids` encodes, to be looked at."""
        return self._render(messages, allow_special, variables).translate(self._restored)

    def _render(
        self, messages: Sequence[Message], allow_special: bool, variables: dict[str, Any]
    ) -> str:
        name = "tool_use" if variables.get("tools") else "default"
        if name not in self.chat_templates:
            name = "default"
        if name not in self.chat_templates:
            raise RequestError(f"{self._source}: this model has no chat template")
        if name not in self._compiled:
            self._compiled[name] = ChatTemplate(self.chat_templates[name], self._source)
        if not allow_special:
            messages, variables = self._all_text(messages), self._all_text(variables)
        variables = {"add_generation_prompt": True} | self.special_tokens | variables
        return self._compiled[name].render(messages, **variables)

    def _all_text(self, value: Any) -> Any:
        """`value` with every string in it protected, keys too."""
        if isinstance(value, str):
            return self._as_text(value)
        if isinstance(value, Mapping):
            return {self._all_text(key): self._all_text(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._all_text(item) for item in value]
        return value

    def token_id(self, token: str) -> int | None:
        """Id of a token by its spelling in the vocabulary."""
        found: int | None = self._backend.token_to_id(token)
        return found


def _unnormalized(token: AddedToken) -> AddedToken:
    """The token, looked for in the text as given."""
    return AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=False,
        special=token.special,
    )


def set_added_ends(backend: Backend, bos: str | None, eos: str | None) -> None:
    """Makes the tokenizer add these tokens around a text (None: none)."""
    ends = [(token, backend.token_to_id(token)) for token in (bos, eos) if token is not None]
    backend.post_processor = processors.TemplateProcessing(
        single=[*([bos] if bos else []), "$A", *([eos] if eos else [])],
        special_tokens=ends,
    )
