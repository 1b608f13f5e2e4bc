"""The examples: what they promise, as far as a CPU can run them."""

import os
import subprocess
import sys

from examples import verify_fused
from tests.support.source_tree import ROOT, on_path


def test_the_three_way_check_with_the_emulation_in_the_fused_kernels_place(monkeypatch, capsys):
    monkeypatch.setattr(verify_fused, "PROBLEMS", verify_fused.PROBLEMS[2:4])
    assert verify_fused.main(["--device", "cpu", "--fused", "torch", "--unfused", "torch"]) == 0
    text = capsys.readouterr().out
    assert "2 of 2 problems pass every gate" in text and "bit for bit" in text
    assert "stage      oracle" in text and "emulation" not in text


def test_without_a_hopper_gpu_it_says_why(capsys):
    assert verify_fused.main([]) == 2
    assert "backend: 'cute' does not run this: " in capsys.readouterr().err


def test_expert_parallel_processes_equal_one():
    """The example itself compares, bit for bit; one of the two ranks has no tokens."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **on_path(ROOT)}
    done = subprocess.run(
        [*command, "examples/expert_parallel.py"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("equal bit for bit") == 2 and "rank 1: T = 0" in done.stdout
