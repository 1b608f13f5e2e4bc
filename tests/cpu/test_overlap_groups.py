"""Weight gradients over a gloo group: computed while dx is on its way home, the same bits in every mode."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from megamoe import MegaMoE, OverlapConfig
from megamoe.errors import MegaMoERuntimeError
from tests.support.distributed import run_ranks
from tests.support.overlap_events import CONFIG, check, events_of_backward


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


def _managed(rank: int, how: str) -> None:
    """Gradients that these wrappers would never see are refused in the forward; "inline" trains."""
    for mode in ("inline", "stream", "delayed"):
        layer = MegaMoE(CONFIG, backend="torch", overlap=OverlapConfig(wgrad=mode))
        outer = torch.nn.Sequential(torch.nn.Identity(), layer)
        if how == "DistributedDataParallel":
            model: torch.nn.Module = DistributedDataParallel(outer)
        elif how == "fully_shard":
            model = fully_shard(outer, mesh=init_device_mesh("cpu", (2,)))
        else:
            model = FullyShardedDataParallel(outer, device_id=torch.device("cpu"))
        x = torch.randn(4, 256).bfloat16()
        if mode == "inline":
            model(x).sum().backward()
            assert all(p.grad is not None for p in model.parameters())
        else:
            reason = "parameters of DistributedDataParallel" if how.startswith("D") else "parameters that FSDP shards"
            with pytest.raises(MegaMoERuntimeError, match=f"overlap.wgrad: expected 'inline' here, got .* {reason}"):
                model(x)
            with torch.no_grad():
                model(x)


@pytest.mark.parametrize("how", ["DistributedDataParallel", "fully_shard", "FullyShardedDataParallel"])
def test_refused_where_others_manage_the_parameters(how):
    run_ranks(_managed, 2, how)


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
