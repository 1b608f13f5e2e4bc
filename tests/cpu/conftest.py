"""Imports the Triton kernels under Triton's interpreter where there is no GPU, and leaves the environment as it was.

Triton decides when a kernel is defined whether the interpreter will run it, so this has to happen before any test
module imports triton; afterwards nothing depends on the variable.
"""

from __future__ import annotations

import contextlib
import os

import torch


def _import_interpreted() -> None:
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        with contextlib.suppress(ImportError):
            import triton.experimental.gluon  # noqa: F401, I001 - triton imports it at the first launch otherwise
            import megamoe.triton_kernels  # noqa: F401
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before


if not torch.cuda.is_available():
    _import_interpreted()
