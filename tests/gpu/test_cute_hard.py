"""The fused kernels under load: many calls, two streams, workspaces and host threads, late and missing ranks.

Every wait on the device is bounded by the kernel's watchdog, so that nothing here can hang.
"""

from __future__ import annotations

import gc
import random
import threading
import time

import pytest
import torch

pytest.importorskip("cutlass")

from cute_kernels import backward_launch, launch
from megamoe import MegaMoE, MoEConfig
from tests.gpu.test_cute_backward import Backward
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


def pinned_bytes() -> int:
    """Pinned host memory that tensors hold."""
    return torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)


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


@pytest.mark.parametrize("tokens", [(160,), (150, 187)])
def test_calls_from_two_streams_on_one_workspace(tokens):
    """They run one after the other, in the order in which the host made them."""
    world, alone = World(Case("streams", tokens=tokens, save=False)), World(Case("streams", tokens=tokens, save=False))
    streams, rng = [torch.cuda.Stream() for _ in range(2)], random.Random(1)
    with world.world, alone.world:
        calls = drawn_calls(world, 8, seed=2)
        want = [bits(alone.run(c)) for c in calls]
        outs = [[nan_like(x) for x in calls[n % 8][0]] for n in range(200)]
        torch.cuda.synchronize()
        for n, out in enumerate(outs):
            with torch.cuda.stream(streams[rng.randrange(2)]):
                if rng.random() < 0.3:
                    torch.cuda._sleep(rng.randrange(DELAY_CYCLES))
                start(world, calls[n % 8], out)
        torch.cuda.synchronize()
        assert_no_errors(world)
        for n, out in enumerate(outs):
            assert_equal_bits(out, want[n % 8], f"call {n}")


@pytest.mark.parametrize("rounds", [150, pytest.param(3000, marks=pytest.mark.slow)])
def test_tiny_calls_of_four_ranks_forward_and_backward_in_turn(rounds):
    """T of 0 to 4, ranks held up at random; each backward belongs to one of the last two forwards."""
    world, rng = World(Case("tiny", tokens=(4, 4, 4, 4), experts=16)), random.Random(7)
    with world.world:
        b = Backward(world)
        calls = drawn_calls(world, 8, seed=1)
        douts = [[torch.randn_like(x) for x in call[0]] for call in calls]
        want = []
        for call, dout in zip(calls, douts, strict=True):
            results = world.run(call)
            grads = b.run(call[1], [r.buffers for r in results], dout)
            want.append([bits(results), [g.dx.view(torch.int16) for g in grads], [g.dp for g in grads]])
        before: tuple = ()
        wrong = torch.zeros((), dtype=torch.long, device="cuda")
        for _ in range(rounds):
            i = rng.randrange(8)
            with torch.cuda.stream(rng.choice(world.world.streams)):
                torch.cuda._sleep(rng.randrange(DELAY_CYCLES // 4))
            outs = [nan_like(x) for x in calls[i][0]]
            results = launch.fused_forward(
                world.world.workspaces, *calls[i], world.weights, save=True, timeout_s=TIMEOUT_S,
                streams=world.world.streams, outs=outs,
            )  # fmt: skip
            here = (i, [r.buffers for r in results])
            j, saved = before if before and rng.random() < 0.5 else here
            before = here
            grads = backward_launch.fused_backward(
                world.world.workspaces, douts[j], calls[j][1], saved, b.weights, timeout_s=TIMEOUT_S,
                streams=world.world.streams,
            )  # fmt: skip
            got = [(o.view(torch.int16), w) for o, w in zip(outs, want[i][0], strict=True)]
            got += [(g.dx.view(torch.int16), w) for g, w in zip(grads, want[j][1], strict=True)]
            got += [(g.dp, w) for g, w in zip(grads, want[j][2], strict=True)]
            for a, w in got:
                wrong += (a != w).any() if w.numel() else 0
        torch.cuda.synchronize()
        assert_no_errors(world)
        assert int(wrong) == 0


def test_very_different_numbers_of_tokens():
    """T = 17, 0, 4096, 1 on four ranks, in another order every step."""
    world, alone = (World(Case("skewed", tokens=(4096,) * 4, experts=16, save=False)) for _ in range(2))
    with world.world, alone.world:
        xs, ids, ps = world.inputs(1)
        sizes, rng = [17, 0, 4096, 1], random.Random(3)
        orders = [rng.sample(sizes, 4) for _ in range(6)]
        calls = [tuple([t[:n] for t, n in zip(part, order, strict=True)] for part in (xs, ids, ps)) for order in orders]
        want = [bits(alone.run(c)) for c in calls]
        outs = [[nan_like(x) for x in calls[n % 6][0]] for n in range(60)]
        for n, out in enumerate(outs):
            start(world, calls[n % 6], out)
        torch.cuda.synchronize()
        assert_no_errors(world)
        for n, out in enumerate(outs):
            assert_equal_bits(out, want[n % 6], f"call {n}")


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
                used.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), pinned_bytes()))
    assert all(last <= early for last, early in zip(used[-1], used[1], strict=True)), used
    torch.cuda.synchronize()
    gc.collect()
    before, pinned = torch.cuda.memory_allocated(), pinned_bytes()
    for n in range(20):
        with launch.LocalWorld(2, hidden=256, num_experts=8, top_k=4, max_tokens=150 + n) as world.world:
            start(world, calls[0], [nan_like(x) for x in calls[0][0]])
            torch.cuda.synchronize()
    gc.collect()
    assert torch.cuda.memory_allocated() <= before + 4096, "close() gives everything back, and streams hold nothing"
    assert pinned_bytes() <= pinned + 4096, "records go with their workspaces"


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
