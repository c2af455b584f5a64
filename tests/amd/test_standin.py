"""The stand-in runs kernels rightly at both wave sizes, and finds the mistakes it is there to find."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pyengine.errors import DeviceError
from pyengine.evidence.parity import run_parity
from pyengine.generation import self_test
from pyengine.generation.engine import Engine, compute_logits
from pyengine.native import Device, Library
from tests.amd import op_cases, sample_cases, toolchain
from tests.amd.standin_library import KernelFault, SampleLibrary
from tests.conftest import CHECKPOINTS, GOLDEN
from tests.planted_faults import rotate_half_of_long_chunks
from tests.tiny import write_tiny

Samples = Callable[[int, str], SampleLibrary]

# One target for each way to multiply matrices: plain, WMMA, WMMA of RDNA4, MFMA.
TARGETS = [(32, "gfx1030"), (32, "gfx1100"), (32, "gfx1200"), (64, "gfx942")]
ORDERS = ["forward", "reverse", "random"]


@pytest.mark.parametrize("kernel", sample_cases.CASES)
@pytest.mark.parametrize(("wave", "target"), TARGETS)
def test_kernels_agree_with_float64_in_every_order(
    standin_samples: Samples,
    monkeypatch: pytest.MonkeyPatch,
    wave: int,
    target: str,
    kernel: str,
) -> None:
    library = standin_samples(wave, target)
    results = []
    for order in ORDERS:
        monkeypatch.setenv("STANDIN_ORDER", order)
        case = sample_cases.make(kernel, wave)
        case.run(library)
        assert case.holds(), f"{order}: {case.error():.2g}"
        results.append(case.arguments[0])
    assert all((result == results[0]).all() for result in results)


def _finding(library: SampleLibrary, bug: str, wave: int) -> str:
    """What is found when a bug's case is run: the fault's text, "wrong" for a wrong result, "" for nothing."""
    number, kernel = sample_cases.BUGS[bug]
    library.set_bug(number)
    case = sample_cases.make(kernel, wave)
    try:
        case.run(library)
    except KernelFault as fault:
        return str(fault)
    return "" if case.holds() else "wrong"


EXPECTED = [
    ("missing_barrier", 32, "gfx1100", "wrong"),
    ("missing_barrier", 64, "gfx942", "wrong"),
    ("wrong_bound", 32, "gfx1100", "out-of-bounds access"),
    ("wrong_bound", 64, "gfx942", "out-of-bounds access"),
    ("fixed_wave_size", 64, "gfx942", "wrong"),
    ("wrong_fragment_row", 32, "gfx1100", "wrong"),
    ("wrong_fragment_row", 32, "gfx1200", "wrong"),
    ("wrong_fragment_row", 64, "gfx942", "wrong"),
    ("lanes_not_repeated", 32, "gfx1100", "does not repeat"),
    ("softmax_without_max", 32, "gfx1100", "wrong"),
    ("divergent_barrier", 32, "gfx1100", "divergent __syncthreads"),
    ("missing_wave_sum", 32, "gfx1100", "wrong"),
    ("barrier_too_early", 32, "gfx1100", "wrong"),
    ("barrier_too_early", 64, "gfx942", "wrong"),
    ("signed_as_unsigned", 32, "gfx1100", "wrong"),
]


@pytest.mark.parametrize(("bug", "wave", "target", "finding"), EXPECTED)
def test_seeded_mistakes_are_found(
    standin_samples: Samples, bug: str, wave: int, target: str, finding: str
) -> None:
    assert finding in _finding(standin_samples(wave, target), bug, wave)


def test_every_seeded_mistake_has_a_test() -> None:
    assert {bug for bug, *_ in EXPECTED} == set(sample_cases.BUGS)


def test_a_fixed_wave_size_passes_at_its_own_size_and_so_both_are_needed(
    standin_samples: Samples,
) -> None:
    assert _finding(standin_samples(32, "gfx1100"), "fixed_wave_size", 32) == ""


def test_a_fault_names_the_block_and_the_thread_and_leaves_the_process_usable(
    standin_samples: Samples,
) -> None:
    library = standin_samples(32, "gfx1100")
    assert "block (3,0,0)" in _finding(library, "wrong_bound", 32)
    assert "thread (235,0,0)" in _finding(library, "wrong_bound", 32)
    library.set_bug(0)
    case = sample_cases.make("scale_add", 32)
    case.run(library)
    assert case.holds()


@pytest.mark.parametrize(
    ("grid", "block"),
    [((0, 1, 1), (32, 1, 1)), ((1, 1, 1), (1025, 1, 1)), ((1, 65536, 1), (1, 1, 1))],
)
def test_a_launch_that_no_card_takes_is_refused(
    standin_samples: Samples, grid: tuple[int, ...], block: tuple[int, ...]
) -> None:
    library = standin_samples(32, "gfx1100")
    x = np.zeros(4, np.float32)
    with pytest.raises(KernelFault, match="cannot be launched"):
        library.launch("scale_add", grid, block, [x, x, np.float32(1), np.int32(4)])


def _quick(case: str) -> bool:
    """The widest matmul takes seconds: one type is enough for a quick run."""
    return toolchain.full_set() or not case.startswith("matmul-wide-") or case.endswith("-f16")


@pytest.mark.parametrize("case", [case for case in op_cases.CASES if _quick(case)])
@pytest.mark.parametrize("wave", [32, 64])
def test_operations_agree_with_float64(
    standin_library: Callable[..., Library], wave: int, case: str
) -> None:
    with op_cases.ran(standin_library(wave), case) as (_, outputs):
        for output in outputs:
            output.check(op_cases.read_memory)


# Only matmuls differ between targets of one wave size.
@pytest.mark.parametrize("case", [case for case in op_cases.CASES if case.startswith("matmul-")])
@pytest.mark.parametrize(("wave", "target"), [(32, "gfx1030"), (32, "gfx1200"), (64, "gfx942")])
def test_matmuls_agree_with_float64_with_every_matrix_unit(
    standin_library: Callable[..., Library], wave: int, target: str, case: str
) -> None:
    if not toolchain.full_set():
        pytest.skip("three more builds of the library: CI_FULL=1")
    with op_cases.ran(standin_library(wave, target), case) as (_, outputs):
        for output in outputs:
            output.check(op_cases.read_memory)


RACY = ["rms_norm", "layer_norm", "matmul-tiled-f16", "attention-split-f16", "attention-tile64-f16"]
RACY += ["matmul-vector_one-q8_0", "sample-filtered", "count_nonfinite", "quantize_q8_0"]


@pytest.mark.parametrize("case", list(op_cases.CASES) if toolchain.full_set() else RACY)
@pytest.mark.parametrize("wave", [32, 64])
def test_operations_do_not_depend_on_the_order_of_lanes(
    standin_library: Callable[..., Library],
    monkeypatch: pytest.MonkeyPatch,
    wave: int,
    case: str,
) -> None:
    results = []
    for order in ("forward", "reverse"):
        monkeypatch.setenv("STANDIN_ORDER", order)
        with op_cases.ran(standin_library(wave), case) as (_, outputs):
            results.append([op_cases.read_memory(o.buffer.ptr, o.buffer.nbytes) for o in outputs])
    assert results[0] == results[1]


def test_a_fault_in_a_kernel_is_a_device_error_with_the_place(
    standin_library: Callable[..., Library],
) -> None:
    library = standin_library(32)
    with (
        op_cases.ran(library, "rms_norm") as (bench, _),
        pytest.raises(DeviceError, match="out-of-bounds"),
    ):
        near_null = 64
        library.c.ok_activate(bench.queue.handle, near_null, near_null, 0, 16)
        bench.queue.sync()


EVERY_MODEL = [*itertools.product([32, 64], CHECKPOINTS, ["f32"])]
EVERY_MODEL += [
    *itertools.product([32], CHECKPOINTS, ["f16"]),
    *itertools.product([64], CHECKPOINTS, ["bf16"]),
]

# A golden holds some hundred positions, and in 16 bits the largest error among so few, over the reference's own, is luck:
# gpt2 in bf16 reaches 1.8 here and 0.98 over the 2,731 positions of the full prompt set.
LARGEST_ERROR_RATIO = 2.0


@pytest.mark.parametrize(
    ("wave", "checkpoint", "dtype"),
    EVERY_MODEL if toolchain.full_set() else [(32, "qwen2", "f32"), (64, "olmo2", "f16")],
)
def test_a_whole_models_logits_are_those_of_transformers(
    standin_library: Callable[..., Library],
    monkeypatch: pytest.MonkeyPatch,
    wave: int,
    checkpoint: str,
    dtype: str,
) -> None:
    monkeypatch.setenv("OKERNEL_LIB", str(standin_library(wave).path))
    report = run_parity(
        CHECKPOINTS[checkpoint], reference=GOLDEN / checkpoint, dtype=dtype, device="hip"
    )
    missed = [
        gate
        for gate in report.gates
        if not gate.passed and (gate.name != "max ratio" or gate.value > LARGEST_ERROR_RATIO)
    ]
    assert not missed, missed
    assert len(report.gates) >= 2


@pytest.mark.parametrize("wave", [32, 64] if toolchain.full_set() else [32])
def test_the_start_up_self_test_passes_and_finds_a_planted_fault(
    standin_library: Callable[..., Library],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    wave: int,
) -> None:
    monkeypatch.setenv("PYENGINE_CACHE", str(tmp_path))
    library = standin_library(wave)
    device = Device(library, 0, *library.device_name())
    verdict = self_test.run(device, "f32", compute_logits)
    assert (verdict.state, verdict.message) == ("passed", "")
    rotate_half_of_long_chunks(library, monkeypatch)
    verdict = self_test.run(device, "f32", compute_logits)
    assert verdict.state == "failed"
    assert "rotary model in f32, 100 tokens in chunks of 32" in verdict.message


@pytest.mark.parametrize("weights", [None, "q8_0"])
def test_a_deterministic_engine_gives_the_same_bits_in_any_batch(
    standin_library: Callable[..., Library],
    monkeypatch: pytest.MonkeyPatch,
    weights: str | None,
) -> None:
    monkeypatch.setenv("OKERNEL_LIB", str(standin_library(32).path))
    ids = np.random.default_rng(0).integers(3, 200, 70).tolist()
    results = []
    for chunk_rows, max_context in ((80, 96), (7, 300)):
        with Engine(
            CHECKPOINTS["qwen2"],
            device="hip",
            dtype="f16",
            weights=weights,
            deterministic=True,
            chunk_rows=chunk_rows,
            max_context=max_context,
        ) as engine:
            alone = engine.logits(ids)
            beside = engine.logits_batch([ids[:20], ids, ids[:3]])[1]
        results += [alone, beside]
    assert all(np.array_equal(result, results[0]) for result in results)


# Launches of a decoder layer in decode. Norm and activation travel with a projection, rotation with the cache; a norm
# of heads, one after a sublayer, and one that is read twice are launches of their own. Attention is two: a head's keys are
# shared out, then merged.
LAUNCHES = {
    "llama": 7,
    "qwen2": 7,
    "phi3": 7,
    "stablelm": 7,
    "bloom": 7,
    "gpt2": 7,
    "stablelm-parallel": 10,
    "olmo2": 11,
}


@pytest.mark.parametrize("variant", LAUNCHES)
def test_a_decoder_layer_keeps_to_its_launches(
    standin_library: Callable[..., Library],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    variant: str,
) -> None:
    monkeypatch.setenv("OKERNEL_LIB", str(standin_library(32).path))
    family, _, parallel = variant.partition("-")
    traits = {"use_parallel_residual": True, "qk_layernorm": True} if parallel else {}
    counts, few = [], family in ("bloom", "gpt2")
    heads = {"n_head": 1} if few else {"num_attention_heads": 1, "num_key_value_heads": 1}
    for layers in (1, 2):
        path = write_tiny(
            family,
            tmp_path / str(layers),
            **traits,
            **heads,
            **{"n_layer" if few else "num_hidden_layers": layers},
        )
        with Engine(path, device="hip", dtype="f16", max_context=256, max_batch=1) as engine:
            counts.append(engine._runner.program(1, logits=False).launches)
    assert counts[1] - counts[0] == LAUNCHES[variant]
