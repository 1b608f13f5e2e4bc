"""The memory plan against torch's allocator: within 5 % above weights and copies."""

from __future__ import annotations

import pytest
import torch

from megamoe.config import MoEConfig
from tests.support.gpu_memory import MemoryCase, measure_peak, why_not

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SMALL = MoEConfig(2048, 768, 32, 8)
SHARED = MoEConfig(2048, 1024, 16, 4, num_shared_experts=1)
CASES = [
    *[MemoryCase(SMALL, 8192, save) for save in ("pool", "repull", "recompute", "none")],
    MemoryCase(SHARED, 8192),
    MemoryCase(SHARED, 8192, weights="fp8"),
    MemoryCase(SMALL, 8192, weights="fp32"),
    MemoryCase(SMALL, 8192, precision="bf16"),
    *[MemoryCase(SMALL, 8192, save, backend="cute") for save in ("pool", "repull", "recompute", "none")],
    MemoryCase(SHARED, 8192, weights="fp8", backend="cute"),
    MemoryCase(SHARED, 8192, "none", weights="fp8", backend="cute"),
    *[MemoryCase(SHARED, 8192, save, weights="fp8", backend="cute", is_packed=True) for save in ("none", "pool")],
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_peak_is_within_five_percent_of_the_plan(case: MemoryCase) -> None:
    why = why_not(case)
    if why is not None:
        pytest.skip(why)
    plan = case.plan()
    above = measure_peak(case) - plan.weights_bytes - plan.copies_bytes
    assert above == pytest.approx(plan.above_weights_bytes, rel=0.05), plan.explain()
