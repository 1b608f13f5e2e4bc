"""Weight gradients that are not finished when a backward returns: on another stream, or when the caller says so."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import Protocol, TypeAlias

import torch
from torch import nn

from megamoe.errors import MegaMoERuntimeError, expected
from megamoe.overlap import WgradMode

WeightJob: TypeAlias = Callable[["torch.Tensor | None", "torch.Tensor | None", bool], None]
"""Computes one rank's dW13 and dW2 into the two tensors (None: not wanted); True: adds to what is there."""


class HasWeights(Protocol):
    """A module with the experts' weights."""

    w13: nn.Parameter
    w2: nn.Parameter


@dataclasses.dataclass(frozen=True)
class Later:
    """Who takes the weight gradients of a backward to compute them later.

    Attributes:
        w13, w2: which ones are wanted.
        take: is given each local rank's job, in the order of ranks. With the last one they may start.
        is_beside: whether they run beside other kernels, which want SMs: then a CTA should take one task and end.
    """

    w13: bool
    w2: bool
    take: Callable[[WeightJob], None]
    is_beside: bool = False


@dataclasses.dataclass(frozen=True)
class _Call:
    """A backward's weight gradients: wanted ones, and each local rank's job."""

    wants: tuple[bool, bool]
    jobs: list[WeightJob]


class DeferredWgrad:
    """The weight gradients that a module's backwards leave, in their order.

    Args:
        experts: has the parameters `w13` and `w2`.
        mode: "stream" or "delayed".

    The bits are those of "inline": a gradient is computed in the parameter's dtype and then added to `.grad`, as
    autograd does it. Into an fp32 or bf16 `main_grad` the kernels add themselves. Hooks that wait for the parameters'
    gradients don't run.
    """

    def __init__(self, experts: HasWeights, mode: WgradMode) -> None:
        self._experts, self.mode = experts, mode
        self._waiting: collections.deque[_Call] = collections.deque()
        self._running: list[_Call] = []

    def __len__(self) -> int:
        """Backwards whose weight gradients are still to be computed."""
        return len(self._waiting)

    def reached(self) -> tuple[bool, bool]:
        """Whether the backward that runs is to reach (w13, w2): `autograd.grad` may ask for others only.

        Raises:
            MegaMoERuntimeError: `autograd.grad` asks for one of them, whose gradient would come too late.
        """
        wanted = []
        for name, parameter in (("w13", self._experts.w13), ("w2", self._experts.w2)):
            if not parameter.requires_grad:
                wanted.append(False)
                continue
            try:
                node = torch.autograd.graph.get_gradient_edge(parameter).node
                wanted.append(torch._C._will_engine_execute_node(node))
            except RuntimeError as error:
                got = f"{self.mode!r} with autograd.grad(..., {name})"
                raise MegaMoERuntimeError(expected("overlap.wgrad", "'inline' here", got, "Take 'inline'.")) from error
        return wanted[0], wanted[1]

    def later(self, w13: bool, w2: bool, num_jobs: int) -> Later:
        """What one backward hands its jobs to, of which there are `num_jobs`, one for each local rank."""
        call = _Call((w13, w2), [])

        def take(job: WeightJob) -> None:
            call.jobs.append(job)
            if len(call.jobs) == num_jobs:
                self._add(call)

        return Later(w13, w2, take, self.mode == "stream")

    def _add(self, call: _Call) -> None:
        """Queue a backward's jobs; "stream" starts them, behind what is on the caller's stream by now."""
        self._waiting.append(call)
        if self.mode != "stream":
            return
        if not self._experts.w13.is_cuda:
            self.run()
            return
        stream = _side_stream(self._experts.w13.device)
        stream.wait_stream(torch.cuda.current_stream(self._experts.w13.device))
        with torch.cuda.stream(stream):
            self.run()
        self._running.append(call)  # the operands belong to the stream until it has been joined
        torch.autograd.Variable._execution_engine.queue_callback(self._join)

    def _join(self) -> None:
        """The end of a backward: the caller's stream waits for the gradients."""
        device = self._experts.w13.device
        torch.cuda.current_stream(device).wait_stream(_side_stream(device))
        self._running.clear()

    def run(self) -> None:
        """Compute what waits, oldest first, on the current stream."""
        while self._waiting:
            call = self._waiting.popleft()
            self._compute(call)

    def _compute(self, call: _Call) -> None:
        parameters = (self._experts.w13, self._experts.w2)
        targets = [_Target(p) if want else None for p, want in zip(parameters, call.wants, strict=True)]
        num_ranks = len(call.jobs)
        for accumulate in (False, True):  # a job adds to both or to neither
            into = [t.into if t is not None and t.adds == accumulate else None for t in targets]
            if all(t is None for t in into):
                continue
            parts = [[None] * num_ranks if t is None else list(t.chunk(num_ranks)) for t in into]
            for i, job in enumerate(call.jobs):
                job(parts[0][i], parts[1][i], accumulate)
        for target in targets:
            if target is not None:
                target.finish()


@functools.lru_cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all layers on a device, so that they share its memory; of the lowest priority that there is."""
    return torch.cuda.Stream(device, priority=0)


class _Target:
    """Where a parameter's gradient goes: straight into main_grad or a new .grad, or through a tensor beside .grad."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self.parameter = parameter
        main = getattr(parameter, "main_grad", None)
        direct = (torch.float32, torch.bfloat16)
        if isinstance(main, torch.Tensor) and main.dtype in direct and main.is_contiguous():
            self.into, self.adds, self.total = main, True, None
            return
        self.total = main if isinstance(main, torch.Tensor) else parameter.grad
        self.adds = False
        dtype = parameter.dtype if parameter.dtype in direct else torch.float32
        self.into = torch.empty(parameter.shape, dtype=dtype, device=parameter.device)

    def finish(self) -> None:
        if self.adds:
            return
        if self.total is None:
            self.parameter.grad = self.into.to(self.parameter.dtype)
        else:
            self.total.add_(self.into.to(self.total.dtype))


def refuse_managed(experts: HasWeights) -> None:
    """Refuse deferred weight gradients where they would never reach who manages the parameters.

    Raises:
        MegaMoERuntimeError: while torch.compile traces (without fullgraph the layer then runs as it is); inside
            DistributedDataParallel; FSDP's sharded parameters; tensor hooks on the parameters, which would get None.
    """
    reason = None
    if torch.compiler.is_compiling():
        reason = "a call that is compiled"
    elif getattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", None) is not None:
        reason = "parameters of DistributedDataParallel"
    elif getattr(experts, "_is_fsdp_managed_module", False):  # while it runs, its parameters are whole and plain
        reason = "parameters that FSDP shards"
    elif any(parameter._backward_hooks for parameter in (experts.w13, experts.w2)):
        reason = "hooks on the parameters"
    if reason is not None:
        raise MegaMoERuntimeError(
            expected("overlap.wgrad", "'inline' here", f"'stream' or 'delayed' with {reason}", "Take 'inline'.")
        )
