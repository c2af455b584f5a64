"""What the compiler made of each kernel: registers, LDS, scratch, occupancy, instruction mix; as a table, and as a gate.

    python -m tests.amd.static_facts LIBRARY_OR_CODE_OBJECT...

prints one table a target and exits with 1 where a kernel uses scratch (spills or indexed local arrays) without a reason in
SCRATCH_ALLOWED, or where its instructions cannot be read. Needs llvm-objdump-19; no card and no ROCm.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.amd import toolchain
from tests.amd.code_objects import CodeObject, embedded_code_objects

# Kernels that may use scratch memory, each with the reason.
SCRATCH_ALLOWED: dict[str, str] = {}


@dataclass(frozen=True)
class Chip:
    """How many waves a SIMD holds: wave size, registers in all and their granule, LDS and SIMDs that share it."""

    wave: int
    registers: int
    granule: int
    max_waves: int
    lds_bytes: int
    simds: int


# LLVM's AMDGPUBaseInfo.cpp (getVGPRAllocGranule, getTotalNumVGPRs, getMaxWavesPerEU); LDS of a workgroup processor.
_RDNA2 = Chip(32, 1024, 16, 16, 128 << 10, 4)
_RDNA3_SMALL = Chip(32, 1024, 16, 16, 128 << 10, 4)
_RDNA3 = Chip(32, 1536, 24, 16, 128 << 10, 4)
_CDNA = Chip(64, 512, 8, 8, 64 << 10, 4)
CHIPS = {
    "gfx1030": _RDNA2, "gfx1100": _RDNA3, "gfx1101": _RDNA3, "gfx1102": _RDNA3_SMALL, "gfx1151": _RDNA3,
    "gfx1200": _RDNA3, "gfx1201": _RDNA3, "gfx90a": _CDNA, "gfx942": _CDNA,
}  # fmt: skip


@dataclass(frozen=True)
class KernelFacts:
    """One kernel of one target."""

    target: str
    name: str
    vgprs: int
    agprs: int
    sgprs: int
    lds_bytes: int
    scratch_bytes: int
    vgpr_spills: int
    sgpr_spills: int
    max_threads: int
    instructions: int
    mix: Counter[str]  # mnemonics

    @property
    def occupancy(self) -> int:
        """Waves a SIMD holds, limited by vector registers and by LDS (workgroups of the largest size allowed)."""
        chip = CHIPS[self.target]
        used = -(-max(self.vgprs, 1) // chip.granule) * chip.granule
        waves = min(chip.max_waves, chip.registers // used)
        if self.lds_bytes:
            group_waves = -(-self.max_threads // chip.wave)
            waves = min(waves, max(chip.lds_bytes // self.lds_bytes * group_waves // chip.simds, 1))
        return waves

    def count(self, pattern: str) -> int:
        """Instructions whose mnemonic begins with the pattern."""
        return sum(n for name, n in self.mix.items() if re.match(pattern, name))

    @property
    def scratch_instructions(self) -> int:
        """Instructions that touch scratch memory."""
        return self.count(r"scratch_(load|store)|buffer_(load|store)")


def kernel_facts(code: CodeObject) -> list[KernelFacts]:
    """The facts of every kernel in a code object, in its order."""
    functions = _functions(code)
    facts = []
    for name, metadata in code.kernels.items():
        mnemonics = functions.get(name)
        if not mnemonics:
            raise ValueError(f"{code.target}: no instructions found for {name}")
        facts.append(
            KernelFacts(
                target=code.target,
                name=name,
                vgprs=metadata[".vgpr_count"],
                agprs=metadata.get(".agpr_count", 0),
                sgprs=metadata[".sgpr_count"],
                lds_bytes=metadata[".group_segment_fixed_size"],
                scratch_bytes=metadata[".private_segment_fixed_size"],
                vgpr_spills=metadata[".vgpr_spill_count"],
                sgpr_spills=metadata[".sgpr_spill_count"],
                max_threads=metadata[".max_flat_workgroup_size"],
                instructions=sum(mnemonics.values()),
                mix=mnemonics,
            )
        )
    return facts


def _functions(code: CodeObject) -> dict[str, Counter[str]]:
    """Mnemonics of each function, the padding behind it left out."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "code.o"
        path.write_bytes(code.data)
        text = toolchain.disassemble(path, code.machine)
    functions = {}
    for found in re.finditer(r"^[0-9a-f]+ <(\w+)>:\n(.*?)(?=^[0-9a-f]+ <|\Z)", text, re.M | re.S):
        names = [
            line.split()[0]
            for line in found[2].splitlines()
            if line.startswith("\t") and line.split()
        ]
        while names and names[-1] in ("s_code_end", "s_nop", "s_trap"):
            names.pop()
        functions[found[1]] = Counter(names)
    return functions


# Columns of the instruction mix: heading and mnemonics.
MIX = (
    ("wmma", r"v_s?wmma_"),
    ("mfma", r"v_mfma_"),
    ("dot", r"v_dot|v_dual_dot"),
    ("fma", r"v_(pk_)?(dual_)?(fma|fmac|fmaak|fmamk)_"),
    ("ld128", r"global_load_(b128|dwordx4)|flat_load_(b128|dwordx4)"),
    ("ld64", r"global_load_(b64|dwordx2|b96|dwordx3)"),
    ("ld32", r"global_load_(b32|dword)$"),
    ("ld<32", r"global_load_(u|s|i|d16|short|sbyte)"),
    ("store", r"global_store"),
    ("flat", r"flat_"),  # LDS or global, decided at run time: twice the waiting
    ("lds", r"ds_(load|read|store|write)"),
    ("xlane", r"ds_b?permute|ds_swizzle|v_permlane|v_readlane|\w+_dpp"),
    ("wait", r"s_wait"),
)


def table(facts: Sequence[KernelFacts]) -> str:
    """One line a kernel, for one target."""
    heads = [
        "vgpr",
        "agpr",
        "sgpr",
        "lds",
        "scratch",
        "spills",
        "waves",
        "code",
        *(h for h, _ in MIX),
    ]
    rows = []
    for k in facts:
        numbers = [
            k.vgprs,
            k.agprs,
            k.sgprs,
            k.lds_bytes,
            k.scratch_bytes,
            k.vgpr_spills + k.sgpr_spills,
        ]
        numbers += [k.occupancy, k.instructions, *(k.count(pattern) for _, pattern in MIX)]
        rows.append([k.name, *(str(n) if n else "." for n in numbers)])
    header = [facts[0].target if facts else "", *heads]
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = []
    for row in [header, *rows]:
        lines.append(
            "  ".join(
                [
                    row[0].ljust(widths[0]),
                    *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True)),
                ]
            )
        )
    return "\n".join(lines)


def violations(facts: Sequence[KernelFacts], allowed: dict[str, str] | None = None) -> list[str]:
    """What the gate refuses, a sentence each: scratch, and spilled vector registers, without a reason.

    Scalar registers that are kept in lanes of a vector register cost no memory and pass.
    """
    reasons = SCRATCH_ALLOWED if allowed is None else allowed
    found = []
    for k in facts:
        if k.name in reasons:
            continue
        where = f"{k.target} {k.name}"
        if k.vgpr_spills:
            found.append(f"{where}: spills {k.vgpr_spills} vector registers")
        elif k.scratch_bytes or k.scratch_instructions:
            found.append(
                f"{where}: {k.scratch_bytes} bytes of scratch, {k.scratch_instructions} accesses to it"
            )
    return found


def main(paths: Sequence[str]) -> int:
    """Prints the tables of every code object in the files; 1 where the gate refuses, 2 where there is nothing to read."""
    refused: list[str] = []
    seen = 0
    for path in paths:
        for code in embedded_code_objects(Path(path).read_bytes()):
            facts = kernel_facts(code)
            print(table(facts), end="\n\n")
            refused += violations(facts)
            seen += 1
    if not seen:
        print("no AMD code object found", file=sys.stderr)
        return 2
    for sentence in refused:
        print(f"REFUSED {sentence}")
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
