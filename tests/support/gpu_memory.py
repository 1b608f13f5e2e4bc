"""What a layer's step really takes on a GPU, as torch's allocator counts it, beside the plan."""

from __future__ import annotations

import dataclasses
import importlib.util

import torch

from megamoe import backends
from megamoe.config import MoEConfig
from megamoe.layer import MegaMoE
from megamoe.memory_plan import MemoryPlan, PlanOptions, human, memory_plan
from megamoe.recipe import Recipe


@dataclasses.dataclass(frozen=True)
class MemoryCase:
    """A layer and a step; save="none" is a forward without a backward."""

    config: MoEConfig
    tokens: int
    save: str = "pool"
    weights: str = "bf16"
    precision: str = "fp8"
    backend: str = "triton"
    wgrad_operands: str = PlanOptions().wgrad_operands
    is_packed: bool = False

    def plan(self) -> MemoryPlan:
        backend = "cute" if self.backend == "cute" else "steps"
        operands = self.wgrad_operands
        options = PlanOptions(
            self.weights, self.precision, backend=backend, wgrad_operands=operands, is_packed=self.is_packed
        )
        return memory_plan(self.config, save=self.save, tokens=self.tokens, options=options)

    def recipe(self) -> Recipe:
        return Recipe(self.precision, wgrad_operands=None if self.precision == "bf16" else self.wgrad_operands)

    def __str__(self) -> str:
        c = self.config
        sizes = f"H{c.hidden_size} I{c.intermediate_size} E{c.num_experts} K{c.top_k} T{self.tokens}"
        shared = f" +{c.num_shared_experts} shared" if c.num_shared_experts else ""
        weights = self.weights + " packed" * self.is_packed
        return f"{sizes}{shared} {self.save} {weights} {self.precision} {self.backend} {self.wgrad_operands}"


def measure_peak(case: MemoryCase) -> int:
    """Peak bytes of a forward, and of its backward unless save is "none", above x and the gradient of out."""
    save = "pool" if case.save == "none" else case.save
    device = torch.device("cuda")
    release_all()
    layer = MegaMoE(
        case.config,
        backend=case.backend,
        weights=case.weights,
        recipe=case.recipe(),
        device=device,
        save=save,
    )
    if case.is_packed:
        layer.pack_weights()
    x = torch.randn(case.tokens, case.config.hidden_size, device=device).bfloat16()
    dout = torch.randn_like(x)

    def step() -> None:
        if case.save == "none":
            with torch.no_grad():
                layer(x)
            return
        y = x.detach().requires_grad_()
        layer(y).backward(dout)

    step()  # compiles kernels and makes what outlives a step
    layer.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - x.nbytes - dout.nbytes - cublas_workspaces()


def release_all() -> None:
    """Free what the fused backend keeps for calls of earlier cases."""
    cute = backends.BACKENDS["cute"]
    if hasattr(cute, "release"):
        cute.release()
    if importlib.util.find_spec("cutlass") is not None:
        from cute_kernels import weights

        for tables in vars(weights).values():
            if hasattr(tables, "cache_clear"):
                tables.cache_clear()


def why_not(case: MemoryCase) -> str | None:
    """Why the case does not run here."""
    if not torch.cuda.is_available():
        return "needs a CUDA device"
    c, device = case.config, torch.device("cuda")
    sizes = {"hidden_size": c.hidden_size, "intermediate_size": c.intermediate_size}
    problem = backends.Problem.of(device, Recipe(case.precision), **sizes, num_experts=c.num_experts, top_k=c.top_k)
    return backends.why_not(case.backend, problem)


def cublas_workspaces() -> int:
    """Bytes that torch's allocator holds for cuBLAS (32 MiB a thread on Hopper): no layer's, and freed here."""
    before = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    return before - torch.cuda.memory_allocated()


def report(cases: list[MemoryCase]) -> None:
    """Print measured and planned peaks, with what is above weights and copies."""
    for case in cases:
        plan = case.plan()
        try:
            measured = measure_peak(case)
        except Exception as error:  # one failure must not hide the rest
            print(f"{case!s:<66} {type(error).__name__}: {str(error)[:150]}")
            continue
        base = plan.weights_bytes + plan.copies_bytes
        above, planned = measured - base, plan.above_weights_bytes
        print(
            f"{case!s:<66} peak {human(measured):>10} planned {human(plan.peak_bytes):>10}  "
            f"above {human(above):>10} planned {human(planned):>10} ({above / planned - 1:+.1%}) {plan.peak_stage.name}"
        )
