"""The router of DeepSeek-V3: from hidden states to expert ids and weights, in fp32."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from megamoe.config import MoEConfig
from megamoe.errors import MegaMoETypeError, MegaMoEValueError, expected

NORM_EPS = 1e-20
"""Added to the sum by which the weights are divided."""


def route(
    logits: torch.Tensor, correction_bias: torch.Tensor | None, config: MoEConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts and weigh them, as DeepSeek-V3 does (arXiv 2412.19437, section 2.1.2).

    Args:
        logits: fp32 [T, E].
        correction_bias: fp32 [E] or None; it decides which experts are chosen and never enters a weight, so no gradient
            flows to it.
        config: groups, K, normalisation, scaling factor.

    Returns:
        (topk_ids int64 [T, K], topk_weights fp32 [T, K]): ids of a token are distinct and in range whatever its
        logits are, NaN too (its weights are then NaN), best choice first. Only the weights are differentiable.
    """
    scores = logits.sigmoid()
    topk_ids = choose_experts(scores, correction_bias, config)
    weights = scores.gather(1, topk_ids)
    if config.norm_topk:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + NORM_EPS)
    return topk_ids, weights * config.routed_scaling_factor


@torch.no_grad()
def choose_experts(
    scores: torch.Tensor, correction_bias: torch.Tensor | None, config: MoEConfig, group_best: int = 2
) -> torch.Tensor:
    """The K experts of each token, int64 [T, K]: distinct and in range whatever the scores [T, E] are, best first.

    With groups only experts of the `topk_groups` best ones are chosen; a group's score is the sum of its best
    `group_best` experts, biases included.
    """
    choice = scores if correction_bias is None else scores + correction_bias
    # A NaN would rank first in one sort and last in another; behind everything, ties still give distinct ids.
    choice = torch.where(choice.isnan(), float("-inf"), choice)
    if config.num_groups > 1:
        each = config.num_experts // config.num_groups
        grouped = choice.view(-1, config.num_groups, each)
        group_score = grouped.topk(min(group_best, each), dim=-1).values.sum(dim=-1)
        best = group_score.topk(config.topk_groups, dim=-1).indices
        allowed = torch.zeros_like(group_score, dtype=torch.bool).scatter_(1, best, True)
        # -inf and not 0: with a negative bias 0 would win
        choice = grouped.masked_fill(~allowed[:, :, None], float("-inf")).flatten(1)
    return choice.topk(config.top_k, dim=-1).indices


class Router(nn.Module):
    """Scores every expert and picks `top_k` of them for each token.

    Args:
        config: of the layer.
        device: of the parameters.
        dtype: of `weight`; scores are formed in fp32 whatever it is.

    Attributes:
        weight: [E, H].
        correction_bias: buffer, fp32 [E]; it stays fp32 when the module is cast, as rounding it would change choices.
    """

    correction_bias: torch.Tensor

    def __init__(
        self, config: MoEConfig, device: torch.device | str | None = None, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        super().__init__()
        if not isinstance(config, MoEConfig):
            raise MegaMoETypeError(expected("config", "a MoEConfig", type(config).__name__))
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size, device=device, dtype=dtype))
        self.register_buffer("correction_bias", torch.zeros(config.num_experts, device=device, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fresh weights, zero bias."""
        nn.init.normal_(self.weight, std=self.config.initializer_range)
        nn.init.zeros_(self.correction_bias)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Router:
        bias = self.correction_bias
        super()._apply(fn, recurse)
        if self.correction_bias.dtype != torch.float32:
            self.correction_bias = bias.to(self.correction_bias.device)
        return self

    def _check(self, x: torch.Tensor) -> None:
        if not isinstance(x, torch.Tensor) or not x.is_floating_point():
            got = getattr(x, "dtype", type(x).__name__)
            raise MegaMoETypeError(expected("x", "a tensor of floating numbers", got))
        if x.dim() != 2 or x.shape[1] != self.config.hidden_size:
            raise MegaMoEValueError(expected("x", f"[T, H = {self.config.hidden_size}]", f"shape {tuple(x.shape)}"))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Route tokens.

        Args:
            x: [T, H], any floating dtype.

        Returns:
            As `route`. Under autocast too, everything is fp32. On CUDA set
            `torch.backends.cuda.matmul.fp32_precision` to "ieee" (torch's default), or logits are rounded to TF32.

        Raises:
            MegaMoETypeError: x is no floating tensor. MegaMoEValueError: x has another hidden size.
        """
        self._check(x)
        with torch.autocast(x.device.type, enabled=False):
            logits = nn.functional.linear(x.float(), self.weight.float())
            return route(logits, self.correction_bias, self.config)
