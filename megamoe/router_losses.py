"""Balancing the load of experts: the auxiliary losses of routers, and the update of the correction bias."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megamoe.errors import MegaMoETypeError, MegaMoEValueError, expected


def sequence_loss(
    scores: torch.Tensor,
    topk_ids: torch.Tensor,
    num_sequences: int = 1,
    token_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """DeepSeek's sequence-wise balance loss without its factor (arXiv 2412.19437, equations 17 to 20).

    For each sequence E / (K * T) * sum over experts of (how often it was chosen) * (mean share of the scores); the mean
    over sequences. 1 for a perfectly even load.

    Args:
        scores: [T, E], not negative (for instance `Routed.scores`); a token's scores are divided by their sum here.
        topk_ids: [T, K]; ids of -1 count for nothing.
        num_sequences: T is this many sequences of equal length, one after the other.
        token_mask: bool [T], False for padding, which counts in neither factor.

    Returns:
        fp32 scalar, differentiable in `scores`. Sequences that are all padding add 0.

    Raises:
        MegaMoEValueError: T is not a multiple of num_sequences, or shapes disagree.
    """
    num_tokens, num_experts = scores.shape
    if num_sequences < 1 or num_tokens % num_sequences:
        raise MegaMoEValueError(expected("num_sequences", f"a divisor of T = {num_tokens}", num_sequences))
    if topk_ids.shape[0] != num_tokens:
        raise MegaMoEValueError(expected("topk_ids", f"[T = {num_tokens}, K]", f"shape {tuple(topk_ids.shape)}"))
    scores = scores.float()
    mask = _mask(token_mask, num_tokens, scores.device)
    share = scores / (scores.sum(dim=-1, keepdim=True) + 1e-20) * mask[:, None]
    chosen = _one_hot_sum(topk_ids, num_experts) * mask[:, None]
    per_sequence = (num_sequences, -1, num_experts)
    length = mask.view(num_sequences, -1).sum(1).clamp_min(1)
    load = chosen.view(per_sequence).sum(1) * (num_experts / topk_ids.shape[1])
    mean_share = share.view(per_sequence).sum(1)
    return ((load * mean_share).sum(1) / length**2).mean()


def switch_loss(logits: torch.Tensor, topk_ids: torch.Tensor, token_mask: torch.Tensor | None = None) -> torch.Tensor:
    """The Switch Transformer's load-balancing loss without its factor (arXiv 2101.03961, equations 4 to 6).

    E * sum over experts of (slots per token that chose it) * (mean softmax probability), over all tokens; K for an even
    load, as in transformers.

    Args:
        logits: [T, E].
        topk_ids: [T, K]; ids of -1 count for nothing.
        token_mask: bool [T], False for padding.

    Returns:
        fp32 scalar, differentiable in `logits`; 0 for T = 0.

    Raises:
        MegaMoEValueError: shapes disagree.
    """
    num_tokens, num_experts = logits.shape
    if topk_ids.shape[0] != num_tokens:
        raise MegaMoEValueError(expected("topk_ids", f"[T = {num_tokens}, K]", f"shape {tuple(topk_ids.shape)}"))
    mask = _mask(token_mask, num_tokens, logits.device)
    total = mask.sum().clamp_min(1)
    load = (_one_hot_sum(topk_ids, num_experts) * mask[:, None]).sum(0) / total
    probability = (logits.float().softmax(dim=-1) * mask[:, None]).sum(0) / total
    return num_experts * (load * probability).sum()


def z_loss(logits: torch.Tensor, token_mask: torch.Tensor | None = None) -> torch.Tensor:
    """Mean of logsumexp(logits)^2 over tokens, without its factor (arXiv 2202.08906, equation 5): keeps logits small.

    Args:
        logits: [T, E].
        token_mask: bool [T], False for padding.

    Returns:
        fp32 scalar, differentiable; 0 for T = 0.
    """
    mask = _mask(token_mask, logits.shape[0], logits.device)
    return (logits.float().logsumexp(dim=-1).square() * mask).sum() / mask.sum().clamp_min(1)


@torch.no_grad()
def update_expert_bias_(
    correction_bias: torch.Tensor,
    counts: torch.Tensor | Sequence[torch.Tensor],
    rate: float = 1e-3,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Move the correction bias of each expert one step towards an even load (arXiv 2408.15664), in place.

    b += rate * sign(mean load - load): up for experts below the mean, down above it, unchanged exactly at it. The signs
    come from integers, so all ranks make the same step bit for bit.

    Args:
        correction_bias: fp32 [E].
        counts: integers [E], slots that chose each expert since the last update; a list is summed (virtual ranks).
        rate: size of a step.
        group: counts are summed over this process group; None: they are complete.

    Returns:
        `correction_bias`.

    Raises:
        MegaMoETypeError: counts that are not integers, a bias that is not fp32.
        MegaMoEValueError: shapes disagree.

    Effects: with a group, one all-reduce of E integers. No synchronisation with the host.
    """
    parts = [counts] if isinstance(counts, torch.Tensor) else list(counts)
    for part in parts:
        if part.is_floating_point() or part.is_complex() or part.dtype == torch.bool:
            raise MegaMoETypeError(expected("counts", "integers", part.dtype, "Shares of tokens would round."))
        if part.shape != correction_bias.shape:
            want = f"[E = {correction_bias.numel()}]"
            raise MegaMoEValueError(expected("counts", want, f"shape {tuple(part.shape)}"))
    if correction_bias.dtype != torch.float32:
        raise MegaMoETypeError(expected("correction_bias", "fp32", correction_bias.dtype, "Steps vanish in bf16."))
    total = torch.stack([part.to(correction_bias.device, torch.int64) for part in parts]).sum(0)
    if group is not None:
        dist.all_reduce(total, group=group)
    direction = torch.sign(total.sum() - total * total.numel())
    return correction_bias.add_(direction.float(), alpha=rate)


def _mask(token_mask: torch.Tensor | None, num_tokens: int, device: torch.device) -> torch.Tensor:
    """fp32 [T]: 1 for tokens that count."""
    if token_mask is None:
        return torch.ones(num_tokens, device=device)
    if token_mask.shape != (num_tokens,):
        raise MegaMoEValueError(expected("token_mask", f"[T = {num_tokens}]", f"shape {tuple(token_mask.shape)}"))
    return token_mask.to(device, torch.float32)


def _one_hot_sum(topk_ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """fp32 [T, E]: how many slots of a token chose an expert."""
    hits = torch.zeros(topk_ids.shape[0], num_experts, device=topk_ids.device)
    return hits.scatter_add_(1, topk_ids.long().clamp_min(0), (topk_ids >= 0).float())
