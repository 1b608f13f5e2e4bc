"""MegaMoE: the mixture-of-experts layer as a module: router, routed experts, shared experts."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn

import checkpoints
from megamoe import backends
from megamoe.config import MoEConfig
from megamoe.context import MoEContext, World
from megamoe.errors import MegaMoEError, MegaMoETypeError, MegaMoEValueError, expected
from megamoe.experts import Experts
from megamoe.family_router import FamilyRouter
from megamoe.functional import FLOATS
from megamoe.loading import WeightFormat, check_fits, format_of, place, read_config
from megamoe.overlap import Overlap, OverlapConfig, OverlapKey, resolve_overlap
from megamoe.recipe import Recipe
from megamoe.router_families import INTEGERS, ROUTER_FAMILIES
from megamoe.routing_plan import experts_per_rank

_OWN_OPTIONS = ("world", "backend", "recipe", "weights", "device", "overlap", "overlap_shared")
"""Of `MegaMoE`; the others are those of `MoEContext`."""


class MegaMoE(nn.Module):
    """A mixture-of-experts layer with its router, on one rank or over expert-parallel ranks.

    out = sum of the chosen experts' outputs, each times its weight, + the shared expert's output.

    Args:
        config: sizes and routing.
        world: None for one rank; a `LocalWorld(R)`: this module then holds all E experts and takes and returns lists
            of R tensors; a process group (or `Hierarchy`): it holds its E / R experts and this process's tokens.
        backend: "auto", "torch", "triton" or "cute".
        recipe: numerics; None: `Recipe(clamp=config.clamp)`.
        weights: "bf16" or "fp32" masters, which can be trained, or "fp8": e4m3 bytes and scales, frozen.
        device: of the parameters.
        overlap: what runs beside what: an `OverlapConfig` (when weight gradients are computed, and settings of fused
            kernels; the same bits under all of them), or a file that `megamoe tune` wrote; None: the defaults.
        overlap_shared: run the shared expert on a stream of its own, beside dispatch and the routed experts; same bits.
            Unfused backends only; no effect on CPUs and in compiled code.
        context: capacity, max_tokens_per_rank, save, debug: as for `MoEContext`.

    Attributes:
        router: `FamilyRouter`, that of `config.family`.
        experts: `Experts`, the routed ones.
        shared: `Experts` with one expert, or None; it runs with the same recipe on every rank's own tokens.

    Raises:
        MegaMoEValueError: E is not a multiple of the ranks; recipe and config have different clamps. The forward
            raises MegaMoERuntimeError where "stream" or "delayed" cannot be: traced by torch.compile, in DDP or FSDP,
            with hooks on the weights.

    Over a process group the gradients of router and shared expert are those of this process's tokens; reduce them over
    the ranks like those of any parameter that all ranks hold. Those of the routed experts are complete.
    """

    shared: Experts | None

    def __init__(
        self,
        config: MoEConfig,
        *,
        world: World = None,
        backend: backends.BackendName = "auto",
        recipe: Recipe | None = None,
        weights: WeightFormat = "bf16",
        device: torch.device | str | None = None,
        overlap: Overlap = None,
        overlap_shared: bool = False,
        **context: Any,
    ) -> None:
        super().__init__()
        device = _check_construction(config, recipe, device, context)
        self.overlap_shared = overlap_shared
        if weights not in get_args(WeightFormat):
            raise MegaMoEValueError(expected("weights", "'fp8', 'bf16' or 'fp32'", repr(weights)))
        recipe = Recipe(clamp=config.clamp) if recipe is None else recipe
        if recipe.clamp != config.clamp:
            raise MegaMoEValueError(expected("recipe.clamp", f"config.clamp = {config.clamp}", recipe.clamp))
        ranks = MoEContext(recipe, world=world, backend=backend, **context)
        alone = MoEContext(recipe, backend=backend, save=ranks.shapes.save)
        settings = _settings(overlap, config, ranks, device)
        ranks.overlap, alone.overlap = settings, _of_shared(settings)
        each = experts_per_rank(config.num_experts, ranks.shapes.num_ranks)
        self.config, self.recipe, self.weights = config, recipe, weights
        router_dtype = torch.float32 if weights == "fp32" else torch.bfloat16
        self.router = FamilyRouter(config, config.family, device, router_dtype, vocab_size=config.hash_vocab_size)
        size = (config.hidden_size, config.intermediate_size)
        self.experts = Experts(each * ranks.shapes.num_local, *size, weights, ranks, device)
        shared_size = (config.hidden_size, config.shared_intermediate_size)
        self.shared = Experts(1, *shared_size, weights, alone, device) if config.num_shared_experts else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fresh weights of standard deviation `config.initializer_range`."""
        self.router.reset_parameters()
        for experts in (self.experts, self.shared):
            if experts is not None:
                experts.reset_parameters(self.config.initializer_range)

    def forward(
        self,
        x: Any,
        *,
        token_ids: Any = None,
        topk_ids: Any = None,
        token_mask: Any = None,
        is_first_microbatch: bool | None = None,
        return_expert_counts: bool = False,
    ) -> Any:
        """Apply the layer.

        Args:
            x: [T, H] or [B, S, H], bf16; fp16 and fp32 are rounded to bf16 for the experts, not for the router. Over a
                LocalWorld a list of R such tensors (with R = 1 one tensor does). Never written to.
            token_ids: int [T] or [B, S], vocabulary ids: a hash layer needs them.
            topk_ids: int [T, K]: use these experts instead of a choice (replayed from another run), -1 for none.
            token_mask: bool [T] or [B, S]: tokens with False get no routed expert and their x is
                not read. These three are lists where x is one.
            is_first_microbatch: False: the weights have not changed since the forward before, so their copies are
                reused; None or True: weights that train are quantised again.
            return_expert_counts: also return how many of these tokens chose each expert.

        Returns:
            out of x's shape and dtype, in an autocast region of the autocast dtype; with `return_expert_counts`
            (out, counts int64 [E]). Lists over a LocalWorld.

        Raises:
            As `mega_moe`.

        Effects: as `mega_moe`.
        """
        is_list = isinstance(x, list | tuple)
        xs: list[torch.Tensor] = list(x) if is_list else [x]
        hidden = self.config.hidden_size
        error = _x_error(xs, is_list, hidden, self.experts.w13.device)
        if error is not None:
            self.experts.context.report(error, self.experts.w13.device)
        device_type = xs[0].device.type
        is_autocast = torch.is_autocast_enabled(device_type)
        dtypes = [torch.get_autocast_dtype(device_type) if is_autocast else value.dtype for value in xs]
        with torch.autocast(device_type, enabled=False):
            flat = [value.reshape(-1, hidden) for value in xs]
            hints = {"token_ids": token_ids, "topk_ids": topk_ids, "token_mask": token_mask}
            given = {name: value if is_list else [value] for name, value in hints.items() if value is not None}
            outs, counts = self._apply_experts(flat, given, is_first_microbatch)
        outs = [out.to(dtype).view(v.shape) for out, dtype, v in zip(outs, dtypes, xs, strict=True)]
        if return_expert_counts:
            return (outs, counts) if is_list else (outs[0], counts[0])
        return outs if is_list else outs[0]

    def _apply_experts(
        self, flat: list[torch.Tensor], hints: dict[str, list[torch.Tensor]], is_first_microbatch: bool | None
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """(out, counts) of each local rank. What belongs to a token alone is computed for all local ranks at once."""
        tokens = [x.shape[0] for x in flat]
        everything = torch.cat(flat) if len(flat) > 1 else flat[0]
        if not hints:
            topk_ids, topk_weights = self.router(everything)
        else:
            try:
                routing = {name: _joined(name, given, tokens) for name, given in hints.items()}
                if "token_mask" in routing:  # padding may hold NaN
                    everything = torch.where(routing["token_mask"][:, None], everything, 0)
                topk_ids, topk_weights = self.router(everything, **routing)
            except MegaMoEError as error:
                self.experts.context.report(error, self.experts.w13.device)
        ids, weights = list(topk_ids.split(tokens)), list(topk_weights.split(tokens))
        rounded = everything.to(torch.bfloat16)
        finish_shared = self._start_shared(rounded, is_first_microbatch)
        outs = self.experts(list(rounded.split(tokens)), ids, weights, is_first_microbatch=is_first_microbatch)
        if finish_shared is not None:
            outs = [out + part for out, part in zip(outs, finish_shared().split(tokens), strict=True)]
        return outs, [_count(rank_ids, self.config.num_experts) for rank_ids in ids]

    def _start_shared(self, x: torch.Tensor, is_first_microbatch: bool | None) -> Callable[[], torch.Tensor] | None:
        """What gives the shared expert's output, on the current stream; with `overlap_shared` it runs from now on."""
        if self.shared is None:
            return None
        shared = self.shared

        def run() -> torch.Tensor:
            first = x.new_zeros(x.shape[0], 1, dtype=torch.int64)
            one = x.new_ones(x.shape[0], 1, dtype=torch.float32)
            return shared(x, first, one, is_first_microbatch=is_first_microbatch)

        if not self.overlap_shared or torch.compiler.is_compiling():
            return run
        chosen = (
            shared.context.choose(shared.w13, 1),
            self.experts.context.choose(self.experts.w13, self.config.top_k),
        )
        if any(backend.is_fused for backend in chosen):
            contract = "False with a fused backend: two kernels that each want every SM could wait for each other"
            raise MegaMoEValueError(expected("overlap_shared", contract, True, "Or take backend='triton'."))
        if not x.is_cuda:
            return run
        side, main = _side_stream(x.device), torch.cuda.current_stream(x.device)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            out = run()

        def join() -> torch.Tensor:
            main.wait_stream(side)
            out.record_stream(main)
            return out

        return join

    def backward_dw(self) -> None:
        """Compute the weight gradients of the backwards since the last call, oldest first, on the current stream.

        With wgrad="delayed"; otherwise there are none. Until then the layer keeps their operands.
        """
        for experts in (self.shared, self.experts):
            if experts is not None:
                experts.backward_dw()

    def set_overlap(self, overlap: Overlap) -> None:
        """Use other settings from the next call on.

        Args:
            overlap: as for the constructor.

        Raises:
            MegaMoERuntimeError: weight gradients wait for `backward_dw()`. MegaMoEValueError: a file does not fit.
        """
        settings = _settings(overlap, self.config, self.experts.context, self.experts.w13.device)
        self.experts.set_overlap(settings)
        if self.shared is not None:
            self.shared.set_overlap(_of_shared(settings))

    def refresh_weights(self) -> None:
        """Say that weights were written in a way that torch does not see; the next forward copies them anew."""
        for experts in (self.experts, self.shared):
            if experts is not None:
                experts.copies.refresh()

    def pack_weights(self) -> None:
        """Hold FP8 weights once, in the order of the fused kernels, in place of the bytes as they came and a copy.

        For inference; results do not change, and a backward makes the copies that it needs as ever. Nothing happens
        where an unfused backend runs the layer. `state_dict` still gives the bytes as they came; casting or moving the
        module, `load_state_dict` and `unpack_weights` bring them back. Until then whoever reads or writes
        `experts.w13` and `w2` themselves finds the kernels' order.

        Raises:
            MegaMoEValueError: the weights are not FP8, H is no multiple of 256, or the experts carry adapters.
        """
        for experts, top_k in ((self.experts, self.config.top_k), (self.shared, 1)):
            if experts is not None:
                if not isinstance(experts, Experts):
                    contract = "experts without adapters"
                    raise MegaMoEValueError(expected("experts", contract, type(experts).__name__, "Merge them first."))
                experts.pack(experts.context.choose(experts.w13, top_k))

    def unpack_weights(self) -> None:
        """Take `pack_weights` back."""
        for experts in (self.experts, self.shared):
            if isinstance(experts, Experts):
                experts.unpack()

    def backend_name(self) -> str:
        """The backend that "auto" takes for the device on which the weights are."""
        w13 = self.experts.w13
        return self.experts.context.choose(w13, self.config.top_k).name

    def extra_repr(self) -> str:
        return f"{self.config}, {self.recipe}, weights={self.weights!r}"

    def checkpoint_tensors(self, layer: int, family: str | None = None) -> checkpoints.MoELayerTensors:
        """This process's part of the layer for `checkpoints.save_moe_layer`: the way back of `from_checkpoint`.

        Args:
            layer: its number in the model.
            family: of names, one of `checkpoints.FAMILIES`; None: that of the config, for gpt-oss "packed".

        Returns:
            Weights in the layer's own format (FP8 bytes and scales, bf16 or fp32), which share memory with the
            parameters; over a process group this rank's experts.

        Raises:
            MegaMoEValueError: the experts carry adapters, or the router a linear bias, for which there is no name.
        """
        problems = []
        if not isinstance(self.experts, Experts):
            contract = "experts without adapters"
            problems.append(expected("experts", contract, type(self.experts).__name__, "Merge them first."))
        if self.router.linear_bias is not None:
            problems.append(expected("router", "no linear bias: checkpoints have no name for it", "one"))
        if problems:
            raise MegaMoEValueError("\n".join(problems))
        rank, _ = place(self.experts.context.world)
        has_bias = self.router.tid2eid is None and ROUTER_FAMILIES[self.config.family].has_bias
        return checkpoints.MoELayerTensors(
            layer=layer,
            family=_family_of(self.config) if family is None else family,
            num_experts=self.config.num_experts,
            first_expert=rank * self.experts.w13.shape[0],
            routed=self.experts.stored(),
            shared=None if self.shared is None else self.shared.stored(),
            router_weight=self.router.weight.detach(),
            correction_bias=self.router.correction_bias if has_bias else None,
            tid2eid=self.router.tid2eid,
        )

    @classmethod
    def from_checkpoint(
        cls,
        folder: str | Path,
        layer: int,
        *,
        config: MoEConfig | None = None,
        weights: WeightFormat | None = None,
        device: torch.device | str = "cpu",
        world: World = None,
        allow_links: bool = False,
        **options: Any,
    ) -> MegaMoE:
        """One MoE layer of a checkpoint, in the names of any family that `checkpoints` knows.

        Args:
            folder: with safetensors files and, unless `config` is given, config.json.
            layer: its number in the model.
            config: of the layer; None: read from config.json.
            weights: None: as stored (FP8 bytes and scales are used as they are). "bf16", "fp32": masters, dequantised
                from FP8 where that is stored. "fp8": quantised 128 x 128 where bf16 is stored.
            device: where the layer goes.
            world: ranks; a process group's rank reads its own experts only.
            allow_links: as for `checkpoints.load_moe_layer`.
            options: backend, recipe and what else the constructor takes.

        Raises:
            checkpoints.CheckpointError: files, keys, shapes or dtypes are not right.
            MegaMoEValueError: the configuration does not fit the checkpoint, or names a router
                that is not known.
        """
        if config is None:
            config = MoEConfig.from_hf(read_config(Path(folder)))
        _check_construction(config, None, device, {})
        rank, num_ranks = place(world)
        stored = checkpoints.load_moe_layer(
            folder, layer, rank=rank, num_ranks=num_ranks, device=device, allow_links=allow_links
        )
        check_fits(config, stored)
        weights = format_of(stored.routed) if weights is None else weights
        if stored.tid2eid is not None:
            config = dataclasses.replace(config, hash_vocab_size=stored.tid2eid.shape[0])
        overlap = options.pop("overlap", None)  # a file has settings for the device where the layer goes
        made = cls(config, world=world, weights=weights, device="meta", **options)
        if stored.tid2eid is not None:
            made.router.tid2eid = stored.tid2eid.to(torch.int64)
        made.router.weight = nn.Parameter(stored.router_weight)
        bias = stored.correction_bias
        made.router.correction_bias = (
            torch.zeros(config.num_experts, device=device) if bias is None else bias.to(torch.float32)
        )
        made.experts.adopt(stored.routed, weights)
        if made.shared is not None and stored.shared is not None:
            made.shared.adopt(stored.shared, weights)
        made.set_overlap(overlap)
        return made


def _family_of(config: MoEConfig) -> str:
    """The naming of a checkpoint that a layer is saved under unless the caller says so."""
    name = config.family.replace("_", "-")
    return name if name in checkpoints.FAMILIES else "packed"


def _check_construction(
    config: Any, recipe: Any, device: torch.device | str | None, options: dict[str, Any]
) -> torch.device | None:
    """Refuse what is of another type than asked for; returns the device."""
    problems = []
    if not isinstance(config, MoEConfig):
        problems.append(expected("config", "a MoEConfig", type(config).__name__))
    if recipe is not None and not isinstance(recipe, Recipe):
        problems.append(expected("recipe", "a Recipe or None", type(recipe).__name__, "Pass Recipe('fp8')."))
    known = [name for name in inspect.signature(MoEContext).parameters if name not in _OWN_OPTIONS]
    for name in sorted(options.keys() - set(known)):
        problems.append(expected("MegaMoE", f"options {', '.join([*_OWN_OPTIONS, *known])}", repr(name)))
    if problems:
        raise MegaMoETypeError("\n".join(problems))
    try:
        where = None if device is None else torch.device(device)
    except (RuntimeError, TypeError):
        raise MegaMoEValueError(expected("device", "cpu, cuda, cuda:N or meta", repr(device))) from None
    if where is not None and where.type == "cuda" and (where.index or 0) >= torch.cuda.device_count():
        here = f"cpu, or one of the {torch.cuda.device_count()} CUDA devices that torch sees"
        raise MegaMoEValueError(expected("device", here, repr(str(device))))
    return where


def _settings(
    overlap: Overlap, config: MoEConfig, context: MoEContext, device: torch.device | str | None
) -> OverlapConfig:
    """The settings that the caller means, read from a file if that is what they are."""
    sizes = (config.num_experts, config.hidden_size, config.intermediate_size, config.top_k)
    where = torch.get_default_device() if device is None else torch.device(device)
    return resolve_overlap(overlap, lambda: OverlapKey.of(where, sizes, context.shapes.num_ranks, context.recipe))


def _of_shared(overlap: OverlapConfig) -> OverlapConfig:
    """For the shared expert: what is tuned to the routed experts' sizes stays at its defaults."""
    return dataclasses.replace(overlap, lag=0, pull_batch=0)


@functools.lru_cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all layers on a device."""
    return torch.cuda.Stream(device)


def _x_error(xs: list[Any], is_list: bool, hidden: int, device: torch.device) -> MegaMoEError | None:
    """What is wrong with x: first types, then shapes and devices."""
    names = [f"x[{i}]" if is_list else "x" for i in range(len(xs))]
    types = [
        expected(name, "a bf16, fp16 or fp32 tensor", getattr(value, "dtype", type(value).__name__))
        for name, value in zip(names, xs, strict=True)
        if not isinstance(value, torch.Tensor) or value.dtype not in FLOATS
    ]
    if types:
        return MegaMoETypeError("\n".join(types))
    shapes = [
        expected(name, f"[T, {hidden}] or [B, S, {hidden}]", f"shape {tuple(value.shape)}")
        for name, value in zip(names, xs, strict=True)
        if value.dim() not in (2, 3) or value.shape[-1] != hidden
    ]
    shapes += [
        expected(name, f"a dense tensor with data on the device of the weights, {device}", value.device)
        for name, value in zip(names, xs, strict=True)
        if value.device != device or value.is_meta or value.layout != torch.strided
    ]
    shapes += [] if xs else [expected("x", "one tensor for each rank", "none")]
    return MegaMoEValueError("\n".join(shapes)) if shapes else None


def _count(topk_ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Slots of each expert, int64 [E]."""
    flat = topk_ids.flatten()
    return flat.new_zeros(num_experts).scatter_add_(0, flat.clamp_min(0), (flat >= 0).to(flat.dtype))


def _joined(name: str, given: list[torch.Tensor], tokens: list[int]) -> torch.Tensor:
    """What the caller says about tokens, of all local ranks one after the other: [T] or, for topk_ids, [T, K]."""
    if len(given) != len(tokens):
        raise MegaMoEValueError(expected(name, f"one tensor for each of the {len(tokens)} of x", len(given)))
    kind = "a bool tensor" if name == "token_mask" else "a tensor of integers"
    strange = [
        getattr(part, "dtype", type(part).__name__)
        for part in given
        if not isinstance(part, torch.Tensor)
        or (part.dtype != torch.bool if name == "token_mask" else part.dtype not in INTEGERS)
    ]
    if strange:
        raise MegaMoETypeError(expected(name, kind, strange[0]))
    least = 2 if name == "topk_ids" else 1
    scalars = [tuple(part.shape) for part in given if part.dim() < least or part.is_meta or part.is_sparse]
    if scalars:
        want = "[T, K] or [B, S, K]" if name == "topk_ids" else "[T] or [B, S]"
        raise MegaMoEValueError(expected(name, f"a dense tensor {want} with data", f"shape {scalars[0]}"))
    flat = [part.flatten(0, -2) if name == "topk_ids" else part.flatten() for part in given]
    wrong = [
        expected(name if len(tokens) == 1 else f"{name}[{i}]", f"{count} tokens as in x", part.shape[0])
        for i, (part, count) in enumerate(zip(flat, tokens, strict=True))
        if part.shape[0] != count
    ]
    if not wrong and len({part.shape[1:] for part in flat}) > 1:
        wrong.append(expected(name, "the same K on every rank", ", ".join(str(part.shape[1]) for part in flat)))
    if wrong:
        raise MegaMoEValueError("\n".join(wrong))
    return torch.cat(flat) if len(flat) > 1 else flat[0]
