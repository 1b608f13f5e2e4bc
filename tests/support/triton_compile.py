"""Compiles Triton kernels without a GPU: every launch inside `compiled_kernels` is compiled and not run.

The launches are those of the real wrappers on CPU tensors: specialisation, descriptors and options are the real ones.
Must run in a process in which triton was imported without its interpreter.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction


@dataclasses.dataclass(frozen=True)
class Compiled:
    """One compiled kernel.

    Attributes:
        name: of the kernel. registers, spill_bytes: a thread's. shared_bytes: a program's. warps, stages: as launched.
        ptx, sass: the code.
    """

    name: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    warps: int
    stages: int
    ptx: str
    sass: str


class _NoDevice:
    """Stands in for the CUDA driver: names the target, has one device and no stream."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_capability(self, device: int = 0) -> tuple[int, int]:
        return divmod(self._capability, 10)


@contextlib.contextmanager
def compiled_kernels(capability: int = 90) -> Iterator[list[Compiled]]:
    """Collects what the launches inside compile to; kernels that were compiled before are collected again.

    `capability`: of the GPU, 80 for 8.0.
    """
    found: list[Compiled] = []
    run = JITFunction.run

    def compile_only(self: JITFunction, *args: object, grid: object, warmup: bool, **kwargs: object) -> object:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        found.append(_describe(kernel))
        return kernel

    active = triton.runtime.driver._active
    triton.runtime.driver.set_active(_NoDevice(capability))
    JITFunction.run = compile_only
    try:
        yield found
    finally:
        JITFunction.run = run
        triton.runtime.driver._active = active


def _describe(kernel: object) -> Compiled:
    metadata, asm = kernel.metadata, kernel.asm  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(asm["cubin"])
        usage, sass = (_cuobjdump(option, path) for option in ("--dump-resource-usage", "-sass"))
    resources = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return Compiled(
        metadata.name,
        resources["REG"],
        resources["STACK"] + resources["LOCAL"],
        metadata.shared,
        metadata.num_warps,
        metadata.num_stages,
        asm["ptx"],
        sass,
    )


def _cuobjdump(option: str, path: Path) -> str:
    tool = triton.knobs.nvidia.cuobjdump.path
    return subprocess.run([tool, option, str(path)], check=True, capture_output=True, text=True).stdout
