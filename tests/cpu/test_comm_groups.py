"""Dispatch and combine over gloo groups: equal to one rank, each stage adjoint to its way back, nobody left waiting."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from megamoe import torch_steps
from megamoe.comm import DispatchOptions, GroupTransport, Hierarchy, LocalWorld, TensorParallel, combine, dispatch
from megamoe.comm import transport as transport_module
from megamoe.comm.handle import Handle, static_sizes
from megamoe.comm.wires import Wire, make_wire
from megamoe.errors import MegaMoERuntimeError, MegaMoETypeError, MegaMoEValueError
from megamoe.quantize import QuantizedRows
from tests.support.comm_cases import (
    CASES,
    HIDDEN,
    Case,
    check_outcome,
    expert_rows,
    make_batch,
    quantized,
    train,
    train_alone,
)
from tests.support.distributed import run_ranks


def two_by_two(rank: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Of 4 processes: the pair (0, 1) or (2, 3) of this one, and the pair (0, 2) or (1, 3)."""
    near = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    far = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return near[rank // 2], far[rank % 2]


# ---------------------------------------------------------------- equal to one rank


def compare(case: Case, rank: int, group: Any) -> None:
    """Everything a rank of a group sees against one rank with the whole batch, and against a LocalWorld."""
    batch = make_batch(case)
    whole, mine = train_alone(case, batch), batch.of((rank,))
    first = [rank * case.num_experts // case.num_ranks]
    worst = case.num_ranks * (max(case.tokens) + 2)
    for options in (
        DispatchOptions(case.num_experts),
        DispatchOptions(case.num_experts, expert_alignment=16),
        DispatchOptions(case.num_experts, num_worst_tokens=worst),
        DispatchOptions(case.num_experts, expand=False),
        DispatchOptions(case.num_experts, expand=False, num_worst_tokens=worst),
    ):
        (outcome,), sent = train(mine, group, options, first)
        check_outcome(case, rank, outcome, whole, is_exact=options.expand)
        has_one_expert = case.num_experts == case.num_ranks or not options.expand
        in_order = has_one_expert and options.num_worst_tokens is None  # then nothing is permuted on arrival
        assert sent.handle.row_plan.exchange.in_order == in_order
        (again,), cached = train(mine, group, options, first, handle=sent.handle)
        assert cached.handle.plan is sent.handle.plan
        assert torch.equal(again.out, outcome.out) and torch.equal(again.dx, outcome.dx)

        local = dispatch(batch.x, batch.ids, batch.weights, LocalWorld(case.num_ranks), options=options)
        assert torch.equal(sent.recv_x[0], local.recv_x[rank])
        assert torch.equal(sent.recv_weights[0], local.recv_weights[rank])
        assert torch.equal(sent.handle.recv_topk_ids()[0], local.handle.recv_topk_ids()[rank])
        for field in dataclasses.fields(sent.handle.received()[0]):
            group_field, local_field = (
                getattr(v, field.name) for v in (sent.handle.received()[0], local.handle.received()[rank])
            )
            assert torch.equal(group_field, local_field), field.name
        for counts, local_counts in zip(sent.tokens_per_expert[0], local.tokens_per_expert[rank], strict=True):
            assert torch.equal(counts, local_counts)

    options = DispatchOptions(case.num_experts)
    sent = dispatch(quantized(mine), mine.ids, None, group, options=options)
    local = dispatch(quantized(batch), batch.ids, None, LocalWorld(case.num_ranks), options=options)
    for part, local_part in zip(sent.recv_x[0], local.recv_x[rank], strict=True):
        assert torch.equal(part.float(), local_part.float())
    assert sent.recv_x[0][1].t().is_contiguous()  # k-major in memory


def _everything_in_a_group_of_two(rank: int) -> None:
    for case in CASES[2]:
        compare(case, rank, dist.group.WORLD)
    _idle_ranks(rank)
    _needs_differ(rank)
    _errors(rank)


def _everything_in_a_group_of_four(rank: int) -> None:
    near, far = two_by_two(rank)
    for case in CASES[4]:
        compare(case, rank, dist.group.WORLD)
        compare(case, rank, Hierarchy(near, far))
    for case in CASES[2][:3]:  # rank in the group is not the global rank
        compare(case, dist.get_rank(far), far)
    _stages_are_adjoint(rank, near, far)
    _tensor_parallel(rank, near, far)


def test_group_of_two() -> None:
    run_ranks(_everything_in_a_group_of_two, 2)


def test_group_of_three() -> None:
    run_ranks(_everything_in_a_group_of_three, 3)


def _everything_in_a_group_of_three(rank: int) -> None:
    for case in CASES[3]:
        compare(case, rank, dist.group.WORLD)


def test_group_of_four_sub_groups_two_levels_and_lanes() -> None:
    run_ranks(_everything_in_a_group_of_four, 4)


# ---------------------------------------------------------------- no rank is left waiting


def _idle_ranks(rank: int) -> None:
    """Rank 1's experts get nothing and its y comes back detached; steps with T = 0 on either or both ranks."""
    for step, tokens in enumerate([(64, 64), (0, 33), (33, 0), (0, 0), (17, 1)]):
        case = Case(tokens, 8, 2, named=(0, 4))
        mine = make_batch(case).of((rank,))
        x = mine.x[0].requires_grad_()
        sent = dispatch(x, mine.ids[0], mine.weights[0], dist.group.WORLD, options=DispatchOptions(8))
        y = sent.recv_x * 2 if rank == 0 else torch.empty_like(sent.recv_x)
        assert rank == 0 or y.shape[0] == 0
        out = combine(y, sent.handle).x
        assert out.shape == x.shape and out.requires_grad, step
        out.sum().backward()
        real = (mine.ids[0] >= 0).sum(1, keepdim=True)
        assert torch.equal(x.grad, (2.0 * real).expand_as(x).bfloat16()), step


def _needs_differ(rank: int) -> None:
    """Only rank 0 wants gradients: rank 1 takes part in the backward all the same."""
    batch = make_batch(CASES[2][0]).of((rank,))
    x, weights = batch.x[0].requires_grad_(rank == 0), batch.weights[0].requires_grad_(rank == 0)
    sent = dispatch(x, batch.ids[0], weights, dist.group.WORLD, options=DispatchOptions(8))
    combine(sent.recv_x * sent.recv_weights[:, None].bfloat16(), sent.handle).x.sum().backward()
    assert (x.grad is not None) == (weights.grad is not None) == (rank == 0)


def _errors(rank: int) -> None:
    x, ids, weights = torch.zeros(3, 8).bfloat16(), torch.zeros(3, 2, dtype=torch.int32), torch.zeros(3, 2)
    four = DispatchOptions(4)

    def refused(kinds: tuple[type[Exception], type[Exception]], match: str, *args, options=four, **more) -> None:
        with pytest.raises(kinds[rank], match=match):
            dispatch(*args, dist.group.WORLD, options=options, **more)

    wrong = lambda good, bad: (good, bad)[rank]  # noqa: E731
    alike = (MegaMoEValueError, MegaMoEValueError)
    types = (MegaMoERuntimeError, MegaMoETypeError)
    refused(types, r"x: expected bf16", wrong(x, x.float()), ids, weights)
    refused(types, r"x: expected bf16.*got a tuple of 1", wrong(x, (x,)), ids, weights)
    refused(types, r"x: expected a tensor, or a list of them, got None", wrong(x, None), ids, weights)
    refused(types, r"topk_weights: expected a tensor, .* got str", x, ids, wrong(weights, "ones"))
    refused(types, r"previous_event: expected a CommEvent", x, ids, weights, previous_event=wrong(None, "e"))
    refused(
        (MegaMoERuntimeError, MegaMoETypeError),
        r"options: expected DispatchOp",
        x,
        ids,
        weights,
        options=wrong(four, None),
    )
    refused(
        (MegaMoERuntimeError, MegaMoEValueError), r"topk_ids: expected the 3 tokens", x, wrong(ids, ids[:1]), weights
    )
    refused(alike, r"x.shape\[1\]: expected the value of rank 0, 8", wrong(x, x[:, :4]), ids, weights)
    refused(
        alike,
        "expand: expected the value of rank 0",
        x,
        ids,
        weights,
        options=wrong(four, DispatchOptions(4, expand=False)),
    )
    refused(alike, "topk_weights is not None: expected the value of rank 0", x, ids, wrong(weights, None))
    refused(alike, r"topk_ids\[1\]\[0, 0\]: expected -1 or an expert", x, wrong(ids, ids + 7), weights)
    dispatch(x, ids, weights, dist.group.WORLD, options=four)  # the group is still good


# ---------------------------------------------------------------- each stage and its way back


def dot(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() * b.double()).sum())


def total(value: float) -> float:
    everyone = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(everyone)
    return float(everyone)


def whole_numbers(*shape: int) -> torch.Tensor:
    """Small integers: sums in any order and precision are exact."""
    return torch.randint(-4, 5, shape).float()


def _stages_are_adjoint(rank: int, near: dist.ProcessGroup, far: dist.ProcessGroup) -> None:
    """sum over ranks of <forth(a), b> = <a, back(b)>, for each stage by itself and for all together."""
    torch.manual_seed(rank)
    for group in (dist.group.WORLD, Hierarchy(near, far), TensorParallel(far, near), TensorParallel(near, far)):
        wire = make_wire(group)
        _wire_is_adjoint(wire)
        case = Case((3, 8, 0, 5), 8, 4)
        batch = make_batch(case).of((wire.rank * wire.num_lanes + wire.lane,))
        for expand in (True, False):
            sent = dispatch(batch.x, batch.ids, batch.weights, group, options=DispatchOptions(8, expand=expand))
            _maps_are_adjoint(sent.handle, sent.recv_x[0], sent.recv_weights[0])


def _wire_is_adjoint(wire: Wire) -> None:
    """The all-to-alls (splits swapped on the way back), and the lanes' all-gather with its reduce-scatter."""
    lanes, ranks = wire.num_lanes, wire.num_ranks
    counts = [[[(5 * lane + 3 * s + 2 * d) % 4 for d in range(ranks)] for s in range(ranks)] for lane in range(lanes)]
    leaving = whole_numbers(sum(counts[wire.lane][wire.rank]), 3)
    arriving = whole_numbers(sum(row[wire.rank] for matrix in counts for row in matrix), 3)
    forth, back = wire.forth(leaving, counts), wire.start_back(arriving, counts)()
    assert forth.shape == arriving.shape and back.shape == leaving.shape
    assert total(dot(forth, arriving)) == total(dot(leaving, back))
    if lanes == 1:  # a permutation of rows: there and back is the identity, and the rows come by source
        assert torch.equal(wire.start_back(forth, counts)(), leaving)
        named = torch.cat([torch.full((n, 1), 10.0 * wire.rank + d) for d, n in enumerate(counts[0][wire.rank])])
        arrived = [10.0 * s + wire.rank for s in range(ranks) for _ in range(counts[0][s][wire.rank])]
        assert wire.forth(named, counts).flatten().tolist() == arrived


def _maps_are_adjoint(handle: Handle, rows: torch.Tensor, weights: torch.Tensor) -> None:
    """The permutations by owner and by local expert with the wire between them: rows, and weights."""
    x, p = whole_numbers(handle.num_tokens[0], HIDDEN).bfloat16(), whole_numbers(handle.num_tokens[0], handle.num_slots)
    y, dp = whole_numbers(*rows.shape).bfloat16(), whole_numbers(*weights.shape)
    (out,), (home,) = handle.rows_out([QuantizedRows(x, None)]), handle.rows_home([y])
    assert total(dot(out.data, y)) == total(dot(x, home))
    (out_weights,), (home_weights,) = handle.weights_out([p]), handle.weights_home([dp])
    assert total(dot(out_weights, dp)) == total(dot(p, home_weights))


def _tensor_parallel(rank: int, lanes: dist.ProcessGroup, experts: dist.ProcessGroup) -> None:
    """EP 2 x TP 2: both lanes of an owner see the same rows and answer with a share; the sums come home."""
    owner, lane = rank // 2, rank % 2
    group = TensorParallel(experts, lanes)
    for case in (Case((3, 8, 0, 5), 8, 4), Case((0, 5, 0, 0), 2, 2), Case((130, 5, 3, 40), 4, 2)):
        batch = make_batch(case)  # of rank 2 * owner + lane
        whole, mine = train_alone(case, batch), batch.of((rank,))
        worst = 4 * (max(case.tokens) + 2)
        for expand, bound in ((True, None), (False, None), (True, worst), (False, worst)):
            x, weights = mine.x[0].clone().requires_grad_(), mine.weights[0].clone().requires_grad_()
            options = DispatchOptions(case.num_experts, num_worst_tokens=bound, expand=expand)
            sent = dispatch(x, mine.ids[0], weights, group, options=options)
            expert = sent.handle.recv_topk_ids()[0]
            expert = torch.where(expert >= 0, expert + owner * case.num_experts // 2, -1)
            rows = sent.recv_x if expand else sent.recv_x[:, None]
            y = expert_rows(rows, expert, (0.25, 0.75)[lane] * sent.recv_weights)
            out = combine(y, sent.handle).x
            out.backward(mine.dout[0])
            for got, reference in ((out, whole.out), (x.grad, whole.dx), (weights.grad, whole.dw)):
                reference = reference[case.tokens_of(rank)]
                scale = max(float(reference.abs().max()), 1.0) if reference.numel() else 1.0
                torch.testing.assert_close(got, reference, rtol=2e-2, atol=2e-2 * scale)

    crossed = [dist.new_group([0, 3]), dist.new_group([1, 2])][int(rank in (1, 2))]
    with pytest.raises(MegaMoEValueError, match="world: expected rank . of lane . at that place of all its groups"):
        dispatch(x, mine.ids[0], weights, TensorParallel(experts, crossed), options=DispatchOptions(4))


# ---------------------------------------------------------------- static shapes never synchronise


class _Echo:
    """A wire of two equal ranks without processes."""

    num_ranks, rank, num_lanes, lane = 2, 0, 1, 0

    def gather(self, value: torch.Tensor) -> torch.Tensor:
        return torch.stack([value, value])[None]

    def forth(self, rows: torch.Tensor, counts: Any) -> torch.Tensor:
        assert rows.shape[0] == sum(counts[0][0])
        return rows

    def start_back(self, rows: torch.Tensor, counts: Any) -> Any:
        return lambda: rows


@pytest.mark.parametrize("expand", [True, False])
def test_static_layout_never_reads_the_device(expand: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake tensors refuse every operation whose shape or control flow depends on values."""
    monkeypatch.setattr(transport_module, "make_wire", lambda group: _Echo())
    transport = GroupTransport(None, torch_steps)
    options = DispatchOptions(4, num_worst_tokens=10, expand=expand)
    max_tokens, num_rows = static_sizes(options, transport, 2)
    assert (max_tokens, num_rows) == (5, 20 + 2 * 127 + 110)
    with FakeTensorMode():
        ids = torch.zeros(4, 2, dtype=torch.int64)
        plan = transport.plan([ids], 4, num_rows, max_tokens=max_tokens)
        tokens = None if expand else transport.plan_tokens(plan, options.num_worst_tokens)
        handle = Handle(None, options, transport, plan, tokens, (4,), 2)
        sent_rows = (5 if tokens is not None else 5 * 2) * 2
        assert handle.row_plan.exchange.sent_slot.shape == (sent_rows,)
        assert handle.recv_topk_ids()[0].shape == ((10, 2) if tokens is not None else (num_rows,))
        assert handle.tokens_per_expert()[0].aligned.shape == (2,)
        with pytest.raises(Exception, match="(?i)data.?dependent|_local_scalar_dense|cannot"):
            transport.plan([ids], 4)  # exact sizes do read it
