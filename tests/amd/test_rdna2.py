"""RDNA2's code generation, executed: the same values, and the rewrites that make it run are the right ones."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

pytest.importorskip(
    "tinygrad.renderer.amd", reason="tinygrad (the instruction decoder) is not installed"
)

from pyengine.native import Library  # noqa: E402
from tests.amd import library_code, op_cases, operations, rdna2, sample_cases, toolchain  # noqa: E402
from tests.amd.code_objects import CodeObject  # noqa: E402
from tests.amd.rdna3 import Machine, Trap  # noqa: E402

Code = Callable[..., CodeObject]


@pytest.mark.parametrize("kernel", sample_cases.CASES)
def test_kernels_agree_with_float64(sample_code_rdna2: Code, kernel: str) -> None:
    case = sample_cases.make(kernel, 32)
    case.run(Machine(sample_code_rdna2()))
    assert case.holds(), f"{case.error():.2g}"


def test_it_is_rdna2_code_on_an_rdna3_machine(sample_code_rdna2: Code) -> None:
    code = sample_code_rdna2()
    assert (code.target, code.machine) == ("gfx1030", "gfx1100")


@pytest.mark.parametrize(
    ("bug", "finding"), [("missing_barrier", "LDS race"), ("wrong_bound", "out-of-bounds")]
)
def test_seeded_mistakes_are_found(sample_code_rdna2: Code, bug: str, finding: str) -> None:
    number, kernel = sample_cases.BUGS[bug]
    with pytest.raises(Trap, match=finding):
        sample_cases.make(kernel, 32).run(Machine(sample_code_rdna2(number)))


def _instructions(line: str) -> list[str]:
    text, _ = rdna2.rewrite(line)
    return [part.strip() for part in text.splitlines()]


def test_a_wide_multiply_add_goes_through_registers_that_no_source_uses() -> None:
    assert _instructions("\tv_mad_u64_u32 v[0:1], null, s4, v0, v[2:3]") == [
        "v_mad_u64_u32 v[254:255], null, s4, v0, v[2:3]",
        "v_mov_b32_e32 v0, v254",
        "v_mov_b32_e32 v1, v255",
    ]


def test_a_wide_multiply_add_that_overlaps_nothing_stays_as_it_is() -> None:
    line = "v_mad_u64_u32 v[8:9], null, s4, v0, v[2:3]"
    assert _instructions("\t" + line) == [line]


def test_a_replacement_that_would_overwrite_the_kernels_registers_becomes_a_trap() -> None:
    kernel = """
full:
\tv_mad_u64_u32 v[0:1], null, s4, v0, v[2:3]
\t.amdhsa_kernel full
\t.amdhsa_next_free_vgpr 255
"""
    assert _instructions(kernel)[2] == "s_trap 2"


def test_the_upper_half_of_a_source_is_taken_out_first() -> None:
    line = "\tv_cvt_f32_f16_sdwa v5, v4 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1"
    assert _instructions(line) == ["v_bfe_u32 v5, v4, 16, 16", "v_cvt_f32_f16 v5, v5"]


def test_a_part_of_a_destination_keeps_the_rest_where_it_says_so() -> None:
    line = (
        "\tv_or_b32_sdwa v1, v2, v3 dst_sel:BYTE_1 dst_unused:UNUSED_PRESERVE "
        "src0_sel:DWORD src1_sel:DWORD"
    )
    assert _instructions(line) == [
        "v_or_b32 v253, v2, v3",
        "v_lshlrev_b32_e32 v253, 8, v253",
        "v_mov_b32_e32 v252, 0xff00",
        "v_bfi_b32 v1, v252, v253, v1",
    ]


def test_a_byte_dot_product_is_told_that_both_sides_are_signed() -> None:
    assert _instructions("\tv_dot4c_i32_i8 v5, v1, v2") == [
        "v_dot4_i32_iu8 v5, v1, v2, v5 neg_lo:[1,1,0]"
    ]


@pytest.fixture(scope="module")
def library_machine(device_tools: None) -> Machine:
    """The executor with every kernel of the library, as compiled for gfx1030."""
    return Machine(library_code.kernel_code_rdna2())


@pytest.mark.parametrize(
    "case", op_cases.QUICK_RDNA2 if not toolchain.full_set() else op_cases.CASES
)
def test_operations_agree_with_float64_and_do_no_more_work_than_recorded(
    standin_library: Callable[..., Library], library_machine: Machine, case: str
) -> None:
    counts = operations.run_as_machine_code(standin_library(32), library_machine, case)
    record = json.loads(operations.RECORD.read_text())
    if record["compiler"] != operations.compiler():
        pytest.skip(f"counts were recorded with clang {record['compiler']}")
    grown = operations.growth(counts, record["gfx1030"].get(case, {}))
    assert not grown, f"{'; '.join(grown)} (if that is meant: python -m tests.amd.operations)"
