"""`megamoe soak`: random calls, forward and backward, of one backend against another, for as long as you like.

Sizes, routing, ranks and options of every call are drawn from its seed, which is printed: `--seed N --calls 1` makes
that call again. The run stops at the first call that fails, misses the gate of `megamoe.gates` between backends, or
gives other bits when it is made again or on one rank; the exit status is then 1.

With `--processes N` as many processes share the GPU, each with seeds of its own; the record adds up what they did.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megamoe import backends
from megamoe._version import __version__
from megamoe.cli.options import MOST_SEED, device_of, within, writable
from megamoe.cli.records import environment
from megamoe.cli.soak_calls import SIZES, compare, draw
from megamoe.recipe import Recipe

SEEDS_A_PROCESS = 10_000_000
"""From the first seed of one process to that of the next."""

LAST_CALL_S = 30.0
"""How long a process that is asked to end may take to write its record."""

Record = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `megamoe soak`."""
    parser.add_argument("--backend", default="cute", choices=("torch", "triton", "cute"))
    parser.add_argument("--against", default="triton", choices=("torch", "triton", "cute"))
    parser.add_argument("--minutes", type=float, default=20.0, help="no call begins after this")
    parser.add_argument("--calls", type=int, help="how many calls at most, of each process")
    parser.add_argument("--seed", type=int, default=0, help="of the first call; each call's is one more")
    parser.add_argument("--processes", type=int, default=1, help="processes at once")
    parser.add_argument("--keep-going", action="store_true", help="go on after a call that failed")
    parser.add_argument("--tokens", type=int, default=1024, help="most tokens of a rank")
    parser.add_argument("--sizes", type=int, default=len(SIZES), help="how many (H, I) to draw from")
    parser.add_argument("--device", help="default: cuda where there is one, else cpu")
    parser.add_argument("--out", type=Path, help="write a record here, as JSON")


def soak_main(arguments: argparse.Namespace) -> int:
    """Run `megamoe soak` and return the exit status."""
    within("--tokens", arguments.tokens, 1)
    within("--sizes", arguments.sizes, 1, len(SIZES))
    within("--processes", arguments.processes, 1, 64)
    within("--calls", arguments.calls, 1)
    within("--minutes", arguments.minutes, 0)
    within("--seed", arguments.seed, 0, MOST_SEED)
    problem = backends.Problem.of(device_of(arguments.device), Recipe(), *SIZES[0])
    for name in (arguments.backend, arguments.against):
        backends.resolve(name, problem)  # refuses what would fail in every call
    if arguments.out is not None:
        writable("--out", arguments.out)
    record = run_processes(arguments) if arguments.processes > 1 else run(arguments)
    lowest = ", ".join(f"{name} {_text(level)}" for name, level in record["lowest_sqnr_db"].items())
    many = f" in {record['processes']} processes at once" if record["processes"] > 1 else ""
    print(
        f"{record['calls']} calls in {record['process_seconds']:.0f} s of processes{many}, "
        f"{len(record['failures'])} failed; lowest SQNR in dB: {lowest}"
    )
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    return 1 if record["failures"] or not record["calls"] else 0


class Ended(Exception):
    """The process was asked to end: the call under way does not count."""


class _Ending:
    """Turns SIGTERM into `Ended` inside a call, and into a wish between two: what is printed is also recorded."""

    def __init__(self) -> None:
        self.is_asked = self.is_in_call = False

    def __call__(self, *_: object) -> None:
        self.is_asked = True
        if self.is_in_call:
            raise Ended

    @contextlib.contextmanager
    def in_call(self) -> Iterator[None]:
        self.is_in_call = True
        try:
            yield
        finally:
            self.is_in_call = False


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[_Ending]:
    ending = _Ending()
    if threading.current_thread() is not threading.main_thread():
        yield ending
        return
    before = signal.signal(signal.SIGTERM, ending)
    try:
        yield ending
    finally:
        signal.signal(signal.SIGTERM, before)


def run(arguments: argparse.Namespace) -> Record:
    """Make calls in this process, and return its record, also where SIGTERM ends it early."""
    with _ended_by_sigterm() as ending:
        return _run(arguments, ending)


def _run(arguments: argparse.Namespace, ending: _Ending) -> Record:
    device = device_of(arguments.device)
    begin, seed = time.monotonic(), arguments.seed
    failures: list[str] = []
    lowest: dict[str, float] = {}
    equal: collections.Counter[str] = collections.Counter()
    covered: collections.Counter[str] = collections.Counter()
    while time.monotonic() - begin < 60 * arguments.minutes and not ending.is_asked:
        if arguments.calls is not None and seed - arguments.seed >= arguments.calls:
            break
        drawn = draw(seed, arguments.tokens, arguments.sizes)
        seed += 1
        try:
            with ending.in_call():
                outcome = compare(drawn, arguments.backend, arguments.against, device)
            lowest = {**lowest, **{name: min(lowest.get(name, v), v) for name, v in outcome.levels.items()}}
            equal.update(outcome.equal)
            failed = "; ".join(outcome.faults)
        except Ended:
            seed -= 1
            break
        except Exception as error:  # whatever it is, it is a finding
            failed = f"{type(error).__name__}: {error}"
        covered.update(drawn.traits())
        print(f"{'FAILED' if failed else 'ok'}  {drawn}{'  ' + failed if failed else ''}", flush=True)
        if failed:
            failures.append(f"{drawn}  {failed}")
            print(f"again: {repeat(arguments, seed - 1)}", flush=True)
            if not arguments.keep_going:
                break
    return {
        "megamoe": __version__,
        **environment(arguments.backend, device),
        "backend": arguments.backend,
        "against": arguments.against,
        "options": {name: getattr(arguments, name) for name in ("tokens", "sizes")},
        "processes": 1,
        "seeds": [[arguments.seed, seed - 1]] if seed > arguments.seed else [],
        "calls": seed - arguments.seed,
        "process_seconds": round(time.monotonic() - begin, 1),
        "failures": failures,
        "lowest_sqnr_db": {name: v if v < float("inf") else None for name, v in lowest.items()},
        "equal_bits": dict(equal),
        "covered": dict(sorted(covered.items())),
    }


def repeat(arguments: argparse.Namespace, seed: int) -> str:
    """The command that makes one call again."""
    options = f"--backend {arguments.backend} --against {arguments.against} --tokens {arguments.tokens}"
    return f"python -m megamoe soak {options} --sizes {arguments.sizes} --seed {seed} --calls 1"


def run_processes(arguments: argparse.Namespace) -> Record:
    """Make calls in several processes at once, each with seeds of its own, and return what they did together.

    The first process that fails ends the others, unless `--keep-going`.
    """
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        outs = [Path(folder) / f"{i}.json" for i in range(arguments.processes)]
        children = [
            subprocess.Popen([sys.executable, "-m", "megamoe", *_child_options(arguments, i, out)])
            for i, out in enumerate(outs)
        ]
        ended: list[int] = []
        try:
            while any(child.poll() is None for child in children):
                time.sleep(0.2)
                if not arguments.keep_going and any(child.poll() not in (None, 0) for child in children):
                    break
        finally:
            ended = [i for i, child in enumerate(children) if child.poll() is None]
            for i in ended:
                children[i].terminate()
            for child in children:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(timeout=LAST_CALL_S)
                child.kill()
                child.wait()
        records = [json.loads(out.read_text()) if out.exists() else None for out in outs]
    statuses = [child.returncode for child in children]
    return merge(records, statuses, time.monotonic() - begin, ended)


BY_US = (-signal.SIGTERM, -signal.SIGKILL)
"""Statuses of a process that was told to end before it listened, or did not end in time."""


def merge(
    records: Sequence[Record | None], statuses: Sequence[int], wall_seconds: float, ended: Sequence[int] = ()
) -> Record:
    """One record of what processes that ran at once did.

    Args:
        records: of each process, None: it was ended, or died, before it wrote one.
        statuses: exit statuses. wall_seconds: from the start of the first to the end of the last.
        ended: processes that were told to end. Whatever else died is a failure, also behind its record.
    """
    there = [record for record in records if record is not None]
    failures = [failure for record in there for failure in record["failures"]]
    lost = [i for i, record in enumerate(records) if record is None]
    for i, (record, status) in enumerate(zip(records, statuses, strict=True)):
        if i in ended and status in BY_US:
            continue
        if record is None:
            failures.append(f"process {i} died with status {status} and left no record")
        elif status not in (0, 1):  # 1: its failures are in the record
            failures.append(f"process {i} died with status {status} behind its record")
    if not there:
        return {
            "processes": len(records),
            "calls": 0,
            "process_seconds": 0.0,
            "failures": failures,
            "lowest_sqnr_db": {},
        }
    lowest: Record = {}
    equal: collections.Counter[str] = collections.Counter()
    covered: collections.Counter[str] = collections.Counter()
    for record in there:
        for name, level in record["lowest_sqnr_db"].items():
            levels = [v for v in (level, lowest.get(name)) if v is not None]
            lowest[name] = min(levels) if levels else None
        equal.update(record["equal_bits"])
        covered.update(record["covered"])
    return there[0] | {
        "processes": len(records),
        "processes_without_record": len(lost),
        "wall_seconds": round(wall_seconds, 1),
        "seeds": [pair for record in there for pair in record["seeds"]],
        "calls": sum(record["calls"] for record in there),
        "process_seconds": round(sum(record["process_seconds"] for record in there), 1),
        "failures": failures,
        "lowest_sqnr_db": lowest,
        "equal_bits": dict(equal),
        "covered": dict(sorted(covered.items())),
    }


def _child_options(arguments: argparse.Namespace, index: int, out: Path) -> list[str]:
    options = ["soak", "--seed", str(arguments.seed + index * SEEDS_A_PROCESS), "--out", str(out)]
    for name in ("backend", "against", "minutes", "tokens", "sizes", "calls", "device"):
        value = getattr(arguments, name)
        options += [] if value is None else [f"--{name}", str(value)]
    return [*options, "--keep-going"] if arguments.keep_going else options


def _text(level: float | None) -> str:
    return "equal" if level is None or level == float("inf") else f"{level:.1f}"
