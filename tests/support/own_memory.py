"""GPU memory of this process alone, whatever else runs on the card."""

from __future__ import annotations

import os
import subprocess

import torch


def own_gpu_bytes() -> int:
    """Bytes that this process holds, as the driver counts them; where it does not say, what is taken of all."""
    torch.cuda.synchronize()
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()
        found = [int(used) for pid, used in (line.split(",") for line in lines) if int(pid) == os.getpid()]
    except (OSError, ValueError, subprocess.SubprocessError):
        found = []
    if found:
        return sum(found) << 20
    free, total = torch.cuda.mem_get_info()
    return total - free
