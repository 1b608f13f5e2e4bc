"""A layer goes into a checkpoint and comes back: the same bytes, trained or as loaded, whole or rank by rank."""

import dataclasses

import pytest
import torch
import torch.distributed as dist

from checkpoints import CheckpointError, save_moe_layer, write_index
from megamoe import LocalWorld, MegaMoE, MoEConfig
from megamoe.errors import MegaMoEValueError
from megamoe.integrations.lora import add_lora
from tests.support.compare import assert_bitwise
from tests.support.distributed import run_ranks
from tests.support.fake_cute import install

CONFIG = MoEConfig(256, 192, num_experts=4, top_k=2, num_shared_experts=1, initializer_range=0.1)


def tokens(seed=1):
    return torch.randn(12, 256, generator=torch.Generator().manual_seed(seed)).bfloat16()


def saved(layer, folder, **options):
    save_moe_layer(folder, layer.checkpoint_tensors(3, **options))
    write_index(folder)
    return folder


def assert_same_state(got, want):
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert_bitwise(got[name], tensor, name)


@pytest.mark.parametrize("weights", ["fp8", "bf16", "fp32"])
@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v2", "qwen3_moe"])
def test_what_was_trained_comes_back(weights, family, tmp_path):
    config = dataclasses.replace(CONFIG, family=family, num_shared_experts=0 if family == "qwen3_moe" else 1)
    layer = MegaMoE(config, weights=weights, backend="torch")
    layer.router.correction_bias.normal_(std=0.01) if family == "deepseek_v3" else None
    optimizer = torch.optim.SGD([p for p in layer.parameters() if p.requires_grad], lr=0.1)
    layer(tokens()).float().square().sum().backward()
    optimizer.step()
    again = MegaMoE.from_checkpoint(saved(layer, tmp_path), 3, config=config, backend="torch")
    assert again.weights == weights
    assert_same_state(again.state_dict(), layer.state_dict())


def test_a_hash_layer_comes_back(tmp_path):
    config = dataclasses.replace(CONFIG, family="deepseek_v4", hash_vocab_size=10)
    layer = MegaMoE(config, backend="torch")
    layer.router.tid2eid.copy_(torch.rand(10, 4).argsort(1)[:, :2])
    again = MegaMoE.from_checkpoint(saved(layer, tmp_path), 3, config=config, backend="torch")
    assert_same_state(again.state_dict(), layer.state_dict())


def test_packed_weights_are_saved_as_they_came(tmp_path, monkeypatch):
    install(monkeypatch)
    config = dataclasses.replace(CONFIG, intermediate_size=128)
    layer = MegaMoE(config, weights="fp8", backend="cute")
    want = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    layer.pack_weights()
    again = MegaMoE.from_checkpoint(saved(layer, tmp_path), 3, config=config, backend="torch")
    assert layer.experts.is_packed
    assert_same_state(again.state_dict(), want)


def test_virtual_ranks_are_saved_whole(tmp_path):
    layer = MegaMoE(CONFIG, world=LocalWorld(2), backend="torch")
    again = MegaMoE.from_checkpoint(saved(layer, tmp_path), 3, config=CONFIG, backend="torch")
    assert_same_state(again.state_dict(), layer.state_dict())


def save_own_part(rank, folder):
    layer = MegaMoE(CONFIG, world=dist.group.WORLD, backend="torch")
    torch.manual_seed(5)  # router and shared expert are the same on all ranks
    layer.router.reset_parameters(), layer.shared.reset_parameters(0.1)
    torch.manual_seed(6 + rank)
    layer.experts.reset_parameters(0.1)
    save_moe_layer(folder, layer.checkpoint_tensors(3))
    return layer.experts.w13.detach(), layer.shared.w2.detach()


def test_each_rank_saves_its_own_experts(tmp_path):
    parts = run_ranks(save_own_part, 2, str(tmp_path))
    write_index(tmp_path)
    whole = MegaMoE.from_checkpoint(tmp_path, 3, config=CONFIG, backend="torch")
    assert_bitwise(whole.experts.w13.detach(), torch.cat([w13 for w13, _ in parts]), "w13")
    assert_bitwise(whole.shared.w2.detach(), parts[0][1], "shared w2")


def test_other_names(tmp_path):
    config = dataclasses.replace(CONFIG, intermediate_size=128)
    layer = MegaMoE(config, weights="fp8", backend="torch")
    again = MegaMoE.from_checkpoint(saved(layer, tmp_path, family="packed"), 3, config=config, backend="torch")
    assert_same_state(again.state_dict(), layer.state_dict())
    with pytest.raises(CheckpointError, match="family: expected one of"):
        saved(layer, tmp_path, family="llama")


def test_refused():
    layer = MegaMoE(CONFIG, weights="fp8", backend="torch")
    layer.router.linear_bias = torch.nn.Parameter(torch.zeros(4))
    add_lora(layer, rank=2)
    with pytest.raises(MegaMoEValueError, match=r"(?s)experts without adapters.*router: expected no linear bias"):
        layer.checkpoint_tensors(3)
