"""What training asks of the layer, on every backend that runs on the GPU; no leak over 200 steps."""

import gc

import pytest
import torch

from megamoe import OverlapConfig
from megamoe.backends import Problem, why_not
from megamoe.recipe import Recipe
from tests.support.layer_cases import Where
from tests.support.training_cases import CASES, layer_of, tokens

BACKENDS = ["cute", "triton"]


@pytest.fixture(params=BACKENDS)
def where(request):
    reason = why_not(request.param, Problem.of(torch.device("cuda"), Recipe(), 256, 128))
    if reason is not None:
        pytest.skip(reason)
    return Where(request.param, "cuda")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_case(case, where):
    case(where)


@pytest.mark.parametrize("wgrad", ["inline", "stream", "delayed"])
def test_no_leak_over_200_steps(wgrad, where):
    """Sizes of five kinds, in turn; after the first round memory and the number of tensors stay what they were."""
    layer = layer_of(where, overlap=OverlapConfig(wgrad=wgrad))
    sizes = (40, 130, 17, 1, 256)

    def step(number: int) -> None:
        x = tokens(where, sizes[number % len(sizes)], seed=number).requires_grad_()
        layer.zero_grad(set_to_none=number % 2 == 0)
        layer(x).float().square().mean().backward()
        layer.backward_dw()

    def state() -> tuple[int, int]:
        gc.collect()
        torch.cuda.synchronize()
        alive = sum(isinstance(o, torch.Tensor) and o.is_cuda for o in gc.get_objects())
        return torch.cuda.memory_allocated(), alive

    for number in range(20):
        step(number)
    before = state()
    for number in range(20, 220):
        step(number)
    assert state() == before
