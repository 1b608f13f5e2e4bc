"""Several GPUs, one process each: `tests.gpu.group_cases` under torchrun. Skipped where there are fewer than two."""

import os
import subprocess
import sys

import pytest
import torch

from tests.support.source_tree import ROOT

pytest.importorskip("cutlass")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_one_process_a_gpu(num_ranks):
    if torch.cuda.device_count() < num_ranks:
        pytest.skip(f"needs {num_ranks} GPUs")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    environment = {**os.environ, "MEGAMOE_TIMEOUT_S": "60"}
    done = subprocess.run(
        [*command, "-m", "tests.gpu.group_cases"],
        capture_output=True,
        text=True,
        timeout=900,
        env=environment,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
