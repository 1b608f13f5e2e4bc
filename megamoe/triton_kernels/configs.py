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
        cols: tile width.
        warps, stages: Triton's num_warps and num_stages.
        group: m-blocks visited before the next n-block, for reuse in L2.
    """

    rows: int = 128
    cols: int = 128
    warps: int = 8
    stages: int = 3
    group: int = 16


@dataclasses.dataclass(frozen=True)
class WgradConfig:
    """A k-grouped GEMM's tile: `rows` x `cols` of one expert's gradient, `depth` pool rows a step."""

    rows: int = 128
    cols: int = 256
    depth: int = 64
    warps: int = 8
    stages: int = 3
    group: int = 8


FP8_GEMMS: tuple[GemmConfig, ...] = (
    GemmConfig(128, 128, 8, 3),
    GemmConfig(128, 128, 8, 4),
    GemmConfig(64, 128, 4, 3),
    GemmConfig(64, 128, 4, 4),
    GemmConfig(64, 64, 4, 4),
)
BF16_GEMMS: tuple[GemmConfig, ...] = (
    GemmConfig(128, 256, 8, 3),
    GemmConfig(128, 128, 8, 4),
    GemmConfig(64, 128, 4, 4),
)
WGRADS: tuple[WgradConfig, ...] = (
    WgradConfig(128, 256, 64, 8, 3),
    WgradConfig(128, 128, 64, 4, 4),
    WgradConfig(128, 128, 64, 8, 4),
)


def pick_gemm(rows: int, scaled: bool) -> GemmConfig:
    """The configuration for a pool of `rows` rows, a pure function."""
    return (FP8_GEMMS if scaled else BF16_GEMMS)[0]


def pick_wgrad() -> WgradConfig:
    """The configuration of wgrad."""
    return WGRADS[0]
