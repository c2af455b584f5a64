"""Code objects are found and read, and the gate on what the compiler made of them refuses what it should."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.amd import library_code, static_facts, toolchain
from tests.amd.code_objects import (
    CodeObject,
    NotACodeObject,
    embedded_code_objects,
    load_code_object,
    parse_code_object,
    read_msgpack,
)

Code = Callable[..., CodeObject]
SOME_TARGETS = ["gfx1030", "gfx1100", "gfx90a"]
TARGETS = list(toolchain.TARGETS) if toolchain.full_set() else SOME_TARGETS

# Needs more registers than there are when `values` is large; an array indexed at run time lies in scratch memory.
HUNGRY = """#include <hip/hip_runtime.h>
extern "C" __global__ void hungry(float *p) {
    float a[VALUES];
#pragma unroll
    for (int i = 0; i < VALUES; ++i) a[i] = p[threadIdx.x + i * 64];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < VALUES; ++i) p[threadIdx.x + (VALUES - 1 - i) * 64] = a[i] * a[(i * 7 + 3) % VALUES];
}
extern "C" __global__ void indexed(float *p, const int *index) {
    float a[64];
    for (int i = 0; i < 64; ++i) a[i] = p[threadIdx.x * 64 + i];
    for (int i = 0; i < 64; ++i) a[index[i] & 63] += a[i];
    for (int i = 0; i < 64; ++i) p[threadIdx.x * 64 + i] = a[i];
}
"""


@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_is_described_and_its_instructions_counted(
    sample_code: Code, target: str
) -> None:
    facts = {k.name: k for k in static_facts.kernel_facts(sample_code(target))}
    assert {"scale_add", "matmul_matrix", "attend"} <= set(facts)
    assert all(k.vgprs > 0 and k.instructions > 5 for k in facts.values())
    # 32 rows of A's tile and 16 of B's, 16 f16 each.
    assert facts["matmul_matrix"].lds_bytes == (32 + 16) * 16 * 2
    assert not static_facts.violations(list(facts.values()))


@pytest.mark.parametrize(
    ("target", "kernel", "pattern"),
    [
        ("gfx1030", "matvec_dot2", "v_dot2"),
        ("gfx1030", "matvec_q8", "v_dot4"),
        ("gfx1100", "matmul_matrix", "v_wmma_f32_16x16x16_f16"),
        ("gfx1100", "matvec_q8", "v_dot4_i32_iu8"),
        ("gfx90a", "matmul_matrix", "v_mfma_f32_16x16x16"),
    ],
)
def test_the_instruction_mix_shows_the_units_that_are_used(
    sample_code: Code, target: str, kernel: str, pattern: str
) -> None:
    (facts,) = (k for k in static_facts.kernel_facts(sample_code(target)) if k.name == kernel)
    assert facts.count(pattern) > 0


def test_the_table_has_a_line_for_each_kernel(sample_code: Code) -> None:
    facts = static_facts.kernel_facts(sample_code("gfx1100"))
    lines = static_facts.table(facts).splitlines()
    assert len(lines) == len(facts) + 1
    assert lines[0].split()[:4] == ["gfx1100", "vgpr", "agpr", "sgpr"]
    assert len({len(line) for line in lines}) == 1


@pytest.fixture
def hungry(tmp_path: Path, device_tools: None) -> Callable[[str, int], tuple[CodeObject, str]]:
    """hungry(target, values): that kernel's code object and the compiler's own remarks on it."""
    source = tmp_path / "hungry.hip"
    source.write_text(HUNGRY)

    def build(target: str, values: int) -> tuple[CodeObject, str]:
        out = tmp_path / "hungry.o"
        flags = [f"-DVALUES={values}", "-Rpass-analysis=kernel-resource-usage"]
        command = [*toolchain.device_command(target, source, flags), "-c", "-o", out]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return load_code_object(out), done.stderr

    return build


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("values", [20, 150])
def test_occupancy_agrees_with_the_compilers_own_figure(
    hungry: Callable[[str, int], tuple[CodeObject, str]], target: str, values: int
) -> None:
    code, remarks = hungry(target, values)
    facts = {k.name: k for k in static_facts.kernel_facts(code)}
    stated = {
        name: int(waves)
        for name, waves in re.findall(
            r"Function Name: (\w+).*?Occupancy \[waves/SIMD\]: (\d+)", remarks, re.S
        )
    }
    assert {name: k.occupancy for name, k in facts.items()} == stated


def test_scratch_is_refused_unless_a_reason_is_written_down(
    hungry: Callable[[str, int], tuple[CodeObject, str]],
) -> None:
    code, _ = hungry("gfx1030", 20)
    facts = static_facts.kernel_facts(code)
    (refused,) = static_facts.violations(facts, {})
    assert refused.startswith("gfx1030 indexed: ") and "scratch" in refused
    assert not static_facts.violations(facts, {"indexed": "the index is known at run time only"})


def test_spills_are_refused(hungry: Callable[[str, int], tuple[CodeObject, str]]) -> None:
    code, _ = hungry("gfx1030", 270)
    found = static_facts.violations(static_facts.kernel_facts(code), {"indexed": "not asked here"})
    assert len(found) == 1 and found[0].startswith("gfx1030 hungry: spills")


def test_code_objects_are_found_inside_a_library(sample_code: Code) -> None:
    first, second = sample_code("gfx1030"), sample_code("gfx90a")
    library = b"\x7fELF\x02\x01 not one" * 3 + first.data + bytes(40) + second.data + b"tail"
    found = list(embedded_code_objects(library))
    assert [code.target for code in found] == ["gfx1030", "gfx90a"]
    assert [code.data for code in found] == [first.data, second.data]


@pytest.mark.parametrize("data", [b"", b"\x7fELF", b"\x7fELF\x02\x01" + bytes(58)])
def test_other_bytes_are_no_code_object(data: bytes) -> None:
    with pytest.raises(NotACodeObject):
        parse_code_object(data)


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"\x05", 5),
        (b"\xff", -1),
        (b"\xcd\x01\x00", 256),
        (b"\xd1\xff\x00", -256),
        (b"\xa3abc", "abc"),
        (b"\xd9\x03abc", "abc"),
        (b"\x92\x01\xc3", [1, True]),
        (b"\xdc\x00\x01\xc0", [None]),
        (b"\x81\xa1k\xc2", {"k": False}),
        (b"\xde\x00\x01\xa1k\x90", {"k": []}),
    ],
)
def test_msgpack_values_are_read(data: bytes, value: object) -> None:
    assert read_msgpack(data) == value


def test_a_msgpack_type_that_metadata_does_not_use_is_refused() -> None:
    with pytest.raises(ValueError, match="0xcb"):
        read_msgpack(b"\xcb" + bytes(8))


def test_the_command_prints_tables_and_refuses_by_its_exit_code(
    sample_code: Code,
    hungry: Callable[[str, int], tuple[CodeObject, str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    good, bad, empty = tmp_path / "good", tmp_path / "bad", tmp_path / "empty"
    good.write_bytes(sample_code("gfx1030").data + sample_code("gfx1100").data)
    bad.write_bytes(hungry("gfx1030", 20)[0].data)
    empty.write_bytes(b"no code here")
    assert static_facts.main([str(good)]) == 0
    assert "gfx1100" in capsys.readouterr().out
    assert static_facts.main([str(good), str(bad)]) == 1
    assert "REFUSED gfx1030 indexed" in capsys.readouterr().out
    assert static_facts.main([str(empty)]) == 2


@pytest.mark.parametrize(
    "target", toolchain.TARGETS if toolchain.full_set() else ["gfx1030", "gfx1100"]
)
def test_no_kernel_of_the_library_uses_scratch_without_a_reason(
    device_tools: None, target: str
) -> None:
    facts = static_facts.kernel_facts(library_code.kernel_code(target))
    assert len(facts) > 50
    assert static_facts.violations(facts) == []


@pytest.mark.parametrize(
    ("target", "kernel", "pattern"),
    [
        ("gfx1100", "matmul_tiled_f16_kernel", "v_wmma_f32_16x16x16_f16"),
        ("gfx1100", "matmul_wide_bf16_kernel", "v_wmma_f32_16x16x16_bf16"),
        ("gfx1100", "matmul_vector_one_f16_kernel", r"global_load_b128"),
    ],
)
def test_the_librarys_matmuls_use_the_matrix_unit_and_wide_loads(
    device_tools: None, target: str, kernel: str, pattern: str
) -> None:
    facts = {k.name: k for k in static_facts.kernel_facts(library_code.kernel_code(target))}
    assert facts[kernel].count(pattern) > 0


def test_reasons_for_scratch_are_given_for_kernels_that_exist(device_tools: None) -> None:
    assert set(static_facts.SCRATCH_ALLOWED) <= set(library_code.kernel_code("gfx1100").kernels)
