"""What all 384 threads of a CTA do before the roles split: quantise tokens, count and sort ids, meet the other ranks.

    count ids                       -> counts[cta, expert]; COUNTED (grid)
    quantise tokens                 (hides the wait for COUNTED)
    rows of CTAs before, totals     -> where each id of this CTA goes in the rank's sorted slot list
    sort                            -> slots[position] = (token * K + k, weight)
    PLACED (grid); its last CTA sends the header to all ranks
    wait for the headers of all ranks
    segments of this rank's experts -> offs (shared memory); code and weight of each row, this CTA's rows to pull

Order of the slot list: global expert, token, k. Nothing depends on who came first: positions are sums of counts.
The scratch memory is the (still unused) pipeline.
"""

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, const_expr, cute, range_constexpr

from cute_kernels import flags, memory, numerics, trace
from cute_kernels import workspace as ws
from cute_kernels.schedule import find_expert, smaller
from cute_kernels.tile_config import BLOCK, THREADS, WARPS

CODE_BITS = 27  # a row code is rank << 27 | token * K + k; -1: padding
NO_ROW = 0x7FFFFF00  # beyond any
LOADS_IN_FLIGHT = 4  # 16-byte loads in flight of a thread that quantises


@cute.jit
def run(k):
    """The whole prologue. Leaves the segments in k.offs and returns how many real rows this rank has: none if the call
    is over already."""
    ok = Int32(1)
    clear_counters(k)
    since = trace.begin(k)
    if const_expr(k.problem.plan_given):
        quantize_tokens(k)
        announce(k)
        ok = await_headers(k)
        given_segments(k, ok)
    else:
        histogram = memory.smem_tensor(k.scratch, Int32, (k.num_experts, WARPS))
        below = memory.smem_tensor(k.scratch + k.num_experts * (WARPS * 4), Int32, (k.num_experts,))
        total = memory.smem_tensor(k.scratch + k.num_experts * ((WARPS + 1) * 4), Int32, (k.num_experts,))
        count(k, histogram)
        since = stamp(k, trace.COUNT, since)
        quantize_tokens(k)
        since = stamp(k, trace.QUANTIZE, since)
        ok = sum_counts(k, below, total)
        since = stamp(k, trace.WAIT_COUNTS, since)
        if ok == 1:
            place(k, histogram, below, total)
            announce(k)
            since = stamp(k, trace.PLACE, since)
            ok = await_headers(k)
            since = stamp(k, trace.WAIT_HEADERS, since)
        ok = make_segments(k, ok)
    rows = order_rows(k)
    stamp(k, trace.PLAN, since)
    return rows


@cute.jit
def stamp(k, what, since: Int64):
    """Ends one stretch of the prologue in the trace and begins the next."""
    if const_expr(k.config.trace):
        if k.tid == 0:
            trace.event(k, trace.PROLOGUE, what, since)
    return trace.begin(k)


# ---------------------------------------------------------------- counters


@cute.jit
def clear_counters(k):
    """Zeroes the set of counters that the next call uses. Its last users were in the call before this one, which has
    ended on all ranks that add to it: nobody adds before it has this rank's next header."""
    other = 1 - k.parity
    i = k.cta * THREADS + k.tid
    while i < k.max_blocks:
        flags.store_relaxed(k.base + k.layout.arrive + Int64(other * k.max_blocks + i) * 4, 0, "gpu")
        flags.store_relaxed(k.base + k.layout.done + Int64(other * k.max_blocks + i) * 4, 0, "gpu")
        i += k.num_ctas * THREADS
    if (k.cta == 0) & (k.tid == 0):
        for word in (ws.CLAIM, ws.COUNTED, ws.PLACED, ws.HOME):
            flags.store_relaxed(flags.flag(k.base, word + other), 0, "gpu")


# ---------------------------------------------------------------- tokens


@cute.jit
def quantize_tokens(k):
    """x [T, H] bf16 -> xq, xs in this rank's blob. A half warp takes 128 channels, 8 a lane; the channel blocks of all
    tokens are one flat sequence."""
    blocks = k.num_tokens * k.problem.k1
    first = (k.cta * WARPS + k.warp) * (2 * LOADS_IN_FLIGHT)
    while first < blocks:
        quantize_blocks(k, first + k.lane // 16, blocks)
        first += k.num_ctas * (WARPS * 2 * LOADS_IN_FLIGHT)


@cute.jit
def quantize_blocks(k, first: Int32, blocks: Int32):
    """Blocks first, first + 2, ... of 128 channels; those beyond the last are read as the last and dropped."""
    channel = k.lane % 16 * 8
    index = [first + 2 * j for j in range(LOADS_IN_FLIGHT)]
    x = k.x.iterator.toint() + Int64(channel) * 2
    values = [
        memory.load_vector(x + Int64(smaller(at, blocks - 1)) * (BLOCK * 2), BFloat16, 8).load().to(Float32)
        for at in index
    ]
    for j in range_constexpr(LOADS_IN_FLIGHT):
        v = [values[j][i] for i in range(8)]
        amax = numerics.abs_max(v, Float32(0.0))
        for distance in (8, 4, 2, 1):
            amax = cute.arch.fmax(amax, cute.arch.shuffle_sync_bfly(amax, distance))
        scale = numerics.scale_of(amax, k.problem.pow2_scales)
        q = numerics.to_e4m3(v, numerics.reciprocal(scale))
        if index[j] < blocks:
            memory.store_vector(k.base + k.layout.xq + Int64(index[j]) * BLOCK + channel, q)
            if channel == 0:
                token = index[j] // k.problem.k1
                at = Int64(token) * k.problem.scale_pitch + (index[j] - token * k.problem.k1)
                cute.arch.store(memory.float_at(k.base + k.layout.xs + at * 4), scale)


# ---------------------------------------------------------------- ids


@cute.jit
def expert_of(k, i: Int32):
    """Global expert of slot i; -1 if it has none or an id outside [0, E)."""
    e = Int32(-1)
    if i < k.num_slots:
        # int64 ids are read as pairs of words: the upper word of a valid one is 0
        words = k.id_words
        e = Int32(k.ids[i * words])
        if (e < 0) | (e >= k.num_experts) | ((words == 2) & (Int32(k.ids[i * words + words - 1]) != 0)):
            e = Int32(-1)
    return e


@cute.jit
def walk(k, histogram, write):
    """This warp's slots in order, 32 at a time: histogram[e, warp] counts on. With `write` (compile-time) it began as
    the position of the warp's first slot of e in the sorted list, and the slots are stored there."""
    each = ((k.num_slots + 31) // 32 + k.num_ctas * WARPS - 1) // (k.num_ctas * WARPS)
    group = (k.cta * WARPS + k.warp) * each
    end = group + each
    while group < end:
        i = group * 32 + k.lane
        e = expert_of(k, i)
        same = Int32(cute.arch.match_sync(0xFFFFFFFF, e))
        before = cute.arch.popc(same & ((Int32(1) << k.lane) - 1))
        if e >= 0:
            if const_expr(write):
                position = histogram[e, k.warp] + before
                entry = k.base + k.layout.slots + Int64(position) * 8
                cute.arch.store(flags.int_at(entry), i)
                cute.arch.store(memory.float_at(entry + 4), Float32(k.weights[i]))
        cute.arch.sync_warp()
        if e >= 0:
            if before == 0:
                histogram[e, k.warp] = histogram[e, k.warp] + cute.arch.popc(same)
        cute.arch.sync_warp()
        group += 1


@cute.jit
def count(k, histogram):
    """counts[cta, e] of this CTA's slots; histogram[e, w] becomes the number in warps before w."""
    clear = memory.smem_tensor(k.scratch, Int32, (k.num_experts * (WARPS + 2),))
    i = k.tid
    while i < k.num_experts * (WARPS + 2):
        clear[i] = Int32(0)
        i += THREADS
    cute.arch.sync_threads()
    walk(k, histogram, False)
    cute.arch.sync_threads()
    e = k.tid
    while e < k.num_experts:
        sum = Int32(0)
        for w in range_constexpr(WARPS):
            n = histogram[e, w]
            histogram[e, w] = sum
            sum += n
        cute.arch.store(flags.int_at(k.base + k.layout.counts + Int64(k.cta * k.num_experts + e) * 4), sum)
        e += THREADS
    cute.arch.sync_threads()
    if k.tid == 0:
        # writer: every CTA, of its counts; reader: sum_counts of every CTA of this rank
        flags.add_release(flags.flag(k.base, ws.COUNTED + k.parity), 1, "gpu")


@cute.jit
def sum_counts(k, below, total):
    """below[e]: ids of e in CTAs before this one; total[e]: in all of them. The table is split among the threads."""
    verdict = k.verdict
    if k.tid == 0:
        verdict[0] = flags.wait_for(
            k.watch, flags.flag(k.base, ws.COUNTED + k.parity), k.num_ctas, "gpu", flags.IN_COUNT, Int32(0)
        )
    cute.arch.sync_threads()
    ok = Int32(verdict[0])
    parts = Int32(THREADS) // k.num_experts
    if parts < 1:
        parts = Int32(1)
    i = k.tid
    while i < parts * k.num_experts:
        e, part = i % k.num_experts, i // k.num_experts
        mine, all = Int32(0), Int32(0)
        for c in cutlass.range(part, k.num_ctas, parts, unroll=8):
            n = flags.load_cg(k.base + k.layout.counts + Int64(c * k.num_experts + e) * 4)
            all += n
            if c < k.cta:
                mine += n
        cute.arch.atomic_add(below.iterator + e, mine, sem="relaxed", scope="cta")
        cute.arch.atomic_add(total.iterator + e, all, sem="relaxed", scope="cta")
        i += THREADS
    cute.arch.sync_threads()
    return ok


@cute.jit
def scan(k, values, n: Int32):
    """values[i] becomes the sum of those before it, in place, values[n] the sum of all; by warp 0. Barriers around it
    are the caller's."""
    if k.warp == 0:
        carry, i = Int32(0), k.lane
        while i - k.lane < n:
            own = Int32(0)
            if i < n:
                own = values[i]
            sum = own
            for step in (1, 2, 4, 8, 16):
                up = cute.arch.shuffle_sync_up(sum, step)
                if k.lane >= step:
                    sum += up
            if i < n:
                values[i] = carry + sum - own
            carry += cute.arch.shuffle_sync(sum, 31)
            i += 32
        if k.lane == 0:
            values[n] = carry


@cute.jit
def place(k, histogram, below, total):
    """Sorts this CTA's slots into the rank's list; CTA 0 writes the body of the header to all ranks."""
    # below and total are neighbours: total[E] lies behind both, so the sum of all has its own place
    scan(k, total, k.num_experts)
    cute.arch.sync_threads()
    if k.cta == 0:
        ints = ws.header_ints(k.num_experts)
        peers = k.peers
        r = Int32(0)
        while r < k.num_ranks:
            header = peers[r] + k.layout.header + Int64((k.rank * 2 + k.parity) * ints) * 4
            e = k.tid
            while e <= k.num_experts:
                # writer of the header's body; readers acquire the header's epoch (PLACED orders it before, at sys)
                cute.arch.store(flags.int_at(header + Int64(ws.H_FIRST + e) * 4), Int32(total[e]))
                e += THREADS
            if k.tid == 0:
                cute.arch.store(flags.int_at(header + ws.H_STATUS * 4), Int32(0))
                cute.arch.store(flags.int_at(header + ws.H_TOKENS * 4), k.num_tokens)
            r += 1
    i = k.tid
    while i < k.num_experts * WARPS:
        e = i % k.num_experts
        histogram[e, i // k.num_experts] = histogram[e, i // k.num_experts] + (below[e] + total[e])
        i += THREADS
    cute.arch.sync_threads()
    walk(k, histogram, True)


@cute.jit
def announce(k):
    """PLACED: this CTA's part of xq, xs, slots (and CTA 0's header bodies) is written; the last CTA sends the headers.
    Released at sys by every CTA, because the header announces it to other ranks."""
    verdict = k.verdict
    # peers read xq with bulk copies (async proxy), this CTA wrote it with ordinary stores
    cute.arch.fence_proxy("async.global")
    cute.arch.sync_threads()
    if k.tid == 0:
        verdict[0] = flags.add_fetch_ordered(flags.flag(k.base, ws.PLACED + k.parity), 1, "sys")
    cute.arch.sync_threads()
    if Int32(verdict[0]) == k.num_ctas - 1:
        ints = ws.header_ints(k.num_experts)
        if k.tid == 0:
            # all CTAs of this launch have read the number of the call: it may advance
            flags.store_relaxed(flags.flag(k.base, ws.EPOCH), k.epoch, "gpu")
        if k.tid < k.num_ranks:
            peers = k.peers
            header = peers[k.tid] + k.layout.header + Int64((k.rank * 2 + k.parity) * ints) * 4
            # writer: the last CTA of this rank; reader: await_headers of every CTA of rank k.tid
            flags.store_release(header, k.epoch, "sys")
    cute.arch.sync_threads()


# ---------------------------------------------------------------- the plan of the owner


@cute.jit
def await_headers(k):
    """Acquires the headers of all ranks: from here on their blobs may be read and written for this call."""
    verdict = k.verdict
    if k.tid == 0:
        ok = Int32(1)
        r = Int32(0)
        while r < k.num_ranks:
            header = k.base + k.layout.header + Int64((r * 2 + k.parity) * ws.header_ints(k.num_experts)) * 4
            if ok == 1:
                ok = flags.wait_for(k.watch, header, k.epoch, "sys", flags.IN_HEADER, r)
            r += 1
        verdict[0] = ok
    cute.arch.sync_threads()
    return Int32(verdict[0])


@cute.jit
def owner_tables(k):
    """Tables of the owner's part in scratch memory: first[e, r], where rank r's list holds the slots of expert e;
    need[e], rows of all ranks' segments; starts[e], real rows of this rank before its expert e."""
    experts = k.num_experts + 1
    first = memory.smem_tensor(k.scratch, Int32, (experts, k.num_ranks))
    need = memory.smem_tensor(k.scratch + experts * k.num_ranks * 4, Int32, (experts,))
    starts = memory.smem_tensor(k.scratch + experts * (k.num_ranks + 1) * 4, Int32, (k.problem.expert_table + 1,))
    return first, need, starts


@cute.jit
def given_segments(k, ok: Int32):
    """With the plan given: segments (k.offs in shared memory, starts in scratch) from the caller's offs and counts."""
    offs = k.offs
    _, _, starts = owner_tables(k)
    e = k.tid
    while e < k.num_local:
        starts[e] = Int32(k.counts_g[e]) * ok
        e += THREADS
    cute.arch.sync_threads()
    scan(k, starts, k.num_local)
    e = k.tid
    while e <= k.problem.expert_table:
        offs[e] = Int32(NO_ROW)
        if e <= k.num_local:
            offs[e] = Int32(k.offs_g[e]) * ok
        else:
            starts[e] = Int32(NO_ROW)
        e += THREADS
    cute.arch.sync_threads()


@cute.jit
def make_segments(k, ok: Int32):
    """offs (shared memory, and the caller's tensor): first row of each local expert, from the headers of all ranks."""
    offs, offs_g, counts_g = k.offs, k.offs_g, k.counts_g
    first, need, starts = owner_tables(k)
    experts = k.num_experts + 1
    ints = ws.header_ints(k.num_experts)
    i = k.tid
    while i < experts * k.num_ranks:
        r = i // experts
        header = k.base + k.layout.header + Int64((r * 2 + k.parity) * ints) * 4
        first[i - r * experts, r] = flags.load_cg(header + Int64(ws.H_FIRST + i - r * experts) * 4)
        i += THREADS
    cute.arch.sync_threads()
    e = k.tid
    while e < k.num_experts:
        rows = Int32(0)
        r = Int32(0)
        while r < k.num_ranks:
            rows += first[e + 1, r] - first[e, r]
            r += 1
        need[e] = (rows + 127) // 128 * 128
        local = e - k.rank * k.num_local
        if (local >= 0) & (local < k.num_local):
            starts[local] = rows * ok
            if k.cta == 0:
                counts_g[local] = rows
        e += THREADS
    cute.arch.sync_threads()
    scan(k, need, k.num_experts)
    cute.arch.sync_threads()
    # every rank looks at the rows of all ranks, so all of them decide alike before a row moves
    if ok == 1:
        r = Int32(0)
        while r < k.num_ranks:
            rows = need[(r + 1) * k.num_local] - need[r * k.num_local]
            if rows > k.max_blocks * 128:
                ok = Int32(0)
                if (k.cta == 0) & (k.tid == 0):
                    flags.record(k.watch, flags.OVERFLOW, flags.IN_PLAN, r, rows, k.max_blocks * 128)
            r += 1
    e = k.tid
    while e <= k.problem.expert_table:
        row = Int32(NO_ROW)
        if e <= k.num_local:
            row = (need[k.rank * k.num_local + e] - need[k.rank * k.num_local]) * ok
            if k.cta == 0:
                offs_g[e] = row
        else:
            starts[e] = Int32(NO_ROW)
        if ok == 0:
            if e < k.num_local:
                starts[e] = Int32(0)
        offs[e] = row
        e += THREADS
    cute.arch.sync_threads()
    scan(k, starts, k.num_local)
    cute.arch.sync_threads()
    return ok


@cute.jit
def order_rows(k):
    """The list of what this CTA pulls: of the rank's real rows, in pool order, every num_ctas-th one, as (row, code);
    and each row's code and weight. Returns how many there are."""
    codes, p_g = k.codes, k.p
    first, _, starts = owner_tables(k)
    peers = k.peers
    rows = Int32(starts[k.num_local])
    i = k.cta + k.tid * k.num_ctas
    while i < rows:
        e = find_expert(starts, i, k.problem.expert_table)
        at = i - starts[e]
        row = k.offs[e] + at
        code = Int32(-1)
        if const_expr(k.problem.plan_given):
            code = Int32(codes[row])
        else:
            e += k.rank * k.num_local
            p = Float32(0.0)
            r = Int32(0)
            while r < k.num_ranks:
                n = first[e + 1, r] - first[e, r]
                if (at >= 0) & (at < n):
                    # of a peer, written before its header, which this CTA has acquired
                    entry = peers[r] + k.layout.slots + Int64(first[e, r] + at) * 8
                    code = flags.load_cg(entry) | (r << CODE_BITS)
                    p = Float32(cute.arch.load(memory.float_at(entry + 4), Float32, cop="cg"))
                at -= n
                r += 1
            codes[row] = code
            p_g[row] = p
        item = k.base + k.layout.order + Int64(i) * 8
        cute.arch.store(flags.int_at(item), row)
        cute.arch.store(flags.int_at(item + 4), code)
        i += k.num_ctas * THREADS
    fill_padding(k, starts)
    # the loader brings codes and weights with bulk copies; the rows' arrival counters release them
    cute.arch.fence_proxy("async.global")
    cute.arch.sync_threads()
    return rows


@cute.jit
def fill_padding(k, starts):
    """Padding rows (of a segment's last block; row % num_ctas says whose they are): code -1, weight 0, where a backward
    will read the pool also zeros; then they have arrived. A warp takes an expert at a time."""
    codes, p_g = k.codes, k.p
    e = k.warp
    while e < k.num_local:
        row = first_padding(k, starts, e)
        while row < k.offs[e + 1]:
            if const_expr(not k.problem.plan_given):
                if k.lane == 0:
                    codes[row] = Int32(-1)
                    p_g[row] = Float32(0.0)
            if const_expr(k.problem.save):
                zero_row(k, row)
            row += k.num_ctas
        e += WARPS
    cute.arch.fence_proxy("async.global")
    cute.arch.sync_warp()
    # orders the warp's stores above before its lanes' adds: reader, the schedulers of GEMM-1 tiles of the block
    flags.fence("gpu")
    arrive = k.base + k.layout.arrive + Int64(k.parity * k.max_blocks) * 4
    e = k.warp + WARPS * k.lane
    while e < k.num_local:
        row = first_padding(k, starts, e)
        while row < k.offs[e + 1]:
            flags.add_relaxed(arrive + Int64(row // 128) * 4, k.pieces, "gpu")
            row += k.num_ctas
        e += WARPS * 32


@cute.jit
def first_padding(k, starts, e: Int32):
    """The first padding row of expert e that is this CTA's."""
    row = k.offs[e] + starts[e + 1] - starts[e]
    away = (k.cta - row) % k.num_ctas
    if away < 0:
        away += k.num_ctas
    return row + away


@cute.jit
def zero_row(k, row: Int32):
    zeros = cute.make_rmem_tensor(4, Int32)
    zeros.fill(0)
    pool, pool_s = k.pool_base, k.pool_s
    i = k.lane
    while i < k.problem.hidden // 16:
        memory.store_vector(pool + Int64(row) * k.problem.hidden + i * 16, zeros)
        i += 32
    block = k.lane
    while block < k.problem.k1:
        pool_s[block, row] = Float32(0.0)
        block += 32
