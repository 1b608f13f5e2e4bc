"""Known failures of MoE layers, on every backend that runs on the GPU."""

import pytest

from tests.support.layer_cases import CASES, Where

BACKENDS = ["triton", "torch"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_case(case, backend):
    case(Where(backend, "cuda"))
