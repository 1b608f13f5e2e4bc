"""Ranks, and the rows that travel between them: virtual ranks, process groups, dispatch and combine."""

from megamoe.comm.local_world import LocalWorld
from megamoe.comm.transport import GroupTransport, LocalTransport, Transport, as_transport
from megamoe.comm.wires import Hierarchy, TensorParallel

__all__ = [
    "GroupTransport",
    "Hierarchy",
    "LocalTransport",
    "LocalWorld",
    "TensorParallel",
    "Transport",
    "as_transport",
]
