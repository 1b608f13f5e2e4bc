"""Known failures of MoE layers, on every backend that runs on the GPU."""

import pytest
import torch

from megamoe.backends import Problem, why_not
from megamoe.recipe import Recipe
from tests.support.layer_cases import CASES, Where, partial_blocks

BACKENDS = ["cute", "triton", "torch"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_case(case, backend):
    size = 192 if case is partial_blocks else 256
    reason = why_not(backend, Problem.of(torch.device("cuda"), Recipe(), size, 128))
    if reason is not None:
        pytest.skip(reason)
    case(Where(backend, "cuda"))
