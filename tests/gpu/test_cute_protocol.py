"""Calls of the fused kernels that end without results: on all ranks, with the same error, and what comes after."""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch

pytest.importorskip("cutlass")

from cute_kernels import backward_launch, launch, status
from megamoe.routing_plan import make_plan
from tests.gpu.test_cute_backward import Backward, real_bits
from tests.gpu.test_cute_forward import Case, World, bits
from tests.support.poison import nan_like

TIMEOUT_S = 10.0
SOON_S = 3.0  # much less than the watchdog


def launch_rank(world: World, r: int, inputs, **changes) -> launch.ForwardResult:
    """One rank's call on its own stream, without waiting."""
    xs, ids, ps = inputs
    options = {"save": world.case.save, "clamp": world.case.clamp, "timeout_s": TIMEOUT_S, **changes}
    with torch.cuda.stream(world.world.streams[r]):
        outs = [nan_like(xs[r]).fill_(1.0)]
        return launch.fused_forward(
            [world.world.workspaces[r]], [xs[r]], [ids[r]], [ps[r]], [world.weights[r]], outs=outs, **options
        )[0]


def ends_soon() -> None:
    begin = time.monotonic()
    torch.cuda.synchronize()
    assert time.monotonic() - begin < SOON_S


def same_error(world: World, code: int) -> str:
    """What all ranks' workspaces say of their last call, which must be the same."""
    errors = [w.error() or "nothing" for w in world.world.workspaces]
    assert len(set(errors)) == 1, errors
    with pytest.raises(status.CallError) as raised:
        world.world.check()
    assert raised.value.code == code and str(raised.value) == errors[0]
    return errors[0]


def assert_next_call_is_right(world: World, inputs, want) -> None:
    got = [r.out.view(torch.int16) for r in world.run(inputs)]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def load_refusal(world: World) -> None:
    """All ranks refuse a call: nothing is wrong with that, and the kernel is on the GPU before ranks wait for it."""
    for w, stream in zip(world.world.workspaces, world.world.streams, strict=True):
        with torch.cuda.stream(stream):
            launch.refuse(w, TIMEOUT_S)
    ends_soon()
    assert not any(w.error() for w in world.world.workspaces)


# ---------------------------------------------------------------- all ranks find the reason in the headers: no reset


@pytest.mark.parametrize("tokens", [(150, 187), (60, 0, 70)])
def test_rank_whose_host_finds_an_error_after_the_others_launched(tokens):
    world = World(Case("refused", tokens=tokens, experts=12))
    with world.world:
        xs, ids, ps = inputs = world.inputs(1)
        want = bits(world.run(inputs))
        load_refusal(world)
        halves = [p.half() for p in ps]
        torch.cuda.synchronize()
        for _ in range(2):  # calls of either parity
            last = len(tokens) - 1
            results = [launch_rank(world, r, inputs) for r in range(last)]
            with pytest.raises(ValueError, match="topk_weights: expected float32"):
                launch_rank(world, last, (xs, ids, halves))
            ends_soon()
            assert all(r.out.isnan().all() for r in results)
            for w in world.world.workspaces[:last]:
                with pytest.raises(status.CallError, match=rf"rank {last} found an error on its host"):
                    w.check()
            assert world.world.workspaces[last].error() is None  # its own host has raised
            assert_next_call_is_right(world, inputs, want)


def test_rank_whose_host_finds_an_error_in_the_backward():
    world = World(Case("refused", tokens=(150, 187)))
    with world.world:
        b = Backward(world)
        inputs = world.inputs(1)
        saved = [r.buffers for r in world.run(inputs)]
        douts, plan = b.douts(1), make_plan(inputs[1], 8)
        want = real_bits(b.run(inputs[1], saved, douts), plan)
        load_refusal(world)
        results = []

        def start(r: int, rows) -> None:
            with torch.cuda.stream(world.world.streams[r]):
                results.extend(
                    backward_launch.fused_backward(
                        [world.world.workspaces[r]],
                        [douts[r]],
                        [inputs[1][r]],
                        [rows],
                        [b.weights[r]],
                        timeout_s=TIMEOUT_S,
                    )  # fmt: skip
                )

        torch.cuda.synchronize()
        start(1, saved[1])
        with pytest.raises(ValueError, match=r"saved\[0\].gate_up: expected"):
            start(0, dataclasses.replace(saved[0], gate_up=saved[0].gate_up[:128]))
        ends_soon()
        assert results[0].dx.isnan().all() and results[0].dp.isnan().all()
        with pytest.raises(status.CallError, match="rank 0 found an error on its host"):
            world.world.workspaces[1].check()
        got = real_bits(b.run(inputs[1], saved, douts), plan)
        assert all(torch.equal(x, y) for x, y in zip(want, got, strict=True))


def test_pool_too_small_on_one_rank():
    """All ranks name it, with the rows it needs and has; the next call raises it once and the one after is right."""
    world = World(Case("overflow", tokens=(150, 200), capacity=512))
    with world.world:
        xs, ids, ps = world.inputs(1)
        few = [torch.where(torch.arange(i.shape[0], device="cuda")[:, None] < 5, i, -1).to(i.dtype) for i in ids]
        want = bits(world.run((xs, few, ps)))
        many = [torch.full_like(i, 6) for i in ids]  # of rank 1
        needed = make_plan(many, 8).ranks[1].num_rows
        outs = [nan_like(x).fill_(1.0) for x in xs]
        launch.fused_forward(
            world.world.workspaces, xs, many, ps, world.weights, save=True, timeout_s=TIMEOUT_S,
            streams=world.world.streams, outs=outs,
        )  # fmt: skip
        ends_soon()
        assert all(out.isnan().all() for out in outs)
        text = f"overflow of the pool of rank 1: {needed} rows needed, 512 available"
        with pytest.raises(status.CallError, match=text):  # nothing is launched
            world.run((xs, few, ps))
        assert_next_call_is_right(world, (xs, few, ps), want)
        launch.fused_forward(
            world.world.workspaces, xs, many, ps, world.weights, save=True, streams=world.world.streams
        )
        assert text in same_error(world, status.OVERFLOW)
        kept = [w.scratch(128) for w in world.world.workspaces]
        for b in kept:
            b.pool.view(torch.uint8).fill_(0xFF), b.h.view(torch.uint8).fill_(0xFF)
        launch.fused_forward(world.world.workspaces, xs, many, ps, world.weights, streams=world.world.streams)
        assert text in same_error(world, status.OVERFLOW)
        assert all(bool((t.view(torch.uint8) == 0xFF).all()) for b in kept for t in (b.pool, b.h)), "no row moved"
        assert_next_call_is_right(world, (xs, few, ps), want)


@pytest.mark.parametrize("ids64", [False, True])
@pytest.mark.parametrize("tokens", [(150,), (150, 187)])
def test_ids_out_of_range(tokens, ids64):
    world = World(Case("ids", tokens=tokens, ids64=ids64))
    with world.world:
        xs, ids, ps = inputs = world.inputs(1)
        want = bits(world.run(inputs))
        wrong = [8, 9, -2, 2**31 - 1, -(2**31)] + ([2**32, 2**32 - 1, 2**40 + 3, -(2**40), 2**63 - 1] if ids64 else [])
        for value in wrong:
            ids_of_last = ids[-1].clone()
            ids_of_last[33, 1] = value
            outs = [nan_like(x).fill_(1.0) for x in xs]
            launch.fused_forward(
                world.world.workspaces, xs, [*ids[:-1], ids_of_last], ps, world.weights, save=True,
                timeout_s=TIMEOUT_S, streams=world.world.streams, outs=outs,
            )  # fmt: skip
            ends_soon()
            assert all(out.isnan().all() for out in outs)
            where = rf"ids out of range: topk_ids[33, 1] of rank {len(tokens) - 1} is {value}."
            assert where in same_error(world, status.BAD_IDS)
            assert_next_call_is_right(world, inputs, want)


def test_error_of_a_forward_is_raised_in_the_backward():
    world = World(Case("pending", tokens=(150,)))
    with world.world:
        b = Backward(world)
        xs, ids, ps = inputs = world.inputs(1)
        saved = [r.buffers for r in world.run(inputs)]
        ids[0][0, 0] = 77
        launch.fused_forward(world.world.workspaces, xs, ids, ps, world.weights, save=True, timeout_s=TIMEOUT_S)
        torch.cuda.synchronize()
        with pytest.raises(status.CallError, match=r"topk_ids\[0, 0\] of rank 0 is 77"):
            backward_launch.fused_backward(world.world.workspaces, b.douts(1), ids, saved, b.weights)


# ---------------------------------------------------------------- the abort word: until reset


@pytest.mark.parametrize("what", ["clamp", "scales", "plan given", "direction"])
def test_different_calls_on_two_ranks(what):
    world = World(Case("differ", tokens=(150, 187)))
    with world.world:
        b = Backward(world)
        xs, ids, ps = inputs = world.inputs(1)
        results = world.run(inputs)
        want, saved = bits(results), [r.buffers for r in results]
        douts = b.douts(1)
        b.run(ids, saved, douts)  # every kernel is on the GPU before ranks wait for each other
        changes = {
            "clamp": {"clamp": 0.5},
            "scales": {"pow2_scales": True},
            "plan given": {"plans": saved[1:]},
            "direction": {},
        }[what]
        all_ranks = {**changes, "plans": saved} if what == "plan given" else changes
        launch.fused_forward(
            world.world.workspaces, xs, ids, ps, world.weights, save=True, streams=world.world.streams, **all_ranks
        )
        torch.cuda.synchronize()
        first = launch_rank(world, 0, inputs)
        if what == "direction":
            with torch.cuda.stream(world.world.streams[1]):
                backward_launch.fused_backward(
                    [world.world.workspaces[1]], douts[1:], ids[1:], saved[1:], b.weights[1:], timeout_s=TIMEOUT_S
                )
        else:
            launch_rank(world, 1, inputs, **changes)
        ends_soon()
        assert first.out.isnan().all()
        error = same_error(world, status.SIGNATURE)
        shown = {"clamp": "clamp 0.5", "scales": "pow2", "plan given": "plan given", "direction": "backward"}[what]
        assert "rank 0 makes a forward (H 256, I 128, E 8, K 4, R 2" in error, error
        assert "rank 1 makes" in error and shown in error.split("rank 1 makes")[1], error
        for _ in range(2):
            with pytest.raises(status.CallError, match=r"expected reset\(\) on all ranks .* calls differ"):
                world.run(inputs)
        world.world.reset()
        assert_next_call_is_right(world, inputs, want)


@pytest.mark.parametrize("other", [{"capacity_rows": 512}, {"max_tokens": 500}, {"num_experts": 16}, {"top_k": 3}])
def test_different_workspaces_of_two_ranks(other):
    """Whatever their sizes, ranks understand each other's headers."""
    world = World(Case("sizes", tokens=(100, 100)))
    with world.world:
        xs, ids, ps = inputs = world.inputs(1)
        world.run(inputs)
        mine = world.world.workspaces[0]
        arguments = {"hidden": 256, "num_experts": 8, "top_k": 4, "max_tokens": 103, **other}
        with launch.Workspace(num_ranks=2, rank=1, num_ctas=mine.num_ctas, **arguments) as theirs:
            mine.reset()  # both make their first call
            for w in (mine, theirs):
                w.connect([mine.blob.data_ptr(), theirs.blob.data_ptr()])
            case = dataclasses.replace(world.case, experts=theirs.num_experts, top_k=theirs.top_k)
            guest = World(case)
            world.world.workspaces[1] = theirs
            world.weights[1] = guest.weights[1]
            guest_inputs = [[a[0], b[1]] for a, b in zip(inputs, guest.inputs(1), strict=True)]
            torch.cuda.synchronize()
            results = [launch_rank(world, r, guest_inputs) for r in range(2)]
            ends_soon()
            guest.world.close()
            assert all(r.out.isnan().all() for r in results)
            assert "calls differ" in same_error(world, status.SIGNATURE)


def test_workspace_takes_no_call_between_a_timeout_and_reset():
    world = World(Case("missing", tokens=(150, 187)))
    with world.world:
        inputs = world.inputs(1)
        want = bits(world.run(inputs))
        out = launch_rank(world, 0, inputs, timeout_s=0.3).out
        torch.cuda.synchronize()
        assert out.isnan().all()
        with pytest.raises(status.CallError, match="rank 0: timeout at a rank's header, index 1") as raised:
            world.run(inputs)
        assert raised.value.code == status.TIMEOUT
        for _ in range(3):
            with pytest.raises(status.CallError, match=r"workspace: expected reset\(\) on all ranks .* timeout"):
                world.run(inputs)
        world.world.reset()
        assert_next_call_is_right(world, inputs, want)


def test_late_rank_touches_no_peer_and_says_why():
    """A rank that begins a call which another has given up: that one's memory stays as it is."""
    world = World(Case("too late", tokens=(150, 187)))
    with world.world:
        inputs = world.inputs(1)
        want = bits(world.run(inputs))
        launch_rank(world, 0, inputs, timeout_s=0.3)
        torch.cuda.synchronize()
        blob = world.world.workspaces[0].blob.clone()
        for _ in range(2):  # the call given up, and one behind it, as a graph would replay it
            world.world.workspaces[1]._given_up = None
            late = launch_rank(world, 1, inputs)
            ends_soon()
            assert late.out.isnan().all()
            assert torch.equal(blob, world.world.workspaces[0].blob)
            with pytest.raises(status.CallError, match="rank 0: timeout at a rank's header, index 1"):
                world.world.workspaces[1].check()
        world.world.reset()
        assert_next_call_is_right(world, inputs, want)


@pytest.mark.parametrize("missing", [0, 1])
def test_missing_rank_in_the_backward(missing):
    world = World(Case("missing", tokens=(150, 187)))
    with world.world:
        b = Backward(world)
        inputs = world.inputs(1)
        saved = [r.buffers for r in world.run(inputs)]
        douts, plan = b.douts(1), make_plan(inputs[1], 8)
        want = real_bits(b.run(inputs[1], saved, douts), plan)
        here = 1 - missing
        (result,) = backward_launch.fused_backward(
            [world.world.workspaces[here]], [douts[here]], [inputs[1][here]], [saved[here]], [b.weights[here]],
            timeout_s=0.3,
        )  # fmt: skip
        ends_soon()
        assert result.dx.isnan().all() and result.dp.isnan().all()
        mine = saved[here]
        dw13 = torch.zeros(4, 256, 256, device="cuda")
        dw2 = torch.zeros(4, 256, 128, device="cuda")
        operands = result.operands(mine.pool, mine.pool_s)
        backward_launch.weight_gradients(operands, mine.offs, mine.counts, dw13, dw2)
        assert int(mine.counts.sum()) > 0
        for dw in (dw13, dw2):
            assert torch.equal(dw.isnan().flatten(1).any(1), mine.counts > 0), "weight gradients are no results either"
        with pytest.raises(status.CallError, match=f"rank {here}: timeout at a rank's header, index {missing}"):
            world.world.check()
        world.world.reset()
        got = real_bits(b.run(inputs[1], saved, douts), plan)
        assert all(torch.equal(x, y) for x, y in zip(want, got, strict=True))
