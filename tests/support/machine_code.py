"""Fused kernels compiled here without a GPU, each once, and whether their machine code can be read."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from cute_kernels import compile as compile_module
from cute_kernels import sass
from cute_kernels.tile_config import TileConfig

needs_nvdisasm = pytest.mark.skipif(
    sass.find_tool("nvdisasm") is None, reason="nvdisasm is neither on PATH nor beside triton"
)


@functools.cache
def compiled_once(
    kernel: Callable[..., Any], fake_arguments: Callable[..., Any], problem: Any
) -> compile_module.Binary:
    """A kernel for a problem, with its module's `fake_arguments` and the default tiling."""
    made = kernel(problem, TileConfig())
    return compile_module.inspect(lambda: (made, fake_arguments(problem, for_launch=False)))
