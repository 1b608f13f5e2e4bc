"""What every role of a fused kernel does when: a timeline, and the share of time each spends waiting for what.

Of a backward GEMM 1 is that with W2 transposed, GEMM 2 that with W13 transposed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megamoe.backends import BACKENDS, Problem, resolve
from megamoe.cli import group_run
from megamoe.cli.options import refuse_given, within, writable
from megamoe.cli.problem import ROUTINGS, ProblemSpec, shape_of, spread
from megamoe.recipe import Recipe

OF_BACKWARD = {"--steal-us": "steal_us", "--delay-us": "delay_us"}
"""Options of a backward on virtual ranks alone, with their fields."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `megamoe trace`."""
    parser.add_argument("--shape", default="A", help="A, B, C or E,H,I,K")
    parser.add_argument("--tokens", type=int, help="T, over all ranks; default: that of the shape, else 8192")
    parser.add_argument("--routing", default="uniform", choices=ROUTINGS, help="as in `megamoe bench`")
    parser.add_argument("--ranks", type=int, default=1, help="virtual ranks, all traced")
    parser.add_argument("--pass", dest="direction", choices=("forward", "backward"), default="forward")
    parser.add_argument("--save", action="store_true", help="trace a training forward; a backward always follows one")
    parser.add_argument(
        "--steal-us", type=float, default=0.0, help="of a backward on several virtual ranks: OverlapConfig"
    )
    parser.add_argument(
        "--delay-us", type=int, default=0, help="of a backward: rows of dX arrive so much later, as over a slow network"
    )
    parser.add_argument("--out", default="trace", help="writes OUT.json (Chrome, Perfetto) and OUT.png")


def check_options(arguments: argparse.Namespace) -> None:
    """Refuse what cannot be traced, and files that cannot be written.

    Raises:
        MegaMoEValueError: the first that is wrong.
    """
    if group_run.launched():
        more = {"--ranks": "ranks", "--pass": "direction", "--routing": "routing"}
        refuse_given(arguments, add_arguments, more | OF_BACKWARD, "under torchrun")
    elif arguments.direction == "forward":
        refuse_given(arguments, add_arguments, OF_BACKWARD, "without --pass backward")
    elif arguments.ranks == 1:
        refuse_given(arguments, add_arguments, {"--steal-us": "steal_us"}, "with one rank")
    within("--steal-us", arguments.steal_us, 0, 1000)
    within("--delay-us", arguments.delay_us, 0, 1_000_000)
    for file in files_of(arguments):
        writable("--out", file)


def files_of(arguments: argparse.Namespace) -> tuple[Path, Path]:
    """The JSON and the PNG file of `--out`."""
    return Path(f"{arguments.out}.json"), Path(f"{arguments.out}.png")


def trace_main(arguments: argparse.Namespace) -> int:
    """Runs the fused kernel a few times with stamps; the last time is shown."""
    if not group_run.launched():
        spread_of(arguments)
        check_options(arguments)
        return show(traced(arguments), arguments)
    from megamoe.cli.trace_group import spec_of, traced_over

    spec = spec_of(arguments, group_run.num_processes())
    check_options(arguments)
    with group_run.membership("cuda") as member:
        events = traced_over(member, spec, arguments.save)
        return show(events, arguments) if member.rank == 0 else 0


def show(events: list, arguments: argparse.Namespace) -> int:
    """Prints the table and writes both files."""
    from cute_kernels import trace

    print(trace.table(trace.shares(events)))
    print(f"One launch, {(max(e.end_ns for e in events) - min(e.begin_ns for e in events)) / 1e3:.0f} us. Loading and")
    print("computing include waits for the other inside a tile; what is missing to 100 % is idle, or not yet begun.")
    chrome, picture = files_of(arguments)
    chrome.write_text(json.dumps(trace.chrome(events)))
    trace.timeline(events, str(picture))
    print(f"wrote {chrome} and {picture}")
    return 0


def spread_of(arguments: argparse.Namespace) -> ProblemSpec:
    """What is traced in one process: tokens spread over virtual ranks."""
    return spread(shape_of("--shape", arguments.shape, arguments.tokens), arguments.ranks, arguments.routing)


def traced(arguments: argparse.Namespace) -> list:
    """The events of all ranks in one launch each."""
    spec = spread_of(arguments)
    ranks = spec.num_ranks
    _refuse_without_cute(spec)

    from cute_kernels import launch, trace
    from cute_kernels.tile_config import TileConfig
    from megamoe.cli.bench_problem import BenchProblem

    problem = BenchProblem(spec, Recipe(), torch.device("cuda"))
    is_backward = arguments.direction == "backward"
    weights = problem.experts(BACKENDS["cute"], transposed=is_backward)
    config = dataclasses.replace(TileConfig(), trace=True)
    sizes = dict(hidden=spec.hidden, num_experts=spec.num_experts, top_k=spec.top_k, max_tokens=max(spec.num_tokens))
    with launch.LocalWorld(ranks, **sizes) as world:
        buffers = [torch.zeros(trace.num_words(w.num_ctas), dtype=torch.int64, device="cuda") for w in world.workspaces]
        stamps: dict[str, Any] = {"config": config, "traces": buffers, "streams": world.streams}
        forward = functools.partial(
            launch.fused_forward, world.workspaces, problem.xs, problem.ids, problem.weights, [e.fused for e in weights]
        )
        run: Callable[[], object] = functools.partial(forward, save=arguments.save, **stamps)
        if is_backward:
            from cute_kernels.backward_launch import fused_backward

            saved = [result.buffers for result in forward(save=True, streams=world.streams)]
            transposed = [e.fused_t for e in weights]
            backward = functools.partial(
                fused_backward, world.workspaces, problem.douts, problem.ids, saved, transposed,
                delay_us=arguments.delay_us, **stamps,
            )  # fmt: skip
            run = functools.partial(_stealing, backward, saved, arguments.steal_us) if arguments.steal_us else backward
        for _ in range(4):  # the last one is kept
            for b in buffers:
                b.zero_()
            torch.cuda.synchronize()
            torch.cuda._sleep(4_000_000)  # cycles: the card waits until the launches of all ranks are queued
            run()
            torch.cuda.synchronize()
        return [
            event
            for r, (b, w) in enumerate(zip(buffers, world.workspaces, strict=True))
            for event in trace.events(b, w.num_ctas, r * w.num_ctas)
        ]


def _stealing(backward: Callable[..., object], saved: list[Any], steal_us: float) -> None:
    """A backward that may take tasks of dW13, which are then left as they are."""
    from cute_kernels.backward_offer import offer

    width = saved[0].gate_up.shape[1]
    offers = []
    for rows in saved:
        dw13 = rows.gate_up.new_empty(rows.counts.shape[0], width, rows.pool.shape[1])
        offers.append(offer(rows.offs, rows.counts, rows.pool, rows.pool_s, dw13, steal_us))
    backward(steals=offers)


def _refuse_without_cute(spec: ProblemSpec) -> None:
    resolve(
        "cute",
        Problem.of(
            torch.device("cuda" if torch.cuda.is_available() else "cpu"),
            Recipe(),
            hidden_size=spec.hidden,
            intermediate_size=spec.intermediate,
            num_experts=spec.num_experts,
            top_k=spec.top_k,
            num_ranks=spec.num_ranks,
            world="one" if spec.num_ranks == 1 else "local",
        ),
    )
