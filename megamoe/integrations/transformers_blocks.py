"""Whole MoE blocks of a transformers model replaced by `MegaMoE`: router, routed experts and shared experts."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from checkpoints import ExpertGroup
from megamoe.config import MoEConfig
from megamoe.errors import MegaMoEValueError, expected
from megamoe.integrations.transformers_experts import find_refusals, is_experts
from megamoe.layer import MegaMoE
from megamoe.loading import WeightFormat, format_of

_PARTS = {"gate", "experts", "shared_experts"}


class MoEBlock(nn.Module):
    """`MegaMoE` with the forward of transformers' MoE blocks.

    Attributes:
        moe: the layer.
    """

    def __init__(self, moe: MegaMoE) -> None:
        super().__init__()
        self.moe = moe

    def forward(self, hidden_states: torch.Tensor, input_ids: torch.Tensor | None = None) -> torch.Tensor:
        """hidden_states [B, S, H] -> the same shape; `input_ids` [B, S] are for hash layers."""
        return self.moe(hidden_states, token_ids=input_ids if self.moe.config.hash_vocab_size else None)


def replace_moe(
    model: nn.Module,
    *,
    checkpoint: str | Path | None = None,
    weights: WeightFormat | None = None,
    **options: Any,
) -> list[str]:
    """Replace every MoE block of a transformers model, in place.

    Args:
        model: DeepSeek-V2, V3, V3.2, V4, Qwen3-MoE, GLM-4.5 and what else `MoEConfig.from_hf` knows.
        checkpoint: folder of safetensors: the blocks are read from there, expert by expert, in the format asked for, so
            FP8 bytes stay as they are and `model` may be on the meta device. None: the model's own weights are taken
            over, without a copy where the format stays.
        weights: "fp8" (frozen; quantised here where bf16 is stored), "bf16", "fp32", or None: as they are.
        options: device, backend, recipe, and what else `MegaMoE` takes. The default recipe computes in FP8 whatever
            the weights are.

    Returns:
        The names of the blocks.

    Raises:
        MegaMoEValueError: a block computes something else, naming it; there is none; `output_router_logits` is set.

    Effects: parameters of replaced blocks have `MegaMoE`'s names, so save them with `checkpoints.save_moe_layer` or
    keep the original to save.
    """
    hf_config: Any = model.config
    text_config = hf_config.get_text_config() if hasattr(hf_config, "get_text_config") else hf_config
    if getattr(text_config, "output_router_logits", False):
        got = "True"
        raise MegaMoEValueError(
            expected("config.output_router_logits", "False: the new blocks record none", got, "Use register() instead.")
        )
    blocks = {name: m for name, m in model.named_modules() if is_experts(getattr(m, "experts", None) or nn.Module())}
    if not blocks:
        raise MegaMoEValueError(expected("model", "MoE blocks of transformers 5", type(model).__name__))
    problems = [f"{name}.{problem}" for name, block in blocks.items() for problem in _find_refusals(block)]
    if problems:
        raise MegaMoEValueError("\n".join(problems))
    config = MoEConfig.from_hf(text_config)
    for name, block in blocks.items():
        if checkpoint is None:
            moe = _from_block(block, config, weights, options)
        else:
            device = options.get("device", "cpu")
            rest = {key: value for key, value in options.items() if key != "device"}
            number = _layer_number(name)
            moe = MegaMoE.from_checkpoint(checkpoint, number, config=config, weights=weights, device=device, **rest)
        model.set_submodule(name, MoEBlock(moe).train(block.training))
    return list(blocks)


def _find_refusals(block: Any) -> list[str]:
    others = {name for name, _ in block.named_children()} - _PARTS
    problems = [expected(name, "no further part of a MoE block", "one") for name in sorted(others)]
    if any(hasattr(p, "device_mesh") for p in block.parameters()):
        problems.append(expected("parameters", "plain tensors", "DTensors", "Replace the blocks before sharding."))
    return problems + [f"experts.{problem}" for problem in find_refusals(block.experts)]


def _layer_number(name: str) -> int:
    found = re.search(r"layers\.(\d+)\.", name)
    if found is None:
        raise MegaMoEValueError(expected("model", "blocks in `layers.<number>.`", name, "Load without checkpoint=."))
    return int(found[1])


def _from_block(block: Any, config: MoEConfig, weights: WeightFormat | None, options: dict[str, Any]) -> MegaMoE:
    gate, experts = block.gate, block.experts
    device = options.get("device")
    rest = {key: value for key, value in options.items() if key != "device"}
    routed = _group(
        (experts.gate_up_proj, getattr(experts, "gate_up_proj_scale_inv", None)),
        (experts.down_proj, getattr(experts, "down_proj_scale_inv", None)),
        device,
    )
    table = getattr(gate, "tid2eid", None)
    if table is not None:
        config = dataclasses.replace(config, hash_vocab_size=table.shape[0])
    weights = format_of(routed) if weights is None else weights
    moe = MegaMoE(config, weights=weights, **rest, device="meta")
    moe.router.weight = nn.Parameter(_moved(gate.weight, device), requires_grad=gate.weight.requires_grad)
    bias = getattr(gate, "e_score_correction_bias", None)
    where = moe.router.weight.device
    moe.router.correction_bias = (
        torch.zeros(config.num_experts, device=where) if bias is None else _moved(bias, device).float()
    )
    if table is not None:
        moe.router.tid2eid = _moved(table, device).long()
    moe.experts.adopt(routed, weights)
    _freeze_like(moe.experts, experts.gate_up_proj, experts.down_proj)
    if moe.shared is not None:
        gate_proj, up_proj, down_proj = (getattr(block.shared_experts, f"{n}_proj") for n in ("gate", "up", "down"))
        moe.shared.adopt(_shared_group(gate_proj, up_proj, down_proj, device), weights)
        _freeze_like(moe.shared, gate_proj.weight, down_proj.weight)
    return moe


def _group(w13: tuple[Any, Any], w2: tuple[Any, Any], device: Any) -> ExpertGroup:
    scale13, scale2 = (None if scale is None else _moved(scale, device).float() for scale in (w13[1], w2[1]))
    return ExpertGroup(_moved(w13[0], device), _moved(w2[0], device), scale13, scale2, str(w13[0].dtype), None)


def _shared_group(gate_proj: Any, up_proj: Any, down_proj: Any, device: Any) -> ExpertGroup:
    biases = [p for p in (gate_proj, up_proj, down_proj) if getattr(p, "bias", None) is not None]
    if biases:
        raise MegaMoEValueError(expected("shared_experts", "projections without biases", f"{len(biases)} with one"))

    def stacked(name: str, *projections: Any) -> torch.Tensor | None:
        tensors = [tensor.detach() for p in projections if (tensor := getattr(p, name, None)) is not None]
        return torch.cat(tensors)[None] if tensors else None

    w13 = stacked("weight", gate_proj, up_proj), stacked("weight_scale_inv", gate_proj, up_proj)
    return _group(w13, (stacked("weight", down_proj), stacked("weight_scale_inv", down_proj)), device)


def _moved(tensor: torch.Tensor, device: Any) -> torch.Tensor:
    return tensor.detach() if device is None else tensor.detach().to(device)


def _freeze_like(experts: Any, w13: torch.Tensor, w2: torch.Tensor) -> None:
    experts.w13.requires_grad_(experts.w13.requires_grad and w13.requires_grad)
    experts.w2.requires_grad_(experts.w2.requires_grad and w2.requires_grad)
