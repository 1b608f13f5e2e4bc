"""Transposed FP8 copies for the FP8 wgrad GEMM: 128 x 128 tiles, quantised along the rows, stored column by column."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float32, Int64, const_expr

from .wgrad_config import TransposeConfig

THREADS = 256
FP8_MAX = 448.0
AMAX_FLOOR = 2.0**-100


class QuantizeTransposed:
    """x [P, width] -> q [P / 128, width, 128] e4m3 and its scales.

    A CTA takes one tile of 128 x 128; a thread holds 8 rows x 8 columns of it. Scales follow the recipe: fp32,
    amax / 448, an IEEE reciprocal, round to nearest with saturation. Rows behind an expert's last one are never read
    and become zeros; blocks without rows are left alone. The tile turns in shared memory: 8 rows of a column are one
    8-byte word, word w of column k at place w ^ (k / 8), free of bank conflicts both ways.

    Scales: one a column: [P / 128, width]; square: [P / 128, ceil(width / 256), 4], two used.
    """

    def __init__(self, config: TransposeConfig):
        assert config.width % 128 == 0 and config.source in ("bf16", "fp8")
        self.config = config

    @cute.jit
    def __call__(self, x: cute.Tensor, scales, block_rows: cute.Tensor, q: cute.Tensor, s: cute.Tensor, stream):
        @cute.struct
        class Shared:
            tile: cute.struct.Align[cute.struct.MemRange[Int64, 128 * 16], 128]
            amax: cute.struct.Align[cute.struct.MemRange[Float32, 8 * 128], 16]
            inv: cute.struct.Align[cute.struct.MemRange[Float32, 128], 16]

        self.shared = Shared
        self.kernel(x, scales, block_rows, q, s).launch(
            grid=[self.config.width // 128, q.shape[0], 1],
            block=[THREADS, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def kernel(self, x, scales, block_rows, q, s):
        tid, _, _ = cute.arch.thread_idx()
        column_block, block, _ = cute.arch.block_idx()
        smem = cutlass.memory.SmemAllocator()
        shared = smem.allocate(self.shared)
        tile = shared.tile.get_tensor(cute.make_layout((16, 128)))
        amax = shared.amax.get_tensor(cute.make_layout((128, 8)))
        inv = shared.inv.get_tensor(cute.make_layout(128))
        rows = block_rows[block]
        if rows > 0:
            raw, row_scales = self.read(x, scales, rows, column_block, block, tid)
            values = self.convert(raw, row_scales)
            self.reduce(values, amax, tid)
            self.make_scales(amax, inv, s, column_block, block, tid)
            self.write(values, inv, tile, q, column_block, block, tid)

    @cute.jit
    def read(self, x, scales, rows, column_block, block, tid):
        """This thread's 8 rows x 8 columns as they are, and the scales of its rows (None: no scales)."""
        dtype = BFloat16 if const_expr(self.config.source == "bf16") else Float8E4M3FN
        width = self.config.width
        first = tid // 16 * 8
        pointer = x.iterator + (Int64(block * 128 + first) * width + column_block * 128 + tid % 16 * 8)
        raw = cute.make_rmem_tensor(cute.make_layout((8, 8)), dtype)
        row_scales = None
        if const_expr(scales is not None):
            row_scales = cute.make_rmem_tensor(8, Float32)
        for i in cutlass.range_constexpr(8):
            if first + i < rows:
                at = (pointer + i * width).align(8 * dtype.width // 8)
                cute.autovec_copy(cute.make_tensor(at, cute.make_layout(8)), raw[None, i])
                if const_expr(scales is not None):
                    row_scales[i] = scales[column_block, block * 128 + first + i]
            else:
                raw[None, i].fill(dtype(0.0))
                if const_expr(scales is not None):
                    row_scales[i] = Float32(0.0)
        return raw, row_scales

    @cute.jit
    def convert(self, raw, row_scales):
        """[row][column] of this thread in fp32. Kept: converting again for the second use would cost more issue slots
        than memory leaves (e4m3 goes through fp16)."""
        rows = []
        for i in cutlass.range_constexpr(8):
            v = cute.make_rmem_tensor(8, Float32)
            v.store(raw[None, i].load().to(Float32))
            if const_expr(row_scales is None):
                rows.append([v[j] for j in range(8)])
            else:
                rows.append([v[j] * row_scales[i] for j in range(8)])
        return rows

    @cute.jit
    def reduce(self, values, amax, tid):
        """amax[column, warp]: over the 16 rows of each warp. NaN is ignored, as the recipe says."""
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
            scale = cute.arch.fmax(top, Float32(AMAX_FLOOR)) * Float32(1.0 / FP8_MAX)
            inv[tid] = Float32(1.0) / scale
            if const_expr(self.config.square):
                if tid == 0:
                    s[block, column_block // 2, column_block % 2] = scale
            else:
                s[block, column_block * 128 + tid] = scale
        cute.arch.sync_threads()

    @cute.jit
    def write(self, values, inv, tile, q, column_block, block, tid):
        c, g = tid % 16, tid // 16
        for j in cutlass.range_constexpr(8):
            scale = inv[c * 8 + j]
            x = cute.make_rmem_tensor(8, Float32)
            for i in cutlass.range_constexpr(8):
                x[i] = values[i][j] * scale
            y = cute.make_rmem_tensor(8, Float8E4M3FN)
            y.store(x.load().to(Float8E4M3FN))
            tile[g ^ c, c * 8 + j] = cute.recast_tensor(y, Int64)[0]
        cute.arch.sync_threads()
        out = cute.recast_ptr(q.iterator, dtype=Int64) + Int64(block * self.config.width + column_block * 128) * 16
        out = cute.make_tensor(out, cute.make_layout(128 * 16))
        for i in cutlass.range_constexpr(8):
            word = i * THREADS + tid
            out[word] = tile[(word % 16) ^ (word // 128), word // 16]
