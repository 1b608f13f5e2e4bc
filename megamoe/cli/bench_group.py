"""`megamoe bench` under torchrun: one process a GPU, the fused layer beside all-to-alls, and the parts it overlaps.

    torchrun --nproc-per-node=2 -m megamoe bench --shapes V3 --tokens-per-rank 4096 --bench forward,fwd_bwd

Times are of the slowest rank. Beside the backends stand "math", the fused kernel alone on what arrives, and "exchange",
the all-to-alls alone (rows there as FP8 and scales, back as bf16): what is faster than their sum is overlap won.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megamoe.backends import Backend
from megamoe.backends.cute_exchange import Choices, ExchangeBackend, Here
from megamoe.cli.bench import add_arguments, shape_names
from megamoe.cli.group_run import Member, backend_of, membership, num_processes
from megamoe.cli.options import choices, integers, refuse_given, within, writable
from megamoe.cli.problem import SHAPES, ProblemSpec, Shape, shape_of, spread
from megamoe.cli.records import Record, environment, write_records
from megamoe.cli.stages import have_same_bits
from megamoe.cli.timing import median_clock, sampled_clock
from megamoe.comm import GroupTransport
from megamoe.comm.transport import exchange_of
from megamoe.gates import GATES, sqnr_db, worst_expert_db
from megamoe.overlap import OverlapConfig
from megamoe.provenance import gpu_name
from megamoe.recipe import Recipe
from megamoe.unfused import ExpertWeights, ForwardOptions, Grads, Needs, Saved

GROUP_SHAPES = SHAPES | {"V3": Shape(256, 7168, 2048, 8, 8192)}
"""V3: DeepSeek-V3 with all its experts, which the ranks share; T is that of each rank."""

VARIANTS = ("cute_symmetric", "cute_nccl", "triton")
PASSES = ("forward", "fwd_bwd")
SUSTAINED_CALLS = 20


@dataclasses.dataclass
class Share:
    """One rank's part of a problem: its tokens, and its experts in bf16. Drawn on its device.

    `ids` are uniform over all experts of the model, K different ones a token.
    """

    member: Member
    spec: ProblemSpec

    def __post_init__(self) -> None:
        spec, device = self.spec, self.member.device
        tokens, each = spec.num_tokens[self.member.rank], spec.num_experts // spec.num_ranks
        g = torch.Generator(device).manual_seed(1000 + self.member.rank)

        def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return torch.randn(*shape, device=device, generator=g, dtype=torch.bfloat16).mul_(scale)

        self.x, self.dout = normal(tokens, spec.hidden), normal(tokens, spec.hidden)
        scores = torch.rand(tokens, spec.num_experts, device=device, generator=g)
        self.ids = scores.topk(spec.top_k, dim=1).indices if tokens else scores[:, : spec.top_k].long()
        self.p = torch.rand(tokens, spec.top_k, device=device, generator=g) / spec.top_k
        self.w13 = normal(each, 2 * spec.intermediate, spec.hidden, scale=spec.hidden**-0.5)
        self.w2 = normal(each, spec.hidden, spec.intermediate, scale=spec.intermediate**-0.5)
        self.grads = torch.empty_like(self.w13), torch.empty_like(self.w2)

    def experts(self, backend: Backend, recipe: Recipe) -> ExpertWeights:
        a, a_t = backend.copy_weight(self.w13, 2, recipe, True)
        b, b_t = backend.copy_weight(self.w2, 1, recipe, True)
        return backend.prepare(ExpertWeights(a, b, a_t, b_t))


class GroupRun:
    """The layer of one variant on this rank's share. `experts`: the weights of each backend, made once."""

    def __init__(self, variant: str, share: Share, recipe: Recipe, experts: dict[str, ExpertWeights]) -> None:
        name, _, way = variant.partition("_")
        transport: Any = way or None
        self.backend = backend_of(name, share.spec, recipe, share.member, transport)
        self.transport = GroupTransport(share.member.group, self.backend.steps)
        if name not in experts:
            experts[name] = share.experts(self.backend, recipe)
        self.experts, self.share, self.recipe = experts[name], share, recipe
        self.needs = Needs(w13=[share.grads[0]], w2=[share.grads[1]])

    def _forward(self, save: bool) -> tuple[list[torch.Tensor], Saved | None]:
        s, options = self.share, ForwardOptions("pool" if save else "none")
        return self.backend.forward(self.transport, [s.x], [s.ids], [s.p], [self.experts], self.recipe, options)

    def forward(self) -> torch.Tensor:
        return self._forward(False)[0][0]

    def fwd_bwd(self) -> Grads:
        saved = self._forward(True)[1]
        assert saved is not None
        return self.backend.backward(self.transport, [self.share.dout], saved, [self.experts], self.needs)

    def results(self) -> dict[str, torch.Tensor]:
        """What is checked before anything is timed."""
        for grad in self.share.grads:  # what this call leaves unwritten must not be another's
            grad.fill_(math.nan)
        out, grads = self.forward(), self.fwd_bwd()
        assert grads.dx is not None and grads.dp is not None
        dw13, dw2 = (g.clone() for g in self.share.grads)
        return {"out": out, "dx": grads.dx[0], "dp": grads.dp[0], "dW13": dw13, "dW2": dw2}


class Parts:
    """The two parts of a forward, apart: what arrives is kept, so that either runs without the other."""

    def __init__(self, run: GroupRun) -> None:
        assert isinstance(run.backend, ExchangeBackend)
        s, self._run, self._backend = run.share, run, run.backend
        self.plan = run.transport.plan([s.ids], s.spec.num_experts)
        self._arrived = run.transport.send_tokens(s.x, self.plan)
        self._p = run.transport.send_slots(s.p, self.plan)[:, None].contiguous()
        self._here = Here(exchange_of(self.plan))
        self._choices = Choices(run.recipe, OverlapConfig())
        self._rows = run.backend.steps.quantize_rows(s.x, run.recipe)
        self._y = torch.empty_like(self._arrived)

    def math(self) -> torch.Tensor:
        """The fused kernel on what has arrived, as one rank."""
        return self._backend.forward_here(
            self._here, self._arrived, self._p, self._run.experts, self._choices, saves=False
        )[0]

    def exchange(self) -> torch.Tensor:
        """Rows gathered for their owners, sent, and back; nothing is sorted where they arrive, or added at home."""
        transport, plan = self._run.transport, self.plan
        transport.send_tokens(self._rows.data, plan)
        assert self._rows.scale is not None
        transport.send_tokens(self._rows.scale, plan)
        return transport.wire.start_back(self._y, exchange_of(plan).counts)()

    def remote_rows(self) -> tuple[int, int]:
        """(rows that this rank sends to others, rows that it gets from them)."""
        (counts,), me = exchange_of(self.plan).counts, self._run.share.member.rank
        return sum(counts[me]) - counts[me][me], sum(row[me] for row in counts) - counts[me][me]


def bench_case(
    name: str,
    spec: ProblemSpec,
    variants: Sequence[str],
    benches: Sequence[str],
    args: argparse.Namespace,
    member: Member,
) -> list[Record]:
    """All records of one shape, on every rank alike; TFLOP/s are those of one GPU. A collective.

    Raises:
        AssertionError: on all ranks, where variants differ beyond the gate on any rank: a wrong result has no time.
    """
    share, recipe = Share(member, spec), Recipe(args.precision)
    experts: dict[str, ExpertWeights] = {}
    runs = {variant: GroupRun(variant, share, recipe, experts) for variant in variants}
    agreement = compare(runs, member)
    calls: dict[tuple[str, str], Callable[[], object]] = {}
    for variant, run in runs.items():
        calls |= {(bench, variant): getattr(run, bench) for bench in benches}
    parts = Parts(runs["cute_nccl"]) if "cute_nccl" in runs else None
    sent = (0, 0)
    if parts is not None:
        calls |= {("forward", "math"): parts.math, ("forward", "exchange"): parts.exchange}
        sent = parts.remote_rows()
    for call in calls.values():  # compiled and allocated before anything is timed
        call()
    times = time_over(calls, member, rounds=args.rounds)
    rows = [sum(of_all) for of_all in zip(*member.gather(sent), strict=True)]
    width = spec.hidden * (1 if args.precision == "fp8" else 2)
    flops = 6 * spec.hidden * spec.intermediate * sum(spec.num_tokens) * spec.top_k
    common = {
        "shape": name, "T": sum(spec.num_tokens), "T_per_rank": spec.num_tokens[0], "routing": "uniform",
        "ranks": spec.num_ranks, "precision": args.precision,
        "bytes_out_per_rank": rows[0] // spec.num_ranks * width,
        "bytes_back_per_rank": rows[1] // spec.num_ranks * 2 * spec.hidden,
    }  # fmt: skip
    records: list[Record] = []
    for (bench, variant), figures in times.items():
        passes = 3 if bench == "fwd_bwd" else 1
        record = {"bench": bench, **common, "backend": variant, **figures}
        record["tflops"] = None if variant == "exchange" else flops * passes / spec.num_ranks / figures["us"] / 1e6
        records.append(record | agreement.get(variant, {}))
    add_overlap(records)
    return [r | environment(str(r["backend"]), member.device) for r in records]


def compare(runs: dict[str, GroupRun], member: Member) -> dict[str, Record]:
    """How near the results of each variant are, over all tensors and ranks, as fields of its records. A collective.

    `emulation_db`: least SQNR against the emulation, None for equal values. `least_sqnr_db`: the same against the first
    variant. `equal_bits`: whether all bits are the first variant's; None for the first itself.

    Raises:
        AssertionError: on all ranks, where a variant misses a gate on any.
    """
    some = next(iter(runs.values()))
    gates, first = GATES[some.recipe.precision], next(iter(runs))
    emulated = GroupRun("torch", some.share, some.recipe, {}).results()
    wanted: dict[str, torch.Tensor] = {}
    figures: dict[str, Record] = {}
    for variant, run in runs.items():
        found = run.results()
        level = lowest_over(found, emulated, member, gates.emulation_db, f"{variant} against the emulation")
        figures[variant] = {"emulation_db": level, "least_sqnr_db": None, "equal_bits": None}
        if variant == first:
            wanted = found
            continue
        level = lowest_over(found, wanted, member, gates.backends_db, f"{variant} against {first}")
        is_equal = all(have_same_bits(found[name], want) for name, want in wanted.items())
        figures[variant] |= {"least_sqnr_db": level, "equal_bits": all(member.gather(is_equal))}
    return figures


def lowest_over(
    found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], member: Member, gate: float, title: str
) -> float | None:
    """The least SQNR in dB of any tensor of any rank, None for equal values. A collective.

    Raises:
        AssertionError: on all ranks, where one is below the gate, or not a number.
    """
    everyone = member.gather({name: lowest_db(found[name], want) for name, want in wanted.items()})
    levels = [level for theirs in everyone for level in theirs.values()]
    assert all(level >= gate for level in levels), f"{title}: {everyone}"
    return None if math.isinf(min(levels)) else min(levels)


def lowest_db(got: torch.Tensor, want: torch.Tensor) -> float:
    """SQNR of a tensor, of weight gradients that of the worst expert: one after the other, as fp64 takes memory."""
    return sqnr_db(got, want) if got.dim() < 3 else worst_expert_db(got, want)[0]


def time_over(
    calls: dict[tuple[str, str], Callable[[], object]], member: Member, rounds: int
) -> dict[tuple[str, str], Record]:
    """Times of calls that all ranks make together, of the slowest rank: single ones, then back to back. A collective.

    The clock is the slowest rank's while calls are made back to back.

    Each round makes every call once, in another order every round, the same on all ranks; a barrier stands before each.
    """
    samples: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
    for number in range(rounds):
        order = list(calls)
        random.Random(number).shuffle(order)
        for key in order:
            samples[key].append(_timed(calls[key], 1, member))
    sustained: dict[tuple[str, str], tuple[float, int | None]] = {}
    for key, call in calls.items():
        with sampled_clock(member.device) as readings:
            us = _timed(call, SUSTAINED_CALLS, member)
        sustained[key] = us, median_clock(readings)
    everyone = member.gather((samples, sustained))
    figures: dict[tuple[str, str], Record] = {}
    for key in calls:
        slowest = [max(of_round) for of_round in zip(*(theirs[0][key] for theirs in everyone), strict=True)]
        clocks = [theirs[1][key][1] for theirs in everyone if theirs[1][key][1] is not None]
        figures[key] = {
            "us": statistics.median(slowest),
            "us_min": min(slowest),
            "us_max": max(slowest),
            "us_sustained": max(theirs[1][key][0] for theirs in everyone),
            "clock_mhz": min(clocks, default=None),
        }
    return figures


def _timed(call: Callable[[], object], count: int, member: Member) -> float:
    if member.device.type != "cuda":
        dist.barrier(member.group)
        begin = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - begin) * 1e6 / count
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    dist.barrier(member.group, device_ids=[member.device.index or 0])
    torch.cuda.synchronize()
    first.record()
    for _ in range(count):
        call()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) * 1e3 / count


def add_overlap(records: list[Record]) -> None:
    """What compares the calls of one shape: with Triton over all-to-alls, and with the parts, one after the other."""
    us = {(r["bench"], r["backend"]): r["us"] for r in records}
    math_us, exchange_us = us.get(("forward", "math")), us.get(("forward", "exchange"))
    for r in records:
        triton = us.get((r["bench"], "triton"))
        r["ratio_to_triton"] = triton / r["us"] if triton else None
        r["us_math_plus_exchange"] = r["exchange_hidden"] = None
        if (r["bench"], r["backend"]) == ("forward", "cute_symmetric") and math_us and exchange_us:
            r["us_math_plus_exchange"] = math_us + exchange_us
            r["exchange_hidden"] = (math_us + exchange_us - r["us"]) / exchange_us


def specs_of(args: argparse.Namespace, num_ranks: int) -> list[tuple[str, ProblemSpec]]:
    """The shapes that the options name, with as many tokens on every rank; T of a shape is that of each rank."""
    found: list[tuple[str, ProblemSpec]] = []
    for name in shape_names(args.shapes):
        shape = shape_of("--shapes", name, args.tokens, GROUP_SHAPES)
        totals: Sequence[int] = [args.tokens or shape.num_tokens * num_ranks]
        if args.tokens_per_rank is not None:
            each = integers("--tokens-per-rank", args.tokens_per_rank)
            within("--tokens-per-rank", min(each), 0)
            totals = [tokens * num_ranks for tokens in each]
        for total in totals:
            whole = dataclasses.replace(shape, num_tokens=total)
            found.append((name, spread(whole, num_ranks, option="--nproc-per-node")))
    return found


def selected(args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """The variants and the benches that the options name; all of them by default."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    variants, benches = list(VARIANTS), list(PASSES)
    if args.backends != parser.get_default("backends"):
        asked = choices("--backends", args.backends, ("cute", *VARIANTS, "torch"))
        variants = [v for v in (*VARIANTS, "torch") if v in asked or v.split("_")[0] in asked]
    if args.bench != parser.get_default("bench"):
        benches = choices("--bench", args.bench, PASSES)
    return variants, benches


def show(records: Sequence[Record]) -> None:
    """A line for each."""
    for r in records:
        hidden = r["exchange_hidden"]
        more = "" if hidden is None else f"  {hidden:.0%} of the exchange hidden"
        times = f"{r['us']:10.1f} us  sustained {r['us_sustained']:10.1f}"
        print(f"{r['bench']:8} {r['shape']} T={r['T_per_rank']:<6} {r['backend']:15} {times}{more}", flush=True)


def bench_group(args: argparse.Namespace) -> int:
    """`megamoe bench` of one process among several; rank 0 prints and writes the records."""
    names = ("suite", "routing", "ranks", "eager", "sustained")
    refuse_given(args, add_arguments, {f"--{name}": name for name in names}, "under torchrun")
    within("--rounds", args.rounds, 1)
    (variants, benches), specs = selected(args), specs_of(args, num_processes())
    status = 0
    with membership(args.device) as member:
        path = args.out / f"{gpu_name(member.device)}-x{member.num_ranks}" / f"{args.name}.json"
        if member.rank == 0:
            writable("--out", path)
        records: list[Record] = []
        for name, spec in specs:
            try:
                found = bench_case(name, spec, variants, benches, args, member)
            except AssertionError as error:  # on all ranks alike
                status = 1
                if member.rank == 0:
                    print(f"{name} T={spec.num_tokens[0]} has no record: {error}", flush=True)
                continue
            records += found
            if member.rank == 0:
                show(found)
        if member.rank == 0:
            write_records(path, records)
            print(f"{len(records)} records in {path}", flush=True)
    return status if records else 1
