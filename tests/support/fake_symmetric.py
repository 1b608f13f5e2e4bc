"""Ranks in several processes without a GPU: shared files stand for symmetric memory, gathers for the fused launches.

Workspaces are the real ones. A fused call gathers the arguments of all ranks, emulates the call of all, and returns
this rank's part, as `tests.support.fake_cute` does for ranks of one process.
"""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megamoe.backends.cute import CuteBackend
from tests.support import fake_cute

MARK = "symmetric-stand-in"
_paths: dict[int, str] = {}


def allocate(num_bytes: int, device: torch.device) -> torch.Tensor:
    handle, path = tempfile.mkstemp(prefix=MARK, dir="/dev/shm")
    os.close(handle)
    blob = torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
    blob.fill_(0xFF)  # garbage
    _paths[blob.data_ptr()] = path
    return blob


def map_peers(blob: torch.Tensor, group: dist.ProcessGroup) -> tuple[Any, list[int]]:
    mine, rank = _paths.pop(blob.data_ptr()), dist.get_rank(group)
    paths: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(paths, (mine, blob.numel()), group=group)
    peers = [
        blob if r == rank else torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
        for r, (path, size) in enumerate(paths)
    ]
    dist.barrier(group)
    os.unlink(mine)
    return peers, [peer.data_ptr() for peer in peers]


def num_mapped() -> int:
    """Blobs, own and peers', that this process has mapped."""
    with open("/proc/self/maps") as maps:
        return sum(MARK in line for line in maps)


def _gather(group: dist.ProcessGroup, value: Any) -> list[Any]:
    written = io.BytesIO()
    torch.save(value, written)  # plain pickles know no FP8
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, written.getvalue(), group=group)
    return [torch.load(io.BytesIO(theirs), weights_only=False) for theirs in everyone]


def _stand_ins(workspace: Any) -> list[Any]:
    if not hasattr(workspace, "stand_ins"):
        sizes = {name: getattr(workspace, name) for name in ("capacity_rows", "max_tokens", "top_k")}
        workspace.stand_ins = [SimpleNamespace(**sizes, scratch=None) for _ in range(workspace.num_ranks)]
    return workspace.stand_ins


def _rows(buffers: Any) -> Any:
    return SimpleNamespace(**{name: getattr(buffers, name) for name in ("codes", "p", "offs", "counts", "gate_up")})


def _over_groups(emulate: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """A fused call of `fake_cute` for ranks of one process, also for one rank of a group."""

    def call(workspaces: Sequence[Any], *lists: Sequence[Any], **options: Any) -> list[Any]:
        from cute_kernels.symmetric import SymmetricWorkspace

        (workspace, *others) = workspaces
        if others or not isinstance(workspace, SymmetricWorkspace):
            return emulate(workspaces, *lists, **options)
        plans = options.pop("plans", None)
        mine = ([_rows(v[0]) if hasattr(v[0], "codes") else v[0] for v in lists], plans and _rows(plans[0]))
        everyone = _gather(workspace.group, mine)
        every_list = [list(values) for values in zip(*(of_rank for of_rank, _ in everyone), strict=True)]
        if plans is not None:
            options["plans"] = [plan for _, plan in everyone]
        return [emulate(_stand_ins(workspace), *every_list, **options)[workspace.rank]]

    return call


def install(monkeypatch: pytest.MonkeyPatch) -> CuteBackend:
    """Make backend="cute" run on the CPU over groups too."""
    from cute_kernels import backward_launch, launch, symmetric

    backend = fake_cute.install(monkeypatch)
    monkeypatch.setattr(symmetric, "allocate", allocate)
    monkeypatch.setattr(symmetric, "map_peers", map_peers)
    monkeypatch.setattr(symmetric, "count_sms", lambda device: 132)
    monkeypatch.setattr(launch, "fused_forward", _over_groups(fake_cute.fused_forward))
    monkeypatch.setattr(backward_launch, "fused_backward", _over_groups(fake_cute.fused_backward))
    return backend
