"""The unfused backends: separate steps in torch or in Triton, around a transport."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence

import torch

from megamoe import unfused
from megamoe.backends.base import Backend, Problem
from megamoe.comm.transport import Transport
from megamoe.quantize import QuantizedWeight
from megamoe.recipe import Recipe
from megamoe.unfused import ExpertWeights, ForwardOptions, Grads, Needs, Saved, Steps
from megamoe.weights import Packing


class StepwiseBackend:
    """A backend made of a module of steps.

    Args:
        name: of the backend.
        module: that has the steps.
    """

    def __init__(self, name: str, module: str) -> None:
        self.name = name
        self._module = module

    auto_device: str | None = None
    saves_codes = False
    is_fused = False
    packing: Packing | None = None

    @property
    def steps(self) -> Steps:
        return importlib.import_module(self._module)

    def why_not(self, problem: Problem) -> str | None:
        return None

    def variant(self, problem: Problem) -> Backend:
        return self

    def copy_weight(
        self, weight: torch.Tensor | QuantizedWeight, row_groups: int, recipe: Recipe, transposed: bool
    ) -> tuple[QuantizedWeight, QuantizedWeight | None]:
        if isinstance(weight, QuantizedWeight):
            return weight, weight.transposed() if transposed else None
        if transposed:
            return self.steps.quantize_weight_with_transpose(weight, recipe, row_groups)
        return self.steps.quantize_weight(weight, recipe, row_groups), None

    def quantize_experts(
        self, w13: torch.Tensor, w2: torch.Tensor, recipe: Recipe, transposed: bool
    ) -> ExpertWeights | None:
        return None

    def prepare(self, weights: ExpertWeights) -> ExpertWeights:
        return weights

    def forward(
        self,
        transport: Transport,
        xs: Sequence[torch.Tensor],
        topk_ids: Sequence[torch.Tensor],
        topk_weights: Sequence[torch.Tensor],
        experts: Sequence[ExpertWeights],
        recipe: Recipe,
        options: ForwardOptions,
    ) -> tuple[list[torch.Tensor], Saved | None]:
        return unfused.forward(self.steps, transport, xs, topk_ids, topk_weights, experts, recipe, options)

    def backward(
        self,
        transport: Transport,
        douts: Sequence[torch.Tensor],
        saved: Saved,
        experts: Sequence[ExpertWeights],
        needs: Needs,
    ) -> Grads:
        return unfused.backward(self.steps, transport, douts, saved, experts, needs)


class TritonBackend(StepwiseBackend):
    """The steps as Triton kernels: CUDA devices, or the CPU under TRITON_INTERPRET=1."""

    auto_device: str | None = "cuda"

    def __init__(self) -> None:
        super().__init__("triton", "megamoe.triton_kernels")

    def why_not(self, problem: Problem) -> str | None:
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed; pip install 'megamoe[triton]'"
        if problem.device_type == "cuda":
            assert problem.capability is not None
            if problem.precision == "fp8" and problem.capability < (8, 9):
                return "FP8 needs compute capability 8.9 or more, not {}.{}".format(*problem.capability)
            return None
        if problem.device_type == "cpu" and importlib.import_module("megamoe.triton_kernels.launch").INTERPRETED:
            return None
        return f"it needs a CUDA device, not {problem.device_type} (TRITON_INTERPRET=1 runs it on the CPU, slowly)"
