"""The routing plan: from the expert ids of all ranks to the order of rows, a pure function of the routing.

Rows of a rank are sorted by (local expert, source rank, source token, slot); each expert's segment is rounded up to
`alignment` rows. Positions come from prefix sums and never from arrival order, so forward, backward and every repeat
see the same rows in the same places.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from megamoe.errors import CapacityError, MegaMoETypeError, MegaMoEValueError, expected
from megamoe.recipe import BLOCK


@dataclasses.dataclass(frozen=True)
class RankPlan:
    """What one rank receives.

    Attributes:
        counts: int32 [E_l], real rows of each local expert.
        offs: int32 [E_l + 1], first row of each local expert's aligned segment; the last entry is the end.
        source_rank: int32 [P], where each row comes from, -1 for padding.
        token: int32 [P], its token there, -1 for padding.
        slot: int32 [P], its slot among the token's K, -1 for padding.
    """

    counts: torch.Tensor
    offs: torch.Tensor
    source_rank: torch.Tensor
    token: torch.Tensor
    slot: torch.Tensor

    @property
    def num_rows(self) -> int:
        """P: rows of the pool, padding included."""
        return self.source_rank.shape[0]

    def expert_of_row(self) -> torch.Tensor:
        """Local expert of each row of the pool, padding included; int64 [P] (rows behind the last segment: E_l)."""
        row = torch.arange(self.num_rows, device=self.offs.device)
        return torch.searchsorted(self.offs[1:].long(), row, right=True)


@dataclasses.dataclass(frozen=True)
class RoutingPlan:
    """The plan of a call for all ranks.

    Attributes:
        num_experts: E, over all ranks.
        ranks: what each rank receives.
        owner: for each source rank int32 [T, K], the rank that owns the slot's expert, -1 for no expert.
        row: for each source rank int32 [T, K], the slot's row in its owner's pool, -1 for no expert.
    """

    num_experts: int
    ranks: tuple[RankPlan, ...]
    owner: tuple[torch.Tensor, ...]
    row: tuple[torch.Tensor, ...]

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)


def check_topk_ids(topk_ids: torch.Tensor, name: str = "topk_ids") -> None:
    """Refuse ids whose dtype or shape is outside the contract (values are checked only on request)."""
    if not isinstance(topk_ids, torch.Tensor):
        raise MegaMoETypeError(expected(name, "an int32 or int64 tensor [T, K]", type(topk_ids).__name__))
    if topk_ids.dtype not in (torch.int32, torch.int64):
        raise MegaMoETypeError(expected(name, "int32 or int64", topk_ids.dtype, "Convert the ids first."))
    if topk_ids.dim() != 2:
        raise MegaMoEValueError(expected(name, "[T, K]", f"shape {tuple(topk_ids.shape)}"))


def check_id_values(topk_ids: torch.Tensor, num_experts: int, name: str = "topk_ids") -> None:
    """Refuse ids outside [-1, num_experts); it synchronises with the device."""
    bad = (topk_ids < -1) | (topk_ids >= num_experts)
    if bool(bad.any()):
        where = [int(i) for i in bad.nonzero()[0]]
        value = int(topk_ids[tuple(where)])
        raise MegaMoEValueError(expected(f"{name}{where}", f"-1 or an expert in [0, {num_experts})", value))


def experts_per_rank(num_experts: int, num_ranks: int) -> int:
    """E / R, which must be whole."""
    if num_ranks < 1:
        raise MegaMoEValueError(expected("num_ranks", "at least 1", num_ranks))
    if num_experts < 1 or num_experts % num_ranks:
        raise MegaMoEValueError(
            expected(
                "num_experts", f"a positive multiple of the {num_ranks} ranks", num_experts, "Choose another EP size."
            )
        )
    return num_experts // num_ranks


def most_rows(counts: torch.Tensor, num_ranks: int) -> int:
    """Rows of the fullest pool, each expert's rounded up to 128, from the rows of all E experts. Synchronises."""
    aligned = (counts + BLOCK - 1) // BLOCK * BLOCK
    return int(aligned.view(num_ranks, -1).sum(1).max())


def make_plan(
    topk_ids: Sequence[torch.Tensor],
    num_experts: int,
    *,
    alignment: int = BLOCK,
    num_rows: int | None = None,
    checked: bool = True,
) -> RoutingPlan:
    """Plan a call.

    Args:
        topk_ids: for each rank [T_r, K], int32 or int64, global expert ids, -1 for no expert; T_r may differ and be 0.
            All on one device; K equal everywhere.
        num_experts: E over all ranks, a multiple of their number; rank r owns experts r * E / R up to (r + 1) * E / R.
        alignment: rows to which each expert's segment is rounded up.
        num_rows: rows of every rank's pool; None: just enough for each.
        checked: False, with `num_rows` given, never synchronises with the device: ids outside [0, num_experts) count as
            -1, and rows behind `num_rows` are left out of the plan of their owner (`offs` still counts them).

    Returns:
        The plan, on the device of the ids.

    Raises:
        MegaMoETypeError, MegaMoEValueError: ids outside the contract.
        CapacityError: more rows than `num_rows` on a rank.
    """
    if not isinstance(topk_ids, (list, tuple)) or not topk_ids:
        got = "none" if isinstance(topk_ids, (list, tuple)) else type(topk_ids).__name__
        raise MegaMoEValueError(expected("topk_ids", "one tensor for each rank", got))
    if alignment < 1:
        raise MegaMoEValueError(expected("alignment", "at least 1 row", alignment))
    if not checked and num_rows is None:
        raise MegaMoEValueError(expected("num_rows", "a number of rows where checked=False", None))
    for r, ids in enumerate(topk_ids):
        name = "topk_ids" if len(topk_ids) == 1 else f"topk_ids[{r}]"
        check_topk_ids(ids, name)
        if checked:
            check_id_values(ids, num_experts, name)
        if ids.shape[1] != topk_ids[0].shape[1]:
            contract = f"K = {topk_ids[0].shape[1]} slots as on rank 0"
            raise MegaMoEValueError(expected(name, contract, ids.shape[1]))
    num_ranks = len(topk_ids)
    per_rank = experts_per_rank(num_experts, num_ranks)
    device, k = topk_ids[0].device, topk_ids[0].shape[1]

    expert = torch.cat([ids.reshape(-1).long() for ids in topk_ids])
    real = (expert >= 0) & (expert < num_experts)
    source = torch.cat([torch.full((ids.numel(),), r, device=device) for r, ids in enumerate(topk_ids)])
    flat_slot = torch.cat([torch.arange(ids.numel(), device=device) for ids in topk_ids])
    # A stable sort by expert alone: the concatenation is in (source rank, token, slot) order already.
    key = torch.where(real, expert, num_experts)
    order = torch.argsort(key, stable=True)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=device)
    counts = counts.scatter_add_(0, key, torch.ones_like(key))[:num_experts]
    place = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=device))
    first = counts.cumsum(0) - counts  # of the sorted, unaligned sequence

    aligned = (counts + alignment - 1) // alignment * alignment
    segment = aligned.view(num_ranks, per_rank)
    offs = torch.nn.functional.pad(segment.cumsum(1), (1, 0))  # [R, E_l + 1]
    safe = torch.where(real, expert, 0)
    row = torch.where(real, offs[:, :-1].reshape(-1)[safe] + place - first[safe], -1)
    owner = torch.where(real, safe // per_rank, -1)

    identity = (source, flat_slot // max(k, 1), flat_slot % max(k, 1))
    ranks = []
    for r in range(num_ranks):
        size = _pool_rows(offs[r, -1], num_rows, checked, r)
        target = torch.where((owner == r) & (row < size), row, size)  # one spare entry takes what belongs elsewhere
        fields = [
            torch.full((size + 1,), -1, dtype=torch.int32, device=device).scatter_(0, target, values.int())[:size]
            for values in identity
        ]
        ranks.append(RankPlan(counts.view(num_ranks, per_rank)[r].int(), offs[r].int(), *fields))
    shapes = [tuple(ids.shape) for ids in topk_ids]

    def by_rank(values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parts = values.split([ids.numel() for ids in topk_ids])
        return tuple(part.int().view(shape) for part, shape in zip(parts, shapes, strict=True))  # no shared storage

    return RoutingPlan(num_experts, tuple(ranks), by_rank(owner), by_rank(row))


def _pool_rows(needed: torch.Tensor, num_rows: int | None, checked: bool, rank: int) -> int:
    """Rows of a rank's pool: what is given if it suffices, else just enough. Synchronises if `checked`."""
    if num_rows is not None and not checked:
        return num_rows
    enough = int(needed)
    if num_rows is not None and enough > num_rows:
        contract = f"at least {enough} rows for rank {rank}"
        raise CapacityError(expected("capacity", contract, num_rows, "Raise it, or leave it out."))
    return enough if num_rows is None else num_rows
