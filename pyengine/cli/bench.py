"""`pyengine bench`: speed of a model beside what the memory allows."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from pyengine.cli import options
from pyengine.evidence.bench import run_bench


def bench(
    context: typer.Context,
    model: options.Model,
    prompt_tokens: Annotated[
        int | None, typer.Option(help="Length of the prompt. Default: 256, if it fits.", min=1)
    ] = None,
    new_tokens: Annotated[
        int | None, typer.Option(help="Tokens to generate. Default: 64, if they fit.", min=2)
    ] = None,
    repeats: Annotated[int, typer.Option(help="Counted runs; medians are printed.", min=1)] = 5,
    as_json: options.Json = False,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    weights: options.Weights = None,
    keep: options.Keep = [],
    kv_dtype: options.KvDtype = None,
    threads: options.Threads = None,
    max_context: options.MaxContext = None,
    max_batch: options.MaxBatch = 1,
    kv_tokens: options.KvTokens = None,
) -> None:
    """Time prefill and decode, and show decode as a share of the measured read bandwidth."""
    with options.open_engine(model, **options.given(context, options.ENGINE_OPTIONS)) as engine:
        report = run_bench(
            engine, prompt_tokens=prompt_tokens, new_tokens=new_tokens, repeats=repeats
        )
    if as_json:
        print(json.dumps(report.to_json()))
        return
    print(f"device    {report.device}, {report.path}, {report.threads} threads")
    print(f"weights   {report.dtype}, {report.weight_bytes / 1e6:.1f} MB read per token")
    print(f"bandwidth {report.read_gb_s:.1f} GB/s read (measured in this run)")
    print(
        f"decode    {report.decode_tok_s:.1f} tokens/s, "
        f"{report.decode_share:.0%} of what the bandwidth allows, over {report.new_tokens} tokens"
    )
    print(f"prefill   {report.prefill_tok_s:.1f} tokens/s over {report.prompt_tokens} tokens")
    print(f"first token after {report.first_token_s * 1e3:.1f} ms (median of {report.repeats})")
