"""Compiles every Triton kernel for SM90 in a process without the interpreter and prints what came out, one JSON a line.

python -m tests.support.triton_compile_all [--all]       --all: every tile configuration, not only the chosen ones
"""

from __future__ import annotations

import json
import sys

import torch

from megamoe import torch_steps, triton_kernels
from megamoe.quantize import QuantizedRows
from megamoe.recipe import Recipe
from megamoe.triton_kernels import configs
from tests.support.steps_cases import random_pool
from tests.support.triton_compile import Compiled, compiled_kernels

EXPERTS, HIDDEN, INTER, TOKENS, TOP_K = 4, 512, 256, 64, 8


def launch_everything(every: bool) -> None:
    """Calls each step as the layer does: FP8 and one source, or with `every` bf16 and two sources too."""
    fp8, bf16 = Recipe(), Recipe("bf16")
    ids = torch.randint(0, EXPERTS, (TOKENS, TOP_K))
    plan = torch_steps.make_plan([ids], EXPERTS)
    mine = plan.ranks[0]
    rows = mine.num_rows
    x, p = torch.randn(TOKENS, HIDDEN).bfloat16(), torch.rand(TOKENS, TOP_K)
    w13 = torch.randn(EXPERTS, 2 * INTER, HIDDEN).bfloat16()
    triton_kernels.make_plan([ids], EXPERTS, num_rows=rows, checked=False)
    triton_kernels.quantize_rows(x, fp8)
    triton_kernels.quantize_weight(w13, fp8, 2)
    triton_kernels.quantize_weight_with_transpose(w13, fp8, 2)
    triton_kernels.dequantize(random_pool(rows, HIDDEN, fp8))
    source = torch_steps.quantize_rows(x, fp8)
    for sources in ([source], [source, source]) if every else ([source],):
        triton_kernels.dispatch(sources, mine)
        triton_kernels.dispatch_weights([p] * len(sources), mine)
        y = torch.randn(rows, HIDDEN).bfloat16()
        triton_kernels.combine([y] * len(sources), plan, 0)
        triton_kernels.combine_weight_grads([torch.rand(rows)] * len(sources), plan, 0)
    gate_up, weight, dh = torch.randn(rows, 2 * INTER).bfloat16(), torch.rand(rows), torch.randn(rows, INTER)
    for recipe in (fp8, bf16, Recipe(clamp=7.0)) if every else (fp8,):
        triton_kernels.swiglu(gate_up, weight, recipe)
        triton_kernels.swiglu_backward(dh, gate_up, weight, recipe)
    pool, plain = random_pool(rows, HIDDEN, fp8), QuantizedRows(torch.randn(rows, HIDDEN).bfloat16(), None, True)
    q13 = torch_steps.quantize_weight(w13, fp8, 2)
    b13 = torch_steps.quantize_weight(w13, bf16, 2)
    count = None if every else 1
    for config in configs.FP8_GEMMS if every else configs.FP8_GEMMS[:2]:
        triton_kernels.grouped_gemm(pool, q13, mine, config=config)
    for config in configs.BF16_GEMMS[:count]:
        triton_kernels.grouped_gemm(plain, b13, mine, config=config)
    for wgrad_config in configs.WGRADS[:count]:
        triton_kernels.wgrad(gate_up, plain.data, mine, config=wgrad_config)
    operands = triton_kernels.wgrad_operands(gate_up, pool, mine, fp8)
    for config in configs.FP8_WGRADS[:count]:
        triton_kernels.wgrad(*operands, mine, config=config)
    if every:
        triton_kernels.grouped_gemm(pool, q13, mine, torch.float32)
        for pair in ((gate_up, plain.data), operands):
            triton_kernels.wgrad(*pair, mine, torch.empty(EXPERTS, 2 * INTER, HIDDEN).bfloat16(), True)


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
    with compiled_kernels() as found:
        launch_everything("--all" in sys.argv)
    for kernel in found:
        print(json.dumps(facts(kernel)))


if __name__ == "__main__":
    main()
