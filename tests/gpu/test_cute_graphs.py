"""CUDA graphs of the fused kernels: captured once, replayed with other x, ids and weights; errors of replays."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass")

from cute_kernels import backward_launch, launch, status
from tests.gpu.test_cute_backward import Backward
from tests.gpu.test_cute_forward import Case, World, bits
from tests.gpu.test_cute_hard import TIMEOUT_S, assert_no_errors
from tests.support.poison import nan_like

REPLAYS = 300


def varied(world: World, count: int) -> list[tuple]:
    """Calls of equal shapes: drawn routing; all rows to one expert; half of the slots to nobody; tokens that stand for
    nobody and hold NaN."""
    calls = [world.inputs(i) for i in range(count)]
    for i, (xs, ids, _) in enumerate(calls):
        for x, ids_of_rank in zip(xs, ids, strict=True):
            if i % 4 == 1:
                ids_of_rank.fill_(i % world.case.experts)
            if i % 4 == 2:
                ids_of_rank[torch.rand(ids_of_rank.shape, device="cuda") < 0.5] = -1
            if i % 4 == 3:
                ids_of_rank[100:], x[100:] = -1, float("nan")
    return calls


def copy_into(inputs, call) -> None:
    for part, new in zip(inputs, call, strict=True):
        for t, n in zip(part, new, strict=True):
            t.copy_(n)


def capture(world: World, inputs) -> tuple[torch.cuda.CUDAGraph, list[torch.Tensor]]:
    """A graph of one call of all ranks (forked from and joined with the capturing stream), and its results."""
    outs = [nan_like(x) for x in inputs[0]]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch.fused_forward(
            world.world.workspaces, *inputs, world.weights, timeout_s=TIMEOUT_S, streams=world.world.streams, outs=outs
        )
    return graph, outs


@pytest.mark.parametrize("tokens", [(150,), (150, 187)])
def test_one_graph_replayed_with_other_x_ids_and_weights(tokens):
    """Each replay equals the eager call."""
    case = Case("graph", tokens=tokens, save=False)
    world, alone = World(case), World(case)
    with world.world, alone.world:
        calls = varied(world, 12)
        want = [bits(alone.run(call)) for call in calls]
        inputs = [[t.clone() for t in part] for part in calls[0]]
        world.run(inputs)
        graph, outs = capture(world, inputs)
        different = torch.zeros((), dtype=torch.long, device="cuda")
        for n in range(REPLAYS):
            copy_into(inputs, calls[n % 12])
            for out in outs:
                out.fill_(float("nan"))
            graph.replay()
            for out, w in zip(outs, want[n % 12], strict=True):
                different += (out.view(torch.int16) != w).any()
        assert int(different) == 0
        assert_no_errors(world)


@pytest.mark.parametrize("tokens", [(150,), (150, 187)])
def test_graph_of_forward_and_backward_replayed_with_other_values(tokens):
    """Both in one graph; the forward's row order is a result of the replay that its backward reads."""
    world = World(Case("graph", tokens=tokens))
    with world.world:
        b = Backward(world)
        calls, all_douts = varied(world, 4), [b.douts(i) for i in range(4)]
        want = []
        for call, douts in zip(calls, all_douts, strict=True):
            results = world.run(call)
            grads = b.run(call[1], [r.buffers for r in results], douts)
            want.append([t.clone() for r, g in zip(results, grads, strict=True) for t in (r.out, g.dx, g.dp)])
        inputs = [[t.clone() for t in part] for part in calls[0]]
        douts = [d.clone() for d in all_douts[0]]
        graph = torch.cuda.CUDAGraph()
        options = {"timeout_s": TIMEOUT_S, "streams": world.world.streams}
        with torch.cuda.graph(graph):
            results = launch.fused_forward(world.world.workspaces, *inputs, world.weights, save=True, **options)
            grads = backward_launch.fused_backward(
                world.world.workspaces, douts, inputs[1], [r.buffers for r in results], b.weights, **options
            )
        got = [t for r, g in zip(results, grads, strict=True) for t in (r.out, g.dx, g.dp)]
        different = torch.zeros((), dtype=torch.long, device="cuda")
        for n in range(REPLAYS // 3):
            copy_into([*inputs, douts], [*calls[n % 4], all_douts[n % 4]])
            for t in got:
                t.fill_(float("nan"))
            graph.replay()
            for t, w in zip(got, want[n % 4], strict=True):
                different += ((t != w) & ~(t.isnan() & w.isnan())).any()
        assert int(different) == 0
        assert_no_errors(world)


@pytest.mark.parametrize("tokens", [(150,), (150, 187)])
def test_backward_behind_a_failed_forward_in_one_graph(tokens):
    """Nobody on the host looks between them: both give NaN, the error is the forward's, the next replay is right."""
    world = World(Case("graph", tokens=tokens, capacity=1024))
    with world.world:
        b = Backward(world)
        xs, ids, ps = world.inputs(1)
        good = [torch.where(torch.arange(len(i), device="cuda")[:, None] < 50, i, -1).to(i.dtype) for i in ids]
        douts = b.douts(1)
        inputs = [[t.clone() for t in part] for part in (xs, good, ps)]
        saved = [r.buffers for r in world.run(inputs)]
        want = [(g.dx.clone(), g.dp.clone()) for g in b.run(inputs[1], saved, douts)]
        graph = torch.cuda.CUDAGraph()
        options = {"timeout_s": TIMEOUT_S, "streams": world.world.streams}
        with torch.cuda.graph(graph):
            results = launch.fused_forward(world.world.workspaces, *inputs, world.weights, save=True, **options)
            grads = backward_launch.fused_backward(
                world.world.workspaces, douts, inputs[1], [r.buffers for r in results], b.weights, **options
            )
        wrong, full = ([torch.full_like(i, e) for i in ids] for e in (8, 1))
        failing = [(wrong, status.BAD_IDS)] + ([(full, status.OVERFLOW)] if len(tokens) > 1 else [])
        for bad, code in failing:
            for given, expected in ((bad, code), (good, None)):
                copy_into(inputs, (xs, given, ps))
                for g in grads:
                    g.dx.fill_(1.0), g.dp.fill_(1.0)
                graph.replay()
                torch.cuda.synchronize()
                if expected is None:
                    world.world.check()
                    for g, (dx, dp) in zip(grads, want, strict=True):
                        assert torch.equal(g.dx, dx) and torch.equal(g.dp, dp)
                else:
                    assert all(g.dx.isnan().all() and g.dp.isnan().all() for g in grads)
                    with pytest.raises(status.CallError) as raised:
                        world.world.check()
                    assert raised.value.code == expected


@pytest.mark.parametrize("tokens", [(150,), (150, 187)])
def test_no_call_waits_for_the_gpu(tokens):
    """Forward and backward, where torch makes every synchronisation an error."""
    world = World(Case("no sync", tokens=tokens))
    with world.world:
        b = Backward(world)
        inputs, douts = world.inputs(1), b.douts(1)
        want = bits(world.run(inputs))
        b.run(inputs[1], [r.buffers for r in world.run(inputs)], douts)
        options = {"timeout_s": TIMEOUT_S, "streams": world.world.streams}
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            results = launch.fused_forward(world.world.workspaces, *inputs, world.weights, save=True, **options)
            saved = [r.buffers for r in results]
            backward_launch.fused_backward(world.world.workspaces, douts, inputs[1], saved, b.weights, **options)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        world.world.check()
        assert all(torch.equal(r.out.view(torch.int16), w) for r, w in zip(results, want, strict=True))


@pytest.mark.parametrize("tokens", [(300,), (150, 187)])
def test_error_of_a_replay_is_raised_by_check_and_the_graph_goes_on(tokens):
    """A pool too small, ids out of range: neither needs a reset."""
    world = World(Case("graph overflow", tokens=tokens, capacity=512, save=False))
    with world.world:
        xs, many, ps = world.inputs(1)
        few = [torch.where((torch.arange(i.shape[0], device="cuda")[:, None] < 5), i, -1).to(i.dtype) for i in many]
        few = [torch.where(i % 4 < 2, i, -1).to(i.dtype) for i in few]
        inputs = [[t.clone() for t in part] for part in (xs, few, ps)]
        want = bits(world.run(inputs))
        graph, outs = capture(world, inputs)
        wrong = [torch.where(i >= 0, 8, i).to(i.dtype) for i in few]
        full = [torch.ones_like(i) for i in many]
        for ids, code, text in ((full, status.OVERFLOW, "overflow of the pool"), (wrong, status.BAD_IDS, "topk_ids")):
            copy_into(inputs, (xs, ids, ps))
            graph.replay()
            graph.replay()  # the first of two errors is kept
            copy_into(inputs, (xs, few, ps))
            torch.cuda.synchronize()
            assert all(out.isnan().all() for out in outs)
            with pytest.raises(status.CallError, match=text) as raised:
                world.world.check()
            assert raised.value.code == code
            graph.replay()
            world.world.check()
            assert all(torch.equal(out.view(torch.int16), w) for out, w in zip(outs, want, strict=True))


def test_replays_behind_a_timeout_end_at_once_until_reset():
    """A rank's graph that is replayed without the other's."""
    world = World(Case("graph timeout", tokens=(150, 187), save=False))
    with world.world:
        inputs = world.inputs(1)
        want = bits(world.run(inputs))
        graph, outs = capture(world, inputs)
        launch.fused_forward(
            world.world.workspaces[:1], *[part[:1] for part in inputs], world.weights[:1], timeout_s=0.2
        )
        for _ in range(5):  # nobody may wait for anybody here
            graph.replay()
        torch.cuda.synchronize()
        assert all(out.isnan().all() for out in outs)
        with pytest.raises(status.CallError, match="timeout at a rank's header, index 1"):
            world.world.check()
        world.world.reset()
        graph.replay()
        world.world.check()
        assert all(torch.equal(out.view(torch.int16), w) for out, w in zip(outs, want, strict=True))
