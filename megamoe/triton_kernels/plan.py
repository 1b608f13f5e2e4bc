"""The routing plan on the device: a stable counting sort by expert whose every position is a prefix sum.

Ids are cut into chunks in (source rank, token, slot) order. A count of each chunk, an exclusive scan over the chunks
and how many earlier ids of its chunk are the same give each slot its row; no atomic decides an order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from megamoe.errors import CapacityError, MegaMoEValueError, expected
from megamoe.quantize import ceil_div
from megamoe.recipe import BLOCK
from megamoe.routing_plan import RankPlan, RoutingPlan, check_id_values, check_topk_ids, experts_per_rank
from megamoe.triton_kernels.numerics import as_int64

CHUNK = 128
SCAN_CHUNKS, SCAN_EXPERTS = 512, 16


@triton.jit(
    do_not_specialize=["first_chunk", "num_ids", "num_experts"], do_not_specialize_on_alignment=["counts", "bad"]
)
def _count_kernel(
    ids, chunk_counts, counts, bad, first_chunk, num_ids, num_experts, CHUNK: tl.constexpr, BINS: tl.constexpr
):  # fmt: skip
    """chunk_counts[first_chunk + pid, e] = ids of this chunk that are e; counts and `bad` (foreign ids) add up.

    The atomic sums are of integers: whoever comes first, they are the same.
    """
    i = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    e = tl.load(ids + i, mask=i < num_ids, other=-1)
    real = (e >= 0) & (e < num_experts)
    bins = tl.arange(0, BINS)
    n = tl.histogram(tl.where(real, e, num_experts).to(tl.int32), BINS)
    chunk = (first_chunk + tl.program_id(0)).to(tl.int64)
    tl.store(chunk_counts + chunk * num_experts + bins, n, mask=bins < num_experts)
    tl.atomic_add(counts + bins, n, mask=(bins < num_experts) & (n > 0), sem="relaxed")
    num_bad = tl.sum((~real & (e != -1)).to(tl.int32), axis=0)
    tl.atomic_add(bad, num_bad, mask=num_bad > 0, sem="relaxed")


@triton.jit(
    do_not_specialize=["num_chunks", "num_experts", "per_rank", "alignment"],
    do_not_specialize_on_alignment=["counts", "summary"],
)
def _scan_kernel(
    chunk_counts, counts, offs, summary, num_chunks, num_experts, per_rank, alignment, ALL: tl.constexpr,
    EXPERTS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Of EXPERTS experts of one rank: each chunk's count becomes the first row of that chunk's ids of the expert.

    The first program of a rank also writes its offs and, to summary[rank], its rows.
    """
    parts = tl.cdiv(per_rank, EXPERTS)
    rank, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    every = tl.arange(0, ALL)
    n = tl.load(counts + rank * per_rank + every, mask=every < per_rank, other=0)
    aligned = (n + alignment - 1) // alignment * alignment
    first = tl.cumsum(aligned, axis=0) - aligned
    if part == 0:
        tl.store(offs + rank * (per_rank + 1) + every, first, mask=every < per_rank)
        tl.store(offs + rank * (per_rank + 1) + per_rank, tl.sum(aligned, axis=0))
        tl.store(summary + rank, tl.sum(aligned, axis=0))
    e = part * EXPERTS + tl.arange(0, EXPERTS)
    row = tl.sum(tl.where(every[:, None] == e[None, :], first[:, None], 0), axis=0)
    for begin in range(0, num_chunks, CHUNKS):
        c = begin + tl.arange(0, CHUNKS)
        mask = (c < num_chunks)[:, None] & (e < per_rank)[None, :]
        at = chunk_counts + rank * per_rank + e[None, :] + c.to(tl.int64)[:, None] * num_experts
        here = tl.load(at, mask=mask, other=0)
        tl.store(at, tl.cumsum(here, axis=0) - here + row[None, :], mask=mask)
        row += tl.sum(here, axis=0)


@triton.jit(
    do_not_specialize=["source", "first_chunk", "num_ids", "num_experts", "per_rank", "top_k", "num_rows", "num_ranks"]
)
def _place_kernel(
    ids, chunk_rows, owner, row, rows_of, source, first_chunk, num_ids, num_experts, per_rank, top_k, num_rows,
    num_ranks, CHUNK: tl.constexpr,
):  # fmt: skip
    """Each slot's owner and row, and behind the row its source: rows_of is int32 [3, R, num_rows], -1 before."""
    place = tl.arange(0, CHUNK)
    i = tl.program_id(0) * CHUNK + place
    e = tl.load(ids + i, mask=i < num_ids, other=-1)
    real = (e >= 0) & (e < num_experts)
    e = tl.where(real, e, -1).to(tl.int32)
    earlier = (e[:, None] == e[None, :]) & (place[None, :] < place[:, None])
    chunk = (first_chunk + tl.program_id(0)).to(tl.int64)
    at = tl.load(chunk_rows + chunk * num_experts + e, mask=real, other=0)
    at += tl.sum(earlier.to(tl.int32), axis=1)
    rank = e // per_rank
    tl.store(owner + i, tl.where(real, rank, -1), mask=i < num_ids)
    tl.store(row + i, tl.where(real, at, -1), mask=i < num_ids)
    fits = real & (at < num_rows)
    to = rank.to(tl.int64) * num_rows + at
    field = as_int64(num_ranks) * num_rows
    tl.store(rows_of + to, tl.zeros_like(i) + source, mask=fits)
    tl.store(rows_of + field + to, i // top_k, mask=fits)
    tl.store(rows_of + 2 * field + to, i % top_k, mask=fits)


def make_plan(
    topk_ids: Sequence[torch.Tensor],
    num_experts: int,
    *,
    alignment: int = BLOCK,
    num_rows: int | None = None,
    checked: bool = True,
) -> RoutingPlan:
    """Plan a call, as `megamoe.routing_plan.make_plan`, bit for bit.

    Args:
        topk_ids: for each rank [T_r, K], int32 or int64, -1 for no expert.
        num_experts: E over all ranks. alignment: rows to which a segment is rounded up.
        num_rows: rows of every rank's pool; None: just enough for each, read back from the device.
        checked: read the device's verdict on ids and capacity back and raise. False needs `num_rows` and never
            synchronises: ids outside [0, E) count as -1, and rows past `num_rows` are stored nowhere.

    Returns:
        The plan, on the device of the ids. Repeatable bit for bit; CUDA-graph safe if not `checked`.

    Raises:
        MegaMoETypeError, MegaMoEValueError: ids outside the contract. CapacityError: more rows than `num_rows`.
    """
    if not topk_ids:
        raise MegaMoEValueError(expected("topk_ids", "one tensor for each rank", "none"))
    if num_rows is None and not checked:
        raise MegaMoEValueError(expected("num_rows", "a number of rows where checked=False", None))
    names = ["topk_ids"] if len(topk_ids) == 1 else [f"topk_ids[{r}]" for r in range(len(topk_ids))]
    for ids, name in zip(topk_ids, names, strict=True):
        check_topk_ids(ids, name)
        if ids.shape[1] != topk_ids[0].shape[1]:
            contract = f"K = {topk_ids[0].shape[1]} slots as on rank 0"
            raise MegaMoEValueError(expected(name, contract, ids.shape[1]))
    num_ranks, device = len(topk_ids), topk_ids[0].device
    per_rank = experts_per_rank(num_experts, num_ranks)
    topk_ids = [ids.contiguous() for ids in topk_ids]
    chunks = [ceil_div(ids.numel(), CHUNK) for ids in topk_ids]
    chunk_rows, counts, offs, summary = _scan(topk_ids, chunks, num_experts, per_rank, alignment)
    sizes = [num_rows or 0] * num_ranks
    if checked:
        *needed, bad = summary.tolist()
        if bad:
            for ids, name in zip(topk_ids, names, strict=True):
                check_id_values(ids, num_experts, name)
        for r, n in enumerate(needed):
            if num_rows is not None and n > num_rows:
                contract = f"at least {n} rows for rank {r}"
                raise CapacityError(expected("capacity", contract, num_rows, "Raise it, or leave it out."))
        sizes = needed if num_rows is None else sizes
    most = max(sizes)
    rows_of = torch.full((3, num_ranks, most), -1, dtype=torch.int32, device=device)
    owner = tuple(torch.empty(ids.shape, dtype=torch.int32, device=device) for ids in topk_ids)
    row = tuple(torch.empty(ids.shape, dtype=torch.int32, device=device) for ids in topk_ids)
    first = 0
    for r, ids in enumerate(topk_ids):
        if chunks[r]:
            _place_kernel[(chunks[r],)](
                ids, chunk_rows, owner[r], row[r], rows_of, r, first, ids.numel(), num_experts, per_rank,
                ids.shape[1], most, num_ranks, CHUNK,
            )  # fmt: skip
        first += chunks[r]
    ranks = tuple(
        RankPlan(counts.view(num_ranks, per_rank)[r], offs[r], *(rows_of[f, r, : sizes[r]] for f in range(3)))
        for r in range(num_ranks)
    )
    return RoutingPlan(num_experts, ranks, owner, row)


def _scan(
    topk_ids: Sequence[torch.Tensor], chunks: list[int], num_experts: int, per_rank: int, alignment: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(first row of each expert in each chunk [chunks, E], counts [E], offs [R, E_l + 1], summary [R + 1])."""
    device, num_ranks, total = topk_ids[0].device, len(topk_ids), sum(chunks)
    ints = {"dtype": torch.int32, "device": device}
    chunk_counts, offs = torch.empty(max(total, 1), num_experts, **ints), torch.empty(num_ranks, per_rank + 1, **ints)
    sums = torch.zeros(num_experts + num_ranks + 1, **ints)
    counts, summary = sums[:num_experts], sums[num_experts:]
    bins = max(32, triton.next_power_of_2(num_experts + 1))
    first = 0
    for ids, n in zip(topk_ids, chunks, strict=True):
        if n:
            _count_kernel[(n,)](
                ids, chunk_counts, counts, summary[num_ranks:], first, ids.numel(), num_experts, CHUNK, bins
            )
        first += n
    experts = min(SCAN_EXPERTS, triton.next_power_of_2(per_rank))
    _scan_kernel[(num_ranks * ceil_div(per_rank, experts),)](
        chunk_counts, counts, offs, summary, total, num_experts, per_rank, alignment,
        triton.next_power_of_2(per_rank), experts, SCAN_CHUNKS, num_warps=8,
    )  # fmt: skip
    return chunk_counts, counts, offs, summary
