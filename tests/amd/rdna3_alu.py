"""What RDNA3's arithmetic instructions compute, on numpy arrays with one element a lane.

Source: AMD, "RDNA3 Instruction Set Architecture" (2023), chapter 16. A signature names destination and sources by type:

    u i f   32 bits: unsigned, signed, float      w s h   16 bits in a register's low or high half
    U I d   64 bits in two registers
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Function = Callable[..., Array]

TYPES: dict[str, type] = {
    "u": np.uint32, "i": np.int32, "f": np.float32, "w": np.uint16, "s": np.int16, "h": np.float16,
    "U": np.uint64, "I": np.int64, "d": np.float64,
}  # fmt: skip
BITS = {letter: np.dtype(t).itemsize * 8 for letter, t in TYPES.items()}

u16, u32, u64, i16, i32, i64 = np.uint16, np.uint32, np.uint64, np.int16, np.int32, np.int64
f16, f32, f64 = np.float16, np.float32, np.float64
ALL_ONES = u32(0xFFFFFFFF)
TINY = f32(np.finfo(f32).tiny)  # the smallest normal number


def fused(a: Array, b: Array, c: Array) -> Array:
    """a * b + c, rounded once to f64 and then to the caller's type (an ulp's hair from a true FMA)."""
    return a.astype(f64) * b + c


def shift(count: Array, bits: int = 32) -> Array:
    """A shift count as the hardware reads it: its low bits alone."""
    return count & count.dtype.type(bits - 1)


def exponent(x: Array) -> Array:
    """The biased exponent field of an f32."""
    return (x.view(u32) >> u32(23) & u32(255)).astype(i32)


def _to_int(low: int, high: int, t: type) -> Function:
    def convert(x: Array) -> Array:
        return np.clip(
            np.nan_to_num(np.trunc(x.astype(f64)), posinf=high, neginf=low), low, high
        ).astype(t)

    return convert


def to_f16_toward_zero(x: Array) -> Array:
    """f32 to f16 by cutting; finite values stay finite."""
    rounded = x.astype(f16)
    too_far = np.abs(rounded.astype(f32)) > np.abs(x)
    cut = np.nextafter(rounded, f16(0))
    return np.where(
        too_far,
        np.where(np.isinf(rounded) & ~np.isinf(x), np.copysign(f16(65504), cut), cut),
        rounded,
    )


def pack(low: Array, high: Array) -> Array:
    """Two 16-bit arrays as the halves of one register."""
    return low.view(u16).astype(u32) | high.view(u16).astype(u32) << u32(16)


def halves(x: Array) -> tuple[Array, Array]:
    """The two 16-bit halves of a register, low first."""
    return (x & u32(0xFFFF)).astype(u16), (x >> u32(16)).astype(u16)


def bf16_to_f32(x: Array) -> Array:
    """bf16 bits to f32."""
    return (x.astype(u32) << u32(16)).view(f32)


def _each(function: Callable[[int], int]) -> Function:
    def apply(x: Array) -> Array:
        return np.array([function(int(v)) for v in x], u32)

    return apply


_popcount = _each(int.bit_count)
_reverse = _each(lambda x: int(f"{x:032b}"[::-1], 2))
_leading_zeros = _each(lambda x: 32 - x.bit_length() if x else 0xFFFFFFFF)
_trailing_zeros = _each(lambda x: (x & -x).bit_length() - 1 if x else 0xFFFFFFFF)


def _leading_sign_bits(x: int) -> int:
    inverted = x ^ 0xFFFFFFFF if x >> 31 else x
    return 32 - inverted.bit_length() if inverted else 0xFFFFFFFF


_lanes_below = np.array([(1 << lane) - 1 for lane in range(32)], u32)


def _permute_bytes(high: Array, low: Array, selectors: Array) -> Array:
    both = high.astype(u64) << u64(32) | low
    result = np.zeros_like(low)
    for i in range(4):
        selector = selectors >> u32(8 * i) & u32(255)
        byte = (both >> (shift(selector, 8).astype(u64) * u64(8))).astype(u32) & u32(255)
        sign = (both >> (selector & u32(3)).astype(u64) * u64(16) + u64(15) & u64(1)).astype(
            u32
        ) * u32(255)
        byte = np.where(
            selector < 8, byte, np.where(selector < 12, sign, (selector > 12) * u32(255))
        )
        result |= byte.astype(u32) << u32(8 * i)
    return result


def _align_bits(high: Array, low: Array, count: Array) -> Array:
    return ((high.astype(u64) << u64(32) | low) >> shift(count).astype(u64)).astype(u32)


def _bit_field(x: Array, first: Array, width: Array) -> Array:
    return x >> shift(first) & ((u32(1) << shift(width)) - u32(1))


def _signed_bit_field(x: Array, first: Array, width: Array) -> Array:
    unused = (u32(32) - shift(width)).astype(i64)
    field = (x.astype(i64) >> shift(first).astype(i64)) << unused & 0xFFFFFFFF
    return np.where(shift(width) == 0, 0, field.astype(u32).view(i32) >> unused.astype(i32))


def _signed_24(x: Array) -> Array:
    return x << i32(8) >> i32(8)


def _unsigned_24(x: Array) -> Array:
    return x & u32(0xFFFFFF)


def _median(a: Array, b: Array, c: Array) -> Array:
    return np.fmax(np.fmin(a, b), np.fmin(np.fmax(a, b), c))


def div_fixup(quotient: Array, denominator: Array, numerator: Array) -> Array:
    """Gives a quotient the sign and the special cases of numerator / denominator."""
    sign = np.copysign(f32(1), denominator) * np.copysign(f32(1), numerator)
    result = np.copysign(np.abs(quotient), sign)
    zero = (numerator == 0) | np.isinf(denominator)
    infinite = (denominator == 0) | np.isinf(numerator)
    result = np.where(zero & ~infinite, np.copysign(f32(0), sign), result)
    result = np.where(infinite & ~zero, np.copysign(f32(np.inf), sign), result)
    undefined = np.isnan(numerator) | np.isnan(denominator) | (zero & infinite)
    return np.where(undefined, f32(np.nan), result)


def div_scale(value: Array, denominator: Array, numerator: Array) -> tuple[Array, Array]:
    """Scales `value`, one of the other two, into a range where a division by Newton's method works; and the flags."""
    up, down = (
        np.ldexp(value.astype(f64), 64).astype(f32),
        np.ldexp(value.astype(f64), -64).astype(f32),
    )
    is_denominator = value.view(u32) == denominator.view(u32)
    is_numerator = value.view(u32) == numerator.view(u32)
    quotient = numerator.astype(f64) / denominator.astype(f64)
    tiny_quotient = (np.abs(quotient) < TINY) & (quotient != 0)
    tiny_denominator = (np.abs(denominator) < TINY) & (denominator != 0)
    tiny_reciprocal = np.abs(1 / denominator.astype(f64)) < TINY
    huge = exponent(numerator) - exponent(denominator) >= 96
    cases = (
        ((numerator == 0) | (denominator == 0), np.full_like(value, np.nan), False),
        (huge, np.where(is_denominator, up, value), True),
        (tiny_denominator, up, False),
        (tiny_reciprocal & tiny_quotient, np.where(is_denominator, up, value), True),
        (tiny_reciprocal, down, False),
        (tiny_quotient, np.where(is_numerator, up, value), True),
        (exponent(numerator) <= 23, up, False),
    )
    conditions = [condition for condition, _, _ in cases]
    scaled = np.select(conditions, [result for _, result, _ in cases], value)
    flags = np.select(conditions, [np.full(value.shape, flag) for _, _, flag in cases], False)
    return scaled.astype(f32), flags


def div_fmas(a: Array, b: Array, c: Array, flags: Array) -> Array:
    """fma(a, b, c), with div_scale's scaling undone where it is flagged."""
    result = fused(a, b, c)
    undone = np.ldexp(result, np.where(exponent(c) > 127, 64, -64))
    return np.where(flags, undone, result).astype(f32)


def classify(x: Array, wanted: Array) -> Array:
    """Whether each value's class (NaN, infinity, normal, denormal, zero, by sign) is in the bit mask `wanted`."""
    negative, size = np.signbit(x), np.abs(x)
    by_size = (np.isnan(x), np.isinf(x), size == 0, size < np.finfo(x.dtype).tiny)
    bit = np.select(
        by_size,
        [np.full(x.shape, 1)]
        + [np.where(negative, low, high) for low, high in ((2, 9), (5, 6), (4, 7))],
        np.where(negative, 3, 8),
    )
    return (wanted >> bit.astype(u32) & u32(1)) != 0


COMPARISONS: dict[str, Function] = {
    "LT": np.less,
    "EQ": np.equal,
    "LE": np.less_equal,
    "GT": np.greater,
    "GE": np.greater_equal,
    "NE": np.not_equal,
    "LG": lambda a, b: (a < b) | (a > b),
    "NEQ": np.not_equal,
    "NLT": lambda a, b: ~(a < b),
    "NLE": lambda a, b: ~(a <= b),
    "NGT": lambda a, b: ~(a > b),
    "NGE": lambda a, b: ~(a >= b),
    "NLG": lambda a, b: ~((a < b) | (a > b)),
    "O": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "U": lambda a, b: np.isnan(a) | np.isnan(b),
    "F": lambda a, b: np.zeros(a.shape, bool),
    "T": lambda a, b: np.ones(a.shape, bool),
}

# Comparisons' type suffixes.
COMPARED = {
    "F32": "f", "F16": "h", "F64": "d", "U32": "u", "I32": "i", "U16": "w", "I16": "s", "U64": "U", "I64": "I",
}  # fmt: skip

VECTOR: dict[str, tuple[str, Function]] = {
    # moves and conversions
    "MOV_B32": ("uu", lambda a: a),
    "MOV_B16": ("ww", lambda a: a),
    "CVT_F32_F16": ("fh", lambda a: a),
    "CVT_F16_F32": ("hf", lambda a: a),
    "CVT_F32_I32": ("fi", lambda a: a),
    "CVT_F32_U32": ("fu", lambda a: a),
    "CVT_F16_I16": ("hs", lambda a: a),
    "CVT_F16_U16": ("hw", lambda a: a),
    "CVT_I32_I16": ("is", lambda a: a),
    "CVT_U32_U16": ("uw", lambda a: a),
    "CVT_F64_F32": ("df", lambda a: a),
    "CVT_F64_I32": ("di", lambda a: a),
    "CVT_F64_U32": ("du", lambda a: a),
    "CVT_F32_F64": ("fd", lambda a: a),
    "CVT_I32_F64": ("id", _to_int(-(2**31), 2**31 - 1, i32)),
    "CVT_U32_F64": ("ud", _to_int(0, 2**32 - 1, u32)),
    "CVT_I32_F32": ("if", _to_int(-(2**31), 2**31 - 1, i32)),
    "CVT_U32_F32": ("uf", _to_int(0, 2**32 - 1, u32)),
    "CVT_I16_F16": ("sh", _to_int(-(2**15), 2**15 - 1, i16)),
    "CVT_U16_F16": ("wh", _to_int(0, 2**16 - 1, u16)),
    "CVT_F32_UBYTE0": ("fu", lambda a: a & u32(255)),
    "CVT_F32_UBYTE1": ("fu", lambda a: a >> u32(8) & u32(255)),
    "CVT_F32_UBYTE2": ("fu", lambda a: a >> u32(16) & u32(255)),
    "CVT_F32_UBYTE3": ("fu", lambda a: a >> u32(24)),
    "CVT_PK_RTZ_F16_F32": ("uff", lambda a, b: pack(to_f16_toward_zero(a), to_f16_toward_zero(b))),
    "CVT_PK_I16_I32": ("uii", lambda a, b: pack(*(np.clip(x, -(2**15), 2**15 - 1).astype(i16) for x in (a, b)))),
    "CVT_PK_U16_U32": ("uuu", lambda a, b: pack(*(np.minimum(x, u32(2**16 - 1)).astype(u16) for x in (a, b)))),
    "PACK_B32_F16": ("uww", pack),
    # f32
    "ADD_F32": ("fff", np.add),
    "SUB_F32": ("fff", np.subtract),
    "SUBREV_F32": ("fff", lambda a, b: b - a),
    "MUL_F32": ("fff", np.multiply),
    "MAX_F32": ("fff", np.fmax),
    "MIN_F32": ("fff", np.fmin),
    "MAX3_F32": ("ffff", lambda a, b, c: np.fmax(np.fmax(a, b), c)),
    "MIN3_F32": ("ffff", lambda a, b, c: np.fmin(np.fmin(a, b), c)),
    "MED3_F32": ("ffff", _median),
    "MAXMIN_F32": ("ffff", lambda a, b, c: np.fmin(np.fmax(a, b), c)),
    "MINMAX_F32": ("ffff", lambda a, b, c: np.fmax(np.fmin(a, b), c)),
    "FMA_F32": ("ffff", fused),
    "DIV_FIXUP_F32": ("ffff", div_fixup),
    "LDEXP_F32": ("ffi", lambda a, n: np.ldexp(a.astype(f64), n)),
    "FREXP_MANT_F32": ("ff", lambda a: np.where(np.isfinite(a), np.frexp(a)[0], a)),
    "FREXP_EXP_I32_F32": ("if", lambda a: np.where(np.isfinite(a), np.frexp(a)[1], 0)),
    "EXP_F32": ("ff", lambda a: np.exp2(a.astype(f64))),
    "LOG_F32": ("ff", lambda a: np.log2(a.astype(f64))),
    "RCP_F32": ("ff", lambda a: 1 / a.astype(f64)),
    "RCP_IFLAG_F32": ("ff", lambda a: 1 / a.astype(f64)),
    "RSQ_F32": ("ff", lambda a: 1 / np.sqrt(a.astype(f64))),
    "SQRT_F32": ("ff", np.sqrt),
    "SIN_F32": ("ff", lambda a: np.sin(a.astype(f64) * 2 * np.pi)),
    "COS_F32": ("ff", lambda a: np.cos(a.astype(f64) * 2 * np.pi)),
    "RNDNE_F32": ("ff", np.rint),
    "FLOOR_F32": ("ff", np.floor),
    "CEIL_F32": ("ff", np.ceil),
    "TRUNC_F32": ("ff", np.trunc),
    "FRACT_F32": ("ff", lambda a: a - np.floor(a)),
    # f16
    "ADD_F16": ("hhh", np.add),
    "SUB_F16": ("hhh", np.subtract),
    "SUBREV_F16": ("hhh", lambda a, b: b - a),
    "MUL_F16": ("hhh", np.multiply),
    "MAX_F16": ("hhh", np.fmax),
    "MIN_F16": ("hhh", np.fmin),
    "FMA_F16": ("hhhh", fused),
    "RCP_F16": ("hh", lambda a: 1 / a.astype(f64)),
    "SQRT_F16": ("hh", lambda a: np.sqrt(a.astype(f64))),
    "RNDNE_F16": ("hh", np.rint),
    "LDEXP_F16": ("hhs", lambda a, n: np.ldexp(a.astype(f64), n)),
    # f64
    "ADD_F64": ("ddd", np.add),
    "MUL_F64": ("ddd", np.multiply),
    "MAX_F64": ("ddd", np.fmax),
    "MIN_F64": ("ddd", np.fmin),
    "FMA_F64": ("dddd", fused),
    "LDEXP_F64": ("ddi", np.ldexp),
    "RNDNE_F64": ("dd", np.rint),
    "CEIL_F64": ("dd", np.ceil),
    "FLOOR_F64": ("dd", np.floor),
    "TRUNC_F64": ("dd", np.trunc),
    # 32-bit integers
    "ADD_NC_U32": ("uuu", np.add),
    "SUB_NC_U32": ("uuu", np.subtract),
    "SUBREV_NC_U32": ("uuu", lambda a, b: b - a),
    "ADD_NC_I32": ("iii", np.add),
    "SUB_NC_I32": ("iii", np.subtract),
    "ADD3_U32": ("uuuu", lambda a, b, c: a + b + c),
    "MUL_LO_U32": ("uuu", np.multiply),
    "MUL_HI_U32": ("uuu", lambda a, b: a.astype(u64) * b >> u64(32)),
    "MUL_HI_I32": ("iii", lambda a, b: a.astype(i64) * b >> 32),
    "MUL_U32_U24": ("uuu", lambda a, b: _unsigned_24(a) * _unsigned_24(b)),
    "MUL_I32_I24": ("iii", lambda a, b: _signed_24(a) * _signed_24(b)),
    "MUL_HI_U32_U24": ("uuu", lambda a, b: _unsigned_24(a).astype(u64) * _unsigned_24(b) >> u64(32)),
    "MAD_U32_U24": ("uuuu", lambda a, b, c: _unsigned_24(a) * _unsigned_24(b) + c),
    "MAD_I32_I24": ("iiii", lambda a, b, c: _signed_24(a) * _signed_24(b) + c),
    "MAD_U32_U16": ("uwwu", lambda a, b, c: a.astype(u32) * b + c),
    "MAD_I32_I16": ("issi", lambda a, b, c: a.astype(i32) * b + c),
    "MIN_U32": ("uuu", np.minimum),
    "MAX_U32": ("uuu", np.maximum),
    "MIN_I32": ("iii", np.minimum),
    "MAX_I32": ("iii", np.maximum),
    "MIN3_U32": ("uuuu", lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    "MAX3_U32": ("uuuu", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "MIN3_I32": ("iiii", lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    "MAX3_I32": ("iiii", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "MED3_I32": ("iiii", lambda a, b, c: np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))),
    "MED3_U32": ("uuuu", lambda a, b, c: np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))),
    "MAXMIN_I32": ("iiii", lambda a, b, c: np.minimum(np.maximum(a, b), c)),
    "MINMAX_I32": ("iiii", lambda a, b, c: np.maximum(np.minimum(a, b), c)),
    "MAXMIN_U32": ("uuuu", lambda a, b, c: np.minimum(np.maximum(a, b), c)),
    "MINMAX_U32": ("uuuu", lambda a, b, c: np.maximum(np.minimum(a, b), c)),
    # bits
    "NOT_B32": ("uu", np.invert),
    "AND_B32": ("uuu", np.bitwise_and),
    "OR_B32": ("uuu", np.bitwise_or),
    "XOR_B32": ("uuu", np.bitwise_xor),
    "XNOR_B32": ("uuu", lambda a, b: ~(a ^ b)),
    "AND_OR_B32": ("uuuu", lambda a, b, c: a & b | c),
    "OR3_B32": ("uuuu", lambda a, b, c: a | b | c),
    "XOR3_B32": ("uuuu", lambda a, b, c: a ^ b ^ c),
    "XAD_U32": ("uuuu", lambda a, b, c: (a ^ b) + c),
    "LSHLREV_B32": ("uuu", lambda n, a: a << shift(n)),
    "LSHRREV_B32": ("uuu", lambda n, a: a >> shift(n)),
    "ASHRREV_I32": ("iui", lambda n, a: a >> shift(n).astype(i32)),
    "LSHL_ADD_U32": ("uuuu", lambda a, n, c: (a << shift(n)) + c),
    "ADD_LSHL_U32": ("uuuu", lambda a, b, n: a + b << shift(n)),
    "LSHL_OR_B32": ("uuuu", lambda a, n, c: a << shift(n) | c),
    "BFE_U32": ("uuuu", _bit_field),
    "BFE_I32": ("iiuu", _signed_bit_field),
    "BFI_B32": ("uuuu", lambda mask, a, b: mask & a | ~mask & b),
    "BFM_B32": ("uuu", lambda width, first: ((u32(1) << shift(width)) - u32(1)) << shift(first)),
    "BFREV_B32": ("uu", _reverse),
    "CLZ_I32_U32": ("uu", _leading_zeros),
    "CTZ_I32_B32": ("uu", _trailing_zeros),
    "CLS_I32": ("uu", _each(_leading_sign_bits)),
    "BCNT_U32_B32": ("uuu", lambda a, b: _popcount(a) + b),
    "MBCNT_LO_U32_B32": ("uuu", lambda mask, b: _popcount(mask & _lanes_below) + b),
    "MBCNT_HI_U32_B32": ("uuu", lambda mask, b: b),
    "ALIGNBIT_B32": ("uuuu", _align_bits),
    "ALIGNBYTE_B32": ("uuuu", lambda a, b, n: _align_bits(a, b, (n & u32(3)) * u32(8))),
    "PERM_B32": ("uuuu", _permute_bytes),
    # 16-bit integers
    "ADD_NC_U16": ("www", np.add),
    "SUB_NC_U16": ("www", np.subtract),
    "ADD_NC_I16": ("sss", np.add),
    "SUB_NC_I16": ("sss", np.subtract),
    "MUL_LO_U16": ("www", np.multiply),
    "MAD_U16": ("wwww", lambda a, b, c: a * b + c),
    "MAD_I16": ("ssss", lambda a, b, c: a * b + c),
    "MIN_U16": ("www", np.minimum),
    "MAX_U16": ("www", np.maximum),
    "MIN_I16": ("sss", np.minimum),
    "MAX_I16": ("sss", np.maximum),
    "NOT_B16": ("ww", np.invert),
    "AND_B16": ("www", np.bitwise_and),
    "OR_B16": ("www", np.bitwise_or),
    "XOR_B16": ("www", np.bitwise_xor),
    "LSHLREV_B16": ("www", lambda n, a: a << shift(n, 16)),
    "LSHRREV_B16": ("www", lambda n, a: a >> shift(n, 16)),
    "ASHRREV_I16": ("sws", lambda n, a: a >> shift(n, 16).astype(i16)),
    # 64-bit integers
    "LSHLREV_B64": ("UuU", lambda n, a: a << shift(n, 64).astype(u64)),
    "LSHRREV_B64": ("UuU", lambda n, a: a >> shift(n, 64).astype(u64)),
    "ASHRREV_I64": ("IuI", lambda n, a: a >> shift(n, 64).astype(i64)),
    "MAD_U64_U32": ("UuuU", lambda a, b, c: a.astype(u64) * b + c),
    "MAD_I64_I32": ("IiiI", lambda a, b, c: a.astype(i64) * b + c),
}  # fmt: skip

# Two-operand forms whose destination is also the addend of a three-operand instruction.
ACCUMULATING = {
    "FMAC_F32": "FMA_F32",
    "FMAC_F16": "FMA_F16",
    "DOT2ACC_F32_F16": "DOT2_F32_F16",
    "DOT2C_F32_F16": "DOT2_F32_F16",
    "PK_FMAC_F16": "PK_FMA_F16",
}

# Packed 16-bit arithmetic: the function of one half and its type.
PACKED: dict[str, tuple[str, Function]] = {
    "PK_ADD_F16": ("hhh", np.add),
    "PK_MUL_F16": ("hhh", np.multiply),
    "PK_MAX_F16": ("hhh", np.fmax),
    "PK_MIN_F16": ("hhh", np.fmin),
    "PK_FMA_F16": ("hhhh", fused),
    "PK_ADD_U16": ("www", np.add),
    "PK_SUB_U16": ("www", np.subtract),
    "PK_ADD_I16": ("sss", np.add),
    "PK_SUB_I16": ("sss", np.subtract),
    "PK_MUL_LO_U16": ("www", np.multiply),
    "PK_MAD_U16": ("wwww", lambda a, b, c: a * b + c),
    "PK_MAX_I16": ("sss", np.maximum),
    "PK_MIN_I16": ("sss", np.minimum),
    "PK_MAX_U16": ("www", np.maximum),
    "PK_MIN_U16": ("www", np.minimum),
    "PK_LSHLREV_B16": ("www", lambda n, a: a << shift(n, 16)),
    "PK_LSHRREV_B16": ("www", lambda n, a: a >> shift(n, 16)),
    "PK_ASHRREV_I16": ("sws", lambda n, a: a >> shift(n, 16).astype(i16)),
}


def dot2(a: Array, b: Array, c: Array, to_f32: Function) -> Array:
    """a[0] b[0] + a[1] b[1] + c over register halves, rounded once."""
    (a0, a1), (b0, b1) = halves(a), halves(b)
    low = to_f32(a0).astype(f64) * to_f32(b0)
    high = to_f32(a1).astype(f64) * to_f32(b1)
    return (low + high + c).astype(f32)


def f16_to_f32(x: Array) -> Array:
    """f16 bits to f32."""
    return x.view(f16).astype(f32)


def dot4(a: Array, b: Array, c: Array, a_signed: bool, b_signed: bool) -> Array:
    """Sum of four products of bytes, plus c."""
    total = c.astype(i64)
    for i in range(4):
        a_byte, b_byte = ((x >> u32(8 * i) & u32(255)).astype(np.uint8) for x in (a, b))
        left = a_byte.view(np.int8) if a_signed else a_byte
        right = b_byte.view(np.int8) if b_signed else b_byte
        total = total + left.astype(i64) * right
    return total.astype(u32)


# Lane that each lane reads in a DPP instruction, and whether it stays inside its row of 16.
def dpp_lanes(control: int) -> tuple[Array, Array]:
    """Source lane and validity of a DPP16 control word. NotImplementedError for one RDNA3 does not have."""
    lane = np.arange(32)
    row, column, n = lane & ~15, lane & 15, control & 15
    if control < 0x100:
        return (lane & ~3) + (control >> 2 * (lane & 3) & 3), np.ones(32, bool)
    source = {
        0x100: column + n,  # row_shl
        0x110: column - n,  # row_shr
        0x120: column - n & 15,  # row_ror
        0x150: np.full(32, n),  # row_share
        0x160: column ^ n,  # row_xmask
    }.get(control & 0x1F0)
    if control in (0x100, 0x110, 0x120):
        source = None
    if control == 0x140:
        source = 15 - column  # row_mirror
    if control == 0x141:
        source = column & 8 | 7 - (column & 7)  # row_half_mirror
    if source is None:
        raise NotImplementedError(f"DPP control {control:#x}")
    valid = (source >= 0) & (source < 16)
    return row + np.clip(source, 0, 15), valid
