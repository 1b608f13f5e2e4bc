"""The fused forward's machine code, compiled here without a GPU: spills, serialised wgmma, scopes of flags."""

import functools
import inspect
import re

import pytest
import torch

pytest.importorskip("cutlass")

from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Int64

from cute_kernels import compile as compile_module
from cute_kernels import launch, sass
from cute_kernels import workspace as ws
from cute_kernels.forward import FusedForward, fake_arguments
from cute_kernels.tile_config import Problem, TileConfig
from tests.support.machine_code import compiled_once, needs_nvdisasm

TUNED = {
    "A": Problem(7168, 2048),
    "A saved": Problem(7168, 2048, save=True, clamp=True),
    "B": Problem(2048, 768),
    "C": Problem(4096, 1024),
    "odd": Problem(384, 384, many_experts=True),
}
DTYPES = {BFloat16: "bfloat16", Int32: "int32", Int64: "int64", Float32: "float32", Float8E4M3FN: "float8_e4m3fn"}
binary = functools.partial(compiled_once, FusedForward, fake_arguments)


@needs_nvdisasm
@pytest.mark.parametrize("name", TUNED)
def test_machine_code(name):
    problem = TUNED[name]
    found = sass.report(binary(problem).cubin)
    waves = 2 * TileConfig().unroll(problem)
    assert found.spills_in_k_loops == 0, found
    assert found.stack_bytes <= 64, found
    assert found.qgmma == 4 * (waves + 1), found  # and the first wave of the first tile
    assert found.warpgroup_arrive == waves + 1, f"serialised wgmma: {found}"
    assert found.registers <= 168 and found.top_register <= 240
    assert binary(problem).seconds < 60


def peer_scopes(ptx: str) -> list[str]:
    """Flag operations below sys scope on addresses that come from the peer table, the only 64-bit values that the
    kernel loads from memory."""
    peer, wrong = set(), []
    for line in ptx.splitlines():
        found = re.match(r"\s*(?:@!?%p\d+ )?([a-z0-9_.:]+)\s+(.*);", line)
        if not found:
            continue
        op, rest = found.groups()
        registers = re.findall(r"%rd\d+", rest)
        flag = re.match(r"(ld|st|red|atom)\.", op) and re.search(r"relaxed|acquire|release|acq_rel", op)
        if flag:
            if ".sys" not in op and any(r in peer for r in registers):
                wrong.append(line.strip())
        elif re.match(r"ld\.(global|shared)\S*\.[bu]64", op):
            peer.add(registers[0])
        elif (
            not op.startswith(("st", "ld", "red", "atom"))
            and len(registers) > 1
            and any(r in peer for r in registers[1:])
        ):
            peer.add(registers[0])
    return wrong


def test_flags_of_other_ranks_have_sys_scope():
    ptx = binary(TUNED["odd"]).ptx
    assert peer_scopes(ptx) == []
    # a planted fault: the courier's last word to the other ranks, and a header, at gpu scope
    for right, wrong in (("red.release.sys", "red.release.gpu"), ("st.release.sys", "st.release.gpu")):
        assert right in ptx
        assert len(peer_scopes(ptx.replace(right, wrong))) >= 1


def test_tracing_leaves_nothing_behind_when_off():
    """Only stamps read the number of the SM."""
    problem = Problem(128, 128)
    traced = FusedForward(problem, TileConfig(trace=True))
    ptx = compile_module.inspect(lambda: (traced, fake_arguments(problem, for_launch=False))).ptx
    assert "%smid" in ptx
    assert "%smid" not in binary(TUNED["odd"]).ptx


def test_unknown_sizes_are_not_in_the_key():
    """T, E, K, R, routing and capacity are no part of what is compiled: the fake arguments name none."""
    problem = Problem(256, 128)
    assert compile_module.kernel_key("forward", (problem, TileConfig())) == compile_module.kernel_key(
        "forward", (Problem(256, 128), TileConfig())
    )
    assert set(vars(problem)) == {
        "hidden", "intermediate", "clamp", "save", "plan_given", "pow2_scales", "many_experts"
    }  # fmt: skip


def test_refuses_what_cannot_work():
    with pytest.raises(ValueError, match="config: expected one that serves"):
        FusedForward(Problem(100, 128), TileConfig())


@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 1), (8192, 8, 32, 1, 132), (100, 12, 512, 4, 33)])
def test_layout_regions_lie_behind_each_other(shape):
    tokens, top_k, experts, ranks, ctas = shape
    blocks = 17
    found = ws.layout(384, tokens, top_k, experts, ranks, ctas, blocks)
    sizes = {
        "header": ranks * 2 * ws.HEADER_INTS * 4,
        "arrive": 2 * blocks * 4,
        "done": 2 * blocks * 4,
        "counts": ctas * experts * 4,
        "order": blocks * 128 * 8,
        "slots": tokens * top_k * 8,
        "xq": tokens * 384,
        "xs": tokens * 16,
        "y": tokens * top_k * 768,
    }
    at = ws.NUM_FLAGS * ws.LINE * 4
    for name, size in sizes.items():
        begin = getattr(found, name)
        assert begin >= at and begin % ws.ALIGN == 0
        at = begin + size
    assert found.size >= at
    assert ws.HEADER_INTS >= ws.H_FIRST + experts + 1


def test_layout_passes_two_gigabytes():
    assert ws.layout(7168, 40000, 8, 256, 1, 132, 4000).size > 2**32


def test_capacity():
    assert ws.capacity_rows(0, 32) == 128
    assert ws.capacity_rows(1, 32) == 128
    assert ws.capacity_rows(65536, 32) >= 65536 + 32 * 127


def small_call():
    workspace = launch.Workspace(hidden=256, num_experts=4, top_k=2, max_tokens=8, num_ctas=4, device="cpu")
    fp8 = torch.float8_e4m3fn
    weights = launch.prepare_weights(
        torch.zeros(4, 256, 256, dtype=fp8),
        torch.ones(4, 2, 2),
        torch.zeros(4, 256, 128, dtype=fp8),
        torch.ones(4, 2, 1),
    )
    x = torch.zeros(8, 256, dtype=torch.bfloat16)
    return workspace, weights, x, torch.zeros(8, 2, dtype=torch.int64), torch.ones(8, 2)


def test_calls_that_are_refused():
    workspace, weights, x, ids, p = small_call()
    launch.check_call(workspace, x, ids, p, weights)
    with pytest.raises(
        ValueError, match=r"x: expected bfloat16 \[8, 256\] on cpu, got float32 .*; topk_weights: expected"
    ):
        launch.check_call(workspace, x.float(), ids, p[:, :1], weights)
    with pytest.raises(ValueError, match="topk_ids: expected int32"):
        launch.check_call(workspace, x, ids.to(torch.int16), p, weights)
    more = torch.cat([x, x])
    with pytest.raises(ValueError, match="expected at most max_tokens = 8 tokens, got 16. Make a larger workspace"):
        launch.check_call(workspace, more, torch.cat([ids, ids]), torch.cat([p, p]), weights)
    with workspace:
        assert "MiB" in repr(workspace) and workspace.num_bytes > 0
    with pytest.raises(ValueError, match="workspace: expected one that is open"):
        launch.check_call(workspace, x, ids, p, weights)
    config = TileConfig(trace=True)
    with pytest.raises(ValueError, match="traces: expected a buffer a rank"):
        launch.fused_forward([workspace], [x], [ids], [p], [weights], config=config)


def test_why_not_of_a_layer():
    reason = launch.why_not(Problem(256, 128), num_experts=600, num_ranks=17, top_k=13)
    for part in ("num_experts: expected 1 to 512", "num_ranks: expected 1 to 16", "top_k: expected 1 to 12"):
        assert part in reason
    assert launch.why_not(Problem(7168, 2048), num_experts=256, num_ranks=8, top_k=8) is None


def test_too_few_connections_for_virtual_ranks(monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with pytest.raises(ValueError, match="CUDA_DEVICE_MAX_CONNECTIONS: expected at least 2"):
        launch.LocalWorld(2, hidden=256, num_experts=4, top_k=2, max_tokens=8)


def test_launch_passes_what_the_kernel_takes():
    """Number, order, dtypes and shapes of a launch's arguments."""
    problem = Problem(256, 128)
    workspace, weights, x, ids, p = small_call()
    buffers = workspace.buffers(128, save=False)
    tensors = launch.kernel_tensors(workspace, buffers, weights, x, ids, p, torch.empty_like(x))
    arguments = [*tensors, workspace.peers, *launch.kernel_sizes(workspace, 1.0), 0.0]
    names = list(inspect.signature(FusedForward.__call__).parameters)[1:-1]
    assert len(arguments) == len(names) == len(fake_arguments(problem)) - 1
    for name, given, fake in zip(names, arguments, fake_arguments(problem)[:-1], strict=True):
        if isinstance(given, torch.Tensor):
            assert str(given.dtype) == f"torch.{DTYPES[fake.element_type]}", name
            assert given.dim() == len(fake.shape), name
            for size, wanted in zip(given.shape, fake.shape, strict=True):
                assert not isinstance(wanted, int) or size == wanted, name
        else:
            assert isinstance(given, (int, float)), name
