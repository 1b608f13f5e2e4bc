"""MegaMoE.from_checkpoint: the bytes that came in, other weight formats, and what does not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import checkpoints
from megamoe import LocalWorld, MegaMoE, MoEConfig, Recipe
from megamoe.errors import MegaMoETypeError, MegaMoEValueError
from megamoe.gates import sqnr_db
from megamoe.quantize import FP8, QuantizedWeight
from tests.support.compare import assert_bitwise
from tests.support.toy_checkpoint import Toy, per_expert, write_shards

CONFIG = MoEConfig(256, 192, num_experts=4, top_k=2, num_shared_experts=1)
HF = {
    "model_type": "deepseek_v3",
    "hidden_size": 256,
    "moe_intermediate_size": 192,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
}


@pytest.fixture
def fp8_folder(tmp_path: Path) -> Path:
    write_shards(tmp_path, small_values(per_expert(Toy())))
    return tmp_path


@pytest.fixture
def bf16_folder(tmp_path: Path) -> Path:
    write_shards(tmp_path, small_values(per_expert(Toy(scale=None))))
    return tmp_path


def small_values(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {k: t * 0.05 if t.dtype == torch.bfloat16 and ".gate." not in k else t for k, t in tensors.items()}


def tokens():
    return torch.randn(12, 256, generator=torch.Generator().manual_seed(1)).bfloat16()


def test_fp8_bytes_and_scales_are_used_as_they_are(fp8_folder):
    (fp8_folder / "config.json").write_text(json.dumps(HF))
    layer = MegaMoE.from_checkpoint(fp8_folder, 3)
    stored = checkpoints.load_moe_layer(fp8_folder, 3)
    assert layer.weights == "fp8" and layer.config.routed_scaling_factor == 2.5
    layer(tokens().requires_grad_()).sum().backward()
    state = layer.state_dict()
    assert_bitwise(state["experts.w13"], stored.routed.w13, "w13")
    assert_bitwise(state["experts.w2"], stored.routed.w2, "w2")
    assert_bitwise(state["experts.w13_scale"], stored.routed.w13_scale, "w13_scale")
    assert_bitwise(state["shared.w13"], stored.shared.w13, "shared w13")
    assert_bitwise(state["shared.w2_scale"], stored.shared.w2_scale, "shared w2_scale")
    assert_bitwise(state["router.weight"], stored.router_weight, "router")
    assert state["router.correction_bias"].dtype == torch.float32
    assert_bitwise(state["router.correction_bias"], stored.correction_bias.float(), "bias")
    assert not any(p.isnan().any() for n, p in state.items() if p.dtype != FP8)
    assert layer.experts.copies.num_bytes() and not layer.eval().experts.copies.num_bytes()


@pytest.mark.parametrize("weights", ["bf16", "fp32"])
def test_fp8_becomes_masters(fp8_folder, weights):
    layer = MegaMoE.from_checkpoint(fp8_folder, 3, config=CONFIG, weights=weights)
    stored = checkpoints.load_moe_layer(fp8_folder, 3).routed
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[weights]
    assert_bitwise(layer.experts.w13.data, QuantizedWeight(stored.w13, stored.w13_scale, 2).dequantize(dtype), "w13")
    assert_bitwise(layer.experts.w2.data, QuantizedWeight(stored.w2, stored.w2_scale).dequantize(dtype), "w2")
    assert layer.experts.w13.requires_grad and layer.experts.w13_scale is None
    layer(tokens()).sum().backward()
    assert layer.experts.w13.grad.dtype == dtype


def test_bf16_stays_bf16_or_becomes_fp8(bf16_folder):
    exact = MegaMoE.from_checkpoint(bf16_folder, 3, config=CONFIG, recipe=Recipe("bf16"))
    masters = MegaMoE.from_checkpoint(bf16_folder, 3, config=CONFIG)
    fp8 = MegaMoE.from_checkpoint(bf16_folder, 3, config=CONFIG, weights="fp8")
    assert exact.weights == masters.weights == "bf16" and fp8.experts.w13.dtype == FP8
    stored = checkpoints.load_moe_layer(bf16_folder, 3).routed
    assert_bitwise(masters.experts.w13.data, stored.w13, "w13")
    with torch.no_grad():
        assert_bitwise(fp8(tokens()), masters(tokens()), "quantised when loaded or when used")
        assert sqnr_db(fp8(tokens()), exact(tokens())) > 20


def test_over_virtual_ranks(fp8_folder):
    one = MegaMoE.from_checkpoint(fp8_folder, 3, config=CONFIG)
    two = MegaMoE.from_checkpoint(fp8_folder, 3, config=CONFIG, world=LocalWorld(2))
    with torch.no_grad():
        outs = two(list(tokens().split([5, 7])))
        assert_bitwise(torch.cat(outs), one(tokens()), "out")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (dict(num_experts=8), "config.num_experts: expected 4 as in the checkpoint, got 8"),
        (dict(hidden_size=128), "config.hidden_size: expected 256 as in the checkpoint, got 128"),
        (dict(intermediate_size=96), "config.intermediate_size: expected 192 as in the checkpoint, got 96"),
        (dict(num_shared_experts=0), "config.shared_intermediate_size: expected 192 as in the checkpoint, got 0"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(fp8_folder, change, match):
    import dataclasses

    with pytest.raises(MegaMoEValueError, match=match):
        MegaMoE.from_checkpoint(fp8_folder, 3, config=dataclasses.replace(CONFIG, **change))


def test_without_config_json(fp8_folder):
    with pytest.raises(MegaMoEValueError, match="folder: expected a folder with a config.json.*Or pass config="):
        MegaMoE.from_checkpoint(fp8_folder, 3)


@pytest.mark.parametrize(("text", "contract"), [("{", "JSON"), ("\xff", "JSON"), ("[]", "a JSON object, got list")])
def test_a_broken_config_json_is_refused(fp8_folder, text, contract):
    (fp8_folder / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(MegaMoEValueError, match=f"config.json: expected {contract}"):
        MegaMoE.from_checkpoint(fp8_folder, 3)


def test_another_layer_is_the_checkpoints_error(fp8_folder):
    with pytest.raises(checkpoints.CheckpointError, match="layer 7"):
        MegaMoE.from_checkpoint(fp8_folder, 7, config=CONFIG)


def test_loading_twice_into_one_object(fp8_folder, tmp_path):
    other = tmp_path / "other"
    write_shards(other, per_expert(Toy(seed=5)))
    first = MegaMoE.from_checkpoint(fp8_folder, 3, config=CONFIG)
    second = MegaMoE.from_checkpoint(other, 3, config=CONFIG)
    grads = []
    for layer, state in ((first, None), (first, second.state_dict()), (second, None)):
        if state is not None:
            layer.load_state_dict(state)
        x = tokens().requires_grad_()
        layer(x).backward(torch.ones(12, 256).bfloat16())
        grads.append(x.grad)
    assert_bitwise(grads[1], grads[2], "dx after the second load")
    assert not torch.equal(grads[0], grads[1])


def test_what_is_no_config_or_device_is_named(fp8_folder):
    with pytest.raises(MegaMoETypeError, match="config: expected a MoEConfig, got dict"):
        MegaMoE.from_checkpoint(fp8_folder, 3, config={"hidden_size": 256})
    with pytest.raises(MegaMoEValueError, match="device: expected cpu, .*, got 'cuda:99'"):
        MegaMoE.from_checkpoint(fp8_folder, 3, config=CONFIG, device="cuda:99")
