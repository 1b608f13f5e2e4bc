"""`replace_moe`: whole blocks of tiny transformers models against the eager path, and blocks read from a checkpoint."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", minversion="5")

import transformers
from safetensors.torch import load_file, save_file

from checkpoints import convert_to_fp8
from megamoe.errors import MegaMoEValueError
from megamoe.gates import sqnr_db
from megamoe.integrations.transformers import MoEBlock, register, replace_moe
from megamoe.quantize import quantize_matrix
from megamoe.recipe import Recipe
from tests.support.tiny_models import FAMILIES, LEAST_DB, assert_close, config_of, make_model, tokens, train_step


def block_name(model: nn.Module) -> str:
    return next(name for name, m in model.named_modules() if name.endswith(".mlp") and hasattr(m, "experts"))


def in_the_names_of_transformers(step: dict[str, torch.Tensor], block: str) -> dict[str, torch.Tensor]:
    """Gradients of a replaced block under the names of the block that it replaces."""
    renamed = {}
    for name, value in step.items():
        name = name.replace("moe.experts.w13", "experts.gate_up_proj").replace("moe.experts.w2", "experts.down_proj")
        name = name.replace("moe.router.weight", "gate.weight")
        if name.endswith("moe.shared.w13"):
            gate, up = value[0].chunk(2)
            renamed[f"{block}.shared_experts.gate_proj.weight"] = gate
            renamed[f"{block}.shared_experts.up_proj.weight"] = up
        elif name.endswith("moe.shared.w2"):
            renamed[f"{block}.shared_experts.down_proj.weight"] = value[0]
        else:
            renamed[name] = value
    return renamed


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_all_gradients_of_a_step(family: str, precision: Any) -> None:
    model = make_model(family)
    ours, block = copy.deepcopy(model), block_name(model)
    limit = getattr(model.config, "swiglu_limit", None)
    assert replace_moe(ours, backend="torch", recipe=Recipe(precision, clamp=limit)) == [block]
    replaced: Any = ours.get_submodule(block)
    assert isinstance(replaced, MoEBlock) and replaced.moe.experts.w13.dtype == torch.float32
    got = in_the_names_of_transformers(train_step(ours, tokens()), block)
    assert_close(got, train_step(model, tokens()), LEAST_DB[precision])


@pytest.mark.parametrize("family", ["deepseek_v4_hash", "glm4_moe"])
def test_generate(family: str) -> None:
    model = make_model(family).bfloat16()
    ours = copy.deepcopy(model)
    replace_moe(ours, backend="torch", weights="fp8")
    assert not any(p.requires_grad for n, p in ours.named_parameters() if ".moe.experts." in n)
    options: dict[str, Any] = dict(max_new_tokens=3, do_sample=False, return_dict_in_generate=True, output_logits=True)
    got, want = ours.generate(tokens(), **options), model.generate(tokens(), **options)
    assert sqnr_db(got.logits[0], want.logits[0]) > LEAST_DB["fp8"]


def test_weights_are_taken_over_without_a_copy() -> None:
    model = make_model("qwen3_moe").bfloat16()
    experts = model.get_submodule(block_name(model)).experts
    experts.gate_up_proj.requires_grad_(False)
    where = experts.gate_up_proj.data_ptr()
    replaced: Any = model.get_submodule(replace_moe(model, backend="torch")[0])
    assert replaced.moe.experts.w13.data_ptr() == where and replaced.moe.weights == "bf16"
    assert not replaced.moe.experts.w13.requires_grad and replaced.moe.experts.w2.requires_grad
    assert not replaced.training  # as the block was


def test_an_fp8_checkpoint_goes_into_fp8_experts_and_the_model_needs_no_others(tmp_path: Path) -> None:
    model = make_model("deepseek_v3").bfloat16()
    model.save_pretrained(tmp_path / "bf16")
    convert_to_fp8(tmp_path / "bf16", tmp_path / "fp8", quantize_matrix)
    with torch.device("meta"):
        empty = transformers.AutoModelForCausalLM.from_config(model.config)
    name = replace_moe(empty, checkpoint=tmp_path / "fp8", backend="torch")[0]
    replaced: Any = empty.get_submodule(name)
    assert replaced.moe.experts.w13.dtype == torch.float8_e4m3fn and replaced.moe.experts.w13.device.type == "cpu"
    x = torch.randn(2, 9, model.config.hidden_size).bfloat16()
    with torch.no_grad():
        assert sqnr_db(replaced(x), model.get_submodule(name)(x)) > LEAST_DB["fp8"]
    rest = {n: p for n, p in model.state_dict().items() if not n.startswith(f"{name}.")}
    missing = empty.load_state_dict(rest, strict=False, assign=True).missing_keys
    assert all(n.startswith(f"{name}.moe.") for n in missing)


def test_transformers_own_loader_of_fp8_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its FP8 experts on our implementation, and taken over by `replace_moe`, byte for byte."""
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    # its own FP8 kernels need a GPU; ours don't, and here only experts are in FP8
    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda self, *args, **options: None)
    model = make_model("deepseek_v3").bfloat16()
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [n for n in tensors if ".mlp.experts." in n]:
        tensors[name], tensors[f"{name}_scale_inv"] = quantize_matrix(tensors[name].float())
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config, block = json.loads((tmp_path / "config.json").read_text()), block_name(model)
    others = ["lm_head", "model.layers.0", "model.layers.1.self_attn", f"{block}.shared_experts", f"{block}.gate"]
    scheme = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": others}
    config["quantization_config"] = {**scheme, "activation_scheme": "dynamic"}
    (tmp_path / "config.json").write_text(json.dumps(config))

    register(backend="torch")
    ours = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, experts_implementation="megamoe"
    )
    experts: Any = ours.get_submodule(block).experts
    assert experts.gate_up_proj.dtype == torch.float8_e4m3fn
    with torch.no_grad():
        want = model(tokens()).logits
        assert sqnr_db(ours(tokens()).logits, want) > LEAST_DB["fp8"]
    step = train_step(ours, tokens())  # transformers leaves requires_grad on FP8 weights
    assert "model.embed_tokens.weight" in step and not any(".experts." in name for name in step)
    ours.eval()
    stored = experts.gate_up_proj.detach().view(torch.uint8).clone()
    replace_moe(ours, backend="torch")
    moe: Any = ours.get_submodule(block).moe
    assert moe.weights == "fp8" and torch.equal(moe.experts.w13.view(torch.uint8), stored)
    with torch.no_grad():
        assert sqnr_db(ours(tokens()).logits, want) > LEAST_DB["fp8"]


# ---------------------------------------------------------------- refusals


def test_a_model_without_such_blocks() -> None:
    dense = nn.Module()
    dense.config = config_of("qwen3_moe")  # type: ignore[assignment]
    with pytest.raises(MegaMoEValueError, match="model: expected MoE blocks of transformers 5, got Module"):
        replace_moe(dense)


def test_router_logits_are_not_recorded() -> None:
    model = make_model("qwen3_moe")
    model.config.output_router_logits = True
    with pytest.raises(MegaMoEValueError, match="config.output_router_logits: expected False"):
        replace_moe(model)


def test_a_block_with_something_more() -> None:
    model = make_model("qwen3_moe")
    name = block_name(model)
    model.get_submodule(name).shared_expert_gate = nn.Linear(2, 2)
    with pytest.raises(MegaMoEValueError, match=rf"{name}.shared_expert_gate: expected no further part of a MoE block"):
        replace_moe(model)


def test_experts_that_compute_something_else() -> None:
    model = make_model("glm4_moe")
    model.get_submodule(block_name(model)).experts.has_bias = True
    with pytest.raises(MegaMoEValueError, match="mlp.experts.has_bias: expected False"):
        replace_moe(model)


def test_another_family() -> None:
    model = make_model("qwen3_moe")
    model.config.model_type = "mixtral"
    with pytest.raises(MegaMoEValueError, match="config.model_type: expected one of .*got 'mixtral'"):
        replace_moe(model)


def test_biases_of_shared_experts() -> None:
    model = make_model("deepseek_v3")
    shared = model.get_submodule(block_name(model)).shared_experts
    shared.up_proj.bias = nn.Parameter(torch.zeros(shared.up_proj.out_features))
    with pytest.raises(MegaMoEValueError, match="shared_experts: expected projections without biases, got 1 with one"):
        replace_moe(model)


def test_a_checkpoint_needs_numbered_layers(tmp_path: Path) -> None:
    model = make_model("qwen3_moe")
    alone = nn.Module()
    alone.config = model.config
    alone.add_module("block", model.get_submodule(block_name(model)))
    with pytest.raises(MegaMoEValueError, match=r"model: expected blocks in `layers.<number>.`, got block"):
        replace_moe(alone, checkpoint=tmp_path)


def test_sharded_blocks() -> None:
    model = make_model("qwen3_moe")
    gate = model.get_submodule(block_name(model)).gate
    gate.weight.device_mesh = object()  # as a DTensor has
    with pytest.raises(MegaMoEValueError, match="parameters: expected plain tensors, got DTensors"):
        replace_moe(model)
