"""Workspaces that the fused calls of one size share, whoever the ranks are."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

from megamoe.errors import CapacityError, MegaMoERuntimeError, MegaMoETimeout, MegaMoEValueError, expected

SOURCE_SHIFT = 27
"""Row codes: source rank << 27 | token * K + slot."""


def check_tokens(max_tokens: int, top_k: int) -> None:
    """Refuse batches whose (token, slot) pairs do not fit a row code."""
    most = (1 << SOURCE_SHIFT) // top_k
    if max_tokens > most:
        next_step = "Split the batch, or raise the number of ranks."
        raise MegaMoEValueError(expected("x", f"at most {most} tokens a rank with K = {top_k}", max_tokens, next_step))


class Shared:
    """The workspaces of the ranks of this process, which calls of one size share, one after the other.

    Args:
        world: `cute_kernels`' LocalWorld or SymmetricWorld.
    """

    def __init__(self, world: Any) -> None:
        self._world = world
        self.workspaces = world.workspaces
        self.streams: Any = world.streams if len(world.workspaces) > 1 else None
        self._lock = threading.Lock()
        self._stream: int | None = None
        self._done = torch.cuda.Event()

    def close(self) -> None:
        """Give the memory back; over a group a collective."""
        self._world.close()

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Around every call: wait for the one before, if it ran on another stream; one host thread at a time.

        A call that is captured can wait for nothing outside its graph: capturing synchronises before.
        """
        with self._lock:
            if torch.cuda.is_current_stream_capturing():
                yield
                return
            stream = torch.cuda.current_stream()
            if self._stream not in (None, stream.cuda_stream):
                stream.wait_event(self._done)
            self._stream = stream.cuda_stream
            yield
            self._done.record()

    def check(self, call: str) -> None:
        """Raise what the calls before recorded; `call` is the last of them. Synchronises."""
        messages = self._errors()
        if not messages:
            return
        self._world.reset()
        text = "; ".join(messages)
        if "timeout" in text:
            raise MegaMoETimeout(f"{call}: {text}. Look for a rank that did not make this call.")
        if "overflow" in text:
            raise CapacityError(f"{call}: {text}. Raise the capacity.")
        raise MegaMoERuntimeError(f"{call}: {text}.")

    def _errors(self) -> list[str]:
        return [message for w in self.workspaces if (message := w.error()) is not None]
