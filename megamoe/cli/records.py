"""Benchmark records: what one holds, where and with what it was measured, and how a file of them is written."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megamoe.provenance import ROOT, gpu_name, kernel_hash

Record = dict[str, Any]

REQUIRED: dict[str, type | tuple[type, ...]] = {
    "bench": str,
    "shape": str,
    "T": int,
    "routing": str,
    "ranks": int,
    "backend": str,
    "precision": str,
    "us": float,
    "us_sustained": float,
    "us_min": float,
    "us_max": float,
    "tflops": (float, type(None)),
    "gpu": str,
    "clock_mhz": (int, type(None)),
    "torch": str,
    "triton": (str, type(None)),
    "cutlass_dsl": (str, type(None)),
    "commit": (str, type(None)),
    "kernel_hash": (str, type(None)),
    "date": str,
}
"""Fields that every record has, with their types."""

OPTIONAL: dict[str, type] = {
    "ratio_to_triton": float,
    "ratio_to_torch_gemms": float,
    "roof_share": float,
    "copy_share": float,
    "gb_per_s": float,
    "peak_bytes": int,
    "graph": bool,
    "includes": str,
    "rel_l2_out": float,
    "rel_l2_dx": float,
    "rel_l2_dp": float,
    "rel_l2_dw13": float,
    "rel_l2_dw2": float,
}
"""Fields of some records: ratios (> 1: ours is faster), share of the roof (1: on it) or of the speed of a copy of the
same bytes, errors against the oracle; `graph`: whether launches were replayed from a CUDA graph; `includes`: what is
inside the time. torch's GEMMs are those of a forward in the recipe's precision, or for weight gradients its bf16
products alone."""


def environment(backend: str, device: torch.device) -> Record:
    """The fields of a record that say where and with what it was measured."""
    return {
        "gpu": gpu_name(device),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "cutlass_dsl": _version("nvidia-cutlass-dsl"),
        "python": platform.python_version(),
        "commit": _commit(),
        "kernel_hash": kernel_hash(backend),
        "date": datetime.date.today().isoformat(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    git = ["git", "-C", str(ROOT), "rev-parse", "--short=10", "HEAD"]
    try:
        return subprocess.run(git, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def write_records(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Write records as a JSON list, one a line, so that a difference of two files can be read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(_rounded(record), sort_keys=False) for record in records)
    path.write_text(f"[\n{lines}\n]\n" if lines else "[]\n")


def _rounded(record: Mapping[str, Any]) -> Record:
    return {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in record.items()}
