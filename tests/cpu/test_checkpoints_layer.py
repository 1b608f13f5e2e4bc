"""Checkpoints through the layer: values that say which matrix and expert they are, and scales that stay as stored."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megamoe.config import MoEConfig
from megamoe.layer import MegaMoE
from megamoe.quantize import QuantizedWeight
from megamoe.recipe import Recipe
from tests.support.distributed import run_ranks
from tests.support.toy_checkpoint import Toy, packed, per_expert, same_bytes, write_shards

H, INTER, E = 256, 128, 4
CONFIG = MoEConfig(H, INTER, E, 2)


def constants(names: str) -> dict[str, torch.Tensor]:
    """Of expert e: gate gives 1 + e, up gives 3, down averages; the router likes all experts alike."""
    toy = Toy(E, H, INTER, scale=None, shared=0)
    tensors = packed(toy, bias=False) if names == "packed" else per_expert(toy, bias=False)
    for key, tensor in tensors.items():
        if ".experts." not in key:
            tensor.zero_()
        elif names == "packed":
            for e in range(E):
                if "gate_up" in key:
                    tensor[e, :INTER], tensor[e, INTER:] = (1 + e) / H, 3 / H
                else:
                    tensor[e] = 1 / INTER
        else:
            expert = int(key.split(".experts.")[1].split(".")[0])
            value = {"gate_proj": (1 + expert) / H, "up_proj": 3 / H, "down_proj": 1 / INTER}
            tensor.fill_(value[key.split(".")[-2]])
    return tensors


@pytest.mark.parametrize("names", ["deepseek", "packed"])
def test_gate_is_gate_and_up_is_up(tmp_path: Path, names: str) -> None:
    """silu(c1) * c2 is not silu(c2) * c1."""
    tensors = constants(names)
    write_shards(tmp_path, tensors)
    layer = MegaMoE.from_checkpoint(tmp_path, 3, config=CONFIG, backend="torch", recipe=Recipe("bf16"))
    x = torch.ones(E, H, dtype=torch.bfloat16)
    ids = torch.arange(E)[:, None].expand(E, 2).contiguous()
    ids[:, 1] = -1
    out = layer.experts(x, ids, torch.ones(E, 2))
    want = torch.nn.functional.silu(1.0 + torch.arange(E)) * 3
    torch.testing.assert_close(out[:, 0].float(), want, rtol=0.02, atol=0)
    again = MegaMoE.from_checkpoint(tmp_path, 3, config=CONFIG, backend="torch", recipe=Recipe("bf16"))
    assert torch.equal(again.experts(x, ids, torch.ones(E, 2)), out)
    state = layer.state_dict()
    if names == "packed":
        assert same_bytes(state["experts.w13"], tensors["model.layers.3.mlp.experts.gate_up_proj"])
        assert same_bytes(state["experts.w2"], tensors["model.layers.3.mlp.experts.down_proj"])
    again.load_state_dict(state)
    assert torch.equal(again.experts(x, ids, torch.ones(E, 2)), out)


@pytest.mark.parametrize("scale_format", ["fp32", "pow2"])
def test_weight_scales_are_never_rounded(tmp_path: Path, scale_format: str) -> None:
    """Scales of 1.01, 1.5 and 1.99 times a power of two keep their values, whatever the format of activation scales."""
    tensors = per_expert(Toy(E, H, INTER, shared=0), bias=False)
    for key in [key for key in tensors if key.endswith("scale_inv")]:
        n = tensors[key].numel()
        mantissa = torch.tensor([1.01, 1.5, 1.99]).repeat(n)[:n]
        tensors[key] = (mantissa * 2.0 ** -torch.arange(n)).view(tensors[key].shape)
    write_shards(tmp_path, tensors)
    recipe = Recipe(scale_format=scale_format)
    layer = MegaMoE.from_checkpoint(tmp_path, 3, config=CONFIG, backend="torch", recipe=recipe)
    experts = layer.experts
    experts(torch.randn(8, H).bfloat16(), torch.zeros(8, 2, dtype=torch.int64), torch.ones(8, 2))
    used = QuantizedWeight(experts.w13, experts.w13_scale, 2).dequantize()
    for e in range(E):
        for part, name in enumerate(("gate_proj", "up_proj")):
            key = f"model.layers.3.mlp.experts.{e}.{name}.weight"
            scale = tensors[f"{key}_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
            assert torch.equal(used[e, part * INTER : (part + 1) * INTER], tensors[key].float() * scale)


def held_by(rank: int, folder: str, pairs: list[list[int]]) -> tuple[list[float], list[float]] | None:
    """First weights of w13 and w2 of this rank's experts, loaded over the group it belongs to."""
    groups = [dist.new_group(members) for members in pairs]
    mine = [group for group, members in zip(groups, pairs, strict=True) if rank in members]
    if not mine:
        return None
    layer = MegaMoE.from_checkpoint(folder, 3, config=CONFIG, world=mine[0], backend="torch")
    for weight in (layer.experts.w13, layer.experts.w2):
        assert weight.isfinite().all() and (weight == weight[:, :1, :1]).all()
    return layer.experts.w13[:, 0, 0].tolist(), layer.experts.w2[:, 0, 0].tolist()


@pytest.mark.parametrize("pairs", [[[0, 2], [1, 3]], [[2, 3]]], ids=["interleaved", "upper"])
def test_rank_in_the_group_decides_which_experts_are_read(tmp_path: Path, pairs: list[list[int]]) -> None:
    """Global ranks 2 and 3 are ranks 0 and 1 of their group."""
    tensors = per_expert(Toy(E, H, INTER, scale=None, shared=0), bias=False)
    for key, tensor in tensors.items():
        if ".experts." in key:
            tensor.fill_(float(key.split(".experts.")[1].split(".")[0]))
    write_shards(tmp_path, tensors)
    results = run_ranks(held_by, 4, str(tmp_path), pairs)
    for members in pairs:
        for rank_in_group, rank in enumerate(members):
            want = [2.0 * rank_in_group, 2.0 * rank_in_group + 1]
            assert results[rank] == (want, want)
