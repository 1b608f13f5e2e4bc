"""The steps of the layer in plain torch: the exact emulation of the recipe, and the contract every step keeps.

`megamoe.triton_kernels` offers the same names with the same signatures. Sums that the recipe rounds once are formed in
fp64, where they are exact for e4m3 operands, so a row's result never depends on the rows beside it.

Letters: P rows of a pool, N and K the output and contraction dimension of a GEMM, E local experts, I the intermediate
size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from megamoe.quantize import (
    QuantizedRows,
    QuantizedWeight,
    abs_max,
    block_ranges,
    quantize_rows,
    quantize_weight,
    scale_of,
    to_e4m3,
)
from megamoe.recipe import BLOCK, Recipe
from megamoe.routing_plan import RankPlan, RoutingPlan, make_plan

__all__ = [
    "SwigluGrads",
    "combine",
    "combine_weight_grads",
    "dequantize",
    "dispatch",
    "dispatch_weights",
    "grouped_gemm",
    "make_plan",
    "quantize_rows",
    "quantize_weight",
    "quantize_weight_with_transpose",
    "swiglu",
    "swiglu_backward",
    "wgrad",
    "wgrad_operands",
]

LOG2_E = 1.4426950408889634


def segments(plan: RankPlan) -> list[tuple[int, int, int]]:
    """(expert, first row, end of its real rows) of every local expert that has rows. Synchronises with the device."""
    offs, counts = plan.offs.tolist(), plan.counts.tolist()
    return [(e, offs[e], offs[e] + n) for e, n in enumerate(counts) if n]


# ---------------------------------------------------------------- quantisation


def quantize_weight_with_transpose(
    w: torch.Tensor, recipe: Recipe, row_groups: int = 1
) -> tuple[QuantizedWeight, QuantizedWeight]:
    """`quantize_weight` and the transposed copy that dgrad reads: [E, N, K] and [E, K, N], same values, same scales."""
    quantized = quantize_weight(w, recipe, row_groups)
    return quantized, quantized.transposed()


def dequantize(rows: QuantizedRows) -> torch.Tensor:
    """The rows that travelled as bf16 [P, channels]: data * scale in fp32, then one rounding. An operand of wgrad."""
    return rows.dequantize(torch.bfloat16)


# ---------------------------------------------------------------- dispatch and combine


def dispatch(sources: Sequence[QuantizedRows], plan: RankPlan) -> QuantizedRows:
    """Bring the rows that a rank's experts need into its pool.

    Args:
        sources: of each rank its quantised tokens, [T_r, H] with row-major scales.
        plan: what the rank receives.

    Returns:
        The pool [P, H] with k-major scales [ceil(H / 128), P]; padding rows and their scales are zero.
    """
    first = sources[0]
    rows, width = plan.num_rows, first.data.shape[1]
    data = torch.zeros(rows, width, dtype=first.data.dtype, device=first.data.device)
    scale = None
    if first.scale is not None:
        scale = torch.zeros(first.scale.shape[1], rows, dtype=torch.float32, device=first.data.device)
    for r, source in enumerate(sources):
        mine = (plan.source_rank == r).nonzero().flatten()
        token = plan.token[mine].long()
        _bytes(data)[mine] = _bytes(source.data)[token]
        if scale is not None and source.scale is not None:
            scale[:, mine] = source.scale[token].t()
    return QuantizedRows(data, scale, k_major=True)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """fp8 as bytes, which every indexing operation supports."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


def dispatch_weights(topk_weights: Sequence[torch.Tensor], plan: RankPlan) -> torch.Tensor:
    """Bring the routing weight of each row to its owner: of each rank fp32 [T_r, K] -> fp32 [P], 0 in padding."""
    weight = torch.zeros(plan.num_rows, dtype=torch.float32, device=topk_weights[0].device)
    for r, w in enumerate(topk_weights):
        mine = (plan.source_rank == r).nonzero().flatten()
        weight[mine] = w[plan.token[mine].long(), plan.slot[mine].long()]
    return weight


def combine(pools: Sequence[torch.Tensor], plan: RoutingPlan, rank: int) -> torch.Tensor:
    """Sum each token's rows at its source: in fp32, over slots ascending, one rounding at the end.

    Args:
        pools: of each rank y [P_r, H], bf16 (padding is not read).
        plan: of the call.
        rank: whose tokens are summed.

    Returns:
        out [T, H] bf16.
    """
    owner, row = plan.owner[rank], plan.row[rank].long()
    total = torch.zeros(owner.shape[0], pools[0].shape[1], dtype=torch.float32, device=pools[0].device)
    for j in range(owner.shape[1]):
        for r, pool in enumerate(pools):
            mine = (owner[:, j] == r).nonzero().flatten()
            total[mine] += pool[row[mine, j]].float()
    return total.to(torch.bfloat16)


def combine_weight_grads(pools: Sequence[torch.Tensor], plan: RoutingPlan, rank: int) -> torch.Tensor:
    """Bring dp home: of each rank fp32 [P_r] -> fp32 [T, K], exactly 0 where a slot has no expert."""
    owner, row = plan.owner[rank], plan.row[rank].long()
    grad = torch.zeros(owner.shape, dtype=torch.float32, device=pools[0].device)
    for r, pool in enumerate(pools):
        mine = owner == r
        grad[mine] = pool[row[mine]]
    return grad


# ---------------------------------------------------------------- GEMMs


def grouped_gemm(
    rows: QuantizedRows, weight: QuantizedWeight, plan: RankPlan, out_dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """m-grouped GEMM: out[r] = weight[e(r)] @ rows[r], with e(r) the expert whose segment holds row r.

    k-blocks of 128 ascending, acc = fma(partial, fl32(sA * sB), acc) in fp32; without scales a plain fp32 sum.

    Args:
        rows: [P, K], scales k-major.
        weight: [E, N, K].
        plan: segments of the pool.
        out_dtype: bf16 or fp32.

    Returns:
        [P, N]; padding rows are zero.
    """
    out = torch.zeros(plan.num_rows, weight.data.shape[1], dtype=out_dtype, device=rows.data.device)
    row_scale, scale = rows.scale_row_major(), weight.expanded_scale()
    for e, begin, end in segments(plan):
        a, b = rows.data[begin:end].double(), weight.data[e].double()
        if row_scale is None or scale is None:
            out[begin:end] = (a @ b.t()).float().to(out_dtype)
            continue
        acc = torch.zeros(end - begin, b.shape[0], dtype=torch.float32, device=a.device)
        for block, (k, k_end) in enumerate(block_ranges(a.shape[1], rows.groups)):
            partial = (a[:, k:k_end] @ b[:, k:k_end].t()).float()
            s = row_scale[begin:end, block, None] * scale[e, :, k]
            acc = (partial.double() * s.double() + acc.double()).float()  # a fused multiply-add
        out[begin:end] = acc.to(out_dtype)
    return out


def wgrad(
    a: torch.Tensor, b: torch.Tensor, plan: RankPlan, out: torch.Tensor | None = None, accumulate: bool = False
) -> torch.Tensor:
    """k-grouped GEMM: out[e] = sum over the rows r of e, ascending, of a[r] (outer) b[r], accumulated in fp32.

    Args:
        a: [P, M] bf16. b: [P, N] bf16. Padding rows are not read.
        plan: segments of the pool.
        out: [E, M, N], fp32 or bf16; None: a new fp32 tensor.
        accumulate: add to `out` (one rounding), leaving experts without rows alone; else overwrite, with zeros there.

    Returns:
        out.
    """
    if out is None:
        out = torch.empty(plan.counts.shape[0], a.shape[1], b.shape[1], dtype=torch.float32, device=a.device)
        accumulate = False
    if not accumulate:
        out.zero_()
    for e, begin, end in segments(plan):
        total = (a[begin:end].double().t() @ b[begin:end].double()).float()
        out[e] = (out[e].float() + total if accumulate else total).to(out.dtype)
    return out


def wgrad_operands(
    left: torch.Tensor | QuantizedRows, right: torch.Tensor | QuantizedRows, plan: RankPlan, recipe: Recipe
) -> tuple[torch.Tensor, torch.Tensor]:
    """The bf16 operands of `wgrad`, by `Recipe.wgrad_operands`.

    "bf16" dequantises what travelled. "fp8" rounds both to e4m3 once more, along the rows, with one fp32 scale for each
    column of 128 rows on the left and for each 128 x 128 block on the right. 128 rows share a scale there, so rows are
    balanced first: what travelled is divided by a power of two in proportion to the row's largest scale, its
    partner multiplied by it. Values are returned as the product sees them, with one rounding to bf16.

    Args:
        left: [P, M], bf16, or rows as they travelled. right: [P, N], the same; exactly one of them travelled.
        plan: segments of the pool, aligned to 128 rows.
        recipe: wgrad_operands.

    Returns:
        left and right in bf16; with "fp8" padding rows are zero.
    """
    travelled = left if isinstance(left, QuantizedRows) else right
    assert isinstance(travelled, QuantizedRows)
    scale = travelled.scale_row_major()
    if recipe.wgrad_operands == "bf16" or scale is None:
        a, b = (v if isinstance(v, torch.Tensor) else dequantize(v) for v in (left, right))
        return a, b
    factor = scale_of(scale.amax(1), "pow2")
    factor = torch.where(factor > 2.0**100, 1.0, factor)
    up, down = torch.where(plan.token >= 0, factor, 0.0), torch.where(plan.token >= 0, 1.0 / factor, 0.0)
    of_left, of_right = (down, up) if travelled is left else (up, down)
    return _requantize_along_rows(left, of_left, (1,)), _requantize_along_rows(right, of_right, (1, 3))


def _requantize_along_rows(
    x: torch.Tensor | QuantizedRows, factor: torch.Tensor, shared: tuple[int, ...]
) -> torch.Tensor:
    """bf16 of e4m3(x * factor), scales shared over `shared` of [P / 128, 128, columns / 128, 128]; factor 0: zeros."""
    given = QuantizedRows(x, None) if isinstance(x, torch.Tensor) else x
    scale = given.scale_row_major()
    rows, columns = given.data.shape
    out = torch.empty(rows, columns, dtype=torch.bfloat16, device=given.data.device)
    for begin in range(0, rows, 64 * BLOCK):  # a bounded part at a time: fp32 copies of a whole pool are large
        part = slice(begin, min(begin + 64 * BLOCK, rows))
        kept = factor[part, None] > 0
        some = QuantizedRows(given.data[part], None if scale is None else scale[part], groups=given.groups)
        v = some.dequantize()
        v = torch.where(kept, v * factor[part, None], 0.0)
        v = torch.nn.functional.pad(v, (0, -columns % BLOCK, 0, -v.shape[0] % BLOCK))
        v = v.view(v.shape[0] // BLOCK, BLOCK, v.shape[1] // BLOCK, BLOCK)
        along = scale_of(abs_max(v, shared), "fp32")
        values = (to_e4m3(v, along).float() * along).reshape(v.shape[0] * BLOCK, -1)
        out[part] = values[: part.stop - begin, :columns].to(out.dtype)
    return out


# ---------------------------------------------------------------- SwiGLU


def _clamped(gate_up: torch.Tensor, clamp: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    gate, up = gate_up.float().chunk(2, dim=1)
    return (gate, up) if clamp is None else (gate.clamp_max(clamp), up.clamp(-clamp, clamp))


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    """As the kernels form it: 1 / (1 + 2^(-x log2 e))."""
    return 1.0 / (1.0 + torch.exp2(x * -LOG2_E))


def swiglu(gate_up: torch.Tensor, weight: torch.Tensor, recipe: Recipe) -> QuantizedRows:
    """h = (silu(gate) * up) * weight in fp32 from bf16 gate and up, then quantised 1x128.

    Args:
        gate_up: [P, 2I] bf16, gate first.
        weight: fp32 [P], the routing weight of each row.
        recipe: clamp, precision, scale format.

    Returns:
        [P, I] with k-major scales.
    """
    gate, up = _clamped(gate_up, recipe.clamp)
    h = quantize_rows((gate * _sigmoid(gate) * up) * weight[:, None], recipe)
    return QuantizedRows(h.data, None if h.scale is None else h.scale.t().contiguous(), k_major=True)


@dataclasses.dataclass(frozen=True)
class SwigluGrads:
    """What the backward of SwiGLU hands on.

    Attributes:
        d_gate_up: [P, 2I] quantised 1x128 (k-major scales): the operand of the dX GEMM.
        d_gate_up_bf16: [P, 2I] bf16, of the same unquantised values: the operand of dW13.
        weighted_act: [P, I] bf16, p * silu(gate) * up: the operand of dW2.
        d_weight: fp32 [P], the gradient of the routing weight.
    """

    d_gate_up: QuantizedRows
    d_gate_up_bf16: torch.Tensor
    weighted_act: torch.Tensor
    d_weight: torch.Tensor


def swiglu_backward(dh: torch.Tensor, gate_up: torch.Tensor, weight: torch.Tensor, recipe: Recipe) -> SwigluGrads:
    """The gradients behind h = (silu(gate) * up) * weight; masks look at the bf16 gate and up, equality passes.

    Args:
        dh: [P, I] fp32, the accumulators of the GEMM before.
        gate_up: [P, 2I] bf16, as saved by the forward.
        weight: fp32 [P].
        recipe: clamp, precision, scale format.

    Returns:
        SwigluGrads.
    """
    raw_gate, raw_up = gate_up.float().chunk(2, dim=1)
    gate, up = _clamped(gate_up, recipe.clamp)
    sigma = _sigmoid(gate)
    silu = gate * sigma
    act = silu * up
    d_act = weight[:, None] * dh
    d_up = d_act * silu
    d_gate = d_act * up * (sigma * (1.0 + gate * (1.0 - sigma)))
    if recipe.clamp is not None:
        d_up = torch.where(raw_up.abs() <= recipe.clamp, d_up, 0.0)
        d_gate = torch.where(raw_gate <= recipe.clamp, d_gate, 0.0)
    d_gate_up = torch.cat([d_gate, d_up], dim=1)
    q = [quantize_rows(half, recipe) for half in (d_gate, d_up)]  # gate and up have scale grids of their own
    scale = None
    if q[0].scale is not None and q[1].scale is not None:
        scale = torch.cat([q[0].scale, q[1].scale], dim=1).t().contiguous()
    quantized = QuantizedRows(_cat_bytes(q[0].data, q[1].data), scale, k_major=True, groups=2)
    weighted = (act * weight[:, None]).to(torch.bfloat16)
    return SwigluGrads(quantized, d_gate_up.to(torch.bfloat16), weighted, block_dot(dh, act))


def _cat_bytes(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.cat([_bytes(a), _bytes(b)], dim=1).view(a.dtype)


def block_dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """sum over channels of a * b, fp32 [rows], in the recipe's order.

    Inside 128 channels four quarters of 32 are added ascending, then the 32 sums at distance 4, 2, 1, 8 and 16 (which
    is how a thread's and a quad's accumulators lie in the fused kernel); the blocks are then added ascending.
    """
    rows, channels = a.shape
    blocks = -(-channels // BLOCK)
    product = torch.nn.functional.pad(a * b, (0, -channels % BLOCK)).view(rows, blocks, 4, 4, 8)
    x = ((product[:, :, 0] + product[:, :, 1]) + product[:, :, 2]) + product[:, :, 3]
    for half in (4, 2, 1):
        x = x[..., :half] + x[..., half:]
    x = x[..., 0]
    x = (x[..., 0] + x[..., 1]) + (x[..., 2] + x[..., 3])
    total = torch.zeros(rows, dtype=torch.float32, device=a.device)
    for block in range(blocks):
        total = total + x[:, block]
    return total
