"""Measures ok_matmul on the CPU: one table with bytes and operations a second, and their limits.

    python scripts/bench_matmul.py [--path avx2] [--threads 2] [--rows 1,64] [--shape 2048x2048]

Few rows are bound by the read of the weights: GB/s, and its share of what ok_read reaches in the
same run on a buffer too large for the caches. Many rows are bound by arithmetic: GFLOP/s, and its
share of numpy's BLAS on the same shape with f32 weights in the same run, on as many threads
(OPENBLAS_NUM_THREADS). Medians of passes over distinct matrices, more than fit a cache where
bandwidth counts. `q8_0/f32` keeps activations in f32.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable

import numpy as np

from pyengine.native import Arena, Buffer, DType, Library, Queue, load_library, ops

Shape = tuple[int, int]  # out, in

SHAPES: list[Shape] = [(576, 576), (1536, 576), (2048, 2048), (11008, 2048), (2048, 5632)]
WORKING_SET_BYTES = 256 << 20


def median_seconds(run: Callable[[], object], seconds: float) -> float:
    """Median duration of `run`, called for about `seconds`, at least five times."""
    run()
    times: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < deadline:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def read_bandwidth(queue: Queue, arena: Arena, seconds: float) -> float:
    """Bytes a second that ok_read reaches on a buffer larger than the caches."""
    with arena.scope():
        source = arena.alloc((WORKING_SET_BYTES // 4,), DType.F32)
        total = arena.alloc((1,), DType.I32)
        queue.library.c.ok_fill(queue.handle, source.ptr, 1, WORKING_SET_BYTES)

        def run() -> None:
            queue.library.c.ok_read(queue.handle, total.ptr, source.ptr, WORKING_SET_BYTES)

        return WORKING_SET_BYTES / median_seconds(run, seconds)


def bench(
    queue: Queue, arena: Arena, shape: Shape, kind: str, rows: int, seconds: float
) -> tuple[float, float]:
    """Bytes of weights a second and operations a second of one shape."""
    out, inner = shape
    dtype = DType.Q8_0 if kind.startswith("q8_0") else DType[kind.upper()]
    queue.set_quantized_activations(kind == "q8_0")
    size = ops.matrix_bytes(queue.library, dtype, out, inner)
    copies = -(-WORKING_SET_BYTES // size) if rows < 16 else max(1, (32 << 20) // size)
    generator = np.random.default_rng(0)
    with arena.scope():
        weights = generator.standard_normal((out, inner), dtype=np.float32)
        source = arena.alloc((out, inner), DType.F32).upload(queue, weights)
        matrices = [ops.new_matrix(arena, dtype, out, inner) for _ in range(copies)]
        for matrix in matrices:
            ops.pack_rows(queue, matrix, 0, source, DType.F32, out)
        x: Buffer = arena.alloc((rows, inner), DType.F32)
        x.upload(queue, generator.standard_normal((rows, inner), dtype=np.float32))
        y = arena.alloc((rows, out), DType.F32)
        with queue.record() as program:
            for matrix in matrices:
                ops.matmul(queue, y, x, matrix)
        elapsed = median_seconds(program.replay, seconds) / copies
        program.close()
    return size / elapsed, 2.0 * rows * out * inner / elapsed


def blas(shape: Shape, rows: int, seconds: float) -> float:
    """Operations a second of numpy's product of the same shape in f32."""
    out, inner = shape
    generator = np.random.default_rng(0)
    weights = generator.standard_normal((out, inner), dtype=np.float32)
    x = generator.standard_normal((rows, inner), dtype=np.float32)
    return 2.0 * rows * out * inner / median_seconds(lambda: x @ weights.T, seconds)


def machine(library: Library) -> str:
    """Processor, path and threads, for the table's head."""
    name = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as file:
            names = [
                line.split(":", 1)[1].strip() for line in file if line.startswith("model name")
            ]
        name = names[0] if names else name
    return f"{name}, path {library.c.ok_path().decode()}, {library.c.ok_threads()} threads"


def main() -> None:
    """Parses the command line and prints the table."""
    parser = argparse.ArgumentParser(description="Measures ok_matmul on the CPU.")
    parser.add_argument("--path", default="", help="instruction set, one of the library's targets")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--rows", default="1,2,4,8,64,256")
    parser.add_argument("--shape", action="append", help="OUTxIN; may be repeated")
    parser.add_argument("--kinds", default="f32,f16,bf16,q8_0,q8_0/f32")
    parser.add_argument("--seconds", type=float, default=0.3, help="time for each line")
    options = parser.parse_args()

    library = load_library("cpu")
    library.c.ok_set_path(options.path.encode())
    if options.threads:
        library.c.ok_set_threads(options.threads)
    shapes = SHAPES
    if options.shape:
        shapes = [(int(out), int(inner)) for out, inner in (s.split("x") for s in options.shape)]

    heights = [int(text) for text in options.rows.split(",")]
    values = max(max(heights) * (inner + 32) for _, inner in shapes)
    largest = 4 * max((out + 16) * (inner + 32) for out, inner in shapes)
    room = 2 * WORKING_SET_BYTES + 3 * largest + 8 * values + 4 * max(heights) * max(shapes)[0]
    with Arena(library, room) as arena, Queue(library) as queue:
        queue.set_scratch(arena, 4 * values)
        bandwidth = read_bandwidth(queue, arena, options.seconds)
        print(f"{machine(library)}; ok_read {bandwidth / 1e9:.1f} GB/s")
        print(
            f"{'out x in':>12} {'rows':>5} {'weights':>9} {'us':>9} "
            f"{'GB/s':>7} {'of read':>8} {'GFLOP/s':>9} {'of BLAS':>8}"
        )
        for shape in shapes:
            for rows in heights:
                yardstick = blas(shape, rows, options.seconds) if rows >= 16 else 0.0
                for kind in options.kinds.split(","):
                    rate, work = bench(queue, arena, shape, kind, rows, options.seconds)
                    micros = 2e6 * rows * shape[0] * shape[1] / work
                    share = f"{work / yardstick:8.0%}" if yardstick else f"{'-':>8}"
                    print(
                        f"{shape[0]:>6}x{shape[1]:<5} {rows:>5} {kind:>9} {micros:>9.1f} "
                        f"{rate / 1e9:>7.1f} {rate / bandwidth:>8.0%} {work / 1e9:>9.1f} {share}"
                    )


if __name__ == "__main__":
    main()
