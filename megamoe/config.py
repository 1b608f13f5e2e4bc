"""The shape of a MoE layer and of its router, frozen, and how to read it from a Hugging Face config."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from megamoe.errors import MegaMoEValueError, expected

MAX_EXPERTS = 512
MAX_TOP_K = 12

SIGMOID_FAMILIES = ("deepseek_v3", "deepseek_v32", "kimi_k2", "glm4_moe", "glm_moe_dsa")
"""`model_type`s whose router is DeepSeek-V3's: sigmoid scores and a correction bias."""


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """One MoE layer with a DeepSeek-V3 router. Hashable.

    Args:
        hidden_size: H.
        intermediate_size: I, of one expert.
        num_experts: E, over all ranks, 1 to 512.
        top_k: K, experts per token, 1 to 12.
        num_groups: groups of experts of which a token may only use some; divides E. 1: no groups.
        topk_groups: how many groups a token may use.
        norm_topk: whether the weights of a token's experts are divided by their sum (+ 1e-20).
        routed_scaling_factor: factor of the weights of routed experts, applied once, never to the shared expert.
        num_shared_experts: experts every token passes, fused into one of size `num_shared_experts * I`; 0: none.
        clamp: limit of the gated activation of all experts, None: none.
        initializer_range: standard deviation of fresh weights.

    Raises:
        MegaMoEValueError: naming every field outside these ranges.
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    num_groups: int = 1
    topk_groups: int = 1
    norm_topk: bool = True
    routed_scaling_factor: float = 1.0
    num_shared_experts: int = 0
    clamp: float | None = None
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        problems = [
            expected(name, contract, getattr(self, name)) for name, contract, good in self._checks() if not good
        ]
        if problems:
            raise MegaMoEValueError("\n".join(problems))

    def _checks(self) -> list[tuple[str, str, bool]]:
        experts, groups = self.num_experts, max(self.num_groups, 1)
        return [
            ("hidden_size", "a positive number of channels", self.hidden_size > 0),
            ("intermediate_size", "a positive number of channels", self.intermediate_size > 0),
            ("num_experts", f"1 to {MAX_EXPERTS}", 1 <= experts <= MAX_EXPERTS),
            ("top_k", f"1 to {min(MAX_TOP_K, experts)}", 1 <= self.top_k <= min(MAX_TOP_K, experts)),
            ("num_groups", f"a divisor of num_experts = {experts}", self.num_groups > 0 and experts % groups == 0),
            (
                "topk_groups",
                f"at most num_groups = {groups}, with at least top_k = {self.top_k} experts in the groups chosen",
                1 <= self.topk_groups <= groups and self.topk_groups * (experts // groups) >= self.top_k,
            ),
            ("num_shared_experts", "0 or more", self.num_shared_experts >= 0),
            ("clamp", "a positive finite limit or None", self.clamp is None or 0 < self.clamp < float("inf")),
        ]

    @property
    def shared_intermediate_size(self) -> int:
        """I of the fused shared expert; 0 without one."""
        return self.num_shared_experts * self.intermediate_size

    @classmethod
    def from_hf(cls, config: Any) -> MoEConfig:
        """Read a Hugging Face config of the DeepSeek-V3 kind.

        Args:
            config: a `transformers` config object, or the contents of config.json as a mapping; `model_type` one of
                `SIGMOID_FAMILIES`.

        Returns:
            The configuration of its MoE layers.

        Raises:
            MegaMoEValueError: another family, another activation or scoring function, or a field is missing.
        """
        get = _reader(config)
        family = get("model_type", None)
        if family not in SIGMOID_FAMILIES:
            raise MegaMoEValueError(
                expected(
                    "config.model_type",
                    f"one of {', '.join(SIGMOID_FAMILIES)}",
                    repr(family),
                    "Build a MoEConfig from its fields if the router is DeepSeek-V3's.",
                )
            )
        for name, only in (("scoring_func", "sigmoid"), ("hidden_act", "silu"), ("topk_method", "noaux_tc")):
            if get(name, only) not in (only, None):
                raise MegaMoEValueError(expected(f"config.{name}", repr(only), repr(get(name, only))))
        return cls(
            hidden_size=get("hidden_size"),
            intermediate_size=get("moe_intermediate_size"),
            num_experts=get("n_routed_experts"),
            top_k=get("num_experts_per_tok"),
            num_groups=get("n_group", None) or 1,
            topk_groups=get("topk_group", None) or 1,
            norm_topk=bool(get("norm_topk_prob", True)),
            routed_scaling_factor=float(get("routed_scaling_factor", 1.0)),
            num_shared_experts=get("n_shared_experts", None) or 0,
            clamp=get("swiglu_limit", None),
            initializer_range=float(get("initializer_range", 0.02)),
        )


_REQUIRED = object()


def _reader(config: Any) -> Any:
    """get(name, default) of a mapping or an object; without a default a missing field is an error."""

    def get(name: str, default: Any = _REQUIRED) -> Any:
        value = config.get(name, default) if isinstance(config, Mapping) else getattr(config, name, default)
        if value is _REQUIRED:
            raise MegaMoEValueError(expected(f"config.{name}", "a value", "none", "Is it the config of a MoE model?"))
        return value

    return get
