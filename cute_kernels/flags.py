"""Flags between CTAs and ranks: every operation on them, and the bounded wait.

A flag is an int32 at an address. Scope "gpu" is for flags whose writers and readers are CTAs of one rank, "sys" for
every flag through which data of another rank is announced. Ranks on one GPU cannot show a wrong scope, so the rule is
kept here: addresses that come from the peer table are only used with "sys".
"""

from cutlass import Int32, Int64, cute

from cute_kernels import workspace as ws

PAUSE_NS = 32  # between two looks at a flag
ABORTED, TIMEOUT, OVERFLOW, BAD_IDS, REFUSED, SIGNATURE, NO_PLAN = 1, 2, 4, 8, 16, 32, 64  # error codes
IN_COUNT, IN_HEADER, IN_ARRIVE, IN_DONE, IN_HOME, IN_PLAN = range(6)  # where


def int_at(address: Int64):
    """Pointer to an int32 in global memory."""
    return cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=4)


def flag(base: Int64, word):
    """Address of flag number `word` of the blob at `base`."""
    return base + Int64(word) * (ws.LINE * 4)


def add_release(address: Int64, value, scope: str) -> None:
    """Adds after everything that this thread, and those it has synchronised with, stored. No result."""
    cute.arch.red(int_at(address), Int32(value), op="add", dtype=Int32, sem="release", scope=scope)


def add_relaxed(address: Int64, value, scope: str) -> None:
    """Adds without ordering of its own: behind a `fence` of the same scope it releases like add_release."""
    cute.arch.red(int_at(address), Int32(value), op="add", dtype=Int32, sem="relaxed", scope=scope)


def fence(scope: str) -> None:
    """Orders this thread's accesses so far, and those of threads it has synchronised with, before its later ones."""
    if scope == "gpu":
        cute.arch.fence_acq_rel_gpu()
    else:
        cute.arch.fence_acq_rel_sys()


def add_fetch(address: Int64, value) -> Int32:
    """Adds and returns the value before, without ordering: for claims."""
    return cute.arch.atomic_add(int_at(address), Int32(value), sem="relaxed", scope="gpu")


def add_fetch_ordered(address: Int64, value, scope: str) -> Int32:
    """Adds and returns the value before; releases this thread's stores and acquires those of earlier adders."""
    return cute.arch.atomic_add(int_at(address), Int32(value), sem="acq_rel", scope=scope)


def store_release(address: Int64, value, scope: str) -> None:
    cute.arch.store(int_at(address), Int32(value), sem="release", scope=scope)


def store_relaxed(address: Int64, value, scope: str) -> None:
    cute.arch.store(int_at(address), Int32(value), sem="relaxed", scope=scope)


def load_acquire(address: Int64, scope: str) -> Int32:
    return cute.arch.load(int_at(address), Int32, sem="acquire", scope=scope)


def load_relaxed(address: Int64, scope: str) -> Int32:
    return cute.arch.load(int_at(address), Int32, sem="relaxed", scope=scope)


def load_cg(address: Int64) -> Int32:
    """Data written by other CTAs of this launch and acquired by a flag: from L2, past L1."""
    return cute.arch.load(int_at(address), Int32, cop="cg")


def nanosleep(ns) -> None:
    cute.arch.inline_ptx("nanosleep.u32 {$r0};", read_only_args=[Int32(ns)])


def now() -> Int32:
    """Time in units of 1024 ns, wrapping after 73 minutes."""
    return Int32(cute.arch.globaltimer() >> 10)


class Watch:
    """What bounded waits and error records need: the blobs of all ranks, this rank and its blob, the number of the
    call, the longest wait in units of 1024 ns."""

    def __init__(self, peers, num_ranks, rank, base, epoch, timeout):
        self.peers, self.num_ranks, self.rank, self.base = peers, num_ranks, rank, base
        self.epoch, self.timeout = epoch, timeout


@cute.jit
def wait_for(watch, address: Int64, target: Int32, scope, where, index: Int32):
    """Waits until the flag equals `target` (acquire). 1: it does; 0: this call is over, by its own watchdog or by
    another's abort word. A flag never passes its target within a call, so equality is enough and survives wrap-around.

    Args:
        scope, where: compile-time; `where` names the wait in the error record. index: expert, block or rank.
    """
    got = load_acquire(address, scope)
    reached = Int32(1)
    if got != target:
        begin = now()
        while (got != target) & (reached == 1):
            nanosleep(PAUSE_NS)
            got = load_acquire(address, scope)
            if got != target:
                if is_aborted(watch) == 1:
                    reached = Int32(0)
                if now() - begin > watch.timeout:
                    reached = Int32(0)
                    record(watch, TIMEOUT, where, index, got, target)
    return reached


@cute.jit
def record(watch, code, where, index: Int32, got: Int32, wanted: Int32):
    """The first error of a call on this rank leaves its record on all ranks (writer: the thread that found it, reader:
    errors.report, behind R_EPOCH or the abort word, sys) and ends the call there: bounded waits read the abort word,
    and so does every later call, until the workspaces are reset."""
    mine = flag(watch.base, ws.ERRORS + watch.rank)
    before = cute.arch.atomic_exch(int_at(mine + 4 * ws.R_CLAIM), watch.epoch, sem="relaxed", scope="gpu")
    peers = watch.peers
    r = Int32(0)
    while r < watch.num_ranks:
        if before != watch.epoch:
            note(flag(peers[r], ws.ERRORS + watch.rank), watch.epoch, code, where, index, got, wanted)
        store_release(flag(peers[r], ws.ABORT), watch.epoch, "sys")
        r += 1


@cute.jit
def note(line: Int64, epoch: Int32, code, where, index: Int32, got: Int32, wanted: Int32):
    """Writes a record into a line."""
    store_relaxed(line + 4 * ws.R_CODE, code, "sys")
    store_relaxed(line + 4 * ws.R_WHERE, where, "sys")
    store_relaxed(line + 4 * ws.R_INDEX, index, "sys")
    store_relaxed(line + 4 * ws.R_GOT, got, "sys")
    store_relaxed(line + 4 * ws.R_WANTED, wanted, "sys")
    store_release(line + 4 * ws.R_EPOCH, epoch, "sys")


@cute.jit
def is_aborted(watch):
    """1 if this call, or one before it, was given up on some rank. Abort words are written by `record` of any rank
    (sys) and read here; no data stands behind them. A rank may be in call n - 1 while another gives up call n."""
    aborted = load_relaxed(flag(watch.base, ws.ABORT), "sys")
    return Int32((aborted != 0) & (aborted <= watch.epoch))
