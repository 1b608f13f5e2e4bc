"""transformers 5: experts implementations "megamoe" and "megamoe_fp8", and whole MoE blocks replaced.

    register()
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16, experts_implementation="megamoe_fp8")

What an experts module asks for and this package does not compute is refused by name, never computed otherwise.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from megamoe import backends
from megamoe.context import MoEContext
from megamoe.errors import MegaMoERuntimeError, MegaMoETypeError, MegaMoEValueError, expected
from megamoe.functional import mega_moe
from megamoe.integrations.transformers_blocks import MoEBlock, replace_moe
from megamoe.integrations.transformers_experts import activation_limit, find_refusals, is_experts
from megamoe.quantize import FP8
from megamoe.recipe import Recipe
from megamoe.unfused import SaveMode
from megamoe.weights import WeightCopies

__all__ = ["MoEBlock", "prepare", "refresh", "register", "replace_moe"]

NAMES = ("megamoe", "megamoe_fp8")
"""`experts_implementation=`: computes in the weights' precision; computes in FP8 whatever the weights are."""

_ATTRIBUTE = "_megamoe"


@dataclasses.dataclass(frozen=True, eq=False)
class _Settings:
    """What `register` was told, for one of the names."""

    name: str
    backend: backends.BackendName
    save: SaveMode
    debug: bool


class _Bound:
    """What an experts module keeps between calls: its context with the copies of its weights. A copy keeps nothing."""

    def __init__(self, module: nn.Module, settings: _Settings) -> None:
        self.settings = settings
        self.dtype = module.gate_up_proj.dtype
        precision: Any = "fp8" if settings.name == "megamoe_fp8" or self.dtype == FP8 else "bf16"
        self.context = MoEContext(
            Recipe(precision, clamp=activation_limit(module)),
            backend=settings.backend,
            save=settings.save,
            debug=settings.debug,
            copies=WeightCopies(module),
        )
        self.is_scaled_in_fp32 = True
        self._scales: tuple[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] | None = None
        if self.dtype == FP8:
            self.is_scaled_in_fp32 = module.gate_up_proj_scale_inv.dtype == torch.float32

    def scales(self, module: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Scales of FP8 weights in fp32; powers of two are converted once, exactly."""
        if self.dtype != FP8:
            return None
        scale13, scale2 = module.gate_up_proj_scale_inv.detach(), module.down_proj_scale_inv.detach()
        if self.is_scaled_in_fp32:
            return scale13, scale2
        key = tuple(
            n for scale in (scale13, scale2) for n in (scale.data_ptr(), -1 if scale.is_inference() else scale._version)
        )
        if self._scales is None or self._scales[0] != key:
            self._scales = key, (scale13.float(), scale2.float())
        return self._scales[1]

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing, ()


def _nothing() -> None:
    """What is left of a `_Bound` in a copy or a pickle; the copy makes its own."""


class _Implementation:
    """An experts implementation: a function (experts module, hidden states, ids, weights) -> output."""

    def __init__(self, settings: _Settings) -> None:
        self.settings = settings

    def __call__(
        self,
        module: Any,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        bound = getattr(module, _ATTRIBUTE, None)
        w13: Any = getattr(module, "gate_up_proj", None)
        if bound is None or bound.settings is not self.settings or bound.dtype != w13.dtype:
            if torch.compiler.is_compiling():
                raise MegaMoERuntimeError(
                    expected("model", "experts that are prepared before torch.compile", "new ones", _PREPARE)
                )
            bound = _bind(module, self.settings, "experts")
        w2: Any = module.down_proj
        if _is_dtensor(w13) or _is_dtensor(w2):
            raise MegaMoETypeError(expected("gate_up_proj, down_proj", "plain tensors", "DTensors", _LOCAL))
        _check_dtype(self.settings, w13, hidden_states.device)
        if bound.dtype == FP8:  # transformers leaves requires_grad on, though nobody computes such gradients
            w13, w2 = w13.detach(), w2.detach()
        ids = top_k_index
        if getattr(module, "_is_expert_parallel", True):  # experts of other ranks have the id num_experts
            ids = torch.where(ids >= module.num_experts, -1, ids)
        keeps_copies = not module.training and not torch.is_grad_enabled()
        return mega_moe(
            hidden_states,
            ids,
            top_k_weights,
            w13,
            w2,
            scales=bound.scales(module),
            context=bound.context,
            is_first_microbatch=False if keeps_copies else None,
        )


_PREPARE = "Call megamoe.integrations.transformers.prepare(model) first."
_LOCAL = "Gather them first (FSDP2 does), or shard whole experts with transformers' own expert parallelism."


def register(*, backend: backends.BackendName = "auto", save: SaveMode = "pool", debug: bool = False) -> None:
    """Make "megamoe" and "megamoe_fp8" known to transformers, for bf16 experts and for FP8 experts.

    After it `model.set_experts_implementation("megamoe")` and `from_pretrained(..., experts_implementation="megamoe")`
    work for every model on that interface whose experts are SwiGLU without biases: DeepSeek-V2, V3, V3.2, V4,
    Qwen3-MoE, GLM-4.5 and others. "megamoe" computes in the weights' precision: bf16, or FP8 where the checkpoint
    is; "megamoe_fp8" computes in FP8 whatever the weights are. All gradients are those of the layer; FP8 weights are
    frozen.

    Args:
        backend: as for `MoEContext`.
        save: what a forward keeps for its backward.
        debug: check the values of ids on CUDA devices too.

    Raises:
        MegaMoERuntimeError: transformers is not installed, or has no experts interface.
        MegaMoEValueError: no such backend.

    Effects: process-wide. In eval mode without grad, copies of the weights are kept until torch sees a write to them;
    after a write that it can't see, call `refresh(model)`.
    """
    backends.check_name(backend)
    for interface in _interfaces():
        for name in NAMES:
            interface.register(name, _Implementation(_Settings(name, backend, save, debug)))


def prepare(model: nn.Module) -> list[str]:
    """Bind every experts module whose implementation is one of ours, and refuse what cannot run, before it runs.

    Args:
        model: after `set_experts_implementation`; its weights may be on the meta device.

    Returns:
        The names of the modules.

    Raises:
        MegaMoEValueError: naming all modules and reasons.
        MegaMoERuntimeError: `register` has not been called.

    Effects: needed once before `torch.compile`; otherwise the first forward does it.
    """
    found, problems = [], []
    for name, module in model.named_modules():
        chosen = getattr(getattr(module, "config", None), "_experts_implementation", None)
        if chosen not in NAMES or not is_experts(module):
            continue
        try:
            _bind(module, _registered(module, chosen).settings, name)
            found.append(name)
        except MegaMoEValueError as error:
            problems.append(str(error))
    if problems:
        raise MegaMoEValueError("\n".join(problems))
    return found


def refresh(model: nn.Module) -> None:
    """Say that weights were written in a way that torch does not see; the next forward copies them anew."""
    for module in model.modules():
        bound = getattr(module, _ATTRIBUTE, None)
        if isinstance(bound, _Bound):
            assert bound.context.copies is not None
            bound.context.copies.refresh()


def _bind(module: nn.Module, settings: _Settings, name: str) -> _Bound:
    problems = find_refusals(module)
    if problems:
        raise MegaMoEValueError("\n".join(f"{name}.{problem}" for problem in problems))
    bound = _Bound(module, settings)
    setattr(module, _ATTRIBUTE, bound)
    return bound


def _interfaces() -> list[Any]:
    try:
        from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError as error:
        raise MegaMoERuntimeError(
            expected("transformers", "a version 5 with its experts interface", error, "pip install 'transformers>=5'")
        ) from error
    return [ALL_EXPERTS_FUNCTIONS, ALL_FP8_EXPERTS_FUNCTIONS]


def _registered(module: nn.Module, name: str) -> _Implementation:
    plain, fp8 = _interfaces()
    interface = fp8 if hasattr(module, "activation_scheme") else plain
    if name not in interface:
        raise MegaMoERuntimeError(
            expected("experts_implementation", "a registered one", repr(name), "Call register().")
        )
    return interface[name]


def _is_dtensor(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "device_mesh")


def _check_dtype(settings: _Settings, w13: torch.Tensor, device: torch.device) -> None:
    """Under "megamoe" fp32 weights would silently be rounded to bf16, unless the user asked for that by autocast."""
    if settings.name == "megamoe_fp8" or w13.dtype in (torch.bfloat16, FP8):
        return
    if torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type) == torch.bfloat16:
        return
    raise MegaMoETypeError(
        expected(
            "gate_up_proj",
            "bf16 or FP8 weights, or a bf16 autocast region, for experts_implementation='megamoe'",
            w13.dtype,
            "Load with dtype=torch.bfloat16, or take 'megamoe_fp8'.",
        )
    )
