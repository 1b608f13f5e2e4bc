"""The end of a call: wait for the rows of all ranks, then out[t] = bf16(sum over k, in order, in fp32, of y)."""

from cutlass import BFloat16, Float32, Int32, Int64, const_expr, cute, range_constexpr

from cute_kernels import flags, memory, trace
from cute_kernels import workspace as ws
from cute_kernels.prologue import expert_of

SLOTS_AT_ONCE = 8  # rows of y whose loads are in flight together
CHUNK = 256  # columns of a warp, 8 a lane


@cute.jit
def combine(k, who: Int32, num_warps: Int32):
    """Sums the tokens of this rank. who: this warp's number among the num_warps of the grid that take part. Returns 1,
    or 0 if the call is over."""
    # writers: the couriers of all CTAs of all ranks, behind their last row of y (sys)
    since = trace.begin(k)
    target = k.num_ranks * k.num_ctas
    ok = flags.wait_for(k.watch, flags.flag(k.base, ws.HOME + k.parity), target, "sys", flags.IN_HOME, Int32(0))
    if const_expr(k.config.trace):
        if k.tid == 128:
            trace.event(k, trace.MATH, trace.WAIT_HOME, since)
    since = trace.begin(k)
    chunks = (k.problem.hidden + CHUNK - 1) // CHUNK
    unit = who
    if const_expr(k.config.skip == "sum"):
        unit = k.num_tokens * chunks
    while unit < k.num_tokens * chunks:
        token = unit // chunks
        column = (unit - token * chunks) * CHUNK + k.lane * 8
        present = slots_present(k, token)
        if column < k.problem.hidden:
            if ok == 1:
                sum_token(k, token, column, present)
            else:
                fill_nan(k, token, column)
        unit += num_warps
    if const_expr(k.config.trace):
        if k.tid == 128:
            trace.event(k, trace.MATH, trace.SUM, since)
    return ok


@cute.jit
def slots_present(k, token: Int32):
    """Bit j: slot j of the token has an expert."""
    e = Int32(-1)
    if k.lane < k.top_k:
        e = expert_of(k, token * k.top_k + k.lane)
    return Int32(cute.arch.vote_ballot_sync(e >= 0))


@cute.jit
def sum_token(k, token: Int32, column: Int32, present: Int32):
    acc = cute.make_rmem_tensor(8, Float32)
    acc.fill(0.0)
    y = k.base + k.layout.y + (Int64(token) * k.top_k * k.problem.hidden + column) * 2
    first = Int32(0)
    while first < k.top_k:
        rows = [cute.make_rmem_tensor(8, BFloat16) for _ in range(SLOTS_AT_ONCE)]
        for j in range_constexpr(SLOTS_AT_ONCE):
            rows[j].fill(0.0)
            if (present >> (first + j)) & 1 == 1:
                source = memory.gmem_tensor(y + Int64(first + j) * (2 * k.problem.hidden), BFloat16, 8, align=16)
                cute.autovec_copy(source, rows[j])
        for j in range_constexpr(SLOTS_AT_ONCE):
            acc.store(acc.load() + rows[j].load().to(Float32))
        first += SLOTS_AT_ONCE
    store_out(k, token, column, acc)


@cute.jit
def fill_nan(k, token: Int32, column: Int32):
    """After a failed call nothing in out looks like a result."""
    acc = cute.make_rmem_tensor(8, Float32)
    acc.fill(float("nan"))
    store_out(k, token, column, acc)


@cute.jit
def store_out(k, token: Int32, column: Int32, acc):
    o = cute.make_rmem_tensor(8, BFloat16)
    o.store(acc.load().to(BFloat16))
    memory.store_vector(k.out.iterator.toint() + (Int64(token) * k.problem.hidden + column) * 2, o)
