"""The exchange of a process under a routing plan: which rows leave in which order, and where arrivals belong."""

from __future__ import annotations

import dataclasses

import torch

from megamoe.comm.wires import Counts, Wire
from megamoe.routing_plan import RankPlan, RoutingPlan


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Indices and splits; everything follows from the plan.

    Attributes:
        counts: rows from whom to whom, [lane][source][owner]; host integers.
        sent_slot: int64 [N_sent], the flat slot (token * K + slot) of each departing row, by (owner, row at the owner).
        pool_row: int64 [N_received], the pool row of each arrival, by (lane, source, pool row).
        in_order: arrivals lie in the pool's order already, as with one local expert: no permutation is needed.
        pool_plan: the arrivals, seen as one source with one slot per token, into the pool.
        home_plan: the rows that came back, seen as one rank's pool, to this process's slots [T, K].
    """

    counts: Counts
    sent_slot: torch.Tensor
    pool_row: torch.Tensor
    in_order: bool
    pool_plan: RankPlan
    home_plan: RoutingPlan

    @property
    def arrival_of_row(self) -> torch.Tensor:
        """int32 [P]: which arrival each pool row is, -1 in padding."""
        return self.pool_plan.token

    def expert_of_arrival(self) -> torch.Tensor:
        """int32 [N_received]: the local expert of each arrival, -1 for those that are no rows."""
        arrival = self.arrival_of_row.long()
        row = torch.arange(arrival.shape[0], device=arrival.device)
        expert = torch.searchsorted(self.pool_plan.offs[1:].long(), row, right=True).int()
        spare = self.pool_row.shape[0]  # where padding goes
        experts = torch.full((spare + 1,), -1, dtype=torch.int32, device=arrival.device)
        is_row = arrival >= 0
        return experts.scatter_(0, torch.where(is_row, arrival, spare), torch.where(is_row, expert, -1))[:-1]


def make_exchange(plan: RoutingPlan, wire: Wire, lane_tokens: list[list[int]], pair_rows: int | None) -> Exchange:
    """Derive the exchange of this process.

    Args:
        plan: of the call, with R sources; the tokens of a source are those of its lanes, one lane after the other.
        wire: over which the rows travel.
        lane_tokens: tokens of [lane][source].
        pair_rows: rows that travel between any two processes, a bound; None: as many as there are (one read-back).

    Returns:
        The exchange.
    """
    me, lane, device = wire.rank, wire.lane, plan.owner[wire.rank].device
    mine, ranks = plan.ranks[me], wire.num_ranks

    begin = sum(of_lane[me] for of_lane in lane_tokens[:lane])
    tokens = slice(begin, begin + lane_tokens[lane][me])
    owner, row = plan.owner[me][tokens], plan.row[me][tokens]
    group = torch.where(owner >= 0, owner, ranks).flatten().long()
    home, sent_counts = _positions(group, row.flatten().long(), ranks, pair_rows)

    source = mine.source_rank.long()
    of_lane = _lane_of(mine, lane_tokens, pair_rows is not None) if wire.num_lanes > 1 else 0
    senders = wire.num_lanes * ranks
    group = torch.where(source >= 0, of_lane * ranks + source, senders)
    arrival, received_counts = _positions(group, torch.arange(mine.num_rows, device=device), senders, pair_rows)

    if pair_rows is None:
        counts = _count_pairs(plan, lane_tokens)
        sent, received = sum(counts[lane][me]), sum(row[me] for of_lane in counts for row in of_lane)
    else:
        counts = [[[pair_rows] * ranks] * ranks] * wire.num_lanes
        sent, received = ranks * pair_rows, senders * pair_rows
    one_slot = torch.where(source >= 0, 0, -1).int()
    pool_plan = RankPlan(mine.counts, mine.offs, one_slot, arrival.int(), one_slot)
    home_plan = RoutingPlan(
        plan.num_experts, (pool_plan,), (torch.where(owner >= 0, 0, -1).int(),), (home.view(owner.shape).int(),)
    )
    in_order = mine.counts.shape[0] == 1 and wire.num_lanes == 1 and pair_rows is None
    return Exchange(counts, _inverse(home, sent), _inverse(arrival, received), in_order, pool_plan, home_plan)


def _lane_of(mine: RankPlan, lane_tokens: list[list[int]], is_static: bool) -> torch.Tensor:
    """Which lane of its source each pool row comes from, int64 [P] (padding: anything)."""
    token = mine.token.clamp_min(0).long()
    if is_static:  # every lane has equally many tokens; no table, whose copy to the device would synchronise
        return token // lane_tokens[0][0]
    last = torch.tensor(lane_tokens, device=token.device).cumsum(0)  # [lanes, R]: first token behind each lane's
    return (token[None] >= last[:, mine.source_rank.long().clamp_min(0)]).sum(0)


def _positions(
    group: torch.Tensor, key: torch.Tensor, num_groups: int, group_rows: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each item lies when items are sorted by (group, key): int64, -1 for items of group `num_groups`.

    With `group_rows` every group takes that many places, so nothing depends on the counts.
    """
    order = torch.argsort(group * 2**40 + key)
    counts = torch.zeros(num_groups + 1, dtype=torch.int64, device=group.device)
    counts.scatter_add_(0, group, torch.ones_like(group))
    first = counts.cumsum(0) - counts
    place = torch.empty_like(group)
    sorted_group = group[order]
    place[order] = torch.arange(group.numel(), device=group.device) - first[sorted_group]
    start = first if group_rows is None else torch.arange(num_groups + 1, device=group.device) * group_rows
    return torch.where(group < num_groups, start[group] + place, -1), counts[:num_groups]


def _inverse(position: torch.Tensor, size: int) -> torch.Tensor:
    """The item at each of `size` positions; positions that no item has name item 0."""
    item = torch.zeros(size + 1, dtype=torch.int64, device=position.device)
    item.scatter_(0, torch.where(position >= 0, position, size), torch.arange(position.numel(), device=position.device))
    return item[:size]


def _count_pairs(plan: RoutingPlan, lane_tokens: list[list[int]]) -> list[list[list[int]]]:
    """Rows from [lane][source] to [owner]. Synchronises with the device."""
    pairs = torch.zeros(len(lane_tokens), plan.num_ranks, plan.num_ranks + 1, dtype=torch.int64)
    pairs = pairs.to(plan.owner[0].device)
    for source, owner in enumerate(plan.owner):
        for lane, part in enumerate(owner.split([tokens[source] for tokens in lane_tokens])):
            group = torch.where(part >= 0, part, plan.num_ranks).flatten().long()
            pairs[lane, source].scatter_add_(0, group, torch.ones_like(group))
    return pairs[:, :, :-1].tolist()
