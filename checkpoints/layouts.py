"""What a loaded layer looks like, and the pure functions between it and the matrices of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from checkpoints.errors import CheckpointError

BLOCK = 128


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class ExpertGroup:
    """Weights of n experts in the layer's layout, and how the checkpoint stored them.

    Attributes:
        w13: [n, 2I, H], gate rows first, then up rows; E4M3 bytes as stored, or bf16, fp16, fp32.
        w2: [n, H, I].
        w13_scale: fp32 [n, 2 * ceil(I / 128), ceil(H / 128)] or None: first the grid of gate, then that of up, each
            with its own last, partial block; so I = 320 has 3 + 3 rows, not ceil(640 / 128) = 5.
        w2_scale: fp32 [n, ceil(H / 128), ceil(I / 128)] or None.
        weight_dtype: as stored: "F8_E4M3", "BF16", "F16", "F32", or, for FP4 converted to E4M3, "I8", "U8" or "F4".
        scale_dtype: as stored: "F32", "BF16", "F8_E8M0", "U8", or None.
        w13_exponents: of FP4: its own exponents, uint8 [n, 2I, H / 32], with which saving gives back its bytes.
        w2_exponents: of FP4: uint8 [n, H, I / 32].
    """

    w13: torch.Tensor
    w2: torch.Tensor
    w13_scale: torch.Tensor | None
    w2_scale: torch.Tensor | None
    weight_dtype: str
    scale_dtype: str | None
    w13_exponents: torch.Tensor | None = None
    w2_exponents: torch.Tensor | None = None

    @property
    def intermediate_size(self) -> int:
        return self.w2.shape[2]


@dataclass(frozen=True)
class MoELayerTensors:
    """One MoE layer of a checkpoint: this rank's routed experts, and what every rank holds.

    Attributes:
        layer: its number in the model.
        family: the naming it was read with, a name of `FAMILIES`.
        num_experts: E, of all ranks.
        first_expert: global number of the first routed expert here; they are consecutive.
        routed: this rank's E_l = E / num_ranks experts.
        shared: the shared experts, fused by the checkpoint into one of I_s = their number * I, or None; leading dim 1.
        router_weight: [E, H] as stored.
        correction_bias: [E] as stored, or None.
        tid2eid: [vocabulary, K] integers as stored (DeepSeek-V4 hash layers), or None.
    """

    layer: int
    family: str
    num_experts: int
    first_expert: int
    routed: ExpertGroup
    shared: ExpertGroup | None
    router_weight: torch.Tensor
    correction_bias: torch.Tensor | None
    tid2eid: torch.Tensor | None

    @property
    def w13_E2IH(self) -> torch.Tensor:
        return self.routed.w13

    @property
    def w2_EHI(self) -> torch.Tensor:
        return self.routed.w2

    @property
    def w13_scale(self) -> torch.Tensor | None:
        return self.routed.w13_scale

    @property
    def w2_scale(self) -> torch.Tensor | None:
        return self.routed.w2_scale


def scale_shape(n: int, k: int) -> tuple[int, int]:
    """Scale grid of an [n, k] matrix in 128 x 128 blocks."""
    return ceil_div(n, BLOCK), ceil_div(k, BLOCK)


def stack_gate_up(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """[gate; up] along the second last dimension: for weights, scales and exponents alike."""
    return torch.cat((gate, up), -2)


def split_gate_up(stacked: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of `stack_gate_up`, as views."""
    half = stacked.shape[-2] // 2
    return stacked.narrow(-2, 0, half), stacked.narrow(-2, half, half)


def local_experts(num_experts: int, rank: int, num_ranks: int) -> range:
    """The consecutive experts of one rank of the expert-parallel group.

    Raises:
        CheckpointError: rank outside the group, or E not a multiple of its size.
    """
    if num_ranks < 1 or not 0 <= rank < num_ranks:
        raise CheckpointError(f"rank: expected 0 <= rank < num_ranks, got rank {rank} of {num_ranks}.")
    if num_experts % num_ranks:
        raise CheckpointError(f"num_ranks: expected a divisor of the {num_experts} experts, got {num_ranks}.")
    each = num_experts // num_ranks
    return range(rank * each, (rank + 1) * each)
