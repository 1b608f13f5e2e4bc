"""Hides a GPU from the tests of this folder, which are of the CPU; without one, imports Triton's kernels interpreted.

Triton decides when a kernel is defined whether the interpreter will run it, so this has to happen before any test
module imports triton; afterwards nothing depends on the variable. Where there is a GPU its kernels stay compiled: the
same process runs tests/gpu, and the tests of the steps run on the GPU.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest
import torch

from tests.support.interpreter import sum_dots_exactly

HAS_GPU = torch.cuda.is_available()
ON_A_GPU = ("test_triton_steps.py",)
"""Tests that run on the GPU where there is one."""


def _import_interpreted() -> None:
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        with contextlib.suppress(ImportError):
            import triton.experimental.gluon  # noqa: F401, I001 - triton imports it at the first launch otherwise
            import megamoe.triton_kernels  # noqa: F401

            sum_dots_exactly()
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before


if not HAS_GPU:
    _import_interpreted()


@pytest.fixture(autouse=True, scope="module")
def no_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests here see the same machine everywhere: neither they nor the processes that they start find a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        if HAS_GPU and request.path.name not in ON_A_GPU:
            patch.setenv("CUDA_VISIBLE_DEVICES", "")
            patch.setattr(torch.cuda, "is_available", lambda: False)
            patch.setattr(torch.cuda, "device_count", lambda: 0)
        yield
