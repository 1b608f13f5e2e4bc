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

DEPTH = 128


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
def _load_tiles(
    a, b, m0, n0, expert, kb, rows, n, k, each_k, WHOLE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """A [ROWS, 128] and B [COLS, 128] of k-block kb; elements outside the block, N or the pool are zero."""
    if WHOLE:
        return a.load([m0, kb * 128]), b.load([expert * n + n0, kb * 128])
    else:
        per_group = tl.cdiv(each_k, 128)
        begin = kb // per_group * each_k
        c = begin + kb % per_group * 128 + tl.arange(0, 128)
        m, j = m0 + tl.arange(0, ROWS), n0 + tl.arange(0, COLS)
        inside = (c < begin + each_k)[None, :]
        at_a = m.to(tl.int64)[:, None] * k + c[None, :]
        at_b = (as_int64(expert) * n + j[:, None]) * k + c[None, :]
        return (
            tl.load(a + at_a, mask=(m < rows)[:, None] & inside, other=0.0),
            tl.load(b + at_b, mask=(j < n)[:, None] & inside, other=0.0),
        )


@triton.jit
def _grouped_gemm_kernel(
    a, a_scale, b, b_scale, out, offs, counts, rows, n, k, experts, each_k, each_n, k_blocks,
    SCALED: tl.constexpr, WHOLE: tl.constexpr, OUT_BF16: tl.constexpr, EXPERTS: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One tile of out. `each_k`, `each_n`: channels with a scale grid of their own (K, N or half of them)."""
    m_block, n_block = _tile(tl.program_id(0), tl.cdiv(rows, ROWS), tl.cdiv(n, COLS), GROUP)
    m0, n0 = m_block * ROWS, n_block * COLS
    expert = _expert_of(m0, offs, experts, EXPERTS)
    m, j = m0 + tl.arange(0, ROWS), n0 + tl.arange(0, COLS)
    acc = tl.zeros((ROWS, COLS), tl.float32)
    end = m0
    if expert < experts:
        end = tl.load(offs + expert) + tl.load(counts + expert)
    if end > m0:
        if SCALED:
            # Scales of the next block are loaded before this block's product, so that their latency is hidden.
            col_blocks = n // each_n * tl.cdiv(each_n, 128)
            at_a = a_scale + m
            if WHOLE and COLS <= 128:
                at_b = b_scale + (as_int64(expert) * col_blocks + n0 // 128) * k_blocks
                sb = tl.load(at_b)
            else:
                block = j // each_n * tl.cdiv(each_n, 128) + j % each_n // 128
                at_b = b_scale + (as_int64(expert) * col_blocks + block) * k_blocks
                sb = tl.load(at_b, mask=j < n, other=0.0)[None, :]
            sa = tl.load(at_a, mask=m < rows, other=0.0)
            for kb in range(0, k_blocks):
                ta, tb = _load_tiles(a, b, m0, n0, expert, kb, rows, n, k, each_k, WHOLE, ROWS, COLS)
                scale = sa[:, None] * sb
                following = tl.minimum(kb + 1, k_blocks - 1)
                sa = tl.load(at_a + as_int64(following) * rows, mask=m < rows, other=0.0)
                if WHOLE and COLS <= 128:
                    sb = tl.load(at_b + following)
                else:
                    sb = tl.load(at_b + following, mask=j < n, other=0.0)[None, :]
                acc = multiply_add(dot(ta, tb.T), scale, acc)
        else:
            for kb in range(0, k_blocks):
                ta, tb = _load_tiles(a, b, m0, n0, expert, kb, rows, n, k, each_k, WHOLE, ROWS, COLS)
                acc = dot_add(ta, tb.T, acc)
    acc = tl.where((m < end)[:, None], acc, 0.0)
    to = out + m.to(tl.int64)[:, None] * n + j[None, :]
    mask = (m < rows)[:, None] & (j < n)[None, :]
    if OUT_BF16:
        tl.store(to, to_bf16(acc), mask=mask)
    else:
        tl.store(to, acc, mask=mask)


def is_whole(rows: QuantizedRows, weight: QuantizedWeight) -> bool:
    """Whether no scale block is partial and every row starts on 16 bytes: plain TMA tiles then hold one block each."""
    n, k = weight.data.shape[1:]
    scaled = rows.scale is not None
    blocks = k // rows.groups % BLOCK == 0 and n // weight.row_groups % BLOCK == 0
    aligned = k * rows.data.element_size() % 16 == 0
    bases = rows.data.data_ptr() % 16 == 0 and weight.data.data_ptr() % 16 == 0
    return (blocks or not scaled) and aligned and bases and bool(rows.data.shape[0])


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
    config = config or pick_gemm(num_rows, scaled)
    whole = is_whole(rows, weight)
    a, b = rows.data.contiguous(), weight.data.contiguous()
    if whole:
        a_arg = TensorDescriptor.from_tensor(a, [config.rows, DEPTH])
        b_arg = TensorDescriptor.from_tensor(b.view(experts * n, k), [config.cols, DEPTH])
    else:
        a_arg, b_arg = a, b
    a_scale = rows.scale.contiguous() if rows.scale is not None else plan.offs
    b_scale = weight.scale.contiguous() if weight.scale is not None else plan.offs
    each_k = k // rows.groups if scaled else k
    each_n = n // weight.row_groups if scaled else n
    grid = (ceil_div(num_rows, config.rows) * ceil_div(n, config.cols),)
    _grouped_gemm_kernel[grid](
        a_arg, a_scale, b_arg, b_scale, out, plan.offs, plan.counts, num_rows, n, k, experts, each_k, each_n,
        k // each_k * ceil_div(each_k, BLOCK), scaled, whole, out_dtype == torch.bfloat16,
        triton.next_power_of_2(experts), config.rows, config.cols, config.group,
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    return out
