"""Workspaces of the fused kernel over process groups: sized alike on all ranks, kept with their group."""

from __future__ import annotations

import collections
import dataclasses
import weakref
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from megamoe.backends.cute_shared import Shared, check_tokens, oldest_to_drop, watchdog
from megamoe.comm.transport import GroupTransport, layer_facts
from megamoe.comm.wires import GroupWire
from megamoe.errors import CapacityError, MegaMoEValueError, expected
from megamoe.overlap import OverlapConfig
from megamoe.recipe import BLOCK, Recipe
from megamoe.routing_plan import check_id_values, most_rows
from megamoe.unfused import ForwardOptions, RowOrder

KEPT_A_GROUP = 4
"""Workspaces of different sizes kept for a group; the one unused for longest goes first, on all ranks alike."""

_CLASSES = 8
"""Sizes that are not known beforehand are rounded up, to this many between a power of two and the next."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What decides a workspace, equal on all ranks.

    Attributes:
        hidden, num_experts, top_k: H, E, K.
        max_tokens: of a rank. rows: P of a pool. reserve_sms: SMs left to other kernels.
    """

    hidden: int
    num_experts: int
    top_k: int
    max_tokens: int
    rows: int
    reserve_sms: int


class GroupWorkspaces:
    """The workspaces of all process groups. They live as long as their group, or until `release`.

    All ranks of a group make the same calls in the same order, so that all create and drop the same workspaces.
    """

    def __init__(self) -> None:
        self._of_group: weakref.WeakKeyDictionary[dist.ProcessGroup, _Kept] = weakref.WeakKeyDictionary()

    def for_forward(
        self,
        transport: GroupTransport,
        x: torch.Tensor,
        ids: torch.Tensor,
        num_local: int,
        recipe: Recipe,
        options: ForwardOptions,
    ) -> Shared:
        """The workspace of a forward. A collective, with two read-backs where sizes are not fixed beforehand.

        Args:
            transport: over one group. x: [T, H]. ids: [T, K]. num_local: E_l. recipe: of the call. options: with the
                sizes that are fixed; with `debug` ranks read back all the same, so that all raise what one has found.

        Raises:
            CapacityError: on all ranks, where a pool would need more rows than `options.num_rows`.
            MegaMoEValueError: with `debug`, on the rank whose ids are out of range; MegaMoERuntimeError on the others.
        """
        num_experts, top_k = num_local * transport.num_ranks, ids.shape[1]
        max_tokens, rows = options.max_tokens, options.num_rows
        if max_tokens is None or rows is None or options.debug:
            tokens, enough = needed(
                transport, ids, num_experts, rows, layer_facts(x.shape[1], recipe), is_checked=options.debug
            )
            max_tokens = round_up(tokens) if max_tokens is None else max_tokens
            rows = round_up(enough) if rows is None else rows
        check_tokens(max_tokens, top_k)
        kept = self._kept(transport)
        kept.tokens_of[rows] = max(max_tokens, kept.tokens_of.get(rows, 0))
        sizes = Sizes(x.shape[1], num_experts, top_k, max_tokens, rows, options.overlap.reserve_sms)
        return kept.shared(sizes, x.device)

    def for_backward(
        self, transport: GroupTransport, dout: torch.Tensor, order: RowOrder, overlap: OverlapConfig
    ) -> Shared:
        """The workspace of the backward of a call with that row order: that of a forward with as many rows."""
        rows, num_experts = order.codes.shape[0], order.counts.shape[0] * transport.num_ranks
        kept = self._kept(transport)
        max_tokens = kept.tokens_of[rows]  # also of a forward whose workspace has been released
        sizes = Sizes(dout.shape[1], num_experts, order.top_k, max_tokens, rows, overlap.reserve_sms)
        return kept.shared(sizes, dout.device)

    def refuse(self, group: dist.ProcessGroup, sizes: Sizes) -> None:
        """Take this rank's part in the others' next call of these sizes without making it; they end with an error.

        Without such a call so far there is no workspace, and nothing is done.
        """
        kept = self._of_group.get(group)
        if kept is not None:
            kept.refuse(sizes)

    def release(self, group: dist.ProcessGroup) -> None:
        """Give back the memory kept for a group. A collective; calls that run are waited for."""
        kept = self._of_group.get(group)
        if kept is not None:
            kept.close()

    def _kept(self, transport: GroupTransport) -> _Kept:
        assert isinstance(transport.wire, GroupWire), "only one group is joined by symmetric memory"
        group = transport.wire.group
        if group not in self._of_group:
            self._of_group[group] = _Kept(weakref.ref(group))
        return self._of_group[group]


class _Kept:
    """The workspaces of one group, which it does not keep alive.

    Attributes:
        tokens_of: for each number of rows the most tokens with which a forward came: a backward knows its rows alone.
    """

    def __init__(self, group: weakref.ref[dist.ProcessGroup]) -> None:
        self._group = group
        self._shared: collections.OrderedDict[Sizes, Shared] = collections.OrderedDict()
        self.tokens_of: dict[int, int] = {}

    def shared(self, sizes: Sizes, device: torch.device) -> Shared:
        if sizes in self._shared:
            self._shared.move_to_end(sizes)
            return self._shared[sizes]
        oldest = oldest_to_drop(self._shared, KEPT_A_GROUP)
        if oldest is not None:
            self._shared.pop(oldest).close()
        group = self._group()
        assert group is not None
        self._shared[sizes] = GroupShared(group, sizes, device, forget=lambda: self._shared.pop(sizes, None))
        return self._shared[sizes]

    def refuse(self, sizes: Sizes) -> None:
        from cute_kernels.launch import refuse

        shared = self._shared.get(sizes)
        if shared is not None:
            self._shared.move_to_end(sizes)  # as on the ranks that make the call
            with shared.call():
                refuse(shared.workspaces[0], **watchdog())

    def close(self) -> None:
        """Of all workspaces; what backwards to come must know of their forwards stays."""
        for shared in self._shared.values():
            shared.close()
        self._shared.clear()


class GroupShared(Shared):
    """The workspace of this process's rank. Making it is a collective.

    A call that was given up leaves a workspace that no rank may use before a reset of all. Nobody waits for ranks that
    may be gone: each forgets it when it raises the error, and their next call makes another one.
    """

    def __init__(
        self, group: dist.ProcessGroup, sizes: Sizes, device: torch.device, forget: Callable[[], object]
    ) -> None:
        from cute_kernels.symmetric import SymmetricWorld

        self._forget = forget
        world = SymmetricWorld(
            group,
            hidden=sizes.hidden,
            num_experts=sizes.num_experts,
            top_k=sizes.top_k,
            max_tokens=sizes.max_tokens,
            capacity_rows=sizes.rows,
            reserve_sms=sizes.reserve_sms,
            device=device,
        )
        super().__init__(world)

    def recover(self) -> None:
        self._forget()


def needed(
    transport: GroupTransport,
    ids: torch.Tensor,
    num_experts: int,
    capacity: int | None,
    agreed: Mapping[str, int],
    is_checked: bool = False,
) -> tuple[int, int]:
    """(most tokens of a rank, most rows of a pool) of a call. A collective with two read-backs.

    Args:
        transport: between the ranks. ids: [T, K] of this one. num_experts: E. capacity: rows that there may be.
        agreed: what else must be equal on all ranks.
        is_checked: refuse ids out of range here; otherwise the kernel does.

    Raises:
        CapacityError: on all ranks, where a pool needs more.
        MegaMoEValueError: ids of this rank are refused. MegaMoERuntimeError: those of another one.
    """
    error = None
    try:
        if is_checked:
            check_id_values(ids, num_experts)
    except MegaMoEValueError as found:
        error = found
    tokens = transport.agree_on_tokens(ids, num_experts, capacity, agreed, error)
    valid = ids[(ids >= 0) & (ids < num_experts)].long()
    counts = transport.wire.gather(torch.bincount(valid, minlength=num_experts)).sum((0, 1))
    rows = most_rows(counts, transport.num_ranks)
    if capacity is not None and rows > capacity:
        contract = f"at least the {rows} rows that a rank of this call receives, padding included"
        raise CapacityError(expected("capacity", contract, capacity, "Raise it, or leave it out."))
    return max(map(max, tokens)), rows


def round_up(size: int) -> int:
    """The next of the sizes that workspaces come in, a multiple of 128."""
    size = max(size, 1)
    step = max(1 << max((size - 1).bit_length() - 1, 0), BLOCK * _CLASSES) // _CLASSES
    return -(-size // step) * step
