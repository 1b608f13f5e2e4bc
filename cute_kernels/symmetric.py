"""Workspaces of ranks in several processes: blobs in torch's symmetric memory, mapped by every process of a group.

    workspace = SymmetricWorkspace(group, hidden=H, num_experts=E, top_k=K, max_tokens=T_max, capacity_rows=P)
    result = fused_forward([workspace], [x], [topk_ids], [topk_weights], [weights])[0]    # this process's rank
    workspace.close()                                                                     # before the group goes

One process owns one rank and one GPU. Plain loads, stores and bulk copies reach the peers; multicast is never used.
"""

from __future__ import annotations

import os
import weakref
from typing import Any

import torch
import torch.distributed as dist

from cute_kernels.launch import Workspace

__all__ = ["SymmetricWorkspace", "SymmetricWorld"]

MULTICAST_VARIABLE = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


class SymmetricWorkspace(Workspace):
    """The workspace of this process's rank, whose blob all processes of the group have mapped. A collective.

    Args:
        group: of the expert-parallel ranks, all on one node, one GPU each.
        arguments: as of Workspace, less num_ranks and rank; equal on all ranks. num_ctas: None: all SMs of the GPU less
            reserve_sms, since each rank has one of its own.

    Raises:
        ValueError: on every rank, where arguments differ between ranks. RuntimeError: torch cannot map a peer's memory.

    Effects: synchronises host and device of all ranks. Sets TORCH_SYMM_MEM_DISABLE_MULTICAST=1 in the environment where
    it is not set. Nothing refers to the memory but this object: once closed or deleted on all ranks, it is free.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        num_ctas: int | None = None,
        reserve_sms: int = 0,
        device: torch.device | None = None,
        **arguments: Any,
    ) -> None:
        os.environ.setdefault(MULTICAST_VARIABLE, "1")
        num_ctas = count_sms(device) - reserve_sms if num_ctas is None else num_ctas
        self._group = weakref.ref(group)
        self._handle: Any = None
        ranks = {"num_ranks": dist.get_world_size(group), "rank": dist.get_rank(group)}
        facts = {**arguments, "num_ctas": num_ctas, "group": dist.get_process_group_ranks(group)}
        check_equal(group, facts)
        super().__init__(num_ctas=num_ctas, device=device, **ranks, **arguments)
        _synchronize(self.device)  # the flags are zero before any rank can pass the rendezvous
        self._handle, addresses = map_peers(self.blob, group)
        self.connect(addresses)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group, None once it is gone: a workspace does not keep it alive."""
        return self._group()

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        return allocate(num_bytes, self.device)

    def reset(self) -> None:
        """After an error: zeroes flags, headers and counters. A collective; it waits for the launches of all ranks."""
        assert self.group is not None, "its group is gone"
        _synchronize(self.device)
        barrier(self.group, self.device)  # no rank's launch runs any more
        super().reset()
        _synchronize(self.device)
        barrier(self.group, self.device)  # no rank launches before all are zero

    def close(self) -> None:
        """Gives the memory back, once no rank uses it. A collective; a second call does nothing.

        A rank that cannot meet the others (its group is gone) lets go of its memory all the same; what peers have
        mapped is freed when the last of them lets go.
        """
        group = self.group
        try:
            if group is not None and self._handle is not None:
                _synchronize(self.device)
                barrier(group, self.device)
        finally:
            self._handle = None
            super().close()


class SymmetricWorld:
    """What `LocalWorld` is for virtual ranks: this process's workspace as a list of one. Arguments as there."""

    streams = None

    def __init__(self, group: dist.ProcessGroup, **arguments: Any) -> None:
        self.workspaces: list[Workspace] = [SymmetricWorkspace(group, **arguments)]

    def reset(self) -> None:
        """Of all ranks, as `SymmetricWorkspace.reset`."""
        self.workspaces[0].reset()

    def check(self) -> None:
        """Raises what the calls so far recorded on this rank: after a failed call every rank has something. Waits."""
        self.workspaces[0].check()

    def close(self) -> None:
        """Of all ranks, as `SymmetricWorkspace.close`."""
        self.workspaces[0].close()

    def __enter__(self) -> SymmetricWorld:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_equal(group: dist.ProcessGroup, facts: dict[str, Any]) -> None:
    """Refuses, on all ranks alike, arguments that differ between ranks. A collective."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, facts, group=group)
    first = everyone[0]
    different = [
        f"{name}: expected the value of rank 0, {first[name]}, on every rank, got {theirs.get(name)} on rank {rank}"
        for rank, theirs in enumerate(everyone)
        for name in first
        if theirs.get(name) != first[name]
    ]
    if different:
        raise ValueError("; ".join(different))


# ---------------------------------------------------------------- torch's symmetric memory, the only calls into it


def allocate(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Memory that `map_peers` can share: an allocation of its own, in no pool, so that it is freed with the tensor."""
    from torch.distributed._symmetric_memory import _SymmetricMemory

    return _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)


def map_peers(blob: torch.Tensor, group: dist.ProcessGroup) -> tuple[Any, list[int]]:
    """(what keeps the mappings alive, the address of every rank's blob here). A collective, and a barrier."""
    from torch.distributed import _symmetric_memory

    handle = _symmetric_memory.rendezvous(blob, group)
    addresses = [int(address) for address in handle.buffer_ptrs]
    rank = dist.get_rank(group)
    if addresses[rank] != blob.data_ptr():
        raise RuntimeError(
            f"rendezvous: expected this rank's own blob at {blob.data_ptr():#x}, got {addresses[rank]:#x}. Report the "
            f"version of torch, {torch.__version__}."
        )
    return handle, addresses


def barrier(group: dist.ProcessGroup, device: torch.device) -> None:
    """Waits, on the host, until every rank is here."""
    on = {"device_ids": [device.index]} if dist.get_backend(group) == "nccl" else {}
    dist.barrier(group, **on)
    _synchronize(device)


def count_sms(device: torch.device | None) -> int:
    """Of this process's GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
