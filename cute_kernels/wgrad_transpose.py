"""Transposed FP8 copies for the FP8 wgrad GEMM: rows balanced, quantised 128 at a time, stored column by column."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from . import numerics
from .wgrad_config import TransposeConfig

THREADS = 256
LARGEST_FACTOR = 2.0**100


class RowFactors:
    """For each row of an FP8 pool m, a power of two in proportion to its largest scale, and 1 / m.

    128 rows share a scale in the transposed copies, and their sizes may differ by more than e4m3 spans: loud tokens
    with faint gradients beside faint tokens with loud ones count alike in dW. So the FP8 pool is divided by m and its
    partner in the product multiplied by m. Both are exact; what is left differs from row to row only as much as the
    rows' shares of the sum do.
    """

    @cute.jit
    def __call__(self, scales: cute.Tensor, factors: cute.Tensor, stream):
        """scales [width / 128, P] fp32; factors [2, P] fp32: m, 1 / m."""
        self.kernel(scales, factors).launch(grid=[scales.shape[1] // 128, 1, 1], block=[128, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, scales, factors):
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        row = block * 128 + tid
        top = Float32(0.0)
        for i in cutlass.range(scales.shape[0], unroll=8):
            top = cute.arch.fmax(top, scales[i, row])
        m = numerics.scale_of(top, True)
        if m > LARGEST_FACTOR:  # Inf: its block is NaN anyway, the others of the row need not be
            m = Float32(1.0)
        factors[0, row] = m
        factors[1, row] = numerics.reciprocal(m)


class QuantizeTransposed:
    """x [P, width] -> q [P / 128, width, 128] e4m3 and its scales.

    A CTA takes one tile of 128 x 128: TMA brings it to shared memory, where a thread reads its 8 rows x 8 columns
    twice, for the largest magnitudes and to quantise. Not kept in registers between, so that enough CTAs fit on an SM
    to keep the memory busy. Scales follow the recipe: fp32, amax / 448, an IEEE reciprocal, round to nearest with
    saturation. Rows behind an expert's last one become zeros; blocks without rows are left alone. The tile turns in
    shared memory: 8 rows of a column are one 8-byte word, word w of column k at place w ^ (k / 8), free of bank
    conflicts both ways.

    Scales: one a column: [P / 128, width]; square: [P / 128, ceil(width / 256), 4], two used.
    """

    def __init__(self, config: TransposeConfig):
        assert config.width % 128 == 0 and config.source in ("bf16", "fp8")
        self.config = config
        self.dtype = BFloat16 if config.source == "bf16" else Float8E4M3FN
        self.has_scales = config.source == "fp8" or config.balanced

    @cute.jit
    def __call__(
        self, x: cute.Tensor, scales, factors, block_rows: cute.Tensor, done, q: cute.Tensor, s: cute.Tensor, stream
    ):
        """scales [width / 128, P] of an e4m3 pool, factors [P] if balanced: fp32, else None. done [1] int32 if skips:
        of the tasks of 1024 columns, so many are left out."""
        box = cute.make_layout((128, 128), stride=(128, 1))
        tma, x_map = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), x, box, (128, 128))

        @cute.struct
        class Shared:
            raw: cute.struct.Align[cute.struct.MemRange[self.dtype, 128 * 128], 128]
            tile: cute.struct.Align[cute.struct.MemRange[Int64, 128 * 16], 128]
            amax: cute.struct.Align[cute.struct.MemRange[Float32, 8 * 128], 16]
            inv: cute.struct.Align[cute.struct.MemRange[Float32, 128], 16]
            row_scales: cute.struct.Align[cute.struct.MemRange[Float32, 128], 16]
            full: cute.struct.MemRange[Int64, 1]

        self.shared = Shared
        self.kernel(tma, x_map, scales, factors, block_rows, done, q, s).launch(
            grid=[self.config.width // 128, q.shape[0], 1],
            block=[THREADS, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def kernel(self, tma, x_map, scales, factors, block_rows, done, q, s):
        if const_expr(done is None):
            self.convert(tma, x_map, scales, factors, block_rows, q, s)
        else:
            column_block, block, _ = cute.arch.block_idx()
            # writers: tasks of kernels before this one in the stream
            if block * (-(-self.config.width // 1024)) + column_block // 8 >= done[0]:
                self.convert(tma, x_map, scales, factors, block_rows, q, s)

    @cute.jit
    def convert(self, tma, x_map, scales, factors, block_rows, q, s):
        tid, _, _ = cute.arch.thread_idx()
        column_block, block, _ = cute.arch.block_idx()
        smem = cutlass.memory.SmemAllocator()
        shared = smem.allocate(self.shared)
        raw = shared.raw.get_tensor(cute.make_layout((128, 128), stride=(128, 1)))
        tile = shared.tile.get_tensor(cute.make_layout((16, 128)))
        amax = shared.amax.get_tensor(cute.make_layout((128, 8)))
        inv = shared.inv.get_tensor(cute.make_layout(128))
        row_scales = shared.row_scales.get_tensor(cute.make_layout(128))
        full = shared.full.data_ptr()
        if tid < 32:
            # before it is known whether the block has rows: one trip to memory less
            self.load(tma, x_map, raw, full, column_block, block)
        rows = block_rows[block]
        if const_expr(self.has_scales):
            if tid < 128:
                scale = Float32(1.0)
                if const_expr(scales is not None):
                    scale = scales[column_block, block * 128 + tid]
                if const_expr(factors is not None):
                    scale = scale * factors[block * 128 + tid]
                row_scales[tid] = scale
        cute.arch.sync_threads()
        cute.arch.mbarrier_wait(full, 0)
        if rows > 0:
            if rows < 128:
                self.zero_pads(raw, row_scales, rows, tid)
            self.reduce(raw, row_scales, amax, tid)
            self.make_scales(amax, inv, s, column_block, block, tid)
            self.write(raw, row_scales, inv, tile, q, column_block, block, tid)

    @cute.jit
    def load(self, tma, x_map, raw, full, column_block, block):
        with cute.arch.elect_one():
            cute.arch.mbarrier_init(full, 1)
        cute.arch.mbarrier_init_fence()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, 128 * 128 * self.dtype.width // 8)
        g = cute.group_modes(cute.local_tile(x_map, (128, 128), (None, None)), 0, 2)
        to, start = cpasync.tma_partition(tma, 0, cute.make_layout(1), cute.group_modes(raw, 0, 2), g)
        cute.copy(tma, start[None, block, column_block], to, tma_bar_ptr=full)

    @cute.jit
    def zero_pads(self, raw, row_scales, rows, tid):
        """Pad rows and their scales hold anything, NaN too, and become zero."""
        words = cute.make_tensor(
            cute.recast_ptr(raw.iterator, dtype=Int64), cute.make_layout(2048 * self.dtype.width // 8)
        )
        i = rows * (16 * self.dtype.width // 8) + tid
        while i < 2048 * self.dtype.width // 8:
            words[i] = Int64(0)
            i += THREADS
        if const_expr(self.has_scales):
            if (tid >= rows) & (tid < 128):
                row_scales[tid] = Float32(0.0)
        cute.arch.sync_threads()

    @cute.jit
    def values(self, raw, row_scales, tid):
        """[row][column] of this thread's 8 x 8 in fp32."""
        values = []
        for i in cutlass.range_constexpr(8):
            row = tid // 16 * 8 + i
            x = cute.make_rmem_tensor(8, self.dtype)
            at = (raw.iterator + (row * 128 + tid % 16 * 8)).align(8 * self.dtype.width // 8)
            cute.autovec_copy(cute.make_tensor(at, cute.make_layout(8)), x)
            v = cute.make_rmem_tensor(8, Float32)
            v.store(x.load().to(Float32))
            if const_expr(self.has_scales):
                values.append([v[j] * row_scales[row] for j in range(8)])
            else:
                values.append([v[j] for j in range(8)])
        return values

    @cute.jit
    def reduce(self, raw, row_scales, amax, tid):
        """amax[column, warp]: over the 16 rows of each warp. NaN is ignored, as the recipe says."""
        values = self.values(raw, row_scales, tid)
        top = [Float32(0.0) for _ in range(8)]
        for i in cutlass.range_constexpr(8):
            top = [cute.arch.fmax(top[j], cute.math.absf(values[i][j])) for j in range(8)]
        top = [cute.arch.fmax(t, cute.arch.shuffle_sync_bfly(t, 16)) for t in top]
        if tid % 32 < 16:
            for j in cutlass.range_constexpr(8):
                amax[tid % 16 * 8 + j, tid // 32] = top[j]
        cute.arch.sync_threads()

    @cute.jit
    def make_scales(self, amax, inv, s, column_block, block, tid):
        """The scales to global memory, their reciprocals to shared memory."""
        top = Float32(0.0)
        if tid < 128:
            for w in cutlass.range_constexpr(8):
                top = cute.arch.fmax(top, amax[tid, w])
        if const_expr(self.config.square):
            for lanes in cutlass.range_constexpr(5):
                top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, 1 << lanes))
            cute.arch.sync_threads()
            if tid < 128 and tid % 32 == 0:
                amax[tid // 32, 0] = top
            cute.arch.sync_threads()
            for w in cutlass.range_constexpr(4):
                top = cute.arch.fmax(top, amax[w, 0])
        if tid < 128:
            scale = numerics.scale_of(top, False)
            inv[tid] = numerics.reciprocal(scale)
            if const_expr(self.config.square):
                if tid == 0:
                    s[block, column_block // 2, column_block % 2] = scale
            else:
                s[block, column_block * 128 + tid] = scale
        cute.arch.sync_threads()

    @cute.jit
    def write(self, raw, row_scales, inv, tile, q, column_block, block, tid):
        c, g = tid % 16, tid // 16
        values = self.values(raw, row_scales, tid)
        for j in cutlass.range_constexpr(8):
            y = numerics.to_e4m3([values[i][j] for i in range(8)], inv[c * 8 + j])
            tile[g ^ c, c * 8 + j] = cute.recast_tensor(y, Int64)[0]
        cute.arch.sync_threads()
        out = cute.recast_ptr(q.iterator, dtype=Int64) + Int64(block * self.config.width + column_block * 128) * 16
        out = cute.make_tensor(out, cute.make_layout(128 * 16))
        for i in cutlass.range_constexpr(8):
            word = i * THREADS + tid
            out[word] = tile[(word % 16) ^ (word // 128), word // 16]
