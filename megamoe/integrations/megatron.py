"""Experts with Megatron-Core's conventions, which needs no Megatron: rows sorted by expert in, (out, None) back.

`GroupedExperts` takes the place of `TEGroupedMLP` in a layer specification. The token dispatcher stays Megatron's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from megamoe import backends
from megamoe.context import MoEContext
from megamoe.deferred import DeferredWgrad
from megamoe.errors import MegaMoERuntimeError, MegaMoEValueError, expected
from megamoe.functional import mega_moe
from megamoe.integrations.grouped import as_counts, expert_of_rows
from megamoe.recipe import Recipe
from megamoe.unfused import SaveMode
from megamoe.weights import WeightCopies

_ONLY: dict[str, tuple[Any, str]] = {
    "gated_linear_unit": (True, "SwiGLU"),
    "add_bias_linear": (False, "experts without biases"),
    "glu_linear_offset": (0.0, "silu(gate) * up"),
    "moe_apply_probs_on_input": (False, "probabilities on the activation"),
    "expert_tensor_parallel_size": (1, "whole experts on a rank"),
    "fp4": (None, "FP8 or bf16"),
    "moe_latent_size": (None, "experts of the model's hidden size"),
}
"""Fields of a TransformerConfig: the value that is computed here (a missing field has it), and what it means."""


class GroupedExperts(nn.Module):
    """The experts of one expert-parallel rank.

    Args:
        num_local_experts: E_l.
        config: a TransformerConfig, or anything with its fields: hidden_size, moe_ffn_hidden_size (or
            ffn_hidden_size), activation_func, activation_func_clamp_value, params_dtype, init_method,
            output_layer_init_method, use_cpu_initialization, expert_model_parallel_size, delay_wgrad_compute,
            gradient_accumulation_fusion.
        submodules: ignored; Megatron's builder passes it.
        pg_collection: process groups; `ep` and `expt_dp` are read.
        recipe: numerics; None: FP8, with the clamp of the config. backend, save: as for `MoEContext`.

    Attributes:
        w13: [E_l, 2I, H], gate rows first. w2: [E_l, H, I]. `allreduce` is False on them where experts are spread over
            ranks, and `skip_backward_post_hook` is True where their gradients are delayed.

    Gradients. A weight that has a `main_grad` gets it added there by this module, in its dtype, and says so by
    `grad_added_to_main_grad`; what autograd sees then is zeros of no size in memory. With `delay_wgrad_compute` the
    backward computes dx and dp only, and `backward_dw()` the weight gradients of all backwards that are left.

    Raises:
        MegaMoEValueError: the config asks for something that is not computed here, naming all of it.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: Any,
        submodules: Any = None,
        pg_collection: Any = None,
        *,
        recipe: Recipe | None = None,
        backend: backends.BackendName = "auto",
        save: SaveMode = "pool",
    ) -> None:
        super().__init__()
        clamp = getattr(config, "activation_func_clamp_value", None)
        recipe = Recipe(clamp=clamp) if recipe is None else recipe
        num_ranks = getattr(config, "expert_model_parallel_size", 1)
        _check(config, recipe, num_ranks, pg_collection)
        self.config, self.num_local_experts = config, num_local_experts
        self.ep_group = getattr(pg_collection, "ep", None)
        self.dp_group = getattr(pg_collection, "expt_dp", None)
        self.delays = bool(getattr(config, "delay_wgrad_compute", False))
        hidden = config.hidden_size
        inter = getattr(config, "moe_ffn_hidden_size", None) or config.ffn_hidden_size
        on_cpu = getattr(config, "use_cpu_initialization", False) or not torch.cuda.is_available()
        where: dict[str, Any] = {
            "device": "cpu" if on_cpu else torch.device("cuda", torch.cuda.current_device()),
            "dtype": getattr(config, "params_dtype", torch.float32),
        }
        self.w13 = nn.Parameter(torch.empty(num_local_experts, 2 * inter, hidden, **where))
        self.w2 = nn.Parameter(torch.empty(num_local_experts, hidden, inter, **where))
        for weight in (self.w13, self.w2):
            weight.allreduce = num_ranks == 1  # type: ignore[attr-defined]
            if self.delays:
                weight.skip_backward_post_hook = True  # type: ignore[attr-defined]
        self.context = MoEContext(recipe, backend=backend, save=save, copies=WeightCopies(self))
        self._deferred = DeferredWgrad(self, "delayed")
        self._hooks: list[Callable[..., None]] = []
        if getattr(config, "perform_initialization", True):
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fresh weights by the config's methods, expert by expert."""
        with torch.no_grad():
            for weight, name in ((self.w13, "init_method"), (self.w2, "output_layer_init_method")):
                init = getattr(self.config, name, None)
                for expert in weight:
                    nn.init.normal_(expert, std=0.02) if init is None else init(expert)

    def forward(
        self, permuted_local_hidden_states: torch.Tensor, tokens_per_expert: Any, permuted_probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Apply the experts.

        Args:
            permuted_local_hidden_states: [P, H], rows sorted by expert; rows behind the last expert's give zeros.
            tokens_per_expert: [E_l], a tensor on any device or a list.
            permuted_probs: [P], weight of each row; it multiplies the activation.

        Returns:
            (out [P, H] of the input's dtype, None for the bias).
        """
        x = permuted_local_hidden_states
        counts = as_counts("tokens_per_expert", tokens_per_expert, self.num_local_experts, x.device)
        if permuted_probs.numel() != x.shape[0]:
            got = f"shape {tuple(permuted_probs.shape)}"
            raise MegaMoEValueError(expected("permuted_probs", f"[{x.shape[0]}], one for each row", got))
        ids, probs = expert_of_rows(counts, x.shape[0]), permuted_probs.reshape(-1, 1)
        has_main_grad = any(getattr(w, "main_grad", None) is not None for w in (self.w13, self.w2))
        self.context.deferred = self._deferred if self.delays or has_main_grad else None
        weights: Any = (self.w13, self.w2)
        if has_main_grad and not self.delays and torch.is_grad_enabled():
            weights = _FinishInBackward.apply(*weights, self)
        return mega_moe(x, ids, probs, *weights, context=self.context), None

    def backward_dw(self) -> None:
        """The weight gradients of the backwards that are left, added to `main_grad` or `grad`; then the hooks.

        Raises:
            MegaMoERuntimeError: none is left.
        """
        if not self.delays:
            return
        if not len(self._deferred):
            raise MegaMoERuntimeError(expected("backward_dw", "a backward before each call", "none that is left"))
        for weight, left_for_autograd in zip((self.w13, self.w2), self._finish(), strict=True):
            if self._hooks and left_for_autograd is not None:
                weight.grad = left_for_autograd  # a hook wants to see one
        for hook in self._hooks:
            hook()

    def _finish(self) -> list[torch.Tensor | None]:
        """Compute what is left; zeros of no size in memory for the weights whose `main_grad` got it."""
        self._deferred.run()
        left: list[torch.Tensor | None] = []
        for weight in (self.w13, self.w2):
            is_in_main_grad = weight.requires_grad and getattr(weight, "main_grad", None) is not None
            if is_in_main_grad:
                weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
            left.append(weight.detach().new_zeros(1).expand(weight.shape) if is_in_main_grad else None)
        return left

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[..., None]) -> None:
        """Have `hook` called at the end of every `backward_dw`, as Megatron's DDP asks for."""
        self._hooks.append(hook)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Megatron's ShardedTensors; dim 0 is the global expert id, so another number of ranks can load them.

        Raises:
            MegaMoERuntimeError: megatron-core is not installed.
        """
        try:
            from megatron.core.dist_checkpointing import ShardedTensor
        except ImportError as error:
            hint = "pip install megatron-core"
            raise MegaMoERuntimeError(expected("sharded_state_dict", "megatron-core", error, hint)) from error
        rank, num_ranks = (0, 1) if self.ep_group is None else (self.ep_group.rank(), self.ep_group.size())
        replica = 0 if self.dp_group is None else self.dp_group.rank()
        axis = len(sharded_offsets)
        return {
            f"{prefix}{name}": ShardedTensor.from_rank_offsets(
                f"{prefix}{name}",
                weight.detach(),
                *sharded_offsets,
                (axis, rank, num_ranks),
                replica_id=(0, 0, replica),
                prepend_axis_num=axis,
            )
            for name, weight in (("w13", self.w13), ("w2", self.w2))
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a copy or a pickle: neither copies of the weights nor backwards that are left are its own."""
        super().__setstate__(state)
        self.context.copies = WeightCopies(self)
        self._deferred, self._hooks = DeferredWgrad(self, "delayed"), []


class _FinishInBackward(torch.autograd.Function):
    """Weights on their way to the experts, whose backward leaves their gradients to the module: computed here."""

    @staticmethod
    def forward(ctx: Any, w13: torch.Tensor, w2: torch.Tensor, experts: GroupedExperts) -> Any:
        ctx.experts = experts
        ctx.set_materialize_grads(False)
        return w13.view_as(w13), w2.view_as(w2)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        is_compiled = any(grad is not None for grad in grads)  # then they come through autograd
        return *(grads if is_compiled else ctx.experts._finish()), None


def _check(config: Any, recipe: Recipe, num_ranks: int, groups: Any) -> None:
    problems = [
        expected(f"config.{name}", f"{good!r}: {meaning}", repr(getattr(config, name)))
        for name, (good, meaning) in _ONLY.items()
        if getattr(config, name, good) not in (good, None)
    ]
    activation = getattr(config, "activation_func", nn.functional.silu)
    if activation is not nn.functional.silu:
        problems.append(expected("config.activation_func", "torch.nn.functional.silu", activation))
    clamp = getattr(config, "activation_func_clamp_value", None)
    if clamp != recipe.clamp:
        problems.append(expected("recipe.clamp", f"config.activation_func_clamp_value = {clamp}", recipe.clamp))
    if num_ranks > 1 and getattr(groups, "ep", None) is None:
        contract = f"process groups with `ep`, for expert_model_parallel_size = {num_ranks}"
        problems.append(expected("pg_collection", contract, groups))
    if problems:
        raise MegaMoEValueError("\n".join(problems))
