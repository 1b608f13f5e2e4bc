"""PyTorch features around the integrations: checkpointing and inference in transformers, the shared expert beside."""

from __future__ import annotations

import copy

import pytest
import torch

from megamoe import LocalWorld, MegaMoE, MoEConfig
from megamoe.backends import BACKENDS
from megamoe.errors import MegaMoEValueError
from tests.support.compare import assert_bitwise

CONFIG = MoEConfig(128, 96, num_experts=4, top_k=2, num_shared_experts=1)


def tokens(count: int = 30) -> torch.Tensor:
    return torch.randn(count, 128, generator=torch.Generator().manual_seed(1)).bfloat16()


def make(**options: object) -> MegaMoE:
    torch.manual_seed(0)
    return MegaMoE(CONFIG, backend="torch", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("world", [None, LocalWorld(2)], ids=["one", "two"])
def test_a_shared_expert_on_its_own_stream_changes_no_bit(world: LocalWorld | None) -> None:
    results = []
    for layer in (make(world=world), make(world=world, overlap_shared=True)):
        x = tokens().requires_grad_()
        out = torch.cat(layer(list(x.split(15)))) if world else layer(x)
        out.backward(tokens())
        results.append({"out": out, "x": x.grad, **{name: p.grad for name, p in layer.named_parameters()}})
    for name, value in results[0].items():
        assert_bitwise(results[1][name], value, name)


def test_it_is_refused_where_kernels_could_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make(overlap_shared=True)
    copied = copy.deepcopy(layer)
    monkeypatch.setattr(BACKENDS["torch"], "is_fused", True)
    for module in (layer, copied):
        with pytest.raises(MegaMoEValueError, match="overlap_shared: expected False with a fused backend.*triton"):
            module(tokens())


# ---------------------------------------------------------------- transformers


@pytest.mark.parametrize("name", ["megamoe", "megamoe_fp8"])
def test_gradient_checkpointing_of_transformers_changes_no_bit(name: str) -> None:
    pytest.importorskip("transformers", minversion="5")
    from megamoe.integrations.transformers import register
    from tests.support import tiny_models

    register(backend="torch")
    plain = tiny_models.make_model("qwen3_moe").bfloat16()
    plain.set_experts_implementation(name)
    checkpointed = copy.deepcopy(plain)
    checkpointed.gradient_checkpointing_enable()
    want = tiny_models.train_step(plain, tiny_models.tokens())
    got = tiny_models.train_step(checkpointed, tiny_models.tokens())
    assert got.keys() == want.keys()
    for key, value in want.items():
        assert_bitwise(got[key], value, key)


def test_inference_mode_gives_the_logits_of_training() -> None:
    pytest.importorskip("transformers", minversion="5")
    from megamoe.integrations.transformers import register
    from tests.support import tiny_models

    register(backend="torch")
    model = tiny_models.make_model("glm4_moe").bfloat16()
    model.set_experts_implementation("megamoe_fp8")
    want = model(tiny_models.tokens()).logits
    with torch.inference_mode():
        first, second = model(tiny_models.tokens()).logits, model(tiny_models.tokens()).logits
    assert_bitwise(first, want.detach(), "inference")
    assert_bitwise(second, want.detach(), "with kept copies")
    assert_bitwise(model(tiny_models.tokens()).logits, want, "with grad again")
