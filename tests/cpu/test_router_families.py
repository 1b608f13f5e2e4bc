"""Routers of every family against transformers' own modules: ids, weights, gradients; replay, hash layers, masks."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megamoe.config import FAMILIES, MoEConfig
from megamoe.errors import MegaMoETypeError, MegaMoEValueError
from megamoe.router import route
from megamoe.router_families import ROUTER_FAMILIES, hash_ids, route_family, sqrt_softplus

transformers = pytest.importorskip("transformers")

T, H = 37, 32


def small(**fields) -> MoEConfig:
    return MoEConfig(**{"hidden_size": H, "intermediate_size": 8, "num_experts": 16, "top_k": 4, **fields})


def hf_router(name: str, *, grouped: bool = False, norm: bool = True, scale: float = 1.0):
    """A transformers router with random weights, and its config."""
    if name == "deepseek_v2":
        from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter as Router

        method = "group_limited_greedy" if grouped else "greedy"
        config = transformers.DeepseekV2Config(
            hidden_size=H, n_routed_experts=16, num_experts_per_tok=4, n_group=4, topk_group=2, topk_method=method
        )
        config.routed_scaling_factor = scale
    elif name in ("deepseek_v3", "glm4_moe"):
        from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
        from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter

        Router = DeepseekV3TopkRouter if name == "deepseek_v3" else Glm4MoeTopkRouter
        kind = transformers.DeepseekV3Config if name == "deepseek_v3" else transformers.Glm4MoeConfig
        groups = dict(n_group=4, topk_group=2) if grouped else dict(n_group=1, topk_group=1)
        config = kind(
            hidden_size=H,
            n_routed_experts=16,
            num_experts_per_tok=4,
            norm_topk_prob=norm,
            routed_scaling_factor=scale,
            **groups,
        )
    elif name == "qwen3_moe":
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter as Router

        config = transformers.Qwen3MoeConfig(hidden_size=H, num_experts=16, num_experts_per_tok=4, norm_topk_prob=norm)
    elif name == "gpt_oss":
        from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter as Router

        config = transformers.GptOssConfig(hidden_size=H, num_local_experts=16, num_experts_per_tok=4)
    else:
        from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HashRouter, DeepseekV4TopKRouter

        Router = DeepseekV4HashRouter if name == "deepseek_v4_hash" else DeepseekV4TopKRouter
        config = transformers.DeepseekV4Config(
            hidden_size=H, n_routed_experts=16, num_experts_per_tok=4, routed_scaling_factor=scale, vocab_size=50
        )
    gen = torch.Generator().manual_seed(3)
    router = Router(config)
    with torch.no_grad():
        for tensor in (*router.parameters(), *router.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=gen))
            else:
                tensor.copy_(torch.rand(tensor.shape[0], 16, generator=gen).argsort(1)[:, : tensor.shape[1]])
    return router, config


CASES = {
    "v2-greedy": ("deepseek_v2", dict(scale=2.5)),
    "v2-groups": ("deepseek_v2", dict(grouped=True, scale=16.0)),
    "v3": ("deepseek_v3", dict(scale=2.5)),
    "v3-groups": ("deepseek_v3", dict(grouped=True)),
    "v3-no-norm": ("deepseek_v3", dict(norm=False, scale=2.5, grouped=True)),
    "glm": ("glm4_moe", dict(scale=1.5)),
    "v4": ("deepseek_v4", dict(scale=1.5)),
    "v4-hash": ("deepseek_v4_hash", dict(scale=1.5)),
    "qwen3": ("qwen3_moe", {}),
    "qwen3-no-norm": ("qwen3_moe", dict(norm=False)),
    "gpt-oss": ("gpt_oss", {}),
}


@pytest.mark.parametrize("case", CASES)
def test_ids_weights_and_gradients_are_those_of_transformers(case: str) -> None:
    name, options = CASES[case]
    router, hf_config = hf_router(name, **options)
    gen = torch.Generator().manual_seed(5)
    x = torch.randn(T, H, generator=gen)
    tokens = torch.randint(0, 50, (T,), generator=gen)
    direction = torch.randn(T, 16, generator=gen)  # a loss that does not depend on the order of the slots

    theirs_x = x.clone().requires_grad_()
    args = (theirs_x[None], tokens) if name.endswith("hash") else (theirs_x,)
    _, their_weights, their_ids = router(*args)
    (their_weights * direction.gather(1, their_ids)).sum().backward()
    their_grads = {n: p.grad.clone() for n, p in router.named_parameters()}

    if name == "gpt_oss":
        config, family = small(), "gpt_oss"
    else:
        config = MoEConfig.from_hf(hf_config)
        family = config.family
    bias = getattr(router, "e_score_correction_bias", None)
    table = getattr(router, "tid2eid", None)
    our_x = x.clone().requires_grad_()
    weight = router.weight.detach().clone().requires_grad_()
    linear_bias = router.bias.detach().clone().requires_grad_() if name == "gpt_oss" else None
    logits = torch.nn.functional.linear(our_x, weight, linear_bias)
    ids = None if table is None else hash_ids(tokens, table)
    got = route_family(logits, config, family, correction_bias=bias, topk_ids=ids)
    (got.topk_weights * direction.gather(1, got.topk_ids)).sum().backward()

    order, their_order = got.topk_ids.argsort(1), their_ids.argsort(1)
    assert torch.equal(got.topk_ids.gather(1, order), their_ids.gather(1, their_order))
    torch.testing.assert_close(
        got.topk_weights.gather(1, order), their_weights.gather(1, their_order), rtol=1e-6, atol=1e-7
    )
    torch.testing.assert_close(our_x.grad, theirs_x.grad, rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(weight.grad, their_grads["weight"], rtol=2e-5, atol=2e-6)
    if linear_bias is not None:
        torch.testing.assert_close(linear_bias.grad, their_grads["bias"], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("groups", [1, 4])
def test_v3_family_equals_the_layers_own_router(groups: int) -> None:
    config = small(num_groups=groups, topk_groups=max(1, groups // 2), routed_scaling_factor=2.5)
    logits, bias = torch.randn(T, 16), torch.randn(16)
    ids, weights = route(logits, bias, config)
    got = route_family(logits, config, "deepseek_v3", correction_bias=bias)
    assert torch.equal(got.topk_ids, ids) and torch.equal(got.topk_weights, weights)


def test_choice_is_sorted_and_distinct_even_for_nan() -> None:
    logits = torch.randn(T, 16)
    logits[3], logits[4, 5:], logits[5] = float("nan"), float("nan"), float("inf")
    for family in ROUTER_FAMILIES:
        ids = route_family(logits, small(), family).topk_ids
        assert all(len(set(row)) == 4 for row in ids.tolist()) and ids.min() >= 0 and ids.max() < 16
        clean = route_family(logits[:3], small(), family)
        assert torch.equal(ids[:3], clean.topk_ids)
        if family != "deepseek_v3":
            assert torch.equal(clean.topk_weights.sort(descending=True).values, clean.topk_weights)


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v4"])
def test_negative_bias_does_not_open_masked_groups(family: str) -> None:
    config = small(num_groups=4, topk_groups=2)
    logits = torch.randn(200, 16)
    ids = route_family(logits, config, family, correction_bias=torch.full((16,), -5.0)).topk_ids
    best = ROUTER_FAMILIES[family].score(logits).view(-1, 4, 4).topk(2, -1).values.sum(-1).topk(2).indices
    assert all(set((row // 4).tolist()) <= set(allowed.tolist()) for row, allowed in zip(ids, best, strict=True))


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v4"])
def test_bias_chooses_and_never_weighs(family: str) -> None:
    logits = torch.randn(T, 16, requires_grad=True)
    bias = (torch.rand(16) * 6 - 3).requires_grad_()
    got = route_family(logits, small(), family, correction_bias=bias)
    chosen = ROUTER_FAMILIES[family].score(logits).gather(1, got.topk_ids)
    torch.testing.assert_close(got.topk_weights, chosen / chosen.sum(1, keepdim=True))
    got.topk_weights[:, 0].sum().backward()
    assert bias.grad is None and logits.grad.abs().sum() > 0


@pytest.mark.parametrize("factor", [1.0, 2.5])
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("family", [f for f in ROUTER_FAMILIES if f != "gpt_oss"])
def test_scaling_factor_applies_once(family: str, norm: bool, factor: float) -> None:
    logits = torch.randn(T, 16)
    config = small(norm_topk=norm)
    plain = route_family(logits, config, family).topk_weights
    scaled = route_family(logits, dataclasses.replace(config, routed_scaling_factor=factor), family).topk_weights
    assert torch.equal(scaled, plain * factor)
    if norm:
        torch.testing.assert_close(plain.sum(1), torch.ones(T))


@pytest.mark.parametrize("family", ROUTER_FAMILIES)
def test_replayed_ids_give_the_same_weights_and_gradients(family: str) -> None:
    a, b = (torch.randn(T, 16, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2))
    chosen = route_family(a, small(), family)
    for dtype in (torch.int32, torch.int64):
        again = route_family(b, small(), family, topk_ids=chosen.topk_ids.to(dtype))
        assert torch.equal(again.topk_weights, chosen.topk_weights) and again.topk_ids.dtype == torch.int64
    direction = torch.randn(T, 4)
    (chosen.topk_weights * direction).sum().backward()
    (again.topk_weights * direction).sum().backward()
    assert torch.equal(a.grad, b.grad)
    shuffled = route_family(b, small(), family, topk_ids=chosen.topk_ids.flip(1))
    torch.testing.assert_close(shuffled.topk_weights.flip(1), chosen.topk_weights)


@pytest.mark.parametrize("family", ROUTER_FAMILIES)
def test_masked_tokens_and_given_ids_of_minus_one_weigh_exactly_nothing(family: str) -> None:
    logits = torch.randn(T, 16)
    mask = torch.arange(T) % 3 != 0
    logits[~mask] = float("nan")
    logits.requires_grad_()
    got = route_family(logits, small(), family, token_mask=mask)
    assert (got.topk_ids[~mask] == -1).all() and (got.topk_ids[mask] >= 0).all()
    assert (got.topk_weights[~mask] == 0).all() and not got.topk_weights.isnan().any()
    ids = got.topk_ids.clone()
    ids[mask, 1] = -1
    partial = route_family(torch.randn(T, 16), small(), family, topk_ids=ids)
    assert (partial.topk_weights[ids == -1] == 0).all() and not partial.topk_weights.isnan().any()
    torch.testing.assert_close(partial.topk_weights[mask].sum(1) > 0, torch.ones(int(mask.sum()), dtype=torch.bool))


@pytest.mark.parametrize("family", ROUTER_FAMILIES)
def test_no_tokens(family: str) -> None:
    got = route_family(torch.zeros(0, 16), small(num_groups=4, topk_groups=2), family)
    assert got.topk_ids.shape == got.topk_weights.shape == (0, 4)


def test_sqrt_softplus_is_smooth_where_softplus_underflows() -> None:
    logits = torch.tensor([-1e4, -300.0, -120, -50, -20.01, -20, -19.99, -1, 0, 30, 1e4], requires_grad=True)
    value = sqrt_softplus(logits)
    value.sum().backward()
    exact = torch.nn.functional.softplus(logits.detach().double(), threshold=100).sqrt()
    slope = logits.detach().double().sigmoid() / (2 * exact.clamp_min(1e-300))
    torch.testing.assert_close(value.double(), exact, rtol=1e-6, atol=1e-38)
    torch.testing.assert_close(logits.grad.double(), slope, rtol=2e-6, atol=1e-38)


def test_hash_ids_by_token() -> None:
    table = torch.tensor([[1, 2], [3, 4], [5, 0]], dtype=torch.int32)
    assert hash_ids(torch.tensor([[2, 0], [1, 1]]), table).tolist() == [[5, 0], [1, 2], [3, 4], [3, 4]]
    with pytest.raises(MegaMoEValueError, match=r"tid2eid: expected \[vocabulary, K\], got shape \(3,\)"):
        hash_ids(torch.tensor([1]), table[:, 0])


def test_refusals() -> None:
    logits = torch.randn(T, 16)
    with pytest.raises(MegaMoEValueError, match=r"family: expected one of deepseek_v2, .* got 'mixtral'"):
        route_family(logits, small(), "mixtral")
    with pytest.raises(MegaMoEValueError, match=r"logits: expected \[T, E = 16\]"):
        route_family(logits[:, :8], small(), "qwen3_moe")
    with pytest.raises(MegaMoEValueError, match=r"topk_ids: expected \[T = 37, K = 4\]"):
        route_family(logits, small(), "qwen3_moe", topk_ids=torch.zeros(T, 3, dtype=torch.int64))
    with pytest.raises(MegaMoEValueError, match=r"token_mask: expected \[T = 37\]"):
        route_family(logits, small(), "qwen3_moe", token_mask=torch.ones(T - 1, dtype=torch.bool))
    with pytest.raises(MegaMoEValueError, match=r"correction_bias: expected None in the family qwen3_moe"):
        route_family(logits, small(), "qwen3_moe", correction_bias=torch.zeros(16))
    with pytest.raises(MegaMoEValueError, match=r"correction_bias: expected \[E = 16\]"):
        route_family(logits, small(), "deepseek_v4", correction_bias=torch.zeros(15))
    with pytest.raises(MegaMoETypeError, match=r"logits: expected fp32, got torch.bfloat16"):
        route_family(logits.bfloat16(), small(), "qwen3_moe")
    with pytest.raises(MegaMoETypeError, match=r"correction_bias: expected fp32"):
        route_family(logits, small(), "deepseek_v4", correction_bias=torch.zeros(16).bfloat16())
    with pytest.raises(MegaMoETypeError, match=r"token_mask: expected bool"):
        route_family(logits, small(), "qwen3_moe", token_mask=torch.ones(T))
    with pytest.raises(MegaMoETypeError, match=r"topk_ids: expected int32 or int64"):
        route_family(logits, small(), "qwen3_moe", topk_ids=torch.zeros(T, 4, dtype=torch.int16))


def test_config_refusals() -> None:
    with pytest.raises(MegaMoEValueError, match=r"config.norm_topk_prob: expected False, got True"):
        MoEConfig.from_hf(transformers.DeepseekV2Config(norm_topk_prob=True, num_experts_per_tok=6))
    with pytest.raises(MegaMoEValueError, match=r"config.scoring_func: expected 'sqrtsoftplus', got 'sigmoid'"):
        MoEConfig.from_hf(transformers.DeepseekV4Config(scoring_func="sigmoid"))
    with pytest.raises(MegaMoEValueError, match=r"config.n_routed_experts: expected a value, got none"):
        MoEConfig.from_hf({"model_type": "qwen3_moe", "hidden_size": 8, "moe_intermediate_size": 8})
    with pytest.raises(MegaMoEValueError, match=r"family: expected one of deepseek_v2, .*, got mixtral"):
        small(family="mixtral")
    with pytest.raises(MegaMoEValueError, match=r"hash_vocab_size: expected 0 or more, got -1"):
        small(hash_vocab_size=-1)
    assert set(FAMILIES) == set(ROUTER_FAMILIES)


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("DeepseekV2Config", "deepseek_v2"),
        ("DeepseekV3Config", "deepseek_v3"),
        ("DeepseekV4Config", "deepseek_v4"),
        ("Qwen3MoeConfig", "qwen3_moe"),
        ("Glm4MoeConfig", "deepseek_v3"),
    ],
)
def test_config_object_and_its_json_say_the_same(name: str, family: str) -> None:
    config = getattr(transformers, name)(num_experts_per_tok=6)
    assert MoEConfig.from_hf(config) == MoEConfig.from_hf(config.to_dict())
    assert MoEConfig.from_hf(config).family == family


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
def test_compiles_without_a_break(family: str) -> None:
    logits, mask = torch.randn(T, 16), torch.arange(T) % 3 != 0

    def routed(logits: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        result = route_family(logits, small(), family, token_mask=mask)
        return result.topk_ids, result.topk_weights

    compiled = torch.compile(routed, fullgraph=True, backend="aot_eager")(logits, mask)
    assert all(torch.equal(a, b) for a, b in zip(compiled, routed(logits, mask), strict=True))
