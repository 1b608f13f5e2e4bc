"""Weight gradients that dgrad takes while dx is in flight, on a Hopper GPU: same bits as without."""

from __future__ import annotations

import argparse
import dataclasses

import pytest
import torch

pytest.importorskip("cutlass")

from cute_kernels import backward_launch, backward_offer
from cute_kernels.backward_problem import TURN_COLUMNS, TURNED, TURNS, W13
from megamoe.cli import trace as trace_command
from megamoe.cli.problem import ProblemSpec, make_problem
from megamoe.overlap import OverlapConfig
from tests.gpu.test_cute_backward import Backward
from tests.gpu.test_cute_forward import TIMEOUT_S, Case, World
from tests.support.compare import assert_bitwise
from tests.support.moe_calls import context_for, run

DELAY_US = 2000  # far more than all tasks take

STEAL_CASES = [
    Case("one rank"),
    Case("two ranks", tokens=(150, 187)),
    Case("two ranks, one empty", tokens=(0, 187)),
    Case("three ranks, clamp", tokens=(150, 1, 300), experts=12, clamp=0.7),
    Case("four ranks", tokens=(10, 0, 300, 150), experts=16),
    Case("all on one", routing="one", top_k=2, tokens=(400, 300)),
    Case("none anywhere", routing="none", tokens=(20, 30)),
    Case("odd", hidden=384, intermediate=384, tokens=(150, 187)),
    Case("qwen", hidden=2048, intermediate=768, experts=16, top_k=8, tokens=(400, 300)),
    Case("many experts", experts=512, top_k=8, tokens=(500, 300)),
]


class Stealing:
    """A backward of a case, its weight gradients included."""

    def __init__(self, case: Case):
        self.case, self.world = case, World(dataclasses.replace(case, save=True))
        self.backward = Backward(self.world)
        inputs = self.world.inputs(1)
        self.ids = inputs[1]
        self.saved = [r.buffers for r in self.world.run(inputs)]
        self.douts = self.backward.douts(1, tailed=True)

    def gradients(self, dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        case, local = self.case, self.case.experts // len(self.case.tokens)
        shapes = (local, 2 * case.intermediate, case.hidden), (local, case.hidden, case.intermediate)
        dw13, dw2 = ([torch.full(s, float("nan"), dtype=dtype, device="cuda") for _ in case.tokens] for s in shapes)
        return dw13, dw2

    def serial(self, dtype: torch.dtype) -> list[torch.Tensor]:
        results = self.backward.run(self.ids, self.saved, self.douts)
        dw13, dw2 = self.gradients(dtype)
        for r, s, a, b in zip(results, self.saved, dw13, dw2, strict=True):
            backward_launch.weight_gradients(r.operands(s.pool, s.pool_s), s.offs, s.counts, a, b)
        torch.cuda.synchronize()
        return [*(r.dx for r in results), *(r.dp for r in results), *dw13, *dw2]

    def stealing(self, dtype: torch.dtype, delay_us: int, steal_us: float = 50.0):
        """Results as of `serial`, and each rank's cursors behind dgrad."""
        dw13, dw2 = self.gradients(dtype)
        offers = [
            backward_offer.offer(s.offs, s.counts, s.pool, s.pool_s, a, steal_us)
            for s, a in zip(self.saved, dw13, strict=True)
        ]
        results = [
            backward_launch._allocate(d, s, self.case.top_k) for d, s in zip(self.douts, self.saved, strict=True)
        ]
        for tensors in (*(vars(r).values() for r in results), *(o.grad_t for o in offers)):
            for t in tensors:
                t.view(torch.uint8).fill_(0xFF)
        world = self.world.world
        backward_launch.fused_backward(
            world.workspaces, self.douts, self.ids, self.saved, self.backward.weights, clamp=self.case.clamp,
            timeout_s=TIMEOUT_S, streams=world.streams, results=results, steals=offers, delay_us=delay_us,
        )  # fmt: skip
        cursors = [o.queue.cursors.tolist() for o in offers]
        for o, r, s, b in zip(offers, results, self.saved, dw2, strict=True):
            backward_offer.drain(o, r.operands(s.pool, s.pool_s), b)
        torch.cuda.synchronize()
        errors = [e for w in world.workspaces if (e := w.error())]
        assert not errors, errors
        return [*(r.dx for r in results), *(r.dp for r in results), *dw13, *dw2], cursors


def differing(got: list[torch.Tensor], want: list[torch.Tensor]) -> list[int]:
    return [
        i
        for i, (a, b) in enumerate(zip(got, want, strict=True))
        if not torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
    ]


@pytest.mark.parametrize("case", STEAL_CASES, ids=lambda c: c.name)
def test_same_bits_whoever_does_a_task(case):
    s = Stealing(case)
    with s.world.world:
        for dtype, delay_us in ((torch.bfloat16, 0), (torch.bfloat16, DELAY_US), (torch.float32, DELAY_US)):
            want = s.serial(dtype)
            got, cursors = s.stealing(dtype, delay_us)
            print(case.name, dtype, delay_us, cursors)
            assert not differing(got, want), (dtype, delay_us, differing(got, want), cursors)
            if delay_us:  # time enough for everything
                check_all_taken(case, s.saved, cursors)


def check_all_taken(case: Case, saved, cursors) -> None:
    pieces = -(-2 * case.intermediate // TURN_COLUMNS)
    tiles = 2 * case.intermediate // 128 * -(-case.hidden // 256)
    for s, c in zip(saved, cursors, strict=True):
        blocks = int(s.offs[-1]) // 128
        assert c[TURNS] >= blocks * pieces and c[TURNED] == blocks * 2 * case.intermediate // 128, (c, blocks)
        assert c[W13] == int((s.counts > 0).sum()) * tiles, (c, tiles)


def test_long_tasks_are_left_to_the_drain():
    case = Case("long", tokens=(400, 300), top_k=2, experts=4)
    s = Stealing(case)
    with s.world.world:
        want = s.serial(torch.bfloat16)
        counts = torch.cat([x.counts for x in s.saved]).tolist()
        got, cursors = s.stealing(torch.bfloat16, DELAY_US, steal_us=5.0)  # one block of 128 rows
        assert not differing(got, want)
        tiles = 2 * case.intermediate // 128 * -(-case.hidden // 256)
        taken = sum(c[W13] for c in cursors)
        assert taken == tiles * sum(0 < n <= 128 for n in counts), (counts, cursors)
        _, cursors = s.stealing(torch.bfloat16, DELAY_US, steal_us=0.0)
        assert all(c[W13] == 0 for c in cursors)


def test_repeats_with_dirty_padding_are_the_same_bits():
    """At other times other tasks are taken."""
    case = Case("repeats", tokens=(150, 187))
    s = Stealing(case)
    with s.world.world:
        for rows in s.saved:
            rows.gate_up[rows.codes < 0] = float("nan")
        want = s.serial(torch.bfloat16)
        for i in range(25):
            for delay_us in (0, DELAY_US):
                got, cursors = s.stealing(torch.bfloat16, delay_us)
                assert not differing(got, want), (i, delay_us, differing(got, want), cursors)


def test_missing_rank_ends_a_call_that_would_steal():
    """No rows, no tasks, NaN in dx; after a reset the bits are right."""
    s = Stealing(Case("missing", tokens=(150, 187)))
    world = s.world.world
    with world:
        want = s.serial(torch.bfloat16)
        dw13, _ = s.gradients(torch.bfloat16)
        rows = s.saved[0]
        offered = backward_offer.offer(rows.offs, rows.counts, rows.pool, rows.pool_s, dw13[0])
        torch.cuda.synchronize()
        with torch.cuda.stream(world.streams[0]):
            (result,) = backward_launch.fused_backward(
                world.workspaces[:1], s.douts[:1], s.ids[:1], s.saved[:1], s.backward.weights[:1], timeout_s=0.3,
                steals=[offered],
            )  # fmt: skip
        torch.cuda.synchronize()
        assert "timeout at a rank's header, index 1" in (world.workspaces[0].error() or "")
        assert bool(result.dx.isnan().all()) and offered.queue.cursors.tolist() == [0, 0, 0, 0]
        world.reset()
        got, _ = s.stealing(torch.bfloat16, DELAY_US)
        assert not differing(got, want)


@pytest.mark.parametrize("save", ["pool", "recompute"])
def test_layer_calls_give_the_bits_of_calls_that_steal_nothing(save):
    problem = make_problem(ProblemSpec((150, 187, 0, 60), 256, 128, 8, 4, "masked"), device=torch.device("cuda"))
    results = [
        run(problem, context_for(problem, backend="cute", save=save, overlap=OverlapConfig(steal_us=steal_us))).joined()
        for steal_us in (0.0, 50.0)
    ]
    torch.cuda.synchronize()
    for name, want in results[0].items():
        assert_bitwise(results[1][name], want, name)


def test_trace_shows_tasks_between_the_last_tile_and_dx():
    parser = argparse.ArgumentParser()
    trace_command.add_arguments(parser)
    options = "--shape 16,256,128,4 --tokens 600 --ranks 2 --pass backward --steal-us 50 --delay-us 2000"
    events = trace_command.traced(parser.parse_args(options.split()))
    math = [e for e in events if e.role == "math"]
    assert {"wgrad copy", "wgrad tile"} <= {e.what for e in math}
    for cta in {e.cta for e in math}:
        mine = [e for e in math if e.cta == cta]
        tiles = [e.end_ns for e in mine if e.what in ("GEMM 1", "GEMM 2")]
        stolen = [e for e in mine if e.what.startswith("wgrad")]
        (sums,) = (e.begin_ns for e in mine if e.what == "combine")
        assert all(e.end_ns <= sums for e in stolen)
        assert not tiles or all(max(tiles) <= e.end_ns for e in stolen)
