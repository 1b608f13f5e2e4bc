"""Weight gradients over a gloo group: computed while dx is on its way home, the same bits in every mode."""

from __future__ import annotations

import pytest
import torch

from tests.support.distributed import run_ranks
from tests.support.overlap_events import check, events_of_backward


def _rank(rank: int, wgrad: str, save: str) -> None:
    events, grads = events_of_backward("torch", "cpu", wgrad, save=save)
    check(events, wgrad, 2)
    _, want = events_of_backward("torch", "cpu", "inline")
    assert grads.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(grads[name], value), name


@pytest.mark.parametrize("save", ["pool", "recompute"])
@pytest.mark.parametrize("wgrad", ["inline", "stream", "delayed"])
def test_weight_gradients_run_between_start_and_wait_of_the_reverse_exchange(wgrad, save):
    run_ranks(_rank, 2, wgrad, save)


def test_the_check_can_fail():
    check(["start", "wait", "start", "wgrad", "wgrad", "wait", "end"], "inline", 2)
    for wrong in (
        ["start", "wait", "wgrad", "wgrad", "end"],
        ["start", "wgrad", "wait", "wgrad", "end"],
        ["start", "wait", "end", "wgrad", "wgrad"],
    ):
        with pytest.raises(AssertionError):
            check(wrong, "inline", 2)
    with pytest.raises(AssertionError):
        check(["start", "wgrad", "wgrad", "wait", "end"], "delayed", 2)
