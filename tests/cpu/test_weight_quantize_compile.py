"""The kernel that quantises weights into the kernels' order: machine code and refusals, without a GPU."""

import pytest
import torch

pytest.importorskip("cutlass")

from cute_kernels import sass, weight_launch
from cute_kernels.compile import inspect
from cute_kernels.weight_quantize import QuantizeConfig
from tests.support.machine_code import needs_nvdisasm


@needs_nvdisasm
@pytest.mark.parametrize("source", ["bfloat16", "float32"])
@pytest.mark.parametrize("is_gate_up", [False, True], ids=["rows", "gate_up"])
def test_code(source, is_gate_up):
    config = QuantizeConfig(4096, 7168, is_gate_up, source, False, True)
    found = sass.report(inspect(lambda: weight_launch.build(config, ffi=False)).cubin)
    assert (found.spills, found.stack_bytes) == (0, 0), str(found)
    assert found.registers <= 104, str(found)  # two CTAs of 256 threads on an SM


@pytest.mark.parametrize(
    "arguments, match",
    [
        ((384, 128, True, "float32"), "rows: expected a positive multiple of 256, got 384"),
        ((384, 100, False, "float32"), "width: expected a positive multiple of 128, got 100"),
        ((384, 128, False, "float16"), "source: expected one of"),
    ],
)
def test_why_not_names_the_argument(arguments, match):
    assert match in QuantizeConfig(*arguments, False, True).why_not()


def test_wants_the_device():
    with pytest.raises(ValueError, match="w_ENK: expected a CUDA tensor, got one on cpu"):
        weight_launch.quantize_weight(torch.zeros(1, 128, 128), is_gate_up=False, pow2=False, transposed=True)
