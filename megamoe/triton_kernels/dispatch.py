"""Dispatch on the device: rows, scales and routing weights of R source ranks into a rank's pool, padding zeroed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from megamoe.quantize import QuantizedRows, ceil_div
from megamoe.routing_plan import RankPlan
from megamoe.triton_kernels.launch import pointer_table, words

TILE_ROWS, MAX_COLS = 16, 128
L2_STRIP_BYTES = 20 << 20
"""How much of an H200's 50 MB of L2 cache the strip of columns that is being copied may take."""


@triton.jit
def _gather(x, table, source, t, width, c, IS_TABLE: tl.constexpr):
    """x[t, c] of each row's source, zero where `source` is -1; `table` holds the sources' addresses."""
    real = (source >= 0)[:, None] & (c < width)[None, :]
    if IS_TABLE:
        base = tl.load(table + source, mask=source >= 0, other=0).to(x.dtype)
        rows = tl.multiple_of(base[:, None], (16, 16)) + t[:, None] * width
    else:
        rows = x + t[:, None] * width
    return tl.load(rows + c[None, :], mask=real, other=0, eviction_policy="evict_last")


@triton.jit(do_not_specialize=["blocks", "num_ranks"])
def _dispatch_kernel(
    data, scale, table, pool, pool_scale, source_rank, token, rows, width, blocks, num_ranks,
    IS_TABLE: tl.constexpr, HAS_SCALE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Copies ROWS x COLS words, or in the last programs scales. Columns are the outer order: a token's row is read for
    each of its experts, and a strip of all tokens stays in L2 until it has been.

    `table` is int64 [2, R]: base addresses of data and scales; without IS_TABLE `data` and `scale` are the only source.
    """
    row_blocks = tl.cdiv(rows, ROWS)
    part = tl.program_id(0) // row_blocks
    r = tl.program_id(0) % row_blocks * ROWS + tl.arange(0, ROWS)
    live = (r < rows)[:, None]
    source = tl.load(source_rank + r, mask=r < rows, other=-1)
    t = tl.load(token + r, mask=r < rows, other=0).to(tl.int64)
    if part * COLS < width:
        c = part * COLS + tl.arange(0, COLS)
        v = _gather(data, table, source, t, width, c, IS_TABLE)
        to = pool + r.to(tl.int64)[:, None] * width + c[None, :]
        tl.store(to, v, mask=live & (c < width)[None, :], eviction_policy="evict_first")
    elif HAS_SCALE:
        b = tl.arange(0, BLOCKS)
        s = _gather(scale, table + num_ranks, source, t, blocks, b, IS_TABLE)
        tl.store(pool_scale + b.to(tl.int64)[None, :] * rows + r[:, None], s, mask=live & (b < blocks)[None, :])


def dispatch(sources: Sequence[QuantizedRows], plan: RankPlan) -> QuantizedRows:
    """As `torch_steps.dispatch`, one kernel that reads every source in place. Stream ordered, no host sync.

    With more than one source their addresses travel in a small table, copied from pageable host memory.
    """
    first, rows = sources[0], plan.num_rows
    pool = torch.empty(rows, first.data.shape[1], dtype=first.data.dtype, device=first.data.device)
    data = [words(source.data) for source in sources]
    blocks, scales, pool_scale = 0, data, pool
    if first.scale is not None:
        blocks = first.scale.shape[1]
        scales = [source.scale.contiguous() for source in sources if source.scale is not None]
        pool_scale = torch.empty(blocks, rows, dtype=torch.float32, device=pool.device)
    if rows:
        if len({d.dtype for d in data}) > 1:  # an unaligned source: all as bytes
            data = [d.view(torch.uint8) for d in data]
        to, width = pool.view(data[0].dtype), data[0].shape[1]
        table = pointer_table([data, scales]) if len(sources) > 1 else plan.token
        strip_bytes = sum(d.shape[0] for d in data) * MAX_COLS * data[0].element_size()
        cols = MAX_COLS if strip_bytes <= L2_STRIP_BYTES else MAX_COLS // 2
        parts = ceil_div(width, cols) + (first.scale is not None)
        _dispatch_kernel[(ceil_div(rows, TILE_ROWS) * parts,)](
            data[0], scales[0], table, to, pool_scale, plan.source_rank, plan.token, rows, width, blocks, len(sources),
            len(sources) > 1, first.scale is not None, TILE_ROWS, cols, triton.next_power_of_2(max(blocks, 1)),
        )  # fmt: skip
    return QuantizedRows(pool, None if first.scale is None else pool_scale, k_major=True)


@triton.jit(do_not_specialize=["top_k"])
def _dispatch_weights_kernel(
    weights, table, out, source_rank, token, slot, rows, top_k, IS_TABLE: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    source = tl.load(source_rank + r, mask=r < rows, other=-1)
    t = tl.load(token + r, mask=r < rows, other=0).to(tl.int64)
    j = tl.load(slot + r, mask=r < rows, other=0)
    if IS_TABLE:
        base = tl.load(table + source, mask=source >= 0, other=0).to(weights.dtype)
        w = tl.load(base + t * top_k + j, mask=source >= 0, other=0.0)
    else:
        w = tl.load(weights + t * top_k + j, mask=source >= 0, other=0.0)
    tl.store(out + r, w, mask=r < rows)


def dispatch_weights(topk_weights: Sequence[torch.Tensor], plan: RankPlan) -> torch.Tensor:
    """As `torch_steps.dispatch_weights`, one kernel; the table of addresses as in `dispatch`."""
    weights = [w.contiguous() for w in topk_weights]
    rows = plan.num_rows
    out = torch.empty(rows, dtype=torch.float32, device=weights[0].device)
    if rows:
        table = pointer_table([weights]) if len(weights) > 1 else plan.token
        _dispatch_weights_kernel[(ceil_div(rows, 1024),)](
            weights[0], table, out, plan.source_rank, plan.token, plan.slot, rows, weights[0].shape[1],
            len(weights) > 1, 1024,
        )  # fmt: skip
    return out
