"""The fused dgrad on a Hopper GPU against the torch steps, its own numbers, Triton and the oracle."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("cutlass")

from cute_kernels import backward_launch, launch
from megamoe import gates
from megamoe import torch_steps as steps
from megamoe.quantize import QuantizedRows
from megamoe.recipe import Recipe
from megamoe.reference import Inputs, oracle_backward
from megamoe.routing_plan import make_plan
from tests.gpu.test_cute_forward import CASES, TIMEOUT_S, Case, World, rel

BACKWARD_CASES = [
    *(dataclasses.replace(c, save=True) for c in CASES),
    Case("clamp, odd I", intermediate=384, clamp=0.7, tokens=(200,)),
    Case("deep I", intermediate=1024, hidden=512, tokens=(260,)),
]


class Backward:
    """A case's forward buffers and transposed weights, from which dgrad runs."""

    def __init__(self, world: World):
        self.world, self.case = world, world.case
        self.w13_t, self.w2_t = ([w.transposed() for w in ws] for ws in (world.w13, world.w2))
        self.weights = [
            backward_launch.prepare_backward_weights(a.data, a.scale, b.data, b.scale)
            for a, b in zip(self.w13_t, self.w2_t, strict=True)
        ]

    def douts(self, seed: int, tailed: bool = False) -> list[torch.Tensor]:
        g = torch.Generator(device="cuda").manual_seed(seed + 900)
        douts = [torch.randn(t, self.case.hidden, device="cuda", generator=g) for t in self.case.tokens]
        if tailed:  # heavy tails, and masked tokens
            douts = [d.pow(5) * (torch.rand(d.shape[0], 1, device="cuda", generator=g) > 0.3) for d in douts]
        return [d.bfloat16() for d in douts]

    def run(self, ids, saved, douts) -> list[backward_launch.BackwardResult]:
        results = [backward_launch._allocate(d, s, self.case.top_k) for d, s in zip(douts, saved, strict=True)]
        for r in results:
            for t in vars(r).values():
                t.view(torch.uint8).fill_(0xFF)
        backward_launch.fused_backward(
            self.world.world.workspaces, douts, ids, saved, self.weights, clamp=self.case.clamp,
            pow2_scales=self.case.pow2, config=self.case.config, timeout_s=TIMEOUT_S,
            streams=self.world.world.streams, results=results,
        )  # fmt: skip
        torch.cuda.synchronize()
        errors = [e for w in self.world.world.workspaces if (e := w.error())]
        assert not errors, errors
        return results


def check_rows(b: Backward, r: int, result, saved, plan, quantized) -> None:
    """What dgrad leaves on rank r: pool, [dg; du], p * act, dp of each row."""
    case, mine = b.case, plan.ranks[r]
    rows = mine.num_rows
    real = (mine.source_rank >= 0).nonzero().flatten()
    want = steps.dispatch(quantized, mine)
    assert torch.equal(result.pool.view(torch.uint8)[:rows], want.data.view(torch.uint8)), "pool"
    assert torch.equal(result.pool_s[:, :rows], want.scale), "pool scales"
    if not real.numel():
        return
    dh = steps.grouped_gemm(want, b.w2_t[r], mine, torch.float32)
    gate_up = torch.where(mine.source_rank[:, None] >= 0, saved.gate_up[:rows], 0.0)
    ref = steps.swiglu_backward(dh, gate_up, saved.p[:rows], case.recipe)
    assert rel(result.weighted[real], ref.weighted_act[real]) < 1e-3, "p * act"
    assert rel(result.grad_bf16[real], ref.d_gate_up_bf16[real]) < 4e-3, "dg, du"
    got = QuantizedRows(result.grad[:rows], result.grad_s[:, :rows].contiguous(), k_major=True).dequantize()
    assert rel(got[real], result.grad_bf16[real]) < (4e-2 if case.pow2 else 3.2e-2), "quantised dg, du"
    blocks = result.grad_bf16[real].float().view(real.numel(), -1, 128)
    scale = result.grad_s[:, real].t()
    limit = blocks.abs().amax(2).clamp_min(2.0**-100) / 448
    assert bool((scale >= limit * 0.996).all()) and bool((scale <= limit * (2.01 if case.pow2 else 1.004)).all()), (
        "scales"
    )
    total = torch.zeros(rows, device="cuda")
    for part in result.dp_parts[:, :rows]:
        total = total + part
    assert rel(total[real], ref.d_weight[real]) < 2e-3, "dp of the rows"


def check_tokens(b: Backward, ids, saved, results, plan) -> None:
    """dx against the kernel's own rows and a GEMM on its own [dg; du]; dp against its own blocks, in order."""
    case = b.case
    d_rows, d_weights = [], []
    for r, result in enumerate(results):
        mine = plan.ranks[r]
        rows = mine.num_rows
        grad = QuantizedRows(result.grad[:rows], result.grad_s[:, :rows].contiguous(), k_major=True, groups=2)
        d_rows.append(steps.grouped_gemm(grad, b.w13_t[r], mine))
        total = torch.zeros(rows, device="cuda")
        for part in result.dp_parts[:, :rows]:
            total = total + part
        d_weights.append(total)
    for r, result in enumerate(results):
        t = case.tokens[r]
        y = b.world.world.workspaces[r].view("y", torch.bfloat16, t, case.top_k, case.hidden)
        valid = (ids[r] >= 0) & (ids[r] < case.experts)
        own = torch.zeros(t, case.hidden, device="cuda")
        for j in range(case.top_k):
            own += torch.where(valid[:, j : j + 1], y[:, j].float(), 0.0)
        assert torch.equal(own.bfloat16(), result.dx), f"the sum over k, {rel(result.dx, own)}"
        if t:
            want = steps.combine(d_rows, plan, r)
            assert rel(result.dx, want) < 8e-3, f"dx {rel(result.dx, want)}"
        assert torch.equal(result.dp, steps.combine_weight_grads(d_weights, plan, r)), "dp"


def real_bits(results, plan) -> list[torch.Tensor]:
    """Bytes of the results, padding left out."""
    found = []
    for r, mine in zip(results, plan.ranks, strict=True):
        real = (mine.source_rank >= 0).nonzero().flatten()
        found += [r.dx.view(torch.int16).clone(), r.dp.view(torch.int32).clone()]
        found += [t.view(torch.uint8)[real].clone() for t in (r.weighted, r.grad_bf16, r.grad)]
    return found


@pytest.mark.parametrize("case", BACKWARD_CASES, ids=lambda c: c.name)
def test_dgrad(case):
    world = World(case)
    with world.world:
        b = Backward(world)
        for seed in (1, 2):  # changing routing
            inputs = world.inputs(seed)
            xs, ids, ps = inputs
            world.poison()
            saved = [r.buffers for r in world.run(inputs)]
            world.poison()
            douts = b.douts(seed, tailed=seed == 2)
            results = b.run(ids, saved, douts)
            plan = make_plan([torch.where(i < case.experts, i, -1) for i in ids], case.experts)
            quantized = [steps.quantize_rows(d, case.recipe) for d in douts]
            for r in range(len(case.tokens)):
                check_rows(b, r, results[r], saved[r], plan, quantized)
            check_tokens(b, ids, saved, results, plan)
            first = real_bits(results, plan)
            for _ in range(2):
                again = real_bits(b.run(ids, saved, douts), plan)
                assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True)), "not repeatable"


def test_dirty_padding_reaches_nothing():
    """NaN in the padding rows of the saved gate and up, and in what dgrad overwrites."""
    world = World(Case("dirty", tokens=(150, 187)))
    with world.world:
        b = Backward(world)
        inputs = world.inputs(1)
        ids = inputs[1]
        plan = make_plan(ids, 8)
        saved = [r.buffers for r in world.run(inputs)]
        douts = b.douts(1)
        want = real_bits(b.run(ids, saved, douts), plan)
        for s in saved:
            s.gate_up[s.codes < 0] = float("nan")
        got = real_bits(b.run(ids, saved, douts), plan)
        assert all(torch.equal(x, y) for x, y in zip(want, got, strict=True))


@pytest.mark.parametrize("tokens", [(300,), (150, 187), (10, 0, 300, 150)], ids=["one rank", "two ranks", "four ranks"])
def test_fifty_repeats_are_the_same_bits(tokens):
    world = World(Case("repeats", tokens=tokens, experts=16))
    with world.world:
        b = Backward(world)
        inputs = world.inputs(1)
        plan = make_plan(inputs[1], 16)
        saved = [r.buffers for r in world.run(inputs)]
        douts = b.douts(1, tailed=True)
        want = real_bits(b.run(inputs[1], saved, douts), plan)
        for i in range(50):
            got = real_bits(b.run(inputs[1], saved, douts), plan)
            assert all(torch.equal(x, y) for x, y in zip(want, got, strict=True)), f"repeat {i}"


def test_gradient_of_zeros():
    """An all-zero dout: exact zeros everywhere, weight gradients too."""
    world = World(Case("zeros", tokens=(150, 187)))
    with world.world:
        b = Backward(world)
        inputs = world.inputs(1)
        saved = [r.buffers for r in world.run(inputs)]
        results = b.run(inputs[1], saved, [torch.zeros_like(d) for d in b.douts(1)])
        for r, s in zip(results, saved, strict=True):
            assert bool((r.dx == 0).all()) and bool((r.dp == 0).all())
            for dtype in (torch.bfloat16, torch.float32):
                dw13 = torch.full((4, 256, 256), float("nan"), dtype=dtype, device="cuda")
                dw2 = torch.full((4, 256, 128), float("nan"), dtype=dtype, device="cuda")
                backward_launch.weight_gradients(r.operands(s.pool, s.pool_s), s.offs, s.counts, dw13, dw2)
                assert bool((dw13 == 0).all()) and bool((dw2 == 0).all())


@pytest.mark.parametrize("backwards", [(1, 0), (0, 1)], ids=["F1 F2 B2 B1", "F1 F2 B1 B2"])
def test_calls_on_one_workspace_in_any_order(backwards):
    """Two forwards and then their backwards, in either order, give what F1 B1 and F2 B2 give."""
    world = World(Case("order", tokens=(150, 187)))
    with world.world:
        b = Backward(world)
        calls = [(world.inputs(s), b.douts(s)) for s in (1, 2)]
        plans = [make_plan(inputs[1], 8) for inputs, _ in calls]
        want = []
        for (inputs, douts), plan in zip(calls, plans, strict=True):
            saved = [r.buffers for r in world.run(inputs)]
            want.append(real_bits(b.run(inputs[1], saved, douts), plan))
        kept = [[r.buffers for r in world.run(inputs)] for inputs, _ in calls]
        for i in backwards:
            got = real_bits(b.run(calls[i][0][1], kept[i], calls[i][1]), plans[i])
            assert all(torch.equal(x, y) for x, y in zip(want[i], got, strict=True)), f"B{i + 1}"


def test_number_of_ranks_changes_no_bit():
    one = World(Case("one", tokens=(300,)))
    with one.world:
        b = Backward(one)
        (x,), (ids,), (p,) = one.inputs(1)
        saved = [r.buffers for r in one.run(([x], [ids], [p]))]
        (dout,) = b.douts(1)
        want = b.run([ids], saved, [dout])[0]
        for ranks in (2, 4):
            split = World(Case(f"{ranks}", tokens=(300 // ranks,) * ranks))
            local = 8 // ranks
            for name in ("w13", "w2"):
                whole = getattr(one, name)[0]
                parts = [
                    dataclasses.replace(
                        whole,
                        data=whole.data[r * local : (r + 1) * local],
                        scale=whole.scale[r * local : (r + 1) * local],
                    )
                    for r in range(ranks)
                ]
                setattr(split, name, parts)
            split.weights = [
                launch.prepare_weights(a.data, a.scale, c.data, c.scale)
                for a, c in zip(split.w13, split.w2, strict=True)
            ]
            with split.world:
                mine = Backward(split)
                inputs = [v.chunk(ranks) for v in (x, ids, p)]
                kept = [r.buffers for r in split.run(inputs)]
                got = mine.run(inputs[1], kept, dout.chunk(ranks))
                assert torch.equal(torch.cat([g.dx for g in got]), want.dx)
                assert torch.equal(torch.cat([g.dp for g in got]), want.dp)


def test_graph_replay():
    world = World(Case("graph"))
    with world.world:
        b = Backward(world)
        inputs = world.inputs(1)
        saved = [r.buffers for r in world.run(inputs)]
        (dout,) = b.douts(1)
        b.run(inputs[1], saved, [dout])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = backward_launch.fused_backward(
                world.world.workspaces, [dout], inputs[1], saved, b.weights, timeout_s=TIMEOUT_S
            )[0]
        for seed in (2, 3):
            (other,) = b.douts(seed)
            dout.copy_(other)
            graph.replay()
            torch.cuda.synchronize()
            got = result.dx.clone(), result.dp.clone()
            want = b.run(inputs[1], saved, [other])[0]
            assert torch.equal(got[0], want.dx) and torch.equal(got[1], want.dp)


def test_rows_of_another_workspace_are_refused():
    world = World(Case("refused"))
    with world.world:
        b = Backward(world)
        inputs = world.inputs(1)
        saved = [r.buffers for r in world.run(inputs)]
        short = dataclasses.replace(saved[0], gate_up=saved[0].gate_up[:128])
        with pytest.raises(ValueError, match=r"saved\[0\].gate_up: expected the workspace's"):
            backward_launch.fused_backward(world.world.workspaces, b.douts(1), inputs[1], [short], b.weights)


@pytest.mark.parametrize("clamp", [None, 1.0])
def test_bytes_equal_triton(clamp):
    """From the same saved rows: [dg; du], p * act, dp and dx of the Triton steps."""
    kernels = pytest.importorskip("megamoe.triton_kernels")
    case = Case("triton", hidden=1024, intermediate=512, experts=8, top_k=4, tokens=(700,), clamp=clamp)
    world = World(case)
    with world.world:
        b = Backward(world)
        inputs = world.inputs(1)
        (ids,) = inputs[1]
        saved = world.run(inputs)[0].buffers
        (dout,) = b.douts(1)
        got = b.run([ids], [saved], [dout])[0]
        plan = make_plan([ids], 8)
        mine = plan.ranks[0]
        real, rows = (mine.source_rank >= 0).nonzero().flatten(), mine.num_rows
        pool = kernels.dispatch([kernels.quantize_rows(dout, case.recipe)], mine)
        dh = kernels.grouped_gemm(pool, b.w2_t[0], mine, torch.float32)
        gate_up = torch.where(mine.source_rank[:, None] >= 0, saved.gate_up[:rows], 0.0)
        want = kernels.swiglu_backward(dh, gate_up, saved.p[:rows].contiguous(), case.recipe)
        d_rows = kernels.grouped_gemm(want.d_gate_up, b.w13_t[0], mine)
        differ = {
            "p * act": (got.weighted[:rows], want.weighted_act),
            "dg, du": (got.grad_bf16[:rows], want.d_gate_up_bf16),
            "quantised": (got.grad[:rows].view(torch.uint8), want.d_gate_up.data.view(torch.uint8)),
        }
        shares = {n: (x[real] != y[real]).float().mean().item() for n, (x, y) in differ.items()}
        dp = kernels.combine_weight_grads([want.d_weight], plan, 0)
        shares["dp"] = (got.dp != dp).float().mean().item()
        dx = kernels.combine([d_rows], plan, 0)
        print(f"clamp {clamp}: {shares}, dx {gates.sqnr_db(got.dx, dx):.1f} dB")
        assert shares["p * act"] == 0.0
        assert max(shares.values()) < 0.02, shares
        assert gates.sqnr_db(got.dx, dx) >= gates.GATES["fp8"].backends_db


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_gates_of_a_whole_backward(precision):
    """dx, dp, dW13 and dW2 against the fp64 oracle on unquantised inputs and weights; one expert is empty."""
    experts, hidden, inter, tokens, top_k = 8, 1024, 512, 900, 4
    g = torch.Generator("cuda").manual_seed(3)

    def rand(*shape):
        return torch.randn(*shape, device="cuda", generator=g)

    popular = torch.tensor([4.0, 3, 2, 1, 1, 0, 0.3, 0.05], device="cuda").expand(tokens, experts)
    ids = torch.multinomial(popular, top_k, generator=g)
    ids[::7, 1] = -1
    p = torch.rand(tokens, top_k, device="cuda", generator=g) + 0.05
    w13 = (rand(experts, 2 * inter, hidden) / hidden**0.5).bfloat16()
    w2 = (rand(experts, hidden, inter) / inter**0.5).bfloat16()
    x, dout = rand(tokens, hidden).bfloat16(), rand(tokens, hidden).bfloat16()
    want = oracle_backward(Inputs(x, ids, p, w13, w2), dout)
    recipe = Recipe()
    q13, q2 = steps.quantize_weight(w13, recipe, 2), steps.quantize_weight(w2, recipe)
    t13, t2 = q13.transposed(), q2.transposed()
    with launch.Workspace(hidden=hidden, num_experts=experts, top_k=top_k, max_tokens=tokens) as ws:
        forward = launch.fused_forward(
            [ws], [x], [ids], [p], [launch.prepare_weights(q13.data, q13.scale, q2.data, q2.scale)], save=True,
            timeout_s=TIMEOUT_S,
        )[0].buffers  # fmt: skip
        grads = backward_launch.fused_backward(
            [ws], [dout], [ids], [forward],
            [backward_launch.prepare_backward_weights(t13.data, t13.scale, t2.data, t2.scale)], timeout_s=TIMEOUT_S,
        )[0]  # fmt: skip
        operands = grads.operands(forward.pool, forward.pool_s)
        if precision == "bf16":
            x_rows, d_rows = (
                QuantizedRows(d, s, k_major=True).dequantize(torch.bfloat16)
                for d, s in ((forward.pool, forward.pool_s), (grads.pool, grads.pool_s))
            )
            operands = dataclasses.replace(operands, x=x_rows, x_scale=None, d=d_rows, d_scale=None)
        dw13, dw2 = torch.full_like(w13, float("nan")), torch.full_like(w2, float("nan"))
        backward_launch.weight_gradients(operands, forward.offs, forward.counts, dw13, dw2, precision=precision)
        assert ws.error() is None
    bounds = gates.GATES["fp8"]
    row, _ = gates.worst_row(grads.dx, want.dx_TH)
    element = gates.worst_weight_grad(grads.dp, want.dp_TK, want.dp_spread_TK)
    found = {"dx": gates.sqnr_db(grads.dx, want.dx_TH), "dp": gates.sqnr_db(grads.dp, want.dp_TK)}
    found |= {"dW13": gates.sqnr_db(dw13, want.dw13_E2IH), "dW2": gates.sqnr_db(dw2, want.dw2_EHI)}
    worst = min(gates.worst_expert_db(dw13, want.dw13_E2IH)[0], gates.worst_expert_db(dw2, want.dw2_EHI)[0])
    print(f"{precision}: {found}, worst expert {worst:.2f} dB, worst row {row:.3f}, worst dp {element:.3f}")
    assert min(found.values()) >= bounds.tensor_db, found
    assert worst >= bounds.expert_db and row <= bounds.row and element <= bounds.weight_grad
    assert bool((dw13[5] == 0).all()) and bool((dw2[5] == 0).all())
