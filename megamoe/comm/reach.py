"""How a fused kernel reaches the ranks of a process group: which ways there are, and where symmetric memory ends."""

from __future__ import annotations

import importlib.util
import os
from typing import Any, Literal, get_args

import torch.distributed as dist

from megamoe.comm.local_world import LocalWorld
from megamoe.errors import MegaMoEValueError, expected

TransportName = Literal["symmetric", "nccl"]
"""How the fused kernel is joined over a process group: through memory that all ranks have mapped, or by all-to-alls."""


def why_not_symmetric(world: Any) -> str | None:
    """Why symmetric memory cannot join the ranks of a world, as far as this process can tell alone; None if it can.

    Where a launcher says how many processes a node has (LOCAL_WORLD_SIZE, as torchrun does), the ranks of a group must
    be of one node. Nothing is exchanged: ranks that turn out not to reach each other's memory fail when it is mapped.
    """
    if world is None or isinstance(world, LocalWorld):
        return "there is no process group"
    if not isinstance(world, dist.ProcessGroup):
        return f"it joins the ranks of one process group, not of a {type(world).__name__}"
    if importlib.util.find_spec("torch.distributed._symmetric_memory") is None:
        return "this torch has no symmetric memory"
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    if local.isdecimal() and int(local) > 0:
        nodes = sorted({rank // int(local) for rank in dist.get_process_group_ranks(world)})
        if len(nodes) > 1:
            return f"its ranks are on {len(nodes)} nodes ({local} processes each), and it joins those of one"
    return None


def check_transport(transport: Any, world: Any) -> None:
    """Refuse what is no transport, or not one of this world.

    Raises:
        MegaMoEValueError: it is neither a name nor None, or symmetric memory cannot join the ranks.
    """
    if transport is None:
        return
    if transport not in get_args(TransportName):
        raise MegaMoEValueError(expected("transport", "'symmetric', 'nccl' or None", repr(transport)))
    if world is None or isinstance(world, LocalWorld):
        next_step = "Leave it out: virtual ranks share one process."
        raise MegaMoEValueError(expected("transport", "None without a process group", repr(transport), next_step))
    reason = why_not_symmetric(world) if transport == "symmetric" else None
    if reason is not None:
        next_step = f"{reason[0].upper()}{reason[1:]}. Use transport='nccl'."
        raise MegaMoEValueError(expected("transport", "'nccl' for this world", repr(transport), next_step))
