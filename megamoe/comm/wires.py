"""Wires: how rows cross process groups, there and back. Plain, hierarchical, and with tensor-parallel lanes.

A wire joins R owners of experts. Rows leave a process sorted by owner and arrive sorted by source; the way back takes
rows in the order of arrival home to the order of departure, so it is the adjoint of the way there. How many rows go
from whom to whom is known to all beforehand: `counts[lane][source][owner]`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from megamoe.errors import MegaMoERuntimeError, MegaMoEValueError, expected

Counts = Sequence[Sequence[Sequence[int]]]
Finish = Callable[[], torch.Tensor]


class Wire(Protocol):
    """What carries rows between processes; all of them join every call, with or without rows of their own.

    Attributes:
        num_ranks: R, the owners among which the experts are spread. rank: this process among them.
        num_lanes: processes that share one owner's experts (tensor parallel), 1 for none. lane: this one among them.
    """

    num_ranks: int
    rank: int
    num_lanes: int
    lane: int

    def gather(self, value: torch.Tensor) -> torch.Tensor:
        """A small tensor of equal shape from everywhere: [lanes, R, *value.shape]."""

    def forth(self, rows: torch.Tensor, counts: Counts) -> torch.Tensor:
        """Rows sorted by owner -> rows sorted by (lane, source), within one of these in the order of departure."""

    def start_back(self, rows: torch.Tensor, counts: Counts) -> Finish:
        """The adjoint, begun: the rows of `forth`'s result home; the lanes' shares of a row are added in fp32.

        Returns:
            What waits for the rest and gives the rows. No other call on the wire may come between.
        """


@dataclasses.dataclass(frozen=True)
class Hierarchy:
    """A two-level EP group: rows cross `inside` (a node), then `between` (equal places of all nodes).

    Args:
        inside: the group of this node; equally large on every node.
        between: the group of the processes that have this one's place in their nodes.

    The EP rank of a process is (its rank in `between`) * (size of `inside`) + (its rank in `inside`).
    """

    inside: dist.ProcessGroup
    between: dist.ProcessGroup


@dataclasses.dataclass(frozen=True)
class TensorParallel:
    """Experts whose intermediate dimension is split: every process of `lanes` holds a slice of the same experts.

    Args:
        experts: the group (or hierarchy) over which experts are spread, one such group per lane.
        lanes: the processes that share this one's experts; each has tokens of its own.

    Dispatch gathers the rows of all lanes; combine adds the lanes' partial rows and hands each lane its own.
    """

    experts: dist.ProcessGroup | Hierarchy
    lanes: dist.ProcessGroup


def make_wire(group: dist.ProcessGroup | Hierarchy | TensorParallel) -> Wire:
    """The wire over a group. Raises MegaMoEValueError where this process is not a member."""
    if isinstance(group, TensorParallel):
        return TensorParallelWire(make_wire(group.experts), group.lanes)
    if isinstance(group, Hierarchy):
        return HierarchicalWire(group.inside, group.between)
    return GroupWire(group)


class GroupWire:
    """One variable-split all-to-all; on the way back with the splits swapped."""

    num_lanes = 1
    lane = 0

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = _rank_in(group)
        self.num_ranks = dist.get_world_size(group)

    def gather(self, value: torch.Tensor) -> torch.Tensor:
        return _all_gather(value, self.group)[None]

    def forth(self, rows: torch.Tensor, counts: Counts) -> torch.Tensor:
        there, here = self._splits(counts)
        return all_to_all(rows, there, here, self.group)

    def start_back(self, rows: torch.Tensor, counts: Counts) -> Finish:
        there, here = self._splits(counts)
        return start_all_to_all(rows, here, there, self.group)

    def _splits(self, counts: Counts) -> tuple[list[int], list[int]]:
        (matrix,) = counts
        return list(matrix[self.rank]), [row[self.rank] for row in matrix]


class HierarchicalWire:
    """Two all-to-alls: to the owner's place inside this node, then between the nodes. On the way back mirrored."""

    num_lanes = 1
    lane = 0

    def __init__(self, inside: dist.ProcessGroup, between: dist.ProcessGroup) -> None:
        self.inside, self.between = inside, between
        self.place, self.node = _rank_in(inside), _rank_in(between)
        self.places, self.nodes = dist.get_world_size(inside), dist.get_world_size(between)
        self.rank, self.num_ranks = self.node * self.places + self.place, self.nodes * self.places

    def gather(self, value: torch.Tensor) -> torch.Tensor:
        return _all_gather(_all_gather(value, self.inside), self.between).flatten(0, 1)[None]

    def forth(self, rows: torch.Tensor, counts: Counts) -> torch.Tensor:
        first, second = self._blocks(counts)
        rows = _transpose_blocks(rows, first.leaving)  # (node, place) of the owner -> (place, node)
        rows = all_to_all(rows, _sums(_flip(first.leaving)), _sums(first.arriving), self.inside)
        rows = _transpose_blocks(
            rows, first.arriving
        )  # (source's place, owner's node) -> (owner's node, source's place)
        return all_to_all(rows, _sums(second.leaving), _sums(second.arriving), self.between)

    def start_back(self, rows: torch.Tensor, counts: Counts) -> Finish:
        first, second = self._blocks(counts)
        arrived = start_all_to_all(rows, _sums(second.arriving), _sums(second.leaving), self.between)

        def finish() -> torch.Tensor:
            near = _transpose_blocks(arrived(), second.leaving)
            near = all_to_all(near, _sums(first.arriving), _sums(_flip(first.leaving)), self.inside)
            return _transpose_blocks(near, _flip(first.leaving))

        return finish

    def _blocks(self, counts: Counts) -> tuple[_Hop, _Hop]:
        (matrix,) = counts
        rank = lambda node, place: node * self.places + place  # noqa: E731
        nodes, places = range(self.nodes), range(self.places)
        mine = matrix[self.rank]
        through_me = [[matrix[rank(self.node, p)][rank(n, self.place)] for n in nodes] for p in places]
        to_me = [[matrix[rank(n, p)][self.rank] for p in places] for n in nodes]
        return (
            _Hop([[mine[rank(n, p)] for p in places] for n in nodes], through_me),
            _Hop(_flip(through_me), to_me),
        )


class TensorParallelWire:
    """An inner wire per lane, then an all-gather over the lanes; on the way back a reduce-scatter in fp32.

    The reduce-scatter is an all-to-all and a sum over lanes ascending: the traffic of the ring, a fixed order, and one
    rounding.
    """

    def __init__(self, inner: Wire, lanes: dist.ProcessGroup) -> None:
        self.inner, self.lanes = inner, lanes
        self.rank, self.num_ranks = inner.rank, inner.num_ranks
        self.lane, self.num_lanes = _rank_in(lanes), dist.get_world_size(lanes)

    def gather(self, value: torch.Tensor) -> torch.Tensor:
        return _all_gather(self.inner.gather(value)[0], self.lanes)

    def forth(self, rows: torch.Tensor, counts: Counts) -> torch.Tensor:
        rows = self.inner.forth(rows, [counts[self.lane]])
        sizes = self._received(counts)
        padded = rows.new_zeros(max(sizes), *rows.shape[1:])
        padded[: rows.shape[0]] = rows
        every = _all_gather(padded, self.lanes)
        return torch.cat([every[lane, :size] for lane, size in enumerate(sizes)])

    def start_back(self, rows: torch.Tensor, counts: Counts) -> Finish:
        sizes = self._received(counts)
        mine = sizes[self.lane]
        arrived = start_all_to_all(rows, sizes, [mine] * self.num_lanes, self.lanes)

        def finish() -> torch.Tensor:
            shares = arrived().view(self.num_lanes, mine, *rows.shape[1:])
            total = shares[0].float()
            for share in shares[1:]:
                total = total + share.float()
            return self.inner.start_back(total.to(rows.dtype), [counts[self.lane]])()

        return finish

    def _received(self, counts: Counts) -> list[int]:
        return [sum(row[self.rank] for row in matrix) for matrix in counts]


# ---------------------------------------------------------------- the collectives underneath

_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before 2.13


def start_all_to_all(rows: torch.Tensor, there: list[int], here: list[int], group: dist.ProcessGroup) -> Finish:
    """Begin to send `there[r]` consecutive rows to each rank of the group and to receive `here[r]`; any dtype."""
    out = torch.empty(sum(here), *rows.shape[1:], dtype=rows.dtype, device=rows.device)
    sent = _as_bytes(rows.contiguous())
    work = dist.all_to_all_single(_as_bytes(out), sent, here, there, group=group, async_op=True)

    def finish() -> torch.Tensor:
        work.wait()  # on CUDA the stream waits, not the host
        return out

    return finish


def all_to_all(rows: torch.Tensor, there: list[int], here: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """`start_all_to_all`, finished."""
    return start_all_to_all(rows, there, here, group)()


def _all_gather(value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    out = torch.empty(dist.get_world_size(group), *value.shape, dtype=value.dtype, device=value.device)
    _all_gather_single(_as_bytes(out).flatten(), _as_bytes(value.contiguous()).flatten(), group=group)
    return out


def _as_bytes(x: torch.Tensor) -> torch.Tensor:
    """[rows, bytes of a row], sharing memory: what travels is never interpreted, so every dtype and NaN survives."""
    rows = x.shape[0] if x.dim() else 1
    return x.view(-1).view(torch.uint8).view(rows, -1) if x.numel() else x.new_empty(rows, 0, dtype=torch.uint8)


def _rank_in(group: dist.ProcessGroup) -> int:
    rank = dist.get_rank(group) if isinstance(group, dist.ProcessGroup) else -1
    if rank < 0:
        raise MegaMoEValueError(
            expected("group", "a process group of which this process is a member", group, "Create it with new_group.")
        )
    return rank


# ---------------------------------------------------------------- blocks of rows


@dataclasses.dataclass(frozen=True)
class _Hop:
    """Sizes of the blocks of rows that leave (in the order in which they lie) and that arrive, as matrices."""

    leaving: list[list[int]]
    arriving: list[list[int]]


def _sums(blocks: list[list[int]]) -> list[int]:
    return [sum(row) for row in blocks]


def _flip(blocks: list[list[int]]) -> list[list[int]]:
    return [list(row) for row in zip(*blocks, strict=True)]


def _transpose_blocks(rows: torch.Tensor, blocks: list[list[int]]) -> torch.Tensor:
    """Rows in blocks (i, j) of `blocks[i][j]` rows -> the same blocks in the order (j, i)."""
    parts = rows.split([size for row in blocks for size in row])
    width = len(blocks[0])
    return torch.cat([parts[i * width + j] for j in range(width) for i in range(len(blocks))])


# ---------------------------------------------------------------- agreement

_MESSAGE_BYTES = 1024


def agree(
    wire: Wire, facts: dict[str, int], error: Exception | None, device: torch.device
) -> list[list[dict[str, int]]]:
    """Tell everyone a few numbers, or that this process has found an error; then all processes raise for this call.

    Args:
        wire: over which processes.
        facts: argument -> value, the same arguments everywhere.
        error: what is wrong here, None if nothing is.
        device: where tensors of the group live.

    Returns:
        The facts of everyone, [lane][rank].

    Raises:
        error: the process that found one. MegaMoERuntimeError: the others, with its rank and message.
        MegaMoEValueError: the groups that make up the wire don't fit together.
    """
    mine = torch.tensor([wire.lane, wire.rank, error is not None, *facts.values()], dtype=torch.int64, device=device)
    everyone = wire.gather(mine).tolist()
    for lane, of_lane in enumerate(everyone):
        for rank, values in enumerate(of_lane):
            if values[:2] != [lane, rank]:
                grid = f"rank {rank} of lane {lane} at that place of all its groups"
                raise MegaMoEValueError(expected("world", grid, f"rank {values[1]} of lane {values[0]}"))
    everyone = [[values[2:] for values in of_lane] for of_lane in everyone]
    if any(values[0] for of_lane in everyone for values in of_lane):
        text = str(error or "").encode()[:_MESSAGE_BYTES].ljust(_MESSAGE_BYTES, b"\0")
        texts = wire.gather(torch.tensor(list(text), dtype=torch.uint8, device=device))
        if error is not None:
            raise error
        for lane, of_lane in enumerate(everyone):
            for rank, values in enumerate(of_lane):
                if values[0]:
                    message = bytes(texts[lane, rank].tolist()).rstrip(b"\0").decode(errors="replace").removesuffix(".")
                    raise MegaMoERuntimeError(
                        expected("group", "valid arguments on every rank", f"an error on rank {rank}: {message}")
                    )
    return [[dict(zip(facts, values[1:], strict=True)) for values in lane] for lane in everyone]


def check_equal(everyone: list[list[dict[str, int]]], names: Sequence[str]) -> None:
    """Refuse, alike on all processes, arguments that must be equal everywhere and are not."""
    first = everyone[0][0]
    for lane in everyone:
        for rank, facts in enumerate(lane):
            for name in names:
                if facts[name] != first[name]:
                    raise MegaMoEValueError(
                        expected(
                            name, f"the value of rank 0, {first[name]}, on every rank", f"{facts[name]} on rank {rank}"
                        )
                    )
