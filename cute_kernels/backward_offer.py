"""Weight gradients whose first tasks dgrad takes while dx is in flight: what it is offered, and the rest behind it.

    offers = [offer(saved.offs, saved.counts, saved.pool, saved.pool_s, dw13, steal_us=50.0)]       # a rank
    grads = fused_backward([ws], [dout], [ids], [saved], [weights], steals=offers)[0]
    drain(offers[0], grads.operands(saved.pool, saved.pool_s), dw2)

The bits are those of `weight_gradients`, whoever does a task.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cute_kernels.backward_problem import TURNED, TURNS, W13
from cute_kernels.wgrad_launch import (
    WgradOperands,
    WgradQueue,
    plan_wgrad,
    row_factors,
    transpose_quantized,
    weight_gradients,
    wgrad_gemm,
)

BLOCK_US, TASK_US = 0.8, 4.0  # a tile's k-block and the rest of a task, on an H200


@dataclass(frozen=True)
class Offer:
    """Tasks of one rank's dW13.

    Attributes:
        queue: experts with few rows first; its cursors are shared by all who take tasks.
        factors: fp32 [P], of the rows of [dg; du].
        grad_t: their transposed copy (q, scales), to be made. x_t: that of x.
        dw13: [E_l, 2I, H], overwritten.
        most_rows: experts with more rows are not offered.
    """

    queue: WgradQueue
    factors: torch.Tensor
    grad_t: tuple[torch.Tensor, torch.Tensor]
    x_t: tuple[torch.Tensor, torch.Tensor]
    dw13: torch.Tensor
    most_rows: int

    def kernel_tensors(self) -> list[torch.Tensor]:
        """In the order of StealingBackward.__call__."""
        q = self.queue
        flat = self.dw13.view(-1, self.dw13.shape[2])
        return [self.factors, q.block_rows, q.order, q.cursors, *self.grad_t, *self.x_t, flat]


def most_rows(steal_us: float) -> int:
    """Rows of the largest expert whose tasks are estimated to take at most steal_us; 0: none."""
    return max(int((steal_us - TASK_US) / BLOCK_US), 0) * 128


def offer(
    offs: torch.Tensor,
    counts: torch.Tensor,
    x: torch.Tensor,
    x_scale: torch.Tensor,
    dw13_E2IH: torch.Tensor,
    steal_us: float = 50.0,
) -> Offer:
    """What the dgrad that is launched next may take. dW13 must not be written by an older backward any more.

    Args:
        offs, counts: int32 [E_l + 1], [E_l] of the forward.
        x, x_scale: the forward's pool, e4m3 [P, H] and fp32 [H / 128, P].
        dw13_E2IH: bf16 or fp32, overwritten by dgrad and `drain` together.
        steal_us: longest task that is taken, as estimated.

    Effects: three kernels on the current stream (plan, factors, transposed copy of x), which `weight_gradients` has
        too; no host sync; graph-safe. The copies of both operands, P (2I + H) bytes, live until the drain.
    """
    rows, width = x.shape[0], dw13_E2IH.shape[1]
    queue = plan_wgrad(offs, counts, rows, TURNED + 1, ascending=True)
    up, down = row_factors(x_scale)
    grad_t = x.new_empty((rows // 128, width, 128)), x_scale.new_empty((rows // 128, width))
    x_t = transpose_quantized(x, queue, x_scale, True, down)
    return Offer(queue, up, grad_t, x_t, dw13_E2IH, most_rows(steal_us))


def drain(offered: Offer, operands: WgradOperands, dw2_EHI: torch.Tensor | None, **modes: int | None) -> None:
    """What dgrad has left of dW13, and dW2. Behind dgrad, on its stream or on one that waits for it.

    Args:
        offered: of `offer`. operands: of dgrad's result.
        dw2_EHI: bf16 or fp32, overwritten; None: not wanted.
        modes: num_ctas, tasks_per_cta of `weight_gradients`.
    """
    queue = offered.queue
    done = queue.cursors[TURNS : TURNS + 1]
    transpose_quantized(operands.d_gate_up, queue, None, False, offered.factors, out=offered.grad_t, done=done)
    wgrad_gemm(offered.grad_t, offered.x_t, queue, offered.dw13, cursor=W13, **modes)
    if dw2_EHI is not None:
        weight_gradients(operands, queue.offs, queue.counts, None, dw2_EHI, **modes)
