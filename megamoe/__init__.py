"""megamoe: a fused FP8 mixture-of-experts layer for Hopper GPUs, with unfused paths that verify it."""

from megamoe._version import __version__
from megamoe.recipe import Recipe

__all__ = ["Recipe", "__version__"]
