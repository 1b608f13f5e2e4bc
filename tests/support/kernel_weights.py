"""Weights read back from the fused kernels' order, byte by byte, by the rules that `cute_kernels.weights` states."""

from __future__ import annotations

import torch

from cute_kernels.weights import GATE_UP, ROWS, KernelWeights, row_order


def untile(blocks: torch.Tensor) -> torch.Tensor:
    """Rows [E, N, K] from blocks of 256 x 128: granule c of row r of a block lies at place c ^ (r % 8)."""
    experts, rows, width = blocks.shape
    flat = blocks.view(torch.uint8).reshape(experts, rows // 256, width // 128, 256, 128)
    row, byte = torch.arange(256)[:, None], torch.arange(128)[None, :]
    place = (byte // 16 ^ row % 8) * 16 + byte % 16
    found = torch.gather(flat, 4, place.expand(flat.shape)).permute(0, 1, 3, 2, 4).reshape(experts, rows, width)
    return found.view(blocks.dtype)


def in_user_order(weights: KernelWeights) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(w13 [E, 2I, H], its scales, w2 [E, H, I], its scales), as the layer states them."""
    experts, rows, hidden = weights.w13.shape
    w13 = _sorted(weights.w13, row_order(GATE_UP, rows))
    w2 = _sorted(weights.w2, row_order(ROWS, hidden))[:, :hidden]
    s13 = torch.cat([weights.s13[..., 0], weights.s13[..., 1]], dim=2).transpose(1, 2)
    s2 = weights.s2[..., :2].flatten(2).transpose(1, 2)[:, : hidden // 128]
    return w13, s13.contiguous(), w2, s2.contiguous()


def _sorted(blocks: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    rows = torch.empty_like(blocks)
    rows[:, order] = untile(blocks)
    return rows
