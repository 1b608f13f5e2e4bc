"""The layer as separate steps around a transport, forward and backward: one text for the torch and the Triton steps.

A list has one entry for each rank that lives in this process. `steps` is a module with the functions of
`megamoe.torch_steps`; a transport moves rows between ranks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import torch

from megamoe.comm.transport import Transport, layer_facts
from megamoe.deferred import Later, WeightJob
from megamoe.overlap import OverlapConfig
from megamoe.quantize import QuantizedRows, QuantizedWeight
from megamoe.recipe import BLOCK, Recipe
from megamoe.routing_plan import RankPlan, RoutingPlan
from megamoe.torch_steps import SwigluGrads

Steps: TypeAlias = Any
"""A module that offers what `megamoe.torch_steps` lists in `__all__`."""

WeightGrads: TypeAlias = Callable[
    [RankPlan, SwigluGrads, "QuantizedRows | None", QuantizedRows, "torch.Tensor | None", "torch.Tensor | None", bool],
    None,
]
"""(segments, gradients of SwiGLU, rows of x, rows of dout, where dW13 goes, where dW2 goes, whether it adds to what is
there), of one rank."""

SaveMode = Literal["none", "pool", "repull", "recompute"]
"""What the forward keeps for the backward.

"pool": the rows that were dispatched and gate/up. "repull": gate/up only; the backward dispatches x again.
"recompute": neither; the backward also repeats GEMM 1. "none": nothing. The gradients are the same bit for bit.
"""


@dataclasses.dataclass(frozen=True)
class ExpertWeights:
    """The experts of one rank as the GEMMs read them.

    Attributes:
        w13: [E_l, 2I, H], gate rows first.
        w2: [E_l, H, I].
        w13_t: [E_l, H, 2I], the transposed copy for the backward; None where there is none to come.
        w2_t: [E_l, I, H].
        fused: the weights as a fused forward reads them, a dataclass of tensors [E_l, ...]; None without one.
        fused_t: the same of a fused backward.
    """

    w13: QuantizedWeight
    w2: QuantizedWeight
    w13_t: QuantizedWeight | None = None
    w2_t: QuantizedWeight | None = None
    fused: Any = None
    fused_t: Any = None


@dataclasses.dataclass(frozen=True)
class ForwardOptions:
    """How a forward runs.

    Attributes:
        save: what it keeps for the backward.
        num_rows: rows of every pool, None: just enough.
        max_tokens: as for `Transport.plan`: with it ids are not checked and nothing synchronises.
        debug: look for errors after the call, which synchronises.
        overlap: settings of fused kernels.
    """

    save: SaveMode = "none"
    num_rows: int | None = None
    max_tokens: int | None = None
    debug: bool = False
    overlap: OverlapConfig = OverlapConfig()


@dataclasses.dataclass(frozen=True)
class RowOrder:
    """The rows of a rank as a fused kernel leaves them.

    Attributes:
        counts, offs: as in `RankPlan`.
        codes: int32 [P], source rank << 27 | token * K + slot, negative in padding; undefined behind offs[E_l].
        top_k: K.
    """

    counts: torch.Tensor
    offs: torch.Tensor
    codes: torch.Tensor
    top_k: int


@dataclasses.dataclass(frozen=True)
class Saved:
    """What the backward needs from the forward.

    Attributes:
        plan: the call's routing, or of each rank the row order of a fused forward.
        recipe: of the call.
        weights: fp32 [P], the routing weight of each row.
        gate_ups: bf16 [P, 2I], or None after save="recompute".
        pools: rows as they travelled, or None after save="repull" or "recompute".
        xs: the inputs, where the pools are None.
        topk_ids: the routing, where `plan` is a row order.
    """

    plan: RoutingPlan | tuple[RowOrder, ...]
    recipe: Recipe
    weights: list[torch.Tensor]
    gate_ups: list[torch.Tensor] | None
    pools: list[QuantizedRows] | None
    xs: list[torch.Tensor] | None
    topk_ids: list[torch.Tensor] | None = None


@dataclasses.dataclass(frozen=True)
class Needs:
    """Which gradients are wanted.

    Attributes:
        x, topk_weights: whether the gradient is wanted on this process.
        w13, w2: where each local rank's weight gradient goes ([E_l, 2I, H], [E_l, H, I]; fp32 or bf16), or None. They
            are overwritten, with zeros for experts without rows.
        later: who takes weight gradients instead, to compute them later; w13 and w2 are None then.
        overlap: settings of fused kernels.
        debug: look for errors after the call, which synchronises.
    """

    x: bool = True
    topk_weights: bool = True
    w13: list[torch.Tensor] | None = None
    w2: list[torch.Tensor] | None = None
    later: Later | None = None
    overlap: OverlapConfig = OverlapConfig()
    debug: bool = False

    @property
    def wants_w13(self) -> bool:
        """Whether dW13 is wanted, now or later: it needs the rows of x."""
        return self.w13 is not None or (self.later is not None and self.later.w13)

    def hand(self, rank: int, job: WeightJob) -> None:
        """Give local rank `rank`'s job to who takes it later, or run it."""
        if self.later is not None:
            self.later.take(job)
        else:
            job(None if self.w13 is None else self.w13[rank], None if self.w2 is None else self.w2[rank], False)


@dataclasses.dataclass(frozen=True)
class Grads:
    """Gradients of each local rank; None where `Needs` did not ask and no other rank depends on it.

    dx bf16 [T, H]; dp fp32 [T, K], exactly 0 for slots without an expert.
    """

    dx: list[torch.Tensor] | None
    dp: list[torch.Tensor] | None
    dw13: list[torch.Tensor] | None
    dw2: list[torch.Tensor] | None


def plan_call(
    transport: Transport,
    topk_ids: Sequence[torch.Tensor],
    num_experts: int,
    hidden_size: int,
    recipe: Recipe,
    options: ForwardOptions,
) -> RoutingPlan:
    """The plan of a layer's call, with the sizes of its options and what all ranks must agree on."""
    return transport.plan(
        list(topk_ids),
        num_experts,
        options.num_rows,
        max_tokens=options.max_tokens,
        checked=options.debug,
        agreed=layer_facts(hidden_size, recipe),
    )


def forward(
    steps: Steps,
    transport: Transport,
    xs: Sequence[torch.Tensor],
    topk_ids: Sequence[torch.Tensor],
    topk_weights: Sequence[torch.Tensor],
    experts: Sequence[ExpertWeights],
    recipe: Recipe,
    options: ForwardOptions | None = None,
) -> tuple[list[torch.Tensor], Saved | None]:
    """Route rows to their experts, apply them, bring the sums home.

    Args:
        steps: who computes.
        transport: who moves rows; every rank of it makes this call, also with T = 0.
        xs: [T, H] bf16, T may differ and be 0.
        topk_ids: int32 or int64 [T, K], global expert ids, -1 for none.
        topk_weights: fp32 [T, K].
        experts: of each local rank.
        recipe: formats and clamp.
        options: what to keep, and sizes; None: the defaults.

    Returns:
        (out bf16 [T, H] of each local rank, Saved or None).
    """
    options = options or ForwardOptions()
    num_experts = experts[0].w13.data.shape[0] * transport.num_ranks
    plan = plan_call(transport, topk_ids, num_experts, xs[0].shape[1], recipe, options)
    pools = _dispatch_rows(steps, transport, xs, plan, recipe)
    weights = transport.dispatch_weights(list(topk_weights), plan)
    gate_ups = _gate_ups(steps, transport, pools, plan, experts)
    ys = []
    for rank, gate_up, weight, mine in zip(transport.local_ranks, gate_ups, weights, experts, strict=True):
        h = steps.swiglu(gate_up, weight, recipe)
        ys.append(steps.grouped_gemm(h, mine.w2, plan.ranks[rank]))
    outs = _own(transport.combine_rows(ys, plan), xs)
    save = options.save
    if save == "none":
        return outs, None
    saved = Saved(
        plan,
        recipe,
        weights,
        gate_ups if save in ("pool", "repull") else None,
        pools if save == "pool" else None,
        None if save == "pool" else list(xs),
    )
    return outs, saved


def backward(
    steps: Steps,
    transport: Transport,
    douts: Sequence[torch.Tensor],
    saved: Saved,
    experts: Sequence[ExpertWeights],
    needs: Needs,
    weight_grads: WeightGrads | None = None,
) -> Grads:
    """The gradients of `forward`.

    With several ranks dx and dp are computed and sent whatever `needs` says, since other ranks wait for their rows;
    only weight gradients are skipped locally.

    Args:
        steps, transport: as for the forward.
        douts: [T, H] bf16 of each local rank.
        saved: from the forward.
        experts: of each local rank, with the transposed copies.
        needs: which gradients are wanted.
        weight_grads: who computes those of weights; None: the steps.

    Returns:
        Grads.
    """
    plan, recipe = saved.plan, saved.recipe
    assert isinstance(plan, RoutingPlan)
    d_pools = _dispatch_rows(steps, transport, douts, plan, recipe)
    pools = saved.pools
    if pools is None and (needs.wants_w13 or saved.gate_ups is None or transport.num_sources > 1):
        assert saved.xs is not None
        pools = _dispatch_rows(steps, transport, saved.xs, plan, recipe)
    gate_ups = saved.gate_ups
    if gate_ups is None:
        assert pools is not None
        gate_ups = _gate_ups(steps, transport, pools, plan, experts)

    travels = transport.num_sources > 1
    grads, d_rows = [], []
    for i, rank in enumerate(transport.local_ranks):
        mine, segment = experts[i], plan.ranks[rank]
        assert mine.w13_t is not None and mine.w2_t is not None
        dh = steps.grouped_gemm(d_pools[i], mine.w2_t, segment, torch.float32)
        grads.append(steps.swiglu_backward(dh, gate_ups[i], saved.weights[i], recipe))
        del dh
        if needs.x or travels:
            d_rows.append(steps.grouped_gemm(grads[i].d_gate_up, mine.w13_t, segment))
    finish = transport.start_combine_rows(d_rows, plan) if needs.x or travels else None
    del d_rows
    compute = weight_grads or functools.partial(compute_weight_grads, steps, recipe=recipe)
    for i, rank in enumerate(transport.local_ranks):  # while rows of dX are on their way home
        x_pool = None if pools is None else pools[i]
        needs.hand(i, functools.partial(compute, plan.ranks[rank], grads[i], x_pool, d_pools[i]))
    dx = _own(finish(), douts) if finish is not None else None
    d_weights = [g.d_weight for g in grads]
    dp = _own(transport.combine_weight_grads(d_weights, plan), douts) if needs.topk_weights or travels else None
    return Grads(dx, dp, needs.w13, needs.w2)


def worst_rows(num_slots: int, experts_per_rank: int) -> int:
    """Rows of a pool that holds `num_slots` rows however they are spread over the experts; symbolic sizes too."""
    padding = (BLOCK - 1) * torch.sym_min(experts_per_rank, num_slots)
    return (num_slots + padding + BLOCK - 1) // BLOCK * BLOCK


def compute_weight_grads(
    steps: Steps,
    segment: RankPlan,
    grads: SwigluGrads,
    pool: QuantizedRows | None,
    d_pool: QuantizedRows,
    dw13: torch.Tensor | None,
    dw2: torch.Tensor | None,
    accumulate: bool = False,
    recipe: Recipe | None = None,
) -> None:
    """Write the weight gradients of one rank, from what travelled, or add them to what is there.

    With the recipe's `wgrad_operands`; without a recipe they are bf16.
    """
    operands = functools.partial(steps.wgrad_operands, plan=segment, recipe=Recipe() if recipe is None else recipe)
    if dw13 is not None:
        assert pool is not None
        steps.wgrad(*operands(grads.d_gate_up_bf16, pool), segment, out=dw13, accumulate=accumulate)
    if dw2 is not None:
        steps.wgrad(*operands(d_pool, grads.weighted_act), segment, out=dw2, accumulate=accumulate)


def _own(values: Sequence[torch.Tensor], tokens: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The rows of a rank's own tokens: with static shapes a plan has rows for as many as there may be."""
    return [value[: own.shape[0]] for value, own in zip(values, tokens, strict=True)]


def _dispatch_rows(
    steps: Steps, transport: Transport, rows: Sequence[torch.Tensor], plan: RoutingPlan, recipe: Recipe
) -> list[QuantizedRows]:
    return transport.dispatch_rows([steps.quantize_rows(r, recipe) for r in rows], plan)


def _gate_ups(
    steps: Steps,
    transport: Transport,
    pools: Sequence[QuantizedRows],
    plan: RoutingPlan,
    experts: Sequence[ExpertWeights],
) -> list[torch.Tensor]:
    return [
        steps.grouped_gemm(pool, mine.w13, plan.ranks[rank])
        for rank, pool, mine in zip(transport.local_ranks, pools, experts, strict=True)
    ]
