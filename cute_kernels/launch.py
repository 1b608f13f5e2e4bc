"""The host side of the fused forward: workspaces, local buffers, and the launch. Here torch meets the kernel.

    weights = prepare_weights(w13_q, w13_scale, w2_q, w2_scale)          # once a weight version, per rank
    with Workspace(hidden=H, num_experts=E, top_k=K, max_tokens=T_max) as ws:
        result = fused_forward([ws], [x], [topk_ids], [topk_weights], [weights])[0]
        result.out                                                       # bf16 [T, H]

Several virtual ranks on one GPU are `LocalWorld(...).workspaces`, and lists of that length.
"""

import contextlib
import ctypes
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from cute_kernels import status
from cute_kernels import workspace as layout_module
from cute_kernels.compile import compiled
from cute_kernels.status import CallError
from cute_kernels.tile_config import MAX_EXPERTS, MAX_RANKS, Problem, TileConfig
from cute_kernels.weights import KernelWeights, prepare_weights

__all__ = [
    "Buffers",
    "CallError",
    "ForwardResult",
    "KernelWeights",
    "LocalWorld",
    "Workspace",
    "fused_forward",
    "prepare_weights",
    "why_not",
]

FP8 = torch.float8_e4m3fn
DEFAULT_TIMEOUT_S = 300.0


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


@dataclass
class ForwardResult:
    """out: bf16 [T, H]. buffers: the pool and row order of the call; with `save` they are the call's own, otherwise the
    workspace's, overwritten by its next call."""

    out: torch.Tensor
    buffers: Buffers


def problem_of(
    workspace: Workspace,
    intermediate: int,
    *,
    clamp: float | None = None,
    save: bool = False,
    plan_given: bool = False,
    pow2_scales: bool = False,
) -> Problem:
    """The compile-time side of a call."""
    return Problem(
        workspace.hidden, intermediate, clamp is not None, save, plan_given, pow2_scales, workspace.num_local > 128
    )


def kernel(problem: Problem, config: TileConfig | None = None):
    """The compiled kernel of one rank, cached in the process and on disk."""
    config = config or TileConfig()

    def build():
        from cute_kernels.forward import FusedForward, fake_arguments

        return FusedForward(problem, config), fake_arguments(problem)

    return compiled("forward", (problem, config), build)


def fused_forward(
    workspaces: Sequence[Workspace],
    xs: Sequence[torch.Tensor],
    topk_ids: Sequence[torch.Tensor],
    topk_weights: Sequence[torch.Tensor],
    weights: Sequence[KernelWeights],
    *,
    clamp: float | None = None,
    pow2_scales: bool = False,
    save: bool = False,
    plans: Sequence[Buffers] | None = None,
    config: TileConfig | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    streams: Sequence[torch.cuda.Stream] | None = None,
    outs: Sequence[torch.Tensor] | None = None,
    traces: Sequence[torch.Tensor] | None = None,
) -> list[ForwardResult]:
    """The fused forward of one rank, or of R virtual ranks in one process (lists of length R).

    Args:
        workspaces: one a rank.
        xs: bf16 [T_r, H]; copied if not contiguous.
        topk_ids: int32 or int64 [T_r, K], -1: no expert. With any other id outside [0, E) the call ends
            without results on all ranks (CallError, later).
        topk_weights: fp32 [T_r, K].
        weights: of each rank, from `prepare_weights`.
        clamp, pow2_scales: of the recipe.
        save: store gate and up (bf16) and keep pool, row order and weights in buffers of this call, for a backward.
        plans: buffers of an earlier call on the same routing whose codes, p and offs are used again.
        config: tuned choices; None: the default.
        timeout_s: longest wait for a flag before the call ends with an error record.
        streams: for virtual ranks, one each; they are forked from and joined with the current stream.
        outs: where to put the results.
        traces: with config.trace, zeroed int64 tensors of `trace.num_words(num_ctas)` words.

    Returns: one ForwardResult a rank.
    Raises: ValueError, before anything is launched; CallError, what an earlier call on a workspace recorded. Where
        other ranks are other processes', they hear of either: their calls end at once.
    Effects: one kernel a rank on the current stream (or `streams`), no host synchronisation; can be captured into a
        CUDA graph (allocate before); bit for bit repeatable.
    """
    first = workspaces[0]
    if config is not None and config.trace and traces is None:
        raise ValueError("traces: expected a buffer a rank where config.trace is set, got None")
    with joined(workspaces):
        intermediate = weights[0].w2.shape[2]
        problem = problem_of(
            first, intermediate, clamp=clamp, save=save, plan_given=plans is not None, pow2_scales=pow2_scales
        )
        launch = kernel(problem, config)
        calls, results = [], []
        for r, workspace in enumerate(workspaces):  # everything is allocated before the first launch
            check_call(workspace, xs[r], topk_ids[r], topk_weights[r], weights[r])
            buffers = workspace.buffers(intermediate, True) if save else workspace.scratch(intermediate)
            if plans is not None:
                given = plans[r]
                buffers = dataclasses.replace(
                    buffers, codes=given.codes, p=given.p, offs=given.offs, counts=given.counts
                )
            x = xs[r].contiguous()
            out = torch.empty_like(x) if outs is None else outs[r]
            tensors = kernel_tensors(workspace, buffers, weights[r], x, topk_ids[r], topk_weights[r], out)
            tensors.append(workspace.peers if traces is None else traces[r])
            calls.append((*tensors, *kernel_sizes(workspace, timeout_s), float(clamp or 0.0)))
            results.append(ForwardResult(out, buffers))
    launch_ranks(launch, calls, workspaces, streams)
    return results


@contextlib.contextmanager
def joined(workspaces: Sequence[Workspace]) -> Iterator[None]:
    """Around what the host does before a call's launches: raises first what earlier calls recorded. If anything is
    raised and other processes have the other ranks, these ranks' place in the call is taken by a refusal, so that all
    ranks end it."""
    try:
        raise_first(workspaces, Workspace.raise_pending)
        yield
    except Exception as error:
        is_dead = isinstance(error, CallError) and error.needs_reset
        if len(workspaces) < workspaces[0].num_ranks and not is_dead:
            for workspace in workspaces:
                if workspace.peers is not None:
                    refuse(workspace)
        raise


def refuse(workspace: Workspace, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
    """Takes part in the next call of all ranks without making it: all ranks end it at once with an error that says so.

    Effects: one small kernel on the current stream, which ends once all ranks have begun the call.
    """
    w = workspace
    calls = [(w.peers, w.blob.data_ptr(), w.rank, w.num_ctas, w.capacity_rows // 128, ticks(timeout_s), status.REFUSED)]
    launch_ranks(refusal_kernel(), calls, [w], None)


def refusal_kernel() -> Callable:
    """The compiled kernel of `refuse`."""

    def build():
        from cute_kernels.refusal import Refusal, fake_arguments

        return Refusal(), fake_arguments()

    return compiled("refusal", (), build)


def launch_ranks(
    launch: Callable,
    calls: Sequence[Sequence],
    workspaces: Sequence[Workspace],
    streams: Sequence[torch.cuda.Stream] | None,
) -> None:
    """Launches each rank's call: one on the current stream, several on streams forked from it and joined with it. Calls
    on one workspace run one after the other, whatever streams they come from; what is captured into a graph cannot wait
    for anything outside."""
    current = torch.cuda.current_stream()
    is_eager = not torch.cuda.is_current_stream_capturing()
    if is_eager:
        for workspace in workspaces:
            workspace.follow(current)
    if streams is None or len(calls) == 1:
        for call in calls:
            launch(*call)
    else:
        for stream in streams:
            stream.wait_stream(current)
        for call, stream in zip(calls, streams, strict=True):
            with torch.cuda.stream(stream):
                launch(*call)
        for stream in streams:
            current.wait_stream(stream)
    if is_eager:
        for workspace in workspaces:
            workspace.ran_on(current)


def check_call(
    workspace: Workspace, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, weights: KernelWeights
) -> None:
    """Refuses what the kernel cannot take, naming everything that is wrong. Looks at metadata only.

    Raises: ValueError.
    """
    tokens, top_k, w = x.shape[0], workspace.top_k, workspace
    inter = weights.w2.shape[2]
    wanted = (
        ("x", x, torch.bfloat16, (tokens, w.hidden)),
        ("topk_ids", topk_ids, torch.int64 if topk_ids.dtype == torch.int64 else torch.int32, (tokens, top_k)),
        ("topk_weights", topk_weights, torch.float32, (tokens, top_k)),
        ("weights.w13", weights.w13, FP8, (w.num_local, 2 * inter, w.hidden)),
        ("weights.w2", weights.w2, FP8, (w.num_local, -(-w.hidden // 256) * 256, inter)),
    )
    wrong = [
        f"{name}: expected {str(dtype).split('.')[1]} {list(shape)} on {w.device}, got "
        f"{str(t.dtype).split('.')[1]} {list(t.shape)} on {t.device}"
        for name, t, dtype, shape in wanted
        if t.dtype != dtype or tuple(t.shape) != shape or t.device != w.device
    ]
    if tokens > w.max_tokens:
        wrong.append(f"x: expected at most max_tokens = {w.max_tokens} tokens, got {tokens}. Make a larger workspace.")
    if w.peers is None:
        wrong.append("workspace: expected one that is open and connected to all ranks, got one that is not")
    if wrong:
        raise ValueError("; ".join(wrong))


def kernel_tensors(
    workspace: Workspace,
    buffers: Buffers,
    weights: KernelWeights,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    out: torch.Tensor,
) -> list[torch.Tensor]:
    """The tensors of FusedForward.__call__ in its order, less the trace."""
    w, b = weights, buffers
    ids = topk_ids.contiguous().view(-1).view(torch.int32)
    flat13, flat2 = w.w13.view(-1, w.w13.shape[2]), w.w2.view(-1, w.w2.shape[2])
    inputs = [x, ids, topk_weights.contiguous().view(-1), flat13, w.s13, flat2, w.s2, out, workspace.peers]
    return [*inputs, b.pool, b.pool_s, b.h, b.hs, b.codes, b.p, b.offs, b.counts, b.gate_up]


def kernel_sizes(workspace: Workspace, timeout_s: float) -> list[int]:
    """The integers of FusedForward.__call__ in its order."""
    w = workspace
    sizes = [w.rank, w.top_k, w.num_experts, w.max_tokens, w.num_ctas]
    return [w.blob.data_ptr(), *sizes, ticks(timeout_s)]


def ticks(seconds: float) -> int:
    """Seconds in the kernels' unit of 1024 ns."""
    return int(seconds * 1e9) // 1024


def why_not(
    problem: Problem, *, num_experts: int, num_ranks: int, top_k: int, config: TileConfig | None = None
) -> str | None:
    """Why the fused kernel cannot serve a layer; None if it can."""
    reasons = [(config or TileConfig()).why_not(problem)]
    if not 1 <= num_experts <= MAX_EXPERTS:
        reasons.append(f"num_experts: expected 1 to {MAX_EXPERTS}, got {num_experts}")
    if not 1 <= num_ranks <= MAX_RANKS:
        reasons.append(f"num_ranks: expected 1 to {MAX_RANKS}, got {num_ranks}")
    if not 1 <= top_k <= 12:
        reasons.append(f"top_k: expected 1 to 12, got {top_k}")
    return "; ".join(r for r in reasons if r) or None
