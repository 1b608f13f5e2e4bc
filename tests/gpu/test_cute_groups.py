"""The fused kernels over a process group of this process alone: every bit that of one rank without a group.

Rendezvous, table of addresses, collective close, and all-to-alls around the kernel.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("cutlass")

from cute_kernels.symmetric import SymmetricWorkspace
from megamoe import MegaMoE, MoEConfig, MoEContext, Recipe, mega_moe
from megamoe.backends import BACKENDS, release
from megamoe.cli.problem import ProblemSpec, make_problem
from tests.support.compare import assert_bitwise
from tests.support.moe_calls import Result, run
from tests.support.own_memory import own_gpu_bytes

SIZES: dict[str, Any] = dict(hidden=256, intermediate=128, num_experts=8, top_k=4)


@pytest.fixture(scope="module")
def nccl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A group of this process alone, over NCCL: the whole path of a group."""
    torch.cuda.set_device(0)
    store = dist.FileStore(str(tmp_path_factory.mktemp("nccl") / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
    yield dist.group.WORLD
    release(dist.group.WORLD)
    dist.destroy_process_group()


def problem_of(tokens: int = 150, routing: str = "zipf", seed: int = 0, **sizes: int) -> Any:
    return make_problem(ProblemSpec(**{**SIZES, **sizes}, num_tokens=(tokens,), routing=routing, seed=seed), "cuda")


def assert_same(got: Result, want: Result) -> None:
    for name, value in want.joined().items():
        assert_bitwise(got.joined()[name], value, name)


def test_workspace_in_symmetric_memory(nccl):
    """Rendezvous gives this rank's own address; close gives the memory back, and a second one does nothing."""
    before = own_gpu_bytes()
    w = SymmetricWorkspace(nccl, hidden=7168, num_experts=32, top_k=8, max_tokens=8192, capacity_rows=128)
    assert w.peers.tolist() == [w.blob.data_ptr()] and w.num_bytes > 900 * 2**20
    assert w.num_ctas == torch.cuda.get_device_properties(0).multi_processor_count
    num_bytes = w.num_bytes
    assert own_gpu_bytes() - before >= num_bytes - 2**20
    w.reset()
    w.close()
    w.close()
    assert own_gpu_bytes() - before <= num_bytes // 4, "an allocation of its own: nothing stays in a pool"


@pytest.mark.parametrize("transport", ["symmetric", "nccl"])
@pytest.mark.parametrize(
    ("tokens", "routing", "options"),
    [
        (150, "zipf", {}),
        (150, "masked", dict(save="repull")),
        (150, "duplicates", dict(save="recompute")),
        (0, "uniform", {}),
        (1, "uniform", dict(capacity=1024)),
        (333, "one_expert", {}),
        (100, "uniform", dict(capacity="worst", max_tokens_per_rank=150)),
    ],
    ids=str,
)
def test_same_bits_as_without_a_group(tokens, routing, options, transport, nccl):
    problem = problem_of(tokens, routing)
    save = options.get("save", "pool")
    want = run(problem, MoEContext(backend="cute", save=save))
    context = MoEContext(world=nccl, backend="cute", transport=transport, **options)
    for _ in range(2):
        assert_same(run(problem, context), want)


@pytest.mark.parametrize("transport", ["symmetric", "nccl"])
def test_clamp_and_powers_of_two(transport, nccl):
    problem, recipe = problem_of(200), Recipe(clamp=1.0, scale_format="pow2")
    want = run(problem, MoEContext(recipe, backend="cute"))
    assert_same(run(problem, MoEContext(recipe, world=nccl, backend="cute", transport=transport)), want)


def test_many_calls_of_changing_size_on_one_group(nccl):
    """Sizes that share a workspace and sizes that do not, forward and backward, against calls without a group."""
    context, alone = MoEContext(world=nccl, backend="cute", transport="symmetric"), MoEContext(backend="cute")
    for seed, tokens in enumerate((5, 200, 128, 0, 1000, 129, 128, 300, 1, 640, 128)):
        problem = problem_of(tokens, ("uniform", "zipf", "masked")[seed % 3], seed)
        assert_same(run(problem, context), run(problem, alone))
    (kept,) = BACKENDS["cute"].groups._of_group.values()
    for shared in kept._shared.values():
        shared.check()


@pytest.mark.parametrize("transport", ["symmetric", "nccl"])
def test_the_layer_trains(transport, nccl):
    config = MoEConfig(256, 128, num_experts=8, top_k=4, num_shared_experts=1, initializer_range=0.1)
    results = []
    for options in ({}, dict(world=nccl, transport=transport)):
        torch.manual_seed(0)
        layer = MegaMoE(config, backend="cute", device="cuda", **options)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        x = torch.randn(200, 256, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).bfloat16()
        for n in (200, 64, 200):
            layer(x[:n]).float().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        layer.eval()
        with torch.no_grad():
            results.append((layer(x), layer.experts.w13.clone()))
    for got, want in zip(*results, strict=True):
        assert_bitwise(got, want, transport)


def test_forward_in_a_graph(nccl):
    """Fixed sizes: nothing is exchanged by the host, so a graph can hold the call over symmetric memory."""
    first, second = problem_of(100, "uniform", 1), problem_of(100, "masked", 2)
    options = dict(capacity="worst", max_tokens_per_rank=100)
    context = MoEContext(world=nccl, backend="cute", transport="symmetric", **options)
    weights = (first.w13_E2IH, first.w2_EHI)
    with torch.no_grad():
        want = mega_moe(second.xs[0], second.topk_ids[0], second.topk_weights[0], *weights, context=context).clone()
        x, ids, p = (t[0].clone() for t in (first.xs, first.topk_ids, first.topk_weights))
        mega_moe(x, ids, p, *weights, context=context)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL has threads of its own
            out = mega_moe(x, ids, p, *weights, context=context)
        for static, other in zip((x, ids, p), (second.xs, second.topk_ids, second.topk_weights), strict=True):
            static.copy_(other[0])
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
    assert_bitwise(out, want, "out")


def test_group_and_layer_built_twenty_times(nccl):
    """Create group and layer, run, release, destroy: memory is back after each round."""
    used = []
    for cycle in range(20):
        group = dist.new_group([0], backend="nccl", device_id=torch.device("cuda", 0))
        context = MoEContext(world=group, backend="cute", transport="symmetric")
        run(problem_of(50 + 40 * cycle), context)
        if cycle % 2:  # else what is kept goes with the group
            release(group)
        del context
        dist.destroy_process_group(group)
        del group
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        used.append(own_gpu_bytes())
    assert used[-1] <= used[1] + 64 * 2**20, [n >> 20 for n in used]
