"""The layer on the GPU's backends: fused beside Triton, capture, streams, compiled code, training, no hidden sync."""

import pytest
import torch

from megamoe import MegaMoE, MoEConfig, mega_moe
from megamoe.backends import Problem, why_not
from megamoe.cli.problem import ProblemSpec, make_problem
from megamoe.gates import GATES, sqnr_db
from megamoe.recipe import Recipe
from tests.support.compare import assert_bitwise
from tests.support.moe_calls import context_for, run

BACKENDS = ["cute", "triton"]
CONFIG = MoEConfig(256, 128, num_experts=8, top_k=2, num_shared_experts=1, initializer_range=0.1)


@pytest.fixture(params=BACKENDS)
def backend(request, device):
    reason = why_not(request.param, Problem.of(device, Recipe(), 256, 128))
    if reason is not None:
        pytest.skip(reason)
    return request.param


def problem_of(tokens, routing="uniform"):
    return make_problem(ProblemSpec(tokens, 256, 128, 8, 2, routing), "cuda")


@pytest.mark.parametrize("tokens", [(50,), (25, 40), (10, 0, 30, 7)], ids=str)
@pytest.mark.parametrize("routing", ["uniform", "masked", "duplicates"])
def test_fused_equals_triton(tokens, routing):
    if reason := why_not("cute", Problem.of(torch.device("cuda"), Recipe(), 256, 128)):
        pytest.skip(reason)
    problem = problem_of(tokens, routing)
    fused = run(problem, context_for(problem, backend="cute")).joined()
    unfused = run(problem, context_for(problem, backend="triton")).joined()
    for name, value in fused.items():
        assert sqnr_db(value, unfused[name]) >= GATES["fp8"].backends_db, name


@pytest.mark.parametrize("save", ["repull", "recompute"])
def test_what_is_saved_changes_no_bit(backend, save):
    problem = problem_of((50,), "masked")
    want = run(problem, context_for(problem, backend=backend)).joined()
    got = run(problem, context_for(problem, backend=backend, save=save)).joined()
    for name, value in got.items():
        assert_bitwise(value, want[name], name)


def test_compiled_equals_eager(backend):
    problem = problem_of((50,), "masked")
    compiled = torch.compile(mega_moe, fullgraph=True, backend="aot_eager")
    want = run(problem, context_for(problem, backend=backend)).joined()
    got = run(problem, context_for(problem, backend=backend), call=compiled).joined()
    for name, value in got.items():
        assert_bitwise(value, want[name], name)


def test_two_streams_in_turn(backend):
    problem = problem_of((50,))
    context = context_for(problem, backend=backend)
    args = (problem.xs[0], problem.topk_ids[0], problem.topk_weights[0], problem.w13_E2IH, problem.w2_EHI)
    with torch.no_grad():
        want = mega_moe(*args, context=context)
        torch.cuda.synchronize()
        streams, outs = [torch.cuda.Stream(), torch.cuda.Stream()], []
        for i in range(40):
            with torch.cuda.stream(streams[i % 2]):
                outs.append(mega_moe(*args, context=context))
    torch.cuda.synchronize()
    for out in outs:
        assert_bitwise(out, want, "out")


def test_capture_and_replay(backend):
    layer = MegaMoE(CONFIG, backend=backend, weights="fp8", device="cuda").eval()
    x = torch.randn(50, 256, device="cuda").bfloat16()
    with torch.no_grad():
        layer(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer(x)
        for _ in range(3):
            x.copy_(torch.randn(50, 256, device="cuda"))
            graph.replay()
            torch.cuda.synchronize()
            assert_bitwise(out, layer(x), "replayed")


def test_nothing_synchronises(backend):
    layer = MegaMoE(CONFIG, backend=backend, weights="bf16", device="cuda")
    x, dout = (
        torch.randn(50, 256, device="cuda").bfloat16().requires_grad_(),
        torch.randn(50, 256, device="cuda").bfloat16(),
    )
    for _ in range(2):
        layer(x).backward(dout)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(x).backward(dout)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("weights", ["bf16", "fp32", "fp8"])
def test_a_layer_trains_and_then_infers(backend, weights):
    torch.manual_seed(0)
    layer = MegaMoE(CONFIG, backend=backend, weights=weights, device="cuda")
    optimizer = torch.optim.AdamW([p for p in layer.parameters() if p.requires_grad], lr=1e-2, fused=True)
    x, target = torch.randn(64, 256, device="cuda").bfloat16(), torch.randn(64, 256, device="cuda")
    losses = []
    for _ in range(12):
        loss = (layer(x).float() - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    trained = layer(x).detach()
    layer.eval()
    with torch.no_grad():
        assert_bitwise(layer(x), trained, "inference")


def test_packed_weights_give_the_same_bits_and_are_held_once(device):
    if reason := why_not("cute", Problem.of(device, Recipe(), 1024, 512)):
        pytest.skip(reason)
    config = MoEConfig(1024, 512, num_experts=16, top_k=2, initializer_range=0.1)
    layer = MegaMoE(config, backend="cute", weights="fp8", device=device).eval()
    x, dout = (torch.randn(70, 1024, device=device).bfloat16() for _ in range(2))

    def results():
        with torch.no_grad():
            out = layer(x)
        y = x.detach().requires_grad_()
        layer(y).backward(dout)
        return out, y.grad

    def held():
        layer.eval()
        with torch.no_grad():
            layer(x)
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    want, before = results(), held()
    state = {name: tensor.cpu() for name, tensor in layer.state_dict().items()}
    layer.pack_weights()
    weights = 3 * 1024 * 512 * 16
    assert before - held() == pytest.approx(weights, rel=0.02)
    for name, got, expected in zip(("out", "dx"), results(), want, strict=True):
        assert_bitwise(got, expected, name)
    for name, tensor in layer.state_dict().items():
        assert_bitwise(tensor.cpu(), state[name], name)
    layer.unpack_weights()
    assert_bitwise(results()[0], want[0], "out, unpacked")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_tensors_on_another_device_than_the_current_one(backend):
    problem = make_problem(ProblemSpec((50,), 256, 128, 8, 2), "cuda:1")
    want = run(problem_of((50,)), context_for(problem, backend=backend)).joined()
    got = run(problem, context_for(problem, backend=backend)).joined()
    for name, value in got.items():
        assert value.device.index == 1
        assert_bitwise(value.cpu(), want[name].cpu(), name)
