"""RDNA3's vector instructions: decoded once into functions of a wave, the arithmetic taken from rdna3_alu."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.amd import rdna3_alu as alu
from tests.amd.rdna3_alu import Array, f32, f64, i64, u32
from tests.amd.rdna3_wave import (
    FIRST_VGPR,
    INLINE_FLOATS,
    LANES,
    MASK,
    VCC,
    WAVE,
    Read,
    Step,
    Trap,
    Wave,
    constant_bits,
    nothing,
    read_scalar,
    read_vector,
    register,
    with_sign,
    write_vector,
)


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
        sources = [
            get("src0"),
            get("vsrc1") if get("vsrc1") is not None else get("src1"),
            get("src2"),
        ]
        result = Operands(
            [s for s in sources if s is not None], get("literal"), get("neg") or 0, get("abs") or 0,
            get("opsel") or 0, bool(get("clmp")), get("omod") or 0,
        )  # fmt: skip
        if get("src0_neg") is not None and not form.startswith(
            "VOP3"
        ):  # DPP has them in other places
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


def decode_vector(inst: Any, form: str, name: str) -> Step:
    name = name.removeprefix("V_")
    if form.endswith("DPP16"):
        return _decode_dpp(inst, form, name)
    operands = Operands.of(inst, form)
    if name == "NOP":
        return nothing
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
        n = register(inst.vdst)
        return lambda w: write_vector(w, n, np.where(w.lanes_of(mask(w)), on(w), off(w)), letter)
    if name == "DIV_FMAS_F32":
        a, b, c = (operands.read(k, "f") for k in range(3))
        n = register(inst.vdst)
        return lambda w: write_vector(
            w, n, alu.div_fmas(a(w), b(w), c(w), w.lanes_of(w.scalars[VCC])), "f"
        )
    letter, compute = _value(name, operands, inst.vdst)
    n = register(inst.vdst)
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
        n = register(inst.vdst)

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
    n, source = register(inst.vdst), operands.read(0, "u")
    low, high = (read_scalar(s.offset, 1, operands.literal) for s in operands.sources[1:])
    across = 16 if name.startswith("PERMLANEX") else 0
    fetch_inactive, zero_invalid = bool(operands.opsel & 1), bool(operands.opsel & 2)

    def step(w: Wave) -> None:
        select = low(w) | high(w) << 32
        lane = np.array([(i & 16 ^ across) + (select >> 4 * (i & 15) & 15) for i in range(WAVE)])
        valid = w.active[lane] | fetch_inactive
        write_vector(
            w, n, np.where(valid, source(w)[lane], u32(0) if zero_invalid else w.vector[n]), "u"
        )

    return step


def _decode_swap(inst: Any) -> Step:
    a, b = register(inst.vdst), register(inst.src0)

    def step(w: Wave) -> None:
        kept = w.vector[a].copy()
        write_vector(w, a, w.vector[b].copy(), "u")
        write_vector(w, b, kept, "u")

    return step


def _decode_with_carry(inst: Any, form: str, name: str, operands: Operands) -> Step:
    """Instructions that also write a mask: sums with carries, the 64-bit multiply-adds, the division's scaling."""
    n = register(inst.vdst)
    out = inst.sdst.offset if form == "VOP3SD" else VCC
    if name in ("MAD_U64_U32", "MAD_I64_I32"):
        letter, compute = _value(name, operands, inst.vdst)
        return lambda w: write_vector(
            w, n, compute(w), letter
        )  # the carry is never read by compilers
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
    n = register(inst.vdst)
    low_select, high_select = inst.opsel, inst.opsel_hi | inst.opsel_hi2 << 2
    if name in ("DOT2_F32_F16", "DOT2_F32_BF16"):
        to_f32 = alu.f16_to_f32 if name.endswith("_F16") else alu.bf16_to_f32
        if (low_select & 3, high_select & 3, inst.neg & 3, inst.neg_hi & 3) != (0, 3, 0, 0):
            raise NotImplementedError("modifiers on a dot product")
        a, b = (_packed_word(operands, k) for k in range(2))
        c = with_sign(
            read_vector(operands.sources[2], "f", operands.literal), bool(inst.neg & 4), False
        )
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
            lambda w: alu.fused(a(w).astype(f32), b(w).astype(f32), c(w).astype(f32)).astype(kind),
            letter,
            operands,
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
            _packed_half(
                operands, k, signature[k + 1], bool(select >> k & 1), bool(negate >> k & 1)
            )
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
        constant = np.full(WAVE, constant_bits("h", source.offset, None), u32)
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
    a, b, n = register(inst.src0), register(inst.src1), register(inst.vdst)
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
                old = w.vector[register(c) + i].view(alu.TYPES[letter])
            else:
                old = read_vector(c, letter, None)(w)
            results.append(
                (product[2 * i : 2 * i + 2].reshape(WAVE) + old).astype(alu.TYPES[letter])
            )
        for i, result in enumerate(results):
            w.vector[n + i] = result.view(u32)

    return step


def decode_dual(inst: Any) -> Step:
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
        parts.append((register(destination), letter, compute))
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
    n = register(inst.vsrc0)
    # The permuted value is laid into a register of its own, and the plain instruction reads that.
    inner = decode_vector(_Redirected(inst), form.removesuffix("_DPP16"), "V_" + name)

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
