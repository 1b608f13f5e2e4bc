"""The wgrad kernels on a GPU against fp64 sums of their operands: poisoned pads, all modes, any order of claims."""

import pytest
import torch

pytest.importorskip("cutlass")

from cute_kernels.wgrad_launch import plan_wgrad, row_factors, transpose_quantized, wgrad_gemm

FP8 = torch.float8_e4m3fn
UNEVEN = [300, 0, 1, 127, 128, 129, 0, 64, 1000, 63, 65]


def aligned_offs(counts):
    offs = torch.zeros(len(counts) + 1, dtype=torch.int64)
    offs[1:] = torch.cumsum((torch.tensor(counts) + 127) // 128 * 128, 0)
    return offs


def row_of(counts):
    """For each real row its place in the pool."""
    offs = aligned_offs(counts)
    return torch.cat([torch.arange(n) + offs[e] for e, n in enumerate(counts)]).cuda()


def make_pool(counts, width, spare=128, dtype=torch.bfloat16, seed=0):
    """[P, width]: unit normal rows with expert-dependent mean sign, NaN in every pad row and behind the end."""
    generator = torch.Generator("cuda").manual_seed(seed)
    rows = int(aligned_offs(counts)[-1]) + spare
    x = torch.full((rows, width), float("nan"), device="cuda")
    real = row_of(counts)
    x[real] = torch.randn(len(real), width, device="cuda", generator=generator)
    return x.to(dtype)


def make_queue(counts, rows, **kwargs):
    offs = aligned_offs(counts).to(torch.int32).cuda()
    return plan_wgrad(offs, torch.tensor(counts, dtype=torch.int32, device="cuda"), rows, **kwargs)


def oracle(a, b, counts):
    """fp64 [E, M, N] from the real rows only."""
    offs = aligned_offs(counts).tolist()
    parts = [a[o : o + n].double().t() @ b[o : o + n].double() for o, n in zip(offs, counts, strict=False)]
    return torch.stack(parts)


def poisoned(counts, M, N, dtype):
    return torch.full((len(counts), M, N), float("nan"), dtype=dtype, device="cuda")


def assert_close(got, want, bound):
    """Every expert within a relative error; exact zeros where there are no rows."""
    for e in range(want.shape[0]):
        norm = want[e].norm()
        if norm == 0:
            assert bool((got[e] == 0).all()), f"expert {e}: expected zeros"
            continue
        error = ((got[e].double() - want[e]).norm() / norm).item()
        assert error < bound, f"expert {e}: relative error {error:.2e}"


def dequantize(q, s):
    """A transposed copy back to [P, width] fp32."""
    blocks, width, _ = q.shape
    scale = s if s.dim() == 2 else s[:, :, :2].reshape(blocks, -1).repeat_interleave(128, 1)[:, :width]
    return (q.float() * scale[:, :, None]).transpose(1, 2).reshape(blocks * 128, width)


def operands(precision, counts, M, N):
    """(launch(queue, out, **modes), fp64 result) for random pools."""
    a, b = make_pool(counts, M, seed=1), make_pool(counts, N, seed=2)
    if precision == "bf16":
        return (lambda queue, out, **modes: wgrad_gemm(a, b, queue, out, **modes)), oracle(a, b, counts), a.shape[0]
    queue = make_queue(counts, a.shape[0])
    qa, qb = transpose_quantized(a, queue), transpose_quantized(b, queue, square=True)
    want = oracle(dequantize(*qa), dequantize(*qb), counts)
    return (lambda queue, out, **modes: wgrad_gemm(qa, qb, queue, out, **modes)), want, a.shape[0]


# fp8: the tensor core's accumulator keeps about 14 bits within a row block
BOUND = {("bf16", torch.float32): 2e-6, ("bf16", torch.bfloat16): 3e-3, ("fp8", torch.float32): 2e-3}
BOUND["fp8", torch.bfloat16] = 3e-3


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("M, N", [(256, 512), (384, 640), (128, 128), (2304, 256)])
def test_overwrite(precision, dtype, M, N):
    launch, want, rows = operands(precision, UNEVEN, M, N)
    out = launch(make_queue(UNEVEN, rows), poisoned(UNEVEN, M, N, dtype))
    assert_close(out, want, BOUND[precision, dtype])


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_accumulate_adds_once_and_leaves_empty_experts_alone(precision, dtype):
    M, N = 256, 384
    launch, want, rows = operands(precision, UNEVEN, M, N)
    old = torch.randn(len(UNEVEN), M, N, device="cuda").mul_(10).to(dtype)
    fresh = launch(make_queue(UNEVEN, rows), poisoned(UNEVEN, M, N, torch.float32))
    out = launch(make_queue(UNEVEN, rows), old.clone(), accumulate=True)
    has_rows = torch.tensor(UNEVEN, device="cuda") > 0
    assert torch.equal(out[~has_rows], old[~has_rows])
    assert torch.equal(out[has_rows], (old.float() + fresh).to(dtype)[has_rows])


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_accumulate_never_touches_an_empty_expert(precision):
    counts = [0, 200, 0]
    launch, _, rows = operands(precision, counts, 128, 256)
    out = launch(make_queue(counts, rows), poisoned(counts, 128, 256, torch.float32), accumulate=True)
    assert bool(out.isnan().all())  # NaN stays NaN in expert 1, and nobody wrote the others


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_same_bits_whoever_claims_what(precision):
    M, N = 384, 768
    launch, want, rows = operands(precision, UNEVEN, M, N)
    tasks = len(UNEVEN) * 3 * 3
    first = launch(make_queue(UNEVEN, rows), poisoned(UNEVEN, M, N, torch.float32))
    assert_close(first, want, BOUND[precision, torch.float32])
    for run in range(50):
        queue = make_queue(UNEVEN, rows)
        if run % 2:
            queue.order.copy_(torch.randperm(len(UNEVEN), device="cuda").int())
        modes = [{}, {"num_ctas": 1}, {"num_ctas": 7}, {"num_ctas": tasks, "tasks_per_cta": 1}, {"tasks_per_cta": 1}]
        modes = modes[run % 5]
        again = launch(queue, poisoned(UNEVEN, M, N, torch.float32), **modes)
        assert torch.equal(again.view(torch.int32), first.view(torch.int32)), f"run {run}"


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_two_kernels_may_draw_from_one_cursor(precision):
    M, N = 384, 768
    launch, want, rows = operands(precision, UNEVEN, M, N)
    whole = launch(make_queue(UNEVEN, rows), poisoned(UNEVEN, M, N, torch.float32))
    queue, out = make_queue(UNEVEN, rows), poisoned(UNEVEN, M, N, torch.float32)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    for stream in streams:
        with torch.cuda.stream(stream):
            launch(queue, out, num_ctas=20)
    torch.cuda.synchronize()
    assert torch.equal(out, whole)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_two_gemms_of_one_plan(precision):
    launch, want, rows = operands(precision, UNEVEN, 256, 256)
    queue = make_queue(UNEVEN, rows, num_gemms=3)
    for cursor in (2, 0, 1):
        out = launch(queue, poisoned(UNEVEN, 256, 256, torch.float32), cursor=cursor)
        assert_close(out, want, BOUND[precision, torch.float32])


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("counts", [[8193, 0, 1], [0, 0, 0], [1], [0, 8193], [127] * 40], ids=str)
def test_row_counts(precision, counts):
    launch, want, rows = operands(precision, counts, 256, 256)
    out = launch(make_queue(counts, rows), poisoned(counts, 256, 256, torch.float32))
    assert_close(out, want, 3e-5 if precision == "bf16" else 2e-3)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_a_pool_without_rows(precision):
    a = torch.zeros(0, 128, dtype=torch.bfloat16, device="cuda")
    queue = make_queue([0, 0], 0)
    out = poisoned([0, 0], 128, 128, torch.float32)
    copies = transpose_quantized(a, queue), transpose_quantized(a, queue, square=True)
    operands = (a, a) if precision == "bf16" else copies
    wgrad_gemm(*operands, queue, out, accumulate=True)
    assert bool(out.isnan().all())
    wgrad_gemm(*operands, queue, out, cursor=1)
    assert not bool(out.any())


def test_many_experts():
    counts = [(7 * e) % 40 for e in range(512)]
    launch, want, rows = operands("bf16", counts, 128, 256)
    queue = make_queue(counts, rows)
    assert queue.order.sort().values.tolist() == list(range(512))
    assert [counts[e] for e in queue.order.tolist()] == sorted(counts, reverse=True)
    assert_close(launch(queue, poisoned(counts, 128, 256, torch.float32)), want, 2e-6)


def test_an_ascending_queue_has_the_empty_experts_last():
    counts = [(7 * e) % 40 for e in range(500)]
    queue = make_queue(counts, int(aligned_offs(counts)[-1]), ascending=True)
    assert queue.order.sort().values.tolist() == list(range(500))
    assert [counts[e] for e in queue.order.tolist()] == sorted(counts, key=lambda n: n or 1 << 30)
    launch, want, rows = operands("fp8", UNEVEN, 128, 256)
    first = launch(make_queue(UNEVEN, rows), poisoned(UNEVEN, 128, 256, torch.float32))
    again = launch(make_queue(UNEVEN, rows, ascending=True), poisoned(UNEVEN, 128, 256, torch.float32))
    assert torch.equal(again, first)


@pytest.mark.parametrize(
    "precision, dtype", [("bf16", torch.bfloat16), ("fp8", torch.bfloat16), ("fp8", torch.float32)]
)
def test_output_of_more_than_two_to_the_32_elements(precision, dtype):
    """E = 512 with three busy experts; their gradients are those of a layer that holds just these."""
    M, N, few = 2048, 4224, [8, 70, 130]
    counts = [0] * 512
    for e, count in zip((255, 256, 511), few, strict=True):
        counts[e] = count
    launch, want, rows = operands(precision, few, M, N)  # empty experts have no rows in the pool
    alone = launch(make_queue(few, rows), poisoned(few, M, N, dtype))
    assert_close(alone, want, BOUND[precision, dtype])
    out = launch(make_queue(counts, rows), poisoned(counts, M, N, dtype))
    assert out.numel() > 2**32
    for accumulate in (False, True):
        if accumulate:
            launch(make_queue(few, rows), alone, accumulate=True)
            launch(make_queue(counts, rows), out, accumulate=True)
        assert not any(bool(out[e].any()) for e in range(512) if not counts[e])  # NaN counts as any
        assert torch.equal(out[[255, 256, 511]], alone)


@pytest.mark.parametrize("source", ["bf16", "fp8"])
def test_tiles_that_are_done_are_left_alone(source):
    """Tasks of 1024 columns of a row block; 1280 columns are two, the second one short."""
    counts, width = [128, 100, 0, 130], 1280
    x = make_pool(counts, width)
    queue = make_queue(counts, x.shape[0])
    scales = torch.rand(width // 128, x.shape[0], device="cuda") if source == "fp8" else None
    x = x.to(FP8) if source == "fp8" else x
    whole = transpose_quantized(x, queue, scales)
    for done in (0, 1, 3, 4, 1000):
        out = torch.full_like(whole[0].view(torch.uint8), 99).view(FP8), torch.full_like(whole[1], 99.0)
        got = transpose_quantized(
            x, queue, scales, out=out, done=torch.tensor([done], dtype=torch.int32, device="cuda")
        )
        assert got[0] is out[0] and got[1] is out[1]
        for block in range(4):  # behind them lies one without rows
            for column in range(0, width, 128):
                at = block, slice(column, column + 128)
                skipped = block * 2 + column // 1024 < done
                want = [torch.full_like(w[at].view(torch.uint8) if i == 0 else w[at], 99) for i, w in enumerate(whole)]
                want = want if skipped else [whole[0][at].view(torch.uint8), whole[1][at]]
                for g, w in zip((out[0][at].view(torch.uint8), out[1][at]), want, strict=True):
                    assert torch.equal(g, w), (done, at)


@pytest.mark.parametrize("square", [False, True], ids=["column", "square"])
@pytest.mark.parametrize("source", ["bf16", "fp8"])
@pytest.mark.parametrize("balanced", [False, True], ids=["plain", "balanced"])
def test_transposed_copy_follows_the_recipe(source, square, balanced):
    width = 384
    x = make_pool(UNEVEN, width)
    x[:, 5] *= 1e-3
    x[300:] *= torch.exp(torch.randn(x.shape[0] - 300, 1, device="cuda")).to(x.dtype)
    x[row_of(UNEVEN)[-1]] = 0
    queue = make_queue(UNEVEN, x.shape[0])
    values, scales = x.float(), None
    if source == "fp8":
        scales = torch.rand(width // 128, x.shape[0], device="cuda") + 0.1
        x = (values / 4).to(FP8)
        values = x.float() * scales.t().repeat_interleave(128, 1)
    factors = None
    if balanced:
        factors = torch.exp2(torch.randint(-20, 20, (x.shape[0],), device="cuda").float())
        values = values * factors[:, None]
    q, s = transpose_quantized(x, queue, scales, square, factors)

    real = torch.zeros(x.shape[0], 1, dtype=torch.bool, device="cuda")
    real[row_of(UNEVEN)] = True
    blocks = torch.where(real, values, 0.0).view(-1, 128, width)
    amax = blocks.abs().amax(1)
    if square:
        amax = amax.view(-1, width // 128, 128).amax(2)
    scale = amax.clamp_min(2.0**-100) * torch.tensor(1 / 448, device="cuda")
    inv = (1.0 / scale).repeat_interleave(128, 1) if square else 1.0 / scale
    want = (blocks * inv[:, None]).clamp(-448, 448).to(FP8).transpose(1, 2).contiguous()
    used = queue.block_rows > 0
    got_scale = s[:, :, :2].reshape(s.shape[0], -1)[:, : width // 128] if square else s
    assert torch.equal(got_scale[used], scale[used])
    assert torch.equal(q.view(torch.uint8)[used], want.view(torch.uint8)[used])


def test_nan_in_a_real_row_stays_in_its_row_and_column():
    counts, M, N = [100, 200], 256, 256
    a, b = make_pool(counts, M, seed=1), make_pool(counts, N, seed=2)
    a[3, 7] = float("nan")
    for out in (
        wgrad_gemm(a, b, make_queue(counts, a.shape[0]), poisoned(counts, M, N, torch.float32)),
        wgrad_gemm(
            transpose_quantized(a, make_queue(counts, a.shape[0])),
            transpose_quantized(b, make_queue(counts, a.shape[0]), square=True),
            make_queue(counts, a.shape[0]),
            poisoned(counts, M, N, torch.float32),
        ),
    ):
        assert bool(out[0, 7].isnan().all())
        out[0, 7] = 0
        assert not bool(out.isnan().any())


def test_row_factors_are_powers_of_two_in_proportion():
    scales = torch.rand(17, 256, device="cuda") * torch.exp(3 * torch.randn(1, 256, device="cuda"))
    scales[:, 3] = 0
    scales[2, 5] = float("inf")
    m, inverse = row_factors(scales)
    want = torch.exp2(torch.ceil(torch.log2(scales.amax(0) / 448)))
    normal = torch.ones(256, dtype=torch.bool, device="cuda")
    normal[[3, 5]] = False
    ratio = m / want
    assert bool(((ratio == 1) | (ratio == 2))[normal].all())  # on the edge of a power either will do
    assert m[3].item() > 0 and m[5].item() == 1
    assert torch.equal(m * inverse, torch.ones_like(m))
    assert not bool((m.view(torch.int32) & 0x7FFFFF).any())
