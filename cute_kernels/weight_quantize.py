"""From a bf16 or fp32 weight both FP8 copies in the kernels' order, in one pass: what a training forward does first."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int64, const_expr

from . import numerics

THREADS = 256
DTYPES = ("bfloat16", "float32")


@dataclass(frozen=True)
class QuantizeConfig:
    """rows, width: N and K of a weight [E, N, K], multiples of 128. is_gate_up: its rows are [gate; up], else plain.
    source: dtype of the weight. pow2: scales are rounded up to powers of two. transposed: also the copy of dgrad."""

    rows: int
    width: int
    is_gate_up: bool
    source: str
    pow2: bool
    transposed: bool

    def why_not(self) -> str | None:
        """None if the kernel can be built, else the reason."""
        multiple = 256 if self.is_gate_up else 128
        for name, value, least in (("rows", self.rows, multiple), ("width", self.width, 128)):
            if value <= 0 or value % least:
                return f"{name}: expected a positive multiple of {least}, got {value}"
        return None if self.source in DTYPES else f"source: expected one of {DTYPES}, got {self.source!r}"


class QuantizeWeight:
    """w [E, N, K] -> q and s as `cute_kernels.weights` lays them out, and the same of the transposed weight.

    A CTA takes one block of 128 x 128: one scale, the same bytes in both copies. A thread holds 8 rows x 8 columns.
    A row of the forward's copy is one line of 128 bytes, which half a warp writes as it is. For the transposed copy
    the block turns in shared memory: 8 rows of a column are one 8-byte word, word i of column c at place i ^ (c / 8).

    Position p of 128 weight rows, in the order in which the tile of 256 holds them, is row `permuted(p)`; the tile's
    other 128 rows lie between positions 63 and 64. In a line, 16-byte granule g is at place g ^ (p % 8).
    """

    def __init__(self, config: QuantizeConfig):
        reason = config.why_not()
        assert reason is None, reason
        self.config = config
        self.dtype = BFloat16 if config.source == "bfloat16" else Float32

    @cute.jit
    def __call__(self, w: cute.Tensor, q: cute.Tensor, s: cute.Tensor, q_t, s_t, stream):
        """w [E, N, K]; q [E, N rounded up to 256, K] e4m3, s [E, K / 128, tiles, 4] fp32: two words of a tile used, the
        others not written; q_t [E, K rounded up to 256, N] and s_t [E, N / 128, tiles, 4], or None."""

        @cute.struct
        class Shared:
            tile: cute.struct.Align[cute.struct.MemRange[Int64, 128 * 16], 128]
            amax: cute.struct.MemRange[Float32, THREADS // 32]

        self.shared = Shared
        grid = [self.config.width // 128, self.config.rows // 128, w.shape[0]]
        self.kernel(w, q, s, q_t, s_t).launch(grid=grid, block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, w, q, s, q_t, s_t):
        config = self.config
        tid, _, _ = cute.arch.thread_idx()
        kb, nb, e = cute.arch.block_idx()
        shared = cutlass.memory.SmemAllocator().allocate(self.shared)
        tile = shared.tile.get_tensor(cute.make_layout((16, 128)))
        amax = shared.amax.get_tensor(cute.make_layout(THREADS // 32))
        c, g = tid % 16, tid // 16
        raw = []
        first = Int64(e * config.rows + nb * 128 + g * 8) * config.width + kb * 128 + c * 8
        for i in cutlass.range_constexpr(8):
            x = cute.make_rmem_tensor(8, self.dtype)
            at = (w.iterator + (first + i * config.width)).align(8 * self.dtype.width // 8)
            cute.autovec_copy(cute.make_tensor(at, cute.make_layout(8)), x)
            v = cute.make_rmem_tensor(8, Float32)
            v.store(x.load().to(Float32))
            raw.append(v)
        top = Float32(0.0)
        for i in cutlass.range_constexpr(8):
            top = numerics.abs_max([raw[i][j] for j in range(8)], top)
        scale = numerics.scale_of(self.largest(top, amax, tid), config.pow2)
        inv = numerics.reciprocal(scale)

        # the tile of the forward's copy and which of its two blocks this is; the transposed copy's
        tile_n, half_n = nb // 2, nb % 2
        if const_expr(config.is_gate_up):
            tile_n, half_n = nb % (config.rows // 256), nb // (config.rows // 256)
        tiles_n, tiles_k = -(-config.rows // 256), -(-config.width // 256)
        if tid == 0:
            s[e, kb, tile_n, half_n] = scale
            if const_expr(config.transposed):
                s_t[e, nb, kb // 2, kb % 2] = scale

        bytes_ = [numerics.to_e4m3([raw[i][j] for j in range(8)], inv) for i in range(8)]
        lines = self.lines(q, (Int64(e * tiles_n + tile_n) * (config.width // 128) + kb) * 256 + half_n * 64)
        for i in cutlass.range_constexpr(8):
            position = self.permuted(g * 8 + i)
            at = (position // 64 * 128 + position % 64) * 16 + ((c // 2) ^ (position % 8)) * 2 + c % 2
            lines[at] = cute.recast_tensor(bytes_[i], Int64)[0]
        if const_expr(config.transposed):
            for j in cutlass.range_constexpr(8):
                column = numerics.to_e4m3([raw[i][j] for i in range(8)], inv)
                tile[g ^ c, c * 8 + j] = cute.recast_tensor(column, Int64)[0]
            cute.arch.sync_threads()
            lines = self.lines(q_t, (Int64(e * tiles_k + kb // 2) * (config.rows // 128) + nb) * 256 + kb % 2 * 64)
            for i in cutlass.range_constexpr(8):
                word = i * THREADS + tid
                position, place = word // 16, word % 16
                column = self.permuted(position)
                granule = (place // 2) ^ (position % 8)
                at = (position // 64 * 128 + position % 64) * 16 + place
                lines[at] = tile[(granule * 2 + place % 2) ^ (column // 8), column]

    @cute.jit
    def largest(self, top, amax, tid):
        """Of all threads' values; behind a barrier."""
        for lanes in cutlass.range_constexpr(5):
            top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, 1 << lanes))
        if tid % 32 == 0:
            amax[tid // 32] = top
        cute.arch.sync_threads()
        for w in cutlass.range_constexpr(THREADS // 32):
            top = cute.arch.fmax(top, amax[w])
        return top

    @cute.jit
    def lines(self, q, line):
        """A copy as words of 8 bytes, from a line of 128 bytes on."""
        return cute.make_tensor(cute.recast_ptr(q.iterator, dtype=Int64) + line * 16, cute.make_layout(192 * 16))

    @cute.jit
    def permuted(self, place):
        """Row <-> position, its own inverse: of 32, place 8 j + 2 q + b is place 8 q + 2 j + b of the other."""
        return place // 32 * 32 + place % 8 // 2 * 8 + place % 32 // 8 * 2 + place % 2
