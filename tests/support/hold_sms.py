"""A kernel that holds SMs: blocks of 1024 threads that wait, beside which no CTA of a fused kernel fits."""

from __future__ import annotations

import torch
from cutlass import Int32, Int64, cute

from cute_kernels import flags
from cute_kernels.compile import compiled


class Hold:
    @cute.jit
    def __call__(self, ended: cute.Tensor, ns: Int64, stream):
        self.kernel(ended, ns).launch(grid=[ended.shape[0], 1, 1], block=[1024, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, ended: cute.Tensor, ns: Int64):
        block, _, _ = cute.arch.block_idx()
        end = Int64(cute.arch.globaltimer()) + ns
        while Int64(cute.arch.globaltimer()) < end:
            flags.nanosleep(1000)
        ended[block] = Int32(1)


def hold_sms(blocks: int, seconds: float) -> None:
    """Holds `blocks` SMs (two blocks share one only where no other is free) for so long, on the current stream."""

    def build():
        from cutlass.cute.runtime import make_fake_compact_tensor
        from cutlass.runtime import make_fake_stream

        ended = make_fake_compact_tensor(Int32, (cute.sym_int(),), stride_order=(0,), assumed_align=4)
        return Hold(), (ended, Int64(1), make_fake_stream(use_tvm_ffi_env_stream=True))

    ended = torch.empty(blocks, dtype=torch.int32, device="cuda")
    compiled("hold", (), build)(ended, int(seconds * 1e9))
