"""A small statement of Megatron-Core's conventions for experts, to test against without Megatron.

What is stated: fields of a TransformerConfig, the hook of its data-parallel wrapper (also in the form that waits for
`backward_dw`), and `ShardedTensor.from_rank_offsets`.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


@dataclasses.dataclass
class TransformerConfig:
    """The fields that experts read."""

    hidden_size: int = 128
    moe_ffn_hidden_size: int | None = 64
    ffn_hidden_size: int = 256
    gated_linear_unit: bool = True
    activation_func: Callable[[torch.Tensor], torch.Tensor] = nn.functional.silu
    activation_func_clamp_value: float | None = None
    glu_linear_offset: float = 0.0
    add_bias_linear: bool = False
    moe_apply_probs_on_input: bool = False
    params_dtype: torch.dtype = torch.bfloat16
    use_cpu_initialization: bool = True
    perform_initialization: bool = True
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int = 1
    delay_wgrad_compute: bool = False
    init_method: Callable[[torch.Tensor], Any] = lambda weight: nn.init.normal_(weight, std=0.1)
    output_layer_init_method: Callable[[torch.Tensor], Any] = lambda weight: nn.init.normal_(weight, std=0.05)


class DataParallel:
    """fp32 `main_grad` buffers and the hook that runs when a gradient is ready.

    Args:
        module: whose parameters. delays: config.delay_wgrad_compute.

    Attributes:
        ready: names in the order in which their gradients became ready.
    """

    def __init__(self, module: nn.Module, delays: bool) -> None:
        self.ready: list[str] = []
        self._accumulators = []
        for name, parameter in module.named_parameters():
            parameter.main_grad = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
            parameter.grad_added_to_main_grad = False
            hook = self._make_hook(name, parameter)
            if delays and getattr(parameter, "skip_backward_post_hook", False):
                module.register_wgrad_accumulation_and_reduce_hooks(hook)
            else:
                accumulator = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
                accumulator.register_hook(hook)
                self._accumulators.append(accumulator)

    def _make_hook(self, name: str, parameter: Any) -> Callable[..., None]:
        def hook(*unused: Any) -> None:
            assert parameter.grad is not None, "a gradient that overlaps with its reduction must not be None"
            if not parameter.grad_added_to_main_grad:
                parameter.main_grad.add_(parameter.grad)
            parameter.grad = None
            self.ready.append(name)

        return hook


@dataclasses.dataclass
class ShardedTensor:
    """What `from_rank_offsets` was told, and the global shape that follows."""

    key: str
    data: torch.Tensor
    offsets: tuple[tuple[int, int, int], ...]
    replica_id: tuple[int, int, int]
    global_shape: tuple[int, ...]

    @classmethod
    def from_rank_offsets(
        cls, key: str, data: torch.Tensor, *offsets: tuple[int, int, int], replica_id: Any, prepend_axis_num: int = 0
    ) -> ShardedTensor:
        shape = [1] * prepend_axis_num + list(data.shape)
        for axis, rank, fragmentation in offsets:
            assert 0 <= rank < fragmentation
            shape[axis] *= fragmentation
        return cls(key, data, offsets, replica_id, tuple(shape))


class Group:
    """A process group, as far as experts ask."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def modules() -> dict[str, Any]:
    """For `sys.modules`: the part of megatron.core that experts import."""
    checkpointing = types.ModuleType("megatron.core.dist_checkpointing")
    checkpointing.ShardedTensor = ShardedTensor  # type: ignore[attr-defined]
    parents = {name: types.ModuleType(name) for name in ("megatron", "megatron.core")}
    return {**parents, "megatron.core.dist_checkpointing": checkpointing}
