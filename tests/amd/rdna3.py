"""Executes gfx1100 code objects in numpy, without a card: values, bounds, races, and how much was asked for.

Each instruction is decoded once (the decoder is tinygrad's, from PyPI) into a function of a wave, whose 32 lanes are one
numpy row. Workgroups run one after another, the waves of a workgroup in turns from barrier to barrier.

Found, each a Trap with the place: accesses outside every buffer, the LDS or the scratch; two waves that use the same LDS
byte between two barriers, one of them writing; two workgroups that store to, or store and read, the same global byte
without atomics; matrix instructions with lanes switched off or operands that are not repeated as RDNA3 wants them; waves
that never end. Registers, LDS and scratch start poisoned.

Not modelled: s_waitcnt and memory ordering, wave64, rounding modes other than to nearest, flushed denormals, time. An
instruction that is not known here raises NotImplementedError.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tinygrad.renderer.amd import decode_inst

from tests.amd import rdna3_alu as alu
from tests.amd import rdna3_scalar as scalar
from tests.amd.code_objects import CodeObject, KernelDescriptor
from tests.amd.rdna3_alu import Array, f32, f64, i64, u32, u64

POISON = 0x7FC0DEAD  # a NaN
WAVE = 32
LANES = np.arange(WAVE)
LANE_BITS = u32(1) << np.arange(WAVE, dtype=u32)
MASK = scalar.MASK
VCC, NULL, M0, EXEC, SCC, LITERAL = 106, 124, 125, 126, 253, 255
FIRST_VGPR = 256
INLINE_FLOATS = {
    240: 0.5, 241: -0.5, 242: 1.0, 243: -1.0, 244: 2.0, 245: -2.0, 246: 4.0, 247: -4.0, 248: 0.15915494,
}  # fmt: skip
BASE_ADDRESS = 0x5_0000_0000  # above 4 GiB: a 32-bit address is out of bounds
SHARED_BASE = 235  # operand: where the LDS appears among flat addresses
SHARED_APERTURE = 0x1_0000 << 32
STEP_LIMIT = 20_000_000
CODE_END = 0xBF9F0000  # s_code_end, which follows the last kernel

Step = Callable[["Wave"], "int | None"]
Read = Callable[["Wave"], Array]


class Trap(Exception):
    """The kernel did something that a card would not forgive, or would hide."""


@dataclass
class Counts:
    """What a launch asked of the machine; the same on every run."""

    instructions: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)  # global_load, global_store, lds_load, ...

    @property
    def total(self) -> int:
        """Instructions executed, summed over waves."""
        return sum(self.instructions.values())


@dataclass(frozen=True)
class Pointer:
    """A kernel argument that points into an array, `offset` bytes from its start."""

    array: Array
    offset: int = 0


class Memory:
    """Global memory: one array of bytes with gaps between the buffers."""

    def __init__(self) -> None:
        self.size = 1 << 12
        self.parts: list[tuple[int, bytes]] = []

    def add(self, data: bytes) -> int:
        """Places bytes at the next free 4 KiB and returns their offset."""
        at = self.size
        self.parts.append((at, data))
        self.size = (at + len(data) + (1 << 13) - 1) >> 12 << 12  # at least a page's gap
        return at

    def seal(self) -> None:
        """Lays everything out; nothing can be added after it."""
        self.bytes = np.zeros(self.size, np.uint8)
        self.valid = np.zeros(self.size, bool)
        self.writer = np.full(self.size, -1, np.int32)  # workgroup that stored there; -2: atomics
        for at, data in self.parts:
            self.bytes[at : at + len(data)] = np.frombuffer(data, np.uint8)
            self.valid[at : at + len(data)] = True


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
    value = _constant_bits("U" if words == 2 else "u", offset, literal)
    return lambda w: value


def _constant_bits(letter: str, offset: int, literal: int | None) -> int:
    """The bits that an inline constant or a literal has for an operand of a type."""
    bits = alu.BITS[letter]
    if offset == LITERAL:
        if literal is None:
            raise NotImplementedError("an operand says literal, the instruction has none")
        if letter == "d":
            return literal << 32
        return (scalar.signed(literal) if letter == "I" else literal) & ((1 << bits) - 1)
    if 128 <= offset <= 192:
        return offset - 128
    if 193 <= offset <= 208:
        return (192 - offset) & ((1 << bits) - 1)
    if offset in INLINE_FLOATS:
        kind = {16: np.float16, 32: np.float32, 64: np.float64}[bits]
        return int.from_bytes(kind(INLINE_FLOATS[offset]).tobytes(), "little")
    raise NotImplementedError(f"operand {offset}")


def _register(operand: Any) -> int:
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
            return lambda w: (w.vector[n].astype(u64) | w.vector[n + 1].astype(u64) << u64(32)).view(kind)
        if bits == 32:
            return lambda w: w.vector[n].view(kind)
        return lambda w: (w.vector[n] >> u32(16 * high)).astype(alu.u16).view(kind)
    if offset < 128 or offset == SCC:
        read = read_scalar(offset, 2 if bits == 64 else 1, None)
        unsigned = {16: alu.u16, 32: u32, 64: u64}[bits]
        mask = (1 << bits) - 1
        return lambda w: np.full(WAVE, read(w) >> 16 * high & mask, unsigned).view(kind)
    value = _constant_bits(letter, offset, literal)
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


class Machine:
    """Decodes and runs one code object."""

    def __init__(self, code: CodeObject) -> None:
        if code.machine not in ("gfx1100", "gfx1101", "gfx1102", "gfx1151"):
            raise NotImplementedError(f"code for {code.machine}")
        self.code = code
        self.steps: dict[int, tuple[Step, str, int]] = {}

    # ---- launching -------------------------------------------------------------------------------------------------

    def launch(
        self,
        kernel: str,
        grid: Sequence[int],
        block: Sequence[int],
        arguments: Sequence[Any],
        dynamic_lds: int = 0,
        groups: Sequence[int] | None = None,
    ) -> Counts:
        """Runs a kernel over grid workgroups of block work-items.

        groups: numbers of the workgroups to run, x fastest; None: all.

        arguments: for pointers numpy arrays (device memory with exactly their bytes, copied back after the run), Pointers
        into them, or None for null; for the rest numpy scalars of the parameters' exact types, or bytes. Raises Trap and
        NotImplementedError.
        """
        grid, block = [*grid, 1, 1][:3], [*block, 1, 1][:3]
        metadata = self.code.kernels[kernel]
        descriptor = self.code.descriptor(kernel)
        lanes = block[0] * block[1] * block[2]
        if lanes > metadata[".max_flat_workgroup_size"]:
            raise Trap(f"{lanes} work-items, the kernel was compiled for {metadata['.max_flat_workgroup_size']}")
        memory, buffers, kernarg, dispatch = self._place(metadata, descriptor, grid, block, arguments)
        self.memory = memory
        self.counts = Counts()
        self.executed: Counter[int] = Counter()
        self.scratch_bytes = descriptor.scratch_bytes
        with np.errstate(all="ignore"):
            for number in range(grid[0] * grid[1] * grid[2]) if groups is None else groups:
                ids = number % grid[0], number // grid[0] % grid[1], number // (grid[0] * grid[1])
                group = Workgroup(number, descriptor.lds_bytes + dynamic_lds)
                self._run_group(group, descriptor, block, ids, kernarg, dispatch)
        for array, at in buffers:
            array[...] = memory.bytes[at : at + array.nbytes].view(array.dtype).reshape(array.shape)
        for pc, count in self.executed.items():
            self.counts.instructions[self.steps[pc][1]] += count
        return self.counts

    def _place(
        self,
        metadata: dict[str, Any],
        descriptor: KernelDescriptor,
        grid: Sequence[int],
        block: Sequence[int],
        arguments: Sequence[Any],
    ) -> tuple[Memory, list[tuple[Array, int]], int, int]:
        memory = Memory()
        self.image_base = BASE_ADDRESS + memory.add(bytes(self.code.image))
        hidden = {f"hidden_block_count_{a}": n for a, n in zip("xyz", grid, strict=True)}
        hidden |= {f"hidden_group_size_{a}": n for a, n in zip("xyz", block, strict=True)}
        hidden |= {f"hidden_remainder_{a}": 0 for a in "xyz"} | {"hidden_grid_dims": 3}
        packed = bytearray(descriptor.kernarg_bytes)
        buffers: list[tuple[Array, int]] = []
        placed: dict[int, int] = {}
        given = iter(arguments)
        for argument in metadata.get(".args", []):
            kind, at, size = argument[".value_kind"], argument[".offset"], argument[".size"]
            if kind == "global_buffer":
                pointer = next(given)
                address = 0
                if pointer is not None:
                    if not isinstance(pointer, Pointer):
                        pointer = Pointer(pointer)
                    array = pointer.array
                    if id(array) not in placed:  # the same array twice: the same memory
                        placed[id(array)] = memory.add(array.tobytes())
                        buffers.append((array, placed[id(array)]))
                    address = BASE_ADDRESS + placed[id(array)] + pointer.offset
                packed[at : at + 8] = struct.pack("<Q", address)
            elif kind == "by_value":
                value = next(given)
                value = value if isinstance(value, bytes) else value.tobytes()
                if len(value) != size:
                    raise TypeError(f"argument {argument.get('.name', at)}: {len(value)} bytes, expected {size}")
                packed[at : at + size] = value
            elif kind in hidden:
                packed[at : at + size] = hidden[kind].to_bytes(size, "little")
            # Other hidden arguments (printf, queues) stay zero.
        if next(given, None) is not None:
            raise TypeError("more arguments than the kernel takes")
        padding = -len(packed) % 64  # the compiler may widen the load of the last arguments
        kernarg = BASE_ADDRESS + memory.add(bytes(packed) + bytes(padding))
        sizes = [g * b for g, b in zip(grid, block, strict=True)]
        dispatch = BASE_ADDRESS + memory.add(struct.pack("<6H3I", 0, 3, *block, 0, *sizes) + bytes(40))
        memory.seal()
        return memory, buffers, kernarg, dispatch

    def _run_group(
        self,
        group: Workgroup,
        descriptor: KernelDescriptor,
        block: Sequence[int],
        ids: Sequence[int],
        kernarg: int,
        dispatch: int,
    ) -> None:
        lanes = block[0] * block[1] * block[2]
        waves = []
        for first in range(0, lanes, WAVE):
            wave = Wave(group, first // WAVE, min(WAVE, lanes - first), descriptor.entry)
            wave.scratch = np.full((WAVE, (self.scratch_bytes + 3) // 4), POISON, u32).view(np.uint8)
            at = 0
            # In this order, each where its bit is set: private segment buffer, dispatch, queue, kernel arguments,
            # dispatch id, flat scratch.
            pointers = (0, 0), (dispatch, 0), (0, 0), (kernarg, 0), (0, 0), (0, 0)
            for bit, (low, high) in enumerate(pointers):
                if descriptor.properties >> bit & 1:
                    words = 4 if bit == 0 else 2
                    wave.scalars[at : at + words] = [low & MASK, low >> 32, high, high][:words]
                    at += words
            at = descriptor.user_sgprs
            for axis in range(3):
                if descriptor.resource2 >> 7 + axis & 1:
                    wave.scalars[at] = ids[axis]
                    at += 1
            item = np.arange(first, first + WAVE, dtype=u32)
            x, y, z = item % u32(block[0]), item // u32(block[0]) % u32(block[1]), item // u32(block[0] * block[1])
            if self.code.target.startswith("gfx10"):  # RDNA2's code expects them apart
                wave.vector[0], wave.vector[1], wave.vector[2] = x, y, z
            else:
                wave.vector[0] = z << u32(20) | y << u32(10) | x
            waves.append(wave)
        while waves:
            for wave in waves:
                self._run_to_barrier(wave)
            waves = [wave for wave in waves if not wave.done]
            group.barrier()

    def _run_to_barrier(self, wave: Wave) -> None:
        executed = self.executed
        for _ in range(STEP_LIMIT):
            pc = wave.pc
            decoded = self.steps.get(pc)
            if decoded is None:
                decoded = self.steps[pc] = self._decode(pc)
            step, name, following = decoded
            executed[pc] += 1
            wave.pc = following
            if name == "S_BARRIER":
                return
            try:
                jump = step(wave)
            except Trap as trap:
                raise Trap(f"{trap} ({name} at {pc:#x}, workgroup {wave.group.number}, wave {wave.number})") from None
            if jump is not None:
                wave.pc = jump
            if wave.done:
                return
        raise Trap(f"{STEP_LIMIT} instructions without a barrier or an end (wave {wave.number})")

    def unknown_instructions(self) -> list[str]:
        """Instructions of all kernels that could not be executed, whether or not a launch gets to them."""
        unknown = set()
        entries = sorted((self.code.descriptor(kernel).entry, kernel) for kernel in self.code.kernels)
        ends = [entry for entry, _ in entries[1:]] + [len(self.code.image)]
        for (pc, kernel), end in zip(entries, ends, strict=True):
            while pc < end and int.from_bytes(self.code.image[pc : pc + 4], "little") != CODE_END:
                try:
                    _, _, pc = self._decode(pc)
                except NotImplementedError as reason:
                    unknown.add(f"{kernel}: {reason}")
                    break
        return sorted(unknown)

    # ---- decoding --------------------------------------------------------------------------------------------------

    def _decode(self, pc: int) -> tuple[Step, str, int]:
        word = int.from_bytes(self.code.image[pc : pc + 4], "little")
        if word >> 26 == 0b111000:  # buffer instructions: only the caches' invalidations are ours
            if word >> 18 & 0xFF in (43, 44):
                return _nothing, "BUFFER_GL_INV", pc + 8
            raise NotImplementedError(f"buffer instruction {word >> 18 & 0xFF} at {pc:#x}")
        inst: Any = decode_inst(bytes(self.code.image[pc : pc + 16]), "rdna3")
        form = type(inst).__name__.replace("_LIT", "")
        following = pc + inst.size()
        if form == "VOPD":
            name = f"{inst.opx.name}::{inst.opy.name}"
        else:
            name = inst.op.name.removesuffix("_E32").removesuffix("_E64")
        try:
            return self._step(inst, form, name, following), name, following
        except (NotImplementedError, KeyError) as reason:
            raise NotImplementedError(f"{name} at {pc:#x}: {reason}") from reason

    def _step(self, inst: Any, form: str, name: str, following: int) -> Step:
        if form.endswith("DPP8"):
            raise NotImplementedError("DPP8")
        if form == "VOPD":
            return _decode_dual(inst)
        if form == "SOPP":
            return _decode_program(inst, name, following)
        if form == "SMEM":
            return self._decode_scalar_load(inst, name)
        if form in ("SOP1", "SOP2", "SOPC", "SOPK"):
            return self._decode_scalar(inst, form, name, following)
        if form == "GLOBAL":
            return self._decode_global(inst, name)
        if form == "FLAT":
            return self._decode_flat(inst, name)
        if form == "SCRATCH":
            return _decode_scratch(inst, name)
        if form == "DS":
            return self._decode_lds(inst, name)
        if form.startswith("V"):
            return _decode_vector(inst, form, name)
        raise NotImplementedError(form)

    # ---- scalar instructions that need the machine --------------------------------------------------------------------

    def _decode_scalar(self, inst: Any, form: str, name: str, following: int) -> Step:
        if name == "S_GETPC_B64":
            at = inst.sdst.offset
            return lambda w: w.write_scalar(at, self.image_base + following, 2)
        if name in ("S_SETPC_B64", "S_SWAPPC_B64"):
            target, back = read_scalar(inst.ssrc0.offset, 2, None), inst.sdst.offset

            def jump(w: Wave) -> int:
                to = target(w) - self.image_base
                if name == "S_SWAPPC_B64":
                    w.write_scalar(back, self.image_base + following, 2)
                return to

            return jump
        return _decode_scalar(inst, form, name)

    def _decode_scalar_load(self, inst: Any, name: str) -> Step:
        if name in ("S_DCACHE_INV", "S_GL1_INV"):
            return _nothing
        if not name.startswith("S_LOAD_B"):
            raise NotImplementedError(name)
        words = int(name.removeprefix("S_LOAD_B")) // 32
        base = read_scalar(inst.sbase.offset, 2, None)
        extra = read_scalar(inst.soffset.offset, 1, None)
        offset, at = scalar.signed(inst.offset, 21), inst.sdata.offset

        def load(w: Wave) -> None:
            address = base(w) + offset + extra(w) - BASE_ADDRESS
            memory = self.memory
            if address < 0 or address & 3 or not memory.valid[address : address + 4 * words].all() or (
                address + 4 * words > memory.size
            ):
                raise Trap(f"out-of-bounds scalar load of {4 * words} bytes")
            self._check_owner(w, np.arange(address, address + 4 * words), store=False)
            self.counts.bytes["scalar_load"] += 4 * words
            values = memory.bytes[address : address + 4 * words].view(u32)
            w.scalars[at : at + words] = [int(v) for v in values]

        return load

    # ---- global memory ---------------------------------------------------------------------------------------------

    def _check_owner(self, wave: Wave, at: Array, *, store: bool, atomic: bool = False) -> None:
        """Traps where another workgroup stored plainly to the same bytes in this launch."""
        writer, number = self.memory.writer[at], wave.group.number
        bad = (writer >= 0) & (writer != number)
        if store:
            bad |= writer == -2
        if bad.any():
            verb = "stores to" if store else "reads"
            raise Trap(f"workgroup {number} {verb} memory that workgroup {int(writer[bad][0])} stored to")
        if store or atomic:
            self.memory.writer[at] = -2 if atomic else number

    def _global_bytes(self, wave: Wave, address: Array, count: int, what: str) -> Array:
        """Indices (active lanes, count) of the bytes at each active lane's address."""
        first = (address - u64(BASE_ADDRESS)).astype(i64)[wave.active]
        at = first[:, None] + np.arange(count)
        inside = (at >= 0) & (at < self.memory.size)
        if not inside.all() or not self.memory.valid[at].all():
            ok = inside & self.memory.valid[np.clip(at, 0, self.memory.size - 1)]
            lane = int(LANES[wave.active][~ok.all(axis=1)][0])
            raise Trap(f"out-of-bounds global {what} of {count} bytes in lane {lane}")
        self.counts.bytes[f"global_{what}"] += at.size
        return at

    def _decode_global(self, inst: Any, name: str) -> Step:
        operation = name.removeprefix("GLOBAL_")
        address = _global_address(inst)
        if operation.startswith("ATOMIC_"):
            return self._decode_global_atomic(inst, operation.removeprefix("ATOMIC_"), address)
        access = Access.parse(operation)
        n = _register(inst.data if access.store else inst.vdst)

        def step(w: Wave) -> None:
            at = self._global_bytes(w, address(w), access.count, "store" if access.store else "load")
            self._check_owner(w, at, store=access.store)
            if access.store:
                self.memory.bytes[at] = access.outgoing(w, n)
            else:
                access.incoming(w, n, self.memory.bytes[at])

        return step

    def _decode_flat(self, inst: Any, name: str) -> Step:
        """Addresses that may lie in the LDS or in global memory, lane by lane."""
        access = Access.parse(name.removeprefix("FLAT_"))
        n, address = _register(inst.data if access.store else inst.vdst), _global_address(inst)

        def step(w: Wave) -> None:
            at, active = address(w), w.active
            in_lds = (at >> u64(32)) == u64(SHARED_APERTURE >> 32)
            for lanes, is_lds in ((active & in_lds, True), (active & ~in_lds, False)):
                if not lanes.any():
                    continue
                w.active = lanes
                if is_lds:
                    where = self._lds_bytes(w, at & u64(MASK), access.count, store=access.store)
                    memory = w.group.lds
                else:
                    where = self._global_bytes(w, at, access.count, "store" if access.store else "load")
                    self._check_owner(w, where, store=access.store)
                    memory = self.memory.bytes
                if access.store:
                    memory[where] = access.outgoing(w, n)
                else:
                    access.incoming(w, n, memory[where])
            w.active = active

        return step

    def _decode_global_atomic(self, inst: Any, operation: str, address: Read) -> Step:
        atomic = Atomic.parse(operation)
        source, result, returns = _register(inst.data), inst.vdst, bool(inst.glc)

        def step(w: Wave) -> None:
            at = self._global_bytes(w, address(w), atomic.count, "atomic")
            self._check_owner(w, at, store=False, atomic=True)
            old = atomic.run(w, self.memory.bytes, at, source)
            if returns:
                atomic.give_back(w, _register(result), old)

        return step

    # ---- LDS -------------------------------------------------------------------------------------------------------

    def _lds_bytes(
        self, wave: Wave, address: Array, count: int, *, store: bool, atomic: bool = False
    ) -> Array:
        at = address.astype(i64)[wave.active][:, None] + np.arange(count)
        wave.group.check(wave.number, at, store=store, atomic=atomic)
        self.counts.bytes["lds_store" if store else "lds_load"] += at.size
        return at

    def _decode_lds(self, inst: Any, name: str) -> Step:
        operation = name.removeprefix("DS_")
        n_address = _register(inst.addr)
        offset = inst.offset0 | inst.offset1 << 8
        if operation in ("BPERMUTE_B32", "PERMUTE_B32", "SWIZZLE_B32"):
            return _decode_exchange(inst, operation, n_address, offset)
        if "2ADDR" in operation:
            return self._decode_lds_pair(inst, operation, n_address)
        if operation.startswith(("LOAD", "STORE")) and "XCHG" not in operation:
            access = Access.parse(operation)
            n = _register(inst.data0 if access.store else inst.vdst)

            def step(w: Wave) -> None:
                at = self._lds_bytes(w, w.vector[n_address] + u32(offset), access.count, store=access.store)
                if access.store:
                    w.group.lds[at] = access.outgoing(w, n)
                else:
                    access.incoming(w, n, w.group.lds[at])

            return step
        atomic = Atomic.parse(operation.replace("_RTN", ""))
        source, second, result = _register(inst.data0), inst.data1, inst.vdst

        def atomic_step(w: Wave) -> None:
            at = self._lds_bytes(
                w, w.vector[n_address] + u32(offset), atomic.count, store=False, atomic=True
            )
            old = atomic.run(w, w.group.lds, at, source, _register(second))
            if "_RTN" in operation:
                atomic.give_back(w, _register(result), old)

        return atomic_step

    def _decode_lds_pair(self, inst: Any, operation: str, n_address: int) -> Step:
        words = 2 if operation.endswith("B64") else 1
        scale = 4 * words * (64 if "STRIDE64" in operation else 1)
        store = operation.startswith("STORE")
        if not store and not operation.startswith("LOAD"):
            raise NotImplementedError(operation)
        access = Access(4 * words, store=store)
        if store:
            registers = _register(inst.data0), _register(inst.data1)
        else:
            registers = _register(inst.vdst), _register(inst.vdst) + words
        offsets = inst.offset0 * scale, inst.offset1 * scale

        def step(w: Wave) -> None:
            base = w.vector[n_address].copy()  # a load may overwrite its own address
            for offset, n in zip(offsets, registers, strict=True):
                at = self._lds_bytes(w, base + u32(offset), access.count, store=store)
                if store:
                    w.group.lds[at] = access.outgoing(w, n)
                else:
                    access.incoming(w, n, w.group.lds[at])

        return step


def _nothing(wave: Wave) -> None:
    """Waits, hints, cache invalidations."""


def _global_address(inst: Any) -> Read:
    n, offset = _register(inst.addr), u64(scalar.signed(inst.offset, 13) & (1 << 64) - 1)
    if inst.saddr.offset == NULL:
        return lambda w: (w.vector[n].astype(u64) | w.vector[n + 1].astype(u64) << u64(32)) + offset
    base = read_scalar(inst.saddr.offset, 2, None)
    return lambda w: w.vector[n].astype(u64) + u64(base(w)) + offset


@dataclass(frozen=True)
class Access:
    """A load or store of `count` bytes a lane, and how they lie in registers."""

    count: int
    store: bool
    is_signed: bool = False
    half: str = ""  # "low" or "high": only that half of the register changes, or is stored

    @staticmethod
    def parse(operation: str) -> Access:
        """From LOAD_U8, LOAD_B128, LOAD_D16_HI_B16, LOAD_U16_D16_HI, STORE_B16_D16_HI..."""
        parts = operation.split("_")
        half = ("high" if "HI" in parts else "low") if "D16" in parts else ""
        (size,) = (p for p in parts[1:] if p[0] in "BUI" and p[1:].isdigit())
        return Access(int(size[1:]) // 8, parts[0] == "STORE", size[0] == "I", half)

    def outgoing(self, wave: Wave, n: int) -> Array:
        """Bytes (active lanes, count) from registers n, n + 1, ..."""
        words = wave.vector[n : n + max(self.count // 4, 1), wave.active]
        if self.half == "high":
            words = words >> u32(16)
        return np.ascontiguousarray(words.T).view(np.uint8).reshape(len(words[0]), -1)[:, : self.count]

    def incoming(self, wave: Wave, n: int, data: Array) -> None:
        """Bytes (active lanes, count) into registers n, n + 1, ..."""
        if self.count >= 4:
            words = np.ascontiguousarray(data).view(u32)
            for i in range(self.count // 4):
                wave.vector[n + i, wave.active] = words[:, i]
            return
        kind: Any = {1: np.int8 if self.is_signed else np.uint8, 2: np.int16 if self.is_signed else np.uint16}
        value = np.ascontiguousarray(data).view(kind[self.count])[:, 0].astype(np.int32).view(u32)
        if self.half:
            old = wave.vector[n, wave.active]
            value = value & u32(0xFFFF)
            value = old & u32(0xFFFF) | value << u32(16) if self.half == "high" else old & u32(0xFFFF0000) | value
        wave.vector[n, wave.active] = value


@dataclass(frozen=True)
class Atomic:
    """A read-modify-write, done lane after lane."""

    name: str
    kind: type
    returns_only: bool = False

    @staticmethod
    def parse(operation: str) -> Atomic:
        """From ADD_U32, MAX_I32, CMPSWAP_B32, STOREXCHG_B32, ADD_F32..."""
        name, suffix = operation.rsplit("_", 1)
        name = {"STOREXCHG": "SWAP", "CMPSTORE": "CMPSWAP"}.get(name, name)
        kinds: dict[str, type] = {
            "U32": np.uint32, "B32": np.uint32, "I32": np.int32, "F32": np.float32,
            "U64": np.uint64, "B64": np.uint64, "I64": np.int64,
        }  # fmt: skip
        if name not in ("ADD", "SUB", "MAX", "MIN", "AND", "OR", "XOR", "SWAP", "CMPSWAP"):
            raise NotImplementedError(f"atomic {operation}")
        return Atomic(name, kinds[suffix])

    @property
    def count(self) -> int:
        """Bytes."""
        return int(np.dtype(self.kind).itemsize)

    def _combine(self, old: Any, value: Any, expected: Any) -> Any:
        match self.name:
            case "ADD":
                return old + value
            case "SUB":
                return old - value
            case "MAX":
                return max(old, value)
            case "MIN":
                return min(old, value)
            case "AND":
                return old & value
            case "OR":
                return old | value
            case "XOR":
                return old ^ value
            case "SWAP":
                return value
        return value if old == expected else old

    def _values(self, wave: Wave, n: int) -> Array:
        words = wave.vector[n : n + self.count // 4, wave.active]
        return np.ascontiguousarray(words.T).view(self.kind)[:, 0]

    def run(self, wave: Wave, memory: Array, at: Array, source: int, second: int | None = None) -> Array:
        """Does it for each active lane; returns what was there before. second: LDS's register of the new value."""
        values = self._values(wave, source)
        expected = values
        if self.name == "CMPSWAP":
            if second is None:
                expected = self._values(wave, source + self.count // 4)
            else:
                values = self._values(wave, second)
        old = np.empty(len(at), self.kind)
        for lane, where in enumerate(at):
            old[lane] = memory[where].view(self.kind)[0]
            new = np.array([self._combine(old[lane], values[lane], expected[lane])], self.kind)
            memory[where] = new.view(np.uint8)
        return old

    def give_back(self, wave: Wave, n: int, old: Array) -> None:
        """Stores the values from before into the result registers."""
        words = old.view(u32).reshape(len(old), -1)
        for i in range(words.shape[1]):
            wave.vector[n + i, wave.active] = words[:, i]


def _decode_exchange(inst: Any, operation: str, n_address: int, offset: int) -> Step:
    source, result = _register(inst.addr if operation == "SWIZZLE_B32" else inst.data0), _register(inst.vdst)

    def bpermute(w: Wave) -> None:
        lane = (w.vector[n_address] + u32(offset) >> u32(2)) & u32(31)
        write_vector(w, result, np.where(w.active[lane], w.vector[source][lane], u32(0)), "u")

    def permute(w: Wave) -> None:
        lane = (w.vector[n_address] + u32(offset) >> u32(2)) & u32(31)
        out = np.zeros(WAVE, u32)
        out[lane[w.active]] = w.vector[source][w.active]
        write_vector(w, result, out, "u")

    def swizzle(w: Wave) -> None:
        if offset & 0x8000:
            lane = (LANES & ~3) + (offset >> 2 * (LANES & 3) & 3)
        else:
            lane = (LANES & (offset & 31) | offset >> 5 & 31) ^ (offset >> 10 & 31)
        write_vector(w, result, np.where(w.active[lane], w.vector[source][lane], u32(0)), "u")

    if operation == "SWIZZLE_B32" and offset >= 0xE000:
        raise NotImplementedError("FFT swizzle")
    return {"BPERMUTE_B32": bpermute, "PERMUTE_B32": permute, "SWIZZLE_B32": swizzle}[operation]


def _decode_scratch(inst: Any, name: str) -> Step:
    access = Access.parse(name.removeprefix("SCRATCH_"))
    n = _register(inst.data if access.store else inst.vdst)
    offset = scalar.signed(inst.offset, 13)
    base = read_scalar(inst.saddr.offset, 1, None)

    def step(w: Wave) -> None:
        own = w.vector[_register(inst.addr)].astype(i64) if inst.sve else np.zeros(WAVE, i64)
        at = (own + base(w) + offset)[w.active][:, None] + np.arange(access.count)
        if at.size and (at.min() < 0 or at.max() >= w.scratch.shape[1]):
            raise Trap("out-of-bounds scratch access")
        lane = LANES[w.active][:, None]
        if access.store:
            w.scratch[lane, at] = access.outgoing(w, n)
        else:
            access.incoming(w, n, w.scratch[lane, at])

    return step


# ---- scalar instructions ----------------------------------------------------------------------------------------------


def _decode_program(inst: Any, name: str, following: int) -> Step:
    if name == "S_ENDPGM":

        def end(w: Wave) -> None:
            w.done = True

        return end
    if name == "S_BRANCH" or name.startswith("S_CBRANCH_"):
        target = following + 4 * scalar.signed(inst.simm16, 16)
        conditions: dict[str, Callable[[Wave], bool]] = {
            "S_BRANCH": lambda w: True,
            "S_CBRANCH_SCC0": lambda w: not w.scc,
            "S_CBRANCH_SCC1": lambda w: bool(w.scc),
            "S_CBRANCH_VCCZ": lambda w: not w.scalars[VCC],
            "S_CBRANCH_VCCNZ": lambda w: bool(w.scalars[VCC]),
            "S_CBRANCH_EXECZ": lambda w: not w.scalars[EXEC],
            "S_CBRANCH_EXECNZ": lambda w: bool(w.scalars[EXEC]),
        }
        taken = conditions[name]
        return lambda w: target if taken(w) else None
    hints = (
        "S_NOP", "S_CLAUSE", "S_DELAY_ALU", "S_WAITCNT", "S_WAITCNT_DEPCTR", "S_WAIT_IDLE", "S_SLEEP", "S_SENDMSG",
        "S_SET_INST_PREFETCH_DISTANCE", "S_SETPRIO", "S_BARRIER", "S_DENORM_MODE", "S_ICACHE_INV",
    )  # fmt: skip
    if name in hints:
        return _nothing
    raise NotImplementedError(name)


def _words(name: str) -> int:
    return 2 if name.endswith("64") else 1


def _decode_scalar(inst: Any, form: str, name: str) -> Step:
    literal = getattr(inst, "literal", None)
    if form == "SOPK":
        return _decode_scalar_immediate(inst, name)
    words = _words(name)
    if form == "SOPC":
        left, right = read_scalar(inst.ssrc0.offset, words, literal), read_scalar(
            inst.ssrc1.offset, 1 if "BITCMP" in name else words, literal
        )
        relation = scalar.compare(name)

        def compare(w: Wave) -> None:
            w.scc = int(relation(left(w), right(w)))

        return compare
    at = inst.sdst.offset
    if name == "S_CLZ_I32_U32" or name.startswith(("S_CTZ_I32", "S_BCNT")):
        out_words = 1
    else:
        out_words = words
    first = read_scalar(inst.ssrc0.offset, words, literal)
    if form == "SOP1":
        if name in scalar.SAVE_EXEC:
            combine = scalar.SAVE_EXEC[name]

            def save(w: Wave) -> None:
                source, old = first(w), w.scalars[EXEC]
                w.set_exec(combine(source, old))
                w.write_scalar(at, old)
                w.scc = int(w.scalars[EXEC] != 0)

            return save
        if name in ("S_BITSET0_B32", "S_BITSET1_B32"):
            wanted = name == "S_BITSET1_B32"

            def set_bit(w: Wave) -> None:
                bit = 1 << (first(w) & 31)
                w.write_scalar(at, w.scalars[at] | bit if wanted else w.scalars[at] & ~bit)

            return set_bit
        unary = scalar.UNARY[name]

        def one(w: Wave) -> None:
            result, scc = unary(first(w))
            w.write_scalar(at, result, out_words)
            if scc is not None:
                w.scc = int(scc)

        return one
    if name in ("S_FMAC_F32", "S_FMAAK_F32", "S_FMAMK_F32"):
        raise NotImplementedError(name)
    binary = scalar.BINARY[name]
    narrow = name.split("_")[1] in ("LSHL", "LSHR", "ASHR", "BFE")  # the second operand has 32 bits
    second = read_scalar(inst.ssrc1.offset, 1 if narrow else words, literal)

    def two(w: Wave) -> None:
        result, scc = binary(first(w), second(w), w.scc)
        w.write_scalar(at, result, words)
        if scc is not None:
            w.scc = int(scc)

    return two


def _decode_scalar_immediate(inst: Any, name: str) -> Step:
    k, at = scalar.signed(inst.simm16, 16), inst.sdst.offset
    if name.startswith("S_WAITCNT") or name in ("S_SETREG_B32", "S_SETREG_IMM32_B32", "S_VERSION"):
        return _nothing  # modes: denormals are always kept, see the module's text
    if name == "S_GETREG_B32":
        return lambda w: w.write_scalar(at, 0)
    if name == "S_MOVK_I32":
        return lambda w: w.write_scalar(at, k & MASK)
    if name == "S_CMOVK_I32":
        return lambda w: w.write_scalar(at, k & MASK) if w.scc else None
    if name == "S_MULK_I32":
        return lambda w: w.write_scalar(at, w.scalars[at] * k & MASK)
    if name == "S_ADDK_I32":

        def add(w: Wave) -> None:
            total = scalar.signed(w.scalars[at]) + k
            w.write_scalar(at, total & MASK)
            w.scc = int(not -(2**31) <= total < 2**31)

        return add
    if name.startswith("S_CMPK_"):
        relation = scalar.compare(name.replace("CMPK", "CMP"))
        constant = k & MASK if name.endswith("I32") else k & 0xFFFF

        def compare(w: Wave) -> None:
            w.scc = int(relation(w.scalars[at], constant))

        return compare
    raise NotImplementedError(name)


# ---- vector instructions ----------------------------------------------------------------------------------------------


@dataclass
class Operands:
    """Where a vector instruction's operands and modifiers are, whatever its encoding."""

    sources: list[Any]
    literal: int | None
    neg: int = 0
    abs: int = 0
    opsel: int = 0
    clamp: bool = False
    omod: int = 0

    @staticmethod
    def of(inst: Any, form: str) -> Operands:
        """Collects them."""
        get = lambda name: getattr(inst, name, None)  # noqa: E731
        sources = [get("src0"), get("vsrc1") if get("vsrc1") is not None else get("src1"), get("src2")]
        result = Operands(
            [s for s in sources if s is not None], get("literal"), get("neg") or 0, get("abs") or 0,
            get("opsel") or 0, bool(get("clmp")), get("omod") or 0,
        )  # fmt: skip
        if get("src0_neg") is not None and not form.startswith("VOP3"):  # DPP has them in other places
            result.neg |= inst.src0_neg | inst.src1_neg << 1
            result.abs |= inst.src0_abs | inst.src1_abs << 1
        return result

    def read(self, k: int, letter: str) -> Read:
        """Operand k as a type, with its modifiers."""
        high = alu.BITS[letter] == 16 and bool(self.opsel >> k & 1)
        read = read_vector(self.sources[k], letter, self.literal, high=high)
        if letter in "fhd":
            read = with_sign(read, bool(self.neg >> k & 1), bool(self.abs >> k & 1))
        elif (self.neg | self.abs) >> k & 1:
            raise NotImplementedError("a sign modifier on an integer operand")
        return read


def _decode_vector(inst: Any, form: str, name: str) -> Step:
    name = name.removeprefix("V_")
    if form.endswith("DPP16"):
        return _decode_dpp(inst, form, name)
    operands = Operands.of(inst, form)
    if name == "NOP":
        return _nothing
    if name.startswith("CMP"):
        return _decode_compare(inst, name, operands)
    if form.startswith("VOP3P"):
        return _decode_packed(inst, name, operands)
    if name in ("READLANE_B32", "READFIRSTLANE_B32", "WRITELANE_B32"):
        return _decode_lane(inst, name, operands)
    if name.startswith("PERMLANE"):
        return _decode_permlane(inst, name, operands)
    if name == "SWAP_B32":
        return _decode_swap(inst)
    if form == "VOP3SD" or "_CO_" in name:
        return _decode_with_carry(inst, form, name, operands)
    if name == "CNDMASK_B32":
        mask = read_scalar(inst.src2.offset if form == "VOP3" else VCC, 1, None)
        letter = "f" if operands.neg | operands.abs else "u"
        off, on = operands.read(0, letter), operands.read(1, letter)
        n = _register(inst.vdst)
        return lambda w: write_vector(w, n, np.where(w.lanes_of(mask(w)), on(w), off(w)), letter)
    if name == "DIV_FMAS_F32":
        a, b, c = (operands.read(k, "f") for k in range(3))
        n = _register(inst.vdst)
        return lambda w: write_vector(
            w, n, alu.div_fmas(a(w), b(w), c(w), w.lanes_of(w.scalars[VCC])), "f"
        )
    letter, compute = _value(name, operands, inst.vdst)
    n = _register(inst.vdst)
    high = alu.BITS[letter] == 16 and bool(operands.opsel >> 3 & 1)
    compute = _with_output_modifiers(compute, letter, operands)
    return lambda w: write_vector(w, n, compute(w), letter, high=high)


def _with_output_modifiers(compute: Read, letter: str, operands: Operands) -> Read:
    if operands.omod:
        factor = {1: 2, 2: 4, 3: 0.5}[operands.omod]
        inner = compute
        kind = alu.TYPES[letter]
        compute = lambda w: inner(w) * kind(factor)  # noqa: E731
    if operands.clamp:
        if letter not in "fhd":
            raise NotImplementedError("clamp on an integer result")
        unclamped = compute
        zero, one = alu.TYPES[letter](0), alu.TYPES[letter](1)
        return lambda w: np.clip(np.nan_to_num(unclamped(w)), zero, one)
    return compute


def _value(name: str, operands: Operands, destination: Any) -> tuple[str, Read]:
    """Type of the result, and how it is computed."""
    if name.startswith("DOT2"):
        old = read_vector(destination, "f", None)
        a, b = operands.read(0, "u"), operands.read(1, "u")
        if name not in ("DOT2ACC_F32_F16", "DOT2C_F32_F16"):
            raise NotImplementedError(name)
        return "f", lambda w: alu.dot2(a(w), b(w), old(w), alu.f16_to_f32)
    if name.startswith(("FMAMK", "FMAAK")):
        letter = {"F32": "f", "F16": "h"}[name[6:]]
        if operands.literal is None:
            raise NotImplementedError("no literal")
        bits = {"f": u32, "h": alu.u16}[letter](operands.literal & ((1 << alu.BITS[letter]) - 1))
        constant = np.full(WAVE, bits).view(alu.TYPES[letter])
        a, b = operands.read(0, letter), operands.read(1, letter)
        kind = alu.TYPES[letter]
        if name.startswith("FMAMK"):
            return letter, lambda w: alu.fused(a(w), constant, b(w)).astype(kind)
        return letter, lambda w: alu.fused(a(w), b(w), constant).astype(kind)
    accumulates = name in alu.ACCUMULATING
    signature, function = alu.VECTOR[alu.ACCUMULATING.get(name, name)]
    letter, kinds = signature[0], signature[1:]
    own = len(kinds) - 1 if accumulates else len(kinds)
    reads = [operands.read(k, kinds[k]) for k in range(own)]
    if accumulates:
        reads.append(read_vector(destination, letter, None))
    kind = alu.TYPES[letter]
    if len(reads) == 1:
        (first,) = reads
        return letter, lambda w: _as(function(first(w)), kind)
    if len(reads) == 2:
        first, second = reads
        return letter, lambda w: _as(function(first(w), second(w)), kind)
    first, second, third = reads
    return letter, lambda w: _as(function(first(w), second(w), third(w)), kind)


def _as(value: Array, kind: type) -> Array:
    return value if value.dtype == kind else value.astype(kind)


def _decode_compare(inst: Any, name: str, operands: Operands) -> Step:
    kind, relation, suffix = name.split("_")
    if relation == "CLASS":
        value, wanted = operands.read(0, alu.COMPARED[suffix]), operands.read(1, "u")
        condition: Read = lambda w: alu.classify(value(w), wanted(w))  # noqa: E731
    else:
        letter, function = alu.COMPARED[suffix], alu.COMPARISONS[relation]
        left, right = operands.read(0, letter), operands.read(1, letter)
        condition = lambda w: function(left(w), right(w))  # noqa: E731
    if kind == "CMPX":
        return lambda w: w.set_exec(w.lane_mask(condition(w)))
    at = inst.vdst.offset if hasattr(inst, "vdst") else VCC
    return lambda w: w.write_scalar(at, w.lane_mask(condition(w)))


def _decode_lane(inst: Any, name: str, operands: Operands) -> Step:
    at = inst.vdst.offset
    if name == "WRITELANE_B32":
        value = read_scalar(inst.src0.offset, 1, operands.literal)
        lane = read_scalar(inst.src1.offset, 1, operands.literal)
        n = _register(inst.vdst)

        def write(w: Wave) -> None:
            w.vector[n, lane(w) & 31] = value(w)

        return write
    source = operands.read(0, "u")
    at = at - FIRST_VGPR if at >= FIRST_VGPR else at  # a scalar register in the vector field
    if name == "READLANE_B32":
        pick = read_scalar(inst.src1.offset, 1, operands.literal)
        return lambda w: w.write_scalar(at, int(source(w)[pick(w) & 31]))
    return lambda w: w.write_scalar(at, int(source(w)[int(np.argmax(w.active))]))


def _decode_permlane(inst: Any, name: str, operands: Operands) -> Step:
    if name not in ("PERMLANE16_B32", "PERMLANEX16_B32"):
        raise NotImplementedError(name)
    n, source = _register(inst.vdst), operands.read(0, "u")
    low, high = (read_scalar(s.offset, 1, operands.literal) for s in operands.sources[1:])
    across = 16 if name.startswith("PERMLANEX") else 0
    fetch_inactive, zero_invalid = bool(operands.opsel & 1), bool(operands.opsel & 2)

    def step(w: Wave) -> None:
        select = low(w) | high(w) << 32
        lane = np.array([(i & 16 ^ across) + (select >> 4 * (i & 15) & 15) for i in range(WAVE)])
        valid = w.active[lane] | fetch_inactive
        write_vector(w, n, np.where(valid, source(w)[lane], u32(0) if zero_invalid else w.vector[n]), "u")

    return step


def _decode_swap(inst: Any) -> Step:
    a, b = _register(inst.vdst), _register(inst.src0)

    def step(w: Wave) -> None:
        kept = w.vector[a].copy()
        write_vector(w, a, w.vector[b].copy(), "u")
        write_vector(w, b, kept, "u")

    return step


def _decode_with_carry(inst: Any, form: str, name: str, operands: Operands) -> Step:
    """Instructions that also write a mask: sums with carries, the 64-bit multiply-adds, the division's scaling."""
    n = _register(inst.vdst)
    out = inst.sdst.offset if form == "VOP3SD" else VCC
    if name in ("MAD_U64_U32", "MAD_I64_I32"):
        letter, compute = _value(name, operands, inst.vdst)
        return lambda w: write_vector(w, n, compute(w), letter)  # the carry is never read by compilers
    if name == "DIV_SCALE_F32":
        a, b, c = (operands.read(k, "f") for k in range(3))

        def scale(w: Wave) -> None:
            value, flags = alu.div_scale(a(w), b(w), c(w))
            write_vector(w, n, value, "f")
            w.write_scalar(out, w.lane_mask(flags))

        return scale
    operation = name.removesuffix("_U32").removesuffix("_CI").removesuffix("_CO")
    if operation not in ("ADD", "SUB", "SUBREV"):
        raise NotImplementedError(name)
    first, second = operands.read(0, "u"), operands.read(1, "u")
    if "_CI" in name:
        carry_in = read_scalar(inst.src2.offset if form == "VOP3SD" else VCC, 1, None)
    else:
        carry_in = lambda w: 0  # noqa: E731

    def add(w: Wave) -> None:
        a, b = first(w).astype(i64), second(w).astype(i64)
        carry = w.lanes_of(carry_in(w)).astype(i64)
        total = {"ADD": a + b + carry, "SUB": a - b - carry, "SUBREV": b - a - carry}[operation]
        carries = w.lane_mask((total >> 32) != 0)
        write_vector(w, n, (total & MASK).astype(u32), "u")
        w.write_scalar(out, carries)

    return add


def _decode_packed(inst: Any, name: str, operands: Operands) -> Step:
    """VOP3P: packed halves, dot products, mixed precision, matrices."""
    if name.startswith("WMMA"):
        return _decode_matrix(inst, name)
    n = _register(inst.vdst)
    low_select, high_select = inst.opsel, inst.opsel_hi | inst.opsel_hi2 << 2
    if name in ("DOT2_F32_F16", "DOT2_F32_BF16"):
        to_f32 = alu.f16_to_f32 if name.endswith("_F16") else alu.bf16_to_f32
        if (low_select & 3, high_select & 3, inst.neg & 3, inst.neg_hi & 3) != (0, 3, 0, 0):
            raise NotImplementedError("modifiers on a dot product")
        a, b = (_packed_word(operands, k) for k in range(2))
        c = with_sign(read_vector(operands.sources[2], "f", operands.literal), bool(inst.neg & 4), False)
        return lambda w: write_vector(w, n, alu.dot2(a(w), b(w), c(w), to_f32), "f")
    if name in ("DOT4_I32_IU8", "DOT4_U32_U8"):
        signs = inst.neg if name == "DOT4_I32_IU8" else 0
        if inst.clmp:
            raise NotImplementedError("a dot product that saturates")
        a, b, c = (read_vector(s, "u", operands.literal) for s in operands.sources)
        kind = np.int32 if name == "DOT4_I32_IU8" else u32
        return lambda w: write_vector(
            w, n, alu.dot4(a(w), b(w), c(w).view(kind), bool(signs & 1), bool(signs & 2)), "u"
        )
    if name.startswith("FMA_MIX"):
        reads = []
        for k in range(3):
            letter = "h" if high_select >> k & 1 else "f"
            high = letter == "h" and bool(low_select >> k & 1)
            read = read_vector(operands.sources[k], letter, operands.literal, high=high)
            reads.append(with_sign(read, bool(inst.neg >> k & 1), bool(inst.neg_hi >> k & 1)))
        a, b, c = reads
        letter = "f" if name == "FMA_MIX_F32" else "h"
        kind = alu.TYPES[letter]
        mixed = _with_output_modifiers(
            lambda w: alu.fused(a(w).astype(f32), b(w).astype(f32), c(w).astype(f32)).astype(kind), letter, operands
        )
        return lambda w: write_vector(w, n, mixed(w), letter, high=name == "FMA_MIXHI_F16")
    if inst.clmp:
        raise NotImplementedError("clamp on packed halves")
    accumulates = name in alu.ACCUMULATING
    signature, function = alu.PACKED[alu.ACCUMULATING.get(name, name)]
    kind = alu.TYPES[signature[0]]
    count = len(signature) - 1 - accumulates
    by_half = []
    for select, negate in ((low_select, inst.neg), (high_select, inst.neg_hi)):
        reads = [
            _packed_half(operands, k, signature[k + 1], bool(select >> k & 1), bool(negate >> k & 1))
            for k in range(count)
        ]
        by_half.append(reads)
    low, high = by_half

    def packed(w: Wave) -> None:
        parts = [_as(function(*(read(w) for read in reads)), kind) for reads in (low, high)]
        write_vector(w, n, alu.pack(*parts), "u")

    return packed


def _packed_word(operands: Operands, k: int) -> Read:
    """A pair of halves as 32 bits: an inline float constant stands in the low half alone."""
    source = operands.sources[k]
    if source.offset in INLINE_FLOATS:
        constant = np.full(WAVE, _constant_bits("h", source.offset, None), u32)
        return lambda w: constant
    return read_vector(source, "u", operands.literal)


def _packed_half(operands: Operands, k: int, letter: str, high: bool, negate: bool) -> Read:
    word, kind = _packed_word(operands, k), alu.TYPES[letter]
    read: Read = lambda w: (word(w) >> u32(16 * high)).astype(alu.u16).view(kind)  # noqa: E731
    return with_sign(read, negate, False)


def _decode_matrix(inst: Any, name: str) -> Step:
    """D = A B + C on 16 x 16 tiles. Lane l holds row l % 16 of A and column l % 16 of B, and D[2 i + l / 16][l % 16]."""
    kinds = {"WMMA_F32_16X16X16_F16": 8, "WMMA_F32_16X16X16_BF16": 8, "WMMA_I32_16X16X16_IU8": 4}
    count = kinds[name]  # registers of A and of B
    integer = name == "WMMA_I32_16X16X16_IU8"
    a, b, n = _register(inst.src0), _register(inst.src1), _register(inst.vdst)
    c = inst.src2
    letter = "i" if integer else "f"
    if inst.clmp or (inst.neg & 4) or (not integer and inst.neg | inst.neg_hi):
        raise NotImplementedError("modifiers on a matrix instruction")

    def rows(w: Wave, first: int, is_signed: bool) -> Array:
        words = w.vector[first : first + count]
        if not (words[:, :16] == words[:, 16:]).all():
            raise Trap("lanes 16-31 do not repeat the operands of lanes 0-15")
        words = np.ascontiguousarray(words[:, :16].T)
        if integer:
            return words.view(np.int8 if is_signed else np.uint8).astype(f64)
        if name.endswith("BF16"):
            return alu.bf16_to_f32(words.view(alu.u16)).astype(f64)
        return words.view(np.float16).astype(f64)

    def step(w: Wave) -> None:
        if not w.active.all():
            raise Trap("a matrix instruction with lanes switched off")
        product = rows(w, a, bool(inst.neg & 1)) @ rows(w, b, bool(inst.neg & 2)).T
        results = []
        for i in range(8):
            if c.offset >= FIRST_VGPR:
                old = w.vector[_register(c) + i].view(alu.TYPES[letter])
            else:
                old = read_vector(c, letter, None)(w)
            results.append((product[2 * i : 2 * i + 2].reshape(WAVE) + old).astype(alu.TYPES[letter]))
        for i, result in enumerate(results):
            w.vector[n + i] = result.view(u32)

    return step


def _decode_dual(inst: Any) -> Step:
    """VOPD: two instructions that read before either writes."""
    literal = getattr(inst, "literal", None)
    parts = []
    for op, destination, first, second in (
        (inst.opx, inst.vdstx, inst.srcx0, inst.vsrcx1),
        (inst.opy, inst.vdsty, inst.srcy0, inst.vsrcy1),
    ):
        name = op.name.removeprefix("V_DUAL_")
        operands = Operands([first, second], literal)
        if name == "CNDMASK_B32":
            letter = "u"
            off, on = operands.read(0, "u"), operands.read(1, "u")
            compute: Read = lambda w, on=on, off=off: np.where(  # type: ignore[misc]  # noqa: E731
                w.lanes_of(w.scalars[VCC]), on(w), off(w)
            )
        else:
            if name == "MOV_B32":
                operands.sources.pop()
            letter, compute = _value(name, operands, destination)
        parts.append((_register(destination), letter, compute))
    (n_x, letter_x, compute_x), (n_y, letter_y, compute_y) = parts

    def step(w: Wave) -> None:
        x = compute_x(w)
        y = compute_y(w)
        if x.base is not None:
            x = x.copy()  # a view of a register that the other half may write
        if y.base is not None:
            y = y.copy()
        write_vector(w, n_x, x, letter_x)
        write_vector(w, n_y, y, letter_y)

    return step


def _decode_dpp(inst: Any, form: str, name: str) -> Step:
    """The first source comes from another lane; lanes whose source does not exist keep still or read zero."""
    source_lane, in_row = alu.dpp_lanes(inst.dpp)
    fetch_inactive, zero_invalid = bool(inst.fi), bool(inst.bc)
    enabled = (inst.row_mask >> (LANES >> 4) & 1 & inst.bank_mask >> (LANES >> 2 & 3)) != 0
    n = _register(inst.vsrc0)
    # The permuted value is laid into a register of its own, and the plain instruction reads that.
    inner = _decode_vector(_Redirected(inst), form.removesuffix("_DPP16"), "V_" + name)

    def step(w: Wave) -> None:
        valid = in_row & (w.active[source_lane] | fetch_inactive)
        w.vector[_DPP_REGISTER] = np.where(valid, w.vector[n][source_lane], u32(0))
        kept = w.active
        w.active = kept & enabled & (valid | zero_invalid)
        inner(w)
        if not name.startswith("CMPX"):
            w.active = kept

    return step


_DPP_REGISTER = FIRST_VGPR  # one row past the registers that code can name


class _Redirected:
    """A DPP instruction seen as the plain one, its first source replaced."""

    def __init__(self, inst: Any) -> None:
        self._inst = inst

    def __getattr__(self, name: str) -> Any:
        if name in ("src0", "vsrc0"):
            return _Operand(FIRST_VGPR + _DPP_REGISTER)
        return getattr(self._inst, name)


@dataclass(frozen=True)
class _Operand:
    offset: int
