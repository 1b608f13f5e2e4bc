"""The torch steps one by one: against exact arithmetic, against autograd, with padding full of NaN."""

import dataclasses

import pytest
import torch

from megamoe import torch_steps as steps
from megamoe.cli.problem import ROUTINGS, ProblemSpec, make_problem
from megamoe.quantize import QuantizedRows, QuantizedWeight
from megamoe.recipe import Recipe
from megamoe.routing_plan import make_plan
from tests.support.compare import assert_bitwise
from tests.support.poison import nan_like

FP8, BF16 = Recipe(), Recipe(precision="bf16")


def poison_padding(pool: torch.Tensor, plan) -> torch.Tensor:
    """A copy whose padding rows are NaN."""
    dirty = nan_like(pool)
    real = plan.token >= 0
    raw = (lambda v: v.view(torch.uint8)) if pool.element_size() == 1 else (lambda v: v)
    raw(dirty)[real] = raw(pool)[real]
    return dirty


@pytest.mark.parametrize("routing", ROUTINGS)
def test_dispatch_brings_every_row_and_zeroes_padding(routing):
    problem = make_problem(ProblemSpec((11, 0, 7, 3), 192, 64, 8, 3, routing))
    plan = make_plan(problem.topk_ids, 8)
    sources = [steps.quantize_rows(x, FP8) for x in problem.xs]
    for mine in plan.ranks:
        pool = steps.dispatch(sources, mine)
        weight = steps.dispatch_weights(problem.topk_weights, mine)
        assert pool.k_major and pool.scale.shape == (2, mine.num_rows) and pool.scale.is_contiguous()
        where = zip(mine.source_rank.tolist(), mine.token.tolist(), mine.slot.tolist(), strict=True)
        for row, (source, token, slot) in enumerate(where):
            if source < 0:
                assert not pool.data.view(torch.uint8)[row].any() and not pool.scale[:, row].any()
                assert weight[row] == 0
            else:
                assert_bitwise(pool.data[row], sources[source].data[token], f"row {row}")
                assert_bitwise(pool.scale[:, row], sources[source].scale[token], f"scale {row}")
                assert weight[row] == problem.topk_weights[source][token, slot]


@pytest.mark.parametrize("routing", ROUTINGS)
def test_combine_sums_slots_in_order_in_fp32(routing):
    problem = make_problem(ProblemSpec((11, 0, 7, 3), 16, 8, 8, 3, routing))
    plan = make_plan(problem.topk_ids, 8)
    pools = [poison_padding(torch.randn(mine.num_rows, 16).bfloat16(), mine) for mine in plan.ranks]
    grads = [poison_padding(torch.randn(mine.num_rows, 1), mine)[:, 0] for mine in plan.ranks]
    for rank, ids in enumerate(problem.topk_ids):
        want = torch.zeros(ids.shape[0], 16)
        want_grad = torch.zeros(ids.shape)
        for t in range(ids.shape[0]):
            for j in range(ids.shape[1]):
                owner, row = plan.owner[rank][t, j].item(), plan.row[rank][t, j].item()
                if owner >= 0:
                    want[t] = want[t] + pools[owner][row].float()
                    want_grad[t, j] = grads[owner][row]
        assert_bitwise(steps.combine(pools, plan, rank), want.bfloat16(), "out")
        assert_bitwise(steps.combine_weight_grads(grads, plan, rank), want_grad, "dp")


def test_dispatch_and_combine_with_unit_weights_multiply_by_k():
    """Each of K = 4 slots carries the token itself: the sum is 4 x, exactly for bf16."""
    problem = make_problem(ProblemSpec((16, 8), 128, 64, 8, 4, "uniform"))
    plan = make_plan(problem.topk_ids, 8)
    sources = [steps.quantize_rows(x, BF16) for x in problem.xs]
    pools = [steps.dispatch(sources, mine).data for mine in plan.ranks]
    for rank, x in enumerate(problem.xs):
        assert_bitwise(steps.combine(pools, plan, rank), 4 * x, "out")


def plan_of(counts: list[int], k: int = 1):
    ids = torch.cat([torch.full((n,), e) for e, n in enumerate(counts)]).view(-1, k)
    return make_plan([ids], len(counts)).ranks[0]


def random_rows(plan, channels: int, recipe: Recipe, groups: int = 1) -> QuantizedRows:
    parts = [steps.quantize_rows(torch.randn(plan.num_rows, channels // groups), recipe) for _ in range(groups)]
    if recipe.precision == "bf16":
        return QuantizedRows(torch.cat([p.data for p in parts], 1), None, True, groups)
    data = torch.cat([p.data.view(torch.uint8) for p in parts], 1).view(torch.float8_e4m3fn)
    return QuantizedRows(data, torch.cat([p.scale for p in parts], 1).t().contiguous(), True, groups)


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
@pytest.mark.parametrize("channels,groups", [(256, 1), (192, 1), (320, 1), (384, 2)])
def test_grouped_gemm_is_the_product_of_dequantised_operands(precision, channels, groups):
    plan, recipe = plan_of([5, 0, 129, 1]), Recipe(precision)
    rows = random_rows(plan, channels, recipe, groups)
    rows = dataclasses.replace(rows, data=poison_padding(rows.data, plan))
    weight = steps.quantize_weight(torch.randn(4, channels, 96), recipe, groups).transposed()
    got = steps.grouped_gemm(rows, weight, plan, torch.float32)
    expert, real = plan.expert_of_row().clamp_max(3), plan.token >= 0
    a, b = rows.dequantize(torch.float64), weight.dequantize(torch.float64)
    want = torch.einsum("pk,pnk->pn", a, b[expert])
    torch.testing.assert_close(got[real], want[real].float(), rtol=1e-5, atol=1e-4)
    assert not got[~real].any()
    assert_bitwise(steps.grouped_gemm(rows, weight, plan), got.bfloat16(), "bf16")


def test_each_row_meets_its_own_expert():
    """Expert e is (e + 1) times the identity; segments end inside, at and one row behind a block."""
    counts = [128, 130, 65, 0, 1, 127, 129]
    plan = plan_of(counts)
    rows = steps.quantize_rows(torch.full((plan.num_rows, 128), 448.0), FP8)
    rows = QuantizedRows(rows.data, rows.scale.t().contiguous(), True)
    weight = torch.stack([torch.eye(128) * (e + 1) for e in range(len(counts))])
    got = steps.grouped_gemm(rows, steps.quantize_weight(weight, FP8), plan)
    expert = (got / 448).round().long() - 1
    assert torch.equal(expert[:, 0], torch.where(plan.token >= 0, plan.expert_of_row(), -1))
    assert bool((expert == expert[:, :1]).all())


def test_promotion_keeps_small_terms():
    """k-block 0 sums to 65536, each of the next 55 to 4: an accumulator of few bits loses them; fp32 has 65756."""
    k = 56 * 128
    data, scale = torch.ones(128, k), torch.empty(56, 128)
    scale[0], scale[1:] = 512.0, 4.0 / 128
    plan = plan_of([1])
    rows = QuantizedRows(data.to(torch.float8_e4m3fn), scale, True)
    weight = QuantizedWeight(torch.ones(1, 8, k).to(torch.float8_e4m3fn), torch.ones(1, 1, 56))
    assert steps.grouped_gemm(rows, weight, plan, torch.float32)[0].tolist() == [65756.0] * 8


@pytest.mark.parametrize("counts", [[5, 0, 130, 1], [1, 127, 129, 0], [0, 0, 0, 7], [0, 0, 0, 0]], ids=str)
def test_wgrad_sums_real_rows_only(counts):
    plan = plan_of(counts)
    a, b = (poison_padding(torch.randn(plan.num_rows, n).bfloat16(), plan) for n in (24, 40))
    got = steps.wgrad(a, b, plan)
    start = plan.offs.tolist()
    for e, n in enumerate(counts):
        rows = slice(start[e], start[e] + n)
        torch.testing.assert_close(got[e].double(), a[rows].double().t() @ b[rows].double(), rtol=1e-6, atol=1e-6)
        assert n or not got[e].any()


def test_wgrad_overwrites_or_accumulates():
    plan = plan_of([3, 0])
    a, b = torch.randn(plan.num_rows, 8).bfloat16(), torch.randn(plan.num_rows, 16).bfloat16()
    fresh = steps.wgrad(a, b, plan)
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.full((2, 8, 16), float("nan"), dtype=dtype)
        assert steps.wgrad(a, b, plan, out) is out
        assert_bitwise(out, fresh.to(dtype), "overwritten")
        out = torch.randn(2, 8, 16).to(dtype)
        before = out.clone()
        steps.wgrad(a, b, plan, out, accumulate=True)
        assert_bitwise(out[0], (before[0].float() + fresh[0]).to(dtype), "accumulated")
        assert_bitwise(out[1], before[1], "an expert without rows is left alone")


@pytest.mark.parametrize("clamp", [None, 1.0])
@pytest.mark.parametrize("intermediate", [128, 96, 320])
def test_swiglu_rounds_once(clamp, intermediate):
    gate_up, weight = torch.randn(9, 2 * intermediate).bfloat16(), torch.rand(9)
    gate, up = gate_up.double().chunk(2, 1)
    if clamp is not None:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    want = torch.nn.functional.silu(gate) * up * weight.double()[:, None]
    got = steps.swiglu(gate_up, weight, Recipe("bf16", clamp=clamp))
    torch.testing.assert_close(got.data.double(), want, rtol=2**-8, atol=1e-30)
    fp8 = steps.swiglu(gate_up, weight, Recipe("fp8", clamp=clamp))
    assert fp8.k_major and fp8.scale.shape == (-(-intermediate // 128), 9) and fp8.scale.is_contiguous()
    want_rows = steps.quantize_rows(want.float(), FP8)
    error = (fp8.dequantize().double() - want).abs()
    assert bool((error <= want_rows.dequantize().double().abs().clamp_min(1e-3) * 0.07).all())


@pytest.mark.parametrize("clamp", [None, 1.0])
@pytest.mark.parametrize("intermediate", [128, 96, 320])
def test_swiglu_backward_is_autograd(clamp, intermediate):
    gate_up = torch.randn(7, 2 * intermediate).bfloat16()
    gate_up[0, :4], gate_up[0, intermediate : intermediate + 4] = 1.0, -1.0  # exactly at the limit: equality passes
    weight, dh = torch.rand(7), torch.randn(7, intermediate)
    leaf, p = gate_up.double().requires_grad_(), weight.double().requires_grad_()
    gate, up = leaf.chunk(2, 1)
    if clamp is not None:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    act = torch.nn.functional.silu(gate) * up
    (act * p[:, None]).backward(dh.double())
    got = steps.swiglu_backward(dh, gate_up, weight, Recipe("fp8", clamp=clamp))
    torch.testing.assert_close(got.d_gate_up_bf16.double(), leaf.grad, rtol=2**-7, atol=1e-6)
    torch.testing.assert_close(got.d_weight.double(), p.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got.weighted_act.double(), (act * p[:, None]).detach(), rtol=2**-7, atol=1e-6)
    assert got.d_gate_up.groups == 2
    assert got.d_gate_up.scale.shape == (2 * -(-intermediate // 128), 7)
    quantized = got.d_gate_up.dequantize()
    halves = [steps.quantize_rows(half, FP8).dequantize() for half in leaf.grad.float().chunk(2, 1)]
    torch.testing.assert_close(quantized, torch.cat(halves, 1), rtol=0.13, atol=1e-3)


@pytest.mark.parametrize("channels", [1, 96, 128, 320])
def test_block_dot_follows_its_stated_order(channels):
    a, b = torch.randn(5, channels), torch.randn(5, channels)

    def fold(values: list[torch.Tensor]) -> torch.Tensor:
        first, second, third, fourth = (values[i : i + 32] for i in range(0, 128, 32))
        x = {c: ((first[c] + second[c]) + third[c]) + fourth[c] for c in range(32)}
        for distance in (4, 2, 1, 8, 16):
            x = {c: x[c] + x[c + distance] for c in x if not c & distance}
        return x[0]

    for row in range(5):
        product = [*(a[row] * b[row]), *[torch.tensor(0.0)] * (-channels % 128)]
        total = torch.tensor(0.0)
        for block in range(0, len(product), 128):
            total = total + fold(product[block : block + 128])
        assert steps.block_dot(a, b)[row] == total
    assert steps.block_dot(a[:0], b[:0]).shape == (0,)


@pytest.mark.parametrize("side", ["left", "right"])
def test_fp8_operands_are_balanced_before_rows_share_a_scale(side):
    """What travelled spans six decades over 128 rows and its partner the inverse: their product keeps every row."""
    plan = plan_of([128, 0, 37])
    magnitude = torch.logspace(-3, 3, plan.num_rows)[torch.randperm(plan.num_rows), None]
    rows = steps.quantize_rows((torch.randn(plan.num_rows, 256) * magnitude).bfloat16(), FP8)
    travelled = QuantizedRows(rows.data, rows.scale.t().contiguous(), k_major=True)
    partner = poison_padding((torch.randn(plan.num_rows, 128) / magnitude).bfloat16(), plan)
    pair = (travelled, partner) if side == "left" else (partner, travelled)
    a, b = steps.wgrad_operands(*pair, plan, Recipe(wgrad_operands="fp8"))
    real = plan.token >= 0
    assert not a[~real].any() and not b[~real].any(), "padding is zero on both sides"
    exact = steps.wgrad(*steps.wgrad_operands(*pair, plan, Recipe(wgrad_operands="bf16")), plan)
    got = steps.wgrad(a, b, plan)
    for e in (0, 2):
        assert (got[e] - exact[e]).norm() < 0.06 * exact[e].norm()
    assert not got[1].any()
    of_rows = (a.float().norm(dim=1) * b.float().norm(dim=1))[real]
    assert bool((of_rows > 0).all()), "no row underflows"


def test_bf16_operands_are_what_travelled():
    plan = plan_of([5, 3])
    rows = steps.quantize_rows(torch.randn(plan.num_rows, 128), FP8)
    travelled = QuantizedRows(rows.data, rows.scale.t().contiguous(), k_major=True)
    partner = torch.randn(plan.num_rows, 64).bfloat16()
    a, b = steps.wgrad_operands(partner, travelled, plan, Recipe(wgrad_operands="bf16"))
    assert_bitwise(a, partner, "left")
    assert_bitwise(b, travelled.dequantize(torch.bfloat16), "right")


def test_all_names_exist():
    assert sorted(steps.__all__) == list(steps.__all__)
    for name in steps.__all__:
        assert callable(getattr(steps, name)) and getattr(steps, name).__doc__


def test_fp8_wgrad_operands_cost_little_and_never_read_padding():
    """As the fused weight gradients round them: near the bf16 operands, better than 20 dB, padding exactly zero."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 3, (200, 2), generator=generator)
    plan = make_plan([ids], 4).ranks[0]
    size = torch.logspace(-3, 3, plan.num_rows)[torch.randperm(plan.num_rows, generator=generator), None]
    pool = steps.quantize_rows(torch.randn(plan.num_rows, 256, generator=generator) * size, Recipe())
    pool = QuantizedRows(pool.data, pool.scale.t().contiguous(), k_major=True)
    partner = (torch.randn(plan.num_rows, 192, generator=generator) / size).bfloat16()
    padding = plan.token < 0
    partner[padding] = float("nan")
    exact = steps.wgrad(*steps.wgrad_operands(partner, pool, plan, Recipe(wgrad_operands="bf16")), plan)
    recipe = Recipe(wgrad_operands="fp8")
    for swap in (False, True):
        left, right = (pool, partner) if swap else (partner, pool)
        a, b = steps.wgrad_operands(left, right, plan, recipe)
        assert a.dtype == b.dtype == torch.bfloat16
        assert bool((a[padding] == 0).all()) and bool((b[padding] == 0).all())
        got = steps.wgrad(a, b, plan)
        want = exact.transpose(1, 2) if swap else exact
        error = ((got - want).norm() / want.norm()).item()
        assert 0.01 < error < 0.1, error
