"""The fused forward when something is wrong: missing or late ranks, pools too small; and many calls in a row."""

from __future__ import annotations

import time

import pytest
import torch

pytest.importorskip("cutlass")

from cute_kernels import launch
from tests.gpu.test_cute_forward import Case, World, bits, check
from tests.support.poison import nan_like


def launch_some(world: World, ranks: list[int], inputs, timeout_s: float) -> list[torch.Tensor]:
    """Launches only these ranks of a world, each on its own stream, without waiting."""
    xs, ids, ps = inputs
    outs = []
    for r in ranks:
        outs.append(nan_like(xs[r]))
        with torch.cuda.stream(world.world.streams[r]):
            launch.fused_forward(
                [world.world.workspaces[r]], [xs[r]], [ids[r]], [ps[r]], [world.weights[r]], save=world.case.save,
                timeout_s=timeout_s, outs=outs[-1:],
            )  # fmt: skip
    return outs


def test_missing_rank_times_out_and_the_next_call_is_right():
    world = World(Case("missing", tokens=(150, 187)))
    with world.world:
        inputs = world.inputs(1)
        world.run(inputs)
        torch.cuda.synchronize()
        (out,) = launch_some(world, [0], inputs, timeout_s=0.3)
        torch.cuda.synchronize()
        error = world.world.workspaces[0].error()
        assert error is not None and "timeout at a rank's header, index 1" in error
        assert out.isnan().all()
        assert "aborted" in (world.world.workspaces[1].error() or "aborted")
        world.world.reset()
        check(world, inputs, world.run(inputs))


def test_late_rank():
    world = World(Case("late", tokens=(150, 187)))
    with world.world:
        inputs = world.inputs(1)
        want = bits(world.run(inputs))
        torch.cuda.synchronize()
        outs = launch_some(world, [1], inputs, timeout_s=10.0)
        time.sleep(1.0)
        outs = launch_some(world, [0], inputs, timeout_s=10.0) + outs
        torch.cuda.synchronize()
        assert all(torch.equal(a, b.view(torch.int16)) for a, b in zip(want, outs, strict=True))
        assert not any(w.error() for w in world.world.workspaces)


@pytest.mark.parametrize("tokens", [(300,), (300, 200)])
def test_pool_too_small_is_found_by_all_ranks_and_nothing_is_left_behind(tokens):
    world = World(Case("overflow", tokens=tokens, capacity=256))
    with world.world:
        xs, ids, ps = world.inputs(1)
        outs = [nan_like(x).fill_(1.0) for x in xs]
        launch.fused_forward(
            world.world.workspaces, xs, ids, ps, world.weights, save=True, timeout_s=5.0, streams=world.world.streams,
            outs=outs,
        )  # fmt: skip
        torch.cuda.synchronize()
        for workspace, out in zip(world.world.workspaces, outs, strict=True):
            assert "overflow of the pool" in (workspace.error() or "")
            assert out.isnan().all()
        world.world.reset()
        ids = [torch.where(torch.arange(i.shape[0], device="cuda")[:, None] < 5, i, -1).to(i.dtype) for i in ids]
        ids = [torch.where(i > 1, -1, i) for i in ids]  # few enough experts and rows for 256 rows
        check(world, (xs, ids, ps), world.run((xs, ids, ps)))


@pytest.mark.parametrize("ranks", [1, 3])
def test_many_calls_with_changing_tokens_and_routing(ranks):
    """Calls follow each other without waiting; every result equals that of a call on its own."""
    case = Case("many", tokens=(200,) * ranks, experts=12, save=False)
    world, alone = World(case), World(case)
    generator = torch.Generator().manual_seed(5)
    with world.world, alone.world:
        calls = []
        for seed in range(60):
            xs, ids, ps = world.inputs(seed)
            cut = torch.randint(0, 201, (ranks,), generator=generator).tolist()
            calls.append(tuple([t[:n].contiguous() for t, n in zip(x, cut, strict=True)] for x in (xs, ids, ps)))
        outs = [[nan_like(x) for x in xs] for xs, _, _ in calls]
        for (xs, ids, ps), out in zip(calls, outs, strict=True):
            launch.fused_forward(
                world.world.workspaces, xs, ids, ps, world.weights, timeout_s=5.0, streams=world.world.streams, outs=out
            )
        torch.cuda.synchronize()
        assert not any(w.error() for w in world.world.workspaces)
        for i in range(0, 60, 7):
            want = bits(alone.run(calls[i]))
            assert all(torch.equal(a, b.view(torch.int16)) for a, b in zip(want, outs[i], strict=True))
