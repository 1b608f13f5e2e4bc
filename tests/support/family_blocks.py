"""MoE blocks of transformers, stored under their families' names, and the layer loaded from there.

Each block is saved by safetensors under its family's names and loaded from there, so names, layout, router, experts and
shared experts are all those of somebody else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from megamoe.comm import LocalWorld
from megamoe.config import MoEConfig
from megamoe.layer import MegaMoE
from megamoe.recipe import Recipe
from tests.support.toy_checkpoint import write_shards

H, INTER, E, K, T = 256, 128, 8, 2, 48
LAYER = 1


@dataclasses.dataclass(frozen=True)
class Block:
    """A block of transformers with random weights, and the names its family stores it under."""

    module: torch.nn.Module
    config: Any
    tensors: dict[str, torch.Tensor]
    token_ids: torch.Tensor | None = None


def common() -> dict[str, Any]:
    return dict(hidden_size=H, moe_intermediate_size=INTER, num_experts_per_tok=K, num_attention_heads=2)


def randomise(module: torch.nn.Module) -> None:
    """Unit-scale weights that bf16 holds exactly."""
    gen = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point():
                values = torch.randn(tensor.shape, generator=gen)
                tensor.copy_((values / tensor.shape[-1] ** 0.5 if tensor.dim() > 1 else values * 0.1).bfloat16())
            else:
                ids = torch.rand(tensor.shape[0], E, generator=gen).argsort(1)[:, : tensor.shape[1]]
                tensor.copy_(ids)


def per_expert_names(module: torch.nn.Module, prefix: str, parts: dict[str, str]) -> dict[str, torch.Tensor]:
    """The block's tensors with experts apart; `parts` renames gate_proj, up_proj and down_proj."""
    tensors = {}
    for name, tensor in module.state_dict().items():
        stored = tensor.bfloat16() if tensor.is_floating_point() and "correction_bias" not in name else tensor
        if name == "experts.gate_up_proj":
            for e in range(E):
                tensors[f"{prefix}experts.{e}.{parts['gate_proj']}.weight"] = stored[e, :INTER].clone()
                tensors[f"{prefix}experts.{e}.{parts['up_proj']}.weight"] = stored[e, INTER:].clone()
        elif name == "experts.down_proj":
            for e in range(E):
                tensors[f"{prefix}experts.{e}.{parts['down_proj']}.weight"] = stored[e].clone()
        else:
            for old, new in parts.items():
                name = name.replace(f"shared_experts.{old}", f"shared_experts.{new}")
            tensors[prefix + name] = stored.clone()
    return tensors


PLAIN = {name: name for name in ("gate_proj", "up_proj", "down_proj")}


def deepseek_v2() -> Block:
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe

    groups = dict(n_group=4, topk_group=2, topk_method="group_limited_greedy", routed_scaling_factor=4.0)
    config = transformers.DeepseekV2Config(**common(), n_routed_experts=E, n_shared_experts=2, **groups)
    module = DeepseekV2Moe(config)
    randomise(module)
    return Block(module, config, per_expert_names(module, f"model.layers.{LAYER}.mlp.", PLAIN))


def deepseek_v3() -> Block:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

    config = transformers.DeepseekV3Config(
        **common(), n_routed_experts=E, n_shared_experts=1, n_group=4, topk_group=2, routed_scaling_factor=2.5
    )
    module = DeepseekV3MoE(config)
    randomise(module)
    return Block(module, config, per_expert_names(module, f"model.layers.{LAYER}.mlp.", PLAIN))


def glm4_moe() -> Block:
    from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeMoE

    config = transformers.Glm4MoeConfig(
        **common(), n_routed_experts=E, n_shared_experts=1, n_group=1, topk_group=1, routed_scaling_factor=1.5
    )
    module = Glm4MoeMoE(config)
    randomise(module)
    return Block(module, config, per_expert_names(module, f"model.layers.{LAYER}.mlp.", PLAIN))


def qwen3_moe() -> Block:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = transformers.Qwen3MoeConfig(**common(), num_experts=E, norm_topk_prob=True)
    module = Qwen3MoeSparseMoeBlock(config)
    randomise(module)
    return Block(module, config, per_expert_names(module, f"model.layers.{LAYER}.mlp.", PLAIN))


def qwen3_packed() -> Block:
    block = qwen3_moe()
    tensors = {
        f"model.layers.{LAYER}.mlp.{name}": t.bfloat16().clone() for name, t in block.module.state_dict().items()
    }
    return dataclasses.replace(block, tensors=tensors)


def round_gate_up(module: torch.nn.Module) -> None:
    """Round gate and up to bf16 before the clamp, as the recipe does: or values next to the limit pass in one layer and
    not in the other, and their gradients have nothing in common."""

    def rounded(value: torch.Tensor) -> torch.Tensor:
        return value + (value.detach().bfloat16().float() - value.detach())

    apply_gate, shared = module.experts._apply_gate, module.shared_experts
    module.experts._apply_gate = lambda gate_up: apply_gate(rounded(gate_up))
    for projection in (shared.gate_proj, shared.up_proj):
        projection.register_forward_hook(lambda module, args, out: rounded(out))


def deepseek_v4(hashed: bool, limit: float) -> Block:
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4SparseMoeBlock

    config = transformers.DeepseekV4Config(
        **common(), n_routed_experts=E, vocab_size=50, swiglu_limit=limit, routed_scaling_factor=1.5
    )
    layer = config.mlp_layer_types.index("hash_moe" if hashed else "moe")
    module = DeepseekV4SparseMoeBlock(config, layer)
    randomise(module)
    round_gate_up(module)
    names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    tensors = per_expert_names(module, f"layers.{LAYER}.ffn.", names)
    tensors = {key.replace("gate.e_score_correction_bias", "gate.bias"): t for key, t in tensors.items()}
    gen = torch.Generator().manual_seed(4)
    return Block(module, config, tensors, torch.randint(0, 50, (T,), generator=gen) if hashed else None)


BLOCKS: dict[str, Callable[[], Block]] = {
    "deepseek-v2": deepseek_v2,
    "deepseek-v3": deepseek_v3,
    "glm-4.5": glm4_moe,
    "qwen3": qwen3_moe,
    "qwen3-packed": qwen3_packed,
    "deepseek-v4": lambda: deepseek_v4(False, 6.0),
    "deepseek-v4-hash": lambda: deepseek_v4(True, 6.0),
    "deepseek-v4-clamped": lambda: deepseek_v4(False, 0.5),
}


@dataclasses.dataclass
class Result:
    """out and every gradient, in the layer's layout; None where a block has no such part."""

    out: torch.Tensor
    dx: torch.Tensor
    d_router: torch.Tensor
    d_w13: torch.Tensor
    d_w2: torch.Tensor
    d_shared_w13: torch.Tensor | None = None
    d_shared_w2: torch.Tensor | None = None


def theirs(block: Block, x: torch.Tensor, dout: torch.Tensor) -> Result:
    """transformers' own forward and backward, in fp32, on the CPU."""
    x = x.float()[None].requires_grad_()
    module = block.module.float()
    args = (x,) if block.token_ids is None else (x, block.token_ids[None])
    out = module(*args)
    out.backward(dout.float()[None])
    grads = {name: p.grad for name, p in module.named_parameters()}
    shared = [None, None]
    if "shared_experts.gate_proj.weight" in grads:
        w13 = torch.cat([grads[f"shared_experts.{part}_proj.weight"] for part in ("gate", "up")])
        shared = [w13, grads["shared_experts.down_proj.weight"]]
    return Result(
        out.detach()[0],
        x.grad[0],
        grads["gate.weight"],
        grads["experts.gate_up_proj"],
        grads["experts.down_proj"],
        *shared,
    )


def ours(
    block: Block, folder: Path, batch: tuple[torch.Tensor, torch.Tensor], ranks: int, precision: str, backend: str
) -> Result:
    """The layer, loaded from the folder, over virtual ranks that share the tokens, on the device of (x, dout)."""
    x, dout = batch
    config = MoEConfig.from_hf(block.config)
    recipe = Recipe(precision, clamp=config.clamp)
    layer = MegaMoE.from_checkpoint(
        folder, LAYER, config=config, world=LocalWorld(ranks), backend=backend, recipe=recipe, device=x.device
    )
    x = x.clone().requires_grad_()
    sizes = [T // ranks] * ranks
    token_ids = None if block.token_ids is None else list(block.token_ids.to(x.device).split(sizes))
    out = torch.cat(layer(list(x.split(sizes)), token_ids=token_ids))
    out.backward(dout)
    shared = [None, None] if layer.shared is None else [layer.shared.w13.grad[0], layer.shared.w2.grad[0]]
    return Result(
        out.detach(), x.grad, layer.router.weight.grad, layer.experts.w13.grad, layer.experts.w2.grad, *shared
    )


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def check(name: str, folder: Path, ranks: int, precision: str, backend: str = "torch", device: str = "cpu") -> None:
    """Compare out and every gradient of a block with the layer's.

    Raises:
        AssertionError: the error of one of them exceeds the gate of the precision.
    """
    block = BLOCKS[name]()
    write_shards(folder, block.tensors)
    gen = torch.Generator().manual_seed(1)
    x, dout = (torch.randn(T, H, generator=gen).bfloat16() for _ in range(2))
    want = theirs(block, x, dout)
    got = ours(block, folder, (x.to(device), dout.to(device)), ranks, precision, backend)
    bound = {"bf16": 10 ** (-45 / 20), "fp8": 10 ** (-21 / 20)}[precision]
    for field in dataclasses.fields(Result):
        a, b = getattr(got, field.name), getattr(want, field.name)
        assert (a is None) == (b is None), field.name
        if a is not None:
            # the router's gradient is a difference of nearly equal terms, and weight gradients are stored in bf16
            slack = {"d_router": 3.0}.get(field.name, 1.2)
            error = relative_error(a.cpu(), b)
            assert error < slack * bound, (field.name, error, bound)
