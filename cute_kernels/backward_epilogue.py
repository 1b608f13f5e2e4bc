"""What becomes of dgrad's accumulators: dSwiGLU with quantisation behind GEMM A, rows to their sources behind GEMM B,
and dp on its way home.

A thread holds, of each of its two rows, 32 columns of each of the tile's two blocks of 128: in quarter 2 * wave + group
of the block the 8 neighbours from 8 * quad (see epilogues). Rows of a wave differ by 8: `half`.
"""

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, const_expr, cute, range_constexpr
from cutlass.cute.nvgpu import warpgroup

from cute_kernels import combine, flags, mainloop, memory, numerics, schedule
from cute_kernels.epilogues import columns, index, store_y
from cute_kernels.prologue import CODE_BITS, expert_of
from cute_kernels.schedule import smaller
from cute_kernels.tile_config import TILE_M, TILE_N

QUARTERS = [(w, g) for w in range(2) for g in range(2)]  # of 128 columns, ascending


@cute.jit
def backward(k, t, wave, kind, slot, stage):
    """dSwiGLU behind GEMM A once both waves are there, store rows behind GEMM B."""
    row, n = Int32(k.ring[0, slot]), Int32(k.ring[1, slot])
    if kind == schedule.GEMM1:
        if const_expr(wave == 0):
            prefetch_gate_up(k, t, row, n)
        else:
            # the epilogue wants the registers of the wave in flight, the next tile's first: that is multiplied again
            warpgroup.wait_group(0)
            dswiglu(k, t, row, n, slot)
            mainloop.issue_again(t, stage)
    elif kind == schedule.GEMM2:  # "else": accumulators of a GEMM-A tile are not kept for it
        store_y(k, t, wave, n, slot)


# ---------------------------------------------------------------- behind GEMM A


@cute.jit
def dswiglu(k, t, row, n, slot):
    """From dh and the saved gate and up: quantised [dg; du], the operands of wgrad, sums of dp over 128 columns.

    Registers hold 128 values of dh, so a unit of 32 columns of one row goes at a time; du takes the place of dh. The
    loop over the tile's blocks (one where I is an odd multiple of 128) and loads that stand behind all stores of the
    unit before keep the compiler from mixing units, for which there are not enough registers; and code that is run
    twice is fetched once."""
    accs = t.accs
    for block in cutlass.range(smaller(Int32(2), k.problem.blocks - 2 * n), unroll=1):
        for half in range_constexpr(2):
            unit(k, t, row, n, block, half, slot)
        for w in range_constexpr(2):
            acc = accs[w]
            for i in range_constexpr(32):
                acc[i] = acc[32 + i]
    # ordinary stores of [dg; du] and scales here; TMA and bulk copies of GEMM-B loaders read them, behind the block's
    # `done` counter
    cute.arch.fence_proxy("async.global")


@cute.jit
def prefetch_gate_up(k, t, row, n):
    """The tile's gate and up into L2, while its last wave is multiplied: of each row and block two lines of 128 bytes
    of either, one a lane of the quad."""
    inter = k.problem.intermediate
    at = k.gate_up.iterator.toint() + (n * TILE_N + t.quad % 2 * 64 + t.quad // 2 * inter) * 2
    for half in range_constexpr(2):
        line = at + Int64(row + t.row + 8 * half) * (4 * inter)
        memory.prefetch(line)
        if const_expr(inter % TILE_N == 0):
            memory.prefetch(line + 256)
        else:
            if n * TILE_N + 128 < inter:
                memory.prefetch(line + 256)


@cute.jit
def load_gate_up(k, t, row, n, block, half):
    """(gate, up) in bf16 of a unit: 4 x 8 columns each."""
    at = k.gate_up.iterator.toint() + Int64(row + t.row + 8 * half) * (4 * k.problem.intermediate)
    at += (n * TILE_N + block * 128 + t.quad * 8) * 2
    return [
        (
            memory.load_vector(at + (w * 128 + g * 64), BFloat16, 8),
            memory.load_vector(at + (w * 128 + g * 64) + 2 * k.problem.intermediate, BFloat16, 8),
        )
        for w, g in QUARTERS
    ]


def rounded_product(a, b) -> Float32:
    """a * b, rounded: never fused with an addition that follows, as every backend does it."""
    return cute.arch.inline_ptx("mul.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b])


def zero_unless_at_most(value, x, limit) -> Float32:
    """value if x <= limit, else 0."""
    return cute.arch.inline_ptx(
        "{ .reg .pred p; setp.le.f32 p, {$r1}, {$r2}; selp.f32 {$w0}, {$r0}, 0f00000000, p; }",
        write_only_types=[Float32],
        read_only_args=[value, x, limit],
    )


@cute.jit
def unit(k, t, row, n, block: Int32, half, slot):
    """This thread's 32 columns of a row and block, whose dh is where block 0's was.

    Order of dp inside 128 columns: quarters of 32 ascending, then columns at distance 4, 2, 1, 8, 16."""
    loaded = load_gate_up(k, t, row, n, block, half)
    d_gate = cute.make_rmem_tensor(32, Float32)
    sums = None
    for i in range_constexpr(len(QUARTERS)):
        dots = quarter(k, t, row, n, block, half, i, slot, loaded[i], d_gate)
        sums = dots if sums is None else [a + b for a, b in zip(sums, dots, strict=True)]
    store_dp(k, t, row + t.row + 8 * half, 2 * n + block, sums)
    d_up = [x for w, g in QUARTERS for x in columns(t.accs[w], 0, g, half)]
    quantize(k, t, row, n, block, half, 1, d_up)
    quantize(k, t, row, n, block, half, 0, [d_gate[j] for j in range(32)])


@cute.jit
def quarter(k, t, row, n, block, half, i, slot, loaded, d_gate):
    """8 columns: dg into d_gate, du in place of dh, both and p * act stored as bf16. Returns dh * act."""
    w, g = QUARTERS[i]
    p = Float32(k.sP[t.row + 8 * half, slot])
    inter = k.problem.intermediate
    at_act = Int64(row + t.row + 8 * half) * (2 * inter) + (n * TILE_N + block * 128 + w * 64 + g * 32 + t.quad * 8) * 2
    at_grad = k.grad_bf16.iterator.toint() + at_act + Int64(row + t.row + 8 * half) * (2 * inter)
    acc = t.accs[w]
    dots, dg, du, weighted = [], [], [], []
    gates, ups = (v.load().to(Float32) for v in loaded)
    for j, dh in enumerate(columns(acc, 0, g, half)):
        raw_gate, raw_up = gates[j], ups[j]
        gate, up = raw_gate, raw_up
        if const_expr(k.problem.clamp):
            gate = numerics.clamp_max(gate, k.limit)
            up = numerics.clamp_max(numerics.clamp_min(up, -k.limit), k.limit)
        sigma = numerics.sigmoid(gate)
        silu = gate * sigma
        act = silu * up
        d_act = p * dh
        by_up = d_act * silu
        by_gate = (d_act * up) * (sigma * (1.0 + rounded_product(gate, 1.0 - sigma)))
        if const_expr(k.problem.clamp):
            by_up = zero_unless_at_most(by_up, cute.math.absf(raw_up), k.limit)
            by_gate = zero_unless_at_most(by_gate, raw_gate, k.limit)
        dots.append(rounded_product(dh, act))
        dg.append(by_gate)
        du.append(by_up)
        weighted.append(act * p)
    memory.store_vector(k.weighted.iterator.toint() + at_act, numerics.pack(weighted, BFloat16))
    memory.store_vector(at_grad, numerics.pack(dg, BFloat16))
    memory.store_vector(at_grad + 2 * inter, numerics.pack(du, BFloat16))
    for j, place in enumerate(index(0, g, half)):
        d_gate[8 * i + j] = dg[j]
        acc[place] = du[j]
    return dots


def folded(values):
    """The upper half added to the lower one until one is left."""
    while len(values) > 1:
        middle = len(values) // 2
        values = [a + b for a, b in zip(values[:middle], values[middle:], strict=True)]
    return values[0]


@cute.jit
def store_dp(k, t, r, block: Int32, sums):
    """The sum of 8 columns of each lane of a quad, lower half first, then of the quad."""
    total = folded(sums)
    total = total + cute.arch.shuffle_sync_bfly(total, 1)
    total = total + cute.arch.shuffle_sync_bfly(total, 2)
    parts = k.dp_parts
    if t.quad == 0:
        # reader: the courier that counts the row block's last GEMM-A tile, of whatever CTA
        parts[block, r] = total


@cute.jit
def quantize(k, t, row, n, block, half, which, values):
    """32 of a row's 128 columns of dg (which = 0) or du (1) into grad [P, 2I], their scale into grad_s."""
    r = row + t.row + 8 * half
    amax = numerics.abs_max(values, Float32(0.0))
    amax = cute.arch.fmax(amax, cute.arch.shuffle_sync_bfly(amax, 1))
    amax = cute.arch.fmax(amax, cute.arch.shuffle_sync_bfly(amax, 2))
    scale = numerics.scale_of(amax, k.problem.pow2_scales)
    inv = numerics.reciprocal(scale)
    inter, grad_s = k.problem.intermediate, k.hs
    if t.quad == 0:
        grad_s[which * k.problem.blocks + 2 * n + block, r] = scale
    at = k.h.iterator.toint() + Int64(r) * (2 * inter) + (which * inter + n * TILE_N + block * 128 + t.quad * 8)
    for i in range_constexpr(len(QUARTERS)):
        q = numerics.to_e4m3(values[8 * i : 8 * i + 8], inv)
        memory.store_vector(at + 32 * i, q)


# ---------------------------------------------------------------- dp


@cute.jit
def count_tile(k, counter: Int64, row):
    """Counts a GEMM-A tile of the block at `row`; the last one's courier sends the block's dp home."""
    before = Int32(0)
    if k.lane == 0:
        # releases this CTA's [dg; du] (reader: the schedulers of this block's GEMM-B tiles) and dp_parts; acquires the
        # dp_parts of the couriers that counted before
        before = flags.add_fetch_ordered(counter, 1, "gpu")
    before = cute.arch.shuffle_sync(before, 0)
    cute.arch.sync_warp()
    if before == k.problem.n1 - 1:
        send_dp(k, row)


@cute.jit
def send_dp(k, row):
    """dp of 128 rows: sums of blocks, ascending, to the ranks that the rows came from."""
    parts, step = k.dp_parts.iterator.toint(), Int64(k.dp_parts.shape[1]) * 4
    r = row + k.lane
    while r < row + TILE_M:
        code = Int32(k.codes[r])
        total = Float32(0.0)
        at = parts + Int64(r) * 4
        block = Int32(0)
        while block < k.problem.blocks:
            total = total + Float32(cute.arch.load(memory.float_at(at), Float32, cop="cg"))
            at += step
            block += 1
        if code >= 0:
            peers = k.peers
            home = peers[code >> CODE_BITS] + k.layout.slots + Int64(code & ((1 << CODE_BITS) - 1)) * 4
            # reader: collect of that rank, behind this CTA's last word at HOME (sys)
            cute.arch.store(memory.float_at(home), total)
        r += 32


def deadline(k) -> Int32:
    """For tests, as if rows of dX were long on their way: when they may be announced (even; units of `flags.now`)."""
    return cute.arch.shuffle_sync((flags.now() + (k.problem.delay_us * 1000 // 1024 + 2)) & Int32(-2), 0)


@cute.jit
def hold_back(k, until: Int32):
    """Waits until then; 0: for the whole delay, from now on."""
    if until == 0:
        until = deadline(k)
    while flags.now() - until < 0:
        flags.nanosleep(1000)


@cute.jit
def collect(k):
    """dx, and dp of this rank's tokens: exactly 0 where a slot has no expert, NaN after a failed call."""
    ok = combine.combine(k, k.cta * 8 + k.warp - 4, k.num_ctas * 8)
    dp = k.dp
    i = (k.cta * 8 + k.warp - 4) * 32 + k.lane
    while i < k.num_slots:
        value = Float32(0.0)
        if expert_of(k, i) >= 0:
            value = Float32(cute.arch.load(memory.float_at(k.base + k.layout.slots + Int64(i) * 4), Float32, cop="cg"))
        if ok == 0:
            value = Float32(float("nan"))
        dp[i] = value
        i += k.num_ctas * 256
    if ok == 0:
        spoil_operands(k)


@cute.jit
def spoil_operands(k):
    """Behind a failed call no weight gradient looks like a result: the rows of wgrad's operands become NaN."""
    nan = cute.make_rmem_tensor(4, Int32)
    nan.fill(0x7FC07FC0)  # two of bf16
    weighted, grad = k.weighted.iterator.toint(), k.grad_bf16.iterator.toint()
    granules = Int32(k.offs_g[k.num_local]) * (k.problem.intermediate // 8)
    i = (k.cta * 8 + k.warp - 4) * 32 + k.lane
    while i < granules:
        memory.store_vector(weighted + Int64(i) * 16, nan)
        for half in range_constexpr(2):
            memory.store_vector(grad + Int64(i) * 32 + 16 * half, nan)
        i += k.num_ctas * 256
