"""The recipe's arithmetic on registers: scales, reciprocals, e4m3, SiLU. One source for every kernel that quantises."""

from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, const_expr, cute

MIN_AMAX = 2.0**-100
LARGEST = 3.4028234663852886e38
NEGATIVE_LOG2_E = -1.4426950408889634


def scale_of(amax: Float32, pow2: bool) -> Float32:
    """fl32(max(amax, 2^-100) * fl32(1 / 448)), with `pow2` rounded up to a power of two."""
    scale = cute.arch.fmax(amax, Float32(MIN_AMAX)) * Float32(1.0 / 448.0)
    if const_expr(pow2):
        bits = cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[scale])
        up = (bits + 0x7FFFFF) & Int32(-0x800000)
        scale = cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[up])
    return scale


def reciprocal(scale: Float32) -> Float32:
    """fl32(1 / scale), correctly rounded. Scales lie between 2^-109 and 2^120, where an approximation with one Newton
    step is exact (it is what rcp.rn does there, without its branch for the rest); 1 / inf is 0."""
    r = cute.arch.rcp_approx(scale)
    error = cute.math.fma(-scale, r, Float32(1.0))
    exact = cute.math.fma(r, error, r)
    return cute.arch.inline_ptx(
        "{ .reg .pred p; setp.le.f32 p, {$r1}, 0f7F7FFFFF; selp.f32 {$w0}, {$r0}, 0f00000000, p; }",
        write_only_types=[Float32],
        read_only_args=[exact, scale],
    )


def sigmoid(x: Float32) -> Float32:
    """rcp.approx(1 + ex2.approx(-x log2 e))"""
    return cute.arch.rcp_approx(1.0 + cute.math.exp2(x * NEGATIVE_LOG2_E, fastmath=True))


def silu(x: Float32) -> Float32:
    """x * sigmoid(x)"""
    return x * sigmoid(x)


def clamp_max(x: Float32, limit: Float32) -> Float32:
    """min(x, limit); NaN stays NaN."""
    return cute.arch.inline_ptx(
        "min.NaN.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[x, limit]
    )


def clamp_min(x: Float32, limit: Float32) -> Float32:
    """max(x, limit); NaN stays NaN."""
    return cute.arch.inline_ptx(
        "max.NaN.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[x, limit]
    )


def abs_max(values, start: Float32) -> Float32:
    """Largest magnitude of `values` and start, ignoring NaN."""
    for v in values:
        start = cute.arch.fmax(start, cute.math.absf(v))
    return start


def pack(values, dtype):
    """Registers of `dtype`, rounded to nearest even from a list of floats (e4m3: saturating; NaN stays NaN)."""
    x = cute.make_rmem_tensor(len(values), Float32)
    for i, v in enumerate(values):
        x[i] = v
    y = cute.make_rmem_tensor(len(values), dtype)
    y.store(x.load().to(dtype))
    return y


def to_bf16(values):
    """(bf16 registers, the same values as floats), for an even number of values.

    By hand, because single conversions would go to the special function units, which the epilogues wait for: pairs are
    packed by the ALU, and a bf16 is the upper half of its float.
    """
    words = cute.make_rmem_tensor(len(values) // 2, Int32)
    back = []
    for i in range(0, len(values), 2):
        word, low, high = cute.arch.inline_ptx(
            "cvt.rn.bf16x2.f32 {$w0}, {$r1}, {$r0}; shl.b32 {$w1}, {$w0}, 16; and.b32 {$w2}, {$w0}, 0xFFFF0000;",
            write_only_types=[Int32, Int32, Int32],
            read_only_args=[values[i], values[i + 1]],
        )
        words[i // 2] = word
        back += [as_float(low), as_float(high)]
    return cute.recast_tensor(words, BFloat16), back


def as_float(bits: Int32) -> Float32:
    """The float of a bit pattern."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[bits])


def to_e4m3(values, inv: Float32):
    return pack([v * inv for v in values], Float8E4M3FN)
