"""FP8 weights that give up their own order for the fused kernel's, so that one copy of them is held.

Rows move inside an expert, bytes stay; an expert's number of bytes does not change. Any device.
"""

from __future__ import annotations

import torch

from megamoe.errors import MegaMoEValueError, expected
from megamoe.quantize import FP8, QuantizedWeight
from megamoe.recipe import BLOCK
from megamoe.unfused import ExpertWeights
from megamoe.weights import Masters


class CutePacking:
    """The kernel's order of [gate; up] rows (`row_groups` = 2) and of plain rows (1)."""

    def check(self, hidden_size: int) -> None:
        """Refuse sizes at which the kernel's order needs more bytes than the user's."""
        if hidden_size % (2 * BLOCK):
            contract = f"a multiple of {2 * BLOCK}: the fused kernel pads w2 to whole tiles"
            raise MegaMoEValueError(expected("hidden_size", contract, hidden_size))

    def pack(self, weight: torch.Tensor, row_groups: int) -> torch.Tensor:
        """E4M3 [E_l, N, K] in the kernel's order, a new tensor of the same shape."""
        from cute_kernels import weights

        return weights.permute_rows(weight, weights.GATE_UP if row_groups == 2 else weights.ROWS)

    def unpack(self, weight: torch.Tensor, row_groups: int) -> torch.Tensor:
        """The inverse of `pack`, a new tensor."""
        from cute_kernels import weights

        kind = weights.GATE_UP if row_groups == 2 else weights.ROWS
        order = weights.granule_order(kind, weight.shape[1], weight.shape[2], weight.device)
        place = torch.empty_like(order)
        place[order] = torch.arange(order.numel(), device=order.device)
        granules = weight.contiguous().view(torch.uint8).view(torch.complex128).view(weight.shape[0], -1)  # 16 bytes
        return torch.index_select(granules, 1, place).view(torch.uint8).view(weight.shape).view(weight.dtype)

    def operands(self, packed: Masters) -> ExpertWeights:
        """What the forward reads: the bytes of the masters themselves, and their scales by tile."""
        from cute_kernels.weights import KernelWeights, tile_scales

        w13, w2, s13, s2 = packed.w13.detach(), packed.w2.detach(), packed.w13_scale, packed.w2_scale
        assert s13 is not None and s2 is not None and w13.dtype == FP8
        gate, up = s13.detach().chunk(2, dim=1)
        even, odd = s2.detach()[:, 0::2], s2.detach()[:, 1::2]
        fused = KernelWeights(w13, tile_scales(gate, up), w2, tile_scales(even, odd))
        return ExpertWeights(QuantizedWeight(w13, s13, 2), QuantizedWeight(w2, s2), fused=fused)
