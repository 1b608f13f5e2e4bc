"""Quantisation to e4m3 on the device: rows 1x128, weights 128x128 and their transposed copy, and back to bf16."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megamoe.errors import MegaMoETypeError, MegaMoEValueError, expected
from megamoe.quantize import FP8, QuantizedRows, QuantizedWeight, ceil_div
from megamoe.recipe import BLOCK, Recipe
from megamoe.triton_kernels.numerics import (
    as_int64,
    from_e4m3,
    inverse,
    magnitude_or_zero,
    pack_e4m3,
    scale_of,
    to_bf16,
    to_e4m3,
)

TILE_VALUES = 4096
"""Of one program of `quantize_rows`: 32 a thread. On an H200 (November 2026) as fast as a copy of the same bytes; 64 a
thread: 88 % of it."""

TRANSPOSED_TILE = 64

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
        tile_cols = min(1024, triton.next_power_of_2(blocks) * BLOCK)
        tile_rows = TILE_VALUES // tile_cols
        grid = (ceil_div(rows, tile_rows) * ceil_div(channels, tile_cols),)
        _quantize_rows_kernel[grid](
            x, data, scale, rows, channels, *x.stride(), blocks, recipe.scale_format == "pow2", tile_rows, tile_cols
        )  # fmt: skip
    return QuantizedRows(data, scale)


@triton.jit
def _load_rows(w, r, end, cols, k, stride_n, stride_k):
    """Rows r and columns of one expert's weight in fp32; zero behind `end` and k."""
    mask = (r < end)[:, None] & (cols < k)[None, :]
    at = r.to(tl.int64)[:, None] * stride_n + cols.to(tl.int64)[None, :] * stride_k
    return tl.load(w + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["each", "row_blocks", "n_blocks", "k_blocks"])
def _quantize_weight_kernel(
    w, data, copy, scale, scale_t, each, n, k, stride_e, stride_n, stride_k, row_blocks, n_blocks, k_blocks,
    POW2: tl.constexpr, COPY: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """One 128 x 128 block of one expert; `row_blocks` of them cover one of the matrices stacked along N.

    The block is read once for its largest magnitude and again, from the cache, to be rounded: that takes few registers,
    and many programs keep the memory busy (bf16 on an H200, November 2026: 94 % of a copy of the same bytes; kept in
    registers in between: 53 %). With COPY the rounded block is also stored to [E, K, N], four rows' bytes a
    32-bit word (`pack_e4m3`). ALIGNED: the matrices' rows are a multiple of 16.
    """
    pid = tl.program_id(0)
    kb, nb = pid % k_blocks, pid // k_blocks % n_blocks
    e = (pid // (k_blocks * n_blocks)).to(tl.int64)
    row0, end = nb // row_blocks * each + nb % row_blocks * 128, (nb // row_blocks + 1) * each
    cols = kb * 128 + tl.arange(0, 128)
    w += e * stride_e
    v = _load_rows(w, row0 + tl.arange(0, 128), end, cols, k, stride_n, stride_k)
    s = scale_of(tl.max(tl.max(magnitude_or_zero(v), axis=1), axis=0), POW2)
    inv = inverse(s)
    tl.store(scale + (e * n_blocks + nb) * k_blocks + kb, s)
    if COPY:
        tl.store(scale_t + (e * k_blocks + kb) * n_blocks + nb, s)
    r = row0 + 4 * tl.arange(0, 32)
    v0 = _load_rows(w, r, end, cols, k, stride_n, stride_k) * inv
    v1 = _load_rows(w, r + 1, end, cols, k, stride_n, stride_k) * inv
    v2 = _load_rows(w, r + 2, end, cols, k, stride_n, stride_k) * inv
    v3 = _load_rows(w, r + 3, end, cols, k, stride_n, stride_k) * inv
    to, there = data + (e * n + r.to(tl.int64)[:, None]) * k + cols[None, :], (cols < k)[None, :]
    tl.store(to, to_e4m3(v0), mask=(r < end)[:, None] & there)
    tl.store(to + k, to_e4m3(v1), mask=(r + 1 < end)[:, None] & there)
    tl.store(to + 2 * k, to_e4m3(v2), mask=(r + 2 < end)[:, None] & there)
    tl.store(to + 3 * k, to_e4m3(v3), mask=(r + 3 < end)[:, None] & there)
    if COPY:
        word0, n4, end4 = row0 // 4, n // 4, end // 4
        if ALIGNED:  # said so that the compiler sees it: four words a store
            word0, n4, end4 = row0 // 16 * 4, n // 16 * 4, end // 16 * 4
        i = word0 + tl.arange(0, 32)
        to = copy + (e * k + cols.to(tl.int64))[None, :] * n4 + i[:, None]
        tl.store(to, pack_e4m3(v0, v1, v2, v3), mask=(i < end4)[:, None] & there)


@triton.jit(do_not_specialize=["n_blocks", "k_blocks"])
def _transpose_weight_kernel(x, out, n, k, stride_e, stride_n, stride_k, n_blocks, k_blocks, TILE: tl.constexpr):
    """TILE x TILE of x [E, N, K] to out [E, K, N]."""
    pid = tl.program_id(0)
    i = pid // k_blocks % n_blocks * TILE + tl.arange(0, TILE)
    j = pid % k_blocks * TILE + tl.arange(0, TILE)
    e = (pid // (k_blocks * n_blocks)).to(tl.int64)
    mask = (i < n)[:, None] & (j < k)[None, :]
    at = x + e * stride_e + i.to(tl.int64)[:, None] * stride_n + j.to(tl.int64)[None, :] * stride_k
    to = out + (e * k + j.to(tl.int64))[None, :] * n + i[:, None]
    tl.store(to, tl.load(at, mask=mask, other=0.0), mask=mask)


def _transpose_weight(x: torch.Tensor) -> torch.Tensor:
    """[E, N, K] to a contiguous [E, K, N]."""
    e, n, k = x.shape
    out = torch.empty(e, k, n, dtype=x.dtype, device=x.device)
    if out.numel():
        n_blocks, k_blocks = ceil_div(n, TRANSPOSED_TILE), ceil_div(k, TRANSPOSED_TILE)
        grid = (e * n_blocks * k_blocks,)
        _transpose_weight_kernel[grid](x, out, n, k, *x.stride(), n_blocks, k_blocks, TRANSPOSED_TILE)
    return out


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
    return _quantize_weight(w, recipe, row_groups, False)[0]


def quantize_weight_with_transpose(
    w: torch.Tensor, recipe: Recipe, row_groups: int = 1
) -> tuple[QuantizedWeight, QuantizedWeight]:
    """Quantise the weights of experts and make the transposed copy, which dgrad multiplies with.

    Args:
        w: [E, N, K], bf16, fp16 or fp32. recipe: formats. row_groups: matrices stacked along N.

    Returns:
        The weight and its transposed copy [E, K, N]: the same bytes and scales. One kernel, no host sync; with "fp8"
        and rows that are no multiple of four torch makes the copy.
    """
    _check_weight(w, row_groups)
    if recipe.precision == "bf16":
        rounded = w.to(torch.bfloat16)
        return QuantizedWeight(rounded, None, row_groups), QuantizedWeight(
            _transpose_weight(rounded), None, 1, row_groups
        )
    if w.shape[1] // row_groups % 4:
        weight = quantize_weight(w, recipe, row_groups)
        return weight, weight.transposed()
    weight, copy = _quantize_weight(w, recipe, row_groups, True)
    assert copy is not None
    return weight, copy


def _quantize_weight(
    w: torch.Tensor, recipe: Recipe, row_groups: int, with_copy: bool
) -> tuple[QuantizedWeight, QuantizedWeight | None]:
    e, n, k = w.shape
    each = n // row_groups
    row_blocks, k_blocks = ceil_div(each, BLOCK), ceil_div(k, BLOCK)
    n_blocks = row_groups * row_blocks
    data = torch.empty(e, n, k, dtype=FP8, device=w.device)
    scale = torch.empty(e, n_blocks, k_blocks, dtype=torch.float32, device=w.device)
    copy, scale_t = (data.new_empty(e, k, n), scale.new_empty(e, k_blocks, n_blocks)) if with_copy else (data, scale)
    if data.numel():
        _quantize_weight_kernel[(e * n_blocks * k_blocks,)](
            w, data, copy.view(torch.int32) if with_copy else copy, scale, scale_t, each, n, k, *w.stride(),
            row_blocks, n_blocks, k_blocks, recipe.scale_format == "pow2", with_copy, each % 16 == 0,
            num_warps=8 if w.element_size() == 2 else 16,
        )  # fmt: skip
    weight = QuantizedWeight(data, scale, row_groups)
    return weight, QuantizedWeight(copy, scale_t, 1, row_groups) if with_copy else None


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
