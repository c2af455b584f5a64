"""Measures decode in f32, f16, bf16 and q8_0 on one model too large for the cache, in one run.

    python scripts/bench_decode.py [--threads 2] [--path avx2] [--hidden 1024] [--layers 8]

Decode reads every weight once a token, so its speed is a matter of bytes: the table has tokens a
second, the bytes that one token reads, their rate and its share of the read bandwidth (ok_read, in
the same run). All engines are loaded first and take turns, so that a busy moment of the machine
meets them all; the ratio to f16 is the median over rounds. Weights are random. `q8_0/f32` keeps
activations in f32.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from typing import Any

from pyengine.evidence.bench import BenchReport, run_bench
from pyengine.generation.engine import Engine
from pyengine.generation.source import ModelSource, source_of
from pyengine.models.random_weights import RandomCheckpoint
from pyengine.native import choose_device

KINDS: dict[str, dict[str, Any]] = {
    "f32": {"dtype": "f32"},
    "f16": {"dtype": "f16"},
    "bf16": {"dtype": "bf16"},
    "q8_0": {"dtype": "f16", "weights": "q8_0"},
    "q8_0/f32": {"dtype": "f16", "weights": "q8_0", "q8_activations": False},
}


def random_model(hidden: int, layers: int, vocab: int) -> ModelSource:
    """A Llama of these sizes."""
    raw = {
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": hidden * 11 // 4,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 128,
        "tie_word_embeddings": True,
    }
    return source_of(RandomCheckpoint(raw))


def main() -> None:
    """Parses the command line and prints the table."""
    parser = argparse.ArgumentParser(description="Measures decode by type of weights.")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--path", default="", help="CPU instruction set, one of the library's")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()

    device = choose_device(options.device)
    if device.library.backend == "cpu":
        device.library.c.ok_set_path(options.path.encode())
    source = random_model(options.hidden, options.layers, options.vocab)
    chosen = options.kinds.split(",")
    with contextlib.ExitStack() as closing:
        engines = {
            kind: closing.enter_context(
                Engine(
                    source, device=options.device, threads=options.threads, max_batch=1,
                    max_context=64 + options.new_tokens, **KINDS[kind],
                )
            )
            for kind in chosen
        }  # fmt: skip
        rounds: list[dict[str, BenchReport]] = [
            {
                kind: run_bench(
                    engine, prompt_tokens=8, new_tokens=options.new_tokens, repeats=1
                )
                for kind, engine in engines.items()
            }
            for _ in range(options.rounds)
        ]  # fmt: skip

    def median(kind: str, field: str) -> float:
        return statistics.median(getattr(reports[kind], field) for reports in rounds)

    first = rounds[0][chosen[0]]
    bandwidth = max(r.read_gb_s for reports in rounds for r in reports.values())
    where = f"{first.device}, {first.path}, {first.threads} threads"
    print(f"{where}; ok_read {bandwidth:.1f} GB/s; medians of {len(rounds)} rounds")
    print(f"{'weights':>9} {'tok/s':>8} {'MB/tok':>8} {'GB/s':>7} {'of read':>8} {'of f16':>7}")
    for kind in chosen:
        size = rounds[0][kind].weight_bytes
        speed = median(kind, "decode_tok_s")
        ratio = f"{'-':>7}"
        if "f16" in chosen:
            of_f16 = statistics.median(
                reports[kind].decode_tok_s / reports["f16"].decode_tok_s for reports in rounds
            )
            ratio = f"{of_f16:7.2f}"
        rate = size * speed / 1e9
        print(
            f"{kind:>9} {speed:>8.1f} {size / 1e6:>8.1f} {rate:>7.1f} {rate / bandwidth:>8.0%} "
            f"{ratio}"
        )


if __name__ == "__main__":
    main()
