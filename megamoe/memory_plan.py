"""What a layer will hold in memory, from its sizes alone, before anything is allocated.

Counted, per process: weights, the copies of them that GEMMs read, what a forward keeps for the backward, and what is
alive beside that at each stage of the unfused path (`megamoe.unfused`), whose peak this is. Not counted: x and the
gradient of out, which the caller holds, cuBLAS's workspaces, and what a kernel needs only while it runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Literal, TypeAlias, get_args

from megamoe.config import MoEConfig
from megamoe.errors import MegaMoEValueError, expected
from megamoe.quantize import ceil_div
from megamoe.recipe import BLOCK

SaveMode: TypeAlias = Literal["none", "pool", "repull", "recompute"]
_BYTES_OF = {"fp8": 1, "bf16": 2, "fp32": 4}


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    """What else decides the memory.

    Attributes:
        weights: "bf16" or "fp32" masters, which train, or "fp8", frozen: no gradient and no forward copy of them.
        precision: of the recipe, "fp8" or "bf16".
        is_virtual: all ranks live in this process (a LocalWorld): what is planned is all of them together.
    """

    weights: Literal["fp8", "bf16", "fp32"] = "bf16"
    precision: Literal["fp8", "bf16"] = "fp8"
    is_virtual: bool = False


@dataclasses.dataclass(frozen=True)
class Item:
    """One thing in memory: what it is and how its bytes come about."""

    name: str
    num_bytes: int
    formula: str = ""


@dataclasses.dataclass(frozen=True)
class Stage:
    """A moment of a step: what is alive then beside the weights and their copies."""

    name: str
    items: tuple[Item, ...]

    @property
    def num_bytes(self) -> int:
        return sum(item.num_bytes for item in self.items)


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
        MegaMoEValueError: E is not a multiple of R, or an argument is outside its choices.
    """
    options = options or PlanOptions()
    _check(config, ranks, save, capacity, tokens, options)
    local = ranks if options.is_virtual else 1
    routed = _Call(
        config.hidden_size,
        config.intermediate_size,
        config.num_experts // ranks,
        config.top_k,
        tokens,
        pool_rows(config, ranks, capacity, tokens),
        ranks,
        local,
        options,
    )
    shared = None
    if config.num_shared_experts:
        rows = worst_rows(tokens * local, 1)
        inter = config.shared_intermediate_size
        shared = _Call(config.hidden_size, inter, 1, 1, tokens * local, rows, 1, 1, options)
    calls = [("", routed)] + ([("shared ", shared)] if shared is not None else [])
    ledger = _Ledger()
    saved = _step(ledger, config, calls, save, tokens * local)
    router = config.num_experts * config.hidden_size * (4 if options.weights == "fp32" else 2)
    weights = [Item("router", router + 4 * config.num_experts, "E * H and the bias")]
    weights += [item for name, call in calls for item in call.weights(name)]
    trains = save != "none" and options.weights != "fp8"
    size = f"H={config.hidden_size} I={config.intermediate_size} E={config.num_experts} K={config.top_k}"
    return MemoryPlan(
        title=f"{size} T={tokens} R={ranks}{' virtual' if options.is_virtual else ''}, weights {options.weights}, "
        f"{options.precision}, save={save}, capacity={capacity}",
        pool_rows=routed.rows,
        is_estimate=ranks > 1 and capacity is None,
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


@dataclasses.dataclass(frozen=True)
class _Call:
    """Sizes of one `mega_moe` call; all bytes are of this process, `local` ranks of it."""

    hidden: int
    inter: int
    experts: int
    slots: int
    tokens: int
    rows: int
    ranks: int
    local: int
    options: PlanOptions

    def activations(self, rows: int, channels: int, groups: int = 1) -> int:
        """Bytes of quantised rows: data and scales, or bf16."""
        if self.options.precision == "bf16":
            return 2 * rows * channels
        return rows * channels + 4 * rows * groups * ceil_div(channels // groups, BLOCK)

    @property
    def scales(self) -> int:
        """Bytes of the 128 x 128 scales of all weights of this process."""
        grid = ceil_div(self.hidden, BLOCK) * ceil_div(self.inter, BLOCK)
        return 4 * 3 * grid * self.experts * self.local

    @property
    def elements(self) -> int:
        return 3 * self.hidden * self.inter * self.experts * self.local

    def weights(self, name: str) -> list[Item]:
        kind = self.options.weights
        held = [Item(f"{name}experts, {kind}", self.elements * _BYTES_OF[kind], f"3 * H * I * E_l * {_BYTES_OF[kind]}")]
        return held + ([Item(f"{name}scales", self.scales, "of 128 x 128 blocks")] if kind == "fp8" else [])

    def copies(self, name: str, save: SaveMode) -> list[Item]:
        precision, kind = self.options.precision, self.options.weights
        size = self.elements + self.scales if precision == "fp8" else 2 * self.elements
        each = "3 * H * I * E_l and scales" if precision == "fp8" else "3 * H * I * E_l * 2"
        held = [] if kind == precision else [Item(f"{name}forward copy", size, each)]
        return held + ([Item(f"{name}transposed copy", size, each)] if save != "none" else [])

    def gradients(self, name: str) -> Item:
        width = _BYTES_OF[self.options.weights]
        return Item(f"{name}weight gradients", self.elements * width, f"3 * H * I * E_l * {width}")

    # tensors of a call, of all local ranks together

    @property
    def plan(self) -> Item:
        per_rank = 4 * (2 * self.experts + 1 + 3 * self.rows)
        own = 2 * 4 * self.tokens * self.slots
        return Item("routing plan", self.ranks * (per_rank + own), "3 words a row, 2 words a slot, of all ranks")

    @property
    def row_weights(self) -> Item:
        return Item("row weights", 4 * self.rows * self.local, "4 P")

    @property
    def gate_up(self) -> Item:
        return Item("gate/up", 4 * self.rows * self.inter * self.local, "P * 2I * 2")

    def pool(self, name: str = "pool") -> Item:
        return Item(name, self.activations(self.rows, self.hidden) * self.local, "P * H and scales")

    def sources(self, name: str) -> Item:
        """Tokens as they leave their source; in bf16 these are the caller's own."""
        if self.options.precision == "bf16":
            return Item(name, 0, "the input itself")
        return Item(name, self.activations(self.tokens, self.hidden) * self.local, "T * H and scales")

    def rows_of(self, name: str, copies: int = 1) -> Item:
        return Item(name, 2 * self.rows * self.hidden * copies, "P * H * 2")

    def operand(self, name: str) -> Item:
        """Rows of a pool as wgrad reads them; in bf16 these are the pool's own."""
        return self.rows_of(name) if self.options.precision == "fp8" else Item(name, 0, "the pool itself")

    def out(self, name: str) -> Item:
        return Item(name, 2 * self.tokens * self.hidden * self.local, "T * H * 2")

    def exchanged(self, name: str, bytes_per_row: int) -> list[Item]:
        """Rows on their way between processes: those that leave and those that arrive."""
        if self.local == self.ranks:
            return []
        return [Item(name, 2 * self.tokens * self.slots * bytes_per_row, "T * K rows sent, as many received")]

    def saved(self, save: SaveMode) -> list[Item]:
        """What `megamoe.operators.pack` hands to autograd."""
        kept = [self.plan, self.row_weights]
        kept += [self.gate_up] if save in ("pool", "repull") else []
        return kept + ([self.pool()] if save == "pool" else [])


class _Ledger:
    """What is alive, and the stages so far."""

    def __init__(self) -> None:
        self.alive: dict[str, Item] = {}
        self.stages: list[Stage] = []

    def hold(self, *items: Item) -> None:
        for item in items:
            assert item.name not in self.alive, item.name
            self.alive[item.name] = item

    def drop(self, *names: str) -> None:
        for name in names:
            self.alive.pop(name, None)

    def mark(self, name: str) -> None:
        items = (dataclasses.replace(item, name=item.name.removeprefix("~")) for item in self.alive.values())
        self.stages.append(Stage(name, tuple(items)))


def _step(
    ledger: _Ledger, config: MoEConfig, calls: list[tuple[str, _Call]], save: SaveMode, tokens: int
) -> list[Item]:
    """Forward and, unless save is "none", backward of a layer; returns what is saved in between."""
    saved = _router(ledger, config, tokens, save != "none", calls[0][1].options)
    for name, call in calls:
        kept = [dataclasses.replace(item, name=f"{name}{item.name}") for item in call.saved(save)]
        _forward(ledger, name, call)
        ledger.drop(*[item for item in ledger.alive if item.startswith("~")])
        if save != "none":
            ledger.hold(*kept)
            saved += kept
        ledger.hold(call.out(f"{name}out"))
    if len(calls) > 1:
        ledger.hold(calls[0][1].out("sum of outs"))
        ledger.mark("add the shared expert")
        ledger.drop("out", "shared out")
    if save == "none":
        return []
    for name, call in reversed(calls):
        if call.options.weights != "fp8":
            ledger.hold(call.gradients(name))
        _backward(ledger, name, call, save)
        ledger.drop(*[item for item in ledger.alive if item.startswith("~")])
        ledger.drop(*[f"{name}{item.name}" for item in call.saved(save)])
        ledger.hold(call.out(f"{name}dx"))
    return saved


def _router(ledger: _Ledger, config: MoEConfig, tokens: int, trains: bool, options: PlanOptions) -> list[Item]:
    """Scores in fp32. A backward needs x in fp32 for the router's weight."""
    x = Item("router x, fp32", 4 * tokens * config.hidden_size, "T * H * 4")
    weight = Item("router weight, fp32", 4 * config.num_experts * config.hidden_size, "E * H * 4")
    scores = Item("router scores", 4 * tokens * config.num_experts, "T * E * 4")
    chosen = Item("router ids and weights", 16 * tokens * config.top_k, "T * K * 16")
    logits = Item("~logits and choice", 3 * 4 * tokens * config.num_experts, "3 * T * E * 4")
    kept = [x, scores, chosen] if options.weights == "fp32" else [x, weight, scores, chosen]
    ledger.hold(*kept, logits)
    ledger.mark("router")
    ledger.drop(logits.name)
    if not trains:
        ledger.drop(*[item.name for item in kept if item is not chosen])
    return kept


def _forward(ledger: _Ledger, name: str, call: _Call) -> None:
    """`megamoe.unfused.forward`; names that begin with ~ end with it."""
    h = Item("~h", call.activations(call.rows, call.inter), "P * I and scales")
    ledger.hold(_passing(call.plan), call.sources("~quantised x"), _passing(call.pool()))
    ledger.hold(*call.exchanged("~exchange", call.activations(1, call.hidden)))
    ledger.mark(f"{name}dispatch")
    ledger.drop("~quantised x", "~exchange")
    ledger.hold(_passing(call.row_weights), _passing(call.gate_up))
    ledger.hold(h, call.rows_of("~y", call.local))
    ledger.mark(f"{name}GEMM 1, SwiGLU, GEMM 2")
    ledger.hold(*call.exchanged("~exchange", 2 * call.hidden), call.out("~out"))
    ledger.mark(f"{name}combine")


def _backward(ledger: _Ledger, name: str, call: _Call, save: SaveMode) -> None:
    """`megamoe.unfused.backward`, with the gradients of everything that trains."""
    trains = call.options.weights != "fp8"
    ledger.hold(call.sources("~quantised dout"), call.pool("~pool of dout"))
    ledger.hold(*call.exchanged("~exchange", call.activations(1, call.hidden)))
    ledger.mark(f"{name}dispatch of dout")
    ledger.drop("~quantised dout", "~exchange")
    if save == "recompute" or (save == "repull" and (trains or call.ranks > 1)):
        ledger.hold(call.sources("~quantised x"), _passing(call.pool()))
        ledger.mark(f"{name}dispatch of x again")
        ledger.drop("~quantised x")
    if save == "recompute":
        ledger.hold(_passing(call.gate_up))
    dh = Item("~dh", 4 * call.rows * call.inter, "P * I * 4")
    done = call.local - 1  # virtual ranks before the last
    quantised = call.activations(call.rows, 2 * call.inter, 2) * call.local
    ledger.hold(
        dh,
        Item("~dgate/dup", quantised if call.options.precision == "fp8" else 0, "P * 2I and scales"),
        Item("~dgate/dup, bf16", 4 * call.rows * call.inter * call.local, "P * 2I * 2"),
        Item("~weighted activations", 2 * call.rows * call.inter * call.local, "P * I * 2"),
        call.rows_of("~dX rows", done),
    )
    ledger.mark(f"{name}dSwiGLU")
    ledger.drop("~dh", "~dX rows")
    ledger.hold(call.rows_of("~dX rows", call.local), call.out("~dx"))
    ledger.hold(*call.exchanged("~exchange", 2 * call.hidden))
    ledger.mark(f"{name}dX GEMM and combine")
    ledger.drop("~dX rows")
    if trains:
        ledger.hold(call.operand("~operand of wgrad"))
        ledger.mark(f"{name}wgrad")


def _passing(item: Item) -> Item:
    """The same tensor while it is local to a call."""
    return dataclasses.replace(item, name=f"~{item.name}")


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
    if options.weights not in _BYTES_OF:
        problems.append(expected("weights", f"one of {', '.join(_BYTES_OF)}", repr(options.weights)))
    if options.precision not in ("fp8", "bf16"):
        problems.append(expected("precision", "'fp8' or 'bf16'", repr(options.precision)))
    if problems:
        raise MegaMoEValueError("\n".join(problems))
