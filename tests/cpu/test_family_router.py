"""FamilyRouter: a module's view of `route_family`: dtypes, hash layers, masks, what it stores."""

from __future__ import annotations

import pytest
import torch

from megamoe.config import MoEConfig
from megamoe.errors import MegaMoETypeError, MegaMoEValueError
from megamoe.family_router import FamilyRouter
from megamoe.router import Router

CONFIG = MoEConfig(32, 8, 8, 2)
T = 20


def make(family: str = "deepseek_v4", **options) -> FamilyRouter:
    torch.manual_seed(0)
    router = FamilyRouter(CONFIG, family, **options)
    torch.nn.init.normal_(router.weight)
    return router


def test_v3_family_equals_the_plain_router_and_shares_its_state() -> None:
    family, plain = make("deepseek_v3"), Router(CONFIG)
    family.correction_bias.normal_()
    plain.load_state_dict(family.state_dict())
    x = torch.randn(T, 32).bfloat16()
    assert all(torch.equal(a, b) for a, b in zip(family(x), plain(x), strict=True))


def test_scores_are_fp32_whatever_the_module_is_cast_to() -> None:
    router = make("gpt_oss", has_linear_bias=True).bfloat16()
    assert router.linear_bias.dtype == torch.bfloat16 and router.correction_bias.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, weights = router(torch.randn(T, 32).bfloat16())
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights.sum(1), torch.ones(T))


def test_hash_layer_looks_experts_up_by_token() -> None:
    router = make(vocab_size=10)
    router.tid2eid.copy_(torch.rand(10, 8).argsort(1)[:, :2])
    tokens = torch.randint(0, 10, (T,))
    x = torch.randn(T, 32).bfloat16()
    ids, weights = router(x, token_ids=tokens)
    assert torch.equal(ids, router.tid2eid[tokens])
    replayed = router(x, topk_ids=ids)
    assert torch.equal(replayed[1], weights)
    with pytest.raises(MegaMoEValueError, match=r"token_ids: expected the vocabulary ids of a hash layer's tokens"):
        router(x)
    assert "tid2eid" in router.state_dict() and "tid2eid" not in make().state_dict()
    assert "hash layer" in repr(router)


def test_nan_in_masked_tokens_reaches_no_gradient() -> None:
    router = make()
    mask = torch.arange(T) % 4 != 0
    x = torch.randn(T, 32)
    x[~mask] = float("nan")
    x.requires_grad_()
    ids, weights = router(x, token_mask=mask)
    assert (ids[~mask] == -1).all() and (weights[~mask] == 0).all()
    (weights * torch.randn(T, 2)).sum().backward()
    assert router.weight.grad.isfinite().all() and router.weight.grad.abs().sum() > 0
    assert (x.grad[~mask] == 0).all() and x.grad.isfinite().all()


def test_refusals() -> None:
    with pytest.raises(MegaMoEValueError, match=r"family: expected one of deepseek_v2, .*, got 'mixtral'"):
        FamilyRouter(CONFIG, "mixtral")
    with pytest.raises(MegaMoEValueError, match=r"x: expected \[T, H = 32\], got shape \(3, 31\)"):
        make()(torch.zeros(3, 31))
    with pytest.raises(MegaMoEValueError, match=r"token_mask: expected \[T = 3\]"):
        make()(torch.zeros(3, 32), token_mask=torch.ones(4, dtype=torch.bool))


@pytest.mark.parametrize("wrong, error, got", [
    (-1, MegaMoEValueError, "-1"), (10, MegaMoEValueError, "10"), (1.9, MegaMoETypeError, "torch.float32"),
])  # fmt: skip
def test_ids_outside_the_vocabulary_are_named_but_for_padding(wrong, error, got) -> None:
    router = make(vocab_size=10)
    router.tid2eid.copy_(torch.rand(10, 8).argsort(1)[:, :2])
    ids, x = torch.randint(0, 10, (T,)), torch.randn(T, 32).bfloat16()
    ids = ids.to(torch.tensor(wrong).dtype)
    ids[3] = wrong
    with pytest.raises(error, match=f"token_ids: expected .*, got {got}"):
        router(x, token_ids=ids)
    if not ids.is_floating_point():
        mask = torch.arange(T) != 3
        chosen, _ = router(x, token_ids=ids, token_mask=mask)
        assert torch.equal(chosen[mask], router.tid2eid[ids[mask]]) and bool((chosen[3] == -1).all())
