"""Failures of other kernels over sizes: ragged rows, odd widths, one token, large offsets. Any backend."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megamoe import Recipe
from megamoe.cli.problem import ProblemSpec, make_problem
from tests.support.backend_cases import (
    BACKENDS,
    RECIPES,
    check,
    named,
    naming_problem,
    need,
    recipe_id,
    run_on,
    with_counts,
)
from tests.support.compare import assert_bitwise

pytestmark = pytest.mark.parametrize("backend", BACKENDS)


@pytest.mark.parametrize("intermediate", [384, 768, 1536, 2048])
def test_widths_at_which_k_grouped_kernels_broke(backend, intermediate, device):
    check(make_problem(ProblemSpec((512,), 2048, intermediate, 8, 2), device), backend)


@pytest.mark.parametrize("hidden", [1024, 2048, 4096, 5120, 6144, 7168, 8192])
@pytest.mark.parametrize("intermediate", [256, 768, 2048])
def test_every_pair_of_sizes(backend, hidden, intermediate, device):
    check(make_problem(ProblemSpec((128,), hidden, intermediate, 4, 2), device), backend)


@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 45, 63, 65, 127, 129, 255])
def test_the_last_rows_are_written(backend, tokens, device):
    check(make_problem(ProblemSpec((tokens, tokens), 256, 128, 4, 2), device), backend)


def test_a_batch_equals_the_same_batch_padded(backend, device):
    """T = 45 against T = 64 whose last 19 tokens have no expert."""
    short = make_problem(ProblemSpec((45,), 256, 128, 4, 2), device)
    need(backend, short)

    def pad(v: torch.Tensor, value: float) -> torch.Tensor:
        return torch.cat([v, v.new_full((19, v.shape[1]), value)])

    long = dataclasses.replace(
        short,
        spec=dataclasses.replace(short.spec, num_tokens=(64,)),
        xs=[pad(short.xs[0], 3.0)],
        topk_ids=[pad(short.topk_ids[0], -1)],
        topk_weights=[pad(short.topk_weights[0], 1.0)],
        douts=[pad(short.douts[0], 5.0)],
    )
    a, b = run_on(short, backend).joined(), run_on(long, backend).joined()
    for name in ("dW13", "dW2"):
        assert_bitwise(b[name], a[name], name)
    for name in ("out", "dx", "dp"):
        assert_bitwise(b[name][:45], a[name], name)
        assert not bool(b[name][45:].any()), f"{name} of tokens without an expert"


@pytest.mark.parametrize("tokens", [(1, 1), (1, 1024)])
def test_one_token_and_more_experts_than_rows(backend, tokens, device):
    check(make_problem(ProblemSpec(tokens, 256, 128, 32, 8), device), backend)


@pytest.mark.parametrize("counts", [[128, 130, 65], [64, 64, 64], [1, 0, 127, 129]], ids=str)
@pytest.mark.parametrize("hidden,intermediate", [(256, 256), (192, 96), (192, 320)])
def test_every_row_names_its_expert(backend, counts, hidden, intermediate, device):
    recipe = Recipe(scale_format="pow2")
    problem = naming_problem(counts, device, hidden, intermediate)
    need(backend, problem, recipe)
    for _ in range(5):
        assert_bitwise(run_on(problem, backend, recipe).outs[0].detach(), named(problem), "out")


@pytest.mark.parametrize("recipe", RECIPES, ids=recipe_id)
def test_rows_of_an_expert_are_any_number(backend, recipe, device):
    check(with_counts([44, 1, 15, 17, 0, 129, 8193, 3], device), backend, recipe)


def test_offsets_beyond_32_bits(backend, device):
    """Experts 255, 256 and 511 of 512 whose weights have more than 2^31 elements, against a layer of those three."""
    if torch.cuda.mem_get_info(device)[0] < 90 << 30:
        pytest.skip("needs 90 GiB of GPU memory")
    hidden, intermediate, used = 4096, 1024, [255, 256, 511]
    small = make_problem(ProblemSpec((8,), hidden, intermediate, 3, 2), device)
    need(backend, small)
    bf16 = {"dtype": torch.bfloat16, "device": device}
    w13, w2 = (torch.zeros(512, *shape, **bf16) for shape in ((2 * intermediate, hidden), (hidden, intermediate)))
    w13[used], w2[used] = small.w13_E2IH, small.w2_EHI
    large = dataclasses.replace(
        small,
        spec=dataclasses.replace(small.spec, num_experts=512),
        topk_ids=[torch.tensor(used, device=device)[small.topk_ids[0]]],
        w13_E2IH=w13,
        w2_EHI=w2,
    )
    want, got = run_on(small, backend).joined(), run_on(large, backend).joined()
    for name in ("out", "dx", "dp"):
        assert_bitwise(got[name], want[name], name)
    for name in ("dW13", "dW2"):
        assert_bitwise(got[name][used], want[name], name)
        assert not bool(got[name][:255].any()) and not bool(got[name][257:511].any())
