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
from megamoe.cli.bench_problem import (
    FP8_WGRAD,
    BenchProblem,
    LayerRun,
    Run,
    Variant,
    ceilings,
    errors,
    torch_gemms,
    triton_stages,
)
from megamoe.cli.problem import ROUTINGS, SHAPES, ProblemSpec, Shape
from megamoe.cli.records import Record, environment, gpu_name, write_records
from megamoe.cli.timing import Timing, captured, clock_mhz, time_variants
from megamoe.errors import BackendUnavailable, MegaMoEValueError, expected
from megamoe.recipe import Recipe

PASSES = {"forward": 1, "backward": 2, "fwd_bwd": 3, "dgrad": 1}
"""The layer's benches, as multiples of the forward's FLOPs."""
BENCHES = (*PASSES, "wgrad", "stages")
SUITE = (
    {"shapes": "A"},
    {"shapes": "B"},
    {"shapes": "C"},
    {"shapes": "A", "routing": "zipf"},
    {"shapes": "A", "tokens": 1024},
    {"shapes": "A", "tokens": 128},
    {"shapes": "A", "ranks": 2},
    {"shapes": "A", "ranks": 4},
)
"""The cases of the committed records: the first three with stages and charts, the others with the layer alone."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `megamoe bench`."""
    parser.add_argument(
        "--suite", action="store_true", help="all cases of the committed records; the next four don't count"
    )
    parser.add_argument("--shapes", default="A,B,C", help="of A, B, C, or E,H,I,K; several by semicolon or comma")
    parser.add_argument("--tokens", type=int, help="T of all ranks together (default: the shape's)")
    parser.add_argument("--routing", default="uniform", choices=ROUTINGS)
    parser.add_argument("--ranks", type=int, default=1, help="virtual ranks")
    parser.add_argument(
        "--backends",
        default="cute,cute_wgrad_fp8,triton",
        help='by comma; NAME_wgrad_fp8: with wgrad_operands="fp8"; what does not run here is named and left out',
    )
    parser.add_argument("--bench", default=",".join(BENCHES), help="by comma")
    parser.add_argument("--precision", default="fp8", choices=("fp8", "bf16"))
    parser.add_argument("--rounds", type=int, default=10, help="launches of each variant, interleaved")
    parser.add_argument("--eager", action="store_true", help="launch every kernel instead of replaying a CUDA graph")
    parser.add_argument("--sustained", type=float, default=0.3, help="seconds of back-to-back launches")
    parser.add_argument("--device", help="default: cuda where there is one, else cpu")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of the records")
    parser.add_argument("--name", default="layer", help="file of the records: <out>/<gpu>/<name>.json; see also stages")
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
        reason = BACKENDS[name.removesuffix(FP8_WGRAD)].why_not(problem)
        if reason is None:
            found.append(name)
        else:
            print(f"{name} is left out: {reason}", file=sys.stderr)
    if not found:
        raise BackendUnavailable(f"--backends: none of {', '.join(names)} runs this on {device}.")
    return found


def bench_case(
    name: str, spec: ProblemSpec, args: argparse.Namespace, device: torch.device
) -> tuple[list[Record], int]:
    """All records of one case, timed in one interleaved run, and how many backends failed.

    A backend that misses a gate or raises is named on stderr and has no record.
    """
    recipe, benches = Recipe(args.precision), choices("--bench", args.bench, BENCHES)
    allowed = (*BACKENDS, *(name + FP8_WGRAD for name in BACKENDS))
    backends = usable(choices("--backends", args.backends, allowed), spec, recipe, device)
    problem = BenchProblem(spec, recipe, device)
    training = bool({"backward", "fwd_bwd", "dgrad", "wgrad"} & set(benches))
    variants: dict[tuple[str, str], Variant] = {}
    facts: dict[tuple[str, str], Record] = {}
    runs: dict[str, LayerRun] = {}
    failed = 0
    for backend in backends:
        try:
            other = runs.get(backend.removesuffix(FP8_WGRAD))
            run = LayerRun(backend, problem, training, other.experts if other else None)
            found = layer_variants(run, benches, training)
        except Exception as error:  # whatever is wrong with one backend, the others are measured
            print(f"{backend} has no record: {type(error).__name__}: {error}", file=sys.stderr)
            failed += 1
            continue
        runs[backend] = run
        variants |= {(bench, backend): variant for bench, (variant, _) in found.items()}
        facts |= {(bench, backend): fact for bench, (_, fact) in found.items()}
    problem.forget_oracle()
    baseline = torch_gemms(problem)
    if baseline is not None:
        variants["gemms", "torch_scaled_grouped_mm" if recipe.precision == "fp8" else "torch_grouped_mm"] = baseline
    if "stages" in benches and "triton" in runs and spec.num_ranks == 1:
        stages = triton_stages(problem, runs["triton"].experts[0], training)
        variants |= {(stage, "triton"): variant for stage, variant in stages.items()}
        variants |= {(bench, "torch"): variant for bench, variant in ceilings(device, recipe.precision).items()}
    calls: dict[tuple[str, str], Run] = {}
    pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
    for key, variant in variants.items():
        variant.run()
        graph = captured(variant.run, device, pool) if variant.capturable and not args.eager else None
        calls[key] = graph or variant.run
        facts[key] = facts.get(key, {}) | {"graph": graph is not None}
    times, clock = _time(calls, f"{name} T={sum(spec.num_tokens)} {spec.routing} R={spec.num_ranks}", args, device)
    common = {"shape": name, "T": sum(spec.num_tokens), "routing": spec.routing, "ranks": spec.num_ranks}
    records = []
    for (bench, backend), variant in variants.items():
        record = {"bench": bench, **common, "backend": backend, "precision": recipe.precision}
        records.append(record | figures(variant, times[bench, backend]) | facts[bench, backend])
    if "wgrad" in benches:
        records += wgrad_records(records, problem.flops)
    add_ratios(records)
    return [r | {"clock_mhz": clock} | environment(str(r["backend"]), device) for r in records], failed


def layer_variants(run: LayerRun, benches: list[str], training: bool) -> dict[str, tuple[Variant, Record]]:
    """What is timed of one backend, and what is known of it beforehand: errors and peak memory.

    Raises:
        AssertionError: a result misses its gate.
    """
    problem = run.problem
    accuracy = errors(problem, run, training)
    wanted = set(benches) | ({"backward", "dgrad"} if "wgrad" in benches else set())
    if run.recipe != problem.recipe:  # only operands of wgrad differ
        wanted -= {"forward"}
    calls = {"forward": run.forward, "backward": run.backward, "fwd_bwd": run.forward_backward, "dgrad": run.dgrad}
    found: dict[str, tuple[Variant, Record]] = {}
    for bench in (b for b in PASSES if b in wanted):
        fact: Record = accuracy if bench != "forward" else {"rel_l2_out": accuracy["rel_l2_out"]}
        variant = Variant(calls[bench], problem.flops * PASSES[bench], capturable=run.capturable)
        found[bench] = variant, fact | {"peak_bytes": peak_bytes(calls[bench], problem.device)}
    return found


def wgrad_records(records: list[Record], flops: int) -> list[Record]:
    """The weight gradients of each backend, as what `backward` takes longer than `dgrad` in the same run."""
    by_key = {(r["bench"], r["backend"]): r for r in records}
    made = []
    for (bench, backend), whole in by_key.items():
        part = by_key.get(("dgrad", backend))
        if bench != "backward" or part is None or whole["us"] <= part["us"]:
            continue
        us = whole["us"] - part["us"]
        same = {k: whole[k] for k in ("shape", "T", "routing", "ranks", "backend", "precision", "graph")}
        sustained = whole["us_sustained"] - part["us_sustained"]
        times = {"us": us, "us_min": us, "us_max": us, "us_sustained": sustained if sustained > 0 else us}
        made.append({"bench": "wgrad", **same, **times, "tflops": flops / us / 1e6, "gb_per_s": None, "derived": True})
    return made


def _time(
    calls: dict[tuple[str, str], Run], title: str, args: argparse.Namespace, device: torch.device
) -> tuple[dict[tuple[str, str], Timing], int | None]:
    """The times of all variants and the clock after the last one."""
    progress = Progress(len(calls) * (args.rounds + 1), title)
    named = {" ".join(key): call for key, call in calls.items()}
    brief = {" ".join(key) for key in calls if key[0] not in (*PASSES, "gemms")}
    times = time_variants(
        named, device, rounds=args.rounds, sustained_s=args.sustained, brief=brief, progress=progress
    )  # fmt: skip
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


def cases_of(args: argparse.Namespace) -> Iterator[tuple[str, ProblemSpec, bool]]:
    """(shape, problem, whether stages and a chart belong to it) of everything that the options name."""
    if not args.suite:
        yield from ((name, spec, True) for name, spec in specs_of(args))
        return
    plain = argparse.Namespace(**vars(args) | {"tokens": None, "routing": "uniform", "ranks": 1})
    for case in SUITE:
        options = argparse.Namespace(**vars(plain) | case)
        yield from ((name, spec, len(case) == 1) for name, spec in specs_of(options))


def bench_main(args: argparse.Namespace) -> int:
    """Run `megamoe bench`."""
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    folder = args.out / gpu_name(device)
    files: dict[str, list[Record]] = {args.name: [], "stages": []}
    failed = 0
    for name, spec, has_stages in cases_of(args):
        benches = [b for b in args.bench.split(",") if has_stages or b != "stages"]
        options = argparse.Namespace(**vars(args) | {"bench": ",".join(benches)})
        try:
            records, failures = bench_case(name, spec, options, device)
        except RuntimeError as error:
            if not args.suite:
                raise
            print(f"{name} T={sum(spec.num_tokens)} has no record: {type(error).__name__}: {error}", file=sys.stderr)
            failed += 1
            continue
        failed += failures
        show(records)
        for record in records:
            is_layer = record["bench"] in (*PASSES, "wgrad", "gemms")
            files[args.name if is_layer else "stages"].append(record)
        for file, content in files.items():
            if content:
                write_records(folder / f"{file}.json", content)
        if records and has_stages and not args.no_charts:
            chart = importlib.import_module("megamoe.cli.chart")
            file = f"{args.name}-{name.replace(',', '-')}.png"
            print(f"chart: {chart.draw(records, folder / file)}")
        if device.type == "cuda":
            torch.cuda.empty_cache()
    print(f"records: {folder}")
    return 1 if failed else 0
