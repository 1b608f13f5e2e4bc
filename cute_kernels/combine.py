"""The end of a call: wait for the rows of all ranks, then out[t] = bf16(sum over k, in order, in fp32, of y)."""

from cutlass import BFloat16, Float32, Int32, Int64, const_expr, cute, range_constexpr

from cute_kernels import errors, flags, memory, trace
from cute_kernels import workspace as ws
from cute_kernels.prologue import expert_of
from cute_kernels.schedule import integer

SLOTS_AT_ONCE = 8  # rows of y whose loads are in flight together
CHUNK = 512  # columns of a warp, twice 8 a lane


@cute.jit
def combine(k, who: Int32, num_warps: Int32):
    """Sums the tokens of this rank. who: this warp's number among the num_warps of the grid that take part. Returns 1,
    or 0 if the call is over."""
    # writers: the couriers of all CTAs of all ranks, behind their last row of y (sys)
    since = trace.begin(k)
    target = k.num_ranks * k.num_ctas
    ok = flags.wait_for(k.watch, flags.flag(k.base, ws.HOME + k.parity), target, "sys", flags.IN_HOME, Int32(0))
    # a call that all ranks ended without rows has all its signals
    ok = ok * (1 - Int32(k.fate[0]))
    if const_expr(k.config.trace):
        if k.tid == 128:
            trace.event(k, trace.MATH, trace.WAIT_HOME, since)
    since = trace.begin(k)
    chunks = (k.problem.hidden + CHUNK - 1) // CHUNK
    units = k.num_tokens * chunks
    unit = who
    present = slots_present(k, unit // chunks)
    while unit < units:
        token = unit // chunks
        column = (unit - token * chunks) * CHUNK + k.lane * 8
        unit += num_warps
        # which slots the next token has is looked up while this one's rows are on their way
        if ok == 1:
            present = sum_token(k, token, column, present, unit // chunks)
        else:
            fill_nan(k, token, column)
    if (ok == 0) & (k.tid == 128):
        errors.report(k)
    if const_expr(k.config.trace):
        if k.tid == 128:
            trace.event(k, trace.MATH, trace.SUM, since)
    return ok


@cute.jit
def expert_of_lane(k, token: Int32):
    """Expert of slot `lane` of the token; -1 behind the last slot and behind the last token."""
    e = Int32(-1)
    if (k.lane < k.top_k) & (token < k.num_tokens):
        e = expert_of(k, token * k.top_k + k.lane)
    return e


@cute.jit
def slots_present(k, token: Int32):
    """Bit j: slot j of the token has an expert."""
    return Int32(cute.arch.vote_ballot_sync(expert_of_lane(k, token) >= 0))


@cute.jit
def sum_token(k, token: Int32, column: Int32, present: Int32, next_token: Int32):
    """CHUNK columns of a token, 8 at `column` and 8 at column + CHUNK / 2 of each lane. Returns slots_present of the
    next token."""
    accs = [cute.make_rmem_tensor(8, Float32) for _ in range(2)]
    for acc in accs:
        acc.fill(0.0)
    # columns behind H are read at column 0 and dropped
    offsets = [column * 2, (column + CHUNK // 2) * integer(column + CHUNK // 2 < k.problem.hidden) * 2]
    if const_expr(k.problem.hidden % CHUNK != 0):
        offsets[0] = offsets[0] * integer(column < k.problem.hidden)
    y = k.base + k.layout.y + Int64(token) * k.top_k * (2 * k.problem.hidden)
    e = Int32(-1)
    first = Int32(0)
    while first < k.top_k:
        # All loads are issued before the first sum: none is conditional (an absent slot reads the token's first row and
        # is masked), and the pin needs them all. Left alone, the compiler keeps two or three in flight.
        here = [integer((present >> (first + j)) & 1 == 1) for j in range(SLOTS_AT_ONCE)]
        rows = [y + Int64((first + j) * here[j]) * (2 * k.problem.hidden) for j in range(SLOTS_AT_ONCE)]
        words = [[memory.load_words(row + offset) for offset in offsets] for row in rows]
        if first == 0:
            e = expert_of_lane(k, next_token)
        cute.arch.inline_ptx("// all loaded", read_only_args=[w for row in words for half in row for w in half])
        for j in range_constexpr(SLOTS_AT_ONCE):
            for h in range_constexpr(2):
                accs[h].store(accs[h].load() + bf16_values([w & -here[j] for w in words[j][h]]))
        first += SLOTS_AT_ONCE
    for h in range_constexpr(2):
        if column + h * (CHUNK // 2) < k.problem.hidden:
            store_out(k, token, column + h * (CHUNK // 2), accs[h])
    return Int32(cute.arch.vote_ballot_sync(e >= 0))


def bf16_values(words):
    """8 floats from 4 words of two bf16 each."""
    t = cute.make_rmem_tensor(4, Int32)
    for i, w in enumerate(words):
        t[i] = w
    return cute.recast_tensor(t, BFloat16).load().to(Float32)


@cute.jit
def fill_nan(k, token: Int32, column: Int32):
    """After a failed call nothing in out looks like a result."""
    acc = cute.make_rmem_tensor(8, Float32)
    acc.fill(float("nan"))
    for offset in (0, CHUNK // 2):
        if column + offset < k.problem.hidden:
            store_out(k, token, column + offset, acc)


@cute.jit
def store_out(k, token: Int32, column: Int32, acc):
    o = cute.make_rmem_tensor(8, BFloat16)
    o.store(acc.load().to(BFloat16))
    memory.store_vector(k.out.iterator.toint() + (Int64(token) * k.problem.hidden + column) * 2, o)
