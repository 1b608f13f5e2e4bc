"""Where the weight gradients go: two MoE layers, three schedules, the same bits, and a trace to look at.

"inline" computes a layer's dW before the backward goes on to the layer below, "stream" beside that on another stream,
"delayed" when the schedule says so: here both layers' dW come after the last dX, when a pipeline stage has sent its dX
away already. What is best depends on sizes and on what else the GPU has to do: measure, as here.

    python examples/overlap_tuning.py --trace overlap.json   # for chrome://tracing or ui.perfetto.dev
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from megamoe import MegaMoE, MoEConfig, OverlapConfig
from megamoe.overlap import WgradMode

MODES: tuple[WgradMode, ...] = ("inline", "stream", "delayed")


class TwoLayers:
    """Two layers with residuals, and one training step of them in one of the modes."""

    def __init__(self, mode: WgradMode, args: argparse.Namespace) -> None:
        torch.manual_seed(0)
        config = MoEConfig(args.hidden, args.intermediate, num_experts=args.experts, top_k=args.top_k)
        options: dict[str, Any] = {"overlap": OverlapConfig(wgrad=mode), "backend": args.backend, "device": args.device}
        self.mode, self.layers = mode, [MegaMoE(config, **options) for _ in range(2)]

    def step(self, x: torch.Tensor) -> torch.Tensor:
        """Forward, backward, weight gradients; returns dx."""
        for layer in self.layers:
            layer.zero_grad(set_to_none=True)
        leaf = x.detach().requires_grad_()
        with record_function(f"{self.mode}: forward"):
            y = leaf
            for layer in self.layers:
                y = y + layer(y)
            loss = y.float().square().mean()
        with record_function(f"{self.mode}: backward"):
            loss.backward()
        if self.mode == "delayed":
            with record_function(f"{self.mode}: backward_dw"):
                for layer in reversed(self.layers):
                    layer.backward_dw()
        assert leaf.grad is not None
        return leaf.grad

    def gradients(self) -> list[torch.Tensor]:
        """Of all parameters."""
        return [p.grad.clone() for layer in self.layers for p in layer.parameters() if p.grad is not None]


def milliseconds(call: Callable[[], Any], repeats: int, device: str) -> float:
    """The median time of a call."""
    times = []
    for _ in range(repeats):
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return sorted(times)[len(times) // 2]


def main(argv: Sequence[str] | None = None) -> int:
    """Run all modes; returns 1 if their bits differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    has_gpu = torch.cuda.is_available()
    parser.add_argument("--tokens", type=int, default=8192 if has_gpu else 96)
    parser.add_argument("--hidden", type=int, default=2048 if has_gpu else 128)
    parser.add_argument("--intermediate", type=int, default=1024 if has_gpu else 128)
    parser.add_argument("--experts", type=int, default=64 if has_gpu else 8)
    parser.add_argument("--top-k", type=int, default=6 if has_gpu else 2)
    parser.add_argument("--repeats", type=int, default=10 if has_gpu else 2)
    parser.add_argument("--backend", default="auto", choices=("auto", "torch", "triton", "cute"))
    parser.add_argument("--device", default="cuda" if has_gpu else "cpu")
    parser.add_argument("--trace", help="write a Chrome trace of one step in each mode to this file")
    args = parser.parse_args(argv)

    x = torch.randn(args.tokens, args.hidden, generator=torch.Generator().manual_seed(1)).bfloat16().to(args.device)
    models = {mode: TwoLayers(mode, args) for mode in MODES}
    results: dict[str, list[torch.Tensor]] = {}
    for mode, model in models.items():
        results[mode] = [model.step(x).clone(), *model.gradients()]
    print(f"{'mode':10}{'step':>10}   gradients")
    failed = False
    for mode, model in models.items():
        is_equal = len(results[mode]) == len(results["inline"]) and all(
            map(torch.equal, results[mode], results["inline"])
        )
        failed |= not is_equal
        took = milliseconds(lambda model=model: model.step(x), args.repeats, args.device)  # type: ignore[misc]
        print(f"{mode:10}{took:7.2f} ms   {'the bits of inline' if is_equal else 'DIFFERENT'}")
    if args.trace:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if args.device.startswith("cuda") else [])]
        with profile(activities=activities) as recorded:
            for model in models.values():
                model.step(x)
        recorded.export_chrome_trace(args.trace)
        print(f"wrote {args.trace}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
