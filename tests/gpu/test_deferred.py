"""Weight gradients on a stream of their own or when asked for, on a GPU: the bits of "inline"."""

from __future__ import annotations

import pytest
import torch

from megamoe import LocalWorld, MegaMoE, MoEConfig, OverlapConfig, Recipe
from megamoe.backends import Problem, why_not
from megamoe.gates import sqnr_db
from tests.support.compare import assert_bitwise

CONFIG = MoEConfig(
    hidden_size=256, intermediate_size=128, num_experts=8, top_k=3, num_groups=4, topk_groups=2, initializer_range=0.1
)


SIZES = (200, 6, 331, 64)
"""Tokens of four micro-batches."""


def run(
    wgrad: str, backend: str, ranks: int = 1, main_grad: torch.dtype | None = None, **options: object
) -> dict[str, torch.Tensor]:
    """The gradients after four micro-batches of different sizes; of the experts into `main_grad` if it has a dtype."""
    torch.manual_seed(0)
    world = LocalWorld(ranks) if ranks > 1 else None
    overlap = OverlapConfig(wgrad=wgrad)
    layer = MegaMoE(CONFIG, backend=backend, overlap=overlap, world=world, device="cuda", **options)
    g = torch.Generator("cuda").manual_seed(1)
    if main_grad is not None:
        for p in (layer.experts.w13, layer.experts.w2):
            p.main_grad = torch.zeros_like(p, dtype=main_grad)
    for size in SIZES:
        x, dout = (torch.randn(size, 256, device="cuda", generator=g).bfloat16() for _ in range(2))
        x.requires_grad_()
        out = layer(list(x.chunk(ranks)) if ranks > 1 else x)
        (torch.cat(out) if ranks > 1 else out).backward(dout)
    layer.backward_dw()
    grads = {name: p.main_grad if hasattr(p, "main_grad") else p.grad for name, p in layer.named_parameters()}
    return {name: grad.clone() for name, grad in grads.items()}


def need(backend: str) -> None:
    reason = why_not(backend, Problem.of(torch.device("cuda"), Recipe(), 256, 128, num_experts=8, top_k=3))
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.parametrize("weights", ["bf16", "fp32"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("backend, operands", [("triton", "fp8"), ("cute", "bf16"), ("cute", "fp8")])
def test_bits_of_inline(backend, operands, ranks, weights):
    need(backend)
    options = {"recipe": Recipe(wgrad_operands=operands), "capacity": 2048 if ranks > 1 else None, "weights": weights}
    want = run("inline", backend, ranks, **options)
    for mode in ("stream", "delayed"):
        got = run(mode, backend, ranks, **options)
        for name, value in want.items():
            assert_bitwise(got[name], value, f"{mode}: {name}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", ["triton", "cute"])
def test_main_grad_takes_the_sum(backend, dtype):
    """The kernels add to main_grad: the same bits in both modes, near the sum that autograd makes."""
    need(backend)
    options = {"recipe": Recipe(wgrad_operands="fp8"), "weights": "fp32"}
    want = run("inline", backend, **options)
    first = run("stream", backend, main_grad=dtype, **options)
    second = run("delayed", backend, main_grad=dtype, **options)
    for name, value in want.items():
        assert_bitwise(second[name], first[name], name)
        if name in ("experts.w13", "experts.w2"):
            assert first[name].dtype == dtype
            assert sqnr_db(first[name].float(), value) > (40 if dtype is torch.bfloat16 else 100), name
        else:
            assert_bitwise(first[name], value, name)


def test_a_backward_of_another_size_before_the_gradients_are_asked_for():
    """What "delayed" keeps is its own: a later call of any size on the same workspace must not reach it."""
    need("cute")
    want = run("inline", "cute", recipe=Recipe(wgrad_operands="fp8"))
    torch.manual_seed(0)
    overlap, recipe = OverlapConfig(wgrad="delayed"), Recipe(wgrad_operands="fp8")
    layer = MegaMoE(CONFIG, backend="cute", overlap=overlap, device="cuda", recipe=recipe)
    g = torch.Generator("cuda").manual_seed(1)
    for size in SIZES:
        x, dout = (torch.randn(size, 256, device="cuda", generator=g).bfloat16() for _ in range(2))
        layer(x.requires_grad_()).backward(dout)
    with torch.no_grad():
        for size in SIZES:
            layer(torch.full((size, 256), float("nan"), device="cuda", dtype=torch.bfloat16))
    layer.backward_dw()
    for name in ("experts.w13", "experts.w2"):
        assert_bitwise(dict(layer.named_parameters())[name].grad, want[name], name)


def test_the_stream_is_joined_when_backward_returns():
    """What reads `.grad` on the caller's stream right behind the backward sees all of it."""
    torch.manual_seed(0)
    layer = MegaMoE(CONFIG, backend="triton", overlap=OverlapConfig(wgrad="stream"), device="cuda")
    x = torch.randn(4000, 256, device="cuda").bfloat16().requires_grad_()
    dout = torch.randn(4000, 256, device="cuda").bfloat16()
    seen = []
    for _ in range(3):
        layer.zero_grad(set_to_none=True)
        layer(x).backward(dout)
        seen.append(layer.experts.w13.grad.clone())
    torch.cuda.synchronize()
    assert all(torch.equal(s, layer.experts.w13.grad) for s in seen)
