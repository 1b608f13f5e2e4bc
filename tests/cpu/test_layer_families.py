"""What the layer is told about tokens: vocabulary ids of hash layers, replayed experts, masks; over ranks too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megamoe.comm import LocalWorld
from megamoe.config import MoEConfig
from megamoe.errors import MegaMoEValueError
from megamoe.layer import MegaMoE
from tests.support.toy_checkpoint import Toy, packed, write_shards
from tests.support.toy_fp4 import v4_layer

CONFIG = MoEConfig(256, 128, 4, 2, num_shared_experts=1)
T = 24


def make(world: LocalWorld | None = None, **fields) -> MegaMoE:
    torch.manual_seed(0)
    config = MoEConfig(256, 128, 4, 2, **fields)
    layer = MegaMoE(config, backend="torch", world=world)
    if config.hash_vocab_size:
        layer.router.tid2eid.copy_(torch.rand(config.hash_vocab_size, 4).argsort(1)[:, :2])
    return layer


def tokens() -> torch.Tensor:
    return torch.randn(T, 256, generator=torch.Generator().manual_seed(1)).bfloat16()


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v4", "qwen3_moe", "gpt_oss"])
def test_each_family_over_ranks_equals_one_rank(family: str) -> None:
    one, two = make(family=family), make(LocalWorld(2), family=family)
    two.load_state_dict(one.state_dict())
    x = tokens()
    out, counts = one(x, return_expert_counts=True)
    outs, both = two([x[:10], x[10:]], return_expert_counts=True)
    assert torch.equal(torch.cat(outs), out) and torch.equal(sum(both), counts)


def test_replayed_experts_give_the_same_output() -> None:
    layer, x = make(num_shared_experts=1), tokens()
    ids, _ = layer.router(x)
    out = layer(x)
    assert torch.equal(layer(x, topk_ids=ids), out)
    assert torch.equal(layer(x.view(2, 12, 256), topk_ids=ids.view(2, 12, 2)).view(T, 256), out)
    others = layer(x, topk_ids=(ids + 1) % 4)
    assert not torch.equal(others, out)
    out, counts = layer(x, topk_ids=torch.full_like(ids, -1), return_expert_counts=True)
    assert counts.tolist() == [0, 0, 0, 0] and torch.equal(out, make_shared_only(layer, x))


def make_shared_only(layer: MegaMoE, x: torch.Tensor) -> torch.Tensor:
    return layer.shared(x, torch.zeros(T, 1, dtype=torch.int64), torch.ones(T, 1))


def test_masked_tokens_are_not_read_and_get_nothing() -> None:
    layer, x = make(num_shared_experts=1), tokens()
    mask = torch.arange(T) % 3 != 0
    poisoned = x.clone()
    poisoned[~mask] = float("nan")
    poisoned.requires_grad_()
    out, counts = layer(poisoned, token_mask=mask, return_expert_counts=True)
    assert torch.equal(out[mask], layer(x)[mask]) and (out[~mask] == 0).all()
    assert int(counts.sum()) == 2 * int(mask.sum())
    out.sum().backward()
    assert (poisoned.grad[~mask] == 0).all() and poisoned.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in layer.parameters() if p.grad is not None)


def test_hash_layer_over_ranks() -> None:
    fields = dict(family="deepseek_v4", hash_vocab_size=30)
    one, two = make(**fields), make(LocalWorld(2), **fields)
    two.load_state_dict(one.state_dict())
    x, words = tokens(), torch.randint(0, 30, (T,))
    out, counts = one(x.view(2, 12, 256), token_ids=words.view(2, 12), return_expert_counts=True)
    assert torch.equal(counts, one.router.tid2eid[words].flatten().bincount(minlength=4))
    outs = two([x[:7], x[7:]], token_ids=[words[:7], words[7:]])
    assert torch.equal(torch.cat(outs), out.view(T, 256))
    with pytest.raises(MegaMoEValueError, match=r"token_ids: expected the vocabulary ids of a hash layer's tokens"):
        one(x)


def test_v4_fp4_checkpoint_becomes_a_hash_layer(tmp_path: Path) -> None:
    write_shards(tmp_path, v4_layer(Toy(inter=128), "I8", hashed=True))
    config = MoEConfig(256, 128, 4, 2, num_shared_experts=1, family="deepseek_v4")
    layer = MegaMoE.from_checkpoint(tmp_path, 3, config=config, backend="torch")
    assert layer.router.tid2eid.shape == (50, 2) and layer.experts.w13.dtype == torch.float8_e4m3fn
    assert layer(tokens(), token_ids=torch.arange(T)).isfinite().all()
    with pytest.raises(MegaMoEValueError, match=r"config.top_k: expected 2 as in the checkpoint, got 3"):
        wrong = MoEConfig(256, 128, 4, 3, num_shared_experts=1, family="deepseek_v4")
        MegaMoE.from_checkpoint(tmp_path, 3, config=wrong)


def test_qwen3_is_read_as_qwen3(tmp_path: Path) -> None:
    write_shards(tmp_path, packed(Toy(inter=128, shared=0, scale=None), bias=False))
    fields = '"hidden_size": 256, "moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2'
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe", "norm_topk_prob": true, ' + fields + "}")
    layer = MegaMoE.from_checkpoint(tmp_path, 3, backend="torch")
    _, weights = layer.router(tokens())
    logits = torch.nn.functional.linear(tokens().float(), layer.router.weight.float())
    want = logits.softmax(-1).topk(2).values
    torch.testing.assert_close(weights, want / want.sum(1, keepdim=True))


def test_refusals() -> None:
    layer, pair, x = make(), make(LocalWorld(2)), tokens()
    with pytest.raises(MegaMoEValueError, match=r"token_mask: expected 24 tokens as in x, got 23"):
        layer(x, token_mask=torch.ones(23, dtype=torch.bool))
    with pytest.raises(MegaMoEValueError, match=r"topk_ids: expected \[T = 24, K = 2\], got shape \(24, 3\)"):
        layer(x, topk_ids=torch.zeros(T, 3, dtype=torch.int64))
    with pytest.raises(MegaMoEValueError, match=r"token_ids: expected one tensor for each of the 2 of x, got 1"):
        pair([x, x], token_ids=[torch.zeros(T)])
    with pytest.raises(MegaMoEValueError, match=r"topk_ids\[1\]: expected 24 tokens as in x, got 20"):
        ids = torch.zeros(T, 2, dtype=torch.int64)
        pair([x, x], topk_ids=[ids, ids[:20]])
