"""The one error of this package, and the way its messages list files and keys."""

from __future__ import annotations

from collections.abc import Iterable

MAX_LISTED = 6


class CheckpointError(ValueError):
    """A checkpoint is missing something, holds something unknown or is malformed; the message names files and keys."""


def listed(names: Iterable[str]) -> str:
    """Names in quotes, the first few in full and the number of the rest."""
    ordered = list(names)
    shown = ", ".join(repr(name) for name in ordered[:MAX_LISTED])
    rest = len(ordered) - MAX_LISTED
    return f"{shown} and {rest} more" if rest > 0 else shown
