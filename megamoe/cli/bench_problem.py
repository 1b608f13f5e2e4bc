"""What `megamoe bench` runs: a problem on the device, one closure a variant, and the errors against the fp64 oracle."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence

import torch

from megamoe.backends import BACKENDS, Backend
from megamoe.cli.problem import ProblemSpec, draw_topk_ids
from megamoe.comm import LocalWorld
from megamoe.comm.transport import Transport, as_transport
from megamoe.deferred import Later, WeightJob
from megamoe.gates import GATES, rel_l2, worst_expert_db, worst_row, worst_weight_grad
from megamoe.memory_plan import worst_rows
from megamoe.recipe import BLOCK, Recipe
from megamoe.reference import Inputs, oracle_backward, oracle_forward
from megamoe.unfused import ExpertWeights, ForwardOptions, Needs, Saved, SaveMode

Run = Callable[[], object]
Tensors = dict[str, list[torch.Tensor]]
"""Results by name, each the parts of the ranks in their order."""
Call = Callable[[], Tensors]


@dataclasses.dataclass(frozen=True)
class Variant:
    """One thing to time.

    Attributes:
        run: launches it on the current stream. flops, num_bytes: what it has to compute and move at least, 0 if that
            says nothing about it. capturable: whether a CUDA graph can hold it.
    """

    run: Run
    flops: int = 0
    num_bytes: int = 0
    capturable: bool = True


class BenchProblem:
    """Random inputs of a shape on R virtual ranks, drawn on the device.

    Args:
        spec: sizes and routing. recipe: numerics. device: where everything lives.
    """

    def __init__(self, spec: ProblemSpec, recipe: Recipe, device: torch.device) -> None:
        self.spec, self.recipe, self.device = spec, recipe, device
        generator = torch.Generator(device=device).manual_seed(spec.seed)

        def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
            values = torch.empty(*shape, dtype=torch.bfloat16, device=device)
            for part in values.view(shape[0], -1).split(max(1, shape[0] // 32)):
                part.copy_(torch.randn(part.shape, generator=generator, device=device) * scale)
            return values

        total, h, i, e = sum(spec.num_tokens), spec.hidden, spec.intermediate, spec.num_experts
        split = lambda v: [part.clone() for part in v.split(list(spec.num_tokens))]  # noqa: E731
        self.xs, self.douts = split(normal(total, h)), split(normal(total, h))
        self.w13, self.w2 = normal(e, 2 * i, h, scale=h**-0.5), normal(e, h, i, scale=i**-0.5)
        ids = draw_topk_ids(spec, torch.Generator().manual_seed(spec.seed)).to(device)
        weights = torch.rand(total, spec.top_k, generator=generator, device=device) + 0.1
        self.ids, self.weights = split(ids), split(weights / weights.sum(1, keepdim=True))
        self.num_rows = int((ids >= 0).sum())
        self.flops = 6 * self.num_rows * h * i
        # One rank's pool has room for any routing; several ranks' pools are sized by it, with one read-back, as in
        # the layer.
        self.options = ForwardOptions()
        if spec.num_ranks == 1:
            self.options = ForwardOptions(num_rows=worst_rows(total * spec.top_k, e), max_tokens=total)

        self._oracle: dict[str, torch.Tensor] = {}
        self._weight_grads: tuple[torch.Tensor, torch.Tensor] | None = None

    def oracle(self, training: bool) -> dict[str, torch.Tensor]:
        """out, and with `training` dx, dp, dw13, dw2, computed in fp64 and kept in fp32."""
        if not self._oracle or training > ("dx" in self._oracle):
            inputs = Inputs(torch.cat(self.xs), torch.cat(self.ids), torch.cat(self.weights), self.w13, self.w2)
            found = {"out": oracle_forward(inputs, self.recipe.clamp).out_TH.float()}
            if training:
                grads = oracle_backward(inputs, torch.cat(self.douts), self.recipe.clamp)
                found |= {"dx": grads.dx_TH.float(), "dp": grads.dp_TK.float()}
                found |= {"dw13": grads.dw13_E2IH.float(), "dw2": grads.dw2_EHI.float()}
                assert grads.dp_spread_TK is not None
                found["spread of dp"] = grads.dp_spread_TK.float()
            self._oracle = found
        return self._oracle

    def judge(self, backend: str, got: Tensors, names: Sequence[str]) -> dict[str, float]:
        """rel-L2 of a call's results against the oracle, as fields of a record.

        Args:
            backend: for messages. got: parts of each result in the order of ranks. names: of what it must hold.

        Raises:
            AssertionError: it holds something else, or a tensor misses a gate.
        """
        assert tuple(got) == tuple(names), f"{backend}: expected {', '.join(names)}, got {', '.join(got)}"
        figures: dict[str, float] = {}
        for name, parts in got.items():
            whole = parts[0] if len(parts) == 1 else torch.cat(parts)
            figures[f"rel_l2_{name}"] = rel_l2(whole, self._oracle[name])
            wrong = self._missed(name, whole, figures[f"rel_l2_{name}"])
            assert not wrong, f"{backend}: {name} {wrong}"
        return figures

    def _missed(self, name: str, got: torch.Tensor, error: float) -> str:
        """Which gate a result misses, "" if none; NaN misses all."""
        gates, want = GATES[self.recipe.precision], self._oracle[name]
        if name == "dp":
            ratio = worst_weight_grad(got, want, self._oracle["spread of dp"])
            return "" if ratio <= gates.weight_grad else f"off by {ratio:.3g} of its spread > {gates.weight_grad:g}"
        db = math.inf if error == 0.0 else -20 * math.log10(error) if error == error else math.nan
        if not db >= gates.tensor_db:
            return f"at {db:.1f} dB, expected at least {gates.tensor_db:g}"
        if name in ("out", "dx"):
            ratio, row = worst_row(got, want)
            return "" if ratio <= gates.row else f"row {row} off by {ratio:.3g} of its norm > {gates.row:g}"
        db, expert = worst_expert_db(got, want)
        return "" if db >= gates.expert_db else f"of expert {expert} at {db:.1f} dB < {gates.expert_db:g}"

    def counts(self) -> torch.Tensor:
        """Rows of each expert over all ranks, int64 [E]."""
        ids = torch.cat(self.ids)
        return torch.bincount(ids[ids >= 0], minlength=self.spec.num_experts)

    def forget_oracle(self) -> None:
        """Free it, and what the allocator holds."""
        self._oracle = {}
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def weight_grads(self) -> tuple[torch.Tensor, torch.Tensor]:
        """bf16 gradients of w13 and w2 that every variant overwrites."""
        if self._weight_grads is None:
            self._weight_grads = torch.empty_like(self.w13), torch.empty_like(self.w2)
        return self._weight_grads

    def requantized_bytes(self) -> int:
        """What making both copies of all weights reads and writes at least."""
        width = 1 if self.recipe.precision == "fp8" else 2
        return (self.w13.numel() + self.w2.numel()) * (2 + 2 * width)

    def transport(self, backend: Backend) -> Transport:
        return as_transport(LocalWorld(self.spec.num_ranks), backend.steps)

    def experts(self, backend: Backend, transposed: bool) -> list[ExpertWeights]:
        """Each rank's weights as the backend reads them, quantised beforehand."""
        mine = []
        for w13, w2 in zip(self.w13.chunk(self.spec.num_ranks), self.w2.chunk(self.spec.num_ranks), strict=True):
            made = backend.quantize_experts(w13, w2, self.recipe, transposed)
            if made is not None:
                mine.append(made)
                continue
            w13_q, w13_t = backend.copy_weight(w13, 2, self.recipe, transposed)
            w2_q, w2_t = backend.copy_weight(w2, 1, self.recipe, transposed)
            mine.append(backend.prepare(ExpertWeights(w13_q, w2_q, w13_t, w2_t)))
        return mine


BF16_WGRAD = "_wgrad_bf16"
"""Behind a backend's name: with Recipe(wgrad_operands="bf16")."""


class LayerRun:
    """The layer of one backend on a problem: forward, backward, both. Weight gradients are bf16, overwritten.

    Args:
        name: of the backend, perhaps with BF16_WGRAD. problem: what to run. training: whether backward will be called.
        experts: the weights as this backend reads them, None to prepare them.
    """

    def __init__(
        self, name: str, problem: BenchProblem, training: bool, experts: list[ExpertWeights] | None = None
    ) -> None:
        self.backend, self.problem = BACKENDS[name.removesuffix(BF16_WGRAD)], problem
        self.recipe = problem.recipe
        if name.endswith(BF16_WGRAD):
            self.recipe = dataclasses.replace(self.recipe, wgrad_operands="bf16")
        self.transport = problem.transport(self.backend)
        self.experts = problem.experts(self.backend, training) if experts is None else experts
        self._saved: Saved | None = None
        self._jobs: list[WeightJob] = []
        self.capturable = problem.spec.num_ranks == 1
        self.needs = Needs(w13=None, w2=None)
        if training:
            dw13, dw2 = (list(grad.chunk(problem.spec.num_ranks)) for grad in problem.weight_grads())
            self.needs = Needs(w13=dw13, w2=dw2)

    def calls(self) -> dict[str, Call]:
        """What is timed and what is checked, by bench."""
        return {
            "forward": self.forward,
            "backward": self.backward,
            "fwd_bwd": self.forward_backward,
            "fwd_bwd_requantized": self.requantize_forward_backward,
            "dgrad": self.dgrad,
            "wgrad": self.wgrad,
            "wgrad13": lambda: self.wgrad(w2=False),
            "wgrad2": lambda: self.wgrad(w13=False),
            "requantize": self.requantize,
        }

    def forward(self) -> Tensors:
        """Inference: nothing is saved."""
        return {"out": self._forward("none", self.experts)[0]}

    def training_forward(self) -> Tensors:
        """What it saves stays for `backward`."""
        outs, self._saved = self._forward("pool", self.experts)
        return {"out": outs}

    def backward(self) -> Tensors:
        """Of the last training forward, which it leaves as it is."""
        return self._backward(self._last(), self.experts, self.needs)

    def dgrad(self) -> Tensors:
        """dx and dp alone."""
        return self._backward(self._last(), self.experts, Needs())

    def prepare_wgrad(self) -> None:
        """Keep what forward and dgrad leave for the weight gradients."""
        self._jobs = []
        self._backward(self._last(), self.experts, Needs(later=Later(True, True, self._jobs.append)))

    def wgrad(self, w13: bool = True, w2: bool = True) -> Tensors:
        """Weight gradients alone, from what `prepare_wgrad` has kept."""
        assert self.needs.w13 is not None and self.needs.w2 is not None and self._jobs
        for job, dw13, dw2 in zip(self._jobs, self.needs.w13, self.needs.w2, strict=True):
            job(dw13 if w13 else None, dw2 if w2 else None, False)
        return ({"dw13": self.needs.w13} if w13 else {}) | ({"dw2": self.needs.w2} if w2 else {})

    def requantize(self) -> Tensors:
        """Both copies of all weights, from the bf16 masters, in the order in which this backend reads them."""
        self.problem.experts(self.backend, True)
        return {}

    def requantize_forward_backward(self) -> Tensors:
        """A training step, with the copies of weights that an optimizer step has changed."""
        return self._step(self.problem.experts(self.backend, True))

    def forward_backward(self) -> Tensors:
        """A training step; what it saves is gone afterwards."""
        return self._step(self.experts)

    def _step(self, experts: list[ExpertWeights]) -> Tensors:
        outs, saved = self._forward("pool", experts)
        assert saved is not None
        return {"out": outs} | self._backward(saved, experts, self.needs)

    def _last(self) -> Saved:
        assert self._saved is not None, "training_forward comes first"
        return self._saved

    def _forward(self, save: SaveMode, experts: list[ExpertWeights]) -> tuple[list[torch.Tensor], Saved | None]:
        p, options = self.problem, dataclasses.replace(self.problem.options, save=save)
        return self.backend.forward(self.transport, p.xs, p.ids, p.weights, experts, self.recipe, options)

    def _backward(self, saved: Saved, experts: list[ExpertWeights], needs: Needs) -> Tensors:
        grads = self.backend.backward(self.transport, self.problem.douts, saved, experts, needs)
        found = {"dx": grads.dx, "dp": grads.dp, "dw13": grads.dw13, "dw2": grads.dw2}
        return {name: parts for name, parts in found.items() if parts is not None}


STEP = ("out", "dx", "dp", "dw13", "dw2")
RESULTS = {
    "forward": STEP[:1],
    "backward": STEP[1:],
    "fwd_bwd": STEP,
    "fwd_bwd_requantized": STEP,
    "dgrad": STEP[1:3],
    "wgrad": STEP[3:],
    "wgrad13": STEP[3:4],
    "wgrad2": STEP[4:],
}
"""What a bench computes: all of it is compared before the bench is timed."""


def errors(
    problem: BenchProblem, run: LayerRun, benches: Collection[str], training: bool
) -> dict[str, dict[str, float]]:
    """rel-L2 of what the calls of these benches compute against the fp64 oracle, by bench, as fields of a record.

    `training`: leaves what backward and wgrad start from. "requantize" is judged by a step on what it makes.

    Raises:
        AssertionError: a tensor misses a gate of the recipe's precision; a wrong result has no time.
    """
    problem.oracle(training)
    found: dict[str, dict[str, float]] = {}
    if training:
        problem.judge(run.backend.name, run.training_forward(), ("out",))
        run.prepare_wgrad()
    calls = run.calls()
    judged = {*benches, "fwd_bwd_requantized"} if "requantize" in benches else benches
    for bench in [name for name in RESULTS if name in judged]:
        for grad in problem.weight_grads() if training else ():
            grad.fill_(math.nan)
        found[bench] = problem.judge(run.backend.name, calls[bench](), RESULTS[bench])
    return found | {"requantize": {}}


def triton_stages(problem: BenchProblem, experts: ExpertWeights, training: bool) -> dict[str, Variant]:
    """The steps of the Triton path one by one, on R = 1; bytes count every input and output once, padding too."""
    steps, recipe, spec = BACKENDS["triton"].steps, problem.recipe, problem.spec
    x, ids, p = torch.cat(problem.xs), torch.cat(problem.ids), torch.cat(problem.weights)
    assert spec.num_ranks == 1
    plan = steps.make_plan([ids], spec.num_experts)
    mine, tokens, rows = plan.ranks[0], x.shape[0], problem.num_rows
    num_rows, h_dim, inter = mine.num_rows, spec.hidden, spec.intermediate
    width = 1 if recipe.precision == "fp8" else 2
    scales = 4 / BLOCK if width == 1 else 0.0
    per = lambda n, size: int(n * size)  # noqa: E731
    q = steps.quantize_rows(x, recipe)
    pool, weight = steps.dispatch([q], mine), steps.dispatch_weights([p], mine)
    gate_up = steps.grouped_gemm(pool, experts.w13, mine)
    h = steps.swiglu(gate_up, weight, recipe)
    y = steps.grouped_gemm(h, experts.w2, mine)
    unit = rows * h_dim * inter * 2
    stages = {
        "plan": Variant(lambda: steps.make_plan([ids], spec.num_experts, num_rows=num_rows, checked=False)),
        "quantize": Variant(lambda: steps.quantize_rows(x, recipe), num_bytes=per(tokens * h_dim, 2 + width + scales)),
        "dispatch": Variant(
            lambda: steps.dispatch([q], mine), num_bytes=per((tokens + num_rows) * h_dim, width + scales)
        ),
        "gemm1": Variant(lambda: steps.grouped_gemm(pool, experts.w13, mine), 2 * unit),
        "swiglu": Variant(
            lambda: steps.swiglu(gate_up, weight, recipe), num_bytes=per(num_rows * inter, 4 + width + scales)
        ),
        "gemm2": Variant(lambda: steps.grouped_gemm(h, experts.w2, mine), unit),
        "combine": Variant(lambda: steps.combine([y], plan, 0), num_bytes=2 * (rows + tokens) * h_dim),
    }
    if not training:
        return stages
    d_pool = steps.dispatch([steps.quantize_rows(torch.cat(problem.douts), recipe)], mine)
    dh = steps.grouped_gemm(d_pool, experts.w2_t, mine, torch.float32)
    grads = steps.swiglu_backward(dh, gate_up, weight, recipe)
    stages |= {
        "gemm_a": Variant(lambda: steps.grouped_gemm(d_pool, experts.w2_t, mine, torch.float32), unit),
        "swiglu_backward": Variant(
            lambda: steps.swiglu_backward(dh, gate_up, weight, recipe),
            num_bytes=per(num_rows * inter, 4 + 4 + 2 + 4 + (2 if width == 1 else 0) + 2 * scales),
        ),
        "gemm_b": Variant(lambda: steps.grouped_gemm(grads.d_gate_up, experts.w13_t, mine), 2 * unit),
    }
    return stages
