"""Layers loaded onto a GPU against MoE blocks of transformers, with the backends that run there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from megamoe import backends
from megamoe.recipe import Recipe
from tests.support.family_blocks import BLOCKS, INTER, E, H, K, check

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("backend", ["triton", "cute"])
@pytest.mark.parametrize("name", BLOCKS)
def test_forward_and_all_gradients(tmp_path: Path, name: str, backend: str, ranks: int) -> None:
    precision = "bf16" if name == "deepseek-v4-clamped" else "fp8"
    world = "local" if ranks > 1 else "one"
    device = torch.device("cuda")
    problem = backends.Problem.of(
        device,
        Recipe(precision),
        hidden_size=H,
        intermediate_size=INTER,
        num_experts=E,
        top_k=K,
        num_ranks=ranks,
        world=world,
    )
    why = backends.why_not(backend, problem)
    if why is not None:
        pytest.skip(why)
    check(name, tmp_path, ranks, precision, backend, "cuda")
