"""The k-grouped wgrad GEMM on SM90: dW[e] = sum over expert e's rows of A[r] (outer) B[r], one writer a tile."""

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.tensor_utils import LayoutEnum

from . import numerics
from .wgrad_config import RING, RING_WORDS, STAGES, THREADS, TILE_M, TILE_N, WgradConfig, locate_tile

WAVE_N = TILE_N // 2  # columns that are stored together, and in FP8 multiplied together
MATH_REGS, LOADER_REGS = 240, 24
WARP_ROWS = 16  # rows of the tile that one math warp holds
BAR_PADS = 1  # named barrier of both math warpgroups: pad rows are zero
ROW_BYTES = 128  # of every swizzled shared-memory row in here


class WgradGemm:
    """What both precisions share: tasks, loader, epilogue.

    A task is (expert, tile of 128 x 256 of dW): all rows of that expert, ascending, in fp32 registers, written by
    nobody else, so the bits depend neither on who takes a task nor when. Task numbers come from an atomic cursor
    in global memory (`wgrad_plan` zeroes it and sorts the experts); any number of CTAs, also of several kernels,
    may draw from one cursor. A number past the last task ends the CTA, as do `tasks_per_cta` tasks.

    Roles   warpgroup 0, warp 0: loader: fills the pipeline. Warp 1: scheduler: claims tasks and looks them up, so
            that three dependent trips to L2 never hold up a load. Warps 2, 3 have nothing to do.
            warpgroups 1, 2: math: 64 rows x 256 columns of the tile each, then their epilogue; from there on every
            warp is on its own, with 16 rows, 4 KiB of staging and TMA stores of its own.
    Stages  full[stage]:   loader (1 arrival + TMA bytes) -> 8 math warps
            empty[stage]:  8 math warps (1 arrival each)  -> loader
    Ring    given[slot]:   scheduler (1 arrival) -> loader, and through the full barrier of the task's first stage ->
            math warps; taken[slot]: 8 math warps (1 arrival each) -> scheduler. A slot holds e, m, n, rows and first
            row of a task; e = -1: no more tasks. A task without rows takes one stage without data; in accumulate
            mode it never enters the ring.
    Scopes  The cursor is the only location that others write while this runs: relaxed, gpu. A tile's
            accumulation (fp32 by TMA reduction, bf16 by load and store) has one writer per launch; launches on
            one dW are ordered by their stream.
    """

    def __init__(self, config: WgradConfig):
        reason = config.why_not()
        assert reason is None, reason
        self.config = config
        self.block_k = config.block_k
        self.dtype = BFloat16 if config.precision == "bf16" else Float8E4M3FN
        self.out_dtype = Float32 if config.out_dtype == "float32" else BFloat16
        self.chunk_n = ROW_BYTES * 8 // self.out_dtype.width  # columns of one staging chunk
        # a half is two chunks in bf16, stored together, and four in fp32, stored one after the other
        self.store_together = 2 if self.out_dtype is BFloat16 else 1
        self.reduce = config.accumulate and self.out_dtype is Float32
        self.major = LayoutEnum.COL_MAJOR if config.precision == "bf16" else LayoutEnum.ROW_MAJOR

    # ---------------------------------------------------------------- host side

    @cute.jit
    def launch(self, tma_a, a_map, tma_b, b_map, sa, sb, queue, out, grid, stream):
        """`queue`: (offs, counts, order, cursor, tasks_per_cta)."""
        tile = (TILE_M, TILE_N, self.block_k)
        a_layout = sm90.make_smem_layout_a(self.major, tile, self.dtype, STAGES)
        b_layout = sm90.make_smem_layout_b(self.major, tile, self.dtype, STAGES)
        d_layout = sm90.make_smem_layout_epi(self.out_dtype, LayoutEnum.ROW_MAJOR, (WARP_ROWS, self.chunk_n), 16)
        store = cpasync.CopyReduceBulkTensorTileS2GOp() if self.reduce else cpasync.CopyBulkTensorTileS2GOp()
        tma_d, d_map = cpasync.make_tiled_tma_atom(
            store, out, cute.slice_(d_layout, (None, None, 0)), (WARP_ROWS, self.chunk_n)
        )
        num_scales = STAGES if const_expr(sa is not None) else 0

        @cute.struct
        class Shared:
            a: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(a_layout)], 1024]
            b: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(b_layout)], 1024]
            d: cute.struct.Align[cute.struct.MemRange[self.out_dtype, cute.cosize(d_layout)], 1024]
            sa: cute.struct.Align[cute.struct.MemRange[Float32, TILE_M * num_scales], 128]
            sb: cute.struct.Align[cute.struct.MemRange[Float32, 4 * num_scales], 16]
            full: cute.struct.MemRange[Int64, STAGES]
            empty: cute.struct.MemRange[Int64, STAGES]
            given: cute.struct.MemRange[Int64, RING]
            taken: cute.struct.MemRange[Int64, RING]
            ring: cute.struct.MemRange[Int32, RING_WORDS * RING]

        self.shared = Shared
        self.kernel(tma_a, a_map, tma_b, b_map, tma_d, d_map, sa, sb, queue, out, a_layout, b_layout, d_layout).launch(
            grid=[grid, 1, 1], block=[THREADS, 1, 1], min_blocks_per_mp=1, stream=stream
        )

    # ---------------------------------------------------------------- device side

    @cute.kernel
    def kernel(self, tma_a, a_map, tma_b, b_map, tma_d, d_map, sa, sb, queue, out, a_layout, b_layout, d_layout):
        tid, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = cutlass.memory.SmemAllocator()
        shared = smem.allocate(self.shared)
        self.sA = shared.a.get_tensor(a_layout.outer, swizzle=a_layout.inner)
        self.sB = shared.b.get_tensor(b_layout.outer, swizzle=b_layout.inner)
        self.sD = shared.d.get_tensor(d_layout.outer, swizzle=d_layout.inner)
        self.sSA, self.sSB = None, None
        if const_expr(sa is not None):
            self.sSA = shared.sa.get_tensor(cute.make_layout((TILE_M, STAGES)))
            self.sSB = shared.sb.get_tensor(cute.make_layout((4, STAGES)))
        self.full, self.empty = shared.full.data_ptr(), shared.empty.data_ptr()
        self.given, self.taken = shared.given.data_ptr(), shared.taken.data_ptr()
        self.ring = shared.ring.get_tensor(cute.make_layout((RING_WORDS, RING)))

        if warp == 0:
            for descriptor in (tma_a, tma_b, tma_d):
                cpasync.prefetch_descriptor(descriptor)
            with cute.arch.elect_one():
                for s in cutlass.range_constexpr(STAGES):
                    cute.arch.mbarrier_init(self.full + s, 1)
                    cute.arch.mbarrier_init(self.empty + s, 8)
                for s in cutlass.range_constexpr(RING):
                    cute.arch.mbarrier_init(self.given + s, 1)
                    cute.arch.mbarrier_init(self.taken + s, 8)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        if warp < 4:
            cute.arch.setmaxregister_decrease(LOADER_REGS)
            if warp == 0:
                self.loader(tma_a, a_map, tma_b, b_map, sa, sb)
            if warp == 1:
                self.scheduler(queue)
        else:
            cute.arch.setmaxregister_increase(MATH_REGS)
            self.math(tid - 128, out, tma_d, d_map)

    @cute.jit
    def advance(self, index: Int32, phase: Int32, size: cutlass.Constexpr):
        """The next stage or slot of a pipeline of `size`, and the phase of its barriers."""
        index += 1
        if index == size:
            index = Int32(0)
            phase = phase ^ 1
        return index, phase

    # ---------------------------------------------------------------- scheduler

    @cute.jit
    def claim(self, cursor: cute.Tensor, wanted):
        """The next task number, the same in all lanes; a number past every task where none is wanted."""
        t = Int32(0x7FFFFFFF)
        if wanted:
            if cute.arch.lane_idx() == 0:
                # many CTAs add, nothing else travels with the number: relaxed
                t = cute.arch.atomic_add(cursor.iterator, Int32(1), sem="relaxed", scope="gpu")
            t = cute.arch.shuffle_sync(t, 0)
        return t

    @cute.jit
    def scheduler(self, queue):
        offs, counts, order, cursor, tasks_per_cta = queue
        tiles = self.config.tiles
        total = counts.shape[0] * tiles
        slot, phase, claimed = Int32(0), Int32(0), Int32(1)
        t = self.claim(cursor, tasks_per_cta > 0)
        while t < total:
            place = t // tiles
            e = order[place]
            m, n = locate_tile(t - place * tiles, self.config.m_tiles, self.config.n_tiles, cutlass.min)
            rows, row = counts[e], offs[e]
            if const_expr(self.config.accumulate):
                if rows > 0:
                    self.give(slot, phase, (e, m, n, rows, row))
                    slot, phase = self.advance(slot, phase, RING)
            else:
                self.give(slot, phase, (e, m, n, rows, row))
                slot, phase = self.advance(slot, phase, RING)
            t = self.claim(cursor, claimed < tasks_per_cta)
            claimed += 1
        self.give(slot, phase, (Int32(-1), Int32(0), Int32(0), Int32(0), Int32(0)))

    @cute.jit
    def give(self, slot, phase, words):
        ring = self.ring
        cute.arch.mbarrier_wait(self.taken + slot, phase ^ 1)
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(RING_WORDS):
                ring[i, slot] = words[i]
            cute.arch.mbarrier_arrive(self.given + slot)

    # ---------------------------------------------------------------- loader

    @cute.jit
    def loader(self, tma_a, a_map, tma_b, b_map, sa, sb):
        parts = self.partition(tma_a, a_map, tma_b, b_map)
        stage, phase, slot, given = Int32(0), Int32(0), Int32(0), Int32(0)
        cute.arch.mbarrier_wait(self.given, 0)
        while self.ring[0, slot] >= 0:
            m, n, rows, row = [self.ring[i, slot] for i in range(1, 5)]
            steps = cutlass.max((rows + self.block_k - 1) // self.block_k, 1)
            for step in cutlass.range(steps, unroll=1):
                cute.arch.mbarrier_wait(self.empty + stage, phase ^ 1)
                if rows > 0:
                    self.load(stage, step, row, m, n, parts, tma_a, tma_b, sa, sb)
                else:
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive(self.full + stage)
                stage, phase = self.advance(stage, phase, STAGES)
            slot, given = self.advance(slot, given, RING)
            cute.arch.mbarrier_wait(self.given + slot, given)
        cute.arch.mbarrier_wait(self.empty + stage, phase ^ 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.full + stage)

    # ---------------------------------------------------------------- math

    @cute.jit
    def take(self, slot, lane):
        """The task in a slot, behind the full barrier of its first stage: (e, m, n) and its rows; frees the slot."""
        task, rows = tuple(self.ring[i, slot] for i in range(3)), self.ring[3, slot]
        if lane == 0:
            cute.arch.mbarrier_arrive(self.taken + slot)
        return task, rows

    # ---------------------------------------------------------------- epilogue

    @cute.jit
    def store_half(self, w: cutlass.Constexpr, acc, first: cutlass.Constexpr, task, tid, out, tma_d, d_map):
        """Stores this warp's 16 rows of columns 128 w .. 128 w + 127, which are acc[first ..]: registers to swizzled
        chunks in its own shared memory, TMA from there. No warp waits for another."""
        e, m, n = task
        warp = cute.arch.make_warp_uniform(tid // 32)
        if n * TILE_N + w * WAVE_N < self.config.N:
            row = (e * self.config.M + m * TILE_M) // WARP_ROWS + warp
            column = (n * TILE_N + w * WAVE_N) // self.chunk_n
            gD = cute.group_modes(cute.local_tile(d_map, (WARP_ROWS, self.chunk_n), (None, None)), 0, 2)
            tDsD, tDgD = cpasync.tma_partition(tma_d, 0, cute.make_layout(1), cute.group_modes(self.sD, 0, 2), gD)
            for c in cutlass.range_constexpr(0, WAVE_N // self.chunk_n, self.store_together):
                # the TMA store that last read these chunks has done so; the lane that issued it waits
                cute.arch.cp_async_bulk_wait_group(2 // self.store_together - 1, read=True)
                cute.arch.sync_warp()
                for i in cutlass.range_constexpr(c, c + self.store_together):
                    values = [acc[first + i * (self.chunk_n // 2) + j] for j in range(self.chunk_n // 2)]
                    if const_expr(self.config.accumulate and not self.reduce):
                        values = self.add_old(values, row * WARP_ROWS, (column + i) * self.chunk_n, tid, out)
                    self.stage_chunk(values, i % 2, tid)
                # generic writes of 32 lanes -> TMA (async proxy) of the elected one, ordered by the barrier
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.sync_warp()
                for i in cutlass.range_constexpr(c, c + self.store_together):
                    cute.copy(tma_d, tDsD[None, warp * 2 + i % 2], tDgD[None, row, column + i])
                cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def stage_chunk(self, values, buffer: cutlass.Constexpr, tid):
        """values: of 8-column block j, rows lane // 4 and 8 below: values[4 j + 2 half + b]."""
        lane = tid % 32
        base = self.sD.iterator.toint() + (tid // 32 * 2 + buffer) * (WARP_ROWS * ROW_BYTES)
        if const_expr(self.out_dtype is BFloat16):
            # lane l addresses row l % 16, 16-byte column l // 16 of two neighbouring blocks
            sub = lane % 16
            at = base + sub * ROW_BYTES + ((lane // 16) ^ (sub % 8)) * 16
            for j in cutlass.range_constexpr(0, self.chunk_n // 8, 2):
                v = cute.recast_tensor(numerics.pack([values[4 * j + i] for i in range(8)], self.out_dtype), Uint32)
                cute.arch.inline_ptx(
                    "stmatrix.sync.aligned.m8n8.x4.shared.b16 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
                    read_only_args=[at ^ (j * 16), v[0], v[1], v[2], v[3]],
                )
        else:
            quad = lane % 4
            at = base + lane // 4 * ROW_BYTES + ((quad // 2) ^ (lane // 4)) * 16 + quad % 2 * 8
            for j in cutlass.range_constexpr(self.chunk_n // 8):
                for half in cutlass.range_constexpr(2):
                    cute.arch.inline_ptx(
                        "st.shared.v2.f32 [{$r0}], {{$r1}, {$r2}};",
                        read_only_args=[
                            (at + half * 8 * ROW_BYTES) ^ (j * 32),
                            values[4 * j + 2 * half],
                            values[4 * j + 2 * half + 1],
                        ],
                    )

    @cute.jit
    def add_old(self, values, row, column, tid, out):
        """Adds what the output holds, in fp32: bf16 is rounded once, after the sum."""
        lane = tid % 32
        pointer = out.iterator + (Int64(row + lane // 4) * self.config.N + column + lane % 4 * 2)
        sums = []
        for j in cutlass.range_constexpr(self.chunk_n // 8):
            for half in cutlass.range_constexpr(2):
                old = cute.make_rmem_tensor(2, self.out_dtype)
                at = (pointer + (half * 8 * self.config.N + j * 8)).align(4)
                cute.autovec_copy(cute.make_tensor(at, cute.make_layout(2)), old)
                sums += [values[4 * j + 2 * half + b] + Float32(old[b]) for b in range(2)]
        return sums


class WgradBf16(WgradGemm):
    """BF16 operands straight from row-major pools: both are M/N-major for wgmma.

    A k-block is 64 rows, one m64n256 wgmma chain a warpgroup, the next one issued before the last is waited for.
    The rows behind an expert's last one, up to the end of its last k-block, may hold anything: both math
    warpgroups zero them in shared memory before the block is multiplied.
    """

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        b: cute.Tensor,
        offs: cute.Tensor,
        counts: cute.Tensor,
        order: cute.Tensor,
        cursor: cute.Tensor,
        out: cute.Tensor,
        grid: Int32,
        tasks_per_cta: Int32,
        stream,
    ):
        """a [P, M], b [P, N] bf16; offs [E + 1], counts [E], order [E], cursor [1] int32; out [E * M, N]."""

        def tma(x, width, tile):
            x = cute.make_tensor(x.iterator, cute.make_layout((width, x.shape[0]), stride=(1, width)))
            layout = sm90.make_smem_layout_a(self.major, (tile, TILE_N, self.block_k), self.dtype, 1)
            op = cpasync.CopyBulkTensorTileG2SOp()
            return cpasync.make_tiled_tma_atom(op, x, cute.slice_(layout, (None, None, 0)), (tile, self.block_k))

        tma_a, a_map = tma(a, self.config.M, TILE_M)
        tma_b, b_map = tma(b, self.config.N, TILE_N)
        queue = (offs, counts, order, cursor, tasks_per_cta)
        self.launch(tma_a, a_map, tma_b, b_map, None, None, queue, out, grid, stream)

    @cute.jit
    def partition(self, tma_a, a_map, tma_b, b_map):
        """Shared [box, stage] and global [box, tile, row block] views of both operands."""
        parts = []
        for tma, tmap, s, tile in ((tma_a, a_map, self.sA, TILE_M), (tma_b, b_map, self.sB, TILE_N)):
            g = cute.group_modes(cute.local_tile(tmap, (tile, self.block_k), (None, None)), 0, 2)
            parts += cpasync.tma_partition(tma, 0, cute.make_layout(1), cute.group_modes(s, 0, 2), g)
        return parts

    @cute.jit
    def load(self, stage, step, row, m, n, parts, tma_a, tma_b, sa, sb):
        bar = self.full + stage
        sA, gA, sB, gB = parts
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(bar, self.config.stage_bytes)
        block = row // self.block_k + step
        cute.copy(tma_a, gA[None, m, block], sA[None, stage], tma_bar_ptr=bar)
        cute.copy(tma_b, gB[None, n, block], sB[None, stage], tma_bar_ptr=bar)

    @cute.jit
    def math(self, tid: Int32, out, tma_d, d_map):
        wg = cute.arch.make_warp_uniform(tid // 128)
        lane = tid % 32
        mma = sm90.make_trivial_tiled_mma(
            BFloat16, BFloat16, OperandMajorMode.MN, OperandMajorMode.MN, Float32, (2, 1, 1), (64, TILE_N)
        )
        mma.set(warpgroup.Field.ACCUMULATE, True)
        thr = mma.get_slice(cute.make_layout(2, stride=128)(wg))
        tA = mma.make_fragment_A(thr.partition_A(self.sA))
        tB = mma.make_fragment_B(thr.partition_B(self.sB))
        acc = cute.make_rmem_tensor(thr.partition_shape_C((TILE_M, TILE_N)), Float32)

        stage, phase, slot = Int32(0), Int32(0), Int32(0)
        cute.arch.mbarrier_wait(self.full, 0)
        task, rows = self.take(slot, lane)
        while task[0] >= 0:
            whole = rows // self.block_k
            rest = rows - whole * self.block_k
            acc.fill(0.0)
            last = stage
            for step in cutlass.range(whole, unroll=1):
                cute.arch.mbarrier_wait(self.full + stage, phase)
                self.issue(mma, acc, tA, tB, stage)
                warpgroup.wait_group(1)
                if (lane == 0) & (step > 0):
                    cute.arch.mbarrier_arrive(self.empty + last)
                last = stage
                stage, phase = self.advance(stage, phase, STAGES)
            warpgroup.wait_group(0)
            if (lane == 0) & (whole > 0):
                cute.arch.mbarrier_arrive(self.empty + last)
            if (rest > 0) | (rows == 0):
                cute.arch.mbarrier_wait(self.full + stage, phase)
                if rest > 0:
                    self.zero_pads(rest, stage, tid)
                    self.issue(mma, acc, tA, tB, stage)
                    warpgroup.wait_group(0)
                if lane == 0:
                    cute.arch.mbarrier_arrive(self.empty + stage)
                stage, phase = self.advance(stage, phase, STAGES)
            for w in cutlass.range_constexpr(2):
                self.store_half(w, acc, w * WAVE_N // 2, task, tid, out, tma_d, d_map)
            slot = (slot + 1) % RING
            cute.arch.mbarrier_wait(self.full + stage, phase)
            task, rows = self.take(slot, lane)
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def issue(self, mma, acc, tA, tB, stage):
        """Start the wgmmas of one k-block."""
        warpgroup.fence()
        for k in cutlass.range_constexpr(self.block_k // 16):
            cute.gemm(mma, acc, tA[None, None, k, stage], tB[None, None, k, stage], acc)
        warpgroup.commit_group()

    @cute.jit
    def zero_pads(self, rest, stage, tid):
        """Rows rest .. 63 of both operands become zero: NaN times zero would be NaN.

        A row of 64 columns is 128 contiguous bytes whatever the swizzle, which only moves 16-byte pieces inside."""
        groups, pieces = (TILE_M + TILE_N) // 64, ROW_BYTES // 16
        zero = Int32(0)
        i = tid
        while i < (self.block_k - rest) * (groups * pieces):
            row = self.block_k - 1 - i // (groups * pieces)
            group = i // pieces % groups
            at = row * ROW_BYTES + i % pieces * 16
            if group < TILE_M // 64:
                at += self.sA.iterator.toint() + (stage * (TILE_M // 64) + group) * (self.block_k * ROW_BYTES)
            else:
                at += self.sB.iterator.toint() + (stage * (TILE_N // 64) + group - TILE_M // 64) * (
                    self.block_k * ROW_BYTES
                )
            cute.arch.inline_ptx("st.shared.v4.b32 [{$r0}], {{$r1}, {$r1}, {$r1}, {$r1}};", read_only_args=[at, zero])
            i += 256
        # generic writes of 256 threads -> wgmma (async proxy) of all of them, ordered by the barrier
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=BAR_PADS, number_of_threads=256)
