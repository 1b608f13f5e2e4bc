"""What becomes of a tile's accumulators: SwiGLU with quantisation behind GEMM 1, rows to their sources behind GEMM 2.

Called by wave: wave w holds 64 columns of each of the tile's two blocks of 128. A thread has two rows (8 apart) and, in
each group of 32 columns, the 8 neighbouring columns from 8 * quad: weight rows are stored in the order that makes them
neighbours (`weights.row_order`). So four threads write 64 contiguous bytes of bf16 with one access each: whole sectors.
"""

from cutlass import BFloat16, Float32, Int32, Int64, const_expr, cute, range_constexpr

from cute_kernels import flags, memory, numerics, schedule
from cute_kernels.prologue import CODE_BITS


def columns(acc, block: int, group: int, half: int):
    """Accumulators of 8 neighbouring columns: of block 0 or 1 (32 registers each), group of 32 columns, row half."""
    return [acc[32 * block + 16 * group + 4 * j + 2 * half + b] for j in range(4) for b in range(2)]


def index(block: int, group: int, half: int):
    return [32 * block + 16 * group + 4 * j + 2 * half + b for j in range(4) for b in range(2)]


@cute.jit
def forward(k, t, wave, kind, slot):
    """SwiGLU + quantise behind GEMM 1, store rows behind GEMM 2."""
    row, n = Int32(k.ring[0, slot]), Int32(k.ring[1, slot])
    if kind == schedule.GEMM1:
        swiglu(k, t, wave, row, n, slot)
        if const_expr(wave == 1):
            store_h(k, t, row, n)
    if kind == schedule.GEMM2:
        store_y(k, t, wave, n, slot)


@cute.jit
def swiglu(k, t, wave, row, n, slot):
    """h = (silu(gate) * up) * p from bf16-rounded gate (block 0) and up (block 1); h replaces the gates."""
    acc = t.accs[wave]
    for half in range_constexpr(2):
        p = Float32(k.sP[t.row + 8 * half, slot])
        for group in range_constexpr(2):
            gate_bits, gate = numerics.to_bf16(columns(acc, 0, group, half))
            up_bits, up = numerics.to_bf16(columns(acc, 1, group, half))
            if const_expr(k.problem.save):
                at = (
                    Int64(row + t.row + 8 * half) * (4 * k.problem.intermediate)
                    + (n * 128 + wave * 64 + group * 32 + t.quad * 8) * 2
                )
                at += k.gate_up.iterator.toint()
                memory.store_vector(at, gate_bits)
                memory.store_vector(at + 2 * k.problem.intermediate, up_bits)
            if const_expr(k.problem.clamp):
                gate = [numerics.clamp_max(g, k.limit) for g in gate]
                up = [numerics.clamp_max(numerics.clamp_min(u, -k.limit), k.limit) for u in up]
            for i, g, u in zip(index(0, group, half), gate, up, strict=True):
                acc[i] = (numerics.silu(g) * u) * p


@cute.jit
def store_h(k, t, row, n):
    """Quantise 128 columns of h and store them with their scale: hq [P, I] row-major, hs [I / 128, P]."""
    accs = t.accs
    hs = k.hs
    for half in range_constexpr(2):
        r = row + t.row + 8 * half
        parts = [(w, g, columns(accs[w], 0, g, half)) for w in range(2) for g in range(2)]
        amax = Float32(0.0)
        for _, _, values in parts:
            amax = numerics.abs_max(values, amax)
        amax = cute.arch.fmax(amax, cute.arch.shuffle_sync_bfly(amax, 1))
        amax = cute.arch.fmax(amax, cute.arch.shuffle_sync_bfly(amax, 2))
        scale = numerics.scale_of(amax, k.problem.pow2_scales)
        inv = numerics.reciprocal(scale)
        if t.quad == 0:
            hs[n, r] = scale
        at = k.h.iterator.toint() + Int64(r) * k.problem.intermediate + (n * 128 + t.quad * 8)
        for w, g, values in parts:
            memory.store_vector(at + (w * 64 + g * 32), numerics.to_e4m3(values, inv))
    # ordinary stores here; TMA and bulk copies of GEMM-2 loaders read them, behind the block's `done` counter
    cute.arch.fence_proxy("async.global")


@cute.jit
def store_y(k, t, wave, n, slot):
    """Rows of y, bf16, to [token * K + k, H] of the rank that the row came from; padding rows nowhere."""
    for half in range_constexpr(2):
        code = Int32(k.sX[t.row + 8 * half, slot])
        if code >= 0:
            slot_of = Int64(code & ((1 << CODE_BITS) - 1))
            at = k.y_base[code >> CODE_BITS] + slot_of * (2 * k.problem.hidden) + (n * 512 + wave * 128 + t.quad * 16)
            for block in range_constexpr(2):
                if const_expr(block == 0 or k.problem.hidden % 256 == 0):
                    store_y_block(t.accs[wave], block, half, at)
                else:
                    if n * 256 + 128 < k.problem.hidden:
                        store_y_block(t.accs[wave], block, half, at)


@cute.jit
def store_y_block(acc, block, half, at: Int64):
    for group in range_constexpr(2):
        memory.store_vector(at + (block * 256 + group * 64), numerics.pack(columns(acc, block, group, half), BFloat16))


@cute.jit
def count_tile(k, counter: Int64):
    """For the stores of h by all math warps, which have arrived at `ended`; reader: the schedulers of this block's
    GEMM-2 tiles, on this rank. By the courier."""
    if k.lane == 0:
        flags.add_release(counter, 1, "gpu")
