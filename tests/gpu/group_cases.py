"""What several GPUs must show, one process each: `torchrun --nproc-per-node=2 -m tests.gpu.group_cases [case ...]`.

Every wait on the device is bounded by the kernels' watchdog, and every case by a limit of its own, behind which the
process ends: a hang is a failure. Rank 0 prints a line for each case; the exit status is 1 if any failed on any rank.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cute_kernels.launch import fused_forward
from cute_kernels.status import CallError
from cute_kernels.symmetric import SymmetricWorkspace
from cute_kernels.weights import prepare_weights
from megamoe import MoEContext, Recipe, mega_moe
from megamoe.backends import BACKENDS, release
from megamoe.cli.group_run import Member, membership, verify_over
from megamoe.cli.problem import Problem, ProblemSpec, make_problem
from megamoe.cli.records import environment, write_records
from megamoe.overlap import OverlapConfig
from tests.support.moe_calls import Result, run

SIZES: dict[str, Any] = dict(hidden=256, intermediate=128, num_experts=16, top_k=4)
CASE_LIMIT_S = 60.0


def tokens_of(member: Member, kind: int = 0) -> tuple[int, ...]:
    """T of each rank: unequal, with an empty rank, one token, or as many each."""
    n = member.num_ranks
    kinds = ([150 - 17 * r for r in range(n)], [0 if r == 1 else 90 + r for r in range(n)], [1] * n, [128] * n)
    return tuple(kinds[kind % 4])


def problem_of(member: Member, seed: int = 0, kind: int = 0, routing: str = "zipf") -> Problem:
    """The same problem on every rank."""
    spec = ProblemSpec(num_tokens=tokens_of(member, kind), routing=routing, seed=seed, **SIZES)  # type: ignore[arg-type]
    return make_problem(spec, member.device)


def call(member: Member, problem: Problem, context: MoEContext) -> dict[str, torch.Tensor]:
    """Forward and backward of this rank's part."""
    r = member.rank
    w13, w2 = problem.weights_of(r)
    leaves = [t.clone().requires_grad_() for t in (problem.xs[r], problem.topk_weights[r], w13, w2)]
    out = mega_moe(leaves[0], problem.topk_ids[r], *leaves[1:], context=context)
    out.backward(problem.douts[r])
    found = dict(zip(("dx", "dp", "dW13", "dW2"), (leaf.grad for leaf in leaves), strict=True))
    return {"out": out.detach(), **found}  # type: ignore[dict-item]


def expected(member: Member, problem: Problem, recipe: Recipe | None = None) -> dict[str, torch.Tensor]:
    """This rank's part of the call on one rank that holds everything."""
    want: Result = run(problem.on_one_rank(), MoEContext(recipe, backend="cute"))
    tokens, r, n = list(problem.spec.num_tokens), member.rank, member.num_ranks
    by_token = {"out": want.outs[0].detach(), "dx": want.dx[0], "dp": want.dp[0]}
    by_expert = {"dW13": want.dw13, "dW2": want.dw2}
    found = {name: value.split(tokens)[r] for name, value in by_token.items()}  # type: ignore[union-attr]
    return found | {name: value.chunk(n)[r] for name, value in by_expert.items()}  # type: ignore[union-attr]


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], where: str) -> None:
    for name, value in want.items():
        a, b = (t.contiguous().view(torch.uint8) for t in (got[name], value))
        assert torch.equal(a, b), f"{where}: {name} has other bits in {int((a != b).sum())} of {a.numel()} bytes"


# ---------------------------------------------------------------- cases


class Forwards:
    """Forwards of this rank's part of a problem on a workspace of their own."""

    def __init__(self, member: Member, problem: Problem, capacity_rows: int = 4096) -> None:
        sizes: dict[str, Any] = dict(hidden=256, num_experts=16, top_k=4, max_tokens=256, capacity_rows=capacity_rows)
        self.workspace = SymmetricWorkspace(member.group, device=member.device, **sizes)
        w13, w2 = problem.weights_of(member.rank)
        (a, _), (b, _) = (BACKENDS["cute"].copy_weight(w, g, Recipe(), False) for w, g in ((w13, 2), (w2, 1)))
        self._weights = prepare_weights(a.data, a.scale, b.data, b.scale)
        self._problem, self._rank = problem, member.rank

    def call(self, timeout_s: float = 20.0, x: torch.Tensor | None = None) -> torch.Tensor:
        p, r = self._problem, self._rank
        inputs = [p.xs[r] if x is None else x], [p.topk_ids[r]], [p.topk_weights[r]], [self._weights]
        out = fused_forward([self.workspace], *inputs, timeout_s=timeout_s)[0].out
        torch.cuda.synchronize()
        return out

    def __enter__(self) -> Forwards:
        return self

    def __exit__(self, *_: object) -> None:
        self.workspace.close()


def rendezvous(member: Member) -> str:
    """Every rank reads through its table of addresses what every other has written."""
    arguments: dict[str, Any] = dict(hidden=256, num_experts=16, top_k=4, max_tokens=256, capacity_rows=1024)
    w = SymmetricWorkspace(member.group, device=member.device, **arguments)
    addresses, begin = w.peers.tolist(), int(w.layout.y)
    w.view("y", torch.int64, 8).fill_(100 + member.rank)
    torch.cuda.synchronize()
    dist.barrier()
    for r, address in enumerate(addresses):
        theirs = w._handle.get_buffer(r, (8,), torch.int64, begin // 8)
        assert theirs.data_ptr() == address + begin and (theirs == 100 + r).all(), f"rank {r}: {theirs.tolist()}"
    del theirs
    dist.barrier()
    w.close()
    return f"{len(set(addresses))} addresses"


def one_rank(member: Member, transport: Any) -> str:
    """Forward, dgrad and wgrad have the bits of one rank, whatever T, routing and options are."""
    count = 0
    for seed, (routing, options) in enumerate(
        (
            ("zipf", {}),
            ("masked", dict(save="repull")),
            ("first_rank", dict(save="recompute")),
            ("duplicates", dict(capacity="worst", max_tokens_per_rank=160)),
            ("uniform", {}),
            ("one_expert", {}),
            ("zipf", dict(overlap=OverlapConfig(steal_us=50.0, reserve_sms=12))),
        )
    ):
        context = MoEContext(world=member.group, backend="cute", transport=transport, **options)  # type: ignore[arg-type]
        for kind in range(4):
            problem = problem_of(member, 10 * seed + kind, kind, routing)
            got = call(member, problem, context)
            assert_same(got, expected(member, problem), f"{routing}, T = {problem.spec.num_tokens}, {options}")
            count += 1
    return f"{count} calls"


def over_memory(member: Member) -> str:
    return one_rank(member, "symmetric")


def over_all_to_alls(member: Member) -> str:
    return one_rank(member, "nccl")


def clamp_and_powers_of_two(member: Member) -> str:
    recipe = Recipe(clamp=1.0, scale_format="pow2")
    context = MoEContext(recipe, world=member.group, backend="cute", transport="symmetric")
    problem = problem_of(member, 3)
    assert_same(call(member, problem, context), expected(member, problem, recipe), "clamp, pow2")
    return ""


def verified(member: Member) -> str:
    """Every stage against the oracle and the emulation."""
    for kind, routing in enumerate(("uniform", "masked")):
        problem = problem_of(member, 5, kind, routing)
        report = verify_over(member, problem, Recipe(), "cute", "symmetric")
        assert not report.other_bits, report.other_bits
        failed = [(v.stage, v.failures) for v in report.verdicts if v.failures]
        assert not failed, failed
    return ""


def late(member: Member) -> str:
    """The last rank comes two seconds late: the others wait, and all are right."""
    context = MoEContext(world=member.group, backend="cute", transport="symmetric")
    problem = problem_of(member, 7)
    want = expected(member, problem)
    call(member, problem, context)
    torch.cuda.synchronize()
    dist.barrier()
    begin = time.monotonic()
    if member.rank == member.num_ranks - 1:
        time.sleep(2.0)
    got = call(member, problem, context)
    torch.cuda.synchronize()
    assert_same(got, want, "late")
    return f"{time.monotonic() - begin:.1f} s"


def missing(member: Member) -> str:
    """The last rank does not come: the watchdog of the others ends the call, and tells it, which comes and ends at
    once. After a reset of all the next call is right."""
    problem = problem_of(member, 9)
    want, r = expected(member, problem)["out"], member.rank
    with Forwards(member, problem) as forwards:
        w, forward = forwards.workspace, forwards.call
        assert torch.equal(forward(20.0), want), "before"
        dist.barrier()
        begin = time.monotonic()
        is_last = r == member.num_ranks - 1
        if is_last:
            time.sleep(3.0)
        out = forward(1.0 if not is_last else 20.0)
        took = time.monotonic() - begin
        error = w.error()
        assert error is not None and out.isnan().all(), f"rank {r}: {error}"
        assert took < (5.0 if is_last else 2.5), f"rank {r} took {took:.1f} s"
        said = member.gather(error)
        w.reset()
        assert torch.equal(forward(20.0), want), "after reset"
        assert w.error() is None
    return " | ".join(said)


def refused(member: Member) -> str:
    """The last rank finds an error on its host: all end that call at once, and the next one is right."""
    problem, r = problem_of(member, 11), member.rank
    want = expected(member, problem)["out"]
    with Forwards(member, problem) as forwards:
        assert torch.equal(forwards.call(), want), "before"
        begin = time.monotonic()
        if r == member.num_ranks - 1:
            try:
                forwards.call(x=problem.xs[r].float())
            except ValueError as error:
                assert "x: expected bfloat16" in str(error)
            else:
                raise AssertionError("fp32 rows were taken")
            torch.cuda.synchronize()
        else:
            assert forwards.call().isnan().all(), "out of a call that ended without results"
        took, said = time.monotonic() - begin, forwards.workspace.error()
        if r == member.num_ranks - 1:
            assert said is None, "it has raised its error already"
        else:
            assert took < 5.0 and "found an error on its host" in (said or ""), f"{said} after {took:.1f} s"
        try:
            forwards.workspace.check()
        except CallError as error:
            assert not error.needs_reset
        assert torch.equal(forwards.call(), want), "after"
    return said or ""


def overflow(member: Member) -> str:
    """A pool too small on one rank: all ranks say so, with the rows that are needed."""
    problem = problem_of(member, 12, 3, "first_rank")
    with Forwards(member, problem, capacity_rows=256) as forwards:
        assert forwards.call().isnan().all()
        said = forwards.workspace.error()
        assert said is not None and "overflow of the pool of rank 0" in said and "256 available" in said, said
    return said


def many_steps(member: Member) -> str:
    """500 training steps of changing size and routing, each compared with its first time; memory stands still."""
    context = MoEContext(world=member.group, backend="cute", transport="symmetric")
    problems = [problem_of(member, s, s, ("uniform", "masked", "zipf", "first_rank")[s % 4]) for s in range(10)]
    first = [call(member, problem, context) for problem in problems]
    torch.cuda.synchronize()
    free: list[int] = []
    for step in range(500):
        i = step % 10
        got = call(member, problems[i], context)
        if step % 50 < 10:
            assert_same(got, first[i], f"step {step}")
        if step % 100 == 99:
            torch.cuda.synchronize()
            free.append(torch.cuda.mem_get_info()[0])  # the GPU is this process's alone
    assert free[-1] >= free[0] - 2**20, [f >> 20 for f in free]
    return f"free MiB {[f >> 20 for f in free]}"


def subgroups(member: Member) -> str:
    """A group of some ranks, then all again; released each time, memory comes back."""
    free = []
    for cycle in range(6):
        group = dist.new_group(list(range(member.num_ranks)))
        context = MoEContext(world=group, backend="cute", transport="symmetric")
        part = Member(group, member.device)
        problem = problem_of(member, cycle, cycle)
        call(part, problem, context)
        release(group)
        del context, part
        dist.destroy_process_group(group)
        del group
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free.append(torch.cuda.mem_get_info()[0])
    assert free[-1] >= free[1] - 2**20, [f >> 20 for f in free]
    return f"free MiB {[f >> 20 for f in free]}"


_ALL = (
    rendezvous,
    over_memory,
    clamp_and_powers_of_two,
    late,
    refused,
    overflow,
    missing,
    verified,
    over_all_to_alls,
    subgroups,
    many_steps,
)
CASES: dict[str, Callable[[Member], str]] = {case.__name__: case for case in _ALL}


def vanish(member: Member) -> None:
    """The last rank's process is gone after three steps: the others leave with an error, by their watchdog, instead of
    waiting half alive. Run alone, with MEGAMOE_TIMEOUT_S; start each process by itself, as torchrun would end them."""
    options: dict[str, Any] = dict(capacity="worst", max_tokens_per_rank=160)  # sizes that nobody asks peers for
    context = MoEContext(world=member.group, backend="cute", transport="symmetric", **options)
    problem = problem_of(member, 13)
    for step in range(10):
        call(member, problem, context)
        torch.cuda.synchronize()
        if member.rank == member.num_ranks - 1 and step == 2:
            os._exit(0)


@contextlib.contextmanager
def limited(name: str) -> Iterator[None]:
    """Ends the process where a case takes too long: a launch that hangs cannot be interrupted otherwise."""

    def give_up() -> None:
        print(f"FAILED  {name}: not done after {CASE_LIMIT_S:g} s on rank {os.environ.get('RANK')}", flush=True)
        os._exit(1)

    timer = threading.Timer(CASE_LIMIT_S, give_up)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def main(arguments: argparse.Namespace) -> int:
    failed, records, names = 0, [], arguments.cases
    with membership("cuda") as member:
        if names == ["vanish"]:
            vanish(member)
            return 0
        for name in names or CASES:
            begin, said, error = time.monotonic(), "", ""
            with limited(name):
                try:
                    said = CASES[name](member)
                except Exception:
                    error = traceback.format_exc(limit=-3)
                    print(f"rank {member.rank}, {name}:\n{error}", flush=True)
                errors = member.gather(error)
            if member.rank == 0:
                bad = [r for r, e in enumerate(errors) if e]
                status = f"FAILED on ranks {bad}" if bad else "ok"
                seconds = time.monotonic() - begin
                print(f"{status:8} {name} {seconds:.1f} s {said}", flush=True)
                record = {"case": name, "ranks": member.num_ranks, "failed_ranks": bad, "seconds": seconds}
                records.append(record | {"said": said} | environment("cute", member.device))
            failed += any(errors)
            if any(errors):
                release(member.group)  # what a failed call left is not used again
        if arguments.out and member.rank == 0:
            write_records(arguments.out, records)
    return 1 if failed else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}, or vanish alone; none: all but that")
    parser.add_argument("--out", type=Path, help="write a record of each case here, as JSON")
    sys.exit(main(parser.parse_args()))
