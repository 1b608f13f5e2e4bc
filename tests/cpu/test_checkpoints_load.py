"""Loading one MoE layer: names of every family, any sharding, one rank's experts, bytes and scales as they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from checkpoints import CheckpointError, load_moe_layer
from tests.support.toy_checkpoint import Toy, blocks, packed, per_expert, same_bytes, write_shards

PREFIX = "model.layers.3.mlp."


def expected_stack(
    tensors: dict[str, torch.Tensor],
    owner: str,
    suffix: str = "weight",
    parts: tuple[str, str] = ("gate_proj", "up_proj"),
) -> torch.Tensor:
    return torch.cat([tensors[f"{owner}.{part}.{suffix}"].float() for part in parts])


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("sizes", [(256, 192), (192, 320), (128, 128)], ids=str)
def test_each_rank_gets_its_block_of_experts(tmp_path: Path, sizes: tuple[int, int], num_ranks: int) -> None:
    toy = Toy(hidden=sizes[0], inter=sizes[1])
    tensors = per_expert(toy)
    write_shards(tmp_path, tensors)
    for rank in range(num_ranks):
        got = load_moe_layer(tmp_path, 3, rank=rank, num_ranks=num_ranks)
        assert (got.num_experts, got.first_expert, got.family) == (4, rank * 4 // num_ranks, "deepseek-v3")
        assert got.w13_E2IH.shape == (4 // num_ranks, 2 * toy.inter, toy.hidden)
        assert got.w13_scale.shape == (4 // num_ranks, 2 * blocks(toy.inter), blocks(toy.hidden))
        assert got.w13_E2IH.dtype == got.w2_EHI.dtype == torch.float8_e4m3fn
        for local in range(4 // num_ranks):
            owner = f"{PREFIX}experts.{got.first_expert + local}"
            assert torch.equal(got.w13_E2IH[local].float(), expected_stack(tensors, owner))
            assert torch.equal(got.w13_scale[local], expected_stack(tensors, owner, "weight_scale_inv"))
            assert same_bytes(got.w2_EHI[local], tensors[f"{owner}.down_proj.weight"])
            assert same_bytes(got.w2_scale[local], tensors[f"{owner}.down_proj.weight_scale_inv"])
        assert torch.equal(got.shared.w13[0].float(), expected_stack(tensors, f"{PREFIX}shared_experts"))
        assert same_bytes(got.router_weight, tensors[f"{PREFIX}gate.weight"])
        assert same_bytes(got.correction_bias, tensors[f"{PREFIX}gate.e_score_correction_bias"])


def test_partial_blocks_keep_three_scale_rows_for_gate_and_three_for_up(tmp_path: Path) -> None:
    tensors = per_expert(Toy(inter=320))
    for key in tensors:
        if key.endswith("gate_proj.weight_scale_inv"):
            tensors[key] = torch.tensor([[1.0], [2.0], [4.0]]).expand(3, 2).contiguous()
        elif key.endswith("up_proj.weight_scale_inv"):
            tensors[key] = torch.tensor([[8.0], [16.0], [32.0]]).expand(3, 2).contiguous()
    write_shards(tmp_path, tensors)
    scale = load_moe_layer(tmp_path, 3).w13_scale
    assert torch.equal(scale[:, :, 0], torch.tensor([1.0, 2, 4, 8, 16, 32]).expand(4, 6))


def test_one_file_without_index_and_the_file_itself(tmp_path: Path) -> None:
    tensors = per_expert(Toy())
    save_file(tensors, tmp_path / "model.safetensors")
    by_folder, by_file = load_moe_layer(tmp_path, 3), load_moe_layer(tmp_path / "model.safetensors", 3)
    assert same_bytes(by_folder.w13_E2IH, by_file.w13_E2IH)
    assert same_bytes(by_folder.w2_EHI[1], tensors[f"{PREFIX}experts.1.down_proj.weight"])


@pytest.mark.parametrize("scales_first", [True, False])
def test_weight_and_scale_in_different_shards(tmp_path: Path, scales_first: bool) -> None:
    tensors = per_expert(Toy())
    write_shards(tmp_path / "apart", tensors, 2, lambda key: int(key.endswith("scale_inv") != scales_first))
    write_shards(tmp_path / "together", tensors, 1)
    apart, together = load_moe_layer(tmp_path / "apart", 3), load_moe_layer(tmp_path / "together", 3)
    assert same_bytes(apart.w13_E2IH, together.w13_E2IH) and same_bytes(apart.w13_scale, together.w13_scale)
    assert same_bytes(apart.w2_EHI, together.w2_EHI) and same_bytes(apart.w2_scale, together.w2_scale)


def test_bf16_checkpoint_has_no_scales(tmp_path: Path) -> None:
    tensors = per_expert(Toy(scale=None), bias=False)
    write_shards(tmp_path, tensors)
    got = load_moe_layer(tmp_path, 3)
    assert got.family == "deepseek-v2" and got.w13_scale is None and got.w2_scale is None
    assert got.w13_E2IH.dtype == torch.bfloat16
    assert same_bytes(got.w2_EHI[2], tensors[f"{PREFIX}experts.2.down_proj.weight"])


def test_packed_tensors_of_transformers(tmp_path: Path) -> None:
    tensors = packed(Toy(inter=256))
    write_shards(tmp_path, tensors)
    got = load_moe_layer(tmp_path, 3, rank=1, num_ranks=2)
    assert got.family == "packed" and got.num_experts == 4
    assert same_bytes(got.w13_E2IH, tensors[f"{PREFIX}experts.gate_up_proj"][2:])
    assert same_bytes(got.w13_scale, tensors[f"{PREFIX}experts.gate_up_proj_scale_inv"][2:])
    assert same_bytes(got.w2_EHI, tensors[f"{PREFIX}experts.down_proj"][2:])


def test_packed_scales_that_straddle_gate_and_up_are_refused(tmp_path: Path) -> None:
    write_shards(tmp_path, packed(Toy(inter=192)))
    with pytest.raises(CheckpointError, match=r"gate_up_proj_scale_inv: expected I to be a multiple of 128.*I = 192"):
        load_moe_layer(tmp_path, 3)


def test_numbers_that_are_prefixes_of_each_other(tmp_path: Path) -> None:
    """Layers 1, 10, 100 and experts 1, 10, 100 side by side: each value says whose it is."""
    tensors = {}
    for layer in (1, 10, 100):
        toy = Toy(experts=101, hidden=128, inter=1, layer=layer, scale=None, shared=0)
        layer_tensors = per_expert(toy, bias=False)
        for key, tensor in layer_tensors.items():
            if ".experts." in key:
                expert = int(key.split(".experts.")[1].split(".")[0])
                layer_tensors[key] = torch.full_like(tensor, layer + expert / 128)
        tensors.update(layer_tensors)
    write_shards(tmp_path, tensors)
    for layer in (1, 10, 100):
        got = load_moe_layer(tmp_path, layer)
        assert got.family == "qwen3-moe" and got.num_experts == 101
        want = (layer + torch.arange(101) / 128).bfloat16()
        assert torch.equal(got.w13_E2IH[:, 1, 5], want) and torch.equal(got.w2_EHI[:, 7, 0], want)


def test_loading_twice_gives_the_same_and_keeps_no_state(tmp_path: Path) -> None:
    write_shards(tmp_path / "a", per_expert(Toy(seed=1)))
    write_shards(tmp_path / "b", per_expert(Toy(seed=2, hidden=128)))
    first = load_moe_layer(tmp_path / "a", 3)
    load_moe_layer(tmp_path / "b", 3)
    again = load_moe_layer(tmp_path / "a", 3)
    assert same_bytes(first.w13_E2IH, again.w13_E2IH) and same_bytes(first.w13_scale, again.w13_scale)


def test_result_outlives_the_files(tmp_path: Path) -> None:
    tensors = per_expert(Toy())
    write_shards(tmp_path, tensors)
    got = load_moe_layer(tmp_path, 3)
    for path in tmp_path.iterdir():
        path.write_bytes(b"\xff" * path.stat().st_size)
    assert same_bytes(got.w2_EHI[0], tensors[f"{PREFIX}experts.0.down_proj.weight"])
    assert same_bytes(got.router_weight, tensors[f"{PREFIX}gate.weight"])
