"""Writing FP8 shards from a bf16 checkpoint, with the project's quantiser, from a model that transformers saved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import CheckpointError, convert_to_fp8, load_moe_layer
from checkpoints.save import INDEX_NAME
from megamoe.quantize import quantize_matrix, quantize_weight
from megamoe.recipe import Recipe
from tests.support.toy_checkpoint import Toy, per_expert, same_bytes, write_shards


@pytest.fixture(scope="module")
def hf_model():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(
        vocab_size=64,
        hidden_size=256,
        intermediate_size=128,
        moe_intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_routed_experts=4,
        n_shared_experts=2,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=16,
        first_k_dense_replace=1,
    )
    return transformers.DeepseekV3ForCausalLM(config).to(torch.bfloat16)


def test_model_saved_by_transformers_converted_and_loaded(tmp_path: Path, hf_model) -> None:
    hf_model.save_pretrained(tmp_path / "bf16", max_shard_size="500KB")
    keys = convert_to_fp8(tmp_path / "bf16", tmp_path / "fp8", quantize_matrix)
    assert len(keys) == 3 * (4 + 1)
    moe = hf_model.model.layers[1].mlp
    plain = load_moe_layer(tmp_path / "bf16", 1)
    assert torch.equal(plain.w13_E2IH, moe.experts.gate_up_proj) and torch.equal(plain.w2_EHI, moe.experts.down_proj)
    assert torch.equal(plain.router_weight, moe.gate.weight)
    assert torch.equal(plain.shared.w2[0], moe.shared_experts.down_proj.weight)
    for rank in range(2):
        got = load_moe_layer(tmp_path / "fp8", 1, rank=rank, num_ranks=2)
        w13 = quantize_weight(moe.experts.gate_up_proj[2 * rank : 2 * rank + 2], Recipe(), row_groups=2)
        assert same_bytes(got.w13_E2IH, w13.data) and same_bytes(got.w13_scale, w13.scale)
        assert got.shared.w13.shape == (1, 2 * 2 * 192, 256) and got.shared.w13_scale.shape == (1, 6, 2)


def test_everything_else_is_copied(tmp_path: Path, hf_model) -> None:
    hf_model.save_pretrained(tmp_path / "bf16", max_shard_size="500KB")
    keys = set(convert_to_fp8(tmp_path / "bf16", tmp_path / "fp8", quantize_matrix))

    def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
        return {key: t for path in folder.glob("*.safetensors") for key, t in load_file(path).items()}

    before, after = all_tensors(tmp_path / "bf16"), all_tensors(tmp_path / "fp8")
    assert set(after) == set(before) | {f"{key}_scale_inv" for key in keys}
    assert all(same_bytes(before[key], after[key]) for key in before if key not in keys)
    index = json.loads((tmp_path / "fp8" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(after)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in after.values())
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    assert config["quantization_config"]["weight_block_size"] == [128, 128]
    assert "model.layers.1.mlp.gate" in config["quantization_config"]["modules_to_not_convert"]
    assert not any(".experts." in name for name in config["quantization_config"]["modules_to_not_convert"])


SMALL = {
    "tokenizer.model": b"\0\xff",
    "merges.txt": b"a b",
    "chat_template.jinja": b"{{ x }}",
    "modeling_own.py": b"pass",
    "generation_config.json": b"{}",
    "LICENSE": b"free",
}


def test_every_small_file_is_copied_and_no_weights(tmp_path: Path) -> None:
    source, target = tmp_path / "bf16", tmp_path / "fp8"
    write_shards(source, per_expert(Toy(scale=None)))
    for name, content in SMALL.items():
        (source / name).write_bytes(content)
    for name in ("pytorch_model.bin", "consolidated.00.pth", "pytorch_model.bin.index.json"):
        (source / name).write_bytes(b"weights")
    (source / "original").mkdir()
    convert_to_fp8(source, target, quantize_matrix)
    shards = {path.name for path in source.glob("*.safetensors")}
    assert {path.name for path in target.iterdir()} == set(SMALL) | shards | {INDEX_NAME}
    assert {name: (target / name).read_bytes() for name in SMALL} == SMALL


def test_links_are_followed_where_that_is_allowed(tmp_path: Path) -> None:
    source, blobs = tmp_path / "bf16", tmp_path / "blobs"
    write_shards(source, per_expert(Toy(scale=None)))
    (source / "config.json").write_text('{"model_type": "deepseek_v3"}')
    (source / "tokenizer.model").write_bytes(b"tokens")
    blobs.mkdir()
    for path in sorted(source.iterdir()):  # as the Hugging Face cache does
        path.rename(blobs / path.name)
        path.symlink_to(blobs / path.name)
    convert_to_fp8(source, tmp_path / "all", quantize_matrix, allow_links=True)
    assert (tmp_path / "all" / "tokenizer.model").read_bytes() == b"tokens"
    config = json.loads((tmp_path / "all" / "config.json").read_text())
    assert config["model_type"] == "deepseek_v3" and config["quantization_config"]["quant_method"] == "fp8"
    for path in sorted(blobs.iterdir()):
        if path.name != "tokenizer.model":
            (source / path.name).unlink()
            path.rename(source / path.name)
    with pytest.raises(CheckpointError, match=r"tokenizer.model: expected a file inside .*, got a link to .*allow_li"):
        convert_to_fp8(source, tmp_path / "one", quantize_matrix)
    assert not (tmp_path / "one").exists()


def test_a_lone_file_brings_its_configuration_and_nothing_else(tmp_path: Path) -> None:
    write_shards(tmp_path / "bf16", per_expert(Toy(scale=None)), num_shards=1)
    (file,) = (tmp_path / "bf16").glob("*.safetensors")
    for name in ("config.json", "diary.json"):
        (tmp_path / "bf16" / name).write_text("{}")
    convert_to_fp8(file, tmp_path / "fp8", quantize_matrix)
    assert {path.name for path in (tmp_path / "fp8").iterdir()} == {file.name, "config.json", INDEX_NAME}


def test_a_shard_that_is_not_finished_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shards(tmp_path / "bf16", per_expert(Toy(scale=None)))

    def full(tensors: object, path: Path, metadata: object) -> None:
        Path(path).write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr("checkpoints.save.save_file", full)
    with pytest.raises(OSError, match="no space left"):
        convert_to_fp8(tmp_path / "bf16", tmp_path / "fp8", quantize_matrix)
    assert not list((tmp_path / "fp8").iterdir())


def test_refusals(tmp_path: Path) -> None:
    write_shards(tmp_path / "bf16", per_expert(Toy(scale=None)))
    write_shards(tmp_path / "fp8", per_expert(Toy()))
    save_file({"model.embed.weight": torch.zeros(2, 2)}, tmp_path / "one.safetensors")
    out = tmp_path / "out"
    with pytest.raises(CheckpointError, match=r"target_folder: expected a new or empty folder"):
        convert_to_fp8(tmp_path / "bf16", tmp_path / "fp8", quantize_matrix)
    with pytest.raises(CheckpointError, match=r"select: .* got 'model.layers.3.mlp.experts.0.down_proj.weight'"):
        convert_to_fp8(tmp_path / "fp8", out, quantize_matrix)
    with pytest.raises(CheckpointError, match=r"select: .* got nothing selected"):
        convert_to_fp8(tmp_path / "one.safetensors", out, quantize_matrix)
    with pytest.raises(CheckpointError, match=r"select: .* got '.*e_score_correction_bias'"):
        convert_to_fp8(tmp_path / "bf16", out, quantize_matrix, select=lambda key: key.endswith("bias"))
    assert not out.exists()
    with pytest.raises(CheckpointError, match=r"quantize: expected float8_e4m3fn and fp32 scales, got torch.bfloat16"):
        convert_to_fp8(tmp_path / "bf16", out, lambda w: (w, quantize_matrix(w)[1]))
    with pytest.raises(CheckpointError, match=r"quantize: expected scales of shape \(2, 2\) for .*down_proj"):
        convert_to_fp8(
            tmp_path / "bf16", tmp_path / "out2", lambda w: (quantize_matrix(w)[0], quantize_matrix(w)[1][:1])
        )
    assert not list(out.glob("*.index.json"))
