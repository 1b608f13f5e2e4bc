"""The router: against transformers, case by case, and in the corners where routers go wrong."""

import itertools

import pytest
import torch

from megamoe import MoEConfig, Router
from megamoe.errors import MegaMoEValueError
from megamoe.router import route


def make(num_groups=1, topk_groups=1, num_experts=16, top_k=4, **fields) -> MoEConfig:
    return MoEConfig(32, 16, num_experts, top_k, num_groups, topk_groups, **fields)


@pytest.mark.parametrize("groups", [(1, 1), (4, 2), (4, 4), (8, 3)], ids=str)
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("factor", [1.0, 2.5])
def test_equals_transformers(groups, norm, factor):
    transformers = pytest.importorskip("transformers")
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    hf_config = transformers.DeepseekV3Config(
        hidden_size=32,
        moe_intermediate_size=16,
        n_routed_experts=16,
        num_experts_per_tok=4,
        n_group=groups[0],
        topk_group=groups[1],
        norm_topk_prob=norm,
        routed_scaling_factor=factor,
    )
    theirs = DeepseekV3TopkRouter(hf_config)
    ours = Router(MoEConfig.from_hf(hf_config), dtype=torch.float32)
    with torch.no_grad():
        theirs.weight.normal_()
        theirs.e_score_correction_bias.uniform_(-1, 1)
        ours.weight.copy_(theirs.weight)
        ours.correction_bias.copy_(theirs.e_score_correction_bias)
    x = torch.randn(200, 32)
    want_x, got_x = x.clone().requires_grad_(), x.clone().requires_grad_()
    _, want_weights, want_ids = theirs(want_x)
    ids, weights = ours(got_x)
    order = ids.argsort(dim=1)
    want_order = want_ids.argsort(dim=1)
    assert torch.equal(ids.gather(1, order), want_ids.gather(1, want_order))
    # one sum over K in another order
    torch.testing.assert_close(weights.gather(1, order), want_weights.gather(1, want_order), rtol=1e-6, atol=0)
    upstream = torch.randn(16)
    (upstream[ids] * weights).sum().backward()
    (upstream[want_ids] * want_weights).sum().backward()
    torch.testing.assert_close(got_x.grad, want_x.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad, rtol=1e-4, atol=1e-5)


def test_negative_scores_never_let_masked_groups_win():
    config = make(num_groups=4, topk_groups=2)
    logits = torch.randn(100, 16)
    bias = torch.full((16,), -5.0)
    ids, _ = route(logits, bias, config)
    group_score = (logits.sigmoid() + bias).view(-1, 4, 4).topk(2, -1).values.sum(-1)
    allowed = group_score.topk(2, -1).indices
    assert ((ids // 4)[:, :, None] == allowed[:, None, :]).any(-1).all()


def test_the_bias_picks_and_never_weighs():
    config = make(routed_scaling_factor=2.5)
    logits = torch.randn(50, 16, requires_grad=True)
    bias = torch.empty(16).uniform_(-3, 3).requires_grad_()
    ids, weights = route(logits, bias, config)
    plain_ids, _ = route(logits, None, config)
    assert not torch.equal(ids, plain_ids), "the bias should have changed a choice"
    scores = logits.sigmoid().gather(1, ids)
    assert torch.equal(weights, scores / (scores.sum(-1, keepdim=True) + 1e-20) * 2.5)
    weights.square().sum().backward()
    assert bias.grad is None and logits.grad is not None


def test_the_bias_stays_fp32_when_the_module_is_cast():
    router = Router(make())
    value = torch.randn(16) / 3
    router.correction_bias.copy_(value)
    for cast in (torch.nn.Module.bfloat16, torch.nn.Module.half, lambda m: m.to(torch.bfloat16)):
        cast(router)
        assert router.correction_bias.dtype == torch.float32
        assert torch.equal(router.correction_bias, value), "rounded on the way"
    assert router.weight.dtype == torch.bfloat16
    assert "correction_bias" in router.state_dict()


@pytest.mark.parametrize("groups", [(1, 1), (4, 2)], ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_ids_are_distinct_and_in_range_whatever_the_row_holds(groups, bad):
    router = Router(make(*groups, num_experts=128, top_k=8))
    x = torch.randn(64, 32)
    clean = x.clone()
    x[59:], clean[59:] = bad, 0.0
    ids, weights = router(x)
    assert ids.min() >= 0 and ids.max() < 128
    assert (ids.sort(dim=1).values.diff(dim=1) > 0).all(), "an expert twice"
    want_ids, want_weights = router(clean)
    assert torch.equal(ids[:59], want_ids[:59]) and torch.equal(weights[:59], want_weights[:59])


def test_one_nan_logit_is_chosen_last():
    logits = torch.zeros(1, 16)
    logits[0, 3] = float("nan")
    ids, _ = route(logits, None, make(top_k=12))
    assert 3 not in ids.tolist()[0]


def test_groups_of_one_expert():
    logits = torch.randn(30, 16)
    config = make(num_groups=16, topk_groups=4)
    assert torch.equal(route(logits, None, config)[0], route(logits, None, make())[0])


def test_is_fp32_under_autocast():
    router, x = Router(make()), torch.randn(40, 32)
    want = router(x)
    with torch.autocast("cpu", torch.bfloat16):
        got = router(x)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True)) and got[1].dtype == torch.float32


def test_no_tokens():
    ids, weights = Router(make(4, 2))(torch.empty(0, 32))
    assert ids.shape == weights.shape == (0, 4)


@pytest.mark.parametrize("shape", [(3, 33), (2, 3, 32), (32,)], ids=str)
def test_refuses_another_shape(shape):
    with pytest.raises(MegaMoEValueError, match=r"x: expected \[T, H = 32\], got shape"):
        Router(make())(torch.empty(shape))


def test_zero_scores_still_give_finite_weights():
    ids, weights = route(torch.full((2, 16), -200.0), None, make())
    assert torch.equal(weights, torch.zeros(2, 4)) and ids.shape == (2, 4)
    assert len(set(itertools.chain(ids[0].tolist()))) == 4
