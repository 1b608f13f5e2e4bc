"""The router of any family as a module: what a checkpoint holds of it, and `route_family` on its logits."""

from __future__ import annotations

import torch
from torch import nn

from megamoe.config import MoEConfig
from megamoe.errors import MegaMoEValueError, expected
from megamoe.router import Router
from megamoe.router_families import ROUTER_FAMILIES, hash_ids, route_family


class FamilyRouter(Router):
    """Scores every expert and picks `top_k` of them for each token, as one family of models does.

    Args:
        config: of the layer.
        family: a name of `router_families.ROUTER_FAMILIES`.
        device: of the parameters.
        dtype: of `weight`; scores are formed in fp32 whatever it is.
        vocab_size: of a hash layer (DeepSeek-V4): experts are looked up by token id. 0: they are chosen by score.
        has_linear_bias: whether logits have a bias that trains (gpt-oss).

    Attributes:
        weight: [E, H]. linear_bias: [E] or None.
        correction_bias: buffer, fp32 [E]; stays zero in families without one.
        tid2eid: buffer, int64 [vocabulary, K] of a hash layer, else None.
    """

    tid2eid: torch.Tensor | None

    def __init__(
        self,
        config: MoEConfig,
        family: str,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.bfloat16,
        *,
        vocab_size: int = 0,
        has_linear_bias: bool = False,
    ) -> None:
        if family not in ROUTER_FAMILIES:
            raise MegaMoEValueError(expected("family", f"one of {', '.join(ROUTER_FAMILIES)}", repr(family)))
        super().__init__(config, device, dtype)
        self.family = family
        bias = torch.zeros(config.num_experts, device=device, dtype=dtype) if has_linear_bias else None
        self.linear_bias = None if bias is None else nn.Parameter(bias)
        table = torch.zeros(vocab_size, config.top_k, device=device, dtype=torch.int64) if vocab_size else None
        self.register_buffer("tid2eid", table)

    def forward(
        self,
        x: torch.Tensor,
        *,
        token_ids: torch.Tensor | None = None,
        topk_ids: torch.Tensor | None = None,
        token_mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Route tokens.

        Args:
            x: [T, H], any floating dtype.
            token_ids: int [T], vocabulary ids; a hash layer needs them, others ignore them.
            topk_ids: int [T, K]: experts that are used instead of a choice (replayed from another run).
            token_mask: bool [T]; tokens with False get no expert.

        Returns:
            (topk_ids int64 [T, K], topk_weights fp32 [T, K]); as `Router.forward`.

        Raises:
            MegaMoEValueError: x has another hidden size; a hash layer without token_ids or topk_ids; as `route_family`.
        """
        self._check(x)
        fits = token_mask is not None and token_mask.dtype == torch.bool and token_mask.shape == x.shape[:1]
        mask = token_mask if fits else None  # one that does not is refused below
        if self.tid2eid is not None and topk_ids is None:
            if token_ids is None:
                raise MegaMoEValueError(expected("token_ids", "the vocabulary ids of a hash layer's tokens", None))
            if mask is not None and mask.shape == token_ids.shape:  # padding may have any id
                token_ids = torch.where(mask, token_ids, 0)
            topk_ids = hash_ids(token_ids, self.tid2eid)
        if mask is not None:
            x = torch.where(mask[:, None], x, 0)  # padding may hold NaN, which would reach the weight's gradient
        with torch.autocast(x.device.type, enabled=False):
            linear_bias = None if self.linear_bias is None else self.linear_bias.float()
            logits = nn.functional.linear(x.float(), self.weight.float(), linear_bias)
            has_bias = ROUTER_FAMILIES[self.family].has_bias
            routed = route_family(
                logits,
                self.config,
                self.family,
                correction_bias=self.correction_bias if has_bias else None,
                topk_ids=topk_ids,
                token_mask=token_mask,
            )
        return routed.topk_ids, routed.topk_weights

    def extra_repr(self) -> str:
        return f"{self.family}{', hash layer' if self.tid2eid is not None else ''}"
