"""Saving gives back the keys and bytes that were read, from one rank or several, and can change the naming."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from checkpoints import CheckpointError, load_moe_layer, save_moe_layer, write_index
from checkpoints.save import INDEX_NAME
from tests.support.toy_checkpoint import Toy, packed, per_expert, same_bytes, write_shards
from tests.support.toy_fp4 import v4_layer


def everything(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        loaded = load_file(path)
        assert not set(loaded) & set(tensors)
        tensors.update(loaded)
    return tensors


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert sorted(got) == sorted(want)
    for key, tensor in want.items():
        assert same_bytes(got[key], tensor), key


CASES = {
    "v3-F32": lambda: per_expert(Toy()),
    "v3-BF16-scales": lambda: per_expert(Toy(scale="BF16", inter=320)),
    "v3-E8M0-scales": lambda: per_expert(Toy(scale="F8_E8M0")),
    "v3-U8-scales": lambda: per_expert(Toy(scale="U8")),
    "v3-bf16": lambda: per_expert(Toy(scale=None)),
    "v2": lambda: per_expert(Toy(scale=None, shared=2), bias=False),
    "qwen3": lambda: per_expert(Toy(scale="BF16", shared=0), bias=False),
    "v4-fp8": lambda: per_expert(Toy(scale="F8_E8M0"), names="v4"),
    "v4-fp4": lambda: v4_layer(Toy(), "I8"),
    "v4-fp4-hash": lambda: v4_layer(Toy(), "U8", hashed=True),
}


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_saved_keys_and_bytes_are_those_that_were_read(tmp_path: Path, case: str, num_ranks: int) -> None:
    tensors = CASES[case]()
    write_shards(tmp_path / "in", tensors)
    files = []
    for rank in range(num_ranks):
        layer = load_moe_layer(tmp_path / "in", 3, rank=rank, num_ranks=num_ranks)
        files += save_moe_layer(tmp_path / "out", layer, max_shard_bytes=200_000)
    assert len(files) == len(set(files)) > num_ranks
    write_index(tmp_path / "out")
    assert_same(everything(tmp_path / "out"), tensors)
    again = load_moe_layer(tmp_path / "out", 3)
    once = load_moe_layer(tmp_path / "in", 3)
    assert same_bytes(again.w13_E2IH, once.w13_E2IH) and same_bytes(again.w2_EHI, once.w2_EHI)


def test_packed_round_trip_and_its_limits(tmp_path: Path) -> None:
    tensors = packed(Toy(inter=256))
    write_shards(tmp_path / "in", tensors)
    save_moe_layer(tmp_path / "out", load_moe_layer(tmp_path / "in", 3))
    assert_same(everything(tmp_path / "out"), tensors)
    half = load_moe_layer(tmp_path / "in", 3, rank=1, num_ranks=2)
    with pytest.raises(CheckpointError, match=r"family: expected all 4 experts on one rank for packed names, got 2"):
        save_moe_layer(tmp_path / "half", half)
    write_shards(tmp_path / "partial", per_expert(Toy(inter=192)))
    with pytest.raises(CheckpointError, match=r"family: expected I to be a multiple of 128 .* got I = 192"):
        save_moe_layer(tmp_path / "out2", load_moe_layer(tmp_path / "partial", 3), family="packed")
    write_shards(tmp_path / "fp4", v4_layer(Toy(), "I8"))
    with pytest.raises(CheckpointError, match=r"family: expected names with one tensor per expert for FP4"):
        save_moe_layer(tmp_path / "out3", load_moe_layer(tmp_path / "fp4", 3), family="packed")


def test_packed_to_per_expert_names_and_back(tmp_path: Path) -> None:
    tensors = packed(Toy(inter=256))
    write_shards(tmp_path / "in", tensors)
    for rank in range(2):
        layer = load_moe_layer(tmp_path / "in", 3, rank=rank, num_ranks=2)
        save_moe_layer(tmp_path / "split", layer, family="deepseek-v3")
    write_index(tmp_path / "split")
    split = everything(tmp_path / "split")
    gate_up = tensors["model.layers.3.mlp.experts.gate_up_proj"]
    assert same_bytes(split["model.layers.3.mlp.experts.2.up_proj.weight"], gate_up[2, 256:])
    save_moe_layer(tmp_path / "joined", load_moe_layer(tmp_path / "split", 3), family="packed")
    assert_same(everything(tmp_path / "joined"), tensors)


def test_changed_values_are_saved_or_refused_never_rounded(tmp_path: Path) -> None:
    write_shards(tmp_path / "in", per_expert(Toy(scale="F8_E8M0")))
    layer = load_moe_layer(tmp_path / "in", 3)
    layer.w13_scale[1, 0, 0] = 3.0
    with pytest.raises(CheckpointError, match=r"scale: expected powers of two to write as exponents, got 3.0"):
        save_moe_layer(tmp_path / "a", layer)
    as_fp32 = dataclasses.replace(layer, routed=dataclasses.replace(layer.routed, scale_dtype="F32"))
    save_moe_layer(tmp_path / "b", as_fp32)
    assert everything(tmp_path / "b")["model.layers.3.mlp.experts.1.gate_proj.weight_scale_inv"][0, 0] == 3.0
    as_bf16 = dataclasses.replace(layer, routed=dataclasses.replace(layer.routed, scale_dtype="BF16"))
    layer.w13_scale[1, 0, 0] = 1.001
    with pytest.raises(CheckpointError, match=r"scale: expected values that bf16 holds exactly"):
        save_moe_layer(tmp_path / "c", as_bf16)
    write_shards(tmp_path / "fp4", v4_layer(Toy(), "I8"))
    layer = load_moe_layer(tmp_path / "fp4", 3)
    layer.w2_EHI[0, 0, 0] = 15.0
    with pytest.raises(CheckpointError, match=r"weight: expected the values that were read, got others"):
        save_moe_layer(tmp_path / "d", layer)
    with pytest.raises(CheckpointError, match=r"family: expected one of .*, got 'gpt-2'"):
        save_moe_layer(tmp_path / "e", layer, family="gpt-2")


def test_index_of_several_layers_and_its_errors(tmp_path: Path) -> None:
    tensors = {**per_expert(Toy(layer=1)), **per_expert(Toy(layer=10, seed=1))}
    write_shards(tmp_path / "in", tensors)
    for layer in (1, 10):
        save_moe_layer(tmp_path / "out", load_moe_layer(tmp_path / "in", layer))
    write_index(tmp_path / "out")
    assert_same(everything(tmp_path / "out"), tensors)
    assert not [path for path in (tmp_path / "out").iterdir() if path.name.startswith(".")]
    index = json.loads((tmp_path / "out" / INDEX_NAME).read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values()), "headers do not count"
    with pytest.raises(CheckpointError, match=r"expected .safetensors files, got none"):
        write_index(tmp_path)
    source = next((tmp_path / "out").glob("*.safetensors"))
    copy = source.with_name("zz.safetensors")
    copy.write_bytes(source.read_bytes())
    with pytest.raises(CheckpointError, match=r"zz.safetensors: expected each key in one file, got .* in layer-0"):
        write_index(tmp_path / "out")
    copy.write_bytes(source.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"zz.safetensors: expected a complete safetensors file"):
        write_index(tmp_path / "out")
