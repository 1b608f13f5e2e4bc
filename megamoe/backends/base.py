"""What a backend is asked, and what it offers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch

from megamoe.comm.reach import TransportName
from megamoe.comm.transport import Transport
from megamoe.quantize import QuantizedWeight
from megamoe.recipe import Recipe
from megamoe.unfused import ExpertWeights, ForwardOptions, Grads, Needs, Saved, Steps
from megamoe.weights import Packing


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is to run, as far as the choice of a backend depends on it.

    Attributes:
        device_type: "cuda", "cpu", ...
        capability: compute capability of the CUDA device, e.g. (9, 0); None elsewhere.
        precision: of the recipe.
        hidden_size, intermediate_size: H and I.
        num_experts, top_k: E and K.
        num_ranks: R.
        world: "one" rank, "local" virtual ranks in this process, or a process "group".
        transport: how the fused kernel is to reach the ranks of a group, None: as it can.
        reach: why symmetric memory cannot join the ranks of the group, "" if it can.
    """

    device_type: str
    capability: tuple[int, int] | None
    precision: Literal["fp8", "bf16"]
    hidden_size: int
    intermediate_size: int
    num_experts: int = 8
    top_k: int = 2
    num_ranks: int = 1
    world: Literal["one", "local", "group"] = "one"
    transport: TransportName | None = None
    reach: str = ""

    @classmethod
    def of(
        cls, device: torch.device, recipe: Recipe, hidden_size: int, intermediate_size: int, **sizes: Any
    ) -> Problem:
        """The problem on a device of this machine; `sizes` are the fields behind these."""
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
        return cls(device.type, capability, recipe.precision, hidden_size, intermediate_size, **sizes)


class Backend(Protocol):
    """One way to compute the layer. Same results within the gates, same saved row order."""

    name: str
    auto_device: str | None
    """The only device type for which "auto" considers it (Triton's interpreter on the CPU is for tests); None: all."""
    saves_codes: bool
    """Whether its forward saves row codes (`RowOrder`) in place of a plan."""

    def why_not(self, problem: Problem) -> str | None:
        """Why it cannot run the problem on this machine; None if it can."""
        ...

    def variant(self, problem: Problem) -> Backend:
        """What runs a problem that it can run: itself, or another one of the same name."""
        ...

    @property
    def steps(self) -> Steps:
        """The steps from which it builds what it does not fuse."""
        ...

    def copy_weight(
        self, weight: torch.Tensor | QuantizedWeight, row_groups: int, recipe: Recipe, transposed: bool
    ) -> tuple[QuantizedWeight, QuantizedWeight | None]:
        """A weight as the forward reads it and, if asked for, as the backward reads it."""
        ...

    is_fused: bool
    """Whether its kernels read the weights in an order of their own, which `prepare` makes."""

    packing: Packing | None
    """How FP8 weights give up their order for that one; None: they are read as they are."""

    def quantize_experts(
        self, w13: torch.Tensor, w2: torch.Tensor, recipe: Recipe, transposed: bool
    ) -> ExpertWeights | None:
        """Both weights quantised straight into that order; None: by `copy_weight`, then `prepare`."""
        ...

    def prepare(self, weights: ExpertWeights) -> ExpertWeights:
        """The weights with `fused` and, where there are transposed ones, `fused_t`."""
        ...

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
        """As `megamoe.unfused.forward`."""
        ...

    def backward(
        self,
        transport: Transport,
        douts: Sequence[torch.Tensor],
        saved: Saved,
        experts: Sequence[ExpertWeights],
        needs: Needs,
    ) -> Grads:
        """As `megamoe.unfused.backward`."""
        ...
