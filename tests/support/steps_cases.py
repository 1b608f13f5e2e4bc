"""Comparing one backend's steps with `torch_steps`: problems of every awkward kind, and how close each step must be."""

from __future__ import annotations

import torch

from megamoe import torch_steps
from megamoe.cli.problem import ProblemSpec
from megamoe.gates import rel_l2
from megamoe.quantize import QuantizedRows, QuantizedWeight
from megamoe.recipe import Recipe

RECIPES = [
    Recipe(),
    Recipe(scale_format="pow2", clamp=1.5),
    Recipe("bf16"),
    Recipe("bf16", clamp=1.5),
]

SPECS = [
    ProblemSpec((40,), 256, 128, 4, 2, "uniform"),
    ProblemSpec((33,), 320, 192, 4, 3, "masked"),
    ProblemSpec((17, 20), 200, 72, 4, 2, "duplicates"),
    ProblemSpec((30, 0), 128, 128, 6, 2, "first_rank"),
    ProblemSpec((150,), 128, 136, 4, 2, "one_expert"),
]


def normal_nans(x: torch.Tensor) -> torch.Tensor:
    """The bit pattern with one NaN for all: sign and payload of a NaN are nobody's contract."""
    bits = x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()]).clone()
    bits[x.float().isnan()] = {1: 0x7F, 2: 0x7FC0, 4: 0x7FC00000}[x.element_size()]
    return bits


def assert_same_values(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    """Bit for bit, except that every NaN equals every NaN."""
    assert (got.shape, got.dtype) == (want.shape, want.dtype), what
    differs = normal_nans(got.cpu()) != normal_nans(want.cpu())
    assert not bool(differs.any()), (
        f"{what}: {int(differs.sum())} of {differs.numel()}, first at {differs.nonzero()[0]}"
    )


def assert_same_quantized(
    got: QuantizedRows | QuantizedWeight, want: QuantizedRows | QuantizedWeight, what: str
) -> None:
    """Data and scales by `assert_same_values`."""
    assert_same_values(got.data, want.data, f"{what}.data")
    assert (got.scale is None) == (want.scale is None), what
    if got.scale is not None and want.scale is not None:
        assert_same_values(got.scale, want.scale, f"{what}.scale")


def assert_one_step_apart(got: QuantizedRows, want: QuantizedRows, what: str, share: float = 1e-4) -> None:
    """What follows the sigmoid: at most `share` of the bytes differ (one of them always may), by one e4m3 step."""
    if got.scale is None or want.scale is None:
        assert rel_l2(got.data.cpu(), want.data.cpu()) <= 2e-3, what
        return
    assert rel_l2(got.scale.cpu(), want.scale.cpu()) <= 1e-5, f"{what}.scale"
    step = (got.data.cpu().view(torch.uint8).int() - want.data.cpu().view(torch.uint8).int()).abs()
    assert not bool((step > 1).any()), f"{what}: a byte is more than one step off"
    assert int(step.sum()) <= max(1, share * step.numel()), f"{what}: {int(step.sum())} of {step.numel()} bytes differ"


def assert_close(got: torch.Tensor, want: torch.Tensor, bound: float, what: str) -> None:
    """rel-L2 of whole tensors."""
    assert (got.shape, got.dtype) == (want.shape, want.dtype), what
    error = rel_l2(got.cpu(), want.cpu())
    assert error <= bound, f"{what}: rel-L2 {error:.2e}, expected at most {bound:.0e}"


def quantized_to(rows: QuantizedRows, device: torch.device) -> QuantizedRows:
    """The same rows on another device."""
    scale = None if rows.scale is None else rows.scale.to(device)
    return QuantizedRows(rows.data.to(device), scale, rows.k_major, rows.groups)


def weight_to(weight: QuantizedWeight, device: torch.device) -> QuantizedWeight:
    """The same weight on another device."""
    scale = None if weight.scale is None else weight.scale.to(device)
    return QuantizedWeight(weight.data.to(device), scale, weight.row_groups, weight.col_groups)


def random_pool(rows: int, channels: int, recipe: Recipe, groups: int = 1) -> QuantizedRows:
    """Random quantised rows with k-major scales, on the CPU."""
    halves = [torch_steps.quantize_rows(torch.randn(rows, channels // groups), recipe) for _ in range(groups)]
    data = torch.cat([h.data.view(torch.uint8) if h.scale is not None else h.data for h in halves], dim=1)
    if halves[0].scale is None:
        return QuantizedRows(data, None, True, groups)
    scale = torch.cat([h.scale for h in halves if h.scale is not None], dim=1).t().contiguous()
    return QuantizedRows(data.view(torch.float8_e4m3fn), scale, True, groups)
