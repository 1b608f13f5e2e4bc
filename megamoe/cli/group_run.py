"""Commands under torchrun: every process is one rank of a process group, and rank 0 judges and prints.

    torchrun --nproc-per-node=8 -m megamoe verify --backend cute --transport symmetric

One GPU a process over NCCL, or CPU processes over gloo.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import io
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megamoe import backends
from megamoe.backends import Backend
from megamoe.cli.problem import Problem, ProblemSpec, make_problem
from megamoe.cli.stages import KINDS, Value, Verdict, emulate, have_same_bits, judge, run_oracle, run_values
from megamoe.comm import GroupTransport
from megamoe.comm.reach import TransportName, check_transport, why_not_symmetric
from megamoe.errors import MegaMoEValueError, expected
from megamoe.recipe import Recipe

TIMEOUT = datetime.timedelta(minutes=10)
"""Of the group: first calls compile, and not on all ranks at the same time."""


def launched() -> bool:
    """Whether this process is one of those that torchrun, or another launcher with its variables, has started."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"))


def num_processes() -> int:
    """Processes that were started together, this one included."""
    return int(os.environ["WORLD_SIZE"])


def add_transport(parser: argparse.ArgumentParser) -> None:
    """The option of commands that run under torchrun too."""
    text = "under torchrun: how backend cute reaches the ranks (default: symmetric memory where it can)"
    parser.add_argument("--transport", choices=("symmetric", "nccl"), help=text)


@dataclasses.dataclass(frozen=True)
class Member:
    """This process in its group."""

    group: dist.ProcessGroup
    device: torch.device

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def num_ranks(self) -> int:
        return dist.get_world_size(self.group)

    def gather(self, value: Any) -> list[Any]:
        """A value of every rank, tensors on the CPU, in the order of ranks. A collective."""
        written = io.BytesIO()
        torch.save(value, written)  # knows FP8, as plain pickles do not
        everyone: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(everyone, written.getvalue(), group=self.group)
        return [torch.load(io.BytesIO(theirs), map_location="cpu", weights_only=False) for theirs in everyone]


@contextlib.contextmanager
def membership(device_name: str | None = None) -> Iterator[Member]:
    """Join the group of all processes, and leave it behind the block, what fused calls keep given back.

    Args:
        device_name: "cpu" or "cuda"; None: cuda where there is one. A process takes the GPU of its LOCAL_RANK.

    Raises:
        MegaMoEValueError: there is no such device, or fewer GPUs than processes here.
    """
    kind = device_name or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind not in ("cpu", "cuda"):
        raise MegaMoEValueError(expected("--device", "cpu or cuda under torchrun", repr(device_name)))
    device = torch.device("cpu")
    options: dict[str, Any] = {}
    if kind == "cuda":
        local, here = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if local >= here:
            raise MegaMoEValueError(expected("--nproc-per-node", f"at most the {here} GPUs of this node", local + 1))
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
        options["device_id"] = device
    owned = not dist.is_initialized()
    if owned:
        dist.init_process_group("nccl" if kind == "cuda" else "gloo", timeout=TIMEOUT, **options)
    group = dist.group.WORLD
    assert group is not None
    try:
        yield Member(group, device)
        backends.release(group)
    finally:
        if owned:
            dist.destroy_process_group()


def backend_of(
    name: str, spec: ProblemSpec, recipe: Recipe, member: Member, transport: TransportName | None
) -> Backend:
    """The backend that runs a problem over the group. Raises as `backends.resolve`."""
    check_transport(transport, member.group)
    asked = backends.Problem.of(
        member.device,
        recipe,
        hidden_size=spec.hidden,
        intermediate_size=spec.intermediate,
        num_experts=spec.num_experts,
        top_k=spec.top_k,
        num_ranks=spec.num_ranks,
        world="group",
        transport=transport,
        reach=why_not_symmetric(member.group) or "",
    )
    return backends.resolve(name, asked)


def transport_name(backend: Backend) -> str:
    """How a backend reaches the ranks of a group, in a word."""
    return "symmetric memory" if backend.saves_codes else "all-to-alls"


@dataclasses.dataclass(frozen=True)
class Report:
    """What `verify_over` found, on rank 0; elsewhere only `backend`.

    Attributes:
        backend: that ran. verdicts: of each stage. other_bits: stages whose bits are not those of one rank.
    """

    backend: Backend
    verdicts: Sequence[Verdict] = ()
    other_bits: Sequence[str] = ()


def verify_over(
    member: Member, problem: Problem, recipe: Recipe, backend: str, transport: TransportName | None
) -> Report:
    """Run this rank's part of a problem on a backend; on rank 0 judge what all ranks found. A collective.

    The oracle and the emulation hold every token on rank 0, and so does the backend's own call on one rank, whose bits
    all stages must have.
    """
    runs = backend_of(backend, problem.spec, recipe, member, transport)
    found = run_values(runs, problem, recipe, GroupTransport(member.group, runs.steps))
    everyone = member.gather(found)
    if member.rank:
        return Report(runs)
    got = {stage: _on(member.device, _joined([values[stage] for values in everyone])) for stage in found}
    masked_by = got["gate_up"].tensor if recipe.clamp is not None else None
    emulated = emulate(problem, recipe, masked_by)
    verdicts = judge(got, emulated, run_oracle(problem, recipe.clamp, masked_by), recipe)
    alone = backends.BACKENDS[runs.name]
    one = run_values(alone, problem.on_one_rank(), recipe)
    other = [stage for stage in KINDS if stage in got and not _same(got[stage], one[stage])]
    return Report(runs, verdicts, other)


def _joined(parts: Sequence[Value]) -> Value:
    """Stages are in the order of ranks: rows by their experts, tokens and experts by their ranks."""
    bits = tuple(torch.cat(list(of_all)) for of_all in zip(*(part.bits for part in parts), strict=True))
    return Value(torch.cat([part.tensor for part in parts]), bits)


def _on(device: torch.device, value: Value) -> Value:
    return Value(value.tensor.to(device), tuple(b.to(device) for b in value.bits))


def _same(a: Value, b: Value) -> bool:
    return all(have_same_bits(x, y) for x, y in zip(a.bits, b.bits, strict=True))


def verify_group(specs: Sequence[ProblemSpec], recipe: Recipe, args: argparse.Namespace) -> int:
    """`megamoe verify` of one process among several; the status is the same on all.

    Args:
        specs: with a T for each rank of the group. args: of the command.
    """
    from megamoe.cli.verify import describe, table

    passed = 0
    with membership(args.device) as member:
        for spec in specs:
            report = verify_over(member, make_problem(spec, member.device), recipe, args.backend, args.transport)
            failed = [v.stage for v in report.verdicts if v.failures] + [f"bits of {s}" for s in report.other_bits]
            passed += not member.gather(failed)[0]
            if member.rank == 0:
                where = f"{member.num_ranks} processes on {member.device.type}, {transport_name(report.backend)}"
                bits = f"not the bits of one rank: {', '.join(report.other_bits)}" if report.other_bits else ""
                print(f"{spec}\nbackend {report.backend.name}, {where}, {describe(recipe)}\n{table(report.verdicts)}")
                print(bits or "every bit is that of one rank", end="\n\n", flush=True)
        if member.rank == 0:
            print(f"{passed} of {len(specs)} problems pass every gate and have the bits of one rank", flush=True)
    return 0 if passed == len(specs) else 1
