"""Chat templates: Jinja programs that come with a model and write a conversation as one prompt.

They are other people's code, so they run in Jinja's immutable sandbox. The environment is that of
Transformers 5.24 (utils/chat_template_utils.py), so that templates written for it mean the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pyengine.errors import ConfigError, RequestError

Message = Mapping[str, Any]


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}`, which marks the assistant's words for training: its body alone."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """json.dumps: Jinja's own filter escapes HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlock, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """One compiled template.

    Raises (at construction):
        ConfigError: it is not a valid template; names `source`.
    """

    def __init__(self, text: str, source: str) -> None:
        try:
            self._template = _environment().from_string(text)
        except jinja2.TemplateError as error:
            raise ConfigError(f"{source}: chat template: {error}") from error

    def render(self, messages: Sequence[Message], **variables: Any) -> str:
        """The prompt for a conversation.

        Args:
            messages: mappings with "role", "content" and whatever else the template reads.
            variables: add_generation_prompt, tools, bos_token, ... as the template names them.

        Raises:
            RequestError: the template refuses the conversation (roles that must alternate, say).
        """
        try:
            return self._template.render(messages=messages, **variables)
        except Exception as error:  # foreign code: anything may go wrong in it
            raise RequestError(f"the chat template refuses this conversation: {error}") from error
