"""Rows that are sorted by expert already, as training frameworks hand them over."""

from __future__ import annotations

from typing import Any

import torch

from megamoe.errors import MegaMoETypeError, MegaMoEValueError, expected


def expert_of_rows(counts: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Expert of each row, int64 [num_rows, 1], of rows sorted by expert; -1 for rows behind the last expert's.

    Args:
        counts: int [E], rows of each expert. num_rows: rows in all, at least their sum.

    Effects: no synchronisation with the host, so a sum above `num_rows` is not seen: the last experts lack rows.
    """
    ends = counts.cumsum(0)
    rows = torch.arange(num_rows, device=counts.device)
    ids = torch.searchsorted(ends, rows, right=True)
    return torch.where(ids < counts.shape[0], ids, -1)[:, None]


def as_counts(argument: str, counts: Any, num_experts: int, device: torch.device) -> torch.Tensor:
    """Rows of each expert as int64 [E] on the device, from a tensor or a list.

    Raises:
        MegaMoEValueError, MegaMoETypeError: another shape, or no integers.
    """
    tensor = counts if isinstance(counts, torch.Tensor) else torch.tensor(counts)
    if tensor.shape != (num_experts,):
        raise MegaMoEValueError(
            expected(argument, f"[{num_experts}], rows of each expert", f"shape {tuple(tensor.shape)}")
        )
    if tensor.is_floating_point():
        raise MegaMoETypeError(expected(argument, "integers", tensor.dtype))
    return tensor.to(device, torch.int64, non_blocking=True)
