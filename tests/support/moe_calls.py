"""Run `mega_moe` forward and backward on a problem, over however many virtual ranks it has."""

from __future__ import annotations

import dataclasses

import torch

from megamoe import LocalWorld, MoEContext, Recipe, mega_moe
from megamoe.cli.problem import Problem
from megamoe.reference import Backward


@dataclasses.dataclass(frozen=True)
class Result:
    """outs and gradients of each rank's tokens; weight gradients of all experts; None where nothing was asked."""

    outs: list[torch.Tensor]
    dx: list[torch.Tensor | None]
    dp: list[torch.Tensor | None]
    dw13: torch.Tensor | None
    dw2: torch.Tensor | None

    def joined(self) -> dict[str, torch.Tensor]:
        """Everything by name, ranks concatenated."""
        return {
            "out": torch.cat(self.outs),
            "dx": torch.cat(self.dx),  # type: ignore[arg-type]
            "dp": torch.cat(self.dp),  # type: ignore[arg-type]
            "dW13": self.dw13,  # type: ignore[dict-item]
            "dW2": self.dw2,  # type: ignore[dict-item]
        }

    def backward(self) -> Backward:
        """The gradients in the oracle's form."""
        found = self.joined()
        return Backward(found["dx"], found["dp"], found["dW13"], found["dW2"])


def context_for(problem: Problem, recipe: Recipe | None = None, **options: object) -> MoEContext:
    """A context over the problem's virtual ranks."""
    ranks = problem.spec.num_ranks
    world = LocalWorld(ranks) if ranks > 1 else None
    return MoEContext(recipe, world=world, **options)  # type: ignore[arg-type]


def run(
    problem: Problem,
    context: MoEContext | None = None,
    requires: tuple[bool, bool, bool, bool] = (True, True, True, True),
    call: object = mega_moe,
) -> Result:
    """One forward and, if any of (x, topk_weights, w13, w2) requires grad, one backward on leaves of their own."""
    context = context_for(problem) if context is None else context
    xs = [x.clone().requires_grad_(requires[0]) for x in problem.xs]
    weights = [p.clone().requires_grad_(requires[1]) for p in problem.topk_weights]
    w13 = problem.w13_E2IH.clone().requires_grad_(requires[2])
    w2 = problem.w2_EHI.clone().requires_grad_(requires[3])
    one = len(xs) == 1
    tokens = (xs[0], problem.topk_ids[0], weights[0]) if one else (xs, problem.topk_ids, weights)
    outs = call(*tokens, w13, w2, context=context)  # type: ignore[operator]
    outs = [outs] if one else outs
    if any(requires):
        torch.autograd.backward(outs, problem.douts)
    return Result(outs, [x.grad for x in xs], [p.grad for p in weights], w13.grad, w2.grad)
