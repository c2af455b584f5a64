"""The engine as programs embed it: the same bits however work is cut, and clear errors."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyengine import Completion, Engine
from pyengine.errors import InvalidArgument, OutOfMemory, RequestError
from pyengine.native import Library
from tests.conftest import is_standin

IDS = [(37 * i * i + 11 * i + 3) % 2040 + 4 for i in range(150)]


@pytest.fixture(scope="module")
def demo(checkpoints: dict[str, Path]) -> Any:
    with Engine(checkpoints["stablelm2"], device="cpu", dtype="f32") as engine:
        yield engine


@pytest.mark.parametrize("name", ["stablelm2", "stablelm2-12b", "bloom", "olmo2", "phi3", "gpt2"])
@pytest.mark.parametrize("options", [{}, {"dtype": "f16"}, {"dtype": "bf16"}, {"weights": "q8_0"}])
def test_logits_are_the_same_bits_however_the_work_is_cut(
    checkpoints: dict[str, Path], name: str, options: dict[str, Any]
) -> None:
    def logits(**more: Any) -> Any:
        with Engine(checkpoints[name], device="cpu", **options, **more) as engine:
            return engine.logits(IDS)

    whole = logits()
    for more in (
        {"chunk_rows": 1},
        {"chunk_rows": 7},
        {"chunk_rows": 64},
        {"chunk_rows": 7, "record": False},
        {"threads": 1},
        {"threads": 2},
    ):
        assert np.array_equal(whole, logits(**more)), more
    others = [IDS[i : 10 + 17 * i] for i in range(7)]
    with Engine(checkpoints[name], device="cpu", **options) as engine:
        together = engine.logits_batch([*others[:3], IDS, *others[3:]])
    assert np.array_equal(whole, together[3])


def test_a_decode_step_is_one_replay_and_no_other_library_call(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(checkpoints["stablelm2"], device="cpu") as engine:
        stream = engine.stream(IDS[:5], max_new_tokens=60, ignore_eos=True)
        next(stream)
        calls: Counter[str] = Counter()
        functions = engine.device.library.c
        for name, function in vars(functions).items():

            def counting(*args: Any, _name: str = name, _function: Any = function) -> Any:
                calls[_name] += 1
                return _function(*args)

            monkeypatch.setattr(functions, name, counting)
        tokens = sum(1 for _ in stream)
        assert set(calls) == {"ok_program_replay"}
        assert tokens - 5 < calls["ok_program_replay"] < 60


def test_decoding_a_thousand_tokens_allocates_nothing(checkpoints: dict[str, Path]) -> None:
    def anonymous_kib() -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.split("RssAnon:")[1].split()[0])

    with Engine(checkpoints["stablelm2"], device="cpu") as engine:
        library = engine.device.library
        for _ in range(2):  # the caches of Python and numpy fill
            engine.generate(IDS[:2], max_new_tokens=500, ignore_eos=True)
        gc.collect()
        allocations, before = library.c.ok_allocation_count(), anonymous_kib()
        for _ in range(2):
            result = engine.generate(IDS[:2], max_new_tokens=500, ignore_eos=True)
            assert result.completion_tokens == 500
        gc.collect()
        assert library.c.ok_allocation_count() == allocations
        assert anonymous_kib() - before < 1024


def test_greedy_is_what_temperature_zero_is(demo: Engine) -> None:
    greedy = demo.generate("The king", max_new_tokens=24)
    for options in ({"top_k": 3}, {"top_p": 0.1}, {"seed": 5}, {"min_p": 0.5}):
        assert demo.generate("The king", max_new_tokens=24, temperature=0, **options) == greedy
    step = demo.logits(demo.tokenize("The king"))[-1].argmax()
    assert greedy.token_ids[0] == step


@pytest.mark.parametrize("top_k", [0, -1, 1, 300, 10**9])
def test_any_top_k_works_and_leaves_greedy_rows_alone(demo: Engine, top_k: int) -> None:
    greedy = demo.generate("And it came", max_new_tokens=8)
    sampled = demo.generate("And it came", max_new_tokens=8, temperature=1.0, top_k=top_k, seed=1)
    assert sampled.completion_tokens == 8
    if top_k == 1:
        assert sampled.token_ids == greedy.token_ids


def test_a_seed_gives_the_same_text_in_any_company(demo: Engine) -> None:
    prompts = ["In the beginning", "A dog is", "To use this program,", "The"]
    options: dict[str, Any] = {"temperature": 0.9, "top_p": 0.9, "seed": 42, "max_new_tokens": 16}
    alone = [demo.generate(p, **options) for p in prompts]
    assert demo.generate(prompts, **options) == alone
    assert demo.generate("The", **options | {"seed": 43}).token_ids != alone[3].token_ids


def test_streamed_text_is_the_generated_text(demo: Engine) -> None:
    whole = demo.generate("A dictionary is", max_new_tokens=40)
    chunks = list(demo.stream("A dictionary is", max_new_tokens=40))
    assert "".join(c.text for c in chunks) == whole.text
    assert chunks[-1].completion == whole
    assert [c.finish_reason for c in chunks[:-1]] == [""] * (len(chunks) - 1)


def test_a_stream_left_early_frees_its_place(checkpoints: dict[str, Path]) -> None:
    with Engine(checkpoints["stablelm2"], device="cpu", max_batch=1, max_context=64) as engine:
        for _ in range(3):
            stream = engine.stream("The", max_new_tokens=60, ignore_eos=True)
            next(stream)
            stream.close()
        assert engine.generate("The", max_new_tokens=5).completion_tokens == 5


def test_prompts_that_fill_the_context(checkpoints: dict[str, Path]) -> None:
    with Engine(checkpoints["stablelm2"], device="cpu", max_context=64) as engine:
        with pytest.raises(RequestError, match="65 tokens do not fit the context of 64"):
            engine.generate(IDS[:65])
        full = engine.generate(IDS[:64])
        assert (full.finish_reason, full.token_ids) == ("length", [])
        nearly = engine.generate(IDS[:60], max_new_tokens=100, ignore_eos=True)
        assert (nearly.finish_reason, nearly.completion_tokens) == ("length", 4)


def test_more_prompts_than_the_batch_holds(checkpoints: dict[str, Path]) -> None:
    prompts = [IDS[i : i + 3 + i] for i in range(9)]
    with Engine(checkpoints["gpt2"], device="cpu", max_batch=2, kv_tokens=96) as engine:
        together = engine.generate(prompts, max_new_tokens=6)
        assert together == [engine.generate(p, max_new_tokens=6) for p in prompts]


def test_threads_share_one_engine(demo: Engine) -> None:
    prompts = [IDS[i : i + 20] for i in range(6)]
    alone = [demo.generate(p, max_new_tokens=12) for p in prompts]
    found: dict[int, Completion] = {}
    threads = [
        threading.Thread(
            target=lambda i=i: found.update({i: demo.generate(prompts[i], max_new_tokens=12)})
        )
        for i in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(6)] == alone


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([], "empty"), ([2048], "token id 2048 is outside the vocabulary of 2048"), ([-1], "-1")],
)
def test_bad_ids_are_named(demo: Engine, prompt: list[int], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        demo.generate(prompt)
    with pytest.raises(RequestError, match=message):
        demo.logits(prompt)


@pytest.mark.parametrize(
    "prompt", [None, 5, b"abc", {"role": "user"}, [1.5], [None], ["a", 5], [[1], "b", 2.5]]
)
def test_what_is_no_prompt_is_refused_in_words(demo: Engine, prompt: Any) -> None:
    with pytest.raises(RequestError):
        demo.generate(prompt)
    with pytest.raises(RequestError, match="messages"):
        demo.chat("hello")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="expected SamplingParams"):
        demo.generate("x", {"temperature": 1})  # type: ignore[call-overload]
    with pytest.raises(RequestError, match="expected token ids"):
        demo.logits("abc")  # type: ignore[arg-type]


def test_a_prompt_that_fails_takes_no_others_down(demo: Engine) -> None:
    with pytest.raises(RequestError, match="do not fit"):
        demo.generate([[1, 2, 3], [5] * 5000])
    assert demo.generate([1, 2, 3], max_new_tokens=2).completion_tokens == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "f64"}, "dtype='f64': expected one of auto, f32, f16, bf16"),
        ({"device": "gpu"}, "device='gpu': expected auto, cpu, hip"),
        ({"weights": "int4"}, "weights='int4'"),
        ({"max_batch": 0}, "max_batch=0"),
        ({"max_context": 0}, "max_context=0"),
        ({"kv_tokens": 0}, "kv_tokens=0"),
        ({"memory_fraction": 0}, "memory_fraction=0"),
        ({"kv_dtype": "auto"}, "kv_dtype='auto'"),
        ({"threads": 0}, "threads=0: must be 1 to 256"),
        ({"threads": "2"}, "threads='2'"),
    ],
)
def test_bad_options_are_named(
    checkpoints: dict[str, Path], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        Engine(checkpoints["stablelm2"], **{"device": "cpu", **options})


def test_learned_positions_end_where_the_table_ends(checkpoints: dict[str, Path]) -> None:
    with Engine(checkpoints["gpt2"], device="cpu") as engine:
        assert engine.logits(IDS + IDS[:106]).shape == (256, 2048)
        with pytest.raises(RequestError, match="257 tokens do not fit the context of 256"):
            engine.logits(IDS + IDS[:107])
    with pytest.raises(RequestError, match="max_context=257: .* 256 tokens"):
        Engine(checkpoints["gpt2"], device="cpu", max_context=257)


def held(library: Library) -> int:
    """Bytes in use: of a GPU; of the CPU this process's own, for others come and go."""
    if library.backend != "cpu":
        free, total = library.device_memory()
        return total - free
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(x for x in status.splitlines() if x.startswith("RssAnon:")).split()[1])


def test_too_much_memory_is_said_in_bytes_and_leaves_nothing(
    checkpoints: dict[str, Path], device: str, library: Library
) -> None:
    with Engine(checkpoints["stablelm2"], device=device, max_context=64, max_batch=1) as engine:
        engine.generate("The", max_new_tokens=2)  # loads what stays for the process
    before = held(library)
    with pytest.raises(OutOfMemory, match=r"needed \d+ bytes, free \d+, total \d+.*max_context"):
        Engine(checkpoints["stablelm2"], device=device, max_context=10**9)
    with Engine(checkpoints["stablelm2"], device=device, max_context=64, max_batch=1) as engine:
        assert engine.generate("The", max_new_tokens=2).completion_tokens == 2
    assert held(library) - before < 16 << 20


def test_every_failing_allocation_is_an_error_and_the_next_engine_works(
    checkpoints: dict[str, Path], device: str, library: Library
) -> None:
    functions = library.c
    with Engine(checkpoints["stablelm2"], device=device, max_context=64) as engine:
        engine.generate([1, 2, 3], max_new_tokens=3)  # loads what stays for the process
    before = held(library)
    failures = 0
    for n in range(1, 1000):
        functions.ok_fail_allocation(n)
        try:
            with Engine(checkpoints["stablelm2"], device=device, max_context=64) as engine:
                engine.generate([1, 2, 3], max_new_tokens=3)
        except OutOfMemory as error:
            failures += 1
            assert "needed" in str(error)
        else:
            break
        finally:
            functions.ok_fail_allocation(0)
    assert failures >= 4  # arenas, queue, programs
    assert held(library) - before < 16 << 20


def test_a_closed_engine_says_so(checkpoints: dict[str, Path]) -> None:
    engine = Engine(checkpoints["gpt2"], device="cpu")
    stream = engine.stream("The", max_new_tokens=8)
    next(stream)
    engine.close()
    engine.close()
    with pytest.raises(RequestError, match="closed"):
        engine.generate("The")
    with pytest.raises(RequestError, match="closed"):
        list(stream)


def test_an_engine_that_is_dropped_warns(checkpoints: dict[str, Path]) -> None:
    engine = Engine(checkpoints["gpt2"], device="cpu")
    with pytest.warns(ResourceWarning, match="Engine was not closed"):
        engine.__del__()
    engine.close()


def test_logits_are_handed_out_where_they_lie(demo: Engine) -> None:
    want = demo.logits(IDS)[-1]
    array = demo.logits_device(IDS)
    assert array.device == ("cpu", 0) and array.shape == (demo.config.vocab_size,)
    assert (np.from_dlpack(array) == want).all() and (np.asarray(array) == want).all()
    assert np.from_dlpack(array).ctypes.data == array.pointer  # no copy


def test_logits_are_handed_out_of_a_step_that_others_share(demo: Engine) -> None:
    want = demo.logits(IDS[:9])[-1]
    stream = demo.stream(IDS[20:40], max_new_tokens=8, ignore_eos=True)
    next(stream)  # now decoding; its row comes before those of a new prompt
    assert (np.asarray(demo.logits_device(IDS[:9])) == want).all()
    stream.close()


def test_device_logits_of_a_full_context_are_refused(checkpoints: dict[str, Path]) -> None:
    with Engine(checkpoints["stablelm2"], device="cpu", max_context=32) as engine:
        engine.logits_device(IDS[:31])
        with pytest.raises(RequestError, match="32 tokens fill the context of 32"):
            engine.logits_device(IDS[:32])


def test_logits_on_a_stream_of_torch_are_taken_by_torch(
    checkpoints: dict[str, Path], gpu: str
) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if is_standin(gpu) or not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    if (gpu == "hip") != (torch.version.hip is not None):
        pytest.skip(f"this torch is not built for {gpu}")
    stream = torch.cuda.Stream()
    with Engine(checkpoints["stablelm2"], device=gpu, stream=stream) as engine:
        ids = IDS[:40]  # up to 64 rows are one program, whether or not all logits are wanted
        want = engine.logits(ids)[-1]
        for _ in range(2):
            array = engine.logits_device(ids)
            taken = torch.from_dlpack(array)
            assert taken.is_cuda and taken.data_ptr() == array.pointer  # no copy
            viewed = torch.as_tensor(array, device="cuda")  # __cuda_array_interface__
            assert viewed.data_ptr() == array.pointer
            with torch.cuda.stream(stream):  # in the order of the engine's own work
                doubled = taken * 2
            stream.synchronize()
            for copy in (taken.cpu(), viewed.cpu(), doubled.cpu() / 2):
                assert np.array_equal(copy.numpy(), want)


def test_a_stream_on_the_cpu_is_refused_and_what_is_no_stream_too(
    checkpoints: dict[str, Path],
) -> None:
    with pytest.raises(InvalidArgument, match="the CPU has no streams"):
        Engine(checkpoints["stablelm2"], device="cpu", stream=4096)
    with pytest.raises(RequestError, match="stream='main'"):
        Engine(checkpoints["stablelm2"], device="cpu", stream="main")
