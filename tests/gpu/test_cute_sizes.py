"""Sizes that trip launchers and 32-bit arithmetic: every T from one compilation, more than 2^31 elements, and the like.

Odd strides, all rows of all ranks on one, memory that the allocator hands out again at once.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

from cute_kernels import compile as compile_module
from cute_kernels import launch
from megamoe import MegaMoE, MoEConfig, MoEContext, Recipe, mega_moe
from megamoe import torch_steps as steps
from megamoe.cli.problem import ProblemSpec, make_problem
from tests.cpu.test_cute_cache import in_new_process
from tests.cpu.test_cute_compile import Scale, build
from tests.support.compare import assert_bitwise
from tests.support.moe_calls import context_for, run
from tests.support.poison import nan_like


def weights_of(experts: int, hidden: int, inter: int, seed: int = 0) -> Any:
    g = torch.Generator("cuda").manual_seed(seed)
    w13 = torch.randn(experts, 2 * inter, hidden, device="cuda", generator=g) / hidden**0.5
    w2 = torch.randn(experts, hidden, inter, device="cuda", generator=g) / inter**0.5
    a, b = steps.quantize_weight(w13, Recipe(), 2), steps.quantize_weight(w2, Recipe())
    return launch.prepare_weights(a.data, a.scale, b.data, b.scale)


@pytest.mark.parametrize("experts", [1, 8])
def test_one_compilation_serves_every_number_of_tokens(experts):
    """T = 1 to 300: rows do not depend on each other, so each call gives the first rows of the longest one."""
    weights, g = weights_of(experts, 256, 128), torch.Generator("cuda").manual_seed(1)
    x = torch.randn(300, 256, device="cuda", generator=g).bfloat16()
    ids = torch.randint(0, experts, (300, 1), device="cuda", generator=g)
    p = torch.rand(300, 1, device="cuda", generator=g)
    with launch.Workspace(hidden=256, num_experts=experts, top_k=1, max_tokens=300) as workspace:

        def forward(x: torch.Tensor, n: int) -> torch.Tensor:
            out = nan_like(x)
            launch.fused_forward([workspace], [x], [ids[:n]], [p[:n]], [weights], timeout_s=5.0, outs=[out])
            return out

        whole = forward(x, 300)
        made = (compile_module.counts.compiled, compile_module.counts.from_disk)
        for n in [*range(1, 301), 0]:
            assert torch.equal(forward(x[:n], n).view(torch.int16), whole[:n].view(torch.int16)), f"T = {n}"
        for stride in (1, 3, 257, 2**31 - 1, 2**33):  # of a dimension of size one, where any stride is contiguous
            one = torch.as_strided(x, (1, 256), (stride, 1))
            assert one.is_contiguous()
            assert torch.equal(forward(one, 1).view(torch.int16), whole[:1].view(torch.int16)), f"stride {stride}"
        assert (compile_module.counts.compiled, compile_module.counts.from_disk) == made, "nothing was compiled again"
        workspace.check()


@pytest.mark.parametrize("backend", ["cute", "triton"])
def test_rows_times_stride_beyond_32_bits(backend):
    """T * K * H = 2.3e9: the last tokens get what they get in a short call."""
    tokens, hidden, inter, top_k = 40960, 7168, 2048, 8
    g = torch.Generator("cuda").manual_seed(2)
    x = torch.randn(tokens, hidden, device="cuda", generator=g, dtype=torch.bfloat16)
    w13 = torch.randn(8, 2 * inter, hidden, device="cuda", generator=g, dtype=torch.bfloat16) / hidden**0.5
    w2 = torch.randn(8, hidden, inter, device="cuda", generator=g, dtype=torch.bfloat16) / inter**0.5
    ids = torch.arange(8, device="cuda").repeat(tokens, 1)
    p = torch.rand(tokens, top_k, device="cuda", generator=g)
    assert tokens * top_k * hidden > 2**31
    context = MoEContext(backend=backend)
    with torch.no_grad():
        tail = mega_moe(x[-64:], ids[-64:], p[-64:], w13, w2, context=context)
        out = mega_moe(x, ids, p, w13, w2, context=context)
    assert_bitwise(out[-64:], tail, "last tokens")
    assert out.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cute", "triton"])
def test_experts_times_stride_beyond_32_bits(backend):
    """E * 2I * H = 4.3e9: experts behind 2^31 elements, forward and weight gradients, against a layer of three."""
    hidden, inter, chosen = 4096, 1024, [255, 256, 511]
    g = torch.Generator("cuda").manual_seed(3)
    w13 = torch.empty(512, 2 * inter, hidden, device="cuda", dtype=torch.bfloat16).normal_(std=1 / 64, generator=g)
    w2 = torch.empty(512, hidden, inter, device="cuda", dtype=torch.bfloat16).normal_(std=1 / 32, generator=g)
    few13, few2 = w13[chosen].clone(), w2[chosen].clone()
    x, dout = (torch.randn(8, hidden, device="cuda", generator=g).bfloat16() for _ in range(2))
    p, at = torch.rand(8, 1, device="cuda", generator=g), torch.arange(8, device="cuda")[:, None] % 3
    results = []
    for a, b, ids in ((w13, w2, torch.tensor(chosen, device="cuda")[at]), (few13, few2, at)):
        a.requires_grad_()
        b.requires_grad_()
        out = mega_moe(x, ids, p, a, b, context=MoEContext(backend=backend))
        out.backward(dout)
        results.append((out.detach(), a.grad, b.grad))
    (out, dw13, dw2), (want, want13, want2) = results
    assert_bitwise(out, want, "out")
    for got, few in ((dw13, want13), (dw2, want2)):
        for i, e in enumerate(chosen):
            assert_bitwise(got[e], few[i], f"expert {e}")
    assert not bool(dw13[254].any()) and not bool(dw13[257].any()) and not bool(dw2[510].any())


@pytest.mark.parametrize("ranks", [4, 8])
def test_all_rows_of_all_ranks_on_one(ranks):
    """The most that a rank can receive, 32768 rows a rank; capacity follows, and the bits are those of one rank."""
    problem = make_problem(ProblemSpec((4096,) * ranks, 256, 128, 32, 4, "first_rank"), "cuda")
    got = run(problem, context_for(problem, backend="cute", capacity="worst"))
    want = run(problem.on_one_rank(), MoEContext(backend="cute"))
    for name, value in want.joined().items():
        assert_bitwise(got.joined()[name], value, name)


def test_memory_handed_out_again_at_once():
    """While calls run, blocks of their sizes are taken, filled with NaN and given back, on their stream and beside."""
    config = MoEConfig(256, 128, num_experts=8, top_k=4, initializer_range=0.1)
    layer = MegaMoE(config, backend="cute", device="cuda")
    x = torch.randn(150, 256, device="cuda").bfloat16()
    dout, side = torch.randn_like(x), torch.cuda.Stream()

    def step() -> list[torch.Tensor]:
        leaf = x.clone().requires_grad_()
        layer.zero_grad(set_to_none=True)
        layer(leaf).backward(dout)
        return [leaf.grad, layer.experts.w13.grad, layer.experts.w2.grad]  # type: ignore[list-item]

    want = [t.clone() for t in step()]
    sizes = [150 * 4 * 256, 1152 * 256, 1152 * 512, 8 * 256 * 256, 4096, 256]
    for n in range(200):
        got = step()
        for size in sizes:
            torch.empty(size, device="cuda").fill_(float("nan"))
            with torch.cuda.stream(side):
                torch.empty(size, device="cuda").fill_(float("nan"))
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)), f"run {n}"


def test_what_was_compiled_without_a_gpu_runs_here(tmp_path, monkeypatch):
    """In a process that sees no GPU, for the architecture that is said, never for a default; loaded and run here, with
    every length, also none."""
    code = (
        "import torch; from tests.cpu.test_cute_cache import counted, get; "
        "get(); print(torch.cuda.device_count(), *counted())"
    )
    hidden = {"CUDA_VISIBLE_DEVICES": "", compile_module.CACHE_VARIABLE: str(tmp_path)}
    assert in_new_process(code, **hidden) == "0 1 0"
    monkeypatch.setenv(compile_module.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(compile_module, "_loaded", {})
    monkeypatch.setattr(compile_module, "counts", compile_module.Counts())
    scale = compile_module.compiled("scale", Scale(3), build(3))
    assert (compile_module.counts.compiled, compile_module.counts.from_disk) == (0, 1)
    for n in (0, 1, 2, 3, 31, 32, 33, 300):
        x = torch.arange(n, device="cuda", dtype=torch.float32)
        out = nan_like(x)
        scale(x, out, n)
        assert torch.equal(out, 3 * x), n
