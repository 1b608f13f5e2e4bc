"""The fused kernels' launches emulated with torch steps, so that what surrounds them runs without a GPU.

The forward's weights are read in the kernels' order, those of the backward stay in the user's; row codes, capacities,
garbage behind the last segment and the buffers of a call that saves nothing are as the kernels leave them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from cute_kernels.weights import KernelWeights
from megamoe import torch_steps as steps
from megamoe.backends import cute
from megamoe.quantize import QuantizedRows, QuantizedWeight
from megamoe.recipe import Recipe
from megamoe.routing_plan import RankPlan, RoutingPlan
from megamoe.unfused import RowOrder
from tests.support.kernel_weights import in_user_order


@dataclasses.dataclass
class Pair:
    """Weights and scales of both matrices, leading dim E_l."""

    w13: torch.Tensor
    s13: torch.Tensor
    w2: torch.Tensor
    s2: torch.Tensor

    def first(self) -> QuantizedWeight:
        return QuantizedWeight(self.w13, self.s13)

    def second(self) -> QuantizedWeight:
        return QuantizedWeight(self.w2, self.s2)


class World:
    """Stands for `cute_kernels.launch.LocalWorld`."""

    made: list[World] = []

    def __init__(self, num_ranks: int, *, capacity_rows: int | None, max_tokens: int, top_k: int, **sizes: Any) -> None:
        rows = 8192 if capacity_rows is None else capacity_rows
        self.followers: list[Any] = []  # streams that wait for the last call
        mine = {"capacity_rows": rows, "max_tokens": max_tokens, "top_k": top_k, "follow": self.followers.append}
        self.workspaces = [SimpleNamespace(**mine, scratch=None) for _ in range(num_ranks)]
        self.streams, self.sizes = [None] * num_ranks, sizes
        World.made.append(self)

        self.failure: Exception | None = None
        self.resets = 0

    def check(self) -> None:
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure

    def reset(self) -> None:
        self.resets += 1


def fused_forward(
    workspaces: Sequence[Any],
    xs: Sequence[torch.Tensor],
    topk_ids: Sequence[torch.Tensor],
    topk_weights: Sequence[torch.Tensor],
    weights: Sequence[KernelWeights],
    *,
    clamp: float | None = None,
    pow2_scales: bool = False,
    save: bool = False,
    plans: Sequence[Any] | None = None,
    streams: Any = None,
) -> list[Any]:
    recipe = Recipe(clamp=clamp, scale_format="pow2" if pow2_scales else "fp32")
    rows, top_k = workspaces[0].capacity_rows, topk_ids[0].shape[1]
    assert all(x.shape[0] <= w.max_tokens for x, w in zip(xs, workspaces, strict=True))
    num_experts = weights[0].w13.shape[0] * len(xs)
    plan = steps.make_plan(list(topk_ids), num_experts, num_rows=rows)
    sources = [steps.quantize_rows(x, recipe) for x in xs]
    made, ys = [], []
    for r, mine in enumerate(plan.ranks):
        pool = steps.dispatch(sources, mine)
        p = steps.dispatch_weights(list(topk_weights), mine) if plans is None else plans[r].p
        pair = Pair(*in_user_order(weights[r]))
        gate_up = steps.grouped_gemm(pool, pair.first(), mine)
        h = steps.swiglu(gate_up, p, recipe)
        ys.append(steps.grouped_gemm(h, pair.second(), mine))
        codes = torch.where(mine.source_rank < 0, -1, (mine.source_rank << 27) | (mine.token * top_k + mine.slot))
        codes[int(mine.offs[-1]) :] = torch.randint(0, 99, (rows - int(mine.offs[-1]),), dtype=torch.int32)
        buffers = SimpleNamespace(
            pool=pool.data, pool_s=pool.scale, gate_up=gate_up, codes=codes, p=p, offs=mine.offs, counts=mine.counts
        )
        if not save:  # the workspace's, which the next call overwrites
            before = workspaces[r].scratch
            if before is not None:
                for t in (before.codes, before.p, before.offs, before.counts):
                    t.fill_(77)
            workspaces[r].scratch = buffers
        made.append(buffers)
    outs = [steps.combine(ys, plan, r) for r in range(len(xs))]
    return [SimpleNamespace(out=out, buffers=buffers) for out, buffers in zip(outs, made, strict=True)]


def fused_backward(
    workspaces: Sequence[Any],
    douts: Sequence[torch.Tensor],
    topk_ids: Sequence[torch.Tensor],
    saved: Sequence[Any],
    weights: Sequence[Pair],
    *,
    clamp: float | None = None,
    pow2_scales: bool = False,
    streams: Any = None,
    steals: Sequence[Offer] = (),
) -> list[Any]:
    for offered in steals:
        offered.is_open = True
    recipe = Recipe(clamp=clamp, scale_format="pow2" if pow2_scales else "fp32")
    assert all(s.gate_up.shape[0] == w.capacity_rows for s, w in zip(saved, workspaces, strict=True))
    orders = [RowOrder(s.counts, s.offs, s.codes, topk_ids[0].shape[1]) for s in saved]
    plan: RoutingPlan = cute.plan_of(orders, [d.shape[0] for d in douts])
    sources = [steps.quantize_rows(d.bfloat16(), recipe) for d in douts]
    made, d_rows = [], []
    for r, mine in enumerate(plan.ranks):
        pool = steps.dispatch(sources, mine)
        dh = steps.grouped_gemm(pool, weights[r].second(), mine, torch.float32)
        grads = steps.swiglu_backward(dh, saved[r].gate_up, saved[r].p, recipe)
        w13_t = dataclasses.replace(weights[r].first(), col_groups=2)
        d_rows.append(steps.grouped_gemm(grads.d_gate_up, w13_t, mine))
        made.append((pool, grads))
    parts = [grads.d_weight for _, grads in made]
    return [
        SimpleNamespace(
            dx=steps.combine(d_rows, plan, r),
            dp=steps.combine_weight_grads(parts, plan, r),
            pool=pool.data,
            pool_s=pool.scale,
            grad_bf16=grads.d_gate_up_bf16,
            weighted=grads.weighted_act,
            operands=functools.partial(_operands, grads, pool),
        )
        for r, (pool, grads) in enumerate(made)
    ]


def _operands(grads: Any, pool: QuantizedRows, x: torch.Tensor, x_scale: torch.Tensor | None) -> Operands:
    return Operands(grads.d_gate_up_bf16, grads.weighted_act, x, x_scale, pool.data, pool.scale)


@dataclasses.dataclass
class Operands:
    """Stands for `wgrad_launch.WgradOperands`."""

    d_gate_up: torch.Tensor
    weighted_act: torch.Tensor
    x: torch.Tensor
    x_scale: torch.Tensor | None
    d: torch.Tensor
    d_scale: torch.Tensor | None


def weight_gradients(
    operands: Operands,
    offs: torch.Tensor,
    counts: torch.Tensor,
    dw13: torch.Tensor | None,
    dw2: torch.Tensor | None,
    *,
    precision: str,
    accumulate: bool = False,
) -> None:
    wanted = ((dw13, operands.x, operands.x_scale), (dw2, operands.d, operands.d_scale))
    assert all((precision == "fp8") == (scale is not None) for out, _, scale in wanted if out is not None)
    x, d = (QuantizedRows(data, scale, k_major=True) for _, data, scale in wanted)
    row = torch.arange(x.data.shape[0])
    token = torch.full_like(row, -1)  # all that the steps read of it: which rows are real
    for begin, count in zip(offs.tolist(), counts.tolist(), strict=False):
        token[begin : begin + count] = row[begin : begin + count]
    segment = RankPlan(counts, offs, token, token, token)
    recipe = Recipe(wgrad_operands=precision)
    for out, a, b in ((dw2, d, operands.weighted_act), (dw13, operands.d_gate_up, x)):
        if out is not None:
            a, b = steps.wgrad_operands(a, b, segment, recipe)
            steps.wgrad(a, b, segment, out=out if accumulate else out.fill_(float("nan")), accumulate=accumulate)


@dataclasses.dataclass
class Offer:
    """Stands for `backward_offer.Offer`."""

    offs: torch.Tensor
    counts: torch.Tensor
    x: torch.Tensor
    x_scale: torch.Tensor
    dw13: torch.Tensor
    steal_us: float
    is_open: bool = False

    made: ClassVar[int] = 0

    def __post_init__(self) -> None:
        Offer.made += 1


def drain(offered: Offer, operands: Operands, dw2: torch.Tensor | None) -> None:
    assert offered.is_open, "dgrad was not offered it"
    assert operands.x is offered.x and operands.x_scale is offered.x_scale
    weight_gradients(operands, offered.offs, offered.counts, offered.dw13, dw2, precision="fp8")


def install(monkeypatch: pytest.MonkeyPatch) -> cute.CuteBackend:
    """Make backend="cute" run on the CPU with these. The `World`s made are in `World.made`."""
    launch = pytest.importorskip("cute_kernels.launch")
    from cute_kernels import backward_launch, backward_offer, wgrad_launch

    backend = cute.CuteBackend()
    monkeypatch.setitem(cute_backends(), "cute", backend)
    monkeypatch.setattr(cute.CuteBackend, "why_not", lambda self, problem: None)
    monkeypatch.setattr(cute.CuteBackend, "steps", steps)
    monkeypatch.setattr(launch, "LocalWorld", World)
    monkeypatch.setattr(launch, "fused_forward", fused_forward)
    monkeypatch.setattr(backward_launch, "fused_backward", fused_backward)
    monkeypatch.setattr(backward_launch, "prepare_backward_weights", Pair)
    monkeypatch.setattr(wgrad_launch, "weight_gradients", weight_gradients)
    monkeypatch.setattr(backward_offer, "offer", Offer)
    monkeypatch.setattr(backward_offer, "drain", drain)
    stream = SimpleNamespace(cuda_stream=0, wait_event=lambda event: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *a: stream)
    monkeypatch.setattr(torch.cuda, "Event", lambda *a, **k: SimpleNamespace(record=lambda: None))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(cute, "_on", lambda device: contextlib.nullcontext())
    World.made, Offer.made = [], 0
    return backend


def cute_backends() -> dict[str, Any]:
    from megamoe.backends import BACKENDS

    return BACKENDS  # type: ignore[return-value]
