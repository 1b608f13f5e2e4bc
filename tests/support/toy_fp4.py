"""DeepSeek-V4 toy layers: FP4 routed experts with 1 x 32 exponents, FP8 shared experts, and what they mean."""

from __future__ import annotations

import torch

from tests.support.toy_checkpoint import Toy, per_expert

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
STORAGE = {"I8": torch.int8, "U8": torch.uint8, "F4": torch.float4_e2m1fn_x2}


def dequantise_fp4(packed: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Values in fp64, by table look-up."""
    data = packed.view(torch.uint8).long()
    values = E2M1.double()[torch.stack((data & 15, data >> 4), -1).flatten(-2)]
    scale = torch.pow(2.0, exponents.view(torch.uint8).double() - 127)
    return values * scale.repeat_interleave(32, -1)


def v4_layer(toy: Toy, storage: str, *, hashed: bool = False, spread: int = 8) -> dict[str, torch.Tensor]:
    """A layer in DeepSeek-V4's names; exponents of one 128 x 128 block lie within `spread` of each other."""
    gen = torch.Generator().manual_seed(toy.seed + 7)
    shared = Toy(toy.experts, toy.hidden, toy.inter, toy.layer, "F8_E8M0", toy.shared, toy.seed)
    tensors = per_expert(shared, bias=not hashed, names="v4")
    prefix = f"layers.{toy.layer}.ffn."
    if hashed:
        tensors[f"{prefix}gate.tid2eid"] = torch.randint(0, toy.experts, (50, 2), generator=gen)
    for key, tensor in list(tensors.items()):
        if not key.startswith(f"{prefix}experts.") or not key.endswith(".weight"):
            continue
        n, k = tensor.shape
        packed = torch.randint(0, 256, (n, k // 2), generator=gen, dtype=torch.uint8)
        exponents = torch.randint(110, 111 + spread, (n, k // 32), generator=gen, dtype=torch.uint8)
        tensors[key] = packed.view(STORAGE[storage])
        scale = exponents if storage == "U8" else exponents.view(torch.float8_e8m0fnu)
        tensors[key.replace(".weight", ".scale")] = scale
    return tensors
