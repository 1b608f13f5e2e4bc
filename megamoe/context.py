"""What a call needs beside its tensors: recipe, ranks, backend, sizes. Operators find a context by its number."""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, get_args

import torch
import torch.distributed as dist

from megamoe import backends
from megamoe.comm import Hierarchy, LocalWorld, Transport, as_transport
from megamoe.comm.reach import TransportName, check_transport, why_not_symmetric
from megamoe.comm.transport import layer_facts
from megamoe.deferred import DeferredWgrad
from megamoe.errors import MegaMoEError, MegaMoERuntimeError, MegaMoETypeError, MegaMoEValueError, expected
from megamoe.overlap import OverlapConfig
from megamoe.recipe import BLOCK, Recipe
from megamoe.unfused import ForwardOptions, SaveMode, worst_rows
from megamoe.weights import WeightCopies

World: TypeAlias = LocalWorld | dist.ProcessGroup | Hierarchy | None
Capacity: TypeAlias = int | Literal["worst"] | None


@dataclasses.dataclass(frozen=True)
class Spec:
    """The part of a context that decides shapes. As a string it is an argument of the operators.

    Attributes:
        backend: as asked for.
        precision: of the recipe.
        num_ranks: R.
        num_local: how many of them live in this process.
        capacity: rows of every pool when R > 1; None: as many as a call needs, which is not known in advance.
        max_tokens_per_rank: bound of T on any rank of a process group, None if there is none.
        save: what a forward keeps when a backward is to come.
        transport: as asked for; with one, a process group of one rank is a group too.
        reach: why symmetric memory cannot join the ranks of the group, "" if it can.
    """

    backend: backends.BackendName
    precision: Literal["fp8", "bf16"]
    num_ranks: int
    num_local: int
    capacity: Capacity
    max_tokens_per_rank: int | None
    save: SaveMode
    transport: TransportName | None = None
    reach: str = ""

    def __str__(self) -> str:
        return "|".join(map(str, dataclasses.astuple(self)))

    @classmethod
    def parse(cls, text: str) -> Spec:
        """The inverse of str()."""
        backend, precision, num_ranks, num_local, capacity, max_tokens, save, transport, reach = text.split("|")
        rows: Capacity = None if capacity == "None" else "worst" if capacity == "worst" else int(capacity)
        bound = None if max_tokens == "None" else int(max_tokens)
        asked = None if transport == "None" else transport
        return cls(backend, precision, int(num_ranks), int(num_local), rows, bound, save, asked, reach)  # type: ignore[arg-type]

    def choose(self, w13: torch.Tensor, top_k: int) -> backends.Backend:
        """The backend for weights [E_l, 2I, H], also fake ones. Raises BackendUnavailable."""
        problem = backends.Problem.of(
            w13.device,
            Recipe(self.precision),
            hidden_size=w13.shape[2],
            intermediate_size=w13.shape[1] // 2,
            num_experts=w13.shape[0] // self.num_local * self.num_ranks,
            top_k=top_k,
            num_ranks=self.num_ranks,
            world="group" if self.is_group else "local" if self.num_ranks > 1 else "one",
            transport=self.transport,
            reach=self.reach,
        )
        return backends.resolve(self.backend, problem)

    @property
    def is_group(self) -> bool:
        """Whether other ranks live in other processes, or are spoken to as if they did."""
        return self.num_local < self.num_ranks or self.transport is not None

    def pool_rows(self, tokens: Sequence[int], top_k: int, experts_per_rank: int) -> int | None:
        """P of every pool of a call; None if only the routing decides it.

        Args:
            tokens: T of each local rank.
            top_k: K.
            experts_per_rank: E_l.
        """
        if (self.num_ranks > 1 or self.is_group) and self.capacity != "worst":
            return self.capacity
        if self.is_group:
            assert self.max_tokens_per_rank is not None
            return worst_rows(self.num_ranks * self.max_tokens_per_rank * top_k, experts_per_rank)
        return worst_rows(sum(tokens) * top_k, experts_per_rank)


class MoEContext:
    """How `mega_moe` runs. Make it once, outside compiled code, and keep it as long as backwards are to come.

    Args:
        recipe: numerics; None: `Recipe()`.
        world: None for one rank, a `LocalWorld`, or a process group (or `Hierarchy`) of expert-parallel ranks.
        backend: "auto", or one of "torch", "triton", "cute", which is used or refused.
        capacity: R > 1 only: rows of every rank's pool, equal on all ranks, a multiple of 128. None: as many as a call
            needs (two read-backs; under torch.compile sizes must be known, so give a number or "worst"). "worst":
            enough for any routing. A call that needs more raises CapacityError on all ranks.
        max_tokens_per_rank: process groups only: bound of T on any rank. With a capacity it makes all shapes static;
            over all-to-alls a rank that finds a fault in its arguments then raises alone, unless `debug`.
        save: what the forward keeps: "pool", "repull" or "recompute", from most memory to most work.
        transport: process groups only: how backend "cute" reaches their ranks. "symmetric": its kernel reads and writes
            the peers' memory, over a group on one node. "nccl": all-to-alls around the kernel, over any group or
            `Hierarchy`, gloo too. None: the first where it can, else the second. Backends "torch" and "triton" always
            run all-to-alls; "auto" runs "cute" over a group only with transport="symmetric".
        overlap: what runs beside what; None: the defaults. Of `wgrad` a call without a module takes "inline" only.
        debug: check the values of ids whatever the device and the sizes, and let the ranks of a group agree before
            every call, so that all raise what one finds. It synchronises.
        copies: where copies of the weights are kept between calls. None: every call makes its own, and so does every
            backward.

    Raises:
        MegaMoEValueError, MegaMoETypeError: an argument is outside these.

    Effects: none; no device is touched. Copying a context gives one with the same settings and empty copies.
    """

    def __init__(
        self,
        recipe: Recipe | None = None,
        *,
        world: World = None,
        backend: backends.BackendName = "auto",
        capacity: Capacity = None,
        max_tokens_per_rank: int | None = None,
        save: SaveMode = "pool",
        transport: TransportName | None = None,
        overlap: OverlapConfig | None = None,
        debug: bool = False,
        copies: WeightCopies | None = None,
    ) -> None:
        backends.check_name(backend)
        num_ranks, num_local = _count_ranks(world)
        check_transport(transport, world)
        _check_sizes(capacity, max_tokens_per_rank, num_local < num_ranks or transport is not None)
        if save not in get_args(SaveMode)[1:]:
            raise MegaMoEValueError(expected("save", "'pool', 'repull' or 'recompute'", repr(save)))
        if recipe is not None and not isinstance(recipe, Recipe):
            got = type(recipe).__name__
            raise MegaMoETypeError(expected("recipe", "a Recipe or None", got, "Pass Recipe('fp8')."))
        self.recipe = recipe if recipe is not None else Recipe()
        self.world, self.backend, self.debug, self.copies = world, backend, debug, copies
        self.overlap = check_overlap(overlap)
        sizes = (num_ranks, num_local, capacity, max_tokens_per_rank, save)
        self.shapes = Spec(backend, self.recipe.precision, *sizes, transport, why_not_symmetric(world) or "")
        self.spec = str(self.shapes)
        self.deferred: DeferredWgrad | None = None
        """Takes weight gradients that are computed later; set by the module that owns the parameters."""
        self.anchor = torch.empty(0, requires_grad=True) if self.shapes.is_group else None
        """Keeps the output of a group attached to autograd on ranks whose own inputs need no gradient: peers wait for
        their part of the backward."""
        self._chosen: dict[tuple[Any, ...], backends.Backend] = {}
        self._transports: dict[str, Transport] = {}
        self.handle = next(_handles)
        _contexts[self.handle] = self

    def choose(self, w13: torch.Tensor, top_k: int) -> backends.Backend:
        """The backend for weights [E_l, 2I, H] and K slots a token.

        Raises:
            BackendUnavailable: the one asked for cannot run it.
        """
        key = (w13.device, w13.shape, top_k)
        if key not in self._chosen:
            self._chosen[key] = self.shapes.choose(w13, top_k)
        return self._chosen[key]

    def transport(self, backend: backends.Backend) -> Transport:
        """The transport over this context's ranks for a backend's steps."""
        if backend.name not in self._transports:
            is_world = self.shapes.num_ranks > 1 or self.shapes.is_group or isinstance(self.world, LocalWorld)
            world = self.world if is_world else None
            self._transports[backend.name] = as_transport(world, backend.steps)
        return self._transports[backend.name]

    def options(self, topk_ids: Sequence[torch.Tensor], experts_per_rank: int, save: SaveMode) -> ForwardOptions:
        """Sizes of a forward; `max_tokens` is set where shapes are static and ids may go unchecked."""
        num_rows = self.shapes.pool_rows([ids.shape[0] for ids in topk_ids], topk_ids[0].shape[1], experts_per_rank)
        unchecked = num_rows is not None and not self.debug and topk_ids[0].is_cuda
        if self.shapes.is_group:
            return ForwardOptions(save, num_rows, self.static_tokens, self.debug, self.overlap)
        bound = max(ids.shape[0] for ids in topk_ids) if unchecked else None
        return ForwardOptions(save, num_rows, bound, self.debug, self.overlap)

    @property
    def static_tokens(self) -> int | None:
        """The bound of T with which a process group plans without exchanging sizes; None: it exchanges them."""
        return self.shapes.max_tokens_per_rank if self.shapes.is_group and self.shapes.capacity is not None else None

    def report(self, error: MegaMoEError, device: torch.device, w13: object = None) -> None:
        """Raise an error that this rank found in its arguments, if possible on all ranks of a group alike.

        Where sizes are fixed, the call that the others make is taken to be the one this context has made with weights
        like `w13` (None: any); where it has made none or several, and over all-to-alls, this rank raises alone.
        """
        if self.shapes.is_group and (self.static_tokens is None or self.debug):
            nothing = torch.empty(0, 1, dtype=torch.int64, device=device)
            self.transport(backends.BACKENDS["torch"]).plan(
                [nothing], self.shapes.num_ranks, agreed=layer_facts(), error=error
            )
        elif self.static_tokens is not None and isinstance(self.world, dist.ProcessGroup):
            shape = w13.shape if isinstance(w13, torch.Tensor) else None
            made = [(key, backend) for key, backend in self._chosen.items() if shape in (None, key[1])]
            if len(made) == 1:
                ((_, (num_local, _, hidden), top_k), backend) = made[0]
                rows = self.shapes.pool_rows([], top_k, num_local)
                assert isinstance(rows, int)
                sizes = (hidden, num_local * self.shapes.num_ranks, top_k, self.static_tokens, rows)
                backends.refuse(backend, self.world, backends.Sizes(*sizes, self.overlap.reserve_sms))
        raise error

    def __deepcopy__(self, memo: dict[int, Any]) -> MoEContext:
        make, settings = self.__reduce__()
        return make(*settings)  # not a copy of the group

    def __reduce__(self) -> tuple[Any, ...]:
        shapes = self.shapes
        sizes = (shapes.capacity, shapes.max_tokens_per_rank, shapes.save, shapes.transport)
        return _make_context, (self.recipe, self.world, self.backend, *sizes, self.overlap, self.debug)


def _make_context(
    recipe: Recipe,
    world: World,
    backend: backends.BackendName,
    capacity: Capacity,
    max_tokens_per_rank: int | None,
    save: SaveMode,
    transport: TransportName | None,
    overlap: OverlapConfig,
    debug: bool,
) -> MoEContext:
    return MoEContext(
        recipe,
        world=world,
        backend=backend,
        capacity=capacity,
        max_tokens_per_rank=max_tokens_per_rank,
        save=save,
        transport=transport,
        overlap=overlap,
        debug=debug,
    )


_contexts: weakref.WeakValueDictionary[int, MoEContext] = weakref.WeakValueDictionary()
_handles = itertools.count(1)


def context_of(handle: int) -> MoEContext:
    """The context with a number.

    Raises:
        MegaMoERuntimeError: it is gone.
    """
    context = _contexts.get(handle)
    if context is None:
        raise MegaMoERuntimeError(
            "context: expected a MoEContext that is alive, got one that was deleted. Keep a reference to it while "
            "compiled code or a backward uses it."
        )
    return context


def _count_ranks(world: World) -> tuple[int, int]:
    """(R, how many of them live here)."""
    if world is None:
        return 1, 1
    if isinstance(world, LocalWorld):
        return world.num_ranks, world.num_ranks
    if isinstance(world, dist.ProcessGroup):
        return dist.get_world_size(world), 1
    if isinstance(world, Hierarchy):
        return dist.get_world_size(world.inside) * dist.get_world_size(world.between), 1
    raise MegaMoETypeError(expected("world", "None, a LocalWorld, a ProcessGroup or a Hierarchy", type(world).__name__))


def check_overlap(overlap: OverlapConfig | None) -> OverlapConfig:
    """The settings, None for the defaults; refuses what is neither."""
    if overlap is not None and not isinstance(overlap, OverlapConfig):
        raise MegaMoETypeError(expected("overlap", "an OverlapConfig or None", type(overlap).__name__))
    return overlap or OverlapConfig()


def _check_sizes(capacity: Capacity, max_tokens: int | None, is_group: bool) -> None:
    if (
        capacity is not None
        and capacity != "worst"
        and (not isinstance(capacity, int) or capacity <= 0 or capacity % BLOCK)
    ):
        raise MegaMoEValueError(
            expected("capacity", f"a positive multiple of {BLOCK}, 'worst' or None", repr(capacity))
        )
    if max_tokens is not None and (not isinstance(max_tokens, int) or max_tokens <= 0):
        raise MegaMoEValueError(expected("max_tokens_per_rank", "a positive integer or None", repr(max_tokens)))
    if capacity == "worst" and is_group and max_tokens is None:
        raise MegaMoEValueError(
            expected("max_tokens_per_rank", "a bound of T, which capacity='worst' needs over a group", None)
        )
