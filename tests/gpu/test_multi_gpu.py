"""Several GPUs, one process each: `tests.gpu.group_cases` under torchrun. Skipped where there are fewer than two."""

import os
import socket
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


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_when_a_process_is_gone_the_others_leave():
    base = {
        **os.environ,
        "MEGAMOE_TIMEOUT_S": "5",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.group_cases", "vanish"],
            env={**base, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.DEVNULL if rank else subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for rank in range(2)
    ]
    try:
        _, said = processes[0].communicate(timeout=150)  # compiling included
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert processes[0].returncode not in (0, None) and "MegaMoETimeout" in said, said[-3000:]
