"""What mega_moe accepts: dtypes, strides, empty calls; and what it refuses, with the words it uses."""

import functools

import pytest
import torch

from megamoe import LocalWorld, MoEContext, Recipe, backends, mega_moe
from megamoe.cli.problem import ProblemSpec, make_problem
from megamoe.context import context_of
from megamoe.errors import BackendUnavailable, CapacityError, MegaMoERuntimeError, MegaMoETypeError, MegaMoEValueError
from tests.support.compare import assert_bitwise
from tests.support.moe_calls import context_for, run
from tests.support.poison import nan_like, poison_allocator

T, H, INTER, E, K = 24, 128, 128, 4, 2


@pytest.fixture
def problem():
    return make_problem(ProblemSpec((T,), H, INTER, E, K))


@pytest.fixture
def want(problem):
    return run(problem)


def apply(problem, x=None, ids=None, weights=None, w13=None, w2=None, **options):
    return mega_moe(
        problem.xs[0] if x is None else x,
        problem.topk_ids[0] if ids is None else ids,
        problem.topk_weights[0] if weights is None else weights,
        problem.w13_E2IH if w13 is None else w13,
        problem.w2_EHI if w2 is None else w2,
        **options,
    )


# ---------------------------------------------------------------- dtypes


def test_int32_and_int64_ids_are_equal(problem, want):
    assert_bitwise(apply(problem, ids=problem.topk_ids[0].int()), want.outs[0], "out")


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint8, torch.float32, torch.bool])
def test_other_ids_are_refused(problem, dtype):
    with pytest.raises(MegaMoETypeError, match=f"topk_ids: expected int32 or int64, got {dtype}. Convert the ids"):
        apply(problem, ids=problem.topk_ids[0].to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_weights_are_converted_with_equal_result(problem, dtype):
    half = problem.topk_weights[0].to(dtype).requires_grad_()
    full = half.detach().float().requires_grad_()
    got, exact = apply(problem, weights=half), apply(problem, weights=full)
    assert_bitwise(got, exact, "out")
    got.backward(problem.douts[0])
    exact.backward(problem.douts[0])
    assert_bitwise(half.grad, full.grad.to(dtype), "dp")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (dict(x=torch.zeros(T, H, dtype=torch.float64)), "x: expected bf16, fp16 or fp32, got torch.float64"),
        (dict(weights=torch.zeros(T, K, dtype=torch.int64)), "topk_weights: expected bf16, fp16 or fp32"),
        (dict(w13=torch.zeros(E, 2 * INTER, H)), "w13, w2: expected one dtype of .* got torch.float32, torch.bfloat16"),
    ],
)
def test_type_errors(problem, change, match):
    with pytest.raises(MegaMoETypeError, match=match):
        apply(problem, **change)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (dict(x=[None]), "x: expected a tensor, or a list of one for each rank, got NoneType"),
        (dict(ids=[[0, 1]]), "topk_ids: expected a tensor, or a list of one for each rank, got list"),
        (dict(weights="w"), "topk_weights: expected a tensor, or a list of one for each rank, got str"),
        (dict(w13=[1.0]), "w13: expected a tensor, got list"),
        (dict(scales=(None,)), "scales: expected those of w13 and of w2, got 1 of them"),
        (dict(scales=3), "scales: expected those of w13 and of w2, got int"),
        (dict(context=Recipe()), "context: expected a MoEContext or None, got Recipe"),
    ],
)
def test_what_is_no_tensor_is_named(problem, change, match):
    with pytest.raises(MegaMoETypeError, match=match):
        apply(problem, **change)


def test_scales_must_be_fp32(problem):
    with pytest.raises(MegaMoETypeError, match="scales: expected fp32, got torch.bfloat16"):
        apply(problem, scales=(torch.ones(1, dtype=torch.bfloat16), torch.ones(1)))


# ---------------------------------------------------------------- shapes


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (dict(x=torch.zeros(T, H + 1)), r"x: expected \[T, H = 128\], got shape \(24, 129\)"),
        (dict(x=torch.zeros(2, T, H)), r"x: expected \[T, H = 128\], got shape \(2, 24, 128\)"),
        (dict(ids=torch.zeros(T + 1, K).int()), r"topk_ids: expected \[T = 24, K\], got shape \(25, 2\)"),
        (dict(ids=torch.zeros(T).int()), r"topk_ids: expected \[T = 24, K\], got shape \(24,\)"),
        (dict(ids=torch.zeros(T, 0).int()), r"topk_ids: expected the same K >= 1 on every rank, got K = 0"),
        (dict(weights=torch.zeros(T, K + 1)), r"topk_weights: expected topk_ids' shape \(24, 2\), got shape \(24, 3\)"),
        (dict(w13=torch.zeros(E, INTER, H).bfloat16()), r"w13, w2: expected \[E, 2I, H\] and \[E, H, I\]"),
        (
            dict(w13=torch.zeros(E, 0, H).bfloat16(), w2=torch.zeros(E, H, 0).bfloat16()),
            "w13, w2: expected H >= 1 and I >= 1, got shapes",
        ),
        (dict(w2=torch.zeros(E, H).bfloat16()), r"w13, w2: expected \[E, 2I, H\] and \[E, H, I\]"),
    ],
)
def test_value_errors(problem, change, match):
    with pytest.raises(MegaMoEValueError, match=match):
        apply(problem, **change)


def test_all_violations_are_named_at_once(problem):
    with pytest.raises(MegaMoEValueError) as error:
        apply(problem, x=torch.zeros(T, H + 1), weights=torch.zeros(T, K + 1))
    assert "x: expected" in str(error.value) and "topk_weights: expected" in str(error.value)


def test_lists_must_have_an_entry_for_each_rank(problem):
    context = MoEContext(world=LocalWorld(2))
    with pytest.raises(MegaMoEValueError, match=r"x: expected 2 tensor\(s\), one for each rank of this process, got 1"):
        apply(problem, context=context)


def test_ranks_must_agree_on_k():
    problem = make_problem(ProblemSpec((5, 5), H, INTER, E, K))
    ids, weights = list(problem.topk_ids), list(problem.topk_weights)
    ids[1], weights[1] = ids[1][:, :1], weights[1][:, :1]
    with pytest.raises(MegaMoEValueError, match=r"topk_ids\[1\]: expected the same K >= 1 on every rank, got K = 1"):
        mega_moe(problem.xs, ids, weights, problem.w13_E2IH, problem.w2_EHI, context=context_for(problem))


def test_experts_must_divide_among_the_ranks():
    problem = make_problem(ProblemSpec((5, 5), H, INTER, E, K))
    w13, w2 = problem.w13_E2IH[:3], problem.w2_EHI[:3]
    with pytest.raises(
        MegaMoEValueError, match=r"w13.shape\[0\]: expected a positive multiple of the 2 local ranks, got 3"
    ):
        mega_moe(problem.xs, problem.topk_ids, problem.topk_weights, w13, w2, context=context_for(problem))


def test_fp8_weights_need_scales_of_the_right_grid(problem):
    w13, w2 = problem.w13_E2IH.to(torch.float8_e4m3fn), problem.w2_EHI.to(torch.float8_e4m3fn)
    with pytest.raises(MegaMoEValueError, match=r"scales\[0\]: expected shape \(4, 2, 1\).* got None"):
        apply(problem, w13=w13, w2=w2)
    with pytest.raises(MegaMoEValueError, match=r"scales\[1\]: expected shape \(4, 1, 1\).* got shape \(4, 1\)"):
        apply(problem, w13=w13, w2=w2, scales=(torch.ones(4, 2, 1), torch.ones(4, 1)))
    with pytest.raises(MegaMoEValueError, match="w13.requires_grad: expected False for FP8 weights"):
        apply(problem, w13=w13.requires_grad_(), w2=w2, scales=(torch.ones(4, 2, 1), torch.ones(4, 1, 1)))
    with pytest.raises(MegaMoEValueError, match="scales: expected None for weights that are not FP8"):
        apply(problem, scales=(torch.ones(4, 2, 1), torch.ones(4, 1, 1)))


def test_everything_is_on_one_device(problem):
    meta = problem.topk_weights[0].to("meta")
    with pytest.raises(MegaMoEValueError, match="topk_weights: expected the device of w13, cpu, got meta"):
        apply(problem, weights=meta)
    with pytest.raises(MegaMoEValueError, match="w2: expected the device of w13, cpu, got meta"):
        apply(problem, w2=problem.w2_EHI.to("meta"))


@pytest.mark.parametrize("bad", [E, E + 5, -2, 2**31 - 1])
def test_ids_out_of_range_are_named(problem, bad):
    ids = problem.topk_ids[0].clone()
    ids[3, 1] = bad
    with pytest.raises(
        MegaMoEValueError, match=rf"topk_ids.*\[3, 1\]: expected -1 or an expert in \[0, 4\), got {bad}"
    ):
        apply(problem, ids=ids)


def test_too_small_a_capacity_is_refused():
    problem = make_problem(ProblemSpec((200, 200), H, INTER, E, K, "first_rank"))
    with pytest.raises(CapacityError, match="capacity: expected at least .* rows for rank 0, got 128"):
        run(problem, context_for(problem, capacity=128))


# ---------------------------------------------------------------- contexts


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        (dict(backend="cuda"), MegaMoEValueError, "backend: expected 'auto' or one of .*'torch', got 'cuda'"),
        (
            dict(capacity=100),
            MegaMoEValueError,
            "capacity: expected a positive multiple of 128, 'worst' or None, got 100",
        ),
        (dict(capacity="best"), MegaMoEValueError, "capacity: expected a positive multiple"),
        (dict(max_tokens_per_rank=0), MegaMoEValueError, "max_tokens_per_rank: expected a positive integer"),
        (dict(save="none"), MegaMoEValueError, "save: expected 'pool', 'repull' or 'recompute', got 'none'"),
        (dict(world=2), MegaMoETypeError, "world: expected None, a LocalWorld, a ProcessGroup or a Hierarchy, got int"),
    ],
)
def test_context_errors(options, error, match):
    with pytest.raises(error, match=match):
        MoEContext(**options)


def test_a_backend_that_does_not_run_here_says_why(problem):
    with pytest.raises(BackendUnavailable, match="backend: 'cute' does not run this: "):
        apply(problem, context=MoEContext(backend="cute"))


def test_a_deleted_context_is_named():
    with pytest.raises(MegaMoERuntimeError, match="context: expected a MoEContext that is alive"):
        context_of(2**40)


def test_a_context_lives_until_its_backward(problem, want):
    x = problem.xs[0].clone().requires_grad_()
    out = apply(problem, x=x, context=MoEContext(Recipe()))  # nobody else holds it
    out.backward(problem.douts[0])
    assert_bitwise(x.grad, want.dx[0], "dx")


# ---------------------------------------------------------------- strides


def strided(kind, t):
    if kind == "wide":
        wide = torch.randn(t.shape[0], 2 * t.shape[1]).to(t.dtype)
        wide[:, : t.shape[1]] = t
        return wide[:, : t.shape[1]]
    if kind == "every_second":
        wide = torch.zeros(t.shape[0], 2 * t.shape[1], dtype=t.dtype)
        wide[:, ::2] = t
        return wide[:, ::2]
    if kind == "transposed":
        return t.t().contiguous().t()
    flat = torch.zeros(t.numel() + 1, dtype=t.dtype)  # storage that starts one element late
    flat[1:] = t.flatten()
    return flat[1:].view(t.shape)


@pytest.mark.parametrize("kind", ["wide", "every_second", "transposed", "offset"])
@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_views_equal_their_contiguous_copies(problem, kind, precision):
    context = MoEContext(Recipe(precision))
    want = run(problem, context)
    x = strided(kind, problem.xs[0]).requires_grad_()
    p = strided(kind, problem.topk_weights[0]).requires_grad_()
    out = apply(problem, x=x, ids=strided(kind, problem.topk_ids[0]), weights=p, context=context)
    out.backward(strided(kind, problem.douts[0]))
    assert_bitwise(out, want.outs[0], "out")
    assert_bitwise(x.grad.contiguous(), want.dx[0], "dx")
    assert_bitwise(p.grad.contiguous(), want.dp[0], "dp")


def test_backends_get_rows_that_kernels_can_copy_in_bulk(problem, monkeypatch):
    """One element behind an alignment: contiguous, and refused by a kernel that copies 16 bytes at once."""
    backend = backends.BACKENDS["torch"]
    seen = []

    def check(real, *args):
        for values in [v for v in args if isinstance(v, list) and v and isinstance(v[0], torch.Tensor)]:
            assert all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in values)
            seen.append(len(values))
        return real(*args)

    for name in ("forward", "backward"):
        monkeypatch.setattr(backend, name, functools.partial(check, getattr(backend, name)))
    late = [strided("offset", t) for t in (problem.xs[0], problem.topk_ids[0], problem.topk_weights[0])]
    out = apply(problem, late[0].requires_grad_(), *late[1:], context=MoEContext(backend="torch", save="repull"))
    out.backward(strided("offset", problem.douts[0]))
    assert len(seen) == 4  # x, ids, weights; dout


def test_strided_weights(problem, want):
    w13 = problem.w13_E2IH.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    w2 = torch.cat([problem.w2_EHI] * 2, dim=2)[:, :, :INTER].detach().requires_grad_()
    out = apply(problem, w13=w13, w2=w2)
    out.backward(problem.douts[0])
    assert_bitwise(out, want.outs[0], "out")
    assert_bitwise(w13.grad.contiguous(), want.dw13, "dW13")
    assert_bitwise(w2.grad.contiguous(), want.dw2, "dW2")


def test_weights_expanded_over_slots(problem):
    p = torch.rand(T, 1).requires_grad_()
    out = apply(problem, weights=p.expand(T, K))
    out.backward(problem.douts[0])
    q = p.detach().clone().requires_grad_()
    apply(problem, weights=q.expand(T, K).contiguous()).backward(problem.douts[0])
    assert_bitwise(p.grad, q.grad, "dp")


@pytest.mark.parametrize(
    "loss",
    [
        lambda out: out.sum(),
        lambda out: out.mean(0).sum(),
        lambda out: out[:, ::2].sum(),
        lambda out: (out.t() @ torch.ones(T, 3).bfloat16()).sum(),
        lambda out: out[:1].expand(T, H).sum(),
    ],
    ids=["sum", "mean", "every_second", "transposed", "expanded"],
)
def test_upstream_gradients_of_any_stride(problem, loss):
    grads = []
    for contiguous in (False, True):
        x = problem.xs[0].clone().requires_grad_()
        out = apply(problem, x=x)
        if contiguous:
            leaf = out.detach().requires_grad_()
            out.backward(torch.autograd.grad(loss(leaf), leaf)[0].contiguous())
        else:
            loss(out).backward()
        grads.append(x.grad)
    assert_bitwise(grads[0], grads[1], "dx")


def test_x_is_never_written_to(problem):
    x = problem.xs[0].clone()
    version, before = x._version, x.clone()
    first, second = apply(problem, x=x), apply(problem, x=x)
    assert_bitwise(x, before, "x")
    assert_bitwise(first, second, "out")
    assert x._version == version and first.data_ptr() != x.data_ptr()


# ---------------------------------------------------------------- nothing to do


@pytest.mark.parametrize("tokens", [(0,), (0, 0), (0, 33), (33, 0)], ids=str)
@pytest.mark.parametrize("save", ["pool", "repull", "recompute"])
def test_no_tokens_stays_attached(tokens, save):
    problem = make_problem(ProblemSpec(tokens, H, INTER, E, K))
    poison_allocator()
    got = run(problem, context_for(problem, save=save))
    for n, out, dx, dp in zip(tokens, got.outs, got.dx, got.dp, strict=True):
        assert out.shape == (n, H) and out.grad_fn is not None
        assert dx.shape == (n, H) and dp.shape == (n, K)
    if not sum(tokens):
        assert not got.dw13.any() and not got.dw2.any()
    else:
        want = run(problem.on_one_rank()).joined()
        for name, value in got.joined().items():
            assert_bitwise(value, want[name], name)


def test_all_ids_masked(problem):
    poison_allocator()
    x, p = problem.xs[0].clone().requires_grad_(), nan_like(problem.topk_weights[0]).requires_grad_()
    w13, w2 = problem.w13_E2IH.clone().requires_grad_(), problem.w2_EHI.clone().requires_grad_()
    out = apply(problem, x=x, ids=torch.full((T, K), -1), weights=p, w13=w13, w2=w2)
    out.backward(problem.douts[0])
    for name, value in {"out": out, "dx": x.grad, "dp": p.grad, "dW13": w13.grad, "dW2": w2.grad}.items():
        assert_bitwise(value, torch.zeros_like(value), name)
