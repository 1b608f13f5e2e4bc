"""`megamoe::forward` and `megamoe::backward`: the layer as custom operators with fake versions and autograd.

They take tensors, a `Spec` as a string, from which their fake versions know every shape, and the number of a
`MoEContext`. What the backward needs is an output of the forward, so it passes through autograd's saved tensors (and
their hooks) like that of any operator.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from megamoe.backends import Backend
from megamoe.comm import GroupTransport
from megamoe.context import MoEContext, Spec, context_of
from megamoe.errors import MegaMoERuntimeError, expected
from megamoe.quantize import FP8, QuantizedRows, ceil_div
from megamoe.recipe import BLOCK
from megamoe.routing_plan import RankPlan, RoutingPlan
from megamoe.unfused import Needs, RowOrder, Saved, SaveMode
from megamoe.weights import Masters, make_experts, split_experts

_PLAN_FIELDS = ("counts", "offs", "source_rank", "token", "slot")


@functools.lru_cache
def _spec(text: str) -> Spec:
    return Spec.parse(text)


# ---------------------------------------------------------------- forward


@torch.library.custom_op(
    "megamoe::forward",
    mutates_args=(),
    schema="(Tensor[] xs, Tensor[] topk_ids, Tensor[] topk_weights, Tensor w13, Tensor w2, Tensor? w13_scale, "
    "Tensor? w2_scale, Tensor? anchor, str spec, SymInt handle, str save, bool requantize, bool[] trains)"
    " -> (Tensor[], Tensor[])",
)
def forward_op(
    xs: Sequence[Tensor],
    topk_ids: Sequence[Tensor],
    topk_weights: Sequence[Tensor],
    w13: Tensor,
    w2: Tensor,
    w13_scale: Tensor | None,
    w2_scale: Tensor | None,
    anchor: Tensor | None,
    spec: str,
    handle: int,
    save: str,
    requantize: bool,
    trains: Sequence[bool],
) -> tuple[list[Tensor], list[Tensor]]:
    """(out of each local rank, what the backward needs as a flat list)."""
    context = context_of(handle)
    backend = context.choose(w13, topk_ids[0].shape[1])
    transport = context.transport(backend)
    masters = Masters(w13, w2, w13_scale, w2_scale, (trains[0], trains[1]))
    with _on(w13.device):
        if context.copies is None:
            experts = make_experts(backend, masters, context.recipe, transposed=False)
        else:
            experts = context.copies.for_forward(
                backend, masters, context.recipe, requantize=requantize, transposed=save != "none"
            )
    mine = split_experts(experts, len(xs))
    options = context.options(topk_ids, mine[0].w13.data.shape[0], cast(SaveMode, save))
    tokens, ids, weights = ([_packed(v) for v in values] for values in (xs, topk_ids, topk_weights))
    with _on(w13.device):
        outs, saved = backend.forward(transport, tokens, ids, weights, mine, context.recipe, options)
    kept = [] if saved is None else pack(saved)
    inputs = [*xs, *topk_ids, *topk_weights, w13, w2]
    own = _unaliased([*outs, *kept], inputs)
    return own[: len(outs)], own[len(outs) :]


@forward_op.register_fake
def _(xs, topk_ids, topk_weights, w13, w2, w13_scale, w2_scale, anchor, spec, handle, save, requantize, trains):  # type: ignore[no-untyped-def]
    outs = [x.new_empty(x.shape, dtype=torch.bfloat16) for x in xs]
    return outs, [] if save == "none" else _fake_saved(_spec(spec), xs, topk_ids, w13, w2, save)


def _fake_saved(
    spec: Spec, xs: Sequence[Tensor], topk_ids: Sequence[Tensor], w13: Tensor, w2: Tensor, save: str
) -> list[Tensor]:
    """Empty tensors of the shapes that `pack` gives, in its order."""
    like, hidden, inter, slots = xs[0], w13.shape[2], w2.shape[2], topk_ids[0].shape[1]
    each = w13.shape[0] // spec.num_local
    tokens = [ids.shape[0] for ids in topk_ids]
    rows = spec.pool_rows(tokens, slots, each)
    size: Callable[[], Any] = lambda: torch.library.get_ctx().new_dynamic_size()  # noqa: E731
    pool_sizes = [size() if rows is None else rows for _ in range(spec.num_ranks)]
    if spec.is_group:
        bound = spec.max_tokens_per_rank if rows is not None else None
        tokens = [size() if bound is None else bound for _ in range(spec.num_ranks)]
    packed = []
    for pool in pool_sizes[: spec.num_local]:
        packed.append(like.new_empty(pool, dtype=torch.float32))
        if save in ("pool", "repull"):
            packed.append(like.new_empty(pool, 2 * inter, dtype=torch.bfloat16))
        if save == "pool":
            packed.append(
                like.new_empty(pool, hidden, dtype=torch.uint8 if spec.precision == "fp8" else torch.bfloat16)
            )
            if spec.precision == "fp8":
                packed.append(like.new_empty(ceil_div(hidden, BLOCK), pool, dtype=torch.float32))
    if spec.choose(w13, slots).saves_codes:
        local = pool_sizes[: spec.num_local]
        return packed + [like.new_empty(n, dtype=torch.int32) for pool in local for n in (each, each + 1, pool)]
    for pool in pool_sizes:
        packed += [like.new_empty(n, dtype=torch.int32) for n in (each, each + 1, pool, pool, pool)]
    packed += [like.new_empty(n, slots, dtype=torch.int32) for n in tokens for _ in range(2)]
    return packed


# ---------------------------------------------------------------- backward


@torch.library.custom_op(
    "megamoe::backward",
    mutates_args=(),
    schema="(Tensor[] douts, Tensor[] saved, Tensor[] xs, Tensor[] topk_ids, Tensor w13, Tensor w2, "
    "Tensor? w13_scale, Tensor? w2_scale, str spec, SymInt handle, str save, bool[] needs, SymInt epoch) -> Tensor[]",
)
def backward_op(
    douts: Sequence[Tensor],
    saved: Sequence[Tensor],
    xs: Sequence[Tensor],
    topk_ids: Sequence[Tensor],
    w13: Tensor,
    w2: Tensor,
    w13_scale: Tensor | None,
    w2_scale: Tensor | None,
    spec: str,
    handle: int,
    save: str,
    needs: Sequence[bool],
    epoch: int,
) -> list[Tensor]:
    """dx of each local rank, dp of each, dW13, dW2: those that `needs` asks for, in this order.

    `needs`: whether x, topk_weights, w13 and w2 need a gradient, and whether dW13 and dW2 are to be computed later.
    """
    context = context_of(handle)
    backend = context.choose(w13, topk_ids[0].shape[1])
    transport = context.transport(backend)
    masters = Masters(w13, w2, w13_scale, w2_scale)
    with _on(w13.device):
        if context.copies is None:
            experts = make_experts(backend, masters, context.recipe, transposed=True)
        else:
            experts = context.copies.for_backward(backend, masters, context.recipe, epoch if epoch >= 0 else None)
    num_local = len(douts)
    grads_of_weights = [
        torch.empty_like(w, memory_format=torch.contiguous_format) if need else None
        for w, need in zip((w13, w2), needs[2:4], strict=True)
    ]
    into = [None if g is None else list(g.chunk(num_local)) for g in grads_of_weights]
    later = None
    if any(needs[4:]) and context.deferred is not None:
        later = context.deferred.later(needs[4], needs[5], num_local)
    with _on(w13.device):
        grads = backend.backward(
            transport,
            [_packed(dout.to(torch.bfloat16)) for dout in douts],
            unpack(saved, [_packed(x) for x in xs], [_packed(ids) for ids in topk_ids], backend, context, save),
            split_experts(experts, num_local),
            Needs(needs[0], needs[1], into[0], into[1], later, context.overlap, context.debug),
        )
    found: list[Tensor] = []
    for need, per_rank in zip(needs, (grads.dx, grads.dp), strict=False):
        found += per_rank if need and per_rank is not None else []
    found += [g for g in grads_of_weights if g is not None]
    return _unaliased(found, [*douts, *saved])


@backward_op.register_fake
def _(douts, saved, xs, topk_ids, w13, w2, w13_scale, w2_scale, spec, handle, save, needs, epoch):  # type: ignore[no-untyped-def]
    found, top_k = [], topk_ids[0].shape[1]
    if needs[0]:
        found += [dout.new_empty(dout.shape, dtype=torch.bfloat16) for dout in douts]
    if needs[1]:
        found += [dout.new_empty(dout.shape[0], top_k, dtype=torch.float32) for dout in douts]
    return found + [w.new_empty(w.shape) for w, need in zip((w13, w2), needs[2:4], strict=True) if need]


# ---------------------------------------------------------------- autograd


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[list[Tensor], list[Tensor]]) -> None:
    xs, topk_ids, _, w13, w2, w13_scale, w2_scale, _, spec, handle, save, _, _ = inputs
    outs, saved = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*saved)
    ctx.spec, ctx.handle, ctx.save, ctx.counts = spec, handle, save, (len(saved), 0 if save == "pool" else len(xs))
    ctx.out_shapes = [out.shape for out in outs]
    traced = isinstance(w13, FakeTensor | FunctionalTensor) or type(handle) is not int
    ctx.context = None if traced else context_of(handle)  # alive until the backward
    copies = None if ctx.context is None else ctx.context.copies
    ctx.epoch = -1 if copies is None else copies.epoch
    chosen = (_spec(spec) if ctx.context is None else ctx.context).choose(w13, topk_ids[0].shape[1])
    ctx.needs_ids = chosen.saves_codes  # a plan says all about the routing
    kept = [*(xs if save != "pool" else ()), *(topk_ids if ctx.needs_ids else ())]
    ctx.save_for_backward(*saved, *kept, w13, w2, w13_scale, w2_scale)


def _backward(ctx: Any, d_outs: list[Tensor | None], d_saved: list[None]) -> tuple[Any, ...]:
    if torch.is_grad_enabled():  # only where a graph of the backward is asked for, and it would be wrong
        raise MegaMoERuntimeError(expected("create_graph", "False: the layer is not differentiable twice", True))
    need_x, _, need_p, need_w13, need_w2, *_ = ctx.needs_input_grad
    num_saved, num_xs = ctx.counts
    kept = ctx.saved_tensors  # unpacked once: activation checkpointing allows no more
    saved, xs = kept[:num_saved], kept[num_saved : num_saved + num_xs]
    *ids, w13, w2, w13_scale, w2_scale = kept[num_saved + num_xs :]
    topk_ids = ids if ctx.needs_ids else [saved[-1]]  # a plan's last tensor is [T, K] too
    douts = [
        w13.new_zeros(shape, dtype=torch.bfloat16) if dout is None else dout
        for dout, shape in zip(d_outs, ctx.out_shapes, strict=True)
    ]
    later = (False, False)
    if ctx.context is not None and ctx.context.deferred is not None:
        reached = ctx.context.deferred.reached()
        later, need_w13, need_w2 = (need_w13 and reached[0], need_w2 and reached[1]), False, False
    needs = [any(need_x), any(need_p), need_w13, need_w2, *later]
    found = backward_op(
        douts, saved, xs, topk_ids, w13, w2, w13_scale, w2_scale, ctx.spec, ctx.handle, ctx.save, needs, ctx.epoch
    )
    left = iter(found)
    num_local = len(douts)
    dx = [next(left) if needs[0] else None for _ in range(num_local)]
    dp = [next(left) if needs[1] else None for _ in range(num_local)]
    dw13 = next(left) if need_w13 else None
    dw2 = next(left) if need_w2 else None
    return dx, [None] * num_local, dp, dw13, dw2, *[None] * 8


forward_op.register_autograd(_backward, setup_context=_setup_context)


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Kernels launch on the current device, which need not be that of the tensors."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _packed(tensor: Tensor) -> Tensor:
    """The tensor, or a copy, row-major at a multiple of 16 bytes: kernels copy in bulk."""
    packed = tensor.contiguous()
    return packed if packed.data_ptr() % 16 == 0 else packed.clone()


def _unaliased(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """The outputs with copies of those that share storage with an input or an earlier output: operators may not.

    Steps hand out slices of one tensor (rows of a plan, tokens of several ranks); what is large never shares.
    """
    seen = {t.untyped_storage()._cdata for t in inputs}
    own = []
    for tensor in outputs:
        if tensor.untyped_storage()._cdata in seen:
            tensor = tensor.clone()
        seen.add(tensor.untyped_storage()._cdata)
        own.append(tensor)
    return own


# ---------------------------------------------------------------- saved state as a flat list


def pack(saved: Saved) -> list[Tensor]:
    """The tensors of `saved`, inputs left out: of each local rank weights, gate/up, pool, scales; then the plan.

    FP8 rows go as bytes: few operations know FP8, and autograd takes it for differentiable.
    """
    packed: list[Tensor] = []
    for i, weight in enumerate(saved.weights):
        packed.append(weight)
        if saved.gate_ups is not None:
            packed.append(saved.gate_ups[i])
        if saved.pools is not None:
            data, scale = saved.pools[i].data, saved.pools[i].scale
            packed += [data] if scale is None else [data.view(torch.uint8), scale]
    plan = saved.plan
    if not isinstance(plan, RoutingPlan):
        return packed + [t for rank in plan for t in (rank.counts, rank.offs, rank.codes)]
    packed += [getattr(rank, name) for rank in plan.ranks for name in _PLAN_FIELDS]
    return packed + [t for pair in zip(plan.owner, plan.row, strict=True) for t in pair]


def unpack(
    packed: Sequence[Tensor], xs: list[Tensor], topk_ids: list[Tensor], backend: Backend, context: MoEContext, save: str
) -> Saved:
    """The inverse of `pack`."""
    left, transport = iter(packed), context.transport(backend)
    weights, gate_ups, pools = [], [], []
    for _ in transport.local_ranks:
        weights.append(next(left))
        if save in ("pool", "repull"):
            gate_ups.append(next(left))
        if save == "pool":
            data = next(left)
            if context.recipe.precision == "fp8":
                pools.append(QuantizedRows(data.view(FP8), next(left), k_major=True))
            else:
                pools.append(QuantizedRows(data, None, k_major=True))
    if backend.saves_codes:
        top_k = topk_ids[0].shape[1]
        orders = tuple(RowOrder(next(left), next(left), next(left), top_k) for _ in transport.local_ranks)
        return Saved(orders, context.recipe, weights, gate_ups or None, pools or None, xs or None, topk_ids)
    ranks = tuple(RankPlan(*(next(left) for _ in _PLAN_FIELDS)) for _ in range(transport.num_ranks))
    pairs = [(next(left), next(left)) for _ in range(transport.num_ranks)]
    owner, row = tuple(p[0] for p in pairs), tuple(p[1] for p in pairs)
    num_experts = ranks[0].counts.shape[0] * transport.num_ranks
    plan = RoutingPlan(num_experts, ranks, owner, row)
    if isinstance(transport, GroupTransport):
        plan = transport.attach(plan, [[o.shape[0] for o in owner]], context.static_tokens, owner[0].shape[1])
    return Saved(plan, context.recipe, weights, gate_ups or None, pools or None, xs or None)
