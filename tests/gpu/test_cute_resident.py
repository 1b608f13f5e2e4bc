"""The fused forward on grids of other sizes than the GPU, and where other kernels hold SMs."""

from __future__ import annotations

import types

import pytest
import torch

pytest.importorskip("cutlass")

from cute_kernels import launch
from tests.gpu.test_cute_forward import Case, World, bits
from tests.gpu.test_cute_hard import TIMEOUT_S, assert_equal_bits, assert_no_errors, drawn_calls, start
from tests.support.hold_sms import hold_sms
from tests.support.poison import nan_like


def num_sms() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count


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


@pytest.mark.parametrize("ranks", [1, 2])
def test_gpu_that_reports_fewer_sms_than_it_has(monkeypatch, ranks):
    """As under MPS, or on an H20."""
    case = Case("78", tokens=(150, 187)[:ranks], save=False)
    full = World(case)
    with full.world:
        call = full.inputs(1)
        want = bits(full.run(call))
    real = torch.cuda.get_device_properties

    def reported(*arguments):
        return types.SimpleNamespace(
            multi_processor_count=78, **{"name": real(*arguments).name, "major": 9, "minor": 0}
        )

    monkeypatch.setattr(torch.cuda, "get_device_properties", reported)
    few = World(case)
    with few.world:
        assert [w.num_ctas for w in few.world.workspaces] == [78 // ranks] * ranks
        assert_equal_bits([r.out for r in few.run(call)], want, "78 SMs")


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


@pytest.mark.parametrize("ranks", [1, 2])
def test_call_waits_for_a_kernel_that_holds_sms(ranks):
    """Within the watchdog's time it is right; beyond, it ends, and after reset all is right."""
    world, side = World(Case("held", tokens=(150, 187)[:ranks], save=False)), torch.cuda.Stream()
    with world.world:
        call = world.inputs(1)
        want = bits(world.run(call))
        hold_sms(1, 0.0)  # loads it
        for timeout_s in (TIMEOUT_S, 0.1):
            outs = [nan_like(x).fill_(1.0) for x in call[0]]
            torch.cuda.synchronize()
            with torch.cuda.stream(side):
                hold_sms(20, 0.5)
            launch.fused_forward(
                world.world.workspaces,
                *call,
                world.weights,
                timeout_s=timeout_s,
                streams=world.world.streams,
                outs=outs,
            )
            torch.cuda.synchronize()
            if timeout_s == TIMEOUT_S:
                assert_no_errors(world)
                assert_equal_bits(outs, want, "held up")
            else:
                assert any("timeout" in (w.error() or "") for w in world.world.workspaces)
                assert all(out.isnan().any() for out in outs)
        world.world.reset()
        assert_equal_bits([r.out for r in world.run(call)], want, "after reset")


def test_reserved_sms_are_enough_for_another_kernel():
    """A call that leaves 20 SMs does not wait for a kernel on 20 SMs."""
    world, side = World(Case("reserved", save=False)), torch.cuda.Stream()
    world.world = launch.LocalWorld(1, hidden=256, num_experts=8, top_k=4, max_tokens=160, reserve_sms=20)
    with world.world:
        call = world.inputs(1)
        want = bits(world.run(call))
        hold_sms(1, 0.0)
        out = nan_like(call[0][0])
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            hold_sms(20, 0.5)
        start(world, call, [out])
        torch.cuda.current_stream().synchronize()
        assert not side.query(), "the other kernel still runs"
        torch.cuda.synchronize()
        assert_no_errors(world)
        assert_equal_bits([out], want, "beside it")
