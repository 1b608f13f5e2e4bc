"""Experts: the weights of one process's experts as a module, with the copies that the GEMMs read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import checkpoints
from megamoe.backends import Backend
from megamoe.context import MoEContext
from megamoe.deferred import DeferredWgrad, refuse_managed
from megamoe.errors import MegaMoERuntimeError, MegaMoEValueError, expected
from megamoe.functional import mega_moe
from megamoe.loading import DTYPES, WeightFormat, convert
from megamoe.overlap import OverlapConfig
from megamoe.quantize import ceil_div, quantize_weight
from megamoe.recipe import BLOCK, Recipe
from megamoe.weights import Packing, WeightCopies


class Experts(nn.Module):
    """Experts of one process, stacked, and the copies of them that the GEMMs read.

    Args:
        num_experts: held here.
        hidden_size: H. intermediate_size: I.
        weights: "bf16" or "fp32": masters that can be trained. "fp8": e4m3 bytes with fp32 scales, frozen.
        context: how they run.
        device: of the parameters.

    Attributes:
        w13: [E_l, 2I, H], gate rows first. w2: [E_l, H, I].
        w13_scale, w2_scale: of FP8 weights fp32 [E_l, 2 * ceil(I / 128), ceil(H / 128)] and
            [E_l, ceil(H / 128), ceil(I / 128)], else None.
        is_packed: the bytes of w13 and w2 are in a fused kernel's order (`pack`); scales are not.

    FP8 bytes and scales keep their dtype whatever the module is cast to, and `state_dict` gives them back as they came.
    """

    w13_scale: nn.Parameter | None
    w2_scale: nn.Parameter | None

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        weights: WeightFormat,
        context: MoEContext,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        e, h, i = num_experts, hidden_size, intermediate_size
        trains, dtype = weights != "fp8", DTYPES[weights]
        self.w13 = nn.Parameter(torch.empty(e, 2 * i, h, device=device, dtype=dtype), requires_grad=trains)
        self.w2 = nn.Parameter(torch.empty(e, h, i, device=device, dtype=dtype), requires_grad=trains)
        grids = {
            "w13_scale": (e, 2 * ceil_div(i, BLOCK), ceil_div(h, BLOCK)),
            "w2_scale": (e, ceil_div(h, BLOCK), ceil_div(i, BLOCK)),
        }
        for name, grid in grids.items():
            scale = None if trains else nn.Parameter(torch.empty(grid, device=device), requires_grad=False)
            self.register_parameter(name, scale)
        self.context = context
        self.copies = context.copies = WeightCopies(self)
        self._defer()
        self.register_load_state_dict_post_hook(_after_load)

    def reset_parameters(self, std: float) -> None:
        """Fresh normal weights; FP8 ones are quantised from them, one expert at a time."""
        for weight, scale, row_groups in ((self.w13, self.w13_scale, 2), (self.w2, self.w2_scale, 1)):
            if scale is None:
                nn.init.normal_(weight, std=std)
                continue
            if weight.is_meta:
                continue
            for e in range(weight.shape[0]):
                fresh = torch.empty(1, *weight.shape[1:], device=weight.device).normal_(std=std)
                quantized = quantize_weight(fresh, Recipe(), row_groups)
                weight.data[e].copy_(quantized.data[0])
                assert quantized.scale is not None
                scale.data[e].copy_(quantized.scale[0])
        self.copies.packing = None
        self.copies.refresh()

    def adopt(self, stored: checkpoints.ExpertGroup, weights: WeightFormat) -> None:
        """Make a checkpoint's tensors the parameters, converted where they are stored in another format."""
        for name, data, scale, row_groups in (
            ("w13", stored.w13, stored.w13_scale, 2),
            ("w2", stored.w2, stored.w2_scale, 1),
        ):
            data, scale = convert(data, scale, row_groups, weights)
            setattr(self, name, nn.Parameter(data, requires_grad=scale is None))
            setattr(self, f"{name}_scale", None if scale is None else nn.Parameter(scale, requires_grad=False))
        self.copies.packing = None
        self.copies.refresh()

    @property
    def is_packed(self) -> bool:
        return self.copies.packing is not None

    def pack(self, backend: Backend) -> None:
        """Hold FP8 weights in the order of a fused backend's kernels only, one copy of each; values do not change.

        Args:
            backend: that runs these experts; an unfused one reads the weights as they are, and nothing happens.

        Raises:
            MegaMoEValueError: the weights are not FP8, or the hidden size is no multiple of 256.

        Effects: w13 and w2 become new parameters, so whoever shares the old ones keeps them.
        """
        if self.w13_scale is None:
            contract = "'fp8': weights that train are masters beside their copies"
            raise MegaMoEValueError(expected("weights", contract, str(self.w13.dtype)))
        if backend.packing is None or self.is_packed:
            return
        backend.packing.check(self.w13.shape[2])
        self._reorder(backend.packing.pack, backend.packing)

    def unpack(self) -> None:
        """Take `pack` back: the bytes of w13 and w2 in the order in which they came."""
        if self.copies.packing is not None:
            self._reorder(self.copies.packing.unpack, None)

    def stored(self) -> checkpoints.ExpertGroup:
        """The weights as a checkpoint stores them; they share memory with the parameters unless these are packed."""
        w13, w2 = self._as_they_came()
        s13, s2 = (None if s is None else s.detach() for s in (self.w13_scale, self.w2_scale))
        dtypes = {torch.bfloat16: ("BF16", None), torch.float32: ("F32", None), torch.float16: ("F16", None)}
        return checkpoints.ExpertGroup(w13, w2, s13, s2, *dtypes.get(w13.dtype, ("F8_E4M3", "F32")))

    def _as_they_came(self) -> tuple[torch.Tensor, torch.Tensor]:
        """w13 and w2 in their own order: the parameters themselves, or copies of packed ones."""
        w13, w2, packing = self.w13.detach(), self.w2.detach(), self.copies.packing
        return (w13, w2) if packing is None else (packing.unpack(w13, 2), packing.unpack(w2, 1))

    def _reorder(self, to_order: Callable[[torch.Tensor, int], torch.Tensor], packing: Packing | None) -> None:
        self.copies.refresh()  # frees the kernels' own copy
        w13, w2 = to_order(self.w13.detach(), 2), to_order(self.w2.detach(), 1)  # both, before either is replaced
        self.w13, self.w2 = (nn.Parameter(data, requires_grad=False) for data in (w13, w2))
        self.copies.packing = packing

    def forward(self, x: Any, topk_ids: Any, topk_weights: Any, *, is_first_microbatch: bool | None = None) -> Any:
        """`mega_moe` with these weights."""
        if self.context.deferred is not None and torch.is_grad_enabled():
            refuse_managed(self)
        scales = None if self.w13_scale is None or self.w2_scale is None else (self.w13_scale, self.w2_scale)
        return mega_moe(
            x,
            topk_ids,
            topk_weights,
            self.w13,
            self.w2,
            scales=scales,
            context=self.context,
            is_first_microbatch=is_first_microbatch,
        )

    def _defer(self) -> None:
        mode = self.context.overlap.wgrad
        self.context.deferred = None if mode == "inline" else DeferredWgrad(self, mode)

    def set_overlap(self, overlap: OverlapConfig) -> None:
        """Use other settings from the next call on; no weight gradients may wait."""
        if self.context.deferred is not None and len(self.context.deferred):
            contract = "no weight gradients that wait"
            raise MegaMoERuntimeError(expected("overlap", contract, len(self.context.deferred), "Call backward_dw()."))
        self.context.overlap = overlap
        self._defer()

    def backward_dw(self) -> None:
        """Compute the weight gradients that wait (wgrad="delayed"), oldest first, on the current stream."""
        if self.context.deferred is not None:
            self.context.deferred.run()

    def train(self, mode: bool = True) -> Experts:
        if not mode:
            self.copies.release_transposed()
        return super().train(mode)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.is_packed:
            destination[prefix + "w13"], destination[prefix + "w2"] = self._as_they_came()

    def _load_from_state_dict(self, *args: Any) -> None:
        self.unpack()
        super()._load_from_state_dict(*args)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Experts:
        self.unpack()
        kept = {} if self.w13_scale is None else {name: p.data for name, p in self.named_parameters(recurse=False)}
        super()._apply(fn, recurse)
        for name, data in kept.items():
            parameter = getattr(self, name)
            if parameter.dtype != data.dtype:
                parameter.data = data.to(parameter.device)
        self.copies.refresh()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:  # of a copy or a pickle: copies are made anew
        super().__setstate__(state)
        self.copies = self.context.copies = WeightCopies(self, self.copies.packing)
        self._defer()


def _after_load(module: nn.Module, incompatible: Any) -> None:
    assert isinstance(module, Experts)
    module.copies.refresh()
