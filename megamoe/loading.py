"""From what a checkpoint stores to what a layer holds: configuration, place among the ranks, weight formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist

import checkpoints
from megamoe.comm import Hierarchy
from megamoe.config import MoEConfig
from megamoe.context import World
from megamoe.errors import MegaMoEValueError, expected
from megamoe.quantize import FP8, QuantizedWeight, quantize_weight
from megamoe.recipe import Recipe

WeightFormat: TypeAlias = Literal["fp8", "bf16", "fp32"]
DTYPES: dict[str, torch.dtype] = {"fp8": FP8, "bf16": torch.bfloat16, "fp32": torch.float32}


def read_config(folder: Path) -> dict[str, Any]:
    """The contents of a checkpoint's config.json.

    Raises:
        MegaMoEValueError: there is none, or it is no JSON object.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise MegaMoEValueError(
            expected("folder", "a folder with a config.json", str(folder), "Or pass config=MoEConfig(...).")
        )
    try:
        config = json.loads(path.read_bytes())
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise MegaMoEValueError(expected(str(path), "JSON", str(error)[:120])) from error
    if not isinstance(config, dict):
        raise MegaMoEValueError(expected(str(path), "a JSON object", type(config).__name__))
    return config


def place(world: World) -> tuple[int, int]:
    """(which part of the experts this process holds, how many parts there are)."""
    if isinstance(world, dist.ProcessGroup):
        return dist.get_rank(world), dist.get_world_size(world)
    if isinstance(world, Hierarchy):
        inside = dist.get_world_size(world.inside)
        rank = dist.get_rank(world.between) * inside + dist.get_rank(world.inside)
        return rank, inside * dist.get_world_size(world.between)
    return 0, 1


def check_fits(config: MoEConfig, stored: checkpoints.MoELayerTensors) -> None:
    """Refuse a checkpoint whose sizes are not those of the configuration.

    Raises:
        MegaMoEValueError: naming each.
    """
    found = {
        "num_experts": stored.num_experts,
        "hidden_size": stored.routed.w13.shape[2],
        "intermediate_size": stored.routed.intermediate_size,
        "shared_intermediate_size": stored.shared.intermediate_size if stored.shared is not None else 0,
    }
    problems = [
        expected(f"config.{name}", f"{size} as in the checkpoint", getattr(config, name))
        for name, size in found.items()
        if getattr(config, name) != size
    ]
    if stored.tid2eid is not None and stored.tid2eid.shape[1] != config.top_k:
        problems.append(expected("config.top_k", f"{stored.tid2eid.shape[1]} as in the checkpoint", config.top_k))
    if problems:
        raise MegaMoEValueError("\n".join(problems))


def format_of(stored: checkpoints.ExpertGroup) -> WeightFormat:
    """The format that holds stored weights without rounding: fp16 becomes fp32."""
    if stored.w13.dtype == FP8:
        return "fp8"
    return "bf16" if stored.w13.dtype == torch.bfloat16 else "fp32"


def convert(
    data: torch.Tensor, scale: torch.Tensor | None, row_groups: int, weights: WeightFormat
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Stored weights in the format asked for, one expert at a time; what is in that format already is not copied.

    Args:
        data: [E, N, K]. scale: of FP8 data. row_groups: matrices stacked along N. weights: the format.

    Returns:
        (data, scale); scale is None unless the format is "fp8".
    """
    if data.dtype == DTYPES[weights]:
        return data, scale
    converted = torch.empty(data.shape, dtype=DTYPES[weights], device=data.device)
    scales = []
    for e in range(data.shape[0]):
        if weights == "fp8":
            one = quantize_weight(data[e : e + 1], Recipe(), row_groups)
            converted[e].copy_(one.data[0])
            scales.append(one.scale)
        elif scale is not None:
            one = QuantizedWeight(data[e : e + 1], scale[e : e + 1], row_groups)
            converted[e] = one.dequantize(DTYPES[weights])[0]
        else:
            converted[e] = data[e].to(DTYPES[weights])
    return converted, torch.cat(scales) if scales else None  # type: ignore[arg-type]
