"""Peak resident memory of loading: at most 1.1 times the rank's weights plus one tensor of a shard, measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.toy_checkpoint import Toy, packed, per_expert, write_shards
from tests.support.toy_fp4 import v4_layer

TOY = Toy(experts=16, hidden=1024, inter=2048)
LAYER = 3 * TOY.experts * TOY.hidden * TOY.inter
"""Bytes of the routed experts at one byte a weight: 96 MiB."""

MEASURE = """
import json, re, sys, torch
from checkpoints import load_moe_layer
folder, rank, num_ranks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)

def status(name):
    return 1024 * int(re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read()).group(1))

load_moe_layer(sys.argv[4], 3)  # first uses load libraries
before, high = status("VmRSS"), status("VmHWM")
layer = load_moe_layer(folder, 3, rank=rank, num_ranks=num_ranks)
groups = [layer.routed, layer.shared] if layer.shared is not None else [layer.routed]
tensors = [t for g in groups for t in vars(g).values() if isinstance(t, torch.Tensor)]
tensors += [t for t in (layer.router_weight, layer.correction_bias, layer.tid2eid) if t is not None]
print(json.dumps(dict(size=sum(t.nbytes for t in tensors), before=before, high_before=high, high=status("VmHWM"))))
"""

CASES = {
    "fp8": (lambda: per_expert(TOY), 2, TOY.hidden * TOY.inter),
    "bf16": (lambda: per_expert(Toy(8, 1024, 2048, scale=None)), 2, 2 * TOY.hidden * TOY.inter),
    "packed": (lambda: packed(TOY), 2, 2 * TOY.experts * TOY.hidden * TOY.inter),
    "fp4": (lambda: v4_layer(TOY, "I8"), 1, TOY.hidden * TOY.inter // 2),
}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc/self/status")
@pytest.mark.parametrize("case", CASES)
def test_peak_memory(tmp_path: Path, case: str) -> None:
    make, num_ranks, largest_tensor = CASES[case]
    write_shards(tmp_path / "big", make(), 3)
    small = {"packed": packed(Toy(inter=128)), "fp4": v4_layer(Toy(), "I8")}.get(case, per_expert(Toy()))
    write_shards(tmp_path / "small", small, 1)
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "big"), "0", str(num_ranks), str(tmp_path / "small")]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    expected = {"fp8": LAYER / 2, "bf16": LAYER / 2, "packed": LAYER / 2, "fp4": LAYER}[case]
    assert expected < seen["size"] < 1.26 * expected
    assert seen["high"] > seen["high_before"], "the peak is hidden by an earlier one"
    peak = seen["high"] - seen["before"]
    assert peak <= 1.1 * seen["size"] + largest_tensor, f"{peak / 2**20:.1f} MiB for {seen['size'] / 2**20:.1f} MiB"
