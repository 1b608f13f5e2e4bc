"""m-grouped GEMM: every 128-row block of the pool times its expert's weight, FP8 with fp32 promotion, or bf16.

FP8: one tensor-core sum from zero for each 128-deep block, then acc = fma(partial, fl32(sA * sB), acc), blocks
ascending. Operands come through TMA descriptors where the shapes allow it (whole blocks of 128 channels, 16-byte rows),
else through masked loads; both give the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from megamoe.quantize import QuantizedRows, QuantizedWeight, ceil_div
from megamoe.recipe import BLOCK
from megamoe.routing_plan import RankPlan
from megamoe.triton_kernels.configs import GemmConfig, pick_gemm
from megamoe.triton_kernels.numerics import as_int64, dot, dot_add, multiply_add, to_bf16


@triton.jit
def _tile(pid, m_blocks, n_blocks, GROUP: tl.constexpr):
    """Blocks of a program: GROUP m-blocks side by side, n-blocks outside them."""
    per_group = GROUP * n_blocks
    first = pid // per_group * GROUP
    height = tl.minimum(m_blocks - first, GROUP)
    inside = pid % per_group
    return first + inside % height, inside // height


@triton.jit
def _expert_of(row, offs, experts, EXPERTS: tl.constexpr):
    """The expert whose segment holds `row`; `experts` behind the last segment."""
    e = tl.arange(0, EXPERTS)
    ends = tl.load(offs + 1 + e, mask=e < experts, other=0x7FFFFFFF)
    return tl.sum((ends <= row).to(tl.int32), axis=0)


@triton.jit
def _load_block(
    x, row0, row_end, kb, k, each_k, TMA: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr
):  # fmt: skip
    """[ROWS, DEPTH] of a row-major matrix from row `row0`, k-block kb; zero behind `row_end` and the block's end.

    By TMA, rows behind `row_end` may be another expert's: what is computed from them is not stored.
    """
    if TMA:
        return x.load([row0, kb * DEPTH])
    else:
        per_group = tl.cdiv(each_k, DEPTH)
        begin = kb // per_group * each_k
        c = begin + kb % per_group * DEPTH + tl.arange(0, DEPTH)
        r = row0 + tl.arange(0, ROWS)
        at = r.to(tl.int64)[:, None] * k + c[None, :]
        return tl.load(x + at, mask=(r < row_end)[:, None] & (c < begin + each_k)[None, :], other=0.0)


@triton.jit
def _weight_scale(b_scale, expert, n0, kb, n, each_n, k_blocks, WHOLE: tl.constexpr, COLS: tl.constexpr):
    """Scales of COLS weight rows from n0 in k-block kb: one number where they share it, else [1, COLS]."""
    blocks = tl.cdiv(each_n, 128)
    base = b_scale + as_int64(expert) * (n // each_n * blocks * k_blocks) + kb
    if WHOLE and COLS <= 128:
        return tl.load(base + n0 // 128 * k_blocks)
    else:
        j = n0 + tl.arange(0, COLS)
        return tl.load(base + (j // each_n * blocks + j % each_n // 128) * k_blocks, mask=j < n, other=0.0)[None, :]


@triton.jit
def _store(out, acc, m0, n0, end, rows, n, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Rows before `end`, and zeros in the tile's padding."""
    m, j = m0 + tl.arange(0, ROWS), n0 + tl.arange(0, COLS)
    acc = tl.where((m < end)[:, None], acc, 0.0)
    to = out + m.to(tl.int64)[:, None] * n + j[None, :]
    mask = (m < rows)[:, None] & (j < n)[None, :]
    if out.dtype.element_ty == tl.bfloat16:
        tl.store(to, to_bf16(acc), mask=mask)
    else:
        tl.store(to, acc, mask=mask)


@triton.jit(do_not_specialize=["experts", "each_n", "k_blocks"], do_not_specialize_on_alignment=["offs", "counts"])
def _scaled_gemm_kernel(
    a, a_scale, b, b_scale, out, offs, counts, rows, n, k, experts, each_k, each_n, k_blocks, WHOLE: tl.constexpr,
    EXPERTS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, PAIR: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One tile of out, or with PAIR two side by side, where the second one's product hides the first one's promotion.

    `each_k`, `each_n`: channels with a scale grid of their own (K and N, or half of them).
    """
    WIDTH: tl.constexpr = COLS * (2 if PAIR else 1)
    m_block, n_block = _tile(tl.program_id(0), tl.cdiv(rows, ROWS), tl.cdiv(n, WIDTH), GROUP)
    m0, n0 = m_block * ROWS, n_block * WIDTH
    n1 = n0 + COLS
    expert = _expert_of(m0, offs, experts, EXPERTS)
    end = m0
    if expert < experts:
        end = tl.load(offs + expert) + tl.load(counts + expert)
    acc0 = tl.zeros((ROWS, COLS), tl.float32)
    acc1 = tl.zeros((ROWS, COLS), tl.float32)
    if end > m0:
        first = as_int64(expert) * n if not WHOLE else expert * n
        m = m0 + tl.arange(0, ROWS)
        sa = tl.load(a_scale + m, mask=m < rows, other=0.0)
        s0 = _weight_scale(b_scale, expert, n0, 0, n, each_n, k_blocks, WHOLE, COLS)
        if PAIR:
            s1 = _weight_scale(b_scale, expert, tl.minimum(n1, n - 1), 0, n, each_n, k_blocks, WHOLE, COLS)
        for kb in range(0, k_blocks):
            ta = _load_block(a, m0, rows, kb, k, each_k, WHOLE, ROWS, 128)
            t0 = _load_block(b, first + n0, first + n, kb, k, each_k, WHOLE, COLS, 128)
            scale0 = sa[:, None] * s0
            # Scales of the next block are loaded before this block's product, so that their latency is hidden.
            following = tl.minimum(kb + 1, k_blocks - 1)
            if PAIR:
                t1 = _load_block(b, first + n1, first + n, kb, k, each_k, WHOLE, COLS, 128)
                scale1 = sa[:, None] * s1
                s1 = _weight_scale(
                    b_scale, expert, tl.minimum(n1, n - 1), following, n, each_n, k_blocks, WHOLE, COLS
                )  # fmt: skip
            sa = tl.load(a_scale + as_int64(following) * rows + m, mask=m < rows, other=0.0)
            s0 = _weight_scale(b_scale, expert, n0, following, n, each_n, k_blocks, WHOLE, COLS)
            p0 = dot(ta, t0.T)
            if PAIR:
                p1 = dot(ta, t1.T)
            acc0 = multiply_add(p0, scale0, acc0)
            if PAIR:
                acc1 = multiply_add(p1, scale1, acc1)
    _store(out, acc0, m0, n0, end, rows, n, ROWS, COLS)
    if PAIR:
        _store(out, acc1, m0, n1, end, rows, n, ROWS, COLS)


@triton.jit(do_not_specialize=["experts"], do_not_specialize_on_alignment=["offs", "counts"])
def _plain_gemm_kernel(
    a, b, out, offs, counts, rows, n, k, experts, TMA: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One tile of out, bf16 operands."""
    m_block, n_block = _tile(tl.program_id(0), tl.cdiv(rows, ROWS), tl.cdiv(n, COLS), GROUP)
    m0, n0 = m_block * ROWS, n_block * COLS
    expert = _expert_of(m0, offs, experts, EXPERTS)
    acc = tl.zeros((ROWS, COLS), tl.float32)
    end = m0
    if expert < experts:
        end = tl.load(offs + expert) + tl.load(counts + expert)
    if end > m0:
        first = as_int64(expert) * n if not TMA else expert * n
        for kb in range(0, tl.cdiv(k, DEPTH)):
            ta = _load_block(a, m0, rows, kb, k, k, TMA, ROWS, DEPTH)
            tb = _load_block(b, first + n0, first + n, kb, k, k, TMA, COLS, DEPTH)
            acc = dot_add(ta, tb.T, acc)
    _store(out, acc, m0, n0, end, rows, n, ROWS, COLS)


def is_whole(rows: QuantizedRows, weight: QuantizedWeight) -> bool:
    """Whether TMA tiles hold what a k-block holds: rows start on 16 bytes, and no block of scales is partial."""
    n, k = weight.data.shape[1:]
    partial = rows.scale is not None and bool(k // rows.groups % BLOCK or n // weight.row_groups % BLOCK)
    bases = rows.data.data_ptr() % 16 == 0 and weight.data.data_ptr() % 16 == 0
    return not partial and bases and k * rows.data.element_size() % 16 == 0


def grouped_gemm(
    rows: QuantizedRows,
    weight: QuantizedWeight,
    plan: RankPlan,
    out_dtype: torch.dtype = torch.bfloat16,
    config: GemmConfig | None = None,
) -> torch.Tensor:
    """As `torch_steps.grouped_gemm`: out[r] = weight[e(r)] @ rows[r], padding rows zero. One kernel, no host sync.

    Args:
        rows: [P, K], scales k-major; padding may hold anything.
        weight: [E, N, K]. plan: segments, aligned to 128 rows. out_dtype: bf16 or fp32.
        config: a tile other than the chosen one; results don't depend on it.

    Returns:
        [P, N]. Repeatable bit for bit.
    """
    (num_rows, k), (experts, n, _) = rows.data.shape, weight.data.shape
    out = torch.empty(num_rows, n, dtype=out_dtype, device=rows.data.device)
    if not out.numel():
        return out
    scaled = rows.scale is not None and weight.scale is not None
    config = config or pick_gemm(k, scaled)
    whole = is_whole(rows, weight)
    a, b = rows.data.contiguous(), weight.data.contiguous()
    a_tiles, b_tiles = a, b
    if whole:
        a_tiles = TensorDescriptor.from_tensor(a, [config.rows, config.depth])
        b_tiles = TensorDescriptor.from_tensor(b.view(experts * n, k), [config.cols, config.depth])
    grid = (ceil_div(num_rows, config.rows) * ceil_div(n, config.cols * (2 if config.pair else 1)),)
    launch = {"num_warps": config.warps, "num_stages": config.stages, "maxnreg": config.registers}
    if rows.scale is None or weight.scale is None:
        _plain_gemm_kernel[grid](
            a_tiles, b_tiles, out, plan.offs, plan.counts, num_rows, n, k, experts, whole,
            triton.next_power_of_2(experts), config.rows, config.cols, config.depth, config.group, **launch,
        )  # fmt: skip
        return out
    each_k, each_n = k // rows.groups, n // weight.row_groups
    k_blocks = rows.groups * ceil_div(each_k, BLOCK)
    assert config.depth == BLOCK and config.cols <= BLOCK, config
    _scaled_gemm_kernel[grid](
        a_tiles, rows.scale.contiguous(), b_tiles, weight.scale.contiguous(), out, plan.offs, plan.counts, num_rows,
        n, k, experts, each_k, each_n, k_blocks, whole, triton.next_power_of_2(experts), config.rows, config.cols,
        config.pair, config.group, **launch,
    )  # fmt: skip
    return out
