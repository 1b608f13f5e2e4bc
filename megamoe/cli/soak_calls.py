"""The calls of `megamoe soak`: what a seed stands for, how a call runs on a backend, and what is compared."""

from __future__ import annotations

import dataclasses
import random
from typing import Any, Literal

import torch

from megamoe.cli.problem import ROUTINGS, Problem, ProblemSpec, make_problem
from megamoe.cli.stages import have_same_bits
from megamoe.comm import LocalWorld
from megamoe.context import MoEContext
from megamoe.experts import Experts
from megamoe.gates import GATES, sqnr_db
from megamoe.overlap import OverlapConfig
from megamoe.recipe import BLOCK, Recipe
from megamoe.routing_plan import most_rows

SIZES = ((256, 128), (384, 384), (1024, 512), (2048, 768), (128, 128))
"""(H, I) that calls draw from: few, because kernels are compiled for each."""

RECIPES = (
    Recipe(),
    Recipe(wgrad_operands="bf16"),
    Recipe(clamp=1.0),
    Recipe(clamp=0.5, scale_format="pow2"),
)
"""Few likewise."""

Capacity = Literal["worst", "exact", "none"]


@dataclasses.dataclass(frozen=True)
class Drawn:
    """One call: what it computes and how.

    Attributes:
        spec: sizes and routing. recipe: formats. save: what the forward keeps. overlap: when weight gradients are made,
            what is left to other kernels.
        capacity: rows of every pool where R > 1: enough for all, exactly those needed, or not said.
        idle: a rank whose ids are all -1; None: no such rank.
        ids: dtype of ids. needs: whether x, topk_weights and the weights need gradients.
        is_again: call twice, for the same bits. is_on_one: also on one rank that holds everything, for the same bits.
    """

    spec: ProblemSpec
    recipe: Recipe
    save: str
    overlap: OverlapConfig
    capacity: Capacity
    idle: int | None
    ids: torch.dtype
    needs: tuple[bool, bool, bool]
    is_again: bool
    is_on_one: bool

    def __str__(self) -> str:
        recipe = f"{self.recipe.scale_format}, clamp {self.recipe.clamp}, {self.recipe.wgrad_operands} wgrad"
        parts = [f"seed {self.spec.seed}: {self.spec}", recipe, f"save={self.save}", str(self.overlap)]
        parts += [f"capacity={self.capacity}"] if self.spec.num_ranks > 1 else []
        parts += [] if self.idle is None else [f"rank {self.idle} idle"]
        parts += [str(self.ids).removeprefix("torch.")]
        parts += [] if all(self.needs) else ["needs " + "".join("xpw"[i] for i in range(3) if self.needs[i])]
        return ", ".join(parts)

    def traits(self) -> list[str]:
        """What a record counts, so that it says what was covered."""
        tokens = self.spec.num_tokens
        traits = [f"R={len(tokens)}", f"H={self.spec.hidden}", f"save={self.save}", f"wgrad={self.overlap.wgrad}"]
        traits += [name for name in ("steal_us", "reserve_sms") if getattr(self.overlap, name)]
        traits += [f"routing={self.spec.routing}", f"operands={self.recipe.wgrad_operands}"]
        traits += [f"scales={self.recipe.scale_format}", f"clamp={self.recipe.clamp}"]
        traits += [f"capacity={self.capacity}"] if len(tokens) > 1 else []
        traits += ["an empty rank"] if 0 in tokens else []
        traits += ["ids all -1 on a rank"] if self.idle is not None else []
        traits += ["no backward"] if not any(self.needs) else [] if all(self.needs) else ["some gradients only"]
        traits += ["called twice"] if self.is_again else []
        traits += ["against one rank"] if self.is_on_one else []
        return traits


def draw(seed: int, largest_tokens: int, num_sizes: int = len(SIZES)) -> Drawn:
    """The call that a seed stands for.

    Args:
        seed: any number. largest_tokens: T of a rank is at most this. num_sizes: how many of `SIZES` are drawn from.
    """
    rng = random.Random(seed)
    num_ranks = rng.choice((1, 1, 2, 3, 4))
    bound = min(rng.choice((1, 17, 128, largest_tokens)), largest_tokens)
    tokens = [rng.randint(0, bound) for _ in range(num_ranks)]
    if rng.random() < 0.2:
        tokens[rng.randrange(num_ranks)] = 0
    hidden, inter = rng.choice(SIZES[:num_sizes])
    num_experts = num_ranks * rng.choice((1, 2, 8, 32))
    top_k = rng.randint(1, min(num_experts, 12))
    spec = ProblemSpec(tuple(tokens), hidden, inter, num_experts, top_k, rng.choice(ROUTINGS), seed)
    overlap = OverlapConfig(
        wgrad=rng.choice(("inline", "inline", "stream", "delayed")),
        steal_us=rng.choice((0.0, 50.0)),
        reserve_sms=rng.choice((0, 0, 12)),
    )
    some = (True, True, True), (True, True, False), (False, False, True), (False, True, True), (False, False, False)
    return Drawn(
        spec,
        rng.choice(RECIPES),
        rng.choice(("pool", "repull", "recompute")),
        overlap,
        rng.choice(("worst", "exact", "none")),
        rng.randrange(num_ranks) if rng.random() < 0.1 else None,
        rng.choice((torch.int32, torch.int64)),
        some[0] if rng.random() < 0.7 else rng.choice(some[1:]),
        rng.random() < 0.3,
        num_ranks > 1 and rng.random() < 0.3,
    )


def problem_of(drawn: Drawn, device: torch.device) -> Problem:
    """The inputs of a call."""
    problem = make_problem(drawn.spec, device)
    ids = [i.to(drawn.ids) for i in problem.topk_ids]
    if drawn.idle is not None:
        ids[drawn.idle].fill_(-1)
    return dataclasses.replace(problem, topk_ids=ids)


def rows_needed(problem: Problem) -> int:
    """The least capacity of a call: the most rows that a rank receives, each expert's rounded up; a multiple of 128."""
    spec = problem.spec
    ids = torch.cat(problem.topk_ids).flatten().long()
    counts = torch.bincount(ids[ids >= 0], minlength=spec.num_experts)
    return max(most_rows(counts, spec.num_ranks), BLOCK)


def results(problem: Problem, drawn: Drawn, backend: str) -> dict[str, torch.Tensor]:
    """out, dx, dp (of all ranks, joined), dW13, dW2 of one call, those that it has."""
    num_ranks = problem.spec.num_ranks
    capacity: Any = {"worst": "worst", "exact": None, "none": None}[drawn.capacity]
    if drawn.capacity == "exact" and num_ranks > 1:
        capacity = rows_needed(problem)
    context = MoEContext(
        drawn.recipe,
        world=LocalWorld(num_ranks) if num_ranks > 1 else None,
        backend=backend,  # type: ignore[arg-type]
        capacity=capacity if num_ranks > 1 else None,
        save=drawn.save,  # type: ignore[arg-type]
        overlap=drawn.overlap,
    )
    spec, device = problem.spec, problem.w13_E2IH.device
    experts = Experts(spec.num_experts, spec.hidden, spec.intermediate, "bf16", context, device)
    with torch.no_grad():
        experts.w13.copy_(problem.w13_E2IH)
        experts.w2.copy_(problem.w2_EHI)
    experts.requires_grad_(drawn.needs[2])
    xs = [x.clone().requires_grad_(drawn.needs[0]) for x in problem.xs]
    ps = [p.clone().requires_grad_(drawn.needs[1]) for p in problem.topk_weights]
    outs = experts(xs, problem.topk_ids, ps) if num_ranks > 1 else [experts(xs[0], problem.topk_ids[0], ps[0])]
    found: dict[str, Any] = {"out": torch.cat([out.detach() for out in outs])}
    if not any(drawn.needs):
        return found
    torch.autograd.backward(outs, problem.douts)
    experts.backward_dw()
    if drawn.needs[0]:
        found["dx"] = torch.cat([x.grad for x in xs])  # type: ignore[misc]
    if drawn.needs[1]:
        found["dp"] = torch.cat([p.grad for p in ps])  # type: ignore[misc]
    if drawn.needs[2]:
        found |= {"dW13": experts.w13.grad, "dW2": experts.w2.grad}
    return found


@dataclasses.dataclass
class Compared:
    """A call's outcome.

    Attributes:
        levels: SQNR in dB of each tensor against the other backend. equal: tensors that have its bytes.
        faults: what was wrong.
    """

    levels: dict[str, float]
    equal: list[str]
    faults: list[str]


def compare(drawn: Drawn, backend: str, against: str, device: torch.device) -> Compared:
    """Run a call on both backends, and where it says so again and on one rank."""
    problem = problem_of(drawn, device)
    found = results(problem, drawn, backend)
    want = results(problem, drawn, against)
    levels = {name: sqnr_db(found[name], want[name]) for name in found}
    gate = GATES["fp8"].backends_db
    low = {name: round(level, 1) for name, level in levels.items() if not level >= gate}
    faults = [f"below {gate:g} dB: {low}"] if low else []
    if drawn.is_again:
        faults += _different(found, results(problem, drawn, backend), "called again")
    if drawn.is_on_one:
        faults += _different(found, results(problem.on_one_rank(), drawn, backend), "on one rank")
    return Compared(levels, [name for name in found if have_same_bits(found[name], want[name])], faults)


def _different(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], where: str) -> list[str]:
    names = [name for name in a if not have_same_bits(a[name], b[name])]
    return [f"other bits {where}: {', '.join(names)}"] if names else []
