"""What a layer will hold in memory, before anything is allocated: weights, copies, saved state, stages, the peak."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import get_args

from megamoe.cli.options import writable
from megamoe.cli.problem import spelled_as_options
from megamoe.config import MoEConfig
from megamoe.errors import BackendUnavailable, MegaMoEValueError, expected
from megamoe.memory_plan import MemoryPlan, PlanOptions, SaveMode, memory_plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `megamoe plan`."""
    parser.add_argument("--config", help="config.json of a model; instead of the five sizes below")
    parser.add_argument("--hidden", type=int, default=7168, help="H")
    parser.add_argument("--intermediate", type=int, default=2048, help="I of one expert")
    parser.add_argument("--experts", type=int, default=256, help="E over all ranks")
    parser.add_argument("--top-k", type=int, default=8, help="K")
    parser.add_argument("--shared", type=int, default=0, help="number of shared experts")
    parser.add_argument("--tokens", type=int, default=8192, help="T of each rank")
    parser.add_argument("--ranks", type=int, default=8, help="R")
    parser.add_argument("--virtual", action="store_true", help="all ranks in one process")
    parser.add_argument("--save", choices=get_args(SaveMode), default="pool", help="'none' is inference")
    parser.add_argument("--capacity", help="rows of each pool, or 'worst'; without it an even load is assumed")
    parser.add_argument("--weights", choices=("fp8", "bf16", "fp32"), default="bf16", help="format of the masters")
    parser.add_argument("--precision", choices=("fp8", "bf16"), default="fp8", help="of the recipe")
    parser.add_argument("--wgrad-operands", choices=("bf16", "fp8"), default=PlanOptions().wgrad_operands)
    parser.add_argument("--backend", choices=("steps", "cute"), default="steps", help="unfused steps or fused kernels")
    parser.add_argument("--steal-us", type=float, default=0.0, help="of the layer's OverlapConfig")
    parser.add_argument("--packed", action="store_true", help="FP8 weights after pack_weights(), with --backend cute")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("--png", help="also draw the stages into this file (needs matplotlib)")


def plan_of(args: argparse.Namespace) -> MemoryPlan:
    """The plan that the options ask for."""
    if args.config is not None:
        try:
            content = json.loads(Path(args.config).read_text())
        except (OSError, ValueError) as error:
            raise MegaMoEValueError(
                expected("--config", "a readable config.json", f"{args.config!r}: {error}")
            ) from error
        if not isinstance(content, dict):
            raise MegaMoEValueError(expected("--config", "a JSON object", type(content).__name__))
        config = MoEConfig.from_hf(content)
    else:
        sizes = (args.hidden, args.intermediate, args.experts, args.top_k)
        with spelled_as_options():
            config = MoEConfig(*sizes, num_shared_experts=args.shared)
    capacity = args.capacity
    if capacity not in (None, "worst"):
        if not capacity.isdecimal():
            raise MegaMoEValueError(expected("--capacity", "a number of rows or 'worst'", repr(capacity)))
        capacity = int(capacity)
    with spelled_as_options():
        options = PlanOptions(
            args.weights, args.precision, args.virtual, args.wgrad_operands, args.backend, args.steal_us, args.packed
        )
        return memory_plan(config, args.ranks, args.save, capacity, tokens=args.tokens, options=options)


def draw(plan: MemoryPlan, path: str | Path) -> None:
    """Draw the stages of a plan as stacked bars, with weights and copies below, into a PNG file.

    Raises:
        BackendUnavailable: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BackendUnavailable(
            expected("--png", "matplotlib", "none", "pip install 'megamoe[plots]', or leave --png out.")
        ) from error
    gib = 2.0**30
    stages = plan.stages
    bases = {"weights": plan.weights_bytes, "copies of weights": plan.copies_bytes}
    saved, gradients = ({item.name for item in items} for items in (plan.saved, plan.gradients))
    parts: dict[str, list[int]] = {"weight gradients": [], "saved for the backward": [], "only in this stage": []}
    for stage in stages:
        of = [0, 0, 0]
        for item in stage.items:
            of[0 if item.name in gradients else 1 if item.name in saved else 2] += item.num_bytes
        for name, num_bytes in zip(parts, of, strict=True):
            parts[name].append(num_bytes)
    figure = Figure(figsize=(10, 1.8 + 0.34 * len(stages)), layout="constrained")
    axes = figure.add_subplot()
    left = [0.0] * len(stages)
    series = {**{name: [num_bytes] * len(stages) for name, num_bytes in bases.items()}, **parts}
    colours = ("#7f8c99", "#b5bfc9", "#d98c4a", "#4a7fb5", "#74b08a")
    for (name, values), colour in zip(series.items(), colours, strict=True):
        widths = [value / gib for value in values]
        axes.barh(range(len(stages)), widths, left=left, color=colour, label=name)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    peak = stages.index(plan.peak_stage)
    axes.axvline(left[peak], color="black", linewidth=0.8, linestyle=":")
    for row, end in enumerate(left):
        axes.text(end, row, f" {end:.2f}" + (" peak" if row == peak else ""), va="center", fontsize=8)
    axes.set_yticks(range(len(stages)), [stage.name for stage in stages], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, max(left) * 1.1)
    axes.set_xlabel("GiB of one process")
    axes.set_title(plan.title, fontsize=8)
    figure.legend(loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    figure.savefig(path, dpi=150, format="png")


def plan_main(args: argparse.Namespace) -> int:
    """Run `megamoe plan`; returns its exit status."""
    plan = plan_of(args)
    png = None if args.png is None else writable("--png", args.png)
    print(json.dumps(plan.as_dict(), indent=1) if args.json else plan.explain())
    if png is not None:
        draw(plan, png)
    return 0
