"""The routing plan against a brute-force enumeration of the order of rows, for every kind of routing."""

import itertools

import pytest
import torch

from megamoe.cli.problem import ROUTINGS, ProblemSpec, draw_topk_ids
from megamoe.errors import CapacityError, MegaMoETypeError, MegaMoEValueError
from megamoe.routing_plan import check_id_values, experts_per_rank, make_plan


def enumerate_rows(ids_by_rank: list[list[list[int]]], num_experts: int, alignment: int) -> list[list[tuple | None]]:
    """For each rank the rows of its pool as (expert, source, token, slot), None for padding: loops, no prefix sums."""
    per_rank = num_experts // len(ids_by_rank)
    pools = []
    for rank in range(len(ids_by_rank)):
        pool: list[tuple | None] = []
        for expert in range(rank * per_rank, (rank + 1) * per_rank):
            rows = [
                (expert, source, token, slot)
                for source, ids in enumerate(ids_by_rank)
                for token, row in enumerate(ids)
                for slot, e in enumerate(row)
                if e == expert
            ]
            pool += rows + [None] * (-len(rows) % alignment)
        pools.append(pool)
    return pools


def check(ids: list[torch.Tensor], num_experts: int, alignment: int = 128, num_rows: int | None = None) -> None:
    plan = make_plan(ids, num_experts, alignment=alignment, num_rows=num_rows)
    pools = enumerate_rows([v.tolist() for v in ids], num_experts, alignment)
    per_rank = num_experts // len(ids)
    assert plan.num_ranks == len(ids)
    where = {}
    for rank, (mine, pool) in enumerate(zip(plan.ranks, pools, strict=True)):
        assert mine.num_rows == (len(pool) if num_rows is None else num_rows)
        pool += [None] * (mine.num_rows - len(pool))
        got = list(zip(mine.source_rank.tolist(), mine.token.tolist(), mine.slot.tolist(), strict=True))
        assert got == [(-1, -1, -1) if row is None else row[1:] for row in pool]
        counts = [sum(row is not None and row[0] == rank * per_rank + e for row in pool) for e in range(per_rank)]
        assert mine.counts.tolist() == counts
        ends = list(itertools.accumulate(-(-c // alignment) * alignment for c in counts))
        assert mine.offs.tolist() == [0, *ends]
        experts = mine.expert_of_row().tolist()
        assert all(row is None or experts[i] == row[0] - rank * per_rank for i, row in enumerate(pool))
        where.update({row[1:]: (rank, i) for i, row in enumerate(pool) if row is not None})
        for field in (mine.counts, mine.offs, mine.source_rank, mine.token, mine.slot):
            assert field.dtype == torch.int32
    for source, v in enumerate(ids):
        assert plan.owner[source].shape == plan.row[source].shape == v.shape
        for token, slot in itertools.product(range(v.shape[0]), range(v.shape[1])):
            want = where.get((source, token, slot), (-1, -1))
            assert (plan.owner[source][token, slot].item(), plan.row[source][token, slot].item()) == want


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("tokens", [(37,), (16, 16), (5, 0, 11, 1), (0, 0)], ids=str)
def test_against_enumeration(routing, tokens):
    spec = ProblemSpec(tokens, num_experts=8, top_k=3, routing=routing)
    ids = list(draw_topk_ids(spec, torch.Generator().manual_seed(1)).split(list(tokens)))
    check(ids, 8)
    check(ids, 8, alignment=4)


def test_all_assignments_of_a_tiny_call():
    """Every one of the 4^4 ways in which two tokens with two slots each may choose among -1, 0, 1, 2 on two ranks."""
    for choice in itertools.product((-1, 0, 1, 3), repeat=4):
        ids = torch.tensor(choice).view(2, 1, 2)
        check([ids[0], ids[1]], 4, alignment=2)


def test_no_expert_at_all_and_no_token_at_all():
    check([torch.full((16, 2), -1)], 4)
    check([torch.empty(0, 8, dtype=torch.int64)], 4)
    check([torch.full((3, 1), -1), torch.empty(0, 1, dtype=torch.int64)], 4)


def test_segments_of_exactly_128_and_one_more():
    ids = torch.tensor([0] * 128 + [1] * 129 + [3] * 1).view(-1, 1)
    check([ids], 4)
    assert make_plan([ids], 4).ranks[0].offs.tolist() == [0, 128, 384, 384, 512]


def test_int32_and_int64_and_strided_ids_give_one_plan():
    wide = torch.randint(-1, 6, (40, 8))
    ids = wide[:, ::2]
    plans = [make_plan([v], 6) for v in (ids, ids.int(), ids.contiguous())]
    for plan in plans[1:]:
        assert torch.equal(plan.row[0], plans[0].row[0])
        assert torch.equal(plan.ranks[0].token, plans[0].ranks[0].token)


def test_a_given_capacity_pads_the_pool_and_overflow_is_an_error():
    ids = [torch.tensor([[0], [1], [3]])]
    check(ids, 4, num_rows=512)
    with pytest.raises(CapacityError, match=r"capacity: expected at least 384 rows for rank 0, got 256\. Raise it"):
        make_plan(ids, 4, num_rows=256)


def test_global_order_does_not_depend_on_the_number_of_ranks():
    """Real rows of R ranks one after the other are the real rows of one rank that holds all tokens."""
    ids = torch.randint(-1, 8, (24, 4))
    one = make_plan([ids], 8).ranks[0]
    real = one.token >= 0
    want = list(zip(one.token[real].tolist(), one.slot[real].tolist(), strict=True))
    for split in ((12, 12), (20, 4, 0, 0), (1, 2, 3, 4, 5, 6, 3, 0)):
        start = [sum(split[:r]) for r in range(len(split))]
        plan = make_plan(list(ids.split(list(split))), 8)
        got = []
        for mine in plan.ranks:
            for source, token, slot in zip(
                mine.source_rank.tolist(), mine.token.tolist(), mine.slot.tolist(), strict=True
            ):
                if source >= 0:
                    got.append((start[source] + token, slot))
        assert got == want


def test_no_two_tensors_of_a_plan_share_memory():
    """They are outputs of a custom operator, which must not alias one another."""
    plan = make_plan([torch.randint(-1, 8, (t, 2)) for t in (5, 3, 7, 1)], 8)
    tensors = [*plan.owner, *plan.row]
    for mine in plan.ranks:
        tensors += [mine.counts, mine.offs, mine.source_rank, mine.token, mine.slot]
    assert len({t.untyped_storage().data_ptr() for t in tensors}) == len(tensors)


def test_refusals():
    good = torch.zeros(2, 2, dtype=torch.int64)
    with pytest.raises(MegaMoEValueError, match="topk_ids: expected one tensor for each rank, got Tensor"):
        make_plan(torch.zeros(2, 2, dtype=torch.int64), 4)
    with pytest.raises(MegaMoEValueError, match="alignment: expected at least 1 row, got 0"):
        make_plan([torch.zeros(2, 2, dtype=torch.int64)], 4, alignment=0)
    with pytest.raises(MegaMoETypeError, match=r"topk_ids: expected an int32 or int64 tensor \[T, K\], got NoneType"):
        make_plan([None], 4)
    with pytest.raises(MegaMoEValueError, match="num_ranks: expected at least 1, got 0"):
        experts_per_rank(4, 0)
    with pytest.raises(MegaMoEValueError, match="topk_ids: expected one tensor for each rank, got none"):
        make_plan([], 4)
    for dtype in (torch.int16, torch.uint8, torch.float32, torch.bool):
        with pytest.raises(MegaMoETypeError, match=r"topk_ids\[1\]: expected int32 or int64, got torch.*Convert"):
            make_plan([good, good.to(dtype)], 4)
    with pytest.raises(MegaMoEValueError, match=r"topk_ids: expected \[T, K\], got shape \(4,\)"):
        make_plan([good.view(-1)], 4)
    with pytest.raises(MegaMoEValueError, match=r"topk_ids\[1\]: expected K = 2 slots as on rank 0, got 3"):
        make_plan([good, torch.zeros(1, 3, dtype=torch.int64)], 4)
    for bad in (4, 9, 2**31 - 1, -2):
        ids = good.clone()
        ids[1, 0] = bad
        with pytest.raises(MegaMoEValueError, match=rf"topk_ids\[1, 0\]: expected -1 or an expert.*got {bad}"):
            make_plan([ids], 4)
    check_id_values(good, 1)
    for experts, ranks in ((30, 4), (5, 2), (0, 1)):
        with pytest.raises(MegaMoEValueError, match=f"num_experts: expected a positive multiple of the {ranks} ranks"):
            experts_per_rank(experts, ranks)


def test_unchecked_plan_is_static_and_leaves_out_what_does_not_fit():
    ids = torch.tensor([[0, 3], [-1, 9], [1, 0]])
    plan = make_plan([ids], 4, alignment=2, num_rows=3, checked=False)
    mine = plan.ranks[0]
    assert mine.num_rows == 3
    assert mine.counts.tolist() == [2, 1, 0, 1]
    assert mine.offs.tolist() == [0, 2, 4, 4, 6]
    assert plan.row[0].tolist() == [[0, 4], [-1, -1], [2, 1]]
    assert mine.token.tolist() == [0, 2, 2]
    checked = make_plan([ids.clamp_max(3)], 4, num_rows=512)
    unchecked = make_plan([ids.clamp_max(3)], 4, num_rows=512, checked=False)
    for field in ("counts", "offs", "source_rank", "token", "slot"):
        assert torch.equal(getattr(checked.ranks[0], field), getattr(unchecked.ranks[0], field))
    with pytest.raises(MegaMoEValueError, match="num_rows: expected a number of rows where checked=False, got None"):
        make_plan([ids], 4, checked=False)
