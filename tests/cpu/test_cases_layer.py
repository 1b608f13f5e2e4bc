"""Known failures of MoE layers, on the torch path."""

import pytest

from tests.support.layer_cases import CASES, Where


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_case(case):
    case(Where("torch", "cpu"))
