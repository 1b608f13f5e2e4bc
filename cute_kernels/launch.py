"""The host side of the fused forward: what is checked, and the launch. Here torch meets the kernel.

    weights = prepare_weights(w13_q, w13_scale, w2_q, w2_scale)          # once a weight version, per rank
    with Workspace(hidden=H, num_experts=E, top_k=K, max_tokens=T_max) as ws:
        result = fused_forward([ws], [x], [topk_ids], [topk_weights], [weights])[0]
        result.out                                                       # bf16 [T, H]

Several virtual ranks on one GPU are `LocalWorld(...).workspaces`, and lists of that length.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from cute_kernels import status
from cute_kernels.compile import compiled
from cute_kernels.status import CallError
from cute_kernels.tile_config import MAX_EXPERTS, MAX_RANKS, Problem, TileConfig
from cute_kernels.weights import KernelWeights, prepare_weights
from cute_kernels.world import FP8, Buffers, LocalWorld, Workspace, raise_first

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

DEFAULT_TIMEOUT_S = 300.0


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
