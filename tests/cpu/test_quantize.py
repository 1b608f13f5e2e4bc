"""Quantisation against the rules, value by value: scales, rounding, saturation, NaN, Inf, partial blocks."""

import bisect
import math
import struct
from fractions import Fraction

import pytest
import torch

from megamoe.errors import MegaMoETypeError, MegaMoEValueError
from megamoe.quantize import (
    FP8,
    QuantizedRows,
    block_of,
    block_ranges,
    quantize_rows,
    quantize_weight,
    scale_of,
    to_e4m3,
)
from megamoe.recipe import BLOCK, MIN_AMAX, Recipe
from tests.support.compare import assert_bitwise, assert_quantized_equal

FP32_SCALES, POW2_SCALES, BF16 = Recipe(), Recipe(scale_format="pow2"), Recipe(precision="bf16")


def fl32(value: Fraction) -> Fraction:
    """The fp32 nearest to an exact rational (through fp64: the values used here are exact there)."""
    return Fraction(struct.unpack("f", struct.pack("f", float(value)))[0])


def e4m3_values() -> list[tuple[Fraction, int]]:
    """All non-negative finite e4m3 values with their bytes, by the definition of the format."""
    values = []
    for byte in range(0x7F):
        exponent, mantissa = byte >> 3, byte & 7
        magnitude = (
            Fraction(mantissa, 8) * Fraction(2) ** -6
            if exponent == 0
            else (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)
        )
        values.append((magnitude, byte))
    return values


E4M3 = e4m3_values()


def nearest_e4m3(value: Fraction) -> int:
    """Byte of the nearest e4m3 value, ties to the even byte, saturated: the definition, by search."""
    sign = 0x80 if value < 0 else 0
    magnitude = min(abs(value), Fraction(448))
    at = bisect.bisect_left(E4M3, (magnitude, 0))
    neighbours = E4M3[max(at - 1, 0) : at + 1]
    return sign | min(neighbours, key=lambda v: (abs(v[0] - magnitude), v[1] & 1))[1]


def quantize_block(values: list[float], pow2: bool = False) -> tuple[list[int], Fraction]:
    """The rule in exact arithmetic with its fp32 roundings written out."""
    amax = max(max(abs(Fraction(v)) for v in values), Fraction(MIN_AMAX))
    scale = fl32(amax * fl32(Fraction(1, 448)))
    if pow2:
        scale = Fraction(2) ** math.ceil(math.log2(scale))
    inverse = fl32(1 / scale)
    return [nearest_e4m3(fl32(Fraction(v) * inverse)) for v in values], scale


@pytest.mark.parametrize("recipe", [FP32_SCALES, POW2_SCALES], ids=["fp32", "pow2"])
def test_rows_follow_the_rule_in_exact_arithmetic(recipe):
    x = torch.randn(6, 2 * BLOCK) * torch.logspace(-3, 3, 6)[:, None]
    x[2, :BLOCK] = 0.0
    x[3, BLOCK:] = torch.linspace(-448.0, 448.0, BLOCK)  # scale exactly 1 and many ties
    x = x.bfloat16()
    q = quantize_rows(x, recipe)
    for row in range(x.shape[0]):
        for block in range(2):
            part = slice(block * BLOCK, (block + 1) * BLOCK)
            codes, scale = quantize_block(x[row, part].tolist(), recipe.scale_format == "pow2")
            assert Fraction(q.scale[row, block].item()) == scale
            got = q.data[row, part].view(torch.uint8).tolist()
            signed_zero = [c & 0x7F if v == 0 else c for c, v in zip(got, x[row, part].tolist(), strict=True)]
            assert signed_zero == codes


def test_zero_blocks_get_a_positive_finite_scale_and_zero_bytes():
    q = quantize_rows(torch.zeros(3, 2 * BLOCK), FP32_SCALES)
    assert bool((q.scale > 0).all()) and bool(q.scale.isfinite().all())
    assert q.scale[0, 0].item() == float(fl32(Fraction(MIN_AMAX) * fl32(Fraction(1, 448))))
    assert not q.data.view(torch.uint8).any()
    assert not q.dequantize().any()


def test_magnitudes_below_the_floor_share_its_scale():
    q = quantize_rows(torch.full((1, BLOCK), 2.0**-110), FP32_SCALES)
    assert_bitwise(q.scale, quantize_rows(torch.zeros(1, BLOCK), FP32_SCALES).scale, "scale")


def test_the_largest_element_becomes_448_and_never_overflows():
    x = torch.rand(512, BLOCK) * torch.logspace(-30, 30, 512)[:, None]
    q = quantize_rows(x, FP32_SCALES)
    assert bool((q.data.float().abs().amax(1) == 448.0).all())
    assert bool(q.data.float().isfinite().all())


def test_saturates_instead_of_overflowing_to_nan():
    """A value just beyond 448 after the product: e4m3 without saturation would make it NaN."""
    got = to_e4m3(torch.tensor([465.0, 1e30, -1e30]), torch.tensor(1.0))
    assert got.float().tolist() == [448.0, 448.0, -448.0]


def test_a_nan_element_becomes_the_nan_byte_and_its_neighbours_stay():
    x = torch.randn(2, BLOCK)
    clean = quantize_rows(x, FP32_SCALES)
    x[0, 7] = float("nan")
    keep = torch.ones(BLOCK, dtype=torch.bool)
    keep[7] = False
    dirty = quantize_rows(x, FP32_SCALES)
    assert dirty.data.view(torch.uint8)[0, 7].item() & 0x7F == 0x7F
    assert_bitwise(dirty.scale, clean.scale, "scale")
    assert_bitwise(dirty.data.view(torch.uint8)[:, keep], clean.data.view(torch.uint8)[:, keep], "neighbours")


def test_a_block_of_nan_only_has_a_finite_scale():
    q = quantize_rows(torch.full((1, BLOCK), float("nan")), FP32_SCALES)
    assert bool(q.scale.isfinite().all()) and bool(q.dequantize().isnan().all())


@pytest.mark.parametrize("recipe", [FP32_SCALES, POW2_SCALES], ids=["fp32", "pow2"])
def test_an_inf_makes_its_whole_block_nan_and_no_other(recipe):
    x = torch.randn(2, 2 * BLOCK)
    x[1, 3] = -float("inf")
    value = quantize_rows(x, recipe).dequantize()
    assert bool(value[1, :BLOCK].isnan().all())
    assert bool(value[1, BLOCK:].isfinite().all()) and bool(value[0].isfinite().all())


def test_every_bf16_value():
    """All 65,536 bit patterns, each beside a 448 so that the scale is 1 for all finite values up to it."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    small = bits[bits.float().abs() <= 448.0]
    x = torch.zeros(small.numel(), BLOCK, dtype=torch.bfloat16)
    x[:, 0], x[:, 1] = 448.0, small
    q = quantize_rows(x, FP32_SCALES)
    scale = q.scale[0, 0].item()
    assert bool((q.scale == scale).all())
    codes = {}
    for value in small.float().tolist():
        codes.setdefault(value, nearest_e4m3(fl32(Fraction(value) * fl32(1 / Fraction(scale)))))
    want = torch.tensor([codes[v] for v in small.float().tolist()], dtype=torch.uint8)
    nonzero = small != 0
    assert_bitwise(q.data.view(torch.uint8)[:, 1][nonzero], want[nonzero], "e4m3 of bf16")
    rest = bits[~(bits.float().abs() <= 448.0)]  # large values, Inf and NaN: alone in their block
    alone = torch.zeros(rest.numel(), BLOCK, dtype=torch.bfloat16)
    alone[:, 5] = rest
    q = quantize_rows(alone, FP32_SCALES)
    finite = rest.isfinite()
    assert bool((q.data.float()[finite, 5] == rest[finite].float().sign() * 448.0).all())
    assert bool(q.dequantize()[~finite, 5].isnan().all())


def test_scales_of_every_power_of_two_and_its_neighbours():
    amax = torch.tensor([448.0 * 2.0**e * f for e in range(-60, 60) for f in (1.0, 1.01, 0.99)])
    fp32, pow2 = scale_of(amax, "fp32"), scale_of(amax, "pow2")
    exponent = torch.frexp(pow2)
    assert bool((exponent.mantissa == 0.5).all()), "pow2 scales are powers of two"
    assert bool((pow2 >= fp32).all()) and bool((pow2 < 2 * fp32).all())


@pytest.mark.parametrize("recipe", [FP32_SCALES, POW2_SCALES], ids=["fp32", "pow2"])
def test_what_is_stored_is_the_scale_that_was_used(recipe):
    """A block whose amax is just above a power of two: a scale rounded after the fact would double every value."""
    x = (torch.rand(64, BLOCK) * 0.5 + 0.5) * 448 * 2.0**-4 * 1.01
    x[:, 0] = 448 * 2.0**-4 * 1.01
    error = ((quantize_rows(x, recipe).dequantize() - x) / x).abs()
    assert error.max().item() <= 2.0**-4


@pytest.mark.parametrize("channels", [1, 64, 127, 129, 192, 320])
def test_partial_last_blocks_of_rows(channels):
    x = torch.randn(5, channels)
    padded = torch.zeros(5, -(-channels // BLOCK) * BLOCK)
    padded[:, :channels] = x
    got, want = quantize_rows(x, FP32_SCALES), quantize_rows(padded, FP32_SCALES)
    assert got.data.shape == (5, channels) and got.data.is_contiguous()
    assert_bitwise(got.scale, want.scale, "scale")
    assert_bitwise(got.data, want.data[:, :channels], "data")


def test_strides_and_dtypes_do_not_matter():
    wide = torch.randn(8, 512).bfloat16()
    view = wide[:, 64:320]
    assert_quantized_equal(quantize_rows(view, FP32_SCALES), quantize_rows(view.contiguous(), FP32_SCALES), "view")
    turned = wide.t().contiguous().t()
    assert_quantized_equal(quantize_rows(turned, FP32_SCALES), quantize_rows(wide, FP32_SCALES), "transposed view")
    assert_quantized_equal(quantize_rows(wide.float(), FP32_SCALES), quantize_rows(wide, FP32_SCALES), "fp32")
    half = torch.randn(2, BLOCK).half()
    assert_quantized_equal(quantize_rows(half, FP32_SCALES), quantize_rows(half.float(), FP32_SCALES), "fp16")


def test_no_rows():
    q = quantize_rows(torch.empty(0, 256), FP32_SCALES)
    assert q.data.shape == (0, 256) and q.scale.shape == (0, 2) and q.dequantize().shape == (0, 256)


def test_dequantising_k_major_scales_gives_the_same_values():
    q = quantize_rows(torch.randn(4, 320), FP32_SCALES)
    pool = QuantizedRows(q.data, q.scale.t().contiguous(), k_major=True)
    assert_bitwise(pool.dequantize(), q.dequantize(), "dequantised")


def test_bf16_recipe_rounds_and_has_no_scales():
    x = torch.randn(3, 200)
    q = quantize_rows(x, BF16)
    assert q.scale is None
    assert_bitwise(q.data, x.bfloat16(), "data")
    w = quantize_weight(x[None], BF16)
    assert w.scale is None and w.expanded_scale() is None
    assert_bitwise(w.data[0], x.bfloat16(), "weight")


@pytest.mark.parametrize("shape", [(256, 384), (128, 128), (320, 192), (40, 130)])
@pytest.mark.parametrize("recipe", [FP32_SCALES, POW2_SCALES], ids=["fp32", "pow2"])
def test_weight_blocks_one_by_one(shape, recipe):
    n, k = shape
    w = torch.randn(2, n, k) * torch.logspace(-2, 2, n)[:, None]
    q = quantize_weight(w, recipe)
    assert q.scale.shape == (2, -(-n // BLOCK), -(-k // BLOCK))
    for e in range(2):
        for i, (n0, n1) in enumerate(block_ranges(n, 1)):
            for j, (k0, k1) in enumerate(block_ranges(k, 1)):
                block = w[e, n0:n1, k0:k1]
                scale = scale_of(block.abs().max(), recipe.scale_format)
                assert q.scale[e, i, j] == scale
                want = (block * (1 / scale)).clamp(-448, 448).to(FP8)
                assert_bitwise(q.data[e, n0:n1, k0:k1], want, f"block {i},{j}")
                assert_bitwise(q.dequantize()[e, n0:n1, k0:k1], want.float() * scale, "dequantised")


def test_a_zero_weight_block_is_zero():
    w = torch.randn(1, 256, 256)
    w[0, 128:, :128] = 0.0
    q = quantize_weight(w, FP32_SCALES)
    assert bool(q.scale.isfinite().all()) and bool((q.scale > 0).all())
    assert not q.dequantize()[0, 128:, :128].any() and bool(q.dequantize().isfinite().all())


def test_stacked_matrices_have_grids_of_their_own():
    """I = 320: gate and up have 3 scale rows each, 6 in all and not 5, and no scale of one reaches into the other."""
    gate, up = torch.randn(2, 320, 192), torch.randn(2, 320, 192) * 100
    both = quantize_weight(torch.cat([gate, up], 1), FP32_SCALES, row_groups=2)
    assert both.scale.shape == (2, 6, 2)
    parts = [quantize_weight(w, FP32_SCALES) for w in (gate, up)]
    assert_bitwise(both.data, torch.cat([p.data.view(torch.uint8) for p in parts], 1).view(FP8), "data")
    assert_bitwise(both.scale, torch.cat([p.scale for p in parts], 1), "scale")
    assert_bitwise(both.dequantize(), torch.cat([p.dequantize() for p in parts], 1), "dequantised")


@pytest.mark.parametrize("groups,shape", [(1, (256, 384)), (2, (640, 192)), (2, (256, 100))])
def test_the_transposed_copy_holds_the_same_values(groups, shape):
    q = quantize_weight(torch.randn(2, *shape), FP32_SCALES, row_groups=groups)
    t = q.transposed()
    assert t.data.is_contiguous() and t.scale.is_contiguous()
    assert t.data.shape == (2, shape[1], shape[0])
    assert_bitwise(t.data.view(torch.uint8), q.data.view(torch.uint8).transpose(1, 2), "bytes")
    assert_bitwise(t.dequantize(), q.dequantize().transpose(1, 2), "values")
    assert_quantized_equal(t.transposed(), q, "twice")


def test_scales_that_are_distinct_powers_of_two_name_the_block():
    """If a scale moved, the dequantised block would carry another block's exponent."""
    n, k = 384, 256
    w = torch.ones(1, n, k) * 448.0
    for i in range(3):
        for j in range(2):
            w[0, i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK] *= 2.0 ** (2 * i + j)
    q = quantize_weight(w, FP32_SCALES)
    assert torch.log2(q.scale[0] / q.scale[0, 0, 0]).tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    assert torch.allclose(q.dequantize(), w, rtol=1e-6)
    assert torch.allclose(q.transposed().dequantize(), w.transpose(1, 2), rtol=1e-6)


def test_block_of_and_block_ranges_agree():
    for size, groups in ((256, 1), (320, 1), (640, 2), (100, 2), (2, 2)):
        blocks = block_of(size, groups)
        for index, (begin, end) in enumerate(block_ranges(size, groups)):
            assert blocks[begin:end].unique().tolist() == [index]
        assert block_ranges(size, groups)[-1][1] == size
        assert sum(end - begin for begin, end in block_ranges(size, groups)) == size


def test_refusals():
    with pytest.raises(MegaMoEValueError, match=r"x: expected a matrix \[rows, channels\], got shape \(2, 3, 4\)"):
        quantize_rows(torch.randn(2, 3, 4), FP32_SCALES)
    with pytest.raises(MegaMoETypeError, match="x: expected a bf16, fp16 or fp32 tensor, got torch.float64"):
        quantize_rows(torch.randn(2, 3).double(), FP32_SCALES)
    with pytest.raises(
        MegaMoEValueError, match=r"w: expected \[E, N, K\] with N a multiple of 2, got shape \(1, 3, 4\)"
    ):
        quantize_weight(torch.randn(1, 3, 4), FP32_SCALES, row_groups=2)
    with pytest.raises(MegaMoEValueError, match=r"w: expected \[E, N, K\]"):
        quantize_weight(torch.randn(3, 4), FP32_SCALES)
    with pytest.raises(MegaMoETypeError, match="w: expected a bf16, fp16 or fp32 tensor, got torch.int32"):
        quantize_weight(torch.ones(1, 2, 2, dtype=torch.int32), FP32_SCALES)
    with pytest.raises(MegaMoETypeError, match="x: expected a bf16, fp16 or fp32 tensor, got NoneType"):
        quantize_rows(None, FP32_SCALES)
    with pytest.raises(MegaMoETypeError, match="recipe: expected a Recipe, got 'fp8'"):
        quantize_weight(torch.ones(1, 2, 2), "fp8")


@pytest.mark.parametrize("row_groups", [1, 2])
def test_weights_with_partial_blocks_hold_no_padding(row_groups):
    weight = quantize_weight(torch.randn(2, 192, 320), Recipe(), row_groups)
    assert weight.data.is_contiguous()
    assert weight.data.untyped_storage().nbytes() == weight.data.numel()
