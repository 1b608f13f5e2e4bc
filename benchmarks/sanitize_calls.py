"""One small call of a CuTe-DSL kernel, for a checker that watches the process: `sanitize_calls.py dgrad`.

Results are compared with the Triton steps, so that a checker that changed timing and broke the call would show.
"""

from __future__ import annotations

import argparse

import torch

from megamoe.cli.problem import ProblemSpec, make_problem
from megamoe.comm import LocalWorld
from megamoe.context import MoEContext
from megamoe.functional import mega_moe
from megamoe.gates import GATES, sqnr_db

SPEC = {"hidden": 256, "intermediate": 128, "num_experts": 4, "top_k": 2, "routing": "masked"}
KERNELS = ("forward", "dgrad", "wgrad", "ranks")


def call(kernel: str, backend: str) -> list[torch.Tensor]:
    """The tensors that the kernel writes: of `ranks` the forward of two virtual ranks."""
    tokens = (40, 25) if kernel == "ranks" else (72,)
    problem = make_problem(ProblemSpec(num_tokens=tokens, **SPEC), "cuda")  # type: ignore[arg-type]
    context = MoEContext(world=LocalWorld(2) if kernel == "ranks" else None, backend=backend)  # type: ignore[arg-type]
    xs = [x.clone().requires_grad_(kernel == "dgrad") for x in problem.xs]
    w13, w2 = (w.clone().requires_grad_(kernel == "wgrad") for w in (problem.w13_E2IH, problem.w2_EHI))
    ids, ps = problem.topk_ids, problem.topk_weights
    if kernel == "ranks":
        return list(mega_moe(xs, ids, ps, w13, w2, context=context))
    out = mega_moe(xs[0], ids[0], ps[0], w13, w2, context=context)
    if kernel == "forward":
        return [out]
    out.backward(problem.douts[0])
    found = [xs[0].grad] if kernel == "dgrad" else [w13.grad, w2.grad]
    return [t for t in found if t is not None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kernel", choices=KERNELS)
    kernel = parser.parse_args().kernel
    got, want = call(kernel, "cute"), call(kernel, "triton")
    torch.cuda.synchronize()
    levels = [sqnr_db(a.detach(), b.detach()) for a, b in zip(got, want, strict=True)]
    assert all(level >= GATES["fp8"].backends_db for level in levels), levels
    print(f"{kernel}: equal to Triton by {', '.join(f'{level:.1f} dB' for level in levels)}")


if __name__ == "__main__":
    main()
