"""Time the layer, forward and backward, beside torch's grouped GEMMs; write records and a bar chart a shape.

A backend whose results miss the gates of `megamoe.gates` has no time: the command fails instead. FP8 weights are
quantised beforehand, but in `fwd_bwd_requantized`; weight gradients are bf16. What a row's time includes is in its
`includes`. See `megamoe/cli/timing.py` for how times are taken.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from megamoe.backends import BACKENDS, Problem, release
from megamoe.cli import group_run
from megamoe.cli.bench_problem import (
    BF16_WGRAD,
    BenchProblem,
    LayerRun,
    Run,
    Variant,
    errors,
    triton_stages,
)
from megamoe.cli.bench_torch import COPY_OF, ceilings, same_size_copies, torch_gemms, torch_wgrads
from megamoe.cli.options import choices, device_of, refuse_given, within, writable
from megamoe.cli.problem import ROUTINGS, ProblemSpec, shape_of, spread
from megamoe.cli.records import Record, environment, write_records
from megamoe.cli.timing import Timing, captured, time_variants
from megamoe.errors import BackendUnavailable
from megamoe.provenance import gpu_name
from megamoe.recipe import Recipe

PASSES = {"forward": 3, "backward": 6, "fwd_bwd": 9, "fwd_bwd_requantized": 9, "dgrad": 3, "wgrad": 3}
"""The layer's benches, as thirds of the forward's FLOPs."""
PARTS = {"wgrad13": 2, "wgrad2": 1, "requantize": 0}
"""Parts of them, alike."""
GEMMS = ("gemms", "gemms_fwd_bwd")
BENCHES = (*PASSES, *PARTS, "stages")
INCLUDES = {
    "forward": "bf16 x and ids to bf16 out: routing, quantisation, dispatch, GEMMs, combine; nothing is saved",
    "backward": "bf16 dout to dx, dp and bf16 dW: dgrad, then wgrad",
    "fwd_bwd": "a forward that saves its pool, then backward; weights were quantised beforehand",
    "fwd_bwd_requantized": "requantize, then fwd_bwd with these copies, which the peak counts",
    "dgrad": "bf16 dout to dx, dp and what wgrad reads: quantisation, dispatch, GEMMs, combine",
    "wgrad": "bf16 dW13 and dW2 from what forward and dgrad leave: conversion of operands, products",
    "wgrad13": "dW13 of wgrad alone",
    "wgrad2": "dW2 of wgrad alone",
    "requantize": "from bf16 weights both quantised copies of each, in the order in which the kernels read them",
    "gemms": "torch's two grouped GEMMs of a forward alone, operands made beforehand",
    "gemms_fwd_bwd": "torch's six grouped GEMMs of a training step alone, operands made beforehand",
}
"""What is inside a bench's time."""
TORCH_WGRAD = "products alone, operands made beforehand"
BIG = "cute,cute_wgrad_bf16,triton,triton_wgrad_bf16"
SMALL: dict[str, Any] = {"backends": "cute,cute_wgrad_bf16,triton", "bench": "forward,backward,fwd_bwd,dgrad,wgrad"}
SUITE: tuple[dict[str, Any], ...] = (
    {"shapes": "A", "backends": BIG},
    {"shapes": "B", "backends": BIG},
    {"shapes": "C", "backends": BIG},
    {"shapes": "A", "routing": "zipf"} | SMALL,
    {"shapes": "A", "tokens": 1024} | SMALL,
    {"shapes": "A", "tokens": 128} | SMALL,
    *(SMALL | {"shapes": "A", "routing": "balanced", "ranks": ranks} for ranks in (1, 2, 4)),
    {"shapes": "A,B,C", "precision": "bf16", "backends": "triton"} | {"bench": "forward,backward,fwd_bwd,dgrad,wgrad"},
)
"""The cases of the committed records: those that name no benches with stages and charts, the others with the layer
alone."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `megamoe bench`."""
    parser.add_argument(
        "--suite", action="store_true", help="all cases of the committed records; the next seven don't count"
    )
    parser.add_argument("--shapes", default="A,B,C", help="of A, B, C, or E,H,I,K; several by semicolon or comma")
    parser.add_argument("--tokens", type=int, help="T of all ranks together (default: the shape's)")
    parser.add_argument("--routing", default="uniform", choices=ROUTINGS)
    parser.add_argument("--ranks", type=int, default=1, help="virtual ranks")
    parser.add_argument(
        "--backends",
        default=BIG,
        help='by comma; NAME_wgrad_bf16: with wgrad_operands="bf16"; what does not run here is named and left out',
    )
    parser.add_argument("--bench", default=",".join(BENCHES), help="by comma")
    parser.add_argument("--precision", default="fp8", choices=("fp8", "bf16"))
    parser.add_argument("--rounds", type=int, default=10, help="launches of each variant, interleaved")
    parser.add_argument("--eager", action="store_true", help="launch every kernel instead of replaying a CUDA graph")
    parser.add_argument("--sustained", type=float, default=0.3, help="seconds of back-to-back launches")
    parser.add_argument("--tokens-per-rank", help="under torchrun: T of every rank, several by comma")
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
        yield name, spread(shape_of("--shapes", name, args.tokens), args.ranks, args.routing)


def shape_names(text: str) -> list[str]:
    """ "A,B" -> A and B; "8,256,128,2" -> that one; semicolons separate in any case."""
    names = []
    for part in text.split(";"):
        names += [part] if part[:1].isdigit() else part.split(",")
    return names


def selected(args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """The benches and the backends that the options name."""
    allowed = (*BACKENDS, *(name + BF16_WGRAD for name in BACKENDS))
    return choices("--bench", args.bench, BENCHES), choices("--backends", args.backends, allowed)


def usable(names: list[str], spec: ProblemSpec, recipe: Recipe, device: torch.device) -> list[str]:
    """The backends that run this; the others are named with their reason."""
    found = []
    for name in names:
        world = "local" if spec.num_ranks > 1 else "one"
        sizes = {"num_experts": spec.num_experts, "top_k": spec.top_k, "num_ranks": spec.num_ranks, "world": world}
        problem = Problem.of(device, recipe, spec.hidden, spec.intermediate, **sizes)
        reason = BACKENDS[name.removesuffix(BF16_WGRAD)].why_not(problem)
        if name.endswith(BF16_WGRAD) and recipe.wgrad_operands == "bf16":
            continue  # the same as without
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
    recipe, (benches, asked) = Recipe(args.precision), selected(args)
    backends = usable(asked, spec, recipe, device)
    problem = BenchProblem(spec, recipe, device)
    training = bool(set(benches) - {"forward", "stages"})
    variants: dict[tuple[str, str], Variant] = {}
    facts: dict[tuple[str, str], Record] = {}
    runs: dict[str, LayerRun] = {}
    failed = 0
    for backend in backends:
        try:
            other = runs.get(backend.removesuffix(BF16_WGRAD))
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
    variants |= torch_gemms(problem, training)
    if "wgrad" in benches and spec.num_ranks == 1:
        found_torch = {key: v for key, v in torch_wgrads(problem).items() if key[0] in benches}
        variants |= found_torch
        facts |= {key: {"includes": TORCH_WGRAD} for key in found_torch}
    if "stages" in benches and "triton" in runs and spec.num_ranks == 1:
        stages = triton_stages(problem, runs["triton"].experts[0], training)
        variants |= {(stage, "triton"): variant for stage, variant in stages.items()}
        beside = ceilings(device, recipe.precision)
        moved = {bench: v.num_bytes for (bench, backend), v in variants.items() if backend == "triton" and v.num_bytes}
        beside |= same_size_copies(moved, device)
        variants |= {(bench, "torch"): variant for bench, variant in beside.items()}
    calls: dict[tuple[str, str], Run] = {}
    pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
    for key, variant in variants.items():
        variant.run()
        graph = captured(variant.run, device, pool) if variant.capturable and not args.eager else None
        calls[key] = graph or variant.run
        facts[key] = facts.get(key, {}) | {"graph": graph is not None}
    times = _time(calls, f"{name} T={sum(spec.num_tokens)} {spec.routing} R={spec.num_ranks}", args, device)
    common = {"shape": name, "T": sum(spec.num_tokens), "routing": spec.routing, "ranks": spec.num_ranks}
    records = []
    for (bench, backend), variant in variants.items():
        record = {"bench": bench, **common, "backend": backend, "precision": recipe.precision}
        record["includes"] = INCLUDES.get(bench)
        records.append(record | figures(variant, times[bench, backend]) | facts[bench, backend])
    add_ratios(records)
    records = [r for r in records if not str(r["bench"]).startswith(COPY_OF)]
    return [r | environment(str(r["backend"]), device) for r in records], failed


def layer_variants(run: LayerRun, benches: list[str], training: bool) -> dict[str, tuple[Variant, Record]]:
    """What is timed of one backend, and what is known of it beforehand: errors and peak memory.

    Raises:
        AssertionError: a result misses its gate.
    """
    problem, wanted = run.problem, set(benches)
    if run.recipe != problem.recipe:  # only operands of wgrad differ
        wanted -= {"forward", "dgrad", "requantize", "fwd_bwd_requantized"}
    accuracy, calls = errors(problem, run, wanted, training), run.calls()
    found: dict[str, tuple[Variant, Record]] = {}
    for bench, thirds in (PASSES | PARTS).items():
        if bench not in wanted:
            continue
        alone = not ({"forward", "backward", "dgrad"} & {bench} or "fwd" in bench)
        num_bytes = 0 if bench != "requantize" else problem.requantized_bytes()
        variant = Variant(calls[bench], problem.flops * thirds // 3, num_bytes, run.capturable or alone)
        found[bench] = variant, accuracy[bench] | {"peak_bytes": peak_bytes(calls[bench], problem.device)}
    return found


def _time(
    calls: dict[tuple[str, str], Run], title: str, args: argparse.Namespace, device: torch.device
) -> dict[tuple[str, str], Timing]:
    """The times of all variants."""
    progress = Progress(len(calls) * (args.rounds + 1), title)
    named = {" ".join(key): call for key, call in calls.items()}
    brief = {" ".join(key) for key in calls if key[0] not in (*PASSES, *GEMMS)}
    times = time_variants(named, device, rounds=args.rounds, sustained_s=args.sustained, brief=brief, progress=progress)
    return {key: times[" ".join(key)] for key in calls}


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
        "clock_mhz": timing.clock_mhz,
        "tflops": variant.flops / timing.us / 1e6 if variant.flops else None,
        "gb_per_s": variant.num_bytes / timing.us / 1e3 if variant.num_bytes else None,
    }


def add_ratios(records: list[Record]) -> None:
    """What compares records of one run: with Triton, with torch's GEMMs, with the measured ceilings."""
    us = {(r["bench"], r["backend"]): r["us"] for r in records}
    gemms = {r["bench"]: r["us"] for r in records if r["backend"] == "torch_grouped_mm"}
    forward = next((r["us"] for r in records if r["bench"] == "gemms"), None)
    gemms |= {"forward": forward} if forward else {}
    gemms |= {"fwd_bwd": gemms["gemms_fwd_bwd"]} if "gemms_fwd_bwd" in gemms else {}
    top = {r["bench"]: r for r in records if r["bench"] in ("copy", "dense_matmul")}
    for r in records:
        triton = us.get((r["bench"], "triton"))
        r["ratio_to_triton"] = triton / r["us"] if triton else None
        beside = None if r["backend"].startswith("torch_") else gemms.get(r["bench"])
        r["ratio_to_torch_gemms"] = beside / r["us"] if beside else None
        copy = us.get((COPY_OF + r["bench"], "torch"))
        r["copy_share"] = copy / r["us"] if copy else None
        r["roof_share"] = None
        if top and r["tflops"]:
            r["roof_share"] = r["tflops"] / top["dense_matmul"]["tflops"]
        elif top and r["gb_per_s"]:
            r["roof_share"] = r["gb_per_s"] / top["copy"]["gb_per_s"]


def show(records: list[Record]) -> None:
    """A plain table."""
    heads = f"{'us':>10} {'sustained':>10} {'TFLOP/s':>8} {'GB/s':>6} {'roof':>5} {'copy':>5}"
    print(f"{'bench':<16} {'shape':<8} {'backend':<24} {heads}")
    for r in records:
        tflops, rate, roof = (r.get(k) for k in ("tflops", "gb_per_s", "roof_share"))
        cells = ["" if tflops is None else f"{tflops:.0f}", "" if rate is None else f"{rate:.0f}"]
        cells += ["" if v is None else f"{v:.0%}" for v in (roof, r.get("copy_share"))]
        rates = " ".join(f"{cell:>{width}}" for cell, width in zip(cells, (8, 6, 5, 5), strict=True))
        times = f"{r['us']:>10.1f} {r['us_sustained']:>10.1f}"
        print(f"{r['bench']:<16} {r['shape']:<8} {r['backend']:<24} {times} {rates}")


def cases_of(args: argparse.Namespace) -> Iterator[tuple[str, ProblemSpec, argparse.Namespace]]:
    """(shape, problem, its options) of everything that the options name."""
    if not args.suite:
        yield from ((name, spec, args) for name, spec in specs_of(args))
        return
    plain: dict[str, Any] = {
        "tokens": None,
        "routing": "uniform",
        "ranks": 1,
        "precision": "fp8",
        "bench": ",".join(BENCHES),
    }
    for case in SUITE:
        options = argparse.Namespace(**vars(args) | plain | case)
        yield from ((name, spec, options) for name, spec in specs_of(options))


def bench_main(args: argparse.Namespace) -> int:
    """Run `megamoe bench`."""
    if group_run.launched():
        from megamoe.cli.bench_group import bench_group

        return bench_group(args)
    refuse_given(args, add_arguments, {"--tokens-per-rank": "tokens_per_rank"}, "without torchrun")
    within("--rounds", args.rounds, 1)
    within("--sustained", args.sustained, 0, 3600)
    cases, device = list(cases_of(args)), device_of(args.device)
    for *_, options in cases:
        selected(options)
    folder = args.out / gpu_name(device)
    writable("--out", folder / f"{args.name}.json")
    files: dict[str, list[Record]] = {args.name: [], "stages": []}
    failed = 0
    for name, spec, options in cases:
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
            is_layer = record["bench"] in (*PASSES, *GEMMS)
            files[args.name if is_layer else "stages"].append(record)
        for file, content in files.items():
            if content:
                write_records(folder / f"{file}.json", content)
        if records and "stages" in options.bench and not args.no_charts:
            chart = importlib.import_module("megamoe.cli.chart")
            file = f"{args.name}-{name.replace(',', '-')}.png"
            print(f"chart: {chart.draw(records, folder / file)}")
        if device.type == "cuda":  # the case's graphs are gone, and nothing else needs the workspaces they held
            release()
            torch.cuda.empty_cache()
    print(f"records: {folder}")
    return 1 if failed else 0
