"""The pulling warp: brings the rows of this rank's pool from the ranks that hold the tokens, in the GEMMs' order.

CTA c takes real rows c, c + num_ctas, ... of the pool: at any time all CTAs are at neighbouring rows. Rows go in
batches, one lane a row (or piece of a row), through two halves of a few buffers in shared memory. In iteration b:

    batch b - 2   its bulk stores are complete: the rows are counted, arrive[block] += 1 a piece; its half is free
    batch b       bulk loads of elements and scales, from the source's blob (counted by `landed[half]`)
    batch b - 1   has landed: bulk stores into the pool; scales by ordinary stores, k-major

Padding rows are not pulled: the prologue has counted them. Once the call is over (abort word), no further batch is
begun: other ranks' memory is left alone, and what is under way is drained.
"""

from cutlass import Float32, Int32, Int64, const_expr, cute, range_constexpr

from cute_kernels import flags, memory, trace
from cute_kernels.prologue import CODE_BITS
from cute_kernels.schedule import smaller
from cute_kernels.tile_config import BLOCK


@cute.jit
def pull(k, rows: Int32):
    """All rows of this CTA, of the rank's `rows` real ones. By one warp."""
    batch, pieces = k.batch, k.pieces
    items = (rows - k.cta + k.num_ctas - 1) // k.num_ctas * pieces
    arrive = k.base + k.layout.arrive + Int64(k.parity * k.max_blocks) * 4
    # of this lane: the pool row of its item in batches b - 2, b - 1, b; -1: none. Code of the item in batch b
    older, old, row, code = Int32(-1), Int32(-1), Int32(-1), Int32(-1)
    b, end = Int32(0), (items + batch - 1) // batch + 2
    while b < end:
        since = trace.begin(k)
        # read here and used behind this batch's work, so that nobody waits for the load; no data stands behind it
        over = flags.is_aborted(k.watch)
        older, old = old, row
        if older >= 0:
            cute.arch.cp_async_bulk_wait_group(0)  # complete, not only read from shared memory
            # writer: this lane, for its own bulk stores and (through sync_warp) the warp's scales; reader: the
            # schedulers of GEMM-1 tiles of this block, on this rank
            flags.add_release(arrive + Int64(older // 128) * 4, 1, "gpu")
        cute.arch.sync_warp()
        row, code = fetch(k, b * batch + k.lane, items, pieces)
        if b * batch < items:
            start(k, b, row, code)
        if (b > 0) & ((b - 1) * batch < items):
            pass_on(k, b - 1, old)
        if const_expr(k.config.trace):
            if (k.lane == 0) & (row >= 0):
                trace.event(k, trace.PULL, trace.ROW, since, row)
        b += 1
        if cute.arch.shuffle_sync(over, 0) == 1:
            items, end = smaller(items, b * batch), smaller(end, b + 2)


@cute.jit
def fetch(k, j: Int32, items: Int32, pieces):
    """Pool row and code of item j of this CTA's list; -1 if there is none, or this lane has none in a batch."""
    row, code = Int32(-1), Int32(-1)
    if (k.lane < k.batch) & (j < items):
        entry = k.base + k.layout.order + Int64(k.cta + j // pieces * k.num_ctas) * 8
        row, code = flags.load_cg(entry), flags.load_cg(entry + 4)
    return row, code


@cute.jit
def start(k, b: Int32, row: Int32, code: Int32):
    """This lane's item of batch b, if any: loads into its buffer. All lanes with a buffer arrive."""
    bar = k.landed + b % 2
    if k.lane < k.batch:
        if row >= 0:
            peers = k.peers
            source = peers[code >> CODE_BITS]
            token = (code & ((1 << CODE_BITS) - 1)) // k.top_k
            first, size, scale_bytes = piece(k, b * k.batch + k.lane)
            buffer = k.slots + (b % 2 * k.batch + k.lane) * k.slot_bytes
            cute.arch.mbarrier_arrive_and_expect_tx(bar, size * BLOCK + scale_bytes)
            elements = source + k.layout.xq + Int64(token) * k.problem.hidden + first * BLOCK
            memory.bulk_load(buffer, elements, size * BLOCK, bar)
            scales = source + k.layout.xs + (Int64(token) * k.problem.scale_pitch + first) * 4
            memory.bulk_load(buffer + k.piece_blocks * BLOCK, scales, scale_bytes, bar)
        else:
            cute.arch.mbarrier_arrive(bar)


@cute.jit
def piece(k, j: Int32):
    """First k-block of item j, its number of k-blocks, bytes of its scales."""
    first, size, scale_bytes = Int32(0), Int32(k.problem.k1), Int32(k.problem.scale_pitch * 4)
    if const_expr(k.pieces > 1):
        first = j % k.pieces * k.piece_blocks
        size = Int32(k.piece_blocks)
        if first + size > k.problem.k1:
            size = k.problem.k1 - first
        scale_bytes = (size + 3) // 4 * 16
    return first, size, scale_bytes


@cute.jit
def pass_on(k, b: Int32, row: Int32):
    """Batch b into the pool."""
    cute.arch.mbarrier_wait(k.landed + b % 2, b // 2 % 2)
    buffers = k.slots + b % 2 * k.batch * k.slot_bytes
    if row >= 0:
        first, size, _ = piece(k, b * k.batch + k.lane)
        at = k.pool_base + Int64(row) * k.problem.hidden + first * BLOCK
        memory.bulk_store(at, buffers + k.lane * k.slot_bytes, size * BLOCK)
        cute.arch.cp_async_bulk_commit_group()
    pool_s = k.pool_s
    for i in range_constexpr(k.batch):
        to = cute.arch.shuffle_sync(row, i)
        if to >= 0:
            first, size, _ = piece(k, b * k.batch + i)
            scales = memory.smem_tensor(buffers + i * k.slot_bytes + k.piece_blocks * BLOCK, Float32, k.piece_blocks)
            block = k.lane
            while block < size:
                pool_s[first + block, to] = scales[block]
                block += 32
    # ordinary stores of scales here, bulk copies of the loaders read them
    cute.arch.fence_proxy("async.global")
    cute.arch.sync_warp()
