"""Run a function on every rank of a gloo group, each in a process of its own, under a watchdog: a hang is a failure.

Processes are forked from a server that has imported torch once, so a group costs a fraction of a second.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PRELOADED = ["pytest", "torch.distributed", "torch._dynamo", "megamoe.cli.problem", "cute_kernels.launch"]
"""What cases import, directly or at the first call of a custom operator."""


def run_ranks(case: Callable[..., Any], num_ranks: int, *args: Any, timeout: float = 120.0) -> list[Any]:
    """Call `case(rank, *args)` on every rank of a fresh default gloo group.

    Args:
        case: a function at the top level of a module. Its result must be picklable.
        num_ranks: processes.
        args: small and picklable.
        timeout: seconds after which the case has hung.

    Returns:
        The results by rank.

    Raises:
        AssertionError: a rank failed (with its traceback) or hung.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        workers, pipes = [], []
        for rank in range(num_ranks):
            receiver, sender = context.Pipe(duplex=False)
            job = (case, rank, num_ranks, args, str(Path(folder) / "store"), timeout, sender)
            worker = context.Process(target=_run_rank, args=job, daemon=True)
            worker.start()
            sender.close()
            workers.append(worker)
            pipes.append(receiver)
        try:
            return _collect(pipes, case.__name__, timeout)
        finally:
            for worker in workers:
                worker.kill()
                worker.join()


def _collect(pipes: list[Connection], name: str, timeout: float) -> list[Any]:
    deadline = time.monotonic() + timeout
    results: list[Any] = [None] * len(pipes)
    waiting, failures = set(range(len(pipes))), []
    while waiting and time.monotonic() < deadline:
        ready = multiprocessing.connection.wait([pipes[rank] for rank in waiting], timeout=0.5)
        for rank in [rank for rank in waiting if pipes[rank] in ready]:
            waiting.remove(rank)
            try:
                is_ok, value = pickle.loads(pipes[rank].recv_bytes())
            except EOFError:
                is_ok, value = False, "the process died without a word"
            results[rank] = value
            if not is_ok:
                failures.append(f"rank {rank} of {name}:\n{value}")
        if failures and waiting:  # peers of a failed rank fail too, mostly because of it: a moment for their words
            deadline = min(deadline, time.monotonic() + 2)
    if failures:
        raise AssertionError("\n".join(failures))
    if waiting:
        raise AssertionError(f"{name}: ranks {sorted(waiting)} hang after {timeout} s")
    return results


def _run_rank(
    case: Callable[..., Any], rank: int, num_ranks: int, args: tuple, store: str, timeout: float, pipe: Connection
) -> None:
    try:
        torch.set_num_threads(1)
        torch.manual_seed(rank)
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, num_ranks),
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=timeout),
        )
        outcome = (True, case(rank, *args))
    except BaseException:
        outcome = (False, traceback.format_exc())
    pipe.send_bytes(pickle.dumps(outcome))
    pipe.close()
    if outcome[0]:
        with contextlib.suppress(Exception):  # a peer may still be joining the group, or be dead already
            dist.barrier()
            dist.destroy_process_group()
