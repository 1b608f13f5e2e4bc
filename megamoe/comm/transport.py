"""Transports: the rows of a call from their tokens to the owners of their experts, and back. One interface, two ways.

`LocalTransport` reads the tensors of all virtual ranks directly; `GroupTransport` sends rows over process groups. Both
give the same bits: those of one rank that holds the whole batch and all experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Protocol

import torch
import torch.distributed as dist

from megamoe.comm.exchange import Exchange, make_exchange
from megamoe.comm.local_world import LocalWorld
from megamoe.comm.wires import Finish, Hierarchy, TensorParallel, agree, check_equal, make_wire
from megamoe.errors import MegaMoEError, MegaMoERuntimeError, MegaMoETypeError, MegaMoEValueError, expected
from megamoe.quantize import QuantizedRows
from megamoe.recipe import BLOCK, Recipe
from megamoe.routing_plan import RoutingPlan, check_topk_ids, experts_per_rank

World = LocalWorld | dist.ProcessGroup | Hierarchy | TensorParallel | None


class Transport(Protocol):
    """Moves rows between ranks. Lists have one entry per rank that lives in this process.

    Attributes:
        num_ranks: R, the owners of experts. local_ranks: which of them live here: all of a LocalWorld, one of a process
            group.
        num_sources: processes or virtual ranks that bring tokens: R, times the lanes of tensor-parallel experts.

    Every rank joins every method, in the same order, also with T = 0 and with experts that receive nothing.
    """

    num_ranks: int
    local_ranks: tuple[int, ...]
    num_sources: int

    def plan(
        self,
        topk_ids: list[torch.Tensor],
        num_experts: int,
        num_rows: int | None = None,
        *,
        alignment: int = BLOCK,
        max_tokens: int | None = None,
        checked: bool = False,
        agreed: Mapping[str, int] | None = None,
        error: Exception | None = None,
    ) -> RoutingPlan:
        """Plan a call from the ids of all ranks.

        Args:
            topk_ids: [T, K] int32 or int64 of each local rank, -1 for no expert; T may differ and be 0.
            num_experts: E over all ranks. num_rows: rows of every pool, None: just enough.
            alignment: rows to which an expert's segment is rounded up.
            max_tokens: tokens of any rank, a bound; with it (and num_rows) shapes are static and nothing synchronises
                with the device; ids outside [0, E) then count as -1. None: sizes are exchanged and read back.
            checked: with max_tokens, exchange sizes and check ids all the same.
            agreed: argument -> value of what else must be equal on all ranks (checked where sizes are exchanged).
            error: what the caller found wrong with this rank's arguments: all ranks then raise.

        Raises:
            MegaMoETypeError, MegaMoEValueError, CapacityError: alike on all ranks, save that ranks whose own arguments
            are right raise MegaMoERuntimeError, which quotes the error of the other. With max_tokens, unchecked, a rank
            raises its error alone: over a process group the others wait for it as long as the group's timeout says.
        """

    def plan_tokens(self, plan: RoutingPlan, num_rows: int | None = None) -> RoutingPlan:
        """The plan with one row per token and rank that owns one of its experts, by (source rank, token), no padding.

        Args:
            plan: with one row per token and expert, from `plan`.
            num_rows: as there; given, nothing synchronises.
        """

    def dispatch_rows(self, rows: list[QuantizedRows], plan: RoutingPlan) -> list[QuantizedRows]:
        """Tokens [T, H] (row-major scales) -> pools [P, H] (k-major scales); padding is zero."""

    def dispatch_weights(self, topk_weights: list[torch.Tensor], plan: RoutingPlan) -> list[torch.Tensor]:
        """fp32 [T, K] -> fp32 [P], 0 in padding."""

    def combine_rows(self, pools: list[torch.Tensor], plan: RoutingPlan) -> list[torch.Tensor]:
        """bf16 [P, H] -> bf16 [T, H]: sums in fp32 over slots ascending, one rounding."""

    def start_combine_rows(self, pools: list[torch.Tensor], plan: RoutingPlan) -> Callable[[], list[torch.Tensor]]:
        """`combine_rows`, begun; what it returns waits for the rest. Work that joins no exchange may run in between."""

    def combine_weight_grads(self, pools: list[torch.Tensor], plan: RoutingPlan) -> list[torch.Tensor]:
        """fp32 [P] -> fp32 [T, K], exactly 0 where a slot has no expert."""


def as_transport(world: World, steps: ModuleType) -> Transport:
    """The transport over `world`: a LocalWorld, a process group (or two of them), or None for one rank alone.

    Args:
        world: who takes part.
        steps: a module with the steps of the layer, such as `megamoe.torch_steps`.

    Raises:
        MegaMoETypeError: world is something else. MegaMoEValueError: this process is not a member of the group.
    """
    if world is None:
        return LocalTransport(LocalWorld(1), steps)
    if isinstance(world, LocalWorld):
        return LocalTransport(world, steps)
    is_foreign = world is dist.GroupMember.NON_GROUP_MEMBER  # what new_group gives to processes left out of it
    if is_foreign or isinstance(world, dist.ProcessGroup | Hierarchy | TensorParallel):
        return GroupTransport(world, steps)
    raise MegaMoETypeError(
        expected("world", "a LocalWorld, a ProcessGroup, a Hierarchy, a TensorParallel or None", type(world).__name__)
    )


class LocalTransport:
    """Virtual ranks of one process: every pool is filled straight from the tensors of all ranks."""

    def __init__(self, world: LocalWorld, steps: ModuleType) -> None:
        self.world, self.steps = world, steps
        self.num_ranks = self.num_sources = world.num_ranks
        self.local_ranks = tuple(range(world.num_ranks))

    def plan(
        self,
        topk_ids: list[torch.Tensor],
        num_experts: int,
        num_rows: int | None = None,
        *,
        alignment: int = BLOCK,
        max_tokens: int | None = None,
        checked: bool = False,
        agreed: Mapping[str, int] | None = None,
        error: Exception | None = None,
    ) -> RoutingPlan:
        if error is not None:
            raise error
        if len(topk_ids) != self.num_ranks:
            raise MegaMoEValueError(
                expected("topk_ids", f"one tensor for each of the {self.num_ranks} ranks", f"{len(topk_ids)}")
            )
        unchecked = {} if max_tokens is None or checked else {"checked": False}
        return self.steps.make_plan(topk_ids, num_experts, alignment=alignment, num_rows=num_rows, **unchecked)

    def plan_tokens(self, plan: RoutingPlan, num_rows: int | None = None) -> RoutingPlan:
        return _plan_tokens(self.steps, plan, num_rows)

    def dispatch_rows(self, rows: list[QuantizedRows], plan: RoutingPlan) -> list[QuantizedRows]:
        return [self.steps.dispatch(rows, mine) for mine in plan.ranks]

    def dispatch_weights(self, topk_weights: list[torch.Tensor], plan: RoutingPlan) -> list[torch.Tensor]:
        return [self.steps.dispatch_weights(topk_weights, mine) for mine in plan.ranks]

    def combine_rows(self, pools: list[torch.Tensor], plan: RoutingPlan) -> list[torch.Tensor]:
        return [self.steps.combine(pools, plan, rank) for rank in self.local_ranks]

    def start_combine_rows(self, pools: list[torch.Tensor], plan: RoutingPlan) -> Callable[[], list[torch.Tensor]]:
        done = self.combine_rows(pools, plan)
        return lambda: done

    def combine_weight_grads(self, pools: list[torch.Tensor], plan: RoutingPlan) -> list[torch.Tensor]:
        return [self.steps.combine_weight_grads(pools, plan, rank) for rank in self.local_ranks]


@dataclasses.dataclass(frozen=True)
class GroupPlan(RoutingPlan):
    """A routing plan together with this process's part in the exchange.

    Attributes:
        exchange: what leaves, what arrives.
        lane_tokens: tokens of [lane][source].
        max_tokens: the bound with which it was planned, None for exact sizes.
    """

    exchange: Exchange
    lane_tokens: list[list[int]]
    max_tokens: int | None


class GroupTransport:
    """Process groups: permute by owner, all-to-all, permute by local expert; the splits swapped on the way back."""

    def __init__(self, group: dist.ProcessGroup | Hierarchy | TensorParallel, steps: ModuleType) -> None:
        self.wire, self.steps = make_wire(group), steps
        self.num_ranks = self.wire.num_ranks
        self.num_sources = self.num_ranks * self.wire.num_lanes
        self.local_ranks: tuple[int, ...] = (self.wire.rank,)

    def plan(
        self,
        topk_ids: list[torch.Tensor],
        num_experts: int,
        num_rows: int | None = None,
        *,
        alignment: int = BLOCK,
        max_tokens: int | None = None,
        checked: bool = False,
        agreed: Mapping[str, int] | None = None,
        error: Exception | None = None,
    ) -> GroupPlan:
        (ids,) = topk_ids
        try:
            check_topk_ids(ids)
            experts_per_rank(num_experts, self.num_ranks)
        except MegaMoEError as found:
            error = error or found
        lane_tokens, unchecked = [], {"checked": False}
        if max_tokens is None or checked:
            lane_tokens, unchecked = self._agree(ids, _facts(num_experts, num_rows, alignment, agreed), error), {}
        elif error is not None:
            raise error
        if max_tokens is not None:
            lane_tokens = [[max_tokens] * self.num_ranks] * self.wire.num_lanes
        padded = ids.new_full((max(map(max, lane_tokens)), ids.shape[1]), -1, dtype=torch.int64)
        padded[: ids.shape[0]] = ids
        everyone = self._gather_ids(padded, is_first=bool(unchecked))
        every_source = [
            torch.cat([everyone[lane, source, : tokens[source]] for lane, tokens in enumerate(lane_tokens)])
            for source in range(self.num_ranks)
        ]
        plan = self.steps.make_plan(every_source, num_experts, alignment=alignment, num_rows=num_rows, **unchecked)
        return self.attach(plan, lane_tokens, max_tokens, ids.shape[1])

    def agree_on_tokens(
        self,
        ids: torch.Tensor,
        num_experts: int,
        num_rows: int | None,
        agreed: Mapping[str, int] | None = None,
        error: Exception | None = None,
    ) -> list[list[int]]:
        """Tokens of [lane][rank]: the first step of `plan`, for callers that plan by themselves; raises as it does."""
        return self._agree(ids, _facts(num_experts, num_rows, BLOCK, agreed), error)

    def _gather_ids(self, ids: torch.Tensor, is_first: bool) -> torch.Tensor:
        """The ids of everyone, [lanes, R, T, K]. `is_first`: nobody has said yet that it comes."""
        try:
            return self.wire.gather(ids)
        except RuntimeError as error:
            if not is_first or isinstance(error, torch.OutOfMemoryError):
                raise
            text = (
                f"group: expected every rank to join the call, got {str(error)[:200]}. Where sizes are fixed a rank "
                "that finds a fault in its arguments raises alone: look for its error. With debug=True, or without "
                "max_tokens_per_rank (num_worst_tokens), all ranks raise it."
            )
            raise MegaMoERuntimeError(text) from error

    def _agree(self, ids: torch.Tensor, facts: dict[str, int], error: Exception | None) -> list[list[int]]:
        """Exchange sizes; refuse together what must be equal and is not."""
        tokens, slots = ids.shape if ids.dim() == 2 else (0, 0)
        facts = {"topk_ids.shape[1]": slots, **facts}
        everyone = agree(self.wire, {"tokens": tokens, **facts}, error, ids.device)
        check_equal(everyone, list(facts))
        return [[theirs["tokens"] for theirs in lane] for lane in everyone]

    def plan_tokens(self, plan: RoutingPlan, num_rows: int | None = None) -> GroupPlan:
        assert isinstance(plan, GroupPlan)
        tokens = _plan_tokens(self.steps, plan, num_rows)
        return self.attach(tokens, plan.lane_tokens, plan.max_tokens, 1)

    def attach(
        self, plan: RoutingPlan, lane_tokens: list[list[int]], max_tokens: int | None, slots_per_owner: int
    ) -> GroupPlan:
        """The plan with this process's exchange.

        Args:
            plan: made from the ids of all ranks.
            lane_tokens, max_tokens: as in GroupPlan.
            slots_per_owner: how many slots of a token may have the same owner.
        """
        pair_rows = None if max_tokens is None else max_tokens * slots_per_owner
        exchange = make_exchange(plan, self.wire, lane_tokens, pair_rows)
        fields = {field.name: getattr(plan, field.name) for field in dataclasses.fields(RoutingPlan)}
        return GroupPlan(**fields, exchange=exchange, lane_tokens=lane_tokens, max_tokens=max_tokens)

    def dispatch_rows(self, rows: list[QuantizedRows], plan: RoutingPlan) -> list[QuantizedRows]:
        (mine,), exchange = rows, exchange_of(plan)
        arrived = QuantizedRows(self.send_tokens(mine.data, plan), None)
        if mine.scale is not None:
            arrived = QuantizedRows(arrived.data, self.send_tokens(mine.scale, plan))
        if exchange.in_order:
            return [_into_pool(arrived, exchange.pool_plan.num_rows)]
        return [self.steps.dispatch([arrived], exchange.pool_plan)]

    def dispatch_weights(self, topk_weights: list[torch.Tensor], plan: RoutingPlan) -> list[torch.Tensor]:
        (mine,) = topk_weights
        return [self.steps.dispatch_weights([self.send_slots(mine, plan)[:, None]], exchange_of(plan).pool_plan)]

    def combine_rows(self, pools: list[torch.Tensor], plan: RoutingPlan) -> list[torch.Tensor]:
        return self.start_combine_rows(pools, plan)()

    def start_combine_rows(self, pools: list[torch.Tensor], plan: RoutingPlan) -> Callable[[], list[torch.Tensor]]:
        home = self._start_back(pools[0], exchange_of(plan))
        return lambda: [self.steps.combine([home()], exchange_of(plan).home_plan, 0)]

    def combine_weight_grads(self, pools: list[torch.Tensor], plan: RoutingPlan) -> list[torch.Tensor]:
        home = self._start_back(pools[0], exchange_of(plan))()
        return [self.steps.combine_weight_grads([home], exchange_of(plan).home_plan, 0)]

    def send_tokens(self, rows: torch.Tensor, plan: RoutingPlan) -> torch.Tensor:
        """[T, ...] -> [N, ...]: a row for each slot that has its expert here, as they arrive: by (source, pool row)."""
        exchange = exchange_of(plan)
        return self._forth(rows, exchange.sent_slot // exchange.home_plan.owner[0].shape[1], exchange)

    def send_slots(self, values: torch.Tensor, plan: RoutingPlan) -> torch.Tensor:
        """[T, K] -> [N], likewise."""
        exchange = exchange_of(plan)
        return self._forth(values.flatten(), exchange.sent_slot, exchange)

    def start_combine_arrivals(self, rows: torch.Tensor, plan: RoutingPlan) -> Finish:
        """bf16 [N, H], a row for each that arrived -> bf16 [T, H], begun; sums as in `combine_rows`."""
        exchange = exchange_of(plan)
        home = self.wire.start_back(rows, exchange.counts)
        return lambda: self.steps.combine([home()], exchange.home_plan, 0)

    def combine_arrival_grads(self, values: torch.Tensor, plan: RoutingPlan) -> torch.Tensor:
        """fp32 [N] -> fp32 [T, K], as `combine_weight_grads`."""
        exchange = exchange_of(plan)
        home = self.wire.start_back(values, exchange.counts)()
        return self.steps.combine_weight_grads([home], exchange.home_plan, 0)

    def _forth(self, rows: torch.Tensor, index: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        if rows.shape[0] == 0 and index.shape[0]:  # static shapes: rows that nobody reads leave all the same
            rows = rows.new_zeros(1, *rows.shape[1:])
        return self.wire.forth(_take(rows, index), exchange.counts)

    def _start_back(self, pool: torch.Tensor, exchange: Exchange) -> Finish:
        rows = pool[: exchange.pool_row.shape[0]] if exchange.in_order else _take(pool, exchange.pool_row)
        return self.wire.start_back(rows, exchange.counts)


def _facts(num_experts: int, num_rows: int | None, alignment: int, agreed: Mapping[str, int] | None) -> dict[str, int]:
    """What must be equal on all ranks of a plan, as numbers."""
    rows = -1 if num_rows is None else num_rows
    return {"num_experts": num_experts, "num_rows": rows, "alignment": alignment, **(agreed or {})}


def layer_facts(hidden_size: int = 0, recipe: Recipe | None = None) -> dict[str, int]:
    """What else must be equal on all ranks of a layer's call, for `agreed`; without arguments, of one with an error."""
    recipe = recipe or Recipe()
    return {
        "hidden_size": hidden_size,
        "recipe.precision, bits": 16 if recipe.precision == "bf16" else 8,
        "recipe.scale_format == 'pow2'": int(recipe.scale_format == "pow2"),
        "recipe.clamp * 1024": -1 if recipe.clamp is None else round(recipe.clamp * 1024),
    }


def _plan_tokens(steps: ModuleType, plan: RoutingPlan, num_rows: int | None) -> RoutingPlan:
    """With the ranks in the place of experts: each token names every rank that owns one of its experts, once."""
    ranks = plan.num_ranks
    ids = []
    for owner in plan.owner:
        named = owner.new_full((owner.shape[0], ranks + 1), -1)
        ids.append(named.scatter_(1, torch.where(owner >= 0, owner, ranks).long(), owner)[:, :ranks])
    return steps.make_plan(ids, ranks, alignment=1, num_rows=num_rows, checked=num_rows is None)


def exchange_of(plan: RoutingPlan) -> Exchange:
    """This process's part in the exchange of a plan that a `GroupTransport` made."""
    assert isinstance(plan, GroupPlan), "plans of a GroupTransport come from its own methods"
    return plan.exchange


def _take(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """rows[index] for every dtype, fp8 as bytes."""
    if rows.element_size() == 1:
        return rows.view(torch.uint8)[index].view(rows.dtype)
    return rows[index]


def _into_pool(arrived: QuantizedRows, num_rows: int) -> QuantizedRows:
    """Rows that lie in the pool's order, padded to it; scales k-major."""
    data, scale = _padded(arrived.data, num_rows), None
    if arrived.scale is not None:
        scale = _padded(arrived.scale, num_rows).t().contiguous()
    return QuantizedRows(data, scale, k_major=True)


def _padded(rows: torch.Tensor, num_rows: int) -> torch.Tensor:
    if rows.shape[0] == num_rows:
        return rows
    padded = torch.zeros(num_rows, *rows.shape[1:], dtype=rows.dtype, device=rows.device)
    padded[: rows.shape[0]] = rows
    return padded
