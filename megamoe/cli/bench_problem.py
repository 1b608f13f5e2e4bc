"""What `megamoe bench` runs: a problem on the device, one closure a variant, and the errors against the fp64 oracle."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch

from megamoe.backends import BACKENDS, Backend
from megamoe.cli.problem import ProblemSpec, draw_topk_ids
from megamoe.comm import LocalWorld
from megamoe.comm.transport import Transport, as_transport
from megamoe.deferred import Later, WeightJob
from megamoe.gates import GATES, rel_l2
from megamoe.memory_plan import worst_rows
from megamoe.recipe import BLOCK, Recipe
from megamoe.reference import Inputs, oracle_backward, oracle_forward
from megamoe.unfused import ExpertWeights, ForwardOptions, Grads, Needs, Saved

Run = Callable[[], object]


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
            self._oracle = found
        return self._oracle

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

    def forward(self) -> list[torch.Tensor]:
        """Inference: nothing is saved."""
        return self._forward(save=False)[0]

    def training_forward(self) -> list[torch.Tensor]:
        """What it saves stays for `backward`."""
        outs, self._saved = self._forward(save=True)
        return outs

    def _forward(
        self, save: bool, experts: list[ExpertWeights] | None = None
    ) -> tuple[list[torch.Tensor], Saved | None]:
        p = self.problem
        options = dataclasses.replace(p.options, save="pool" if save else "none")
        return self.backend.forward(
            self.transport, p.xs, p.ids, p.weights, experts or self.experts, self.recipe, options
        )

    def backward(self) -> Grads:
        """Of the last training forward, which it leaves as it is."""
        assert self._saved is not None, "training_forward comes first"
        return self._backward(self._saved)

    def dgrad(self) -> Grads:
        """dx and dp alone."""
        assert self._saved is not None, "training_forward comes first"
        return self._backward(self._saved, Needs())

    def prepare_wgrad(self) -> None:
        """Keep what forward and dgrad leave for the weight gradients."""
        assert self._saved is not None, "training_forward comes first"
        self._jobs = []
        self._backward(self._saved, Needs(later=Later(True, True, self._jobs.append)))

    def wgrad(self, w13: bool = True, w2: bool = True) -> None:
        """Weight gradients alone, from what `prepare_wgrad` has kept."""
        assert self.needs.w13 is not None and self.needs.w2 is not None and self._jobs
        for job, dw13, dw2 in zip(self._jobs, self.needs.w13, self.needs.w2, strict=True):
            job(dw13 if w13 else None, dw2 if w2 else None, False)

    def requantize(self) -> list[ExpertWeights]:
        """Both copies of all weights, from the bf16 masters, in the order in which this backend reads them."""
        return self.problem.experts(self.backend, True)

    def requantize_forward_backward(self) -> Grads:
        """A training step, with the copies of weights that an optimizer step has changed."""
        saved = self._forward(save=True, experts=self.requantize())[1]
        assert saved is not None
        return self._backward(saved)

    def _backward(self, saved: Saved, needs: Needs | None = None) -> Grads:
        return self.backend.backward(self.transport, self.problem.douts, saved, self.experts, needs or self.needs)

    def forward_backward(self) -> Grads:
        """A training step; what it saves is gone afterwards."""
        saved = self._forward(save=True)[1]
        assert saved is not None
        return self._backward(saved)


def errors(problem: BenchProblem, run: LayerRun, training: bool) -> dict[str, float]:
    """rel-L2 of what a run computes against the fp64 oracle, as fields of a record.

    Raises:
        AssertionError: a tensor misses the gate of the recipe's precision; a wrong result has no time.
    """
    wanted = problem.oracle(training)
    figures: dict[str, float] = {}
    least = GATES[problem.recipe.precision].tensor_db

    def compare(name: str, got: torch.Tensor) -> None:
        error = rel_l2(got, wanted[name])
        db = math.inf if error == 0.0 else -20 * math.log10(error)
        assert db >= least, f"{run.backend.name}: {name} at {db:.1f} dB, expected at least {least}"
        figures[f"rel_l2_{name}"] = error

    out = torch.cat(run.training_forward() if training else run.forward())
    compare("out", out)
    if training:
        grads = run.backward()
        assert grads.dx is not None and grads.dp is not None and grads.dw13 is not None and grads.dw2 is not None
        compare("dx", torch.cat(grads.dx))
        figures["rel_l2_dp"] = rel_l2(torch.cat(grads.dp), wanted["dp"])
        dw13, dw2 = problem.weight_grads()
        compare("dw13", dw13)
        compare("dw2", dw2)
        run.prepare_wgrad()
        dw13.fill_(math.nan)
        dw2.fill_(math.nan)
        run.wgrad()
        compare("dw13", dw13)
        compare("dw2", dw2)
    return figures


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
