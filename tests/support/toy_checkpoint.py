"""Small checkpoints in the names of every model family, whose tensors are random bytes or say which expert they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.support.compare import as_bytes

FP8 = torch.float8_e4m3fn
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Toy:
    """Sizes and encoding of a toy layer; `scale` names the dtype of 128 x 128 scales, None means bf16 weights."""

    experts: int = 4
    hidden: int = 256
    inter: int = 192
    layer: int = 3
    scale: str | None = "F32"
    shared: int = 1
    seed: int = 0


def blocks(n: int) -> int:
    return -(-n // 128)


def random_scale(gen: torch.Generator, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """Scales whose every element differs from its neighbours, in a storage dtype."""
    if dtype in ("F8_E8M0", "U8"):
        exponents = torch.randint(100, 140, shape, generator=gen, dtype=torch.uint8)
        return exponents if dtype == "U8" else exponents.view(torch.float8_e8m0fnu)
    scale = torch.rand(shape, generator=gen) * 0.01 + 0.001
    return scale.to(torch.bfloat16) if dtype == "BF16" else scale


def random_weight(gen: torch.Generator, toy: Toy, *shape: int) -> torch.Tensor:
    w = torch.randn(shape, generator=gen)
    return w.to(torch.bfloat16 if toy.scale is None else FP8)


def per_expert(toy: Toy, *, bias: bool = True, names: str = "deepseek") -> dict[str, torch.Tensor]:
    """`mlp.experts.N.gate_proj.weight` or, for names="v4", `ffn.experts.N.w1.weight`."""
    gen = torch.Generator().manual_seed(toy.seed)
    v4 = names == "v4"
    prefix = f"layers.{toy.layer}.ffn." if v4 else f"model.layers.{toy.layer}.mlp."
    parts = ("w1", "w3", "w2") if v4 else ("gate_proj", "up_proj", "down_proj")
    suffix = "scale" if v4 else "weight_scale_inv"
    tensors = {f"{prefix}gate.weight": torch.randn(toy.experts, toy.hidden, generator=gen).bfloat16()}
    if bias:
        name = "gate.bias" if v4 else "gate.e_score_correction_bias"
        tensors[prefix + name] = torch.randn(toy.experts, generator=gen)
    owners = [(f"{prefix}experts.{e}", toy.inter) for e in range(toy.experts)]
    owners += [(f"{prefix}shared_experts", toy.inter * toy.shared)] if toy.shared else []
    for owner, inter in owners:
        for part, (n, k) in zip(parts, ((inter, toy.hidden), (inter, toy.hidden), (toy.hidden, inter)), strict=True):
            tensors[f"{owner}.{part}.weight"] = random_weight(gen, toy, n, k)
            if toy.scale is not None:
                tensors[f"{owner}.{part}.{suffix}"] = random_scale(gen, (blocks(n), blocks(k)), toy.scale)
    return tensors


def packed(toy: Toy, *, bias: bool = True) -> dict[str, torch.Tensor]:
    """transformers' `mlp.experts.gate_up_proj` [E, 2I, H] and `down_proj` [E, H, I]; shared experts as everywhere."""
    single = per_expert(toy, bias=bias)
    gen = torch.Generator().manual_seed(toy.seed + 1)
    prefix = f"model.layers.{toy.layer}.mlp."
    tensors = {key: t for key, t in single.items() if ".experts." not in key}
    for name, n, k in (("gate_up_proj", 2 * toy.inter, toy.hidden), ("down_proj", toy.hidden, toy.inter)):
        tensors[f"{prefix}experts.{name}"] = random_weight(gen, toy, toy.experts, n, k)
        if toy.scale is not None:
            shape = (toy.experts, blocks(n), blocks(k))
            tensors[f"{prefix}experts.{name}_scale_inv"] = random_scale(gen, shape, toy.scale)
    return tensors


def write_shards(
    folder: Path, tensors: dict[str, torch.Tensor], num_shards: int = 3, shard_of: Callable[[str], int] | None = None
) -> dict[str, str]:
    """Write shards and an index; by default keys go to shards in turn, so that neighbours are apart."""
    folder.mkdir(parents=True, exist_ok=True)
    weight_map = {}
    for i, key in enumerate(sorted(tensors)):
        number = shard_of(key) if shard_of is not None else i % num_shards
        weight_map[key] = f"model-{number + 1:05d}-of-{num_shards:05d}.safetensors"
    for file in sorted(set(weight_map.values())):
        save_file({key: t for key, t in tensors.items() if weight_map[key] == file}, folder / file)
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: object) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal dtype, shape and bytes (so NaN and -0 count)."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(as_bytes(a), as_bytes(b))
