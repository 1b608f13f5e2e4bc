"""MoEConfig: what it accepts, what it refuses by name, and what it reads from Hugging Face configs."""

import dataclasses

import pytest

from megamoe import MoEConfig
from megamoe.errors import MegaMoETypeError, MegaMoEValueError

GOOD = dict(hidden_size=64, intermediate_size=32, num_experts=8, top_k=2)


def test_is_frozen_and_hashable():
    config = MoEConfig(**GOOD)
    assert hash(config) == hash(MoEConfig(**GOOD))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.top_k = 3


@pytest.mark.parametrize(
    ("field", "value", "match"),
    [
        ("hidden_size", 0, "hidden_size: expected a positive"),
        ("intermediate_size", -1, "intermediate_size: expected a positive"),
        ("num_experts", 513, "num_experts: expected 1 to 512, got 513"),
        ("num_experts", 0, "num_experts: expected 1 to 512, got 0"),
        ("top_k", 0, "top_k: expected 1 to 8, got 0"),
        ("top_k", 9, "top_k: expected 1 to 8, got 9"),
        ("num_groups", 3, "num_groups: expected a divisor of num_experts = 8, got 3"),
        ("num_groups", 0, "num_groups: expected a divisor"),
        ("topk_groups", 2, "topk_groups: expected at most num_groups = 1"),
        ("num_shared_experts", -1, "num_shared_experts: expected 0 or more"),
        ("clamp", 0.0, "clamp: expected a positive finite limit"),
        ("clamp", float("inf"), "clamp: expected a positive finite limit"),
        ("routed_scaling_factor", float("nan"), "routed_scaling_factor: expected a finite number, got nan"),
        ("initializer_range", -1.0, "initializer_range: expected 0 or a positive finite number, got -1.0"),
    ],
)
def test_refuses(field, value, match):
    with pytest.raises(MegaMoEValueError, match=match):
        MoEConfig(**{**GOOD, field: value})


@pytest.mark.parametrize(
    ("field", "value", "match"),
    [
        ("hidden_size", 128.0, "hidden_size: expected an integer, got 128.0"),
        ("top_k", None, "top_k: expected an integer, got None"),
        ("num_experts", "8", "num_experts: expected an integer, got '8'"),
        ("num_groups", True, "num_groups: expected an integer, got True"),
        ("routed_scaling_factor", "2.5", "routed_scaling_factor: expected a number, got '2.5'"),
        ("clamp", "7", "clamp: expected a number or None, got '7'"),
    ],
)
def test_refuses_types(field, value, match):
    with pytest.raises(MegaMoETypeError, match=match):
        MoEConfig(**{**GOOD, field: value})


def test_refuses_more_slots_than_the_chosen_groups_have_experts():
    with pytest.raises(MegaMoEValueError, match="topk_groups: .* at least top_k = 3 experts in the groups chosen"):
        MoEConfig(64, 32, num_experts=8, top_k=3, num_groups=4, topk_groups=1)


def test_names_all_violations_at_once():
    with pytest.raises(MegaMoEValueError) as error:
        MoEConfig(0, 0, 0, 0)
    assert all(name in str(error.value) for name in ("hidden_size", "intermediate_size", "num_experts", "top_k"))


def test_from_hf_deepseek_v3():
    transformers = pytest.importorskip("transformers")
    hf = transformers.DeepseekV3Config()
    want = MoEConfig(7168, 2048, 256, 8, 8, 4, True, 2.5, 1, None, 0.02)
    assert MoEConfig.from_hf(hf) == want
    assert MoEConfig.from_hf(hf.to_dict()) == want
    assert want.shared_intermediate_size == 2048


def test_from_hf_glm():
    transformers = pytest.importorskip("transformers")
    config = MoEConfig.from_hf(transformers.Glm4MoeConfig())
    assert (config.num_experts, config.num_groups, config.topk_groups, config.num_shared_experts) == (128, 1, 1, 1)


HF = {
    "model_type": "deepseek_v3",
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
}


def test_from_hf_keeps_the_clamp():
    assert MoEConfig.from_hf({**HF, "swiglu_limit": 10.0}).clamp == 10.0
    assert MoEConfig.from_hf(HF).clamp is None


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"model_type": "mixtral"}, "config.model_type: expected one of deepseek_v3.*got 'mixtral'"),
        ({"model_type": None}, "config.model_type"),
        ({"scoring_func": "softmax"}, "config.scoring_func: expected 'sigmoid', got 'softmax'"),
        ({"hidden_act": "gelu"}, "config.hidden_act: expected 'silu', got 'gelu'"),
        ({"topk_method": "greedy"}, "config.topk_method: expected 'noaux_tc'"),
    ],
)
def test_from_hf_refuses(change, match):
    with pytest.raises(MegaMoEValueError, match=match):
        MoEConfig.from_hf({**HF, **change})


def test_from_hf_takes_null_for_the_default_and_names_what_is_no_number():
    null = MoEConfig.from_hf({**HF, "routed_scaling_factor": None, "initializer_range": None})
    assert (null.routed_scaling_factor, null.initializer_range) == (1.0, 0.02)
    with pytest.raises(MegaMoETypeError, match="routed_scaling_factor: expected a number, got 'twice'"):
        MoEConfig.from_hf({**HF, "routed_scaling_factor": "twice"})
    with pytest.raises(MegaMoETypeError, match="norm_topk: expected True or False, got 'no'"):
        MoEConfig(64, 32, 8, 2, norm_topk="no")


def test_from_hf_names_a_missing_field():
    with pytest.raises(MegaMoEValueError, match="config.moe_intermediate_size: expected a value"):
        MoEConfig.from_hf({k: v for k, v in HF.items() if k != "moe_intermediate_size"})


@pytest.mark.parametrize("value, want", [(True, True), (False, False), (0, False), (None, True)])
def test_flags_of_a_config(value, want):
    names = {"n_routed_experts": 8, "num_experts_per_tok": 2, "hidden_size": 64, "moe_intermediate_size": 32}
    config = {"model_type": "deepseek_v3", "norm_topk_prob": value} | names
    assert MoEConfig.from_hf(config).norm_topk is want
    with pytest.raises(MegaMoETypeError, match="norm_topk: expected True or False, got 'false'"):
        MoEConfig.from_hf(config | {"norm_topk_prob": "false"})
    with pytest.raises(MegaMoEValueError, match=r"config.model_type: expected one of .*, got \['deepseek_v3'\]"):
        MoEConfig.from_hf(config | {"model_type": ["deepseek_v3"]})
