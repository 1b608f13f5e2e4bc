"""Weights quantised straight into the kernels' order have the bytes and scales of the recipe."""

import dataclasses

import pytest
import torch

pytest.importorskip("cutlass")

from cute_kernels.backward_launch import prepare_backward_weights
from cute_kernels.weight_launch import quantize_experts, quantize_weight
from cute_kernels.weights import prepare_weights
from megamoe import MegaMoE, MoEConfig, torch_steps
from megamoe.recipe import Recipe
from tests.support.compare import assert_bitwise

SIZES = [(256, 128), (384, 640), (1024, 384), (7168, 256)]  # H, I; odd numbers of blocks are padded


def weights(hidden: int, inter: int, dtype: torch.dtype, experts: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator("cuda").manual_seed(hidden + inter)
    w13, w2 = (
        torch.randn(experts, *shape, device="cuda", generator=g) for shape in ((2 * inter, hidden), (hidden, inter))
    )
    for w in (w13, w2):
        w.mul_(torch.exp(torch.randn(experts, w.shape[1], 1, device="cuda", generator=g)))
        w[0, :128, :128] = 0.0
        w[1, 5, 7], w[1, 5, 8], w[1, -1, -1] = float("nan"), 3e38, float("inf")
    return w13.to(dtype), w2.to(dtype)


@pytest.mark.parametrize("hidden, inter", SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("pow2", [False, True], ids=["fp32", "pow2"])
def test_bytes_and_scales_of_the_recipe(hidden, inter, dtype, pow2):
    w13, w2 = weights(hidden, inter, dtype)
    recipe = Recipe(scale_format="pow2" if pow2 else "fp32")
    pairs = [torch_steps.quantize_weight_with_transpose(w, recipe, groups) for w, groups in ((w13, 2), (w2, 1))]
    (a, a_t), (b, b_t) = pairs
    want = prepare_weights(a.data, a.scale, b.data, b.scale)
    want_t = prepare_backward_weights(a_t.data, a_t.scale, b_t.data, b_t.scale)
    got, got_t = quantize_experts(w13, w2, pow2=pow2)
    for have, wanted in ((got, want), (got_t, want_t)):
        for field in dataclasses.fields(wanted):
            assert_bitwise(getattr(have, field.name), getattr(wanted, field.name), field.name)
    alone, nothing = quantize_experts(w13, w2, pow2=pow2, transposed=False)
    assert nothing is None
    assert_bitwise(alone.w13, got.w13, "w13 without its transposed copy")


def test_a_weight_of_more_than_two_to_the_31_elements():
    w = torch.zeros(300, 2048, 4096, dtype=torch.bfloat16, device="cuda")
    w[-1] = torch.randn(2048, 4096, device="cuda")
    (q, s), (q_t, s_t) = quantize_weight(w, is_gate_up=False, pow2=False, transposed=True)
    (one, one_s), (one_t, one_s_t) = quantize_weight(w[-1:], is_gate_up=False, pow2=False, transposed=True)
    assert q.numel() > 2**31
    for have, want in ((q, one), (s, one_s), (q_t, one_t), (s_t, one_s_t)):
        assert_bitwise(have[-1:], want, "last expert")
    assert not bool(q[-2].view(torch.uint8).any())


@pytest.mark.parametrize("masters", ["bf16", "fp32"])
def test_the_layer_trains_with_them_as_with_separate_kernels(masters, monkeypatch):
    config = MoEConfig(256, 128, 8, 2)
    x, dout = (torch.randn(300, 256, device="cuda").bfloat16() for _ in range(2))
    found = []
    for one_pass in (True, False):
        if not one_pass:
            monkeypatch.setattr("megamoe.backends.cute.CuteBackend.quantize_experts", lambda *args: None)
        torch.manual_seed(0)
        layer = MegaMoE(config, backend="cute", weights=masters, device="cuda")
        mine = x.clone().requires_grad_()
        out = layer(mine)
        out.backward(dout)
        found.append([out, mine.grad, *(p.grad for p in layer.parameters())])
    for got, want in zip(*found, strict=True):
        assert_bitwise(got, want, "one pass")


def test_what_it_refuses():
    w = torch.zeros(1, 384, 256, device="cuda")
    with pytest.raises(ValueError, match="rows: expected a positive multiple of 256, got 384"):
        quantize_weight(w, is_gate_up=True, pow2=False, transposed=False)
    with pytest.raises(ValueError, match="w_ENK: expected torch.bfloat16 or torch.float32, got torch.float16"):
        quantize_weight(w.half(), is_gate_up=False, pow2=False, transposed=False)
