"""What transformers' experts modules ask for, and what of it this package does not compute."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from megamoe.errors import MegaMoEValueError, expected
from megamoe.quantize import FP8
from megamoe.recipe import BLOCK

_FLAGS = {
    "has_gate": (True, "experts with a gate projection"),
    "has_bias": (False, "experts without biases"),
    "is_transposed": (False, "weights [E, out, in]"),
    "is_concatenated": (True, "gate rows first, then up rows, not interleaved"),
    "has_post_expert_norm": (False, "no norm behind the experts"),
}
"""Flags of the experts interface: the value that is computed here (a missing flag has it), and what it means."""

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def is_experts(module: nn.Module) -> bool:
    """Whether a module is on transformers' experts interface."""
    return hasattr(module, "has_gate") and hasattr(module, "has_bias") and hasattr(module, "num_experts")


def find_refusals(module: nn.Module) -> list[str]:
    """Everything about an experts module that is not computed here, a message each; empty if it can run."""
    problems = [
        expected(flag, f"{good}: {meaning}", getattr(module, flag), "Keep transformers' own implementation.")
        for flag, (good, meaning) in _FLAGS.items()
        if getattr(module, flag, good) != good
    ]
    if problems:  # the rest depends on them
        return problems
    w13, w2 = getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)
    if not isinstance(w13, torch.Tensor) or not isinstance(w2, torch.Tensor):
        return [expected("gate_up_proj, down_proj", "stacked weights", "none")]
    if w13.dtype not in (*_FLOATS, FP8) or w13.dtype != w2.dtype:
        problems.append(expected("gate_up_proj, down_proj", "bf16, fp16, fp32 or e4m3", f"{w13.dtype}, {w2.dtype}"))
    if w13.dtype == FP8:
        problems += _fp8_refusals(module, w2.shape[-1])
    try:
        activation_limit(module)
    except MegaMoEValueError as error:
        problems.append(str(error))
    return problems


def _fp8_refusals(module: nn.Module, intermediate: int) -> list[str]:
    problems = []
    block = getattr(module, "block_size", None)
    if block is None or tuple(block) != (BLOCK, BLOCK):
        problems.append(expected("block_size", f"({BLOCK}, {BLOCK})", block))
    if getattr(module, "activation_scheme", "dynamic") != "dynamic":
        problems.append(expected("activation_scheme", "'dynamic'", repr(getattr(module, "activation_scheme", None))))
    if intermediate % BLOCK:
        contract = f"a multiple of {BLOCK}: a scale must not belong to gate and up rows"
        problems.append(expected("down_proj.shape[2]", contract, intermediate))
    return problems


def activation_limit(module: nn.Module) -> float | None:
    """The clamp of an experts module's SwiGLU, None without one, found by evaluating its `_apply_gate`.

    Raises:
        MegaMoEValueError: the activation is another one.
    """
    module_: Any = module
    # values around 0, far out, and on both sides of any limit that the module names
    limits = list(_named_limits(module))
    far = [sign * value for limit in (50.0, 1e3, 1e4, *limits) for value in (limit, 2 * limit) for sign in (-1, 1)]
    points = torch.cat([torch.linspace(-12.0, 12.0, 97), torch.tensor(far)])
    gate = points[:, None].expand(len(points), len(points))
    up = points[None].expand(len(points), len(points))
    try:
        with torch.no_grad():
            got = module_._apply_gate(torch.cat([gate, up], dim=1))
    except Exception as error:  # a gate that reads parameters, or wants other shapes
        raise MegaMoEValueError(_not_swiglu(module, f"{type(error).__name__}: {error}")) from error
    for limit in (None, *limits):
        g, u = (gate, up) if limit is None else (gate.clamp(max=limit), up.clamp(-limit, limit))
        want = torch.nn.functional.silu(g) * u
        if got.shape == want.shape and torch.allclose(got.float(), want, rtol=1e-4, atol=1e-5):
            return limit
    raise MegaMoEValueError(_not_swiglu(module, "other values"))


def _named_limits(module: nn.Module) -> Iterator[float]:
    holders = (module, getattr(module, "config", None))
    values = {getattr(holder, name, None) for holder in holders for name in ("limit", "swiglu_limit")}
    yield from sorted(float(v) for v in values if isinstance(v, int | float) and v > 0)


def _not_swiglu(module: nn.Module, got: str) -> str:
    activation = type(getattr(module, "act_fn", None)).__name__
    contract = "silu(gate) * up, with or without a limit"
    return expected("_apply_gate", contract, f"{got} (act_fn {activation})", "Keep transformers' own implementation.")
