"""Transposed e4m3 copies of a pool with scales along its rows, balanced row by row: the FP8 operands of wgrad."""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

from megamoe.quantize import FP8, QuantizedRows, ceil_div
from megamoe.recipe import BLOCK
from megamoe.routing_plan import RankPlan
from megamoe.triton_kernels.numerics import (
    as_int64,
    from_e4m3,
    inverse,
    magnitude_or_zero,
    pack_e4m3,
    scale_of,
)

_LARGEST_FACTOR: tl.constexpr = tl.constexpr(2.0**100)


@dataclasses.dataclass(frozen=True)
class TransposedRows:
    """A pool whose rows are the contraction: tensor cores want FP8 operands contiguous along it.

    Attributes:
        data: e4m3 [ceil(P / 128), columns, 128], each block of 128 rows transposed; zeros where there is no row.
        scale: fp32 [ceil(P / 128), columns], or with `is_square` [ceil(P / 128), ceil(columns / 128)].
        num_rows: P. is_square: whether 128 columns share a scale.
    """

    data: torch.Tensor
    scale: torch.Tensor
    num_rows: int
    is_square: bool

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """data * scale in fp32, then `dtype`; [P, columns]. For references, not for speed."""
        blocks, columns, _ = self.data.shape
        scale = self.scale.repeat_interleave(BLOCK, 1)[:, :columns] if self.is_square else self.scale
        values = self.data.float() * scale[:, :, None]
        return values.transpose(1, 2).reshape(blocks * BLOCK, columns)[: self.num_rows].to(dtype)


@triton.jit(do_not_specialize=["rows", "stride_row", "stride_block"])
def _row_factors_kernel(
    scale, token, factors, rows, blocks, stride_row, stride_block, ROWS: tl.constexpr, BLOCKS: tl.constexpr
):  # fmt: skip
    """factors[0, r] = m, a power of two in proportion to the row's largest scale; [1, r] = 1 / m; both 0 in padding."""
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    r64 = r.to(tl.int64)
    top = tl.zeros((ROWS,), tl.float32)
    for first in range(0, blocks, BLOCKS):
        b = first + tl.arange(0, BLOCKS)
        at = scale + r64[None, :] * stride_row + b.to(tl.int64)[:, None] * stride_block
        top = tl.maximum(top, tl.max(tl.load(at, mask=(b < blocks)[:, None] & (r < rows)[None, :], other=0.0), axis=0))
    m = scale_of(top, True)
    m = tl.where(m > _LARGEST_FACTOR, 1.0, m)  # an Inf: its block is NaN anyway, the others of the row need not be
    real = tl.load(token + r, mask=r < rows, other=-1) >= 0
    tl.store(factors + r, tl.where(real, m, 0.0), mask=r < rows)
    tl.store(factors + rows + r64, tl.where(real, inverse(m), 0.0), mask=r < rows)


def row_factors(rows: QuantizedRows, plan: RankPlan) -> torch.Tensor:
    """fp32 [2, P]: for each row what its partner in the product is multiplied by, and what it is itself; 0 in padding.

    Both are powers of two, one the other's inverse: 128 rows share a scale in the transposed copies, and what is left
    then differs from row to row only as much as the rows' shares of the sum do.
    """
    scale = rows.scale_row_major()
    assert scale is not None
    num_rows, blocks = scale.shape
    factors = torch.empty(2, num_rows, dtype=torch.float32, device=scale.device)
    if num_rows:
        tile_rows, tile_blocks = 32, 16
        _row_factors_kernel[(ceil_div(num_rows, tile_rows),)](
            scale, plan.token, factors, num_rows, blocks, *scale.stride(), tile_rows, tile_blocks
        )
    return factors


@triton.jit
def _load_scaled(x, x_scale, factor, r, c, rows, width, block, SCALED: tl.constexpr):
    """Rows r and columns c of x times their factors in fp32; padding, which may hold anything, is zero."""
    f = tl.load(factor + r, mask=r < rows, other=0.0)
    mask = (f > 0)[:, None] & (c < width)[None, :]
    v = tl.load(x + r.to(tl.int64)[:, None] * width + c[None, :], mask=mask, other=0.0)
    if SCALED:
        s = tl.load(x_scale + as_int64(block) * rows + r, mask=f > 0, other=0.0)
        return from_e4m3(v) * s[:, None] * f[:, None]
    else:
        return v.to(tl.float32) * f[:, None]


@triton.jit(do_not_specialize=["rows"])
def _transpose_kernel(
    x, x_scale, factor, out, scale, rows, width, blocks, SCALED: tl.constexpr, SQUARE: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """128 x 128 of x, read once for the largest magnitudes and again, from the cache and in PARTS, to be rounded.

    Four rows' bytes are a 32-bit word of `out`; see `pack_e4m3`.
    """
    WORDS: tl.constexpr = 32 // PARTS
    block, row_block = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    c = block * 128 + tl.arange(0, 128)
    v = _load_scaled(x, x_scale, factor, row_block * 128 + tl.arange(0, 128), c, rows, width, block, SCALED)
    top = tl.max(magnitude_or_zero(v), axis=0)
    if SQUARE:
        s = scale_of(tl.max(top, axis=0), False)
        inv = inverse(s)
        tl.store(scale + as_int64(row_block) * blocks + block, s)
    else:
        s = scale_of(top, False)
        inv = inverse(s)[None, :]
        tl.store(scale + as_int64(row_block) * width + c, s, mask=c < width)
    for part in range(PARTS):
        i = part * WORDS + tl.arange(0, WORDS)
        r = row_block * 128 + 4 * i
        v0 = _load_scaled(x, x_scale, factor, r, c, rows, width, block, SCALED) * inv
        v1 = _load_scaled(x, x_scale, factor, r + 1, c, rows, width, block, SCALED) * inv
        v2 = _load_scaled(x, x_scale, factor, r + 2, c, rows, width, block, SCALED) * inv
        v3 = _load_scaled(x, x_scale, factor, r + 3, c, rows, width, block, SCALED) * inv
        to = out + (as_int64(row_block) * width + c.to(tl.int64))[None, :] * 32 + i[:, None]
        tl.store(to, pack_e4m3(v0, v1, v2, v3), mask=(c < width)[None, :])


def transpose_rows(rows: torch.Tensor | QuantizedRows, factor: torch.Tensor, is_square: bool) -> TransposedRows:
    """Round rows to e4m3 along the rows.

    Args:
        rows: [P, columns], bf16, or e4m3 with k-major scales.
        factor: fp32 [P], what each row is multiplied by; where it is 0 the row is padding and not read.
        is_square: one scale for 128 x 128 instead of for 128 rows of each column.

    Returns:
        The copy. One kernel, no host sync, repeatable bit for bit.
    """
    x, x_scale = (rows, factor) if isinstance(rows, torch.Tensor) else (rows.data, rows.scale)
    assert x_scale is not None and (isinstance(rows, torch.Tensor) or (rows.k_major and rows.groups == 1))
    num_rows, width = x.shape
    row_blocks, blocks = ceil_div(num_rows, BLOCK), ceil_div(width, BLOCK)
    data = torch.empty(row_blocks, width, BLOCK, dtype=FP8, device=x.device)
    scale = torch.empty(row_blocks, blocks if is_square else width, dtype=torch.float32, device=x.device)
    if data.numel():
        _transpose_kernel[(row_blocks * blocks,)](
            x.contiguous(), x_scale.contiguous(), factor, data.view(torch.int32), scale, num_rows, width, blocks,
            isinstance(rows, QuantizedRows), is_square, 1 if isinstance(rows, QuantizedRows) else 2, num_warps=4,
        )  # fmt: skip
    return TransposedRows(data, scale, num_rows, is_square)
