"""What runs where: the table, the reasons, and what "auto" takes."""

import dataclasses
import importlib.util

import pytest
import torch

from megamoe import Recipe, backends
from megamoe.backends import BACKENDS, Problem, resolve, why_not
from megamoe.backends.cute import SOURCE_SHIFT, plan_of
from megamoe.cli.problem import ProblemSpec, make_problem
from megamoe.errors import BackendUnavailable, MegaMoEValueError
from megamoe.routing_plan import make_plan
from megamoe.unfused import RowOrder
from tests.support.compare import assert_bitwise

HOPPER = Problem("cuda", (9, 0), "fp8", 7168, 2048)
PRESENT = {"triton", "cutlass", "cute_kernels.launch"}


@pytest.fixture
def installed(monkeypatch):
    """A set of the modules that can be found; everything is, until a test takes something out."""
    found = set(PRESENT)
    real = importlib.util.find_spec

    def find_spec(name, package=None):
        return (object() if name in found else None) if name in PRESENT else real(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    monkeypatch.setattr(pytest.importorskip("megamoe.triton_kernels.launch"), "INTERPRETED", False)
    return found


def on(**change):
    return dataclasses.replace(HOPPER, **change)


CPU = on(device_type="cpu", capability=None)


@pytest.mark.parametrize(
    ("problem", "backend", "reason"),
    [
        (HOPPER, "cute", None),
        (HOPPER, "triton", None),
        (HOPPER, "torch", None),
        (on(precision="bf16"), "cute", "no bf16 kernel yet; bf16 runs on the Triton path"),
        (on(precision="bf16"), "triton", None),
        (
            on(hidden_size=192, intermediate_size=320),
            "cute",
            "multiples of 128, not hidden_size = 192, intermediate_size = 320",
        ),
        (on(capability=(10, 0)), "cute", "it needs a Hopper GPU .* not compute capability 10.0"),
        (on(capability=(10, 0)), "triton", None),
        (on(capability=(8, 0)), "triton", "FP8 needs compute capability 8.9 or more, not 8.0"),
        (on(capability=(8, 0), precision="bf16"), "triton", None),
        (on(world="group", num_ranks=8), "triton", None),
        (on(world="group", num_ranks=8), "cute", None),
        (on(world="group", num_ranks=8, transport="symmetric"), "cute", None),
        (on(world="group", num_ranks=8, transport="nccl", top_k=13, num_experts=8 * 512), "cute", None),
        (on(world="group", num_ranks=8, transport="nccl", num_experts=8 * 513), "cute", "expected 1 to 512, got 513"),
        (
            on(world="group", num_ranks=8, transport="symmetric", reach="its ranks are on 2 nodes"),
            "cute",
            "symmetric memory cannot join these ranks: its ranks are on 2 nodes; transport='nccl' can",
        ),
        (on(world="group", num_ranks=17, num_experts=34), "cute", "num_ranks: expected 1 to 16, got 17"),
        (on(world="group", num_ranks=17, num_experts=34, reach="its ranks are on 3 nodes"), "cute", None),
        (on(world="local", num_ranks=2), "cute", None),
        (on(num_experts=513), "cute", "num_experts: expected 1 to 512, got 513"),
        (on(top_k=13), "cute", "top_k: expected 1 to 12, got 13"),
        (on(world="local", num_ranks=2), "triton", None),
        (CPU, "cute", "it needs a Hopper GPU .* not cpu"),
        (CPU, "triton", "it needs a CUDA device, not cpu"),
        (CPU, "torch", None),
        (on(device_type="mps", capability=None), "torch", None),
    ],
)
def test_the_table(installed, problem, backend, reason):
    got = why_not(backend, problem)
    if reason is None:
        assert got is None
        assert resolve(backend, problem).name == backend
    else:
        with pytest.raises(
            BackendUnavailable, match=f"backend: '{backend}' does not run this: .*{reason}.*backend='auto'"
        ):
            resolve(backend, problem)


@pytest.mark.parametrize(
    ("problem", "missing", "taken"),
    [
        (HOPPER, (), "cute"),
        (HOPPER, ("cutlass",), "triton"),
        (HOPPER, ("cute_kernels.launch",), "triton"),
        (HOPPER, ("cutlass", "triton"), "torch"),
        (on(precision="bf16"), (), "triton"),
        (on(hidden_size=192), (), "triton"),
        (on(world="group", num_ranks=8), (), "triton"),
        (on(world="group", num_ranks=8, transport="nccl"), (), "triton"),
        (on(world="group", num_ranks=8, transport="symmetric"), (), "cute"),
        (on(world="group", num_ranks=8, transport="symmetric", reach="of two nodes"), (), "triton"),
        (on(capability=(8, 0)), (), "torch"),
        (CPU, (), "torch"),
    ],
)
def test_auto_takes_the_fastest_that_can(installed, problem, missing, taken):
    installed -= set(missing)
    assert resolve("auto", problem).name == taken
    assert why_not("auto", problem) is None


@pytest.mark.parametrize(
    ("backend", "missing", "reason"),
    [
        ("cute", "cute_kernels.launch", "the fused kernel is not part of this version"),
        ("cute", "triton", "its backward needs triton"),
        ("cute", "cutlass", "nvidia-cutlass-dsl is not installed; pip install 'megamoe\\[cute\\]'"),
        ("triton", "triton", "triton is not installed; pip install 'megamoe\\[triton\\]'"),
    ],
)
def test_says_what_to_install(installed, backend, missing, reason):
    installed.discard(missing)
    with pytest.raises(BackendUnavailable, match=reason):
        resolve(backend, HOPPER)


def test_the_triton_interpreter_runs_on_the_cpu(installed, monkeypatch):
    launch = pytest.importorskip("megamoe.triton_kernels.launch")
    for interpreted in (True, False):
        monkeypatch.setattr(launch, "INTERPRETED", interpreted)
        assert (why_not("triton", CPU) is None) == interpreted
        assert resolve("auto", CPU).name == "torch", "the interpreter is for tests"


def test_refuses_unknown_names():
    for call in (resolve, why_not):
        with pytest.raises(
            MegaMoEValueError, match="backend: expected 'auto' or one of 'cute', 'triton', 'torch', got 'xla'"
        ):
            call("xla", HOPPER)


def test_the_problem_of_a_device():
    problem = Problem.of(
        torch.device("cpu"), Recipe("bf16"), hidden_size=256, intermediate_size=128, num_ranks=2, world="local"
    )
    assert problem == Problem("cpu", None, "bf16", 256, 128, num_ranks=2, world="local")


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_backends_offer_every_step(name):
    if name == "triton":
        pytest.importorskip("triton")
    from megamoe import torch_steps

    steps = BACKENDS[name].steps
    missing = [step for step in torch_steps.__all__ if not hasattr(steps, step)]
    assert not missing


def test_every_backend_has_a_name_of_its_own():
    assert [backend.name for backend in BACKENDS.values()] == list(BACKENDS) == ["cute", "triton", "torch"]
    assert backends.BackendName.__args__ == ("auto", "torch", "triton", "cute")


@pytest.mark.parametrize("tokens", [(20,), (9, 0, 14, 3)], ids=str)
def test_row_codes_stand_for_the_plan(tokens):
    """What a fused forward leaves (codes, garbage behind the last segment) gives back the plan of the same routing."""
    problem = make_problem(ProblemSpec(tokens, num_experts=8, top_k=3, routing="masked"))
    want = make_plan(problem.topk_ids, 8, num_rows=1024)
    orders = []
    for rank in want.ranks:
        codes = (rank.source_rank << SOURCE_SHIFT) | (rank.token * 3 + rank.slot)
        codes = torch.where(rank.source_rank < 0, -1, codes)
        codes[int(rank.offs[-1]) :] = torch.randint(0, 1000, (1024 - int(rank.offs[-1]),), dtype=torch.int32)
        orders.append(RowOrder(rank.counts, rank.offs, codes, 3))
    got = plan_of(orders, list(tokens))
    assert got.num_experts == 8
    for got_rank, want_rank in zip(got.ranks, want.ranks, strict=True):
        for name in ("counts", "offs", "source_rank", "token", "slot"):
            assert_bitwise(getattr(got_rank, name), getattr(want_rank, name), name)
    for got_tensor, want_tensor in zip((*got.owner, *got.row), (*want.owner, *want.row), strict=True):
        assert_bitwise(got_tensor, want_tensor, "owner, row")
