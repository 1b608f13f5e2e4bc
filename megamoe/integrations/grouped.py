"""Experts on rows sorted by expert already, as training frameworks hand them over; delayed weight gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from megamoe.context import MoEContext
from megamoe.errors import MegaMoETypeError, MegaMoEValueError, expected
from megamoe.functional import find_error
from megamoe.operators import backward_op, forward_op, unpack
from megamoe.unfused import Needs, backward, compute_weight_grads
from megamoe.weights import Masters

WeightGrads = tuple[torch.Tensor, torch.Tensor]


def expert_of_rows(counts: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Expert of each row, int64 [num_rows, 1], of rows sorted by expert; -1 for rows behind the last expert's.

    Args:
        counts: int [E], rows of each expert. num_rows: rows in all, at least their sum.

    Effects: no synchronisation with the host, so a sum above `num_rows` is not seen: the last experts lack rows.
    """
    ends = counts.cumsum(0)
    rows = torch.arange(num_rows, device=counts.device)
    ids = torch.searchsorted(ends, rows, right=True)
    return torch.where(ids < counts.shape[0], ids, -1)[:, None]


def as_counts(argument: str, counts: Any, num_experts: int, device: torch.device) -> torch.Tensor:
    """Rows of each expert as int64 [E] on the device, from a tensor or a list.

    Raises:
        MegaMoEValueError, MegaMoETypeError: another shape, or no integers.
    """
    tensor = counts if isinstance(counts, torch.Tensor) else torch.tensor(counts)
    if tensor.shape != (num_experts,):
        raise MegaMoEValueError(
            expected(argument, f"[{num_experts}], rows of each expert", f"shape {tuple(tensor.shape)}")
        )
    if tensor.is_floating_point():
        raise MegaMoETypeError(expected(argument, "integers", tensor.dtype))
    return tensor.to(device, torch.int64, non_blocking=True)


@dataclasses.dataclass
class DelayedCall:
    """How one call's weight gradients leave autograd.

    Attributes:
        context: of the experts, with kept copies.
        dtype: of the weight gradients.
        deliver: called in the backward with a function that computes (dW13, dW2); returns what autograd gets for them.
    """

    context: MoEContext
    dtype: torch.dtype
    deliver: Callable[[Callable[[], WeightGrads]], tuple[torch.Tensor | None, torch.Tensor | None]]


def apply_delayed(
    x: torch.Tensor,
    ids: torch.Tensor,
    probs: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    call: DelayedCall,
) -> torch.Tensor:
    """`mega_moe` on one rank whose backward computes dx and dp, and hands over the rest of the work.

    Args:
        x, ids, probs, w13, w2: as for `mega_moe`; weights that train.
        call: where the weight gradients go.

    Effects: unfused backends keep the operands of the weight gradients, which then need no weights any more. A fused
    backend's buffers belong to its workspace, so it repeats its backward for them.
    """
    error = find_error(call.context.shapes, [x], [ids], [probs], w13, w2, None, None)
    if error is not None:
        raise error
    return _Delayed.apply(x, probs, w13, w2, ids, call)


class _Delayed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        probs: torch.Tensor,
        w13: torch.Tensor,
        w2: torch.Tensor,
        ids: torch.Tensor,
        call: DelayedCall,
    ) -> torch.Tensor:
        context = call.context
        rounded = x.to(torch.bfloat16)
        outs, saved = forward_op(
            [rounded],
            [ids],
            [probs.float()],
            w13,
            w2,
            None,
            None,
            None,
            context.spec,
            context.handle,
            context.shapes.save,
            True,
            [True, True],
        )
        assert context.copies is not None
        ctx.call, ctx.epoch, ctx.dtypes = call, context.copies.epoch, (x.dtype, probs.dtype)
        ctx.save_for_backward(rounded, ids, w13, w2, *saved)
        return outs[0].to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        x, ids, w13, w2, *saved = ctx.saved_tensors
        dout = grad_outputs[0].to(torch.bfloat16)
        split = _split_fused if ctx.call.context.choose(w13, ids.shape[1]).is_fused else _split_steps
        dx, dp, weight_grads = split(ctx, dout, (x, ids, w13, w2), saved)
        dw13, dw2 = ctx.call.deliver(weight_grads)
        return dx.to(ctx.dtypes[0]), dp.to(ctx.dtypes[1]), dw13, dw2, None, None


Split = tuple[torch.Tensor, torch.Tensor, Callable[[], WeightGrads]]


def _split_steps(ctx: Any, dout: torch.Tensor, inputs: tuple[torch.Tensor, ...], saved: list[torch.Tensor]) -> Split:
    """(dx, dp, what is left to do): the steps up to dx now, the weight GEMMs later, from their saved operands."""
    x, ids, w13, w2 = inputs
    context, dtype = ctx.call.context, ctx.call.dtype
    backend = context.choose(w13, ids.shape[1])
    experts = context.copies.for_backward(backend, Masters(w13, w2), context.recipe, ctx.epoch)
    state = unpack(saved, [x], [ids], backend, context, context.shapes.save)
    operands: list[tuple[Any, Any, Any, Any]] = []
    wanted = Needs(w13=[x.new_empty(0)], w2=[x.new_empty(0)])
    keep: Any = lambda *found: operands.append(found[:4])  # noqa: E731
    grads = backward(backend.steps, context.transport(backend), [dout], state, [experts], wanted, keep)
    shapes, device = (w13.shape, w2.shape), w13.device
    assert grads.dx is not None and grads.dp is not None

    def weight_grads() -> WeightGrads:
        dw13, dw2 = (torch.empty(shape, dtype=dtype, device=device) for shape in shapes)
        compute_weight_grads(backend.steps, *operands.pop(), dw13, dw2)
        return dw13, dw2

    return grads.dx[0], grads.dp[0], weight_grads


def _split_fused(ctx: Any, dout: torch.Tensor, inputs: tuple[torch.Tensor, ...], saved: list[torch.Tensor]) -> Split:
    """(dx, dp, what is left to do): the backward once for dx and dp, and once more for the weights."""
    x, ids, w13, w2 = inputs
    context, epoch, dtype = ctx.call.context, ctx.epoch, ctx.call.dtype

    def run(needs: list[bool]) -> list[torch.Tensor]:
        shapes = (context.spec, context.handle, context.shapes.save)
        return backward_op([dout], saved, [x], [ids], w13, w2, None, None, *shapes, needs, epoch)

    def weight_grads() -> WeightGrads:
        dw13, dw2 = run([False, False, True, True])
        return dw13.to(dtype), dw2.to(dtype)

    dx, dp = run([True, True, False, False])
    return dx, dp, weight_grads
