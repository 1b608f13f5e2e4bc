"""Options of the commands: numbers, lists, devices and files, refused by the name of their option."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from megamoe.errors import MegaMoEValueError, expected

MOST_SEED = 2**63 - 1
"""What torch takes."""


def within(option: str, value: float | None, low: float, high: float | None = None) -> None:
    """Refuse a number outside [low, high]; None stands for an option that was not given.

    Raises:
        MegaMoEValueError: it is outside, or not a number.
    """
    if value is not None and not (low <= value and (high is None or value <= high)):  # NaN is outside
        raise MegaMoEValueError(expected(option, f"at least {low}" if high is None else f"{low} to {high}", value))


def integers(option: str, text: str) -> tuple[int, ...]:
    """A comma-separated list of integers."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise MegaMoEValueError(expected(option, "integers separated by commas", repr(text))) from None


def numbers(option: str, text: str) -> tuple[float, ...]:
    """A comma-separated list of numbers."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise MegaMoEValueError(expected(option, "numbers separated by commas", repr(text))) from None


def choices(option: str, text: str, allowed: Sequence[str]) -> list[str]:
    """A comma-separated selection."""
    chosen = text.split(",")
    if not set(chosen) <= set(allowed):
        raise MegaMoEValueError(expected(option, f"of {', '.join(allowed)}", repr(text)))
    return chosen


def device_of(text: str | None) -> torch.device:
    """The device that `--device` names; None: cuda where there is one, else cpu."""
    try:
        device = torch.device(text or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise MegaMoEValueError(expected("--device", "cpu, cuda or cuda:N", repr(text))) from None
    num_cuda = torch.cuda.device_count() if device.type == "cuda" else 0
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and (device.index or 0) >= num_cuda):
        here = "cpu" + (f" or one of {num_cuda} CUDA devices" if num_cuda else ", as torch sees no CUDA device")
        raise MegaMoEValueError(expected("--device", here, repr(text)))
    return device


def writable(option: str, path: str | Path) -> Path:
    """A path as one where a file can be written, found out before anything runs. Its folder is made.

    Raises:
        MegaMoEValueError: it cannot.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        with path.open("a"):
            pass
        if is_new:
            path.unlink(missing_ok=True)  # another rank may be trying it too
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise MegaMoEValueError(expected(option, "a file that can be written", f"{str(path)!r}: {why}")) from error
    return path


def refuse_given(
    args: argparse.Namespace,
    add_arguments: Callable[[argparse.ArgumentParser], None],
    options: Mapping[str, str],
    where: str,
) -> None:
    """Refuse options that mean nothing in this way of running a command, where they are not what they are by default.

    Args:
        args: as parsed. add_arguments: of the command. options: by their spelling their fields in `args`.
        where: how the command runs.
    """
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    for option, field in options.items():
        value = getattr(args, field)
        if value != parser.get_default(field):
            raise MegaMoEValueError(expected(option, f"not to be given {where}", value))
