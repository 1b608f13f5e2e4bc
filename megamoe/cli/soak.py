"""Random calls, forward and backward, of one backend against another, for as long as you like.

Sizes, routing, ranks and options of every call are drawn from its seed, which is printed: `--seed N --calls 1` makes
that call again. The exit status is 1 if any call failed or missed the gate of `megamoe.gates` between backends, else 0.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import random
import time
from pathlib import Path
from typing import Any

import torch

from megamoe._version import __version__
from megamoe.cli.problem import ROUTINGS, Problem, ProblemSpec, make_problem
from megamoe.comm import LocalWorld
from megamoe.context import MoEContext
from megamoe.errors import MegaMoEValueError, expected
from megamoe.functional import mega_moe
from megamoe.gates import GATES, sqnr_db
from megamoe.recipe import Recipe

SIZES = ((128, 128), (256, 128), (384, 384), (1024, 512), (2048, 768))
"""(H, I) that calls draw from: few, because each is compiled."""


@dataclasses.dataclass(frozen=True)
class Drawn:
    """One call: what it computes, by which recipe, and what its forward keeps."""

    spec: ProblemSpec
    recipe: Recipe
    save: str

    def __str__(self) -> str:
        recipe = f"{self.recipe.scale_format}, clamp {self.recipe.clamp}"
        return f"seed {self.spec.seed}: {self.spec}, {recipe}, save={self.save}"


def draw(seed: int, largest_tokens: int, num_sizes: int = len(SIZES)) -> Drawn:
    """The call that a seed stands for.

    Args:
        seed: any number. largest_tokens: T of a rank is at most this. num_sizes: how many of `SIZES` are drawn from.
    """
    rng = random.Random(seed)
    num_ranks = rng.choice((1, 1, 2, 3, 4))
    bound = rng.choice((1, 17, 128, largest_tokens))
    tokens = tuple(rng.randint(0, min(bound, largest_tokens)) for _ in range(num_ranks))
    hidden, inter = rng.choice(SIZES[:num_sizes])
    num_experts = num_ranks * rng.choice((1, 2, 8, 32))
    spec = ProblemSpec(
        tokens, hidden, inter, num_experts, rng.randint(1, min(num_experts, 12)), rng.choice(ROUTINGS), seed
    )
    recipe = Recipe(clamp=rng.choice((None, 1.0)), scale_format=rng.choice(("fp32", "pow2")))
    return Drawn(spec, recipe, rng.choice(("pool", "repull", "recompute")))


def results(problem: Problem, drawn: Drawn, backend: str) -> dict[str, torch.Tensor]:
    """out, dx, dp (of all ranks, joined), dW13, dW2 of one call."""
    num_ranks = problem.spec.num_ranks
    world = LocalWorld(num_ranks) if num_ranks > 1 else None
    context = MoEContext(drawn.recipe, world=world, backend=backend, save=drawn.save)  # type: ignore[arg-type]
    xs, ps = ([t.clone().requires_grad_() for t in part] for part in (problem.xs, problem.topk_weights))
    w13, w2 = (w.clone().requires_grad_() for w in (problem.w13_E2IH, problem.w2_EHI))
    if num_ranks == 1:
        outs = [mega_moe(xs[0], problem.topk_ids[0], ps[0], w13, w2, context=context)]
    else:
        outs = mega_moe(xs, problem.topk_ids, ps, w13, w2, context=context)
    torch.autograd.backward(outs, problem.douts)
    found: dict[str, Any] = {
        "out": torch.cat([out.detach() for out in outs]),
        "dx": torch.cat([x.grad for x in xs]),  # type: ignore[misc]
        "dp": torch.cat([p.grad for p in ps]),  # type: ignore[misc]
        "dW13": w13.grad,
        "dW2": w2.grad,
    }
    return found


def compare(drawn: Drawn, backend: str, against: str, device: torch.device) -> dict[str, float]:
    """SQNR in dB of each tensor of one backend against the other."""
    problem = make_problem(drawn.spec, device)
    found, want = (results(problem, drawn, name) for name in (backend, against))
    return {name: sqnr_db(found[name], want[name]) for name in found}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `megamoe soak`."""
    parser.add_argument("--backend", default="cute", choices=("torch", "triton", "cute"))
    parser.add_argument("--against", default="triton", choices=("torch", "triton", "cute"))
    parser.add_argument("--minutes", type=float, default=20.0, help="no call begins after this")
    parser.add_argument("--calls", type=int, help="how many calls at most")
    parser.add_argument("--seed", type=int, default=0, help="of the first call; each call's is one more")
    parser.add_argument("--tokens", type=int, default=1024, help="most tokens of a rank")
    parser.add_argument("--sizes", type=int, default=len(SIZES), help="how many (H, I) to draw from")
    parser.add_argument("--device", help="default: cuda where there is one, else cpu")
    parser.add_argument("--out", type=Path, help="write a record here, as JSON")


def soak_main(arguments: argparse.Namespace) -> int:
    """Run `megamoe soak` and return the exit status."""
    if arguments.tokens < 1:
        raise MegaMoEValueError(expected("--tokens", "at least 1", arguments.tokens))
    if not 1 <= arguments.sizes <= len(SIZES):
        raise MegaMoEValueError(expected("--sizes", f"1 to {len(SIZES)}", arguments.sizes))
    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    gate, begin = GATES["fp8"].backends_db, time.monotonic()
    failures: list[str] = []
    worst: dict[str, float] = {}
    seed = arguments.seed
    while time.monotonic() - begin < 60 * arguments.minutes:
        if arguments.calls is not None and seed - arguments.seed >= arguments.calls:
            break
        drawn = draw(seed, arguments.tokens, arguments.sizes)
        failed = ""
        try:
            levels = compare(drawn, arguments.backend, arguments.against, device)
            worst = {name: min(worst.get(name, level), level) for name, level in levels.items()}
            low = {name: round(level, 1) for name, level in levels.items() if not level >= gate}
            failed = f"below {gate:g} dB: {low}" if low else ""
        except Exception as error:  # whatever it is, it is a finding, and the next call goes on
            failed = f"{type(error).__name__}: {error}"
        print(f"{'FAILED' if failed else 'ok'}  {drawn}{'  ' + failed if failed else ''}", flush=True)
        if failed:
            failures.append(f"{drawn}  {failed}")
        seed += 1
    calls, seconds = seed - arguments.seed, time.monotonic() - begin
    lowest = ", ".join(f"{name} {level:.1f}" for name, level in worst.items())
    print(f"{calls} calls in {seconds:.0f} s, {len(failures)} failed; lowest SQNR in dB: {lowest}")
    if arguments.out is not None:
        record = {
            "megamoe": __version__, "torch": torch.__version__, "gpu": _gpu(device), "backend": arguments.backend,
            "against": arguments.against, "first_seed": arguments.seed, "calls": calls, "seconds": round(seconds),
            "failures": failures, "lowest_sqnr_db": {k: v if v < 1e9 else None for k, v in worst.items()},
        }  # fmt: skip
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    return 1 if failures or not calls else 0


def _gpu(device: torch.device) -> str | None:
    with contextlib.suppress(RuntimeError, AssertionError):
        return torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return None
