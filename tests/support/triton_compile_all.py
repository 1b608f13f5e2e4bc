"""Compiles every Triton kernel in a process without the interpreter and prints what came out, one JSON a line.

python -m tests.support.triton_compile_all [--all] [--capability 90]
    --all: every tile configuration, not only the chosen ones; --capability: below 89 the steps of the bf16 recipe alone
"""

from __future__ import annotations

import argparse
import json

import torch

from megamoe import torch_steps, triton_kernels
from megamoe.recipe import Recipe
from megamoe.routing_plan import RankPlan
from megamoe.triton_kernels import configs
from tests.support.steps_cases import random_pool
from tests.support.triton_compile import Compiled, compiled_kernels

EXPERTS, HIDDEN, INTER, TOKENS, TOP_K = 4, 512, 256, 64, 8


def launch_everything(every: bool, recipes: tuple[Recipe, ...]) -> None:
    """Calls each step as the layer does: with the first recipe and one source, or with `every` all and two sources."""
    recipe = recipes[0]
    ids = torch.randint(0, EXPERTS, (TOKENS, TOP_K))
    plan = torch_steps.make_plan([ids], EXPERTS)
    mine = plan.ranks[0]
    rows = mine.num_rows
    x, p = torch.randn(TOKENS, HIDDEN).bfloat16(), torch.rand(TOKENS, TOP_K)
    triton_kernels.make_plan([ids], EXPERTS, num_rows=rows, checked=False)
    triton_kernels.quantize_rows(x, recipe)
    source = torch_steps.quantize_rows(x, recipe)
    for sources in ([source], [source, source]) if every else ([source],):
        triton_kernels.dispatch(sources, mine)
        triton_kernels.dispatch_weights([p] * len(sources), mine)
        y = torch.randn(rows, HIDDEN).bfloat16()
        triton_kernels.combine([y] * len(sources), plan, 0)
        triton_kernels.combine_weight_grads([torch.rand(rows)] * len(sources), plan, 0)
    gate_up, weight, dh = torch.randn(rows, 2 * INTER).bfloat16(), torch.rand(rows), torch.randn(rows, INTER)
    for each in (*recipes, Recipe(recipe.precision, clamp=7.0)) if every else recipes[:1]:
        triton_kernels.swiglu(gate_up, weight, each)
        triton_kernels.swiglu_backward(dh, gate_up, weight, each)
    for each in recipes:
        launch_gemms(gate_up, mine, each, every)


def launch_gemms(gate_up: torch.Tensor, mine: RankPlan, recipe: Recipe, every: bool) -> None:
    """The quantisers of weights and the products of one recipe, with the chosen tile or with `every` tile."""
    w13 = torch.randn(EXPERTS, 2 * INTER, HIDDEN).bfloat16()
    triton_kernels.quantize_weight(w13, recipe, 2)
    triton_kernels.quantize_weight_with_transpose(w13, recipe, 2)
    b13 = torch_steps.quantize_weight(w13, recipe, 2)
    pool = random_pool(mine.num_rows, HIDDEN, recipe)
    triton_kernels.dequantize(pool)
    operands = triton_kernels.wgrad_operands(gate_up, pool, mine, recipe)
    if recipe.precision == "fp8":
        gemms, wgrads, chosen = configs.FP8_GEMMS, configs.FP8_WGRADS, 2
    else:
        gemms, wgrads, chosen = configs.BF16_GEMMS, configs.WGRADS, 1
    for config in gemms if every else gemms[:chosen]:
        triton_kernels.grouped_gemm(pool, b13, mine, config=config)
    for wgrad_config in wgrads if every else wgrads[:1]:
        triton_kernels.wgrad(*operands, mine, config=wgrad_config)
    if every:
        triton_kernels.grouped_gemm(pool, b13, mine, torch.float32)
        triton_kernels.wgrad(*operands, mine, torch.empty(EXPERTS, 2 * INTER, HIDDEN).bfloat16(), True)


def facts(kernel: Compiled) -> dict[str, object]:
    """What the tests look at."""
    return {
        "name": kernel.name,
        "warps": kernel.warps,
        "registers": kernel.registers,
        "spill_bytes": kernel.spill_bytes,
        "shared_bytes": kernel.shared_bytes,
        "fp8_mma": kernel.sass.count("QGMMA"),
        "bf16_mma": kernel.sass.count("HGMMA"),
        "tma_loads": kernel.sass.count("UTMALDG"),
        "approximate": "ex2.approx.ftz.f32" in kernel.ptx and "rcp.approx.ftz.f32" in kernel.ptx,
        "saturating": "cvt.rn.satfinite.e4m3x2.f32" in kernel.ptx,
        "contracted": "fma.rn.f32" in kernel.ptx,
        "ffma": kernel.sass.count("FFMA"),
    }


def main() -> None:
    """Print the facts of every kernel."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--capability", type=int, default=90)
    args = parser.parse_args()
    recipes = (Recipe(), Recipe("bf16")) if args.capability >= 89 else (Recipe("bf16"),)
    with compiled_kernels(args.capability) as found:
        launch_everything(args.all, recipes)
    for kernel in found:
        print(json.dumps(facts(kernel)))


if __name__ == "__main__":
    main()
