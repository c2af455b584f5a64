"""RDNA3's scalar instructions, on Python integers. Source: AMD, "RDNA3 ISA" (2023), chapter 16.

In the tables a function gets the sources as unsigned integers and returns (result, SCC); SCC None leaves it as it was.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.amd.rdna3_alu import COMPARISONS
from tests.amd.rdna3_wave import EXEC, MASK, VCC, Step, Wave, nothing, read_scalar, signed

Result = tuple[int, "bool | None"]


def _float(x: int) -> np.float32:
    return np.float32(struct.unpack("<f", struct.pack("<I", x & MASK))[0])


def _float_bits(x: float | np.floating) -> int:
    return int(np.float32(x).view(np.uint32))


def _to_int(x: int, low: int, high: int) -> int:
    value = float(np.nan_to_num(np.trunc(np.float64(_float(x)))))
    return int(min(max(value, low), high)) & MASK


def _flagged(value: int, bits: int = 32) -> Result:
    value &= (1 << bits) - 1
    return value, value != 0


def _add(a: int, b: int, carry: int = 0) -> Result:
    total = a + b + carry
    return total & MASK, total > MASK


def _subtract(a: int, b: int, borrow: int = 0) -> Result:
    return a - b - borrow & MASK, a - b - borrow < 0


def _overflowing(total: int) -> Result:
    return total & MASK, not -(2**31) <= total < 2**31


def _field(x: int, spec: int, bits: int, is_signed: bool) -> Result:
    first, width = spec & bits - 1, spec >> 16 & 127
    value = x >> first & (1 << width) - 1
    if is_signed and width:
        value = signed(value, width)
    return _flagged(value, bits)


def _select(a: int, b: int, first: bool) -> Result:
    return (a if first else b), first


def _leading_zeros(x: int) -> Result:
    return (32 - x.bit_length() if x else MASK), None


def _leading_sign_bits(x: int) -> Result:
    value = signed(x)
    inverted = ~value if value < 0 else value
    return (32 - inverted.bit_length() if inverted else MASK), None


def _trailing_zeros(x: int) -> Result:
    return ((x & -x).bit_length() - 1 if x else MASK), None


# One source (SOP1). Saves of EXEC, jumps and the like are the machine's.
UNARY: dict[str, Callable[[int], Result]] = {
    "S_MOV_B32": lambda a: (a, None),
    "S_MOV_B64": lambda a: (a, None),
    "S_NOT_B32": lambda a: _flagged(~a),
    "S_NOT_B64": lambda a: _flagged(~a, 64),
    "S_BREV_B32": lambda a: (int(f"{a:032b}"[::-1], 2), None),
    "S_CTZ_I32_B32": _trailing_zeros,
    "S_CTZ_I32_B64": _trailing_zeros,
    "S_CLZ_I32_U32": _leading_zeros,
    "S_CLS_I32": _leading_sign_bits,
    "S_SEXT_I32_I8": lambda a: (signed(a, 8) & MASK, None),
    "S_SEXT_I32_I16": lambda a: (signed(a, 16) & MASK, None),
    "S_ABS_I32": lambda a: _flagged(abs(signed(a))),
    "S_BCNT1_I32_B32": lambda a: _flagged(a.bit_count()),
    "S_BCNT1_I32_B64": lambda a: _flagged(a.bit_count()),
    "S_CVT_F32_I32": lambda a: (_float_bits(float(signed(a))), None),
    "S_CVT_F32_U32": lambda a: (_float_bits(float(a)), None),
    "S_CVT_I32_F32": lambda a: (_to_int(a, -(2**31), 2**31 - 1), None),
    "S_CVT_U32_F32": lambda a: (_to_int(a, 0, MASK), None),
    "S_RNDNE_F32": lambda a: (_float_bits(np.rint(_float(a))), None),
    "S_FLOOR_F32": lambda a: (_float_bits(np.floor(_float(a))), None),
    "S_TRUNC_F32": lambda a: (_float_bits(np.trunc(_float(a))), None),
    "S_CEIL_F32": lambda a: (_float_bits(np.ceil(_float(a))), None),
}

# Two sources (SOP2); SCC on entry comes third.
BINARY: dict[str, Callable[[int, int, int], Result]] = {
    "S_ADD_U32": lambda a, b, scc: _add(a, b),
    "S_SUB_U32": lambda a, b, scc: _subtract(a, b),
    "S_ADDC_U32": _add,
    "S_SUBB_U32": _subtract,
    "S_ADD_I32": lambda a, b, scc: _overflowing(signed(a) + signed(b)),
    "S_SUB_I32": lambda a, b, scc: _overflowing(signed(a) - signed(b)),
    "S_MUL_I32": lambda a, b, scc: (a * b & MASK, None),
    "S_MUL_HI_U32": lambda a, b, scc: (a * b >> 32, None),
    "S_MUL_HI_I32": lambda a, b, scc: (signed(a) * signed(b) >> 32 & MASK, None),
    "S_MIN_I32": lambda a, b, scc: _select(a, b, signed(a) < signed(b)),
    "S_MIN_U32": lambda a, b, scc: _select(a, b, a < b),
    "S_MAX_I32": lambda a, b, scc: _select(a, b, signed(a) > signed(b)),
    "S_MAX_U32": lambda a, b, scc: _select(a, b, a > b),
    "S_ABSDIFF_I32": lambda a, b, scc: _flagged(abs(signed(a) - signed(b))),
    "S_AND_B32": lambda a, b, scc: _flagged(a & b),
    "S_OR_B32": lambda a, b, scc: _flagged(a | b),
    "S_XOR_B32": lambda a, b, scc: _flagged(a ^ b),
    "S_NAND_B32": lambda a, b, scc: _flagged(~(a & b)),
    "S_NOR_B32": lambda a, b, scc: _flagged(~(a | b)),
    "S_XNOR_B32": lambda a, b, scc: _flagged(~(a ^ b)),
    "S_AND_NOT1_B32": lambda a, b, scc: _flagged(a & ~b),
    "S_OR_NOT1_B32": lambda a, b, scc: _flagged(a | ~b),
    "S_AND_B64": lambda a, b, scc: _flagged(a & b, 64),
    "S_OR_B64": lambda a, b, scc: _flagged(a | b, 64),
    "S_XOR_B64": lambda a, b, scc: _flagged(a ^ b, 64),
    "S_AND_NOT1_B64": lambda a, b, scc: _flagged(a & ~b, 64),
    "S_LSHL_B32": lambda a, b, scc: _flagged(a << (b & 31)),
    "S_LSHR_B32": lambda a, b, scc: _flagged(a >> (b & 31)),
    "S_ASHR_I32": lambda a, b, scc: _flagged(signed(a) >> (b & 31)),
    "S_LSHL_B64": lambda a, b, scc: _flagged(a << (b & 63), 64),
    "S_LSHR_B64": lambda a, b, scc: _flagged(a >> (b & 63), 64),
    "S_ASHR_I64": lambda a, b, scc: _flagged(signed(a, 64) >> (b & 63), 64),
    "S_LSHL1_ADD_U32": lambda a, b, scc: _add(a << 1, b),
    "S_LSHL2_ADD_U32": lambda a, b, scc: _add(a << 2, b),
    "S_LSHL3_ADD_U32": lambda a, b, scc: _add(a << 3, b),
    "S_LSHL4_ADD_U32": lambda a, b, scc: _add(a << 4, b),
    "S_BFE_U32": lambda a, b, scc: _field(a, b, 32, False),
    "S_BFE_I32": lambda a, b, scc: _field(a, b, 32, True),
    "S_BFE_U64": lambda a, b, scc: _field(a, b, 64, False),
    "S_BFE_I64": lambda a, b, scc: _field(a, b, 64, True),
    "S_BFM_B32": lambda a, b, scc: (((1 << (a & 31)) - 1) << (b & 31) & MASK, None),
    "S_CSELECT_B32": lambda a, b, scc: (a if scc else b, None),
    "S_CSELECT_B64": lambda a, b, scc: (a if scc else b, None),
    "S_PACK_LL_B32_B16": lambda a, b, scc: (a & 0xFFFF | (b & 0xFFFF) << 16, None),
    "S_PACK_LH_B32_B16": lambda a, b, scc: (a & 0xFFFF | b & 0xFFFF0000, None),
    "S_PACK_HH_B32_B16": lambda a, b, scc: (a >> 16 | b & 0xFFFF0000, None),
    "S_PACK_HL_B32_B16": lambda a, b, scc: (a >> 16 | (b & 0xFFFF) << 16, None),
    # RDNA3.5 (gfx1151) only
    "S_ADD_F32": lambda a, b, scc: (_float_bits(_float(a) + _float(b)), None),
    "S_SUB_F32": lambda a, b, scc: (_float_bits(_float(a) - _float(b)), None),
    "S_MUL_F32": lambda a, b, scc: (_float_bits(_float(a) * _float(b)), None),
    "S_MIN_F32": lambda a, b, scc: (_float_bits(np.fmin(_float(a), _float(b))), None),
    "S_MAX_F32": lambda a, b, scc: (_float_bits(np.fmax(_float(a), _float(b))), None),
}

# EXEC := f(source, EXEC), the old EXEC saved.
SAVE_EXEC: dict[str, Callable[[int, int], int]] = {
    "S_AND_SAVEEXEC_B32": lambda a, mask: a & mask,
    "S_OR_SAVEEXEC_B32": lambda a, mask: a | mask,
    "S_XOR_SAVEEXEC_B32": lambda a, mask: a ^ mask,
    "S_AND_NOT1_SAVEEXEC_B32": lambda a, mask: a & ~mask & MASK,
    "S_AND_NOT0_SAVEEXEC_B32": lambda a, mask: ~a & mask & MASK,
    "S_OR_NOT1_SAVEEXEC_B32": lambda a, mask: (a | ~mask) & MASK,
    "S_OR_NOT0_SAVEEXEC_B32": lambda a, mask: (~a | mask) & MASK,
}


def compare(name: str) -> Callable[[int, int], bool]:
    """S_CMP_* and S_BITCMP* (SOPC). KeyError for a name that is neither."""
    if name.startswith("S_BITCMP"):
        wanted, bits = int(name[8]), int(name[-2:])
        return lambda a, b: (a >> (b & bits - 1) & 1) == wanted
    _, _, relation, kind = name.split("_")
    function = COMPARISONS[relation]
    if kind == "I32":
        return lambda a, b: bool(function(signed(a), signed(b)))
    if kind == "F32":
        return lambda a, b: bool(function(_float(a), _float(b)))
    if kind in ("U32", "U64"):
        return lambda a, b: bool(function(a, b))
    raise KeyError(name)


def decode_program(inst: Any, name: str, following: int) -> Step:
    if name == "S_ENDPGM":

        def end(w: Wave) -> None:
            w.done = True

        return end
    if name == "S_BRANCH" or name.startswith("S_CBRANCH_"):
        target = following + 4 * signed(inst.simm16, 16)
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
        return nothing
    raise NotImplementedError(name)


def _words(name: str) -> int:
    return 2 if name.endswith("64") else 1


def decode_scalar(inst: Any, form: str, name: str) -> Step:
    literal = getattr(inst, "literal", None)
    if form == "SOPK":
        return _decode_scalar_immediate(inst, name)
    words = _words(name)
    if form == "SOPC":
        left, right = (
            read_scalar(inst.ssrc0.offset, words, literal),
            read_scalar(inst.ssrc1.offset, 1 if "BITCMP" in name else words, literal),
        )
        relation = compare(name)

        def run_compare(w: Wave) -> None:
            w.scc = int(relation(left(w), right(w)))

        return run_compare
    at = inst.sdst.offset
    if name == "S_CLZ_I32_U32" or name.startswith(("S_CTZ_I32", "S_BCNT")):
        out_words = 1
    else:
        out_words = words
    first = read_scalar(inst.ssrc0.offset, words, literal)
    if form == "SOP1":
        if name in SAVE_EXEC:
            combine = SAVE_EXEC[name]

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
        unary = UNARY[name]

        def one(w: Wave) -> None:
            result, scc = unary(first(w))
            w.write_scalar(at, result, out_words)
            if scc is not None:
                w.scc = int(scc)

        return one
    if name in ("S_FMAC_F32", "S_FMAAK_F32", "S_FMAMK_F32"):
        raise NotImplementedError(name)
    binary = BINARY[name]
    narrow = name.split("_")[1] in ("LSHL", "LSHR", "ASHR", "BFE")  # the second operand has 32 bits
    second = read_scalar(inst.ssrc1.offset, 1 if narrow else words, literal)

    def two(w: Wave) -> None:
        result, scc = binary(first(w), second(w), w.scc)
        w.write_scalar(at, result, words)
        if scc is not None:
            w.scc = int(scc)

    return two


def _decode_scalar_immediate(inst: Any, name: str) -> Step:
    k, at = signed(inst.simm16, 16), inst.sdst.offset
    if name.startswith("S_WAITCNT") or name in ("S_SETREG_B32", "S_SETREG_IMM32_B32", "S_VERSION"):
        return nothing  # modes: denormals are always kept, see the module's text
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
            total = signed(w.scalars[at]) + k
            w.write_scalar(at, total & MASK)
            w.scc = int(not -(2**31) <= total < 2**31)

        return add
    if name.startswith("S_CMPK_"):
        relation = compare(name.replace("CMPK", "CMP"))
        constant = k & MASK if name.endswith("I32") else k & 0xFFFF

        def run_compare(w: Wave) -> None:
            w.scc = int(relation(w.scalars[at], constant))

        return run_compare
    raise NotImplementedError(name)
