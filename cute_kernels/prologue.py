"""What the threads of a CTA do before the roles split: quantise tokens, sort ids, meet the other ranks.

    sorting warps (0 to 3)                                          quantising warps (4 to 11)
    count ids                       -> counts[cta, expert]; COUNTED (grid)        x -> xq, xs
    rows of CTAs before, totals     -> where each id of this CTA goes in the rank's sorted slot list
    sort                            -> slots[position] = (token * K + k, weight)
    LISTED (grid); its last CTA tells all ranks in the header, with status and signature
    wait for the lists of all ranks; compare signatures, end here if some rank's status says so
    segments of this rank's experts -> offs (shared memory); the schedule's cuts; code and weight of each row, and the
                                       list of the rows that this CTA will pull
    all: PLACED (grid); its last CTA sends the header to all ranks; wait for the headers of all ranks

Order of the slot list: global expert, token, k. Nothing depends on who came first: positions are sums of counts.
The scratch memory is the (still unused) pipeline.
"""

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, const_expr, cute, range_constexpr

from cute_kernels import errors, flags, memory, numerics, trace
from cute_kernels import workspace as ws
from cute_kernels.schedule import CUTS, cut, find_expert, group_size, integer, scaled_group, smaller
from cute_kernels.tile_config import BLOCK, THREADS, WARPS

SORT_WARPS = 4
SORT_THREADS = 32 * SORT_WARPS
SORT_BARRIER, PLAN_BARRIER = 2, 3  # named barriers: of the sorting warps; segments are ready
SUM_BATCH = 8  # CTAs whose counts a thread looks at together
WALK_BATCH = 4  # groups of 32 slots that a warp looks at together
QUANTIZE_WARPS = WARPS - SORT_WARPS

CODE_BITS = 27  # a row code is rank << 27 | token * K + k; -1: padding
NO_ROW = 0x7FFFFF00  # beyond any
LOADS_IN_FLIGHT = 6  # 16-byte loads of a step of a thread that quantises; two steps are under way


def sync(threads):
    """Barrier of all threads of the CTA, or of the sorting warps."""
    if threads == THREADS:
        cute.arch.sync_threads()
    else:
        cute.arch.barrier(barrier_id=SORT_BARRIER, number_of_threads=threads)


@cute.jit
def run(k):
    """The whole prologue. Leaves segments and schedule in shared memory and returns how many real rows this rank has:
    none if the call is over already."""
    offs, cuts = k.offs, k.cuts
    clear_counters(k)
    since = trace.begin(k)
    if k.warp < SORT_WARPS:
        sort(k)
    else:
        quantize_tokens(k)
        if const_expr(k.config.trace):
            if k.tid == THREADS - 1:
                trace.event(k, trace.MATH, trace.QUANTIZE, since)
        cute.arch.barrier(barrier_id=PLAN_BARRIER, number_of_threads=THREADS)
        order_rows(k)
    since = trace.begin(k)
    announce(k, ws.PLACED, ws.H_EPOCH, THREADS)
    ok = await_headers(k, ws.H_EPOCH, THREADS)
    if const_expr(k.problem.plan_given):
        errors.compare_headers(k)
        cute.arch.sync_threads()
        ok = errors.judge_headers(k, ok)
    stamp(k, trace.WAIT_HEADERS, since)
    _, _, starts = owner_tables(k)
    rows = Int32(starts[k.num_local]) * ok
    cute.arch.sync_threads()
    if ok == 0:
        if k.tid < CUTS:
            cuts[k.tid] = Int32(0)
        if k.tid == 0:
            offs[k.num_local] = Int32(0)
    cute.arch.sync_threads()
    return rows


@cute.jit
def sort(k):
    """What the sorting warps do: this rank's slots by expert, then the rows that this rank gets from all ranks."""
    ok = Int32(1)
    since = trace.begin(k)
    if const_expr(k.problem.plan_given):
        given_segments(k)
    else:
        histogram = memory.smem_tensor(k.scratch, Int32, (k.num_experts, SORT_WARPS))
        below = memory.smem_tensor(k.scratch + k.num_experts * (SORT_WARPS * 4), Int32, (k.num_experts,))
        total = memory.smem_tensor(k.scratch + k.num_experts * ((SORT_WARPS + 1) * 4), Int32, (k.num_experts,))
        count(k, histogram)
        since = stamp(k, trace.COUNT, since)
        ok = sum_counts(k, below, total) * (1 - Int32(k.fate[1]))
        since = stamp(k, trace.WAIT_COUNTS, since)
        if ok == 1:
            place(k, histogram, below, total)
            announce(k, ws.LISTED, ws.H_LISTED, SORT_THREADS)
            since = stamp(k, trace.PLACE, since)
            ok = await_headers(k, ws.H_LISTED, SORT_THREADS)
            since = stamp(k, trace.WAIT_HEADERS, since)
        make_segments(k, ok)
    make_cuts(k)
    # segments are in shared memory: the quantising warps may help with the rows once they are done
    cute.arch.barrier_arrive(barrier_id=PLAN_BARRIER, number_of_threads=THREADS)
    _, _, starts = owner_tables(k)
    fill_padding(k, starts)
    order_rows(k)
    stamp(k, trace.PLAN, since)


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
        for word in (ws.CLAIM, ws.COUNTED, ws.LISTED, ws.PLACED, ws.HOME, ws.BAD_ID):
            flags.store_relaxed(flags.flag(k.base, word + other), 0, "gpu")


# ---------------------------------------------------------------- tokens


@cute.jit
def quantize_tokens(k):
    """x [T, H] bf16 -> xq, xs in this rank's blob. A half warp takes 128 channels, 8 a lane; the channel blocks of all
    tokens are one flat sequence. The loads of a step are issued before the work on the step before."""
    blocks = k.num_tokens * k.problem.k1
    step = k.num_ctas * (QUANTIZE_WARPS * 2 * LOADS_IN_FLIGHT)
    first = (k.cta * QUANTIZE_WARPS + k.warp - SORT_WARPS) * (2 * LOADS_IN_FLIGHT) + k.lane // 16
    if first < blocks:
        values = [cute.make_rmem_tensor(4, Int32) for _ in range(LOADS_IN_FLIGHT)]
        coming = [cute.make_rmem_tensor(4, Int32) for _ in range(LOADS_IN_FLIGHT)]
        load_blocks(k, values, first, blocks)
        while first < blocks:
            load_blocks(k, coming, first + step, blocks)
            quantize_blocks(k, values, first, blocks)
            for j in range_constexpr(LOADS_IN_FLIGHT):
                values[j].store(coming[j].load())
            first += step


@cute.jit
def load_blocks(k, values, first: Int32, blocks: Int32):
    """8 channels a lane of blocks first, first + 2, ...; those beyond the last are read as the last."""
    x = k.x.iterator.toint() + Int64(k.lane % 16) * 16
    for j in range_constexpr(LOADS_IN_FLIGHT):
        words = memory.load_input(x + Int64(smaller(first + 2 * j, blocks - 1)) * (BLOCK * 2))
        for i in range_constexpr(4):
            values[j][i] = words[i]


@cute.jit
def quantize_blocks(k, values, first: Int32, blocks: Int32):
    """Blocks first, first + 2, ... of 128 channels; those beyond the last are dropped."""
    channel = k.lane % 16 * 8
    for j in range_constexpr(LOADS_IN_FLIGHT):
        at = first + 2 * j
        wide = cute.recast_tensor(values[j], BFloat16).load().to(Float32)
        v = [wide[i] for i in range(8)]
        amax = numerics.abs_max(v, Float32(0.0))
        for distance in (8, 4, 2, 1):
            amax = cute.arch.fmax(amax, cute.arch.shuffle_sync_bfly(amax, distance))
        scale = numerics.scale_of(amax, k.problem.pow2_scales)
        q = numerics.to_e4m3(v, numerics.reciprocal(scale))
        if at < blocks:
            memory.store_vector(k.base + k.layout.xq + Int64(at) * BLOCK + channel, q)
            if channel == 0:
                token = at // k.problem.k1
                place = Int64(token) * k.problem.scale_pitch + (at - token * k.problem.k1)
                cute.arch.store(memory.float_at(k.base + k.layout.xs + place * 4), scale)


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


def slot_expert(k, i: Int32, inside):
    """As expert_of, without a branch, where there is at least one slot, and whether its id is out of range; (-1, no) if
    not `inside`."""
    at = smaller(i, k.num_slots - 1) * k.id_words
    e, upper = Int32(k.ids[at]), Int32(k.ids[at + k.id_words - 1])
    valid = inside & (i < k.num_slots) & (e >= 0) & (e < k.num_experts) & ((k.id_words == 1) | (upper == 0))
    # -1 is the only other id that is right, in one word or two
    wrong = inside & (i < k.num_slots) & (integer(valid) == 0) & ((e & upper) != -1)
    return (e + 1) * integer(valid) - 1, wrong


@cute.jit
def walk(k, histogram, write):
    """This warp's slots in order, 32 at a time: histogram[e, warp] counts on. With `write` (compile-time) it began as
    the position of the warp's first slot of e in the sorted list, and the slots are stored there."""
    each = ((k.num_slots + 31) // 32 + k.num_ctas * SORT_WARPS - 1) // (k.num_ctas * SORT_WARPS)
    group = (k.cta * SORT_WARPS + k.warp) * each
    end = group + each
    while group < end:
        # the loads of a batch are under way together
        slots = [(group + b) * 32 + k.lane for b in range(WALK_BATCH)]
        found = [slot_expert(k, slots[b], group + b < end) for b in range(WALK_BATCH)]
        experts = [e for e, _ in found]
        if const_expr(not write):
            for b in range_constexpr(WALK_BATCH):
                if found[b][1]:
                    # reader: errors.describe_rank of the rank's last CTA, behind COUNTED and LISTED
                    flags.store_relaxed(flags.flag(k.base, ws.BAD_ID + k.parity), slots[b] + 1, "gpu")
        weights = [Float32(0.0) for _ in range(WALK_BATCH)]
        if const_expr(write):
            weights = [Float32(k.weights[smaller(i, k.num_slots - 1)]) for i in slots]
        for b in range_constexpr(WALK_BATCH):
            e, i = experts[b], slots[b]
            same = Int32(cute.arch.match_sync(0xFFFFFFFF, e))
            before = cute.arch.popc(same & ((Int32(1) << k.lane) - 1))
            if e >= 0:
                if const_expr(write):
                    position = histogram[e, k.warp] + before
                    entry = k.base + k.layout.slots + Int64(position) * 8
                    cute.arch.store(flags.int_at(entry), i)
                    cute.arch.store(memory.float_at(entry + 4), weights[b])
            cute.arch.sync_warp()
            if e >= 0:
                if before == 0:
                    histogram[e, k.warp] = histogram[e, k.warp] + cute.arch.popc(same)
            cute.arch.sync_warp()
        group += WALK_BATCH


@cute.jit
def count(k, histogram):
    """counts[cta, e] of this CTA's slots; histogram[e, w] becomes the number in warps before w."""
    clear = memory.smem_tensor(k.scratch, Int32, (k.num_experts * (SORT_WARPS + 2),))
    i = k.tid
    while i < k.num_experts * (SORT_WARPS + 2):
        clear[i] = Int32(0)
        i += SORT_THREADS
    sync(SORT_THREADS)
    walk(k, histogram, False)
    sync(SORT_THREADS)
    e = k.tid
    while e < k.num_experts:
        sum = Int32(0)
        for w in range_constexpr(SORT_WARPS):
            n = histogram[e, w]
            histogram[e, w] = sum
            sum += n
        cute.arch.store(
            flags.int_at(k.base + k.layout.counts + Int64(k.cta * ws.count_pitch(k.num_experts) + e) * 4), sum
        )
        e += SORT_THREADS
    sync(SORT_THREADS)
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
    sync(SORT_THREADS)
    ok = Int32(verdict[0])
    # a thread takes four experts and every parts-th CTA
    pitch = ws.count_pitch(k.num_experts)
    parts = Int32(SORT_THREADS) // (pitch // 4)
    i = k.tid
    while i < parts * (pitch // 4):
        e, part = i % (pitch // 4) * 4, i // (pitch // 4)
        mine, all = [Int32(0) for _ in range(4)], [Int32(0) for _ in range(4)]
        c = part
        while c < k.num_ctas:
            # the loads of a batch are under way together
            ctas = [c + parts * j for j in range(SUM_BATCH)]
            rows = [k.base + k.layout.counts + Int64(smaller(x, k.num_ctas - 1) * pitch + e) * 4 for x in ctas]
            counts = [memory.load_ints_cg(row) for row in rows]
            for x, n in zip(ctas, counts, strict=True):
                is_one, is_before = integer(x < k.num_ctas), integer(x < k.cta)
                all = [a + b * is_one for a, b in zip(all, n, strict=True)]
                mine = [a + b * is_before for a, b in zip(mine, n, strict=True)]
            c += parts * SUM_BATCH
        for j in range_constexpr(4):
            if e + j < k.num_experts:
                cute.arch.atomic_add(below.iterator + e + j, mine[j], sem="relaxed", scope="cta")
                cute.arch.atomic_add(total.iterator + e + j, all[j], sem="relaxed", scope="cta")
        i += SORT_THREADS
    sync(SORT_THREADS)
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
    sync(SORT_THREADS)
    if k.cta == 0:
        peers = k.peers
        r = Int32(0)
        while r < k.num_ranks:
            header = errors.header_at(k, peers[r], k.rank)
            e = k.tid
            while e <= k.num_experts:
                # writer of the header's body; readers acquire the header's epoch (PLACED orders it before, at sys)
                cute.arch.store(flags.int_at(header + Int64(ws.H_FIRST + e) * 4), Int32(total[e]))
                e += SORT_THREADS
            r += 1
    i = k.tid
    while i < k.num_experts * SORT_WARPS:
        e = i % k.num_experts
        histogram[e, i // k.num_experts] = histogram[e, i // k.num_experts] + (below[e] + total[e])
        i += SORT_THREADS
    sync(SORT_THREADS)
    walk(k, histogram, True)


@cute.jit
def announce(k, counter, word, threads):
    """`counter` (LISTED or PLACED): this CTA's part is written, that is, slots and CTA 0's header bodies, or also its
    tokens; the rank's last CTA then writes the call's number into `word` of its header on all ranks, the first time
    with status and signature. Released at sys by every CTA, because the header announces it to other ranks. By the
    CTA's first `threads` threads."""
    verdict = k.verdict
    # peers read xq with bulk copies (async proxy), this CTA wrote it with ordinary stores
    cute.arch.fence_proxy("async.global")
    sync(threads)
    if k.tid == 0:
        verdict[0] = flags.add_fetch_ordered(flags.flag(k.base, counter + k.parity), 1, "sys")
    sync(threads)
    if Int32(verdict[0]) == k.num_ctas - 1:
        if const_expr(word == ws.H_EPOCH):
            if k.tid == 0:
                # all CTAs of this launch have read the number of the call: it may advance
                flags.store_relaxed(flags.flag(k.base, ws.EPOCH), k.epoch, "gpu")
        if (k.tid < k.num_ranks) & (Int32(k.fate[1]) == 0):
            peers = k.peers
            header = errors.header_at(k, peers[k.tid], k.rank)
            if const_expr(word == ws.H_LISTED or k.problem.plan_given):
                errors.describe_rank(k, header)
            if const_expr(word == ws.H_EPOCH and k.problem.plan_given):
                # a rank whose call has lists looks here for the signature
                flags.store_release(header + ws.H_LISTED * 4, k.epoch, "sys")
            # writer: the last CTA of this rank; reader: await_headers of every CTA of rank k.tid
            flags.store_release(header + word * 4, k.epoch, "sys")
    sync(threads)


# ---------------------------------------------------------------- the plan of the owner


@cute.jit
def await_headers(k, word, threads):
    """Acquires `word` of the headers of all ranks: after H_LISTED their headers and slots may be read, after H_EPOCH
    their blobs may be read and written for this call. By the CTA's first `threads` threads; 0: the call is over."""
    verdict = k.verdict
    if k.tid == 0:
        ok = Int32(1)
        r = Int32(0)
        while r < k.num_ranks:
            header = errors.header_at(k, k.base, r)
            if ok == 1:
                ok = flags.wait_for(k.watch, header + word * 4, k.epoch, "sys", flags.IN_HEADER, r)
            r += 1
        verdict[0] = ok * (1 - Int32(k.fate[1]))
    sync(threads)
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
def given_segments(k):
    """With the plan given: segments (k.offs in shared memory, starts in scratch) from the caller's offs and counts. If
    they are those of a call that ended without results (make_segments), so does this one, on all ranks."""
    offs = k.offs
    if k.tid == 0:
        if Int32(k.offs_g[0]) < 0:
            errors.end_call(k, flags.NO_PLAN, flags.IN_PLAN, Int32(0), Int32(0), Int32(0))
    _, _, starts = owner_tables(k)
    has_plan = integer(Int32(k.offs_g[0]) >= 0)
    e = k.tid
    while e < k.num_local:
        starts[e] = Int32(k.counts_g[e]) * has_plan
        e += SORT_THREADS
    sync(SORT_THREADS)
    scan(k, starts, k.num_local)
    e = k.tid
    while e <= k.problem.expert_table:
        offs[e] = Int32(NO_ROW)
        if e <= k.num_local:
            offs[e] = cutlass.max(Int32(k.offs_g[e]), Int32(0))
        else:
            starts[e] = Int32(NO_ROW)
        e += SORT_THREADS
    sync(SORT_THREADS)


@cute.jit
def make_segments(k, ok: Int32):
    """offs (shared memory, and the caller's tensor): first row of each local expert, from the headers of all ranks."""
    offs, offs_g, counts_g = k.offs, k.offs_g, k.counts_g
    first, need, starts = owner_tables(k)
    experts = k.num_experts + 1
    errors.compare_headers(k)
    i = k.tid
    while i < experts * k.num_ranks:
        r = i // experts
        header = errors.header_at(k, k.base, r)
        first[i - r * experts, r] = flags.load_cg(header + Int64(ws.H_FIRST + i - r * experts) * 4)
        i += SORT_THREADS
    sync(SORT_THREADS)
    ok = errors.judge_headers(k, ok)
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
                counts_g[local] = rows * ok
        e += SORT_THREADS
    sync(SORT_THREADS)
    scan(k, need, k.num_experts)
    sync(SORT_THREADS)
    # every rank looks at the rows of all ranks, so all of them decide alike before a row moves
    if ok == 1:
        r = Int32(0)
        while r < k.num_ranks:
            rows = need[(r + 1) * k.num_local] - need[r * k.num_local]
            if (rows > k.max_blocks * 128) & (ok == 1):
                ok = Int32(0)
                if k.tid == 0:
                    errors.end_call(k, flags.OVERFLOW, flags.IN_PLAN, r, rows, k.max_blocks * 128)
            r += 1
    e = k.tid
    while e <= k.problem.expert_table:
        row = Int32(NO_ROW)
        if e <= k.num_local:
            row = (need[k.rank * k.num_local + e] - need[k.rank * k.num_local]) * ok
            if k.cta == 0:
                # a call without results has no rows, and says so to those that are given its plan
                offs_g[e] = row - integer(ok == 0) * integer(e == 0)
        else:
            starts[e] = Int32(NO_ROW)
        if ok == 0:
            if e < k.num_local:
                starts[e] = Int32(0)
                if k.cta == 0:
                    counts_g[e] = Int32(0)
        offs[e] = row
        e += SORT_THREADS
    sync(SORT_THREADS)
    scan(k, starts, k.num_local)
    sync(SORT_THREADS)


@cute.jit
def make_cuts(k):
    """The schedule's groups, in shared memory."""
    cuts = k.cuts
    blocks = Int32(k.offs[k.num_local]) // 128
    size = group_size(blocks, scaled_group(k.config.group(k.problem), k.num_ctas))
    if k.tid < CUTS:
        cuts[k.tid] = cut(k.tid, blocks, size, k.offs, k.problem.expert_table)


@cute.jit
def order_rows(k):
    """The list of what this CTA pulls: of the rank's real rows, in pool order, every num_ctas-th one, as (row, code);
    and each row's code and weight. All warps share the work."""
    first, _, starts = owner_tables(k)
    rows = Int32(starts[k.num_local])
    cursor = k.cursor
    chunk = Int32(0)
    while chunk * (32 * k.num_ctas) < rows:
        # warps take 32 rows at a time
        if k.lane == 0:
            chunk = cute.arch.atomic_add(cursor.iterator, Int32(1), sem="relaxed", scope="cta")
        chunk = cute.arch.shuffle_sync(chunk, 0)
        i = k.cta + (chunk * 32 + k.lane) * k.num_ctas
        if i < rows:
            order_row(k, i, first, starts)
    # the loader brings codes and weights with bulk copies; the rows' arrival counters release them
    cute.arch.fence_proxy("async.global")


@cute.jit
def order_row(k, i: Int32, first, starts):
    """Real row number i of the rank."""
    codes, p_g = k.codes, k.p
    e = find_expert(starts, i, k.problem.expert_table)
    at = i - starts[e]
    row = k.offs[e] + at
    code = Int32(-1)
    if const_expr(k.problem.plan_given):
        code = Int32(codes[row])
    else:
        peers = k.peers
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
        e += SORT_WARPS
    cute.arch.fence_proxy("async.global")
    cute.arch.sync_warp()
    # orders the warp's stores above before its lanes' adds: reader, the schedulers of GEMM-1 tiles of the block
    flags.fence("gpu")
    arrive = k.base + k.layout.arrive + Int64(k.parity * k.max_blocks) * 4
    e = k.warp + SORT_WARPS * k.lane
    while e < k.num_local:
        row = first_padding(k, starts, e)
        while row < k.offs[e + 1]:
            flags.add_relaxed(arrive + Int64(row // 128) * 4, k.pieces, "gpu")
            row += k.num_ctas
        e += SORT_WARPS * 32


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
