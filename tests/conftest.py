"""What every test gets: seeded generators, one torch thread a worker, and the device that the tests under gpu/ need."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores
        torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests under tests/gpu collect anywhere and are skipped where there is no CUDA device."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if (HERE / "gpu") in item.path.parents:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same random numbers in every run, whatever ran before."""
    torch.manual_seed(0)


@pytest.fixture
def device() -> torch.device:
    """The CUDA device where there is one, else the CPU: for tests that hold on both."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
