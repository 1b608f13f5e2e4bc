"""Transports: rows over LocalWorld and over gloo groups arrive and come home with the bits of one rank alone."""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch
import torch.distributed as dist

from megamoe import torch_steps
from megamoe.comm import GroupTransport, Hierarchy, LocalTransport, LocalWorld, TensorParallel, as_transport
from megamoe.comm.transport import Transport
from megamoe.errors import CapacityError, MegaMoERuntimeError, MegaMoETypeError, MegaMoEValueError
from megamoe.quantize import QuantizedRows, quantize_rows
from megamoe.recipe import Recipe
from tests.support.comm_cases import Case, make_batch
from tests.support.distributed import run_ranks

CASES = {
    2: [
        Case((5, 5), 4, 2),
        Case((7, 3), 8, 3, precision="bf16"),
        Case((0, 9), 4, 2),
        Case((9, 0), 4, 2),
        Case((0, 0), 4, 2),
        Case((64, 64), 8, 2, named=(0, 4)),
        Case((6, 11), 2, 2),
        Case((6, 11), 2, 2, num_rows=384),
        Case((150, 1), 4, 4, num_rows=1024),
    ],
    3: [Case((4, 9, 2), 6, 3), Case((0, 5, 8), 3, 2, named=(2, 3)), Case((3, 0, 4), 9, 1)],
    4: [Case((3, 8, 0, 5), 8, 4), Case((1, 1, 1, 1), 4, 2, named=(3, 4)), Case((6, 2, 7, 4), 16, 12, precision="bf16")],
}


@dataclasses.dataclass(frozen=True)
class Rows:
    """The tensors of all ranks, x quantised."""

    rows: list[QuantizedRows]
    ids: list[torch.Tensor]
    weights: list[torch.Tensor]


def make_rows(case: Case) -> Rows:
    batch = make_batch(case)
    rows = [quantize_rows(x, Recipe(precision=case.precision)) for x in batch.x]
    return Rows(rows, batch.ids, batch.weights)


def by_expert(x: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
    """Stands for an expert: its rows answer with a multiple that names it; computed in fp32, rounded once."""
    return (x * (expert[:, None] + 1).float()).bfloat16()


@dataclasses.dataclass(frozen=True)
class Result:
    """Of one rank: what reached its pool, and what came home."""

    pool: torch.Tensor
    pool_weights: torch.Tensor
    out: torch.Tensor
    weight_grads: torch.Tensor


def travel(transport: Transport, case: Case, batch: Rows) -> list[Result]:
    """Forward and home again on every rank of this process; padding is poisoned before it goes home."""
    here = transport.local_ranks
    plan = transport.plan([batch.ids[r] for r in here], case.num_experts, case.num_rows)
    pools = transport.dispatch_rows([batch.rows[r] for r in here], plan)
    weights = transport.dispatch_weights([batch.weights[r] for r in here], plan)
    y, dp = [], []
    per_rank = case.num_experts // transport.num_ranks
    for i, r in enumerate(here):
        padding = plan.ranks[r].token < 0
        rows = pools[i].dequantize()
        assert rows[padding].count_nonzero() == 0 and weights[i][padding].count_nonzero() == 0
        answer = by_expert(rows, plan.ranks[r].expert_of_row() + r * per_rank)
        y.append(answer.masked_fill(padding[:, None], float("nan")))
        dp.append((answer.float().sum(1) * weights[i]).masked_fill(padding, float("nan")))
    outs = transport.combine_rows(y, plan)
    begun = transport.start_combine_rows([rows.clone() for rows in y], plan)
    y = [rows.fill_(torch.nan) for rows in y]  # work in between
    for begun_out, out in zip(begun(), outs, strict=True):
        assert torch.equal(begun_out, out)
    grads = transport.combine_weight_grads(dp, plan)
    results = []
    for i in range(len(here)):
        results.append(Result(pools[i].dequantize(), weights[i], outs[i], grads[i]))
    return results


def one_rank_result(case: Case, batch: Rows) -> Result:
    """The same global batch on one rank that holds all experts."""
    scales = [q.scale for q in batch.rows if q.scale is not None]
    rows = QuantizedRows(torch.cat([q.data for q in batch.rows]), torch.cat(scales) if scales else None)
    whole = Rows([rows], [torch.cat(batch.ids)], [torch.cat(batch.weights)])
    alone = dataclasses.replace(case, tokens=(sum(case.tokens),), num_rows=None)
    return travel(as_transport(None, torch_steps), alone, whole)[0]


def check(case: Case, batch: Rows, rank: int, result: Result, whole: Result) -> None:
    mine = case.tokens_of(rank)
    assert torch.equal(result.out, whole.out[mine]), (case, rank)
    assert torch.equal(result.weight_grads, whole.weight_grads[mine]), (case, rank)
    assert result.weight_grads[batch.ids[rank] < 0].count_nonzero() == 0


@pytest.mark.parametrize("case", [case for cases in CASES.values() for case in cases], ids=str)
def test_local_world_equals_one_rank(case: Case) -> None:
    batch = make_rows(case)
    whole = one_rank_result(case, batch)
    results = travel(as_transport(LocalWorld(case.num_ranks), torch_steps), case, batch)
    for rank, result in enumerate(results):
        check(case, batch, rank, result, whole)
    pools = [result.pool[: result.pool.shape[0] if case.num_rows is None else 0] for result in results]
    if case.num_rows is None:  # the pools one after the other are the pool of one rank
        assert torch.equal(torch.cat(pools), whole.pool)
        assert torch.equal(torch.cat([result.pool_weights for result in results]), whole.pool_weights)


def _compare_with_local(transport: Transport, case: Case) -> None:
    """This rank's results against those of a LocalWorld and of one rank; `case` in ranks of the group."""
    batch = make_rows(case)
    (result,) = travel(transport, case, batch)
    (rank,) = transport.local_ranks
    check(case, batch, rank, result, one_rank_result(case, batch))
    local = travel(LocalTransport(LocalWorld(case.num_ranks), torch_steps), case, batch)[rank]
    assert torch.equal(result.pool, local.pool) and torch.equal(result.pool_weights, local.pool_weights)


def _group_cases(rank: int, num_ranks: int) -> None:
    transport = as_transport(dist.group.WORLD, torch_steps)
    assert isinstance(transport, GroupTransport) and transport.local_ranks == (rank,)
    for case in CASES[num_ranks]:
        _compare_with_local(transport, case)


@pytest.mark.parametrize("num_ranks", sorted(CASES))
def test_gloo_equals_one_rank(num_ranks: int) -> None:
    run_ranks(_group_cases, num_ranks, num_ranks)


def _sub_group_cases(rank: int) -> None:
    groups = {ranks: dist.new_group(list(ranks)) for ranks in ((0, 2), (1, 3), (2, 3), (0,), (1,), (2,), (3,))}
    for pair in ((0, 2), (1, 3), (2, 3)):
        if rank in pair:
            transport = as_transport(groups[pair], torch_steps)
            assert transport.local_ranks == (pair.index(rank),)
            for case in CASES[2]:
                _compare_with_local(transport, case)
    alone = as_transport(groups[(rank,)], torch_steps)
    assert alone.num_ranks == 1 and alone.local_ranks == (0,)
    for case in (Case((9,), 4, 2), Case((0,), 4, 2), Case((9,), 1, 8)):
        _compare_with_local(alone, case)

    # 4 processes as 2 x 2, inside a node first
    inside = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    between = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    two_level = as_transport(Hierarchy(inside, between), torch_steps)
    assert two_level.local_ranks == (rank,)
    for case in CASES[4]:
        _compare_with_local(two_level, case)


def test_sub_groups_groups_of_one_and_two_levels() -> None:
    run_ranks(_sub_group_cases, 4)


def _tensor_parallel_cases(rank: int) -> None:
    """EP 2 x TP 2: each lane holds half of every expert's answer; pools are equal, sums come home to each lane."""
    experts = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    lanes = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    transport = as_transport(TensorParallel(experts, lanes), torch_steps)
    owner, lane = rank // 2, rank % 2
    assert transport.num_ranks == 2 and transport.local_ranks == (owner,)
    for case in CASES[4][:1] + [Case((0, 5, 0, 0), 2, 2), Case((130, 5, 3, 40), 4, 2, precision="bf16")]:
        batch = make_rows(case)  # rank = 2 * owner + lane: the tokens of an owner are those of its lanes
        whole = one_rank_result(case, batch)
        plan = transport.plan([batch.ids[rank]], case.num_experts)
        (pool,) = transport.dispatch_rows([batch.rows[rank]], plan)
        (weights,) = transport.dispatch_weights([batch.weights[rank]], plan)
        owners_rows = [0, plan.ranks[0].num_rows, whole.pool.shape[0]]
        part = slice(owners_rows[owner], owners_rows[owner + 1])
        assert torch.equal(pool.dequantize(), whole.pool[part]) and torch.equal(weights, whole.pool_weights[part])
        # a power of two each: the sum over lanes is exact
        y = by_expert(pool.dequantize(), plan.ranks[owner].expert_of_row() + owner * case.num_experts // 2)
        share = (y * 0.25, y * 0.75)[lane] if case.precision == "bf16" else (y * 0.5)
        (out,) = transport.combine_rows([share], plan)
        mine = case.tokens_of(rank)
        if case.precision == "bf16":  # 0.75 y is rounded once
            torch.testing.assert_close(out, whole.out[mine], rtol=2e-2, atol=2e-2)
        else:
            assert torch.equal(out, whole.out[mine])
        dp = y.float().sum(1) * weights
        (grads,) = transport.combine_weight_grads([dp * 0.5], plan)
        assert torch.equal(grads, whole.weight_grads[mine])


def test_tensor_parallel_lanes_gather_and_reduce() -> None:
    run_ranks(_tensor_parallel_cases, 4)


def _error_cases(rank: int) -> None:
    transport = as_transport(dist.group.WORLD, torch_steps)
    ids = torch.zeros(3, 2, dtype=torch.int64)

    def refused(kind: type[Exception], match: str, *args, **kwargs) -> None:
        with pytest.raises(kind, match=match):
            transport.plan(*args, **kwargs)

    if rank == 1:
        refused(MegaMoETypeError, "topk_ids: expected int32 or int64, got torch.float32", [ids.float()], 4)
    else:
        refused(
            MegaMoERuntimeError, r"an error on rank 1: topk_ids: expected int32 or int64, got .* first\.$", [ids], 4
        )
    if rank == 0:
        refused(
            MegaMoEValueError,
            "topk_ids: expected one row",
            [ids],
            4,
            error=MegaMoEValueError("topk_ids: expected one row"),
        )
    else:
        refused(MegaMoERuntimeError, "an error on rank 0: topk_ids: expected one row", [ids], 4)
    refused(MegaMoEValueError, r"num_experts: expected the value of rank 0, 4.*got 6 on rank 1", [ids], 4 + 2 * rank)
    refused(MegaMoEValueError, r"topk_ids.shape\[1\]: expected the value of rank 0, 1", [ids[:, : 1 + rank]], 4)
    refused(MegaMoEValueError, "num_experts: expected a positive multiple of the 2 ranks, got 5", [ids], 5)
    refused(
        MegaMoEValueError,
        r"topk_ids\[1\]\[0, 1\]: expected -1 or an expert in \[0, 4\), got 9",
        [ids + 9 * rank * torch.tensor([0, 1])],
        4,
    )
    refused(CapacityError, "capacity: expected at least 128 rows for rank 0, got 64", [ids], 4, 64)
    _compare_with_local(transport, CASES[2][0])  # and the group is still good


def test_errors_end_the_call_on_all_ranks() -> None:
    run_ranks(_error_cases, 2)


def _not_a_member(rank: int) -> None:
    group = dist.new_group([0])
    if rank == 1:
        with pytest.raises(
            MegaMoEValueError, match="group: expected a process group of which this process is a member"
        ):
            as_transport(group, torch_steps)


def test_groups_of_others_are_refused() -> None:
    run_ranks(_not_a_member, 2)


def test_local_errors() -> None:
    with pytest.raises(MegaMoEValueError, match="num_ranks: expected a positive integer, got 0"):
        LocalWorld(0)
    with pytest.raises(MegaMoETypeError, match="world: expected a LocalWorld.* got str"):
        as_transport("world", torch_steps)
    with pytest.raises(MegaMoEValueError, match="topk_ids: expected one tensor for each of the 2 ranks, got 1"):
        as_transport(LocalWorld(2), torch_steps).plan([torch.zeros(1, 1, dtype=torch.int64)], 2)
    with pytest.raises(MegaMoEValueError, match="what the caller found"):
        as_transport(None, torch_steps).plan(
            [torch.zeros(1, 1, dtype=torch.int64)], 2, error=MegaMoEValueError("what the caller found")
        )


def _hang(rank: int) -> None:
    if rank == 0:
        dist.barrier()
    time.sleep(600)


def _fail(rank: int) -> None:
    if rank == 1:
        raise ValueError("on purpose")
    dist.barrier()


def test_watchdog_catches_hangs_and_failures() -> None:
    with pytest.raises(AssertionError, match="(?i)hang|time.?out|timed out"):
        run_ranks(_hang, 2, timeout=3.0)
    with pytest.raises(AssertionError, match="on purpose"):
        run_ranks(_fail, 2, timeout=20.0)
