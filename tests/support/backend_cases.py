"""What the failure cases share: any backend, problems with given rows per expert, and one check of everything."""

from __future__ import annotations

import pytest
import torch

from megamoe import Recipe
from megamoe.backends import Problem as Setting
from megamoe.backends import why_not
from megamoe.cli.problem import Problem, ProblemSpec, make_problem
from megamoe.gates import GATES
from megamoe.reference import oracle_backward, oracle_forward
from tests.support.compare import assert_backward_passes, assert_bitwise, assert_rows_pass
from tests.support.moe_calls import Result, context_for, run
from tests.support.poison import poison_allocator

BACKENDS = ["triton", "cute"]
RECIPES = [Recipe(), Recipe(wgrad_operands="bf16"), Recipe("bf16")]


def recipe_id(recipe: Recipe) -> str:
    """Of a parametrised test."""
    return f"{recipe.precision}-{recipe.wgrad_operands}"


def need(backend: str, problem: Problem, recipe: Recipe | None = None) -> None:
    """Skip where the backend says that it does not run this problem here."""
    spec, device = problem.spec, problem.xs[0].device
    world = "local" if spec.num_ranks > 1 else "one"
    sizes = {"num_experts": spec.num_experts, "top_k": spec.top_k, "num_ranks": spec.num_ranks, "world": world}
    reason = why_not(backend, Setting.of(device, recipe or Recipe(), spec.hidden, spec.intermediate, **sizes))
    if reason is not None:
        pytest.skip(f"{backend}: {reason}")


def with_counts(counts: list[int], device: torch.device, hidden: int = 256, intermediate: int = 128) -> Problem:
    """One rank, K = 1, expert e in counts[e] tokens, in random order."""
    spec = ProblemSpec((sum(counts),), hidden, intermediate, len(counts), 1)
    problem = make_problem(spec, device)
    ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    ids = ids[torch.randperm(len(ids))]
    problem.topk_ids[0] = ids[:, None].to(device)
    return problem


def naming_problem(counts: list[int], device: torch.device, hidden: int, intermediate: int) -> Problem:
    """Expert e returns (e + 1) * x in the first min(H, I) channels and zeros behind them, exactly, with pow2 scales.

    Channel 0 of x is 64, which makes every gate 64 and silu(gate) the same; up is x / 64.
    """
    problem = with_counts(counts, device, hidden, intermediate)
    x = torch.randint(1, 9, (sum(counts), hidden)).bfloat16()
    x[:, 0] = 64.0
    problem.xs[0] = x.to(device)
    same = torch.eye(intermediate, hidden, device=device)
    problem.w13_E2IH.zero_()
    problem.w13_E2IH[:, :intermediate, 0] = 1.0
    problem.w13_E2IH[:, intermediate:] = (same / 64).bfloat16()
    name = torch.arange(1, len(counts) + 1, device=device)[:, None, None]
    problem.w2_EHI.copy_((same.t() * name).bfloat16())
    problem.topk_weights[0].fill_(1.0)
    return problem


def named(problem: Problem) -> torch.Tensor:
    """What `naming_problem` must return."""
    width = min(problem.spec.hidden, problem.spec.intermediate)
    out = torch.zeros_like(problem.xs[0])
    out[:, :width] = problem.xs[0][:, :width] * (problem.topk_ids[0] + 1)
    return out


def run_on(problem: Problem, backend: str, recipe: Recipe | None = None, **options: object) -> Result:
    """Forward and backward in dirty memory."""
    device = problem.xs[0].device
    poison_allocator(1 << 24, device, blocks=8)
    return run(problem, context_for(problem, recipe, backend=backend, **options))


def check(problem: Problem, backend: str, recipe: Recipe | None = None, **options: object) -> Result:
    """Everything against the oracle, and a second run bit for bit.

    Returns:
        The first run's results.
    """
    recipe = recipe or Recipe()
    need(backend, problem, recipe)
    got = run_on(problem, backend, recipe, **options)
    assert_same(run_on(problem, backend, recipe, **options), got)
    inputs, bounds = problem.global_inputs(), GATES[recipe.precision]
    joined = got.joined()
    assert all(bool(v.isfinite().all()) for v in joined.values())
    assert_rows_pass(joined["out"], oracle_forward(inputs, recipe.clamp).out_TH, bounds, "out")
    assert_backward_passes(got.backward(), oracle_backward(inputs, torch.cat(problem.douts), recipe.clamp), bounds)
    return got


def assert_same(got: Result, want: Result, skip: tuple[str, ...] = ()) -> None:
    """Bit for bit, every result."""
    others = want.joined()
    for name, value in got.joined().items():
        if name not in skip:
            assert_bitwise(value, others[name], name)
