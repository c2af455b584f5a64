"""A wave of RDNA3: its registers, the LDS it shares, and how instructions name operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.amd import rdna3_alu as alu
from tests.amd.rdna3_alu import Array, u32, u64

POISON = 0x7FC0DEAD  # a NaN
WAVE = 32
LANES = np.arange(WAVE)
LANE_BITS = u32(1) << np.arange(WAVE, dtype=u32)
MASK = 0xFFFFFFFF
VCC, NULL, M0, EXEC, SCC, LITERAL = 106, 124, 125, 126, 253, 255
FIRST_VGPR = 256
INLINE_FLOATS = {
    240: 0.5, 241: -0.5, 242: 1.0, 243: -1.0, 244: 2.0, 245: -2.0, 246: 4.0, 247: -4.0, 248: 0.15915494,
}  # fmt: skip
SHARED_BASE = 235  # operand: where the LDS appears among flat addresses
SHARED_APERTURE = 0x1_0000 << 32

Step = Callable[["Wave"], "int | None"]
Read = Callable[["Wave"], Array]


class Trap(Exception):
    """The kernel did something that a card would not forgive, or would hide."""


def signed(x: int, bits: int = 32) -> int:
    """The two's complement value of an unsigned integer."""
    return (x & ((1 << bits) - 1) ^ 1 << bits - 1) - (1 << bits - 1)


class Workgroup:
    """LDS and who used it since the last barrier."""

    MANY = 1 << 20
    ATOMIC = 1 << 21

    def __init__(self, number: int, lds_bytes: int) -> None:
        self.number = number
        self.lds = np.full((lds_bytes + 3) // 4, POISON, u32).view(np.uint8)[:lds_bytes]
        self.writer = np.full(lds_bytes, -1, np.int32)
        self.reader = np.full(lds_bytes, -1, np.int32)

    def barrier(self) -> None:
        """All waves have arrived."""
        self.writer[:] = -1
        self.reader[:] = -1

    def check(self, wave: int, at: Array, *, store: bool, atomic: bool = False) -> None:
        """Traps on a race or an access outside the LDS; notes the access."""
        if at.size == 0:
            return
        if at.min() < 0 or at.max() >= len(self.lds):
            raise Trap(f"out-of-bounds LDS access at byte {int(at.max())} of {len(self.lds)}")
        writer, reader = self.writer[at], self.reader[at]
        mine = (writer == wave) | (writer == wave + self.ATOMIC)
        if atomic:
            mine |= writer >= self.ATOMIC
        bad = (writer >= 0) & ~mine
        if store or atomic:
            bad |= (reader >= 0) & (reader != wave)
            self.writer[at] = wave + (self.ATOMIC if atomic else 0)
        else:
            self.reader[at] = np.where((reader >= 0) & (reader != wave), self.MANY, wave)
        if bad.any():
            verb = "writes" if store or atomic else "reads"
            raise Trap(
                f"LDS race: wave {wave} {verb} byte {int(at[bad][0])}, which another wave used since the last barrier"
            )


class Wave:
    """Registers and state of 32 lanes."""

    def __init__(self, group: Workgroup, number: int, lanes: int, pc: int) -> None:
        self.group, self.number, self.pc = group, number, pc
        self.vector = np.full((FIRST_VGPR + 1, WAVE), POISON, u32)
        self.scalars = [POISON] * 128
        self.scc = 0
        self.done = False
        self.scratch = np.zeros((WAVE, 0), np.uint8)
        self.scalars[NULL] = 0
        self.set_exec((1 << lanes) - 1)

    def set_exec(self, mask: int) -> None:
        """Switches lanes on and off."""
        self.scalars[EXEC] = mask & MASK
        self.active = (u32(mask & MASK) & LANE_BITS) != 0

    def write_scalar(self, at: int, value: int, words: int = 1) -> None:
        """Writes one or two scalar registers; NULL swallows."""
        if at == NULL:
            return
        if at == EXEC:
            self.set_exec(value)
            return
        self.scalars[at] = value & MASK
        if words == 2:
            self.scalars[at + 1] = value >> 32 & MASK

    def lane_mask(self, condition: Array) -> int:
        """Active lanes for which the condition holds, as a mask."""
        return int((LANE_BITS * (condition & self.active)).sum(dtype=u64))

    def lanes_of(self, mask: int) -> Array:
        """A mask as 32 booleans."""
        return (u32(mask & MASK) & LANE_BITS) != 0


def read_scalar(offset: int, words: int, literal: int | None) -> Callable[[Wave], int]:
    """A scalar operand of 32 or 64 bits."""
    if offset < 128:
        if words == 1:
            return lambda w: w.scalars[offset]
        return lambda w: w.scalars[offset] | w.scalars[offset + 1] << 32
    if offset == SCC:
        return lambda w: w.scc
    if offset == SHARED_BASE and words == 2:
        return lambda w: SHARED_APERTURE
    value = constant_bits("U" if words == 2 else "u", offset, literal)
    return lambda w: value


def constant_bits(letter: str, offset: int, literal: int | None) -> int:
    """The bits that an inline constant or a literal has for an operand of a type."""
    bits = alu.BITS[letter]
    if offset == LITERAL:
        if literal is None:
            raise NotImplementedError("an operand says literal, the instruction has none")
        if letter == "d":
            return literal << 32
        return (signed(literal) if letter == "I" else literal) & ((1 << bits) - 1)
    if 128 <= offset <= 192:
        return offset - 128
    if 193 <= offset <= 208:
        return (192 - offset) & ((1 << bits) - 1)
    if offset in INLINE_FLOATS:
        kind = {16: np.float16, 32: np.float32, 64: np.float64}[bits]
        return int.from_bytes(kind(INLINE_FLOATS[offset]).tobytes(), "little")
    raise NotImplementedError(f"operand {offset}")


def register(operand: Any) -> int:
    """Number of a vector register operand."""
    if operand.offset < FIRST_VGPR:
        raise NotImplementedError(f"operand {operand.offset} where a vector register is expected")
    return int(operand.offset) - FIRST_VGPR


def read_vector(operand: Any, letter: str, literal: int | None, *, high: bool = False) -> Read:
    """A vector operand as an array of the type's 32 elements; `high`: the upper half of a register."""
    kind, bits, offset = alu.TYPES[letter], alu.BITS[letter], operand.offset
    if offset >= FIRST_VGPR:
        n = offset - FIRST_VGPR
        if bits == 64:
            return lambda w: (
                w.vector[n].astype(u64) | w.vector[n + 1].astype(u64) << u64(32)
            ).view(kind)
        if bits == 32:
            return lambda w: w.vector[n].view(kind)
        return lambda w: (w.vector[n] >> u32(16 * high)).astype(alu.u16).view(kind)
    if offset < 128 or offset == SCC:
        read = read_scalar(offset, 2 if bits == 64 else 1, None)
        unsigned = {16: alu.u16, 32: u32, 64: u64}[bits]
        mask = (1 << bits) - 1
        return lambda w: np.full(WAVE, read(w) >> 16 * high & mask, unsigned).view(kind)
    value = constant_bits(letter, offset, literal)
    constant = np.full(WAVE, value >> 16 * high, {16: alu.u16, 32: u32, 64: u64}[bits]).view(kind)
    return lambda w: constant


def with_sign(read: Read, negate: bool, absolute: bool) -> Read:
    """An operand with its neg and abs modifiers."""
    if absolute and negate:
        return lambda w: -np.abs(read(w))
    if absolute:
        return lambda w: np.abs(read(w))
    return (lambda w: -read(w)) if negate else read


def write_vector(wave: Wave, n: int, value: Array, letter: str, *, high: bool = False) -> None:
    """Writes the active lanes of a register, of two for 64 bits, or of half a register."""
    bits = alu.BITS[letter]
    if bits == 64:
        whole = value.view(u64)
        np.copyto(wave.vector[n], (whole & u64(MASK)).astype(u32), where=wave.active)
        np.copyto(wave.vector[n + 1], (whole >> u64(32)).astype(u32), where=wave.active)
        return
    if bits == 16:
        half = value.view(alu.u16).astype(u32) << u32(16 * high)
        value = wave.vector[n] & u32(MASK >> 16 if high else MASK >> 16 << 16) | half
    np.copyto(wave.vector[n], value.view(u32), where=wave.active)


def nothing(wave: Wave) -> None:
    """Waits, hints, cache invalidations."""
