"""What training asks of the layer, on the torch path and around emulated fused launches."""

import pytest

from tests.support import fake_cute
from tests.support.layer_cases import Where
from tests.support.training_cases import CASES


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_case(case):
    case(Where("torch", "cpu"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_around_the_fused_launches(case, monkeypatch):
    fake_cute.install(monkeypatch)
    case(Where("cute", "cpu"))
