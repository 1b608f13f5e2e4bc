"""dW13 and dW2 by the wgrad kernels from a whole layer's operands, against the fp64 oracle on unquantised inputs."""

import pytest
import torch

pytest.importorskip("cutlass")

from cute_kernels.wgrad_launch import (
    WgradOperands,
    plan_wgrad,
    row_factors,
    transpose_quantized,
    weight_gradients,
    wgrad_gemm,
)
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
    m_x, m_d = row_factors(forward.pool.scale), row_factors(d_rows.scale)
    bf16 = {
        "dW13": wgrad_gemm(grads.d_gate_up_bf16, x_bf16, queue, empty(NUM_EXPERTS, 2 * INTER, HIDDEN), cursor=0),
        "dW2": wgrad_gemm(d_bf16, grads.weighted_act, queue, empty(NUM_EXPERTS, HIDDEN, INTER), cursor=1),
    }
    fp8 = {
        "dW13": wgrad_gemm(
            transpose_quantized(grads.d_gate_up_bf16, queue, factors=m_x[0]),
            transpose_quantized(forward.pool.data, queue, forward.pool.scale, True, m_x[1]),
            queue,
            empty(NUM_EXPERTS, 2 * INTER, HIDDEN),
            cursor=2,
        ),
        "dW2": wgrad_gemm(
            transpose_quantized(d_rows.data, queue, d_rows.scale, False, m_d[1]),
            transpose_quantized(grads.weighted_act, queue, None, True, m_d[0]),
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


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_weight_gradients_are_the_two_gemms(precision):
    forward, d_rows, grads, plan, want = layer()
    x, d = forward.pool, d_rows
    if precision == "bf16":
        operands = WgradOperands(
            grads.d_gate_up_bf16,
            grads.weighted_act,
            x.dequantize(torch.bfloat16),
            None,
            d.dequantize(torch.bfloat16),
            None,
        )
    else:
        operands = WgradOperands(grads.d_gate_up_bf16, grads.weighted_act, x.data, x.scale, d.data, d.scale)
    shapes = (NUM_EXPERTS, 2 * INTER, HIDDEN), (NUM_EXPERTS, HIDDEN, INTER)
    runs = []
    for _ in range(3):
        dw13, dw2 = (torch.full(shape, float("nan"), device="cuda") for shape in shapes)
        weight_gradients(operands, plan.offs, plan.counts, dw13, dw2, precision=precision)
        runs.append((dw13, dw2))
        assert gates.sqnr_db(dw13, want.dw13_E2IH) >= gates.GATES["fp8"].tensor_db
        assert gates.sqnr_db(dw2, want.dw2_EHI) >= gates.GATES["fp8"].tensor_db
        assert torch.equal(dw13, runs[0][0]) and torch.equal(dw2, runs[0][1])
    weight_gradients(operands, plan.offs, plan.counts, *runs[0], precision=precision, accumulate=True)
    assert torch.equal(runs[0][0], 2 * runs[1][0]) and torch.equal(runs[0][1], 2 * runs[1][1])


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_a_graph_replays_with_new_routing(precision):
    """Counts, offsets and pools live on the device only: a captured call serves whatever they hold."""
    counts_now, width, rows = [100, 0, 300, 128], 256, 1024
    offs, counts = torch.zeros(5, dtype=torch.int32, device="cuda"), torch.zeros(4, dtype=torch.int32, device="cuda")
    pools = [torch.randn(rows, width, device="cuda").bfloat16() for _ in range(4)]
    x, d = (quantize_rows(v, Recipe()) for v in pools[2:])
    weighted = pools[1][:, :128].contiguous()
    operands = WgradOperands(pools[0], weighted, pools[2], None, pools[3], None)
    if precision == "fp8":
        operands = WgradOperands(pools[0], weighted, x.data, x.scale.t().contiguous(), d.data, d.scale.t().contiguous())
    dw13 = torch.full((4, 256, width), float("nan"), device="cuda")
    dw2 = torch.full((4, width, 128), float("nan"), device="cuda")

    def call():
        weight_gradients(operands, offs, counts, dw13, dw2, precision=precision)

    def route(values):
        ends = torch.tensor([0] + [(n + 127) // 128 * 128 for n in values]).cumsum(0).int()
        offs.copy_(ends)
        counts.copy_(torch.tensor(values).int())

    route(counts_now)
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for values in ([1, 500, 0, 7], [0, 0, 0, 1000], [0, 0, 0, 0], [100, 0, 300, 128]):
        route(values)
        dw13.fill_(float("nan"))
        dw2.fill_(float("nan"))
        graph.replay()
        got = dw13.clone(), dw2.clone()
        call()
        assert torch.equal(dw13, got[0]) and torch.equal(dw2, got[1])
        start = offs.tolist()
        for e, n in enumerate(values):
            if n:
                want = (
                    operands.d_gate_up[start[e] : start[e] + n].double().t()
                    @ pools[2][start[e] : start[e] + n].double()
                )
                assert gates.rel_l2(dw13[e], want) < (0.05 if precision == "fp8" else 1e-5)
            else:
                assert not dw13[e].any() and not dw2[e].any()


def test_rows_of_very_different_size():
    """Rows of x from 1e-3 to 1e3 within 128, their partners the other way round: all count alike, none may be lost."""
    rows, counts = 256, [200]
    magnitude = torch.logspace(-3, 3, rows, device="cuda")[torch.randperm(rows, device="cuda"), None]
    x, d = torch.randn(rows, 256, device="cuda") * magnitude, torch.randn(rows, 384, device="cuda") * magnitude
    d_gate_up, weighted = (torch.randn(rows, n, device="cuda") / magnitude for n in (512, 256))
    xq, dq = (quantize_rows(v.bfloat16(), Recipe()) for v in (x, d))
    d_gate_up, weighted = d_gate_up.bfloat16(), weighted.bfloat16()
    operands = WgradOperands(
        d_gate_up, weighted, xq.data, xq.scale.t().contiguous(), dq.data, dq.scale.t().contiguous()
    )
    offs, n = torch.tensor([0, 256], device="cuda").int(), torch.tensor(counts, device="cuda").int()
    dw13, dw2 = torch.empty(1, 512, 256, device="cuda"), torch.empty(1, 384, 256, device="cuda")
    weight_gradients(operands, offs, n, dw13, dw2)
    for got, a, b in ((dw13, d_gate_up, xq.dequantize()), (dw2, dq.dequantize(), weighted)):
        want = a[:200].double().t() @ b[:200].double()
        for part, wanted in zip(got[0].split(128), want.split(128), strict=True):
            assert gates.sqnr_db(part, wanted) > 27  # two roundings to e4m3
