"""`pyengine chat`: a conversation on the terminal."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from pyengine.cli import options
from pyengine.generation.engine import Engine
from pyengine.generation.sampling import SamplingParams


def chat(
    context: typer.Context,
    model: options.Model,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    weights: options.Weights = None,
    keep: options.Keep = [],
    kv_dtype: options.KvDtype = None,
    threads: options.Threads = None,
    max_context: options.MaxContext = None,
    max_batch: options.MaxBatch = 1,
    kv_tokens: options.KvTokens = None,
    max_new_tokens: options.MaxNewTokens = 512,
    min_new_tokens: options.MinNewTokens = 0,
    temperature: options.Temperature = 0.7,
    top_k: options.TopK = 0,
    top_p: options.TopP = 0.95,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    presence_penalty: options.PresencePenalty = 0.0,
    frequency_penalty: options.FrequencyPenalty = 0.0,
    seed: options.Seed = None,
    stop: options.Stop = [],
    ignore_eos: options.IgnoreEos = False,
) -> None:
    """Talk to a model that has a chat template.

    Each line of input is a message. An empty line or end of input (Ctrl-D) leaves; Ctrl-C stops an
    answer and keeps what came.
    """
    params = SamplingParams(**options.given(context, options.SAMPLING_OPTIONS))
    messages = [{"role": "system", "content": system}] if system is not None else []
    with options.open_engine(model, **options.given(context, options.ENGINE_OPTIONS)) as engine:
        while line := _ask():
            messages.append({"role": "user", "content": line})
            _forget_what_does_not_fit(engine, messages)
            answer = []
            try:
                for chunk in engine.stream(messages, params):
                    answer.append(chunk.text)
                    print(chunk.text, end="", flush=True)
            except KeyboardInterrupt:
                pass
            print()
            messages.append({"role": "assistant", "content": "".join(answer)})


def _forget_what_does_not_fit(engine: Engine, messages: list[dict[str, str]]) -> None:
    """Drops the oldest turns, never the system message or the question, and says so."""
    first = int(messages[0]["role"] == "system")
    dropped = 0
    while len(messages) > first + 1 and len(engine.chat_ids(messages)) >= engine.max_context:
        del messages[first]
        dropped += 1
    if dropped:
        print(f"pyengine: the context is full: {dropped} messages forgotten", file=sys.stderr)


def _ask() -> str:
    """The next message; empty at the end. The prompt sign is for people, so not in a pipe."""
    try:
        if sys.stdin.isatty():
            return input("> ").strip()
        return sys.stdin.readline().strip()
    except EOFError:
        return ""
