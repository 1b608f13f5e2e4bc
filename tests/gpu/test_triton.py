"""Triton kernels on the GPU itself: every tile configuration one by one, exact rounding, and accumulation in fp32."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from megamoe import torch_steps, triton_kernels
from megamoe.quantize import QuantizedRows, QuantizedWeight
from megamoe.recipe import Recipe
from megamoe.triton_kernels import configs
from tests.support.compare import assert_bitwise
from tests.support.poison import nan_like
from tests.support.steps_cases import assert_close, assert_same_quantized, assert_same_values, random_pool, weight_to
from tests.support.steps_cases import quantized_to as rows_to

COUNTS = [130, 0, 300, 1, 64]


def make_plans(counts: list[int], device: torch.device):
    """The same plan of one rank on the device and on the CPU."""
    ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))[:, None]
    there = triton_kernels.make_plan([ids.to(device)], len(counts)).ranks[0]
    return there, torch_steps.make_plan([ids], len(counts)).ranks[0]


def gemm_operands(recipe: Recipe, counts: list[int], n: int, k: int, device: torch.device):
    """(arguments on the device, arguments on the CPU) with padding that holds NaN."""
    there, here = make_plans(counts, device)
    rows = random_pool(here.num_rows, k, recipe)
    weight = torch_steps.quantize_weight(torch.randn(len(counts), n, k), recipe, 2)
    want = torch_steps.grouped_gemm(rows, weight, here, torch.float32)
    padding = here.token < 0
    rows.data[padding] = nan_like(rows.data[padding])
    return (rows_to(rows, device), weight_to(weight, device), there), want


@pytest.mark.parametrize("config", [*configs.FP8_GEMMS, *configs.BF16_GEMMS], ids=str)
@pytest.mark.parametrize("n,k", [(512, 1024), (384, 128), (272, 200)])
def test_gemm_configurations(config, n, k, device):
    recipe = Recipe("fp8" if config in configs.FP8_GEMMS else "bf16")
    arguments, want = gemm_operands(recipe, COUNTS, n, k, device)
    chosen = triton_kernels.grouped_gemm(*arguments, torch.float32)
    got = triton_kernels.grouped_gemm(*arguments, torch.float32, config=config)
    assert_close(got, want, 2e-4, str(config))
    assert_bitwise(got, chosen, f"{config} against the chosen one")
    rounded = triton_kernels.grouped_gemm(*arguments, config=config)
    assert_close(rounded, want.bfloat16(), 2e-3, str(config))
    assert_bitwise(rounded, got.bfloat16(), "one rounding")


@pytest.mark.parametrize("config", configs.WGRADS, ids=str)
@pytest.mark.parametrize("m,n", [(512, 256), (200, 72), (130, 129)])
def test_wgrad_configurations(config, m, n, device):
    there, here = make_plans(COUNTS, device)
    a, b = (torch.randn(here.num_rows, width).bfloat16() for width in (m, n))
    want = torch_steps.wgrad(a, b, here)
    a[here.token < 0], b[here.token < 0] = float("nan"), float("nan")
    got = triton_kernels.wgrad(a.to(device), b.to(device), there, config=config)
    assert_close(got, want, 2e-4, str(config))
    assert_bitwise(got, triton_kernels.wgrad(a.to(device), b.to(device), there), "against the chosen one")


@pytest.mark.parametrize("config", configs.FP8_WGRADS, ids=str)
@pytest.mark.parametrize("m,n", [(512, 256), (200, 72), (130, 1300)])
def test_fp8_wgrad_configurations(config, m, n, device):
    """Against the exact sums of the operands, and bit for bit against the chosen configuration and a second run."""
    counts = [*COUNTS, 1200]
    there, here = make_plans(counts, device)
    rows, partner = random_pool(here.num_rows, n, Recipe()), torch.randn(here.num_rows, m).bfloat16()
    padding = here.token < 0
    rows.data[padding], partner[padding] = nan_like(rows.data[padding]), float("nan")
    operands = triton_kernels.wgrad_operands(
        partner.to(device), rows_to(rows, device), there, Recipe(wgrad_operands="fp8")
    )
    a, b = (v.dequantize().double().cpu() for v in operands)
    want = torch.zeros(len(counts), m, n)
    for e, begin, end in torch_steps.segments(here):
        want[e] = (a[begin:end].t() @ b[begin:end]).float()
    got = triton_kernels.wgrad(*operands, there, nan_like(want).to(device), config=config)
    assert_close(got, want, 2e-4, str(config))
    assert not bool(got[1].any()), "an expert without rows"
    assert_bitwise(triton_kernels.wgrad(*operands, there, config=config), got, "repeat")
    assert_bitwise(got, triton_kernels.wgrad(*operands, there), "against the chosen one")


@pytest.mark.parametrize("travelled_left", [False, True])
def test_fp8_operands_of_wgrad_have_the_bytes_of_the_rule(travelled_left, device):
    """Rows of 18 binades, padding of NaN: once in bf16 every value is that of `torch_steps`."""
    there, here = make_plans([130, 0, 300, 1, 64, 1000], device)
    size = torch.exp2(torch.randint(-9, 9, (here.num_rows, 1)).float())
    rows, partner = random_pool(here.num_rows, 1024, Recipe()), (torch.randn(here.num_rows, 712) / size).bfloat16()
    rows.scale.mul_(size.t())
    padding = here.token < 0
    rows.scale[:, padding], partner[padding] = float("nan"), float("nan")
    pair = (rows, partner) if travelled_left else (partner, rows)
    want = torch_steps.wgrad_operands(*pair, here, Recipe(wgrad_operands="fp8"))
    moved = [v.to(device) if isinstance(v, torch.Tensor) else rows_to(v, device) for v in pair]
    got = triton_kernels.wgrad_operands(*moved, there, Recipe(wgrad_operands="fp8"))
    for name, a, b in zip(("left", "right"), got, want, strict=True):
        assert_same_values(a.dequantize(torch.bfloat16), b, name)


def test_tma_and_masked_loads_give_the_same_bits(device):
    """The same operands at an address that no descriptor takes."""
    (rows, weight, plan), _ = gemm_operands(Recipe(), COUNTS, 256, 512, device)
    shifted = torch.empty(rows.data.numel() + 1, dtype=torch.uint8, device=device)[1:].view(rows.data.shape)
    shifted.copy_(rows.data.view(torch.uint8))
    other = QuantizedRows(shifted.view(torch.float8_e4m3fn), rows.scale, True)
    want = triton_kernels.grouped_gemm(rows, weight, plan)
    assert_bitwise(triton_kernels.grouped_gemm(other, weight, plan), want, "out")


def test_promotion_keeps_what_the_tensor_core_would_lose(device):
    """A block that sums to 65536 and 55 blocks that sum to 4 each: 65756 exactly, from fp32."""
    plan, _ = make_plans([128], device)
    k = 56 * 128
    a, b = torch.zeros(128, k, device=device), torch.zeros(1, 128, k, device=device)
    a[:, :128], b[:, :, :128] = 16.0, 32.0
    a[:, 128::128], b[:, :, 128::128] = 2.0, 2.0
    ones = torch.ones(56, 128, device=device)
    rows = QuantizedRows(a.to(torch.float8_e4m3fn), ones, True)
    weight = QuantizedWeight(b.to(torch.float8_e4m3fn), torch.ones(1, 1, 56, device=device))
    for config in configs.FP8_GEMMS:
        got = triton_kernels.grouped_gemm(rows, weight, plan, torch.float32, config=config)
        assert bool((got == 65756.0).all()), f"{config}: {got[0, 0].item()}"


def test_a_long_contraction(device):
    arguments, want = gemm_operands(Recipe(), [130], 256, 16384, device)
    assert_close(triton_kernels.grouped_gemm(*arguments, torch.float32), want, 2e-4, "K = 16384")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("scale_format", ["fp32", "pow2"])
def test_weights_and_transposed_copies_of_every_dtype(dtype, scale_format, device):
    recipe = Recipe(scale_format=scale_format)
    for shape, groups in (((3, 512, 384), 2), ((2, 300, 200), 1), ((2, 144, 128), 2)):
        w = (torch.randn(shape) * torch.exp2(torch.randint(-8, 8, shape).float())).to(dtype)
        got, copy = triton_kernels.quantize_weight_with_transpose(w.to(device), recipe, groups)
        want = torch_steps.quantize_weight(w, recipe, groups)
        assert_same_quantized(got, want, f"{shape}")
        assert_same_quantized(copy, want.transposed(), f"{shape} transposed")


def test_all_bytes_survive_every_copy(device):
    """All 256 byte values through dispatch (words and bytes), transposition and back."""
    for width in (512, 130):
        data = torch.arange(256, dtype=torch.uint8).repeat(width // 2 + 1)[: 128 * width].view(128, width)
        plan, _ = make_plans([100], device)
        rows = QuantizedRows(
            data.view(torch.float8_e4m3fn).to(device), torch.rand(128, width // 128 + 1, device=device)
        )
        pool = triton_kernels.dispatch([rows], plan)
        assert_bitwise(pool.data[:100].cpu(), data.view(torch.float8_e4m3fn)[:100], f"{width} bytes a row")


def test_every_bf16_value_is_quantised_alike_by_torch_and_triton(device):
    """And, listed: where the fp32 interpreter's casts would differ, our own rounding does not."""
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(-1, 128)
    for scale_format in ("fp32", "pow2"):
        recipe = Recipe(scale_format=scale_format)
        got = triton_kernels.quantize_rows(x.to(device), recipe)
        assert_same_quantized(got, torch_steps.quantize_rows(x, recipe), scale_format)


@pytest.mark.parametrize("scale_format", ["fp32", "pow2"])
def test_the_stored_scale_is_the_one_that_was_used(scale_format, device):
    """amax just above a power of two: within one e4m3 rounding of every normal element."""
    x = torch.rand(64, 128, device=device) + 0.5
    x[:, 0] = 448 * 2.0**-4 * 1.01
    rows = triton_kernels.quantize_rows(x, Recipe(scale_format=scale_format))
    error = (rows.dequantize() - x).abs() / x
    assert error.max().item() <= 2.0**-4


def test_swiglu_follows_the_rule_byte_for_byte(device):
    """From gate and up by the stated operations on the same GPU, with torch's own exponential: the same within a step
    in a byte of ten thousand; and the rule's quantisation of the kernel's own bf16 output exactly."""
    gate_up = (torch.randn(512, 2 * 1024, device=device) * 3).bfloat16()
    weight = torch.rand(512, device=device)
    got = triton_kernels.swiglu(gate_up, weight, Recipe())
    want = torch_steps.swiglu(gate_up, weight, Recipe())
    step = (got.data.view(torch.uint8).int() - want.data.view(torch.uint8).int()).abs()
    assert int(step.max()) <= 1 and int(step.sum()) <= 1e-4 * step.numel(), f"{int(step.sum())} bytes differ"
    h = triton_kernels.swiglu(gate_up, weight, Recipe("bf16")).data
    again = triton_kernels.swiglu(gate_up, weight, Recipe("bf16")).data
    assert_same_values(again, h, "repeat")
    assert_close(got.dequantize(), h.float(), 0.04, "fp8 against bf16")


def test_dp_order_on_the_gpu(device):
    """sigmoid(100) = 1: nothing approximate is left in dp, which folds in the stated order."""
    gate_up = torch.ones(300, 2 * 2048, device=device, dtype=torch.bfloat16)
    gate_up[:, :2048] = 100.0
    dh = torch.randn(300, 2048) * torch.exp2(torch.randint(-12, 12, (300, 2048)).float())
    weight = torch.ones(300, device=device)
    got = triton_kernels.swiglu_backward(dh.to(device), gate_up, weight, Recipe()).d_weight
    assert_bitwise(got.cpu(), torch_steps.block_dot(dh, torch.full_like(dh, 100.0)), "dp")


def test_plans_of_large_batches(device):
    for experts, top_k, tokens in ((32, 8, (8192,)), (512, 8, (4000, 96, 0, 1)), (256, 12, (5000,))):
        ids = [torch.randint(-1, experts, (t, top_k)) for t in tokens]
        got = triton_kernels.make_plan([v.to(device) for v in ids], experts)
        want = torch_steps.make_plan(ids, experts)
        for a, b in zip((*got.owner, *got.row), (*want.owner, *want.row), strict=True):
            assert_bitwise(a.cpu(), b, "owner, row")
        for a, b in zip(got.ranks, want.ranks, strict=True):
            for field in ("counts", "offs", "source_rank", "token", "slot"):
                assert_bitwise(getattr(a, field).cpu(), getattr(b, field), field)


def test_where_it_runs_and_where_not(device):
    assert triton_kernels.why_not(device, "fp8") is None
    assert "TRITON_INTERPRET=1" in (triton_kernels.why_not(torch.device("cpu"), "fp8") or "")
