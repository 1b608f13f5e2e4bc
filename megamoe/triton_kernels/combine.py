"""Combine on the device: each token's rows summed in fp32 in slot order at its source, and dp brought home."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from megamoe.quantize import ceil_div
from megamoe.routing_plan import RoutingPlan
from megamoe.triton_kernels.launch import pool_table
from megamoe.triton_kernels.numerics import to_bf16


@triton.jit(do_not_specialize=["rows", "num_ranks", "tokens"])
def _combine_kernel(
    pool, table, out, owner, row, rows, num_ranks, tokens, width, TOP_K: tl.constexpr, IS_TABLE: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """`table` is int64 [2, R]: addresses and row counts of the pools; a row behind its pool's end counts as NaN."""
    parts = tl.cdiv(width, COLS)
    pid = tl.program_id(0)
    t = pid // parts * ROWS + tl.arange(0, ROWS)
    c = pid % parts * COLS + tl.arange(0, COLS)
    total = tl.zeros((ROWS, COLS), tl.float32)
    for j in tl.static_range(TOP_K):
        slot = t.to(tl.int64) * TOP_K + j
        r = tl.load(row + slot, mask=t < tokens, other=-1).to(tl.int64)
        if IS_TABLE:
            rank = tl.load(owner + slot, mask=r >= 0, other=0)
            base = tl.load(table + rank, mask=r >= 0, other=0).to(pool.dtype)
            size = tl.load(table + num_ranks + rank, mask=r >= 0, other=0)
            from_rows = tl.multiple_of(base[:, None], (16, 16)) + r[:, None] * width
        else:
            from_rows = pool + r[:, None] * width
            size = rows
        real = ((r >= 0) & (r < size))[:, None] & (c < width)[None, :]
        value = tl.load(from_rows + c[None, :], mask=real, other=0.0).to(tl.float32)
        total += tl.where((r >= size)[:, None], float("nan"), value)
    to = out + t.to(tl.int64)[:, None] * width + c[None, :]
    tl.store(to, to_bf16(total), mask=(t < tokens)[:, None] & (c < width)[None, :])


def combine(pools: Sequence[torch.Tensor], plan: RoutingPlan, rank: int) -> torch.Tensor:
    """As `torch_steps.combine`, one gather-sum kernel without atomics; addresses as in `dispatch`."""
    owner, row = plan.owner[rank], plan.row[rank]
    tokens, top_k = row.shape
    pools = [pool.contiguous() for pool in pools]
    width = pools[0].shape[1]
    out = torch.empty(tokens, width, dtype=torch.bfloat16, device=pools[0].device)
    if out.numel():
        table = pool_table(pools) if len(pools) > 1 else row
        tile_rows, tile_cols = 1, min(2048, triton.next_power_of_2(width))
        _combine_kernel[(ceil_div(tokens, tile_rows) * ceil_div(width, tile_cols),)](
            pools[0],
            table,
            out,
            owner,
            row,
            pools[0].shape[0],
            len(pools),
            tokens,
            width,
            top_k,
            len(pools) > 1,
            tile_rows,
            tile_cols,
        )
    return out


@triton.jit(do_not_specialize=["rows", "num_ranks", "slots"])
def _combine_weight_grads_kernel(
    pool, table, out, owner, row, rows, num_ranks, slots, IS_TABLE: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """As in `_combine_kernel`, of single values."""
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    r = tl.load(row + i, mask=i < slots, other=-1).to(tl.int64)
    if IS_TABLE:
        rank = tl.load(owner + i, mask=r >= 0, other=0)
        base = tl.load(table + rank, mask=r >= 0, other=0).to(pool.dtype)
        size = tl.load(table + num_ranks + rank, mask=r >= 0, other=0)
        grad = tl.load(base + r, mask=(r >= 0) & (r < size), other=0.0)
    else:
        size = rows
        grad = tl.load(pool + r, mask=(r >= 0) & (r < size), other=0.0)
    tl.store(out + i, tl.where(r >= size, float("nan"), grad), mask=i < slots)


def combine_weight_grads(pools: Sequence[torch.Tensor], plan: RoutingPlan, rank: int) -> torch.Tensor:
    """As `torch_steps.combine_weight_grads`, one gather kernel; addresses as in `dispatch`."""
    owner, row = plan.owner[rank], plan.row[rank]
    pools = [pool.contiguous() for pool in pools]
    out = torch.empty(row.shape, dtype=torch.float32, device=pools[0].device)
    if out.numel():
        table = pool_table(pools) if len(pools) > 1 else row
        _combine_weight_grads_kernel[(ceil_div(out.numel(), 1024),)](
            pools[0], table, out, owner, row, pools[0].shape[0], len(pools), out.numel(), len(pools) > 1, 1024
        )
    return out
