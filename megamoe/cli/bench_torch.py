"""What torch itself does at best, beside which the layer is timed: grouped GEMMs alone, a copy, a dense product."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from megamoe.cli.bench_problem import BenchProblem, Run, Variant

WGRAD_ALIGN = 16
"""Rows to which torch wants every expert's segment aligned where it sums over rows."""


def torch_gemms(problem: BenchProblem, training: bool) -> dict[tuple[str, str], Variant]:
    """torch's grouped GEMMs alone, FP8 with one scale a row or bf16: "gemms", the two of a forward, and in bf16 with
    `training` "gemms_fwd_bwd", all six of a training step. Empty where torch has none.

    They read rows packed by expert without padding (for sums over rows: see `torch_wgrads`), quantised beforehand; what
    they compute is not the layer.
    """
    if problem.device.type != "cuda":
        return {}
    spec, fp8 = problem.spec, problem.recipe.precision == "fp8"
    offs = problem.counts().cumsum(0).int()
    rows, h, i = problem.num_rows, spec.hidden, spec.intermediate
    kind = torch.float8_e4m3fn if fp8 else torch.bfloat16
    a13 = torch.randn(rows, h, device=problem.device).to(kind)
    a2 = torch.randn(rows, i, device=problem.device).to(kind)
    b13, b2 = ((w.float() * w.shape[2] ** 0.5).to(kind).transpose(1, 2) for w in (problem.w13, problem.w2))
    ones = torch.ones(max(rows, spec.num_experts * max(2 * i, h)), device=problem.device)

    def scaled(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        scale_b = ones[: b.shape[0] * b.shape[2]].view(b.shape[0], b.shape[2])
        return torch._scaled_grouped_mm(
            a, b, ones[:rows], scale_b, offs=offs, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    def plain(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch._grouped_mm(a, b, offs=offs)

    gemm, backend = (scaled, "torch_scaled_grouped_mm") if fp8 else (plain, "torch_grouped_mm")

    def both() -> None:
        gemm(a13, b13)
        gemm(a2, b2)

    found = {("gemms", backend): Variant(both, problem.flops)}
    wgrad = torch_wgrads(problem).get(("wgrad", backend)) if training and not fp8 else None
    if wgrad is None:
        return found
    d13 = torch.randn(rows, 2 * i, device=problem.device).to(kind)

    def step() -> None:
        both()
        gemm(a13, b2.transpose(1, 2))  # dgrad: dout @ W2, [dg; du] @ W13
        gemm(d13, b13.transpose(1, 2))
        wgrad.run()

    return found | {("gemms_fwd_bwd", backend): Variant(step, 3 * problem.flops)}


def torch_wgrads(problem: BenchProblem) -> dict[tuple[str, str], Variant]:
    """torch's grouped GEMMs that sum over rows, alone: the products of the weight gradients and nothing around them.

    "torch_grouped_mm" multiplies bf16 rows; "torch_scaled_grouped_mm" (fp8 only) transposed e4m3 copies with one scale
    for all rows of a column, made beforehand. Experts' rows are padded with zeros to multiples of 16. A product that
    torch refuses or gets wrong has no variant.
    """
    if problem.device.type != "cuda":
        return {}
    spec, device = problem.spec, problem.device
    counts = problem.counts()
    aligned = (counts + WGRAD_ALIGN - 1) // WGRAD_ALIGN * WGRAD_ALIGN
    ends = aligned.cumsum(0).int()
    rows, h, i = int(ends[-1]), spec.hidden, spec.intermediate
    expert = torch.repeat_interleave(torch.arange(spec.num_experts, device=device), aligned)
    real = (torch.arange(rows, device=device) - (ends - aligned)[expert] < counts[expert])[:, None]
    pools = {w: torch.randn(rows, w, device=device).mul_(real).bfloat16() for w in {2 * i, h, i}}
    pairs = {"wgrad13": (pools[2 * i], pools[h]), "wgrad2": (pools[h], pools[i])}

    def plain(name: str) -> torch.Tensor:
        a, b = pairs[name]
        return torch._grouped_mm(a.t(), b, offs=ends, out_dtype=torch.bfloat16)

    found = _wgrad_variants("torch_grouped_mm", plain, pairs, ends, problem)
    if problem.recipe.precision != "fp8":
        return found
    turned = {w: pool.to(torch.float8_e4m3fn).t().contiguous() for w, pool in pools.items()}
    ones = torch.ones(spec.num_experts * max(2 * i, h), device=device)

    def scaled(name: str) -> torch.Tensor:
        a, b = (turned[pool.shape[1]] for pool in pairs[name])
        scale_a, scale_b = (ones[: spec.num_experts * x.shape[0]] for x in (a, b))
        return torch._scaled_grouped_mm(
            a, b.t(), scale_a, scale_b, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    return found | _wgrad_variants("torch_scaled_grouped_mm", scaled, pairs, ends, problem)


def _wgrad_variants(
    backend: str,
    product: Callable[[str], torch.Tensor],
    pairs: dict[str, tuple[torch.Tensor, torch.Tensor]],
    ends: torch.Tensor,
    problem: BenchProblem,
) -> dict[tuple[str, str], Variant]:
    """A product's variants, if it is right for the first and the last expert."""
    try:
        for name, (a, b) in pairs.items():
            got = product(name)
            for e in (0, ends.shape[0] - 1):
                some = slice(int(ends[e - 1]) if e else 0, int(ends[e]))
                want = a[some].float().t() @ b[some].float()
                assert float((got[e].float() - want).norm()) <= 0.1 * float(want.norm()), f"{name} of expert {e}"
    except (RuntimeError, AssertionError) as error:  # this torch has none of this kind
        print(f"{backend} has no weight gradients: {str(error).splitlines()[0]}", file=sys.stderr)
        return {}

    def both() -> None:
        product("wgrad13")
        product("wgrad2")

    thirds = problem.flops // 3
    return {
        ("wgrad", backend): Variant(both, problem.flops),
        ("wgrad13", backend): Variant(lambda: product("wgrad13"), 2 * thirds),
        ("wgrad2", backend): Variant(lambda: product("wgrad2"), thirds),
    }


COPY_OF = "copy_of_"
"""Before a bench's name: a copy of as many bytes."""


def same_size_copies(num_bytes: dict[str, int], device: torch.device) -> dict[str, Variant]:
    """A copy of as many bytes as each bench moves, half of them read and half written: what the card does with so few.

    A small kernel cannot reach the rate of a large copy: a launch takes its time, and lines that the flush before it
    left in the L2 cache are written back meanwhile. An elementwise kernel, as a copy would be a copy node of a graph.
    """
    if device.type != "cuda" or not num_bytes:
        return {}
    source, target = (torch.zeros(max(num_bytes.values()) // 8, device=device) for _ in range(2))

    def copy(count: int) -> Run:
        return lambda: torch.add(source[:count], 0.0, out=target[:count])

    return {COPY_OF + bench: Variant(copy(n // 8), num_bytes=n) for bench, n in num_bytes.items()}


def ceilings(device: torch.device, precision: str) -> dict[str, Variant]:
    """What the card does at best: a copy, and one dense product of torch in the same precision."""
    if device.type != "cuda":
        return {}
    size = 8192
    source, target = (torch.empty(1 << 30, dtype=torch.uint8, device=device) for _ in range(2))
    a, b = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    one = torch.ones((), device=device)
    if precision == "fp8":
        a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
        product: Run = lambda: torch._scaled_mm(  # noqa: E731
            a8, b8, one, one, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    else:
        product = lambda: a @ b  # noqa: E731
    return {
        # not in a graph: a copy node of a graph is slower than the kernel of an eager copy
        "copy": Variant(lambda: target.copy_(source), num_bytes=2 << 30, capturable=False),
        "dense_matmul": Variant(product, 2 * size**3),
    }
