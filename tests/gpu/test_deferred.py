"""Weight gradients on a stream of their own or when asked for, on a GPU: the bits of "inline"."""

from __future__ import annotations

import pytest
import torch

from megamoe import LocalWorld, MegaMoE, MoEConfig, Recipe
from megamoe.backends import Problem, why_not
from tests.support.compare import assert_bitwise

CONFIG = MoEConfig(
    hidden_size=256, intermediate_size=128, num_experts=8, top_k=3, num_groups=4, topk_groups=2, initializer_range=0.1
)


def run(wgrad: str, backend: str, ranks: int = 1, **options: object) -> dict[str, torch.Tensor]:
    """The gradients after four micro-batches."""
    torch.manual_seed(0)
    world = LocalWorld(ranks) if ranks > 1 else None
    layer = MegaMoE(CONFIG, backend=backend, wgrad=wgrad, world=world, device="cuda", **options)
    g = torch.Generator("cuda").manual_seed(1)
    for _ in range(4):
        x, dout = (torch.randn(200, 256, device="cuda", generator=g).bfloat16() for _ in range(2))
        x.requires_grad_()
        out = layer(list(x.chunk(ranks)) if ranks > 1 else x)
        (torch.cat(out) if ranks > 1 else out).backward(dout)
    layer.backward_dw()
    return {name: p.grad.clone() for name, p in layer.named_parameters()}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("backend, operands", [("triton", "bf16"), ("cute", "bf16"), ("cute", "fp8")])
def test_bits_of_inline(backend, operands, ranks):
    reason = why_not(backend, Problem.of(torch.device("cuda"), Recipe(), 256, 128, num_experts=8, top_k=3))
    if reason is not None:
        pytest.skip(reason)
    recipe = Recipe(wgrad_operands=operands)
    capacity = 1024 if ranks > 1 else None
    want = run("inline", backend, ranks, recipe=recipe, capacity=capacity)
    for mode in ("stream", "delayed"):
        got = run(mode, backend, ranks, recipe=recipe, capacity=capacity)
        for name, value in want.items():
            assert_bitwise(got[name], value, f"{mode}: {name}")


def test_the_stream_is_joined_when_backward_returns():
    """What reads `.grad` on the caller's stream right behind the backward sees all of it."""
    torch.manual_seed(0)
    layer = MegaMoE(CONFIG, backend="triton", wgrad="stream", device="cuda")
    x = torch.randn(4000, 256, device="cuda").bfloat16().requires_grad_()
    dout = torch.randn(4000, 256, device="cuda").bfloat16()
    seen = []
    for _ in range(3):
        layer.zero_grad(set_to_none=True)
        layer(x).backward(dout)
        seen.append(layer.experts.w13.grad.clone())
    torch.cuda.synchronize()
    assert all(torch.equal(s, layer.experts.w13.grad) for s in seen)
