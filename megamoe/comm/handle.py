"""What dispatch knows and combine needs: options, layout, and the handle that both share."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from types import ModuleType
from typing import NamedTuple

import torch

from megamoe import torch_steps
from megamoe.comm.transport import Transport, World
from megamoe.errors import MegaMoETypeError, MegaMoEValueError, expected
from megamoe.quantize import QuantizedRows, ceil_div
from megamoe.recipe import BLOCK
from megamoe.routing_plan import RankPlan, RoutingPlan, check_topk_ids, experts_per_rank


@dataclasses.dataclass(frozen=True)
class DispatchOptions:
    """How dispatch lays rows out; equal on all ranks.

    Args:
        num_experts: E over all ranks, a multiple of their number.
        expert_alignment: rows to which each expert's segment is rounded up (with `expand`).
        num_worst_tokens: None: receive as many rows as there are; sizes are read back from the device. A number:
            static shapes and no host synchronisation, so CUDA graphs can capture the call (of one rank or of a process
            group; calls over several virtual ranks copy their addresses from the host). It is the most tokens that all
            ranks together may have, R * (the most of one rank). Over a process group the worst case then travels: for
            few tokens a rank. Ids outside [0, num_experts) count as -1.
        expand: True: one row per token and expert, expert-major. False: one row per token and rank that owns one of its
            experts, by (source rank, token).
    """

    num_experts: int
    expert_alignment: int = BLOCK
    num_worst_tokens: int | None = None
    expand: bool = True

    def __post_init__(self) -> None:
        for name, lowest in (("num_experts", 1), ("expert_alignment", 1), ("num_worst_tokens", 1)):
            value = getattr(self, name)
            if value is None and name == "num_worst_tokens":
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                raise MegaMoETypeError(expected(name, "an integer", repr(value)))
            if value < lowest:
                raise MegaMoEValueError(expected(name, f"at least {lowest}", value))
        if not isinstance(self.expand, bool):
            raise MegaMoETypeError(expected("expand", "True or False", repr(self.expand)))


class TokensPerExpert(NamedTuple):
    """int32 [E_l] on the device: rows of each local expert, and the rows of its aligned segment."""

    real: torch.Tensor
    aligned: torch.Tensor


class DispatchLayout(NamedTuple):
    """Where one rank's tokens go.

    num_tokens_per_rank: int32 [R], tokens with an expert there. num_tokens_per_expert: int32 [E], slots that name it.
    is_token_in_rank: bool [T, R].
    """

    num_tokens_per_rank: torch.Tensor
    num_tokens_per_expert: torch.Tensor
    is_token_in_rank: torch.Tensor


def get_dispatch_layout(topk_ids: torch.Tensor, num_experts: int, num_ranks: int) -> DispatchLayout:
    """Count where the tokens of one rank go. Local: nothing is exchanged and nothing synchronises.

    Args:
        topk_ids: int32 or int64 [T, K], -1 for no expert (as ids outside [0, num_experts) are read).
        num_experts: E over all ranks.
        num_ranks: R.

    Returns:
        DispatchLayout, on the device of the ids.

    Raises:
        MegaMoETypeError, MegaMoEValueError: ids that are no such matrix; E that is no multiple of R.
    """
    check_topk_ids(topk_ids)
    per_rank = experts_per_rank(num_experts, num_ranks)
    ids = topk_ids.long()
    expert = torch.where((ids >= 0) & (ids < num_experts), ids, num_experts)
    flat = expert.flatten()
    per_expert = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device)
    per_expert.scatter_add_(0, flat, torch.ones_like(flat))
    in_rank = torch.zeros(ids.shape[0], num_ranks + 1, dtype=torch.bool, device=ids.device)
    in_rank = in_rank.scatter_(1, expert // per_rank, True)[:, :num_ranks]
    return DispatchLayout(in_rank.sum(0).int(), per_expert[:num_experts].int(), in_rank)


@dataclasses.dataclass(frozen=True, eq=False)
class Handle:
    """The layout and the identity of rows of one dispatch. A cached handle dispatches again without the layout.

    Attributes:
        world, options: of the dispatch.
        transport: that carries the rows.
        plan: the plan with one row per token and expert: counts, offsets, and where each slot's row lies.
        token_plan: with `expand=False` the plan with one row per token and rank, else None.
        num_tokens: T of each local rank. num_slots: K.
        anchor: ties a combine to its dispatch in autograd when y does not; None without gradients.
    """

    world: World
    options: DispatchOptions
    transport: Transport
    plan: RoutingPlan
    token_plan: RoutingPlan | None
    num_tokens: tuple[int, ...]
    num_slots: int
    anchor: torch.Tensor | None = None

    @property
    def row_plan(self) -> RoutingPlan:
        """The plan of the rows that travel."""
        return self.plan if self.token_plan is None else self.token_plan

    def tensors(self) -> list[torch.Tensor]:
        """All that its plans hold."""
        return _tensors_in((self.plan, self.token_plan))

    def received(self) -> list[RankPlan]:
        """Of each local rank its rows: counts, offsets, and every row's source rank, token and slot.

        Padding has -1 in all three. With `expand=False` a row stands for a token, and `slot` is -1 everywhere. Over
        tensor-parallel lanes the tokens of a source are those of its lanes, one lane after the other.
        """
        mine = [self.row_plan.ranks[rank] for rank in self.transport.local_ranks]
        if self.token_plan is None:
            return mine
        return [dataclasses.replace(plan, slot=torch.full_like(plan.slot, -1)) for plan in mine]

    def recv_topk_ids(self) -> list[torch.Tensor]:
        """Of each local rank the local experts of its rows, int64, -1 for none: [P], or [N, K] with `expand=False`."""
        ids = []
        for rank in self.transport.local_ranks:
            mine = self.plan.ranks[rank]
            expert = torch.where(mine.token >= 0, mine.expert_of_row(), -1)
            ids.append(expert if self.token_plan is None else self._by_token(rank, expert, -1))
        return ids

    def tokens_per_expert(self) -> list[TokensPerExpert]:
        """Of each local rank the rows of its experts, real and aligned."""
        mine = [self.plan.ranks[rank] for rank in self.transport.local_ranks]
        return [TokensPerExpert(plan.counts, plan.offs.diff()) for plan in mine]

    # The four linear maps. Dispatch and combine are made of them, and each other's backward: rows_home is the adjoint
    # of rows_out, weights_home that of weights_out.

    def rows_out(self, rows: list[QuantizedRows]) -> list[QuantizedRows]:
        """Tokens to the owners of their experts."""
        return self.transport.dispatch_rows(rows, self.row_plan)

    def rows_home(self, rows: list[torch.Tensor]) -> list[torch.Tensor]:
        """The sum of each token's rows, in fp32, by slot (by rank with `expand=False`); bf16 [T, H]."""
        home = self.transport.combine_rows([y.contiguous() for y in rows], self.row_plan)
        return [out[:tokens] for out, tokens in zip(home, self.num_tokens, strict=True)]

    def weights_out(self, weights: list[torch.Tensor]) -> list[torch.Tensor]:
        """fp32 [T, K] to the owners: [P], or [N, K] with `expand=False`; 0 where there is no row."""
        weights = [w.contiguous() for w in weights]
        arrived = self.transport.dispatch_weights(weights, self.plan)
        if self.token_plan is None:
            return arrived
        return [self._by_token(r, w, 0.0) for r, w in zip(self.transport.local_ranks, arrived, strict=True)]

    def weights_home(self, values: list[torch.Tensor]) -> list[torch.Tensor]:
        """A number of every row to the slot it belongs to, [T, K]; exactly 0 for slots without an expert."""
        if self.token_plan is not None:
            ranks = self.transport.local_ranks
            values = [
                torch.nn.functional.pad(v.flatten(), (0, 1))[self._token_slot(r)]
                for r, v in zip(ranks, values, strict=True)
            ]
        home = self.transport.combine_weight_grads([v.contiguous() for v in values], self.plan)
        return [out[:tokens] for out, tokens in zip(home, self.num_tokens, strict=True)]

    def _token_slot(self, rank: int) -> torch.Tensor:
        """For each row of `plan` its place among the [N, K] slots of the token rows; N * K for padding."""
        assert self.token_plan is not None
        mine, token_rows = self.plan.ranks[rank], self.token_plan.ranks[rank].num_rows
        row_of_token = torch.nn.utils.rnn.pad_sequence(
            [rows[:, rank] for rows in self.token_plan.row], batch_first=True
        )
        row_of_token = torch.nn.functional.pad(row_of_token, (0, 1)).long()  # [R, most tokens + 1]: never empty
        source, token = mine.source_rank.long(), mine.token.long()
        row = row_of_token[source.clamp_min(0), token.clamp_min(0)]
        return torch.where(source >= 0, row * self.num_slots + mine.slot, token_rows * self.num_slots)

    def _by_token(self, rank: int, values: torch.Tensor, fill: float) -> torch.Tensor:
        """Values of the rows of `plan` as [N, K] of the token rows; `fill` where no slot has its expert here."""
        assert self.token_plan is not None
        rows = self.token_plan.ranks[rank].num_rows
        flat = values.new_full((rows * self.num_slots + 1,), fill)
        return flat.scatter_(0, self._token_slot(rank), values)[:-1].view(rows, self.num_slots)


def _tensors_in(value: object) -> list[torch.Tensor]:
    """The tensors of a plan: of dataclasses in tuples in dataclasses."""
    if isinstance(value, torch.Tensor):
        return [value]
    if dataclasses.is_dataclass(value):
        return _tensors_in(tuple(vars(value).values()))
    return [tensor for part in value for tensor in _tensors_in(part)] if isinstance(value, tuple) else []


def static_sizes(options: DispatchOptions, transport: Transport, num_slots: int) -> tuple[int, int] | tuple[None, None]:
    """(tokens of any rank, rows of any pool) when shapes are static, else (None, None)."""
    worst = options.num_worst_tokens
    if worst is None:
        return None, None
    alignment, slots = options.expert_alignment, worst * num_slots
    experts = options.num_experts // transport.num_ranks
    rows = slots + (alignment - 1) * min(experts, slots)
    return worst // transport.num_sources, ceil_div(rows, alignment) * alignment


def steps_for(device: torch.device) -> ModuleType:
    """The steps that move rows on a device: Triton kernels on CUDA where triton is installed, else torch."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        return importlib.import_module("megamoe.triton_kernels")
    return torch_steps
