"""Assertions of the gates, with what a reader needs to find the fault: the figure, the bound, the first bad place."""

from __future__ import annotations

import torch

from megamoe import gates
from megamoe.quantize import QuantizedRows, QuantizedWeight
from megamoe.reference import Backward


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """The bit pattern as integers, so that NaN equals NaN and 0 differs from -0."""
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def assert_bitwise(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    """Equal in shape, dtype and every bit; the message names the first place that differs."""
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    assert got.dtype == want.dtype, f"{what}: {got.dtype}, expected {want.dtype}"
    differs = as_bytes(got) != as_bytes(want.to(got.device))
    if bool(differs.any()):
        at = tuple(differs.nonzero()[0].tolist())
        raise AssertionError(
            f"{what}: {int(differs.sum())} of {differs.numel()} differ, first at {at}: "
            f"{got[at].float().item()} for {want[at].float().item()}"
        )


def assert_quantized_equal(
    got: QuantizedRows | QuantizedWeight, want: QuantizedRows | QuantizedWeight, what: str
) -> None:
    """Bytes and scales equal bit for bit."""
    assert_bitwise(got.data, want.data, f"{what}.data")
    assert (got.scale is None) == (want.scale is None), f"{what}.scale"
    if got.scale is not None and want.scale is not None:
        assert_bitwise(got.scale, want.scale, f"{what}.scale")


def assert_rows_pass(got: torch.Tensor, want: torch.Tensor, bounds: gates.Gates, what: str) -> None:
    """out and dx against the oracle: the whole tensor and the worst row."""
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    db = gates.sqnr_db(got, want)
    assert db >= bounds.tensor_db, f"{what}: {db:.1f} dB, expected at least {bounds.tensor_db}"
    error, row = gates.worst_row(got, want)
    assert error <= bounds.row, f"{what}: row {row} is off by {error:.3f}, expected at most {bounds.row}"


def assert_experts_pass(got: torch.Tensor, want: torch.Tensor, bounds: gates.Gates, what: str) -> None:
    """dW13 and dW2 against the oracle: the whole tensor, the worst expert, exact zeros where the oracle's are."""
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    db = gates.sqnr_db(got, want)
    assert db >= bounds.tensor_db, f"{what}: {db:.1f} dB, expected at least {bounds.tensor_db}"
    worst, expert = gates.worst_expert_db(got, want)
    assert worst >= bounds.expert_db, f"{what}: expert {expert} at {worst:.1f} dB, expected {bounds.expert_db}"


def assert_backward_passes(got: Backward, want: Backward, bounds: gates.Gates) -> None:
    """All four gradients against the oracle's."""
    assert want.dp_spread_TK is not None, "want must come from the oracle"
    assert_rows_pass(got.dx_TH, want.dx_TH, bounds, "dx")
    error = gates.worst_weight_grad(got.dp_TK, want.dp_TK, want.dp_spread_TK)
    assert error <= bounds.weight_grad, f"dp: {error:.3f} of its spread, expected at most {bounds.weight_grad}"
    assert_experts_pass(got.dw13_E2IH, want.dw13_E2IH, bounds, "dW13")
    assert_experts_pass(got.dw2_EHI, want.dw2_EHI, bounds, "dW2")
