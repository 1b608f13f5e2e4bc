"""The copies of the weights that the GEMMs read: when they are made, kept and thrown away.

Rules. Weights that train are quantised again in every forward, unless the caller says `is_first_microbatch=False`: a
version counter does not move under fused optimizers nor under `.data.copy_`. Frozen weights are quantised once, keyed
on storage, pointer and version. `load_state_dict`, an optimizer step and `refresh()` throw the copies away. FP8
masters are their own copy; packed, they are that of a fused kernel too. The transposed copy exists only where a
backward is to come.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook

from megamoe.errors import MegaMoERuntimeError
from megamoe.quantize import FP8, QuantizedWeight
from megamoe.recipe import Recipe
from megamoe.unfused import ExpertWeights


class Packing(Protocol):
    """How FP8 weights give up their order for that of a fused kernel. It holds no state."""

    def check(self, hidden_size: int) -> None:
        """Raises MegaMoEValueError where the kernel's order needs more bytes."""
        ...

    def pack(self, weight: torch.Tensor, row_groups: int) -> torch.Tensor:
        """E4M3 [E_l, N, K] in the kernel's order, a new tensor; `row_groups` as in `QuantizedWeight`."""
        ...

    def unpack(self, weight: torch.Tensor, row_groups: int) -> torch.Tensor:
        """The inverse of `pack`."""
        ...

    def operands(self, packed: Masters) -> ExpertWeights:
        """The operands of a forward whose `fused` are the bytes of `packed` themselves."""
        ...


class Quantizer(Protocol):
    """A backend, as far as copies are concerned."""

    name: str
    is_fused: bool
    packing: Packing | None

    def copy_weight(
        self, weight: torch.Tensor | QuantizedWeight, row_groups: int, recipe: Recipe, transposed: bool
    ) -> tuple[QuantizedWeight, QuantizedWeight | None]:
        """The operand of the forward and, if asked for, that of the backward."""
        ...

    def quantize_experts(
        self, w13: torch.Tensor, w2: torch.Tensor, recipe: Recipe, transposed: bool
    ) -> ExpertWeights | None:
        """Both weights quantised straight into the order of a fused kernel; None: by way of `copy_weight`."""
        ...

    def prepare(self, weights: ExpertWeights) -> ExpertWeights:
        """The weights with `fused` and, where there are transposed ones, `fused_t`."""
        ...


@dataclasses.dataclass(frozen=True)
class Masters:
    """A layer's weights as the user holds them.

    Attributes:
        w13: [E, 2I, H] bf16, fp16 or fp32, or e4m3 with scales.
        w2: [E, H, I].
        w13_scale: fp32 [E, 2 * ceil(I / 128), ceil(H / 128)] of e4m3 weights, else None.
        w2_scale: fp32 [E, ceil(H / 128), ceil(I / 128)], or None.
        trains: whether (w13, w2) require grad.
    """

    w13: torch.Tensor
    w2: torch.Tensor
    w13_scale: torch.Tensor | None = None
    w2_scale: torch.Tensor | None = None
    trains: tuple[bool, bool] = (False, False)


@dataclasses.dataclass
class _Copy:
    key: tuple[Any, ...]
    storages: tuple[StorageWeakRef | None, ...]
    """Held so that the address of a storage that died cannot be taken for it."""
    forward: QuantizedWeight
    transposed: QuantizedWeight | None


@dataclasses.dataclass
class _Fused:
    key: tuple[Any, ...]
    storages: tuple[StorageWeakRef | None, ...]
    experts: ExpertWeights


class WeightCopies:
    """The copies of one layer's weights.

    Args:
        owner: the module whose parameters they are; an optimizer that steps one of its parameters makes them stale.
        packing: as the attribute.

    Attributes:
        epoch: counts the events that made all copies stale.
        packing: how the masters are packed; None: they are as they came.
    """

    def __init__(self, owner: torch.nn.Module | None = None, packing: Packing | None = None) -> None:
        self.epoch = 0
        self.packing = packing
        self._owner = weakref.ref(owner) if owner is not None else None
        self._copies: dict[str, _Copy] = {}
        self._fused: _Fused | None = None
        _watch_optimizers(self)

    def refresh(self) -> None:
        """Throw all copies away: the next forward makes them anew. A backward of an earlier forward then raises."""
        self._copies.clear()
        self._fused = None
        self.epoch += 1

    def release_transposed(self) -> None:
        """Free the copies of the backward; one that is still needed is made again from that of the forward."""
        for copy in self._copies.values():
            copy.transposed = None
        if self._fused is not None:
            self._fused.experts = dataclasses.replace(self._fused.experts, fused_t=None)

    def num_bytes(self) -> int:
        """Bytes of all copies that are not the masters themselves."""
        held = {}
        for copy in self._copies.values():
            own = {ref.cdata for ref in copy.storages if ref is not None}
            for tensor in _tensors(copy.forward) + _tensors(copy.transposed):
                storage = tensor.untyped_storage()
                if storage._cdata not in own:
                    held[storage._cdata] = storage.nbytes()
        if self._fused is not None:
            own = {ref.cdata for ref in self._fused.storages if ref is not None}
            for group in (self._fused.experts.fused, self._fused.experts.fused_t):
                for field in () if group is None else dataclasses.fields(group):
                    storage = getattr(group, field.name).untyped_storage()
                    if storage._cdata not in own:
                        held[storage._cdata] = storage.nbytes()
        return sum(held.values())

    def for_forward(
        self, backend: Quantizer, masters: Masters, recipe: Recipe, *, requantize: bool, transposed: bool
    ) -> ExpertWeights:
        """The operands of a forward, made anew where the rules say so.

        Args:
            backend: who quantises.
            masters: the weights.
            recipe: formats.
            requantize: whether weights that train are quantised again (False: is_first_microbatch=False).
            transposed: whether a backward is to come.

        Raises:
            MegaMoERuntimeError: the masters are packed, and not for this backend.
        """
        if self.packing is not None and backend.packing is None:
            raise MegaMoERuntimeError(
                f"weights: expected them as they came for backend {backend.name!r}, got packed ones. Call "
                "unpack_weights() first."
            )
        if backend.is_fused:
            return self._get_fused(backend, masters, recipe, requantize, transposed)
        w13, w13_t = self._get("w13", backend, masters, recipe, requantize, transposed)
        w2, w2_t = self._get("w2", backend, masters, recipe, requantize, transposed)
        return ExpertWeights(w13, w2, w13_t, w2_t)

    def for_backward(self, backend: Quantizer, masters: Masters, recipe: Recipe, epoch: int | None) -> ExpertWeights:
        """The operands of the backward of a forward that this object served.

        Args:
            backend, masters, recipe: as for the forward.
            epoch: `self.epoch` at that forward, or None if unknown.

        Raises:
            MegaMoERuntimeError: the weights changed in between.
        """
        if not (self._copies or self._fused) or epoch not in (None, self.epoch):
            raise MegaMoERuntimeError(
                "backward: expected the weights of its forward, got weights changed since by an optimizer step, "
                "load_state_dict or refresh_weights. Run the backward before they change."
            )
        # other weights may have passed through in between (a teacher's, an average's): their copies are not taken
        return self.for_forward(backend, masters, recipe, requantize=False, transposed=True)

    def _get_fused(
        self, backend: Quantizer, masters: Masters, recipe: Recipe, requantize: bool, transposed: bool
    ) -> ExpertWeights:
        """Both weights in the order of a fused kernel, which replaces the plain copies."""
        sources = (masters.w13, masters.w13_scale, masters.w2, masters.w2_scale)
        key = (backend.name, recipe.precision, recipe.scale_format, *(_identity(t) for t in sources))
        held = self._fused
        stale = held is None or held.key != key or (any(masters.trains) and requantize)
        if stale or (transposed and held is not None and held.experts.fused_t is None):
            self._fused = held = None  # free the old copies first
            experts = self._make_fused(backend, masters, recipe, transposed=transposed)
            storages = tuple(None if t is None else StorageWeakRef(t.untyped_storage()) for t in sources)
            self._fused = _Fused(key, storages, experts)
        assert self._fused is not None
        return self._fused.experts

    def _make_fused(self, backend: Quantizer, masters: Masters, recipe: Recipe, *, transposed: bool) -> ExpertWeights:
        """Both weights in the kernels' order; masters that are packed are the operands of the forward themselves."""
        packing = self.packing
        if packing is None:
            return _without_plain_copies(make_experts(backend, masters, recipe, transposed=transposed))
        made = packing.operands(masters)
        if transposed:
            w13, w2 = packing.unpack(masters.w13.detach(), 2), packing.unpack(masters.w2.detach(), 1)
            plain = dataclasses.replace(masters, w13=w13, w2=w2)
            made = dataclasses.replace(made, fused_t=make_experts(backend, plain, recipe, transposed=True).fused_t)
        return _without_plain_copies(made)

    def _get(
        self, name: str, backend: Quantizer, masters: Masters, recipe: Recipe, requantize: bool, transposed: bool
    ) -> tuple[QuantizedWeight, QuantizedWeight | None]:
        sources, trains = (
            ((masters.w13, masters.w13_scale), masters.trains[0])
            if name == "w13"
            else ((masters.w2, masters.w2_scale), masters.trains[1])
        )
        key = (backend.name, recipe.precision, recipe.scale_format, *(_identity(t) for t in sources))
        copy = self._copies.get(name)
        if copy is None or copy.key != key or (trains and requantize):
            if copy is not None:
                del self._copies[name], copy  # free the old copy first
            made = make_copy(
                backend, *sources, row_groups=2 if name == "w13" else 1, recipe=recipe, transposed=transposed
            )
            storages = tuple(None if t is None else StorageWeakRef(t.untyped_storage()) for t in sources)
            copy = self._copies[name] = _Copy(key, storages, *made)
        if transposed and copy.transposed is None:
            copy.transposed = copy.forward.transposed()
        return copy.forward, copy.transposed if transposed else None

    def __reduce__(self) -> tuple[Any, ...]:  # a copy starts empty; its module sets itself as owner
        return WeightCopies, (None, self.packing)


def make_experts(backend: Quantizer, masters: Masters, recipe: Recipe, *, transposed: bool) -> ExpertWeights:
    """The operands of a forward and, if asked for, of a backward."""
    made = backend.quantize_experts(masters.w13.detach(), masters.w2.detach(), recipe, transposed)
    if made is not None:
        return made
    w13, w13_t = make_copy(backend, masters.w13, masters.w13_scale, row_groups=2, recipe=recipe, transposed=transposed)
    w2, w2_t = make_copy(backend, masters.w2, masters.w2_scale, row_groups=1, recipe=recipe, transposed=transposed)
    return backend.prepare(ExpertWeights(w13, w2, w13_t, w2_t))


def _without_plain_copies(weights: ExpertWeights) -> ExpertWeights:
    """Weights whose kernels read `fused` only: the plain copies keep their shapes and give up their memory."""

    def shell(w: QuantizedWeight | None) -> QuantizedWeight | None:
        return None if w is None else dataclasses.replace(w, data=w.data.new_empty(1, 1, 1).expand(w.data.shape))

    plain = {name: shell(getattr(weights, name)) for name in ("w13", "w2", "w13_t", "w2_t")}
    return dataclasses.replace(weights, **plain)  # type: ignore[arg-type]


def make_copy(
    backend: Quantizer,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    *,
    row_groups: int,
    recipe: Recipe,
    transposed: bool,
) -> tuple[QuantizedWeight, QuantizedWeight | None]:
    """The operands of one weight. E4M3 bytes are used as they are; under the bf16 recipe they are dequantised."""
    weight = weight.detach()
    source: torch.Tensor | QuantizedWeight = weight
    if weight.dtype == FP8:
        source = QuantizedWeight(weight, None if scale is None else scale.detach(), row_groups)
        if recipe.precision == "bf16":
            source = QuantizedWeight(source.dequantize(torch.bfloat16), None, row_groups)
    return backend.copy_weight(source, row_groups, recipe, transposed)


def split_experts(weights: ExpertWeights, num_parts: int) -> list[ExpertWeights]:
    """Views of the consecutive experts of each rank of one process."""
    if num_parts == 1:
        return [weights]
    each = weights.w13.data.shape[0] // num_parts

    def part(w: QuantizedWeight | None, i: int) -> QuantizedWeight | None:
        if w is None:
            return None
        scale = None if w.scale is None else w.scale.narrow(0, i * each, each)
        return dataclasses.replace(w, data=w.data.narrow(0, i * each, each), scale=scale)

    def fused_part(fused: Any, i: int) -> Any:
        if fused is None:
            return None
        tensors = {f.name: getattr(fused, f.name).narrow(0, i * each, each) for f in dataclasses.fields(fused)}
        return type(fused)(**tensors)

    plain, fused = (weights.w13, weights.w2, weights.w13_t, weights.w2_t), (weights.fused, weights.fused_t)
    return [
        ExpertWeights(*(part(w, i) for w in plain), *(fused_part(f, i) for f in fused))  # type: ignore[arg-type]
        for i in range(num_parts)
    ]


def _tensors(weight: QuantizedWeight | None) -> list[torch.Tensor]:
    return [] if weight is None else [t for t in (weight.data, weight.scale) if t is not None]


def _identity(t: torch.Tensor | None) -> tuple[Any, ...] | None:
    """What tells a tensor's content from another's, as far as torch sees it."""
    if t is None:
        return None
    version = -1 if t.is_inference() else t._version
    return t.untyped_storage()._cdata, t.data_ptr(), version, t.shape, t.stride(), t.dtype, t.device


# ---------------------------------------------------------------- optimizer steps

_watched: weakref.WeakSet[WeightCopies] = weakref.WeakSet()
_hook: list[Any] = []
"""The handle of the one hook, registered with the first copies and not by importing."""


def _watch_optimizers(copies: WeightCopies) -> None:
    _watched.add(copies)
    if not _hook:
        _hook.append(register_optimizer_step_post_hook(_after_step))


def _after_step(optimizer: torch.optim.Optimizer, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for copies in list(_watched):
        owner = copies._owner() if copies._owner is not None else None
        if owner is not None and any(id(p) in stepped for p in owner.parameters(recurse=False)):
            copies.refresh()
