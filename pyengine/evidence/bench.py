"""How fast a model runs here, beside what its bytes allow at the measured read bandwidth."""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

from pyengine.errors import RequestError
from pyengine.generation.engine import Engine
from pyengine.native import Arena, Device, DType, Queue, Stopwatch, ops

PROBE_BYTES = {"cpu": 512 << 20, "hip": 2 << 30, "cuda": 2 << 30}  # several times any cache


@dataclass(frozen=True)
class BenchReport:
    """Medians of `repeats` runs.

    Attributes:
        read_gb_s: measured read bandwidth of the device's memory.
        weight_bytes: bytes of weights that one decoded token must read.
        decode_tok_s: tokens a second, one sequence.
        decode_share: weight_bytes * decode_tok_s over the bandwidth.
        prefill_tok_s: prompt tokens a second.
        first_token_s: from the request to its first token, `prompt_tokens` long.
    """

    device: str
    path: str
    threads: int
    dtype: str
    prompt_tokens: int
    new_tokens: int
    repeats: int
    read_gb_s: float
    weight_bytes: int
    decode_tok_s: float
    decode_share: float
    prefill_tok_s: float
    first_token_s: float

    def to_json(self) -> dict[str, Any]:
        """Plain values for json.dumps."""
        return asdict(self)


def read_bandwidth(device: Device, *, repeats: int = 7) -> float:
    """Best measured read bandwidth of a device's memory, GB/s (1e9 bytes)."""
    library = device.library
    size = PROBE_BYTES[library.backend]
    times = []
    with (
        Arena(library, size + (1 << 16), device=device.index) as arena,
        Queue(library, device=device.index) as queue,
    ):
        source, word = arena.alloc((size // 4,), DType.I32), arena.alloc((1,), DType.I32)
        library.c.ok_fill(queue.handle, source.ptr, 1, source.nbytes)
        watch = Stopwatch(queue, device=device.index)
        for _ in range(repeats):
            watch.start()
            ops.read_probe(queue, word, source)
            times.append(watch.stop_ms())
        watch.close()
    return size / min(times) / 1e6


def _seconds(engine: Engine, ids: list[int], count: int) -> float:
    """Time from the request to its `count`-th token."""
    start = time.perf_counter()
    engine.generate(ids, max_new_tokens=count, ignore_eos=True)
    return time.perf_counter() - start


def run_bench(
    engine: Engine,
    *,
    prompt_tokens: int | None = None,
    new_tokens: int | None = None,
    repeats: int = 5,
) -> BenchReport:
    """Times prefill and greedy decode of one sequence.

    The tokens are arbitrary ids: speed does not depend on them.

    Args:
        prompt_tokens, new_tokens: None: 256 and 64, or less where the context is short.

    Raises:
        RequestError: what is asked for does not fit the context.
    """
    vocab_size, context = engine.config.vocab_size, engine.max_context
    if new_tokens is None:
        new_tokens = max(2, min(64, context - (prompt_tokens or context // 2)))
    if prompt_tokens is None:
        prompt_tokens = max(1, min(256, context - new_tokens))
    if prompt_tokens + new_tokens > context:
        raise RequestError(
            f"prompt_tokens={prompt_tokens} and new_tokens={new_tokens} do not fit the context of "
            f"{context} (max_context)"
        )
    ids = [(7919 * i + 1) % vocab_size for i in range(prompt_tokens)]
    first, decode = [], []
    for run in range(repeats + 1):  # the first run records programs and warms caches
        one, all_tokens = (_seconds(engine, ids, count) for count in (1, new_tokens))
        if run:
            first.append(one)
            decode.append((new_tokens - 1) / (all_tokens - one))
    bandwidth = read_bandwidth(engine.device)
    decode_tok_s = statistics.median(decode)
    weight_bytes = engine.decode_bytes
    library = engine.device.library
    return BenchReport(
        device=f"{engine.device.label} ({engine.device.name})",
        path=library.c.ok_path().decode(),
        threads=library.c.ok_threads(),
        dtype=engine.weights or engine.dtype.name.lower(),
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        repeats=repeats,
        read_gb_s=bandwidth,
        weight_bytes=weight_bytes,
        decode_tok_s=decode_tok_s,
        decode_share=weight_bytes * decode_tok_s / (bandwidth * 1e9),
        prefill_tok_s=prompt_tokens / statistics.median(first),
        first_token_s=statistics.median(first),
    )
