"""Measures the GPU build on one card: read bandwidth, matmuls, decode and prefill.

    python scripts/bench_gpu.py [--backend cuda] [--dtype f16] [--model stablelm-2-1.6b]

- Read bandwidth: ok_read over 2 GiB. Shares of bandwidth are of the best figure of this run.
- One row: bytes of weights a second, over distinct matrices that no cache holds.
- Many rows: TFLOP/s, and the share of torch's matmul (the maker's library) on the same shape and
  type, timed in turns in the same run. Without torch that column is empty.
- The model: a checkpoint of the published size with random weights, decoded and prefilled through
  Engine. Its share is weight bytes * tokens a second over the bandwidth.

Times are the device's own, from recorded programs; medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from pyengine.errors import EngineError
from pyengine.native import Arena, DType, Library, Queue, Stopwatch, load_library, ops

ROOT = Path(__file__).resolve().parent.parent
DTYPES = {"f32": DType.F32, "f16": DType.F16, "bf16": DType.BF16, "q8_0": DType.Q8_0}
WORKING_SET_BYTES = 1 << 30
READ_BYTES = 2 << 30

VECTOR_SHAPES = [(2048, 2048), (6144, 2048), (11264, 2048), (2048, 5632), (100352, 2048)]
"""(out, in): the matrices of StableLM-2-1.6B."""
WIDE_SHAPES = [
    (512, 2048, 2048), (512, 5632, 2048), (512, 11264, 2048), (512, 2048, 5632),
    (512, 100352, 2048), (4096, 4096, 4096),
]  # fmt: skip
"""(rows, out, in)."""


def device_ms(queue: Queue, run: Callable[[], object], repeats: int = 9) -> float:
    """Median milliseconds of `run` between two events."""
    watch = Stopwatch(queue)
    run()
    times = []
    for _ in range(repeats):
        watch.start()
        run()
        times.append(watch.stop_ms())
    watch.close()
    return statistics.median(times)


def read_bandwidth(library: Library) -> float:
    """Bytes a second of ok_read."""
    with Arena(library, READ_BYTES + 4096) as arena, Queue(library) as queue:
        source, word = arena.alloc((READ_BYTES // 4,), DType.I32), arena.alloc((1,), DType.I32)
        library.c.ok_fill(queue.handle, source.ptr, 1, READ_BYTES)
        return READ_BYTES / device_ms(queue, lambda: ops.read_probe(queue, word, source)) * 1e3


def matmul_seconds(
    library: Library, dtype: DType, rows: int, out: int, inner: int
) -> tuple[float, float]:
    """Seconds and weight bytes of one matmul; a working set of distinct matrices is walked."""
    size = ops.matrix_bytes(library, dtype, out, inner)
    copies = max(2, min(64, WORKING_SET_BYTES // size))
    room = copies * (size + 256) + 4 * (rows * (out + inner) + out * inner) + (256 << 20)
    rng = np.random.default_rng(0)
    with Arena(library, room) as arena, Queue(library) as queue:
        queue.set_scratch(arena, ops.matmul_scratch_bytes(library, dtype, rows, out, inner) or 256)
        x = arena.alloc((rows, inner), DType.F32)
        x.upload(queue, rng.standard_normal((rows, inner), np.float32))
        y = arena.alloc((rows, out), DType.F32)
        first = ops.pack_matrix(
            queue, arena, 0.02 * rng.standard_normal((out, inner), np.float32), dtype
        )
        matrices = [first] + [ops.new_matrix(arena, dtype, out, inner) for _ in range(copies - 1)]
        for matrix in matrices[1:]:
            library.c.ok_copy(queue.handle, matrix.ptr, first.ptr, size)
        with queue.record() as program:
            for matrix in matrices:
                ops.matmul(queue, y, x, matrix)
        milliseconds = device_ms(queue, program.replay)
        program.close()
    return milliseconds / copies / 1e3, size


def torch_matmul_seconds(dtype: str, rows: int, out: int, inner: int) -> float | None:
    """Seconds of torch's x @ W.T on the same shape, or None without torch and its GPU."""
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available() or dtype == "q8_0":
        return None
    torch.backends.cuda.matmul.allow_tf32 = False
    kind = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[dtype]
    copies = max(2, min(16, WORKING_SET_BYTES // (out * inner * kind.itemsize)))
    x = torch.randn(rows, inner, device="cuda").to(kind)
    weights = [(0.02 * torch.randn(out, inner, device="cuda")).to(kind) for _ in range(copies)]
    times = []
    for _ in range(10):
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        for weight in weights:
            x @ weight.T
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / copies / 1e3)
    del x, weights
    torch.cuda.empty_cache()
    return float(statistics.median(times[1:]))


def bench_model(backend: str, dtype: str, model: str, folder: Path) -> dict[str, Any]:
    """Decode and prefill of a random checkpoint of a published size."""
    from pyengine import Engine
    from pyengine.evidence.bench import run_bench

    if not (folder / "config.json").exists():
        command = [sys.executable, ROOT / "scripts/make_synthetic.py", model, folder]
        subprocess.run([*map(str, command), "--dtype", "f16"], check=True, cwd=ROOT)
    options: dict[str, Any] = {"weights": "q8_0"} if dtype == "q8_0" else {"dtype": dtype}
    with Engine(folder, device=backend, max_context=2048, max_batch=1, **options) as engine:
        return run_bench(engine, prompt_tokens=512, new_tokens=128).to_json()


def main() -> int:
    """Prints the tables; 2 where the card cannot be used."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="cuda", choices=["cuda", "hip"])
    parser.add_argument("--dtype", default="f16", choices=DTYPES)
    parser.add_argument("--model", default="stablelm-2-1.6b", help="of make_synthetic.py, or none")
    parser.add_argument("--checkpoint", type=Path, help="where the random model is kept")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    arguments = parser.parse_args()
    try:
        library = load_library(arguments.backend)
        library.check_device(0)
    except EngineError as error:
        print(f"bench_gpu: {error}", file=sys.stderr)
        return 2

    dtype = DTYPES[arguments.dtype]
    figures: dict[str, Any] = {}
    name, arch = library.device_name()
    bandwidth = read_bandwidth(library)
    print(f"{name} ({arch}), {library.build_info}\nread: {bandwidth / 1e12:.3f} TB/s")
    figures["read_bytes_s"] = bandwidth

    print(f"\none row, {arguments.dtype}\n{'out x in':>16} {'us':>8} {'TB/s':>7} {'of read':>8}")
    for out, inner in VECTOR_SHAPES:
        seconds, size = matmul_seconds(library, dtype, 1, out, inner)
        rate, share = size / seconds / 1e12, size / seconds / bandwidth
        print(f"{f'{out} x {inner}':>16} {seconds * 1e6:8.1f} {rate:7.3f} {share:8.1%}")
        figures[f"vector {out}x{inner}"] = {"seconds": seconds, "share_of_read": share}

    header = f"{'rows x out x in':>20} {'us':>9} {'TFLOP/s':>8} {'torch':>8} {'share':>7}"
    print(f"\nmany rows, {arguments.dtype}\n{header}")
    for rows, out, inner in WIDE_SHAPES:
        shape, teraflop = f"{rows} x {out} x {inner}", 2e-12 * rows * out * inner
        seconds, _ = matmul_seconds(library, dtype, rows, out, inner)
        other = torch_matmul_seconds(arguments.dtype, rows, out, inner)
        beside = f"{teraflop / other:8.1f} {other / seconds:7.1%}" if other else ""
        print(f"{shape:>20} {seconds * 1e6:9.1f} {teraflop / seconds:8.1f} {beside}")
        figures[f"wide {rows}x{out}x{inner}"] = {"seconds": seconds, "torch_seconds": other}

    if arguments.model != "none":
        with tempfile.TemporaryDirectory() as scratch:
            folder = arguments.checkpoint or Path(scratch) / arguments.model
            report = bench_model(arguments.backend, arguments.dtype, arguments.model, folder)
        share = report["weight_bytes"] * report["decode_tok_s"] / bandwidth
        print(
            f"\n{arguments.model}, {arguments.dtype}: decode {report['decode_tok_s']:.1f} tok/s, "
            f"{share:.1%} of read bandwidth; prefill of 512 {report['prefill_tok_s']:,.0f} tok/s"
        )
        figures["model"] = report | {"decode_share_of_read": share}
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
