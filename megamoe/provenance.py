"""What ties a measurement to where and of what it was taken: the name of the device, and a hash of the kernels."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
_SOURCES = {"triton": "megamoe/triton_kernels", "cute": "cute_kernels", "math": "cute_kernels"}
"""Where the kernels of a backend are, and of "math": the fused kernel alone, in records of several processes."""


def kernel_hash(backend: str, root: Path = ROOT) -> str | None:
    """Hash of the sources that make a backend's kernels; None for a backend that is not ours.

    Args:
        backend: as in a record. root: of the source tree.
    """
    backend = backend.split("_")[0]
    if backend not in _SOURCES:
        return None
    digest = hashlib.sha256()
    for path in sorted((root / _SOURCES[backend]).rglob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def gpu_name(device: torch.device) -> str:
    """A device's name as that of a folder, without its maker: "h200" for an NVIDIA H200, "cpu" for the CPU.

    The whole name counts: an "h100-pcie", "h100-nvl" and "h100-80gb-hbm3" (SXM) are different cards.
    """
    if device.type != "cuda":
        return "cpu"
    name = torch.cuda.get_device_name(device).lower().removeprefix("nvidia")
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-") or "gpu"
