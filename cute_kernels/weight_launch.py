"""Launches the kernel that brings bf16 or fp32 weights into the fused kernels' order, quantised."""

from __future__ import annotations

import torch

from .backward_launch import BackwardWeights
from .compile import compiled
from .weight_quantize import QuantizeConfig
from .weights import BLOCK, KernelWeights

SOURCES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}


def build(config: QuantizeConfig, ffi: bool = True):
    """(kernel, fake arguments) of `QuantizeWeight`."""
    from cutlass import BFloat16, Float8E4M3FN, Float32, cute
    from cutlass.cute.runtime import make_fake_compact_tensor
    from cutlass.runtime import make_fake_stream

    from .weight_quantize import QuantizeWeight

    def fake(dtype, *shape):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=16)

    def copy(rows, width):
        tiles = -(-rows // 256)
        return fake(Float8E4M3FN, e, tiles * 256, width), fake(Float32, e, width // BLOCK, tiles, 4)

    e = cute.sym_int()
    w = fake(BFloat16 if config.source == "bfloat16" else Float32, e, config.rows, config.width)
    transposed = copy(config.width, config.rows) if config.transposed else (None, None)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True) if ffi else make_fake_stream()
    return QuantizeWeight(config), (w, *copy(config.rows, config.width), *transposed, stream)


def quantize_weight(
    w_ENK: torch.Tensor, *, is_gate_up: bool, pow2: bool, transposed: bool
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor] | None]:
    """(q, s) of a weight and of its transposed copy, as `KernelWeights` and `BackwardWeights` hold them.

    Args:
        w_ENK: bf16 or fp32 on a CUDA device, N and K multiples of 128 (of 256 for N of [gate; up]).
        is_gate_up: whether its rows are [gate; up]. pow2: of the recipe. transposed: whether dgrad will read it.

    Raises: ValueError, for another dtype, device or size.
    Effects: one kernel on the current stream, no host sync; graph-safe; bytes and scales are those of the recipe.
    """
    experts, rows, width = w_ENK.shape
    if w_ENK.dtype not in SOURCES:
        raise ValueError(f"w_ENK: expected {' or '.join(map(str, SOURCES))}, got {w_ENK.dtype}")
    config = QuantizeConfig(rows, width, is_gate_up, SOURCES[w_ENK.dtype], pow2, transposed)
    reason = config.why_not()
    if reason:
        raise ValueError(reason)
    if not w_ENK.is_cuda:
        raise ValueError(f"w_ENK: expected a CUDA tensor, got one on {w_ENK.device}")

    def empty(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        tiles = -(-n // 256)
        make = w_ENK.new_zeros if n % 256 else w_ENK.new_empty  # rows behind the last one are zeros
        q = make((experts, tiles * 256, k), dtype=torch.float8_e4m3fn)
        return q, w_ENK.new_zeros((experts, k // BLOCK, tiles, 4), dtype=torch.float32)

    forward, backward = empty(rows, width), empty(width, rows) if transposed else None
    if experts:
        kernel = compiled("weight_quantize", config, lambda: build(config))
        kernel(w_ENK.contiguous(), *forward, *(backward or (None, None)))
    return forward, backward


def quantize_experts(
    w13_E2IH: torch.Tensor, w2_EHI: torch.Tensor, *, pow2: bool = False, transposed: bool = True
) -> tuple[KernelWeights, BackwardWeights | None]:
    """One rank's weights as the fused forward and, with `transposed`, the fused backward read them; see
    `quantize_weight`."""
    modes = {"pow2": pow2, "transposed": transposed}
    w13, w13_t = quantize_weight(w13_E2IH, is_gate_up=True, **modes)
    w2, w2_t = quantize_weight(w2_EHI, is_gate_up=False, **modes)
    if w13_t is None or w2_t is None:
        return KernelWeights(*w13, *w2), None
    return KernelWeights(*w13, *w2), BackwardWeights(*w2_t, *w13_t)
