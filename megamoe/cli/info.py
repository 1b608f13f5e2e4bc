"""Versions, devices, and which backend runs here, or why not."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform

import torch

from megamoe._version import __version__
from megamoe.backends import BACKENDS, Problem, resolve, why_not
from megamoe.cli.problem import ProblemSpec, spelled_as_options
from megamoe.recipe import Recipe

PACKAGES = ("torch", "triton", "nvidia-cutlass-dsl", "safetensors", "transformers")
VARIABLES = ("MEGAMOE_CACHE_DIR", "TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `megamoe info`."""
    parser.add_argument("--hidden", type=int, default=7168, help="H of the layer that is asked about")
    parser.add_argument("--intermediate", type=int, default=2048, help="I of the layer that is asked about")
    parser.add_argument("--experts", type=int, default=32, help="E of that layer")
    parser.add_argument("--top-k", type=int, default=8, help="K of that layer")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def version_of(package: str) -> str | None:
    """The installed version, None if it is missing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def devices() -> list[dict[str, object]]:
    """The CUDA devices that torch sees. Initialises CUDA where there are any."""
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            {
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "sms": properties.multi_processor_count,
                "memory_gib": round(properties.total_memory / 2**30, 1),
            }
        )
    return found


def backend_table(sizes: dict[str, int]) -> dict[str, dict[str, str]]:
    """By backend and precision, for these sizes on the first device: "runs", or why not; and what "auto" takes."""
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    table: dict[str, dict[str, str]] = {}
    problems = [Problem.of(device, recipe, **sizes) for recipe in (Recipe("fp8"), Recipe("bf16"))]
    for name in BACKENDS:
        table[name] = {problem.precision: why_not(name, problem) or "runs" for problem in problems}
    table["auto"] = {problem.precision: f"takes {resolve('auto', problem).name}" for problem in problems}
    return table


def packages() -> dict[str, str | None]:
    """Versions of what this package works with."""
    return {name: version_of(name) for name in PACKAGES}


def environment() -> dict[str, str]:
    """The variables that matter here, where they are set."""
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}


def info_main(args: argparse.Namespace) -> int:
    """Run `megamoe info`; returns its exit status."""
    with spelled_as_options():
        ProblemSpec((1,), args.hidden, args.intermediate, args.experts, args.top_k)
    sizes = {
        "hidden_size": args.hidden,
        "intermediate_size": args.intermediate,
        "num_experts": args.experts,
        "top_k": args.top_k,
    }
    backends = backend_table(sizes)
    if args.json:
        facts = {
            "megamoe": __version__,
            "python": platform.python_version(),
            "packages": packages(),
            "cuda": torch.version.cuda,
            "devices": devices(),
            "environment": environment(),
            "backends": backends,
        }
        print(json.dumps(facts, indent=1))
        return 0
    print(f"megamoe {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}")
    for name, version in packages().items():
        print(f"  {name:20} {version or 'not installed'}")
    print(f"  {'CUDA of torch':20} {torch.version.cuda or 'none: a CPU build'}")
    found = devices()
    print("devices" if found else "devices: no CUDA device")
    for index, d in enumerate(found):
        print(f"  cuda:{index} {d['name']}, capability {d['capability']}, {d['sms']} SMs, {d['memory_gib']} GiB")
    for name, value in environment().items():
        print(f"  {name}={value}")
    size = f"H = {args.hidden}, I = {args.intermediate}, E = {args.experts}, K = {args.top_k}"
    print(f"backends for {size}")
    for name, answers in backends.items():
        for precision, answer in answers.items():
            print(f"  {name:7} {precision:5} {answer}")
    return 0
