"""Tile configurations of the GEMM kernels: fixed lists, and the one that is used for a problem. None changes a result.

A depth of 128 is part of the recipe for FP8 (one promotion a block); for the others a sum's order follows the tensor
core's 16-deep steps, so their depth is fixed too.
"""

from __future__ import annotations

import dataclasses

import triton


@dataclasses.dataclass(frozen=True)
class GemmConfig:
    """An m-grouped GEMM's tile.

    Attributes:
        rows: tile height; divides 128, so that a tile never spans two experts.
        cols: tile width; at most 128 for FP8, so that a tile has one weight scale a k-block.
        depth: channels a step; 128 for FP8.
        warps, stages: Triton's num_warps and num_stages. registers: a thread's limit, None for none.
        pair: two tiles side by side in one program (FP8 only).
        specialized: a pair whose loads have a warpgroup of their own (FP8 only; `warps` is that of one warpgroup).
        group: m-blocks visited before the next n-block, for reuse in L2.
    """

    rows: int
    cols: int
    depth: int
    warps: int
    stages: int
    registers: int | None = None
    pair: bool = False
    specialized: bool = False
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


SPECIALIZES = triton.__version__.startswith("3.6.")
"""Whether this Triton compiles specialised kernels as measured: 3.6 does, 3.9 fails to."""

FP8_GEMMS: tuple[GemmConfig, ...] = (
    GemmConfig(64, 128, 128, warps=4, stages=3),
    GemmConfig(128, 128, 128, warps=8, stages=4),
    GemmConfig(128, 128, 128, warps=8, stages=4, pair=True),
    GemmConfig(64, 64, 128, warps=4, stages=4),
    *([GemmConfig(128, 128, 128, warps=4, stages=4, pair=True, specialized=True)] if SPECIALIZES else []),
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


def pick_gemm(k: int, scaled: bool) -> GemmConfig:
    """The configuration for k channels of the operands, a pure function.

    FP8 on an H200: at K = 7168 one 128-row tile an SM (909 TFLOP/s) beats three 64-row tiles (807), whose loads pass
    L2 more often; at K = 2048 they beat it (878 to 788), as their epilogues hide each other (November 2026).
    """
    if not scaled:
        return BF16_GEMMS[0]
    return FP8_GEMMS[1] if k >= 4096 else FP8_GEMMS[0]


def pick_wgrad() -> WgradConfig:
    """The configuration of wgrad."""
    return WGRADS[0]
