"""The gates: how far a result may be from the fp64 oracle. One table, read by `verify`, the tests and the records."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import torch


@dataclasses.dataclass(frozen=True)
class Gates:
    """Bounds against the fp64 oracle on unquantised inputs and weights.

    Attributes:
        tensor_db: least SQNR of a whole tensor, in dB.
        expert_db: least SQNR of the worst expert's weight gradient (or of the worst expert's rows).
        row: largest error of a row of out or dx, relative to max(its norm, the rms norm of all rows).
        weight_grad: largest error of an element of dp, relative to sqrt(sum over channels of (dh * A)^2).
        backends_db: least SQNR of one GPU backend against another where they don't agree bit for bit.
        emulation_db: the same against the emulation, whose sums inside 128 channels are exact while those of tensor
            cores are not: values at a rounding boundary of e4m3 fall to the other side.
    """

    tensor_db: float
    expert_db: float
    row: float
    weight_grad: float
    backends_db: float = 46.0
    emulation_db: float = 40.0


GATES: dict[Literal["fp8", "bf16"], Gates] = {
    "fp8": Gates(tensor_db=21.0, expert_db=20.0, row=0.15, weight_grad=0.4),
    "bf16": Gates(tensor_db=45.0, expert_db=43.0, row=0.012, weight_grad=0.03),
}


def rel_l2(got: torch.Tensor, want: torch.Tensor) -> float:
    """||got - want|| / ||want|| in fp64; 0 if both are zero, inf if only `want` is; NaN never passes a bound."""
    error, norm = (got.double() - want.double()).norm().item(), want.double().norm().item()
    return error / norm if norm else (0.0 if error == 0.0 else (math.nan if math.isnan(error) else math.inf))


def sqnr_db(got: torch.Tensor, want: torch.Tensor) -> float:
    """Signal over quantisation noise, -20 log10(rel_l2), in dB; inf for equal tensors."""
    error = rel_l2(got, want)
    return math.inf if error == 0.0 else -20.0 * math.log10(error) if error == error else math.nan


def worst_row(got: torch.Tensor, want: torch.Tensor) -> tuple[float, int]:
    """Largest row error relative to max(the row's norm, the rms row norm), and its row (-1 without rows)."""
    if not want.shape[0]:
        return 0.0, -1
    norm = want.double().norm(dim=1)
    error = (got.double() - want.double()).norm(dim=1)
    floor = norm.square().mean().sqrt()
    ratio = torch.where(error == 0.0, 0.0, error / torch.maximum(norm, floor))
    ratio = torch.where(ratio.isnan(), math.inf, ratio)
    return ratio.max().item(), int(ratio.argmax())


def worst_expert_db(got_EMN: torch.Tensor, want_EMN: torch.Tensor) -> tuple[float, int]:
    """Least SQNR over experts, and its expert; an expert whose gradient is zero must match exactly."""
    figures = [sqnr_db(g, w) for g, w in zip(got_EMN, want_EMN, strict=True)]
    figures = [-math.inf if math.isnan(f) else f for f in figures]
    worst = min(range(len(figures)), key=figures.__getitem__)
    return figures[worst], worst


def worst_weight_grad(got_TK: torch.Tensor, want_TK: torch.Tensor, spread_TK: torch.Tensor) -> float:
    """Largest |error| of dp relative to `spread` = sqrt(sum over channels of (dh * A)^2), with which it cancels."""
    error = (got_TK.double() - want_TK.double()).abs()
    ratio = torch.where(error == 0.0, 0.0, error / spread_TK.double())
    return torch.where(ratio.isnan(), math.inf, ratio).max().item() if ratio.numel() else 0.0
