"""Other weights pass through a layer between forward and backward: gradients are those of the forward's weights."""

import pytest
import torch
from torch.func import functional_call

from megamoe import MegaMoE, MoEConfig, Recipe
from tests.support.compare import assert_bitwise
from tests.support.fake_cute import install

CONFIG = MoEConfig(128, 128, num_experts=4, top_k=2, initializer_range=0.1)


def tokens(seed=7):
    return torch.randn((16, 128), generator=torch.Generator().manual_seed(seed)).bfloat16()


def no_change(layer, other):
    pass


def call_with_the_others(layer, other):
    with torch.no_grad():
        functional_call(layer, dict(other.named_parameters()), (tokens(),))


def swap_and_back(layer, other):
    """As an average of weights is evaluated."""
    kept = {name: p.data for name, p in layer.named_parameters()}
    theirs = dict(other.named_parameters())
    for name, p in layer.named_parameters():
        p.data = theirs[name].data
    with torch.no_grad():
        layer(tokens())
    for name, p in layer.named_parameters():
        p.data = kept[name]


def share_copies(layer, other):
    other.experts.context.copies = layer.experts.context.copies
    other(tokens())


def gradients(between, weights, recipe, backend):
    layer, other = (MegaMoE(CONFIG, weights=weights, recipe=recipe, backend=backend) for _ in range(2))
    for seed, module in enumerate((layer, other)):
        torch.manual_seed(seed)
        module.reset_parameters()
    x = tokens(8).requires_grad_()
    out = layer(x)
    between(layer, other)
    out.backward(tokens(9))
    return {"dx": x.grad} | {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("between", [call_with_the_others, swap_and_back, share_copies])
@pytest.mark.parametrize("weights, precision", [("bf16", "fp8"), ("fp8", "fp8"), ("bf16", "bf16")])
@pytest.mark.parametrize("backend", ["torch", "cute"])
def test_gradients_are_those_of_the_forward(between, weights, precision, backend, monkeypatch):
    if backend == "cute":
        if precision == "bf16":
            pytest.skip("the fused kernels are FP8")
        install(monkeypatch)
    want = gradients(no_change, weights, Recipe(precision), backend)
    got = gradients(between, weights, Recipe(precision), backend)
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        assert_bitwise(got[name], gradient, name)
