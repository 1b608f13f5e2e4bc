"""Failures that users of expert-parallel layers met, as cases: idle ranks, empty batches, gradients over ranks, groups.

Over gloo groups and LocalWorld; whatever the ranks, the results are those of one rank with the whole batch.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megamoe import LocalWorld, MegaMoE, MoEConfig, MoEContext, Recipe, mega_moe
from megamoe.cli.problem import Problem, ProblemSpec, make_problem
from megamoe.comm import Hierarchy
from megamoe.gates import GATES
from megamoe.reference import oracle_backward, oracle_forward
from tests.support.compare import assert_backward_passes, assert_bitwise, assert_rows_pass
from tests.support.distributed import run_ranks
from tests.support.moe_calls import Result, context_for, run
from tests.support.poison import poison_allocator
from tests.support.toy_checkpoint import write_shards

SMALL = {"hidden": 128, "intermediate": 128}


def of_rank(problem: Problem, rank: int) -> Problem:
    """What one process of a group holds: its tokens, its experts."""
    w13, w2 = problem.weights_of(rank)
    spec = dataclasses.replace(problem.spec, num_tokens=problem.spec.num_tokens[rank : rank + 1])
    lists = {name: [getattr(problem, name)[rank]] for name in ("xs", "topk_ids", "topk_weights", "douts")}
    return dataclasses.replace(problem, spec=spec, w13_E2IH=w13, w2_EHI=w2, **lists)


def assert_part_of(got: Result, whole: Result, problem: Problem, rank: int) -> None:
    """A process's results against one rank's with the whole batch and all experts, bit for bit."""
    begin = sum(problem.spec.num_tokens[:rank])
    tokens = slice(begin, begin + problem.spec.num_tokens[rank])
    each = problem.spec.num_experts // problem.spec.num_ranks
    experts = slice(rank * each, (rank + 1) * each)
    for name, value in got.joined().items():
        part = experts if name.startswith("dW") else tokens
        assert_bitwise(value, whole.joined()[name][part], f"{name} of rank {rank}")


def compare(problem: Problem, rank: int, group: Any, recipe: Recipe | None = None, **options: Any) -> Result:
    """Forward and backward over a group against one rank."""
    got = run(of_rank(problem, rank), MoEContext(recipe, world=group, **options))
    assert_part_of(got, run(problem.on_one_rank(), MoEContext(recipe)), problem, rank)
    return got


# ---------------------------------------------------------------- empty


def _idle_rank(rank: int) -> None:
    problem = make_problem(ProblemSpec((64, 64), **SMALL, num_experts=8, routing="first_rank"))
    assert max(int(ids.max()) for ids in problem.topk_ids) < 4
    context = MoEContext(world=dist.group.WORLD)
    steps = [run(of_rank(problem, rank), context) for _ in range(3)]
    for got in steps:
        assert_part_of(got, run(problem.on_one_rank()), problem, rank)
        if rank == 1:
            assert got.dw13.count_nonzero() == 0 and got.dw2.count_nonzero() == 0
    inputs = problem.global_inputs()
    want = oracle_backward(inputs, torch.cat(problem.douts))
    begin = 64 * rank
    bounds = GATES["fp8"]
    assert_rows_pass(steps[0].outs[0], oracle_forward(inputs).out_TH[begin : begin + 64], bounds, "out")
    assert_rows_pass(steps[0].dx[0], want.dx_TH[begin : begin + 64], bounds, "dx")


def test_a_rank_whose_experts_get_no_rows_joins_everything_and_has_zero_gradients() -> None:
    run_ranks(_idle_rank, 2)


def _empty_batches(rank: int) -> None:
    for tokens in [(0, 33), (33, 0), (0, 0), (17, 1), (0, 300)]:
        problem = make_problem(ProblemSpec(tokens, **SMALL, num_experts=4))
        for options in ({}, {"capacity": "worst", "max_tokens_per_rank": 300}, {"capacity": 1024}):
            compare(problem, rank, dist.group.WORLD, **options)
    layer = MegaMoE(MoEConfig(128, 128, 4, 2, num_shared_experts=1), world=dist.group.WORLD)
    for tokens in [(0, 5), (5, 0), (0, 0)]:
        x = torch.randn(tokens[rank], 128).bfloat16().requires_grad_()
        out = layer(x)
        assert out.shape == x.shape and out.requires_grad
        out.sum().backward()
        assert x.grad.shape == x.shape
        for name, parameter in layer.named_parameters():
            assert parameter.grad is not None, name


def test_ranks_without_tokens_stay_attached_and_the_others_are_right() -> None:
    run_ranks(_empty_batches, 2)


def ids_of_counts(counts: list[int], top_k: int) -> torch.Tensor:
    """[T, K] ids that name each expert so often; what is left over is -1."""
    flat = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    flat = torch.nn.functional.pad(flat, (0, -flat.numel() % top_k), value=-1)
    return flat[torch.randperm(flat.numel())].view(-1, top_k)


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_gradients_of_experts_without_rows_are_zero_in_dirty_memory(precision: str) -> None:
    busy = make_problem(ProblemSpec((218,), **SMALL, num_experts=6, top_k=2, routing="zipf"))
    ids = ids_of_counts([27, 0, 303, 74, 0, 32], 2)
    assert ids.shape == busy.topk_ids[0].shape
    case = dataclasses.replace(busy, topk_ids=[ids])
    context = context_for(case, Recipe(precision))
    results = []
    for _ in range(2):
        run(dataclasses.replace(busy, topk_ids=[torch.randint(0, 6, ids.shape)]), context)
        poison_allocator()
        results.append(run(case, context))
    for got in results:
        assert got.dw13[[1, 4]].count_nonzero() == 0 and got.dw2[[1, 4]].count_nonzero() == 0
        for name, value in got.joined().items():
            assert value.isfinite().all(), name
            assert_bitwise(value, results[0].joined()[name], name)
    want = oracle_backward(case.global_inputs(), case.douts[0])
    assert_backward_passes(results[0].backward(), want, GATES[precision])


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("tokens", [(0,), (0, 0), (16,), (16, 3)], ids=str)
def test_nothing_to_compute_gives_zeros(tokens: tuple[int, ...], compiled: bool) -> None:
    problem = make_problem(ProblemSpec(tokens, **SMALL, num_experts=4))
    masked = dataclasses.replace(problem, topk_ids=[torch.full_like(ids, -1) for ids in problem.topk_ids])
    call = torch.compile(mega_moe, fullgraph=True, backend="aot_eager") if compiled else mega_moe
    got = run(masked, context_for(problem, capacity="worst" if len(tokens) > 1 else None), call=call)
    for name, value in got.joined().items():
        assert value.count_nonzero() == 0, name
    assert [out.shape[0] for out in got.outs] == list(tokens)


def train_step(problem: Problem, context: MoEContext) -> list[torch.Tensor]:
    """The fp32 masters after one step of AdamW with weight decay."""
    masters = [torch.nn.Parameter(w.float()) for w in (problem.w13_E2IH, problem.w2_EHI)]
    optimizer = torch.optim.AdamW(masters, lr=0.01, weight_decay=0.1)
    tokens = (problem.xs, problem.topk_ids, problem.topk_weights)
    outs = mega_moe(*(tokens if len(problem.xs) > 1 else (t[0] for t in tokens)), *masters, context=context)
    torch.autograd.backward(outs, problem.douts if len(problem.xs) > 1 else problem.douts[0])
    assert all(p.grad is not None and p.grad.isfinite().all() for p in masters)
    optimizer.step()
    return [p.detach() for p in masters]


def _optimizer_step(rank: int) -> None:
    problem = make_problem(ProblemSpec((20, 12), **SMALL, num_experts=4, routing="first_rank"))
    got = train_step(of_rank(problem, rank), MoEContext(world=dist.group.WORLD))
    alone = train_step(problem.on_one_rank(), MoEContext())
    over_local = train_step(problem, context_for(problem))
    for mine, whole, local in zip(got, alone, over_local, strict=True):
        assert_bitwise(mine, whole[2 * rank : 2 * rank + 2], "parameters after the step")
        assert_bitwise(local, whole, "parameters after the step, virtual ranks")


def test_an_optimizer_step_moves_idle_experts_as_on_one_rank() -> None:
    run_ranks(_optimizer_step, 2)


# ---------------------------------------------------------------- gradients


def _weight_gradients(rank: int) -> None:
    problem = make_problem(ProblemSpec((23, 18), **SMALL, num_experts=4, top_k=3, routing="masked"))
    for ids, weights in zip(problem.topk_ids, problem.topk_weights, strict=True):
        weights[1::4, 0] = 0.0  # a slot with weight zero has a gradient all the same
        weights[ids < 0] = 7.0
    for precision in ("fp8", "bf16"):
        got = compare(problem, rank, dist.group.WORLD, Recipe(precision))
        ids, grad = problem.topk_ids[rank], got.dp[0]
        assert grad[ids < 0].count_nonzero() == 0
        zero_weight = (problem.topk_weights[rank] == 0) & (ids >= 0)
        assert zero_weight.any() and grad[zero_weight].count_nonzero() > 0
    # slot by slot <dout, what the expert gives at weight one>, from the oracle's forward
    inputs, dout = problem.global_inputs(), torch.cat(problem.douts).double()
    alone = inputs.topk_ids_TK
    begin = sum(problem.spec.num_tokens[:rank])
    for slot in range(3):
        only = torch.full_like(alone, -1)
        only[:, slot] = alone[:, slot]
        ones = dataclasses.replace(inputs, topk_ids_TK=only, topk_weights_TK=torch.ones_like(inputs.topk_weights_TK))
        want = (oracle_forward(ones).out_TH * dout).sum(1)[begin : begin + grad.shape[0]]
        spread = dout.norm(dim=1).mean() * 0.02
        assert (grad[:, slot].double() - want).abs().max() < spread, slot


def test_each_slot_gets_its_own_weight_gradient_and_no_other() -> None:
    run_ranks(_weight_gradients, 2)


@dataclasses.dataclass(frozen=True)
class Trained:
    """Gradients of one process: its tokens', the router's share, its experts'."""

    dx: torch.Tensor
    d_router: torch.Tensor
    dw13: torch.Tensor
    dw2: torch.Tensor


def make_layer(world: Any, rank: int = 0, num_ranks: int = 1) -> MegaMoE:
    """The same layer whatever the ranks: parameters by their global numbers."""
    generator = torch.Generator().manual_seed(7)
    layer = MegaMoE(MoEConfig(128, 128, 8, 2), world=world, weights="fp32")
    each = 8 // num_ranks
    with torch.no_grad():
        layer.router.weight.copy_(torch.randn(8, 128, generator=generator) * 0.2)
        for parameter in (layer.experts.w13, layer.experts.w2):
            whole = torch.randn(8, *parameter.shape[1:], generator=generator) * 0.09
            parameter.copy_(whole[rank * each : (rank + 1) * each])
    return layer


def train_layer(layer: MegaMoE, x: torch.Tensor, dout: torch.Tensor, through: str) -> Trained:
    """One backward through the routing weights only, through x only, or both."""
    x = x.clone().requires_grad_()
    ids, weights = layer.router(x)
    rows = x.detach() if through == "weights" else x
    out = layer.experts(rows, ids, weights.detach() if through == "x" else weights)
    out.backward(dout)
    router = layer.router.weight
    d_router = torch.zeros_like(router) if router.grad is None else router.grad
    return Trained(x.grad, d_router, layer.experts.w13.grad, layer.experts.w2.grad)


def _router_gradients(rank: int) -> None:
    torch.manual_seed(0)
    tokens = (9, 0, 14, 6)
    x, dout = torch.randn(sum(tokens), 128).bfloat16(), torch.randn(sum(tokens), 128).bfloat16()
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    for through in ("weights", "x", "both"):
        alone = train_layer(make_layer(None), x, dout, through)
        for group, sizes in ((dist.group.WORLD, tokens), (pair, (18, 11))):
            place = dist.get_rank(group)
            mine = slice(sum(sizes[:place]), sum(sizes[: place + 1]))
            got = train_layer(make_layer(group, place, len(sizes)), x[mine], dout[mine], through)
            if through == "x":
                assert_bitwise(got.dx, alone.dx[mine], "dx")
            else:  # the router's part of dx is a GEMM of another size
                torch.testing.assert_close(got.dx, alone.dx[mine], rtol=2e-2, atol=1e-3)
            dist.all_reduce(got.d_router, group=group)
            torch.testing.assert_close(got.d_router, alone.d_router, rtol=1e-4, atol=1e-5)
            assert (through == "x") == (got.d_router.count_nonzero() == 0)
            each = 8 // len(sizes)
            assert_bitwise(got.dw13, alone.dw13[place * each : (place + 1) * each], "dW13")


def test_gradients_of_x_and_router_are_the_same_for_any_number_of_ranks() -> None:
    run_ranks(_router_gradients, 4)


def _expert_gradient_norms(rank: int) -> None:
    torch.manual_seed(0)
    tokens = (9, 3, 14, 6)
    x = torch.randn(sum(tokens), 128).bfloat16()
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    # the convention: the loss is the sum over ranks, so a mean is the local sum over the number of all tokens
    for scale in (1.0, 1.0 / (sum(tokens) * 128)):
        dout = torch.full((sum(tokens), 128), scale).bfloat16()
        alone = train_layer(make_layer(None), x, dout, "both")
        whole = torch.stack([alone.dw13.double().square().sum(), alone.dw2.double().square().sum()])
        for group, sizes in ((dist.group.WORLD, tokens), (pair, (12, 20))):
            place = dist.get_rank(group)
            mine = slice(sum(sizes[:place]), sum(sizes[: place + 1]))
            got = train_layer(make_layer(group, place, len(sizes)), x[mine], dout[mine], "both")
            norms = torch.stack([got.dw13.double().square().sum(), got.dw2.double().square().sum()])
            dist.all_reduce(norms, group=group)
            assert whole.min() > 0
            torch.testing.assert_close(norms, whole, rtol=1e-12, atol=0)


def test_expert_gradients_and_their_norm_do_not_scale_with_the_ranks() -> None:
    run_ranks(_expert_gradient_norms, 4)


def _needs_differ(rank: int) -> None:
    """Whatever each rank wants gradients of, its peers get theirs: no collective depends on one rank's needs."""
    problem = make_problem(ProblemSpec((9, 7), **SMALL, num_experts=4))
    whole = run(problem.on_one_rank()).joined()
    mine = of_rank(problem, rank)
    for save in ("pool", "repull", "recompute"):
        context = MoEContext(world=dist.group.WORLD, save=save)
        for needs in itertools.product([True, False], repeat=4):
            requires = needs if rank == 0 else tuple(not need for need in needs)
            if any(requires):
                got = run(mine, context, requires)
            else:  # attached all the same: the peer waits for this rank's backward
                out = mega_moe(
                    mine.xs[0], mine.topk_ids[0], mine.topk_weights[0], mine.w13_E2IH, mine.w2_EHI, context=context
                )
                out.backward(mine.douts[0])
                continue
            tokens = slice(0, 9) if rank == 0 else slice(9, 16)
            experts = slice(2 * rank, 2 * rank + 2)
            found = {"dx": got.dx[0], "dp": got.dp[0], "dW13": got.dw13, "dW2": got.dw2}
            for (name, grad), need in zip(found.items(), requires, strict=True):
                assert (grad is not None) == need, (name, requires)
                if grad is not None:
                    assert_bitwise(grad, whole[name][experts if name.startswith("dW") else tokens], name)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out = mega_moe(
                mine.xs[0], mine.topk_ids[0], mine.topk_weights[0], mine.w13_E2IH, mine.w2_EHI, context=context
            )
        assert not out.requires_grad
        assert_bitwise(out, whole["out"][slice(0, 9) if rank == 0 else slice(9, 16)], "out")


def test_each_rank_may_want_other_gradients() -> None:
    run_ranks(_needs_differ, 2)


def _micro_batches(rank: int) -> None:
    layer = make_layer(dist.group.WORLD, rank, 2)
    batches = [
        make_problem(ProblemSpec(tokens, **SMALL, seed=i)) for i, tokens in enumerate([(5, 9), (0, 4), (12, 1), (3, 3)])
    ]
    parameters = [layer.experts.w13, layer.experts.w2, layer.router.weight]

    def gradients(problems: list[Problem]) -> list[torch.Tensor]:
        for i, problem in enumerate(problems):
            layer(problem.xs[rank], is_first_microbatch=i == 0).backward(problem.douts[rank])
        return [p.grad.clone() for p in parameters]

    singles = []
    for problem in batches:
        layer.zero_grad()
        singles.append(gradients([problem]))
    want = [sum(grads) for grads in zip(*singles, strict=True)]
    for set_to_none in (True, False, True):
        layer.zero_grad(set_to_none=set_to_none)
        for grad, total in zip(gradients(batches), want, strict=True):
            torch.testing.assert_close(grad, total, rtol=1e-5, atol=1e-6)


def test_micro_batches_add_up_and_nothing_is_carried_over() -> None:
    run_ranks(_micro_batches, 2)


# ---------------------------------------------------------------- groups


def _groups_one_after_the_other(rank: int) -> None:
    """A group that leaves a process out, then all, then two others; then two levels, there and again."""
    groups = [dist.new_group([0, 1, 2]), dist.group.WORLD, dist.new_group([1, 3])]
    near = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    far = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    for group, tokens in zip(groups, [(5, 0, 8), (4, 7, 1, 6), (3, 9)], strict=True):
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            continue
        problem = make_problem(ProblemSpec(tokens, **SMALL, num_experts=12, top_k=3))
        compare(problem, dist.get_rank(group), group)
    problem = make_problem(ProblemSpec((4, 7, 1, 6), **SMALL, num_experts=12, top_k=3))
    compare(problem, rank, Hierarchy(near, far))
    compare(problem, rank, Hierarchy(near, far), capacity="worst", max_tokens_per_rank=9)


def test_layers_on_overlapping_groups_and_two_levels() -> None:
    run_ranks(_groups_one_after_the_other, 4)


def write_named_experts(folder: Path) -> None:
    """A checkpoint whose expert e has the constant value e + 1 in its down projection and 1 / 64 in the others."""
    prefix = "model.layers.0.mlp."
    tensors = {f"{prefix}gate.weight": torch.randn(8, 128).bfloat16()}
    for e in range(8):
        for name, shape, value in (
            ("gate_proj", (64, 128), 1 / 64),
            ("up_proj", (64, 128), 1 / 64),
            ("down_proj", (128, 64), e + 1.0),
        ):
            tensors[f"{prefix}experts.{e}.{name}.weight"] = torch.full(shape, value).bfloat16()
    write_shards(folder, tensors)


def _sliced_checkpoint(rank: int, folder: str) -> None:
    config = MoEConfig(128, 64, 8, 2)
    whole = MegaMoE.from_checkpoint(folder, 0, config=config, recipe=Recipe("bf16"))
    x = torch.linspace(-1, 1, 6 * 128).view(6, 128).bfloat16()
    want = whole(x)
    for ranks in ((0, 2), (1, 3), (2, 3)):
        group = dist.new_group(list(ranks))
        if rank not in ranks:
            continue
        place = ranks.index(rank)
        poison_allocator()
        layer = MegaMoE.from_checkpoint(folder, 0, config=config, world=group, recipe=Recipe("bf16"))
        assert layer.experts.w2.shape[0] == 4
        for local in range(4):
            assert (layer.experts.w2[local] == place * 4 + local + 1).all(), (ranks, rank, local)
            assert (layer.experts.w13[local] == 1 / 64).all()
        mine = slice(0, 2) if place == 0 else slice(2, 6)
        assert_bitwise(layer(x[mine]), want[mine], "out")


def test_the_rank_in_the_group_decides_which_experts_are_loaded(tmp_path: Path) -> None:
    write_named_experts(tmp_path)
    run_ranks(_sliced_checkpoint, 4, str(tmp_path))


def _group_of_one(rank: int) -> None:
    group = [dist.new_group([0]), dist.new_group([1])][rank]
    problem = make_problem(ProblemSpec((21,), **SMALL, num_experts=16, top_k=8, seed=rank))
    for recipe in (Recipe(), Recipe("bf16")):
        for options in ({}, {"capacity": "worst", "max_tokens_per_rank": 32}, {"save": "recompute"}):
            compare(problem, 0, group, recipe, **options)
    for name, value in run(problem, MoEContext(world=LocalWorld(1))).joined().items():
        assert_bitwise(value, run(problem).joined()[name], name)


def test_a_group_of_one_is_no_group() -> None:
    run_ranks(_group_of_one, 2)


def test_checkpoint_names_itself(tmp_path: Path) -> None:
    """The case above can fail: its experts differ."""
    write_named_experts(tmp_path)
    assert json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    layer = MegaMoE.from_checkpoint(tmp_path, 0, config=MoEConfig(128, 64, 8, 2))
    assert [float(w.mean()) for w in layer.experts.w2.detach()] == [float(e + 1) for e in range(8)]
