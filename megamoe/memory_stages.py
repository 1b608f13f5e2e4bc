"""The tensors of one `mega_moe` call and the order in which they live: what `memory_plan` adds up.

Two ways to run a call: the unfused steps (`megamoe.unfused`) and the fused kernels (`megamoe.backends.cute`).
"""

from __future__ import annotations

import dataclasses
from typing import Literal, TypeAlias

from cute_kernels import workspace
from megamoe.config import MoEConfig
from megamoe.quantize import ceil_div
from megamoe.recipe import BLOCK

SaveMode: TypeAlias = Literal["none", "pool", "repull", "recompute"]
BYTES_OF = {"fp8": 1, "bf16": 2, "fp32": 4}
ASSUMED_SMS = 132


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    """What else decides the memory.

    Attributes:
        weights: "bf16" or "fp32" masters, which train, or "fp8", frozen: no gradient and no forward copy of them.
        precision: of the recipe, "fp8" or "bf16".
        is_virtual: all ranks live in this process (a LocalWorld): what is planned is all of them together.
        wgrad_operands: of the recipe, "bf16" or "fp8"; with precision "bf16" it says nothing.
        backend: "steps", the unfused path of torch and Triton, or "cute", the fused kernels.
        steal_us: of the layer's `OverlapConfig`: above 0 the fused backward of several ranks holds copies for dW13.
        is_packed: after `MegaMoE.pack_weights()`: FP8 weights are held in the fused kernels' order alone.
    """

    weights: Literal["fp8", "bf16", "fp32"] = "bf16"
    precision: Literal["fp8", "bf16"] = "fp8"
    is_virtual: bool = False
    wgrad_operands: Literal["bf16", "fp8"] = "fp8"
    backend: Literal["steps", "cute"] = "steps"
    steal_us: float = 0.0
    is_packed: bool = False


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
class Call:
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
        held = [Item(f"{name}experts, {kind}", self.elements * BYTES_OF[kind], f"3 * H * I * E_l * {BYTES_OF[kind]}")]
        return held + ([Item(f"{name}scales", self.scales, "of 128 x 128 blocks")] if kind == "fp8" else [])

    def copies(self, name: str, save: SaveMode) -> list[Item]:
        precision, kind = self.options.precision, self.options.weights
        size = self.elements + self.scales if precision == "fp8" else 2 * self.elements
        each = "3 * H * I * E_l and scales" if precision == "fp8" else "3 * H * I * E_l * 2"
        both = save != "none"
        held = [] if kind == precision and not self.is_fused else [Item(f"{name}forward copy", size, each)]
        if self.options.is_packed:
            held = [Item(f"{name}scales of tiles", 2 * self.scales, "4 words for two blocks of 128 x 128")]
        held += [Item(f"{name}transposed copy", size, each)] if both else []
        if self.is_fused and kind == "fp8":  # others are quantised straight into the kernels' order
            tables = 3 * self.hidden * self.inter // 2 * (1 + both)
            held.append(Item(f"{name}kernel order tables", tables, "8 bytes a 16 of one expert's weights"))
        return held

    @property
    def is_fused(self) -> bool:
        return self.options.backend == "cute"

    def gradients(self, name: str) -> Item:
        width = BYTES_OF[self.options.weights]
        return Item(f"{name}weight gradients", self.elements * width, f"3 * H * I * E_l * {width}")

    # tensors of a call, of all local ranks together

    @property
    def plan(self) -> Item:
        per_rank = 4 * (2 * self.experts + 1 + 3 * self.rows)
        own = 2 * 4 * self.tokens * self.slots
        return Item("routing plan", self.ranks * (per_rank + own), "3 words a row, 2 words a slot, of all ranks")

    @property
    def row_order(self) -> Item:
        return Item("row order", 4 * (self.rows + 2 * self.experts + 1) * self.local, "a word a row")

    def workspace(self, name: str, save: SaveMode) -> Item:
        """What fused kernels keep between calls: flags, send and combine buffers; without `save` the pool too."""
        tokens, rows = self.tokens, self.rows
        if save == "none":  # sizes are rounded up, so that calls of other sizes share it
            tokens = max(1 << (tokens - 1).bit_length(), BLOCK)
            rows = workspace.capacity_rows(tokens * self.slots * self.ranks, self.experts)
        experts, ctas = self.experts * self.ranks, ASSUMED_SMS // self.ranks
        size = workspace.layout(self.hidden, tokens, self.slots, experts, self.ranks, ctas, rows // BLOCK).size
        if save in ("none", "recompute"):
            size += self.activations(rows, self.hidden) + self.activations(rows, self.inter) + 8 * rows
        return Item(f"{name}workspace", size * self.local, "T * K * H * 2 and what is sent")

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

    def wgrad_operands(self, name: str) -> Item:
        """What the larger of the two weight gradients reads beside what is there, of one rank."""
        if self.options.precision == "bf16":
            return Item(name, 0, "the pool itself")
        width = 2 * self.inter + self.hidden
        if self.options.wgrad_operands == "bf16":
            return Item(name, 2 * self.rows * self.hidden, "P * H * 2")
        # transposed e4m3 with scales along the rows; the torch steps keep bf16 instead
        return Item(name, self.rows * width + 4 * self.rows * width // BLOCK, "P * (2I + H) and scales")

    def out(self, name: str) -> Item:
        return Item(name, 2 * self.tokens * self.hidden * self.local, "T * H * 2")

    def exchanged(self, name: str, bytes_per_row: int) -> list[Item]:
        """Rows on their way between processes: those that leave and those that arrive."""
        if self.local == self.ranks:
            return []
        return [Item(name, 2 * self.tokens * self.slots * bytes_per_row, "T * K rows sent, as many received")]

    def saved(self, save: SaveMode) -> list[Item]:
        """What `megamoe.operators.pack` hands to autograd."""
        kept = [self.row_order if self.is_fused else self.plan, self.row_weights]
        kept += [self.gate_up] if save in ("pool", "repull") else []
        return kept + ([self.pool()] if save == "pool" else [])


class Ledger:
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


def step(ledger: Ledger, config: MoEConfig, calls: list[tuple[str, Call]], save: SaveMode, tokens: int) -> list[Item]:
    """Forward and, unless save is "none", backward of a layer; returns what is saved in between."""
    is_fused = calls[0][1].is_fused
    ledger.hold(*[call.workspace(name, save) for name, call in calls if is_fused])
    saved = _router(ledger, config, tokens, save != "none", calls[0][1].options)
    for name, call in calls:
        kept = [dataclasses.replace(item, name=f"{name}{item.name}") for item in call.saved(save)]
        if is_fused:
            _fused_forward(ledger, name, call, save)
        else:
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
        (_fused_backward if is_fused else _backward)(ledger, name, call, save)
        ledger.drop(*[item for item in ledger.alive if item.startswith("~")])
        ledger.drop(*[f"{name}{item.name}" for item in call.saved(save)])
        ledger.hold(call.out(f"{name}dx"))
    return saved


def _router(ledger: Ledger, config: MoEConfig, tokens: int, trains: bool, options: PlanOptions) -> list[Item]:
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


def _forward(ledger: Ledger, name: str, call: Call) -> None:
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


def _backward(ledger: Ledger, name: str, call: Call, save: SaveMode) -> None:
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
        ledger.hold(call.wgrad_operands("~operands of wgrad"))
        ledger.mark(f"{name}wgrad")


def _fused_forward(ledger: Ledger, name: str, call: Call, save: SaveMode) -> None:
    """`CuteBackend.forward`, behind the copies that weights which train get every time."""
    if save != "none":
        ledger.hold(_passing(call.row_order), _passing(call.row_weights))
    if save in ("pool", "repull"):
        ledger.hold(_passing(call.pool()), _passing(call.gate_up), _fused_h(call))
    ledger.hold(call.out("~out"))
    ledger.mark(f"{name}fused forward")


def _fused_backward(ledger: Ledger, name: str, call: Call, save: SaveMode) -> None:
    """`CuteBackend.backward`."""
    trains = call.options.weights != "fp8"
    if save == "recompute" or (save == "repull" and trains):
        gate_up = dataclasses.replace(call.gate_up, name="~gate/up again")
        again = (_fused_h(call), _passing(call.row_order), _passing(call.row_weights))
        ledger.hold(_passing(call.pool()), gate_up, *again, call.out("~out again"))
        ledger.mark(f"{name}fused forward again")
        ledger.drop(*[item.name for item in again], "~out again")
    wide = call.rows * call.inter * call.local
    ledger.hold(
        call.pool("~pool of dout"),
        Item("~dgate/dup", call.activations(call.rows, 2 * call.inter, 2) * call.local, "P * 2I and scales"),
        Item("~dgate/dup, bf16", 4 * wide, "P * 2I * 2"),
        Item("~weighted activations", 2 * wide, "P * I * 2"),
        Item("~partial sums of dp", 4 * wide // BLOCK, "P * I / 128 * 4"),
        call.out("~dx"),
    )
    steals = trains and call.ranks > 1 and call.options.steal_us > 0 and call.options.wgrad_operands == "fp8"
    if steals:
        copies = call.wgrad_operands("").num_bytes * call.local
        ledger.hold(Item("~operands of dW13", copies, "P * (2I + H) and scales"))
    ledger.mark(f"{name}fused dgrad")
    if steals:
        width = call.inter + call.hidden
        copies = call.rows * width + 4 * call.rows * width // BLOCK
        ledger.hold(Item("~operands of dW2", copies, "P * (I + H) and scales"))
        ledger.mark(f"{name}wgrad")
    elif trains:
        ledger.hold(call.wgrad_operands("~operands of wgrad"))
        ledger.mark(f"{name}wgrad")


def _fused_h(call: Call) -> Item:
    return Item("~h", call.activations(call.rows, call.inter) * call.local, "P * I and scales")


def _passing(item: Item) -> Item:
    """The same tensor while it is local to a call."""
    return dataclasses.replace(item, name=f"~{item.name}")
