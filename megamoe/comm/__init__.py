"""Ranks, and the rows that travel between them: virtual ranks, process groups, dispatch and combine."""

from megamoe.comm.events import CommEvent
from megamoe.comm.explicit import Combined, Dispatched, combine, dispatch
from megamoe.comm.handle import DispatchLayout, DispatchOptions, Handle, TokensPerExpert, get_dispatch_layout
from megamoe.comm.local_world import LocalWorld
from megamoe.comm.transport import GroupTransport, LocalTransport, Transport, as_transport
from megamoe.comm.wires import Hierarchy, TensorParallel

__all__ = [
    "Combined",
    "CommEvent",
    "DispatchLayout",
    "DispatchOptions",
    "Dispatched",
    "GroupTransport",
    "Handle",
    "Hierarchy",
    "LocalTransport",
    "LocalWorld",
    "TensorParallel",
    "TokensPerExpert",
    "Transport",
    "as_transport",
    "combine",
    "dispatch",
    "get_dispatch_layout",
]
