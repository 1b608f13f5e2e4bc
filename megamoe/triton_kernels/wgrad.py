"""k-grouped GEMM: each expert's weight gradient, one program an output tile over all of its rows in order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from megamoe import torch_steps
from megamoe.quantize import QuantizedRows, ceil_div
from megamoe.recipe import Recipe
from megamoe.routing_plan import RankPlan
from megamoe.triton_kernels.configs import WgradConfig, pick_wgrad
from megamoe.triton_kernels.numerics import dot_add, to_bf16
from megamoe.triton_kernels.quantize import dequantize


@triton.jit
def _load_rows(x, row, end, col, width, DEPTH: tl.constexpr, COLS: tl.constexpr):
    """[DEPTH, COLS] of a row-major pool; rows from `end` on and columns from `width` on are zero."""
    r, c = row + tl.arange(0, DEPTH), col + tl.arange(0, COLS)
    at = r.to(tl.int64)[:, None] * width + c[None, :]
    return tl.load(x + at, mask=(r < end)[:, None] & (c < width)[None, :], other=0.0)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["offs", "counts"])
def _wgrad_kernel(
    a, a_tiles, b, b_tiles, out, offs, counts, rows, m, n, ACCUMULATE: tl.constexpr, OUT_BF16: tl.constexpr,
    TMA: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Whole steps of DEPTH rows come in unmasked; the last, partial one is masked, as padding may hold anything."""
    m_blocks, n_blocks = tl.cdiv(m, ROWS), tl.cdiv(n, COLS)
    pid = tl.program_id(0)
    expert = pid // (m_blocks * n_blocks)
    tile = pid % (m_blocks * n_blocks)
    first = tile // (GROUP * n_blocks) * GROUP
    height = tl.minimum(m_blocks - first, GROUP)
    inside = tile % (GROUP * n_blocks)
    m0, n0 = (first + inside % height) * ROWS, inside // height * COLS
    # Of a plan with more rows than the pool, `offs` points behind the pool's end.
    begin = tl.minimum(tl.load(offs + expert), rows)
    num_rows = tl.minimum(tl.load(counts + expert), rows - begin)
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
        r, c = m0 + tl.arange(0, ROWS), n0 + tl.arange(0, COLS)
        mask = (r < m)[:, None] & (c < n)[None, :]
        to = out + (expert.to(tl.int64) * m + r[:, None]) * n + c[None, :]
        if ACCUMULATE:
            acc += tl.load(to, mask=mask, other=0.0).to(tl.float32)
        if OUT_BF16:
            tl.store(to, to_bf16(acc), mask=mask)
        else:
            tl.store(to, acc, mask=mask)


def wgrad_operands(
    left: torch.Tensor | QuantizedRows, right: torch.Tensor | QuantizedRows, plan: RankPlan, recipe: Recipe
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `torch_steps.wgrad_operands`: what travelled as bf16, one kernel; "fp8" operands by torch's operations."""
    if recipe.wgrad_operands == "fp8":
        return torch_steps.wgrad_operands(left, right, plan, recipe)
    a, b = (v if isinstance(v, torch.Tensor) else dequantize(v) for v in (left, right))
    return a, b


def wgrad(
    a: torch.Tensor,
    b: torch.Tensor,
    plan: RankPlan,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
    config: WgradConfig | None = None,
) -> torch.Tensor:
    """As `torch_steps.wgrad`: out[e] = sum over its rows, ascending, of a[r] (outer) b[r]. One kernel, no host sync.

    Args:
        a: [P, M] bf16. b: [P, N] bf16. plan: segments; padding is not read.
        out: [E, M, N] contiguous, fp32 or bf16; None: a new fp32 tensor. accumulate: add to it.
        config: a tile other than the chosen one; results don't depend on it.

    Returns:
        out. Repeatable bit for bit: every element has one writer.
    """
    experts, m, n = plan.counts.shape[0], a.shape[1], b.shape[1]
    if out is None:
        out = torch.empty(experts, m, n, dtype=torch.float32, device=a.device)
        accumulate = False
    assert out.is_contiguous(), "wgrad writes a contiguous [E, M, N]"
    if not out.numel():
        return out
    config = config or pick_wgrad()
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
    return out
