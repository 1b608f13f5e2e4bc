"""Weight gradients over a group of one rank on NCCL: launched while dx is on its way; the same bits in all modes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from megamoe.backends import Problem, why_not
from megamoe.recipe import Recipe
from tests.support.compare import assert_bitwise
from tests.support.overlap_events import check, events_of_backward


@pytest.fixture(scope="module")
def nccl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    torch.cuda.set_device(0)
    store = dist.FileStore(str(tmp_path_factory.mktemp("nccl") / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("wgrad", ["inline", "stream", "delayed"])
@pytest.mark.parametrize("backend", ["triton", "cute"])
def test_weight_gradients_run_between_start_and_wait_of_the_reverse_exchange(backend, wgrad, nccl):
    reason = why_not(backend, Problem.of(torch.device("cuda"), Recipe(), 256, 128))
    if reason is not None:
        pytest.skip(reason)
    events, grads = events_of_backward(backend, "cuda", wgrad, transport="nccl")
    check(events, wgrad, 1 if backend == "cute" else 2)
    _, want = events_of_backward(backend, "cuda", "inline", transport="nccl")
    torch.cuda.synchronize()
    assert grads.keys() == want.keys()
    for name, value in want.items():
        assert_bitwise(grads[name], value, name)
