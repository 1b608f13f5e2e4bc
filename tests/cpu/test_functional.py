"""mega_moe: against the oracle and the emulation, over ranks, and everything autograd may ask of it."""

import dataclasses
import itertools

import pytest
import torch

from megamoe import LocalWorld, MoEContext, Recipe, mega_moe
from megamoe.cli.problem import ProblemSpec, make_problem
from megamoe.errors import MegaMoERuntimeError
from megamoe.gates import GATES
from megamoe.quantize import quantize_weight
from megamoe.reference import emulate_backward, emulate_forward, oracle_backward, oracle_forward
from tests.support.compare import assert_backward_passes, assert_bitwise, assert_rows_pass
from tests.support.moe_calls import context_for, run

ROUTINGS = ["uniform", "zipf", "one_expert", "masked", "duplicates"]
RECIPES = [Recipe(), Recipe("bf16"), Recipe(scale_format="pow2"), Recipe(wgrad_operands="bf16")]


@pytest.fixture
def problem():
    return make_problem(ProblemSpec(num_tokens=(33,), hidden=192, intermediate=160, num_experts=6, top_k=3))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: f"{r.precision}-{r.scale_format}-{r.wgrad_operands}")
@pytest.mark.parametrize("routing", ROUTINGS)
def test_passes_the_gates_and_equals_the_emulation(recipe, routing):
    problem = make_problem(ProblemSpec((45,), 256, 192, 8, 3, routing))
    got = run(problem, MoEContext(recipe))
    inputs = problem.global_inputs()
    bounds = GATES[recipe.precision]
    assert_rows_pass(got.outs[0], oracle_forward(inputs).out_TH, bounds, "out")
    assert_backward_passes(got.backward(), oracle_backward(inputs, problem.douts[0]), bounds)
    emulated = emulate_forward(inputs, recipe)
    grads = emulate_backward(emulated, problem.douts[0], recipe)
    assert_bitwise(got.outs[0], emulated.out_TH, "out")
    assert_bitwise(got.dx[0], grads.dx_TH, "dx")
    assert_bitwise(got.dp[0], grads.dp_TK, "dp")
    assert_bitwise(got.dw13, grads.dw13_E2IH.bfloat16(), "dW13")
    assert_bitwise(got.dw2, grads.dw2_EHI.bfloat16(), "dW2")


@pytest.mark.parametrize("tokens", [(24, 24), (12, 12, 12, 12), (17, 0, 30, 1), (0, 48)], ids=str)
@pytest.mark.parametrize("routing", ["uniform", "masked", "first_rank"])
def test_any_number_of_ranks_gives_the_same_bits(tokens, routing):
    problem = make_problem(ProblemSpec(tokens, 128, 128, 8, 2, routing))
    many, one = run(problem).joined(), run(problem.on_one_rank()).joined()
    for name, value in many.items():
        assert_bitwise(value, one[name], name)


@pytest.mark.parametrize("save", ["pool", "repull", "recompute"])
@pytest.mark.parametrize("tokens", [(40,), (25, 15)], ids=str)
@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_what_is_saved_changes_no_bit(save, tokens, precision):
    problem = make_problem(ProblemSpec(tokens, 128, 128, 4, 2, "masked"))
    want = run(problem, context_for(problem, Recipe(precision))).joined()
    got = run(problem, context_for(problem, Recipe(precision), save=save)).joined()
    for name, value in got.items():
        assert_bitwise(value, want[name], name)


@pytest.mark.parametrize("save", ["pool", "repull", "recompute"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_are_none_exactly_where_frozen(save, ranks):
    tokens = (30,) if ranks == 1 else (13, 17)
    problem = make_problem(ProblemSpec(tokens, 128, 128, 4, 2))
    context = context_for(problem, save=save)
    want = run(problem, context)
    for requires in itertools.product([True, False], repeat=4):
        got = run(problem, context, requires)
        assert all(a.requires_grad == any(requires) for a in got.outs)
        found = (got.dx[0], got.dp[0], got.dw13, got.dw2)
        for need, grad, full in zip(requires, found, (want.dx[0], want.dp[0], want.dw13, want.dw2), strict=True):
            assert (grad is not None) == need, requires
            if grad is not None:
                assert_bitwise(grad, full, str(requires))


def test_no_weight_gradient_is_computed_for_frozen_weights(problem, monkeypatch):
    from megamoe import torch_steps

    calls = []
    original = torch_steps.wgrad
    monkeypatch.setattr(torch_steps, "wgrad", lambda *a, **k: calls.append(k["out"].shape) or original(*a, **k))
    run(problem, requires=(True, True, False, False))
    assert not calls
    run(problem, requires=(True, True, False, True))
    assert [tuple(shape) for shape in calls] == [(6, 192, 160)]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_grad_nothing_is_saved_and_the_bits_are_the_same(problem, mode):
    want = run(problem).outs[0]
    x = problem.xs[0].clone().requires_grad_()
    with mode():
        out = mega_moe(x, problem.topk_ids[0], problem.topk_weights[0], problem.w13_E2IH, problem.w2_EHI)
    assert not out.requires_grad
    assert_bitwise(out, want, "out")


def test_gradients_accumulate_over_calls(problem):
    single = run(problem)
    leaves = [t.clone().requires_grad_() for t in (problem.xs[0], problem.topk_weights[0])]
    w13, w2 = (t.float().requires_grad_() for t in (problem.w13_E2IH, problem.w2_EHI))
    for _ in range(3):
        out = mega_moe(leaves[0], problem.topk_ids[0], leaves[1], w13, w2)
        out.backward(problem.douts[0])
    torch.testing.assert_close(leaves[1].grad, 3 * single.dp[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(w13.grad, 3 * run_fp32(problem).dw13, rtol=1e-6, atol=0)
    torch.testing.assert_close(w2.grad, 3 * run_fp32(problem).dw2, rtol=1e-6, atol=0)


def run_fp32(problem):
    masters = dataclasses.replace(problem, w13_E2IH=problem.w13_E2IH.float(), w2_EHI=problem.w2_EHI.float())
    return run(masters)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weight_gradients_have_their_parameters_dtype(problem, dtype):
    masters = dataclasses.replace(problem, w13_E2IH=problem.w13_E2IH.to(dtype), w2_EHI=problem.w2_EHI.to(dtype))
    got, exact = run(masters), run_fp32(problem)
    assert got.dw13.dtype == got.dw2.dtype == dtype
    assert_bitwise(got.outs[0], exact.outs[0], "out")  # bf16 values that fp32 and fp16 hold too
    if dtype == torch.bfloat16:
        assert_bitwise(got.dw13, exact.dw13.to(dtype), "dW13 is rounded once")


def test_fp8_weights_are_used_as_they_are(problem):
    recipe = Recipe()
    w13, w2 = quantize_weight(problem.w13_E2IH, recipe, 2), quantize_weight(problem.w2_EHI, recipe)
    want = run(problem, requires=(True, True, False, False))
    x, p = problem.xs[0].clone().requires_grad_(), problem.topk_weights[0].clone().requires_grad_()
    out = mega_moe(x, problem.topk_ids[0], p, w13.data, w2.data, scales=(w13.scale, w2.scale))
    out.backward(problem.douts[0])
    assert_bitwise(out, want.outs[0], "out")
    assert_bitwise(x.grad, want.dx[0], "dx")
    assert_bitwise(p.grad, want.dp[0], "dp")


def test_fp8_weights_under_the_bf16_recipe_are_dequantised(problem):
    recipe = Recipe("bf16")
    w13, w2 = quantize_weight(problem.w13_E2IH, Recipe(), 2), quantize_weight(problem.w2_EHI, Recipe())
    tokens = (problem.xs[0], problem.topk_ids[0], problem.topk_weights[0])
    context = MoEContext(recipe)
    got = mega_moe(*tokens, w13.data, w2.data, scales=(w13.scale, w2.scale), context=context)
    want = mega_moe(*tokens, w13.dequantize(torch.bfloat16), w2.dequantize(torch.bfloat16), context=context)
    assert_bitwise(got, want, "out")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_x_of_another_dtype_is_rounded_and_out_has_its_dtype(problem, dtype):
    want = run(problem)
    x = problem.xs[0].to(dtype).requires_grad_()
    out = mega_moe(x, problem.topk_ids[0], problem.topk_weights[0], problem.w13_E2IH, problem.w2_EHI)
    assert_bitwise(out, want.outs[0].to(dtype), "out")
    out.backward(problem.douts[0].to(dtype))
    assert x.grad.dtype == dtype


def test_a_backward_may_be_repeated(problem):
    x = problem.xs[0].clone().requires_grad_()
    out = mega_moe(x, problem.topk_ids[0], problem.topk_weights[0], problem.w13_E2IH, problem.w2_EHI)
    (first,) = torch.autograd.grad(out, x, problem.douts[0], retain_graph=True)
    (second,) = torch.autograd.grad(out, x, problem.douts[0])
    assert_bitwise(second, first, "dx")
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(out, x, problem.douts[0])


def test_not_differentiable_twice(problem):
    x = problem.xs[0].clone().requires_grad_()
    out = mega_moe(x, problem.topk_ids[0], problem.topk_weights[0], problem.w13_E2IH, problem.w2_EHI)
    with pytest.raises(
        MegaMoERuntimeError, match="create_graph: expected False: the layer is not differentiable twice"
    ):
        torch.autograd.grad(out, x, problem.douts[0].clone().requires_grad_(), create_graph=True)


def test_some_ranks_outputs_unused():
    problem = make_problem(ProblemSpec((20, 20), 128, 128, 4, 2))
    xs = [x.clone().requires_grad_() for x in problem.xs]
    outs = mega_moe(
        xs, problem.topk_ids, problem.topk_weights, problem.w13_E2IH, problem.w2_EHI, context=context_for(problem)
    )
    outs[1].backward(problem.douts[1])
    want = run(dataclasses.replace(problem, douts=[torch.zeros_like(problem.douts[0]), problem.douts[1]]))
    assert_bitwise(xs[1].grad, want.dx[1], "dx of the rank that was used")
    assert not xs[0].grad.any()


def test_a_world_of_one_is_no_world(problem):
    want = run(problem).joined()
    for world in (LocalWorld(1), None):
        got = run(problem, MoEContext(world=world)).joined()
        for name, value in got.items():
            assert_bitwise(value, want[name], name)
    out = mega_moe(
        problem.xs, problem.topk_ids, problem.topk_weights, problem.w13_E2IH, problem.w2_EHI, context=MoEContext()
    )
    assert isinstance(out, list) and torch.equal(out[0], want["out"])


@pytest.mark.parametrize("capacity", ["worst", 1024])
def test_capacity_changes_no_bit(capacity):
    problem = make_problem(ProblemSpec((20, 28), 128, 128, 8, 2))
    want = run(problem).joined()
    got = run(problem, context_for(problem, capacity=capacity)).joined()
    for name, value in got.items():
        assert_bitwise(value, want[name], name)


def test_two_contexts_and_interleaved_backwards(problem):
    other = make_problem(ProblemSpec((11,), 192, 160, 6, 3, seed=1))
    want = [run(p) for p in (problem, other)]
    context = MoEContext()
    leaves, outs = [], []
    for p in (problem, other):
        x = p.xs[0].clone().requires_grad_()
        leaves.append(x)
        outs.append(mega_moe(x, p.topk_ids[0], p.topk_weights[0], p.w13_E2IH, p.w2_EHI, context=context))
    for i in (0, 1):
        outs[i].backward((problem, other)[i].douts[0])
        assert_bitwise(leaves[i].grad, want[i].dx[0], f"dx of call {i}")
