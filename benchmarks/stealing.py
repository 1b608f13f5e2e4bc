"""A backward whose rows of dX are a millisecond late, with and without tasks of dW13 taken meanwhile, one record each.

    python -m benchmarks.stealing --out benchmarks/results/h200/checks/stealing.json

Shape A on virtual ranks of one GPU, dgrad and then the weight gradients. "stealing" offers dgrad tasks of at most 50 us
(`OverlapConfig(steal_us=50)`). Times are medians of rounds that make every step once, in changing order; `ms_until_dx`
is from the start to the end of dgrad. A step whose bits are not those of the plain one has no time: the exit status is
then 1, and 2 where nothing could be measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megamoe.backends import BACKENDS, Problem, resolve
from megamoe.cli.bench_problem import BenchProblem
from megamoe.cli.options import integers, within, writable
from megamoe.cli.problem import ProblemSpec, shape_of, spread
from megamoe.cli.records import Record, environment, write_records
from megamoe.cli.stages import have_same_bits
from megamoe.errors import MegaMoEError, expected
from megamoe.recipe import Recipe

DELAY_US, STEAL_US = 1000, 50
SLEEP_CYCLES = 40_000_000
"""The card waits so long until all launches of a step are queued."""


@dataclasses.dataclass(frozen=True)
class Mode:
    """One way to make the step: whether dgrad may steal, and how late the rows of dX are."""

    is_stealing: bool
    delay_us: int

    def fields(self) -> Record:
        step = "stealing" if self.is_stealing else "dgrad, then wgrad"
        return {"step": step, "delay_us": self.delay_us, "steal_us": STEAL_US if self.is_stealing else 0}


MODES = tuple(Mode(is_stealing, delay_us) for is_stealing in (False, True) for delay_us in (0, DELAY_US))
PLAIN = MODES[0]

Step = Callable[[Mode], tuple[float, float]]
"""Makes a step; milliseconds until dx is there, and until all gradients are."""
Results = Callable[[], list[torch.Tensor]]
"""Copies of what the last step has left."""


def measured(step: Step, results: Results, rounds: int) -> Iterator[Record]:
    """The figures of every mode.

    Raises:
        AssertionError: a mode gives other bits than the plain one.
    """
    step(PLAIN)
    want = results()
    for mode in MODES:  # also compiles
        step(mode)
        found = results()
        wrong = [i for i, (a, b) in enumerate(zip(found, want, strict=True)) if not have_same_bits(a, b)]
        assert not wrong, f"{mode.fields()}: other bits than the plain step in tensors {wrong}"
    samples: dict[Mode, list[tuple[float, float]]] = {mode: [] for mode in MODES}
    for number in range(rounds):
        for mode in random.Random(number).sample(MODES, len(MODES)):
            samples[mode].append(step(mode))
    for mode, times in samples.items():
        until_dx, whole = zip(*times, strict=True)
        yield mode.fields() | {
            "ms": round(statistics.median(whole), 3),
            "ms_until_dx": round(statistics.median(until_dx), 3),
            "samples_ms": [round(ms, 3) for ms in whole],
            "same_bits": True,
        }


def steps_of(spec: ProblemSpec, body: Callable[[Step, Results], list[Record]]) -> list[Record]:
    """What `body` makes of the steps of a problem on virtual ranks of this GPU."""
    from cute_kernels import launch
    from cute_kernels.backward_launch import fused_backward
    from cute_kernels.backward_offer import drain, offer
    from cute_kernels.wgrad_launch import weight_gradients

    problem = BenchProblem(spec, Recipe(), torch.device("cuda"))
    experts = problem.experts(BACKENDS["cute"], transposed=True)
    dw13s, dw2s = (grad.chunk(spec.num_ranks) for grad in problem.weight_grads())
    kept: list[Any] = []
    sizes: Mapping[str, int] = dict(
        hidden=spec.hidden, num_experts=spec.num_experts, top_k=spec.top_k, max_tokens=max(spec.num_tokens)
    )
    with launch.LocalWorld(spec.num_ranks, **sizes) as world:
        inputs = problem.xs, problem.ids, problem.weights, [e.fused for e in experts]
        forward = launch.fused_forward(world.workspaces, *inputs, save=True, streams=world.streams)
        saved = [result.buffers for result in forward]
        transposed = [e.fused_t for e in experts]

        def step(mode: Mode) -> tuple[float, float]:
            for grad in (*dw13s, *dw2s):
                grad.fill_(float("nan"))
            begin, dx, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
            torch.cuda.synchronize()
            torch.cuda._sleep(SLEEP_CYCLES)
            begin.record()
            offers: Any = None
            if mode.is_stealing:
                pairs = zip(saved, dw13s, strict=True)
                offers = [offer(s.offs, s.counts, s.pool, s.pool_s, dw13, STEAL_US) for s, dw13 in pairs]
            grads = fused_backward(
                world.workspaces, problem.douts, problem.ids, saved, transposed,
                streams=world.streams, steals=offers, delay_us=mode.delay_us,
            )  # fmt: skip
            dx.record()
            for r, (left, rows) in enumerate(zip(grads, saved, strict=True)):
                operands = left.operands(rows.pool, rows.pool_s)
                if offers is None:
                    weight_gradients(operands, rows.offs, rows.counts, dw13s[r], dw2s[r])
                else:
                    drain(offers[r], operands, dw2s[r])
            end.record()
            end.synchronize()
            kept[:] = [t for left in grads for t in (left.dx, left.dp)]
            return begin.elapsed_time(dx), begin.elapsed_time(end)

        def results() -> list[torch.Tensor]:
            return [t.clone() for t in (*kept, *problem.weight_grads())]

        return body(step, results)


def measure(spec: ProblemSpec, rounds: int) -> list[Record]:
    """The figures of every mode on this GPU."""
    sizes = {"num_experts": spec.num_experts, "top_k": spec.top_k, "num_ranks": spec.num_ranks}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    resolve("cute", Problem.of(device, Recipe(), spec.hidden, spec.intermediate, **sizes, world="local"))
    return steps_of(spec, lambda step, results: list(measured(step, results, rounds)))


def main(argv: Sequence[str] | None = None, measure: Callable[[ProblemSpec, int], list[Record]] = measure) -> int:
    """Measure and write the records; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", default="A", help="A, B, C or E,H,I,K")
    parser.add_argument("--ranks", default="2,4", help="virtual ranks, by comma")
    parser.add_argument("--rounds", type=int, default=14, help="steps of each kind")
    arguments = parser.parse_args(argv)
    records: list[Record] = []
    try:
        within("--rounds", arguments.rounds, 1)
        shape = shape_of("--shape", arguments.shape)
        specs = [spread(shape, ranks) for ranks in integers("--ranks", arguments.ranks)]
        if any(spec.num_ranks == 1 for spec in specs):
            raise MegaMoEError(expected("--ranks", "at least 2 ranks", 1, "One has nothing to wait for."))
        writable("--out", arguments.out)
        for spec in specs:
            common = {"shape": arguments.shape, "T": shape.num_tokens, "ranks": spec.num_ranks}
            records += [common | figures for figures in measure(spec, arguments.rounds)]
    except (MegaMoEError, AssertionError) as error:
        print(f"stealing: {error}", file=sys.stderr)
        return 1 if isinstance(error, AssertionError) else 2
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    write_records(arguments.out, [record | environment("cute", device) for record in records])
    for r in records:
        late = f"{r['delay_us']} us late" if r["delay_us"] else "at once"
        print(f"{r['ranks']} ranks, {late:12} {r['step']:18} {r['ms']:8.3f} ms, dx after {r['ms_until_dx']:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
