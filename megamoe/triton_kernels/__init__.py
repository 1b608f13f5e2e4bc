"""The steps of the layer as Triton kernels: the names, signatures and results of `megamoe.torch_steps`.

Needs triton; importing it does not initialise CUDA. On CPU tensors the kernels run under Triton's interpreter if
TRITON_INTERPRET=1 was set before triton was imported.
"""

from megamoe.torch_steps import SwigluGrads
from megamoe.triton_kernels.combine import combine, combine_weight_grads
from megamoe.triton_kernels.dispatch import dispatch, dispatch_weights
from megamoe.triton_kernels.gemm import grouped_gemm
from megamoe.triton_kernels.launch import why_not
from megamoe.triton_kernels.plan import make_plan
from megamoe.triton_kernels.quantize import (
    dequantize,
    quantize_rows,
    quantize_weight,
    quantize_weight_with_transpose,
)
from megamoe.triton_kernels.swiglu import swiglu, swiglu_backward
from megamoe.triton_kernels.wgrad import wgrad, wgrad_operands

__all__ = [
    "SwigluGrads",
    "combine",
    "combine_weight_grads",
    "dequantize",
    "dispatch",
    "dispatch_weights",
    "grouped_gemm",
    "make_plan",
    "quantize_rows",
    "quantize_weight",
    "quantize_weight_with_transpose",
    "swiglu",
    "swiglu_backward",
    "wgrad",
    "wgrad_operands",
    "why_not",
]
