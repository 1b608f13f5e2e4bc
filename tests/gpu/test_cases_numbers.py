"""Failures of other kernels over values: dirty padding, zero blocks, NaN, wide ranges, order of sums. Any backend."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megamoe import MegaMoE, MoEConfig, Recipe, mega_moe
from megamoe.cli.problem import ProblemSpec, make_problem
from megamoe.gates import GATES, sqnr_db
from tests.support.backend_cases import BACKENDS, RECIPES, assert_same, check, need, recipe_id, run_on, with_counts
from tests.support.compare import assert_bitwise
from tests.support.moe_calls import context_for, run

pytestmark = pytest.mark.parametrize("backend", BACKENDS)


@pytest.mark.parametrize("fill", [float("nan"), float("inf"), 3e38])
def test_dirty_memory_changes_nothing(backend, fill, device):
    problem = with_counts([1, 127, 129, 0, 5], device)
    need(backend, problem)
    want = run(problem, context_for(problem, backend=backend))
    for size in (1 << 12, 1 << 16, 1 << 20, 1 << 24):
        held = [torch.full((size // 4,), fill, device=device) for _ in range(32)]
        del held
    assert_same(run(problem, context_for(problem, backend=backend)), want)


@pytest.mark.parametrize("recipe", RECIPES, ids=recipe_id)
def test_padding_stays_out_of_weight_gradients(backend, recipe, device):
    check(with_counts([1, 127, 129, 0, 5], device), backend, recipe)


@pytest.mark.parametrize("fill", [float("nan"), float("inf"), 3e38])
@pytest.mark.parametrize("tokens", [1, 7, 31, 32, 33])
def test_rows_behind_the_batch_are_not_read(backend, fill, tokens, device):
    problem = make_problem(ProblemSpec((tokens,), 256, 128, 4, 2), device)
    need(backend, problem)
    longer = torch.full((tokens + 64, 256), fill, dtype=torch.bfloat16, device=device)
    longer[:tokens] = problem.xs[0]
    assert_same(run_on(dataclasses.replace(problem, xs=[longer[:tokens]]), backend), run_on(problem, backend))


def test_a_nan_stays_in_its_row(backend, device):
    problem = make_problem(ProblemSpec((64,), 256, 128, 4, 1), device)
    need(backend, problem)
    problem.topk_ids[0] = torch.arange(64, device=device)[:, None] % 4
    want = run_on(problem, backend).outs[0].detach()
    problem.xs[0][6, 17] = float("nan")  # a token of expert 2
    got = run_on(problem, backend).outs[0].detach()
    assert bool(got[6].isnan().all())
    others = torch.arange(64, device=device) != 6
    assert_bitwise(got[others], want[others], "out of the other tokens")


@pytest.mark.parametrize("weights", ["fp8", "bf16"])
def test_a_second_checkpoint_reaches_the_backward(backend, weights, device):
    """The transposed copies of frozen weights follow what is loaded over them."""
    need(backend, make_problem(ProblemSpec((64,), 256, 128, 4, 2), device))
    config = MoEConfig(256, 128, num_experts=4, top_k=2, initializer_range=0.1)
    layer, other = (MegaMoE(config, weights=weights, backend=backend, device=device) for _ in range(2))
    x, dout = (torch.randn(64, 256, device=device).bfloat16() for _ in range(2))
    grads = []
    for model, state in ((layer, None), (layer, other.state_dict()), (other, None)):
        model.requires_grad_(False)
        if state is not None:
            model.load_state_dict(state)
        leaf = x.clone().requires_grad_()
        model(leaf).backward(dout)
        grads.append(leaf.grad)
    assert_bitwise(grads[1], grads[2], "dx after the second load")
    assert not torch.equal(grads[0], grads[1])


def test_zero_blocks(backend, device):
    problem = make_problem(ProblemSpec((64,), 256, 128, 4, 2), device)
    problem.xs[0][3] = 0.0
    problem.xs[0][4, :128] = 0.0
    problem.w13_E2IH[0, :128, :128] = 0.0
    problem.w2_EHI[1] = 0.0
    problem.douts[0][7] = 0.0
    got = check(problem, backend)
    assert not bool(got.outs[0][3].any()) and not bool(got.dx[0][7].any())


def test_no_gradient_at_all(backend, device):
    problem = make_problem(ProblemSpec((64,), 256, 128, 4, 2), device)
    need(backend, problem)
    problem.douts[0].zero_()
    for name, value in run_on(problem, backend).joined().items():
        assert name == "out" or not bool(value.any()), name


def test_rows_of_very_different_size(backend, device):
    """x from 1e-3 to 1e3 within one expert, dout the other way round: wgrad adds no error to the recipe's."""
    problem = with_counts([128, 200], device)
    need(backend, problem)
    size = torch.logspace(-3, 3, 328, device=device)[torch.randperm(328, device=device)]
    problem.xs[0] = (problem.xs[0] * size[:, None]).bfloat16()
    problem.douts[0] = (problem.douts[0] / size[:, None]).bfloat16()
    got, want = run_on(problem, backend).joined(), run_on(problem, "torch").joined()
    for name in ("dW13", "dW2"):
        mine, exact = (v.double().unflatten(1, (-1, 128)).unflatten(3, (-1, 128)) for v in (got[name], want[name]))
        share = ((mine - exact).square().sum((2, 4)) / exact.square().sum((2, 4))).sqrt().max().item()
        assert share <= 0.02, f"{name}: a 128 x 128 block is off by {share:.3f}"


@pytest.mark.parametrize("clamp", [10.0, None])
def test_the_clamp_is_the_same_on_every_path(backend, clamp, device):
    recipe = Recipe(clamp=clamp)
    problem = make_problem(ProblemSpec((64,), 256, 128, 4, 2), device)
    need(backend, problem, recipe)
    problem.w13_E2IH.mul_(15.0)
    got, want = run_on(problem, backend, recipe).joined(), run_on(problem, "torch", recipe).joined()
    assert sqnr_db(got["out"], want["out"]) >= GATES["fp8"].emulation_db
    for name in ("dx", "dp", "dW13", "dW2"):
        assert sqnr_db(got[name], want[name]) >= 40.0, name


@pytest.mark.parametrize("tokens", [(512,), (128, 128, 128, 128)], ids=len)
def test_runs_repeat_bit_for_bit(backend, tokens, device):
    problem = make_problem(ProblemSpec(tokens, 512, 256, 16, 8), device)
    need(backend, problem)
    want = run_on(problem, backend)
    for _ in range(10):
        assert_same(run_on(problem, backend), want)


def test_a_token_does_not_see_its_batch(backend, device):
    problem = make_problem(ProblemSpec((1024,), 256, 128, 8, 2), device)
    need(backend, problem)
    whole = run_on(problem, backend)
    for tokens in (1, 64):
        lists = {name: [getattr(problem, name)[0][:tokens]] for name in ("xs", "topk_ids", "topk_weights", "douts")}
        part = dataclasses.replace(
            problem, spec=dataclasses.replace(problem.spec, num_tokens=(tokens,)), **lists
        )  # fmt: skip
        got = run_on(part, backend)
        for name in ("outs", "dx", "dp"):
            a, b = getattr(got, name)[0].detach(), getattr(whole, name)[0].detach()
            assert_bitwise(a, b[:tokens], f"{name} of {tokens} tokens")


@pytest.mark.parametrize("tokens", [(64,), (40, 24)], ids=len)
def test_a_graph_replays_with_new_routing(backend, tokens, device):
    """Captured once; new inputs in the same memory, also another routing, give what an eager call gives."""
    problem = make_problem(ProblemSpec(tokens, 256, 128, 8, 2), device)
    need(backend, problem)
    options = {"capacity": "worst"} if len(tokens) > 1 else {}
    context = context_for(problem, backend=backend, **options)
    one = len(tokens) == 1
    lists = (problem.xs, problem.topk_ids, problem.topk_weights)
    arguments = [v[0] for v in lists] if one else list(lists)

    def call() -> list[torch.Tensor]:
        with torch.no_grad():
            out = mega_moe(*arguments, problem.w13_E2IH, problem.w2_EHI, context=context)
        return [out] if one else out

    side = torch.cuda.Stream(device)
    with torch.cuda.stream(side):
        call()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for seed in (1, 2):
        other = make_problem(dataclasses.replace(problem.spec, seed=seed, routing="masked"), device)
        others = (other.xs, other.topk_ids, other.topk_weights)
        for mine, theirs in zip(lists, others, strict=True):
            for to, value in zip(mine, theirs, strict=True):
                to.copy_(value)
        graph.replay()
        for r, want in enumerate(call()):
            assert_bitwise(captured[r], want, f"out of rank {r}, seed {seed}")
