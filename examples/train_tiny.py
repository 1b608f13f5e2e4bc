"""Train a tiny DeepSeek-style language model with FP8 experts: fused and Triton kernels beside bf16, three seeds each.

Two layers of attention and a mixture of experts with a shared expert, on bytes of the texts that Python's help() shows.
All runs see the same batches; a seed draws the weights. The fused kernels pass if their losses are no further from the
Triton path's than those of two seeds are from each other: mean absolute difference over the last third of the steps.
Router biases are moved by how many tokens each expert got, as DeepSeek-V3 balances its experts.

    python examples/train_tiny.py --out tiny        # on a GPU; also writes tiny.json and, with matplotlib, tiny.png
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import multiprocessing
import pydoc_data.topics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megamoe import MegaMoE, MoEConfig, Recipe
from megamoe.backends import BACKENDS, Problem

VOCAB, CONTEXT, LAYERS = 256, 128, 2
GAP = 0.01
"""What the mean loss with FP8 may be away from that with bf16 in the end, in nats."""


@dataclasses.dataclass(frozen=True)
class Run:
    """Who computes the experts."""

    name: str
    backend: str
    recipe: Recipe


BF16 = Run("bf16", "torch", Recipe("bf16"))
TRITON = Run("Triton FP8", "triton", Recipe())
FUSED = Run("fused FP8", "cute", Recipe())
EMULATED = Run("FP8 emulation", "torch", Recipe())


class Attention(nn.Module):
    """Causal attention with four heads, written out: the same bits in every run."""

    def __init__(self, hidden: int, device: str) -> None:
        super().__init__()
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False, device=device)
        self.out = nn.Linear(hidden, hidden, bias=False, device=device)
        self.register_buffer("mask", torch.ones(CONTEXT, CONTEXT, device=device).triu(1).bool(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, S, H] -> [B, S, H]."""
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(self.mask, -math.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Bytes [B, S] -> logits of the next byte [B, S, 256]."""

    def __init__(self, config: MoEConfig, run: Run, device: str) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.bytes, self.places = (nn.Embedding(n, hidden, device=device) for n in (VOCAB, CONTEXT))
        self.norms = nn.ModuleList(nn.RMSNorm(hidden, device=device) for _ in range(2 * LAYERS + 1))
        self.attentions = nn.ModuleList(Attention(hidden, device) for _ in range(LAYERS))
        self.experts = nn.ModuleList(
            MegaMoE(config, recipe=run.recipe, weights="fp32", backend=run.backend, device=device)  # type: ignore[arg-type]
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(hidden, VOCAB, bias=False, device=device)
        self.bias_step = 1e-3

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.bytes(words) + self.places.weight
        experts: Any
        for i, (attention, experts) in enumerate(zip(self.attentions, self.experts, strict=True)):
            x = x + attention(self.norms[2 * i](x))
            out, counts = experts(self.norms[2 * i + 1](x), return_expert_counts=True)
            x = x + out
            if self.training:
                with torch.no_grad():
                    experts.router.correction_bias += self.bias_step * torch.sign(
                        counts.float().mean() - counts.float()
                    )
        return self.head(self.norms[-1](x))


def text() -> torch.Tensor:
    """The bytes of all of Python's help topics, one after the other."""
    topics = pydoc_data.topics.topics
    return torch.frombuffer(bytearray("".join(topics[name] for name in sorted(topics)).encode()), dtype=torch.uint8)


def train(run: Run, seed: int, args: argparse.Namespace) -> dict[str, list[float]]:
    """Losses and gradient norms of a run."""
    torch.manual_seed(seed)
    config = MoEConfig(args.hidden, args.intermediate, num_experts=8, top_k=2, num_shared_experts=1)
    model = Model(config, run, args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))
    data = text().to(args.device)
    generator = torch.Generator().manual_seed(0)  # the same batches in every run
    offsets = torch.arange(CONTEXT + 1, device=args.device)
    losses, norms = [], []
    for step in range(args.steps):
        starts = torch.randint(0, len(data) - CONTEXT - 1, (args.batch, 1), generator=generator).to(args.device)
        batch = data[starts + offsets].long()
        logits = model(batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        for group in optimizer.param_groups:  # up in 20 steps, down to a tenth along a cosine
            group["lr"] = args.lr * min((step + 1) / 20, 0.55 + 0.45 * math.cos(math.pi * step / args.steps))
        optimizer.step()
        losses.append(loss.detach())
    return {"loss": torch.stack(losses).tolist(), "grad_norm": torch.stack(norms).tolist()}


def every(jobs: Sequence[tuple[Run, int, argparse.Namespace]], processes: int) -> Iterator[dict[str, list[float]]]:
    """What `train` finds for each job, in their order."""
    if processes == 1:
        yield from itertools.starmap(train, jobs)
        return
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(train, *zip(*jobs, strict=True))


def distance(a: Sequence[float], b: Sequence[float]) -> float:
    """Mean absolute difference."""
    return sum(abs(x - y) for x, y in zip(a, b, strict=True)) / len(a)


def judge(losses: dict[str, list[list[float]]], steps: int) -> dict[str, Any]:
    """The figures that decide, and whether the runs pass.

    Args:
        losses: by name of the run, for each seed, of each step.
        steps: of a run; the last third counts.
    """
    third = max(1, steps // 3)
    last = {name: [seed[-third:] for seed in seeds] for name, seeds in losses.items()}
    mean = {name: sum(map(sum, seeds)) / len(seeds) / third for name, seeds in last.items()}
    unfused = TRITON.name if TRITON.name in losses else next(name for name in losses if name != BF16.name)
    seeds = last[unfused]
    pairs = list(itertools.combinations(range(len(seeds)), 2))
    figures: dict[str, Any] = {
        "mean_of_last_third": mean,
        "between_seeds": sum(distance(seeds[i], seeds[j]) for i, j in pairs) / len(pairs) if pairs else None,
        "fp8_to_bf16": {name: value - mean[BF16.name] for name, value in mean.items() if name != BF16.name},
    }
    before = {name: sum(sum(s[third : 2 * third]) for s in runs) / len(runs) / third for name, runs in losses.items()}
    figures["fp8_to_bf16_in_the_third_before"] = {
        name: value - before[BF16.name] for name, value in before.items() if name != BF16.name
    }
    first = sum(seed[0] for seed in losses[BF16.name]) / len(losses[BF16.name])
    learns = all(value < 0.8 * first for value in mean.values())
    passes = learns and all(abs(gap) < 0.05 * first for gap in figures["fp8_to_bf16"].values())
    if FUSED.name in last and figures["between_seeds"] is not None:
        apart = [distance(a, b) for a, b in zip(last[FUSED.name], seeds, strict=True)]
        figures["fused_to_triton"] = sum(apart) / len(apart)
        passes = passes and figures["fused_to_triton"] <= figures["between_seeds"]
    return {**figures, "passes": passes}


def report(losses: dict[str, list[list[float]]], figures: dict[str, Any], steps: int) -> None:
    """Print the losses of the first seed, and what decides."""
    names = list(losses)
    print("step  " + "".join(f"{name:>15}" for name in names))
    for step in sorted({*range(0, steps, max(1, steps // 10)), steps - 1}):
        print(f"{step:4}  " + "".join(f"{losses[name][0][step]:15.4f}" for name in names))
    print(
        "mean of the last third, all seeds: "
        + ", ".join(f"{n} {v:.4f}" for n, v in figures["mean_of_last_third"].items())
    )
    for name, gap in figures["fp8_to_bf16"].items():
        was = figures["fp8_to_bf16_in_the_third_before"][name]
        kept = "within" if abs(gap) <= GAP else "beyond"
        print(f"{name} to bf16: {gap:+.4f}, {kept} {GAP} (the third before: {was:+.4f})")
    if "fused_to_triton" in figures:
        print(
            f"fused to Triton, mean |difference| over the last third: {figures['fused_to_triton']:.4f}; "
            f"two seeds: {figures['between_seeds']:.4f}"
        )
    print("pass" if figures["passes"] else "FAIL")


def draw(losses: dict[str, list[list[float]]], path: Path) -> bool:
    """Loss curves of all runs and seeds into one PNG; False where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    whole, apart = figure.subplots(1, 2)
    styles = (("#444444", 1.0, "-"), ("#4a7fb5", 2.4, "-"), ("#d98c4a", 0.9, "--"))
    for (colour, width, dashes), (name, seeds) in zip(styles, losses.items(), strict=False):
        for i, (seed, bf16) in enumerate(zip(seeds, losses[BF16.name], strict=True)):
            label = name if i == 0 else None
            whole.plot(seed, color=colour, linewidth=width / 2, linestyle=dashes, label=label)
            difference = torch.tensor(seed) - torch.tensor(bf16)
            smooth = difference.unfold(0, min(10, len(seed)), 1).mean(1).tolist()
            apart.plot(smooth, color=colour, linewidth=width, linestyle=dashes, label=label)
    whole.set_title("all runs and seeds", fontsize=9)
    apart.set_title("less the bf16 run of the same seed, means of 10 steps", fontsize=9)
    apart.axhspan(-GAP, GAP, color="#74b08a", alpha=0.2, linewidth=0)
    for axes in (whole, apart):
        axes.set_xlabel("step")
        axes.set_ylabel("loss, nats a byte")
        axes.legend(frameon=False)
    figure.savefig(path, dpi=130)
    return True


def runs_on(device: str, hidden: int, intermediate: int) -> list[Run]:
    """bf16, then what runs here: the FP8 kernels, or their emulation where there are none."""
    if not device.startswith("cuda"):
        return [BF16, EMULATED]
    problem, found = Problem.of(torch.device(device), Recipe(), hidden, intermediate, num_experts=8, top_k=2), [BF16]
    for run in (TRITON, FUSED):
        reason = BACKENDS[run.backend].why_not(problem)
        if reason is None:
            found.append(run)
        else:
            print(f"{run.name} is left out: {reason}")
    return found if len(found) > 1 else [BF16, EMULATED]


def main(argv: Sequence[str] | None = None) -> int:
    """Train all runs with all seeds; returns the exit status."""
    has_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3 if has_gpu else 1)
    parser.add_argument(
        "--batch", type=int, default=16 if has_gpu else 4, help=f"sequences of {CONTEXT} bytes in a step"
    )
    parser.add_argument("--hidden", type=int, default=256 if has_gpu else 128)
    parser.add_argument("--intermediate", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--processes", type=int, default=1, help="so many runs at once")
    parser.add_argument("--device", default="cuda" if has_gpu else "cpu")
    parser.add_argument("--out", help="also write OUT.json and OUT.png")
    args = parser.parse_args(argv)

    begin = time.perf_counter()
    jobs = [
        (run, seed, args) for run in runs_on(args.device, args.hidden, args.intermediate) for seed in range(args.seeds)
    ]
    losses: dict[str, list[list[float]]] = {}
    norms: dict[str, list[list[float]]] = {}
    for (run, seed, _), found in zip(jobs, every(jobs, args.processes), strict=True):
        losses.setdefault(run.name, []).append(found["loss"])
        norms.setdefault(run.name, []).append(found["grad_norm"])
        print(f"{time.perf_counter() - begin:4.0f} s: {run.name}, seed {seed}: {found['loss'][-1]:.4f}", flush=True)
    seconds = round(time.perf_counter() - begin, 1)
    figures = judge(losses, args.steps)
    report(losses, figures, args.steps)
    if args.out is not None:
        path = Path(args.out)
        path.parent.mkdir(parents=True, exist_ok=True)
        record = {"what": vars(args), **environment(args.device), "seconds": seconds, **figures}
        record |= {"losses": rounded(losses), "grad_norms": rounded(norms)}
        path.with_suffix(".json").write_text(json.dumps(record) + "\n")
        print(
            f"wrote {path.with_suffix('.json')}" + (f", {path}.png" if draw(losses, path.with_suffix(".png")) else "")
        )
    return 0 if figures["passes"] else 1


def environment(device: str) -> dict[str, Any]:
    """Where and with what it was trained."""
    from megamoe.cli.records import environment as of

    return of("cute", torch.device(device))


def rounded(values: dict[str, list[list[float]]]) -> dict[str, list[list[float]]]:
    """Five digits."""
    return {name: [[float(f"{v:.5g}") for v in seed] for seed in seeds] for name, seeds in values.items()}


if __name__ == "__main__":
    sys.exit(main())
