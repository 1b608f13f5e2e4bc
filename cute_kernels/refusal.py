"""The call of a rank that cannot make it: a header with a status, so that all ranks end at once with the same error."""

from cutlass import Int32, Int64, cute

from cute_kernels import flags
from cute_kernels import workspace as ws

THREADS = 128


class Refusal:
    """One CTA that takes part in call n without tokens, rows or weights (writer -> reader as in FusedForward):

    clears the counters of call n + 1; its header, with the status, LISTED and EPOCH, to all ranks; waits for the
    headers of all ranks; its part of HOME to all ranks, as if by its workspace's num_ctas CTAs; waits for its own
    HOME.
    """

    @cute.jit
    def __call__(
        self,
        peers: cute.Tensor,
        base: Int64,
        rank: Int32,
        num_ctas: Int32,
        max_blocks: Int32,
        timeout: Int32,
        status: Int32,
        stream,
    ):
        """peers [R] i64: addresses of the blobs; base: this rank's. timeout: in units of 1024 ns."""
        # header, arrive and done lie where R and max_blocks say; the sizes of regions behind them do not matter
        places = ws.layout(128, Int64(1), Int64(1), Int64(1), Int64(peers.shape[0]), Int64(1), Int64(max_blocks))
        sizes = (base, rank, num_ctas, max_blocks, timeout, status)
        self.kernel(peers, sizes, tuple(places)).launch(grid=[1, 1, 1], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, peers: cute.Tensor, sizes, places):
        base, rank, num_ctas, max_blocks, timeout, status = sizes
        layout = ws.Layout(*places)
        num_ranks = Int32(peers.shape[0])
        tid, _, _ = cute.arch.thread_idx()
        # writer: the launch before this one; stream order is enough
        epoch = flags.load_relaxed(flags.flag(base, ws.EPOCH), "gpu") + 1
        watch = flags.Watch(peers, num_ranks, rank, base, epoch, timeout)
        parity = epoch % 2
        i = tid
        while i < max_blocks:
            for region in (layout.arrive, layout.done):
                flags.store_relaxed(base + region + Int64((1 - parity) * max_blocks + i) * 4, 0, "gpu")
            i += THREADS
        if tid == 0:
            for word in (ws.CLAIM, ws.COUNTED, ws.LISTED, ws.PLACED, ws.HOME, ws.BAD_ID):
                flags.store_relaxed(flags.flag(base, word + 1 - parity), 0, "gpu")
            flags.store_relaxed(flags.flag(base, ws.EPOCH), epoch, "gpu")
        cute.arch.sync_threads()  # counters of the next call are zero before anybody sees this header
        if (tid == 0) & (flags.load_relaxed(flags.flag(base, ws.ABORT), "sys") == 0):
            self.take_part(watch, layout.header, parity, num_ctas, status)

    @cute.jit
    def take_part(self, watch, header: Int64, parity: Int32, num_ctas: Int32, status: Int32):
        peers = watch.peers
        r = Int32(0)
        while r < watch.num_ranks:
            mine = peers[r] + header + Int64((watch.rank * 2 + parity) * ws.HEADER_INTS) * 4
            flags.store_relaxed(mine + 4 * ws.H_STATUS, status, "sys")
            flags.store_relaxed(mine + 4 * ws.H_TOKENS, 0, "sys")
            # readers: prologue.await_headers of every CTA of rank r
            flags.store_release(mine + 4 * ws.H_LISTED, watch.epoch, "sys")
            flags.store_release(mine + 4 * ws.H_EPOCH, watch.epoch, "sys")
            r += 1
        ok = Int32(1)
        r = Int32(0)
        while r < watch.num_ranks:
            theirs = watch.base + header + Int64((r * 2 + parity) * ws.HEADER_INTS) * 4
            if ok == 1:
                ok = flags.wait_for(watch, theirs + 4 * ws.H_EPOCH, watch.epoch, "sys", flags.IN_HEADER, r)
            r += 1
        if ok == 1:
            r = Int32(0)
            while r < watch.num_ranks:
                flags.add_release(flags.flag(peers[r], ws.HOME + parity), num_ctas, "sys")
                r += 1
            home = flags.flag(watch.base, ws.HOME + parity)
            flags.wait_for(watch, home, watch.num_ranks * num_ctas, "sys", flags.IN_HOME, Int32(0))


def fake_arguments(for_launch: bool = True) -> tuple:
    """Arguments for `cute.compile`."""
    from cutlass.cute.runtime import make_fake_compact_tensor
    from cutlass.runtime import make_fake_stream

    peers = make_fake_compact_tensor(Int64, (cute.sym_int(),), stride_order=(0,), assumed_align=8)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True) if for_launch else make_fake_stream()
    return (peers, Int64(0), *(Int32(1) for _ in range(5)), stream)
