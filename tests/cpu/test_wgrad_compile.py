"""The wgrad kernels' machine code, compiled without a GPU: nothing spilled, wgmma not serialised, memory in budget."""

import pytest

pytest.importorskip("cutlass")

from cute_kernels import sass, wgrad_launch
from cute_kernels.compile import inspect
from cute_kernels.wgrad_config import TransposeConfig, WgradConfig
from tests.support.machine_code import needs_nvdisasm

pytestmark = needs_nvdisasm

GEMMS = [
    WgradConfig(4096, 7168, "bf16", "bfloat16"),
    WgradConfig(4096, 7168, "bf16", "float32", accumulate=True),
    WgradConfig(7168, 2048, "bf16", "bfloat16", accumulate=True),
    WgradConfig(4096, 7168, "fp8", "bfloat16"),
    WgradConfig(4096, 7168, "fp8", "float32", accumulate=True),
    WgradConfig(2048, 640, "fp8", "bfloat16", accumulate=True),
]


def name_of(config: WgradConfig) -> str:
    return f"{config.precision}-{config.out_dtype}{'-accumulate' if config.accumulate else ''}-{config.M}x{config.N}"


@pytest.mark.parametrize("config", GEMMS, ids=name_of)
def test_gemm_code(config):
    found = sass.report(inspect(lambda: wgrad_launch.build_gemm(config, ffi=False)).cubin)
    assert (found.spills, found.stack_bytes) == (0, 0), str(found)
    if config.precision == "bf16":  # the k-loop's chain of four and the tail's
        assert (found.hgmma, found.qgmma, found.warpgroup_arrive) == (8, 0, 2), str(found)
    else:  # two waves of four in the loop, one ahead of it; when overwriting, one behind a task without rows
        waves = 3 if config.accumulate else 4
        assert (found.hgmma, found.qgmma, found.warpgroup_arrive) == (0, 4 * waves, waves), str(found)
        assert found.ffma >= 128
    assert found.registers == 168 and found.top_register < 240


@pytest.mark.parametrize("source", ["bf16", "fp8"])
@pytest.mark.parametrize("square, balanced", [(False, True), (True, False)], ids=["column", "square"])
def test_transpose_code(source, square, balanced):
    config = TransposeConfig(4096, source, square, balanced)
    found = sass.report(inspect(lambda: wgrad_launch.build_transpose(config, ffi=False)).cubin)
    assert (found.spills, found.stack_bytes) == (0, 0), str(found)
    assert found.registers <= (48 if source == "fp8" else 64)  # five CTAs of 256 threads on an SM, or four


@pytest.mark.parametrize("build", [wgrad_launch.build_plan, wgrad_launch.build_row_factors])
def test_small_kernels_code(build):
    found = sass.report(inspect(lambda: build(ffi=False)).cubin)
    assert found.spills == 0 and found.registers <= 64
