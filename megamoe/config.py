"""The shape of a MoE layer and of its router, frozen, and how to read it from a Hugging Face config."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from megamoe.errors import MegaMoETypeError, MegaMoEValueError, expected

MAX_EXPERTS = 512
MAX_TOP_K = 12

MODEL_TYPES = {
    "deepseek_v3": "deepseek_v3",
    "deepseek_v32": "deepseek_v3",
    "kimi_k2": "deepseek_v3",
    "glm4_moe": "deepseek_v3",
    "glm_moe_dsa": "deepseek_v3",
    "deepseek_v2": "deepseek_v2",
    "deepseek_v4": "deepseek_v4",
    "qwen3_moe": "qwen3_moe",
}
"""`model_type` of a Hugging Face config -> whose router it has."""

FAMILIES = ("deepseek_v2", "deepseek_v3", "deepseek_v4", "qwen3_moe", "gpt_oss")
"""Routers, as `megamoe.router_families` defines them."""

_ONLY: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"scoring_func": "softmax", "norm_topk_prob": False},
    "deepseek_v3": {"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    "deepseek_v4": {"scoring_func": "sqrtsoftplus", "norm_topk_prob": True},
    "qwen3_moe": {},
}
"""The one value of a field that is understood, by family."""


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """One MoE layer and its router. Hashable.

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
        family: whose router it is, one of `FAMILIES`.
        hash_vocab_size: vocabulary of a hash layer (DeepSeek-V4), which looks experts up by token id; 0: by score.

    Raises:
        MegaMoETypeError: naming every field that is no number, or no integer where one is needed.
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
    family: str = "deepseek_v3"
    hash_vocab_size: int = 0

    def __post_init__(self) -> None:
        wrong_types = [
            expected(name, contract, repr(value))
            for name, contract, kinds in self._kinds()
            if not isinstance(value := getattr(self, name), kinds) or isinstance(value, bool) != (kinds == (bool,))
        ]
        if wrong_types:
            raise MegaMoETypeError("\n".join(wrong_types))
        problems = [
            expected(name, contract, getattr(self, name)) for name, contract, good in self._checks() if not good
        ]
        if problems:
            raise MegaMoEValueError("\n".join(problems))

    def _kinds(self) -> list[tuple[str, str, tuple[type, ...]]]:
        sizes = ("hidden_size", "intermediate_size", "num_experts", "top_k", "num_groups", "topk_groups")
        integers = [(name, "an integer", (int,)) for name in (*sizes, "num_shared_experts", "hash_vocab_size")]
        numbers = [(name, "a number", (int, float)) for name in ("routed_scaling_factor", "initializer_range")]
        flags = [("norm_topk", "True or False", (bool,))]
        return [*integers, *numbers, *flags, ("clamp", "a number or None", (int, float, type(None)))]

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
            ("family", f"one of {', '.join(FAMILIES)}", self.family in FAMILIES),
            ("hash_vocab_size", "0 or more", self.hash_vocab_size >= 0),
            ("routed_scaling_factor", "a finite number", math.isfinite(self.routed_scaling_factor)),
            ("initializer_range", "0 or a positive finite number", 0 <= self.initializer_range < math.inf),
            ("clamp", "a positive finite limit or None", self.clamp is None or 0 < self.clamp < float("inf")),
        ]

    @property
    def shared_intermediate_size(self) -> int:
        """I of the fused shared expert; 0 without one."""
        return self.num_shared_experts * self.intermediate_size

    @classmethod
    def from_hf(cls, config: Any) -> MoEConfig:
        """Read a Hugging Face config.

        Args:
            config: a `transformers` config object, or the contents of config.json as a mapping; `model_type` one of
                `MODEL_TYPES`.

        Returns:
            The configuration of its MoE layers. Of DeepSeek-V4 those that route by scores; its hash layers have
            `hash_vocab_size` besides.

        Raises:
            MegaMoEValueError: another model, another activation, scoring or normalisation, or a field is missing.
        """
        get = _reader(config)
        model_type = get("model_type", None)
        family = MODEL_TYPES.get(model_type) if isinstance(model_type, str) else None
        if family is None:
            raise MegaMoEValueError(
                expected(
                    "config.model_type",
                    f"one of {', '.join(MODEL_TYPES)}",
                    repr(model_type),
                    "Build a MoEConfig from its fields if its router is one of these models'.",
                )
            )
        for name, only in {"hidden_act": "silu", **_ONLY[family]}.items():
            if get(name, only) not in (only, None):
                raise MegaMoEValueError(expected(f"config.{name}", repr(only), repr(get(name, only))))
        names = ("n_routed_experts", "num_experts", "num_local_experts")
        num_experts = next((name for name in names if get(name, None) is not None), names[0])
        has_groups = family == "deepseek_v3" or get("topk_method", None) == "group_limited_greedy"
        return cls(
            hidden_size=get("hidden_size"),
            intermediate_size=get("moe_intermediate_size"),
            num_experts=get(num_experts),
            top_k=get("num_experts_per_tok"),
            num_groups=has_groups and get("n_group", None) or 1,
            topk_groups=has_groups and get("topk_group", None) or 1,
            norm_topk=family != "deepseek_v2" and _flag(get("norm_topk_prob", None), family != "qwen3_moe"),
            routed_scaling_factor=_number(get("routed_scaling_factor", None), 1.0),
            num_shared_experts=get("n_shared_experts", None) or 0,
            clamp=get("swiglu_limit", None),
            initializer_range=_number(get("initializer_range", None), 0.02),
            family=family,
        )


def _number(value: Any, default: float) -> Any:
    """A number of a config as float; null is the default, and what is no number stays, to be refused by its name."""
    if value is None:
        return default
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value


def _flag(value: Any, default: bool) -> Any:
    """A flag of a config: null is the default, 0 and 1 are False and True; what else there is stays, to be refused."""
    return default if value is None else bool(value) if value in (0, 1) else value


_REQUIRED = object()


def _reader(config: Any) -> Any:
    """get(name, default) of a mapping or an object; without a default a missing field is an error."""

    def get(name: str, default: Any = _REQUIRED) -> Any:
        value = config.get(name, default) if isinstance(config, Mapping) else getattr(config, name, default)
        if value is _REQUIRED:
            raise MegaMoEValueError(expected(f"config.{name}", "a value", "none", "Is it the config of a MoE model?"))
        return value

    return get
