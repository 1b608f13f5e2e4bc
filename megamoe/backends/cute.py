"""The fused backend: the expert-parallel forward as one CuTe-DSL kernel on Hopper, weight gradients in CuTe-DSL."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch

from megamoe import unfused
from megamoe.backends.base import Backend, Problem
from megamoe.backends.cute_groups import GroupWorkspaces
from megamoe.backends.cute_packing import CutePacking
from megamoe.backends.cute_shared import SOURCE_SHIFT, Shared, check_tokens, oldest_to_drop, watchdog
from megamoe.backends.stepwise import StepwiseBackend
from megamoe.comm.transport import GroupTransport, Transport
from megamoe.deferred import WeightJob
from megamoe.overlap import OverlapConfig
from megamoe.quantize import QuantizedRows, QuantizedWeight
from megamoe.recipe import BLOCK, Recipe
from megamoe.routing_plan import RankPlan, RoutingPlan, check_id_values
from megamoe.unfused import ExpertWeights, ForwardOptions, Grads, Needs, RowOrder, Saved
from megamoe.weights import Packing

KEPT_WORKSPACES = 4
"""Workspaces of different sizes kept for later calls; the one unused for longest goes first, those of graphs never."""


class CuteBackend(StepwiseBackend):
    """Fused forward, fused data gradient, CuTe-DSL weight gradients. Triton quantises the weights."""

    auto_device: str | None = "cuda"
    saves_codes = True
    is_fused = True
    packing: Packing | None = CutePacking()

    def __init__(self) -> None:
        super().__init__("cute", "megamoe.triton_kernels")
        self._workspaces: collections.OrderedDict[tuple[Any, ...], Shared] = collections.OrderedDict()
        self.groups = GroupWorkspaces()

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
        if problem.world == "group" and problem.transport == "symmetric" and problem.reach:
            return f"symmetric memory cannot join these ranks: {problem.reach}; transport='nccl' can"
        sizes = {"hidden_size": problem.hidden_size, "intermediate_size": problem.intermediate_size}
        odd = [f"{name} = {size}" for name, size in sizes.items() if size % BLOCK]
        if odd:
            return f"it needs multiples of {BLOCK}, not {', '.join(odd)}"
        from cute_kernels import launch, tile_config

        num_local = problem.num_experts // problem.num_ranks
        is_alone = _is_exchange(problem)  # the kernel then sees this rank's experts only, and rows in place of slots
        return launch.why_not(
            tile_config.Problem(
                problem.hidden_size, problem.intermediate_size, save=True, many_experts=num_local > 128
            ),
            num_experts=num_local if is_alone else problem.num_experts,
            num_ranks=1 if is_alone else problem.num_ranks,
            top_k=1 if is_alone else problem.top_k,
        )

    def variant(self, problem: Problem) -> Backend:
        return self.exchange if _is_exchange(problem) else self

    @functools.cached_property
    def exchange(self) -> Backend:
        """The kernels between all-to-alls."""
        from megamoe.backends.cute_exchange import ExchangeBackend

        return ExchangeBackend()

    def quantize_experts(
        self, w13: torch.Tensor, w2: torch.Tensor, recipe: Recipe, transposed: bool
    ) -> ExpertWeights | None:
        from cute_kernels import weight_launch

        if not (w13.is_cuda and {w13.dtype, w2.dtype} <= set(weight_launch.SOURCES)):
            return None
        pow2 = recipe.scale_format == "pow2"
        fused, fused_t = weight_launch.quantize_experts(w13, w2, pow2=pow2, transposed=transposed)
        nothing = w13.new_empty((1, 1, 1), dtype=torch.float8_e4m3fn)  # of plain copies only the shapes are read
        plain_13 = QuantizedWeight(nothing.expand(w13.shape), None, 2)
        return ExpertWeights(plain_13, QuantizedWeight(nothing.expand(w2.shape), None), fused=fused, fused_t=fused_t)

    def prepare(self, weights: ExpertWeights) -> ExpertWeights:
        from cute_kernels.backward_launch import prepare_backward_weights
        from cute_kernels.weights import prepare_weights

        w13, w2, w13_t, w2_t = weights.w13, weights.w2, weights.w13_t, weights.w2_t
        assert w13.scale is not None and w2.scale is not None
        fused = prepare_weights(w13.data, w13.scale, w2.data, w2.scale)
        fused_t = None
        if w13_t is not None and w2_t is not None:
            assert w13_t.scale is not None and w2_t.scale is not None
            fused_t = prepare_backward_weights(w13_t.data, w13_t.scale, w2_t.data, w2_t.scale)
        return dataclasses.replace(weights, fused=fused, fused_t=fused_t)

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

        num_local, top_k = experts[0].w13.data.shape[0], topk_ids[0].shape[1]
        saves = options.save != "none"
        if isinstance(transport, GroupTransport):
            shared = self.groups.for_forward(transport, xs[0], topk_ids[0], num_local, recipe, options)
        else:
            if options.debug:
                for ids in topk_ids:
                    check_id_values(ids, num_local * transport.num_ranks)
            tokens = [x.shape[0] for x in xs]
            if not sum(tokens):
                return _nothing(xs, num_local, experts[0].w2.data.shape[2], top_k, recipe, options)
            rows = options.num_rows or unfused.worst_rows(sum(tokens) * top_k, num_local)
            # a call that saves gives its pool away: its rows are exactly those promised; others share a roomy workspace
            most = max(tokens) if saves else _next_power(max(tokens))
            shared = self._workspace(xs, num_local, top_k, most, rows * saves, options.overlap.reserve_sms)
        with shared.call():
            results = fused_forward(
                shared.workspaces,
                list(xs),
                list(topk_ids),
                list(topk_weights),
                [mine.fused for mine in experts],
                clamp=recipe.clamp,
                pow2_scales=recipe.scale_format == "pow2",
                save=options.save in ("pool", "repull"),
                streams=shared.streams,
                **tiling(options.overlap),
            )
        if options.debug:
            shared.check()
        outs = [result.out for result in results]
        if not saves:
            return outs, None
        return outs, _saved([r.buffers for r in results], top_k, recipe, options, xs, topk_ids)

    def backward(
        self,
        transport: Transport,
        douts: Sequence[torch.Tensor],
        saved: Saved,
        experts: Sequence[ExpertWeights],
        needs: Needs,
    ) -> Grads:
        from cute_kernels.backward_launch import fused_backward

        orders, topk_ids, recipe = saved.plan, saved.topk_ids, saved.recipe
        assert not isinstance(orders, RoutingPlan) and topk_ids is not None
        if isinstance(transport, GroupTransport):
            shared = self.groups.for_backward(transport, douts[0], orders[0], needs.overlap)
        else:
            tokens, num_local = [dout.shape[0] for dout in douts], orders[0].counts.shape[0]
            if not sum(tokens):
                return _no_gradients(douts, orders[0].top_k, needs)
            sizes = (num_local, orders[0].top_k, max(tokens), orders[0].codes.shape[0], needs.overlap.reserve_sms)
            shared = self._workspace(douts, *sizes)
        rounding: dict[str, Any] = {"clamp": recipe.clamp, "pow2_scales": recipe.scale_format == "pow2"}
        chosen = rounding | tiling(needs.overlap)
        pools, gate_ups = saved.pools, saved.gate_ups
        # what a process needs does not decide what it launches: the ranks of others wait for it
        needs_pools = needs.wants_w13 or isinstance(transport, GroupTransport)
        with shared.call():
            if gate_ups is None or (pools is None and needs_pools):
                pools, gate_ups = self._recompute(shared, saved, experts, chosen)
            rows = [
                Rows(order.codes, p, order.offs, order.counts, gate_up)
                for order, p, gate_up in zip(orders, saved.weights, gate_ups, strict=True)
            ]
            offers = _offers(transport, needs, recipe, orders, pools)
            if offers:
                chosen["steals"] = offers
            results = fused_backward(
                shared.workspaces,
                list(douts),
                topk_ids,
                rows,
                [mine.fused_t for mine in experts],
                streams=shared.streams,
                **chosen,
            )
            for i, (order, result) in enumerate(zip(orders, results, strict=True)):
                x_pool = None if pools is None else pools[i]
                if offers:
                    needs.hand(i, functools.partial(_drain, offers[i], result, x_pool))
                else:
                    needs.hand(i, self._weight_job(needs, recipe, order, result, x_pool))
        if needs.debug:
            shared.check()
        return Grads([r.dx for r in results], [r.dp for r in results], needs.w13, needs.w2)

    def _recompute(
        self, shared: Shared, saved: Saved, experts: Sequence[ExpertWeights], chosen: dict[str, Any]
    ) -> tuple[list[QuantizedRows], list[torch.Tensor]]:
        """Pools and gate/up of a forward that did not keep both: the forward once more, its row order given."""
        from cute_kernels.launch import fused_forward

        assert saved.xs is not None and saved.topk_ids is not None and not isinstance(saved.plan, RoutingPlan)
        given: Any = [  # only these of the fields of Buffers are read
            Rows(order.codes, p, order.offs, order.counts, p)
            for order, p in zip(saved.plan, saved.weights, strict=True)
        ]
        again = fused_forward(
            shared.workspaces,
            saved.xs,
            saved.topk_ids,
            [ids.new_zeros(ids.shape, dtype=torch.float32) for ids in saved.topk_ids],  # those of the plan are used
            [mine.fused for mine in experts],
            save=True,
            plans=given,
            streams=shared.streams,
            **chosen,
        )
        buffers = [result.buffers for result in again]
        return [QuantizedRows(b.pool, b.pool_s, k_major=True) for b in buffers], [b.gate_up for b in buffers]

    def _weight_job(
        self, needs: Needs, recipe: Recipe, order: RowOrder, result: Any, x_pool: QuantizedRows | None
    ) -> WeightJob:
        """The weight gradients of one rank, for `Needs.hand`."""
        is_beside = needs.later is not None and needs.later.is_beside  # CTAs that end soon give their SMs to others
        grid = {"tasks_per_cta": 1} if is_beside else {}
        return functools.partial(self._weight_grads, recipe, grid, order, result, x_pool)

    def _weight_grads(
        self,
        recipe: Recipe,
        grid: dict[str, Any],
        order: RowOrder,
        result: Any,
        x_pool: QuantizedRows | None,
        dw13: torch.Tensor | None,
        dw2: torch.Tensor | None,
        accumulate: bool,
    ) -> None:
        """The weight gradients of one rank by the k-grouped CuTe-DSL GEMMs, from what forward and dgrad left."""
        from cute_kernels.wgrad_launch import weight_gradients

        if dw13 is None and dw2 is None:
            return
        d_pool = QuantizedRows(result.pool, result.pool_s, k_major=True)
        x_pool = d_pool if x_pool is None else x_pool  # not read: dW13 is not wanted
        operands = result.operands(x_pool.data, x_pool.scale)
        precision = recipe.wgrad_operands
        compute: Any = functools.partial(weight_gradients, precision=precision, accumulate=accumulate, **grid)
        segments = (order.offs, order.counts)
        if precision != "bf16":
            compute(operands, *segments, dw13, dw2)
            return
        # one after the other: a dequantised operand is the largest tensor of a backward
        if dw2 is not None:
            given = dataclasses.replace(operands, d=self.steps.dequantize(d_pool), d_scale=None)
            compute(given, *segments, None, dw2)
            del given
        if dw13 is not None:
            given = dataclasses.replace(operands, x=self.steps.dequantize(x_pool), x_scale=None)
            compute(given, *segments, dw13, None)

    def _workspace(
        self,
        tensors: Sequence[torch.Tensor],
        num_local: int,
        top_k: int,
        max_tokens: int,
        rows: int,
        reserve_sms: int,
    ) -> Shared:
        """That of calls with tokens like these; `rows` of a pool, 0: enough for any routing."""
        sizes = (num_local, len(tensors), top_k, max_tokens, rows or None, reserve_sms)
        key = (tensors[0].device, tensors[0].shape[1], *sizes)
        if key in self._workspaces:
            self._workspaces.move_to_end(key)
        else:
            oldest = oldest_to_drop(self._workspaces, KEPT_WORKSPACES)
            if oldest is not None:
                self._workspaces.pop(oldest).retire()
            self._workspaces[key] = Shared(_local_world(*key))
        return self._workspaces[key]

    def release(self) -> None:
        """Free all workspaces of ranks in this process. Calls that run must have ended."""
        self._workspaces.clear()
        if "exchange" in vars(self):
            self.exchange.release()  # type: ignore[attr-defined]


def _offers(
    transport: Transport,
    needs: Needs,
    recipe: Recipe,
    orders: Sequence[RowOrder],
    pools: Sequence[QuantizedRows] | None,
) -> list[Any]:
    """What dgrad may take of each local rank's dW13 while dx is on its way; empty: nothing.

    Only of gradients that are due now: nothing older adds to these tensors, and nobody else writes to them.
    """
    steal_us = needs.overlap.steal_us
    if not steal_us or transport.num_ranks == 1 or needs.later is not None or recipe.wgrad_operands != "fp8":
        return []
    if needs.w13 is None or pools is None:
        return []
    from cute_kernels.backward_offer import offer

    offers = []
    for order, pool, dw13 in zip(orders, pools, needs.w13, strict=True):
        assert pool.scale is not None
        offers.append(offer(order.offs, order.counts, pool.data, pool.scale, dw13, steal_us))
    return offers


def _drain(
    offered: Any,
    result: Any,
    x_pool: QuantizedRows | None,
    dw13: torch.Tensor | None,
    dw2: torch.Tensor | None,
    accumulate: bool,
) -> None:
    """A weight job: what dgrad has left of dW13, which it was offered, and dW2."""
    from cute_kernels.backward_offer import drain

    assert x_pool is not None and dw13 is offered.dw13 and not accumulate
    drain(offered, result.operands(x_pool.data, x_pool.scale), dw2)


@dataclasses.dataclass
class Rows:
    """What a rank's fused call takes of an earlier one: `cute_kernels.backward_launch.SavedRows`."""

    codes: torch.Tensor
    p: torch.Tensor
    offs: torch.Tensor
    counts: torch.Tensor
    gate_up: torch.Tensor


def _local_world(
    device: torch.device,
    hidden: int,
    num_local: int,
    num_ranks: int,
    top_k: int,
    max_tokens: int,
    capacity_rows: int | None,
    reserve_sms: int,
) -> Any:
    from cute_kernels.launch import LocalWorld

    check_tokens(max_tokens, top_k)
    with _on(device):
        return LocalWorld(
            num_ranks,
            hidden=hidden,
            num_experts=num_local * num_ranks,
            top_k=top_k,
            max_tokens=max_tokens,
            capacity_rows=capacity_rows,
            device=device,
            **({"reserve_sms": reserve_sms} if reserve_sms else {}),
        )


def tiling(overlap: OverlapConfig) -> dict[str, Any]:
    """The arguments of a fused call for its tiling and its longest wait, where these are not the defaults."""
    from cute_kernels.tile_config import TileConfig

    chosen: dict[str, Any] = overlap.tiling
    found: dict[str, Any] = {"config": TileConfig(**chosen)} if chosen else {}
    return found | watchdog()


def _is_exchange(problem: Problem) -> bool:
    """Whether the kernels run between all-to-alls rather than over the memory of all ranks."""
    return problem.world == "group" and (problem.transport == "nccl" or bool(problem.reach))


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(device)


def _next_power(n: int) -> int:
    return max(1 << (n - 1).bit_length(), BLOCK)


def _saved(
    buffers: Sequence[Any],
    top_k: int,
    recipe: Recipe,
    options: ForwardOptions,
    xs: Sequence[torch.Tensor],
    topk_ids: Sequence[torch.Tensor],
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
        list(topk_ids),
    )


def _nothing(
    xs: Sequence[torch.Tensor], num_local: int, inter: int, top_k: int, recipe: Recipe, options: ForwardOptions
) -> tuple[list[torch.Tensor], Saved | None]:
    """A call without tokens."""
    outs = [torch.empty_like(x) for x in xs]
    if options.save == "none":
        return outs, None
    rows, hidden = options.num_rows or 0, xs[0].shape[1]

    def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=xs[0].device)

    def order() -> RowOrder:
        counts, offs = zeros(num_local, dtype=torch.int32), zeros(num_local + 1, dtype=torch.int32)
        return RowOrder(counts, offs, zeros(rows, dtype=torch.int32) - 1, top_k)

    def pool() -> QuantizedRows:
        scale = zeros(hidden // BLOCK, rows, dtype=torch.float32)
        return QuantizedRows(zeros(rows, hidden, dtype=torch.float8_e4m3fn), scale, k_major=True)

    has_gate_up, has_pool = options.save != "recompute", options.save == "pool"
    return outs, Saved(
        tuple(order() for _ in xs),
        recipe,
        [zeros(rows, dtype=torch.float32) for _ in xs],
        [zeros(rows, 2 * inter, dtype=torch.bfloat16) for _ in xs] if has_gate_up else None,
        [pool() for _ in xs] if has_pool else None,
        None if has_pool else list(xs),
    )


def _no_gradients(douts: Sequence[torch.Tensor], top_k: int, needs: Needs) -> Grads:
    """The backward of a call without tokens."""
    for i in range(len(douts)):
        needs.hand(i, _zero)
    dp = [dout.new_empty(0, top_k, dtype=torch.float32) for dout in douts]
    return Grads([torch.empty_like(dout) for dout in douts], dp, needs.w13, needs.w2)


def _zero(dw13: torch.Tensor | None, dw2: torch.Tensor | None, accumulate: bool) -> None:
    """The weight gradients of a rank without rows."""
    for out in (dw13, dw2):
        if out is not None and not accumulate:
            out.zero_()


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
