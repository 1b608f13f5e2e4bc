"""Measure how a layer of a given shape overlaps best, and write it to a file that `MegaMoE(..., overlap=FILE)` reads.

A step of two layers, forward and backward, is timed under one setting after the other: of each field in turn the
values that were asked for, with the best of the fields before, and the defaults; every round times all of them, in
another order. What wins is timed against the defaults once more, and taken if it still wins. With several processes
(torchrun) a step's time is that of the slowest rank. What changes a bit of the results has no time.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megamoe.backends import BACKENDS
from megamoe.cli.bench import Progress
from megamoe.cli.group_run import Member, launched, membership
from megamoe.cli.options import device_of, integers, numbers, refuse_given, within, writable
from megamoe.cli.problem import ROUTINGS, ProblemSpec, draw_topk_ids, shape_of, spelled_as_options, spread
from megamoe.cli.timing import time_variants
from megamoe.comm import LocalWorld
from megamoe.config import MoEConfig
from megamoe.errors import MegaMoEError, MegaMoEValueError
from megamoe.layer import MegaMoE
from megamoe.overlap import OverlapConfig, OverlapKey, read_entries, read_overlap, write_overlap
from megamoe.recipe import Recipe

Timer = Callable[[Mapping[str, Callable[[], object]], torch.device, int, Callable[[str], None]], dict[str, float]]
"""(steps by setting, device, rounds, progress) -> microseconds of a step on this rank."""

FUSED_ONLY = ("reserve_sms", "lag", "pull_batch")
"""Fields that only fused kernels have."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `megamoe tune`."""
    parser.add_argument("--shape", default="A", help="A, B, C or E,H,I,K")
    parser.add_argument("--tokens", type=int, help="T, over all ranks; default: that of the shape")
    parser.add_argument("--routing", default="uniform", choices=ROUTINGS)
    parser.add_argument("--ranks", type=int, default=1, help="virtual ranks; under torchrun they are its processes")
    parser.add_argument("--backend", default="auto", choices=("auto", *BACKENDS))
    parser.add_argument("--wgrad-operands", choices=("bf16", "fp8"), help="default: the recipe's")
    parser.add_argument("--clamp", type=float, help="limit of the gated activation")
    parser.add_argument("--wgrad", default="inline,stream", help="'delayed' only where you call backward_dw() yourself")
    parser.add_argument("--steal-us", default="0,50", help="with several ranks")
    parser.add_argument("--reserve-sms", default="0,4,8")
    parser.add_argument("--lag", default="0,8,32")
    parser.add_argument("--pull-batch", default="0,2,4")
    parser.add_argument("--rounds", type=int, default=15, help="steps under each setting; twice as many in the end")
    parser.add_argument("--least-gain", type=float, default=1.0, help="per cent for which a value is worth a change")
    parser.add_argument("--device", help="default: cuda where there is one, else cpu")
    parser.add_argument("--out", default="overlap.json", help="what else stands in this file stays there")


@dataclasses.dataclass(frozen=True)
class Row:
    """One setting in the table: microseconds on the slowest rank, those of the defaults in the same run; or why not."""

    overlap: OverlapConfig
    us: float | None
    us_default: float | None = None
    note: str = ""


class TwoLayers:
    """Two layers with residuals on one set of weights, and a step of them under any setting.

    Args:
        config, recipe, backend: of the layers. spec: tokens and routing. world: ranks. device: where.
    """

    def __init__(
        self, config: MoEConfig, recipe: Recipe, backend: str, spec: ProblemSpec, world: Any, device: torch.device
    ) -> None:
        torch.manual_seed(0)
        options: dict[str, Any] = {"recipe": recipe, "backend": backend, "world": world, "device": device}
        if isinstance(world, LocalWorld) and world.num_ranks > 1:
            options["capacity"] = "worst"
        self.layers = [MegaMoE(config, **options) for _ in range(2)]
        generator = torch.Generator().manual_seed(1)
        self.ids = [i.to(device) for i in draw_topk_ids(spec, generator).split(list(spec.num_tokens))]
        sizes = [(t, config.hidden_size) for t in spec.num_tokens]
        self.xs, self.douts = ([torch.randn(s, generator=generator).bfloat16().to(device) for s in sizes] for _ in "12")
        self.is_list = len(self.xs) > 1

    def step(self, overlap: OverlapConfig) -> dict[str, torch.Tensor]:
        """Everything that a step computes, by name."""
        for layer in self.layers:
            layer.set_overlap(overlap)
            layer.zero_grad(set_to_none=True)
        leaves = [x.detach().requires_grad_() for x in self.xs]
        ys: Any = leaves
        for layer in self.layers:
            outs = layer(ys, topk_ids=self.ids) if self.is_list else [layer(ys[0], topk_ids=self.ids[0])]
            ys = [y + out for y, out in zip(ys, outs, strict=True)]
        torch.autograd.backward(ys, self.douts)
        for layer in reversed(self.layers):
            layer.backward_dw()
        found = {f"out {i}": y.detach() for i, y in enumerate(ys)}
        found |= {f"dx {i}": leaf.grad for i, leaf in enumerate(leaves) if leaf.grad is not None}
        for i, layer in enumerate(self.layers):
            found |= {f"{i}.{name}": p.grad for name, p in layer.named_parameters() if p.grad is not None}
        return found


def digest(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, int]]:
    """Two sums of each tensor's bits, one weighted by position: equal for equal bits, and hardly for others."""
    sums = {}
    for name, tensor in tensors.items():
        plain = weighted = 0
        bits = tensor.contiguous().view(-1).view(torch.uint8)
        words = bits.view(torch.int16 if bits.numel() % 2 == 0 else torch.uint8)
        for part in words.split(1 << 24):
            place = torch.arange(1, part.numel() + 1, device=part.device)
            plain += int(part.sum(dtype=torch.int64))
            weighted += int((part.long() * place).sum())
        sums[name] = (plain, weighted)
    return sums


def candidates(best: OverlapConfig, field: str, values: Sequence[Any]) -> list[OverlapConfig]:
    """`best` with each of a field's values, itself first."""
    return [best, *(dataclasses.replace(best, **{field: v}) for v in values if v != getattr(best, field))]


def slowest(us: Mapping[str, float], group: Any = None) -> dict[str, float]:
    """The times of the slowest rank, the same on all ranks: a step ends when its last rank does."""
    if group is None:
        return dict(us)
    on_cuda = dist.get_backend(group) == "nccl"
    times = torch.tensor(list(us.values()), dtype=torch.float64, device="cuda" if on_cuda else "cpu")
    dist.all_reduce(times, dist.ReduceOp.MAX, group)
    return dict(zip(us, times.tolist(), strict=True))


def measure(
    variants: Mapping[str, Callable[[], object]], device: torch.device, rounds: int, progress: Callable[[str], None]
) -> dict[str, float]:
    """The timer: medians of interleaved steps. Every rank makes the same number of calls in the same order."""
    times = time_variants(variants, device, rounds=rounds, sustained_s=0.0, progress=progress)
    return {name: timing.us for name, timing in times.items()}


def search(
    step: Callable[[OverlapConfig], Mapping[str, torch.Tensor]],
    space: Mapping[str, Sequence[Any]],
    device: torch.device,
    *,
    rounds: int = 10,
    least_gain: float = 0.005,
    timer: Timer = measure,
    group: Any = None,
    show: Callable[[Row], None] = lambda row: None,
) -> tuple[OverlapConfig, list[Row]]:
    """The best setting of a step, field by field.

    Args:
        step: runs once under a setting and returns what it computed.
        space: values of each field to try, beside the default.
        rounds: steps under each setting. least_gain: share of the time below which a value is not worth a change.
        timer: takes the times. group: ranks in other processes. show: is given each row of the table.

    Returns:
        (setting, rows). Settings that are refused, or whose bits are not those of the default, have no time.
    """
    default = OverlapConfig()
    best, want = default, digest(step(default))
    rows: list[Row] = []

    def add(row: Row) -> None:
        rows.append(row)
        show(row)

    def timed(settings: Sequence[OverlapConfig], rounds: int, title: str) -> dict[OverlapConfig, float]:
        is_first = group is None or dist.get_rank(group) == 0
        progress = Progress((rounds + 1) * len(settings), title) if is_first else lambda name: None
        variants = {str(overlap): _once(step, overlap) for overlap in settings}
        times = slowest(timer(variants, device, rounds, progress), group)
        return {overlap: times[str(overlap)] for overlap in settings}

    for field, values in space.items():
        usable, others = list(dict.fromkeys([default, best])), candidates(best, field, values)
        for overlap in [o for o in others if o not in usable]:
            note = _why_not(step, overlap, want, group)
            if note:
                add(Row(overlap, None, note=note))
            else:
                usable.append(overlap)
        if usable[-1] in (default, best):  # no other value
            continue
        times = timed(usable, rounds, field)
        for overlap in usable:
            add(Row(overlap, times[overlap], times[default]))
        winner = min(usable, key=times.__getitem__)
        if times[winner] < times[best] * (1 - least_gain):
            best = winner
    if best == default:
        return best, rows
    times = timed([default, best], 2 * rounds, "again")
    is_better = times[best] < times[default] * (1 - least_gain)
    add(
        Row(best, times[best], times[default], "again: taken" if is_better else "again: no gain, the defaults are kept")
    )
    return best if is_better else default, rows


def _once(step: Callable[[OverlapConfig], object], overlap: OverlapConfig) -> Callable[[], object]:
    return lambda: step(overlap)


def _why_not(
    step: Callable[[OverlapConfig], Mapping[str, torch.Tensor]], overlap: OverlapConfig, want: object, group: Any
) -> str:
    """Why a setting takes no part; "" if it does, and then it has run twice. The same on all ranks."""
    note = ""
    try:
        found = [digest(step(overlap)) for _ in range(2)]  # both before any is judged: other ranks make both too
        note = "" if found == [want, want] else "other bits"
    except (MegaMoEError, ValueError, AssertionError) as error:
        note = f"refused: {str(error).splitlines()[0][:70]}"
    if group is not None:
        notes: list[str] = [""] * dist.get_world_size(group)
        dist.all_gather_object(notes, note, group)
        note = next(filter(None, notes), "")
    return note


# ---------------------------------------------------------------- the command


def space_of(args: argparse.Namespace, is_fused: bool, ranks: int) -> dict[str, Sequence[Any]]:
    """The values to try, by field; tasks are stolen "inline" only, so this is known before other modes are tried."""
    space: dict[str, Sequence[Any]] = {"steal_us": numbers("--steal-us", args.steal_us), "wgrad": args.wgrad.split(",")}
    space |= {name: integers(f"--{name.replace('_', '-')}", getattr(args, name)) for name in FUSED_ONLY}
    with spelled_as_options():
        for name, values in space.items():
            for value in values:
                OverlapConfig(**{name: value})  # what it refuses, it refuses now
    unused = {"steal_us"} if ranks == 1 else set()
    unused |= set() if is_fused else {"steal_us", *FUSED_ONLY}
    return {name: values for name, values in space.items() if name not in unused}


def problem_of(args: argparse.Namespace, rank: int | None, ranks: int) -> tuple[MoEConfig, ProblemSpec]:
    """The layer's sizes and this process's tokens: those of one rank of a group, or of all R (`rank` None)."""
    shape = shape_of("--shape", args.shape, args.tokens)
    spec = spread(shape, ranks, args.routing, "--ranks" if rank is None else "--nproc-per-node")
    config = MoEConfig(shape.hidden, shape.intermediate, shape.num_experts, shape.top_k, clamp=args.clamp)
    if rank is None:
        return config, spec
    return config, dataclasses.replace(spec, num_tokens=spec.num_tokens[:1], seed=rank)


def tune_main(args: argparse.Namespace, timer: Timer = measure) -> int:
    """Run `megamoe tune`; returns its exit status."""
    within("--rounds", args.rounds, 1)
    within("--least-gain", args.least_gain, 0, 100)
    if not launched():
        return tune_on(args, timer, device_of(args.device))
    refuse_given(args, add_arguments, {"--ranks": "ranks"}, "under torchrun")
    with membership(args.device) as member:
        return tune_on(args, timer, member.device, member)


def tune_on(args: argparse.Namespace, timer: Timer, device: torch.device, member: Member | None = None) -> int:
    """Measure and write, as one process or as one of several (`member`); rank 0 of them prints and writes."""
    group, rank = (member.group, member.rank) if member else (None, None)
    is_first = not rank
    ranks = member.num_ranks if member else args.ranks
    with spelled_as_options():
        config, spec = problem_of(args, rank, ranks)
        recipe = Recipe(clamp=args.clamp, wgrad_operands=args.wgrad_operands)
    space_of(args, is_fused=True, ranks=ranks)  # refuses what is wrong before layers are made
    if is_first:
        check_out(args.out)
    world = group if group is not None else LocalWorld(ranks) if ranks > 1 else None
    layers = TwoLayers(config, recipe, args.backend, spec, world, device)
    backend = layers.layers[0].backend_name()
    space = space_of(args, BACKENDS[backend].is_fused, ranks)
    if is_first:
        shape = f"E={config.num_experts} H={config.hidden_size} I={config.intermediate_size} K={config.top_k}"
        print(f"{shape} T={ranks * spec.num_tokens[0]} {args.routing} R={ranks}, backend {backend} on {device}")
    best, rows = search(
        layers.step, space, device, rounds=args.rounds, least_gain=args.least_gain / 100, timer=timer, group=group,
        show=Table() if is_first else lambda row: None,
    )  # fmt: skip
    won, base = next(((row.us, row.us_default) for row in reversed(rows) if row.overlap == best), (None, None))
    if is_first:
        sizes = (config.num_experts, config.hidden_size, config.intermediate_size, config.top_k)
        key = OverlapKey.of(device, sizes, ranks, recipe)
        facts = {"tokens": ranks * spec.num_tokens[0], "routing": args.routing, "backend": backend, "us": won}
        write_overlap(args.out, key, best, {**facts, "us_default": base, "torch": torch.__version__})
        assert read_overlap(args.out, key) == best
        gain = f", {1 - won / base:.1%} faster than the defaults" if won and base and best != OverlapConfig() else ""
        print(f"best: {best}{gain}\nwrote {args.out}: MegaMoE(..., overlap={args.out!r})")
    return 0


def check_out(path: str) -> None:
    """Refuse a file that cannot be written, or that holds something else, before anything is measured."""
    if writable("--out", path).exists():
        try:
            read_entries(path)
        except MegaMoEValueError as error:
            raise MegaMoEValueError("--out" + str(error).removeprefix("overlap")) from error


class Table:
    """Prints each setting as soon as it has been measured."""

    def __init__(self) -> None:
        print(f"{'setting':<52}{'ms':>9}{'to defaults':>13}")

    def __call__(self, row: Row) -> None:
        if row.us is None or row.us_default is None:
            print(f"{row.overlap!s:<52}  {row.note}", flush=True)
        else:
            change = row.us / row.us_default - 1
            print(f"{row.overlap!s:<52}{row.us / 1e3:>9.3f}{change:>+13.1%}  {row.note}".rstrip(), flush=True)
