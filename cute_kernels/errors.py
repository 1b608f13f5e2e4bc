"""What ends a call for everybody: what ranks say of themselves in their headers, and the report that the host reads.

A call ends in one of two ways without results. Where all ranks see the same reason in the same headers (ids out of
range, a rank refused by its host, a pool too small), each of them makes the call without rows: counters and headers are
as after any call, and the next call is right. Where a wait expires, or signatures differ, the abort word ends this call
and every later one on all ranks until the workspaces are reset.

k.fate (shared memory): [0] 1 if the call is over, out becomes NaN; [1] 1 if it was over before it began: no peer's
memory is touched; [2], [3] while headers are compared: MAX_RANKS - r of the lowest rank r with a status, and with a
signature other than rank 0's.
"""

from cutlass import Float32, Int32, Int64, const_expr, cute, range_constexpr

from cute_kernels import flags
from cute_kernels import workspace as ws
from cute_kernels.tile_config import BLOCK, MAX_RANKS

HEADER_THREADS = 8  # that look at a rank's header
REPORT_WAIT = 10_000  # units of 1024 ns: for the record of whoever raised the abort word


@cute.jit
def begin(k):
    """Whether the call is over before it begins. By one thread; a barrier of the CTA follows."""
    fate = k.fate
    # writer: flags.record of any rank; a call that was given up stays so until the workspaces are reset
    stopped = Int32(flags.load_relaxed(flags.flag(k.base, ws.ABORT), "sys") != 0)
    fate[0], fate[1], fate[2], fate[3] = stopped, stopped, Int32(0), Int32(0)


# ---------------------------------------------------------------- headers


def header_at(k, base: Int64, source):
    """Address of rank `source`'s header of this call in the blob at `base`."""
    return base + k.layout.header + Int64((source * 2 + k.parity) * ws.HEADER_INTS) * 4


def signature(k) -> list:
    """The words that all ranks must agree on in a call, to understand each other; see status.signature_text."""
    p = k.problem
    kind = k.direction.direction_code + 2 * p.plan_given + 4 * p.pow2_scales + 8 * p.clamp
    kind += (p.hidden // BLOCK) * 16 + (p.intermediate // BLOCK) * 65536
    sizes = k.num_experts + k.top_k * 1024 + k.num_ranks * 16384 + k.num_ctas * 524288
    limit = cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[Float32(k.limit)])
    return [Int32(kind), sizes, k.max_blocks, k.max_tokens, limit]


@cute.jit
def describe_rank(k, header: Int64):
    """Status, tokens and signature into a header. By one thread, which releases the header afterwards."""
    status, detail = Int32(0), [Int32(0) for _ in range(ws.DETAIL_WORDS)]
    if const_expr(not k.problem.plan_given):
        # writer: prologue.count of any CTA of this rank, before its COUNTED; one of the slots with an id out of range
        bad = flags.load_relaxed(flags.flag(k.base, ws.BAD_ID + k.parity), "gpu")
        if bad != 0:
            status = Int32(flags.BAD_IDS)
            at = (bad - 1) * k.id_words
            detail = [bad - 1, Int32(k.ids[at]), Int32(k.ids[at + k.id_words - 1])]
    flags.store_relaxed(header + 4 * ws.H_STATUS, status, "sys")
    flags.store_relaxed(header + 4 * ws.H_TOKENS, k.num_tokens, "sys")
    for i, word in enumerate(signature(k)):
        flags.store_relaxed(header + 4 * (ws.H_SIGNATURE + i), word, "sys")
    for i, word in enumerate(detail):
        flags.store_relaxed(header + 4 * (ws.H_DETAIL + i), word, "sys")


@cute.jit
def compare_headers(k):
    """Looks at the status and signature of all ranks, whose headers have been acquired. By at least
    HEADER_THREADS * R threads; a barrier, then `judge_headers` follow."""
    fate = k.fate
    r, i = k.tid // HEADER_THREADS, k.tid % HEADER_THREADS
    if (r < k.num_ranks) & (i <= ws.SIGNATURE_WORDS):
        header = header_at(k, k.base, r)
        if i == ws.SIGNATURE_WORDS:
            if flags.load_cg(header + 4 * ws.H_STATUS) != 0:
                cute.arch.atomic_max(fate.iterator + 2, MAX_RANKS - r, sem="relaxed", scope="cta")
        else:
            word = Int64((ws.H_SIGNATURE + i) * 4)
            if flags.load_cg(header + word) != flags.load_cg(header_at(k, k.base, 0) + word):
                cute.arch.atomic_max(fate.iterator + 3, MAX_RANKS - r, sem="relaxed", scope="cta")


@cute.jit
def judge_headers(k, ok: Int32):
    """ok, or 0 if what the headers say ends the call. All ranks look at the same headers and decide alike."""
    fate = k.fate
    status, differs = Int32(fate[2]), Int32(fate[3])
    if (status > 0) & (ok == 1):
        ok = Int32(0)
        if k.tid == 0:
            r = MAX_RANKS - status
            header = header_at(k, k.base, r)
            line = flags.flag(k.base, ws.ERRORS + k.rank)
            copy_words(header + 4 * ws.H_DETAIL, line + 4 * ws.R_MORE, ws.DETAIL_WORDS)
            end_call(k, flags.load_cg(header + 4 * ws.H_STATUS), flags.IN_HEADER, r, Int32(0), Int32(0))
    if (differs > 0) & (ok == 1):
        ok = Int32(0)
        if k.tid == 0:
            other, peers = MAX_RANKS - differs, k.peers
            r = Int32(0)
            while r < k.num_ranks:
                line = flags.flag(peers[r], ws.ERRORS + k.rank) + 4 * ws.R_MORE
                word = 4 * ws.H_SIGNATURE
                copy_words(header_at(k, k.base, 0) + word, line, ws.SIGNATURE_WORDS)
                copy_words(header_at(k, k.base, other) + word, line + 4 * ws.SIGNATURE_WORDS, ws.SIGNATURE_WORDS)
                r += 1
            flags.record(k.watch, flags.SIGNATURE, flags.IN_HEADER, other, Int32(0), Int32(0))
    return ok


@cute.jit
def end_call(k, code, where, index: Int32, got: Int32, wanted: Int32):
    """This call ends without results on all ranks, each of which finds that out for itself. By a thread of a CTA."""
    fate = k.fate
    fate[0] = Int32(1)
    if k.cta == 0:
        flags.note(flags.flag(k.base, ws.ERRORS + k.rank), k.epoch, code, where, index, got, wanted)


@cute.jit
def copy_words(source: Int64, to: Int64, count):
    for i in range_constexpr(count):
        flags.store_relaxed(to + 4 * i, flags.load_cg(source + 4 * i), "sys")


# ---------------------------------------------------------------- the report


@cute.jit
def report(k):
    """The record of a call that failed, into memory of the host, unless one lies there that the host has not seen. By
    one thread of each CTA whose call failed; the first one of the rank does it."""
    line = flags.flag(k.base, ws.REPORT)
    before = cute.arch.atomic_exch(flags.int_at(line + 4 * ws.REPORTED), k.epoch, sem="relaxed", scope="gpu")
    if before != k.epoch:
        to = Int64(cute.arch.load(cute.make_ptr(Int64, line + 4 * ws.REPORT_TO, cute.AddressSpace.gmem), Int64))
        if (to != 0) & (flags.load_relaxed(to + 4 * ws.R_CODE, "sys") == 0):
            origin, call = find_record(k)
            source = flags.flag(k.base, ws.ERRORS + origin)
            code = Int32(flags.ABORTED)
            if origin < k.num_ranks:
                code = flags.load_cg(source + 4 * ws.R_CODE)
                for i in range_constexpr(ws.R_WHERE, ws.LINE):
                    flags.store_relaxed(to + 4 * i, flags.load_cg(source + 4 * i), "sys")
            flags.store_relaxed(to + 4 * ws.R_EPOCH, call, "sys")
            flags.store_relaxed(to + 4 * ws.R_ORIGIN, origin, "sys")
            # reader: Workspace.raise_pending, without synchronising
            flags.store_release(to + 4 * ws.R_CODE, code, "sys")


@cute.jit
def find_record(k):
    """The lowest rank that left a record of the call that failed, this one or an earlier one, and that call's number.
    num_ranks: none did in time."""
    call = flags.load_acquire(flags.flag(k.base, ws.ABORT), "sys")
    if call == 0:
        call = Int32(k.epoch)
    origin = Int32(k.num_ranks)
    begin = flags.now()
    while (origin == k.num_ranks) & (flags.now() - begin < REPORT_WAIT):
        r = k.num_ranks - 1
        while r >= 0:
            if flags.load_acquire(flags.flag(k.base, ws.ERRORS + r) + 4 * ws.R_EPOCH, "sys") == call:
                origin = Int32(r)
            r -= 1
    return origin, call
