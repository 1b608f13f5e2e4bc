"""What ranks keep from call to call: workspaces, the buffers of a call, virtual ranks in one process."""

import ctypes
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from cute_kernels import status
from cute_kernels import workspace as layout_module
from cute_kernels.status import CallError

FP8 = torch.float8_e4m3fn


@dataclass
class Buffers:
    """What one rank's call fills besides out: the pool and its row order. P rows; E_l experts.

    Attributes:
        pool, pool_s: rows that the rank received, e4m3 [P, H], and their scales, fp32 [H / 128, P].
        h, hs: GEMM 2's operand, e4m3 [P, I] and fp32 [I / 128, P].
        codes: int32 [P]: source rank << 27 | token * K + slot; -1 in padding. Rows behind offs[E_l] are undefined.
        p: fp32 [P], the routing weight of each row, 0 in padding.
        offs, counts: int32 [E_l + 1] first row of each expert (segments are multiples of 128), [E_l] real rows.
        gate_up: bf16 [P, 2I], saved for a backward; a dummy of one row unless `save`.
    """

    pool: torch.Tensor
    pool_s: torch.Tensor
    h: torch.Tensor
    hs: torch.Tensor
    codes: torch.Tensor
    p: torch.Tensor
    offs: torch.Tensor
    counts: torch.Tensor
    gate_up: torch.Tensor

    @staticmethod
    def allocate(
        hidden: int, intermediate: int, rows: int, num_local: int, save: bool, device: torch.device
    ) -> "Buffers":
        """Uninitialised. rows: a multiple of 128."""

        def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return Buffers(
            empty(rows, hidden, dtype=FP8),
            empty(hidden // 128, rows, dtype=torch.float32),
            empty(rows, intermediate, dtype=FP8),
            empty(intermediate // 128, rows, dtype=torch.float32),
            empty(rows, dtype=torch.int32),
            empty(rows, dtype=torch.float32),
            empty(num_local + 1, dtype=torch.int32),
            empty(num_local, dtype=torch.int32),
            empty(rows if save else 1, 2 * intermediate, dtype=torch.bfloat16),
        )

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in vars(self).values())


class Workspace:
    """What one rank keeps from call to call: a blob that all ranks see (flags, send buffer, combine buffer), and in
    inference the pool. All ranks make the same sequence of calls on it.

    A call that fails on the device fills its results with NaN and leaves a record, which the next call on the workspace
    raises as CallError, or `check`. Calls on several streams run one after the other, unless they are captured: graphs
    that share a workspace must not be replayed at the same time.

    Args:
        hidden: H.
        num_experts: E, of all ranks, at most 512.
        top_k: K, at most 12.
        max_tokens: most tokens of any rank in any call; equal on all ranks.
        num_ranks, rank: of the expert-parallel group, at most 16.
        capacity_rows: rows P of this rank's pool, rounded up to 128; None: what can never overflow (for one rank
            T * K + 127 * min(E, T * K)).
        num_ctas: CTAs of a launch, all of which must be resident; None: the GPU's SMs / num_ranks (virtual ranks share
            one GPU), less reserve_sms.
        reserve_sms: SMs left to other kernels.
        device: None: torch's current CUDA device.

    Effects: allocates `num_bytes` and zeroes the flags. Close it (or use `with`) to give the memory back.
    """

    def __init__(
        self,
        *,
        hidden: int,
        num_experts: int,
        top_k: int,
        max_tokens: int,
        num_ranks: int = 1,
        rank: int = 0,
        capacity_rows: int | None = None,
        num_ctas: int | None = None,
        reserve_sms: int = 0,
        device: torch.device | None = None,
    ):
        self.device = torch.device("cuda" if device is None else device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.hidden, self.num_experts, self.top_k, self.max_tokens = hidden, num_experts, top_k, max_tokens
        self.num_ranks, self.rank = num_ranks, rank
        self.num_local = num_experts // num_ranks
        if num_ctas is None:
            sms = torch.cuda.get_device_properties(self.device).multi_processor_count
            num_ctas = (sms - reserve_sms) // num_ranks
        self.num_ctas = num_ctas
        slots = max_tokens * top_k * num_ranks
        rows = layout_module.capacity_rows(slots, self.num_local) if capacity_rows is None else capacity_rows
        self.capacity_rows = max(-(-rows // 128), 1) * 128
        self.layout = layout_module.layout(
            hidden, max_tokens, top_k, num_experts, num_ranks, num_ctas, self.capacity_rows // 128
        )
        self.blob = self._allocate(int(self.layout.size))
        on_gpu = self.device.type == "cuda"
        self._record = torch.zeros(layout_module.LINE, dtype=torch.int32, pin_memory=on_gpu)  # written by errors.report
        self._words = (ctypes.c_int32 * layout_module.LINE).from_address(self._record.data_ptr())  # read in 0.1 us
        self._given_up: CallError | None = None
        self._clear()
        self._stream: int | None = None
        self._done = torch.cuda.Event() if on_gpu else None
        self.peers: torch.Tensor | None = None
        self._scratch: dict[int, Buffers] = {}
        if num_ranks == 1:
            self.connect([self.blob.data_ptr()])

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        """The blob's memory, uint8, on `device`."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def connect(self, addresses: Sequence[int]) -> None:
        """Tells this rank where the blobs of all ranks lie, in the order of ranks."""
        self.peers = torch.tensor(list(addresses), dtype=torch.int64, device=self.device)

    @property
    def num_bytes(self) -> int:
        """Of the blob and of the buffers kept for inference."""
        return int(self.layout.size) + sum(b.num_bytes for b in self._scratch.values())

    def scratch(self, intermediate: int) -> Buffers:
        """The buffers that calls without `save` share."""
        if intermediate not in self._scratch:
            self._scratch[intermediate] = self.buffers(intermediate, save=False)
        return self._scratch[intermediate]

    def buffers(self, intermediate: int, save: bool) -> Buffers:
        """New buffers for one call."""
        return Buffers.allocate(self.hidden, intermediate, self.capacity_rows, self.num_local, save, self.device)

    def view(self, region: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        """A region of the blob as a tensor, for tests and tools."""
        begin = int(getattr(self.layout, region))
        count = 1
        for n in shape:
            count *= n
        return self.blob[begin : begin + count * dtype.itemsize].view(dtype).view(shape)

    def flags(self) -> torch.Tensor:
        """int32 [flags, 32]: the words at the blob's front. Synchronises when read."""
        lines = layout_module.NUM_FLAGS
        return self.blob[: lines * layout_module.LINE * 4].view(torch.int32).view(lines, layout_module.LINE)

    def error(self) -> str | None:
        """What is wrong with the calls so far, None if nothing. Waits for them."""
        self._synchronize()
        return str(found) if (found := self._pending() or self._given_up) else None

    def check(self) -> None:
        """Raises what went wrong in the calls so far. Waits for them.

        Raises: CallError, for one rank's workspace the same as for any other's.
        """
        self._synchronize()
        self.raise_pending()

    def raise_pending(self) -> None:
        """Raises what calls that have ended recorded, and again what asks for `reset`. Does not synchronise.

        Raises: CallError.
        """
        found = self._pending()
        if found is not None:
            self._words[layout_module.R_CODE] = 0
            if found.needs_reset:
                self._given_up = found
            raise found
        if self._given_up is not None:
            text = (
                f"workspace: expected reset() on all ranks after a call that was given up, got a call. {self._given_up}"
            )
            raise CallError(text, self._given_up.code)

    def _pending(self) -> CallError | None:
        if self._words[layout_module.R_CODE] == 0:
            return None
        return status.error_of(list(self._words), self.rank, self.top_k, self.num_ranks)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _clear(self) -> None:
        """Zeroes flags, headers and counters, and tells the kernels where to report."""
        self.blob[: self.layout.order].zero_()
        begin = (layout_module.REPORT * layout_module.LINE + layout_module.REPORT_TO) * 4
        self.blob[begin : begin + 8].view(torch.int64).fill_(self._record.data_ptr())

    def reset(self) -> None:
        """After an error: zeroes flags, headers and counters. Of all ranks, while no launch runs."""
        self._synchronize()
        self._clear()
        self._record.zero_()
        self._given_up = None

    def follow(self, stream: torch.cuda.Stream) -> None:
        """Lets `stream` wait for the last call, if that ran on another one."""
        if self._stream not in (None, stream.cuda_stream) and self._done is not None:
            stream.wait_event(self._done)

    def ran_on(self, stream: torch.cuda.Stream) -> None:
        """A call on `stream` has been launched."""
        self._stream = stream.cuda_stream
        if self._done is not None:
            self._done.record(stream)

    def close(self) -> None:
        """Gives the memory back. Nothing may run on it any more, on any rank."""
        self.blob, self.peers = torch.empty(0, dtype=torch.uint8), None
        self._scratch.clear()

    def __enter__(self) -> "Workspace":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"Workspace(rank {self.rank} of {self.num_ranks}, H {self.hidden}, E {self.num_experts}, K {self.top_k}, "
            f"max_tokens {self.max_tokens}, capacity {self.capacity_rows} rows, {self.num_bytes / 2**20:.0f} MiB)"
        )


def raise_first(workspaces: Sequence[Workspace], look: Callable[[Workspace], None]) -> None:
    """`look` at all workspaces; what it raised for the first one that had something to raise."""
    found: CallError | None = None
    for workspace in workspaces:
        try:
            look(workspace)
        except CallError as error:
            found = found or error
    if found is not None:
        raise found


class LocalWorld:
    """R virtual ranks in one process on one GPU: their workspaces and streams. Arguments as of Workspace."""

    def __init__(self, num_ranks: int, **arguments):
        connections = int(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "8"))
        if connections < num_ranks:
            raise ValueError(
                f"CUDA_DEVICE_MAX_CONNECTIONS: expected at least {num_ranks} for {num_ranks} virtual ranks, got "
                f"{connections}. Their kernels would wait for each other in one queue."
            )
        self.workspaces = [Workspace(num_ranks=num_ranks, rank=r, **arguments) for r in range(num_ranks)]
        for workspace in self.workspaces:
            workspace.connect([w.blob.data_ptr() for w in self.workspaces])
        self.streams = [torch.cuda.Stream() for _ in range(num_ranks)] if num_ranks > 1 else None

    def reset(self) -> None:
        """After an error: of all ranks, once no launch runs."""
        for workspace in self.workspaces:
            workspace.reset()
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def check(self) -> None:
        """Raises what went wrong in the calls so far, on any rank. Waits for them.

        Raises: CallError.
        """
        raise_first(self.workspaces, Workspace.check)

    def close(self) -> None:
        for workspace in self.workspaces:
            workspace.close()

    def __enter__(self) -> "LocalWorld":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
