"""Triton's interpreter with products of matrices that no BLAS decides: summed in fp64, rounded once to fp32.

The interpreter multiplies with numpy, whose BLAS sums in another order for another shape, on some processors and not on
others; tensor cores don't. Tests that compare bits over tile shapes need sums that depend on their terms only.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def sum_dots_exactly() -> None:
    """From now on `tl.dot` of the interpreter, in this process, gives the same bits in every tile."""
    from triton.runtime import interpreter

    builder: Any = interpreter.InterpreterBuilder
    original = builder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        if {a.data.dtype, b.data.dtype, d.data.dtype} != {np.dtype(np.float32)}:
            return original(self, a, b, d, *precision)
        product = np.matmul(a.data, b.data, dtype=np.float64).astype(np.float32)
        return interpreter.TensorHandle(product + d.data, d.dtype)

    builder.create_dot = create_dot
