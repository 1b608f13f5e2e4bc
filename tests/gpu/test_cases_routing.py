"""Failures of other layers over routings: idle experts, empty batches, masked, foreign, repeated ids. Any backend."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megamoe import Recipe
from megamoe.cli.problem import ROUTINGS, ProblemSpec, make_problem
from megamoe.errors import MegaMoEError
from tests.support.backend_cases import BACKENDS, RECIPES, assert_same, check, need, recipe_id, run_on, with_counts
from tests.support.compare import assert_bitwise

pytestmark = pytest.mark.parametrize("backend", BACKENDS)


@pytest.mark.parametrize("recipe", RECIPES, ids=recipe_id)
def test_experts_without_rows_have_zero_gradients(backend, recipe, device):
    busy = with_counts([545] * 6, device)
    need(backend, busy, recipe)
    run_on(busy, backend, recipe)
    got = check(with_counts([162, 0, 2577, 446, 0, 83], device), backend, recipe)
    for e in (1, 4):
        assert not bool(got.dw13[e].any()) and not bool(got.dw2[e].any()), f"expert {e}"


def test_an_optimizer_steps_experts_without_rows_like_the_others(backend, device):
    """A rank without rows has gradients all the same: weight decay moves its experts as it does on one rank."""
    problem = make_problem(ProblemSpec((64, 64), 256, 128, 8, 2, "first_rank"), device)
    need(backend, problem)
    stepped = []
    for each in (problem, problem.on_one_rank()):
        got = run_on(each, backend)
        weights = [w.detach().clone() for w in (each.w13_E2IH, each.w2_EHI)]
        for w, grad in zip(weights, (got.dw13, got.dw2), strict=True):
            w.grad = grad.to(w.dtype)
        torch.optim.AdamW(weights, lr=0.1, weight_decay=0.1).step()
        stepped.append(weights)
    for name, two, one, before in zip(("w13", "w2"), *stepped, (problem.w13_E2IH, problem.w2_EHI), strict=True):
        assert_bitwise(two, one, name)
        assert_bitwise(two[4:], before[4:] * (1 - 0.1 * 0.1), f"{name} of idle experts decays and nothing else")


@pytest.mark.parametrize("tokens", [0, 16])
def test_nothing_is_routed(backend, tokens, device):
    problem = make_problem(ProblemSpec((tokens,), 256, 128, 4, 2), device)
    need(backend, problem)
    problem.topk_ids[0].fill_(-1)
    for name, value in run_on(problem, backend).joined().items():
        assert not bool(value.any()), name


@pytest.mark.parametrize("tokens", [(0, 33), (33, 0), (0, 0), (17, 1), (0, 512)], ids=str)
def test_ranks_with_empty_batches(backend, tokens, device):
    problem = make_problem(ProblemSpec(tokens, 256, 128, 8, 2), device)
    got = check(problem, backend)
    assert all(out.requires_grad and out.shape == (t, 256) for out, t in zip(got.outs, tokens, strict=True))


def test_a_rank_that_receives_no_rows(backend, device):
    problem = make_problem(ProblemSpec((64, 64), 256, 128, 8, 2, "first_rank"), device)
    got = check(problem, backend)
    assert not bool(got.dw13[4:].any()) and not bool(got.dw2[4:].any())


def test_masked_slots_add_nothing(backend, device):
    problem = make_problem(ProblemSpec((64,), 256, 128, 16, 8), device)
    ids, weights = problem.topk_ids[0], problem.topk_weights[0]
    ids[torch.rand(ids.shape, device=device) < 0.3] = -1
    ids[5], ids[63] = -1, -1
    want = check(problem, backend)
    weights[ids < 0] = torch.where(torch.rand(int((ids < 0).sum()), device=device) < 0.5, float("nan"), 7.0)
    got = run_on(problem, backend)
    assert_same(got, want)
    assert not bool(got.outs[0][[5, 63]].any()) and not bool(got.dp[0][ids < 0].any())


def test_foreign_ids_are_masked_or_refused(backend, device):
    problem = make_problem(ProblemSpec((64,), 256, 128, 8, 2), device)
    need(backend, problem)
    masked = dataclasses.replace(problem, topk_ids=[problem.topk_ids[0].clone()])
    for at, value in (((3, 0), 8), ((9, 1), 13), ((60, 0), 2**31 - 1)):
        problem.topk_ids[0][at], masked.topk_ids[0][at] = value, -1
    with pytest.raises(MegaMoEError, match=r"topk_ids.*(8|13|2147483647)"):
        run_on(problem, backend, debug=True)
    try:
        got = run_on(problem, backend)
    except MegaMoEError:
        pass
    else:
        assert_same(got, run_on(masked, backend))
    assert torch.ones(8, device=device).sum().item() == 8.0, "the next operation works"


def test_an_expert_twice_is_two_slots(backend, device):
    problem = make_problem(ProblemSpec((64,), 256, 128, 8, 4, "duplicates"), device)
    problem.topk_ids[0][0] = torch.tensor([3, 3, 7, 7])
    problem.topk_weights[0][0] = torch.tensor([0.1, 0.2, 0.3, 0.4])
    got = check(problem, backend)
    dp = got.dp[0][0]
    assert bool(torch.equal(dp[0], dp[1])) and bool(torch.equal(dp[2], dp[3])), "both slots of an expert see the same A"


@pytest.mark.parametrize("recipe", RECIPES, ids=recipe_id)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_routing_on_four_ranks(backend, routing, recipe, device):
    problem = make_problem(ProblemSpec((40, 0, 130, 7), 256, 128, 8, 3, routing), device)
    assert_same(check(problem, backend, recipe), run_on(problem.on_one_rank(), backend, recipe))


def test_id_and_weight_dtypes(backend, device):
    problem = make_problem(ProblemSpec((33,), 256, 128, 8, 2), device)
    need(backend, problem)
    want = run_on(problem, backend)

    def with_ids(dtype: torch.dtype) -> object:
        return run_on(dataclasses.replace(problem, topk_ids=[problem.topk_ids[0].to(dtype)]), backend)

    assert_same(with_ids(torch.int32), want)
    for dtype in (torch.int16, torch.uint8):
        with pytest.raises(TypeError, match="topk_ids: expected int32 or int64"):
            with_ids(dtype)
    rounded = problem.topk_weights[0].bfloat16()
    as_bf16 = dataclasses.replace(problem, topk_weights=[rounded])
    as_fp32 = dataclasses.replace(problem, topk_weights=[rounded.float()])
    a, b = run_on(as_bf16, backend), run_on(as_fp32, backend)
    assert_bitwise(a.outs[0].detach(), b.outs[0].detach(), "out")
    assert a.dp[0].dtype == torch.bfloat16


def test_a_static_capacity_gives_the_same_bits(backend, device):
    problem = make_problem(ProblemSpec((40, 8), 256, 128, 8, 3), device)
    need(backend, problem)
    want = run_on(problem, backend)
    assert_same(run_on(problem, backend, Recipe(), capacity="worst"), want)
    assert_same(run_on(problem, backend, Recipe(), capacity=2048), want)
