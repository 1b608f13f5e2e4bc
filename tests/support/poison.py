"""Dirty memory: outputs full of NaN and an allocator that hands back blocks full of garbage."""

from __future__ import annotations

import torch


def nan_like(x: torch.Tensor) -> torch.Tensor:
    """A tensor of x's shape, dtype and device whose every element is NaN (the NaN byte for e4m3)."""
    if x.element_size() == 1:
        return torch.full(x.shape, 0x7F, dtype=torch.uint8, device=x.device).view(x.dtype)
    return torch.full_like(x, float("nan"))


def poison_allocator(num_bytes: int = 1 << 24, device: torch.device | str = "cpu", blocks: int = 4) -> None:
    """Allocate blocks, fill them with 0xFF bytes (NaN in every float format) and free them again."""
    held = [torch.full((num_bytes,), 0xFF, dtype=torch.uint8, device=device) for _ in range(blocks)]
    del held
