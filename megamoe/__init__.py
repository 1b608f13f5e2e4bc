"""megamoe: a fused FP8 mixture-of-experts layer for Hopper GPUs, with unfused paths that verify it."""

from megamoe._version import __version__
from megamoe.comm import LocalWorld
from megamoe.config import MoEConfig
from megamoe.context import MoEContext
from megamoe.functional import mega_moe
from megamoe.layer import MegaMoE
from megamoe.overlap import OverlapConfig
from megamoe.recipe import Recipe
from megamoe.router import Router

__all__ = [
    "LocalWorld",
    "MegaMoE",
    "MoEConfig",
    "MoEContext",
    "OverlapConfig",
    "Recipe",
    "Router",
    "__version__",
    "mega_moe",
]
