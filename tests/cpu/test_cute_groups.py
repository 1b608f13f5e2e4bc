"""The fused backend over process groups, with emulated launches, over shared memory or all-to-alls.

The bits of one rank, whatever a rank lacks; workspaces that all ranks make and drop alike; faults that end all calls.
"""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("cutlass")

from megamoe import LocalWorld, MegaMoE, MoEConfig, MoEContext, mega_moe
from megamoe.backends import BACKENDS, cute_groups, release
from megamoe.cli.problem import ProblemSpec, make_problem
from megamoe.comm import Hierarchy, wires
from megamoe.comm.reach import why_not_symmetric
from megamoe.errors import CapacityError, MegaMoEError, MegaMoEValueError
from megamoe.overlap import OverlapConfig
from tests.cpu.test_layer_groups import check, local
from tests.support import fake_symmetric
from tests.support.compare import assert_bitwise
from tests.support.distributed import run_ranks
from tests.support.source_tree import ROOT, on_path

SPEC = dict(hidden=128, intermediate=128, num_experts=8, top_k=2)


def by_emulation():
    return fake_symmetric.install(pytest.MonkeyPatch())


def same_as_one_rank(rank, spec, options, nodes):
    by_emulation()
    world = dist.group.WORLD
    if nodes:
        each = dist.get_world_size() // nodes
        insides = [dist.new_group(list(range(n * each, (n + 1) * each))) for n in range(nodes)]
        betweens = [dist.new_group(list(range(p, nodes * each, each))) for p in range(each)]
        world = Hierarchy(insides[rank // each], betweens[rank % each])
    context = MoEContext(world=world, backend="cute", **options)
    for seed in range(2):
        problem = make_problem(ProblemSpec(**{**spec, "seed": seed}))
        leaves = local(problem, rank)
        out = mega_moe(leaves[0], problem.topk_ids[rank], *leaves[1:], context=context)
        assert out.grad_fn is not None
        out.backward(problem.douts[rank])
        check(problem, rank, out, leaves)
    return fake_symmetric.num_mapped()


@pytest.mark.parametrize(
    ("tokens", "routing", "options"),
    [
        ((20, 13), "uniform", dict(transport="nccl")),
        ((64, 64), "first_rank", dict(save="repull", transport="symmetric")),  # rank 1 receives nothing
        ((64, 64), "first_rank", dict(save="repull", transport="nccl")),
        ((64, 64), "first_rank", dict(save="recompute", transport="nccl")),
        ((0, 33), "masked", dict(transport="symmetric")),
        ((0, 0), "uniform", dict(save="recompute", transport="symmetric")),
        ((0, 0), "uniform", dict(transport="nccl")),
        ((17, 0, 40, 1), "duplicates", dict(transport="symmetric")),
        ((17, 0, 40, 1), "uniform", dict(capacity="worst", max_tokens_per_rank=40, transport="nccl")),
        ((20, 13), "uniform", dict(capacity=1024, max_tokens_per_rank=32, save="recompute", transport="symmetric")),
        ((20, 13), "uniform", dict(capacity=1024, save="repull", transport="symmetric")),
        ((30,), "uniform", dict(transport="symmetric")),  # a group of one
        ((30,), "uniform", dict(transport="nccl")),
    ],
    ids=str,
)
def test_same_bits_as_one_rank(tokens, routing, options):
    spec = SPEC | dict(num_tokens=tokens, routing=routing)
    mapped = run_ranks(same_as_one_rank, len(tokens), spec, options, 0)
    assert all((n > 0) == (options["transport"] == "symmetric") for n in mapped), "who maps the memory of peers"


@pytest.mark.parametrize("save", ["pool", "recompute"])
def test_same_bits_over_two_levels_of_groups(save):
    spec = SPEC | dict(num_tokens=(17, 0, 40, 1), routing="masked")
    assert run_ranks(same_as_one_rank, 4, spec, dict(save=save), 2) == [0] * 4


# ---------------------------------------------------------------- the layer


CONFIG = MoEConfig(128, 128, num_experts=8, top_k=2, num_shared_experts=1, initializer_range=0.1)


def trained(rank, transport, overlap):
    by_emulation()
    torch.manual_seed(0)
    whole = MegaMoE(CONFIG, backend="torch")
    torch.manual_seed(0)
    layer = MegaMoE(CONFIG, backend="cute", world=dist.group.WORLD, transport=transport, overlap=overlap)
    num_ranks = dist.get_world_size()
    mine = slice(rank * 8 // num_ranks, (rank + 1) * 8 // num_ranks)
    layer.load_state_dict(whole.state_dict() | {
        f"experts.{name}": getattr(whole.experts, name).detach()[mine] for name in ("w13", "w2")
    })  # fmt: skip
    x = torch.randn(20 * (rank + 1), 128, generator=torch.Generator().manual_seed(rank)).bfloat16()
    for _ in range(2):
        layer(x).float().square().sum().backward()
        layer.experts.backward_dw()
        with torch.no_grad():
            for p in layer.experts.parameters():
                p -= 0.1 * p.grad
                p.grad = None
    return layer(x).detach(), layer.experts.w13.detach()


@pytest.mark.parametrize(
    "overlap", [OverlapConfig(), OverlapConfig(wgrad="delayed", reserve_sms=8), OverlapConfig(steal_us=50.0)], ids=str
)
def test_the_layer_trains_alike_over_memory_and_over_all_to_alls(overlap):
    found = [run_ranks(trained, 2, transport, overlap) for transport in ("symmetric", "nccl")]
    for rank in range(2):
        for a, b in zip(found[0][rank], found[1][rank], strict=True):
            assert_bitwise(a, b, f"rank {rank}")
    assert found[0][0][0].isfinite().all() and found[0][0][0].any()


def seam(rank):
    """What a backward over all-to-alls does when, from the launch of dgrad on."""
    by_emulation()
    from cute_kernels import backward_launch, wgrad_launch

    events, patch = [], pytest.MonkeyPatch()

    def noted(name, function):
        return lambda *args, **kwargs: (events.append(name), function(*args, **kwargs))[1]

    def start(*args):
        events.append("start")
        finish = original(*args)
        return noted("wait", finish)

    original = wires.start_all_to_all
    patch.setattr(wires, "start_all_to_all", start)
    patch.setattr(backward_launch, "fused_backward", noted("dgrad", backward_launch.fused_backward))
    patch.setattr(wgrad_launch, "weight_gradients", noted("wgrad", wgrad_launch.weight_gradients))
    context = MoEContext(world=dist.group.WORLD, backend="cute", transport="nccl")
    problem = make_problem(ProblemSpec((20, 13), **SPEC))
    x, p, w13, w2 = local(problem, rank)
    mega_moe(x, problem.topk_ids[rank], p, w13, w2, context=context).sum().backward()
    return events[events.index("dgrad") :]


def test_weight_gradients_run_while_dx_is_on_its_way():
    for events in run_ranks(seam, 2):
        assert events == ["dgrad", "start", "wgrad", "wait", "start", "wait"], "dx, then dp"


# ---------------------------------------------------------------- choice


def choices(rank):
    by_emulation()
    world, w13 = dist.group.WORLD, torch.empty(4, 256, 128)
    found = {}
    for transport in (None, "symmetric", "nccl"):
        chosen = MoEContext(world=world, backend="cute", transport=transport).choose(w13, 2)
        found[transport] = (chosen.name, chosen.saves_codes)
    os.environ["LOCAL_WORLD_SIZE"] = "1"  # as if each were on a node of its own
    chosen = MoEContext(world=world, backend="cute").choose(w13, 2)
    found["two nodes"] = (chosen.name, chosen.saves_codes)
    match = "transport: expected 'nccl' for this world, got 'symmetric'. Its ranks are on 2 nodes"
    with pytest.raises(MegaMoEValueError, match=match):
        MoEContext(world=world, backend="cute", transport="symmetric")
    return found


def test_what_runs_over_a_group():
    (found, _) = run_ranks(choices, 2)
    assert found[None] == found["symmetric"] == ("cute", True), "over memory: row codes are saved"
    assert found["nccl"] == found["two nodes"] == ("cute", False), "over all-to-alls: a plan"


def test_transport_is_checked():
    with pytest.raises(MegaMoEValueError, match="transport: expected 'symmetric', 'nccl' or None, got 'ib'"):
        MoEContext(world=LocalWorld(2), transport="ib")
    with pytest.raises(MegaMoEValueError, match="transport: expected None without a process group, got 'nccl'"):
        MoEContext(world=LocalWorld(2), transport="nccl")
    assert why_not_symmetric(None) == "there is no process group"
    assert "not of a Hierarchy" in why_not_symmetric(Hierarchy(None, None))


# ---------------------------------------------------------------- workspaces


def workspace(group, **sizes):
    from cute_kernels.symmetric import SymmetricWorkspace

    sizes = {"hidden": 128, "num_experts": 8, "top_k": 2, "max_tokens": 64, "capacity_rows": 1024, **sizes}
    return SymmetricWorkspace(group, device=torch.device("cpu"), **sizes)


def reached(rank):
    by_emulation()
    group, num_ranks = dist.group.WORLD, dist.get_world_size()
    w = workspace(group)
    assert (w.rank, w.num_ranks, w.num_ctas) == (rank, num_ranks, 132), "all SMs: each rank has a GPU of its own"
    assert not w.flags()[0].any() and w.error() is None, "no call yet"
    offset = int(w.layout.y) + 8 * rank
    for address in w.peers.tolist():
        ctypes.c_int64.from_address(address + offset).value = 100 + rank
    dist.barrier()
    assert w.view("y", torch.int64, num_ranks).tolist() == [100 + r for r in range(num_ranks)]
    w.flags()[0] = 5
    w.reset()
    assert not w.flags()[0].any()
    w.close()
    w.close()
    del w
    gc.collect()
    return fake_symmetric.num_mapped()


def test_every_rank_reaches_every_blob_and_close_frees_all():
    assert run_ranks(reached, 3) == [0, 0, 0]


def unequal_needs(rank, transport):
    """Ranks that need different gradients, or none, still launch what the others wait for."""
    by_emulation()
    context = MoEContext(world=dist.group.WORLD, backend="cute", transport=transport, save="repull")
    problem = make_problem(ProblemSpec((20, 13), **SPEC))
    for needs in ([True] * 4, [False] * 4), ([False, False, True, False], [True, False, False, False]):
        leaves = [t.detach().requires_grad_(need) for t, need in zip(local(problem, rank), needs[rank], strict=True)]
        out = mega_moe(leaves[0], problem.topk_ids[rank], *leaves[1:], context=context)
        out.backward(problem.douts[rank])
        check(problem, rank, out, leaves)


@pytest.mark.parametrize("transport", ["symmetric", "nccl"])
def test_unequal_needs(transport):
    run_ranks(unequal_needs, 2, transport)


def unequal(rank):
    by_emulation()
    with pytest.raises(
        ValueError, match="max_tokens: expected the value of rank 0, 64, on every rank, got 65 on rank 1"
    ):
        workspace(dist.group.WORLD, max_tokens=64 + rank)
    return fake_symmetric.num_mapped()


def test_unequal_arguments_are_refused_on_all_ranks():
    assert run_ranks(unequal, 2) == [0, 0]


def several_groups(rank):
    """A group that leaves a rank out, then a larger one, then another."""
    by_emulation()
    made = [dist.new_group(ranks) for ranks in ([0, 1, 2], [0, 1, 2, 3], [1, 3])]
    seen = []
    for group, ranks in zip(made, ([0, 1, 2], [0, 1, 2, 3], [1, 3]), strict=True):
        if rank in ranks:
            with workspace(group) as w:
                seen.append((w.rank, w.num_ranks))
    return seen


def test_groups_that_overlap():
    assert run_ranks(several_groups, 4) == [
        [(0, 3), (0, 4)],
        [(1, 3), (1, 4), (0, 2)],
        [(2, 3), (2, 4)],
        [(3, 4), (1, 2)],
    ]


def call(context, rank, tokens, **change):
    problem = make_problem(ProblemSpec(**{**SPEC, "num_tokens": tokens, **change}))
    x, p, w13, w2 = local(problem, rank)
    return mega_moe(x, problem.topk_ids[rank], p, w13, w2, context=context)


def rebuilt(rank):
    """Group, layer, calls of changing size, release, group destroyed, again and again."""
    backend, mapped = by_emulation(), []
    for cycle in range(8):
        group = dist.new_group([0, 1])
        context = MoEContext(world=group, backend="cute", transport="symmetric")
        call(context, rank, (20 + 40 * cycle, 3)).sum().backward()
        mapped.append(fake_symmetric.num_mapped())
        if cycle % 2:
            release(group)
        del context
        dist.destroy_process_group(group)
        del group
        gc.collect()
        assert fake_symmetric.num_mapped() == 0, f"cycle {cycle}: nothing outlives its group"
    assert not len(backend.groups._of_group)
    return mapped


def test_rebuilding_group_and_layer_leaves_nothing_behind():
    assert run_ranks(rebuilt, 2) == [[2] * 8] * 2


def released_between(rank):
    by_emulation()
    context = MoEContext(world=dist.group.WORLD, backend="cute", transport="symmetric")
    problem = make_problem(ProblemSpec((20, 13), **SPEC))
    leaves = local(problem, rank)
    out = mega_moe(leaves[0], problem.topk_ids[rank], *leaves[1:], context=context)
    release(dist.group.WORLD)
    assert fake_symmetric.num_mapped() == 0
    out.backward(problem.douts[rank])
    check(problem, rank, out, leaves)


def test_a_backward_may_come_after_release():
    run_ranks(released_between, 2)


def sized(rank):
    backend = by_emulation()
    context = MoEContext(world=dist.group.WORLD, backend="cute")
    made = []
    for tokens in ((1, 1), (100, 128), (128, 2), (60, 60), (300, 10), (500, 1), (900, 1), (1200, 1)):
        call(context, rank, tokens).sum().backward()
        made.append(len(backend.groups._of_group[dist.group.WORLD]._shared))
    assert max(made) == cute_groups.KEPT_A_GROUP and made[0] == 1
    others = MoEContext(world=dist.group.WORLD, backend="cute")
    before = list(backend.groups._of_group[dist.group.WORLD]._shared.values())
    call(others, rank, (1200, 1)).sum().backward()
    after = list(backend.groups._of_group[dist.group.WORLD]._shared.values())
    assert set(map(id, before)) == set(map(id, after)), "another layer shares them"
    return made


def test_calls_of_like_sizes_share_a_workspace_and_few_are_kept():
    (first, second) = run_ranks(sized, 2)
    assert first == second


def test_sizes_are_rounded_up_in_eighths():
    assert [cute_groups.round_up(n) for n in (0, 1, 128, 129, 1024, 1025, 2048, 2049, 65537)] == [
        128, 128, 128, 256, 1024, 1152, 2048, 2304, 73728,
    ]  # fmt: skip
    for n in range(1, 5000):
        assert n <= cute_groups.round_up(n) <= max(n * 1.125 + 1, n + 127)


def overflows(rank):
    by_emulation()
    context = MoEContext(world=dist.group.WORLD, backend="cute", capacity=256)
    with pytest.raises(CapacityError, match="capacity: expected at least the 512 rows .*, got 256"):
        call(context, rank, (64, 64), routing="first_rank")
    return call(context, rank, (8, 8), routing="one_expert").isfinite().all().item()  # 32 rows of one expert


def test_capacity_too_small_is_refused_on_all_ranks():
    assert run_ranks(overflows, 2) == [True, True]


def refusing(rank):
    """Sizes are fixed, so nobody asks: a rank that finds a fault on its host takes part in the others' call all the
    same, once a call of these sizes has been made. The sizes of calls that come between are other ones."""
    backend, refused = by_emulation(), []
    pytest.MonkeyPatch().setattr("cute_kernels.launch.refuse", lambda workspace: refused.append(workspace.hidden))

    def context(name="cute"):
        return MoEContext(world=dist.group.WORLD, backend=name, capacity=1024, max_tokens_per_rank=64)

    def faulty(context, hidden, w13=None):
        problem = make_problem(ProblemSpec((20, 13), **SPEC | dict(hidden=hidden)))
        x, p, own, w2 = local(problem, rank)
        with pytest.raises(MegaMoEError, match="expected"):
            ids = problem.topk_ids[rank].to(torch.int16)
            mega_moe(x, ids, p, own if w13 is None else w13, w2, context=context)

    wide, narrow, other = context(), context(), context("torch")
    faulty(wide, 256)
    assert refused == [], "there is no such call yet"
    call(wide, rank, (20, 13), hidden=256)
    call(narrow, rank, (20, 13))
    faulty(wide, 256)
    assert refused == [256]
    (*_, last) = backend.groups._of_group[dist.group.WORLD]._shared
    assert last.hidden == 256, "used last, as on ranks that make the call"
    faulty(wide, 256, w13="none")
    assert refused == [256, 256], "what such a context has called is known"
    call(wide, rank, (20, 13))
    faulty(wide, 256, w13="none")
    assert refused == [256, 256], "either could be meant"
    faulty(wide, 128)
    call(other, rank, (20, 13))
    faulty(other, 128)
    return refused


def test_a_fault_on_the_host_ends_the_call_of_all():
    assert run_ranks(refusing, 2) == [[256, 256, 128]] * 2


def checked(rank, options):
    """With debug all ranks raise what one finds, also where sizes are fixed."""
    by_emulation()
    context = MoEContext(world=dist.group.WORLD, debug=True, **options)
    problem = make_problem(ProblemSpec((20, 13), **SPEC))
    x, p, w13, w2 = local(problem, rank)
    ids, found = problem.topk_ids[rank], []
    for wrong in (ids.to(torch.int16), torch.where(ids == ids[0, 0], 99, ids)):
        with pytest.raises(MegaMoEError) as caught:
            mega_moe(x, wrong if rank == 1 else ids, p, w13, w2, context=context)
        found.append(str(caught.value))
    call(context, rank, (20, 13)).sum().backward()
    return found


@pytest.mark.parametrize("fixed", [{}, dict(capacity=1024, max_tokens_per_rank=64)], ids=["exchanged", "fixed"])
@pytest.mark.parametrize("transport", ["symmetric", "nccl"])
def test_with_debug_all_ranks_raise_what_one_finds(transport, fixed):
    for found in run_ranks(checked, 2, dict(backend="cute", transport=transport) | fixed):
        assert "topk_ids: expected int32 or int64, got torch.int16" in found[0]
        assert "expected -1 or an expert in [0, 8), got 99" in found[1]


def test_release_of_what_is_not_kept_does_nothing():
    assert BACKENDS["cute"].release() is None


VANISH = """
import os, sys, torch, torch.distributed as dist
from datetime import timedelta
from megamoe import MoEContext, mega_moe
from megamoe.cli.problem import ProblemSpec, make_problem
rank, store = int(sys.argv[1]), dist.FileStore(sys.argv[2], 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=10))
problem = make_problem(ProblemSpec((20, 13), 128, 128, 8, 2))
context = MoEContext(world=dist.group.WORLD, backend="torch")
for step in range(10):
    w13, w2 = problem.weights_of(rank)
    x = problem.xs[rank].clone().requires_grad_()
    mega_moe(x, problem.topk_ids[rank], problem.topk_weights[rank], w13, w2, context=context).sum().backward()
    if rank == 1 and step == 2:
        os._exit(0)
"""


def test_when_a_process_is_gone_the_others_leave(tmp_path):
    environment = {**os.environ, **on_path(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", VANISH]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")], env=environment, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        _, said = processes[0].communicate(timeout=120)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert processes[0].returncode == 1 and "Error" in said, said[-2000:]
