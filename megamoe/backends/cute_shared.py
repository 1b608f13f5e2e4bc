"""Workspaces that fused calls of one size share, whoever the ranks are, and their errors in this package's types."""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from megamoe.errors import (
    CapacityError,
    MegaMoEError,
    MegaMoERuntimeError,
    MegaMoETimeout,
    MegaMoEValueError,
    expected,
)

SOURCE_SHIFT = 27
"""Row codes: source rank << 27 | token * K + slot."""

TIMEOUT_VARIABLE = "MEGAMOE_TIMEOUT_S"


def watchdog() -> dict[str, float]:
    """The longest wait of a fused call for another rank, where the environment says it (`MEGAMOE_TIMEOUT_S`)."""
    text = os.environ.get(TIMEOUT_VARIABLE, "")
    if not text:
        return {}
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < math.inf:
        raise MegaMoEValueError(expected(TIMEOUT_VARIABLE, "a positive number of seconds", repr(text)))
    return {"timeout_s": seconds}


def check_tokens(max_tokens: int, top_k: int) -> None:
    """Refuse batches whose (token, slot) pairs do not fit a row code."""
    most = (1 << SOURCE_SHIFT) // top_k
    if max_tokens > most:
        next_step = "Split the batch, or raise the number of ranks."
        raise MegaMoEValueError(expected("x", f"at most {most} tokens a rank with K = {top_k}", max_tokens, next_step))


def oldest_to_drop(kept: Mapping[Any, Shared], most: int) -> Any:
    """Which of the workspaces kept, oldest first, makes room for one more; None if none must go, or may.

    Those of a captured call stay, however many: its graph is replayed on them. While a call is captured all stay, since
    a graph cannot wait for the work on another.
    """
    if torch.cuda.is_current_stream_capturing():
        return None
    droppable = [key for key, shared in kept.items() if not shared.is_captured]
    return droppable[0] if len(droppable) >= most else None


class Shared:
    """The workspaces of the ranks of this process, which calls of one size share, one after the other.

    Args:
        world: `cute_kernels`' LocalWorld or SymmetricWorld.

    Attributes:
        is_captured: a CUDA graph holds a call on them.
    """

    def __init__(self, world: Any) -> None:
        self._world = world
        self.workspaces = world.workspaces
        self.streams: Any = world.streams if len(world.workspaces) > 1 else None
        self.is_captured = False
        self._lock = threading.Lock()
        self._callers: dict[int, torch.cuda.Stream] = {}

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Around every call: one host thread at a time; what earlier calls recorded is raised in our types."""
        with self._lock, self._translated():
            self.is_captured |= torch.cuda.is_current_stream_capturing()
            stream = torch.cuda.current_stream()
            self._callers[stream.cuda_stream] = stream
            yield

    def retire(self) -> None:
        """Before the memory goes back to the allocator, which gives it to the streams it was made on at once.

        It was made in calls, whose streams wait for the last call here, whichever stream that ran on.
        """
        for stream in self._callers.values():
            for workspace in self.workspaces:
                workspace.follow(stream)

    def check(self) -> None:
        """Raise what the calls so far recorded. Synchronises."""
        with self._translated():
            self._world.check()

    def close(self) -> None:
        """Give the memory back; over a group a collective."""
        self._world.close()

    def recover(self) -> None:
        """After a call that was given up: what the next one needs to be right."""
        self._world.reset()

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        from cute_kernels.status import CallError

        try:
            yield
        except CallError as error:
            if error.needs_reset:
                self.recover()
            raise _our_error(error) from None


def _our_error(error: Any) -> MegaMoEError:
    """A CallError in this package's types."""
    from cute_kernels import status

    kinds = {
        status.TIMEOUT: MegaMoETimeout,
        status.ABORTED: MegaMoETimeout,
        status.OVERFLOW: CapacityError,
        status.BAD_IDS: MegaMoEValueError,
    }
    return kinds.get(error.code, MegaMoERuntimeError)(str(error))
