"""transformers' experts interface: tiny models of each family on our implementations against the eager path."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", minversion="5")

import transformers
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS, FP8Experts
from transformers.integrations.moe import use_experts_implementation

from megamoe import weights
from megamoe.errors import BackendUnavailable, MegaMoERuntimeError, MegaMoETypeError, MegaMoEValueError
from megamoe.gates import sqnr_db
from megamoe.integrations import transformers as integration
from megamoe.integrations.transformers_experts import activation_limit, find_refusals
from megamoe.quantize import QuantizedWeight, quantize_weight
from megamoe.recipe import Recipe
from tests.support.compare import assert_bitwise
from tests.support.distributed import run_ranks
from tests.support.tiny_models import (
    FAMILIES,
    INTER,
    LEAST_DB,
    E,
    H,
    assert_close,
    config_of,
    make_model,
    tokens,
    train_step,
    with_bf16_experts,
)


@pytest.fixture(autouse=True)
def registered() -> None:
    integration.register(backend="torch")


@pytest.mark.parametrize("name", ["megamoe", "megamoe_fp8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_all_gradients_of_a_step(family: str, name: str) -> None:
    model = make_model(family)
    ours = with_bf16_experts(model) if name == "megamoe" else copy.deepcopy(model)
    ours.set_experts_implementation(name)
    assert len(integration.prepare(ours)) == 1
    precision = "bf16" if name == "megamoe" else "fp8"
    assert_close(train_step(ours, tokens()), train_step(model, tokens()), LEAST_DB[precision])


@pytest.mark.parametrize("family", FAMILIES)
def test_generate(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of every step as long as the tokens before are the same, and copies of the weights made once."""
    model = make_model(family)
    ours = copy.deepcopy(model)
    ours.set_experts_implementation("megamoe_fp8")
    made = []
    original = weights.make_copy
    monkeypatch.setattr(weights, "make_copy", lambda *a, **k: made.append(1) or original(*a, **k))
    options: dict[str, Any] = dict(max_new_tokens=4, do_sample=False, return_dict_in_generate=True, output_logits=True)
    want, got = model.generate(tokens(), **options), ours.generate(tokens(), **options)
    compared = 0
    for step, (a, b) in enumerate(zip(got.logits, want.logits, strict=True)):
        length = tokens().shape[1] + step
        same = (got.sequences[:, :length] == want.sequences[:, :length]).all(1)
        if same.any():
            assert sqnr_db(a[same], b[same]) >= LEAST_DB["fp8"]
            compared += 1
    assert compared >= 2
    assert len(made) == 2  # w13 and w2 of the one MoE layer


def test_from_pretrained(tmp_path: Any) -> None:
    model = make_model("qwen3_moe").bfloat16()
    model.save_pretrained(tmp_path)
    load = transformers.AutoModelForCausalLM.from_pretrained
    ours = load(tmp_path, dtype=torch.bfloat16, experts_implementation="megamoe")
    eager = load(tmp_path, dtype=torch.bfloat16, experts_implementation="eager")
    assert ours.config._experts_implementation == "megamoe"
    with torch.no_grad():
        got, want = ours(tokens()).logits, eager(tokens()).logits
    assert sqnr_db(got.float(), want.float()) > 35  # both round everywhere
    assert not torch.equal(got, want)  # it is another computation


# ---------------------------------------------------------------- one experts module


def make_experts(family: str = "qwen3_moe", **change: Any) -> Any:
    """An experts module of transformers with bf16 weights, on our implementation."""
    config = config_of(family)
    for name, value in change.items():
        setattr(config, name, value)
    config._experts_implementation = "megamoe"
    block = next(m for m in make_model(family).modules() if hasattr(m, "has_gate"))
    experts = type(block)(config)
    experts.load_state_dict(block.state_dict())
    return experts.bfloat16()


def routed(num_experts: int = E, top_k: int = 2, count: int = 17) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(3)
    x = torch.randn(count, H, generator=gen).bfloat16()
    ids = torch.rand(count, num_experts, generator=gen).argsort(1)[:, :top_k]
    return x, ids, torch.rand(count, top_k, generator=gen)


def run(experts: Any, name: str, x: torch.Tensor, ids: torch.Tensor, p: torch.Tensor) -> dict[str, torch.Tensor]:
    experts.config._experts_implementation = name
    experts.zero_grad()
    x, p = x.clone().requires_grad_(), p.clone().requires_grad_()
    out = experts(x, ids, p)
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(out.dtype))
    grads = {n: w.grad.float() for n, w in experts.named_parameters() if w.grad is not None}
    return {"out": out.detach().float(), "x": x.grad.float(), "p": p.grad, **grads}


def test_experts_of_other_ranks_add_nothing_and_get_no_gradient() -> None:
    """transformers' expert parallelism gives them the id `num_experts` and the weight 0."""
    experts = make_experts()
    experts._is_expert_parallel = True
    x, ids, p = routed()
    ids[::3, 1] = E
    ids[0] = E
    p = p.masked_fill(ids == E, 0.0)
    reference = copy.deepcopy(experts).float()
    got = run(experts, "megamoe", x, ids, p)
    want = run(reference, "eager", x.float(), ids.masked_fill(ids == E, 0), p)
    assert not got["p"][ids == E].any() and not got["out"][0].any() and not got["x"][0].any()
    want["p"] = want["p"].masked_fill(ids == E, 0.0)
    assert_close(got, want, LEAST_DB["bf16"])


def test_without_expert_parallelism_such_an_id_is_an_error() -> None:
    if not hasattr(make_experts(), "_is_expert_parallel"):
        pytest.skip("this transformers does not say which modules are expert-parallel")
    x, ids, p = routed()
    ids[0, 0] = E
    with pytest.raises(MegaMoEValueError, match="topk_ids"):
        make_experts()(x, ids, p)


@pytest.mark.parametrize(
    ("flag", "value", "match"),
    [
        ("has_gate", False, "has_gate: expected True: experts with a gate projection, got False"),
        ("has_bias", True, "has_bias: expected False: experts without biases, got True"),
        ("is_transposed", True, r"is_transposed: expected False: weights \[E, out, in\], got True"),
        ("is_concatenated", False, "is_concatenated: expected True: gate rows first.*, got False"),
        ("has_post_expert_norm", True, "has_post_expert_norm: expected False: no norm behind the experts, got True"),
    ],
)
def test_flags_that_are_not_computed_are_refused(flag: str, value: bool, match: str) -> None:
    experts = make_experts()
    setattr(experts, flag, value)
    with pytest.raises(MegaMoEValueError, match=rf"experts\.{match}"):
        experts(*routed())


def test_gpt_oss_is_refused_with_every_reason() -> None:
    config = transformers.GptOssConfig(
        vocab_size=32,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_local_experts=4,
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.set_experts_implementation("megamoe")
    with pytest.raises(MegaMoEValueError) as error:
        integration.prepare(model)
    for flag in ("has_bias", "is_transposed", "is_concatenated"):
        assert f"model.layers.0.mlp.experts.{flag}: " in str(error.value)


@pytest.mark.parametrize("act", ["gelu", "relu2", "gelu_pytorch_tanh"])
def test_other_activations_are_refused(act: str) -> None:
    experts = make_experts(hidden_act=act)
    with pytest.raises(MegaMoEValueError, match=r"_apply_gate: expected silu\(gate\) \* up, .*, got other values"):
        experts(*routed())


def scaled_gate(self: Any, gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def limited_silently(self: Any, gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate.clamp(max=30.0)) * up.clamp(-30.0, 30.0)


def with_parameters(self: Any, gate_up: torch.Tensor) -> torch.Tensor:
    return gate_up @ torch.ones(2 * INTER, INTER)


@pytest.mark.parametrize(
    ("gate", "got"), [(scaled_gate, "other values"), (limited_silently, "other values"), (with_parameters, "Runtime")]
)
def test_custom_gates_are_refused(gate: Any, got: str) -> None:
    experts = make_experts()
    experts._apply_gate = gate.__get__(experts)
    with pytest.raises(MegaMoEValueError, match=f"_apply_gate: expected .*got {got}"):
        experts(*routed())


def test_the_limit_of_deepseek_v4_is_found_and_kept() -> None:
    experts = make_experts("deepseek_v4")
    assert activation_limit(experts) == 6.0
    x, ids, p = routed()
    got = run(experts, "megamoe", 20 * x, ids, p)
    want = run(copy.deepcopy(experts).float(), "eager", 20 * x.float(), ids, p)
    assert sqnr_db(got["out"], want["out"]) > LEAST_DB["bf16"]
    assert activation_limit(make_experts("qwen3_moe")) is None


def test_fp32_weights_are_not_silently_computed_in_bf16() -> None:
    experts = make_experts().float()
    x, ids, p = routed()
    with pytest.raises(MegaMoETypeError, match="gate_up_proj: expected bf16 or FP8 weights, .*got torch.float32"):
        experts(x, ids, p)
    with torch.autocast("cpu", torch.bfloat16):
        cast = experts(x, ids, p)
    assert_bitwise(cast, make_experts()(x, ids, p), "out")
    with torch.autocast("cpu", torch.float16), pytest.raises(MegaMoETypeError, match="gate_up_proj"):
        experts(x, ids, p)


def test_cast_after_the_first_call() -> None:
    experts = make_experts()
    x, ids, p = routed()
    experts.config._experts_implementation = "megamoe_fp8"
    want = experts(x, ids, p)
    assert_bitwise(experts.float()(x, ids, p), want, "the same values in fp32")


# ---------------------------------------------------------------- FP8 experts


def make_fp8_experts(scale_fmt: str = "float", config: Any = None, block: Any = (128, 128)) -> tuple[Any, Any, Any]:
    config = config_of("qwen3_moe") if config is None else config
    config._experts_implementation = "megamoe"
    made = type("Experts", (FP8Experts,), {})
    made = use_experts_implementation(experts_class=made, experts_interface=ALL_FP8_EXPERTS_FUNCTIONS)
    experts = made(config, block_size=block, scale_fmt=scale_fmt)
    gen = torch.Generator().manual_seed(2)
    recipe = Recipe(scale_format="pow2" if scale_fmt == "ue8m0" else "fp32")
    w13 = quantize_weight(torch.randn(E, 2 * INTER, H, generator=gen) / H**0.5, recipe, 2)
    w2 = quantize_weight(torch.randn(E, H, INTER, generator=gen) / INTER**0.5, recipe)
    with torch.no_grad():
        for name, value in (("gate_up_proj", w13), ("down_proj", w2)):
            getattr(experts, name).data = value.data
            scale = getattr(experts, f"{name}_scale_inv")
            scale.data = value.scale.to(scale.dtype)
    return experts, w13, w2


def dequantized(weight: QuantizedWeight) -> torch.Tensor:
    return weight.dequantize(torch.float32)


@pytest.mark.parametrize("scale_fmt", ["float", "ue8m0"])
@pytest.mark.parametrize("name", ["megamoe", "megamoe_fp8"])
def test_fp8_experts_compute_in_fp8(scale_fmt: str, name: str) -> None:
    experts, w13, w2 = make_fp8_experts(scale_fmt)
    plain = make_experts().float()
    with torch.no_grad():
        plain.gate_up_proj.copy_(dequantized(w13))
        plain.down_proj.copy_(dequantized(w2))
    x, ids, p = routed()
    got, want = run(experts, name, x, ids, p), run(plain, "eager", x.float(), ids, p)
    assert_close(got, {key: want[key] for key in got}, LEAST_DB["fp8"])
    assert "gate_up_proj" not in got  # frozen, though its requires_grad is set, as transformers leaves it
    assert experts.gate_up_proj.requires_grad


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"block_size": (64, 128)}, r"block_size: expected \(128, 128\), got \(64, 128\)"),
        ({"block_size": None}, r"block_size: expected \(128, 128\), got None"),
        ({"activation_scheme": "static"}, "activation_scheme: expected 'dynamic', got 'static'"),
    ],
)
def test_other_fp8_formats_are_refused(change: dict[str, Any], match: str) -> None:
    experts, _, _ = make_fp8_experts()
    for name, value in change.items():
        setattr(experts, name, value)
    with pytest.raises(MegaMoEValueError, match=match):
        experts(*routed())


def test_fp8_blocks_that_hold_gate_and_up_rows_are_refused() -> None:
    experts, _, _ = make_fp8_experts()
    experts.down_proj.data = experts.down_proj.data[..., :96]
    assert "down_proj.shape[2]: expected a multiple of 128" in find_refusals(experts)[0]


def test_packed_fp4_is_refused() -> None:
    experts, _, _ = make_fp8_experts()
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(experts, name)
        setattr(experts, name, nn.Parameter(weight.data.view(torch.int8), requires_grad=False))
    with pytest.raises(MegaMoEValueError, match=r"gate_up_proj, down_proj: expected bf16.*got torch.int8"):
        experts(*routed())


# ---------------------------------------------------------------- copies, compile, ranks


def test_steps_and_loads_reach_the_copies_kept_in_eval() -> None:
    experts = make_experts().eval()
    experts.config._experts_implementation = "megamoe_fp8"
    x, ids, p = routed()
    with torch.no_grad():
        first = experts(x, ids, p)
        assert_bitwise(experts(x, ids, p), first, "twice")
        experts.down_proj.mul_(2)
        doubled = experts(x, ids, p)
        assert_bitwise(doubled, 2 * first, "a write that torch sees")
        experts.down_proj.data = experts.down_proj.data.clone()
        experts.down_proj.data.mul_(2)
        integration.refresh(experts)
        assert_bitwise(experts(x, ids, p), 4 * first, "after refresh")
    optimizer = torch.optim.AdamW(experts.parameters(), lr=0.1, fused=True)
    experts.train()
    experts(x, ids, p).sum().backward()
    optimizer.step()
    with torch.no_grad():
        stepped = experts.eval()(x, ids, p)
    assert not torch.equal(stepped, 4 * first)


def test_copies_of_a_model_are_independent() -> None:
    experts = make_experts()
    x, ids, p = routed()
    want = experts(x, ids, p)
    for copied in (copy.deepcopy(experts), pickle.loads(pickle.dumps(experts))):
        assert copied._megamoe is None
        assert_bitwise(copied(x, ids, p), want, "out")
        assert copied._megamoe.context.handle != experts._megamoe.context.handle


def test_compiled_without_graph_breaks_and_for_any_number_of_tokens() -> None:
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    experts = make_experts()
    counter = CompileCounter()
    compiled = torch.compile(experts, fullgraph=True, dynamic=True, backend=counter)
    with pytest.raises(Exception, match=r"prepare\(model\)|prepared before torch.compile"):
        compiled(*routed())
    integration.prepare(experts)
    for count in (17, 33, 64):
        args = routed(count=count)
        assert_bitwise(compiled(*args), experts(*args), f"{count} tokens")
    assert counter.frame_count <= 2
    torch._dynamo.reset()


def expert_parallel_case(rank: int) -> dict[str, torch.Tensor]:
    """Experts sharded over two ranks, as transformers does it: DTensors outside its region, local ones inside."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    integration.register(backend="torch")
    mesh = init_device_mesh("cpu", (2,))
    experts = make_experts()
    whole = {name: p.detach().clone() for name, p in experts.named_parameters()}
    for name, weight in whole.items():
        setattr(experts, name, nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)])))
    experts.num_experts, experts._is_expert_parallel = E // 2, True
    x, ids, p = routed()
    with pytest.raises(MegaMoETypeError, match="gate_up_proj, down_proj: expected plain tensors, got DTensors"):
        experts(x, ids, p)
    away = ids // (E // 2) != rank
    local = torch.where(away, E // 2, ids % (E // 2))
    sharded = dict(experts.named_parameters())
    experts._parameters.update({name: parameter.to_local() for name, parameter in sharded.items()})
    out = experts(x, local, p.masked_fill(away, 0.0))
    out.float().sum().backward()
    grads = {name: parameter.grad.full_tensor() for name, parameter in sharded.items()}
    total = out.detach().float()
    torch.distributed.all_reduce(total)
    return {"out": total, **grads}


def test_transformers_expert_parallelism() -> None:
    experts = make_experts()
    x, ids, p = routed()
    out = experts(x, ids, p)
    out.float().sum().backward()
    for result in run_ranks(expert_parallel_case, 2):
        assert sqnr_db(result["out"], out.detach().float()) > LEAST_DB["bf16"]
        for name, parameter in experts.named_parameters():
            assert_bitwise(result[name], parameter.grad, name)


# ---------------------------------------------------------------- registering


def test_a_backend_by_name_is_used_or_refused() -> None:
    with pytest.raises(MegaMoEValueError, match="backend: expected 'auto' or one of"):
        integration.register(backend="fast")  # type: ignore[arg-type]
    integration.register(backend="cute")
    with pytest.raises(BackendUnavailable, match="backend: 'cute' does not run this"):
        make_experts()(*routed())


def test_registering_again_changes_what_runs() -> None:
    experts = make_experts()
    x, ids, p = routed()
    want = experts(x, ids, p)
    integration.register(backend="torch", save="recompute", debug=True)
    assert_bitwise(experts(x, ids, p), want, "out")
    assert experts._megamoe.context.shapes.save == "recompute"


def test_prepare_before_register_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = make_experts()
    for interface in integration._interfaces():
        for name in integration.NAMES:
            monkeypatch.delitem(type(interface)._global_mapping, name)
    with pytest.raises(MegaMoERuntimeError, match="experts_implementation: expected a registered one, got 'megamoe'"):
        integration.prepare(experts)


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers.integrations.moe", None)
    with pytest.raises(MegaMoERuntimeError, match="transformers: expected a version 5 with its experts interface"):
        integration.register()
