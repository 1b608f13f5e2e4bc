"""What a layer will hold in memory, from its sizes alone, before anything is allocated.

Counted, per process: weights, the copies of them that GEMMs read, what a forward keeps for the backward, and what is
alive beside that at each stage of the unfused path or of the fused kernels (`megamoe.memory_stages`). Not counted:
x and the gradient of out, which the caller holds, cuBLAS's workspaces, and what a kernel needs only while it runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Literal, get_args

from megamoe.config import MoEConfig
from megamoe.errors import MegaMoETypeError, MegaMoEValueError, expected
from megamoe.memory_stages import BYTES_OF, Call, Item, Ledger, PlanOptions, SaveMode, Stage, step
from megamoe.quantize import ceil_div
from megamoe.recipe import BLOCK


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Memory of one process.

    Attributes:
        title: sizes and choices in one line.
        pool_rows: P of each rank's pool.
        is_estimate: P depends on the routing and is given for an even load.
        weights: parameters.
        copies: what is held of the weights beside them.
        gradients: of weights that train; empty without a backward.
        saved: from the forward to its backward; empty without one.
        stages: in the order in which they happen; saved tensors and gradients are part of them.
    """

    title: str
    pool_rows: int
    is_estimate: bool
    weights: tuple[Item, ...]
    copies: tuple[Item, ...]
    gradients: tuple[Item, ...]
    saved: tuple[Item, ...]
    stages: tuple[Stage, ...]

    @property
    def weights_bytes(self) -> int:
        return _total(self.weights)

    @property
    def copies_bytes(self) -> int:
        return _total(self.copies)

    @property
    def gradients_bytes(self) -> int:
        return _total(self.gradients)

    @property
    def saved_bytes(self) -> int:
        return _total(self.saved)

    @property
    def peak_stage(self) -> Stage:
        """The stage that needs most."""
        return max(self.stages, key=lambda stage: stage.num_bytes)

    @property
    def above_weights_bytes(self) -> int:
        """Peak above inputs, weights and their copies; gradients of weights count."""
        return self.peak_stage.num_bytes

    @property
    def peak_bytes(self) -> int:
        """Peak of everything but the inputs."""
        return self.weights_bytes + self.copies_bytes + self.above_weights_bytes

    def explain(self) -> str:
        """The plan as text: every item with its formula, every stage with its sum."""
        lines = [self.title]
        rows = f"pool of {self.pool_rows:,} rows a rank"
        lines.append(rows + (" for an even load; more if the routing is uneven" if self.is_estimate else ""))
        for name, items in (
            ("weights", self.weights),
            ("copies of weights", self.copies),
            ("gradients of weights", self.gradients),
            ("saved for the backward", self.saved),
        ):
            lines.append(f"{name:<28}{human(_total(items)):>12}")
            lines += [f"  {item.name:<26}{human(item.num_bytes):>12}   {item.formula}".rstrip() for item in items]
        lines.append("stages, beside weights and copies")
        peak = self.peak_stage
        for stage in self.stages:
            mark = "   <- peak" if stage is peak else ""
            lines.append(f"  {stage.name:<26}{human(stage.num_bytes):>12}{mark}")
        lines += [f"    {item.name:<24}{human(item.num_bytes):>12}   {item.formula}".rstrip() for item in peak.items]
        lines.append(f"{'peak above weights, copies':<28}{human(self.above_weights_bytes):>12}")
        lines.append(f"{'peak':<28}{human(self.peak_bytes):>12}")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, object]:
        """Plain numbers, for JSON."""
        return {
            "title": self.title,
            "pool_rows": self.pool_rows,
            "pool_rows_are_an_estimate": self.is_estimate,
            "weights_bytes": self.weights_bytes,
            "copies_bytes": self.copies_bytes,
            "gradients_bytes": self.gradients_bytes,
            "saved_bytes": self.saved_bytes,
            "stages": {stage.name: stage.num_bytes for stage in self.stages},
            "peak_stage": self.peak_stage.name,
            "above_weights_bytes": self.above_weights_bytes,
            "peak_bytes": self.peak_bytes,
        }


def memory_plan(
    config: MoEConfig,
    ranks: int = 1,
    save: SaveMode = "pool",
    capacity: int | Literal["worst"] | None = None,
    *,
    tokens: int = 8192,
    options: PlanOptions | None = None,
) -> MemoryPlan:
    """Plan the memory of one `MegaMoE` layer. Pure: no tensor is made, no device is asked.

    Args:
        config: of the layer.
        ranks: R.
        save: "pool", "repull" or "recompute" for training; "none" for inference.
        capacity: as for `MegaMoE`: rows of each pool, "worst", or None (an even load is assumed where R > 1).
        tokens: T of each rank.
        options: weights, precision, virtual ranks; None: the defaults.

    Returns:
        MemoryPlan.

    Raises:
        MegaMoETypeError: an argument of another type. MegaMoEValueError: E is not a multiple of R, or an argument is
            outside its choices.
    """
    options = PlanOptions() if options is None else options
    kinds = {"config": MoEConfig, "ranks": int, "tokens": int, "options": PlanOptions}
    for (name, kind), value in zip(kinds.items(), (config, ranks, tokens, options), strict=True):
        if not isinstance(value, kind) or isinstance(value, bool):
            raise MegaMoETypeError(expected(name, f"a value of type {kind.__name__}", type(value).__name__))
    _check(config, ranks, save, capacity, tokens, options)
    local = ranks if options.is_virtual else 1
    is_fused = options.backend == "cute"
    routed = Call(
        config.hidden_size,
        config.intermediate_size,
        config.num_experts // ranks,
        config.top_k,
        tokens,
        pool_rows(config, ranks, "worst" if capacity is None and is_fused else capacity, tokens),
        ranks,
        local,
        options,
    )
    shared = None
    if config.num_shared_experts:
        rows = worst_rows(tokens * local, 1)
        inter = config.shared_intermediate_size
        shared = Call(config.hidden_size, inter, 1, 1, tokens * local, rows, 1, 1, options)
    calls = [("", routed)] + ([("shared ", shared)] if shared is not None else [])
    ledger = Ledger()
    saved = step(ledger, config, calls, save, tokens * local)
    router = config.num_experts * config.hidden_size * (4 if options.weights == "fp32" else 2)
    weights = [Item("router", router + 4 * config.num_experts, "E * H and the bias")]
    weights += [item for name, call in calls for item in call.weights(name)]
    trains = save != "none" and options.weights != "fp8"
    size = f"H={config.hidden_size} I={config.intermediate_size} E={config.num_experts} K={config.top_k}"
    return MemoryPlan(
        title=f"{size} T={tokens} R={ranks}{' virtual' if options.is_virtual else ''}, weights {options.weights}, "
        f"{options.precision}, save={save}, capacity={capacity}, {options.backend}",
        pool_rows=routed.rows,
        is_estimate=ranks > 1 and capacity is None and not is_fused,
        weights=tuple(weights),
        copies=tuple(item for name, call in calls for item in call.copies(name, save)),
        gradients=tuple(call.gradients(name) for name, call in calls) if trains else (),
        saved=tuple(saved),
        stages=tuple(ledger.stages),
    )


def worst_rows(num_slots: int, experts_per_rank: int) -> int:
    """Rows of a pool that holds `num_slots` rows however they are spread over the experts."""
    padding = (BLOCK - 1) * min(experts_per_rank, num_slots)
    return ceil_div(num_slots + padding, BLOCK) * BLOCK


def pool_rows(config: MoEConfig, ranks: int, capacity: int | Literal["worst"] | None, tokens: int) -> int:
    """P of every rank's pool; for R > 1 without a capacity: under an even load."""
    experts = config.num_experts // ranks
    if ranks == 1 or capacity == "worst":
        return worst_rows(ranks * tokens * config.top_k, experts)
    if capacity is not None:
        return int(capacity)
    per_expert = ceil_div(ranks * tokens * config.top_k, config.num_experts)
    return experts * ceil_div(per_expert, BLOCK) * BLOCK


def _total(items: Iterable[Item]) -> int:
    return sum(item.num_bytes for item in items)


def human(num_bytes: float) -> str:
    """Bytes with a binary unit."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.2f} GiB"


def _check(
    config: MoEConfig, ranks: int, save: str, capacity: int | str | None, tokens: int, options: PlanOptions
) -> None:
    problems = []
    if ranks < 1 or config.num_experts % ranks:
        problems.append(expected("ranks", f"a divisor of num_experts = {config.num_experts}", ranks))
    if save not in get_args(SaveMode):
        problems.append(expected("save", f"one of {', '.join(get_args(SaveMode))}", repr(save)))
    is_rows = isinstance(capacity, int) and not isinstance(capacity, bool) and capacity > 0 and capacity % BLOCK == 0
    if not (capacity in (None, "worst") or is_rows):
        problems.append(expected("capacity", f"a positive multiple of {BLOCK}, 'worst' or None", repr(capacity)))
    if tokens < 0:
        problems.append(expected("tokens", "0 or more", tokens))
    if options.weights not in BYTES_OF:
        problems.append(expected("weights", f"one of {', '.join(BYTES_OF)}", repr(options.weights)))
    if options.precision not in ("fp8", "bf16"):
        problems.append(expected("precision", "'fp8' or 'bf16'", repr(options.precision)))
    if options.wgrad_operands not in ("bf16", "fp8"):
        problems.append(expected("wgrad_operands", "'bf16' or 'fp8'", repr(options.wgrad_operands)))
    if not 0 <= options.steal_us <= 1000:
        problems.append(expected("steal_us", "a number from 0 to 1000", options.steal_us))
    if options.is_packed and (options.weights, options.backend) != ("fp8", "cute"):
        got = f"True with {options.weights!r} and {options.backend!r}"
        problems.append(expected("is_packed", "False unless weights are 'fp8' and the backend is 'cute'", got))
    if options.backend not in ("steps", "cute"):
        problems.append(expected("backend", "'steps' or 'cute'", repr(options.backend)))
    if options.backend == "cute":
        odd = [f"{n} = {v}" for n, v in (("H", config.hidden_size), ("I", config.intermediate_size)) if v % BLOCK]
        if odd or options.precision != "fp8" or (ranks > 1 and not options.is_virtual):
            got = ", ".join([*odd, options.precision, f"{ranks} ranks{' virtual' * options.is_virtual}"])
            want = f"'steps' unless H and I are multiples of {BLOCK}, in fp8, on one rank or virtual ones"
            problems.append(expected("backend", want, f"'cute' with {got}"))
    if problems:
        raise MegaMoEValueError("\n".join(problems))
