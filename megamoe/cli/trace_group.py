"""`megamoe trace` under torchrun: the fused forward of every rank on its own GPU, on one clock.

torchrun --nproc-per-node=2 -m megamoe trace --shape V3 --tokens 8192
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import torch
import torch.distributed as dist

from megamoe.backends.cute_groups import needed
from megamoe.cli.bench_group import GROUP_SHAPES, Share
from megamoe.cli.group_run import Member, backend_of
from megamoe.cli.problem import ProblemSpec, shape_of, spread
from megamoe.comm import GroupTransport
from megamoe.comm.transport import layer_facts
from megamoe.recipe import Recipe


def spec_of(arguments: argparse.Namespace, num_ranks: int) -> ProblemSpec:
    """What the options name, with as many tokens on every rank; T of a shape is that of each."""
    shape = shape_of("--shape", arguments.shape, arguments.tokens, GROUP_SHAPES)
    if arguments.tokens is None:
        shape = dataclasses.replace(shape, num_tokens=shape.num_tokens * num_ranks)
    return spread(shape, num_ranks, option="--nproc-per-node")


def traced_over(member: Member, spec: ProblemSpec, saves: bool) -> list:
    """The events of all ranks in one launch each, on rank 0 (elsewhere those of all ranks too). A collective.

    GPUs have clocks of their own: the end of the wait for all headers, which the last of them ends everywhere within
    microseconds, is taken for the same instant on all ranks.
    """
    from cute_kernels import launch, trace
    from cute_kernels.symmetric import SymmetricWorkspace
    from cute_kernels.tile_config import TileConfig

    recipe = Recipe()
    backend = backend_of("cute", spec, recipe, member, "symmetric")
    share = Share(member, spec)
    experts = share.experts(backend, recipe)
    transport = GroupTransport(member.group, backend.steps)
    _, rows = needed(transport, share.ids, spec.num_experts, None, layer_facts(spec.hidden))
    sizes: dict[str, Any] = dict(hidden=spec.hidden, num_experts=spec.num_experts, top_k=spec.top_k)
    sizes |= dict(max_tokens=max(spec.num_tokens), capacity_rows=rows, device=member.device)
    with SymmetricWorkspace(member.group, **sizes) as workspace:
        stamps = torch.zeros(trace.num_words(workspace.num_ctas), dtype=torch.int64, device=member.device)
        inputs = [share.x], [share.ids], [share.p], [experts.fused]
        config = dataclasses.replace(TileConfig(), trace=True)
        for _ in range(4):  # the last one is kept
            stamps.zero_()
            torch.cuda.synchronize()
            dist.barrier(member.group, device_ids=[member.device.index or 0])
            launch.fused_forward([workspace], *inputs, config=config, traces=[stamps], save=saves)
            torch.cuda.synchronize()
        workspace.check()
        mine = trace.events(stamps, workspace.num_ctas, member.rank * workspace.num_ctas)
    everyone = member.gather([dataclasses.astuple(event) for event in mine])
    headers = trace.NAMES[trace.WAIT_HEADERS]
    return on_one_clock([[trace.Event(*event) for event in theirs] for theirs in everyone], headers)


def on_one_clock(events: list[list], same: str) -> list:
    """Events of all ranks, each rank's shifted so that its last event of kind `same` ends when rank 0's does."""
    marks = [max(e.end_ns for e in of_rank if e.what == same) for of_rank in events]
    return [
        dataclasses.replace(e, begin_ns=e.begin_ns - mark + marks[0], end_ns=e.end_ns - mark + marks[0])
        for of_rank, mark in zip(events, marks, strict=True)
        for e in of_rank
    ]
