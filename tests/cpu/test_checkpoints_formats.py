"""Scale dtypes, FP4 to E4M3, and the name tables: each conversion exact, each with its inverse."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from checkpoints import CheckpointError, load_moe_layer
from checkpoints.fp4 import e4m3_to_fp4, exponent_to_scale, fp4_to_e4m3, pack_codes, scale_to_exponent, unpack_codes
from checkpoints.layouts import split_gate_up, stack_gate_up
from checkpoints.names import FAMILIES, TABLES, TensorName
from checkpoints.scales import exponents_to_fp32, fp32_to_exponents, scale_from_fp32, scale_to_fp32
from tests.support.toy_checkpoint import Toy, per_expert, same_bytes, write_shards
from tests.support.toy_fp4 import dequantise_fp4, v4_layer

PREFIX = "model.layers.3.mlp."


def dequantise(data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    n, k = data.shape
    return data.double() * scale.double().repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]


# scales


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_every_exponent_byte_means_its_power_of_two(dtype: torch.dtype) -> None:
    exponents = torch.arange(255, dtype=torch.uint8)
    scale = scale_to_fp32(exponents.view(dtype), "k", "f")
    assert scale.dtype == torch.float32
    assert scale.tolist() == [math.ldexp(1.0, b - 127) for b in range(255)]
    assert torch.equal(fp32_to_exponents(scale), exponents)
    assert torch.equal(exponents_to_fp32(exponents), scale)


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F8_E8M0", "U8"])
def test_scales_come_back_in_their_dtype(dtype: str) -> None:
    stored = per_expert(Toy(scale=dtype))[f"{PREFIX}experts.0.up_proj.weight_scale_inv"]
    assert same_bytes(scale_from_fp32(scale_to_fp32(stored, "k", "f"), dtype), stored)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_byte_120_is_two_to_minus_7_and_255_is_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = per_expert(Toy())
    for key in [k for k in tensors if k.endswith("scale_inv")]:
        tensors[key] = torch.full(tensors[key].shape, 120, dtype=torch.uint8).view(dtype)
    write_shards(tmp_path / "good", tensors)
    assert load_moe_layer(tmp_path / "good", 3).w13_scale.unique().tolist() == [2.0**-7]
    bad = f"{PREFIX}experts.2.up_proj.weight_scale_inv"
    tensors[bad] = torch.tensor([[120, 120], [120, 255]], dtype=torch.uint8).view(dtype)
    write_shards(tmp_path / "bad", tensors)
    with pytest.raises(CheckpointError, match=rf"safetensors: {bad}: expected exponent bytes.*255 \(NaN\) at \(1, 1\)"):
        load_moe_layer(tmp_path / "bad", 3)
    assert load_moe_layer(tmp_path / "bad", 3, rank=0, num_ranks=2).first_expert == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_scales_that_are_no_scales_are_refused(value: float) -> None:
    with pytest.raises(CheckpointError, match=r"f: k: expected finite scales >= 0, got .* at \(0, 1\)"):
        scale_to_fp32(torch.tensor([[1.0, value]]), "k", "f")


def test_unknown_scale_dtype(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"f: k: expected a scale of F32, BF16, F8_E8M0, U8, got torch.float16"):
        scale_to_fp32(torch.ones(1, dtype=torch.float16), "k", "f")
    tensors = per_expert(Toy())
    key = f"{PREFIX}experts.1.gate_proj.weight_scale_inv"
    for scale in [k for k in tensors if k.endswith("scale_inv")]:
        tensors[scale] = tensors[scale].half()
    write_shards(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=rf"{key}: expected a scale of dtype F32, BF16, F8_E8M0, U8, got F16"):
        load_moe_layer(tmp_path, 3)


@pytest.mark.parametrize("value", [3.0, 0.0, -2.0, 2.0**-128, float("inf")])
def test_only_powers_of_two_become_exponents(value: float) -> None:
    with pytest.raises(CheckpointError, match=r"scale: expected powers of two"):
        fp32_to_exponents(torch.tensor([1.0, value]))


# FP4


def test_codes_pack_and_unpack() -> None:
    packed = torch.arange(256, dtype=torch.uint8).view(4, 64)
    codes = unpack_codes(packed)
    assert codes[0, :4].tolist() == [0, 0, 1, 0] and codes[1, :2].tolist() == [0, 4]
    assert torch.equal(pack_codes(codes), packed)


@pytest.mark.parametrize("shape", [(128, 128), (320, 96), (520, 256)], ids=str)
def test_fp4_becomes_e4m3_with_the_same_values_and_back(shape: tuple[int, int]) -> None:
    gen = torch.Generator().manual_seed(1)
    n, k = shape
    packed = torch.randint(0, 256, (n, k // 2), generator=gen, dtype=torch.uint8)
    exponents = torch.randint(100, 111, (n, k // 32), generator=gen, dtype=torch.uint8)
    data, scale = fp4_to_e4m3(packed, exponents)
    assert torch.equal(dequantise(data, exponent_to_scale(scale)), dequantise_fp4(packed, exponents))
    assert torch.equal(torch.signbit(data.float()), torch.signbit(dequantise_fp4(packed, exponents)))
    assert torch.equal(e4m3_to_fp4(data, scale, exponents), packed)
    assert torch.equal(scale_to_exponent(exponent_to_scale(scale)), scale)


def test_fp4_exponents_at_the_limits_and_one_beyond() -> None:
    """6 * 2^b over 0.5 * 2^b': E4M3 holds 384 to 2^-9, so b - b' may be 14, and 15 is refused."""
    packed = torch.full((256, 128), 0x17, dtype=torch.uint8)  # 6 and 0.5 in turn
    exponents = torch.full((256, 8), 127, dtype=torch.uint8)
    exponents[200, 5] = 127 + 14
    data, scale = fp4_to_e4m3(packed, exponents)
    assert torch.equal(dequantise(data, exponent_to_scale(scale)), dequantise_fp4(packed, exponents))
    assert scale.tolist() == [[-6, -6], [-6, 8]]
    exponents[200, 5] += 1
    with pytest.raises(CheckpointError, match=r"^w1: .* got block \(1, 1\) with exponents from 0 to 15"):
        fp4_to_e4m3(packed, exponents, "w1")


def test_fp4_blocks_of_zeros_do_not_count_and_strips_keep_their_block_numbers() -> None:
    packed = torch.full((640, 64), 0x22, dtype=torch.uint8)
    exponents = torch.full((640, 4), 127, dtype=torch.uint8)
    packed[3, :16], exponents[3, 0] = 0x80, 254  # zeros and minus zeros under a huge scale
    exponents[10, 1] = 0
    packed[10, 16:32] = 0
    data, scale = fp4_to_e4m3(packed, exponents)
    assert torch.equal(dequantise(data, exponent_to_scale(scale)), dequantise_fp4(packed, exponents))
    assert torch.equal(e4m3_to_fp4(data, scale, exponents), packed)
    exponents[600, 2] = 170
    with pytest.raises(CheckpointError, match=r"got block \(4, 0\) with exponents from 0 to 43"):
        fp4_to_e4m3(packed, exponents)


@pytest.mark.parametrize("hashed", [False, True])
@pytest.mark.parametrize("storage", ["I8", "U8", "F4"])
def test_v4_layer_loads_with_its_values(tmp_path: Path, storage: str, hashed: bool) -> None:
    tensors = v4_layer(Toy(), storage, hashed=hashed)
    write_shards(tmp_path, tensors)
    got = load_moe_layer(tmp_path, 3, rank=1, num_ranks=2)
    assert got.family == "deepseek-v4" and got.w13_E2IH.dtype == torch.float8_e4m3fn
    assert (got.tid2eid is not None) == hashed == (got.correction_bias is None)
    for local in range(2):
        owner = f"layers.3.ffn.experts.{2 + local}"
        want = {
            p: dequantise_fp4(tensors[f"{owner}.{p}.weight"], tensors[f"{owner}.{p}.scale"]) for p in ("w1", "w2", "w3")
        }
        gate, up = split_gate_up(got.w13_E2IH[local])
        gate_scale, up_scale = split_gate_up(got.w13_scale[local])
        assert torch.equal(dequantise(gate, gate_scale), want["w1"])
        assert torch.equal(dequantise(up, up_scale), want["w3"])
        assert torch.equal(dequantise(got.w2_EHI[local], got.w2_scale[local]), want["w2"])
    assert got.shared.weight_dtype == "F8_E4M3"
    assert same_bytes(got.shared.w2[0], tensors["layers.3.ffn.shared_experts.w2.weight"])


def test_v4_block_that_e4m3_cannot_hold_names_key_and_block(tmp_path: Path) -> None:
    tensors = v4_layer(Toy(), "I8", spread=40)
    write_shards(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=r"ffn.experts.\d.w\d.weight: expected FP4 blocks .* block \(\d, \d\)"):
        load_moe_layer(tmp_path, 3)


# layouts and names


def test_stacking_and_splitting_are_inverse() -> None:
    gate, up = torch.randn(2, 3, 5), torch.randn(2, 3, 5)
    stacked = stack_gate_up(gate, up)
    assert torch.equal(stacked[:, :3], gate)
    assert all(torch.equal(a, b) for a, b in zip(split_gate_up(stacked), (gate, up), strict=True))


@pytest.mark.parametrize("table", TABLES, ids=lambda t: t.name)
def test_names_parse_to_what_made_them(table) -> None:
    seen = set()
    for role in table.roles:
        for layer in (0, 1, 10, 60):
            for expert in (0, 1, 10, 383) if "{expert}" in table.roles[role] else (None,):
                key = table.key(role, layer, expert)
                assert table.parse(key) == TensorName(role, layer, expert)
                seen.add(key)
    assert len(seen) == len({(table.parse(key)) for key in seen})


@pytest.mark.parametrize(
    "key",
    [
        "model.layers.3.mlp.experts.01.gate_proj.weight",
        "model.layers.3.mlp.experts.-1.gate_proj.weight",
        "model.layers.3.mlp.experts.\u0663.gate_proj.weight",
        "model.layers.3.mlp.experts.1e2.gate_proj.weight",
        "model.layers.3.mlp.experts..gate_proj.weight",
        "model.layers.3.mlp.experts.1.gate_proj.weight.weight",
        "model.layers.3.mlp.experts.1.gate_proj",
        "model.layers.3.mlp.experts.99999999999999999999.gate_proj.weight",
        "xmodel.layers.3.mlp.experts.1.gate_proj.weight",
        "model.layers.3.mlp.gate_proj.weight",
    ],
)
def test_names_that_only_look_right_are_unknown(key: str) -> None:
    assert all(table.parse(key) is None for table in TABLES)


def test_families_point_at_known_roles() -> None:
    for family in FAMILIES.values():
        assert set(family.one_of) <= set(family.table.roles) and "router" in family.table.roles
