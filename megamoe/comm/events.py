"""Events: when the tensors of an asynchronous dispatch or combine are ready, and the stream on which it runs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence

import torch


class CommEvent:
    """A point in the work of a CUDA stream; on the CPU, where calls end when they return, a point long past.

    Args:
        event: what was recorded, or None.
        tensors: results that were made on that stream; the allocator must learn who uses them.
    """

    def __init__(self, event: torch.cuda.Event | None = None, tensors: Sequence[torch.Tensor] = ()) -> None:
        self.event, self.tensors = event, tuple(tensors)

    @classmethod
    def record(cls, device: torch.device, tensors: Sequence[torch.Tensor] = ()) -> CommEvent:
        """The present point of the current stream of `device`: a `previous_event` for dispatch and combine."""
        if device.type != "cuda":
            return cls()
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        return cls(event, tensors)

    def current_stream_wait(self, device: torch.device | None = None) -> None:
        """Let the current stream of `device` (None: of the event's own) wait for it. No host synchronisation."""
        if self.event is None:
            return
        for tensor in self.tensors:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
        torch.cuda.current_stream(self.event.device if device is None else device).wait_event(self.event)


@functools.cache
def _comm_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def comm_stream(inputs: Sequence[torch.Tensor], is_async: bool, previous_event: CommEvent | None) -> Iterator[None]:
    """Where a call runs: the current stream, or a stream of its own behind `previous_event` (None: all work so far).

    Args:
        inputs: all tensors that the call reads, the first one on its device: the allocator must learn who uses them.
        is_async, previous_event: as for dispatch and combine.
    """
    device = inputs[0].device
    if device.type != "cuda":
        yield
        return
    if not is_async:
        if previous_event is not None:
            previous_event.current_stream_wait(device)
        yield
        return
    start = previous_event or CommEvent.record(device)
    with torch.cuda.stream(_comm_stream(device)):
        start.current_stream_wait(device)
        for tensor in inputs:
            tensor.record_stream(_comm_stream(device))
        yield
