"""LoRA on frozen FP8 experts: results and gradients against fp32 arithmetic, what is held, merging, refusals."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch

from megamoe import LocalWorld, MegaMoE, MoEConfig
from megamoe.errors import MegaMoEValueError
from megamoe.gates import GATES, sqnr_db
from megamoe.integrations.lora import LoRAExperts, add_lora, remove_lora
from megamoe.quantize import QuantizedWeight
from tests.support.compare import assert_bitwise

CONFIG = MoEConfig(128, 96, num_experts=4, top_k=2, num_shared_experts=1, initializer_range=0.1)
NAMES = ("a13", "b13", "a2", "b2")


def make(**options: object) -> MegaMoE:
    torch.manual_seed(0)
    return MegaMoE(CONFIG, weights="fp8", backend="torch", **options)  # type: ignore[arg-type]


def with_update(layer: MegaMoE) -> LoRAExperts:
    add_lora(layer, rank=4, alpha=8.0)
    experts = layer.experts
    assert isinstance(experts, LoRAExperts)
    gen = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for update in (experts.a13, experts.b13, experts.a2, experts.b2):
            update.copy_(torch.randn(update.shape, generator=gen) * update.shape[-1] ** -0.5 * 0.4)
    return experts


def tokens(count: int = 40) -> torch.Tensor:
    return torch.randn(count, 128, generator=torch.Generator().manual_seed(2)).bfloat16()


def test_it_starts_as_the_layer_was() -> None:
    layer = make()
    want = layer(tokens())
    trained = add_lora(layer)
    assert {id(p) for p in trained} == {id(p) for p in layer.parameters() if p.requires_grad}
    assert sqnr_db(layer(tokens()), want) > 30  # weights rounded to bf16, and quantised again


def test_out_and_gradients_against_plain_arithmetic() -> None:
    layer = make()
    experts = with_update(layer)
    x = tokens().requires_grad_()
    ids, weights = layer.router(tokens())
    out = experts(x, ids, weights.detach())
    out.backward(tokens())

    leaves = {name: getattr(experts, name).detach().float().requires_grad_() for name in NAMES}
    want_x = tokens().float().requires_grad_()
    stored = (QuantizedWeight(experts.base.w13.data, experts.base.w13_scale, 2), experts.base.w2, experts.base.w2_scale)
    w13 = stored[0].dequantize(torch.float32) + 2.0 * leaves["b13"] @ leaves["a13"]
    w2 = QuantizedWeight(stored[1].data, stored[2]).dequantize(torch.float32) + 2.0 * leaves["b2"] @ leaves["a2"]
    want = torch.zeros(40, 128)
    for e in range(4):
        token, slot = (ids == e).nonzero(as_tuple=True)
        gate, up = (want_x[token] @ w13[e].T).chunk(2, dim=1)
        rows = (torch.nn.functional.silu(gate) * up * weights.detach()[token, slot, None]) @ w2[e].T
        want = want.index_add(0, token, rows)
    want.backward(tokens().float())
    pairs = {name: (getattr(experts, name).grad, leaf.grad) for name, leaf in leaves.items()}
    for name, (got, wanted) in {**pairs, "out": (out.detach(), want.detach()), "x": (x.grad, want_x.grad)}.items():
        assert sqnr_db(got, wanted) > GATES["fp8"].tensor_db, name
    assert experts.base.w13.grad is None


def test_over_ranks_and_checkpointed_it_has_the_same_bits() -> None:
    layer, pair = make(), make(world=LocalWorld(2))
    pair.load_state_dict(layer.state_dict())
    experts, spread = with_update(layer), with_update(pair)
    x = tokens()
    out = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
    out.backward(x)
    both = torch.cat(pair([x[:15], x[15:]]))
    assert_bitwise(both, out, "out")
    both.backward(x)
    for name in NAMES:
        assert_bitwise(getattr(spread, name).grad, getattr(experts, name).grad, name)


def test_the_updated_weights_are_not_held_between_forward_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make()
    experts = with_update(layer)
    built: list[weakref.ref] = []
    update = LoRAExperts._updated

    def watched(*args: object, **options: object) -> torch.Tensor:
        made = update(*args, **options)  # type: ignore[arg-type]
        built.append(weakref.ref(made))
        return made

    monkeypatch.setattr(LoRAExperts, "_updated", watched)
    out = layer(tokens().requires_grad_())
    assert len(built) == 2 and all(made() is None for made in built)
    out.sum().backward()
    assert len(built) == 4 and experts.a2.grad is not None


def test_it_trains_and_merges() -> None:
    layer = make()
    before = {name: value.view(torch.uint8).clone() for name, value in layer.state_dict().items() if "w13" in name}
    target = torch.randn(40, 128, generator=torch.Generator().manual_seed(5))
    optimizer = torch.optim.AdamW(add_lora(layer, rank=8), lr=0.02)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = (layer(tokens()).float() - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0], losses
    adapted = layer(tokens())
    state = layer.state_dict()
    for name, value in before.items():
        assert torch.equal(state[name.replace("experts.", "experts.base.")].view(torch.uint8), value), "it is frozen"
    copied = copy.deepcopy(layer)
    assert_bitwise(copied(tokens()), adapted, "a copy")
    remove_lora(layer)
    assert not isinstance(layer.experts, LoRAExperts) and layer.experts.w13.dtype == torch.float8_e4m3fn
    assert_bitwise(layer(tokens()), adapted, "merged")


def test_refusals() -> None:
    with pytest.raises(MegaMoEValueError, match="experts: expected FP8 weights, got torch.bfloat16"):
        add_lora(MegaMoE(CONFIG, backend="torch"))
    layer = make()
    with pytest.raises(MegaMoEValueError, match="rank: expected 1 or more, got 0"):
        add_lora(layer, rank=0)
    with pytest.raises(MegaMoEValueError, match="layer: expected adapters of add_lora, got none"):
        remove_lora(layer)
    add_lora(layer)
    with pytest.raises(MegaMoEValueError, match="layer: expected no adapters yet, got some"):
        add_lora(layer)
