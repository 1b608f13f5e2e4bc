"""Every Triton kernel against `torch_steps`: on a GPU if there is one, else under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from megamoe import torch_steps, triton_kernels
from megamoe.cli.problem import ProblemSpec, make_problem
from megamoe.errors import CapacityError, MegaMoETypeError, MegaMoEValueError
from megamoe.quantize import QuantizedRows
from megamoe.recipe import Recipe
from megamoe.routing_plan import RankPlan, RoutingPlan
from megamoe.triton_kernels import configs
from tests.support.compare import assert_bitwise
from tests.support.poison import nan_like
from tests.support.steps_cases import (
    RECIPES,
    SPECS,
    assert_close,
    assert_one_step_apart,
    assert_same_quantized,
    assert_same_values,
    quantized_to,
    random_pool,
    weight_to,
)

FP8_RECIPES = [Recipe(), Recipe(scale_format="pow2")]


def plans_to(plan: RoutingPlan, device: torch.device) -> RoutingPlan:
    def move(rank: RankPlan) -> RankPlan:
        return RankPlan(*(getattr(rank, f).to(device) for f in ("counts", "offs", "source_rank", "token", "slot")))

    owner, row = (tuple(v.to(device) for v in values) for values in (plan.owner, plan.row))
    return RoutingPlan(plan.num_experts, tuple(move(rank) for rank in plan.ranks), owner, row)


def assert_same_plan(got: RoutingPlan, want: RoutingPlan) -> None:
    for r, (a, b) in enumerate(zip(got.ranks, want.ranks, strict=True)):
        for field in ("counts", "offs", "source_rank", "token", "slot"):
            assert_bitwise(getattr(a, field).cpu(), getattr(b, field), f"ranks[{r}].{field}")
    for name in ("owner", "row"):
        for r, (a, b) in enumerate(zip(getattr(got, name), getattr(want, name), strict=True)):
            assert_bitwise(a.cpu(), b, f"{name}[{r}]")


def awkward_values() -> torch.Tensor:
    """[13, 320]: 60 binades, a NaN among numbers, an Inf, a zero row, a zero block."""
    x = torch.randn(13, 320) * torch.exp2(torch.randint(-30, 30, (13, 320)).float())
    x[3, 5], x[5, 130] = float("nan"), float("inf")
    x[4] = 0.0
    x[6, 128:256] = 0.0
    return x


@pytest.mark.parametrize("recipe", FP8_RECIPES, ids=lambda r: r.scale_format)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_quantize_rows_has_the_bytes_of_torch(recipe, dtype, device):
    x = awkward_values().to(dtype)
    for v in (x, x[:, ::2], x[:0], x.t()[:, :7]):
        got = triton_kernels.quantize_rows(v.to(device), recipe)
        assert_same_quantized(got, torch_steps.quantize_rows(v, recipe), f"{v.shape}")


def test_every_bf16_value_rounds_to_the_byte_of_torch(device):
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = torch.nn.functional.pad(x, (0, -x.numel() % 127)).view(-1, 127)
    beside = torch.full((x.shape[0], 1), 448.0, dtype=torch.bfloat16)  # the scale of in-range values is 1
    for v in (torch.cat([x.clamp(-448, 448), beside], dim=1), torch.cat([x, beside], dim=1)):
        got = triton_kernels.quantize_rows(v.to(device), Recipe())
        assert_same_quantized(got, torch_steps.quantize_rows(v, Recipe()), "all bf16")


@pytest.mark.parametrize("recipe", FP8_RECIPES, ids=lambda r: r.scale_format)
@pytest.mark.parametrize("groups,n,k", [(1, 128, 256), (2, 144, 200), (2, 512, 128), (1, 130, 64), (2, 20, 300)])
def test_quantize_weight_and_its_transposed_copy(recipe, groups, n, k, device):
    w = torch.randn(2, n, k)
    w[1, :128, :128] = 0.0
    want = torch_steps.quantize_weight(w, recipe, groups)
    assert_same_quantized(triton_kernels.quantize_weight(w.to(device), recipe, groups), want, "w")
    for v in (w, w.bfloat16(), w.half()):
        got, copy = triton_kernels.quantize_weight_with_transpose(v.to(device), recipe, groups)
        want = torch_steps.quantize_weight(v, recipe, groups)
        assert_same_quantized(got, want, "w")
        assert_same_quantized(copy, want.transposed(), "transposed")
        assert (got.row_groups, copy.col_groups) == (groups, groups)


def test_the_transposed_copy_holds_all_byte_values(device):
    """Some Triton releases corrupt FP8 tiles that are transposed in registers."""
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    values[values.isnan()] = 0.0
    w = values[torch.randint(0, 256, (1, 128, 128))]
    w[0, 0] = values[torch.arange(128)]
    w[0, 1] = values[torch.arange(128, 256)]
    w[0, 2, 0] = 448.0
    got, copy = triton_kernels.quantize_weight_with_transpose(w.to(device), Recipe())
    want = torch_steps.quantize_weight(w, Recipe())
    assert len(want.data.view(torch.uint8).unique()) == 254
    assert_same_quantized(got, want, "w")
    assert_same_quantized(copy, want.transposed(), "transposed")


@pytest.mark.parametrize("groups,channels", [(1, 320), (2, 144)])
def test_dequantize(groups, channels, device):
    rows = random_pool(9, channels, Recipe(), groups)
    want = torch_steps.dequantize(rows)
    assert_same_values(triton_kernels.dequantize(quantized_to(rows, device)), want, "k-major")
    row_major = QuantizedRows(rows.data, rows.scale.t().contiguous(), False, groups)
    assert_same_values(triton_kernels.dequantize(quantized_to(row_major, device)), want, "row-major")
    plain = QuantizedRows(torch.randn(3, 8).bfloat16(), None)
    assert triton_kernels.dequantize(plain) is plain.data


def test_bf16_steps_round_and_transpose_only(device):
    recipe = Recipe("bf16")
    x, w = torch.randn(3, 40, device=device), torch.randn(2, 6, 40, device=device)
    assert_same_quantized(triton_kernels.quantize_rows(x, recipe), torch_steps.quantize_rows(x, recipe), "x")
    assert_same_quantized(triton_kernels.quantize_weight(w, recipe, 2), torch_steps.quantize_weight(w, recipe, 2), "w")
    for v in (w, torch.randn(3, 130, 200, device=device).bfloat16(), w.transpose(1, 2), w[:0]):
        _, copy = triton_kernels.quantize_weight_with_transpose(v, recipe, 2)
        assert_same_quantized(copy, torch_steps.quantize_weight(v, recipe, 2).transposed(), "transposed")


PLANS = [(8, 2, (40,)), (6, 3, (100, 0, 7)), (512, 8, (33, 50)), (4, 1, (0,)), (1, 1, (300,)), (12, 12, (5, 9, 0, 1))]


@pytest.mark.parametrize("experts,top_k,tokens", PLANS, ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_plan_is_the_plan_of_torch(experts, top_k, tokens, dtype, device):
    ids = [torch.randint(-1, experts, (t, top_k)).to(dtype) for t in tokens]
    there = [v.to(device) for v in ids]
    assert_same_plan(triton_kernels.make_plan(there, experts), torch_steps.make_plan(ids, experts))
    options = {"alignment": 64, "num_rows": experts * 64 + sum(tokens) * top_k}
    want = torch_steps.make_plan(ids, experts, **options)
    assert_same_plan(triton_kernels.make_plan(there, experts, **options), want)
    assert_same_plan(triton_kernels.make_plan(there, experts, **options, checked=False), want)


def test_unchecked_plan_masks_bad_ids_and_leaves_out_rows_behind_the_pool(device):
    ids = torch.tensor([[0, 4], [7, -5], [1, 2**31 - 1], [1, 1]], device=device)
    got = triton_kernels.make_plan([ids], 4, num_rows=128, checked=False)
    want = torch_steps.make_plan([ids.cpu()], 4, num_rows=128, checked=False)
    assert got.ranks[0].counts.tolist() == [1, 3, 0, 0]
    assert_same_plan(got, want)


def test_plan_refuses(device):
    ids = torch.zeros(3, 2, dtype=torch.int64, device=device)
    make_plan = triton_kernels.make_plan
    with pytest.raises(MegaMoEValueError, match=r"topk_ids: expected one tensor for each rank"):
        make_plan([], 4)
    with pytest.raises(MegaMoETypeError, match=r"topk_ids: expected int32 or int64, got torch.int16"):
        make_plan([ids.short()], 4)
    with pytest.raises(MegaMoEValueError, match=r"topk_ids: expected \[T, K\]"):
        make_plan([ids[0]], 4)
    with pytest.raises(MegaMoEValueError, match=r"topk_ids\[1\]: expected K = 2 slots as on rank 0, got 1"):
        make_plan([ids, ids[:, :1]], 4)
    with pytest.raises(MegaMoEValueError, match=r"topk_ids\[2, 1\]: expected -1 or an expert in \[0, 4\), got 9"):
        make_plan([ids.index_put((torch.tensor(2), torch.tensor(1)), torch.tensor(9, device=device))], 4)
    with pytest.raises(MegaMoEValueError, match=r"num_experts: expected a positive multiple of the 2 ranks, got 5"):
        make_plan([ids, ids], 5)
    with pytest.raises(CapacityError, match=r"capacity: expected at least 128 rows for rank 0, got 100"):
        make_plan([ids], 4, num_rows=100)
    with pytest.raises(MegaMoEValueError, match=r"num_rows: expected a number of rows where checked=False"):
        make_plan([ids], 4, checked=False)


def test_quantisers_refuse():
    with pytest.raises(MegaMoEValueError, match=r"x: expected a matrix"):
        triton_kernels.quantize_rows(torch.zeros(2, 3, 4), Recipe())
    with pytest.raises(MegaMoETypeError, match=r"x: expected bf16, fp16 or fp32"):
        triton_kernels.quantize_rows(torch.zeros(2, 3, dtype=torch.float64), Recipe())
    with pytest.raises(MegaMoEValueError, match=r"w: expected \[E, N, K\] with N a multiple of 2"):
        triton_kernels.quantize_weight(torch.zeros(2, 3, 4), Recipe(), 2)
    with pytest.raises(MegaMoETypeError, match=r"w: expected bf16, fp16 or fp32"):
        triton_kernels.quantize_weight_with_transpose(torch.zeros(2, 2, 4, dtype=torch.int8), Recipe(), 2)


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_dispatch_and_combine(spec, precision, device):
    problem = make_problem(spec)
    plan = torch_steps.make_plan(problem.topk_ids, spec.num_experts)
    moved = plans_to(plan, device)
    sources = [torch_steps.quantize_rows(x, Recipe(precision)) for x in problem.xs]
    weights = problem.topk_weights
    ys, grads = [], []
    for mine, there in zip(plan.ranks, moved.ranks, strict=True):
        got = triton_kernels.dispatch([quantized_to(s, device) for s in sources], there)
        assert_same_quantized(got, torch_steps.dispatch(sources, mine), "pool")
        got_w = triton_kernels.dispatch_weights([w.to(device) for w in weights], there)
        assert_bitwise(got_w.cpu(), torch_steps.dispatch_weights(weights, mine), "weights")
        y, grad = torch.randn(mine.num_rows, spec.hidden).bfloat16(), torch.randn(mine.num_rows)
        y[mine.token < 0], grad[mine.token < 0] = float("nan"), float("nan")
        ys.append(y)
        grads.append(grad)
    for r in range(spec.num_ranks):
        out = triton_kernels.combine([y.to(device) for y in ys], moved, r)
        assert_bitwise(out.cpu(), torch_steps.combine(ys, plan, r), "out")
        dp = triton_kernels.combine_weight_grads([g.to(device) for g in grads], moved, r)
        assert_bitwise(dp.cpu(), torch_steps.combine_weight_grads(grads, plan, r), "dp")


def test_rows_that_are_no_whole_words_are_copied_byte_by_byte(device):
    problem = make_problem(ProblemSpec((9, 4), 130, 128, 4, 2))
    plan = torch_steps.make_plan(problem.topk_ids, 4)
    sources = [torch_steps.quantize_rows(x, Recipe()) for x in problem.xs]
    for mine, there in zip(plan.ranks, plans_to(plan, device).ranks, strict=True):
        got = triton_kernels.dispatch([quantized_to(s, device) for s in sources], there)
        assert_same_quantized(got, torch_steps.dispatch(sources, mine), "pool")


def test_combine_marks_rows_behind_the_pool(device):
    ids = torch.tensor([[0], [1]], device=device)
    plan = triton_kernels.make_plan([ids], 2, num_rows=128, checked=False)
    out = triton_kernels.combine([torch.ones(128, 8, dtype=torch.bfloat16, device=device)], plan, 0)
    assert out[0].tolist() == [1.0] * 8 and bool(out[1].isnan().all())
    dp = triton_kernels.combine_weight_grads([torch.ones(128, device=device)], plan, 0)
    assert dp[0].item() == 1.0 and bool(dp[1].isnan().all())


def ragged_plan(counts: list[int], device: torch.device) -> RankPlan:
    """A plan of one rank whose experts have these rows."""
    ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))[:, None]
    return triton_kernels.make_plan([ids.to(device)], len(counts)).ranks[0]


def to_cpu(plan: RankPlan) -> RankPlan:
    return RankPlan(*(getattr(plan, f).cpu() for f in ("counts", "offs", "source_rank", "token", "slot")))


GEMMS = [  # counts, N, K, row groups of the weight, groups of the rows
    ([130, 0, 1, 64], 128, 256, 1, 1),
    ([5, 0, 129], 272, 200, 2, 1),
    ([3, 20], 96, 400, 1, 2),
]


@pytest.mark.parametrize("counts,n,k,row_groups,groups", GEMMS, ids=str)
@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_grouped_gemm(counts, n, k, row_groups, groups, precision, device):
    plan = ragged_plan(counts, device)
    recipe = Recipe(precision)
    rows = random_pool(plan.num_rows, k, recipe, groups)
    weight = torch_steps.quantize_weight(torch.randn(len(counts), n, k // groups), recipe, row_groups)
    if groups == 2:
        weight = torch_steps.quantize_weight(torch.randn(len(counts), k, n), recipe, 2).transposed()
    want = torch_steps.grouped_gemm(rows, weight, to_cpu(plan), torch.float32)
    padding = (plan.token < 0).cpu()
    rows.data[padding] = nan_like(rows.data[padding])  # padding is nobody's business
    if rows.scale is not None:
        rows.scale[:, padding] = float("nan")
    arguments = (quantized_to(rows, device), weight_to(weight, device), plan)
    assert_close(triton_kernels.grouped_gemm(*arguments, torch.float32), want, 2e-4, "fp32")
    got = triton_kernels.grouped_gemm(*arguments)
    assert_close(got, want.bfloat16(), 2e-3, "bf16")
    assert not bool(got[padding.to(device)].float().abs().sum()), "padding rows are zero"


@pytest.mark.parametrize("config", configs.FP8_GEMMS[:3], ids=str)
def test_fp8_configurations_give_the_same_bits(config, device):
    plan = ragged_plan([130, 0, 5], device)
    rows = quantized_to(random_pool(plan.num_rows, 256, Recipe()), device)
    weight = weight_to(torch_steps.quantize_weight(torch.randn(3, 384, 256), Recipe()), device)
    want = triton_kernels.grouped_gemm(rows, weight, plan, torch.float32, config=configs.FP8_GEMMS[0])
    assert_bitwise(triton_kernels.grouped_gemm(rows, weight, plan, torch.float32, config=config), want, str(config))


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("rows,inter", [(50, 256), (3, 200)])
def test_swiglu_and_its_backward(recipe, rows, inter, device):
    gate_up = (torch.randn(rows, 2 * inter) * 2).bfloat16()
    gate_up[0, :8] = 1.5  # at the limit: passes
    gate_up[1] = 0.0
    gate_up[2, :4] = torch.tensor([-200.0, 200.0, -90.0, 90.0])  # 2^(-x log2 e) overflows and vanishes
    weight, dh = torch.rand(rows), torch.randn(rows, inter)
    weight[-1] = 0.0
    there = (gate_up.to(device), weight.to(device))
    h = triton_kernels.swiglu(*there, recipe)
    assert_one_step_apart(h, torch_steps.swiglu(gate_up, weight, recipe), "h")
    got = triton_kernels.swiglu_backward(dh.to(device), *there, recipe)
    want = torch_steps.swiglu_backward(dh, gate_up, weight, recipe)
    assert got.d_gate_up.groups == 2
    assert_one_step_apart(got.d_gate_up, want.d_gate_up, "d_gate_up")
    assert_close(got.d_gate_up_bf16, want.d_gate_up_bf16, 1e-3, "d_gate_up_bf16")
    assert_close(got.weighted_act, want.weighted_act, 1e-3, "weighted_act")
    assert_close(got.d_weight, want.d_weight, 1e-5, "d_weight")


def test_dp_is_summed_in_the_stated_order(device):
    """With silu(gate) * up = 1 / 2 everywhere, dp is the fold of dh / 2: nothing approximate is left."""
    gate_up = torch.cat([torch.zeros(40, 300), torch.ones(40, 300)], dim=1).bfloat16()
    gate_up[:, :300] = 100.0  # sigmoid = 1
    dh = torch.randn(40, 300) * torch.exp2(torch.randint(-12, 12, (40, 300)).float())
    got = triton_kernels.swiglu_backward(dh.to(device), gate_up.to(device), torch.ones(40, device=device), Recipe())
    assert_bitwise(got.d_weight.cpu(), torch_steps.block_dot(dh, torch.full_like(dh, 100.0)), "dp")


@pytest.mark.parametrize("m,n", [(128, 256), (200, 72), (9, 130)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wgrad(m, n, dtype, device):
    plan = ragged_plan([64, 0, 130, 1, 129], device)
    a, b = torch.randn(plan.num_rows, m).bfloat16(), torch.randn(plan.num_rows, n).bfloat16()
    exact = torch_steps.wgrad(a, b, to_cpu(plan))
    want = exact.to(dtype)
    padding = (plan.token < 0).cpu()
    a[padding], b[padding] = float("nan"), float("nan")
    a, b = a.to(device), b.to(device)
    bound = 2e-4 if dtype == torch.float32 else 2e-3
    out = nan_like(want).to(device)
    assert triton_kernels.wgrad(a, b, plan, out) is out
    assert_close(out, want, bound, "overwrite")
    assert not bool(out[1].abs().sum()), "an expert without rows"
    before = torch.randn(5, m, n).to(dtype)
    got = triton_kernels.wgrad(a, b, plan, before.clone().to(device), accumulate=True)
    assert_close(got, (before.float() + exact).to(dtype), bound, "accumulate")
    assert_bitwise(got[1].cpu(), before[1], "an expert without rows")
    if dtype == torch.float32:
        assert_bitwise(triton_kernels.wgrad(a, b, plan).cpu(), out.cpu(), "a new tensor")


@pytest.mark.parametrize("travelled_left", [False, True])
@pytest.mark.parametrize("operands", ["bf16", "fp8"])
def test_wgrad_operands(operands, travelled_left, device):
    recipe = Recipe(wgrad_operands=operands)
    plan = ragged_plan([64, 0, 130, 1], device)
    pair, there = wgrad_pair(plan, travelled_left, device)
    want = torch_steps.wgrad_operands(*pair, to_cpu(plan), recipe)
    got = triton_kernels.wgrad_operands(*there, plan, recipe)
    for name, a, b in zip(("left", "right"), got, want, strict=True):
        a = a if operands == "bf16" else a.dequantize(torch.bfloat16)
        real = (plan.token >= 0).cpu() if operands == "bf16" else slice(None)
        assert_same_values(a.cpu()[real], b[real], name)


def wgrad_pair(plan: RankPlan, travelled_left: bool, device: torch.device, widths: tuple[int, int] = (200, 72)):
    """A pair for `wgrad_operands` on the CPU and on the device, of very different rows; its padding holds NaN."""
    size = torch.exp2(torch.randint(-9, 9, (plan.num_rows, 1)).float())
    rows = torch_steps.quantize_rows(torch.randn(plan.num_rows, widths[0]) * size, Recipe())
    rows.scale[5, 1] = float("inf")
    rows.scale[7] = 2.0**-100
    partner = (torch.randn(plan.num_rows, widths[1]) / size).bfloat16()
    partner[3, 4], partner[:, 9] = float("nan"), 0.0
    padding = (plan.token < 0).cpu()
    rows.scale[padding], partner[padding] = float("nan"), float("nan")
    rows.data[padding] = nan_like(rows.data[padding])
    travelled = QuantizedRows(rows.data, rows.scale.t().contiguous(), k_major=True)
    pair = (travelled, partner) if travelled_left else (partner, travelled)
    there = tuple(v.to(device) if isinstance(v, torch.Tensor) else quantized_to(v, device) for v in pair)
    return pair, there


@pytest.mark.parametrize("m,n", [(128, 256), (200, 72), (9, 130)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wgrad_of_fp8_operands(m, n, dtype, device):
    """Near the emulation, whose operands are rounded to bf16 once more; with their exact values as near as any GEMM."""
    recipe = Recipe(wgrad_operands="fp8")
    plan = ragged_plan([64, 0, 130, 1, 257], device)
    travelled, partner = random_pool(plan.num_rows, n, recipe), torch.randn(plan.num_rows, m).bfloat16()
    padding = (plan.token < 0).cpu()
    travelled.data[padding], partner[padding] = nan_like(travelled.data[padding]), float("nan")
    operands = triton_kernels.wgrad_operands(partner.to(device), quantized_to(travelled, device), plan, recipe)
    out = nan_like(torch.empty(5, m, n, dtype=dtype)).to(device)
    assert triton_kernels.wgrad(*operands, plan, out) is out
    exact = sum_of_products(*(v.dequantize().cpu() for v in operands), to_cpu(plan))
    assert_close(out, exact.to(dtype), 2e-4 if dtype == torch.float32 else 2e-3, "overwrite")
    emulated = torch_steps.wgrad_operands(partner, travelled, to_cpu(plan), recipe)
    assert_close(out, torch_steps.wgrad(*emulated, to_cpu(plan)).to(dtype), 4e-3, "the emulation")
    assert not bool(out[1].abs().sum()), "an expert without rows"
    before = torch.randn(5, m, n).to(dtype)
    got = triton_kernels.wgrad(*operands, plan, before.clone().to(device), accumulate=True)
    assert_close(got, (before.float() + exact).to(dtype), 2e-4 if dtype == torch.float32 else 2e-3, "accumulate")
    assert_bitwise(got[1].cpu(), before[1], "an expert without rows")
    if dtype == torch.float32:
        assert_bitwise(triton_kernels.wgrad(*operands, plan).cpu(), out.cpu(), "a new tensor")


def sum_of_products(a: torch.Tensor, b: torch.Tensor, plan: RankPlan) -> torch.Tensor:
    """fp32 [E, M, N], summed in fp64."""
    out = torch.zeros(plan.counts.shape[0], a.shape[1], b.shape[1])
    for e, begin, end in torch_steps.segments(plan):
        out[e] = (a[begin:end].double().t() @ b[begin:end].double()).float()
    return out


@pytest.mark.parametrize("config", configs.FP8_WGRADS, ids=str)
def test_fp8_wgrad_configurations_give_the_same_bits(config, device):
    recipe = Recipe(wgrad_operands="fp8")
    plan = ragged_plan([130, 0, 5], device)
    _, there = wgrad_pair(plan, False, device, (192, 272))
    operands = triton_kernels.wgrad_operands(*there, plan, recipe)
    want = triton_kernels.wgrad(*operands, plan, config=configs.FP8_WGRADS[0])
    assert_same_values(triton_kernels.wgrad(*operands, plan, config=config), want.cpu(), str(config))


def test_fp8_wgrad_in_a_pool_of_any_length(device):
    """A pool that ends inside a block of 128 rows, and one that ends before its plan does."""
    recipe = Recipe(wgrad_operands="fp8")
    ids = torch.repeat_interleave(torch.arange(3), torch.tensor([130, 0, 5]))[:, None].to(device)
    pool, partner = random_pool(421, 128, recipe), torch.randn(421, 64).bfloat16()
    results = []
    for rows in (384, 421, 256):
        plan = triton_kernels.make_plan([ids], 3, num_rows=rows, checked=False).ranks[0]
        there = QuantizedRows(pool.data[:rows].to(device), pool.scale[:, :rows].contiguous().to(device), True)
        operands = triton_kernels.wgrad_operands(partner[:rows].to(device), there, plan, recipe)
        results.append(triton_kernels.wgrad(*operands, plan).cpu())
    assert bool(results[0][2].any())
    assert_bitwise(results[1], results[0], "421 rows")
    assert_bitwise(results[2][:2], results[0][:2], "experts that are there")
    assert not bool(results[2][2].any()), "an expert behind the pool"


def test_fp8_wgrad_without_rows(device):
    recipe = Recipe(wgrad_operands="fp8")
    plan = ragged_plan([0, 0], device)
    pool = quantized_to(random_pool(0, 128, recipe), device)
    operands = triton_kernels.wgrad_operands(torch.empty(0, 64, device=device).bfloat16(), pool, plan, recipe)
    assert not bool(triton_kernels.wgrad(*operands, plan).any())
    before = torch.randn(2, 64, 128, device=device)
    assert_bitwise(triton_kernels.wgrad(*operands, plan, before.clone(), accumulate=True), before, "accumulate")


def test_every_step_is_there():
    assert set(torch_steps.__all__) <= set(triton_kernels.__all__)


def test_nothing_at_all(device):
    """No tokens, and tokens without an expert: every step returns empty or zero tensors."""
    for tokens in (0, 5):
        spec = ProblemSpec((tokens,), 128, 128, 2, 2)
        problem = make_problem(spec, device)
        plan = triton_kernels.make_plan([torch.full((tokens, 2), -1, device=device)], 2)
        mine = plan.ranks[0]
        assert mine.num_rows == 0
        pool = triton_kernels.dispatch([triton_kernels.quantize_rows(problem.xs[0], Recipe())], mine)
        weight = triton_kernels.dispatch_weights(problem.topk_weights, mine)
        w13 = triton_kernels.quantize_weight(problem.w13_E2IH, Recipe(), 2)
        gate_up = triton_kernels.grouped_gemm(pool, w13, mine)
        assert triton_kernels.swiglu(gate_up, weight, Recipe()).scale.shape == (1, 0)
        dh = torch.empty(0, 128, device=device)
        grads = triton_kernels.swiglu_backward(dh, gate_up, weight, Recipe())
        dw13 = triton_kernels.wgrad(grads.d_gate_up_bf16, triton_kernels.dequantize(pool), mine)
        assert dw13.shape == (2, 256, 128) and not bool(dw13.any())
        out = triton_kernels.combine([torch.empty(0, 128, dtype=torch.bfloat16, device=device)], plan, 0)
        assert out.shape == (tokens, 128) and not bool(out.any())
        assert not bool(triton_kernels.combine_weight_grads([grads.d_weight], plan, 0).any())


def test_where_the_kernels_run(device):
    assert triton_kernels.why_not(device, "fp8") is None
    assert "not on meta" in triton_kernels.why_not(torch.device("meta"), "fp8")
