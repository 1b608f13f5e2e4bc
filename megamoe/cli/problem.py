"""Random problems for `megamoe verify`, the benchmarks and the tests: tokens, routing, weights, upstream gradients."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Literal, get_args

import torch

from megamoe.cli.options import within
from megamoe.errors import MegaMoEError, MegaMoEValueError, expected
from megamoe.quantize import QuantizedWeight
from megamoe.reference import Inputs
from megamoe.routing_plan import experts_per_rank

Routing = Literal["uniform", "balanced", "zipf", "one_expert", "first_rank", "masked", "duplicates"]
ROUTINGS: tuple[Routing, ...] = get_args(Routing)


@dataclasses.dataclass(frozen=True)
class Shape:
    """A size that is measured: E, H, I, K and T of one rank that holds everything."""

    num_experts: int
    hidden: int
    intermediate: int
    top_k: int
    num_tokens: int


SHAPES = {
    "A": Shape(32, 7168, 2048, 8, 8192),
    "B": Shape(128, 2048, 768, 8, 8192),
    "C": Shape(128, 4096, 1024, 8, 32768),
}
"""A: DeepSeek-V3 on one rank of eight. B: Qwen3-30B. C: between them, with many tokens."""

DEFAULT_TOKENS = 8192
"""T of a shape that is given by its four numbers."""


def shape_of(option: str, name: str, tokens: int | None = None, shapes: Mapping[str, Shape] = SHAPES) -> Shape:
    """A shape by its name or its four numbers.

    Args:
        option: that `name` is the value of. tokens: T of `--tokens`, None: the shape's. shapes: those with names.

    Raises:
        MegaMoEValueError: it is neither, or T is less than 1.
    """
    parts = name.split(",")
    if name in shapes:
        shape = shapes[name]
    elif len(parts) == 4 and all(part.isdecimal() and int(part) > 0 for part in parts):
        experts, hidden, inter, top_k = (int(part) for part in parts)
        shape = Shape(experts, hidden, inter, top_k, DEFAULT_TOKENS)
    else:
        raise MegaMoEValueError(expected(option, f"{', '.join(shapes)} or E,H,I,K", repr(name)))
    within("--tokens", tokens, 1)
    return dataclasses.replace(shape, num_tokens=tokens or shape.num_tokens)


@dataclasses.dataclass(frozen=True)
class ProblemSpec:
    """What to draw.

    Attributes:
        num_tokens: T of each rank; one entry a rank, which may be 0.
        hidden: H. intermediate: I. num_experts: E over all ranks. top_k: K.
        routing: "uniform": K different experts a token, the last expert never (where E > K); "balanced": K different
            experts a token, all experts equally often (up to one row); "zipf": popularity 1 / rank, E / 8 experts
            never; "one_expert": all slots to expert 0; "first_rank": only experts of rank 0;
            "masked": uniform with 30 % of the slots and every fifth token's whole row without an expert;
            "duplicates": drawn with repetition, every third token names one expert K times.
        seed: of everything; the same problem for every backend, device and number of ranks with the same total T.
    """

    num_tokens: tuple[int, ...] = (48,)
    hidden: int = 256
    intermediate: int = 128
    num_experts: int = 8
    top_k: int = 2
    routing: Routing = "uniform"
    seed: int = 0

    def __post_init__(self) -> None:
        sizes = {"hidden": self.hidden, "intermediate": self.intermediate, "top_k": self.top_k}
        problems = [expected(name, "at least 1", size) for name, size in sizes.items() if size < 1]
        if not self.num_tokens or min(self.num_tokens) < 0:
            problems.append(expected("num_tokens", "T >= 0 for each rank", self.num_tokens))
        if self.routing not in ROUTINGS:
            problems.append(expected("routing", f"one of {', '.join(ROUTINGS)}", repr(self.routing)))
        if problems:
            raise MegaMoEValueError("\n".join(problems))
        experts_per_rank(self.num_experts, self.num_ranks)

    @property
    def num_ranks(self) -> int:
        return len(self.num_tokens)

    def __str__(self) -> str:
        tokens = ",".join(str(t) for t in self.num_tokens)
        return (
            f"R={self.num_ranks} T={tokens} H={self.hidden} I={self.intermediate} E={self.num_experts} "
            f"K={self.top_k} {self.routing} seed={self.seed}"
        )


def spread(shape: Shape, ranks: int, routing: Routing = "uniform", option: str = "--ranks") -> ProblemSpec:
    """A shape whose tokens and experts are spread evenly over R ranks.

    Raises:
        MegaMoEValueError: R divides one of them not; `option` is what R was given by.
    """
    if ranks < 1 or shape.num_tokens % ranks or shape.num_experts % ranks:
        contract = f"a divisor of {shape.num_tokens} tokens and {shape.num_experts} experts"
        raise MegaMoEValueError(expected(option, contract, ranks))
    sizes = (shape.hidden, shape.intermediate, shape.num_experts, shape.top_k)
    return ProblemSpec((shape.num_tokens // ranks,) * ranks, *sizes, routing)


OPTIONS = {
    "num_experts": "--experts",
    "num_tokens": "--tokens",
    "hidden_size": "--hidden",
    "intermediate_size": "--intermediate",
    "num_shared_experts": "--shared",
    "is_packed": "--packed",
}
"""Fields whose option has another name than theirs."""


@contextlib.contextmanager
def spelled_as_options() -> Iterator[None]:
    """Inside, refusals of a ProblemSpec, a config or a Recipe name options of the command line, not fields."""
    try:
        yield
    except MegaMoEError as error:
        lines = [line.partition(":") for line in str(error).splitlines()]
        spelled = [
            (name if name.startswith("--") else OPTIONS.get(name, "--" + name.replace("_", "-"))) + colon + rest
            for name, colon, rest in lines
        ]
        raise type(error)("\n".join(spelled)) from None


@dataclasses.dataclass(frozen=True)
class Problem:
    """The inputs of one call on R ranks; lists have one entry a rank.

    Attributes:
        spec: what was drawn.
        xs: bf16 [T_r, H]. topk_ids: int64 [T_r, K]. topk_weights: fp32 [T_r, K]. douts: bf16 [T_r, H].
        w13_E2IH, w2_EHI: of all experts, bf16 or fp32; what the oracle uses.
        quantized: (w13, w2) as the GEMMs read them, None: the backend quantises w13_E2IH and w2_EHI itself.
    """

    spec: ProblemSpec
    xs: list[torch.Tensor]
    topk_ids: list[torch.Tensor]
    topk_weights: list[torch.Tensor]
    douts: list[torch.Tensor]
    w13_E2IH: torch.Tensor
    w2_EHI: torch.Tensor
    quantized: tuple[QuantizedWeight, QuantizedWeight] | None = None

    def global_inputs(self) -> Inputs:
        """The same call on one rank that holds every token, as the oracle takes it."""
        one = self.on_one_rank()
        return Inputs(one.xs[0], one.topk_ids[0], one.topk_weights[0], self.w13_E2IH, self.w2_EHI)

    def on_one_rank(self) -> Problem:
        """The same call on one rank that holds every token."""
        lists = (self.xs, self.topk_ids, self.topk_weights, self.douts)
        xs, ids, weights, douts = ([torch.cat(values)] for values in lists)
        spec = dataclasses.replace(self.spec, num_tokens=(sum(self.spec.num_tokens),))
        return dataclasses.replace(self, spec=spec, xs=xs, topk_ids=ids, topk_weights=weights, douts=douts)

    def weights_of(self, rank: int) -> tuple[torch.Tensor | QuantizedWeight, torch.Tensor | QuantizedWeight]:
        """w13 and w2 of one rank's experts, quantised if they are given so."""
        num_experts = experts_per_rank(self.spec.num_experts, self.spec.num_ranks)
        mine = slice(rank * num_experts, (rank + 1) * num_experts)
        if self.quantized is None:
            return self.w13_E2IH[mine], self.w2_EHI[mine]
        w13, w2 = (
            dataclasses.replace(w, data=w.data[mine], scale=None if w.scale is None else w.scale[mine])
            for w in self.quantized
        )
        return w13, w2


def make_problem(spec: ProblemSpec, device: torch.device | str = "cpu") -> Problem:
    """Draw a problem of unit scale, so that out and all gradients are O(1).

    Args:
        spec: sizes, routing and seed.
        device: where the tensors end; they are drawn on the CPU, so that the numbers don't depend on it.

    Returns:
        The problem.
    """
    generator = torch.Generator().manual_seed(spec.seed)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).bfloat16()

    total, h, i, e = sum(spec.num_tokens), spec.hidden, spec.intermediate, spec.num_experts
    x, dout = normal(total, h), normal(total, h)
    w13, w2 = normal(e, 2 * i, h, scale=h**-0.5), normal(e, h, i, scale=i**-0.5)
    ids = draw_topk_ids(spec, generator)
    weights = torch.rand(total, spec.top_k, generator=generator) + 0.1
    weights = weights / weights.sum(1, keepdim=True)
    split = lambda v: [part.clone().to(device) for part in v.split(list(spec.num_tokens))]  # noqa: E731
    return Problem(spec, split(x), split(ids), split(weights), split(dout), w13.to(device), w2.to(device))


def draw_topk_ids(spec: ProblemSpec, generator: torch.Generator) -> torch.Tensor:
    """Expert ids of all tokens of all ranks, int64 [sum of T, K]; see ProblemSpec.routing."""
    total, e, k = sum(spec.num_tokens), spec.num_experts, spec.top_k
    if spec.routing == "one_expert":
        return torch.zeros(total, k, dtype=torch.int64)
    if spec.routing == "balanced":
        token, slot = torch.arange(total)[:, None], torch.arange(k)[None, :]
        names = torch.rand(total // e + 1, e, generator=generator).argsort(1)  # in E tokens all experts come K times
        return names[token // e, (token % e * k + slot) % e]
    usable = e
    popularity = torch.ones(e)
    if spec.routing == "first_rank":
        usable = e // spec.num_ranks
    elif spec.routing == "zipf":
        usable = e - e // 8
        popularity = 1.0 / torch.arange(1, e + 1)
    elif e > k:
        usable = e - 1
    popularity[usable:] = 0.0
    repeat = spec.routing == "duplicates" or usable < k
    if not total:
        return torch.empty(0, k, dtype=torch.int64)
    ids = torch.multinomial(popularity.expand(total, e), k, replacement=repeat, generator=generator)
    if spec.routing == "duplicates":
        ids[::3] = ids[::3, :1]
    if spec.routing == "masked":
        ids[torch.rand(total, k, generator=generator) < 0.3] = -1
        ids[::5] = -1
    return ids
