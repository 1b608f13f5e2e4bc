"""Checks of what a user hands to dispatch and combine: on metadata before anything is exchanged, all faults at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from megamoe.comm.events import CommEvent
from megamoe.comm.handle import DispatchOptions, Handle
from megamoe.comm.transport import Transport, World
from megamoe.errors import MegaMoEError, MegaMoETypeError, MegaMoEValueError, expected
from megamoe.quantize import FP8, ceil_div
from megamoe.recipe import BLOCK
from megamoe.routing_plan import check_topk_ids

ROWS = "bf16 [T, H] or (e4m3 [T, H], fp32 [T, ceil(H / 128)])"


class Problems:
    """The faults of one call."""

    def __init__(self) -> None:
        self._found: list[MegaMoEError] = []

    def type(self, argument: str, contract: str, got: object, next_step: str = "") -> None:
        self._found.append(MegaMoETypeError(expected(argument, contract, got, next_step)))

    def value(self, argument: str, contract: str, got: object, next_step: str = "") -> None:
        self._found.append(MegaMoEValueError(expected(argument, contract, got, next_step)))

    def add(self, error: MegaMoEError) -> None:
        self._found.append(error)

    def error(self) -> MegaMoEError | None:
        """One error that names all of them, of the first one's type; None if there are none."""
        if len(self._found) < 2:
            return self._found[0] if self._found else None
        return type(self._found[0])("\n".join(str(error) for error in self._found))

    def raise_any(self) -> None:
        error = self.error()
        if error is not None:
            raise error


@dataclasses.dataclass(frozen=True)
class Arguments:
    """What a dispatch is given, an entry for each local rank; no entry for None. Nothing is checked yet."""

    x: list[Any]
    topk_ids: list[Any]
    topk_weights: list[Any]
    previous_event: Any = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors among them, those of x first."""
        given = [*flat(self.x), *self.topk_ids, *self.topk_weights]
        return [part for part in given if isinstance(part, torch.Tensor)]

    @property
    def device(self) -> torch.device:
        """That of the first tensor; the CPU where there is none."""
        return next((part.device for part in self.tensors), torch.device("cpu"))

    def problems(self) -> Problems:
        """Arguments that are neither a tensor, nor (x) a pair of tensors, nor a list of these; tensors far apart."""
        given = {"x": flat(self.x), "topk_ids": self.topk_ids, "topk_weights": self.topk_weights}
        problems = Problems()
        for name, parts in given.items():
            kinds = sorted({type(part).__name__ for part in parts if not isinstance(part, torch.Tensor)})
            if kinds or (name == "x" and not parts):
                problems.type(name, "a tensor, or a list of them", " and ".join(kinds) or None)
            _check_devices(problems, name, parts, self.device)
        for i, rows in enumerate(self.x):
            if isinstance(rows, tuple) and len(rows) != 2:
                problems.type(_name("x", self.x, i), ROWS, f"a tuple of {len(rows)}")
        _check_event(problems, self.previous_event)
        return problems


def flat(rows: Sequence[Any]) -> list[Any]:
    """Rows and (data, scales) pairs as one list of tensors."""
    return [part for row in rows for part in (row if isinstance(row, tuple) else (row,))]


def check_dispatch(call: Arguments, options: DispatchOptions | None, transport: Transport) -> Problems:
    """What is wrong with the arguments of a dispatch that makes a new layout."""
    problems = call.problems()
    if problems.error() is not None:
        return problems
    _check_options(problems, options, transport)
    _check_lists(problems, transport, x=call.x, topk_ids=call.topk_ids, topk_weights=call.topk_weights or call.x)
    if problems.error() is not None:
        return problems
    assert options is not None
    for i, (rows, ids) in enumerate(zip(call.x, call.topk_ids, strict=True)):
        name = _name("x", call.x, i)
        tokens = _check_rows(problems, name, rows)
        try:
            check_topk_ids(ids, _name("topk_ids", call.x, i))
        except MegaMoEError as error:
            problems.add(error)
            continue
        if ids.shape[0] != tokens:
            problems.value(_name("topk_ids", call.x, i), f"the {tokens} tokens of {name}", ids.shape[0])
        worst, sources = options.num_worst_tokens, transport.num_sources
        if worst is not None and tokens * sources > worst:
            problems.value("num_worst_tokens", f"at least {sources} ranks times the {tokens} tokens of {name}", worst)
        if call.topk_weights:
            _check_numbers(problems, _name("topk_weights", call.x, i), call.topk_weights[i], tuple(ids.shape))
    _check_alike(problems, "x", call.x)
    return problems


def check_cached_dispatch(call: Arguments, world: World, options: DispatchOptions | None, handle: Handle) -> Problems:
    """What is wrong with the arguments of a dispatch along a cached handle."""
    problems = call.problems()
    if not isinstance(handle, Handle):
        problems.type("handle", "the Handle of a dispatch, or None", type(handle).__name__)
    if problems.error() is not None:
        return problems
    if call.topk_ids:
        problems.value("topk_ids", "None with a handle, whose ids they are", "a tensor")
    if world is not None and world is not handle.world and world != handle.world:
        problems.value("world", "that of the handle, or None", "another one")
    if options is not None and options != handle.options:
        problems.value("options", "those of the handle, or None", options)
    _check_lists(problems, handle.transport, x=call.x, topk_weights=call.topk_weights or call.x)
    if problems.error() is not None:
        return problems
    for i, (rows, tokens) in enumerate(zip(call.x, handle.num_tokens, strict=True)):
        if _check_rows(problems, _name("x", call.x, i), rows) != tokens:
            problems.value(_name("x", call.x, i), f"the {tokens} tokens of the handle", flat([rows])[0].shape[0])
        if call.topk_weights:
            shape = (tokens, handle.num_slots)
            _check_numbers(problems, _name("topk_weights", call.x, i), call.topk_weights[i], shape)
    _check_alike(problems, "x", call.x)
    return problems


def check_combine(
    y: Sequence[torch.Tensor],
    topk_weights: Sequence[torch.Tensor],
    bias: Sequence[torch.Tensor],
    handle: Handle,
    previous_event: CommEvent | None,
) -> Problems:
    """What is wrong with the arguments of a combine; lists as for dispatch."""
    problems = Problems()
    _check_event(problems, previous_event)
    if not isinstance(handle, Handle):
        problems.type("handle", "the Handle of a dispatch", type(handle).__name__)
        return problems
    given = {"y": y, "topk_weights": topk_weights, "bias": bias}
    _check_lists(problems, handle.transport, **{name: part for name, part in given.items() if part or name == "y"})
    if problems.error() is not None:
        return problems
    for name, parts in given.items():
        _check_devices(problems, name, parts, y[0].device)
    expand = handle.token_plan is None
    for i, rank in enumerate(handle.transport.local_ranks):
        rows, name = handle.row_plan.ranks[rank].num_rows, _name("y", y, i)
        per_slot = (rows, handle.num_slots)
        contract = f"bf16 [{rows}, H]" + ("" if expand else f" or [{rows}, {handle.num_slots}, H]")
        shape = tuple(y[i].shape)
        if y[i].dtype != torch.bfloat16:
            problems.type(name, contract, y[i].dtype)
        if not (y[i].dim() == 2 and shape[0] == rows or not expand and y[i].dim() == 3 and shape[:2] == per_slot):
            problems.value(name, contract, f"shape {shape}", "Return a row for each received one, padding included.")
            continue
        if topk_weights:
            _check_numbers(problems, _name("topk_weights", y, i), topk_weights[i], (rows,) if expand else per_slot)
        if bias:
            contract = f"bf16 [{handle.num_tokens[i]}, {shape[-1]}]"
            if bias[i].dtype != torch.bfloat16:
                problems.type(_name("bias", y, i), contract, bias[i].dtype)
            if tuple(bias[i].shape) != (handle.num_tokens[i], shape[-1]):
                problems.value(_name("bias", y, i), contract, f"shape {tuple(bias[i].shape)}")
    _check_alike(problems, "y", y)
    return problems


def _name(argument: str, values: Sequence[Any], i: int) -> str:
    return argument if len(values) == 1 else f"{argument}[{i}]"


def _check_options(problems: Problems, options: DispatchOptions | None, transport: Transport) -> None:
    if not isinstance(options, DispatchOptions):
        next_step = "Pass DispatchOptions(num_experts=...), or the handle of an earlier dispatch."
        problems.type("options", "DispatchOptions", type(options).__name__, next_step)
        return
    worst, sources = options.num_worst_tokens, transport.num_sources
    if options.num_experts % transport.num_ranks:
        problems.value("num_experts", f"a multiple of the {transport.num_ranks} ranks", options.num_experts)
    if worst is not None and worst % sources:
        problems.value("num_worst_tokens", f"a multiple of the {sources} ranks that bring tokens", worst)


def _check_lists(problems: Problems, transport: Transport, **lists: Sequence[Any]) -> None:
    ranks = len(transport.local_ranks)
    for name, values in lists.items():
        if len(values) != ranks:
            contract = "a tensor" if ranks == 1 else f"a list with a tensor for each of the {ranks} ranks"
            problems.value(name, contract, f"{len(values)} tensors" if values else None)
        elif not all(isinstance(part, torch.Tensor) for part in flat(values)):
            problems.type(name, "a tensor", " and ".join(sorted({type(part).__name__ for part in flat(values)})))


def _check_event(problems: Problems, previous_event: Any) -> None:
    if previous_event is not None and not isinstance(previous_event, CommEvent):
        next_step = "Make one by CommEvent.record(device)."
        problems.type("previous_event", "a CommEvent or None", type(previous_event).__name__, next_step)


def _check_devices(problems: Problems, name: str, parts: Sequence[Any], device: torch.device) -> None:
    for other in sorted({str(part.device) for part in parts if isinstance(part, torch.Tensor)} - {str(device)}):
        problems.value(name, f"tensors on {device} like all others of the call", other)


def _check_alike(problems: Problems, name: str, ranks: Sequence[Any]) -> None:
    """Rows of all virtual ranks are of one dtype and width; ranks of a group compare theirs when they meet."""
    if problems.error() is not None:
        return
    first, *others = [flat([rows])[0] for rows in ranks]
    for i, data in enumerate(others, 1):
        if (data.dtype, data.shape[-1]) != (first.dtype, first.shape[-1]):
            contract = f"{first.dtype} and H = {first.shape[-1]} as on rank 0"
            problems.value(f"{name}[{i}]", contract, f"{data.dtype} and H = {data.shape[-1]}")


def _check_rows(problems: Problems, name: str, rows: Any) -> int:
    """Checks x; returns T (0 where it has none)."""
    data, *rest = rows if isinstance(rows, tuple) else (rows,)
    if data.dim() != 2:
        problems.value(name, ROWS, f"shape {tuple(data.shape)}")
        return 0
    if [part.dtype for part in (data, *rest)] != ([FP8, torch.float32] if rest else [torch.bfloat16]):
        problems.type(name, ROWS, tuple(part.dtype for part in (data, *rest)) if rest else data.dtype)
    if rest and tuple(rest[0].shape) != (data.shape[0], ceil_div(data.shape[1], BLOCK)):
        problems.value(f"{name}'s scales", f"[{data.shape[0]}, {ceil_div(data.shape[1], BLOCK)}]", tuple(rest[0].shape))
    return data.shape[0]


def _check_numbers(problems: Problems, name: str, values: torch.Tensor, shape: tuple[int, ...]) -> None:
    contract = f"fp32 {list(shape)}"
    if values.dtype != torch.float32:
        problems.type(name, contract, values.dtype, "Convert them first.")
    if tuple(values.shape) != shape:
        problems.value(name, contract, f"shape {tuple(values.shape)}")
