"""Times attention on one machine: decode in microseconds and GB/s, prefill in GFLOP/s.

    python scripts/bench_attention.py [--threads 2] [--dtype f16] [--repeats 30]

Decode reads every visible key and value once, so its figure is bytes over time, beside the read
bandwidth measured in the same run. Prefill does 4 * head_dim operations for each pair of a row and
a key it sees.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np

from pyengine.native import Arena, DType, Library, Queue, load_library, ops

# heads, kv_heads, head_dim: SmolLM2 135M, Qwen2.5 0.5B, Llama 3.2 1B, StableLM-2 1.6B
SHAPES = [(9, 3, 64), (14, 2, 64), (32, 8, 64), (32, 32, 64)]
CONTEXTS = (512, 4096)
PROBE_BYTES = 256 << 20


def median_seconds(queue: Queue, run: Callable[[], None], repeats: int) -> float:
    """Median wall time of a call with its wait, after two calls to warm up."""
    times = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        run()
        queue.sync()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def read_bandwidth(library: Library, queue: Queue, arena: Arena, repeats: int) -> float:
    """Bytes a second of the library's own read kernel."""
    with arena.scope():
        source, word = arena.alloc((PROBE_BYTES // 4,), DType.I32), arena.alloc((1,), DType.I32)
        library.c.ok_fill(queue.handle, source.ptr, 1, PROBE_BYTES)
        return PROBE_BYTES / median_seconds(
            queue, lambda: ops.read_probe(queue, word, source), min(repeats, 5)
        )


def time_attention(
    queue: Queue, arena: Arena, dtype: DType, shape: tuple[int, int, int], context: int,
    rows: int, layers: int, repeats: int,
) -> float:  # fmt: skip
    """Seconds for the last `rows` positions of one sequence.

    `layers` caches are used in turn, so that the processor's own caches do not hold what is read.
    """
    heads, kv_heads, head_dim = shape
    rng = np.random.default_rng(0)
    blocks = -(-context // ops.KV_BLOCK_SIZE)
    with arena.scope():
        kv = arena.alloc((context, kv_heads * head_dim), DType.F32)
        kv.upload(queue, rng.normal(size=kv.shape))
        slot = arena.alloc((context,), DType.I32).upload(queue, np.arange(context))
        caches = [ops.kv_layer(arena, dtype, blocks, kv_heads, head_dim) for _ in range(layers)]
        for cache in caches:
            ops.kv_append(queue, cache, kv, kv, slot)
        q = arena.alloc((rows, heads * head_dim), DType.F32)
        q.upload(queue, rng.normal(size=q.shape))
        y = arena.alloc(q.shape, DType.F32)
        table = arena.alloc((1, blocks), DType.I32)
        table.upload(queue, rng.permutation(blocks)[None])
        sequence = arena.alloc((rows,), DType.I32).upload(queue, np.zeros(rows))
        position = arena.alloc((rows,), DType.I32)
        position.upload(queue, np.arange(context - rows, context))

        def run() -> None:
            for cache in caches:
                ops.attention_paged(
                    queue, y, q, cache, table, sequence, position, heads=heads,
                    scale=head_dim**-0.5,
                )  # fmt: skip

        return median_seconds(queue, run, repeats) / layers


def main() -> None:
    """Prints one table."""
    parser = argparse.ArgumentParser(description="Times attention on one machine.")
    parser.add_argument("--backend", default="cpu", choices=["cpu", "hip", "cuda"])
    parser.add_argument("--threads", type=int, help="CPU only; default: all cores")
    parser.add_argument("--path", default="", help="CPU only: instruction-set path")
    parser.add_argument("--dtype", default="f16", choices=["f32", "f16", "bf16"])
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    library = load_library(options.backend)
    if options.backend == "cpu":
        library.c.ok_set_path(options.path.encode())
        if options.threads:
            library.c.ok_set_threads(options.threads)
    dtype = DType[options.dtype.upper()]
    item = 4 if dtype == DType.F32 else 2

    with Arena(library, 1 << 30) as arena, Queue(library) as queue:
        queue.set_scratch(arena, ops.attention_scratch_bytes(library, 8, 32, 128, max(CONTEXTS)))
        probe = read_bandwidth(library, queue, arena, options.repeats)
        path = library.c.ok_path().decode() if options.backend == "cpu" else options.backend
        print(
            f"{library.device_name()[0]}, {path}, {library.c.ok_threads()} threads, "
            f"{options.dtype} cache, median of {options.repeats}, read {probe / 1e9:.1f} GB/s"
        )
        print("heads  kv  dim context  decode us   GB/s of read  prefill us  GFLOP/s")
        for shape in SHAPES:
            heads, kv_heads, head_dim = shape
            for context in CONTEXTS:
                size = 2 * context * kv_heads * head_dim * item
                layers = max(1, min(16, PROBE_BYTES // size))
                common = (queue, arena, dtype, shape, context)
                decode = time_attention(*common, 1, layers, options.repeats)
                prefill = time_attention(*common, 512, 1, max(3, options.repeats // 6))
                pairs = 512 * (context - 512) + 512 * 513 // 2
                print(
                    f"{heads:5} {kv_heads:3} {head_dim:4} {context:7} "
                    f"{decode * 1e6:10.1f} {size / decode / 1e9:6.1f} "
                    f"{size / decode / probe:7.0%} {prefill * 1e6:11.0f} "
                    f"{4 * head_dim * heads * pairs / prefill / 1e9:8.1f}"
                )


if __name__ == "__main__":
    main()
