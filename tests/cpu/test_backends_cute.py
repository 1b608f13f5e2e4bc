"""What surrounds the fused kernels: weights, workspaces, row order, saved state, on the CPU with emulated launches."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from cute_kernels import status
from megamoe import MegaMoE, MoEConfig, Recipe, backends, mega_moe
from megamoe.backends.cute import KEPT_WORKSPACES, tiling
from megamoe.cli.problem import ProblemSpec, make_problem
from megamoe.errors import CapacityError, MegaMoERuntimeError, MegaMoETimeout, MegaMoEValueError
from megamoe.overlap import OverlapConfig
from tests.support.compare import assert_bitwise
from tests.support.fake_cute import World, install
from tests.support.moe_calls import context_for, run

CONFIG = MoEConfig(128, 128, num_experts=4, top_k=2, num_shared_experts=1, initializer_range=0.1)


@pytest.fixture(autouse=True)
def backend(monkeypatch):
    return install(monkeypatch)


def tokens(n=20, seed=7):
    return torch.randn((n, 128), generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("save", ["pool", "repull", "recompute"])
@pytest.mark.parametrize("sizes", [(30,), (11, 0, 7, 12), (0,), (0, 0)], ids=str)
@pytest.mark.parametrize("recipe", [Recipe(), Recipe(clamp=1.0, scale_format="pow2")], ids=["plain", "clamp-pow2"])
def test_equals_the_torch_path(save, sizes, recipe):
    problem = make_problem(ProblemSpec(sizes, 128, 128, 4, 2, "masked"))
    want = run(problem, context_for(problem, recipe, backend="torch")).joined()
    got = run(problem, context_for(problem, recipe, backend="cute", save=save)).joined()
    for name, value in got.items():
        assert_bitwise(value, want[name], name)


@pytest.mark.parametrize(
    "requires", [(True, False, False, False), (False, False, True, False), (False, True, False, True)]
)
@pytest.mark.parametrize("save", ["pool", "repull"])
def test_frozen_tensors(requires, save):
    problem = make_problem(ProblemSpec((20,), 128, 128, 4, 2))
    want = run(problem, context_for(problem, backend="torch"), requires)
    got = run(problem, context_for(problem, backend="cute", save=save), requires)
    for a, b in zip(
        (got.dx[0], got.dp[0], got.dw13, got.dw2), (want.dx[0], want.dp[0], want.dw13, want.dw2), strict=True
    ):
        assert (a is None) == (b is None)
        if a is not None:
            assert_bitwise(a, b, str(requires))


@pytest.mark.parametrize("weights", ["bf16", "fp8"])
def test_the_layer_trains_and_infers_as_on_the_torch_path(weights):
    results = []
    for name in ("torch", "cute"):
        torch.manual_seed(0)
        layer = MegaMoE(CONFIG, weights=weights, backend=name)
        optimizer = torch.optim.SGD([p for p in layer.parameters() if p.requires_grad], lr=0.1)
        for _ in range(3):
            layer(tokens(), is_first_microbatch=True).float().square().sum().backward()
            layer(tokens(9), is_first_microbatch=False).float().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        layer.eval()
        with torch.no_grad():
            results.append((layer(tokens()), layer.state_dict()))
    assert_bitwise(results[1][0], results[0][0], "out")
    for name, value in results[0][1].items():
        assert_bitwise(results[1][1][name], value, name)


def test_a_backward_after_eval_makes_the_transposed_weights_again():
    layer, x = MegaMoE(CONFIG, backend="cute"), tokens().requires_grad_()
    layer(x).backward(tokens(seed=8))
    want, x.grad = x.grad, None
    out = layer(x)
    layer.eval()
    out.backward(tokens(seed=8))
    assert_bitwise(x.grad, want, "dx")


def test_frozen_weights_are_prepared_once(monkeypatch, backend):
    calls = []
    original = type(backend).prepare
    monkeypatch.setattr(type(backend), "prepare", lambda self, w: calls.append(1) or original(self, w))
    layer = MegaMoE(CONFIG, weights="fp8", backend="cute")
    for _ in range(3):
        layer(tokens().requires_grad_()).sum().backward()
    assert len(calls) == 2, "routed and shared, once each"
    layer.refresh_weights()
    layer(tokens())
    assert len(calls) == 4


def test_kernel_copies_replace_the_plain_ones():
    layer = MegaMoE(dataclasses.replace(CONFIG, hidden_size=256), backend="cute")  # no tile of w2 is padded
    layer(torch.randn(20, 256).bfloat16()).float().sum().backward()
    one = 4 * 3 * 256 * 128
    assert 2 * one <= layer.experts.copies.num_bytes() < 2.1 * one
    layer.eval()
    assert one <= layer.experts.copies.num_bytes() < 1.1 * one


def test_compiled_equals_eager():
    problem = make_problem(ProblemSpec((13,), 128, 128, 4, 2))
    torch._dynamo.reset()
    compiled = torch.compile(mega_moe, fullgraph=True, backend="aot_eager")
    want = run(problem, context_for(problem, backend="cute")).joined()
    got = run(problem, context_for(problem, backend="cute"), call=compiled).joined()
    for name, value in got.items():
        assert_bitwise(value, want[name], name)


# ---------------------------------------------------------------- workspaces


def test_calls_of_one_size_share_a_workspace_and_few_are_kept():
    layer = MegaMoE(MoEConfig(128, 128, num_experts=4, top_k=2), backend="cute")
    for n in (5, 9, 128, 100):
        with torch.no_grad():
            layer(tokens(n))
    assert len(World.made) == 1, "calls that keep nothing share a roomy one"
    layer(tokens(9))
    layer(tokens(9)).sum().backward()
    assert len(World.made) == 2, "forward and backward share one of their own size"
    for n in range(20, 20 + KEPT_WORKSPACES):
        layer(tokens(n))
    layer(tokens(9))
    assert len(World.made) == 2 + KEPT_WORKSPACES + 1, "the one unused for longest had gone"


def test_a_workspace_that_a_graph_is_replayed_on_is_kept(monkeypatch):
    layer = MegaMoE(MoEConfig(128, 128, num_experts=4, top_k=2), backend="cute")
    for n in range(10, 10 + KEPT_WORKSPACES):
        layer(tokens(n))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    layer(tokens(9))
    layer(tokens(10))
    assert len(World.made) == KEPT_WORKSPACES + 1, "nothing goes while a call is captured"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for n in range(20, 20 + 2 * KEPT_WORKSPACES):
        layer(tokens(n))
    made = len(World.made)
    layer(tokens(9)), layer(tokens(20 + 2 * KEPT_WORKSPACES - 1))
    assert len(World.made) == made, "the captured one is there, and so are the others that are kept"
    layer(tokens(20))
    assert len(World.made) == made + 1
    backends.release()
    layer(tokens(20))
    assert len(World.made) == made + 2


def test_streams_that_may_get_the_memory_of_a_dropped_workspace_wait_for_its_last_call(monkeypatch):
    layer = MegaMoE(MoEConfig(128, 128, num_experts=4, top_k=2), backend="cute")
    streams = [SimpleNamespace(cuda_stream=i, wait_event=lambda event: None) for i in range(3)]
    for stream in (streams[1], streams[2], streams[1]):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *a, stream=stream: stream)
        layer(tokens(9))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *a: streams[0])
    for n in range(20, 20 + KEPT_WORKSPACES - 1):
        layer(tokens(n))
    assert World.made[0].followers == [], "it is kept"
    layer(tokens(30))
    assert World.made[0].followers == streams[1:]
    assert all(world.followers == [] for world in World.made[1:])


def test_release_frees_all(backend):
    layer = MegaMoE(CONFIG, backend="cute")
    layer(tokens())
    assert backend._workspaces
    backend.release()
    assert not backend._workspaces


@pytest.mark.parametrize(
    ("code", "error", "resets"),
    [
        (status.TIMEOUT, MegaMoETimeout, 1),
        (status.ABORTED, MegaMoETimeout, 1),
        (status.SIGNATURE, MegaMoERuntimeError, 1),
        (status.OVERFLOW, CapacityError, 0),
        (status.BAD_IDS, MegaMoEValueError, 0),
        (status.REFUSED, MegaMoERuntimeError, 0),
    ],
)
def test_errors_of_a_call_are_raised_with_debug(code, error, resets):
    problem = make_problem(ProblemSpec((13,), 128, 128, 4, 2))
    context = context_for(problem, backend="cute", debug=True)
    run(problem, context)
    World.made[-1].failure = status.CallError("call 3: as the record says", code)
    with pytest.raises(error, match="call 3: as the record says"):
        run(problem, context)
    assert World.made[-1].resets == resets, "a call that was given up is behind us"
    run(problem, context)


@pytest.mark.parametrize("debug", [False, True])
def test_errors_of_a_backward_are_raised_with_debug(monkeypatch, debug):
    from cute_kernels import backward_launch

    problem = make_problem(ProblemSpec((13,), 128, 128, 4, 2))
    context = context_for(problem, backend="cute", debug=debug)
    launch = backward_launch.fused_backward

    def failing(*arguments, **options):
        World.made[-1].failure = status.CallError("call 2: timeout", status.TIMEOUT)
        return launch(*arguments, **options)

    monkeypatch.setattr(backward_launch, "fused_backward", failing)
    if debug:
        with pytest.raises(MegaMoETimeout, match="call 2: timeout"):
            run(problem, context)
        assert World.made[-1].failure is None and World.made[-1].resets == 1
    else:
        run(problem, context)
        assert World.made[-1].failure is not None, "nobody looked, nobody waited"


def test_errors_of_an_earlier_call_are_raised_in_our_types(monkeypatch):
    problem = make_problem(ProblemSpec((13,), 128, 128, 4, 2))
    context = context_for(problem, backend="cute")
    run(problem, context)

    def late(*_, **__):
        raise status.CallError("call 1: overflow of the pool", status.OVERFLOW)

    monkeypatch.setattr("cute_kernels.launch.fused_forward", late)
    with pytest.raises(CapacityError, match="call 1: overflow of the pool"):
        run(problem, context)


def test_the_environment_bounds_the_waits(monkeypatch):
    assert tiling(OverlapConfig()) == {}
    monkeypatch.setenv("MEGAMOE_TIMEOUT_S", "2.5")
    assert tiling(OverlapConfig()) == {"timeout_s": 2.5}
    for wrong in ("0", "soon", "inf", "nan"):
        monkeypatch.setenv("MEGAMOE_TIMEOUT_S", wrong)
        with pytest.raises(MegaMoEValueError, match=f"MEGAMOE_TIMEOUT_S: expected a positive .*, got '{wrong}'"):
            tiling(OverlapConfig())


def test_overlap_settings_reach_the_kernels():
    layer = MegaMoE(CONFIG, backend="cute", overlap=OverlapConfig(reserve_sms=12))
    layer(tokens())
    assert [world.sizes.get("reserve_sms") for world in World.made] == [12, 12], "routed and shared"
    assert tiling(OverlapConfig(lag=3, pull_batch=2))["config"].group_blocks == 3


def test_ids_are_checked_with_debug():
    problem = make_problem(ProblemSpec((13,), 128, 128, 4, 2))
    problem.topk_ids[0][3, 1] = 9
    with pytest.raises(MegaMoEValueError, match=r"topk_ids\[3, 1\]: expected -1 or an expert in \[0, 4\), got 9"):
        run(problem, context_for(problem, backend="cute", debug=True))
