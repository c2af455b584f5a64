"""Options that commands share: the arguments of Engine and SamplingParams, with dashes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from pyengine.generation.engine import Engine
from pyengine.models.hub import resolve_model

_MODEL, _SAMPLING = "Model", "Sampling"

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A Hugging Face directory, a GGUF file, or a name: demo, smollm2, org/name.",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]

Device = Annotated[
    str,
    typer.Option(
        help="auto (a usable GPU, else the CPU), cpu, hip, hip:N, cuda or cuda:N.",
        rich_help_panel=_MODEL,
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        help="Type of weights and matrix inputs: auto (as stored), f32, f16 or bf16.",
        rich_help_panel=_MODEL,
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(
        help="q8_0: matrices in 8 bits; float: in --dtype. Default: as the file is stored.",
        rich_help_panel=_MODEL,
    ),
]
Keep = Annotated[
    list[str],
    typer.Option(
        help="With --weights q8_0: a role that stays in --dtype, e.g. lm_head, or in a type of its "
        "own: lm_head=f16. May be repeated.",
        rich_help_panel=_MODEL,
    ),
]
KvDtype = Annotated[
    str | None,
    typer.Option(
        help="Type of the KV cache: f32, f16 or bf16. Default: as --dtype.", rich_help_panel=_MODEL
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        help="CPU threads. Default: the cores this process may use.", rich_help_panel=_MODEL
    ),
]
MaxContext = Annotated[
    int | None,
    typer.Option(
        help="Most tokens of a sequence, prompt and answer; there a text ends. Default: the "
        "model's own limit, less where memory is short.",
        rich_help_panel=_MODEL,
    ),
]
MaxBatch = Annotated[
    int, typer.Option(help="Most sequences computed side by side.", rich_help_panel=_MODEL)
]
KvTokens = Annotated[
    int | None,
    typer.Option(
        help="Tokens the KV cache holds in all. Default: --max-batch contexts, within 80 % of the "
        "free memory.",
        rich_help_panel=_MODEL,
    ),
]

MaxNewTokens = Annotated[
    int, typer.Option(help="Most tokens to generate.", rich_help_panel=_SAMPLING)
]
MinNewTokens = Annotated[
    int, typer.Option(help="No end of text before this many.", rich_help_panel=_SAMPLING)
]
Temperature = Annotated[
    float, typer.Option(help="0: greedy; higher: more varied.", rich_help_panel=_SAMPLING)
]
TopK = Annotated[int, typer.Option(help="Keep the k likeliest; 0: all.", rich_help_panel=_SAMPLING)]
TopP = Annotated[
    float, typer.Option(help="Keep the likeliest that sum to p; 1: all.", rich_help_panel=_SAMPLING)
]
MinP = Annotated[
    float,
    typer.Option(
        help="Keep what is >= min_p as likely as the likeliest.", rich_help_panel=_SAMPLING
    ),
]
RepetitionPenalty = Annotated[
    float, typer.Option(help="> 1 discourages what was said.", rich_help_panel=_SAMPLING)
]
PresencePenalty = Annotated[
    float, typer.Option(help="Subtracted once for ids in the output.", rich_help_panel=_SAMPLING)
]
FrequencyPenalty = Annotated[
    float,
    typer.Option(help="Subtracted for each time an id was output.", rich_help_panel=_SAMPLING),
]
LogitBias = Annotated[
    list[str],
    typer.Option(help="ID=VALUE: added to a logit. May be repeated.", rich_help_panel=_SAMPLING),
]
Seed = Annotated[int | None, typer.Option(help="Same seed, same text.", rich_help_panel=_SAMPLING)]
Stop = Annotated[
    list[str],
    typer.Option(help="A string that ends the text. May be repeated.", rich_help_panel=_SAMPLING),
]
IgnoreEos = Annotated[
    bool,
    typer.Option("--ignore-eos", help="Go on past the end of text.", rich_help_panel=_SAMPLING),
]
Files = Annotated[
    list[Path], typer.Option("--file", "-f", help="A file whose text is a prompt. May be repeated.")
]


@contextlib.contextmanager
def progress_bar(label: str) -> Iterator[Callable[[int, int], None] | None]:
    """What to call with (bytes done, bytes in all); None where standard error is no terminal.

    The bar appears with the first call and is gone in the end.
    """
    if not sys.stderr.isatty():
        yield None
        return
    with Progress(
        TextColumn(label), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
        TimeRemainingColumn(), console=Console(stderr=True), transient=True,
    ) as bar:  # fmt: skip
        task = bar.add_task(label, total=None, visible=False)
        yield lambda done, total: bar.update(task, completed=done, total=total, visible=True)


@contextlib.contextmanager
def open_engine(model: str, **options: Any) -> Iterator[Engine]:
    """An Engine; on a terminal a bar shows a first download, another the loading of weights."""
    with progress_bar(f"fetching {model}") as progress:
        path = resolve_model(model, progress)
    with progress_bar("loading") as progress:
        engine = Engine(path, progress=progress, **options)
    with engine:
        yield engine


def given(context: typer.Context, names: tuple[str, ...]) -> dict[str, Any]:
    """The values of the named options of the running command."""
    return {name: context.params[name] for name in names}


ENGINE_OPTIONS = (
    "device", "dtype", "weights", "keep", "kv_dtype", "threads", "max_context", "max_batch",
    "kv_tokens",
)  # fmt: skip
SAMPLING_OPTIONS = (
    "max_new_tokens", "min_new_tokens", "temperature", "top_k", "top_p", "min_p",
    "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "stop", "ignore_eos",
)  # fmt: skip
