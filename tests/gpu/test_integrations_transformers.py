"""transformers' experts interface and replaced blocks on a GPU: a step of tiny models against the eager path."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5")

from megamoe import backends
from megamoe.errors import BackendUnavailable
from megamoe.integrations.transformers import prepare, register, replace_moe
from megamoe.recipe import Recipe
from tests.support.tiny_models import (
    INTER,
    LEAST_DB,
    E,
    H,
    K,
    assert_close,
    make_model,
    tokens,
    train_step,
    with_bf16_experts,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

CASES = [
    ("deepseek_v3", "megamoe", "triton"),
    ("deepseek_v4", "megamoe", "triton"),
    ("qwen3_moe", "megamoe_fp8", "triton"),
    ("deepseek_v3", "megamoe_fp8", "cute"),
    ("qwen3_moe", "megamoe_fp8", "cute"),
]


def skip_unless_it_runs(backend: str, precision: Any) -> None:
    device = torch.device("cuda")
    problem = backends.Problem.of(device, Recipe(precision), H, INTER, num_experts=E, top_k=K)
    why = backends.why_not(backend, problem)
    if why is not None:
        pytest.skip(why)


@pytest.mark.parametrize(("family", "name", "backend"), CASES, ids=str)
def test_a_training_step(family: str, name: str, backend: Any) -> None:
    precision = "bf16" if name == "megamoe" else "fp8"
    skip_unless_it_runs(backend, precision)
    register(backend=backend)
    model = make_model(family).cuda()
    ours = with_bf16_experts(model) if name == "megamoe" else copy.deepcopy(model)
    ours.set_experts_implementation(name)
    prepare(ours)
    ids = tokens().cuda()
    assert_close(train_step(ours, ids), train_step(model, ids), LEAST_DB[precision])
    ours.eval()
    with torch.no_grad():  # another number of tokens, copies kept
        first, second = ours(input_ids=ids[:, :5]).logits, ours(input_ids=ids[:, :5]).logits
    assert torch.equal(first, second) and first.isfinite().all()


@pytest.mark.parametrize("weights", ["fp8", "bf16"])
def test_replaced_blocks_generate(weights: Any) -> None:
    model = make_model("deepseek_v3").bfloat16().cuda()
    ours = copy.deepcopy(model)
    replace_moe(ours, weights=weights)
    ids = tokens().cuda()
    options: dict[str, Any] = dict(max_new_tokens=3, do_sample=False, return_dict_in_generate=True, output_logits=True)
    got, want = ours.generate(ids, **options), model.generate(ids, **options)
    error = (got.logits[0] - want.logits[0]).norm() / want.logits[0].norm()
    assert error < 10 ** (-LEAST_DB["fp8"] / 20)


def test_a_backend_that_does_not_run_is_refused() -> None:
    register(backend="cute")
    model = make_model("qwen3_moe").bfloat16().cuda()
    model.set_experts_implementation("megamoe")  # bf16 has no fused kernel
    with pytest.raises(BackendUnavailable, match="backend: 'cute' does not run this"):
        model(input_ids=tokens().cuda())
