"""Backends, what each can run, and which one "auto" takes: the first of cute, triton, torch that can."""

from __future__ import annotations

from typing import Literal

import torch.distributed as dist

from megamoe.backends.base import Backend, Problem
from megamoe.backends.cute import CuteBackend
from megamoe.backends.cute_groups import Sizes
from megamoe.backends.stepwise import StepwiseBackend, TritonBackend
from megamoe.errors import BackendUnavailable, MegaMoEValueError, expected

__all__ = [
    "BACKENDS",
    "Backend",
    "BackendName",
    "Problem",
    "Sizes",
    "check_name",
    "refuse",
    "release",
    "resolve",
    "why_not",
]

BackendName = Literal["auto", "torch", "triton", "cute"]

BACKENDS: dict[str, Backend] = {
    "cute": CuteBackend(),
    "triton": TritonBackend(),
    "torch": StepwiseBackend("torch", "megamoe.torch_steps"),
}
"""By name, in the order in which "auto" tries them."""


def check_name(name: str) -> None:
    """Refuse what is no backend."""
    if name != "auto" and name not in BACKENDS:
        raise MegaMoEValueError(expected("backend", f"'auto' or one of {', '.join(map(repr, BACKENDS))}", repr(name)))


def why_not(name: str, problem: Problem) -> str | None:
    """Why a backend cannot run a problem here; None if it can."""
    check_name(name)
    return None if name == "auto" else BACKENDS[name].why_not(problem)


def resolve(name: str, problem: Problem) -> Backend:
    """The backend that runs a problem.

    Args:
        name: "auto" for the fastest that can, or one by name, which is then used or refused, never replaced. Over a
            process group "auto" takes a fused backend only where symmetric memory is asked for.
        problem: what is to run.

    Raises:
        BackendUnavailable: the one asked for cannot run it; the message says why.
        MegaMoEValueError: no such backend.
    """
    check_name(name)
    if name != "auto":
        reason = BACKENDS[name].why_not(problem)
        if reason is not None:
            raise BackendUnavailable(
                f"backend: {name!r} does not run this: {reason}. backend='auto' picks one that does."
            )
        return BACKENDS[name].variant(problem)
    candidates = [b for b in BACKENDS.values() if b.auto_device in (None, problem.device_type)]
    if problem.world == "group" and problem.transport != "symmetric":
        candidates = [b for b in candidates if not b.is_fused]
    return next(backend for backend in candidates if backend.why_not(problem) is None).variant(problem)


def refuse(backend: Backend, group: dist.ProcessGroup, sizes: Sizes) -> None:
    """End the fused call that the other ranks of a group are about to make, in place of making it.

    Args:
        backend: that runs it; nothing is done for one without workspaces that the group shares.
        group: of the ranks.
        sizes: of the call; nothing is done where none of these sizes has been made.
    """
    if isinstance(backend, CuteBackend):
        backend.groups.refuse(group, sizes)


def release(group: dist.ProcessGroup | None = None) -> None:
    """Give back the memory that fused calls keep: those over a process group, before it is destroyed, or all others.

    Args:
        group: whose; None: of calls between ranks of this process, and between all-to-alls. These must have ended, and
            no CUDA graph may still be replayed that captured one.

    Effects: with a group a collective of its ranks, which waits for their calls. Later calls allocate again.
    """
    for backend in BACKENDS.values():
        if isinstance(backend, CuteBackend):
            if group is None:
                backend.release()
            else:
                backend.groups.release(group)
