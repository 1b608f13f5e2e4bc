"""The fused kernels between all-to-alls: ranks that share no memory, of any process group or hierarchy of groups.

What arrives here is, to the kernels, the tokens of one rank with one expert each; they sort, multiply and un-sort it as
ever. Rows travel as bf16 both ways and are quantised by the kernel: every bit is that of ranks that share memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from megamoe.backends.cute import CuteBackend, Rows, tiling
from megamoe.backends.cute_shared import Shared
from megamoe.comm.exchange import Exchange
from megamoe.comm.transport import GroupTransport, Transport, exchange_of
from megamoe.overlap import OverlapConfig
from megamoe.quantize import QuantizedRows, ceil_div
from megamoe.recipe import BLOCK, Recipe
from megamoe.routing_plan import RoutingPlan
from megamoe.unfused import ExpertWeights, ForwardOptions, Grads, Needs, RowOrder, Saved, plan_call


class ExchangeBackend(CuteBackend):
    """`CuteBackend` over a `GroupTransport` whose ranks are reached by all-to-alls alone. It saves the plan of a call.

    Weight gradients run between the start and the end of the exchange that brings dx home.
    """

    saves_codes = False

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
        assert isinstance(transport, GroupTransport)
        num_experts = experts[0].w13.data.shape[0] * transport.num_ranks
        plan = plan_call(transport, topk_ids, num_experts, xs[0].shape[1], recipe, options)
        arrived = transport.send_tokens(xs[0], plan)
        p = transport.send_slots(topk_weights[0], plan)
        here = Here(exchange_of(plan))
        saves = options.save in ("pool", "repull")
        out, buffers = self.forward_here(here, arrived, p[:, None], experts[0], Choices(recipe, options.overlap), saves)
        outs = [transport.start_combine_arrivals(out, plan)()[: xs[0].shape[0]]]
        if options.save == "none":
            return outs, None
        rows = plan.ranks[transport.local_ranks[0]].num_rows
        weights = buffers.p[:rows] if saves else buffers.p[:rows].clone()  # without gate/up they are the workspace's
        saved = Saved(
            plan,
            recipe,
            [weights],
            [buffers.gate_up[:rows]] if saves else None,
            [_pool_of(buffers, rows)] if options.save == "pool" else None,
            None if options.save == "pool" else list(xs),
        )
        return outs, saved

    def backward(
        self,
        transport: Transport,
        douts: Sequence[torch.Tensor],
        saved: Saved,
        experts: Sequence[ExpertWeights],
        needs: Needs,
    ) -> Grads:
        plan, recipe, tokens = saved.plan, saved.recipe, douts[0].shape[0]
        choices = Choices(recipe, needs.overlap)
        assert isinstance(transport, GroupTransport) and isinstance(plan, RoutingPlan)
        here = Here(exchange_of(plan))
        d_arrived = transport.send_tokens(douts[0], plan)
        pool = None if saved.pools is None else saved.pools[0]
        gate_up = None if saved.gate_ups is None else saved.gate_ups[0]
        p = saved.weights[0]
        if saved.xs is not None:  # what was not kept travels again, on all ranks alike
            if gate_up is None:
                arrived = transport.send_tokens(saved.xs[0], plan)
                unread = torch.zeros_like(here.ids, dtype=torch.float32)  # p of the row order are used
                _, again = self.forward_here(here, arrived, unread, experts[0], choices, True, p)
                pool, gate_up = _pool_of(again, here.num_rows), again.gate_up
            else:
                (pool,) = transport.dispatch_rows([self.steps.quantize_rows(saved.xs[0], recipe)], plan)
        if pool is not None and not pool.data.shape[0]:
            pool = None  # without rows, those of dout do
        assert gate_up is not None
        rows = here.rows(p, gate_up)
        result = self._backward(here, d_arrived, rows, experts[0], choices)
        num_arrived = d_arrived.shape[0]
        finish = transport.start_combine_arrivals(result.dx[:num_arrived], plan)
        order = RowOrder(rows.counts, rows.offs, rows.codes, 1)
        needs.hand(0, self._weight_job(needs, recipe, order, result, pool))
        dx = finish()[:tokens]
        dp = transport.combine_arrival_grads(result.dp.flatten()[:num_arrived], plan)[:tokens]
        return Grads([dx], [dp], needs.w13, needs.w2)

    def forward_here(
        self,
        here: Here,
        arrived: torch.Tensor,
        p: torch.Tensor,
        experts: ExpertWeights,
        choices: Choices,
        saves: bool,
        given: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Any]:
        """(rows of y in the order of arrival, the buffers of the call); with `given`, the p of a row order known."""
        from cute_kernels.launch import fused_forward

        shared = self._shared(here, arrived, choices)
        plans: Any = None if given is None else [here.rows(given, given)]
        with shared.call():
            (result,) = fused_forward(
                shared.workspaces,
                [_at_least_one(arrived)],
                [here.ids],
                [_at_least_one(p)],
                [experts.fused],
                **choices.arguments(),
                save=saves,
                plans=plans,
            )
        return result.out[: arrived.shape[0]], result.buffers

    def _shared(self, here: Here, arrived: torch.Tensor, choices: Choices) -> Shared:
        sizes = (here.num_local, 1, here.ids.shape[0], here.num_rows, choices.overlap.reserve_sms)
        return self._workspace([arrived], *sizes)

    def _backward(self, here: Here, arrived: torch.Tensor, rows: Rows, experts: ExpertWeights, choices: Choices) -> Any:
        from cute_kernels.backward_launch import fused_backward

        shared = self._shared(here, arrived, choices)
        with shared.call():
            (result,) = fused_backward(
                shared.workspaces,
                [_at_least_one(arrived)],
                [here.ids],
                [rows],
                [experts.fused_t],
                **choices.arguments(),
            )
        return result


@dataclasses.dataclass(frozen=True)
class Choices:
    """How the kernels of a call round and run."""

    recipe: Recipe
    overlap: OverlapConfig

    def arguments(self) -> dict[str, Any]:
        """For a fused call."""
        rounding = {"clamp": self.recipe.clamp, "pow2_scales": self.recipe.scale_format == "pow2"}
        return rounding | tiling(self.overlap)


class Here:
    """What arrives at this process, as the call of one rank with one slot a token.

    Attributes:
        ids: int32 [N, 1], local experts, -1 where nothing arrives; N >= 1.
        num_local: E_l. num_rows: P, a positive multiple of 128.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._plan = exchange.pool_plan
        self.ids = _at_least_one(exchange.expert_of_arrival()[:, None], -1)
        self.num_local = self._plan.counts.shape[0]
        self.num_rows = max(ceil_div(self._plan.num_rows, BLOCK), 1) * BLOCK

    def rows(self, p: torch.Tensor, gate_up: torch.Tensor) -> Rows:
        """The row order of such a call: the code of a row is its arrival."""
        return Rows(
            self._padded(self._plan.token, -1),
            self._padded(p, 0),
            self._plan.offs,
            self._plan.counts,
            self._padded(gate_up, 0),
        )

    def _padded(self, rows: torch.Tensor, fill: int) -> torch.Tensor:
        """At least one block of rows, where the plan has none."""
        if rows.shape[0] == self.num_rows:
            return rows
        return rows.new_full((self.num_rows, *rows.shape[1:]), fill)


def _pool_of(buffers: Any, num_rows: int) -> QuantizedRows:
    return QuantizedRows(buffers.pool[:num_rows], buffers.pool_s[:, :num_rows], k_major=True)


def _at_least_one(rows: torch.Tensor, fill: int = 0) -> torch.Tensor:
    """Contiguous rows, one that stands for nothing where there are none."""
    return rows.contiguous() if rows.shape[0] else rows.new_full((1, *rows.shape[1:]), fill)
