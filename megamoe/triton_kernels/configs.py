"""Tile configurations of the GEMM kernels: fixed lists, and the one that is used for a problem. None changes a result.

A depth of 128 is part of the recipe for FP8 (one promotion a block); for the others a sum's order follows the tensor
core's 16-deep steps, so their depth is fixed too.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class GemmConfig:
    """An m-grouped GEMM's tile.

    Attributes:
        rows: tile height; divides 128, so that a tile never spans two experts.
        cols: tile width; at most 128 for FP8, so that a tile has one weight scale a k-block.
        depth: channels a step; 128 for FP8.
        warps, stages: Triton's num_warps and num_stages. registers: a thread's limit, None for none.
        pair: two tiles side by side in one program (FP8 only).
        group: m-blocks visited before the next n-block, for reuse in L2.
    """

    rows: int
    cols: int
    depth: int
    warps: int
    stages: int
    registers: int | None = None
    pair: bool = False
    group: int = 16


@dataclasses.dataclass(frozen=True)
class WgradConfig:
    """A k-grouped GEMM's tile: `rows` x `cols` of one expert's gradient, `depth` pool rows a step."""

    rows: int
    cols: int
    depth: int
    warps: int
    stages: int
    group: int = 8


FP8_GEMMS: tuple[GemmConfig, ...] = (
    GemmConfig(64, 128, 128, warps=4, stages=3),
    GemmConfig(128, 64, 128, warps=8, stages=3, pair=True),
    GemmConfig(128, 128, 128, warps=8, stages=4),
    GemmConfig(64, 64, 128, warps=4, stages=4),
)
BF16_GEMMS: tuple[GemmConfig, ...] = (
    GemmConfig(128, 256, 64, warps=8, stages=4),
    GemmConfig(128, 128, 64, warps=4, stages=3),
    GemmConfig(128, 128, 64, warps=8, stages=3),
    GemmConfig(64, 128, 64, warps=4, stages=4),
)
WGRADS: tuple[WgradConfig, ...] = (
    WgradConfig(128, 256, 64, warps=8, stages=4, group=16),
    WgradConfig(256, 128, 64, warps=8, stages=4),
    WgradConfig(128, 128, 64, warps=4, stages=3),
    WgradConfig(128, 128, 64, warps=8, stages=3),
)
FP8_WGRADS: tuple[GemmConfig, ...] = (
    GemmConfig(64, 128, 128, warps=4, stages=3, group=32),
    GemmConfig(128, 64, 128, warps=8, stages=3, pair=True),
    GemmConfig(128, 128, 128, warps=8, stages=4),
    GemmConfig(64, 64, 128, warps=4, stages=4),
)


def pick_gemm(k: int, scaled: bool) -> GemmConfig:
    """The configuration for k channels of the operands, a pure function.

    FP8 on an H200 (November 2026): two 128 x 64 tiles in one program, two programs an SM, are best at K = 7168 and
    4096 (980 and 907 TFLOP/s; one 128 x 128 tile an SM: 909 and 766), three 64 x 128 tiles an SM at K = 2048 with few
    rows an expert (807 against 767).
    """
    if not scaled:
        return BF16_GEMMS[0]
    return FP8_GEMMS[1] if k >= 4096 else FP8_GEMMS[0]


def pick_wgrad() -> WgradConfig:
    """The configuration of wgrad with bf16 operands."""
    return WGRADS[0]


def pick_fp8_wgrad() -> GemmConfig:
    """The configuration of wgrad with FP8 operands.

    On an H200 (November 2026) three 64 x 128 tiles an SM: dW13 at 901 TFLOP/s in shape A and 636 in B; the next best of
    these lists 728 and 456, bf16 operands 694 and 433.
    """
    return FP8_WGRADS[0]
