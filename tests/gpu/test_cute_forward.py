"""The fused forward on a Hopper GPU against the torch steps: row order and pool exactly, then its own numbers."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("cutlass")

from cute_kernels import launch
from cute_kernels import workspace as workspace_module
from cute_kernels.tile_config import TileConfig
from megamoe import torch_steps as steps
from megamoe.quantize import QuantizedRows, QuantizedWeight
from megamoe.recipe import Recipe
from megamoe.routing_plan import RankPlan, make_plan
from tests.support.poison import nan_like

TIMEOUT_S = 5.0
CODE_BITS = 27


@dataclass(frozen=True)
class Case:
    name: str
    tokens: tuple[int, ...] = (150,)  # of each rank
    hidden: int = 256
    intermediate: int = 128
    experts: int = 8
    top_k: int = 4
    routing: str = "zipf"
    clamp: float | None = None
    pow2: bool = False
    save: bool = True
    ids64: bool = False
    capacity: int | None = None
    config: TileConfig | None = None

    @property
    def recipe(self) -> Recipe:
        return Recipe(clamp=self.clamp, scale_format="pow2" if self.pow2 else "fp32")


CASES = [
    Case("plain"),
    Case("int64 ids", ids64=True),
    Case("one token", tokens=(1,)),
    Case("no token", tokens=(0,)),
    Case("k1", top_k=1, tokens=(333,)),
    Case("k3", top_k=3),
    Case("k12", top_k=12, experts=16),
    Case("one expert", experts=1, top_k=1),
    Case("all on one", routing="one", top_k=2, tokens=(700,)),
    Case("none anywhere", routing="none"),
    Case("duplicates", routing="duplicates"),
    Case("clamp", clamp=0.5),
    Case("pow2", pow2=True),
    Case("128 experts", experts=128, top_k=8, tokens=(500,)),
    Case("512 experts", experts=512, top_k=8, tokens=(500,)),
    Case("least", hidden=128, intermediate=128),
    Case("odd", hidden=384, intermediate=384),
    Case("two ranks", tokens=(150, 187)),
    Case("two ranks, one empty", tokens=(0, 187)),
    Case("three ranks", tokens=(150, 1, 300), experts=12),
    Case("four ranks", tokens=(10, 0, 300, 150), experts=16),
    Case("four ranks, all on one", tokens=(10, 0, 300, 150), experts=16, routing="one"),
    Case("wide", hidden=7168, intermediate=2048, experts=8, top_k=8, tokens=(300,), save=False),
    Case("wide, saved, two ranks", hidden=7168, intermediate=2048, experts=8, top_k=8, tokens=(100, 150)),
    Case("pieces", hidden=1280, config=TileConfig(pull_pieces=3, pull_batch=2)),
    Case("pieces, two ranks", hidden=1280, tokens=(90, 150), config=TileConfig(pull_pieces=2, pull_batch=1)),
    Case("small groups", tokens=(700,), config=TileConfig(group_blocks=2, pull_batch=5)),
    Case("few rows", tokens=(200,), experts=64, save=False),
    Case("few rows, two ranks", tokens=(120, 90), experts=64, save=False),
    Case("qwen", hidden=2048, intermediate=768, experts=16, top_k=8, tokens=(400,)),
]


def route(case: Case, seed: int) -> list[torch.Tensor]:
    g = torch.Generator(device="cuda").manual_seed(seed)
    popularity = 1.0 / torch.arange(1, case.experts + 1, device="cuda").float()
    popularity = popularity[torch.randperm(case.experts, device="cuda", generator=g)]
    if case.experts >= 8:
        popularity[torch.randperm(case.experts, device="cuda", generator=g)[: case.experts // 8]] = 0
    ids = []
    for t in case.tokens:
        replace = case.routing == "duplicates" or int((popularity > 0).sum()) < case.top_k
        i = torch.zeros(0, case.top_k, dtype=torch.long, device="cuda")
        if t:
            i = torch.multinomial(popularity.expand(t, -1), case.top_k, replacement=replace, generator=g)
            i[torch.rand(t, case.top_k, device="cuda", generator=g) < 0.1] = -1
        if case.routing == "one":
            i.fill_(case.experts // 2)
        if case.routing == "none":
            i.fill_(-1)
        ids.append(i if case.ids64 else i.int())
    return ids


class World:
    """A case's weights, workspaces and inputs."""

    def __init__(self, case: Case, seed: int = 0):
        self.case = case
        g = torch.Generator(device="cuda").manual_seed(seed)
        ranks = len(case.tokens)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device="cuda", generator=g)

        local = case.experts // ranks
        self.w13 = [
            steps.quantize_weight(normal(local, 2 * case.intermediate, case.hidden) / case.hidden**0.5, case.recipe, 2)
            for _ in range(ranks)
        ]
        self.w2 = [
            steps.quantize_weight(normal(local, case.hidden, case.intermediate) / case.intermediate**0.5, case.recipe)
            for _ in range(ranks)
        ]
        self.weights = [
            launch.prepare_weights(a.data, a.scale, b.data, b.scale) for a, b in zip(self.w13, self.w2, strict=True)
        ]
        self.world = launch.LocalWorld(
            ranks, hidden=case.hidden, num_experts=case.experts, top_k=case.top_k, max_tokens=max(*case.tokens, 1) + 3,
            capacity_rows=case.capacity,
        )  # fmt: skip
        self.generator = g

    def inputs(self, seed: int) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        g = torch.Generator(device="cuda").manual_seed(seed + 100)
        ids = route(self.case, seed)
        xs = [torch.randn(t, self.case.hidden, device="cuda", generator=g).bfloat16() for t in self.case.tokens]
        ps = [torch.rand(t, self.case.top_k, device="cuda", generator=g) + 0.1 for t in self.case.tokens]
        return xs, ids, ps

    def poison(self) -> None:
        for w in self.world.workspaces:
            w.blob[w.layout.order :].fill_(0xFF)
            for b in w._scratch.values():
                for t in vars(b).values():
                    t.view(-1).view(torch.uint8).fill_(0xFF)

    def run(self, inputs, plans=None) -> list[launch.ForwardResult]:
        xs, ids, ps = inputs
        outs = [nan_like(x) for x in xs]
        results = launch.fused_forward(
            self.world.workspaces, xs, ids, ps, self.weights, clamp=self.case.clamp, pow2_scales=self.case.pow2,
            save=self.case.save, plans=plans, config=self.case.config, timeout_s=TIMEOUT_S,
            streams=self.world.streams, outs=outs,
        )  # fmt: skip
        torch.cuda.synchronize()
        errors = [e for w in self.world.workspaces if (e := w.error())]
        assert not errors, errors
        return results


def rel(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)).item()


def check_plan(result: launch.ForwardResult, plan: RankPlan, top_k: int) -> None:
    b, rows = result.buffers, plan.num_rows
    assert torch.equal(b.offs, plan.offs), "offs"
    assert torch.equal(b.counts, plan.counts), "counts"
    code = (plan.source_rank << CODE_BITS) | (plan.token * top_k + plan.slot)
    assert torch.equal(b.codes[:rows], torch.where(plan.source_rank < 0, -1, code)), "codes"


def check(world: World, inputs, results) -> None:
    case, (xs, ids, ps) = world.case, inputs
    plan = make_plan(ids, case.experts)
    quantized = [steps.quantize_rows(x, case.recipe) for x in xs]
    pools = []
    for r, (result, mine) in enumerate(zip(results, plan.ranks, strict=True)):
        b, rows = result.buffers, mine.num_rows
        check_plan(result, mine, case.top_k)
        real = (mine.source_rank >= 0).nonzero().flatten()
        want = steps.dispatch(quantized, mine)
        weight = steps.dispatch_weights(ps, mine)
        assert torch.equal(b.p[:rows], weight), "weights"
        assert torch.equal(b.pool.view(torch.uint8)[real], want.data.view(torch.uint8)[real]), "pool"
        assert torch.equal(b.pool_s[:, real], want.scale[:, real]), "pool scales"
        if case.save:  # padding of a saved pool is zero
            assert torch.equal(b.pool.view(torch.uint8)[:rows], want.data.view(torch.uint8)), "pool padding"
            assert torch.equal(b.pool_s[:, :rows], want.scale), "padding scales"
        gate_up = steps.grouped_gemm(want, world.w13[r], mine)
        if case.save and real.numel():
            assert rel(b.gate_up[real], gate_up[real]) < 4e-3, "gate_up"
            gate_up = torch.where(mine.source_rank[:, None] >= 0, b.gate_up[:rows], gate_up)
        hq = steps.swiglu(gate_up, weight, case.recipe)
        mine_h = QuantizedRows(b.h[:rows], b.hs[:, :rows].contiguous(), k_major=True)
        if case.save and real.numel():  # by the rules, from the kernel's own gate and up
            check_h(b.h[real], b.hs[:, real], steps.swiglu(b.gate_up[real].cpu(), weight[real].cpu(), case.recipe))
        elif real.numel():
            assert rel(mine_h.dequantize()[real], hq.dequantize()[real]) < 1e-2, "h"
        pools.append(steps.grouped_gemm(QuantizedRows(mine_h.data, mine_h.scale, True), world.w2[r], mine))
    for r, result in enumerate(results):
        workspace = world.world.workspaces[r]
        t = case.tokens[r]
        y = workspace.view("y", torch.bfloat16, t, case.top_k, case.hidden)
        valid = (ids[r] >= 0) & (ids[r] < case.experts)
        own = torch.zeros(t, case.hidden, device="cuda")
        for j in range(case.top_k):
            own += torch.where(valid[:, j : j + 1], y[:, j].float(), 0.0)
        assert torch.equal(own.bfloat16(), result.out), f"the sum over k, {rel(result.out, own)}"
        want = steps.combine(pools, plan, r)
        if t:
            assert rel(result.out, want) < 8e-3, f"out {rel(result.out, want)}"


def check_h(h: torch.Tensor, hs: torch.Tensor, want: QuantizedRows) -> None:
    """Bytes and scales of h against torch on the CPU, whose sigmoid is no approximation: at most 1e-4 of the bytes may
    differ (one, of few), by one step of e4m3."""
    got, wanted = (t.view(torch.uint8).int().cpu() for t in (h, want.data))
    differ = int((got != wanted).sum())
    assert differ <= max(1, 1e-4 * got.numel()), f"hq: {differ} of {got.numel()} bytes differ"
    away = (steps_of_e4m3(got) - steps_of_e4m3(wanted)).abs()
    assert int(away.max()) <= 1, f"hq: {int(away.max())} steps away"
    assert rel(hs.cpu(), want.scale) < 1e-6, "hs"


def steps_of_e4m3(bits: torch.Tensor) -> torch.Tensor:
    """Numbers the values of e4m3 from below, from their bytes; both zeros are 0."""
    return torch.where(bits >= 128, 128 - bits, bits)


def bits(results) -> list[torch.Tensor]:
    return [r.out.clone().view(torch.int16) for r in results]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_forward(case):
    world = World(case)
    with world.world:
        for seed in (1, 2, 3):  # changing routing
            inputs = world.inputs(seed)
            world.poison()
            results = world.run(inputs)
            check(world, inputs, results)
            first = bits(results)
            for _ in range(3):
                assert all(torch.equal(a, b) for a, b in zip(first, bits(world.run(inputs)), strict=True)), (
                    "not repeatable"
                )


def test_plan_given():
    """With the plan of a first call given, a second one with other tokens equals one that plans itself."""
    world = World(Case("plan", tokens=(150, 187)))
    with world.world:
        xs, ids, ps = world.inputs(1)
        planned = world.run((xs, ids, ps))
        xs = [x + 1 for x in xs]
        want = bits(world.run((xs, ids, ps)))
        got = bits(world.run((xs, ids, ps), plans=[r.buffers for r in planned]))
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def test_token_alone_equals_token_in_batch():
    world = World(Case("alone", save=False))
    with world.world:
        (x,), (ids,), (p,) = world.inputs(1)
        out = bits(world.run(([x], [ids], [p])))[0]
        for t in (0, 7, 149):
            alone = bits(world.run(([x[t : t + 1]], [ids[t : t + 1]], [p[t : t + 1]])))[0]
            assert torch.equal(alone[0], out[t])


def test_number_of_ranks_changes_no_bit():
    case = Case("one", tokens=(300,), experts=12, save=False)
    one = World(case)
    with one.world:
        (x,), (ids,), (p,) = one.inputs(1)
        want = bits(one.run(([x], [ids], [p])))[0]
    for ranks in (2, 3, 4):
        split = World(Case(f"{ranks}", tokens=(300 // ranks,) * ranks, experts=12, save=False))
        w13 = QuantizedWeight(one.w13[0].data, one.w13[0].scale, 2)
        local = case.experts // ranks
        split.weights = [
            launch.prepare_weights(
                w13.data[r * local : (r + 1) * local], w13.scale[r * local : (r + 1) * local],
                one.w2[0].data[r * local : (r + 1) * local], one.w2[0].scale[r * local : (r + 1) * local],
            )
            for r in range(ranks)
        ]  # fmt: skip
        with split.world:
            got = torch.cat(bits(split.run((x.chunk(ranks), ids.chunk(ranks), p.chunk(ranks)))))
            assert torch.equal(got, want)


@pytest.mark.parametrize("tokens", [(512,), (200, 0, 131, 181)], ids=["one rank", "four ranks"])
def test_fifty_repeats_are_equal(tokens):
    world = World(Case("repeats", tokens=tokens, experts=16, top_k=8, save=False))
    with world.world:
        inputs = world.inputs(1)
        first = bits(world.run(inputs))
        for i in range(50):
            world.poison()
            assert all(torch.equal(a, b) for a, b in zip(first, bits(world.run(inputs)), strict=True)), i


def test_the_pull_stops_once_the_call_is_over():
    """Two CTAs pull 32768 rows each, which takes tens of milliseconds; the abort word is raised after three."""
    case = Case("abort", tokens=(8192,), hidden=1024, top_k=8, save=False, config=TileConfig(pull_batch=1))
    world = World(case)
    world.world.close()
    world.world = launch.LocalWorld(1, hidden=1024, num_experts=8, top_k=8, max_tokens=8192, num_ctas=2)
    with world.world:
        inputs = world.inputs(1)
        inputs[1][0].random_(0, 8)
        check(world, inputs, world.run(inputs))
        (workspace,) = world.world.workspaces
        buffers = workspace.scratch(case.intermediate)
        buffers.pool.view(torch.uint8).fill_(0xFF)
        epoch = torch.tensor([2], dtype=torch.int32).pin_memory()
        out = nan_like(inputs[0][0])
        torch.cuda.synchronize()
        launch.fused_forward(
            [workspace], *inputs, world.weights, config=case.config, timeout_s=TIMEOUT_S, outs=[out]
        )  # fmt: skip
        time.sleep(0.003)
        with torch.cuda.stream(torch.cuda.Stream()):
            workspace.flags()[workspace_module.ABORT, :1].copy_(epoch, non_blocking=True)
        torch.cuda.synchronize()
        assert out.isnan().all()
        is_pulled = (buffers.pool.view(torch.uint8)[: int(buffers.offs[-1])] != 0xFF).any(1)
        assert 0 < int(is_pulled.sum()) < 60000, int(is_pulled.sum())
        world.world.reset()
        check(world, inputs, world.run(inputs))


def test_graph_replay():
    world = World(Case("graph", save=False))
    with world.world:
        (x,), (ids,), (p,) = world.inputs(1)
        world.run(([x], [ids], [p]))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = launch.fused_forward(world.world.workspaces, [x], [ids], [p], world.weights, timeout_s=TIMEOUT_S)[
                0
            ].out
        for seed in (2, 3, 4):
            (x2,), (ids2,), (p2,) = world.inputs(seed)
            x.copy_(x2), ids.copy_(ids2), p.copy_(p2)
            graph.replay()
            torch.cuda.synchronize()
            got = out.clone()
            assert torch.equal(got, world.run(([x2], [ids2], [p2]))[0].out)


@pytest.mark.parametrize("tokens", [(150,), (150, 187)], ids=["one rank", "two ranks"])
def test_one_kernel_a_rank_and_no_memset(tokens):
    from torch.profiler import ProfilerActivity, profile

    world = World(Case("profile", tokens=tokens, save=False, ids64=True))
    with world.world:
        inputs = world.inputs(1)
        world.run(inputs)
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            launch.fused_forward(
                world.world.workspaces, *inputs, world.weights, timeout_s=TIMEOUT_S, streams=world.world.streams
            )
            torch.cuda.synchronize()
        events = [e.name for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        assert len(events) == len(tokens), events
