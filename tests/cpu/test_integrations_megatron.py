"""Megatron-Core's conventions: results, where gradients go and when, what a checkpoint sees, what is refused."""

from __future__ import annotations

import copy
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megamoe import mega_moe
from megamoe.context import MoEContext
from megamoe.errors import MegaMoERuntimeError, MegaMoETypeError, MegaMoEValueError
from megamoe.integrations.grouped import expert_of_rows
from megamoe.integrations.megatron import GroupedExperts
from megamoe.recipe import Recipe
from tests.support.compare import assert_bitwise
from tests.support.distributed import run_ranks
from tests.support.megatron_conventions import DataParallel, Group, TransformerConfig, modules

COUNTS = [5, 0, 17, 2]


def make(recipe: Recipe | None = None, save: Any = "pool", **fields: Any) -> GroupedExperts:
    torch.manual_seed(0)
    return GroupedExperts(len(COUNTS), TransformerConfig(**fields), recipe=recipe, backend="torch", save=save)


def batch(seed: int = 1, rows: int = sum(COUNTS)) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 128, generator=gen).bfloat16().requires_grad_()
    probs = torch.rand(rows, generator=gen).requires_grad_()
    return x, probs, torch.randn(rows, 128, generator=gen).bfloat16()


def step(experts: GroupedExperts, seed: int = 1) -> dict[str, torch.Tensor]:
    x, probs, dout = batch(seed)
    out, bias = experts(x, torch.tensor(COUNTS), probs)
    assert bias is None
    out.backward(dout)
    assert x.grad is not None and probs.grad is not None
    return {"out": out.detach(), "x": x.grad, "probs": probs.grad}


def one_by_one(experts: GroupedExperts, seed: int = 1) -> dict[str, torch.Tensor]:
    """Each expert by itself on its rows: `mega_moe` with one expert."""
    x, probs, dout = batch(seed)
    parts: dict[str, list[torch.Tensor]] = {"out": [], "x": [], "probs": [], "w13": [], "w2": []}
    context, at = MoEContext(experts.context.recipe, backend="torch"), 0
    for e, count in enumerate(COUNTS):
        rows = slice(at, at + count)
        at += count
        leaves = [t.detach()[rows].clone().requires_grad_() for t in (x, probs)]
        weights = [w.detach()[e : e + 1].clone().requires_grad_() for w in (experts.w13, experts.w2)]
        ids = torch.zeros(count, 1, dtype=torch.int64)
        out = mega_moe(leaves[0], ids, leaves[1][:, None], *weights, context=context)
        out.backward(dout[rows])
        for name, value in zip(parts, (out.detach(), *(t.grad for t in (*leaves, *weights))), strict=True):
            assert value is not None
            parts[name].append(value)
    return {name: torch.cat(values) for name, values in parts.items()}


@pytest.mark.parametrize("recipe", [Recipe(), Recipe("bf16")], ids=["fp8", "bf16"])
def test_each_expert_sees_its_rows(recipe: Recipe) -> None:
    experts = make(recipe)
    got, want = step(experts), one_by_one(experts)
    got |= {"w13": experts.w13.grad, "w2": experts.w2.grad}
    for name, value in want.items():
        assert_bitwise(got[name], value, name)


def test_counts_may_be_a_list_and_rows_behind_the_last_expert_give_zeros() -> None:
    experts = make()
    x, probs, _ = batch(rows=sum(COUNTS) + 6)
    out, _ = experts(x, COUNTS, probs)
    assert not out[sum(COUNTS) :].any()
    assert_bitwise(out[: sum(COUNTS)], experts(x[: sum(COUNTS)], torch.tensor(COUNTS), probs[: sum(COUNTS)])[0], "out")
    assert expert_of_rows(torch.tensor([2, 0, 1]), 5)[:, 0].tolist() == [0, 0, 2, -1, -1]
    assert expert_of_rows(torch.tensor([0, 0]), 0).shape == (0, 1)


@pytest.mark.parametrize("save", ["pool", "repull", "recompute"])
def test_delayed_weight_gradients_have_the_bits_of_the_others(save: Any) -> None:
    plain, delayed = make(), make(save=save, delay_wgrad_compute=True)
    want = [step(plain, seed) for seed in (1, 2)]
    got = [step(delayed, seed) for seed in (1, 2)]
    for a, b in zip(got, want, strict=True):
        for name in b:
            assert_bitwise(a[name], b[name], name)
    assert delayed.w13.grad is None and delayed.w2.grad is None
    delayed.backward_dw()
    for name in ("w13", "w2"):
        assert_bitwise(getattr(delayed, name).grad, getattr(plain, name).grad, name)
    with pytest.raises(MegaMoERuntimeError, match="backward_dw: expected a backward before each call, got none"):
        delayed.backward_dw()


def test_weights_may_change_between_a_backward_and_its_delayed_part() -> None:
    plain, delayed = make(), make(delay_wgrad_compute=True)
    step(plain)
    step(delayed)
    with torch.no_grad():
        delayed.w2.zero_()
        delayed.w13.zero_()
    delayed.backward_dw()
    assert_bitwise(delayed.w13.grad, plain.w13.grad, "w13")


def test_without_delay_backward_dw_does_nothing() -> None:
    experts = make()
    step(experts)
    before = experts.w13.grad
    experts.backward_dw()
    assert experts.w13.grad is before


@pytest.mark.parametrize("delays", [False, True])
def test_main_grad_gets_fp32_sums_and_the_hooks_run_when_they_are_there(delays: bool) -> None:
    experts = make(delay_wgrad_compute=delays)
    wrapper = DataParallel(experts, delays)
    exact = make(params_dtype=torch.float32)  # the same weights, so gradients are not rounded to bf16
    with torch.no_grad():
        exact.w13.copy_(experts.w13)
        exact.w2.copy_(experts.w2)
    for seed in (1, 2):
        step(experts, seed)
        if delays:
            assert not wrapper.ready or seed == 2
            experts.backward_dw()
        step(exact, seed)
    assert sorted(wrapper.ready) == ["w13", "w13", "w2", "w2"]
    for name in ("w13", "w2"):
        weight: Any = getattr(experts, name)
        assert weight.grad is None and weight.grad_added_to_main_grad
        assert_bitwise(weight.main_grad, getattr(exact, name).grad, name)


def test_main_grad_without_a_wrapper_leaves_grad_alone() -> None:
    experts = make(delay_wgrad_compute=True)
    for weight in (experts.w13, experts.w2):
        weight.main_grad = torch.zeros(weight.shape)  # type: ignore[attr-defined]
    step(experts)
    experts.backward_dw()
    assert experts.w13.grad is None and experts.w13.main_grad.any()  # type: ignore[attr-defined]


def test_marks() -> None:
    groups = SimpleNamespace(ep=Group(1, 2), expt_dp=Group(3, 4))
    spread = GroupedExperts(4, TransformerConfig(expert_model_parallel_size=2), None, groups)
    alone = make(delay_wgrad_compute=True)
    for a, b in ((spread.w13, alone.w13), (spread.w2, alone.w2)):
        assert a.allreduce is False and b.allreduce is True  # type: ignore[attr-defined]
        assert not hasattr(a, "skip_backward_post_hook") and b.skip_backward_post_hook  # type: ignore[attr-defined]


def test_the_sharded_state_dict_has_global_expert_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    config = TransformerConfig(expert_model_parallel_size=2)
    experts = GroupedExperts(4, config, None, SimpleNamespace(ep=Group(1, 2), expt_dp=Group(3, 4)))
    found = experts.sharded_state_dict("decoder.mlp.experts.", ((0, 5, 9),))
    assert sorted(found) == ["decoder.mlp.experts.w13", "decoder.mlp.experts.w2"]
    w13 = found["decoder.mlp.experts.w13"]
    assert w13.key == "decoder.mlp.experts.w13" and w13.replica_id == (0, 0, 3)
    assert w13.global_shape == (9, 2 * 4, 128, 128) and w13.offsets == ((0, 5, 9), (1, 1, 2))
    assert w13.data.data_ptr() == experts.w13.data_ptr()
    experts.load_state_dict({name.removeprefix("decoder.mlp.experts."): t.data for name, t in found.items()})


def test_megatron_core_itself_takes_the_shards() -> None:
    checkpointing = pytest.importorskip("megatron.core.dist_checkpointing")
    groups = SimpleNamespace(ep=Group(1, 2), expt_dp=Group(0, 1))
    experts = GroupedExperts(4, TransformerConfig(expert_model_parallel_size=2), None, groups)
    shard = experts.sharded_state_dict("mlp.")["mlp.w2"]
    assert isinstance(shard, checkpointing.ShardedTensor)
    assert shard.global_shape == (8, 128, 64) and shard.global_offset == (4, 0, 0)


def test_without_megatron_core_a_sharded_state_dict_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron.core.dist_checkpointing", None)
    with pytest.raises(MegaMoERuntimeError, match="sharded_state_dict: expected megatron-core, .*pip install"):
        make().sharded_state_dict()


def test_the_methods_of_the_config_initialise() -> None:
    experts = make(init_method=lambda w: w.fill_(2), output_layer_init_method=lambda w: w.fill_(3))
    assert (experts.w13 == 2).all() and (experts.w2 == 3).all()
    assert make(moe_ffn_hidden_size=None).w2.shape == (4, 128, 256)


def test_frozen_and_copied() -> None:
    experts = make(delay_wgrad_compute=True)
    copied = copy.deepcopy(experts)
    want = step(experts)["out"]
    assert_bitwise(step(copied)["out"], want, "a copy")
    experts.w13.requires_grad_(False)
    assert_bitwise(step(experts)["out"], want, "one frozen")
    experts.backward_dw()
    copied.backward_dw()
    assert_bitwise(experts.w2.grad, 2 * copied.w2.grad, "two steps")
    assert experts.w13.grad is None or not experts.w13.requires_grad
    experts.w2.requires_grad_(False)
    assert_bitwise(step(experts)["out"], want, "frozen")


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"gated_linear_unit": False}, "config.gated_linear_unit: expected True: SwiGLU, got False"),
        ({"add_bias_linear": True}, "config.add_bias_linear: expected False"),
        ({"glu_linear_offset": 1.0}, "config.glu_linear_offset: expected 0.0"),
        ({"moe_apply_probs_on_input": True}, "config.moe_apply_probs_on_input: expected False"),
        ({"expert_tensor_parallel_size": 2}, "config.expert_tensor_parallel_size: expected 1"),
        ({"activation_func": torch.nn.functional.gelu}, "config.activation_func: expected torch.nn.functional.silu"),
        ({"expert_model_parallel_size": 2}, "pg_collection: expected process groups with `ep`"),
    ],
)
def test_refuses(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(MegaMoEValueError, match=match):
        make(**fields)


def test_the_clamp_of_the_config_is_kept() -> None:
    assert make(activation_func_clamp_value=7.0).context.recipe.clamp == 7.0
    with pytest.raises(MegaMoEValueError, match="recipe.clamp: expected config.activation_func_clamp_value = 7.0"):
        make(Recipe(), activation_func_clamp_value=7.0)


def test_refuses_other_rows() -> None:
    experts = make()
    x, probs, _ = batch()
    with pytest.raises(MegaMoEValueError, match=r"tokens_per_expert: expected \[4\], rows of each expert, got shape"):
        experts(x, COUNTS[:3], probs)
    with pytest.raises(MegaMoETypeError, match="tokens_per_expert: expected integers, got torch.float32"):
        experts(x, torch.tensor(COUNTS).float(), probs)
    with pytest.raises(MegaMoEValueError, match=r"permuted_probs: expected \[24\], one for each row"):
        experts(x, COUNTS, probs[1:])
    with pytest.raises(MegaMoEValueError, match=r"x: expected \[T, H = 128\]"):
        make(delay_wgrad_compute=True)(x[:, :64], COUNTS, probs)


def data_parallel_case(rank: int) -> list[dict[str, torch.Tensor]]:
    """Two micro-batches under megatron-core's own DistributedDataParallel, in every combination of its options."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig as MegatronConfig

    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    parallel_state.initialize_model_parallel()
    results = []
    for delays, overlaps in ((False, False), (False, True), (True, False), (True, True)):
        fields = TransformerConfig()
        config = MegatronConfig(
            num_layers=1,
            num_attention_heads=2,
            num_moe_experts=len(COUNTS),
            hidden_size=fields.hidden_size,
            moe_ffn_hidden_size=fields.moe_ffn_hidden_size,
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            add_bias_linear=False,
            params_dtype=torch.bfloat16,
            use_cpu_initialization=True,
        )
        wrapping = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=overlaps)
        config.delay_wgrad_compute = wrapping.delay_wgrad_compute = delays
        experts = GroupedExperts(len(COUNTS), config, backend="torch")
        experts.load_state_dict(make().state_dict())
        wrapped = DistributedDataParallel(config, wrapping, experts)
        for seed in (1, 2):
            x, probs, dout = batch(seed)
            wrapped(x, torch.tensor(COUNTS), probs)[0].backward(dout)
            experts.backward_dw()
        wrapped.finish_grad_sync()
        results.append({name: p.main_grad.clone() for name, p in experts.named_parameters()})
        assert experts.w13.grad is None
    return results


def test_megatron_core_itself_finds_the_gradients() -> None:
    pytest.importorskip("megatron.core.distributed")
    experts = make()
    DataParallel(experts, False)
    for seed in (1, 2):
        step(experts, seed)
    for found in run_ranks(data_parallel_case, 1)[0]:
        for name, parameter in experts.named_parameters():
            assert_bitwise(found[name], parameter.main_grad, name)
