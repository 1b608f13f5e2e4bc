"""A small LoRA adapter on frozen FP8 experts: W + (alpha / rank) * B @ A for every expert's gate/up and down weight.

The sum is formed in bf16 and quantised in every forward, and formed again for the backward, so that the experts'
kernels run unchanged on every backend. It is held for the length of one forward or backward of one layer: 2 bytes a
weight beside the FP8 bytes that stay.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megamoe.context import MoEContext
from megamoe.errors import MegaMoEValueError, expected
from megamoe.experts import Experts
from megamoe.integrations.built_weights import mega_moe_built
from megamoe.layer import MegaMoE
from megamoe.quantize import QuantizedWeight, quantize_weight
from megamoe.recipe import Recipe
from megamoe.weights import WeightCopies


class LoRAExperts(nn.Module):
    """Frozen experts with a low-rank update that trains.

    Args:
        base: FP8 experts.
        rank: r. alpha: the update is scaled by alpha / rank.

    Attributes:
        base: the experts, frozen.
        a13: [E_l, r, H], b13: [E_l, 2I, r], a2: [E_l, r, I], b2: [E_l, H, r], bf16. The b are zero at first, so the
            layer starts as it was but for the rounding of W to bf16.
    """

    def __init__(self, base: Experts, rank: int, alpha: float) -> None:
        super().__init__()
        if base.w13_scale is None:
            raise MegaMoEValueError(expected("experts", "FP8 weights", str(base.w13.dtype), "Load with weights='fp8'."))
        if rank < 1:
            raise MegaMoEValueError(expected("rank", "1 or more", rank))
        base.unpack()
        self.base, self.factor = base, alpha / rank
        (e, rows, hidden), inter = base.w13.shape, base.w2.shape[2]
        where: dict[str, Any] = {"device": base.w13.device, "dtype": torch.bfloat16}
        self.a13 = nn.Parameter(torch.randn(e, rank, hidden, **where) * hidden**-0.5)
        self.b13 = nn.Parameter(torch.zeros(e, rows, rank, **where))
        self.a2 = nn.Parameter(torch.randn(e, rank, inter, **where) * inter**-0.5)
        self.b2 = nn.Parameter(torch.zeros(e, hidden, rank, **where))
        self.context = _without_copies(base.context)

    @property
    def w13(self) -> torch.Tensor:
        """The frozen weight."""
        return self.base.w13

    @property
    def copies(self) -> WeightCopies:
        """Copies of the frozen weights, which are not used until `merge`."""
        return self.base.copies

    def forward(self, x: Any, topk_ids: Any, topk_weights: Any, *, is_first_microbatch: bool | None = None) -> Any:
        """`mega_moe` with the updated weights."""
        is_list = not isinstance(x, torch.Tensor)
        xs, ids, weights = (list(v) if not isinstance(v, torch.Tensor) else [v] for v in (x, topk_ids, topk_weights))
        parameters = [self.a13, self.b13, self.a2, self.b2]
        outs = mega_moe_built(xs, ids, weights, self._build, parameters, self.context)
        return outs if is_list else outs[0]

    def merge(self) -> Experts:
        """Put the update into the FP8 weights, which are quantised anew, and return the experts.

        Effects: writes to the base's weights and scales in place.
        """
        with torch.no_grad():
            for name, row_groups in (("w13", 2), ("w2", 1)):
                weight, scale = getattr(self.base, name), getattr(self.base, f"{name}_scale")
                for e in range(weight.shape[0]):
                    a, b = (self.a13, self.b13) if name == "w13" else (self.a2, self.b2)
                    updated = self._updated(name, a[e : e + 1], b[e : e + 1], slice(e, e + 1))
                    merged = quantize_weight(updated.float(), Recipe(), row_groups)
                    assert merged.scale is not None
                    weight[e].copy_(merged.data[0])
                    scale[e].copy_(merged.scale[0])
        self.base.copies.refresh()
        return self.base

    def _build(
        self, a13: torch.Tensor, b13: torch.Tensor, a2: torch.Tensor, b2: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._updated("w13", a13, b13), self._updated("w2", a2, b2)

    def _updated(self, name: str, a: torch.Tensor, b: torch.Tensor, experts: slice = slice(None)) -> torch.Tensor:
        weight, scale = getattr(self.base, name), getattr(self.base, f"{name}_scale")
        stored = QuantizedWeight(weight.detach()[experts], scale.detach()[experts], 2 if name == "w13" else 1)
        return torch.baddbmm(stored.dequantize(torch.bfloat16), b, a, alpha=self.factor)


def add_lora(layer: MegaMoE, rank: int = 16, alpha: float = 32.0) -> list[nn.Parameter]:
    """Put adapters on the routed experts of a layer, in place; router and shared expert are frozen.

    Args:
        layer: with FP8 weights.
        rank: of the update. alpha: the update is scaled by alpha / rank.

    Returns:
        The parameters that train, for an optimizer. `remove_lora(layer)` merges them into the FP8 weights.

    Raises:
        MegaMoEValueError: the weights are not FP8; the layer has adapters already.
    """
    if isinstance(layer.experts, LoRAExperts):
        raise MegaMoEValueError(expected("layer", "no adapters yet", "some", "Call remove_lora first."))
    adapted = LoRAExperts(layer.experts, rank, alpha)
    layer.requires_grad_(False)
    layer.experts = adapted  # type: ignore[assignment]
    return [adapted.a13, adapted.b13, adapted.a2, adapted.b2]


def remove_lora(layer: MegaMoE) -> None:
    """Merge the adapters into the FP8 weights and take them off.

    Raises:
        MegaMoEValueError: the layer has none.
    """
    if not isinstance(layer.experts, LoRAExperts):
        raise MegaMoEValueError(expected("layer", "adapters of add_lora", "none"))
    layer.experts = layer.experts.merge()


def _without_copies(context: MoEContext) -> MoEContext:
    """The same ranks and settings; weights that change in every forward have no copies to keep."""
    shapes = context.shapes
    return MoEContext(
        context.recipe,
        world=context.world,
        backend=context.backend,
        capacity=shapes.capacity,
        max_tokens_per_rank=shapes.max_tokens_per_rank,
        save=shapes.save,
        debug=context.debug,
    )
