"""One problem through a backend, the emulation and the oracle, with every stage laid side by side in one row order."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from megamoe import backends, torch_steps, unfused
from megamoe.backends.stepwise import StepwiseBackend
from megamoe.cli.problem import Problem
from megamoe.comm import LocalWorld, Transport, as_transport
from megamoe.gates import GATES, Gates, rel_l2, sqnr_db, worst_expert_db, worst_row, worst_weight_grad
from megamoe.quantize import QuantizedRows, QuantizedWeight
from megamoe.recipe import Recipe
from megamoe.reference import oracle_backward, oracle_forward, routed
from megamoe.routing_plan import RankPlan, RoutingPlan

Kind = Literal["rows", "tokens", "slots", "experts"]
"""What the first dimension is: routed rows, tokens, tokens of [T, K], or experts."""


class Recorder:
    """A module of steps that remembers what each step returned, call by call."""

    def __init__(self, steps: Any) -> None:
        self._steps = steps
        self.results: dict[str, list[Any]] = defaultdict(list)

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._steps, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            self.results[name].append(result)
            return result

        return call


@dataclasses.dataclass(frozen=True)
class Value:
    """A stage's tensor over all ranks, in the global order, and the bits behind it."""

    tensor: torch.Tensor
    bits: tuple[torch.Tensor, ...]


Values = dict[str, Value]
KINDS: dict[str, Kind] = {
    "x": "rows",
    "gate_up": "rows",
    "h": "rows",
    "y": "rows",
    "out": "tokens",
    "dh": "rows",
    "d_gate_up": "rows",
    "p*act": "rows",
    "dX": "rows",
    "dp": "slots",
    "dx": "tokens",
    "dW13": "experts",
    "dW2": "experts",
}
"""Every stage in the order of the computation. A fused backend shows only what it stores."""


def run_backend(name: str, problem: Problem, recipe: Recipe) -> tuple[str, Values]:
    """Forward and backward of a problem on its virtual ranks.

    Args:
        name: "auto" or a backend.
        problem: where its tensors are.
        recipe: formats and clamp.

    Returns:
        (the backend that ran, its stages).

    Raises:
        BackendUnavailable: the backend does not run this here.
    """
    spec, device = problem.spec, problem.w13_E2IH.device
    world: Literal["one", "local"] = "one" if spec.num_ranks == 1 else "local"
    asked = backends.Problem.of(
        device,
        recipe,
        hidden_size=spec.hidden,
        intermediate_size=spec.intermediate,
        num_experts=spec.num_experts,
        top_k=spec.top_k,
        num_ranks=spec.num_ranks,
        world=world,
    )
    backend = backends.resolve(name, asked)
    if backend.name in ("torch", "triton"):
        return backend.name, run_steps(backend.steps, problem, recipe)
    return backend.name, run_values(backend, problem, recipe)


def run_values(
    backend: backends.Backend, problem: Problem, recipe: Recipe, transport: Transport | None = None
) -> Values:
    """What a backend stores of a forward and backward.

    Args:
        transport: between the problem's ranks; None: they are virtual ranks of this process. Over a process group the
            stages are those of this process's rank.
    """
    world = transport or as_transport(LocalWorld(problem.spec.num_ranks), backend.steps)
    return _run(backend, None, problem, recipe, world)


def run_steps(steps: Any, problem: Problem, recipe: Recipe) -> Values:
    """The unfused layer with a module of steps, every stage recorded."""
    recorder = Recorder(steps)
    transport = as_transport(LocalWorld(problem.spec.num_ranks), recorder)  # type: ignore[arg-type]
    return _run(_Unfused(recorder), recorder, problem, recipe, transport)


def emulate(problem: Problem, recipe: Recipe, gate_up: torch.Tensor | None = None) -> Values:
    """The recipe's emulation: the torch steps on one rank that holds every token and every expert.

    Args:
        problem: the call. recipe: formats and clamp.
        gate_up: the rows to go on with after GEMM 1, instead of the emulation's own.
    """
    steps = torch_steps if gate_up is None else _GivenGateUp(gate_up)
    return run_steps(steps, problem.on_one_rank(), recipe)


class _GivenGateUp:
    """The torch steps, with the result of the first GEMM given."""

    def __init__(self, gate_up: torch.Tensor) -> None:
        self._given: torch.Tensor | None = gate_up

    def __getattr__(self, name: str) -> Any:
        return getattr(torch_steps, name)

    def grouped_gemm(self, rows: QuantizedRows, weight: QuantizedWeight, plan: RankPlan, *rest: Any) -> torch.Tensor:
        if self._given is None:
            return torch_steps.grouped_gemm(rows, weight, plan, *rest)
        given, self._given = self._given, None
        out = given.new_zeros(plan.num_rows, given.shape[1])
        out[plan.token >= 0] = given
        return out


class _Unfused(StepwiseBackend):
    """The stepwise backend around given steps."""

    def __init__(self, steps: Any) -> None:
        super().__init__("recorded", "megamoe.torch_steps")
        self._given = steps

    @property
    def steps(self) -> Any:
        return self._given


def _run(
    backend: backends.Backend, recorder: Recorder | None, problem: Problem, recipe: Recipe, transport: Transport
) -> Values:
    ranks = transport.local_ranks
    num_ranks = len(ranks)

    def local(values: Sequence[Any]) -> list[Any]:
        return [values[rank] for rank in ranks]

    experts = []
    for rank in ranks:
        w13, w2 = problem.weights_of(rank)
        a, a_t = backend.copy_weight(w13, 2, recipe, True)
        b, b_t = backend.copy_weight(w2, 1, recipe, True)
        experts.append(backend.prepare(unfused.ExpertWeights(a, b, a_t, b_t)))
    outs, saved = backend.forward(
        transport,
        local(problem.xs),
        local(problem.topk_ids),
        local(problem.topk_weights),
        experts,
        recipe,
        unfused.ForwardOptions(save="pool"),
    )
    assert saved is not None
    dw13, dw2 = (
        [torch.full(v.shape, float("nan"), device=v.device) for v in local(w.chunk(problem.spec.num_ranks))]
        for w in (problem.w13_E2IH, problem.w2_EHI)
    )
    grads = backend.backward(transport, local(problem.douts), saved, experts, unfused.Needs(w13=dw13, w2=dw2))
    assert grads.dx is not None and grads.dp is not None
    values = {
        "out": _joined(outs),
        "dp": _joined(grads.dp),
        "dx": _joined(grads.dx),
        "dW13": _joined(dw13),
        "dW2": _joined(dw2),
    }
    rows = _Rows(saved.plan, ranks)
    if saved.pools is not None:
        values["x"] = rows.quantized(saved.pools)
    if saved.gate_ups is not None:
        values["gate_up"] = rows.plain(saved.gate_ups)
    if recorder is not None:
        gemm = recorder.results["grouped_gemm"]  # gate_up of all ranks, y of all ranks, then (dh, dX) rank by rank
        back = recorder.results["swiglu_backward"]
        values["h"] = rows.quantized(recorder.results["swiglu"])
        values["y"] = rows.plain(gemm[num_ranks : 2 * num_ranks])
        values["dh"] = rows.plain(gemm[2 * num_ranks :: 2])
        values["dX"] = rows.plain(gemm[2 * num_ranks + 1 :: 2])
        values["d_gate_up"] = rows.quantized([g.d_gate_up for g in back])
        values["p*act"] = rows.plain([g.weighted_act for g in back])
    return {stage: values[stage] for stage in KINDS if stage in values}


class _Rows:
    """Pools of all ranks as the real rows of one global order: (expert, source rank, token, slot)."""

    def __init__(self, plan: RoutingPlan | tuple[unfused.RowOrder, ...], ranks: Sequence[int]) -> None:
        if isinstance(plan, RoutingPlan):
            self._real = [plan.ranks[rank].token >= 0 for rank in ranks]
        else:
            self._real = [_is_real(order) for order in plan]

    def plain(self, pools: list[torch.Tensor]) -> Value:
        whole = torch.cat([_select(pool, real) for pool, real in zip(pools, self._real, strict=True)])
        return Value(whole, (whole,))

    def quantized(self, pools: list[QuantizedRows]) -> Value:
        values = torch.cat([p.dequantize()[real] for p, real in zip(pools, self._real, strict=True)])
        bits = [torch.cat([_select(p.data, real) for p, real in zip(pools, self._real, strict=True)])]
        scales = [(p.scale_row_major(), real) for p, real in zip(pools, self._real, strict=True)]
        bits += [torch.cat([s[real] for s, real in scales if s is not None])] if scales[0][0] is not None else []
        return Value(values, tuple(bits))


def _is_real(order: unfused.RowOrder) -> torch.Tensor:
    """Which rows of a fused kernel's pool hold a token; codes behind the last segment are undefined."""
    row = torch.arange(order.codes.shape[0], device=order.codes.device)
    return (order.codes >= 0) & (row < order.offs[-1])


def _select(pool: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    return (pool.view(torch.uint8) if pool.element_size() == 1 else pool)[real]


def _joined(parts: list[torch.Tensor]) -> Value:
    whole = torch.cat(parts)
    return Value(whole, (whole,))


@dataclasses.dataclass(frozen=True)
class Oracle:
    """The unrounded stages, and what judging them needs.

    Attributes:
        values: fp64, by stage.
        dp_spread_TK: yardstick of dp.
        expert_P: expert of each row.
    """

    values: dict[str, torch.Tensor]
    dp_spread_TK: torch.Tensor
    expert_P: torch.Tensor


def run_oracle(problem: Problem, clamp: float | None, gate_up: torch.Tensor | None = None) -> Oracle:
    """The oracle on one rank that holds every token.

    Args:
        problem: the call. clamp: of its recipe.
        gate_up: a backend's rows, which decide the masks of the clamp's gradients; None: the oracle's own.
    """
    inputs = problem.global_inputs()
    forward = oracle_forward(inputs, clamp)
    backward = oracle_backward(inputs, torch.cat(problem.douts), clamp, gate_up)
    assert backward.rows is not None and backward.dp_spread_TK is not None
    order = routed(inputs.topk_ids_TK)
    device = inputs.x_TH.device
    token = torch.cat([t for _, t, _ in order]) if order else torch.empty(0, dtype=torch.int64, device=device)
    expert = torch.cat([torch.full_like(t, e) for e, t, _ in order]) if order else token
    values = {
        "x": inputs.x_TH.double()[token],
        "gate_up": forward.gate_up_P2I,
        "h": forward.h_PI,
        "y": forward.y_PH,
        "out": forward.out_TH,
        "dh": backward.rows.dh_PI,
        "d_gate_up": backward.rows.d_gate_up_P2I,
        "p*act": backward.rows.weighted_act_PI,
        "dX": backward.rows.dx_PH,
        "dp": backward.dp_TK,
        "dx": backward.dx_TH,
        "dW13": backward.dw13_E2IH,
        "dW2": backward.dw2_EHI,
    }
    return Oracle(values, backward.dp_spread_TK, expert)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """How one stage compares.

    Attributes:
        stage: its name. sqnr_db, rel_l2: against the oracle, the whole tensor.
        worst_row: largest row error, relative to max(its norm, the rms norm of rows); dp: largest error of its spread.
        worst_row_idx: its row.
        worst_expert_db, worst_expert: least SQNR of an expert's rows or gradient, and the expert; None without experts.
        is_bitwise: whether all bits are those of the emulation.
        emulation_db: SQNR against the emulation.
        failures: which gates it misses; empty: passed.
    """

    stage: str
    sqnr_db: float
    rel_l2: float
    worst_row: float
    worst_row_idx: int
    worst_expert_db: float | None
    worst_expert: int | None
    is_bitwise: bool
    emulation_db: float
    failures: tuple[str, ...]


def judge(got: Values, beside: Values, oracle: Oracle, recipe: Recipe, least_db: float | None = None) -> list[Verdict]:
    """Compare every stage that `got` has, in the order of the computation.

    Args:
        got: of a backend. beside: what its bits are compared with, the emulation or another backend.
        oracle, recipe: of the same problem.
        least_db: bound against `beside`; None: that of the emulation.

    With a clamp, a value at the limit that rounding moves across it flips its mask: oracle and `beside` then have to
    take their masks from `got`'s gate and up, as `verify_problem` makes them.
    """
    gates = GATES[recipe.precision]
    if least_db is not None:
        gates = dataclasses.replace(gates, emulation_db=least_db)
    return [_judge(stage, got[stage], beside[stage], oracle, gates) for stage in KINDS if stage in got]


AFTER_MASKS = frozenset({"d_gate_up", "dX", "dp", "dx", "dW13"})
"""Stages behind the masks of the clamp (dp: behind values at the limit)."""


def _judge(stage: str, got: Value, emulated: Value, oracle: Oracle, gates: Gates) -> Verdict:
    kind, want = KINDS[stage], oracle.values[stage]
    tensor = got.tensor.double()
    whole_db, error = sqnr_db(tensor, want), rel_l2(tensor, want)
    expert_db: float | None = None
    expert: int | None = None
    if kind == "slots":
        ratio = worst_weight_grad(tensor, want, oracle.dp_spread_TK)
        row = int((tensor - want).abs().amax(1).argmax()) if tensor.numel() else -1
    else:
        ratio, row = worst_row(tensor.flatten(1), want.flatten(1))
    if kind == "experts":
        expert_db, expert = worst_expert_db(tensor, want)
    elif kind == "rows" and tensor.shape[0]:
        experts = oracle.expert_P.unique().tolist()
        figures = [sqnr_db(tensor[oracle.expert_P == e], want[oracle.expert_P == e]) for e in experts]
        expert_db, expert = min((-1e9 if f != f else f, e) for f, e in zip(figures, experts, strict=True))
    is_bitwise = all(have_same_bits(a, b) for a, b in zip(got.bits, emulated.bits, strict=True))
    emulation_db = sqnr_db(tensor, emulated.tensor.double())
    failures: list[str] = []

    def gate(holds: bool, text: str) -> None:
        if not holds:  # NaN holds nothing
            failures.append(text)

    if kind == "slots":
        gate(ratio <= gates.weight_grad, f"{ratio:.3g} of its spread > {gates.weight_grad}")
    else:
        gate(whole_db >= gates.tensor_db, f"{whole_db:.1f} dB < {gates.tensor_db:g}")
    if stage in ("out", "dx"):
        gate(ratio <= gates.row, f"row {row}: {ratio:.3g} > {gates.row}")
    if expert_db is not None:
        gate(expert_db >= gates.expert_db, f"expert {expert}: {expert_db:.1f} dB < {gates.expert_db:g}")
    gate(is_bitwise or emulation_db >= gates.emulation_db, f"beside: {emulation_db:.1f} dB < {gates.emulation_db:g}")
    return Verdict(stage, whole_db, error, ratio, row, expert_db, expert, is_bitwise, emulation_db, tuple(failures))


def have_same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal byte for byte: 0 and -0 are not, NaN may be."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def verify_problem(
    problem: Problem, recipe: Recipe, backend: str, progress: Callable[[str], None] = lambda _: None
) -> tuple[str, list[Verdict]]:
    """Run a problem three ways and compare.

    Args:
        problem: the call. recipe: formats and clamp. backend: name or "auto".
        progress: called with a few words before each part.

    Returns:
        (the backend that ran, a verdict for each stage it shows).
    """
    progress(f"{backend} backend")
    name, got = run_backend(backend, problem, recipe)
    progress("emulation")
    emulated = emulate(problem, recipe)
    masked_by = got["gate_up"].tensor if recipe.clamp is not None and "gate_up" in got else None
    if masked_by is not None:  # masks look at the backend's own values
        own = emulate(problem, recipe, masked_by)
        emulated |= {stage: own[stage] for stage in AFTER_MASKS}
    progress("oracle")
    oracle = run_oracle(problem, recipe.clamp, masked_by)
    return name, judge(got, emulated, oracle, recipe)
