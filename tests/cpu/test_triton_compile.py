"""The Triton kernels compiled, which needs no GPU. SM90: no spills, tensor cores, TMA, the right approximations."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parent.parent.parent
SHARED_BYTES = 232_448
MAY_SPILL_BYTES = 16


def compile_kernels(*options: str, cache: Path) -> list[dict]:
    """In a process of its own: this one may run under the interpreter."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-m", "tests.support.triton_compile_all", *options]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(kernels: list[dict]) -> None:
    for kernel in kernels:
        assert kernel["spill_bytes"] <= MAY_SPILL_BYTES, kernel
        assert kernel["shared_bytes"] <= SHARED_BYTES, kernel
    by_name: dict[str, list[dict]] = {}
    for kernel in kernels:
        by_name.setdefault(kernel["name"], []).append(kernel)
    for name in ("_scaled_gemm_kernel", "_scaled_wgrad_kernel"):
        assert all(k["fp8_mma"] and k["tma_loads"] for k in by_name[name])
    assert all(k["bf16_mma"] and k["tma_loads"] for k in by_name["_plain_gemm_kernel"] + by_name["_wgrad_kernel"])
    assert all(k["approximate"] for name in ("_swiglu_kernel", "_swiglu_backward_kernel") for k in by_name[name])
    quantisers = ("_quantize_rows_kernel", "_quantize_weight_kernel", "_transpose_kernel")
    assert all(k["saturating"] for name in quantisers for k in by_name[name])
    for k in by_name["_swiglu_kernel"] + by_name["_swiglu_backward_kernel"]:  # products and sums round one by one
        assert not k["contracted"], k
        assert k["saturating"] or not k["ffma"], f"{k}: only the reciprocal of a scale has any"


def test_every_kernel_compiles(tmp_path):
    check(compile_kernels(cache=tmp_path))


@pytest.mark.compile_all
@pytest.mark.parametrize("capability", [80, 89])
def test_every_kernel_compiles_for_what_else_it_runs_on(capability, tmp_path):
    """The bf16 recipe from SM80 on, both from SM89: no descriptor in hardware, and at most 99 KB of shared memory."""
    kernels = compile_kernels("--capability", str(capability), cache=tmp_path)
    assert all(kernel["shared_bytes"] <= 101_376 for kernel in kernels)
    assert not any(kernel["tma_loads"] for kernel in kernels)
    has_fp8 = any(kernel["name"] == "_scaled_wgrad_kernel" for kernel in kernels)
    assert has_fp8 == (capability >= 89) and any(kernel["name"] == "_plain_gemm_kernel" for kernel in kernels)


@pytest.mark.compile_all
def test_every_configuration_compiles(tmp_path):
    check(compile_kernels("--all", cache=tmp_path))
