"""Quantisation to e4m3 on the device: rows 1x128, weights 128x128 and their transposed copy, and back to bf16."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megamoe.errors import MegaMoETypeError, MegaMoEValueError, expected
from megamoe.quantize import FP8, QuantizedRows, QuantizedWeight, ceil_div
from megamoe.recipe import BLOCK, Recipe
from megamoe.triton_kernels.launch import words
from megamoe.triton_kernels.numerics import as_int64, from_e4m3, inverse, magnitude_or_zero, scale_of, to_bf16, to_e4m3

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit(do_not_specialize=["rows", "blocks"])
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


@triton.jit(do_not_specialize=["each", "n", "row_blocks", "n_blocks", "k_blocks"])
def _quantize_weight_kernel(
    w, data, scale, each, n, k, stride_e, stride_n, stride_k, row_blocks, n_blocks, k_blocks, POW2: tl.constexpr
):  # fmt: skip
    """One 128 x 128 block of one expert; `row_blocks` of them cover one of the matrices stacked along N."""
    pid = tl.program_id(0)
    kb = pid % k_blocks
    nb = pid // k_blocks % n_blocks
    e = (pid // (k_blocks * n_blocks)).to(tl.int64)
    group = nb // row_blocks
    rows = group * each + nb % row_blocks * 128 + tl.arange(0, 128)
    cols = kb * 128 + tl.arange(0, 128)
    mask = (rows < (group + 1) * each)[:, None] & (cols < k)[None, :]
    rows64, cols64 = rows.to(tl.int64), cols.to(tl.int64)
    v = tl.load(w + e * stride_e + rows64[:, None] * stride_n + cols64[None, :] * stride_k, mask=mask, other=0.0)
    v = v.to(tl.float32)
    s = scale_of(tl.max(tl.max(magnitude_or_zero(v), axis=1), axis=0), POW2)
    tl.store(data + (e * n + rows64[:, None]) * k + cols[None, :], to_e4m3(v * inverse(s)), mask=mask)
    tl.store(scale + (e * n_blocks + nb) * k_blocks + kb, s)


@triton.jit(do_not_specialize=["n_blocks", "k_blocks"])
def _transpose_words_kernel(x, out, n, k, n_blocks, k_blocks):
    """128 x 128 bytes of x [E, N, K / 4] to out [E, K, N / 4], both as 32-bit words of four bytes.

    Four rows' words make four words of the transposed rows, by shifts alone: nothing smaller than 32 bits changes its
    place. With Triton 3.6 the bytes of e4m3 values come out wrong (on an H200, half of them) when they are taken apart
    in the kernel that rounded them.
    """
    pid = tl.program_id(0)
    kb = pid % k_blocks
    nb = pid // k_blocks % n_blocks
    e = (pid // (k_blocks * n_blocks)).to(tl.int64)
    r = nb * 32 + tl.arange(0, 32)
    c = kb * 32 + tl.arange(0, 32)
    k4, n4 = k // 4, n // 4
    mask = (r < n4)[:, None] & (c < k4)[None, :]
    at = x + (e * n + 4 * r[:, None]) * k4 + c[None, :]
    x0 = tl.load(at, mask=mask, other=0)
    x1 = tl.load(at + k4, mask=mask, other=0)
    x2 = tl.load(at + 2 * k4, mask=mask, other=0)
    x3 = tl.load(at + 3 * k4, mask=mask, other=0)
    to = out + (e * k + 4 * c[None, :].to(tl.int64)) * n4 + r[:, None]
    for j in tl.static_range(4):
        low = ((x0 >> (8 * j)) & 255) | (((x1 >> (8 * j)) & 255) << 8)
        high = (((x2 >> (8 * j)) & 255) << 16) | (((x3 >> (8 * j)) & 255) << 24)
        tl.store(to + j * n4, low | high, mask=mask)


def transpose_bytes(x: torch.Tensor) -> torch.Tensor:
    """[E, N, K] of a one-byte dtype to a contiguous [E, K, N], ten times as fast as torch's copy."""
    e, n, k = x.shape
    source = words(x)
    if n % 4 or source.dtype != torch.int32 or not x.numel():
        return x.transpose(1, 2).contiguous()
    out = torch.empty(e, k, n // 4, dtype=torch.int32, device=x.device)
    n_blocks, k_blocks = ceil_div(n, BLOCK), ceil_div(k, BLOCK)
    _transpose_words_kernel[(e * n_blocks * k_blocks,)](source, out, n, k, n_blocks, k_blocks)
    return out.view(x.dtype)


def _check_weight(w: torch.Tensor, row_groups: int) -> None:
    if w.dim() != 3 or w.shape[1] % row_groups:
        raise MegaMoEValueError(
            expected("w", f"[E, N, K] with N a multiple of {row_groups}", f"shape {tuple(w.shape)}")
        )
    if w.dtype not in _FLOATS:
        raise MegaMoETypeError(expected("w", "bf16, fp16 or fp32", w.dtype))


def quantize_weight(w: torch.Tensor, recipe: Recipe, row_groups: int = 1) -> QuantizedWeight:
    """As `megamoe.quantize.quantize_weight`, one kernel. Launches on the current stream, no host sync."""
    _check_weight(w, row_groups)
    if recipe.precision == "bf16":
        return QuantizedWeight(w.to(torch.bfloat16), None, row_groups)
    e, n, k = w.shape
    each = n // row_groups
    row_blocks, k_blocks = ceil_div(each, BLOCK), ceil_div(k, BLOCK)
    n_blocks = row_groups * row_blocks
    data = torch.empty(e, n, k, dtype=FP8, device=w.device)
    scale = torch.empty(e, n_blocks, k_blocks, dtype=torch.float32, device=w.device)
    if data.numel():
        _quantize_weight_kernel[(e * n_blocks * k_blocks,)](
            w, data, scale, each, n, k, *w.stride(), row_blocks, n_blocks, k_blocks, recipe.scale_format == "pow2",
            num_warps=16,
        )  # fmt: skip
    return QuantizedWeight(data, scale, row_groups)


def quantize_weight_with_transpose(
    w: torch.Tensor, recipe: Recipe, row_groups: int = 1
) -> tuple[QuantizedWeight, QuantizedWeight]:
    """Quantise the weights of experts and make the transposed copy, which dgrad multiplies with.

    Args:
        w: [E, N, K], bf16, fp16 or fp32. recipe: formats. row_groups: matrices stacked along N.

    Returns:
        The weight and its transposed copy [E, K, N]: the same bytes and scales. Two kernels, no host sync.
    """
    weight = quantize_weight(w, recipe, row_groups)
    if weight.scale is None:
        return weight, weight.transposed()
    scale = weight.scale.transpose(1, 2).contiguous()
    return weight, QuantizedWeight(transpose_bytes(weight.data), scale, 1, row_groups)


@triton.jit(do_not_specialize=["rows"])
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
