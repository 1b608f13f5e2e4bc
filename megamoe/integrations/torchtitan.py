"""Experts with torchtitan's conventions, which needs no torchtitan: `GroupedExperts` on rows sorted by expert.

E experts, D the model's and F the experts' width, R rows. The token dispatcher stays torchtitan's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megamoe import backends
from megamoe.context import MoEContext
from megamoe.errors import MegaMoETypeError, expected
from megamoe.integrations.built_weights import mega_moe_built
from megamoe.integrations.grouped import as_counts, expert_of_rows
from megamoe.recipe import Recipe
from megamoe.unfused import SaveMode


class GroupedExperts(nn.Module):
    """The experts of one expert-parallel rank, or all of them.

    Args:
        dim: D. hidden_dim: F. num_experts: E.
        recipe: numerics; None: FP8. backend, save: as for `MoEContext`.
        device, dtype: of the parameters.

    Attributes:
        w1_EFD: gate. w3_EFD: up. w2_EDF: down.

    Under FSDP2 the copies of the weights are made from what was gathered, in the forward and again in the backward, and
    are not kept in between; no gathered weight is kept either. Expert parallelism by DTensors that shard dim 0 works on
    the local part; other placements are refused.
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        num_experts: int,
        *,
        recipe: Recipe | None = None,
        backend: backends.BackendName = "auto",
        save: SaveMode = "pool",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.w1_EFD = nn.Parameter(torch.empty(num_experts, hidden_dim, dim, **where))
        self.w2_EDF = nn.Parameter(torch.empty(num_experts, dim, hidden_dim, **where))
        self.w3_EFD = nn.Parameter(torch.empty(num_experts, hidden_dim, dim, **where))
        self.context = MoEContext(recipe, backend=backend, save=save)
        self.init_weights(0.02)

    def init_weights(self, init_std: float, buffer_device: Any = None) -> None:
        """Truncated normal weights: the gate's of 0.02, the others' of `init_std`."""
        nn.init.trunc_normal_(self.w1_EFD, std=0.02)
        nn.init.trunc_normal_(self.w2_EDF, std=init_std)
        nn.init.trunc_normal_(self.w3_EFD, std=init_std)

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        """Apply the experts.

        Args:
            x_RD: rows sorted by expert; rows behind the last expert's give zeros.
            num_tokens_per_expert_E: integers, rows of each expert here.

        Returns:
            out_RD of x's dtype.

        Effects: no synchronisation with the host.
        """
        w1, w2, w3 = (_local(name, getattr(self, name)) for name in ("w1_EFD", "w2_EDF", "w3_EFD"))
        counts = as_counts("num_tokens_per_expert_E", num_tokens_per_expert_E, w1.shape[0], x_RD.device)
        ids = expert_of_rows(counts, x_RD.shape[0])
        ones = torch.ones_like(ids, dtype=torch.float32)
        return mega_moe_built([x_RD], [ids], [ones], _stack, [w1, w2, w3], self.context)[0]


def _stack(w1: torch.Tensor, w2: torch.Tensor, w3: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cat([w1, w3], dim=1), w2


def _local(name: str, weight: Any) -> torch.Tensor:
    """The local part of a weight whose experts are spread over ranks."""
    if not hasattr(weight, "device_mesh"):
        return weight
    if not all(p.is_replicate() or p.is_shard(0) for p in weight.placements):
        contract = "a tensor, or a DTensor that shards dim 0 at most"
        raise MegaMoETypeError(expected(name, contract, weight.placements, "Shard whole experts."))
    return weight.to_local()
