"""The wgrad task list without a GPU: every tile once, limits of a configuration, what a caller may get wrong."""

import pytest
import torch

from cute_kernels import wgrad_launch
from cute_kernels.wgrad_config import GROUP_M, MAX_SHARED_BYTES, WgradConfig, locate_tile

SHAPES = [(4096, 7168), (7168, 2048), (1536, 2048), (2048, 768), (128, 128), (384, 640), (2176, 128), (128, 2176)]


@pytest.mark.parametrize("M, N", SHAPES)
def test_every_tile_is_a_task_once(M, N):
    config = WgradConfig(M, N)
    tiles = [locate_tile(i, config.m_tiles, config.n_tiles) for i in range(config.tiles)]
    assert sorted(tiles) == [(m, n) for m in range(config.m_tiles) for n in range(config.n_tiles)]


def test_neighbouring_tasks_share_operands():
    config = WgradConfig(4096, 7168)
    running = [locate_tile(i, config.m_tiles, config.n_tiles) for i in range(132)]
    assert len({m for m, _ in running}) == GROUP_M
    assert len({n for _, n in running}) <= 132 // GROUP_M + 1


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16"])
def test_shared_memory_fits(precision, out_dtype):
    config = WgradConfig(4096, 7168, precision, out_dtype)
    assert config.why_not() is None
    assert config.shared_bytes <= MAX_SHARED_BYTES


@pytest.mark.parametrize(
    "arguments, match",
    [
        ((100, 128), "M: expected a positive multiple of 128, got 100"),
        ((128, 0), "N: expected a positive multiple of 128, got 0"),
        ((128, 128, "fp4"), "precision: expected one of"),
        ((128, 128, "fp8", "float16"), "out_dtype: expected one of"),
    ],
)
def test_why_not_names_the_argument(arguments, match):
    assert match in WgradConfig(*arguments).why_not()


def queue_of(counts, num_rows):
    """A queue on the CPU, as `plan_wgrad` would leave it; good enough for checks that come before a launch."""
    n = torch.tensor(counts, dtype=torch.int32)
    zeros = torch.zeros(2, dtype=torch.int32)
    return wgrad_launch.WgradQueue(zeros.new_zeros(len(counts) + 1), n, n, zeros, n.new_zeros(num_rows // 128))


def test_bf16_call_reports_all_violations_at_once():
    queue = queue_of([3, 5], 256)
    a, b = torch.zeros(256, 128, dtype=torch.bfloat16), torch.zeros(128, 256, dtype=torch.float32)
    with pytest.raises(ValueError, match="b: expected shape .*\n.*b: expected torch.bfloat16.*\n.*out_EMN") as error:
        wgrad_launch.wgrad_gemm(a, b, queue, torch.zeros(2, 128, 128))
    assert "a: " not in str(error.value)


def test_bf16_call_wants_the_device():
    a, out = torch.zeros(256, 128, dtype=torch.bfloat16), torch.zeros(2, 128, 128)
    with pytest.raises(ValueError, match="a: expected a CUDA tensor, got one on cpu"):
        wgrad_launch.wgrad_gemm(a, a, queue_of([3, 5], 256), out)


def test_fp8_call_checks_copies_and_scales():
    q = torch.zeros(2, 128, 128, dtype=torch.float8_e4m3fn)
    s = torch.zeros(2, 128)
    with pytest.raises(ValueError, match=r"b\[1\]: expected shape \(2, 1, 4\), got \(2, 128\)"):
        wgrad_launch.wgrad_gemm((q, s), (q, s), queue_of([3, 5], 256), torch.zeros(2, 128, 128))
    with pytest.raises(ValueError, match=r"a\[1\]: expected torch.float32, got torch.float64"):
        wgrad_launch.wgrad_gemm((q, s.double()), (q, s), queue_of([3, 5], 256), torch.zeros(2, 128, 128))


def test_operands_are_of_one_kind():
    q, a = torch.zeros(2, 128, 128, dtype=torch.float8_e4m3fn), torch.zeros(256, 128, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="a, b: expected two bf16 pools or two transposed copies, got one of each"):
        wgrad_launch.wgrad_gemm(a, (q, torch.zeros(2, 1, 4)), queue_of([3, 5], 256), torch.zeros(2, 128, 128))


def test_transpose_checks_its_source():
    queue = queue_of([3, 5], 256)
    with pytest.raises(ValueError, match="x_PN: expected torch.float8_e4m3fn, got torch.bfloat16"):
        wgrad_launch.transpose_quantized(torch.zeros(256, 128, dtype=torch.bfloat16), queue, torch.zeros(1, 256))
    with pytest.raises(ValueError, match="x_PN: expected a width that is a multiple of 128, got 100"):
        wgrad_launch.transpose_quantized(torch.zeros(256, 100, dtype=torch.bfloat16), queue)
    x, q = torch.zeros(256, 128, dtype=torch.bfloat16), torch.zeros(2, 128, 128, dtype=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"out\[1\]: expected shape \(2, 1, 4\), got \(2, 128\)"):
        wgrad_launch.transpose_quantized(x, queue, square=True, out=(q, torch.zeros(2, 128)))
    with pytest.raises(ValueError, match=r"out\[0\]: expected torch.float8_e4m3fn, got torch.bfloat16"):
        wgrad_launch.transpose_quantized(x, queue, out=(q.bfloat16(), torch.zeros(2, 128)))
    with pytest.raises(ValueError, match=r"done: expected shape \(1,\), got \(2,\)"):
        wgrad_launch.transpose_quantized(x, queue, done=torch.zeros(2, dtype=torch.int32))


def test_plan_checks_its_arguments():
    offs, counts = torch.zeros(3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="num_rows: expected a multiple of 128, got 130"):
        wgrad_launch.plan_wgrad(offs, counts, 130)
    with pytest.raises(ValueError, match=r"offs: expected shape \(3,\), got \(2,\)"):
        wgrad_launch.plan_wgrad(offs[:2], counts, 128)
    with pytest.raises(ValueError, match="counts: expected 1 to 1024 experts, got 0"):
        wgrad_launch.plan_wgrad(offs[:1], counts[:0], 128)
    with pytest.raises(ValueError, match="offs: expected a CUDA tensor"):
        wgrad_launch.plan_wgrad(offs, counts, 128)


def test_cursor_and_limit_are_checked_before_the_launch():
    queue, config, out = queue_of([3, 5], 256), WgradConfig(128, 128), torch.zeros(2, 128, 128)
    with pytest.raises(ValueError, match="cursor: expected 0 to 1, got 2"):
        wgrad_launch._launch(config, (), queue, out, 2, 4, None)
    with pytest.raises(ValueError, match="tasks_per_cta: expected 1 CTAs to cover 2 tasks, got 1 each"):
        wgrad_launch._launch(config, (), queue, out, 0, 1, 1)


def test_row_factors_check_their_scales():
    with pytest.raises(ValueError, match="scales: expected a multiple of 128 rows, got 100"):
        wgrad_launch.row_factors(torch.zeros(2, 100))
    with pytest.raises(ValueError, match="scales: expected torch.float32, got torch.float64"):
        wgrad_launch.row_factors(torch.zeros(2, 128, dtype=torch.float64))
    x = torch.zeros(256, 128, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"factors: expected shape \(256,\), got \(128,\)"):
        wgrad_launch.transpose_quantized(x, queue_of([3, 5], 256), factors=torch.ones(128))


def test_fp8_weight_gradients_want_fp8_pools(monkeypatch):
    monkeypatch.setattr(wgrad_launch, "plan_wgrad", lambda offs, counts, rows: queue_of([3, 5], 256))
    x = torch.zeros(256, 128, dtype=torch.bfloat16)
    operands = wgrad_launch.WgradOperands(x, x, x, None, x, None)
    with pytest.raises(ValueError, match="operands: expected e4m3 x and d with their scales, got bf16"):
        wgrad_launch.weight_gradients(operands, x, x, None, torch.zeros(2, 128, 128))


def test_weight_gradients_in_bf16_want_bf16_pools():
    queue = queue_of([3, 5], 256)
    fp8 = torch.zeros(256, 128, dtype=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="a: expected torch.bfloat16, got torch.float8_e4m3fn"):
        wgrad_launch.wgrad_gemm(fp8, fp8.bfloat16(), queue, torch.zeros(2, 128, 128))
