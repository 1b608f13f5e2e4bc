"""The math warpgroups: block-scaled FP8 wgmma with promotion in fp32, one tile after the other without a gap.

Each warpgroup owns 64 rows of a 128 x 256 tile. A k-block of 128 is two waves of m64n128: four wgmmas into a temporary
accumulator, which is then added, scaled, to the final one (`acc = fma(partial, sA * sB, acc)`). Registers leave room
for one temporary beside 64 x 256 final values, so a warpgroup has one wave in flight; the other warpgroup's wave fills
the tensor cores while this one promotes. That holds as long as nothing but the promotion stands between two waves:

    - the wait for the next k-block, its scales and descriptors come before the promotion;
    - the first wave of the next tile is issued before the end of this tile's epilogue, and the first half of the
      epilogue runs under the tile's last wave.

Wave w of a tile takes 64 columns of each of the tile's two blocks of 128 (weight rows are stored in that order).
"""

import cutlass
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float8E4M3FN, Float32, Int32, const_expr, cute, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from cute_kernels import schedule, trace
from cute_kernels.loader import advance
from cute_kernels.tile_config import BLOCK, TILE_M

WAVE_N = 128


class MathThread:
    """What a thread of the math warpgroups holds: its place, the MMA atoms and its operands."""

    def __init__(self, k):
        self.tid = k.tid - 128
        self.wg = cute.arch.make_warp_uniform(self.tid // 128)
        self.row = self.tid // 32 * 16 + k.lane // 4  # of the tile; the thread's other row is 8 below
        self.quad = k.lane % 4
        # two atoms, the flag set once in each: set inside a loop it would not survive tracing
        self.mma = [
            sm90.make_trivial_tiled_mma(
                Float8E4M3FN, Float8E4M3FN, OperandMajorMode.K, OperandMajorMode.K, Float32, (2, 1, 1), (64, WAVE_N)
            )
            for _ in range(2)
        ]
        self.mma[0].set(warpgroup.Field.ACCUMULATE, False)
        self.mma[1].set(warpgroup.Field.ACCUMULATE, True)
        thread = self.mma[0].get_slice(cute.make_layout(2, stride=128)(self.wg))
        self.a = self.mma[0].make_fragment_A(thread.partition_A(k.sA))
        b = self.mma[0].make_fragment_B(thread.partition_B(k.sB))
        b = cute.logical_divide(b, (None, 1, None, None))
        self.b = [b[None, (None, w), None, None] for w in range(2)]
        shape = thread.partition_shape_C((TILE_M, WAVE_N))
        self.tmp = cute.make_rmem_tensor(shape, Float32)
        self.accs = [cute.make_rmem_tensor(shape, Float32) for _ in range(2)]


@cute.jit
def math(k, finish):
    """All tiles of this CTA. finish(k, t, wave, kind, slot, stage): a strategy's epilogue, called for either wave of a
    tile as soon as its accumulators t.accs[wave] are final; stage: of the wave in flight."""
    t = MathThread(k)
    between = k.direction.between
    cute.arch.mbarrier_wait(k.full, 0)
    slot = Int32(0)
    kind = Int32(k.ring[2, 0])
    stage, phase = Int32(0), Int32(0)
    scale = scales(k, t, 0)
    issue(t, 0, 0)
    while kind >= 0:
        since = trace.begin(k)
        if const_expr(k.steals):
            if kind >= schedule.HOMEWARD:
                stage, phase, scale = apart(k, t, between, kind, slot, stage, phase, scale)
            else:
                stage, phase, scale = tile(k, t, finish, kind, slot, stage, phase, scale)
        else:
            stage, phase, scale = tile(k, t, finish, kind, slot, stage, phase, scale)
        # every warp's stores of this tile stand before this arrival; reader: the courier
        cute.arch.sync_warp()
        if k.lane == 0:
            cute.arch.mbarrier_arrive(k.ended + slot)
            if const_expr(k.config.trace):
                if t.tid == 0:
                    trace.event(
                        k, trace.MATH, trace.of_tile(kind), since, Int32(k.ring[0, slot]) // TILE_M, k.ring[1, slot]
                    )
        slot += 1
        if slot == k.config.ring:
            slot = Int32(0)
        kind = Int32(k.ring[2, slot])
    warpgroup.wait_group(0)
    if k.lane == 0:
        cute.arch.mbarrier_arrive(k.ended + slot)


@cute.jit
def tile(k, t, finish, kind, slot, stage, phase, scale):
    """A tile whose first wave is in flight, until that of the next one is."""
    accs, stages, problem = t.accs, k.config.stages, k.problem
    for acc in accs:
        acc.fill(0.0)
    bodies = Int32(problem.k1 // k.unroll)
    if kind == schedule.GEMM2:
        bodies = Int32(problem.k2 // k.unroll)
    if kind == schedule.PAUSE:
        bodies = Int32(1)
    if const_expr(k.steals):
        if kind >= schedule.WGRAD:
            bodies = Int32(k.ring[3, slot])
    for body in cutlass.range(bodies, unroll=1):
        for u in range_constexpr(k.unroll):
            # wave 0 of this k-block is in flight. ptxas keeps wgmma asynchronous across the back edge only if a
            # wait for all of them comes first behind it; otherwise it serialises all of them
            here = u % stages if k.unroll % stages == 0 else stage
            retire(t, 0, scale[0])
            issue(t, 1, here)
            if const_expr(u == k.unroll - 1):
                if body == bodies - 1:
                    finish(k, t, 0, kind, slot, here)
            # The next k-block, or the next tile's first, or behind the last tile an empty stage: the wave issued
            # then reads stale memory and is dropped
            scale_1 = scale[1]
            release = k.empty + here
            if const_expr(k.unroll % (2 * stages) == 0):
                next_stage, next_phase = (u + 1) % stages, (u + 1) // stages % 2
            else:
                stage, phase = advance(stage, phase, stages)
                next_stage, next_phase = stage, phase
                if const_expr(k.unroll % stages == 0):
                    next_stage = (u + 1) % stages
            cute.arch.mbarrier_wait(k.full + next_stage, next_phase)
            scale = scales(k, t, next_stage)
            warpgroup.wait_group(0)
            if k.lane == 0:
                cute.arch.mbarrier_arrive(release)
            retire(t, 1, scale_1)
            issue(t, 0, next_stage)
    finish(k, t, 1, kind, slot, 0 if k.unroll % stages == 0 else stage)
    return stage, phase, scale


@cute.jit
def apart(k, t, between, kind, slot, stage, phase, scale):
    """An entry of the ring that is no tile and has one stage (see backward_steal): the wave in flight is dropped, the
    next tile's first one issued behind the work."""
    warpgroup.wait_group(0)
    between(k, t, kind, slot, stage)
    cute.arch.sync_warp()
    if k.lane == 0:
        cute.arch.mbarrier_arrive(k.empty + stage)
    stage, phase = advance(stage, phase, k.config.stages)
    cute.arch.mbarrier_wait(k.full + stage, phase)
    scale = scales(k, t, stage)
    issue_again(t, stage)
    return stage, phase, scale


@cute.jit
def scales(k, t, stage):
    """For each wave, for its 64 columns of either block of 128: the scales of this thread's two rows."""
    sSA, sSB = k.sSA, k.sSB
    a0, a1 = sSA[t.row, stage], sSA[t.row + 8, stage]
    pair = [(a0 * b, a1 * b) for b in (sSB[0, stage], sSB[1, stage])]
    return [pair, pair]


@cute.jit
def issue(t, wave, stage):
    """Start the four wgmmas of a wave."""
    warpgroup.fence()
    for i in range_constexpr(BLOCK // 32):
        cute.gemm(t.mma[min(i, 1)], t.tmp, t.a[None, None, i, stage], t.b[wave][None, None, i, stage], t.tmp)
    warpgroup.commit_group()


@cute.jit
def issue_again(t, stage):
    """The wave that was in flight when an epilogue wanted its registers. Clearing tells the compiler that nobody reads
    what it was."""
    tmp = t.tmp
    tmp.fill(0.0)
    issue(t, 0, stage)


@cute.jit
def retire(t, wave, scale):
    """Wait for the wave in flight and promote it. The pin keeps LLVM from sinking the additions behind the next wgmma,
    whose accumulators would then need copies and make ptxas serialise."""
    acc, tmp = t.accs[wave], t.tmp
    warpgroup.wait_group(0)
    for i in range_constexpr(WAVE_N // 2):
        acc[i] = cute.math.fma(tmp[i], scale[i // 32][i // 2 % 2], acc[i])
    cute.arch.inline_ptx("// pinned", read_only_args=[acc[i] for i in range(WAVE_N // 2)])
