"""The fused forward: dispatch, GEMM 1, SwiGLU, GEMM 2 and combine of one rank in one persistent kernel."""

import cutlass
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float8E4M3FN, Float32, Int32, Int64, Uint8, const_expr, cute, range_constexpr
from cutlass.cute.nvgpu import cpasync
from cutlass.utils import LayoutEnum

from cute_kernels import combine, dispatch, epilogues, errors, flags, loader, mainloop, prologue
from cute_kernels import workspace as ws
from cute_kernels.schedule import CUTS
from cute_kernels.tile_config import BLOCK, MAX_RANKS, THREADS, TILE_M, TILE_N, Problem, TileConfig


class Context:
    """Everything that the roles of a CTA share: this thread's place, run-time sizes, tensors, shared memory. Plain
    attributes; roles take it as their first argument."""


class FusedForward:
    """The kernel of one rank. Grid: num_ctas CTAs, all resident; 384 threads:

        warp 0        loader: TMA of activations, weights and scales
        warp 1        pull: brings the pool's rows from the ranks that hold the tokens
        warp 2        courier: announces ended tiles, and at the end this CTA's last row
        warp 3        scheduler: claims tiles, waits for their flags
        WG 1, WG 2    math: 64 rows each of a 128 x 256 tile, epilogues; at the end the sum over k

    Pipelines in shared memory (producer -> consumer; arrivals of full / empty):

        full, empty [stages]   loader -> math: one k-block of A, B and scales (1 + bytes / 8 warps)
        ring [entries]         loader -> math -> courier: row, column tile and kind of a tile, its 128 words for the
                               epilogue; covered by `full` of its first k-block; ended (8 warps) / free (courier)
        todo                   scheduler -> loader: ready (1) / taken (1)
        landed [2]             pull, from bulk loads to bulk stores (lanes with a buffer + bytes)

    Flags in global memory (writer -> reader, scope); n: number of the call; the two sets are used alternately, each
    zeroed by the call in between:

        COUNTED [n & 1]        every CTA: its counts are written -> every CTA of the rank (gpu), num_ctas
        LISTED [n & 1]         every CTA: its part of the slot list is written -> the last one of them (sys)
        PLACED [n & 1]         every CTA: its tokens are written too -> the last one of them (sys)
        header [src][n & 1]    those last CTAs, to all ranks: this rank's list, and then all inputs of the call, are in
                               place -> every CTA (sys), n
        arrive [n & 1][block]  pulling warps, +1 a piece of a row -> schedulers of GEMM-1 tiles (gpu), 128 * pieces
        done [n & 1][block]    couriers, +1 a GEMM-1 tile -> schedulers of the block's GEMM-2 tiles (gpu), n1
        HOME [n & 1]           couriers of all ranks, their last row is stored -> combine (sys), R * num_ctas
        CLAIM [n & 1]          schedulers' next tile (relaxed)
        BAD_ID [n & 1]         a thread that counts an id out of range: its slot -> the last CTA at LISTED (gpu)
        ABORT                  whoever gives up, to all ranks: n -> every bounded wait and every launch (sys)
        ERRORS [src]           with it, from rank src to all ranks: what happened -> errors.report (sys)
        EPOCH                  the last CTA at PLACED: n -> the next launch

    A tile waits for tiles with smaller numbers only; since math warps end a tile only once the next one has begun, the
    loader inserts a `pause` when the next tile is late (see loader.pause). A rank's blob is touched for call n only
    after its header n, and a call ends after it has acquired all headers and all contributions: a rank is at most one
    call ahead of another, so only headers and counters need two copies. How calls end without results: errors.py.
    """

    direction_code = 0  # in the signature that ranks compare

    def __init__(self, problem: Problem, config: TileConfig):
        reason = config.why_not(problem)
        if reason:
            raise ValueError(f"config: expected one that serves {problem}, got {config}. {reason}")
        self.problem, self.config = problem, config
        self.unroll = config.unroll(problem)

    # ---------------------------------------------------------------- host side

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        ids: cute.Tensor,
        weights: cute.Tensor,
        w13: cute.Tensor,
        s13: cute.Tensor,
        w2: cute.Tensor,
        s2: cute.Tensor,
        out: cute.Tensor,
        peers: cute.Tensor,
        pool: cute.Tensor,
        pool_s: cute.Tensor,
        h: cute.Tensor,
        hs: cute.Tensor,
        codes: cute.Tensor,
        p: cute.Tensor,
        offs: cute.Tensor,
        counts: cute.Tensor,
        gate_up: cute.Tensor,
        trace: cute.Tensor,
        base: Int64,
        rank: Int32,
        top_k: Int32,
        num_experts: Int32,
        max_tokens: Int32,
        num_ctas: Int32,
        timeout: Int32,
        limit: Float32,
        stream,
    ):
        """x [T, H] bf16; ids [T * K] i32, or i64 as pairs of words; weights [T * K] f32; out [T, H] bf16.

        Weights in kernel order: w13 [E_l * 2I, H], w2 [E_l * 256 * n2, I] e4m3; s13 [E_l, k1, n1, 4] and
        s2 [E_l, k2, n2, 4] f32. peers [R] i64: addresses of the blobs.

        Of this rank only: pool [P, H], h [P, I] e4m3; pool_s [H / 128, P],
        hs [I / 128, P] f32; codes [P] i32, p [P] f32; offs [E_l + 1], counts [E_l] i32; gate_up [P, 2I] bf16 (any,
        unless saved); trace i64 (trace.num_words, or any); base: this rank's blob. timeout: in units of 1024 ns."""
        tensors = (x, ids, weights, s13, s2, out, peers, pool, pool_s, h, hs, codes, p, offs, counts, gate_up, trace)
        sizes = (base, rank, top_k, num_experts, max_tokens, num_ctas, timeout)
        self.start((pool, w13, h, w2), tensors, sizes, limit, stream)

    def start(self, operands, tensors, sizes, limit, stream, more=()):
        """Launches. operands: A and weights of either GEMM; tensors: what bind_arguments unpacks; more: what bind_more
        does."""
        stages = self.config.stages
        tile = (TILE_M, TILE_N, BLOCK)
        a_layout = sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, tile, Float8E4M3FN, stages)
        b_layout = sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, tile, Float8E4M3FN, stages)

        def tma(tensor, rows):
            box = sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, (rows, 64, BLOCK), Float8E4M3FN, 1)
            op = cpasync.CopyBulkTensorTileG2SOp()
            return cpasync.make_tiled_tma_atom(op, tensor, cute.slice_(box, (None, None, 0)), (rows, BLOCK))

        pool, weights_1, h, weights_2 = operands
        maps1 = (*tma(pool, TILE_M), weights_1.iterator.toint(), *tma(pool, TILE_M // 2))
        maps2 = (*tma(h, TILE_M), weights_2.iterator.toint(), *tma(h, TILE_M // 2))
        base, rank, top_k, num_experts, max_tokens, num_ctas, timeout = sizes
        places = ws.layout(
            self.problem.hidden,
            Int64(max_tokens),
            Int64(top_k),
            Int64(num_experts),
            Int64(tensors[6].shape[0]),  # peers
            Int64(num_ctas),
            Int64(pool.shape[0] // TILE_M),
        )
        self.shared = self.shared_storage(a_layout, b_layout)
        sizes = (base, rank, top_k, num_experts, max_tokens, num_ctas, timeout)
        self.kernel(maps1, maps2, tensors, sizes, tuple(places), limit, a_layout, b_layout, more).launch(
            grid=[num_ctas, 1, 1], block=[THREADS, 1, 1], min_blocks_per_mp=1, stream=stream
        )

    def shared_storage(self, a_layout, b_layout):
        """The struct of a CTA's shared memory; TileConfig.smem_bytes adds it up."""
        problem, config = self.problem, self.config
        slot_bytes = config.slot_bytes(problem)

        @cute.struct
        class Shared:
            a: cute.struct.Align[cute.struct.MemRange[Float8E4M3FN, cute.cosize(a_layout)], 1024]
            b: cute.struct.Align[cute.struct.MemRange[Float8E4M3FN, cute.cosize(b_layout)], 1024]
            slots: cute.struct.Align[cute.struct.MemRange[Uint8, 2 * config.batch(problem) * slot_bytes], 128]
            sa: cute.struct.Align[cute.struct.MemRange[Float32, TILE_M * config.stages], 128]
            x: cute.struct.Align[cute.struct.MemRange[Int32, TILE_M * config.ring], 128]
            sb: cute.struct.Align[cute.struct.MemRange[Float32, 4 * config.stages], 16]
            y_base: cute.struct.MemRange[Int64, MAX_RANKS]
            full: cute.struct.MemRange[Int64, config.stages]
            empty: cute.struct.MemRange[Int64, config.stages]
            ended: cute.struct.MemRange[Int64, config.ring]
            free: cute.struct.MemRange[Int64, config.ring]
            landed: cute.struct.MemRange[Int64, 2]
            ready: cute.struct.MemRange[Int64, 1]
            taken: cute.struct.MemRange[Int64, 1]
            ring: cute.struct.MemRange[Int32, 4 * config.ring]
            todo: cute.struct.MemRange[Int32, 4]
            verdict: cute.struct.MemRange[Int32, 1]
            cursor: cute.struct.MemRange[Int32, 1]
            fate: cute.struct.MemRange[Int32, 4]
            offs: cute.struct.MemRange[Int32, problem.expert_table + 1]
            cuts: cute.struct.MemRange[Int32, CUTS]
            trace_count: cute.struct.MemRange[Int32, 8 if config.trace else 1]

        return Shared

    # ---------------------------------------------------------------- device side

    @cute.kernel
    def kernel(self, maps1, maps2, tensors, sizes, places, limit: Float32, a_layout, b_layout, more):
        k = Context()
        self.bind_arguments(k, tensors, sizes, places, limit)
        self.bind_more(k, more)
        smem = cutlass.utils.SmemAllocator()
        self.bind_shared(k, smem.allocate(self.shared), a_layout, b_layout)
        if k.warp == 0:
            for maps in (maps1, maps2):
                cpasync.prefetch_descriptor(maps[0])
                cpasync.prefetch_descriptor(maps[3])
            self.init_barriers(k)
            if const_expr(self.config.prefetch_blocks > 0):
                loader.prefetch_weights(k, maps1[2])
        if const_expr(self.config.trace):
            self.clear_trace(k)
        if k.tid == 0:
            cursor = k.cursor
            cursor[0] = Int32(0)
            errors.begin(k)
        if k.tid < k.num_ranks:
            y_base, peers = k.y_base, k.peers
            y_base[k.tid] = peers[k.tid] + k.layout.y
        cute.arch.sync_threads()
        rows = prologue.run(k)
        # the prologue's scratch memory is the pipeline, written next by TMA
        cute.arch.fence_proxy("async.shared", space="cta")
        # rows that the pulling warp brings with bulk copies were written by ordinary stores, of other ranks too; their
        # headers have been acquired by ordinary loads (the writers' own fence: prologue.announce)
        cute.arch.fence_proxy("async.global")
        cute.arch.sync_threads()
        if k.warp < 4:
            cute.arch.setmaxregister_decrease(self.config.other_registers)
            if k.warp == 0:
                loader.loader(k, maps1, maps2)
            if k.warp == 1:
                dispatch.pull(k, rows)
            if k.warp == 2:
                loader.courier(k)
            if k.warp == 3:
                loader.scheduler(k)
        else:
            cute.arch.setmaxregister_increase(self.config.math_registers)
            mainloop.math(k, self.finish)
            self.collect(k)

    # ---------------------------------------------------------------- what the directions differ in

    def finish(self, k, t, wave, kind, slot, stage):
        """The epilogue of a tile's wave (see mainloop.math)."""
        epilogues.forward(k, t, wave, kind, slot)

    def tile_done(self, k, counter, row):
        """A GEMM-1 tile of the block at `row` has been stored. By all lanes of the courier."""
        epilogues.count_tile(k, counter)

    def collect(self, k):
        """What the math warps do at the end: the results of this rank's tokens."""
        combine.combine(k, k.cta * 8 + k.warp - 4, k.num_ctas * 8)

    def before_home(self, k, sent):
        """Before a CTA's last row is announced."""

    steals = False
    """Whether work that is not this call's waits behind the tiles. Then these are called too (see backward_steal):
    after_tiles by the scheduler, load_stolen by the loader, between by the math warps, stolen_done and await_end by the
    courier."""

    after_tiles = load_stolen = between = stolen_done = await_end = None

    # ---------------------------------------------------------------- set-up

    def bind_more(self, k, more):
        """What only some kernels have."""

    def bind_arguments(self, k, tensors, sizes, places, limit):
        """This thread's place, run-time sizes, tensors."""
        k.problem, k.config, k.unroll, k.direction = self.problem, self.config, self.unroll, self
        k.steals = self.steals
        k.batch, k.pieces = self.config.batch(self.problem), self.config.pieces(self.problem)
        k.piece_blocks, k.slot_bytes = self.config.piece_blocks(self.problem), self.config.slot_bytes(self.problem)
        k.x, k.ids, k.weights, k.s13, k.s2, k.out, k.peers, k.pool, k.pool_s, k.h, k.hs = tensors[:11]
        k.codes, k.p, k.offs_g, k.counts_g, k.gate_up, k.trace = tensors[11:17]
        k.pool_base = k.pool.iterator.toint()
        k.codes_base = k.codes.iterator.toint()
        k.p_words = cute.make_tensor(cute.recast_ptr(k.p.iterator, dtype=Int32), k.p.layout)
        k.base, k.rank, k.top_k, k.num_experts, k.max_tokens, k.num_ctas, timeout = sizes
        k.layout = ws.Layout(*places)
        k.limit = limit
        k.tid, _, _ = cute.arch.thread_idx()
        k.cta, _, _ = cute.arch.block_idx()
        k.warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        k.lane = k.tid % 32
        k.num_ranks = Int32(k.peers.shape[0])
        k.num_local = k.num_experts // k.num_ranks
        k.num_tokens = Int32(k.out.shape[0])
        k.num_slots = k.num_tokens * k.top_k
        k.id_words = cutlass.max(Int32(k.ids.shape[0]) // cutlass.max(k.num_slots, Int32(1)), Int32(1))
        k.max_blocks = Int32(k.pool.shape[0]) // TILE_M
        # writer: the last CTA at PLACED of the launch before this one; stream order is enough
        k.epoch = flags.load_relaxed(flags.flag(k.base, ws.EPOCH), "gpu") + 1
        k.parity = k.epoch % 2
        k.watch = flags.Watch(k.peers, k.num_ranks, k.rank, k.base, k.epoch, timeout)

    def bind_shared(self, k, shared, a_layout, b_layout):
        """Views of shared memory."""
        config = self.config
        k.sA = shared.a.get_tensor(a_layout.outer, swizzle=a_layout.inner)
        k.sB = shared.b.get_tensor(b_layout.outer, swizzle=b_layout.inner)
        k.scratch = shared.a.data_ptr().toint()
        k.b_base = shared.b.data_ptr().toint()
        k.slots = shared.slots.data_ptr().toint()
        k.sSA = shared.sa.get_tensor(cute.make_layout((TILE_M, config.stages)))
        k.sSB = shared.sb.get_tensor(cute.make_layout((4, config.stages)))
        k.sX = shared.x.get_tensor(cute.make_layout((TILE_M, config.ring)))
        k.sP = cute.make_tensor(cute.recast_ptr(k.sX.iterator, dtype=Float32), k.sX.layout)
        k.y_base = shared.y_base.get_tensor(cute.make_layout(MAX_RANKS))
        k.ring = shared.ring.get_tensor(cute.make_layout((4, config.ring)))
        k.todo = shared.todo.get_tensor(cute.make_layout(4))
        k.fate = shared.fate.get_tensor(cute.make_layout(4))
        k.cursor = shared.cursor.get_tensor(cute.make_layout(1))
        k.verdict = shared.verdict.get_tensor(cute.make_layout(1))
        k.trace_count = shared.trace_count.get_tensor(cute.make_layout(8 if config.trace else 1))
        k.cuts = shared.cuts.get_tensor(cute.make_layout(CUTS))
        k.offs = shared.offs.get_tensor(cute.make_layout(self.problem.expert_table + 1))
        k.full, k.empty = shared.full.data_ptr(), shared.empty.data_ptr()
        k.ended, k.free, k.landed = shared.ended.data_ptr(), shared.free.data_ptr(), shared.landed.data_ptr()
        k.ready, k.taken = shared.ready.data_ptr(), shared.taken.data_ptr()

    @cute.jit
    def clear_trace(self, k):
        count = k.trace_count
        if k.tid < 8:
            count[k.tid] = Int32(0)

    @cute.jit
    def init_barriers(self, k):
        config = self.config
        with cute.arch.elect_one():
            for s in range_constexpr(config.stages):
                cute.arch.mbarrier_init(k.full + s, 1)
                cute.arch.mbarrier_init(k.empty + s, 8)
            for s in range_constexpr(config.ring):
                cute.arch.mbarrier_init(k.ended + s, 8)
                cute.arch.mbarrier_init(k.free + s, 1)
            for s in range_constexpr(2):
                cute.arch.mbarrier_init(k.landed + s, k.batch)
            cute.arch.mbarrier_init(k.ready, 1)
            cute.arch.mbarrier_init(k.taken, 1)
        cute.arch.mbarrier_init_fence()


def fake_arguments(problem: Problem, for_launch: bool = True) -> tuple:
    """Arguments for `cute.compile`: only what is fixed in them shapes the code."""
    from cutlass import BFloat16
    from cutlass.cute.runtime import make_fake_compact_tensor
    from cutlass.runtime import make_fake_stream

    def tensor(dtype, *shape, align=16):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=align)

    def free(divisor=1):
        return cute.sym_int(divisibility=divisor)

    hidden, inter, k1, k2, n1, n2 = (getattr(problem, a) for a in ("hidden", "intermediate", "k1", "k2", "n1", "n2"))
    tokens, rows, experts = free(), free(128), free()
    return (
        tensor(BFloat16, tokens, hidden),
        tensor(Int32, free(), align=4),
        tensor(Float32, free(), align=4),
        tensor(Float8E4M3FN, free(256), hidden),
        tensor(Float32, experts, k1, n1, 4),
        tensor(Float8E4M3FN, free(256), inter),
        tensor(Float32, experts, k2, n2, 4),
        tensor(BFloat16, tokens, hidden),
        tensor(Int64, free(), align=8),
        tensor(Float8E4M3FN, rows, hidden),
        tensor(Float32, k1, rows),
        tensor(Float8E4M3FN, rows, inter),
        tensor(Float32, k2, rows),
        tensor(Int32, rows),
        tensor(Float32, rows),
        tensor(Int32, free(), align=4),
        tensor(Int32, experts, align=4),
        tensor(BFloat16, free(), 2 * inter),
        tensor(Int64, free(), align=8),
        Int64(0),
        *(Int32(1) for _ in range(6)),
        Float32(0.0),
        make_fake_stream(use_tvm_ffi_env_stream=True) if for_launch else make_fake_stream(),
    )
