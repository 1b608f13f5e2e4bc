"""The wgrad task queue: experts sorted by their rows, cursors at zero, the real rows of every block of 128."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

THREADS = 512
MAX_EXPERTS = 1024


class WgradPlan:
    """One CTA that reads offs and counts and leaves what the wgrad kernels of one backward pass need.

    order[i]       the expert with the i-th most rows, ties by number: the longest tasks are claimed first, so that the
                   last ones to run are short
    cursors[:]     0
    block_rows[b]  real rows among the pool's rows 128 b .. 128 b + 127; 0 behind the last segment

    One thread an expert; O(E^2) comparisons in shared memory, about two microseconds at 512 experts.
    """

    @cute.jit
    def __call__(
        self,
        offs: cute.Tensor,
        counts: cute.Tensor,
        order: cute.Tensor,
        cursors: cute.Tensor,
        block_rows: cute.Tensor,
        stream,
    ):
        """offs [E + 1], counts [E], order [E], cursors [any], block_rows [P / 128], all int32."""

        @cute.struct
        class Shared:
            counts: cute.struct.MemRange[Int32, MAX_EXPERTS]

        self.shared = Shared
        self.kernel(offs, counts, order, cursors, block_rows).launch(
            grid=[1, 1, 1], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, offs, counts, order, cursors, block_rows):
        tid, _, _ = cute.arch.thread_idx()
        smem = cutlass.memory.SmemAllocator()
        all_counts = smem.allocate(self.shared).counts.get_tensor(cute.make_layout(MAX_EXPERTS))
        num_experts = counts.shape[0]
        i = tid
        while i < block_rows.shape[0]:
            block_rows[i] = Int32(0)
            i += THREADS
        i = tid
        while i < cursors.shape[0]:
            cursors[i] = Int32(0)
            i += THREADS
        e = tid
        while e < num_experts:
            all_counts[e] = counts[e]
            e += THREADS
        cute.arch.sync_threads()
        e = tid
        while e < num_experts:
            rows, place = all_counts[e], Int32(0)
            for other in cutlass.range(num_experts, unroll=4):
                place += Int32((all_counts[other] > rows) | ((all_counts[other] == rows) & (other < e)))
            order[place] = e
            block = offs[e] // 128
            while rows > 0:
                block_rows[block] = cutlass.min(rows, 128)
                block += 1
                rows -= 128
            e += THREADS
