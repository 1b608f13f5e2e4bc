"""The fused backend: the whole expert-parallel forward as one CuTe-DSL kernel on Hopper."""

from __future__ import annotations

import importlib.util

from megamoe.backends.base import Problem
from megamoe.backends.stepwise import StepwiseBackend

BLOCK = 128


class CuteBackend(StepwiseBackend):
    """Fused forward; what is not fused yet runs as the Triton steps on the same saved row order."""

    def __init__(self) -> None:
        super().__init__("cute", "megamoe.triton_kernels")

    def why_not(self, problem: Problem) -> str | None:
        if importlib.util.find_spec("cute_kernels.launch") is None:
            return "the fused kernel is not part of this version"
        if importlib.util.find_spec("cutlass") is None:
            return "nvidia-cutlass-dsl is not installed; pip install 'megamoe[cute]'"
        if problem.device_type != "cuda" or problem.capability is None or problem.capability[0] != 9:
            where = (
                problem.device_type
                if problem.capability is None
                else "compute capability {}.{}".format(*problem.capability)
            )
            return f"it needs a Hopper GPU (compute capability 9.0), not {where}"
        if problem.precision != "fp8":
            return "it has no bf16 kernel yet; bf16 runs on the Triton path"
        odd = [
            f"{name} = {size}"
            for name, size in (("hidden_size", problem.hidden_size), ("intermediate_size", problem.intermediate_size))
            if size % BLOCK
        ]
        if odd:
            return f"it needs multiples of {BLOCK}, not {', '.join(odd)}"
        return None
