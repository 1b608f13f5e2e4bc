"""The pulling warp: brings the rows of this rank's pool from the ranks that hold the tokens, in the GEMMs' order.

CTA c takes pool rows c, c + num_ctas, ...: at any time all CTAs are at neighbouring rows. A row goes in one or more
pieces through a few buffers in shared memory:

    start     bulk load of elements and scales, from the source's blob (counted by `landed[slot]`)
    pass on   (half the buffers later) bulk store into the pool; scales by ordinary stores, k-major
    count     (when the buffer is needed again) the row is in the pool: arrive[block] += 1

Padding rows are counted only; where a backward will read the pool they are zeroed, elements and scales.
"""

from cutlass import Float32, Int32, Int64, const_expr, cute

from cute_kernels import flags, memory, trace
from cute_kernels.prologue import CODE_BITS
from cute_kernels.tile_config import BLOCK


@cute.jit
def pull(k):
    """All rows of this CTA. By one warp."""
    depth = k.config.pull_slots
    late = depth // 2
    pieces = k.config.pieces(k.problem)
    rows = Int32(k.offs[k.num_local])
    items = (rows - k.cta + k.num_ctas - 1) // k.num_ctas * pieces
    code = Int32(-1)
    arrive = k.base + k.layout.arrive + Int64(k.parity * k.max_blocks) * 4
    j = Int32(0)
    while j < items + depth:
        if j >= depth:
            count_row(k, j - depth, depth - 1 - late, pieces, arrive)
        if j < items:
            if j % (32 * pieces) == 0:
                row = k.cta + (j // pieces + k.lane) * k.num_ctas
                code = Int32(-1)
                if row < rows:
                    code = Int32(k.codes[row])
            start(k, j, cute.arch.shuffle_sync(code, j // pieces % 32), pieces)
        i = j - late
        if (i >= 0) & (i < items):
            pass_on(k, i, pieces)
        j += 1


@cute.jit
def start(k, j: Int32, code: Int32, pieces):
    """Item j: piece j % pieces of a row."""
    slot = j % k.config.pull_slots
    bar = k.landed + slot
    buffer = k.slots + slot * k.config.slot_bytes(k.problem)
    blocks = k.config.piece_blocks(k.problem)
    if k.lane == 0:
        if code >= 0:
            peers = k.peers
            token = (code & ((1 << CODE_BITS) - 1)) // k.top_k
            source = peers[code >> CODE_BITS]
            first, size, scale_bytes = piece(k, j, pieces)
            cute.arch.mbarrier_arrive_and_expect_tx(bar, size * BLOCK + scale_bytes)
            row = source + k.layout.xq + Int64(token) * k.problem.hidden + first * BLOCK
            memory.bulk_load(buffer, row, size * BLOCK, bar)
            scales = source + k.layout.xs + (Int64(token) * k.problem.scale_pitch + first) * 4
            memory.bulk_load(buffer + blocks * BLOCK, scales, scale_bytes, bar)
        else:
            cute.arch.mbarrier_arrive(bar)


@cute.jit
def piece(k, j: Int32, pieces):
    """First k-block of item j, its number of k-blocks, bytes of its scales."""
    first, size, scale_bytes = Int32(0), Int32(k.problem.k1), Int32(k.problem.scale_pitch * 4)
    if const_expr(pieces > 1):
        blocks = k.config.piece_blocks(k.problem)
        first = j % pieces * blocks
        size = Int32(blocks)
        if first + blocks > k.problem.k1:
            size = k.problem.k1 - first
        scale_bytes = (size + 3) // 4 * 16
    return first, size, scale_bytes


@cute.jit
def pass_on(k, i: Int32, pieces):
    """Item i has landed: into the pool."""
    slot = i % k.config.pull_slots
    cute.arch.mbarrier_wait(k.landed + slot, i // k.config.pull_slots % 2)
    buffer = k.slots + slot * k.config.slot_bytes(k.problem)
    blocks = k.config.piece_blocks(k.problem)
    row = k.cta + i // pieces * k.num_ctas
    first, size, _ = piece(k, i, pieces)
    at = k.pool.iterator.toint() + Int64(row) * k.problem.hidden + first * BLOCK
    is_padding = Int32(0)
    if const_expr(k.problem.save):
        is_padding = Int32(Int32(k.codes[row]) < 0)
    if is_padding == 1:
        zero_piece(k, at, row, first, size)
    else:
        if k.lane == 0:
            memory.bulk_store(at, buffer, size * BLOCK)
        scales = memory.smem_tensor(buffer + blocks * BLOCK, Float32, blocks)
        pool_s = k.pool_s
        block = k.lane
        while block < size:
            pool_s[first + block, row] = scales[block]
            block += 32
    if k.lane == 0:
        cute.arch.cp_async_bulk_commit_group()
    # scales (and zeros): ordinary stores here, read by bulk copies and TMA of the loaders
    cute.arch.fence_proxy("async.global")


@cute.jit
def zero_piece(k, at: Int64, row: Int32, first: Int32, size: Int32):
    zeros = cute.make_rmem_tensor(4, Int32)
    zeros.fill(0)
    i = k.lane
    while i < size * (BLOCK // 16):
        memory.store_vector(at + i * 16, zeros)
        i += 32
    pool_s = k.pool_s
    block = k.lane
    while block < size:
        pool_s[first + block, row] = Float32(0.0)
        block += 32


@cute.jit
def count_row(k, i: Int32, newer, pieces, arrive: Int64):
    """Item i's stores are complete (not only read from shared memory): with a row's last piece, count the row."""
    if k.lane == 0:
        cute.arch.cp_async_bulk_wait_group(newer)
    cute.arch.sync_warp()
    if k.lane == 0:
        if i % pieces == pieces - 1:
            trace.event(k, trace.PULL, trace.ROW, trace.begin(k), k.cta + i // pieces * k.num_ctas)
            # writer: lane 0, for its own bulk stores and (through sync_warp) the warp's scales; reader: the schedulers
            # of GEMM-1 tiles of this block, on this rank
            flags.add_release(arrive + Int64((k.cta + i // pieces * k.num_ctas) // 128) * 4, 1, "gpu")
