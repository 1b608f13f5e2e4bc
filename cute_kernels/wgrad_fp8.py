"""The FP8 form of the wgrad GEMM: transposed e4m3 operands, scales along rows, promotion to fp32 on the CUDA cores."""

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float8E4M3FN, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from .wgrad import WAVE_N, WgradGemm
from .wgrad_config import RING, STAGES, TILE_M, TILE_N

BLOCK_K = 128


class WgradFp8(WgradGemm):
    """FP8 operands as `wgrad_transpose` lays them out: [P / 128, width, 128], a row block's columns behind each other.

        dW[m, n] = sum over row blocks b, ascending, of sa[b, m] * sb[b, n // 128] * (A[b, m] . B[b, n])

    A k-block is one row block. A math warpgroup takes it in two waves, columns 0 .. 127 and 128 .. 255, each four
    wgmmas into one temporary, which is then scaled and added to the final accumulators in fp32. Only the promotion
    stands between two waves of a warpgroup: the wait for the next k-block and its scales come before it, the first
    wave of the next task starts before this task's second half is stored, and the first half is stored under the last
    wave. Behind the last task that wave multiplies a stale stage and is dropped, as is that of a task without rows.

    Pad rows are zeros in the copies; nothing is masked here. Leaving out the wgmmas of slices of 64 or 32 rows that are
    all padding saves less than a branch a slice costs: 11 and 20 % of the time at DeepSeek-V3's shape (H200, November
    2026).
    """

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        b: cute.Tensor,
        sa: cute.Tensor,
        sb: cute.Tensor,
        offs: cute.Tensor,
        counts: cute.Tensor,
        order: cute.Tensor,
        cursor: cute.Tensor,
        out: cute.Tensor,
        grid: Int32,
        tasks_per_cta: Int32,
        stream,
    ):
        """a [P / 128, M, 128], b [P / 128, N, 128] e4m3; sa [P / 128, M], sb [P / 128, ceil(N / 256), 4] fp32: of a
        row block and N tile two scales, two unused; offs [E + 1], counts [E], order [E], cursor [1] int32;
        out [E * M, N]."""

        def tma(x, width):
            x = cute.make_tensor(x.iterator, cute.make_layout((x.shape[0] * width, BLOCK_K), stride=(BLOCK_K, 1)))
            layout = sm90.make_smem_layout_a(self.major, (128, TILE_N, BLOCK_K), self.dtype, 1)
            op = cpasync.CopyBulkTensorTileG2SOp()
            return cpasync.make_tiled_tma_atom(op, x, cute.slice_(layout, (None, None, 0)), (128, BLOCK_K))

        tma_a, a_map = tma(a, self.config.M)
        tma_b, b_map = tma(b, self.config.N)
        queue = (offs, counts, order, cursor, tasks_per_cta)
        self.launch(tma_a, a_map, tma_b, b_map, sa, sb, queue, out, grid, stream)

    @cute.jit
    def partition(self, tma_a, a_map, tma_b, b_map):
        """Shared [box, 128-row part of the tile and stage] and global [box, 128 rows] views of both operands."""
        parts = []
        for tma, tmap, s, tile in ((tma_a, a_map, self.sA, TILE_M), (tma_b, b_map, self.sB, TILE_N)):
            g = cute.group_modes(cute.local_tile(tmap, (128, BLOCK_K), (None, 0)), 0, 2)
            for i in cutlass.range_constexpr(tile // 128):
                half = cute.local_tile(s, (128, BLOCK_K, s.shape[2]), (i, 0, 0))
                parts.append(cpasync.tma_partition(tma, 0, cute.make_layout(1), cute.group_modes(half, 0, 2), g))
        return parts

    @cute.jit
    def load(self, stage, step, row, m, n, parts, tma_a, tma_b, sa, sb):
        bar = self.full + stage
        block = row // BLOCK_K + step
        sa_bulk = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32, num_bits_per_copy=TILE_M * 32)
        sb_bulk = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32, num_bits_per_copy=128)
        ga = sa.iterator + (Int64(block) * self.config.M + m * TILE_M)
        gb = sb.iterator + (block * self.config.n_tiles + n) * 4
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(bar, self.config.stage_bytes)
            cute.copy(
                sa_bulk, cute.make_tensor(ga.align(16), cute.make_layout(TILE_M)), self.sSA[None, stage], mbar_ptr=bar
            )
            cute.copy(sb_bulk, cute.make_tensor(gb.align(16), cute.make_layout(4)), self.sSB[None, stage], mbar_ptr=bar)
        (sA, gA), (sB0, gB), (sB1, _) = parts
        halves = self.config.N // 128
        cute.copy(tma_a, gA[None, block * self.config.m_tiles + m], sA[None, stage], tma_bar_ptr=bar)
        cute.copy(tma_b, gB[None, block * halves + 2 * n], sB0[None, stage], tma_bar_ptr=bar)
        # where N ends inside the tile, the second half is the first once more, and nobody stores it
        second = cutlass.min(2 * n + 1, halves - 1)
        cute.copy(tma_b, gB[None, block * halves + second], sB1[None, stage], tma_bar_ptr=bar)

    # ---------------------------------------------------------------- math

    @cute.jit
    def math(self, tid: Int32, out, tma_d, d_map):
        wg = cute.arch.make_warp_uniform(tid // 128)
        lane = tid % 32
        r0 = tid // 32 * 16 + lane // 4  # this thread's first row of the tile; the other is 8 below

        # two atoms, the flag set once in each: set inside a loop it would not survive the tracer
        mma = [
            sm90.make_trivial_tiled_mma(
                Float8E4M3FN, Float8E4M3FN, OperandMajorMode.K, OperandMajorMode.K, Float32, (2, 1, 1), (64, WAVE_N)
            )
            for _ in range(2)
        ]
        mma[0].set(warpgroup.Field.ACCUMULATE, False)
        mma[1].set(warpgroup.Field.ACCUMULATE, True)
        thr = mma[0].get_slice(cute.make_layout(2, stride=128)(wg))
        tA = mma[0].make_fragment_A(thr.partition_A(self.sA))  # (MMA, 1, 4, stage)
        tB = mma[0].make_fragment_B(thr.partition_B(self.sB))  # (MMA, 2, 4, stage)
        tB = cute.logical_divide(tB, (None, 1, None, None))
        tB = [tB[None, (None, w), None, None] for w in range(2)]
        shape = thr.partition_shape_C((TILE_M, WAVE_N))
        tmp = cute.make_rmem_tensor(shape, Float32)
        accs = [cute.make_rmem_tensor(shape, Float32) for _ in range(2)]

        stage, phase, slot = Int32(0), Int32(0), Int32(0)
        cute.arch.mbarrier_wait(self.full, 0)
        task, rows = self.take(slot, lane)
        scale = self.scales(r0, stage)
        self.issue(mma, tmp, tA, tB[0], stage)
        while task[0] >= 0:
            steps = (rows + BLOCK_K - 1) // BLOCK_K
            for acc in accs:
                acc.fill(0.0)
            if const_expr(not self.config.accumulate):
                if steps == 0:  # a stage without data; the wave in flight is dropped
                    warpgroup.wait_group(0)
                    self.store_half(0, accs[0], 0, task, tid, out, tma_d, d_map)
                    if lane == 0:
                        cute.arch.mbarrier_arrive(self.empty + stage)
                    stage, phase = self.advance(stage, phase, STAGES)
                    cute.arch.mbarrier_wait(self.full + stage, phase)
                    scale = self.scales(r0, stage)
                    self.issue(mma, tmp, tA, tB[0], stage)
            for step in cutlass.range(steps, unroll=1):
                # wave 0 of this k-block is in flight; a wait for all waves comes first behind the back edge, or
                # ptxas serialises
                self.retire(accs[0], tmp, scale[0])
                self.issue(mma, tmp, tA, tB[1], stage)
                if step == steps - 1:
                    self.store_half(0, accs[0], 0, task, tid, out, tma_d, d_map)
                done, scale_1 = stage, scale[1]
                stage, phase = self.advance(stage, phase, STAGES)
                cute.arch.mbarrier_wait(self.full + stage, phase)
                scale = self.scales(r0, stage)
                warpgroup.wait_group(0)
                if lane == 0:
                    cute.arch.mbarrier_arrive(self.empty + done)
                self.retire(accs[1], tmp, scale_1)
                self.issue(mma, tmp, tA, tB[0], stage)
            self.store_half(1, accs[1], 0, task, tid, out, tma_d, d_map)
            slot = (slot + 1) % RING
            task, rows = self.take(slot, lane)
        warpgroup.wait_group(0)
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def scales(self, r0, stage):
        """For each wave: the scales of this thread's two rows."""
        a0, a1 = self.sSA[r0, stage], self.sSA[r0 + 8, stage]
        return [(a0 * b, a1 * b) for b in (self.sSB[0, stage], self.sSB[1, stage])]

    @cute.jit
    def issue(self, mma, tmp, tA, tB, stage):
        """Start the four wgmmas of one wave."""
        warpgroup.fence()
        for k in cutlass.range_constexpr(BLOCK_K // 32):
            cute.gemm(mma[min(k, 1)], tmp, tA[None, None, k, stage], tB[None, None, k, stage], tmp)
        warpgroup.commit_group()

    @cute.jit
    def retire(self, acc, tmp, scale):
        """Wait for the wave in flight and promote it."""
        warpgroup.wait_group(0)
        for i in cutlass.range_constexpr(WAVE_N // 2):
            acc[i] = cute.math.fma(tmp[i], scale[i // 2 % 2], acc[i])
        # keeps the promotion here: sunk behind the next wgmma it would need copies, and ptxas would serialise
        cute.arch.inline_ptx("// promoted", read_only_args=[acc[i] for i in range(WAVE_N // 2)])
