"""The host side of the fused backward: weights for dgrad, buffers, the launch; wgrad from what it leaves.

weights = prepare_backward_weights(w13_t, w13_t_scale, w2_t, w2_t_scale)     # once a weight version, per rank
saved = fused_forward([ws], [x], [ids], [p], [forward_weights], save=True)[0].buffers
grads = fused_backward([ws], [dout], [ids], [saved], [weights])[0]           # grads.dx, grads.dp
weight_gradients(grads.operands(saved.pool, saved.pool_s), saved.offs, saved.counts, dw13, dw2)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from cute_kernels.backward_problem import BackwardProblem
from cute_kernels.compile import compiled, source_hash
from cute_kernels.launch import DEFAULT_TIMEOUT_S, FP8, Workspace, joined, kernel_sizes, launch_ranks
from cute_kernels.tile_config import BLOCK, TileConfig
from cute_kernels.weights import ROWS, permute_rows, tile_scales
from cute_kernels.wgrad_launch import WgradOperands, weight_gradients

__all__ = [
    "BackwardResult",
    "BackwardWeights",
    "SavedRows",
    "fused_backward",
    "prepare_backward_weights",
    "weight_gradients",
]


@dataclass(frozen=True)
class BackwardWeights:
    """One rank's transposed weights as dgrad reads them, both in `row_order("rows", ...)`, zeros behind the last row.

    Attributes:
        w2_t: e4m3 [E_l, I rounded up to 256, H].
        s2_t: fp32 [E_l, H / 128, ceil(I / 256), 4]: for each k-block and tile the scales of its two blocks of 128.
        w13_t: e4m3 [E_l, H rounded up to 256, 2I].
        s13_t: fp32 [E_l, 2I / 128, ceil(H / 256), 4].
    """

    w2_t: torch.Tensor
    s2_t: torch.Tensor
    w13_t: torch.Tensor
    s13_t: torch.Tensor


def prepare_backward_weights(
    w13_t: torch.Tensor, s13_t: torch.Tensor, w2_t: torch.Tensor, s2_t: torch.Tensor
) -> BackwardWeights:
    """Brings transposed FP8 weights into the kernel's order. The results are new tensors.

    Args:
        w13_t, w2_t: e4m3 [E_l, H, 2I] and [E_l, I, H].
        s13_t, s2_t: fp32 scales [E_l, H / 128, 2I / 128] and [E_l, I / 128, H / 128].
    """

    def scales(s: torch.Tensor) -> torch.Tensor:
        s = torch.nn.functional.pad(s, (0, 0, 0, s.shape[1] % 2))
        return tile_scales(s[:, 0::2], s[:, 1::2])

    return BackwardWeights(permute_rows(w2_t, ROWS), scales(s2_t), permute_rows(w13_t, ROWS), scales(s13_t))


class SavedRows(Protocol):
    """What a rank keeps from its forward for dgrad: `launch.Buffers` of a call with save=True is one.

    codes int32 [P], p fp32 [P], offs int32 [E_l + 1], counts int32 [E_l], gate_up bf16 [P, 2I].
    """

    codes: torch.Tensor
    p: torch.Tensor
    offs: torch.Tensor
    counts: torch.Tensor
    gate_up: torch.Tensor


class Stealable(Protocol):
    """What a rank's dgrad may take of its weight gradients: `backward_offer.Offer`."""

    dw13: torch.Tensor
    most_rows: int

    def kernel_tensors(self) -> list[torch.Tensor]: ...


@dataclass
class BackwardResult:
    """What one rank's dgrad leaves. P rows in the forward's order.

    Attributes:
        dx: bf16 [T, H]. dp: fp32 [T, K], exactly 0 where a slot has no expert.
        pool, pool_s: the rows of dout as they travelled, e4m3 [P, H] and fp32 [H / 128, P].
        grad_bf16: bf16 [P, 2I], the unquantised gradients of gate and up.
        weighted: bf16 [P, I], p * silu(gate) * up.
        grad, grad_s: e4m3 [P, 2I] and fp32 [2I / 128, P], GEMM B's operand.
        dp_parts: fp32 [I / 128, P], dp of each row over 128 columns.
    """

    dx: torch.Tensor
    dp: torch.Tensor
    pool: torch.Tensor
    pool_s: torch.Tensor
    grad_bf16: torch.Tensor
    weighted: torch.Tensor
    grad: torch.Tensor
    grad_s: torch.Tensor
    dp_parts: torch.Tensor

    def operands(self, x: torch.Tensor, x_scale: torch.Tensor | None) -> WgradOperands:
        """For `weight_gradients`, with the forward's pool."""
        return WgradOperands(self.grad_bf16, self.weighted, x, x_scale, self.pool, self.pool_s)


def kernel(problem: BackwardProblem, config: TileConfig | None = None):
    """The compiled kernel of one rank, cached in the process and on disk."""
    config = config or TileConfig()
    if problem.stolen is not None:
        return _stealing_kernel(problem, config)

    def build():
        from cute_kernels.backward import FusedBackward, fake_arguments

        return FusedBackward(problem, config), fake_arguments(problem)

    return compiled("backward", (problem, config), build)


def _stealing_kernel(problem: BackwardProblem, config: TileConfig):
    def build():
        from cute_kernels.backward_steal import StealingBackward, fake_arguments

        return StealingBackward(problem, config), fake_arguments(problem)

    # its code has parts of wgrad's
    return compiled("backward_steal", (problem, config, source_hash("wgrad")), build)


def fused_backward(
    workspaces: Sequence[Workspace],
    douts: Sequence[torch.Tensor],
    topk_ids: Sequence[torch.Tensor],
    saved: Sequence[SavedRows],
    weights: Sequence[BackwardWeights],
    *,
    clamp: float | None = None,
    pow2_scales: bool = False,
    config: TileConfig | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    streams: Sequence[torch.cuda.Stream] | None = None,
    results: Sequence[BackwardResult] | None = None,
    traces: Sequence[torch.Tensor] | None = None,
    steals: Sequence[Stealable] | None = None,
    delay_us: int = 0,
) -> list[BackwardResult]:
    """dgrad of one rank, or of R virtual ranks in one process (lists of length R).

    Args:
        workspaces: one a rank, those of the forward or others of the same sizes; P, the rows of `saved`, must be their
            capacity.
        douts: bf16 [T_r, H]; copied if not contiguous.
        topk_ids: int32 or int64 [T_r, K], the forward's. Only which slots have an expert matters.
        saved: of the forward.
        weights: from `prepare_backward_weights`.
        clamp, pow2_scales, config, timeout_s, streams, traces: as in `launch.fused_forward`.
        results: where to put the results; None: new tensors.
        steals: of each rank, from `backward_offer.offer`: tasks of dW13 that the math warps take while dx is in flight,
            where there are several ranks. Then `backward_offer.drain` does what is left.
        delay_us: for tests: rows of dX are announced so much later.

    Returns: one BackwardResult a rank.
    Raises: ValueError, where the rows saved do not fit the workspace; CallError, as launch.fused_forward.
    Effects: one kernel a rank on the current stream (or `streams`), no host synchronisation; can be captured into a
        CUDA graph; bit for bit repeatable.
    """
    first = workspaces[0]
    with joined(workspaces):
        for r, workspace in enumerate(workspaces):
            if saved[r].gate_up.shape[0] != workspace.capacity_rows:
                raise ValueError(
                    f"saved[{r}].gate_up: expected the workspace's {workspace.capacity_rows} rows, got "
                    f"{saved[r].gate_up.shape[0]}. Use a workspace of the forward's capacity."
                )
        intermediate = weights[0].w13_t.shape[2] // 2
        problem = BackwardProblem(
            first.hidden,
            intermediate,
            clamp is not None,
            pow2_scales=pow2_scales,
            many_experts=first.num_local > 128,
            stolen=None if steals is None else str(steals[0].dw13.dtype).split(".")[1],
            delay_us=delay_us,
        )
        launch = kernel(problem, config)
        calls, made = [], []
        for r, workspace in enumerate(workspaces):  # everything is allocated before the first launch
            dout = douts[r].contiguous()
            result = results[r] if results is not None else _allocate(dout, saved[r], workspace.top_k)
            made.append(result)
            trace = workspace.peers if traces is None else traces[r]
            tensors = kernel_tensors(workspace, dout, topk_ids[r], saved[r], weights[r], result)
            sizes = kernel_sizes(workspace, timeout_s)
            if steals is not None:
                tensors += steals[r].kernel_tensors()
                sizes.append(steals[r].most_rows)
            calls.append((*tensors, trace, *sizes, float(clamp or 0.0)))
    launch_ranks(launch, calls, workspaces, streams)
    return made


def _allocate(dout: torch.Tensor, saved: SavedRows, top_k: int) -> BackwardResult:
    """Uninitialised."""
    rows, width = saved.gate_up.shape
    tokens, hidden = dout.shape

    def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=dout.device)

    return BackwardResult(
        torch.empty_like(dout),
        empty(tokens, top_k, dtype=torch.float32),
        empty(rows, hidden, dtype=FP8),
        empty(hidden // BLOCK, rows, dtype=torch.float32),
        empty(rows, width, dtype=torch.bfloat16),
        empty(rows, width // 2, dtype=torch.bfloat16),
        empty(rows, width, dtype=FP8),
        empty(width // BLOCK, rows, dtype=torch.float32),
        empty(width // 2 // BLOCK, rows, dtype=torch.float32),
    )


def kernel_tensors(
    workspace: Workspace,
    dout: torch.Tensor,
    topk_ids: torch.Tensor,
    saved: SavedRows,
    weights: BackwardWeights,
    result: BackwardResult,
) -> list[torch.Tensor]:
    """The tensors of FusedBackward.__call__ in its order, less the trace."""
    ids = topk_ids.contiguous().view(-1).view(torch.int32)
    w, s, r = weights, saved, result
    flat2, flat13 = w.w2_t.view(-1, w.w2_t.shape[2]), w.w13_t.view(-1, w.w13_t.shape[2])
    inputs = [dout, ids, flat2, w.s2_t, flat13, w.s13_t, r.dx, r.dp.view(-1), workspace.peers]
    rows = [r.pool, r.pool_s, r.grad, r.grad_s, s.codes, s.p, s.offs, s.counts, s.gate_up]
    return [*inputs, *rows, r.grad_bf16, r.weighted, r.dp_parts]
