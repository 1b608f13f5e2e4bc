"""The fused backend: the expert-parallel forward as one CuTe-DSL kernel on Hopper, weight gradients in CuTe-DSL."""

from __future__ import annotations

import collections
import dataclasses
import functools
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch

from megamoe import unfused
from megamoe.backends.base import Problem
from megamoe.backends.stepwise import StepwiseBackend
from megamoe.comm.transport import Transport
from megamoe.errors import CapacityError, MegaMoERuntimeError, MegaMoETimeout
from megamoe.quantize import QuantizedRows
from megamoe.recipe import BLOCK, Recipe
from megamoe.routing_plan import RankPlan, RoutingPlan, check_id_values
from megamoe.torch_steps import SwigluGrads
from megamoe.unfused import ExpertWeights, ForwardOptions, Grads, Needs, RowOrder, Saved

SOURCE_SHIFT = 27
"""Row codes: source rank << 27 | token * K + slot."""

KEPT_WORKSPACES = 4
"""Workspaces of different sizes kept for later calls; the one unused for longest goes first."""


class CuteBackend(StepwiseBackend):
    """Fused forward and CuTe-DSL weight gradients; the data gradient runs as Triton steps on the same row order."""

    auto_device = "none until it is measured through the layer"
    saves_codes = True

    def __init__(self) -> None:
        super().__init__("cute", "megamoe.triton_kernels")
        self._workspaces: collections.OrderedDict[tuple[Any, ...], _Shared] = collections.OrderedDict()

    def why_not(self, problem: Problem) -> str | None:
        if importlib.util.find_spec("cute_kernels.launch") is None:
            return "the fused kernel is not part of this version"
        if importlib.util.find_spec("cutlass") is None:
            return "nvidia-cutlass-dsl is not installed; pip install 'megamoe[cute]'"
        if importlib.util.find_spec("triton") is None:
            return "its backward needs triton, which is not installed; pip install 'megamoe[triton]'"
        if problem.device_type != "cuda" or problem.capability is None or problem.capability[0] != 9:
            where = problem.device_type
            if problem.capability is not None:
                where = "compute capability {}.{}".format(*problem.capability)
            return f"it needs a Hopper GPU (compute capability 9.0), not {where}"
        if problem.precision != "fp8":
            return "it has no bf16 kernel yet; bf16 runs on the Triton path"
        if problem.world == "group":
            return "it reaches virtual ranks of one process only; process groups run on the Triton path"
        sizes = {"hidden_size": problem.hidden_size, "intermediate_size": problem.intermediate_size}
        odd = [f"{name} = {size}" for name, size in sizes.items() if size % BLOCK]
        if odd:
            return f"it needs multiples of {BLOCK}, not {', '.join(odd)}"
        from cute_kernels import launch, tile_config

        return launch.why_not(
            tile_config.Problem(
                problem.hidden_size,
                problem.intermediate_size,
                save=True,
                many_experts=problem.num_experts // problem.num_ranks > 128,
            ),
            num_experts=problem.num_experts,
            num_ranks=problem.num_ranks,
            top_k=problem.top_k,
        )

    def prepare(self, weights: ExpertWeights) -> ExpertWeights:
        from cute_kernels.weights import prepare_weights

        w13, w2 = weights.w13, weights.w2
        return dataclasses.replace(weights, fused=prepare_weights(w13.data, w13.scale, w2.data, w2.scale))

    def forward(
        self,
        transport: Transport,
        xs: Sequence[torch.Tensor],
        topk_ids: Sequence[torch.Tensor],
        topk_weights: Sequence[torch.Tensor],
        experts: Sequence[ExpertWeights],
        recipe: Recipe,
        options: ForwardOptions,
    ) -> tuple[list[torch.Tensor], Saved | None]:
        from cute_kernels.launch import fused_forward

        num_local = experts[0].w13.data.shape[0]
        tokens, top_k = [x.shape[0] for x in xs], topk_ids[0].shape[1]
        if options.debug:
            for ids in topk_ids:
                check_id_values(ids, num_local * len(xs))
        if not sum(tokens):
            return _nothing(xs, num_local, experts[0].w2.data.shape[2], top_k, recipe, options)
        rows = options.num_rows or unfused.worst_rows(sum(tokens) * top_k, num_local)
        keeps = options.save in ("pool", "repull")
        # a call that saves gives its pool away: its rows are exactly those promised; others share a roomy workspace
        bound = max(tokens) if options.save != "none" else _next_power(max(tokens))
        key = (xs[0].device, xs[0].shape[1], num_local, len(xs), top_k, bound, rows if options.save != "none" else None)
        shared = self._workspace(key)
        shared.enter()
        results = fused_forward(
            shared.workspaces,
            [x.contiguous() for x in xs],
            list(topk_ids),
            list(topk_weights),
            [mine.fused for mine in experts],
            clamp=recipe.clamp,
            pow2_scales=recipe.scale_format == "pow2",
            save=keeps,
            streams=shared.streams,
        )
        shared.leave()
        if options.debug:
            shared.check()
        outs = [result.out for result in results]
        if options.save == "none":
            return outs, None
        return outs, _saved([r.buffers for r in results], top_k, recipe, options, xs)

    def backward(
        self,
        transport: Transport,
        douts: Sequence[torch.Tensor],
        saved: Saved,
        experts: Sequence[ExpertWeights],
        needs: Needs,
    ) -> Grads:
        assert not isinstance(saved.plan, RoutingPlan)
        plan = plan_of(saved.plan, [dout.shape[0] for dout in douts])
        return unfused.backward(
            self.steps,
            transport,
            douts,
            dataclasses.replace(saved, plan=plan),
            experts,
            needs,
            functools.partial(_weight_grads, self.steps),
        )

    def _workspace(self, key: tuple[Any, ...]) -> _Shared:
        if key in self._workspaces:
            self._workspaces.move_to_end(key)
        else:
            while len(self._workspaces) >= KEPT_WORKSPACES:
                self._workspaces.popitem(last=False)
            self._workspaces[key] = _Shared(*key)
        return self._workspaces[key]

    def release(self) -> None:
        """Free all workspaces. Calls that run must have ended."""
        self._workspaces.clear()


class _Shared:
    """The workspaces of all ranks, which calls of one size share, one after the other."""

    def __init__(
        self,
        device: torch.device,
        hidden: int,
        num_local: int,
        num_ranks: int,
        top_k: int,
        max_tokens: int,
        capacity_rows: int | None,
    ) -> None:
        from cute_kernels.launch import LocalWorld

        with torch.cuda.device(device):
            self._world = LocalWorld(
                num_ranks,
                hidden=hidden,
                num_experts=num_local * num_ranks,
                top_k=top_k,
                max_tokens=max_tokens,
                capacity_rows=capacity_rows,
                device=device,
            )
        self.workspaces = self._world.workspaces
        self.streams = self._world.streams if num_ranks > 1 else None
        self._stream: int | None = None
        self._done = torch.cuda.Event()

    def enter(self) -> None:
        """Wait for the call before, if it ran on another stream."""
        stream = torch.cuda.current_stream()
        if self._stream not in (None, stream.cuda_stream):
            stream.wait_event(self._done)
        self._stream = stream.cuda_stream

    def leave(self) -> None:
        if not torch.cuda.is_current_stream_capturing():
            self._done.record()

    def check(self) -> None:
        """Raise what the calls before recorded. Synchronises."""
        messages = [message for w in self.workspaces if (message := w.error()) is not None]
        if not messages:
            return
        self._world.reset()
        text = "; ".join(messages)
        if "timeout" in text:
            raise MegaMoETimeout(f"forward: {text}. Look for a rank that did not make this call.")
        if "overflow" in text:
            raise CapacityError(f"forward: {text}. Raise the capacity.")
        raise MegaMoERuntimeError(f"forward: {text}.")


def _next_power(n: int) -> int:
    return max(1 << (n - 1).bit_length(), BLOCK)


def _saved(
    buffers: Sequence[Any], top_k: int, recipe: Recipe, options: ForwardOptions, xs: Sequence[torch.Tensor]
) -> Saved:
    """What a fused call left, as the backward takes it."""
    if options.save == "recompute":  # the buffers are the workspace's
        kept = [(b.counts.clone(), b.offs.clone(), b.codes.clone(), b.p.clone()) for b in buffers]
    else:
        kept = [(b.counts, b.offs, b.codes, b.p) for b in buffers]
    return Saved(
        tuple(RowOrder(counts, offs, codes, top_k) for counts, offs, codes, _ in kept),
        recipe,
        [p for *_, p in kept],
        None if options.save == "recompute" else [b.gate_up for b in buffers],
        [QuantizedRows(b.pool, b.pool_s, k_major=True) for b in buffers] if options.save == "pool" else None,
        None if options.save == "pool" else list(xs),
    )


def _nothing(
    xs: Sequence[torch.Tensor], num_local: int, inter: int, top_k: int, recipe: Recipe, options: ForwardOptions
) -> tuple[list[torch.Tensor], Saved | None]:
    """A call without tokens."""
    outs = [torch.empty_like(x) for x in xs]
    if options.save == "none":
        return outs, None
    rows, hidden, like = options.num_rows or 0, xs[0].shape[1], xs[0]
    ints = {"dtype": torch.int32, "device": like.device}
    orders = tuple(
        RowOrder(
            torch.zeros(num_local, **ints), torch.zeros(num_local + 1, **ints), torch.full((rows,), -1, **ints), top_k
        )
        for _ in xs
    )
    pools = [
        QuantizedRows(
            like.new_zeros(rows, hidden, dtype=torch.float8_e4m3fn),
            like.new_zeros(hidden // BLOCK, rows, dtype=torch.float32),
            k_major=True,
        )
        for _ in xs
    ]
    return outs, Saved(
        orders,
        recipe,
        [like.new_zeros(rows, dtype=torch.float32) for _ in xs],
        None if options.save == "recompute" else [like.new_zeros(rows, 2 * inter) for _ in xs],
        pools if options.save == "pool" else None,
        None if options.save == "pool" else list(xs),
    )


def plan_of(orders: Sequence[RowOrder], tokens: Sequence[int]) -> RoutingPlan:
    """The routing plan that row codes stand for; `orders` and `tokens` (T) of each rank. Nothing synchronises."""
    device, top_k = orders[0].codes.device, orders[0].top_k
    owners = [torch.full((t * top_k + 1,), -1, dtype=torch.int32, device=device) for t in tokens]
    rows = [torch.full_like(owner, -1) for owner in owners]
    ranks = []
    for rank, order in enumerate(orders):
        row = torch.arange(order.codes.shape[0], dtype=torch.int32, device=device)
        is_real = (order.codes >= 0) & (row < order.offs[-1])
        codes = torch.where(is_real, order.codes, -1)
        source = codes >> SOURCE_SHIFT  # -1 stays -1
        flat = codes & ((1 << SOURCE_SHIFT) - 1)
        token = torch.where(is_real, flat // top_k, -1)
        slot = torch.where(is_real, flat % top_k, -1)
        ranks.append(RankPlan(order.counts, order.offs, source, token, slot))
        for s, (owner, place) in enumerate(zip(owners, rows, strict=True)):
            spare = owner.shape[0] - 1
            at = torch.where(source == s, flat, spare).long()
            owner[at] = rank
            place[at] = row
    shape = [(t, top_k) for t in tokens]
    trim = lambda values: tuple(v[:-1].view(s) for v, s in zip(values, shape, strict=True))  # noqa: E731
    num_experts = orders[0].counts.shape[0] * len(orders)
    return RoutingPlan(num_experts, tuple(ranks), trim(owners), trim(rows))


def _weight_grads(
    steps: Any,
    segment: RankPlan,
    grads: SwigluGrads,
    pool: QuantizedRows | None,
    d_pool: QuantizedRows,
    dw13: torch.Tensor | None,
    dw2: torch.Tensor | None,
) -> None:
    """The weight gradients of one rank by the k-grouped CuTe-DSL GEMM, BF16 operands."""
    from cute_kernels.wgrad_launch import plan_wgrad, wgrad_bf16

    if segment.num_rows == 0:
        for out in (dw13, dw2):
            if out is not None:
                out.zero_()
        return
    queue = plan_wgrad(segment.offs, segment.counts, segment.num_rows)
    if dw13 is not None:
        assert pool is not None
        wgrad_bf16(grads.d_gate_up_bf16, steps.dequantize(pool), queue, dw13, cursor=1)
    if dw2 is not None:
        wgrad_bf16(steps.dequantize(d_pool), grads.weighted_act, queue, dw2, cursor=0)
