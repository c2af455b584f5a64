"""gfx1100 machine code gives the right values, keeps to its buffers, and does no more work than it did before."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest

pytest.importorskip(
    "tinygrad.renderer.amd", reason="tinygrad (the instruction decoder) is not installed"
)

from pyengine.native import Library  # noqa: E402
from tests.amd import library_code, op_cases, operations, sample_cases, toolchain  # noqa: E402
from tests.amd.code_objects import CodeObject  # noqa: E402
from tests.amd.rdna3 import Counts, Machine, Trap  # noqa: E402

Code = Callable[..., CodeObject]


@pytest.mark.parametrize("kernel", sample_cases.CASES)
def test_kernels_agree_with_float64(sample_code: Code, kernel: str) -> None:
    case = sample_cases.make(kernel, 32)
    case.run(Machine(sample_code("gfx1100")))
    assert case.holds(), f"{case.error():.2g}"


EXPECTED = {
    "missing_barrier": "LDS race",
    "wrong_bound": "out-of-bounds global load",
    "wrong_fragment_row": "wrong",
    "lanes_not_repeated": "do not repeat",
    "softmax_without_max": "wrong",
    "divergent_barrier": "LDS race",
    "missing_wave_sum": "wrong",
    "barrier_too_early": "LDS race",
    "signed_as_unsigned": "wrong",
}


@pytest.mark.parametrize("bug", EXPECTED)
def test_seeded_mistakes_are_found(sample_code: Code, bug: str) -> None:
    number, kernel = sample_cases.BUGS[bug]
    case = sample_cases.make(kernel, 32)
    try:
        case.run(Machine(sample_code("gfx1100", number)))
    except Trap as trap:
        assert EXPECTED[bug] in str(trap)
    else:
        assert EXPECTED[bug] == "wrong" and not case.holds()


def test_every_seeded_mistake_that_a_wave_of_32_can_show_has_a_test() -> None:
    assert set(EXPECTED) == set(sample_cases.BUGS) - {"fixed_wave_size"}


def test_counts_are_the_same_on_every_run_and_see_the_work(sample_code: Code) -> None:
    machine = Machine(sample_code("gfx1100"))
    runs = [sample_cases.make("scale_add", 32).run(machine) for _ in range(2)]
    assert runs[0] == runs[1]
    assert runs[0].bytes["global_load"] == 2 * 4 * 1003
    assert runs[0].bytes["global_store"] == 4 * 1003


def test_a_block_larger_than_the_kernel_was_compiled_for_is_a_trap(sample_code: Code) -> None:
    x = np.zeros(4, np.float32)
    with pytest.raises(Trap, match="2048 work-items"):
        Machine(sample_code("gfx1100")).launch(
            "scale_add", (1,), (2048,), [x, x, np.float32(1), np.int32(4)]
        )


def test_arguments_must_have_the_sizes_of_the_parameters(sample_code: Code) -> None:
    x = np.zeros(4, np.float32)
    machine = Machine(sample_code("gfx1100"))
    with pytest.raises(TypeError, match="8 bytes, expected 4"):
        machine.launch("scale_add", (1,), (32,), [x, x, np.float32(1), np.int64(4)])
    with pytest.raises(TypeError, match="more arguments"):
        machine.launch("scale_add", (1,), (32,), [x, x, np.float32(1), np.int32(4), x])


def test_workgroups_that_store_to_the_same_place_are_a_trap(sample_code: Code) -> None:
    y = np.zeros(64, np.uint32)
    machine = Machine(sample_code("gfx1100"))
    machine.launch("everyone_stores", (1,), (64,), [y])
    with pytest.raises(Trap, match="workgroup 1 stores to memory that workgroup 0 stored to"):
        machine.launch("everyone_stores", (2,), (64,), [y])


def test_an_unknown_instruction_is_an_error_and_not_a_guess(sample_code: Code) -> None:
    code = sample_code("gfx1100")
    broken = bytearray(code.image)
    entry = code.descriptor("philox").entry
    broken[entry : entry + 4] = (0xBF900000 | 0).to_bytes(4, "little")  # s_trap 0
    with pytest.raises(NotImplementedError, match="S_TRAP"):
        Machine(type(code)(**{**vars(code), "image": broken})).launch(
            "philox", (1,), (32,), [np.zeros(32, np.uint32), np.uint64(0), np.int32(32)]
        )


# ---- the library's own kernels -------------------------------------------------------------------


@pytest.fixture(scope="module")
def library_machine(device_tools: None) -> Machine:
    """The executor with every kernel of the library."""
    return Machine(library_code.kernel_code("gfx1100"))


@pytest.mark.parametrize("case", op_cases.QUICK if not toolchain.full_set() else op_cases.CASES)
def test_operations_agree_with_float64_and_do_no_more_work_than_recorded(
    standin_library: Callable[..., Library], library_machine: Machine, case: str
) -> None:
    counts = operations.run_as_machine_code(standin_library(32), library_machine, case)
    record = json.loads(operations.RECORD.read_text())
    if record["compiler"] != operations.compiler():
        pytest.skip(f"counts were recorded with clang {record['compiler']}")
    grown = operations.growth(counts, record["gfx1100"].get(case, {}))
    assert not grown, f"{'; '.join(grown)} (if that is meant: python -m tests.amd.operations)"


def test_growth_beyond_two_percent_is_named() -> None:
    counts = Counts()
    counts.instructions["V_ADD_F32"] = 1021
    counts.bytes["global_load"] = 102
    assert operations.growth(counts, {"instructions": 1000, "global_load": 100}) == [
        "instructions: 1021, recorded 1000"
    ]


def test_every_kernel_of_the_library_is_reached_by_a_case(
    standin_library: Callable[..., Library], library_machine: Machine
) -> None:
    reached = {"probe_step_kernel"}  # the graph's self-test: no operation launches it
    for case in op_cases.CASES:
        with op_cases.ran(standin_library(32), case) as (bench, _):
            reached |= {launch.kernel for launch in bench.launches}
    assert set(library_machine.code.kernels) == reached


def test_the_executor_knows_every_instruction_of_the_library(library_machine: Machine) -> None:
    assert library_machine.unknown_instructions() == []
