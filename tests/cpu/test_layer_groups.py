"""The layer over gloo process groups: the bits of one rank, no hang whatever a rank lacks, errors on all alike."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megamoe import MegaMoE, MoEConfig, MoEContext, Recipe, mega_moe
from megamoe.cli.problem import ProblemSpec, make_problem
from megamoe.comm import Hierarchy, TensorParallel
from megamoe.errors import MegaMoEError, MegaMoERuntimeError, MegaMoETypeError, MegaMoEValueError
from tests.support.compare import assert_bitwise
from tests.support.distributed import run_ranks
from tests.support.moe_calls import run

CONFIG = MoEConfig(128, 64, num_experts=8, top_k=2, num_shared_experts=1, initializer_range=0.1)


def world():
    return dist.group.WORLD


def local(problem, rank):
    """This rank's leaves: x, topk_weights, w13, w2."""
    w13, w2 = problem.weights_of(rank)
    return [t.clone().requires_grad_() for t in (problem.xs[rank], problem.topk_weights[rank], w13, w2)]


def check(problem, rank, out, leaves):
    """A rank's results against one rank that holds everything."""
    want = run(problem.on_one_rank())
    tokens, num_ranks = problem.spec.num_tokens, len(problem.spec.num_tokens)
    x, p, w13, w2 = leaves
    for name, got, full in (("out", out, want.outs[0]), ("dx", x.grad, want.dx[0]), ("dp", p.grad, want.dp[0])):
        if got is not None:
            assert_bitwise(got.detach(), full.detach().split(tokens)[rank], f"{name} of rank {rank}")
    for name, weight, full in (("dW13", w13, want.dw13), ("dW2", w2, want.dw2)):
        if weight.requires_grad:
            assert_bitwise(weight.grad, full.chunk(num_ranks)[rank], f"{name} of rank {rank}")


def same_as_one_rank(rank, spec, options):
    context = MoEContext(world=world(), **options)
    for seed in range(2):
        problem = make_problem(ProblemSpec(**{**spec, "seed": seed}))
        leaves = local(problem, rank)
        out = mega_moe(leaves[0], problem.topk_ids[rank], *leaves[1:], context=context)
        assert out.grad_fn is not None
        out.backward(problem.douts[rank])
        check(problem, rank, out, leaves)


SPEC = dict(hidden=128, intermediate=64, num_experts=8, top_k=2)


@pytest.mark.parametrize(
    ("tokens", "routing", "options"),
    [
        ((20, 13), "uniform", {}),
        ((64, 64), "first_rank", {}),  # rank 1's experts are idle
        ((0, 33), "masked", dict(save="repull")),
        ((0, 0), "uniform", dict(save="recompute")),
        ((17, 0, 40, 1), "uniform", {}),
        ((17, 0, 40, 1), "uniform", dict(capacity="worst", max_tokens_per_rank=40)),
        ((20, 13), "uniform", dict(capacity=1024, max_tokens_per_rank=32, save="recompute")),
        ((20, 13), "uniform", dict(capacity=1024)),
    ],
    ids=str,
)
def test_same_bits_as_one_rank(tokens, routing, options):
    run_ranks(same_as_one_rank, len(tokens), SPEC | dict(num_tokens=tokens, routing=routing), options)


def unequal_needs(rank):
    """Ranks that need different gradients, or none, still take part in the backward of the others."""
    context = MoEContext(world=world())
    problem = make_problem(ProblemSpec((20, 13), **SPEC))
    for needs in ([True, True, True, True], [False] * 4), ([False, False, True, False], [True, False, False, False]):
        leaves = [t.detach().requires_grad_(need) for t, need in zip(local(problem, rank), needs[rank], strict=True)]
        out = mega_moe(leaves[0], problem.topk_ids[rank], *leaves[1:], context=context)
        out.backward(problem.douts[rank])
        assert [t.grad is not None for t in leaves] == needs[rank]
        check(problem, rank, out, leaves)


def test_ranks_may_need_different_gradients():
    run_ranks(unequal_needs, 2)


FIXED = dict(capacity=1024, max_tokens_per_rank=32)


def one_rank_is_wrong(rank, options, timeout):
    group = dist.new_group([0, 1], timeout=timedelta(seconds=timeout))
    context = MoEContext(world=group, **options)
    problem = make_problem(ProblemSpec((20, 13), **SPEC))
    leaves = local(problem, rank)
    ids, x = problem.topk_ids[rank], leaves[0]
    try:
        mega_moe(x, ids.short() if rank == 1 else ids, *leaves[1:], context=context)
    except MegaMoEError as error:
        return type(error), str(error)
    return None


@pytest.mark.parametrize("options", [{}, dict(debug=True), FIXED | dict(debug=True)], ids=str)
def test_an_error_on_one_rank_is_raised_on_all(options):
    (other, message), (own, own_message) = run_ranks(one_rank_is_wrong, 2, options, 60)
    assert own is MegaMoETypeError and "topk_ids: expected int32 or int64, got torch.int16" in own_message
    assert other is MegaMoERuntimeError and "rank 1" in message and "torch.int16" in message


def test_where_sizes_are_fixed_the_others_wait_and_are_told_why():
    (other, message), (own, own_message) = run_ranks(one_rank_is_wrong, 2, FIXED, 3)
    assert own is MegaMoETypeError and "topk_ids: expected int32 or int64, got torch.int16" in own_message
    assert other is MegaMoERuntimeError and message.startswith("group: expected every rank to join the call, got ")
    assert "raises alone: look for its error. With debug=True" in message


UNLIKE = {
    "hidden_size": ({}, {"hidden": 256}),
    "recipe.precision, bits": ({}, {"recipe": Recipe("bf16")}),
    "recipe.scale_format": ({}, {"recipe": Recipe(scale_format="pow2")}),
    "recipe.clamp": ({}, {"recipe": Recipe(clamp=2.0)}),
}


def unlike_calls(rank, options):
    for name, by_rank in UNLIKE.items():
        mine = dict(by_rank[rank])
        recipe = mine.pop("recipe", Recipe())
        problem = make_problem(ProblemSpec((5, 7), **{**SPEC, **mine}))
        context = MoEContext(recipe, world=world(), backend="torch", **options)
        x, p, w13, w2 = local(problem, rank)
        with pytest.raises(MegaMoEValueError, match=f"{name}.*: expected the value of rank 0, .* on every rank"):
            mega_moe(x, problem.topk_ids[rank], p, w13, w2, context=context)


@pytest.mark.parametrize("options", [{}, dict(capacity="worst", max_tokens_per_rank=16, debug=True)], ids=str)
def test_ranks_of_other_sizes_or_recipes_are_refused_on_all(options):
    run_ranks(unlike_calls, 2, options)


def ids_out_of_range(rank, options):
    context = MoEContext(world=world(), debug=True, **options)
    problem = make_problem(ProblemSpec((20, 13), **SPEC))
    leaves, ids = local(problem, rank), problem.topk_ids[rank]
    with pytest.raises(MegaMoEValueError, match=r"topk_ids\[1\]\[.*: expected -1 or an expert in \[0, 8\), got 99"):
        mega_moe(leaves[0], torch.where(ids == ids[0, 0], 99, ids) if rank else ids, *leaves[1:], context=context)
    out = mega_moe(leaves[0], ids, *leaves[1:], context=context)
    out.backward(problem.douts[rank])
    check(problem, rank, out, leaves)


@pytest.mark.parametrize("options", [{}, FIXED], ids=str)
def test_with_debug_ids_are_checked_on_all_ranks(options):
    run_ranks(ids_out_of_range, 2, options)


def too_many_tokens(rank, options):
    problem = make_problem(ProblemSpec((20, 40), **SPEC))
    leaves = local(problem, rank)
    with pytest.raises(MegaMoEError) as caught:
        mega_moe(leaves[0], problem.topk_ids[rank], *leaves[1:], context=MoEContext(world=world(), **options))
    return str(caught.value)


@pytest.mark.parametrize("options", [dict(max_tokens_per_rank=32), FIXED | dict(debug=True)], ids=str)
def test_more_tokens_than_their_bound_are_refused(options):
    for message in run_ranks(too_many_tokens, 2, options):
        assert "x: expected at most max_tokens_per_rank = 32 rows, got 40" in message


def layer_over_a_group(rank, subgroup):
    torch.manual_seed(5)
    whole = MegaMoE(CONFIG)
    if subgroup:  # global ranks 1 and 2 are ranks 0 and 1 of the group
        group = dist.new_group([1, 2])
        if rank == 0:
            return None
        rank -= 1
    else:
        group = world()
    layer = MegaMoE(CONFIG, world=group)
    state = whole.state_dict()
    for name in ("experts.w13", "experts.w2"):
        state[name] = state[name].chunk(2)[rank]
    layer.load_state_dict(state)
    xs = torch.randn(33, 128).bfloat16().split([21, 12])
    douts = torch.randn(33, 128).bfloat16().split([21, 12])
    x = xs[rank].clone().requires_grad_()
    out = layer(x)
    out.backward(douts[rank])
    full = torch.cat(xs).requires_grad_()
    want = whole(full)
    want.backward(torch.cat(douts))
    # the router's GEMM has another shape on each rank: routing weights agree to the last bits only
    torch.testing.assert_close(out, want.split([21, 12])[rank], rtol=0.02, atol=0.02)
    torch.testing.assert_close(x.grad, full.grad.split([21, 12])[rank], rtol=0.02, atol=0.02)
    torch.testing.assert_close(layer.experts.w13.grad, whole.experts.w13.grad.chunk(2)[rank], rtol=0.02, atol=0.02)
    gate = layer.router.weight.grad.float()
    dist.all_reduce(gate, group=group)
    torch.testing.assert_close(gate, whole.router.weight.grad.float(), rtol=0.05, atol=0.05)
    try:
        layer(torch.zeros(3, 127) if rank else x)
    except MegaMoEError as error:
        return type(error)
    return None


@pytest.mark.parametrize("subgroup", [False, True])
def test_the_module(subgroup):
    results = run_ranks(layer_over_a_group, 3 if subgroup else 2, subgroup)
    assert results[-2:] == [MegaMoERuntimeError, MegaMoEValueError]


def over_two_groups(rank):
    near = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    far = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    context = MoEContext(world=Hierarchy(near[rank // 2], far[rank % 2]))
    problem = make_problem(ProblemSpec((9, 0, 12, 5), **SPEC))
    leaves = local(problem, rank)
    out = mega_moe(leaves[0], problem.topk_ids[rank], *leaves[1:], context=context)
    out.backward(problem.douts[rank])
    check(problem, rank, out, leaves)


def test_hierarchy():
    run_ranks(over_two_groups, 4)


def refusals(rank):
    found = []
    for options in (
        dict(world=TensorParallel(world(), world())),
        dict(world=world(), capacity="worst"),
    ):
        try:
            MoEContext(**options)
        except MegaMoEError as error:
            found.append(str(error))
    return found


def test_refusals():
    for first, second in run_ranks(refusals, 2):
        assert first.startswith("world: expected None, a LocalWorld, a ProcessGroup or a Hierarchy, got TensorParallel")
        assert second.startswith(
            "max_tokens_per_rank: expected a bound of T, which capacity='worst' needs over a group"
        )


def alone_in_a_group(rank):
    problem = make_problem(ProblemSpec((20,), **SPEC))
    got, want = run(problem, MoEContext(world=world())).joined(), run(problem).joined()
    for name, value in got.items():
        assert_bitwise(value, want[name], name)


def test_a_group_of_one_is_no_group():
    run_ranks(alone_in_a_group, 1)
