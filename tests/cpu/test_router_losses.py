"""Balance losses against loops and transformers' own, and the bias update from integer counts over ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megamoe.errors import MegaMoETypeError, MegaMoEValueError
from megamoe.router_losses import sequence_loss, switch_loss, update_expert_bias_, z_loss
from tests.support.distributed import run_ranks

E, K = 8, 2


def routing(num_tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.randn(num_tokens, E, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
    return logits.requires_grad_(), logits.detach().topk(K).indices


def loop_sequence_loss(scores: torch.Tensor, ids: torch.Tensor, num_sequences: int, mask: torch.Tensor) -> torch.Tensor:
    """Equations 17 to 20 as they stand."""
    losses = []
    for s, i, m in zip(scores.chunk(num_sequences), ids.chunk(num_sequences), mask.chunk(num_sequences), strict=True):
        s, i = s[m], i[m]
        if not len(s):
            losses.append(scores.sum() * 0)
            continue
        f = [E / (K * len(s)) * (i == e).sum() for e in range(E)]
        p = [torch.stack([row[e] / row.sum() for row in s]).mean() for e in range(E)]
        losses.append(sum(a * b for a, b in zip(f, p, strict=True)))
    return torch.stack(losses).mean()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("num_sequences", [1, 3])
def test_sequence_loss_is_the_papers(num_sequences: int, masked: bool) -> None:
    logits, ids = routing(24)
    mask = torch.ones(24, dtype=torch.bool)
    if masked:
        mask[[1, 5]] = False
        mask[16:] = False  # the last of three sequences is all padding
    ours = sequence_loss(logits.sigmoid(), ids, num_sequences, mask if masked else None)
    (grad,) = torch.autograd.grad(ours, logits)
    theirs = loop_sequence_loss(logits.double().sigmoid(), ids, num_sequences, mask)
    (want,) = torch.autograd.grad(theirs, logits)
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(grad, want, rtol=1e-5, atol=1e-8)


def test_sequence_loss_of_an_even_load_is_one() -> None:
    ids = torch.arange(16).view(8, 2) % E
    assert sequence_loss(torch.ones(8, E), ids).item() == pytest.approx(1.0)
    assert sequence_loss(torch.ones(8, E), ids.where(ids % 2 == 0, -1)).item() == pytest.approx(0.5)


@pytest.mark.parametrize("masked", [False, True])
def test_switch_loss_is_that_of_transformers(masked: bool) -> None:
    modeling = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")
    logits, ids = routing(30)
    mask = torch.arange(30) % 4 != 0 if masked else None
    ours = switch_loss(logits, ids, mask)
    theirs = modeling.load_balancing_loss_func((logits,), E, K, None if mask is None else mask.view(2, 15))
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(*(torch.autograd.grad(loss, logits)[0] for loss in (ours, theirs)))


def test_z_loss_is_that_of_transformers() -> None:
    modeling = pytest.importorskip("transformers.models.switch_transformers.modeling_switch_transformers")
    logits, _ = routing(30)
    ours, theirs = z_loss(logits), modeling.router_z_loss_func(logits[None])
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(*(torch.autograd.grad(loss, logits)[0] for loss in (ours, theirs)))
    mask = torch.arange(30) < 10
    torch.testing.assert_close(z_loss(logits, mask), z_loss(logits[:10]))


def test_no_tokens_and_wrong_shapes() -> None:
    empty, ids = torch.zeros(0, E, requires_grad=True), torch.zeros(0, K, dtype=torch.int64)
    for loss in (sequence_loss(empty, ids), switch_loss(empty, ids), z_loss(empty)):
        assert loss.item() == 0
        loss.backward()
    with pytest.raises(MegaMoEValueError, match=r"num_sequences: expected a divisor of T = 6, got 4"):
        sequence_loss(torch.ones(6, E), torch.zeros(6, K, dtype=torch.int64), 4)
    for loss_of in (sequence_loss, switch_loss):
        with pytest.raises(MegaMoEValueError, match=r"topk_ids: expected \[T = 6, K\], got shape \(5, 2\)"):
            loss_of(torch.ones(6, E), torch.zeros(5, K, dtype=torch.int64))
    with pytest.raises(MegaMoEValueError, match=r"token_mask: expected \[T = 6\]"):
        z_loss(torch.ones(6, E), torch.ones(5, dtype=torch.bool))


def test_bias_moves_towards_an_even_load() -> None:
    bias = torch.tensor([0.5, 0.5, 0.5, 0.5])
    got = update_expert_bias_(bias, torch.tensor([10, 0, 5, 5]), rate=0.25)
    assert got is bias and bias.tolist() == [0.25, 0.75, 0.5, 0.5]
    update_expert_bias_(bias, [torch.tensor([1, 0, 0, 0]), torch.tensor([0, 3, 0, 0])], rate=0.25)
    assert bias.tolist() == [0.25, 0.5, 0.75, 0.75]


def test_bias_signs_are_exact_for_large_counts() -> None:
    """Means that fp32 cannot tell from a count: 2^24 + 1 against a mean of 2^24 + 0.75."""
    counts = torch.tensor([2**24 + 1, 2**24 + 1, 2**24 + 1, 2**24])
    assert update_expert_bias_(torch.zeros(4), counts, rate=1.0).tolist() == [-1, -1, -1, 1]


def test_bias_refusals() -> None:
    with pytest.raises(MegaMoETypeError, match=r"counts: expected integers, got torch.float32"):
        update_expert_bias_(torch.zeros(4), torch.ones(4))
    with pytest.raises(MegaMoEValueError, match=r"counts: expected \[E = 4\], got shape \(5,\)"):
        update_expert_bias_(torch.zeros(4), torch.ones(5, dtype=torch.int64))
    with pytest.raises(MegaMoETypeError, match=r"correction_bias: expected fp32, got torch.bfloat16"):
        update_expert_bias_(torch.zeros(4).bfloat16(), torch.ones(4, dtype=torch.int64))


def bias_of_rank(rank: int) -> tuple[list[float], list[int]]:
    counts = torch.tensor([[7, 0, 1, 2], [1, 4, 3, 2]][rank], dtype=torch.int32)
    bias = update_expert_bias_(torch.zeros(4), counts, rate=0.5, group=dist.group.WORLD)
    return bias.tolist(), counts.tolist()


def test_counts_are_summed_over_the_group() -> None:
    for rank, (bias, counts) in enumerate(run_ranks(bias_of_rank, 2)):
        assert bias == [-0.5, 0.5, 0.5, 0.5]  # 8, 4, 4, 4 against a mean of 5
        assert counts == [[7, 0, 1, 2], [1, 4, 3, 2]][rank]
