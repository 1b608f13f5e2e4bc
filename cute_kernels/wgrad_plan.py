"""The wgrad task queue: experts sorted by their rows, cursors at zero, the real rows of every block of 128."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

THREADS = 512
MAX_EXPERTS = 1024
NEVER = -0x7FFFFFFF  # key of an expert that comes last


class WgradPlan:
    """One CTA that reads offs and counts and leaves what the wgrad kernels of one backward pass need.

    order[i]       the expert with the i-th most rows, ties by number: the longest tasks are claimed first, so that the
                   last ones to run are short. Ascending: the i-th fewest, experts without rows last
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
        ascending: Int32,
        stream,
    ):
        """offs [E + 1], counts [E], order [E], cursors [any], block_rows [P / 128], all int32."""

        @cute.struct
        class Shared:
            keys: cute.struct.MemRange[Int32, MAX_EXPERTS]

        self.shared = Shared
        self.kernel(offs, counts, order, cursors, block_rows, ascending).launch(
            grid=[1, 1, 1], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, offs, counts, order, cursors, block_rows, ascending):
        tid, _, _ = cute.arch.thread_idx()
        smem = cutlass.memory.SmemAllocator()
        keys = smem.allocate(self.shared).keys.get_tensor(cute.make_layout(MAX_EXPERTS))
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
            key = counts[e]
            if ascending != 0:
                key = -key
                if key == 0:
                    key = Int32(NEVER)
            keys[e] = key
            e += THREADS
        cute.arch.sync_threads()
        e = tid
        while e < num_experts:
            key, place = keys[e], Int32(0)
            for other in cutlass.range(num_experts, unroll=4):
                place += Int32((keys[other] > key) | ((keys[other] == key) & (other < e)))
            order[place] = e
            block, rows = offs[e] // 128, counts[e]
            while rows > 0:
                block_rows[block] = cutlass.min(rows, 128)
                block += 1
                rows -= 128
            e += THREADS
