"""How RDNA3's memory instructions move bytes between memory and registers, and lanes exchange values through the LDS unit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.amd.rdna3_alu import Array, i64, u32, u64
from tests.amd.rdna3_wave import (
    LANES,
    NULL,
    WAVE,
    Read,
    Step,
    Trap,
    Wave,
    read_scalar,
    register,
    signed,
    write_vector,
)


def global_address(inst: Any) -> Read:
    n, offset = register(inst.addr), u64(signed(inst.offset, 13) & (1 << 64) - 1)
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
        return (
            np.ascontiguousarray(words.T).view(np.uint8).reshape(len(words[0]), -1)[:, : self.count]
        )

    def incoming(self, wave: Wave, n: int, data: Array) -> None:
        """Bytes (active lanes, count) into registers n, n + 1, ..."""
        if self.count >= 4:
            words = np.ascontiguousarray(data).view(u32)
            for i in range(self.count // 4):
                wave.vector[n + i, wave.active] = words[:, i]
            return
        kind: Any = {
            1: np.int8 if self.is_signed else np.uint8,
            2: np.int16 if self.is_signed else np.uint16,
        }
        value = np.ascontiguousarray(data).view(kind[self.count])[:, 0].astype(np.int32).view(u32)
        if self.half:
            old = wave.vector[n, wave.active]
            value = value & u32(0xFFFF)
            value = (
                old & u32(0xFFFF) | value << u32(16)
                if self.half == "high"
                else old & u32(0xFFFF0000) | value
            )
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

    def run(
        self, wave: Wave, memory: Array, at: Array, source: int, second: int | None = None
    ) -> Array:
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


def decode_exchange(inst: Any, operation: str, n_address: int, offset: int) -> Step:
    source, result = (
        register(inst.addr if operation == "SWIZZLE_B32" else inst.data0),
        register(inst.vdst),
    )

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


def decode_scratch(inst: Any, name: str) -> Step:
    access = Access.parse(name.removeprefix("SCRATCH_"))
    n = register(inst.data if access.store else inst.vdst)
    offset = signed(inst.offset, 13)
    base = read_scalar(inst.saddr.offset, 1, None)

    def step(w: Wave) -> None:
        own = w.vector[register(inst.addr)].astype(i64) if inst.sve else np.zeros(WAVE, i64)
        at = (own + base(w) + offset)[w.active][:, None] + np.arange(access.count)
        if at.size and (at.min() < 0 or at.max() >= w.scratch.shape[1]):
            raise Trap("out-of-bounds scratch access")
        lane = LANES[w.active][:, None]
        if access.store:
            w.scratch[lane, at] = access.outgoing(w, n)
        else:
            access.incoming(w, n, w.scratch[lane, at])

    return step
