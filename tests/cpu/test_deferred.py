"""Weight gradients computed on another stream or when asked for: the bits of "inline", `main_grad`, what is refused."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

from megamoe import LocalWorld, MegaMoE, MoEConfig, OverlapConfig, Recipe
from megamoe.deferred import DeferredWgrad
from megamoe.errors import MegaMoERuntimeError, MegaMoEValueError
from megamoe.gates import sqnr_db
from tests.support.compare import assert_bitwise

CONFIG = MoEConfig(
    hidden_size=128, intermediate_size=64, num_experts=8, top_k=3, num_groups=4, topk_groups=2, num_shared_experts=1,
    initializer_range=0.1,
)  # fmt: skip
MODES = ["stream", "delayed"]


def layer_of(wgrad: str, weights: str = "bf16", **options: object) -> MegaMoE:
    torch.manual_seed(0)
    return MegaMoE(CONFIG, backend="torch", weights=weights, overlap=OverlapConfig(wgrad=wgrad), **options)


def tokens(seed: int, count: int = 30) -> torch.Tensor:
    return torch.randn(count, 128, generator=torch.Generator().manual_seed(seed)).bfloat16()


def run(layer: MegaMoE, seeds: tuple[int, ...], split: int = 1) -> dict[str, torch.Tensor | None]:
    """The gradients after a backward for each seed."""
    for seed in seeds:
        x = tokens(seed).requires_grad_()
        out = layer(list(x.chunk(split)) if split > 1 else x)
        (torch.cat(out) if split > 1 else out).backward(tokens(seed + 50))
    layer.backward_dw()
    return {name: p.grad for name, p in layer.named_parameters()}


def assert_same(got: dict, want: dict) -> None:
    assert got.keys() == want.keys()
    for name, value in got.items():
        if want[name] is None:
            assert value is None, name
        else:
            assert_bitwise(value, want[name], name)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("weights", ["bf16", "fp32"])
@pytest.mark.parametrize("seeds", [(1,), (1, 2, 3, 4)], ids=["one", "four micro-batches"])
def test_bits_of_inline(mode, weights, seeds):
    assert_same(run(layer_of(mode, weights), seeds), run(layer_of("inline", weights), seeds))


@pytest.mark.parametrize("mode", MODES)
def test_bits_over_virtual_ranks(mode):
    got, want = (run(layer_of(m, world=LocalWorld(2)), (1, 2), split=2) for m in (mode, "inline"))
    assert_same(got, want)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("save", ["repull", "recompute"])
def test_bits_where_less_is_saved(mode, save):
    assert_same(run(layer_of(mode, save=save), (1, 2)), run(layer_of("inline"), (1, 2)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("trains", list(itertools.product([False, True], repeat=2)), ids=str)
def test_frozen_weights(mode, trains):
    layers = [layer_of(m) for m in (mode, "inline")]
    for layer in layers:
        layer.experts.w13.requires_grad_(trains[0])
        layer.experts.w2.requires_grad_(trains[1])
    assert_same(*(run(layer, (1,)) for layer in layers))


def test_delayed_gradients_wait_until_they_are_asked_for():
    layer = layer_of("delayed")
    x = tokens(1).requires_grad_()
    layer(x).backward(tokens(51))
    assert x.grad is not None and layer.router.weight.grad is not None
    assert layer.experts.w13.grad is None and layer.experts.w2.grad is None
    assert len(layer.experts.context.deferred) == 1
    layer.backward_dw()
    assert layer.experts.w13.grad is not None and len(layer.experts.context.deferred) == 0
    before = layer.experts.w13.grad.clone()
    layer.backward_dw()  # there is nothing left
    assert_bitwise(layer.experts.w13.grad, before, "w13")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_main_grad_takes_the_sum(mode, dtype):
    """Added to in fp32 or bf16 by the step itself; `.grad` stays empty."""
    layer, want = layer_of(mode), run(layer_of("inline"), (1,))
    for p in (layer.experts.w13, layer.experts.w2):
        p.main_grad = torch.full_like(p, 1.0, dtype=dtype)
    run(layer, (1,))
    for name in ("w13", "w2"):
        p = getattr(layer.experts, name)
        assert p.grad is None
        bound = 1e-2 if dtype is torch.bfloat16 else 2e-3
        torch.testing.assert_close(p.main_grad.float() - 1.0, want[f"experts.{name}"].float(), rtol=2e-2, atol=bound)


@pytest.mark.parametrize("mode", MODES)
def test_experts_without_rows_in_main_grad_are_left_alone(mode):
    layer = layer_of(mode)
    marked = torch.full_like(layer.experts.w13, 3.0, dtype=torch.float32)
    layer.experts.w13.main_grad = marked
    ids = torch.zeros(30, 3, dtype=torch.int64)  # all on expert 0
    layer(tokens(1).requires_grad_(), topk_ids=ids).backward(tokens(51))
    layer.backward_dw()
    assert bool((marked[1:] == 3.0).all()) and not bool((marked[0] == 3.0).all())


@pytest.mark.parametrize("mode", MODES)
def test_no_tokens(mode):
    got, want = (layer_of(m) for m in (mode, "inline"))
    for layer in (got, want):
        layer(tokens(1, 0).requires_grad_()).backward(tokens(2, 0))
        layer.backward_dw()
    assert_same(*({n: p.grad for n, p in m.named_parameters()} for m in (got, want)))


def test_a_copy_has_a_queue_of_its_own():
    layer = layer_of("delayed")
    other = copy.deepcopy(layer)
    other(tokens(1).requires_grad_()).backward(tokens(51))
    assert len(other.experts.context.deferred) == 1 and len(layer.experts.context.deferred) == 0
    other.backward_dw()
    assert other.experts.w13.grad is not None and layer.experts.w13.grad is None


def test_inference_needs_no_queue():
    layer = layer_of("delayed")
    with torch.no_grad():
        layer(tokens(1))
    assert len(layer.experts.context.deferred) == 0


def test_unknown_modes_are_refused():
    with pytest.raises(MegaMoEValueError, match="wgrad: expected 'inline', 'stream' or 'delayed', got 'later'"):
        layer_of("later")


def test_refused_in_compiled_calls():
    layer = layer_of("stream")

    def call(x):
        return layer(x)

    compiled = torch.compile(call, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="'stream' or 'delayed' with a call that is compiled"):
        compiled(tokens(1).requires_grad_())


def test_inline_has_no_queue():
    assert layer_of("inline").experts.context.deferred is None
    assert isinstance(layer_of("stream").experts.context.deferred, DeferredWgrad)


@pytest.mark.parametrize("mode", ["inline", *MODES])
def test_bf16_operands_of_wgrad(mode):
    """The recipe's operands reach weight gradients in every mode; nothing else changes."""
    recipe = Recipe(wgrad_operands="bf16")
    got, want, other = (
        run(layer_of(m, recipe=r), (1,)) for m, r in ((mode, recipe), ("inline", recipe), ("inline", None))
    )
    assert_same(got, want)
    names = [name for name in got if name.split(".")[-1] in ("w13", "w2")]
    assert len(names) == 4 and not any(torch.equal(got[name], other[name]) for name in names)
    assert all(sqnr_db(got[name], other[name]) > 20 for name in names)
    assert_bitwise(got["router.weight"], other["router.weight"], "router")


@pytest.mark.parametrize("mode", MODES)
def test_a_backward_that_asks_for_others_leaves_the_weights_alone(mode):
    layer, x = layer_of(mode), tokens(1).requires_grad_()
    (dx,) = torch.autograd.grad(layer(x).float().sum(), x)
    layer.backward_dw()
    assert dx.abs().sum() > 0 and layer.experts.w13.grad is None and layer.experts.w2.grad is None
    layer(x).float().sum().backward(inputs=[layer.experts.w2])
    layer.backward_dw()
    assert layer.experts.w13.grad is None
    want = layer_of("inline")
    want(x).float().sum().backward(inputs=[want.experts.w2])
    assert_bitwise(layer.experts.w2.grad, want.experts.w2.grad, "dW2")


@pytest.mark.parametrize("mode", MODES)
def test_what_would_come_too_late_is_refused(mode):
    layer, x = layer_of(mode), tokens(1).requires_grad_()
    with pytest.raises(MegaMoERuntimeError, match=f"expected 'inline' here, got '{mode}' with autograd.grad"):
        torch.autograd.grad(layer(x).float().sum(), layer.experts.w13)
    handle = layer.experts.w13.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(MegaMoERuntimeError, match="'stream' or 'delayed' with hooks on the parameters"):
        layer(x)
    handle.remove()
    layer(x)
