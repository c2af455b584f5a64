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
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tinygrad.renderer.amd import decode_inst

from tests.amd.code_objects import CodeObject, KernelDescriptor
from tests.amd.launches import Pointer
from tests.amd.rdna3_alu import Array, i64, u32, u64
from tests.amd.rdna3_memory import Access, Atomic, decode_exchange, decode_scratch, global_address
from tests.amd.rdna3_scalar import decode_program, decode_scalar
from tests.amd.rdna3_vector import decode_dual, decode_vector
from tests.amd.rdna3_wave import (
    LANES,
    MASK,
    POISON,
    SHARED_APERTURE,
    WAVE,
    Read,
    Step,
    Trap,
    Wave,
    Workgroup,
    nothing,
    read_scalar,
    register,
    signed,
)

BASE_ADDRESS = 0x5_0000_0000  # above 4 GiB: a 32-bit address is out of bounds
STEP_LIMIT = 20_000_000
CODE_END = 0xBF9F0000  # s_code_end, which follows the last kernel


@dataclass
class Counts:
    """What a launch asked of the machine; the same on every run."""

    instructions: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)  # global_load, global_store, lds_load, ...

    @property
    def total(self) -> int:
        """Instructions executed, summed over waves."""
        return sum(self.instructions.values())


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
            raise Trap(
                f"{lanes} work-items, the kernel was compiled for {metadata['.max_flat_workgroup_size']}"
            )
        memory, buffers, kernarg, dispatch = self._place(
            metadata, descriptor, grid, block, arguments
        )
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
                    raise TypeError(
                        f"argument {argument.get('.name', at)}: {len(value)} bytes, expected {size}"
                    )
                packed[at : at + size] = value
            elif kind in hidden:
                packed[at : at + size] = hidden[kind].to_bytes(size, "little")
            # Other hidden arguments (printf, queues) stay zero.
        if next(given, None) is not None:
            raise TypeError("more arguments than the kernel takes")
        padding = -len(packed) % 64  # the compiler may widen the load of the last arguments
        kernarg = BASE_ADDRESS + memory.add(bytes(packed) + bytes(padding))
        sizes = [g * b for g, b in zip(grid, block, strict=True)]
        dispatch = BASE_ADDRESS + memory.add(
            struct.pack("<6H3I", 0, 3, *block, 0, *sizes) + bytes(40)
        )
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
            wave.scratch = np.full((WAVE, (self.scratch_bytes + 3) // 4), POISON, u32).view(
                np.uint8
            )
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
            x, y, z = (
                item % u32(block[0]),
                item // u32(block[0]) % u32(block[1]),
                item // u32(block[0] * block[1]),
            )
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
                raise Trap(
                    f"{trap} ({name} at {pc:#x}, workgroup {wave.group.number}, wave {wave.number})"
                ) from None
            if jump is not None:
                wave.pc = jump
            if wave.done:
                return
        raise Trap(f"{STEP_LIMIT} instructions without a barrier or an end (wave {wave.number})")

    def unknown_instructions(self) -> list[str]:
        """Instructions of all kernels that could not be executed, whether or not a launch gets to them."""
        unknown = set()
        entries = sorted(
            (self.code.descriptor(kernel).entry, kernel) for kernel in self.code.kernels
        )
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
                return nothing, "BUFFER_GL_INV", pc + 8
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
            return decode_dual(inst)
        if form == "SOPP":
            return decode_program(inst, name, following)
        if form == "SMEM":
            return self._decode_scalar_load(inst, name)
        if form in ("SOP1", "SOP2", "SOPC", "SOPK"):
            return self._decode_scalar(inst, form, name, following)
        if form == "GLOBAL":
            return self._decode_global(inst, name)
        if form == "FLAT":
            return self._decode_flat(inst, name)
        if form == "SCRATCH":
            return decode_scratch(inst, name)
        if form == "DS":
            return self._decode_lds(inst, name)
        if form.startswith("V"):
            return decode_vector(inst, form, name)
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
        return decode_scalar(inst, form, name)

    def _decode_scalar_load(self, inst: Any, name: str) -> Step:
        if name in ("S_DCACHE_INV", "S_GL1_INV"):
            return nothing
        if not name.startswith("S_LOAD_B"):
            raise NotImplementedError(name)
        words = int(name.removeprefix("S_LOAD_B")) // 32
        base = read_scalar(inst.sbase.offset, 2, None)
        extra = read_scalar(inst.soffset.offset, 1, None)
        offset, at = signed(inst.offset, 21), inst.sdata.offset

        def load(w: Wave) -> None:
            address = base(w) + offset + extra(w) - BASE_ADDRESS
            memory = self.memory
            if (
                address < 0
                or address & 3
                or not memory.valid[address : address + 4 * words].all()
                or (address + 4 * words > memory.size)
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
            raise Trap(
                f"workgroup {number} {verb} memory that workgroup {int(writer[bad][0])} stored to"
            )
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
        address = global_address(inst)
        if operation.startswith("ATOMIC_"):
            return self._decode_global_atomic(inst, operation.removeprefix("ATOMIC_"), address)
        access = Access.parse(operation)
        n = register(inst.data if access.store else inst.vdst)

        def step(w: Wave) -> None:
            at = self._global_bytes(
                w, address(w), access.count, "store" if access.store else "load"
            )
            self._check_owner(w, at, store=access.store)
            if access.store:
                self.memory.bytes[at] = access.outgoing(w, n)
            else:
                access.incoming(w, n, self.memory.bytes[at])

        return step

    def _decode_flat(self, inst: Any, name: str) -> Step:
        """Addresses that may lie in the LDS or in global memory, lane by lane."""
        access = Access.parse(name.removeprefix("FLAT_"))
        n, address = register(inst.data if access.store else inst.vdst), global_address(inst)

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
                    where = self._global_bytes(
                        w, at, access.count, "store" if access.store else "load"
                    )
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
        source, result, returns = register(inst.data), inst.vdst, bool(inst.glc)

        def step(w: Wave) -> None:
            at = self._global_bytes(w, address(w), atomic.count, "atomic")
            self._check_owner(w, at, store=False, atomic=True)
            old = atomic.run(w, self.memory.bytes, at, source)
            if returns:
                atomic.give_back(w, register(result), old)

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
        n_address = register(inst.addr)
        offset = inst.offset0 | inst.offset1 << 8
        if operation in ("BPERMUTE_B32", "PERMUTE_B32", "SWIZZLE_B32"):
            return decode_exchange(inst, operation, n_address, offset)
        if "2ADDR" in operation:
            return self._decode_lds_pair(inst, operation, n_address)
        if operation.startswith(("LOAD", "STORE")) and "XCHG" not in operation:
            access = Access.parse(operation)
            n = register(inst.data0 if access.store else inst.vdst)

            def step(w: Wave) -> None:
                at = self._lds_bytes(
                    w, w.vector[n_address] + u32(offset), access.count, store=access.store
                )
                if access.store:
                    w.group.lds[at] = access.outgoing(w, n)
                else:
                    access.incoming(w, n, w.group.lds[at])

            return step
        atomic = Atomic.parse(operation.replace("_RTN", ""))
        source, second, result = register(inst.data0), inst.data1, inst.vdst

        def atomic_step(w: Wave) -> None:
            at = self._lds_bytes(
                w, w.vector[n_address] + u32(offset), atomic.count, store=False, atomic=True
            )
            old = atomic.run(w, w.group.lds, at, source, register(second))
            if "_RTN" in operation:
                atomic.give_back(w, register(result), old)

        return atomic_step

    def _decode_lds_pair(self, inst: Any, operation: str, n_address: int) -> Step:
        words = 2 if operation.endswith("B64") else 1
        scale = 4 * words * (64 if "STRIDE64" in operation else 1)
        store = operation.startswith("STORE")
        if not store and not operation.startswith("LOAD"):
            raise NotImplementedError(operation)
        access = Access(4 * words, store=store)
        if store:
            registers = register(inst.data0), register(inst.data1)
        else:
            registers = register(inst.vdst), register(inst.vdst) + words
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
