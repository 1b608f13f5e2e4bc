"""Compare every stage of the layer, forward and backward, with the fp64 oracle and with the recipe's emulation.

The exit status is 1 if any stage misses a gate of `megamoe.gates`, else 0.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence

import torch

from megamoe._version import __version__
from megamoe.cli import group_run
from megamoe.cli.options import MOST_SEED, device_of, integers, refuse_given, within
from megamoe.cli.problem import ROUTINGS, SHAPES, ProblemSpec, make_problem, spelled_as_options, spread
from megamoe.cli.stages import Verdict, verify_problem
from megamoe.errors import MegaMoEValueError, expected
from megamoe.recipe import Recipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `megamoe verify`."""
    parser.add_argument("--backend", default="auto", choices=("auto", "torch", "triton", "cute"))
    parser.add_argument("--precision", default="fp8", choices=("fp8", "bf16"))
    parser.add_argument("--scale-format", default="fp32", choices=("fp32", "pow2"))
    parser.add_argument("--clamp", type=float, help="limit of the gated activation")
    parser.add_argument(
        "--wgrad-operands", choices=("bf16", "fp8"), help="of the weight gradients (default: by the precision)"
    )
    parser.add_argument("--ranks", type=int, help="virtual ranks (default: 2, or one for each entry of --tokens)")
    parser.add_argument("--shape", choices=SHAPES, help="sizes of the benchmarks, instead of the five that follow")
    parser.add_argument("--tokens", default="64", help="T of every rank, or one T for each rank: 64 or 17,0,96,1")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--intermediate", type=int, default=256)
    parser.add_argument("--experts", type=int, default=16, help="over all ranks")
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--routing", default="uniform", help=f"one of {', '.join(ROUTINGS)}; several by comma; or all")
    parser.add_argument("--seeds", default="0", help="comma-separated")
    parser.add_argument("--device", help="default: cuda where there is one, else cpu")
    group_run.add_transport(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def tokens_of(text: str, num_ranks: int | None) -> tuple[int, ...]:
    """T of each rank from `--tokens` and `--ranks`."""
    counts = integers("--tokens", text)
    if len(counts) == 1:
        return counts * (2 if num_ranks is None else num_ranks)
    if num_ranks not in (None, len(counts)):
        raise MegaMoEValueError(expected("--tokens", f"one T, or one for each of the {num_ranks} ranks", text))
    return counts


def specs_of(args: argparse.Namespace) -> Iterator[ProblemSpec]:
    """The problems that the options name: every routing with every seed."""
    routings = ROUTINGS if args.routing == "all" else args.routing.split(",")
    within("--ranks", args.ranks, 1)
    if args.shape is None:
        sizes = (args.hidden, args.intermediate, args.experts, args.top_k)
        spec = ProblemSpec(tokens_of(args.tokens, args.ranks), *sizes)
    else:
        spec = spread(SHAPES[args.shape], args.ranks or 1)
    for routing in routings:
        for seed in integers("--seeds", args.seeds):
            within("--seeds", seed, 0, MOST_SEED)
            yield dataclasses.replace(spec, routing=routing, seed=seed)


def ranks_of_group(args: argparse.Namespace) -> int:
    """R under torchrun, which is the number of its processes."""
    refuse_given(args, add_arguments, {"--json": "json"}, "under torchrun")
    num_ranks = group_run.num_processes()
    if args.ranks not in (None, num_ranks):
        raise MegaMoEValueError(expected("--ranks", f"the {num_ranks} processes of torchrun", args.ranks))
    return num_ranks


def verify_main(args: argparse.Namespace) -> int:
    """Run `megamoe verify`; returns its exit status."""
    with spelled_as_options():
        recipe = Recipe(args.precision, args.scale_format, args.clamp, args.wgrad_operands)
        if group_run.launched():
            args.ranks = ranks_of_group(args)
            specs = list(specs_of(args))
            return group_run.verify_group(specs, recipe, args)
        refuse_given(args, add_arguments, {"--transport": "transport"}, "without torchrun")
        specs = list(specs_of(args))
    device = device_of(args.device)
    reports: list[dict[str, object]] = []
    num_passed = 0
    for number, spec in enumerate(specs, 1):
        progress = Progress(f"[{number}/{len(specs)}] {spec}")
        backend, verdicts = verify_problem(make_problem(spec, device), recipe, args.backend, progress)
        progress.clear()
        num_passed += all(not v.failures for v in verdicts)
        reports.append({"problem": str(spec), "backend": backend, "stages": [as_json(v) for v in verdicts]})
        if not args.json:
            print(f"{spec}\nbackend {backend} on {device.type}, {describe(recipe)}\n{table(verdicts)}\n", flush=True)
    passed = num_passed == len(specs)
    if args.json:
        summary = {
            "version": __version__,
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            "recipe": dataclasses.asdict(recipe),
            "passed": passed,
            "problems": reports,
        }
        print(json.dumps(summary, indent=1))
    else:
        print(f"{num_passed} of {len(specs)} problems pass every gate")
    return 0 if passed else 1


def describe(recipe: Recipe) -> str:
    """A recipe in a few words."""
    parts: list[str] = [recipe.precision]
    parts += [f"{recipe.scale_format} scales"] if recipe.precision == "fp8" else []
    parts += [f"{recipe.wgrad_operands} operands of weight gradients"] if recipe.precision == "fp8" else []
    if recipe.clamp is not None:
        parts += [f"clamp {recipe.clamp:g} (masks of the gradients by the backend's own gate and up)"]
    return ", ".join(parts)


HEADER = ("stage", "oracle", "rel-L2", "worst row", "worst expert", "emulation", "gates")


def table(verdicts: Sequence[Verdict], beside: str = "emulation") -> str:
    """Verdicts as aligned text, one line a stage; `beside` names what the bits were compared with."""
    lines = [tuple(beside if title == "emulation" else title for title in HEADER)] + [cells(v) for v in verdicts]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEADER))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def cells(v: Verdict) -> tuple[str, ...]:
    """One line of the table."""
    expert = "" if v.worst_expert_db is None else f"{decibels(v.worst_expert_db)} at {v.worst_expert}"
    return (
        v.stage,
        decibels(v.sqnr_db),
        f"{v.rel_l2:.2e}",
        f"{v.worst_row:.4f} at {v.worst_row_idx}",
        expert,
        "bit for bit" if v.is_bitwise else decibels(v.emulation_db),
        "pass" if not v.failures else "FAIL " + "; ".join(v.failures),
    )


def decibels(value: float) -> str:
    """A figure in dB; equal tensors read "exact"."""
    return "exact" if value == math.inf else f"{value:.1f} dB"


def as_json(v: Verdict) -> dict[str, object]:
    """A verdict as JSON allows it: infinite and undefined figures become null."""
    fields = dataclasses.asdict(v)
    finite = {k: None if isinstance(x, float) and not math.isfinite(x) else x for k, x in fields.items()}
    return {**finite, "failures": list(v.failures), "passed": not v.failures}


class Progress:
    """What runs and since when, on stderr: one line that rewrites itself on a terminal; in a pipe, one every 10 s."""

    INTERVAL_S = 10.0

    def __init__(self, title: str) -> None:
        self._title = title
        self._start = self._shown = time.monotonic()
        self._is_terminal = sys.stderr.isatty()

    def __call__(self, part: str) -> None:
        now = time.monotonic()
        text = f"{self._title}: {part} ({now - self._start:.0f} s)"
        if self._is_terminal:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
        elif now - self._shown > self.INTERVAL_S:
            print(text, file=sys.stderr, flush=True)
            self._shown = now

    def clear(self) -> None:
        """Remove the line."""
        if self._is_terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
