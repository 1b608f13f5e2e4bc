"""Train a tiny language model with FP8 experts, beside the same model with bf16 experts, and compare the losses.

The data are texts of a made-up language in which every word follows from the two before it, so that a model can learn
it in seconds. Router biases are moved by how many tokens each expert got, as DeepSeek-V3 balances its experts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from megamoe import MegaMoE, MoEConfig, Recipe

VOCAB, CONTEXT = 32, 2


class Model(nn.Module):
    """Embeds the two words before, passes two MoE layers with residuals, and guesses the next word."""

    def __init__(self, config: MoEConfig, recipe: Recipe, backend: str, device: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB * CONTEXT, config.hidden_size, device=device)
        self.norms = nn.ModuleList(nn.RMSNorm(config.hidden_size, device=device) for _ in range(2))
        self.layers = nn.ModuleList(
            MegaMoE(config, recipe=recipe, weights="fp32", backend=backend, device=device)  # type: ignore[arg-type]
            for _ in range(2)
        )
        self.head = nn.Linear(config.hidden_size, VOCAB, device=device)
        self.bias_step = 1e-3

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """words [T, 2] -> logits [T, VOCAB]."""
        places = torch.arange(CONTEXT, device=words.device) * VOCAB
        x = self.embedding(words + places).sum(dim=1)
        layer: Any
        for norm, layer in zip(self.norms, self.layers, strict=True):
            out, counts = layer(norm(x), return_expert_counts=True)
            x = x + out
            if self.training:
                with torch.no_grad():
                    layer.router.correction_bias += self.bias_step * torch.sign(counts.float().mean() - counts.float())
        return self.head(x)


def train(recipe: Recipe, args: argparse.Namespace) -> list[float]:
    """The losses of a run; only the recipe differs between runs."""
    torch.manual_seed(0)
    config = MoEConfig(args.hidden, args.hidden // 2, num_experts=8, top_k=2, num_shared_experts=1)
    model = Model(config, recipe, args.backend, args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(1)
    rule = torch.randint(0, VOCAB, (VOCAB, VOCAB), generator=generator)
    losses = []
    for _ in range(args.steps):
        words = torch.randint(0, VOCAB, (args.tokens, CONTEXT), generator=generator)
        target = rule[words[:, 0], words[:, 1]].to(args.device)
        loss = nn.functional.cross_entropy(model(words.to(args.device)), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main(argv: Sequence[str] | None = None) -> int:
    """Train both; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--tokens", type=int, default=512, help="T of a step")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--backend", default="auto", choices=("auto", "torch", "triton", "cute"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)

    runs = {precision: train(Recipe(precision), args) for precision in ("fp8", "bf16")}  # type: ignore[arg-type]
    print("step      fp8     bf16")
    for step in sorted({*range(0, args.steps, max(1, args.steps // 10)), args.steps - 1}):
        print(f"{step:4}  {runs['fp8'][step]:7.4f}  {runs['bf16'][step]:7.4f}")
    last = max(1, args.steps // 10)
    fp8, bf16 = (sum(losses[-last:]) / last for losses in runs.values())
    first = runs["bf16"][0]
    apart = abs(fp8 - bf16) / first
    passes = fp8 < 0.9 * first and apart < 0.05
    print(f"mean of the last {last}: {fp8:.4f} and {bf16:.4f}, {apart:.1%} of the first loss apart", end="")
    print(": pass" if passes else ": FAIL, expected less than 5 % apart and a loss that falls by a tenth at least")
    return 0 if passes else 1


if __name__ == "__main__":
    sys.exit(main())
