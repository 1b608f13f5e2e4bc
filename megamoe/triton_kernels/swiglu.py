"""Scaled SwiGLU with quantisation, and its backward with dp and both operands of wgrad, one kernel each.

Both kernels are compiled without contraction of products and sums, so that every operation rounds as it does in
`torch_steps`; only the sigmoid is the hardware's approximation.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megamoe.quantize import FP8, QuantizedRows, ceil_div
from megamoe.recipe import BLOCK, Recipe
from megamoe.torch_steps import SwigluGrads
from megamoe.triton_kernels.numerics import (
    as_int64,
    clamp_limits,
    inverse,
    magnitude_or_zero,
    scale_of,
    sigmoid,
    to_bf16,
    to_e4m3,
)

TILE_ROWS = 16
BACKWARD_TILE_ROWS, BACKWARD_WARPS = 8, 2


@triton.jit
def _store_quantized(v, data, at, mask, scale, row_mask, SCALED: tl.constexpr, POW2: tl.constexpr):
    """One [ROWS, 128] block: e4m3 and the scales of its rows, or bf16."""
    if SCALED:
        s = scale_of(tl.max(magnitude_or_zero(v), axis=1), POW2)
        tl.store(data + at, to_e4m3(v * inverse(s)[:, None]), mask=mask)
        tl.store(scale, s, mask=row_mask)
    else:
        tl.store(data + at, to_bf16(v), mask=mask)


@triton.jit
def _swiglu_kernel(
    gate_up, weight, h, scale, rows, inter, CLAMP: tl.constexpr, SCALED: tl.constexpr, POW2: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """h of ROWS rows and one block of 128 channels."""
    blocks = tl.cdiv(inter, 128)
    pid = tl.program_id(0)
    block = pid % blocks
    r = pid // blocks * ROWS + tl.arange(0, ROWS)
    r64 = r.to(tl.int64)
    c = block * 128 + tl.arange(0, 128)
    mask = (r < rows)[:, None] & (c < inter)[None, :]
    at = r64[:, None] * (2 * inter) + c[None, :]
    gate = tl.load(gate_up + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + at + inter, mask=mask, other=0.0).to(tl.float32)
    p = tl.load(weight + r, mask=r < rows, other=0.0)
    gate, up = clamp_limits(gate, up, CLAMP)
    v = gate * sigmoid(gate) * up * p[:, None]
    _store_quantized(
        v, h, r64[:, None] * inter + c[None, :], mask, scale + as_int64(block) * rows + r, r < rows, SCALED, POW2
    )


def swiglu(gate_up: torch.Tensor, weight: torch.Tensor, recipe: Recipe) -> QuantizedRows:
    """As `torch_steps.swiglu`, one kernel. Launches on the current stream, no host sync, repeatable bit for bit.

    On a GPU the sigmoid is the hardware's approximation: a byte in ten thousand differs from torch by one e4m3 step.
    """
    rows, inter = gate_up.shape[0], gate_up.shape[1] // 2
    blocks, scaled = ceil_div(inter, BLOCK), recipe.precision == "fp8"
    h = torch.empty(rows, inter, dtype=FP8 if scaled else torch.bfloat16, device=gate_up.device)
    scale = torch.empty(blocks, rows, dtype=torch.float32, device=gate_up.device) if scaled else weight
    if h.numel():
        _swiglu_kernel[(ceil_div(rows, TILE_ROWS) * blocks,)](
            gate_up.contiguous(), weight.contiguous(), h, scale, rows, inter, recipe.clamp or 0.0, scaled,
            recipe.scale_format == "pow2", TILE_ROWS, enable_fp_fusion=False,
        )  # fmt: skip
    return QuantizedRows(h, scale if scaled else None, k_major=True)


@triton.jit
def _fold_128(x, ROWS: tl.constexpr):
    """The sum of 128 columns in the recipe's order, [ROWS]: quarters of 32 ascending, then distances 4, 2, 1, 8, 16.

    Reductions of two values, or of one or two among zeros, are exact in whatever order they are compiled to.
    """
    x = tl.reshape(x, (ROWS, 4, 32))
    quarter = tl.arange(0, 4)[None, :, None]
    low = tl.sum(tl.where(quarter < 2, x, 0.0), axis=1)
    x = (low + tl.sum(tl.where(quarter == 2, x, 0.0), axis=1)) + tl.sum(tl.where(quarter == 3, x, 0.0), axis=1)
    x = tl.sum(tl.reshape(x, (ROWS, 4, 2, 4)), axis=2)
    x = tl.sum(tl.reshape(x, (ROWS, 4, 2, 2)), axis=2)
    x = tl.sum(tl.reshape(x, (ROWS, 2, 2, 2)), axis=3)
    return tl.sum(tl.sum(x, axis=2), axis=1)


@triton.jit
def _swiglu_backward_kernel(
    dh, gate_up, weight, d_gate_up, scale, d_gate_up_bf16, weighted_act, d_weight, rows, inter,
    CLAMP: tl.constexpr, SCALED: tl.constexpr, POW2: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """All channels of ROWS rows, block by block, so that dp is summed over the blocks in order by one program."""
    blocks = tl.cdiv(inter, 128)
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    r64 = r.to(tl.int64)
    live = r < rows
    p = tl.load(weight + r, mask=live, other=0.0)[:, None]
    total = tl.zeros((ROWS,), tl.float32)
    for block in range(0, blocks):
        c = block * 128 + tl.arange(0, 128)
        mask = live[:, None] & (c < inter)[None, :]
        narrow, wide = r64[:, None] * inter + c[None, :], r64[:, None] * (2 * inter) + c[None, :]
        grad = tl.load(dh + narrow, mask=mask, other=0.0)
        raw_gate = tl.load(gate_up + wide, mask=mask, other=0.0).to(tl.float32)
        raw_up = tl.load(gate_up + wide + inter, mask=mask, other=0.0).to(tl.float32)
        gate, up = clamp_limits(raw_gate, raw_up, CLAMP)
        sigma = sigmoid(gate)
        silu = gate * sigma
        act = silu * up
        d_act = p * grad
        d_up = d_act * silu
        d_gate = d_act * up * (sigma * (1.0 + gate * (1.0 - sigma)))
        if CLAMP > 0:
            d_up = tl.where(tl.abs(raw_up) <= CLAMP, d_up, 0.0)
            d_gate = tl.where(raw_gate <= CLAMP, d_gate, 0.0)
        tl.store(weighted_act + narrow, to_bf16(act * p), mask=mask)
        at_scale = scale + as_int64(block) * rows + r
        _store_quantized(d_gate, d_gate_up, wide, mask, at_scale, live, SCALED, POW2)
        at_scale += as_int64(blocks) * rows
        _store_quantized(d_up, d_gate_up, wide + inter, mask, at_scale, live, SCALED, POW2)
        if SCALED:
            tl.store(d_gate_up_bf16 + wide, to_bf16(d_gate), mask=mask)
            tl.store(d_gate_up_bf16 + wide + inter, to_bf16(d_up), mask=mask)
        total += _fold_128(grad * act, ROWS)
    tl.store(d_weight + r, total, mask=live)


def swiglu_backward(dh: torch.Tensor, gate_up: torch.Tensor, weight: torch.Tensor, recipe: Recipe) -> SwigluGrads:
    """As `torch_steps.swiglu_backward`, one kernel. Launches on the current stream, no host sync, repeatable."""
    rows, inter = dh.shape
    blocks, scaled = ceil_div(inter, BLOCK), recipe.precision == "fp8"
    bf16 = {"dtype": torch.bfloat16, "device": dh.device}
    d_gate_up_bf16, weighted_act = torch.empty(rows, 2 * inter, **bf16), torch.empty(rows, inter, **bf16)
    d_weight = torch.empty(rows, dtype=torch.float32, device=dh.device)
    d_gate_up, scale = d_gate_up_bf16, d_weight
    if scaled:
        d_gate_up = torch.empty(rows, 2 * inter, dtype=FP8, device=dh.device)
        scale = torch.empty(2 * blocks, rows, dtype=torch.float32, device=dh.device)
    if dh.numel():
        _swiglu_backward_kernel[(ceil_div(rows, BACKWARD_TILE_ROWS),)](
            dh.contiguous(), gate_up.contiguous(), weight.contiguous(), d_gate_up, scale, d_gate_up_bf16,
            weighted_act, d_weight, rows, inter, recipe.clamp or 0.0, scaled, recipe.scale_format == "pow2",
            BACKWARD_TILE_ROWS, enable_fp_fusion=False, num_warps=BACKWARD_WARPS,
        )  # fmt: skip
    else:
        d_weight.zero_()
    quantized = QuantizedRows(d_gate_up, scale if scaled else None, k_major=True, groups=2)
    return SwigluGrads(quantized, d_gate_up_bf16, weighted_act, d_weight)
