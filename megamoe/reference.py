"""The layer written as its maths, forward and backward: the oracle in fp64, and the recipe's emulation in fp32.

The oracle rounds nothing (fp64 in, fp64 out, passes gradcheck); the emulation rounds where the recipe says, stage by
stage, with `torch_steps`. Both visit slots expert by expert, rows of an expert in (token, slot) order. They are made to
be read and to judge the other backends, not to be fast.
"""

from __future__ import annotations

import dataclasses

import torch

from megamoe import torch_steps
from megamoe.quantize import QuantizedRows, QuantizedWeight, quantize_rows, quantize_weight
from megamoe.recipe import Recipe
from megamoe.routing_plan import RoutingPlan, make_plan


@dataclasses.dataclass(frozen=True)
class Inputs:
    """One rank's call, experts of all ranks included.

    Attributes:
        x_TH: tokens. topk_ids_TK: experts, -1 for none. topk_weights_TK: routing weights.
        w13_E2IH: [gate; up] stacked on dim 1, gate first. w2_EHI: the down projection.
    """

    x_TH: torch.Tensor
    topk_ids_TK: torch.Tensor
    topk_weights_TK: torch.Tensor
    w13_E2IH: torch.Tensor
    w2_EHI: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Forward:
    """out [T, H] and what the backward needs, per routed slot in (expert, token, slot) order."""

    out_TH: torch.Tensor
    gate_up_P2I: torch.Tensor
    h_PI: torch.Tensor
    y_PH: torch.Tensor


@dataclasses.dataclass(frozen=True)
class BackwardRows:
    """Stages of the backward, per routed slot in (expert, token, slot) order."""

    dh_PI: torch.Tensor
    d_gate_up_P2I: torch.Tensor
    weighted_act_PI: torch.Tensor
    dx_PH: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Backward:
    """Gradients of all inputs."""

    dx_TH: torch.Tensor
    dp_TK: torch.Tensor
    dw13_E2IH: torch.Tensor
    dw2_EHI: torch.Tensor
    dp_spread_TK: torch.Tensor | None = None
    """Of the oracle only: sqrt(sum over channels of (dh * A)^2), the yardstick of dp, which cancels."""
    rows: BackwardRows | None = None
    """Of the oracle only: the stages between."""


# ---------------------------------------------------------------- the oracle


def oracle_forward(inputs: Inputs, clamp: float | None = None) -> Forward:
    """The layer without any rounding, in fp64.

    Args:
        inputs: any dtypes and devices; everything is computed in fp64. Ids of -1 add exactly 0.
        clamp: limit of the gated activation, None for none.

    Returns:
        Forward in fp64, differentiable by autograd (which gradcheck uses).
    """
    x, p, w13, w2 = _double(inputs)
    out = torch.zeros_like(x)
    gate_ups: list[torch.Tensor] = []
    hs: list[torch.Tensor] = []
    ys: list[torch.Tensor] = []
    for e, token, slot in routed(inputs.topk_ids_TK):
        gate_up = x[token] @ w13[e].t()
        gate, up = _clamp(gate_up, clamp)
        h = torch.nn.functional.silu(gate) * up * p[token, slot][:, None]
        y = h @ w2[e].t()
        out = out.index_add(0, token, y)
        for stage, value in ((gate_ups, gate_up), (hs, h), (ys, y)):
            stage.append(value)
    return Forward(out, _cat(gate_ups, x, w13.shape[1]), _cat(hs, x, w2.shape[2]), _cat(ys, x, x.shape[1]))


def oracle_backward(
    inputs: Inputs, dout_TH: torch.Tensor, clamp: float | None = None, masked_by_P2I: torch.Tensor | None = None
) -> Backward:
    """The gradients of `oracle_forward`, written out; masks of the clamp let equality pass.

    Args:
        inputs: as for the forward.
        dout_TH: the gradient of out.
        clamp: as for the forward.
        masked_by_P2I: gate/up rows, in the order of `Forward.gate_up_P2I`, that decide the masks, as a value that
            rounding moved across the limit has the gradient of where it is; None: those of the oracle itself.

    Returns:
        Backward in fp64; experts without rows have exactly zero gradient, slots without an expert too.
    """
    x, p, w13, w2 = _double(inputs)
    dout = dout_TH.double()
    dx, dp, dw13, dw2 = (torch.zeros_like(v) for v in (x, p, w13, w2))
    spread = torch.zeros_like(p)
    stages: list[list[torch.Tensor]] = [[], [], [], []]
    row = 0
    for e, token, slot in routed(inputs.topk_ids_TK):
        raw = x[token] @ w13[e].t()
        gate, up = _clamp(raw, clamp)
        sigma = torch.sigmoid(gate)
        act = gate * sigma * up
        weight = p[token, slot][:, None]
        dh = dout[token] @ w2[e]
        dp[token, slot] = (dh * act).sum(1)
        spread[token, slot] = (dh * act).norm(dim=1)
        d_act = weight * dh
        d_gate = d_act * up * sigma * (1 + gate * (1 - sigma))
        d_up = d_act * gate * sigma
        if clamp is not None:
            judge = raw if masked_by_P2I is None else masked_by_P2I[row : row + token.shape[0]]
            raw_gate, raw_up = judge.chunk(2, dim=1)
            d_gate = d_gate * (raw_gate <= clamp)
            d_up = d_up * (raw_up.abs() <= clamp)
        row += token.shape[0]
        d_gate_up = torch.cat([d_gate, d_up], dim=1)
        dx_rows = d_gate_up @ w13[e]
        dx.index_add_(0, token, dx_rows)
        dw13[e] = d_gate_up.t() @ x[token]
        dw2[e] = dout[token].t() @ (weight * act)
        for stage, value in zip(stages, (dh, d_gate_up, weight * act, dx_rows), strict=True):
            stage.append(value)
    widths = (w2.shape[2], w13.shape[1], w2.shape[2], x.shape[1])
    rows = BackwardRows(*(_cat(stage, x, width) for stage, width in zip(stages, widths, strict=True)))
    return Backward(dx, dp, dw13, dw2, spread, rows)


def routed(topk_ids_TK: torch.Tensor) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
    """(expert, tokens, slots) of every expert that has rows, ascending; rows in (token, slot) order."""
    experts = sorted(set(topk_ids_TK[topk_ids_TK >= 0].tolist()))
    return [(e, *(topk_ids_TK == e).nonzero(as_tuple=True)) for e in experts]


def _double(inputs: Inputs) -> tuple[torch.Tensor, ...]:
    fields = (inputs.x_TH, inputs.topk_weights_TK, inputs.w13_E2IH, inputs.w2_EHI)
    return tuple(v.double() for v in fields)


def _clamp(gate_up: torch.Tensor, clamp: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    gate, up = gate_up.chunk(2, dim=1)
    return (gate, up) if clamp is None else (gate.clamp(max=clamp), up.clamp(-clamp, clamp))


def _cat(parts: list[torch.Tensor], like: torch.Tensor, width: int) -> torch.Tensor:
    return torch.cat(parts) if parts else like.new_zeros(0, width)


# ---------------------------------------------------------------- the emulation


@dataclasses.dataclass(frozen=True)
class EmulatedForward:
    """What the emulation computed, stage by stage, in the pool's row order (one rank holds all experts)."""

    plan: RoutingPlan
    pool: QuantizedRows
    weight_P: torch.Tensor
    w13: QuantizedWeight
    w2: QuantizedWeight
    gate_up_P2I: torch.Tensor
    h: QuantizedRows
    y_PH: torch.Tensor
    out_TH: torch.Tensor


def emulate_forward(inputs: Inputs, recipe: Recipe) -> EmulatedForward:
    """The layer with every rounding of the recipe, on one rank.

    Args:
        inputs: bf16 or fp32 tokens and weights.
        recipe: formats and clamp.

    Returns:
        Every stage; out_TH is bf16.
    """
    plan = make_plan([inputs.topk_ids_TK], inputs.w13_E2IH.shape[0])
    mine = plan.ranks[0]
    w13, w2 = quantize_weight(inputs.w13_E2IH, recipe, row_groups=2), quantize_weight(inputs.w2_EHI, recipe)
    pool = torch_steps.dispatch([quantize_rows(inputs.x_TH, recipe)], mine)
    weight = torch_steps.dispatch_weights([inputs.topk_weights_TK], mine)
    gate_up = torch_steps.grouped_gemm(pool, w13, mine)
    h = torch_steps.swiglu(gate_up, weight, recipe)
    y = torch_steps.grouped_gemm(h, w2, mine)
    out = torch_steps.combine([y], plan, 0)
    return EmulatedForward(plan, pool, weight, w13, w2, gate_up, h, y, out)


def emulate_backward(forward: EmulatedForward, dout_TH: torch.Tensor, recipe: Recipe) -> Backward:
    """The gradients with every rounding of the recipe, from a forward of the same recipe.

    Args:
        forward: from `emulate_forward`.
        dout_TH: the gradient of out, bf16 (rounded to it).
        recipe: as for the forward.

    Returns:
        Backward: dx bf16, dp fp32, dW fp32.
    """
    mine = forward.plan.ranks[0]
    dout = torch_steps.dispatch([quantize_rows(dout_TH.to(torch.bfloat16), recipe)], mine)
    dh = torch_steps.grouped_gemm(dout, forward.w2.transposed(), mine, torch.float32)
    grads = torch_steps.swiglu_backward(dh, forward.gate_up_P2I, forward.weight_P, recipe)
    d_rows = torch_steps.grouped_gemm(grads.d_gate_up, forward.w13.transposed(), mine)
    dx = torch_steps.combine([d_rows], forward.plan, 0)
    dp = torch_steps.combine_weight_grads([grads.d_weight], forward.plan, 0)
    dw13 = torch_steps.wgrad(*torch_steps.wgrad_operands(grads.d_gate_up_bf16, forward.pool, mine, recipe), mine)
    dw2 = torch_steps.wgrad(*torch_steps.wgrad_operands(dout, grads.weighted_act, mine, recipe), mine)
    return Backward(dx, dp, dw13, dw2)
