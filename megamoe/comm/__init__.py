"""Ranks, and the rows that travel between them: virtual ranks, process groups, dispatch and combine.

    sent = dispatch(x, topk_ids, topk_weights, group, options=DispatchOptions(num_experts=256))
    y = my_experts(sent.recv_x, sent.recv_weights, sent.tokens_per_expert.aligned)
    out = combine(y, sent.handle).x

For those who know DeepEP: `num_experts`, `expert_alignment` and `num_worst_tokens` are in `DispatchOptions`, which also
says whether rows are expanded; the buffer is the `world` (a process group, or virtual ranks); `EventOverlap` and
`Buffer.capture()` are `CommEvent` and `CommEvent.record(device)`. A handle serves both directions: the calls
are differentiable, so a backward needs none of its own.
"""

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
