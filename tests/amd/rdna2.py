"""Executes RDNA2 (gfx1030) code generation: compiled for gfx1030 to assembly text, assembled as gfx1100.

The two instruction sets share most of their assembly language; the assembler itself knows the old spellings. What RDNA3
lacks is rewritten here, instruction by instruction. Then the kernel descriptors get RDNA2's layout of user registers back:
the executor reads the target's name in the metadata (still gfx1030) and hands work-item ids over in registers of their own.

Counts of rewritten instructions are those of the replacement, so compare counts only with counts of the same way.
"""

from __future__ import annotations

import re
import struct
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.amd import toolchain
from tests.amd.code_objects import CodeObject, load_code_object, parse_code_object

# Directives of gfx1030's kernel descriptor that gfx1100's assembler refuses.
_FOREIGN_DIRECTIVES = (
    "user_sgpr_private_segment_buffer",
    "user_sgpr_flat_scratch_init",
    "system_sgpr_private_segment_wavefront_offset",
    "reserve_xnack_mask",
    "reserve_flat_scratch",
    "shared_vgpr_count",
)
_LAST_REGISTER = 256

_DIRECTIVE = re.compile(r"\s*\.amdhsa_(\w+) (\S+)")
_MAD_64 = re.compile(r"\s+(v_mad_[ui]64_[ui]32) v\[(\d+):(\d+)\], (.*)")
_DOT4 = re.compile(r"\s+v_dot4c_i32_i8(?:_e32)? (v\d+), ([^,]+), ([^,\s]+)")
_SDWA = re.compile(r"\s+(\w+)_sdwa (.*)")
_SELECT = re.compile(r"(dst_sel|dst_unused|src0_sel|src1_sel):(\w+)")
# Of a selected part of a register: the first bit and the width.
_PARTS = {
    "BYTE_0": (0, 8), "BYTE_1": (8, 8), "BYTE_2": (16, 8), "BYTE_3": (24, 8), "WORD_0": (0, 16), "WORD_1": (16, 16),
}  # fmt: skip


def rewrite(assembly: str) -> tuple[str, dict[str, dict[str, str]]]:
    """gfx1030 assembly to gfx1100 assembly, and each kernel's descriptor directives as they were.

    Where a replacement needs more registers than the kernel leaves, s_trap stands instead: the executor refuses it if it
    gets there. NotImplementedError for an instruction that RDNA3 lacks and this module does not know.
    """
    lines: list[str] = []
    descriptors = _descriptors(assembly)
    free = Free(0)
    for line in assembly.splitlines():
        if "amdhsa.target" not in line:
            line = line.replace("gfx1030", "gfx1100")
        if found := re.match(r"(\w+):", line):
            if found[1] in descriptors:
                free = Free(int(descriptors[found[1]]["next_free_vgpr"]))
        elif found := _DIRECTIVE.match(line):
            if found[1] in _FOREIGN_DIRECTIVES:
                continue
            if found[1] == "next_free_vgpr":
                line = f"\t.amdhsa_next_free_vgpr {_LAST_REGISTER}"
        try:
            lines.extend(_rewrite_instruction(line, free))
        except NoRegisters:
            lines.append("\ts_trap 2")
    return "\n".join(lines) + "\n", descriptors


def _descriptors(assembly: str) -> dict[str, dict[str, str]]:
    descriptors: dict[str, dict[str, str]] = {}
    current: dict[str, str] = {}
    for line in assembly.splitlines():
        if found := re.match(r"\s*\.amdhsa_kernel (\S+)", line):
            current = descriptors[found[1]] = {}
        elif found := _DIRECTIVE.match(line):
            current[found[1]] = found[2]
    return descriptors


class NoRegisters(Exception):
    """A replacement finds no register that the kernel does not use."""


@dataclass(frozen=True)
class Free:
    """The vector registers that a kernel leaves: all from `first` on."""

    first: int

    def take(self, count: int) -> list[int]:
        """The last `count` registers, the first of them even."""
        at = (_LAST_REGISTER - count) & ~1
        if at < self.first:
            raise NoRegisters
        return list(range(at, at + count))


def _registers(operand: str) -> set[int]:
    """Vector registers that an operand names."""
    if found := re.search(r"\bv(\d+)\b", operand):
        return {int(found[1])}
    if found := re.search(r"\bv\[(\d+):(\d+)\]", operand):
        return set(range(int(found[1]), int(found[2]) + 1))
    return set()


def _rewrite_instruction(line: str, free: Free) -> list[str]:
    if found := _MAD_64.match(line):  # RDNA3 forbids a destination that overlaps a source
        operation, low, high, rest = found.groups()
        if not {int(low), int(high)} & set().union(*map(_registers, rest.split(","))):
            return [line]
        result = free.take(2)
        return [
            f"\t{operation} v[{result[0]}:{result[1]}], {rest}",
            f"\tv_mov_b32_e32 v{low}, v{result[0]}",
            f"\tv_mov_b32_e32 v{high}, v{result[1]}",
        ]
    if found := _DOT4.match(line):
        destination, first, second = found.groups()
        return [f"\tv_dot4_i32_iu8 {destination}, {first}, {second}, {destination} neg_lo:[1,1,0]"]
    if found := re.match(r"\s+v_dot4_i32_i8 (.*)", line):
        return [f"\tv_dot4_i32_iu8 {found[1]} neg_lo:[1,1,0]"]
    if found := re.match(r"\s+s_memtime s\[(\d+):", line):
        return [f"\ts_mov_b64 s[{found[1]}:{int(found[1]) + 1}], 0"]
    if found := re.match(
        r"\s+(v_\w*16\w*)_e32 (.*)", line
    ):  # RDNA3's short form reaches 128 registers for 16-bit values
        return [f"\t{found[1]} {found[2]}"]
    if found := _SDWA.match(line):
        return _rewrite_sdwa(found[1], found[2], free)
    return [line]


def _rewrite_sdwa(operation: str, rest: str, free: Free) -> list[str]:
    """Sub-dword addressing: take the parts out, do the plain instruction, put the part in."""
    selects = dict(_SELECT.findall(rest))
    operands = [
        part.strip()
        for part in re.sub(r"\s+(dst_sel|dst_unused|src\d_sel):\w+", "", rest).split(",")
    ]
    destination, sources = operands[0], operands[1:]
    whole = operation.startswith("v_cmp") or selects.get("dst_sel", "DWORD") == "DWORD"
    partial = [i for i in range(len(sources)) if selects.get(f"src{i}_sel", "DWORD") != "DWORD"]
    others = [source for i, source in enumerate(sources) if i not in partial[:1]]
    if (
        whole
        and len(partial) == 1
        and _registers(destination)
        and not (_registers(destination) & set().union(*map(_registers, others)))
    ):
        extracted = [destination]  # nothing else reads it: the part can lie there
    else:
        extracted = [f"v{n}" for n in free.take(len(partial))]
    lines = []
    for i, plain in zip(partial, extracted, strict=True):
        taken = re.fullmatch(r"(-)?(\|)?(sext\()?(v\d+|s\d+|[\w.-]+)\)?\|?", sources[i])
        if not taken:
            raise NotImplementedError(f"SDWA operand {sources[i]}")
        negative, absolute, extended, register = taken.groups()
        first, width = _PARTS[selects[f"src{i}_sel"]]
        extract = "v_bfe_i32" if extended else "v_bfe_u32"
        lines.append(f"\t{extract} {plain}, {register}, {first}, {width}")
        sources[i] = f"{'-' if negative else ''}{'|' + plain + '|' if absolute else plain}"
    if whole:
        return [*lines, f"\t{operation} {', '.join([destination, *sources])}"]
    first, width = _PARTS[selects["dst_sel"]]
    mask, result = f"v{free.take(4)[0]}", f"v{free.take(4)[1]}"
    lines.append(f"\t{operation} {', '.join([result, *sources])}")
    bits = ((1 << width) - 1) << first
    if first:
        lines.append(f"\tv_lshlrev_b32_e32 {result}, {first}, {result}")
    unused = selects.get("dst_unused", "UNUSED_PAD")
    if unused == "UNUSED_PRESERVE":
        lines.append(f"\tv_mov_b32_e32 {mask}, {bits:#x}")
        lines.append(f"\tv_bfi_b32 {destination}, {mask}, {result}, {destination}")
    elif unused == "UNUSED_PAD":
        lines.append(f"\tv_and_b32_e32 {destination}, {bits:#x}, {result}")
    else:
        raise NotImplementedError(f"SDWA {unused}")
    return lines


def compile_rdna2(source: Path, out: Path, flags: Iterable[str] = ()) -> CodeObject:
    """Compiles one .hip file for gfx1030 and returns a code object that the gfx1100 executor runs.

    out: a path for the object; its assembly is left beside it. RuntimeError with the assembler's words where a rewrite is
    missing.
    """
    command = toolchain.device_command("gfx1030", source, flags)
    assembly = subprocess.run([*command, "-S", "-o", "-"], capture_output=True, text=True)
    if assembly.returncode:
        raise RuntimeError(assembly.stderr[:4000])
    text, descriptors = rewrite(assembly.stdout)
    listing = out.with_suffix(".s")
    listing.write_text(text)
    toolchain.assemble(listing, "gfx1100", out)
    return _restore_descriptors(load_code_object(out), descriptors)


def _restore_descriptors(code: CodeObject, descriptors: dict[str, dict[str, str]]) -> CodeObject:
    """Gives the kernel descriptors RDNA2's user registers: two pointers that RDNA3's assembler cannot say."""
    data = bytearray(code.data)
    for kernel, directives in descriptors.items():
        address = code.symbols[f"{kernel}.kd"]
        (section,) = (
            s for s in code.sections if s.address and s.address <= address < s.address + s.size
        )
        at = section.offset + address - section.address
        resource2, properties = struct.unpack_from("<IH", data, at + 52)
        buffer = int(directives.get("user_sgpr_private_segment_buffer", "0"))
        flat = int(directives.get("user_sgpr_flat_scratch_init", "0"))
        count = (resource2 >> 1 & 31) + 4 * buffer + 2 * flat
        if "user_sgpr_count" in directives:
            count = int(directives["user_sgpr_count"])
        struct.pack_into("<I", data, at + 52, resource2 & ~(31 << 1) | count << 1)
        struct.pack_into("<H", data, at + 56, properties | buffer | flat << 5)
    return parse_code_object(bytes(data))
