"""Batches of several ranks and experts that name themselves, for tests of dispatch and combine over any world."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import torch

from megamoe.comm import Dispatched, DispatchOptions, combine, dispatch
from megamoe.quantize import quantize_rows
from megamoe.recipe import Recipe

HIDDEN = 160  # a partial scale block


@dataclasses.dataclass(frozen=True)
class Case:
    """Tokens of each rank, experts, slots; which experts the ids may name; rows of a pool (None: as many as needed)."""

    tokens: tuple[int, ...]
    num_experts: int
    slots: int
    named: tuple[int, int] | None = None
    num_rows: int | None = None
    precision: Literal["fp8", "bf16"] = "fp8"

    @property
    def num_ranks(self) -> int:
        return len(self.tokens)

    def tokens_of(self, rank: int) -> slice:
        """Where a rank's tokens lie in the batch of one rank that has them all."""
        begin = sum(self.tokens[:rank])
        return slice(begin, begin + self.tokens[rank])


CASES = {
    2: [
        Case((7, 3), 8, 3),
        Case((0, 9), 4, 2),
        Case((0, 0), 4, 2),
        Case((12, 9), 8, 2, named=(0, 4)),
        Case((6, 11), 2, 2),
        Case((150, 1), 4, 4),
    ],
    3: [Case((4, 9, 2), 6, 3), Case((0, 5, 8), 3, 2, named=(2, 3))],
    4: [Case((3, 8, 0, 5), 8, 4), Case((1, 1, 1, 1), 4, 2, named=(3, 4))],
}
"""By number of ranks: unequal T, T = 0, ranks whose experts get nothing, one expert a rank, segments over 128 rows."""


@dataclasses.dataclass(frozen=True)
class Batch:
    """The tensors of all ranks."""

    x: list[torch.Tensor]
    ids: list[torch.Tensor]
    weights: list[torch.Tensor]
    dout: list[torch.Tensor]

    def of(self, ranks: tuple[int, ...]) -> Batch:
        return Batch(*([values[r] for r in ranks] for values in (self.x, self.ids, self.weights, self.dout)))

    def whole(self) -> Batch:
        """The batch of one rank that has all tokens."""
        return Batch(*([torch.cat(values)] for values in (self.x, self.ids, self.weights, self.dout)))


def make_batch(case: Case) -> Batch:
    generator = torch.Generator().manual_seed(sum(case.tokens) * 31 + case.num_experts)
    low, high = case.named or (0, case.num_experts)
    x, ids, weights, dout = [], [], [], []
    for tokens in case.tokens:
        x.append(torch.randn(tokens, HIDDEN, generator=generator).bfloat16())
        of_rank = torch.randint(low, high, (tokens, case.slots), generator=generator)
        ids.append(of_rank.masked_fill(torch.rand(tokens, case.slots, generator=generator) < 0.2, -1))
        weights.append(torch.rand(tokens, case.slots, generator=generator))
        dout.append(torch.randn(tokens, HIDDEN, generator=generator).bfloat16())
    return Batch(x, ids, weights, dout)


def expert_rows(rows: torch.Tensor, expert: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Stands for the experts: a multiple of the row that names the expert, times its weight; NaN where there is none.

    Any leading shape: rows [..., H], expert and weight [...]; one rounding.
    """
    y = (rows.float() * (expert + 1)[..., None] * weight[..., None]).bfloat16()
    return torch.where((expert < 0)[..., None], torch.nan, y)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Of one rank."""

    out: torch.Tensor
    weights_home: torch.Tensor
    dx: torch.Tensor
    dw: torch.Tensor


def train(
    batch: Batch, world: Any, options: DispatchOptions, first_expert: list[int], **dispatch_options: Any
) -> tuple[list[Outcome], Dispatched]:
    """Dispatch, experts, combine, and the backward, on every rank of this process; all as lists.

    Args:
        batch: of the ranks of this process.
        world, options: for dispatch.
        first_expert: of each rank of this process.
        dispatch_options: for dispatch, e.g. handle instead of world and options.

    Returns:
        Of each rank the outcome; and what dispatch returned, its tensors as lists.
    """
    xs = [x.clone().requires_grad_() for x in batch.x]
    ws = [w.clone().requires_grad_() for w in batch.weights]
    given = {} if "handle" in dispatch_options else {"options": options, "world": world}
    ids = None if "handle" in dispatch_options else batch.ids
    sent = dispatch(xs, ids, ws, **given, **dispatch_options)
    ys, numbers = [], []
    experts = sent.handle.recv_topk_ids()
    for rows, weights, own, first in zip(sent.recv_x, sent.recv_weights, experts, first_expert, strict=True):
        own = torch.where(own >= 0, own + first, -1)
        ys.append(expert_rows(rows if options.expand else rows[:, None], own, weights))
        numbers.append(torch.where(own >= 0, (own + 1) * weights.detach(), torch.nan))
    home = combine(ys, sent.handle, topk_weights=numbers)
    torch.autograd.backward(home.x, batch.dout)
    outcomes = [
        Outcome(out.detach(), numbers, x.grad, w.grad)
        for out, numbers, x, w in zip(home.x, home.weights, xs, ws, strict=True)
    ]
    return outcomes, sent


def train_alone(case: Case, batch: Batch, expand: bool = True) -> Outcome:
    """The whole batch on one rank that holds all experts."""
    outcomes, _ = train(batch.whole(), None, DispatchOptions(case.num_experts, expand=expand), [0])
    return outcomes[0]


def check_outcome(case: Case, rank: int, got: Outcome, whole: Outcome, is_exact: bool = True) -> None:
    """One rank's outcome against its part of the whole batch's: the same bits, or (not exact) bf16 tolerance."""
    for field in dataclasses.fields(Outcome):
        mine, theirs = getattr(got, field.name), getattr(whole, field.name)[case.tokens_of(rank)]
        if is_exact:
            assert mine.shape == theirs.shape and torch.equal(mine, theirs), (case, rank, field.name)
        else:
            torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2, msg=lambda m: f"{case} {rank} {m}")  # noqa: B023


def quantized(batch: Batch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """x as (e4m3, scales)."""
    rows = [quantize_rows(x, Recipe()) for x in batch.x]
    return [(q.data, q.scale) for q in rows]
