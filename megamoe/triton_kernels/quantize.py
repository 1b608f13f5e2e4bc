"""Quantisation to e4m3 on the device: rows 1x128, weights 128x128 with both copies in one pass, and back to bf16."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megamoe.errors import MegaMoETypeError, MegaMoEValueError, expected
from megamoe.quantize import FP8, QuantizedRows, QuantizedWeight, ceil_div
from megamoe.recipe import BLOCK, Recipe
from megamoe.triton_kernels.numerics import as_int64, from_e4m3, inverse, magnitude_or_zero, scale_of, to_bf16, to_e4m3

WEIGHT_WARPS, WEIGHT_REGISTERS = 16, 64
"""Two programs an SM."""

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
def _quantize_rows_kernel(
    x, data, scale, rows, channels, stride_row, stride_channel, blocks, POW2: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr,
):  # fmt: skip
    """One tile of ROWS x COLS, COLS / 128 scales a row."""
    parts = tl.cdiv(channels, COLS)
    pid = tl.program_id(0)
    r = (pid // parts) * ROWS + tl.arange(0, ROWS)
    c = (pid % parts) * COLS + tl.arange(0, COLS)
    r64 = r.to(tl.int64)
    mask = (r < rows)[:, None] & (c < channels)[None, :]
    at = r64[:, None] * stride_row + c.to(tl.int64)[None, :] * stride_channel
    v = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    v = tl.reshape(v, (ROWS, COLS // 128, 128))
    s = scale_of(tl.max(magnitude_or_zero(v), axis=2), POW2)
    q = tl.reshape(to_e4m3(v * inverse(s)[:, :, None]), (ROWS, COLS))
    tl.store(data + r64[:, None] * channels + c[None, :], q, mask=mask)
    block = (pid % parts) * (COLS // 128) + tl.arange(0, COLS // 128)
    tl.store(scale + r64[:, None] * blocks + block[None, :], s, mask=(r < rows)[:, None] & (block < blocks)[None, :])


def quantize_rows(x: torch.Tensor, recipe: Recipe) -> QuantizedRows:
    """As `megamoe.quantize.quantize_rows`, one kernel. Launches on the current stream, no host sync."""
    if x.dim() != 2:
        raise MegaMoEValueError(expected("x", "a matrix [rows, channels]", f"shape {tuple(x.shape)}"))
    if x.dtype not in _FLOATS:
        raise MegaMoETypeError(expected("x", "bf16, fp16 or fp32", x.dtype))
    if recipe.precision == "bf16":
        return QuantizedRows(x.to(torch.bfloat16), None)
    rows, channels = x.shape
    blocks = ceil_div(channels, BLOCK)
    data = torch.empty(rows, channels, dtype=FP8, device=x.device)
    scale = torch.empty(rows, blocks, dtype=torch.float32, device=x.device)
    if rows:
        tile_rows, tile_cols = 8, min(1024, triton.next_power_of_2(blocks) * BLOCK)
        grid = (ceil_div(rows, tile_rows) * ceil_div(channels, tile_cols),)
        _quantize_rows_kernel[grid](
            x, data, scale, rows, channels, *x.stride(), blocks, recipe.scale_format == "pow2", tile_rows, tile_cols
        )  # fmt: skip
    return QuantizedRows(data, scale)


@triton.jit
def _load_weight(w, n, cols, live_n, k, stride_n, stride_k):
    mask = live_n[:, None] & (cols < k)[None, :]
    at = n.to(tl.int64)[:, None] * stride_n + cols.to(tl.int64)[None, :] * stride_k
    return tl.load(w + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _quantize_weight_kernel(
    w, data, scale, words_t, scale_t, each, n, k, stride_e, stride_n, stride_k, row_blocks, n_blocks, k_blocks,
    TRANSPOSE: tl.constexpr, POW2: tl.constexpr,
):  # fmt: skip
    """One 128 x 128 block of one expert; `row_blocks` of them cover one of the matrices stacked along N.

    The block is held as four tiles of every fourth row, whose bytes make the words of `words_t`, the transposed copy
    [E, K, N / 4]: Triton 3.6 corrupts tiles of bytes that change their layout (a quarter of the bytes of a transposed
    fp32 weight on an H200), so what is transposed is 32 bits wide. TRANSPOSE needs `each` to be a multiple of 4.
    """
    pid = tl.program_id(0)
    kb = pid % k_blocks
    nb = pid // k_blocks % n_blocks
    e = (pid // (k_blocks * n_blocks)).to(tl.int64)
    group = nb // row_blocks
    end = (group + 1) * each
    row = group * each + nb % row_blocks * 128 + tl.arange(0, 32) * 4
    cols = kb * 128 + tl.arange(0, 128)
    at_w = w + e * stride_e
    v0 = _load_weight(at_w, row, cols, row < end, k, stride_n, stride_k)
    v1 = _load_weight(at_w, row + 1, cols, row + 1 < end, k, stride_n, stride_k)
    v2 = _load_weight(at_w, row + 2, cols, row + 2 < end, k, stride_n, stride_k)
    v3 = _load_weight(at_w, row + 3, cols, row + 3 < end, k, stride_n, stride_k)
    largest = tl.maximum(magnitude_or_zero(v0), magnitude_or_zero(v1))
    largest = tl.maximum(largest, tl.maximum(magnitude_or_zero(v2), magnitude_or_zero(v3)))
    s = scale_of(tl.max(tl.max(largest, axis=1), axis=0), POW2)
    inv = inverse(s)
    q0, q1, q2, q3 = to_e4m3(v0 * inv), to_e4m3(v1 * inv), to_e4m3(v2 * inv), to_e4m3(v3 * inv)
    inside = (cols < k)[None, :]
    at = data + (e * n + row[:, None]) * k + cols[None, :]
    tl.store(at, q0, mask=(row < end)[:, None] & inside)
    tl.store(at + k, q1, mask=(row + 1 < end)[:, None] & inside)
    tl.store(at + 2 * k, q2, mask=(row + 2 < end)[:, None] & inside)
    tl.store(at + 3 * k, q3, mask=(row + 3 < end)[:, None] & inside)
    tl.store(scale + (e * n_blocks + nb) * k_blocks + kb, s)
    if TRANSPOSE:
        words = _byte(q0) | (_byte(q1) << 8) | (_byte(q2) << 16) | (_byte(q3) << 24)
        to = words_t + (e * k + cols.to(tl.int64)[None, :]) * (n // 4) + (row // 4)[:, None]
        tl.store(to, words, mask=(row < end)[:, None] & inside)
        tl.store(scale_t + (e * k_blocks + kb) * n_blocks + nb, s)


@triton.jit
def _byte(q):
    return q.to(tl.uint8, bitcast=True).to(tl.int32)


def _check_weight(w: torch.Tensor, row_groups: int) -> None:
    if w.dim() != 3 or w.shape[1] % row_groups:
        raise MegaMoEValueError(
            expected("w", f"[E, N, K] with N a multiple of {row_groups}", f"shape {tuple(w.shape)}")
        )
    if w.dtype not in _FLOATS:
        raise MegaMoETypeError(expected("w", "bf16, fp16 or fp32", w.dtype))


def _quantize_weight(
    w: torch.Tensor, recipe: Recipe, row_groups: int, transpose: bool
) -> tuple[QuantizedWeight, QuantizedWeight | None]:
    e, n, k = w.shape
    each = n // row_groups
    row_blocks, k_blocks = ceil_div(each, BLOCK), ceil_div(k, BLOCK)
    n_blocks = row_groups * row_blocks
    data = torch.empty(e, n, k, dtype=FP8, device=w.device)
    scale = torch.empty(e, n_blocks, k_blocks, dtype=torch.float32, device=w.device)
    words_t, scale_t = scale, scale
    if transpose:
        words_t = torch.empty(e, k, n // 4, dtype=torch.int32, device=w.device)
        scale_t = torch.empty(e, k_blocks, n_blocks, dtype=torch.float32, device=w.device)
    if data.numel():
        _quantize_weight_kernel[(e * n_blocks * k_blocks,)](
            w, data, scale, words_t, scale_t, each, n, k, *w.stride(), row_blocks, n_blocks, k_blocks,
            transpose, recipe.scale_format == "pow2", num_warps=WEIGHT_WARPS, maxnreg=WEIGHT_REGISTERS,
        )  # fmt: skip
    copy = QuantizedWeight(words_t.view(FP8), scale_t, 1, row_groups) if transpose else None
    return QuantizedWeight(data, scale, row_groups), copy


def quantize_weight(w: torch.Tensor, recipe: Recipe, row_groups: int = 1) -> QuantizedWeight:
    """As `megamoe.quantize.quantize_weight`, one kernel. Launches on the current stream, no host sync."""
    _check_weight(w, row_groups)
    if recipe.precision == "bf16":
        return QuantizedWeight(w.to(torch.bfloat16), None, row_groups)
    return _quantize_weight(w, recipe, row_groups, transpose=False)[0]


def quantize_weight_with_transpose(
    w: torch.Tensor, recipe: Recipe, row_groups: int = 1
) -> tuple[QuantizedWeight, QuantizedWeight]:
    """Quantise the weights of experts and make the transposed copy, which dgrad multiplies with, in the same pass.

    Args:
        w: [E, N, K], bf16, fp16 or fp32. recipe: formats. row_groups: matrices stacked along N.

    Returns:
        The weight and its transposed copy [E, K, N]: the same bytes and scales.
    """
    _check_weight(w, row_groups)
    if recipe.precision == "bf16":
        weight = QuantizedWeight(w.to(torch.bfloat16), None, row_groups)
        return weight, weight.transposed()
    weight, copy = _quantize_weight(w, recipe, row_groups, transpose=w.shape[1] // row_groups % 4 == 0)
    return weight, weight.transposed() if copy is None else copy


@triton.jit
def _dequantize_kernel(
    data, scale, out, rows, channels, each, stride_scale_row, stride_scale_block, ROWS: tl.constexpr
):  # fmt: skip
    """bf16(data * scale) of ROWS rows of one block; `each` channels, with a scale grid of their own, make a group."""
    per_group = tl.cdiv(each, 128)
    blocks = channels // each * per_group
    block = tl.program_id(0) % blocks
    r = (tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    begin = block // per_group * each
    c = begin + block % per_group * 128 + tl.arange(0, 128)
    mask = (r < rows)[:, None] & (c < begin + each)[None, :]
    at = r[:, None] * channels + c[None, :]
    s = tl.load(scale + r * stride_scale_row + as_int64(block) * stride_scale_block, mask=r < rows, other=0.0)
    v = from_e4m3(tl.load(data + at, mask=mask, other=0.0)) * s[:, None]
    tl.store(out + at, to_bf16(v), mask=mask)


def dequantize(rows: QuantizedRows) -> torch.Tensor:
    """What travelled, as bf16 [rows, channels]: the operand of wgrad. One kernel, none if the rows are bf16 already."""
    if rows.scale is None:
        return rows.data.to(torch.bfloat16)
    num_rows, channels = rows.data.shape
    out = torch.empty(num_rows, channels, dtype=torch.bfloat16, device=rows.data.device)
    if out.numel():
        strides = rows.scale.stride()[::-1] if rows.k_major else rows.scale.stride()
        each, tile_rows = channels // rows.groups, 32
        grid = (ceil_div(num_rows, tile_rows) * rows.groups * ceil_div(each, BLOCK),)
        _dequantize_kernel[grid](rows.data, rows.scale, out, num_rows, channels, each, *strides, tile_rows)
    return out
