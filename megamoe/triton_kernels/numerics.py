"""The recipe's arithmetic as device functions: e4m3 and bf16 rounding, scales, the sigmoid, the promoted multiply-add.

Under Triton's interpreter (TRITON_INTERPRET=1, read when triton and this module are imported) casts to e4m3 and bf16 do
not round as the hardware does and there is neither inline assembly nor a fused multiply-add. `INTERPRETED` selects
plain arithmetic with the same results there; compiled code never contains it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

INTERPRETED: tl.constexpr = tl.constexpr(bool(knobs.runtime.interpret))

_INV_E4M3_MAX: tl.constexpr = tl.constexpr(1.0 / 448.0)
_MIN_AMAX: tl.constexpr = tl.constexpr(2.0**-100)
_NEG_LOG2_E: tl.constexpr = tl.constexpr(-1.4426950408889634)


@triton.jit
def as_int64(x):
    """A scalar as 64 bits, also where it is a Python integer (a loop's under the interpreter) or a constant."""
    return tl.full((), 0, tl.int64) + x


@triton.jit
def to_e4m3(v):
    """fp32 to e4m3: nearest even, saturated to +-448, NaN to the NaN byte."""
    if INTERPRETED:
        magnitude = tl.minimum(tl.abs(v), 448.0)
        bits = magnitude.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)  # exponent bias 127 to 7
        # Adding 2^14, whose last place is 2^-9, rounds to a multiple of e4m3's smallest number.
        small = (magnitude + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        code = tl.where(magnitude < 0.015625, small, normal)
        code = tl.where(v == v, code, 0x7F) | ((v.to(tl.int32, bitcast=True) >> 24) & 0x80)
        return code.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    else:
        return v.to(tl.float8e4nv)


@triton.jit
def pack_e4m3(v0, v1, v2, v3):
    """Four fp32 tensors, rounded as `to_e4m3` does, as one of 32-bit words; v0 is the lowest byte.

    The bytes are put together where they are rounded: with Triton 3.6 on Hopper e4m3 values that the compiler takes
    apart in the kernel that rounded them come out wrong, 32-bit words do not.
    """
    if INTERPRETED:
        word = to_e4m3(v0).to(tl.uint8, bitcast=True).to(tl.uint32)
        word |= to_e4m3(v1).to(tl.uint8, bitcast=True).to(tl.uint32) << 8
        word |= to_e4m3(v2).to(tl.uint8, bitcast=True).to(tl.uint32) << 16
        word |= to_e4m3(v3).to(tl.uint8, bitcast=True).to(tl.uint32) << 24
        return word.to(tl.int32, bitcast=True)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; "
            "cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }",
            "=r,f,f,f,f",
            [v0, v1, v2, v3],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def from_e4m3(q):
    """e4m3 to fp32, exactly."""
    if INTERPRETED:
        bits = q.to(tl.uint8, bitcast=True).to(tl.int32)
        code = bits & 0x7F
        normal = ((code + (120 << 3)) << 20).to(tl.float32, bitcast=True)
        magnitude = tl.where(code < 8, code.to(tl.float32) * 0.001953125, normal)
        magnitude = tl.where(code == 0x7F, float("nan"), magnitude)
        return magnitude * tl.where(bits >= 0x80, -1.0, 1.0)
    else:
        return q.to(tl.float32)


@triton.jit
def to_bf16(v):
    """fp32 to bf16, nearest even."""
    if INTERPRETED:
        bits = v.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(v == v, rounded, 0x7FC0)
        return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return v.to(tl.bfloat16)


@triton.jit
def magnitude_or_zero(v):
    """|v|, and 0 for NaN: what the largest magnitude of a block is taken over."""
    return tl.where(v == v, tl.abs(v), 0.0)


@triton.jit
def scale_of(amax, POW2: tl.constexpr):
    """The scale of blocks whose largest magnitude is `amax`; POW2 rounds it up to a power of two."""
    scale = tl.maximum(amax, _MIN_AMAX) * _INV_E4M3_MAX
    if POW2:
        scale = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & -0x800000).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def inverse(scale):
    """1 / scale as IEEE rounds it."""
    return tl.div_rn(tl.zeros_like(scale) + 1.0, scale)


@triton.jit
def sigmoid(x):
    """1 / (1 + 2^(-x log2 e)) with the hardware's approximate power and reciprocal."""
    t = x * _NEG_LOG2_E
    if INTERPRETED:
        return 1.0 / (1.0 + tl.exp2(t))
    else:
        power = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [t], dtype=tl.float32, is_pure=True, pack=1
        )
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + power], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def multiply_add(a, b, c):
    """fma(a, b, c) in fp32, one rounding."""
    if INTERPRETED:
        return (a.to(tl.float64) * b.to(tl.float64) + c.to(tl.float64)).to(tl.float32)
    else:
        return tl.fma(a, b, c)


@triton.jit
def dot(a, b):
    """a @ b in fp32 from zero: for e4m3 the tensor core's own accumulator, over one 128-deep block."""
    if INTERPRETED:
        return tl.dot(from_e4m3(a), from_e4m3(b))
    else:
        return tl.dot(a, b)


@triton.jit
def dot_add(a, b, acc):
    """acc + a @ b in fp32, for bf16 operands."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    else:
        return tl.dot(a, b, acc)


@triton.jit
def clamp_limits(gate, up, CLAMP: tl.constexpr):
    """min(gate, c) and clamp(up, -c, c), where CLAMP is c or 0 for none; NaN stays NaN."""
    if CLAMP > 0:
        gate = tl.where(gate > CLAMP, CLAMP, gate)
        up = tl.where(up > CLAMP, CLAMP, tl.where(up < -CLAMP, -CLAMP, up))
    return gate, up
