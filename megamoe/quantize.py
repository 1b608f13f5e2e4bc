"""Quantisation to e4m3 in torch: 1x128 activations, 128x128 weights, and back. The rules all backends follow.

A block v with s = fl32(max(amax, 2^-100) * fl32(1/448)) and inv = fl32(1 / s) becomes q = e4m3(fl32(v * inv)), rounded
to nearest even and saturated to +-448. amax ignores NaN, so a NaN element becomes the NaN byte and its neighbours stay;
an Inf makes s infinite, and with it every element of its block NaN once dequantised.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch

from megamoe.errors import MegaMoETypeError, MegaMoEValueError, expected
from megamoe.recipe import BLOCK, E4M3_MAX, MIN_AMAX, Recipe

FP8 = torch.float8_e4m3fn


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclasses.dataclass(frozen=True)
class QuantizedRows:
    """Activations as they travel.

    Attributes:
        data: [rows, channels], e4m3, or bf16 when the recipe has no scales.
        scale: fp32 [rows, ceil(channels / 128)], or with `k_major` its transpose; None for bf16.
        k_major: whether `scale` is [ceil(channels / 128), rows], the layout of a pool.
        groups: how many matrices stand side by side along the channels, each with blocks of its own (2 for the
            gradients of gate and up): it only matters where channels / groups is not a multiple of 128.
    """

    data: torch.Tensor
    scale: torch.Tensor | None
    k_major: bool = False
    groups: int = 1

    def scale_row_major(self) -> torch.Tensor | None:
        """The scales as [rows, blocks], whatever their layout."""
        return self.scale.t() if self.scale is not None and self.k_major else self.scale

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """data * scale in fp32 (one rounding), then `dtype`; [rows, channels]."""
        scale = self.scale_row_major()
        if scale is None:
            return self.data.to(dtype)
        return (self.data.float() * scale[:, block_of(self.data.shape[1], self.groups, scale.device)]).to(dtype)


@dataclasses.dataclass(frozen=True)
class QuantizedWeight:
    """The experts' weights in one precision.

    Attributes:
        data: [E, N, K], e4m3, or bf16 when the recipe has no scales.
        scale: fp32 [E, row_groups * ceil(N / row_groups / 128), ceil(K / 128)], or None for bf16.
        row_groups: how many matrices are stacked along N, each with a scale grid of its own (2 for gate and up): it
            only matters where N / row_groups is not a multiple of 128.
        col_groups: the same along K, for the transposed copy.
    """

    data: torch.Tensor
    scale: torch.Tensor | None
    row_groups: int = 1
    col_groups: int = 1

    def expanded_scale(self) -> torch.Tensor | None:
        """The scale of each element, [E, N, K] (a view where possible; for references, not for speed)."""
        if self.scale is None:
            return None
        _, n, k = self.data.shape
        rows = block_of(n, self.row_groups, self.scale.device)
        cols = block_of(k, self.col_groups, self.scale.device)
        return self.scale[:, rows][:, :, cols]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """data * scale in fp32 (one rounding), then `dtype`; [E, N, K]."""
        scale = self.expanded_scale()
        return self.data.to(dtype) if scale is None else (self.data.float() * scale).to(dtype)

    def transposed(self) -> QuantizedWeight:
        """The same values as [E, K, N], contiguous, with the transposed scales: the operand of dgrad."""
        scale = None if self.scale is None else self.scale.transpose(1, 2).contiguous()
        return QuantizedWeight(self.data.transpose(1, 2).contiguous(), scale, self.col_groups, self.row_groups)


def block_of(size: int, groups: int, device: torch.device | None = None) -> torch.Tensor:
    """For each of `size` rows, made of `groups` stacked matrices, the index of its scale block; int64 [size]."""
    each = size // groups
    row = torch.arange(size, device=device)
    return row // each * ceil_div(each, BLOCK) + row % each // BLOCK


def block_ranges(size: int, groups: int) -> list[tuple[int, int]]:
    """(begin, end) of each block of 128 along a dimension of `groups` stacked matrices, ascending."""
    each = size // groups
    return [(g + i, min(g + i + BLOCK, g + each)) for g in range(0, size, each) for i in range(0, each, BLOCK)]


def scale_of(amax: torch.Tensor, scale_format: Literal["fp32", "pow2"]) -> torch.Tensor:
    """The scale of blocks whose largest magnitude is `amax` (fp32, any shape)."""
    scale = amax.clamp_min(MIN_AMAX) * torch.tensor(1.0 / E4M3_MAX, dtype=torch.float32, device=amax.device)
    if scale_format == "pow2":  # up to the next power of two, in the exponent's own bits
        scale = ((scale.view(torch.int32) + 0x7FFFFF) & -0x800000).view(torch.float32)
    return scale


def to_e4m3(v: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """v / scale as the rule computes it: one IEEE reciprocal a block, one product, saturation, nearest even."""
    return (v * (1.0 / scale)).clamp(-E4M3_MAX, E4M3_MAX).to(FP8)


def abs_max(x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """Largest magnitude over `dims` (kept), ignoring NaN."""
    return torch.where(x.isnan(), 0.0, x.abs()).amax(dims, keepdim=True)


def _check_types(name: str, value: object, recipe: object) -> None:
    """Refuse what is no tensor that can be quantised, and what is no recipe."""
    is_float = isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16, torch.float32)
    if not is_float:
        got = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
        raise MegaMoETypeError(expected(name, "a bf16, fp16 or fp32 tensor", got))
    if not isinstance(recipe, Recipe):
        raise MegaMoETypeError(expected("recipe", "a Recipe", repr(recipe), "Recipe() is the default of the layer."))


def quantize_rows(x: torch.Tensor, recipe: Recipe) -> QuantizedRows:
    """Quantise activations, one scale per row and 128 channels.

    Args:
        x: [rows, channels], bf16, fp16 or fp32, any device and strides; channels may end in a partial block.
        recipe: "bf16" only rounds to bf16.

    Returns:
        QuantizedRows with row-major scales [rows, ceil(channels / 128)].

    Raises:
        MegaMoEValueError: x is not a matrix. MegaMoETypeError: x is not floating point of at most 32 bits.
    """
    _check_types("x", x, recipe)
    if x.dim() != 2:
        raise MegaMoEValueError(expected("x", "a matrix [rows, channels]", f"shape {tuple(x.shape)}"))
    if recipe.precision == "bf16":
        return QuantizedRows(x.to(torch.bfloat16), None)
    rows, channels = x.shape
    blocks = ceil_div(channels, BLOCK)
    v = torch.nn.functional.pad(x.float(), (0, blocks * BLOCK - channels)).view(rows, blocks, BLOCK)
    scale = scale_of(abs_max(v, (2,)), recipe.scale_format)
    data = to_e4m3(v, scale).view(rows, blocks * BLOCK)[:, :channels].contiguous()
    return QuantizedRows(data, scale[:, :, 0].contiguous())


def quantize_weight(w: torch.Tensor, recipe: Recipe, row_groups: int = 1) -> QuantizedWeight:
    """Quantise the weights of experts, one scale per 128 x 128 block.

    Args:
        w: [E, N, K], bf16, fp16 or fp32; N / row_groups and K may end in partial blocks.
        recipe: "bf16" only rounds to bf16.
        row_groups: matrices stacked along N, each with its own grid (2 for [gate; up]).

    Returns:
        QuantizedWeight with scales [E, row_groups * ceil(N / row_groups / 128), ceil(K / 128)].

    Raises:
        MegaMoEValueError: w is not [E, N, K] or N is not a multiple of row_groups. MegaMoETypeError: as for rows.
    """
    _check_types("w", w, recipe)
    if w.dim() != 3 or w.shape[1] % row_groups:
        raise MegaMoEValueError(
            expected("w", f"[E, N, K] with N a multiple of {row_groups}", f"shape {tuple(w.shape)}")
        )
    if recipe.precision == "bf16":
        return QuantizedWeight(w.to(torch.bfloat16), None, row_groups)
    e, n, k = w.shape
    each = n // row_groups
    nb, kb = ceil_div(each, BLOCK), ceil_div(k, BLOCK)
    v = w.float().view(e, row_groups, each, k)
    v = torch.nn.functional.pad(v, (0, kb * BLOCK - k, 0, nb * BLOCK - each))
    v = v.view(e, row_groups, nb, BLOCK, kb, BLOCK)
    scale = scale_of(abs_max(v, (3, 5)), recipe.scale_format)
    data = to_e4m3(v, scale).view(e, row_groups, nb * BLOCK, kb * BLOCK)[:, :, :each, :k].reshape(e, n, k).contiguous()
    return QuantizedWeight(data, scale.view(e, row_groups * nb, kb), row_groups)


def quantize_matrix(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One matrix as `checkpoints.convert_to_fp8` asks for it: [N, K] -> (e4m3 [N, K], fp32 a 128 x 128 block)."""
    quantized = quantize_weight(weight[None], Recipe())
    assert quantized.scale is not None
    return quantized.data[0], quantized.scale[0]
