"""dW13 and dW2 by the wgrad kernels from a whole layer's operands, against the fp64 oracle on unquantised inputs."""

import pytest
import torch

pytest.importorskip("cutlass")

from cute_kernels.wgrad_launch import plan_wgrad, transpose_quantized, wgrad_bf16, wgrad_fp8
from megamoe import gates, torch_steps
from megamoe.quantize import quantize_rows
from megamoe.recipe import Recipe
from megamoe.reference import Inputs, emulate_forward, oracle_backward

NUM_EXPERTS, HIDDEN, INTER, TOKENS, TOP_K = 8, 1024, 512, 700, 4


def layer():
    """Operands of both GEMMs as the forward and dgrad leave them, and the oracle's gradients; expert 5 is empty."""
    g = torch.Generator("cuda").manual_seed(3)

    def rand(*shape):
        return torch.randn(*shape, device="cuda", generator=g)

    popular = torch.tensor([4.0, 3, 2, 1, 1, 0, 0.3, 0.05], device="cuda").expand(TOKENS, NUM_EXPERTS)
    ids = torch.multinomial(popular, TOP_K, generator=g)
    weights = torch.rand(TOKENS, TOP_K, device="cuda", generator=g) + 0.05
    w13, w2 = (
        (rand(NUM_EXPERTS, 2 * INTER, HIDDEN) / HIDDEN**0.5).bfloat16(),
        (rand(NUM_EXPERTS, HIDDEN, INTER) / INTER**0.5).bfloat16(),
    )
    inputs, dout = Inputs(rand(TOKENS, HIDDEN).bfloat16(), ids, weights, w13, w2), rand(TOKENS, HIDDEN).bfloat16()
    recipe = Recipe()
    forward = emulate_forward(inputs, recipe)
    plan = forward.plan.ranks[0]
    d_rows = torch_steps.dispatch([quantize_rows(dout, recipe)], plan)
    dh = torch_steps.grouped_gemm(d_rows, forward.w2.transposed(), plan, torch.float32)
    grads = torch_steps.swiglu_backward(dh, forward.gate_up_P2I, forward.weight_P, recipe)
    return forward, d_rows, grads, plan, oracle_backward(inputs, dout)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gates_and_the_two_db_rule(dtype):
    forward, d_rows, grads, plan, want = layer()
    queue = plan_wgrad(plan.offs, plan.counts, plan.num_rows, 4)

    def empty(*shape):
        return torch.full(shape, float("nan"), dtype=dtype, device="cuda")

    x_bf16, d_bf16 = forward.pool.dequantize(torch.bfloat16), d_rows.dequantize(torch.bfloat16)
    bf16 = {
        "dW13": wgrad_bf16(grads.d_gate_up_bf16, x_bf16, queue, empty(NUM_EXPERTS, 2 * INTER, HIDDEN), cursor=0),
        "dW2": wgrad_bf16(d_bf16, grads.weighted_act, queue, empty(NUM_EXPERTS, HIDDEN, INTER), cursor=1),
    }
    fp8 = {
        "dW13": wgrad_fp8(
            transpose_quantized(grads.d_gate_up_bf16, queue),
            transpose_quantized(forward.pool.data, queue, forward.pool.scale, square=True),
            queue,
            empty(NUM_EXPERTS, 2 * INTER, HIDDEN),
            cursor=2,
        ),
        "dW2": wgrad_fp8(
            transpose_quantized(d_rows.data, queue, d_rows.scale),
            transpose_quantized(grads.weighted_act, queue, square=True),
            queue,
            empty(NUM_EXPERTS, HIDDEN, INTER),
            cursor=3,
        ),
    }
    bounds = gates.GATES["fp8"]
    for name, exact in (("dW13", want.dw13_E2IH), ("dW2", want.dw2_EHI)):
        figures = {}
        for operands, got in (("bf16", bf16[name]), ("fp8", fp8[name])):
            figures[operands] = gates.sqnr_db(got, exact)
            worst, expert = gates.worst_expert_db(got, exact)
            print(f"{name} {operands} operands: {figures[operands]:.2f} dB, worst expert {expert} {worst:.2f} dB")
            assert figures[operands] >= bounds.tensor_db, (name, operands)
            assert worst >= bounds.expert_db, (name, operands, expert)
            assert bool((got[5] == 0).all()), (name, operands)
        assert figures["bf16"] - figures["fp8"] <= 2.0, name
