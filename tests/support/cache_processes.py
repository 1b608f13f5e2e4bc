"""Processes that want the same kernel at the same moment from one cache folder.

python -m tests.support.cache_processes PROCESSES FOLDER...    prints, a folder a line, what each process counted
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from typing import Any

from cute_kernels import compile as compile_module
from tests.cpu.test_cute_compile import Scale, build


def want(folder: str, begin: Any, results: Any) -> None:
    """One process: waits for the others, then asks."""
    os.environ[compile_module.CACHE_VARIABLE] = folder
    try:
        begin.wait(timeout=60)
        assert callable(compile_module.compiled("scale", Scale(3), build(3)))
        results.put((compile_module.counts.compiled, compile_module.counts.from_disk))
    except BaseException as error:
        results.put(repr(error))
    results.close()
    results.join_thread()
    os._exit(0)  # what libraries do at a forked process's exit is not the question here


def at_once(processes: int, folder: str) -> list[Any]:
    """What each process counted, (compiled, from disk), or its error. They are forked from this one, which has imported
    everything and compiled nothing."""
    context = multiprocessing.get_context("fork")
    begin, results = context.Barrier(processes), context.Queue()
    workers = [context.Process(target=want, args=(folder, begin, results), daemon=True) for _ in range(processes)]
    for worker in workers:
        worker.start()
    try:
        return [results.get(timeout=60) for _ in workers]
    finally:
        for worker in workers:
            worker.join(timeout=10)
            if worker.is_alive():
                worker.kill()


if __name__ == "__main__":
    for where in sys.argv[2:]:
        print(json.dumps(at_once(int(sys.argv[1]), where)), flush=True)
