"""k-grouped GEMM: each expert's weight gradient, one program an output tile over all of its rows in order.

Operands are bf16 pools as they are, or transposed e4m3 copies: then one tensor-core sum from zero for each block of 128
rows, and acc = fma(partial, fl32(sA * sB), acc), blocks ascending.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from megamoe.quantize import QuantizedRows, ceil_div
from megamoe.recipe import BLOCK, Recipe
from megamoe.routing_plan import RankPlan
from megamoe.triton_kernels.configs import GemmConfig, WgradConfig, pick_fp8_wgrad, pick_wgrad
from megamoe.triton_kernels.numerics import dot, dot_add, multiply_add, to_bf16
from megamoe.triton_kernels.quantize import dequantize
from megamoe.triton_kernels.transposed import TransposedRows, row_factors, transpose_rows


@triton.jit
def _load_rows(x, row, end, col, width, DEPTH: tl.constexpr, COLS: tl.constexpr):
    """[DEPTH, COLS] of a row-major pool; rows from `end` on and columns from `width` on are zero."""
    r, c = row + tl.arange(0, DEPTH), col + tl.arange(0, COLS)
    at = r.to(tl.int64)[:, None] * width + c[None, :]
    return tl.load(x + at, mask=(r < end)[:, None] & (c < width)[None, :], other=0.0)


@triton.jit
def _task(pid, m, n, ROWS: tl.constexpr, COLS: tl.constexpr, GROUP: tl.constexpr):
    """(expert, first row, first column) of a program: expert by expert, GROUP m-blocks side by side."""
    m_blocks, n_blocks = tl.cdiv(m, ROWS), tl.cdiv(n, COLS)
    tile = pid % (m_blocks * n_blocks)
    first = tile // (GROUP * n_blocks) * GROUP
    height = tl.minimum(m_blocks - first, GROUP)
    inside = tile % (GROUP * n_blocks)
    return pid // (m_blocks * n_blocks), (first + inside % height) * ROWS, inside // height * COLS


@triton.jit
def _segment(offs, counts, expert, rows):
    """First row of an expert and how many it has; of a plan with more rows than the pool, `offs` points behind it."""
    begin = tl.minimum(tl.load(offs + expert), rows)
    return begin, tl.minimum(tl.load(counts + expert), rows - begin)


@triton.jit
def _store(
    out, acc, expert, m0, n0, m, n, ACCUMULATE: tl.constexpr, OUT_BF16: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr,
):  # fmt: skip
    """One tile of an expert's gradient, or the sum of it and what is there."""
    r, c = m0 + tl.arange(0, ROWS), n0 + tl.arange(0, COLS)
    mask = (r < m)[:, None] & (c < n)[None, :]
    to = out + (expert.to(tl.int64) * m + r[:, None]) * n + c[None, :]
    if ACCUMULATE:
        acc += tl.load(to, mask=mask, other=0.0).to(tl.float32)
    if OUT_BF16:
        tl.store(to, to_bf16(acc), mask=mask)
    else:
        tl.store(to, acc, mask=mask)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["offs", "counts"])
def _wgrad_kernel(
    a, a_tiles, b, b_tiles, out, offs, counts, rows, m, n, ACCUMULATE: tl.constexpr, OUT_BF16: tl.constexpr,
    TMA: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Whole steps of DEPTH rows come in unmasked; the last, partial one is masked, as padding may hold anything."""
    expert, m0, n0 = _task(tl.program_id(0), m, n, ROWS, COLS, GROUP)
    begin, num_rows = _segment(offs, counts, expert, rows)
    if num_rows > 0 or not ACCUMULATE:
        end = begin + num_rows
        whole = begin + num_rows // DEPTH * DEPTH
        acc = tl.zeros((ROWS, COLS), tl.float32)
        for row in range(begin, whole, DEPTH):
            if TMA:
                ta, tb = a_tiles.load([row, m0]), b_tiles.load([row, n0])
            else:
                ta = _load_rows(a, row, end, m0, m, DEPTH, ROWS)
                tb = _load_rows(b, row, end, n0, n, DEPTH, COLS)
            acc = dot_add(ta.T, tb, acc)
        if whole < end:
            ta = _load_rows(a, whole, end, m0, m, DEPTH, ROWS)
            tb = _load_rows(b, whole, end, n0, n, DEPTH, COLS)
            acc = dot_add(ta.T, tb, acc)
        _store(out, acc, expert, m0, n0, m, n, ACCUMULATE, OUT_BF16, ROWS, COLS)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["offs", "counts"])
def _scaled_wgrad_kernel(
    a_tiles, a_scale, b_tiles, b_scale, out, offs, counts, rows, m, n, ACCUMULATE: tl.constexpr,
    OUT_BF16: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, PAIR: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Operands [P / 128 * columns, 128], fewer than 2^31 rows: a descriptor's coordinate, and the index of a scale. A
    tile that reaches over the last column reads what nobody stores.

    With PAIR two tiles side by side, where the second one's product hides the first one's promotion.
    """
    WIDTH: tl.constexpr = COLS * (2 if PAIR else 1)
    expert, m0, n0 = _task(tl.program_id(0), m, n, ROWS, WIDTH, GROUP)
    begin, num_rows = _segment(offs, counts, expert, rows)
    if num_rows > 0 or not ACCUMULATE:
        acc0 = tl.zeros((ROWS, COLS), tl.float32)
        acc1 = tl.zeros((ROWS, COLS), tl.float32)
        first, last = begin // 128, (begin + num_rows + 127) // 128
        r, n_blocks = m0 + tl.arange(0, ROWS), tl.cdiv(n, 128)
        j0, j1 = n0 // 128, tl.minimum((n0 + COLS) // 128, n_blocks - 1)
        # Scales of the next block are loaded before this block's product; those behind the last one are dropped.
        top = tl.minimum(tl.maximum(last - 1, first), (rows - 1) // 128)
        start = tl.minimum(first, top)
        sa = tl.load(a_scale + (start * m + r), mask=r < m, other=0.0)
        s0 = tl.load(b_scale + (start * n_blocks + j0))
        s1 = tl.load(b_scale + (start * n_blocks + j1))
        for block in range(first, last):
            ta = a_tiles.load([block * m + m0, 0])
            t0 = b_tiles.load([block * n + n0, 0])
            scale0 = sa[:, None] * s0
            following = tl.minimum(block + 1, top)
            if PAIR:
                t1 = b_tiles.load([block * n + n0 + COLS, 0])
                scale1 = sa[:, None] * s1
                s1 = tl.load(b_scale + (following * n_blocks + j1))
            sa = tl.load(a_scale + (following * m + r), mask=r < m, other=0.0)
            s0 = tl.load(b_scale + (following * n_blocks + j0))
            p0 = dot(ta, t0.T)
            if PAIR:
                p1 = dot(ta, t1.T)
            acc0 = multiply_add(p0, scale0, acc0)
            if PAIR:
                acc1 = multiply_add(p1, scale1, acc1)
        _store(out, acc0, expert, m0, n0, m, n, ACCUMULATE, OUT_BF16, ROWS, COLS)
        if PAIR:
            _store(out, acc1, expert, m0, n0 + COLS, m, n, ACCUMULATE, OUT_BF16, ROWS, COLS)


Operand: TypeAlias = torch.Tensor | TransposedRows
"""Of `wgrad`: a bf16 pool, or a transposed copy."""


def wgrad_operands(
    left: torch.Tensor | QuantizedRows, right: torch.Tensor | QuantizedRows, plan: RankPlan, recipe: Recipe
) -> tuple[Operand, Operand]:
    """As `torch_steps.wgrad_operands`, but FP8 operands stay FP8.

    "bf16": what travelled as bf16, one kernel. "fp8": transposed copies whose values, once in bf16, are those of torch
    bit for bit; three kernels. No host sync.
    """
    travelled = left if isinstance(left, QuantizedRows) else right
    assert isinstance(travelled, QuantizedRows)
    if recipe.wgrad_operands == "bf16" or travelled.scale is None:
        a, b = (v if isinstance(v, torch.Tensor) else dequantize(v) for v in (left, right))
        return a, b
    of_partner, of_travelled = row_factors(travelled, plan)
    a_factor, b_factor = (of_travelled if v is travelled else of_partner for v in (left, right))
    return transpose_rows(left, a_factor, False), transpose_rows(right, b_factor, True)


def wgrad(
    a: Operand,
    b: Operand,
    plan: RankPlan,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
    config: WgradConfig | GemmConfig | None = None,
) -> torch.Tensor:
    """As `torch_steps.wgrad`: out[e] = sum over its rows, ascending, of a[r] (outer) b[r]. One kernel, no host sync.

    Args:
        a: [P, M] bf16, or its transposed copy with one scale a column. b: [P, N] bf16, or its transposed copy with
            square scales.
        plan: segments, aligned to 128 rows; padding of bf16 pools is not read.
        out: [E, M, N] contiguous, fp32 or bf16; None: a new fp32 tensor. accumulate: add to it.
        config: a tile other than the chosen one; results don't depend on it.

    Returns:
        out. Repeatable bit for bit: every element has one writer.
    """
    experts, m, n = plan.counts.shape[0], _columns(a), _columns(b)
    if out is None:
        device = a.device if isinstance(a, torch.Tensor) else a.data.device
        out = torch.empty(experts, m, n, dtype=torch.float32, device=device)
        accumulate = False
    assert out.is_contiguous(), "wgrad writes a contiguous [E, M, N]"
    if not out.numel():
        return out
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        assert config is None or isinstance(config, WgradConfig)
        _wgrad_bf16(a, b, plan, out, accumulate, config or pick_wgrad())
    else:
        assert isinstance(a, TransposedRows) and isinstance(b, TransposedRows)
        assert config is None or isinstance(config, GemmConfig)
        _wgrad_fp8(a, b, plan, out, accumulate, config or pick_fp8_wgrad())
    return out


def _columns(operand: Operand) -> int:
    return operand.shape[1] if isinstance(operand, torch.Tensor) else operand.data.shape[1]


def _wgrad_bf16(
    a: torch.Tensor, b: torch.Tensor, plan: RankPlan, out: torch.Tensor, accumulate: bool, config: WgradConfig
) -> None:
    experts, m, n = out.shape
    a, b = a.contiguous(), b.contiguous()
    tma = a.shape[0] > 0 and all(x.shape[1] % 8 == 0 and x.data_ptr() % 16 == 0 for x in (a, b))
    a_tiles = TensorDescriptor.from_tensor(a, [config.depth, config.rows]) if tma else a
    b_tiles = TensorDescriptor.from_tensor(b, [config.depth, config.cols]) if tma else b
    grid = (experts * ceil_div(m, config.rows) * ceil_div(n, config.cols),)
    _wgrad_kernel[grid](
        a, a_tiles, b, b_tiles, out, plan.offs, plan.counts, a.shape[0], m, n, accumulate,
        out.dtype == torch.bfloat16, tma, config.rows, config.cols, config.depth, config.group,
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip


def _wgrad_fp8(
    a: TransposedRows, b: TransposedRows, plan: RankPlan, out: torch.Tensor, accumulate: bool, config: GemmConfig
) -> None:
    assert b.is_square and not a.is_square and config.depth == BLOCK and config.cols <= BLOCK, config
    experts, m, n = out.shape
    if not a.data.numel() or not b.data.numel():  # no rows, so no descriptor
        if not accumulate:
            out.zero_()
        return
    a_tiles = TensorDescriptor.from_tensor(a.data.view(-1, BLOCK), [config.rows, BLOCK])
    b_tiles = TensorDescriptor.from_tensor(b.data.view(-1, BLOCK), [config.cols, BLOCK])
    grid = (experts * ceil_div(m, config.rows) * ceil_div(n, config.cols * (2 if config.pair else 1)),)
    _scaled_wgrad_kernel[grid](
        a_tiles, a.scale, b_tiles, b.scale, out, plan.offs, plan.counts, a.num_rows, m, n, accumulate,
        out.dtype == torch.bfloat16, config.rows, config.cols, config.pair, config.group, num_warps=config.warps,
        num_stages=config.stages, maxnreg=config.registers,
    )  # fmt: skip
