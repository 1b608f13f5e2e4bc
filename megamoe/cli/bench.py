"""Time the layer, forward and backward, beside torch's grouped GEMMs; write records and a bar chart a shape.

A backend whose results miss the gates of `megamoe.gates` has no time: the command fails instead. FP8 weights are
quantised beforehand; weight gradients are bf16. See `megamoe/cli/timing.py` for how times are taken.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from megamoe.backends import BACKENDS, Problem
from megamoe.cli.bench_problem import BenchProblem, LayerRun, Run, Variant, ceilings, errors, torch_gemms, triton_stages
from megamoe.cli.problem import ROUTINGS, SHAPES, ProblemSpec, Shape
from megamoe.cli.records import Record, environment, gpu_name, write_records
from megamoe.cli.timing import Timing, captured, clock_mhz, time_variants
from megamoe.errors import BackendUnavailable, MegaMoEValueError, expected
from megamoe.recipe import Recipe

LAYER_BENCHES = ("forward", "backward", "fwd_bwd")
BENCHES = (*LAYER_BENCHES, "stages")
PASSES = {"forward": 1, "backward": 2, "fwd_bwd": 3}
"""Multiples of the forward's FLOPs."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `megamoe bench`."""
    parser.add_argument("--shapes", default="A,B,C", help="of A, B, C, or E,H,I,K; several by semicolon or comma")
    parser.add_argument("--tokens", type=int, help="T of all ranks together (default: the shape's)")
    parser.add_argument("--routing", default="uniform", choices=ROUTINGS)
    parser.add_argument("--ranks", type=int, default=1, help="virtual ranks")
    parser.add_argument("--backends", default="cute,triton", help="by comma; what does not run here is named, left out")
    parser.add_argument("--bench", default=",".join(BENCHES), help="by comma")
    parser.add_argument("--precision", default="fp8", choices=("fp8", "bf16"))
    parser.add_argument("--rounds", type=int, default=10, help="launches of each variant, interleaved")
    parser.add_argument("--eager", action="store_true", help="launch every kernel instead of replaying a CUDA graph")
    parser.add_argument("--sustained", type=float, default=0.3, help="seconds of back-to-back launches")
    parser.add_argument("--device", help="default: cuda where there is one, else cpu")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of the records")
    parser.add_argument("--name", default="layer", help="file name of the records: <out>/<gpu>/<name>.json")
    parser.add_argument("--no-charts", action="store_true", help="no PNG files beside the records")


class Progress:
    """A bar on stderr; where stderr is no terminal, a line whenever another tenth is done."""

    def __init__(self, total: int, title: str) -> None:
        self.total, self.title, self.done, self.tenth = max(total, 1), title, 0, 0

    def __call__(self, name: str) -> None:
        self.done += 1
        share = min(self.done / self.total, 1.0)
        bar = "#" * int(share * 30)
        text = f"{self.title} [{bar:<30}] {share:4.0%} {name}"
        if sys.stderr.isatty():
            print(f"\r{text:<100}", end="\n" if share == 1.0 else "", file=sys.stderr, flush=True)
        elif int(share * 10) > self.tenth:
            self.tenth = int(share * 10)
            print(text, file=sys.stderr, flush=True)


def specs_of(args: argparse.Namespace) -> Iterator[tuple[str, ProblemSpec]]:
    """The shapes that the options name, as problems on R virtual ranks."""
    for name in shape_names(args.shapes):
        if name in SHAPES:
            shape = SHAPES[name]
        else:
            try:
                experts, hidden, inter, top_k = (int(part) for part in name.split(","))
                shape = Shape(experts, hidden, inter, top_k, 1024)
            except ValueError:
                raise MegaMoEValueError(expected("--shapes", f"{', '.join(SHAPES)} or E,H,I,K", repr(name))) from None
        tokens = args.tokens or shape.num_tokens
        if args.ranks < 1 or tokens % args.ranks:
            raise MegaMoEValueError(expected("--ranks", f"a divisor of {tokens} tokens", args.ranks))
        yield (
            name,
            ProblemSpec(
                num_tokens=(tokens // args.ranks,) * args.ranks,
                hidden=shape.hidden,
                intermediate=shape.intermediate,
                num_experts=shape.num_experts,
                top_k=shape.top_k,
                routing=args.routing,
            ),
        )


def shape_names(text: str) -> list[str]:
    """ "A,B" -> A and B; "8,256,128,2" -> that one; semicolons separate in any case."""
    names = []
    for part in filter(None, text.split(";")):
        names += [part] if part[0].isdigit() else part.split(",")
    return names


def choices(argument: str, text: str, allowed: tuple[str, ...]) -> list[str]:
    """A comma-separated selection."""
    chosen = text.split(",")
    if not set(chosen) <= set(allowed):
        raise MegaMoEValueError(expected(argument, f"of {', '.join(allowed)}", repr(text)))
    return chosen


def usable(names: list[str], spec: ProblemSpec, recipe: Recipe, device: torch.device) -> list[str]:
    """The backends that run this; the others are named with their reason."""
    found = []
    for name in names:
        world = "local" if spec.num_ranks > 1 else "one"
        sizes = {"num_experts": spec.num_experts, "top_k": spec.top_k, "num_ranks": spec.num_ranks, "world": world}
        problem = Problem.of(device, recipe, spec.hidden, spec.intermediate, **sizes)
        reason = BACKENDS[name].why_not(problem)
        if reason is None:
            found.append(name)
        else:
            print(f"{name} is left out: {reason}", file=sys.stderr)
    if not found:
        raise BackendUnavailable(f"--backends: none of {', '.join(names)} runs this on {device}.")
    return found


def bench_shape(name: str, spec: ProblemSpec, args: argparse.Namespace, device: torch.device) -> list[Record]:
    """All records of one shape; everything that is timed is timed in one interleaved run."""
    recipe, benches = Recipe(args.precision), choices("--bench", args.bench, BENCHES)
    backends = usable(choices("--backends", args.backends, tuple(BACKENDS)), spec, recipe, device)
    problem = BenchProblem(spec, recipe, device)
    training = "backward" in benches or "fwd_bwd" in benches
    variants: dict[tuple[str, str], Variant] = {}
    call: Run
    facts: dict[tuple[str, str], Record] = {}
    for backend in backends:
        run = LayerRun(backend, problem, training)
        accuracy = errors(problem, run, training)
        for bench in (b for b in LAYER_BENCHES if b in benches):
            call = {"forward": run.forward, "backward": run.backward, "fwd_bwd": run.forward_backward}[bench]
            variants[bench, backend] = Variant(call, problem.flops * PASSES[bench])
            shown = accuracy if bench != "forward" else {"rel_l2_out": accuracy["rel_l2_out"]}
            facts[bench, backend] = shown | {"peak_bytes": peak_bytes(call, device)}
    baseline = torch_gemms(problem)
    if baseline is not None:
        variants["gemms", "torch_scaled_grouped_mm" if recipe.precision == "fp8" else "torch_grouped_mm"] = baseline
    if "stages" in benches and "triton" in backends and spec.num_ranks == 1:
        stages = triton_stages(problem, training)
        variants |= {(stage, "triton"): variant for stage, variant in stages.items()}
    variants |= {(bench, "torch"): variant for bench, variant in ceilings(device, recipe.precision).items()}
    calls, graphs = {}, set()
    for key, variant in variants.items():
        variant.run()
        graph = None if args.eager else captured(variant.run, device)
        calls[key] = graph or variant.run
        graphs |= {key} if graph else set()
    times, clock = _time(calls, f"{name} T={sum(spec.num_tokens)}", args, device)
    common = {"shape": name, "T": sum(spec.num_tokens), "routing": spec.routing, "ranks": spec.num_ranks}
    records = []
    for (bench, backend), variant in variants.items():
        record = {"bench": bench, **common, "backend": backend, "precision": recipe.precision}
        record |= figures(variant, times[bench, backend]) | facts.get((bench, backend), {})
        records.append(record | {"graph": (bench, backend) in graphs})
    add_ratios(records)
    return [r | {"clock_mhz": clock} | environment(str(r["backend"]), device) for r in records]


def _time(
    calls: dict[tuple[str, str], Run], title: str, args: argparse.Namespace, device: torch.device
) -> tuple[dict[tuple[str, str], Timing], int | None]:
    """The times of all variants and the clock after the last one."""
    progress = Progress(len(calls) * (args.rounds + 1), title)
    named = {" ".join(key): call for key, call in calls.items()}
    times = time_variants(named, device, rounds=args.rounds, sustained_s=args.sustained, progress=progress)
    clock = clock_mhz(device)
    return {key: times[" ".join(key)] for key in calls}, clock


def peak_bytes(call: Run, device: torch.device) -> int | None:
    """Bytes allocated at most during a call beyond those before it; None on the CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def figures(variant: Variant, timing: Timing) -> Record:
    """Times and rates of a record."""
    return {
        "us": timing.us,
        "us_sustained": timing.us_sustained,
        "us_min": timing.us_min,
        "us_max": timing.us_max,
        "tflops": variant.flops / timing.us / 1e6 if variant.flops else None,
        "gb_per_s": variant.num_bytes / timing.us / 1e3 if variant.num_bytes else None,
    }


def add_ratios(records: list[Record]) -> None:
    """What compares records of one run: with Triton, with torch's GEMMs, with the measured ceilings."""
    us = {(r["bench"], r["backend"]): r["us"] for r in records}
    gemms = next((r["us"] for r in records if r["bench"] == "gemms"), None)
    top = {r["bench"]: r for r in records if r["bench"] in ("copy", "dense_matmul")}
    for r in records:
        triton = us.get((r["bench"], "triton"))
        r["ratio_to_triton"] = triton / r["us"] if triton else None
        r["ratio_to_torch_gemms"] = gemms / r["us"] if gemms and r["bench"] == "forward" else None
        r["roof_share"] = None
        if top and r["tflops"]:
            r["roof_share"] = r["tflops"] / top["dense_matmul"]["tflops"]
        elif top and r["gb_per_s"]:
            r["roof_share"] = r["gb_per_s"] / top["copy"]["gb_per_s"]


def show(records: list[Record]) -> None:
    """A plain table."""
    heads = f"{'us':>10} {'sustained':>10} {'TFLOP/s':>8} {'GB/s':>6} {'roof':>5}"
    print(f"{'bench':<16} {'shape':<8} {'backend':<24} {heads}")
    for r in records:
        tflops, rate, roof = (r.get(k) for k in ("tflops", "gb_per_s", "roof_share"))
        cells = ["" if tflops is None else f"{tflops:.0f}", "" if rate is None else f"{rate:.0f}"]
        share = "" if roof is None else f"{roof:.0%}"
        times = f"{r['us']:>10.1f} {r['us_sustained']:>10.1f}"
        print(f"{r['bench']:<16} {r['shape']:<8} {r['backend']:<24} {times} {cells[0]:>8} {cells[1]:>6} {share:>5}")


def bench_main(args: argparse.Namespace) -> int:
    """Run `megamoe bench`."""
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    everything: list[Record] = []
    folder = args.out / gpu_name(device)
    for name, spec in specs_of(args):
        records = bench_shape(name, spec, args, device)
        show(records)
        everything += records
        write_records(folder / f"{args.name}.json", everything)
        if not args.no_charts:
            chart = importlib.import_module("megamoe.cli.chart")
            file = f"{args.name}-{name.replace(',', '-')}.png"
            print(f"chart: {chart.draw(records, folder / file)}")
        if device.type == "cuda":
            torch.cuda.empty_cache()
    print(f"records: {folder / f'{args.name}.json'}")
    return 0
