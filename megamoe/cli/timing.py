"""How times are measured: interleaved rounds with a flushed L2 cache, then back-to-back launches."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import torch

FLUSH_BYTES = 256 << 20
"""More than any L2 cache holds."""
HEAD_START_CYCLES = 2_000_000
"""About a millisecond, in which the host issues all launches of a call, so that its own time is not measured."""

BETWEEN_READINGS_S = 0.02
"""From one reading of the clock to the next, beside what a reading takes."""


@dataclasses.dataclass(frozen=True)
class Timing:
    """Times of one variant in microseconds.

    Attributes:
        us: median of single launches, each behind a flush of the L2 cache.
        us_min, us_max: of the same launches.
        us_sustained: mean of back-to-back launches, at the clock that the card holds under this load.
        clock_mhz: this clock, the median of readings during these launches; None where none fell into them.
    """

    us: float
    us_min: float
    us_max: float
    us_sustained: float
    clock_mhz: int | None = None


def time_variants(
    variants: Mapping[str, Callable[[], object]],
    device: torch.device,
    *,
    rounds: int = 10,
    sustained_s: float = 0.3,
    brief: Container[str] = (),
    progress: Callable[[str], None] = lambda name: None,
) -> dict[str, Timing]:
    """Time functions against each other: one call of each a round, in another order every round.

    A power-capped card is slower behind heavy work, so what ran before a call must not always be the same. Single
    launches wait on the device until the host has issued them.

    Args:
        variants: what to time; each was run before, so that nothing is compiled or allocated for the first time.
        device: a CUDA device (events on the current stream), or the CPU (wall time, nothing to flush).
        rounds: launches of each. sustained_s: seconds of back-to-back launches of each; 0: none, `us` stands for it.
        brief: names for which a sixth of these seconds will do.
        progress: told the name of what has just been done.

    Returns:
        The times by name. Effects: synchronises with the device.
    """
    samples: dict[str, list[float]] = {name: [] for name in variants}
    flush = torch.empty(FLUSH_BYTES if device.type == "cuda" else 0, dtype=torch.uint8, device=device)
    for number in range(rounds):
        order = list(variants)
        random.Random(number).shuffle(order)
        for name in order:
            flush.zero_()
            samples[name].append(_once(variants[name], device))
            progress(name)
    times = {}
    for name, run in variants.items():
        us = statistics.median(samples[name])
        seconds = sustained_s / 6 if name in brief else sustained_s
        count = max(1, round(seconds * 1e6 / max(us, 1.0)))
        sustained, clock = us, None
        if sustained_s:
            with sampled_clock(device) as readings:
                sustained = _repeated(run, count, device)
            clock = median_clock(readings)
        times[name] = Timing(us, min(samples[name]), max(samples[name]), sustained, clock)
        progress(name)
    return times


def _once(run: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda._sleep(HEAD_START_CYCLES)
    return _repeated(run, 1, device)


def _repeated(run: Callable[[], object], count: int, device: torch.device) -> float:
    if device.type != "cuda":
        begin = time.perf_counter()
        for _ in range(count):
            run()
        return (time.perf_counter() - begin) * 1e6 / count
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(count):
        run()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) * 1e3 / count


def captured(run: Callable[[], object], device: torch.device, pool: Any = None) -> Callable[[], object] | None:
    """A function that replays `run` as a CUDA graph, so that launches cost the host nothing; None where it cannot.

    Args:
        run: was run before; works on the same memory whenever it is called. device: where it runs.
        pool: of `torch.cuda.graph_pool_handle`, for graphs whose results nobody reads and which never run at once.
    """
    if device.type != "cuda":
        return None
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize(device)
    try:
        with torch.cuda.graph(graph, pool=pool):
            run()
    except RuntimeError:  # it synchronises, or copies from pageable memory
        torch.cuda.synchronize(device)
        return None
    return graph.replay


@contextlib.contextmanager
def sampled_clock(device: torch.device) -> Iterator[list[int]]:
    """Readings of the SM clock while the block runs; one that ends behind it doesn't count."""
    readings: list[int] = []
    is_over = threading.Event()

    def read() -> None:
        while not is_over.is_set():
            clock = clock_mhz(device)
            if clock is None:
                return
            if not is_over.is_set():
                readings.append(clock)
            is_over.wait(BETWEEN_READINGS_S)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield readings
    finally:
        is_over.set()
        reader.join()


def median_clock(readings: Sequence[int]) -> int | None:
    """Of readings of a clock in MHz; None without any."""
    return round(statistics.median(readings)) if readings else None


def clock_mhz(device: torch.device) -> int | None:
    """The SM clock of a CUDA device now, as nvidia-smi reads it; None where there is none."""
    if device.type != "cuda":
        return None
    uuid = torch.cuda.get_device_properties(device).uuid  # nvidia-smi counts devices that this process may not see
    query = ["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits", f"--id=GPU-{uuid}"]
    try:
        return int(subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout.split()[0])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None
