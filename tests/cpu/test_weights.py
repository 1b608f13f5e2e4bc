"""Copies of the weights: when they are made anew, when they are reused, and what they cost."""

import gc

import pytest
import torch

from megamoe import MegaMoE, MoEConfig, MoEContext, Recipe, mega_moe
from megamoe.errors import MegaMoERuntimeError
from megamoe.quantize import FP8
from tests.support.compare import assert_bitwise

CONFIG = MoEConfig(128, 128, num_experts=4, top_k=2, num_shared_experts=1, initializer_range=0.1)
COPY_BYTES = 4 * 3 * 128 * 128 + 4 * 3 * 4
"""FP8 bytes and scales of the routed experts."""


def tokens(n=20, seed=7):
    return torch.randn((n, 128), generator=torch.Generator().manual_seed(seed)).bfloat16()


def fresh(layer):
    """What a layer built from these weights, without a past, computes."""
    twin = MegaMoE(layer.config, weights=layer.weights)
    twin.load_state_dict(layer.state_dict())
    with torch.no_grad():
        return twin(tokens())


def count_copies(layer, monkeypatch):
    """A list that grows by the name of a weight whenever it is copied anew."""
    from megamoe import weights

    made, original = [], weights.make_copy

    def counted(backend, weight, *args, **options):
        for experts in (layer.experts, layer.shared):
            made.extend(n for n in ("w13", "w2") if getattr(experts, n).data_ptr() == weight.data_ptr())
        return original(backend, weight, *args, **options)

    monkeypatch.setattr(weights, "make_copy", counted)
    return made


def train(layer, **options):
    layer(tokens(), **options).float().square().sum().backward()


# ---------------------------------------------------------------- writes that must be seen


def adamw(layer, **options):
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, **options)
    train(layer)
    optimizer.step()


def data_copy(layer):
    for p in layer.parameters():
        p.data.copy_(p.data * 0.5)


def load(layer):
    layer.load_state_dict({name: value * 0.5 for name, value in layer.state_dict().items()})


def load_assign(layer):
    layer.load_state_dict({name: value * 0.5 for name, value in layer.state_dict().items()}, assign=True)


def in_place(layer):
    with torch.no_grad():
        for p in layer.parameters():
            p.mul_(0.5)


def new_data(layer):
    for p in layer.parameters():
        p.data = p.data * 0.5


@pytest.mark.parametrize(
    "write",
    [
        lambda layer: adamw(layer, foreach=True),
        lambda layer: adamw(layer, fused=True),
        data_copy,
        load,
        load_assign,
        in_place,
        new_data,
    ],
    ids=["adamw_foreach", "adamw_fused", "data_copy", "load", "load_assign", "in_place", "new_data"],
)
@pytest.mark.parametrize("mode", ["train", "no_grad"])
def test_a_forward_sees_every_write(write, mode):
    layer = MegaMoE(CONFIG)
    train(layer)
    before = layer(tokens()).detach()
    write(layer)
    with torch.set_grad_enabled(mode == "train"):
        out = layer(tokens())
    assert_bitwise(out.detach(), fresh(layer), "out")
    assert not torch.equal(out, before)


@pytest.mark.parametrize("write", [load, load_assign, in_place, new_data], ids=lambda f: f.__name__)
def test_frozen_weights_see_every_write_that_torch_sees(write):
    layer = MegaMoE(CONFIG).requires_grad_(False)
    before = layer(tokens())
    write(layer)
    assert_bitwise(layer(tokens()), fresh(layer), "out")
    assert not torch.equal(layer(tokens()), before)


def test_a_hidden_write_to_frozen_weights_needs_refresh():
    layer = MegaMoE(CONFIG).requires_grad_(False)
    before = layer(tokens())
    layer.experts.w13.data.copy_(layer.experts.w13.data * 0.5)
    layer.shared.w2.data.copy_(layer.shared.w2.data * 0.5)
    assert_bitwise(layer(tokens()), before, "torch cannot see this write")
    layer.refresh_weights()
    assert_bitwise(layer(tokens()), fresh(layer), "out")


def test_new_frozen_weights_at_an_old_address_are_seen():
    layer = MegaMoE(CONFIG).requires_grad_(False)
    for _ in range(6):  # freed memory comes back at once
        layer.experts.w13.data = torch.empty(0, dtype=torch.bfloat16)
        gc.collect()
        layer.experts.w13.data = torch.randn(4, 256, 128).bfloat16()
        assert_bitwise(layer(tokens()), fresh(layer), "out")


@pytest.mark.parametrize("weights", ["fp8", "bf16"])
def test_a_second_checkpoint_reaches_the_backward(weights):
    layer, other = MegaMoE(CONFIG, weights=weights), MegaMoE(CONFIG, weights=weights)
    layer.requires_grad_(False)
    other.requires_grad_(False)
    grads = []
    for model, state in ((layer, None), (layer, other.state_dict()), (other, None)):
        if state is not None:
            model.load_state_dict(state)
        x = tokens().requires_grad_()
        model(x).backward(tokens(seed=8))
        grads.append(x.grad)
    assert_bitwise(grads[1], grads[2], "dx after the second load")
    assert not torch.equal(grads[0], grads[1])


# ---------------------------------------------------------------- when copies are made


def test_weights_that_train_are_copied_in_every_forward(monkeypatch):
    layer = MegaMoE(CONFIG)
    made = count_copies(layer, monkeypatch)
    for _ in range(3):
        train(layer)
    assert sorted(made) == ["w13"] * 6 + ["w2"] * 6  # routed and shared


def test_later_micro_batches_reuse_them_until_an_optimizer_steps(monkeypatch):
    layer = MegaMoE(CONFIG)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    made = count_copies(layer, monkeypatch)
    train(layer, is_first_microbatch=True)
    train(layer, is_first_microbatch=False)
    assert len(made) == 4
    optimizer.step()
    out = layer(tokens(), is_first_microbatch=False)
    assert len(made) == 8
    assert_bitwise(out.detach(), fresh(layer), "out after the step")


def test_an_optimizer_of_other_parameters_changes_nothing(monkeypatch):
    layer, other = MegaMoE(CONFIG), torch.nn.Linear(2, 2)
    train(layer)
    made = count_copies(layer, monkeypatch)
    other(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    train(layer, is_first_microbatch=False)
    assert not made


def test_frozen_weights_are_copied_once(monkeypatch):
    layer = MegaMoE(CONFIG).requires_grad_(False)
    made = count_copies(layer, monkeypatch)
    for _ in range(3):
        layer(tokens())
        layer(tokens().requires_grad_()).sum().backward()
    assert sorted(made) == ["w13"] * 2 + ["w2"] * 2


def test_one_of_two_weights_frozen(monkeypatch):
    layer = MegaMoE(CONFIG)
    for experts in (layer.experts, layer.shared):
        experts.w2.requires_grad_(False)
    made = count_copies(layer, monkeypatch)
    for _ in range(3):
        train(layer)
    assert sorted(made) == ["w13"] * 6 + ["w2"] * 2
    assert layer.experts.w2.grad is None and layer.experts.w13.grad is not None


def test_a_call_without_kept_copies_makes_its_own():
    layer = MegaMoE(CONFIG)
    x, ids, weights = tokens(), torch.randint(4, (20, 2)), torch.rand(20, 2)
    want = layer.experts(x, ids, weights)
    got = mega_moe(x, ids, weights, layer.experts.w13, layer.experts.w2, context=MoEContext(Recipe()))
    assert_bitwise(got, want, "out")


# ---------------------------------------------------------------- what they cost


def test_inference_holds_one_copy():
    layer = MegaMoE(CONFIG, weights="fp8").eval()
    with torch.no_grad():
        layer(tokens())
    assert layer.experts.copies.num_bytes() == 0, "FP8 bytes are used as they are"
    layer = MegaMoE(CONFIG).eval()
    with torch.no_grad():
        layer(tokens())
    assert layer.experts.copies.num_bytes() == COPY_BYTES


def test_training_holds_the_transposed_copy_too_and_eval_frees_it():
    layer = MegaMoE(CONFIG)
    train(layer)
    assert layer.experts.copies.num_bytes() >= 2 * 4 * 3 * 128 * 128
    layer.eval()
    assert layer.experts.copies.num_bytes() == COPY_BYTES


def test_the_bf16_recipe_needs_no_copy_for_the_forward():
    layer = MegaMoE(CONFIG, recipe=Recipe("bf16")).eval()
    with torch.no_grad():
        layer(tokens())
    assert layer.experts.copies.num_bytes() == 0


def test_a_backward_after_eval_makes_the_transposed_copy_again():
    layer, x = MegaMoE(CONFIG), tokens().requires_grad_()
    layer(x).backward(tokens(seed=8))
    want, x.grad = x.grad, None
    out = layer(x)
    layer.eval()
    out.backward(tokens(seed=8))
    assert_bitwise(x.grad, want, "dx")


def test_copies_go_with_their_layer():
    layer = MegaMoE(CONFIG)
    train(layer)
    from megamoe import weights

    gc.collect()
    before = len(weights._watched)
    del layer
    gc.collect()
    assert len(weights._watched) == before - 2


# ---------------------------------------------------------------- weights that change too early


@pytest.mark.parametrize(
    "change",
    [lambda layer: layer.refresh_weights(), load_assign, lambda layer: layer.to(torch.float32)],
    ids=["refresh", "load", "cast"],
)
def test_a_backward_after_the_weights_changed_raises(change):
    layer = MegaMoE(CONFIG)
    out = layer(tokens().requires_grad_())
    change(layer)
    with pytest.raises(MegaMoERuntimeError, match="backward: expected the weights of its forward, got weights changed"):
        out.sum().backward()


def test_a_backward_after_a_fused_step_raises():
    layer = MegaMoE(CONFIG)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, fused=True)
    early = layer(tokens().requires_grad_())
    train(layer)
    optimizer.step()
    layer(tokens())
    with pytest.raises(RuntimeError, match="weights of its forward|modified by an inplace operation"):
        early.sum().backward()


# ---------------------------------------------------------------- the bytes that came in


def test_state_dict_gives_fp8_bytes_back():
    layer = MegaMoE(CONFIG, weights="fp8")
    every_byte = torch.arange(layer.experts.w13.numel()).to(torch.uint8).view(layer.experts.w13.shape)
    every_byte[(every_byte & 0x7F) == 0x7F] = 0  # no NaN
    state = layer.state_dict()
    state["experts.w13"] = every_byte.view(FP8)
    state["experts.w13_scale"] = torch.rand_like(state["experts.w13_scale"]) + 0.5
    layer.load_state_dict(state)
    train_frozen(layer)
    for cast in (lambda m: m.bfloat16(), lambda m: m.float(), lambda m: m.half(), lambda m: m.to(torch.float64)):
        cast(layer)
        for name in ("experts.w13", "experts.w13_scale", "experts.w2", "shared.w13", "shared.w2_scale"):
            assert_bitwise(layer.state_dict()[name], state[name], name)
    assert layer.router.weight.dtype == torch.float64


def train_frozen(layer):
    layer(tokens().requires_grad_()).sum().backward()


def test_fp8_weights_are_frozen():
    layer = MegaMoE(CONFIG, weights="fp8")
    trainable = {name for name, p in layer.named_parameters() if p.requires_grad}
    assert trainable == {"router.weight"}
    train(layer)
    assert layer.experts.w13.grad is None


def test_optimizers_skip_frozen_fp8_weights():
    layer = MegaMoE(CONFIG, weights="fp8")
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, weight_decay=0.1)
    train(layer)
    optimizer.step()
    after = layer.state_dict()
    assert not torch.equal(after["router.weight"], before["router.weight"]), "the step was one"
    frozen = [name for name in before if name.startswith(("experts.", "shared."))]
    assert len(frozen) == 8
    for name in frozen:
        assert_bitwise(after[name], before[name], name)


def test_the_layer_trains():
    torch.manual_seed(0)
    layer, target = MegaMoE(CONFIG), torch.randn(20, 128)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    losses = []
    for _ in range(12):
        loss = (layer(tokens()).float() - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
