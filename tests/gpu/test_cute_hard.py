"""The fused forward under load: many calls in a row, two workspaces, two host threads, graphs replayed, odd grids, late
and missing ranks. Every wait on the device is bounded by the kernel's watchdog, so that nothing here can hang."""

from __future__ import annotations

import gc
import random
import threading
import time

import pytest
import torch

pytest.importorskip("cutlass")

from cute_kernels import launch
from megamoe import MegaMoE, MoEConfig
from tests.gpu.test_cute_forward import Case, World, bits
from tests.gpu.test_cute_forward_faults import launch_some
from tests.support.poison import nan_like

TIMEOUT_S = 10.0
DELAY_CYCLES = 200_000  # about 0.1 ms


def drawn_calls(world: World, count: int, seed: int) -> list[tuple]:
    """Calls whose T, routing and values differ; every rank has T = 0 in some."""
    case, rng, calls = world.case, random.Random(seed), []
    for i in range(count):
        xs, ids, ps = world.inputs(i)
        cut = [rng.choice((0, 1, rng.randint(0, t), t)) for t in case.tokens]
        if i % 4 == 1:  # all rows to one expert
            ids = [t.fill_(rng.randrange(case.experts)) for t in ids]
        if i % 4 == 2:  # half of the slots to nobody
            ids = [torch.where(torch.rand(t.shape, device="cuda") < 0.5, -1, t).to(t.dtype) for t in ids]
        calls.append(tuple([t[:n].contiguous() for t, n in zip(part, cut, strict=True)] for part in (xs, ids, ps)))
    return calls


def start(world: World, call: tuple, outs: list[torch.Tensor]) -> None:
    """Launches a call without waiting."""
    launch.fused_forward(
        world.world.workspaces, *call, world.weights, save=world.case.save, timeout_s=TIMEOUT_S,
        streams=world.world.streams, outs=outs,
    )  # fmt: skip


def assert_equal_bits(outs: list[torch.Tensor], want: list[torch.Tensor], where: str) -> None:
    for rank, (a, b) in enumerate(zip(outs, want, strict=True)):
        assert torch.equal(a.view(torch.int16), b), f"{where}, rank {rank}"


def assert_no_errors(world: World) -> None:
    errors = [e for w in world.world.workspaces if (e := w.error())]
    assert not errors, errors


@pytest.mark.parametrize(
    ("ranks", "count"),
    [(1, 300), (2, 300), pytest.param(3, 1000, marks=pytest.mark.slow), pytest.param(2, 1000, marks=pytest.mark.slow)],
)
def test_back_to_back_calls_with_delays(ranks, count):
    """One workspace, no wait between calls, ranks held up at random: every result is that of the call on its own."""
    case = Case("many", tokens=(200, 130, 90)[:ranks], experts=12, save=False)
    world, alone, rng = World(case), World(case), random.Random(ranks)
    with world.world, alone.world:
        calls = drawn_calls(world, 16, seed=3)
        want = [bits(alone.run(call)) for call in calls]
        order = [rng.randrange(len(calls)) for _ in range(count)]
        outs = [[nan_like(x) for x in calls[i][0]] for i in order]
        torch.cuda.synchronize()
        for i, out in zip(order, outs, strict=True):
            if rng.random() < 0.3:
                stream = rng.choice(world.world.streams or [torch.cuda.current_stream()])
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(rng.randrange(DELAY_CYCLES))
            start(world, calls[i], out)
        torch.cuda.synchronize()
        assert_no_errors(world)
        for n, (i, out) in enumerate(zip(order, outs, strict=True)):
            assert_equal_bits(out, want[i], f"call {n}")


def test_two_workspaces_interleaved_on_one_stream():
    worlds = [World(Case("a", experts=12, save=False)), World(Case("b", tokens=(90,), top_k=2, save=False), seed=1)]
    with worlds[0].world, worlds[1].world:
        calls = [drawn_calls(w, 6, seed=5) for w in worlds]
        want = [[bits(w.run(c)) for c in cs] for w, cs in zip(worlds, calls, strict=True)]
        outs = []
        for n in range(120):
            for w, cs in zip(worlds, calls, strict=True):
                outs.append([nan_like(cs[n % 6][0][0])])
                start(w, cs[n % 6], outs[-1])
        torch.cuda.synchronize()
        for w in worlds:
            assert_no_errors(w)
        for n, out in enumerate(outs):
            assert_equal_bits(out, want[n % 2][n // 2 % 6], f"call {n}")


def test_two_workspaces_at_once_on_halves_of_the_gpu():
    half = torch.cuda.get_device_properties(0).multi_processor_count // 2
    worlds, streams = [World(Case("half", save=False), seed=s) for s in (0, 1)], [torch.cuda.Stream() for _ in range(2)]
    for w in worlds:
        w.world = launch.LocalWorld(1, hidden=256, num_experts=8, top_k=4, max_tokens=160, num_ctas=half)
    with worlds[0].world, worlds[1].world:
        calls = [drawn_calls(w, 4, seed=6) for w in worlds]
        want = [[bits(w.run(c)) for c in cs] for w, cs in zip(worlds, calls, strict=True)]
        outs: list[list] = [[nan_like(cs[n % 4][0][0]) for n in range(100)] for cs in calls]
        torch.cuda.synchronize()
        for n in range(100):
            for w, cs, stream, out in zip(worlds, calls, streams, outs, strict=True):
                with torch.cuda.stream(stream):
                    start(w, cs[n % 4], [out[n]])
        torch.cuda.synchronize()
        for i, w in enumerate(worlds):
            assert_no_errors(w)
            for n, out in enumerate(outs[i]):
                assert_equal_bits([out], want[i][n % 4], f"workspace {i}, call {n}")


def test_two_host_threads_share_a_layer():
    """Their calls share one workspace: one after the other, each right."""
    config = MoEConfig(256, 128, num_experts=8, top_k=2, initializer_range=0.1)
    layer = MegaMoE(config, backend="cute", weights="fp8", device="cuda").eval()
    xs = [torch.randn(n, 256, device="cuda").bfloat16() for n in (100, 128)]
    with torch.no_grad():
        want = [layer(x) for x in xs]
    got: list[list[torch.Tensor]] = [[], []]
    failed: list[Exception] = []
    torch.cuda.synchronize()

    def work(i: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
                got[i] = [layer(xs[i]) for _ in range(100)]
                torch.cuda.current_stream().synchronize()
        except Exception as error:  # judged below, in the test's own thread
            failed.append(error)

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(timeout=30)
    assert not failed and not any(t.is_alive() for t in threads), failed
    for i in range(2):
        assert len(got[i]) == 100 and all(torch.equal(out, want[i]) for out in got[i]), f"thread {i}"


def test_calls_and_workspaces_leave_no_memory_behind():
    case, used = Case("leak", tokens=(150, 120), save=True), []
    world = World(case)
    calls = drawn_calls(world, 5, seed=8)
    with world.world:
        for n in range(200):
            start(world, calls[n % 5], [nan_like(x) for x in calls[n % 5][0]])
            if n % 20 == 19:
                torch.cuda.synchronize()
                used.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert used[-1][0] <= used[1][0] and used[-1][1] <= used[1][1], used
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated()
    for n in range(20):
        with launch.LocalWorld(2, hidden=256, num_experts=8, top_k=4, max_tokens=150 + n) as world.world:
            start(world, calls[0], [nan_like(x) for x in calls[0][0]])
            torch.cuda.synchronize()
    gc.collect()
    assert torch.cuda.memory_allocated() <= before + 4096, "close() gives everything back, and streams hold nothing"


def test_one_graph_replayed_300_times():
    """Captured with one routing, replayed with others: each replay equals the eager call."""
    case = Case("graph", save=False)
    world, alone = World(case), World(case)
    with world.world, alone.world:
        whole = [world.inputs(i) for i in range(12)]
        for i, (xs, ids, _) in enumerate(whole):
            if i % 4 == 1:
                ids[0].fill_(i % 8)
            if i % 4 == 2:
                ids[0][torch.rand(ids[0].shape, device="cuda") < 0.5] = -1
            if i % 4 == 3:  # tokens that stand for nobody hold NaN
                ids[0][100:], xs[0][100:] = -1, float("nan")
        want = [bits(alone.run(call)) for call in whole]
        x, ids, p = (part[0].clone() for part in whole[0])
        world.run(([x], [ids], [p]))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = launch.fused_forward(world.world.workspaces, [x], [ids], [p], world.weights, timeout_s=TIMEOUT_S)[0]
        different = torch.zeros((), dtype=torch.long, device="cuda")
        for n in range(300):
            for t, part in zip((x, ids, p), whole[n % 12], strict=True):
                t.copy_(part[0])
            out.out.fill_(float("nan"))
            graph.replay()
            different += (out.out.view(torch.int16) != want[n % 12][0]).any()
        assert int(different) == 0
        assert_no_errors(world)


def test_error_of_a_replay_is_seen_and_the_graph_goes_on():
    world = World(Case("graph overflow", tokens=(300,), capacity=256, save=False))
    with world.world:
        (x,), (many,), (p,) = world.inputs(1)
        few = torch.where((torch.arange(300, device="cuda")[:, None] < 5) & (many < 2), many, -1).to(many.dtype)
        ids = few.clone()
        want = bits(world.run(([x], [ids], [p])))[0]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = launch.fused_forward(world.world.workspaces, [x], [ids], [p], world.weights, timeout_s=TIMEOUT_S)[0]
        ids.copy_(many)
        graph.replay()
        torch.cuda.synchronize()
        assert out.out.isnan().all() and "overflow of the pool" in (world.world.workspaces[0].error() or "")
        world.world.reset()
        ids.copy_(few)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out.out.view(torch.int16), want) and world.world.workspaces[0].error() is None


@pytest.mark.parametrize("num_ctas", [78, 33, 8, 1])
def test_number_of_ctas_changes_no_bit(num_ctas):
    world = World(Case("grid", experts=12, save=False))
    with world.world:
        calls = drawn_calls(world, 4, seed=9)
        want = [bits(world.run(c)) for c in calls]
    world.world = launch.LocalWorld(1, hidden=256, num_experts=12, top_k=4, max_tokens=160, num_ctas=num_ctas)
    with world.world:
        for n, call in enumerate(calls):
            assert_equal_bits([r.out for r in world.run(call)], want[n], f"call {n}")


def test_reserved_sms_are_left_alone():
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    with launch.LocalWorld(1, hidden=256, num_experts=8, top_k=4, max_tokens=8, reserve_sms=20) as world:
        assert world.workspaces[0].num_ctas == sms - 20


def test_grid_that_cannot_be_resident_ends_with_an_error():
    world, sms = World(Case("too many", save=False)), torch.cuda.get_device_properties(0).multi_processor_count
    world.world = launch.LocalWorld(1, hidden=256, num_experts=8, top_k=4, max_tokens=160, num_ctas=sms + 8)
    with world.world:
        call = world.inputs(1)
        out = nan_like(call[0][0]).fill_(1.0)
        launch.fused_forward(world.world.workspaces, *call, world.weights, timeout_s=0.3, outs=[out])
        torch.cuda.synchronize()
        assert "timeout at the counts of all CTAs" in (world.world.workspaces[0].error() or "")
        assert out.isnan().all()
    world = World(Case("after", save=False))
    with world.world:  # the context is as good as before
        world.run(call)


def test_calls_beside_a_busy_stream():
    """Other kernels hold SMs whenever a call begins."""
    world, side, stop = World(Case("busy", save=False)), torch.cuda.Stream(), 100
    a = torch.randn(2048, 2048, device="cuda").bfloat16()
    with world.world:
        calls = drawn_calls(world, 4, seed=4)
        want = [bits(world.run(c)) for c in calls]
        outs = [[nan_like(calls[n % 4][0][0])] for n in range(stop)]
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            for _ in range(200):
                a @ a
        for n, out in enumerate(outs):
            start(world, calls[n % 4], out)
        torch.cuda.synchronize()
        assert_no_errors(world)
        for n, out in enumerate(outs):
            assert_equal_bits(out, want[n % 4], f"call {n}")


# ---------------------------------------------------------------- ranks that are late, missing or refuse


def test_each_rank_two_seconds_late_in_turn():
    world = World(Case("late", tokens=(150, 187)))
    with world.world:
        inputs = world.inputs(1)
        want = bits(world.run(inputs))
        for late in (0, 1):  # one call of either parity
            outs = {1 - late: launch_some(world, [1 - late], inputs, timeout_s=TIMEOUT_S)[0]}
            time.sleep(2.0)
            outs[late] = launch_some(world, [late], inputs, timeout_s=TIMEOUT_S)[0]
            torch.cuda.synchronize()
            assert_no_errors(world)
            assert_equal_bits([outs[0], outs[1]], want, f"rank {late} late")


def test_rank_that_comes_after_the_others_gave_up_ends_at_once():
    world = World(Case("too late", tokens=(150, 187)))
    with world.world:
        inputs = world.inputs(1)
        want = bits(world.run(inputs))
        (first,) = launch_some(world, [0], inputs, timeout_s=0.3)
        torch.cuda.synchronize()
        assert "timeout at a rank's header, index 1" in (world.world.workspaces[0].error() or "")
        begin = time.monotonic()
        (second,) = launch_some(world, [1], inputs, timeout_s=TIMEOUT_S)
        torch.cuda.synchronize()
        assert time.monotonic() - begin < TIMEOUT_S / 2
        assert first.isnan().all() and second.isnan().all()
        world.world.reset()
        assert_equal_bits([r.out for r in world.run(inputs)], want, "after reset")


def test_two_of_four_ranks_never_launch():
    world = World(Case("two of four", tokens=(50, 60, 0, 70), experts=16))
    with world.world:
        inputs = world.inputs(1)
        want = bits(world.run(inputs))
        outs = launch_some(world, [0, 3], inputs, timeout_s=0.3)
        torch.cuda.synchronize()
        assert all(out.isnan().all() for out in outs)
        errors = [world.world.workspaces[r].error() or "" for r in (0, 3)]
        assert any("timeout at a rank's header, index 1" in e for e in errors), errors
        world.world.reset()
        assert_equal_bits([r.out for r in world.run(inputs)], want, "after reset")


def test_call_refused_on_the_host_launches_no_rank():
    """Nothing has been launched, so the next call needs no reset."""
    world = World(Case("refused", tokens=(50, 60)))
    with world.world:
        xs, ids, ps = inputs = world.inputs(1)
        want = bits(world.run(inputs))
        with pytest.raises(ValueError, match="topk_weights: expected float32"):
            world.run((xs, ids, [ps[0], ps[1].half()]))
        assert_equal_bits([r.out for r in world.run(inputs)], want, "next call")
