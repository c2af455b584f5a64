"""`pyengine generate`: continues one prompt or many."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from pyengine.cli import options
from pyengine.errors import RequestError
from pyengine.generation.completion import Completion
from pyengine.generation.engine import Engine, Prompt
from pyengine.generation.sampling import SamplingParams

MOST_BYTES = 256 << 20  # of a file of prompts


def generate(
    context: typer.Context,
    model: options.Model,
    prompts: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PROMPT]...", help="Prompts; none: standard input is one."),
    ] = None,
    file: options.Files = [],
    lines: Annotated[
        Path | None, typer.Option(help="A file with a prompt on each line; - is standard input.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Prompts are user messages under the chat template.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="With --chat: a system message.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object a prompt and line.")
    ] = False,
    no_stream: Annotated[
        bool, typer.Option("--no-stream", help="Print the text at the end, not as it comes.")
    ] = False,
    logprobs: Annotated[
        int | None, typer.Option(help="With --json: log-probabilities, and the N likeliest.")
    ] = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    weights: options.Weights = None,
    keep: options.Keep = [],
    kv_dtype: options.KvDtype = None,
    threads: options.Threads = None,
    max_context: options.MaxContext = None,
    max_batch: options.MaxBatch = 8,
    kv_tokens: options.KvTokens = None,
    max_new_tokens: options.MaxNewTokens = 128,
    min_new_tokens: options.MinNewTokens = 0,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    presence_penalty: options.PresencePenalty = 0.0,
    frequency_penalty: options.FrequencyPenalty = 0.0,
    logit_bias: options.LogitBias = [],
    seed: options.Seed = None,
    stop: options.Stop = [],
    ignore_eos: options.IgnoreEos = False,
) -> None:
    """Continue a prompt, streaming the text to standard output.

    Prompts come from the command line, from --file or --lines, or from standard input. Several
    are computed side by side; each text is then printed under a line that names its prompt.
    """
    if system is not None and not chat:
        raise RequestError("--system needs --chat")
    if logprobs is not None and not as_json:
        raise RequestError("--logprobs needs --json")
    params = SamplingParams(
        **options.given(context, options.SAMPLING_OPTIONS),
        logit_bias=parse_bias(logit_bias),
        logprobs=logprobs,
    )
    texts = _prompts(prompts or [], file, lines)
    chosen = options.given(context, options.ENGINE_OPTIONS)
    chosen["max_batch"] = min(max_batch, len(texts))  # no cache for sequences that never come
    with options.open_engine(model, **chosen) as engine:
        inputs = [_prompt(text, chat, system) for text in texts]
        if as_json:
            for text, completion in zip(texts, engine.generate(inputs, params), strict=True):
                print(json.dumps({"prompt": text, **completion.to_json()}, ensure_ascii=False))
        elif len(inputs) == 1:
            print_stream(engine, inputs[0], params, stream=not no_stream)
        else:
            for text, completion in zip(texts, engine.generate(inputs, params), strict=True):
                print(f"==> {_shortened(text)}\n{completion.text}\n")


def print_stream(
    engine: Engine, prompt: Prompt, params: SamplingParams, *, stream: bool = True
) -> Completion:
    """Prints a continuation as it comes, and a newline."""
    completion = None
    for chunk in engine.stream(prompt, params):
        completion = chunk.completion
        if stream:
            print(chunk.text, end="", flush=True)
    assert completion is not None
    print("" if stream else completion.text)
    return completion


def parse_bias(items: list[str]) -> dict[int, float]:
    """{id: value} from "ID=VALUE" words. Raises RequestError."""
    found = {}
    for item in items:
        token, _, value = item.partition("=")
        try:
            found[int(token)] = float(value)
        except ValueError:
            raise RequestError(f"--logit-bias {item!r}: expected ID=VALUE, e.g. 42=-100") from None
    return found


def _prompts(words: list[str], files: list[Path], lines: Path | None) -> list[str]:
    """All prompts, in the order: command line, files, lines; else standard input."""
    prompts = list(words) + [_read(file) for file in files]
    if lines is not None:
        prompts += [line for line in _read(lines).splitlines() if line]
        if not prompts:
            raise RequestError(f"{lines}: no line holds a prompt")
    if not prompts and not sys.stdin.isatty():
        prompts = [_read(Path("-"))]
    if not prompts:
        raise RequestError("no prompt: give one as an argument, with --file, or on standard input")
    return prompts


def _read(file: Path) -> str:
    try:
        with open(0 if str(file) == "-" else file, "rb", closefd=str(file) != "-") as opened:
            data = opened.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise RequestError(f"{file}: longer than {MOST_BYTES >> 20} MiB, which no model reads")
        return data.decode()
    except OSError as error:
        raise RequestError(f"{file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{file}: not UTF-8 text ({error.reason} at byte {error.start})"
        ) from error


def _prompt(text: str, chat: bool, system: str | None) -> Prompt:
    if not chat:
        return text
    messages = [{"role": "system", "content": system}] if system is not None else []
    return [*messages, {"role": "user", "content": text}]


def _shortened(text: str, limit: int = 60) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"
