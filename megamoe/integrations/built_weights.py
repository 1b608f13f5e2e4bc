"""`mega_moe` with weights that are built from other parameters in every forward, and built again for the backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from megamoe.context import MoEContext
from megamoe.functional import find_error, mega_moe
from megamoe.operators import backward_op, forward_op

Build = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""Parameters -> (w13, w2), by differentiable operations."""


def mega_moe_built(
    xs: Sequence[torch.Tensor],
    topk_ids: Sequence[torch.Tensor],
    topk_weights: Sequence[torch.Tensor],
    build: Build,
    parameters: Sequence[torch.Tensor],
    context: MoEContext,
) -> list[torch.Tensor]:
    """Apply experts whose weights are `build(*parameters)`.

    Args:
        xs, topk_ids, topk_weights: lists, as for `mega_moe`.
        build: pure: the same parameters give the same weights.
        parameters: what may get gradients; also frozen tensors.
        context: without kept copies.

    Returns:
        out of each local rank.

    Effects: as `mega_moe`; between forward and backward no built weight is held, only parameters, which FSDP2 gathers
    again and activation checkpointing sees like any saved tensor. A compiler decides by itself what it keeps.
    Not differentiable twice.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return mega_moe(list(xs), list(topk_ids), list(topk_weights), *build(*parameters), context=context)
    given = [*xs, *topk_weights, *parameters, *([] if context.anchor is None else [context.anchor])]
    outs = _Built.apply(build, context, list(topk_ids), *given)
    return list(outs) if isinstance(outs, tuple) else [outs]


class _Built(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, build: Build, context: MoEContext, ids: list[torch.Tensor], *given: torch.Tensor) -> Any:
        num_local = len(ids)
        xs, weights, parameters = given[:num_local], given[num_local : 2 * num_local], given[2 * num_local :]
        parameters = parameters[: len(parameters) - (context.anchor is not None)]
        w13, w2 = build(*parameters)
        error = find_error(context.shapes, list(xs), ids, list(weights), w13, w2, None, None)
        if error is not None:
            context.report(error, w13.device, w13)
        rounded, save = [x.to(torch.bfloat16) for x in xs], context.shapes.save
        fixed = (None, None, None, context.spec, context.handle, save, True, [True, True])
        outs, saved = forward_op(rounded, ids, [p.float() for p in weights], w13, w2, *fixed)
        ctx.build, ctx.context, ctx.num_local, ctx.num_saved = build, context, num_local, len(saved)
        ctx.dtypes = [t.dtype for t in (*xs, *weights)]
        ctx.save_for_backward(*saved, *rounded, *ids, *parameters)
        return tuple(out.to(x.dtype) for out, x in zip(outs, xs, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        context, n = ctx.context, ctx.num_local
        kept, needs = ctx.saved_tensors, ctx.needs_input_grad[3:]
        saved, kept = kept[: ctx.num_saved], kept[ctx.num_saved :]
        xs, ids = list(kept[:n]), list(kept[n : 2 * n])
        wanted = needs[2 * n : 2 * n + len(kept) - 2 * n]
        with torch.enable_grad():
            leaves = [p.detach().requires_grad_(need) for p, need in zip(kept[2 * n :], wanted, strict=True)]
            w13, w2 = ctx.build(*leaves)
        wants = [any(needs[:n]), any(needs[n : 2 * n]), w13.requires_grad, w2.requires_grad]
        douts = [dout.to(torch.bfloat16) for dout in grad_outputs]
        shapes = (context.spec, context.handle, context.shapes.save)
        fixed = (w13.detach(), w2.detach(), None, None, *shapes, wants, -1)
        left = iter(backward_op(douts, saved, xs, ids, *fixed))
        found = [next(left).to(ctx.dtypes[i]) if wants[i // n] else None for i in range(2 * n)]
        built = [(w, next(left)) for w in (w13, w2) if w.requires_grad]
        targets = [leaf for leaf in leaves if leaf.requires_grad]
        grads = iter(torch.autograd.grad([w for w, _ in built], targets, [g for _, g in built]) if built else ())
        found += [next(grads) if leaf.requires_grad else None for leaf in leaves]
        return None, None, None, *found, *([] if context.anchor is None else [None])
