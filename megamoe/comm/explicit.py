"""Dispatch and combine as separate, differentiable calls: for experts that the layer of this package does not know.

Token-major to destination-major to expert-major, and back. Each call is a linear map of the rows it is given, and the
backward of one is the forward of the other on the same handle.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch.autograd.function import once_differentiable

from megamoe.comm.checks import Arguments, check_cached_dispatch, check_combine, check_dispatch, flat
from megamoe.comm.events import CommEvent, comm_stream
from megamoe.comm.handle import DispatchOptions, Handle, TokensPerExpert, static_sizes, steps_for
from megamoe.comm.transport import Transport, World, as_transport
from megamoe.quantize import QuantizedRows
from megamoe.routing_plan import RoutingPlan

Rows = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Map = Callable[[list[torch.Tensor]], list[torch.Tensor]]


class Dispatched(NamedTuple):
    """What dispatch returns; over a LocalWorld every field but handle and event is a list of R.

    recv_x: bf16 [P, H], or (e4m3 [P, H], fp32 [P, H / 128], k-major in memory). recv_weights: fp32 [P], None if no
    weights were given. tokens_per_expert: real and aligned counts. With `expand=False` N rows, and weights [N, K].
    """

    recv_x: Any
    recv_weights: Any
    tokens_per_expert: TokensPerExpert | list[TokensPerExpert]
    handle: Handle
    event: CommEvent


class Combined(NamedTuple):
    """What combine returns: x bf16 [T, H], weights fp32 [T, K] (None if none were given), event. Lists as above."""

    x: Any
    weights: Any
    event: CommEvent


def dispatch(
    x: Rows | list[Rows],
    topk_ids: torch.Tensor | list[torch.Tensor] | None = None,
    topk_weights: torch.Tensor | list[torch.Tensor] | None = None,
    world: World = None,
    *,
    options: DispatchOptions | None = None,
    handle: Handle | None = None,
    async_op: bool = False,
    previous_event: CommEvent | None = None,
) -> Dispatched:
    """Bring tokens to the ranks that own their experts. Every rank of the world makes the call, also with T = 0.

    Args:
        x: bf16 [T, H], or (e4m3 [T, H], fp32 [T, ceil(H / 128)]), which carries no gradient. T may differ and be 0.
        topk_ids: int32 or int64 [T, K], global expert ids, -1 for no expert; the same expert twice is two rows.
        topk_weights: fp32 [T, K], or None if no weights are to travel.
        world: a LocalWorld (then x, ids and weights are lists of R), a process group, a Hierarchy, a TensorParallel, or
            None for one rank.
        options: number of experts, alignment, static shapes, expanded rows or not; needed without a handle.
        handle: of an earlier dispatch of the same ids, instead of topk_ids, world and options: skips the layout.
        async_op: on CUDA, run on a stream of its own; wait with `event.current_stream_wait()` before using results.
        previous_event: what the call waits for; None: all work of the current stream.

    Returns:
        Dispatched. Expanded rows are in (local expert, source rank, token, slot) order, each expert's segment aligned
        and its padding zero; rows not expanded are in (source rank, token) order. Repeatable bit for bit.

    Raises:
        MegaMoETypeError, MegaMoEValueError: arguments outside the contract. Over a group all ranks raise: those whose
        arguments are right raise MegaMoERuntimeError (with a handle or `num_worst_tokens` only the rank at fault).

    Effects: one read-back of sizes without a handle and without `num_worst_tokens`; else no host synchronisation. Under
    grad mode results are attached to autograd whatever x requires, since other ranks wait for the backward; x and
    weights get their gradients by the way of `combine`.
    """
    call = Arguments(_as_list(x), _as_list(topk_ids), _as_list(topk_weights), previous_event)
    if handle is None:
        transport = as_transport(world, steps_for(call.device))
        error = check_dispatch(call, options, transport).error()
        if error is not None:
            _meet_with(error, transport, call, options)
    else:
        check_cached_dispatch(call, world, options, handle).raise_any()
    inputs = call.tensors if handle is None else call.tensors + handle.tensors()
    with comm_stream(inputs, async_op, previous_event):
        if handle is None:
            assert options is not None
            plans = _plan(transport, call, options)
            tokens = tuple(ids.shape[0] for ids in call.topk_ids)
            handle = Handle(world, options, transport, *plans, tokens, call.topk_ids[0].shape[1])
        recv_x, recv_weights, anchor = _send(handle, call.x, call.topk_weights)
        counts = handle.tokens_per_expert()
        made = [*flat(recv_x), *recv_weights, *(part for pair in counts for part in pair), *handle.tensors()]
        event = CommEvent.record(call.device, made)
    handle = dataclasses.replace(handle, anchor=anchor)
    arrived = _like(recv_weights, x) if recv_weights else None
    return Dispatched(_like(recv_x, x), arrived, _like(counts, x), handle, event)


def combine(
    y: torch.Tensor | list[torch.Tensor],
    handle: Handle,
    topk_weights: torch.Tensor | list[torch.Tensor] | None = None,
    bias: torch.Tensor | list[torch.Tensor] | None = None,
    *,
    async_op: bool = False,
    previous_event: CommEvent | None = None,
) -> Combined:
    """Bring the experts' rows home and add them, each token at its source. Every rank makes the call.

    Args:
        y: bf16 [P, H], a row for each that was received; padding is not read. With `expand=False` [N, H], or
            [N, K, H]: the rows of a token's slots (of those whose expert is local), which are added here in fp32 and
            travel as one row. Routing weights are not applied: the experts do that.
        handle: of the dispatch.
        topk_weights: fp32 [P] ([N, K] with `expand=False`): numbers of the rows that travel home to their slots.
        bias: bf16 [T, H], added to the sum in fp32.
        async_op, previous_event: as for dispatch.

    Returns:
        Combined. The sum is in fp32, over slots ascending (over ranks with `expand=False`), rounded once, and once more
        if there is a bias.

    Raises:
        MegaMoETypeError, MegaMoEValueError: arguments outside the contract; on the rank at fault only.

    Effects: no host synchronisation; repeatable bit for bit.
    """
    ys, values, biases = _as_list(y), _as_list(topk_weights), _as_list(bias)
    check_combine(ys, values, biases, handle, previous_event).raise_any()
    n = len(ys)

    def home(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return handle.rows_home(tensors[:n]) + (handle.weights_home(tensors[n:]) if values else [])

    def out(grads: list[torch.Tensor]) -> list[torch.Tensor]:
        return _data(handle.rows_out(_unscaled(grads[:n]))) + (handle.weights_out(grads[n:]) if values else [])

    with comm_stream(ys + values + biases + handle.tensors(), async_op, previous_event):
        if any(rows.dim() == 3 for rows in ys):
            ys = [_add_slots(rows, own) for rows, own in zip(ys, handle.recv_topk_ids(), strict=True)]
        # Experts without rows easily lose the thread of autograd; the dispatch must run backward all the same.
        anchor = None if any(rows.requires_grad for rows in ys) else handle.anchor
        results, _ = _apply(home, out, anchor, ys + values)
        sums, weights = results[:n], results[n:]
        if biases:
            sums = [(s.float() + b.float()).to(torch.bfloat16) for s, b in zip(sums, biases, strict=True)]
        event = CommEvent.record(ys[0].device, sums + weights)
    return Combined(_like(sums, y), _like(weights, y) if values else None, event)


_AGREED = ("x.shape[1]", "x.element_size()", "expand", "topk_weights is not None")
"""What is equal on all ranks that make a layout together, besides what every plan compares."""


def _plan(transport: Transport, call: Arguments, options: DispatchOptions) -> tuple[RoutingPlan, RoutingPlan | None]:
    """The layout of a new call."""
    max_tokens, num_rows = static_sizes(options, transport, call.topk_ids[0].shape[1])
    rows = flat(call.x)[0]
    agreed = (rows.shape[1], rows.element_size(), options.expand, bool(call.topk_weights))
    plan = transport.plan(
        call.topk_ids,
        options.num_experts,
        num_rows,
        alignment=options.expert_alignment,
        max_tokens=max_tokens,
        agreed=dict(zip(_AGREED, agreed, strict=True)),
    )
    return plan, None if options.expand else transport.plan_tokens(plan, options.num_worst_tokens)


def _meet_with(error: Exception, transport: Transport, call: Arguments, options: Any) -> NoReturn:
    """Raise what is wrong with this rank's arguments; where ranks meet before a call, on all of them."""
    if not isinstance(options, DispatchOptions) or options.num_worst_tokens is None:
        nothing = [torch.empty(0, 0, dtype=torch.int64, device=call.device)] * len(transport.local_ranks)
        transport.plan(nothing, transport.num_ranks, agreed=dict.fromkeys(_AGREED, 0), error=error)
    raise error


class _Linear(torch.autograd.Function):
    """A linear map of a list of tensors whose backward is its adjoint, and an anchor that ties it to autograd.

    The node exists whether or not a tensor of this rank requires a gradient: the backward is collective.
    """

    @staticmethod
    def forward(
        ctx: Any, there: Map, back: Map, anchor: torch.Tensor, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.back = back
        return (*there(list(tensors)), torch.zeros_like(anchor))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, None, grads[-1], *ctx.back(list(grads[:-1])))


def _apply(
    there: Map, back: Map, anchor: torch.Tensor | None, tensors: list[torch.Tensor]
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """`there(tensors)`, differentiable by `back`; and the anchor for what follows (None without gradients)."""
    if not torch.is_grad_enabled():
        return there(tensors), None
    if anchor is None:
        anchor = torch.zeros((), device=tensors[0].device, requires_grad=True)
    *results, anchor = _Linear.apply(there, back, anchor, *tensors)
    return results, anchor


def _send(
    handle: Handle, xs: list[Any], weights: list[torch.Tensor]
) -> tuple[list[Any], list[torch.Tensor], torch.Tensor | None]:
    """(recv_x, recv_weights, anchor): rows first, then weights, forth and back."""
    n = 0 if isinstance(xs[0], tuple) else len(xs)  # tensors of x that autograd knows

    def out(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        rows = _data(handle.rows_out(_unscaled(tensors[:n]))) if n else []
        return rows + (handle.weights_out(tensors[n:]) if weights else [])

    def home(grads: list[torch.Tensor]) -> list[torch.Tensor]:
        rows = handle.rows_home(grads[:n]) if n else []
        return rows + (handle.weights_home(grads[n:]) if weights else [])

    recv_x: list[Any] = []
    if not n:
        pools = handle.rows_out([QuantizedRows(q.contiguous(), s.contiguous()) for q, s in xs])
        recv_x = [(pool.data, pool.scale_row_major()) for pool in pools]
        if not weights:
            return recv_x, [], None
    results, anchor = _apply(out, home, None, (xs if n else []) + weights)
    return recv_x or results[:n], results[n:], anchor


def _add_slots(y: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """[N, K, H] -> [N, H]: the rows of local experts, added in fp32 over slots ascending, rounded once."""
    if y.dim() == 2:
        return y
    total = torch.zeros_like(y[:, 0], dtype=torch.float32)
    for slot in range(y.shape[1]):
        total = total + torch.where(own[:, slot, None] >= 0, y[:, slot].float(), 0.0)
    return total.to(y.dtype)


def _unscaled(rows: Sequence[torch.Tensor]) -> list[QuantizedRows]:
    return [QuantizedRows(x.contiguous(), None) for x in rows]


def _data(rows: Sequence[QuantizedRows]) -> list[torch.Tensor]:
    return [x.data for x in rows]


def _as_list(value: Any) -> list[Any]:
    """One entry per local rank; None is no entry."""
    return list(value) if isinstance(value, list) else [] if value is None else [value]


def _like(values: list[Any], given: Any) -> Any:
    """Results in the form of the argument: a list for a list."""
    return values if isinstance(given, list) else values[0]
