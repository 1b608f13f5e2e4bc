"""Routers of other model families, beside DeepSeek-V3's: scores, choice and weights as pure functions of fp32 logits.

A family is a scoring function, a rule for groups and a rule for weights (`RouterFamily`); `route_family` applies it to
logits, also with ids that are given: replayed from another run, or looked up by token (`hash_ids`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from megamoe.config import MoEConfig
from megamoe.errors import MegaMoETypeError, MegaMoEValueError, expected
from megamoe.router import NORM_EPS, choose_experts

SOFTPLUS_TAIL = -20.0
"""Below it softplus(x) equals exp(x) in fp32, and sqrt(exp(x)) = exp(x / 2) has a gradient where softplus is 0."""


def sqrt_softplus(logits: torch.Tensor) -> torch.Tensor:
    """sqrt(softplus(logits)), DeepSeek-V4's score; value and gradient are finite for every finite logit."""
    body = torch.nn.functional.softplus(logits.clamp_min(SOFTPLUS_TAIL)).sqrt()
    return torch.where(logits < SOFTPLUS_TAIL, (logits.clamp_max(SOFTPLUS_TAIL) / 2).exp(), body)


def softmax(logits: torch.Tensor) -> torch.Tensor:
    """Over all experts."""
    return logits.softmax(dim=-1)


def identity(logits: torch.Tensor) -> torch.Tensor:
    """The logits themselves are the scores."""
    return logits


@dataclasses.dataclass(frozen=True)
class RouterFamily:
    """How a family of models routes.

    Attributes:
        name: in messages.
        score: logits -> scores, fp32 [T, E]; the choice is by scores, plus the correction bias if there is one.
        group_best: a group's score is the sum of its best `group_best` experts: 2 in DeepSeek-V3, 1 (the best) in V2.
        has_bias: whether a correction bias may take part in the choice.
        softmax_over_chosen: the weights are a softmax over the scores of the chosen experts (gpt-oss: top-k, then
            softmax); else they are the scores themselves, normalised if `norm_topk`.
    """

    name: str
    score: Callable[[torch.Tensor], torch.Tensor]
    group_best: int = 2
    has_bias: bool = False
    softmax_over_chosen: bool = False


ROUTER_FAMILIES = {
    "deepseek_v2": RouterFamily("deepseek_v2", softmax, group_best=1),
    "deepseek_v3": RouterFamily("deepseek_v3", torch.sigmoid, has_bias=True),
    "deepseek_v4": RouterFamily("deepseek_v4", sqrt_softplus, has_bias=True),
    "qwen3_moe": RouterFamily("qwen3_moe", softmax),
    "gpt_oss": RouterFamily("gpt_oss", identity, softmax_over_chosen=True),
}
"""DeepSeek-V3's stands for Kimi-K2, GLM-4.5 and GLM-5 too. Qwen3: softmax, then top-k; gpt-oss: top-k, then softmax."""


@dataclasses.dataclass(frozen=True)
class Routed:
    """What a router decided.

    Attributes:
        topk_ids: int64 [T, K]; -1 for no expert (masked tokens; ids of -1 that were given).
        topk_weights: fp32 [T, K], differentiable, exactly 0 where the id is -1.
        scores: fp32 [T, E], differentiable: for `sequence_loss`.
    """

    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    scores: torch.Tensor


def route_family(
    logits: torch.Tensor,
    config: MoEConfig,
    family: str | RouterFamily,
    *,
    correction_bias: torch.Tensor | None = None,
    topk_ids: torch.Tensor | None = None,
    token_mask: torch.Tensor | None = None,
) -> Routed:
    """Choose experts and weigh them, in fp32.

    Args:
        logits: fp32 [T, E].
        config: K, groups, normalisation (`norm_topk`: divide by the sum + 1e-20), scaling factor (applied once).
        family: a name of ROUTER_FAMILIES or a RouterFamily.
        correction_bias: fp32 [E], only where the family has one; it takes part in the choice and never in a weight.
        topk_ids: int [T, K] in [-1, E): these experts are used instead of a choice, and only weighed.
        token_mask: bool [T]; tokens with False get no expert.

    Returns:
        Routed. Ids of a token are distinct unless given, best choice first.

    Raises:
        MegaMoEValueError, MegaMoETypeError: unknown family, wrong shapes or dtypes, a bias where the family has none.

    Effects: no synchronisation with the host; the values of given ids are not checked here, but read no foreign memory.
    """
    rule = _family(family)
    _check(logits, config, rule, correction_bias, topk_ids, token_mask)
    scores = rule.score(logits)
    is_all_experts = topk_ids is None and token_mask is None
    topk_ids = choose_experts(scores, correction_bias, config, rule.group_best) if topk_ids is None else topk_ids.long()
    if token_mask is not None:
        topk_ids = torch.where(token_mask[:, None], topk_ids, -1)
    is_expert = None if is_all_experts else topk_ids >= 0
    chosen = scores.gather(1, topk_ids if is_all_experts else topk_ids.clamp(0, config.num_experts - 1))
    if is_expert is not None:
        chosen = torch.where(is_expert, chosen, float("-inf") if rule.softmax_over_chosen else 0.0)
    if rule.softmax_over_chosen:
        if is_expert is not None:  # a row without any expert would be a softmax over nothing
            chosen = torch.where(is_expert.any(1, keepdim=True), chosen, 0.0)
        weights = chosen.softmax(dim=-1)
        weights = weights if is_expert is None else torch.where(is_expert, weights, 0.0)
    else:
        weights = chosen
        if config.norm_topk:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + NORM_EPS)
    return Routed(topk_ids, weights * config.routed_scaling_factor, scores)


INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def hash_ids(token_ids: torch.Tensor, tid2eid: torch.Tensor) -> torch.Tensor:
    """The experts of each token in a hash layer (DeepSeek-V4): a look-up by vocabulary id, for `topk_ids=`.

    Args:
        token_ids: int [T] or [B, S].
        tid2eid: int [vocabulary, K].

    Returns:
        int64 [T, K].

    Raises:
        MegaMoEValueError: tid2eid is no [vocabulary, K] table; an id outside the vocabulary (on CUDA devices an
            assertion of the device, so that nothing synchronises). MegaMoETypeError: ids that are no integers.
    """
    if tid2eid.dim() != 2:
        raise MegaMoEValueError(expected("tid2eid", "[vocabulary, K]", f"shape {tuple(tid2eid.shape)}"))
    if token_ids.dtype not in INTEGERS:
        raise MegaMoETypeError(expected("token_ids", "a tensor of integers", token_ids.dtype))
    ids, size = token_ids.reshape(-1).long(), tid2eid.shape[0]
    if ids.device.type == "cpu" and not torch.compiler.is_compiling() and ids.numel():
        low, high = (int(v) for v in torch.aminmax(ids))
        if low < 0 or high >= size:
            raise MegaMoEValueError(expected("token_ids", f"ids in [0, {size})", low if low < 0 else high))
    return tid2eid.index_select(0, ids.to(tid2eid.device)).long()


def _family(family: str | RouterFamily) -> RouterFamily:
    if isinstance(family, RouterFamily):
        return family
    if family not in ROUTER_FAMILIES:
        raise MegaMoEValueError(expected("family", f"one of {', '.join(ROUTER_FAMILIES)}", repr(family)))
    return ROUTER_FAMILIES[family]


def _check(
    logits: torch.Tensor,
    config: MoEConfig,
    rule: RouterFamily,
    correction_bias: torch.Tensor | None,
    topk_ids: torch.Tensor | None,
    token_mask: torch.Tensor | None,
) -> None:
    problems = []
    if logits.dim() != 2 or logits.shape[1] != config.num_experts:
        problems.append(expected("logits", f"[T, E = {config.num_experts}]", f"shape {tuple(logits.shape)}"))
    elif topk_ids is not None and topk_ids.shape != (logits.shape[0], config.top_k):
        want = f"[T = {logits.shape[0]}, K = {config.top_k}]"
        problems.append(expected("topk_ids", want, f"shape {tuple(topk_ids.shape)}"))
    if token_mask is not None and token_mask.shape != logits.shape[:1]:
        problems.append(expected("token_mask", f"[T = {logits.shape[0]}]", f"shape {tuple(token_mask.shape)}"))
    if correction_bias is not None and not rule.has_bias:
        problems.append(expected("correction_bias", f"None in the family {rule.name}", "a tensor"))
    if correction_bias is not None and correction_bias.shape != (config.num_experts,):
        shape = f"shape {tuple(correction_bias.shape)}"
        problems.append(expected("correction_bias", f"[E = {config.num_experts}]", shape))
    if problems:
        raise MegaMoEValueError("\n".join(problems))
    for name, tensor in (("logits", logits), ("correction_bias", correction_bias)):
        if tensor is not None and tensor.dtype != torch.float32:
            raise MegaMoETypeError(expected(name, "fp32", tensor.dtype, "Rounding it would change choices."))
    if token_mask is not None and token_mask.dtype != torch.bool:
        raise MegaMoETypeError(expected("token_mask", "bool", token_mask.dtype))
    if topk_ids is not None and topk_ids.dtype not in (torch.int32, torch.int64):
        raise MegaMoETypeError(expected("topk_ids", "int32 or int64", topk_ids.dtype))
