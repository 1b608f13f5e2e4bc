"""Dispatch and combine over LocalWorld: layout, order of rows, both modes, static shapes, gradients, errors."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from megamoe.comm import (
    CommEvent,
    DispatchOptions,
    Handle,
    LocalWorld,
    combine,
    dispatch,
    explicit,
    get_dispatch_layout,
)
from megamoe.comm.events import comm_stream
from megamoe.errors import MegaMoETypeError, MegaMoEValueError
from megamoe.quantize import QuantizedRows
from tests.support.comm_cases import CASES, HIDDEN, Case, check_outcome, make_batch, quantized, train, train_alone

ALL = [case for cases in CASES.values() for case in cases]


def first_experts(case: Case) -> list[int]:
    return [r * case.num_experts // case.num_ranks for r in range(case.num_ranks)]


@pytest.mark.parametrize("case", ALL, ids=str)
def test_layout_counts_by_enumeration(case: Case) -> None:
    per_rank = case.num_experts // case.num_ranks
    for ids in make_batch(case).ids:
        layout = get_dispatch_layout(ids, case.num_experts, case.num_ranks)
        for rank in range(case.num_ranks):
            here = [[rank * per_rank <= e < (rank + 1) * per_rank for e in token] for token in ids.tolist()]
            assert layout.is_token_in_rank[:, rank].tolist() == [any(token) for token in here]
            assert layout.num_tokens_per_rank[rank] == sum(map(any, here))
        flat = ids.flatten().tolist()
        assert layout.num_tokens_per_expert.tolist() == [flat.count(e) for e in range(case.num_experts)]


@pytest.mark.parametrize("alignment", [128, 1, 48])
@pytest.mark.parametrize("case", ALL, ids=str)
def test_expanded_rows_lie_in_order_with_zero_padding(case: Case, alignment: int) -> None:
    batch = make_batch(case)
    options = DispatchOptions(case.num_experts, expert_alignment=alignment)
    sent = dispatch(batch.x, batch.ids, batch.weights, LocalWorld(case.num_ranks), options=options)
    per_rank = case.num_experts // case.num_ranks
    for rank, received in enumerate(sent.handle.received()):
        rows, weights = sent.recv_x[rank], sent.recv_weights[rank]
        counts, row = sent.tokens_per_expert[rank], 0
        for local in range(per_rank):
            begin = row
            for source, ids in enumerate(batch.ids):
                for token, slot in (ids == rank * per_rank + local).nonzero().tolist():
                    assert torch.equal(rows[row], batch.x[source][token])
                    assert weights[row] == batch.weights[source][token, slot]
                    identity = [v[row].item() for v in (received.source_rank, received.token, received.slot)]
                    assert identity == [source, token, slot]
                    assert sent.handle.recv_topk_ids()[rank][row] == local
                    row += 1
            assert counts.real[local] == row - begin
            end = begin + -(-(row - begin) // alignment) * alignment
            assert counts.aligned[local] == end - begin
            assert rows[row:end].count_nonzero() == 0 and weights[row:end].count_nonzero() == 0
            assert (received.token[row:end] == -1).all() and (sent.handle.recv_topk_ids()[rank][row:end] == -1).all()
            row = end
        assert rows.shape == (row, HIDDEN)


@pytest.mark.parametrize("case", ALL, ids=str)
def test_rows_not_expanded_come_once_per_rank_by_source_and_token(case: Case) -> None:
    batch = make_batch(case)
    options = DispatchOptions(case.num_experts, expand=False)
    sent = dispatch(batch.x, batch.ids, batch.weights, LocalWorld(case.num_ranks), options=options)
    per_rank = case.num_experts // case.num_ranks
    for rank, received in enumerate(sent.handle.received()):
        expected_rows = []
        for source, ids in enumerate(batch.ids):
            here = (ids >= rank * per_rank) & (ids < (rank + 1) * per_rank)
            expected_rows += [(source, token) for token in here.any(1).nonzero().flatten().tolist()]
        assert list(zip(received.source_rank.tolist(), received.token.tolist(), strict=True)) == expected_rows
        assert (received.slot == -1).all()
        own = sent.handle.recv_topk_ids()[rank]
        assert own.shape == sent.recv_weights[rank].shape == (len(expected_rows), case.slots)
        for row, (source, token) in enumerate(expected_rows):
            assert torch.equal(sent.recv_x[rank][row], batch.x[source][token])
            ids = batch.ids[source][token] - rank * per_rank
            is_local = (ids >= 0) & (ids < per_rank) & (batch.ids[source][token] >= 0)
            assert torch.equal(own[row], torch.where(is_local, ids, -1))
            assert torch.equal(sent.recv_weights[rank][row], batch.weights[source][token] * is_local)
        flat = own.flatten().tolist()
        assert sent.tokens_per_expert[rank].real.tolist() == [flat.count(e) for e in range(per_rank)]


@pytest.mark.parametrize("case", ALL, ids=str)
def test_everything_equals_one_rank(case: Case) -> None:
    batch, world = make_batch(case), LocalWorld(case.num_ranks)
    whole = train_alone(case, batch)
    worst = case.num_ranks * (max(case.tokens) + 2)
    for options in (
        DispatchOptions(case.num_experts),
        DispatchOptions(case.num_experts, expert_alignment=16),
        DispatchOptions(case.num_experts, num_worst_tokens=worst),
        DispatchOptions(case.num_experts, expand=False),
        DispatchOptions(case.num_experts, expand=False, num_worst_tokens=worst),
    ):
        outcomes, sent = train(batch, world, options, first_experts(case))
        for rank, outcome in enumerate(outcomes):
            check_outcome(case, rank, outcome, whole, is_exact=options.expand)
            assert torch.equal(outcome.weights_home, whole.weights_home[case.tokens_of(rank)])
        again, cached = train(batch, world, options, first_experts(case), handle=sent.handle)
        assert cached.handle.plan is sent.handle.plan
        for first, second in zip(outcomes, again, strict=True):
            assert torch.equal(first.out, second.out) and torch.equal(first.dx, second.dx)


@pytest.mark.parametrize("expand", [True, False])
def test_the_way_back_is_the_other_call_on_the_same_handle(expand: bool) -> None:
    case = CASES[2][0]
    batch, world = make_batch(case), LocalWorld(2)
    xs, ws = [x.requires_grad_() for x in batch.x], [w.requires_grad_() for w in batch.weights]
    sent = dispatch(xs, batch.ids, ws, world, options=DispatchOptions(case.num_experts, expand=expand))
    d_rows = [torch.randn_like(rows) for rows in sent.recv_x]
    d_weights = [torch.randn_like(w) for w in sent.recv_weights]
    torch.autograd.backward(sent.recv_x + sent.recv_weights, d_rows + d_weights)
    home = combine(d_rows, sent.handle, topk_weights=d_weights)
    for rank in range(2):
        assert torch.equal(xs[rank].grad, home.x[rank]) and torch.equal(ws[rank].grad, home.weights[rank])

    ys = [torch.randn_like(rows).requires_grad_() for rows in d_rows]
    numbers = [torch.randn_like(w).requires_grad_() for w in d_weights]
    home = combine(ys, sent.handle, topk_weights=numbers)
    d_home = [torch.randn_like(w) for w in home.weights]
    torch.autograd.backward(home.x + home.weights, batch.dout + d_home)
    forth = dispatch(batch.dout, topk_weights=d_home, handle=sent.handle)
    for rank in range(2):
        assert torch.equal(ys[rank].grad, forth.recv_x[rank])
        assert torch.equal(numbers[rank].grad, forth.recv_weights[rank])


def test_fp8_rows_travel_with_their_scales() -> None:
    case = CASES[2][0]
    batch = make_batch(case)
    for expand in (True, False):
        options = DispatchOptions(case.num_experts, expand=expand)
        sent = dispatch(quantized(batch), batch.ids, None, LocalWorld(2), options=options)
        plain = dispatch(batch.x, batch.ids, None, LocalWorld(2), options=options)
        assert sent.recv_weights is None and sent.handle.anchor is None
        for (data, scale), rows in zip(sent.recv_x, plain.recv_x, strict=True):
            assert data.dtype == torch.float8_e4m3fn and scale.shape == (rows.shape[0], 2)
            assert scale.t().is_contiguous()  # k-major, as the GEMMs read a pool
            torch.testing.assert_close(QuantizedRows(data, scale).dequantize(), rows.float(), rtol=0.07, atol=0.02)


def test_static_shapes_depend_on_nothing_but_the_bound() -> None:
    case = CASES[2][0]
    batch = make_batch(case)
    for expand, rows in ((True, 1024), (False, 16)):
        options = DispatchOptions(case.num_experts, num_worst_tokens=16, expand=expand)
        for ids in (batch.ids, [torch.full_like(i, 3) for i in batch.ids], [torch.full_like(i, -1) for i in batch.ids]):
            sent = dispatch(batch.x, ids, batch.weights, LocalWorld(2), options=options)
            assert [tuple(r.shape) for r in sent.recv_x] == [(640 if expand else rows, HIDDEN)] * 2


def test_an_expert_loop_of_its_own_over_rows_not_expanded() -> None:
    """A dispatch among the rank's own experts, nested: its combine adds their rows, which then travel as one."""
    case = CASES[2][0]
    batch = make_batch(case)
    whole = train_alone(case, batch)
    sent = dispatch(
        batch.x, batch.ids, batch.weights, LocalWorld(2), options=DispatchOptions(case.num_experts, expand=False)
    )
    ys = []
    for rows, weights, own, first in zip(
        sent.recv_x, sent.recv_weights, sent.handle.recv_topk_ids(), first_experts(case), strict=True
    ):
        inner = dispatch(rows, own, weights, options=DispatchOptions(case.num_experts // 2))
        expert = inner.handle.recv_topk_ids()[0] + first
        y = (inner.recv_x.float() * (expert + 1)[:, None] * inner.recv_weights[:, None]).bfloat16()
        ys.append(combine(y, inner.handle).x)
    home = combine(ys, sent.handle)
    for rank in range(2):
        torch.testing.assert_close(home.x[rank], whole.out[case.tokens_of(rank)], rtol=2e-2, atol=2e-2)


def test_bias_is_added_and_gets_its_gradient() -> None:
    case = CASES[2][0]
    batch = make_batch(case)
    sent = dispatch(batch.x, batch.ids, None, LocalWorld(2), options=DispatchOptions(case.num_experts))
    bias = [torch.randn_like(x).requires_grad_() for x in batch.x]
    plain = combine(sent.recv_x, sent.handle)
    home = combine(sent.recv_x, sent.handle, bias=bias)
    torch.autograd.backward(home.x, batch.dout)
    for rank in range(2):
        assert torch.equal(home.x[rank], (plain.x[rank].float() + bias[rank].float()).bfloat16())
        assert torch.equal(bias[rank].grad, batch.dout[rank])


def test_one_tensor_for_one_rank_and_events_on_the_cpu() -> None:
    batch = make_batch(Case((5,), 4, 2))
    (x,), (ids,), (weights,) = batch.x, batch.ids, batch.weights
    for world in (None, LocalWorld(1)):
        sent = dispatch(
            x, ids, weights, world, options=DispatchOptions(4), async_op=True, previous_event=CommEvent.record(x.device)
        )
        assert sent.recv_x.shape[1] == HIDDEN and sent.tokens_per_expert.real.sum() == (ids >= 0).sum()
        sent.event.current_stream_wait()
        home = combine(sent.recv_x, sent.handle, async_op=True, previous_event=sent.event)
        home.event.current_stream_wait()
        assert home.x.shape == x.shape and home.weights is None
        many = (ids >= 0).sum(1, keepdim=True)
        torch.testing.assert_close(home.x.float(), x.float() * many, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("expand", [True, False])
def test_the_allocator_learns_of_all_that_a_call_reads_and_makes(expand: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a stream of its own: inputs when it begins, results with its event, plans both ways."""
    given, recorded, running = [], [], []

    @contextlib.contextmanager
    def comm_stream(inputs, is_async, previous_event):
        given[:] = inputs
        running.append(True)
        yield
        running.clear()

    def record(device, tensors=()):
        assert running
        recorded[:] = tensors
        return CommEvent()

    def counted(handle):
        assert running, "on the stream that made the plan"
        return counts(handle)

    def among(tensors, wanted):
        return {id(tensor) for tensor in wanted} <= {id(tensor) for tensor in tensors}

    counts = Handle.tokens_per_expert
    monkeypatch.setattr(Handle, "tokens_per_expert", counted)
    monkeypatch.setattr(explicit, "comm_stream", comm_stream)
    monkeypatch.setattr(CommEvent, "record", record)
    batch = make_batch(CASES[2][0])
    with torch.no_grad():
        sent = dispatch(batch.x, batch.ids, batch.weights, LocalWorld(2), options=DispatchOptions(8, expand=expand))
    assert among(given, [*batch.x, *batch.ids, *batch.weights])
    plans = [plan for plan in (sent.handle.plan, sent.handle.token_plan) if plan is not None]
    held = [t for plan in plans for rank in plan.ranks for t in vars(rank).values()]
    held += [t for plan in plans for t in (*plan.owner, *plan.row)]
    assert among(recorded, [*sent.recv_x, *sent.recv_weights, *held])
    assert among(recorded, [t for pair in sent.tokens_per_expert for t in pair])
    with torch.no_grad():
        combine(sent.recv_x, sent.handle, topk_weights=sent.recv_weights, bias=batch.x)
        assert among(given, [*sent.recv_x, *sent.recv_weights, *batch.x, *held])
        dispatch(batch.x, handle=sent.handle)
        assert among(given, [*batch.x, *held])


def test_an_event_is_waited_for_on_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Device 0 is the current one, the event is of device 1."""
    waits = []

    def current_stream(device=None):
        return SimpleNamespace(wait_event=lambda event: waits.append((device or torch.device("cuda:0")).index))

    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    event = CommEvent(SimpleNamespace(device=torch.device("cuda:1")))
    event.current_stream_wait()
    rows = SimpleNamespace(device=torch.device("cuda:2"))
    with comm_stream([rows], is_async=False, previous_event=event):
        pass
    assert waits == [1, 2], "alone on its own device; before a call on the device of that"


def test_results_are_attached_whatever_requires_a_gradient() -> None:
    batch = make_batch(Case((5, 0), 4, 2))
    sent = dispatch(batch.x, batch.ids, batch.weights, LocalWorld(2), options=DispatchOptions(4))
    assert all(t.requires_grad for t in sent.recv_x + sent.recv_weights)
    home = combine([rows.detach() for rows in sent.recv_x], sent.handle)
    assert all(out.requires_grad for out in home.x)
    with torch.no_grad():
        sent = dispatch(batch.x, batch.ids, batch.weights, LocalWorld(2), options=DispatchOptions(4))
        assert not any(t.requires_grad for t in sent.recv_x) and sent.handle.anchor is None


def test_a_detached_y_still_runs_the_backward_of_its_dispatch() -> None:
    """Otherwise a rank without rows would leave its peers waiting in the backward."""
    batch = make_batch(Case((5, 4), 4, 2))
    xs = [x.requires_grad_() for x in batch.x]
    sent = dispatch(xs, batch.ids, None, LocalWorld(2), options=DispatchOptions(4))
    home = combine([rows.detach() for rows in sent.recv_x], sent.handle)
    torch.autograd.backward(home.x, batch.dout)
    for x in xs:
        assert x.grad is not None and x.grad.count_nonzero() == 0


def test_bad_options_are_refused() -> None:
    for name in ("num_experts", "expert_alignment", "num_worst_tokens"):
        with pytest.raises(MegaMoEValueError, match=f"{name}: expected at least 1, got 0"):
            DispatchOptions(**{"num_experts": 4, name: 0})
        with pytest.raises(MegaMoETypeError, match=f"{name}: expected an integer, got 'four'"):
            DispatchOptions(**{"num_experts": 4, name: "four"})
    with pytest.raises(MegaMoETypeError, match="expand: expected True or False, got None"):
        DispatchOptions(4, expand=None)
    with pytest.raises(MegaMoETypeError, match="topk_ids: expected int32 or int64"):
        get_dispatch_layout(torch.zeros(2, 2), 4, 2)
    with pytest.raises(MegaMoETypeError, match="topk_ids: expected an int32 or int64 tensor .* got NoneType"):
        get_dispatch_layout(None, 4, 2)
    with pytest.raises(MegaMoEValueError, match="num_experts: expected a positive multiple of the 3 ranks, got 4"):
        get_dispatch_layout(torch.zeros(2, 2, dtype=torch.int64), 4, 3)


def test_bad_arguments_of_dispatch_are_refused() -> None:
    x, ids, weights = torch.zeros(3, 8).bfloat16(), torch.zeros(3, 2, dtype=torch.int32), torch.zeros(3, 2)
    four = DispatchOptions(4)

    def refused(kind: type[Exception], match: str, *args, **kwargs) -> None:
        with pytest.raises(kind, match=match):
            dispatch(*args, **({"options": four} | kwargs))

    refused(MegaMoETypeError, "^x: expected a tensor, or a list of them, got None.$", None)
    refused(MegaMoETypeError, "^topk_ids: expected a tensor, or a list of them, got str.$", x, "ids")
    refused(MegaMoETypeError, "options: expected DispatchOptions, got NoneType. Pass", x, ids, options=None)
    refused(MegaMoETypeError, "options: expected DispatchOptions, got dict. Pass", x, ids, options={"num_experts": 4})
    refused(MegaMoETypeError, "previous_event: expected a CommEvent or None, got str.", x, ids, previous_event="e")
    refused(MegaMoEValueError, "topk_ids: expected a tensor, got None", x)
    refused(
        MegaMoEValueError,
        "x: expected a list with a tensor for each of the 2 ranks, got 1",
        x,
        ids,
        None,
        LocalWorld(2),
    )
    refused(
        MegaMoEValueError,
        "num_experts: expected a multiple of the 3 ranks, got 4",
        [x] * 3,
        [ids] * 3,
        None,
        LocalWorld(3),
    )
    refused(MegaMoETypeError, "world: expected a LocalWorld", x, ids, None, "world")
    refused(MegaMoETypeError, r"x: expected bf16 \[T, H\] or .*, got torch.float32", x.float(), ids)
    refused(MegaMoEValueError, r"x: expected bf16 \[T, H\] or .*, got shape \(24,\)", x.flatten(), ids)
    refused(MegaMoETypeError, r"x: expected .*, got a tuple of 3", (x, x, x), ids)
    refused(MegaMoETypeError, r"x: expected .*, got a tuple of 1", (x,), ids)
    refused(MegaMoETypeError, r"x: expected .*, got a tuple of 0", (), ids)
    refused(MegaMoETypeError, r"x: expected .*, got \(torch.bfloat16, torch.float32\)", (x, weights[:, :1]), ids)
    q = x.to(torch.float8_e4m3fn)
    refused(MegaMoEValueError, r"x's scales: expected \[3, 1\], got \(3, 2\)", (q, weights), ids)
    two, unlike = (
        ([ids] * 2, None, LocalWorld(2)),
        r"x\[1\]: expected torch.bfloat16 and H = 8 as on rank 0, got torch.",
    )
    refused(MegaMoEValueError, unlike + "float8_e4m3fn and H = 8", [x, (q, weights[:, :1].contiguous())], *two)
    refused(MegaMoEValueError, unlike + "bfloat16 and H = 4", [x, x[:, :4]], *two)
    apart = "topk_ids: expected tensors on cpu like all others of the call, got meta"
    refused(MegaMoEValueError, apart, x, ids.to("meta"))
    refused(MegaMoETypeError, "topk_ids: expected int32 or int64, got torch.float32", x, ids.float())
    refused(MegaMoEValueError, r"topk_ids: expected \[T, K\]", x, ids[0])
    refused(MegaMoEValueError, "topk_ids: expected the 3 tokens of x, got 2", x, ids[:2])
    refused(MegaMoEValueError, r"topk_ids\[0, 0\]: expected -1 or an expert in \[0, 4\), got 9", x, ids + 9)
    refused(MegaMoETypeError, r"topk_weights: expected fp32 \[3, 2\], got torch.bfloat16", x, ids, weights.bfloat16())
    refused(MegaMoEValueError, r"topk_weights: expected fp32 \[3, 2\], got shape \(3, 1\)", x, ids, weights[:, :1])
    both = r"(?s)x: expected .*torch.float32.*topk_weights: expected fp32"
    refused(MegaMoETypeError, both, x.float(), ids, weights[:, :1])  # all faults at once
    worst = DispatchOptions(4, num_worst_tokens=4)
    refused(
        MegaMoEValueError,
        "num_worst_tokens: expected at least 2 ranks times the 3 tokens of x",
        [x] * 2,
        [ids] * 2,
        None,
        LocalWorld(2),
        options=worst,
    )
    worst = DispatchOptions(4, num_worst_tokens=7)
    refused(
        MegaMoEValueError,
        "num_worst_tokens: expected a multiple of the 2 ranks",
        [x] * 2,
        [ids] * 2,
        None,
        LocalWorld(2),
        options=worst,
    )


def test_bad_arguments_with_a_handle_are_refused() -> None:
    x, ids, weights = torch.zeros(3, 8).bfloat16(), torch.zeros(3, 2, dtype=torch.int32), torch.zeros(3, 2)
    handle = dispatch(x, ids, weights, options=DispatchOptions(4, expert_alignment=8)).handle

    def refused(kind: type[Exception], match: str, *args, call=dispatch, **kwargs) -> None:
        with pytest.raises(kind, match=match):
            call(*args, **kwargs)

    refused(MegaMoEValueError, "topk_ids: expected None with a handle", x, ids, handle=handle)
    refused(MegaMoEValueError, "world: expected that of the handle", x, world=LocalWorld(2), handle=handle)
    refused(MegaMoEValueError, "options: expected those of the handle", x, options=DispatchOptions(4), handle=handle)
    refused(MegaMoEValueError, "x: expected the 3 tokens of the handle, got 2", x[:2], handle=handle)
    refused(MegaMoEValueError, r"topk_weights: expected fp32 \[3, 2\]", x, topk_weights=weights[:2], handle=handle)
    refused(MegaMoETypeError, "handle: expected the Handle of a dispatch, or None, got str", x, handle="h")
    refused(MegaMoETypeError, r"x: expected .*, got a tuple of 1", (x,), handle=handle)
    refused(MegaMoETypeError, "^x: expected a tensor, or a list of them, got str.$", "x", handle=handle)
    pair = dispatch([x] * 2, [ids] * 2, None, LocalWorld(2), options=DispatchOptions(4, expert_alignment=8)).handle
    refused(MegaMoEValueError, r"x\[1\]: expected torch.bfloat16 and H = 8 as", [x, x[:, :4]], handle=pair)

    y = torch.zeros(8, 8).bfloat16()
    combine(y, handle)
    ys = [torch.zeros(mine.num_rows, 8).bfloat16() for mine in pair.received()]
    combine(ys, pair)
    unlike = r"y\[1\]: expected torch.bfloat16 and H = 8 as on rank 0, got torch.bfloat16 and H = 4"
    refused(MegaMoEValueError, unlike, [ys[0], ys[1][:, :4]], pair, call=combine)
    apart = "bias: expected tensors on cpu like all others of the call, got meta"
    refused(MegaMoEValueError, apart, y, handle, None, x.to("meta"), call=combine)
    refused(MegaMoETypeError, "previous_event: expected a CommEvent", y, handle, previous_event="e", call=combine)
    refused(MegaMoETypeError, "handle: expected the Handle of a dispatch, got NoneType", y, None, call=combine)
    refused(MegaMoEValueError, "y: expected a tensor, got 2 tensors", [y, y], handle, call=combine)
    refused(MegaMoEValueError, "^y: expected a tensor, got None.$", None, handle, call=combine)
    refused(MegaMoETypeError, "y: expected a tensor, got str", "y", handle, call=combine)
    refused(MegaMoETypeError, r"y: expected bf16 \[8, H\], got torch.float32", y.float(), handle, call=combine)
    refused(
        MegaMoEValueError, r"y: expected bf16 \[8, H\], got shape \(6, 8\). Return a row", y[:6], handle, call=combine
    )
    refused(
        MegaMoEValueError, r"y: expected bf16 \[8, H\], got shape", y[:, None].expand(8, 2, 8), handle, call=combine
    )
    refused(MegaMoEValueError, r"topk_weights: expected fp32 \[8\]", y, handle, weights, call=combine)
    refused(MegaMoEValueError, r"bias: expected bf16 \[3, 8\], got shape", y, handle, None, y, call=combine)
    refused(
        MegaMoETypeError, r"bias: expected bf16 \[3, 8\], got torch.float32", y, handle, None, x.float(), call=combine
    )
