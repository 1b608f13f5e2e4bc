"""Broken and hostile checkpoints: an error that names files and keys, nothing half-loaded, nothing read outside."""

from __future__ import annotations

import json
import os
import random
import re
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from checkpoints import CheckpointError, load_moe_layer
from checkpoints.files import MAX_CONFIG_BYTES, ReadRequest, open_source
from tests.support.toy_checkpoint import INDEX, Toy, packed, per_expert, same_bytes, write_index, write_shards
from tests.support.toy_fp4 import v4_layer

P = "model.layers.3.mlp."
SHARD = "model-0000{}-of-00003.safetensors"
Tensors = dict[str, torch.Tensor]


def load_fails(folder: Path, *words: str, **options) -> str:
    """The message of the refusal; it must hold all of `words`."""
    with pytest.raises(CheckpointError) as caught:
        load_moe_layer(folder, options.pop("layer", 3), **options)
    for word in words:
        assert word in str(caught.value)
    return str(caught.value)


def test_arguments_that_are_none(tmp_path: Path) -> None:
    write_shards(tmp_path, per_expert(Toy()))
    load_fails(tmp_path, "layer: expected the number of a layer, got '3'.", layer="3")
    load_fails(tmp_path, "device: expected cpu, cuda or cuda:N, got 'bogus'.", device="bogus")
    load_fails(None, "folder: expected a path, got NoneType.")


# files and index


def test_missing_shard_is_named_with_the_keys_it_held(tmp_path: Path) -> None:
    weight_map = write_shards(tmp_path, per_expert(Toy()))
    (tmp_path / SHARD.format(2)).unlink()
    first = sorted(key for key, file in weight_map.items() if file == SHARD.format(2))[0]
    load_fails(tmp_path, SHARD.format(2), first, "Fetch the missing shards")


@pytest.mark.parametrize("cut", [1, 1000, "all but the header", "inside the header", "empty"])
def test_truncated_shard(tmp_path: Path, cut: int | str) -> None:
    write_shards(tmp_path, per_expert(Toy()))
    path = tmp_path / SHARD.format(3)
    data = path.read_bytes()
    header = 8 + struct.unpack("<Q", data[:8])[0]
    end = {"all but the header": header, "inside the header": header // 2, "empty": 0}.get(cut)
    path.write_bytes(data[: len(data) - cut] if isinstance(cut, int) else data[:end])
    load_fails(tmp_path, SHARD.format(3), "expected a complete safetensors file")


def test_index_that_names_a_file_that_is_not_there(tmp_path: Path) -> None:
    weight_map = write_shards(tmp_path, per_expert(Toy()))
    write_index(tmp_path, {**weight_map, f"{P}experts.4.gate_proj.weight": "model-00004.safetensors"})
    load_fails(tmp_path, INDEX, "'model-00004.safetensors'", "experts.4.gate_proj")


def test_stray_shard_that_the_index_does_not_name(tmp_path: Path) -> None:
    write_shards(tmp_path, per_expert(Toy()))
    save_file({"x": torch.zeros(1)}, tmp_path / "old.safetensors")
    load_fails(tmp_path, INDEX, "'old.safetensors'", "Remove them")


def test_foreign_shard_of_another_checkpoint(tmp_path: Path) -> None:
    write_shards(tmp_path, per_expert(Toy()))
    save_file({"model.norm.weight": torch.zeros(4)}, tmp_path / SHARD.format(1))
    load_fails(tmp_path, SHARD.format(1), INDEX, f"'{P}experts.0.down_proj.weight'", "a shard without")


def test_shard_with_keys_that_the_index_places_elsewhere(tmp_path: Path) -> None:
    tensors = per_expert(Toy())
    weight_map = write_shards(tmp_path, tensors)
    key = next(k for k, file in weight_map.items() if file == SHARD.format(1))
    write_index(tmp_path, {**weight_map, key: SHARD.format(2)})
    load_fails(tmp_path, key, INDEX)
    del weight_map[key]
    write_index(tmp_path, weight_map)
    load_fails(tmp_path, key)


def test_swapped_shards(tmp_path: Path) -> None:
    write_shards(tmp_path, per_expert(Toy()))
    a, b = tmp_path / SHARD.format(1), tmp_path / SHARD.format(2)
    first, second = a.read_bytes(), b.read_bytes()
    a.write_bytes(second)
    b.write_bytes(first)
    load_fails(tmp_path, SHARD.format(1), "a shard without")


def test_folder_without_index(tmp_path: Path) -> None:
    load_fails(tmp_path, "exactly one .safetensors file, got 0 files")
    load_fails(tmp_path / "nowhere", "folder: expected a folder or a .safetensors file")
    (tmp_path / "config.json").write_text("{}")
    load_fails(tmp_path / "config.json", "folder: expected a folder or a .safetensors file, got 'config.json'")
    write_shards(tmp_path, per_expert(Toy()))
    (tmp_path / INDEX).rename(tmp_path / ("a" + INDEX))
    (tmp_path / ("b" + INDEX)).write_text("{}")
    load_fails(tmp_path, "expected one index", "'amodel", "'bmodel")
    for path in tmp_path.glob("*.json"):
        path.unlink()
    load_fails(tmp_path, "got 3 files and no index", SHARD.format(1))


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "{outside}/secret.safetensors", "sub/x.safetensors", "..\\x.safetensors", "", "."]
)
def test_names_that_leave_the_folder_are_refused_and_not_opened(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight_map = write_shards(tmp_path / "folder", per_expert(Toy()))
    save_file({f"{P}gate.weight": torch.zeros(4, 256)}, tmp_path / "secret.safetensors")
    name = name.format(outside=tmp_path)
    write_index(tmp_path / "folder", {**weight_map, f"{P}gate.weight": name})
    monkeypatch.setattr("checkpoints.files.safe_open", lambda *a, **k: pytest.fail("a shard was opened"))
    load_fails(tmp_path / "folder", INDEX, "expected plain names", repr(name))


@pytest.mark.parametrize("what", ["shard", "index", "config"])
def test_links_out_of_the_folder_need_leave(tmp_path: Path, what: str) -> None:
    folder = tmp_path / "folder"
    write_shards(folder, per_expert(Toy()))
    (folder / "config.json").write_text(json.dumps({"quantization_config": {"weight_block_size": [64, 64]}}))
    name = {"shard": SHARD.format(2), "index": INDEX, "config": "config.json"}[what]
    if what != "config":
        (folder / "config.json").unlink()
    (folder / name).rename(tmp_path / "blob")
    os.symlink(tmp_path / "blob", folder / name)
    load_fails(folder, name, "got a link to", "allow_links=True")
    if what == "config":  # read like any other
        load_fails(folder, "expected weight_block_size [128, 128], got [64, 64]", allow_links=True)
        return
    assert load_moe_layer(folder, 3, allow_links=True).num_experts == 4


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        "nul",
        '{"weight_map": []}',
        '{"weight_map": {"a": 1}}',
        "[" * 100_000,
        '{"weight_map": 3}',
        "\xff\xfe",
    ],
    ids=lambda text: text[:20],
)
def test_index_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_bytes(text.encode("latin-1"))
    load_fails(tmp_path, INDEX, "expected")


def test_index_with_a_key_twice_and_index_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / INDEX).write_text('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}')
    load_fails(tmp_path, INDEX, "expected each name once, got 'a' several times")
    monkeypatch.setattr("checkpoints.files.MAX_INDEX_BYTES", 10)
    load_fails(tmp_path, INDEX, "expected an index of at most 10 bytes")


# headers


def raw_file(path: Path, header: object, data: bytes = b"", length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


@pytest.mark.parametrize(
    "header, data, length",
    [
        (b"{}", b"", 2**63),
        (b"{}", b"", 2**40),
        (b"\xff" * 20, b"", None),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"\0" * 4, None),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}, b"\0" * 4, None),
        ({"a": {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 4]}}, b"\0" * 4, None),
        ({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, b"\0" * 4, None),
        ({"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}, b"\0" * 4, None),
        ({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}, b"\0" * 8, None),
        (
            {
                "a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
                "b": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
            },
            b"\0" * 4,
            None,
        ),
        ({"a": {"dtype": "U8", "shape": [4], "data_offsets": [2**64 - 4, 2**64]}}, b"\0" * 4, None),
    ],
)
def test_hostile_headers(tmp_path: Path, header: object, data: bytes, length: int | None) -> None:
    raw_file(tmp_path / "model.safetensors", header, data, length)
    load_fails(tmp_path, "model.safetensors: expected a complete safetensors file")


def test_expert_number_of_a_billion_costs_nothing(tmp_path: Path) -> None:
    tensors = per_expert(Toy())
    tensors[f"{P}experts.999999999.gate_proj.weight"] = torch.zeros(1)
    write_shards(tmp_path, tensors)
    load_fails(
        tmp_path, "unknown 'model.layers.3.mlp.experts.999999999.gate_proj.weight'", "experts.4.gate_proj.weight"
    )


# keys

EDITS: dict[str, tuple[Callable[[Tensors], object], list[str]]] = {
    "scale removed": (
        lambda t: t.pop(f"{P}experts.2.up_proj.weight_scale_inv"),
        [
            f"-of-00003.safetensors: {P}experts.2.up_proj.weight: expected its scale "
            f"'{P}experts.2.up_proj.weight_scale_inv' in {INDEX}, got none. The bytes mean nothing without it"
        ],
    ),
    "scale renamed": (
        lambda t: t.update({f"{P}experts.2.up_proj.weight_scale": t.pop(f"{P}experts.2.up_proj.weight_scale_inv")}),
        ["no 'model.layers.3.mlp.experts.2.up_proj.weight_scale_inv'", "unknown", "experts.2.up_proj.weight_scale'"],
    ),
    "shared scale removed": (
        lambda t: t.pop(f"{P}shared_experts.up_proj.weight_scale_inv"),
        [f"{P}shared_experts.up_proj.weight: expected its scale '{P}shared_experts.up_proj.weight_scale_inv' in"],
    ),
    "all scales removed": (
        lambda t: [t.pop(k) for k in list(t) if k.endswith("scale_inv")],
        [
            f"-of-00003.safetensors: {P}experts.0.gate_proj.weight: expected its scale "
            f"'{P}experts.0.gate_proj.weight_scale_inv' for F8_E4M3, got none; ",
            "; and 6 more. The bytes mean nothing without it: fetch the shard",
        ],
    ),
    "unknown key": (
        lambda t: t.update({f"{P}experts.1.gate_proj.bias": torch.zeros(1)}),
        ["unknown", "1.gate_proj.bias"],
    ),
    "extra expert": (
        lambda t: t.update({f"{P}experts.4.up_proj.weight": torch.zeros(1)}),
        ["no 'model.layers.3.mlp.experts.4.gate_proj.weight'"],
    ),
    "expert missing": (
        lambda t: [t.pop(k) for k in list(t) if ".experts.1." in k],
        ["no 'model.layers.3.mlp.experts.1.gate_proj.weight'", "unknown", "experts.3.down_proj.weight"],
    ),
    "last expert missing": (
        lambda t: [t.pop(k) for k in list(t) if ".experts.3." in k],
        [f"{P}gate.weight: expected [3, H]", "got [4, 256]"],
    ),
    "router missing": (lambda t: t.pop(f"{P}gate.weight"), ["no 'model.layers.3.mlp.gate.weight'"]),
    "shared part missing": (
        lambda t: t.pop(f"{P}shared_experts.down_proj.weight"),
        ["no 'model.layers.3.mlp.shared_experts.down_proj.weight'"],
    ),
    "weight missing": (
        lambda t: t.pop(f"{P}experts.0.down_proj.weight"),
        ["no 'model.layers.3.mlp.experts.0.down_proj.weight'"],
    ),
    "wrong shape": (
        lambda t: t.update({f"{P}experts.1.down_proj.weight": t[f"{P}experts.1.down_proj.weight"].t().contiguous()}),
        [f".safetensors: {P}experts.1.down_proj.weight: expected shape [256, 192], got [192, 256]"],
    ),
    "wrong scale shape": (
        lambda t: t.update({f"{P}experts.1.up_proj.weight_scale_inv": torch.ones(1, 2)}),
        [f"{P}experts.1.up_proj.weight_scale_inv: expected shape [2, 2] (128 x 128 blocks of 192 x 256), got [1, 2]"],
    ),
    "per-channel scale": (
        lambda t: t.update({k: torch.ones(t[k[:-10]].shape[0], 1) for k in list(t) if k.endswith("scale_inv")}),
        ["expected shape [2, 2] (128 x 128 blocks of 192 x 256), got [192, 1]", "more."],
    ),
    "one expert in bf16": (
        lambda t: t.update({f"{P}experts.1.up_proj.weight": t[f"{P}experts.1.up_proj.weight"].bfloat16()}),
        ["expected F8_E4M3 as in", "got BF16", "expected no scale of a BF16 weight"],
    ),
    "e5m2": (
        lambda t: t.update({k: t[k].float().to(torch.float8_e5m2) for k in list(t) if k.endswith("_proj.weight")}),
        ["expected a weight of BF16, F16, F32, F8_E4M3 or packed FP4", "got F8_E5M2"],
    ),
    "scales of two dtypes": (
        lambda t: t.update({f"{P}experts.1.up_proj.weight_scale_inv": torch.ones(2, 2).bfloat16()}),
        ["expected one scale dtype in the layer, got BF16, F32"],
    ),
    "bias of a wrong length": (
        lambda t: t.update({f"{P}gate.e_score_correction_bias": torch.zeros(5)}),
        [f"{P}gate.e_score_correction_bias: expected [4] of BF16, F16, F32, got [5] of F32"],
    ),
    "bias of integers": (
        lambda t: t.update({f"{P}gate.e_score_correction_bias": torch.zeros(4, dtype=torch.int32)}),
        ["expected [4] of BF16, F16, F32, got [4] of I32"],
    ),
    "router without dimensions": (lambda t: t.update({f"{P}gate.weight": torch.tensor(1.0)}), ["got [] of F32"]),
    "weight without dimensions": (
        lambda t: t.update({f"{P}experts.0.gate_proj.weight": torch.tensor(1.0).to(torch.float8_e4m3fn)}),
        [f"{P}experts.0.gate_proj.weight: expected shape"],
    ),
    "weight without elements": (
        lambda t: t.update({f"{P}experts.0.gate_proj.weight": torch.zeros(0, 256).to(torch.float8_e4m3fn)}),
        [f"{P}experts.0.gate_proj.weight: expected shape [0, 256]"],
    ),
}


@pytest.mark.parametrize("edit", EDITS)
def test_edited_checkpoint_is_refused_with_names(tmp_path: Path, edit: str) -> None:
    tensors = per_expert(Toy())
    change, words = EDITS[edit]
    change(tensors)
    write_shards(tmp_path, tensors)
    load_fails(tmp_path, *words)


def test_scale_missing_on_another_rank_is_noticed_by_all(tmp_path: Path) -> None:
    tensors = per_expert(Toy())
    del tensors[f"{P}experts.3.up_proj.weight_scale_inv"]
    write_shards(tmp_path, tensors)
    for rank in range(4):
        load_fails(tmp_path, "experts.3.up_proj.weight_scale_inv", rank=rank, num_ranks=4)


def test_bf16_weights_with_scales_are_refused(tmp_path: Path) -> None:
    tensors = per_expert(Toy(scale=None))
    for key in [k for k in tensors if k.endswith("_proj.weight")]:
        tensors[f"{key}_scale_inv"] = torch.ones(2, 2)
    write_shards(tmp_path, tensors)
    load_fails(
        tmp_path, "expected no scale of a BF16 weight, got model.layers.3.mlp.experts.0.gate_proj.weight_scale_inv"
    )


def test_layers_ranks_and_families_that_are_not_there(tmp_path: Path) -> None:
    write_shards(tmp_path, {**per_expert(Toy()), "model.layers.0.mlp.gate_proj.weight": torch.zeros(2, 2)})
    load_fails(tmp_path, "layer: expected the experts of layer 0", "dense layer?", layer=0)
    load_fails(tmp_path, "layer: expected the experts of layer 30", "got none", layer=30)
    load_fails(tmp_path, "rank: expected 0 <= rank < num_ranks, got rank 2 of 2", rank=2, num_ranks=2)
    load_fails(tmp_path, "got rank -1 of 2", rank=-1, num_ranks=2)
    load_fails(tmp_path, "num_ranks: expected a divisor of the 4 experts, got 3", rank=0, num_ranks=3)
    load_fails(tmp_path, "family: expected 'auto' or one of", "'mixtral'", family="mixtral")
    load_fails(tmp_path, "in the names of qwen3-moe", "unknown", "e_score_correction_bias", family="qwen3-moe")
    load_fails(tmp_path, "in the names of deepseek-v4", "no 'layers.3.ffn", family="deepseek-v4")


def test_two_namings_of_one_layer(tmp_path: Path) -> None:
    write_shards(tmp_path, {**per_expert(Toy()), **packed(Toy(inter=256))})
    load_fails(tmp_path, "got mlp.experts.N.gate_proj and mlp.experts.gate_up_proj")


def test_config_decides_what_a_family_must_hold(tmp_path: Path) -> None:
    write_shards(tmp_path, per_expert(Toy(), bias=False))
    assert load_moe_layer(tmp_path, 3).family == "deepseek-v2"
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "kimi_k2"}))
    load_fails(tmp_path, "in the names of kimi-k2", "no 'model.layers.3.mlp.gate.e_score_correction_bias'")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"weight_block_size": [64, 128]}}))
    load_fails(tmp_path, "config.json: expected weight_block_size [128, 128], got [64, 128]")
    (tmp_path / "config.json").write_text("[]")
    load_fails(tmp_path, "config.json: expected an object")
    (tmp_path / "config.json").write_text("{")
    load_fails(tmp_path, "config.json: expected JSON")
    (tmp_path / "config.json").write_text(" " * (MAX_CONFIG_BYTES + 1))
    load_fails(tmp_path, f"config.json: expected at most {MAX_CONFIG_BYTES} bytes")


def test_a_linked_config_says_as_much_as_a_file(tmp_path: Path) -> None:
    write_shards(tmp_path / "folder", per_expert(Toy(), bias=False))
    (tmp_path / "blob").write_text(json.dumps({"model_type": "deepseek_v3"}))
    os.symlink(tmp_path / "blob", tmp_path / "folder" / "config.json")
    load_fails(tmp_path / "folder", "in the names of deepseek-v3", "correction_bias", allow_links=True)
    (tmp_path / "folder" / "config.json").unlink()
    (tmp_path / "folder" / "other.json").write_text(json.dumps({"model_type": "deepseek_v3"}))
    os.symlink("other.json", tmp_path / "folder" / "config.json")  # inside the folder: needs no leave
    load_fails(tmp_path / "folder", "in the names of deepseek-v3", "correction_bias")


def test_packed_shapes(tmp_path: Path) -> None:
    tensors = packed(Toy(inter=256))
    key = f"{P}experts.gate_up_proj"
    write_shards(tmp_path / "odd", {**tensors, key: torch.zeros(4, 5, 256).to(torch.float8_e4m3fn)})
    load_fails(tmp_path / "odd", f"{key}: expected [E, 2I, H], got shape [4, 5, 256]")
    write_shards(tmp_path / "few", {**tensors, key: tensors[key][:3].clone()})
    load_fails(tmp_path / "few", f"{key}: expected shape [4, 512, 256], got [3, 512, 256]")
    write_shards(tmp_path / "router", {**tensors, f"{P}gate.weight": torch.zeros(())})
    load_fails(tmp_path / "router", "gate.weight: expected [0, H]")


def test_packed_fp4_is_refused(tmp_path: Path) -> None:
    tensors = packed(Toy(inter=256))
    key = f"{P}experts.gate_up_proj"
    tensors[key] = torch.zeros(4, 512, 128, dtype=torch.uint8)
    tensors[f"{P}experts.down_proj"] = torch.zeros(4, 256, 128, dtype=torch.uint8)
    for name, shape in ((f"{key}_scale_inv", (4, 512, 8)), (f"{P}experts.down_proj_scale_inv", (4, 256, 8))):
        tensors[name] = torch.full(shape, 127, dtype=torch.uint8)
    write_shards(tmp_path, tensors)
    load_fails(tmp_path, f"{key}_scale_inv: expected FP4 experts in tensors of their own")


def test_shard_that_changes_after_its_header_was_checked(tmp_path: Path) -> None:
    tensors = per_expert(Toy())
    weight_map = write_shards(tmp_path, tensors)
    source = open_source(tmp_path)
    key = sorted(weight_map)[0]
    request = ReadRequest(key, lambda tensor: None)
    save_file({"other": torch.zeros(1)}, tmp_path / weight_map[key])
    with pytest.raises(CheckpointError, match=rf"{weight_map[key]}: expected tensor '{key}'"):
        source.read([request])
    (tmp_path / weight_map[key]).unlink()
    with pytest.raises(CheckpointError, match=rf"{weight_map[key]}: expected a complete safetensors file"):
        source.read([request])


def test_v4_layer_needs_a_bias_or_a_table_and_its_own_scales(tmp_path: Path) -> None:
    tensors = v4_layer(Toy(), "I8")
    write_shards(tmp_path / "a", {k: t for k, t in tensors.items() if not k.endswith("gate.bias")})
    load_fails(tmp_path / "a", "no 'layers.3.ffn.gate.bias or layers.3.ffn.gate.tid2eid'")
    table = {"layers.3.ffn.gate.tid2eid": torch.zeros(50, 2)}
    write_shards(tmp_path / "b", {**tensors, **table})
    load_fails(tmp_path / "b", "gate.tid2eid: expected [vocabulary, K] of I32, I64, got [50, 2] of F32")
    scale = "layers.3.ffn.experts.1.w1.scale"
    write_shards(tmp_path / "c", {**tensors, scale: torch.ones(192, 8)})
    load_fails(tmp_path / "c", f"{scale}: expected a scale of dtype F8_E8M0, U8, got F32")
    write_shards(tmp_path / "d", {**tensors, scale: tensors[scale][:, :4].contiguous()})
    load_fails(tmp_path / "d", f"{scale}: expected shape [192, 8] (1 x 32 blocks of 192 x 256), got [192, 4]")
    with pytest.raises(CheckpointError, match=r"w2.scale: expected .* K a multiple of 32, got K = 80"):
        write_shards(tmp_path / "e", v4_layer(Toy(inter=80), "I8"))
        load_moe_layer(tmp_path / "e", 3)


def test_message_lists_few_keys_and_the_number_of_the_rest(tmp_path: Path) -> None:
    write_shards(tmp_path, {k: t for k, t in per_expert(Toy(experts=40)).items() if "up_proj" not in k})
    message = load_fails(tmp_path, "more")
    assert len(message) < 1500 and re.search(r"and \d+ more", message)


def mutated(data: bytes, end: int, rng: random.Random) -> bytes:
    """Some bytes before `end` overwritten, removed or inserted."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(end)
        kind = rng.random()
        if kind < 0.4:
            changed[at] = rng.randrange(256)
        elif kind < 0.7:
            changed[at] = rng.choice(b'0123456789-,:"{}[]')
        elif kind < 0.85:
            del changed[at : at + rng.randrange(1, 20)]
        else:
            changed[at:at] = rng.randbytes(rng.randrange(1, 8))
    return bytes(changed)


def test_random_damage_to_index_and_headers_is_refused_or_harmless(tmp_path: Path) -> None:
    write_shards(tmp_path, per_expert(Toy(hidden=128, inter=32)))
    want = load_moe_layer(tmp_path, 3)
    good = {path: path.read_bytes() for path in sorted(tmp_path.iterdir())}
    rng, refused = random.Random(0), 0
    for _ in range(300):
        path = rng.choice(list(good))
        data = good[path]
        end = len(data) if path.suffix == ".json" else 8 + struct.unpack("<Q", data[:8])[0]
        path.write_bytes(mutated(data, end, rng))
        try:
            got = load_moe_layer(tmp_path, 3)
            assert same_bytes(got.w13_E2IH, want.w13_E2IH) and same_bytes(got.w13_scale, want.w13_scale)
        except CheckpointError:
            refused += 1
        path.write_bytes(data)
    assert refused > 250
