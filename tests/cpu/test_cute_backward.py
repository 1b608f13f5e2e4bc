"""The fused dgrad without a GPU: machine code, arguments of a launch, tile counts, order of the weights."""

import functools
import inspect

import pytest
import torch

pytest.importorskip("cutlass")

from cute_kernels import backward_launch, launch, sass
from cute_kernels.backward import FusedBackward, fake_arguments
from cute_kernels.backward_problem import BackwardProblem
from cute_kernels.tile_config import TileConfig
from cute_kernels.weights import ROWS, permute_rows, row_order
from megamoe.quantize import quantize_weight
from megamoe.recipe import Recipe
from tests.cpu.test_cute_forward_code import DTYPES, peer_scopes
from tests.support.machine_code import compiled_once, needs_nvdisasm

TUNED = {
    "A": BackwardProblem(7168, 2048),
    "A clamped": BackwardProblem(7168, 2048, clamp=True),
    "C": BackwardProblem(4096, 1024),
    "odd": BackwardProblem(384, 384, clamp=True, many_experts=True),
}
binary = functools.partial(compiled_once, FusedBackward, fake_arguments)


@needs_nvdisasm
@pytest.mark.parametrize("name", TUNED)
def test_machine_code(name):
    problem = TUNED[name]
    found = sass.report(binary(problem).cubin)
    waves = 2 * TileConfig().unroll(problem)
    assert found.stack_bytes == found.spills == 0, found
    # besides the main loop's waves the first of the first tile, and the one that the epilogue of GEMM A issues again
    assert found.qgmma == 4 * (waves + 2), found
    assert found.warpgroup_arrive == waves + 2, f"serialised wgmma: {found}"
    assert found.registers <= 168 and found.top_register <= 240


def test_flags_of_other_ranks_have_sys_scope():
    ptx = binary(TUNED["odd"]).ptx
    assert peer_scopes(ptx) == []
    assert len(peer_scopes(ptx.replace("red.release.sys", "red.release.gpu"))) >= 1


def test_products_in_sums_are_rounded():
    """Neither dp's products nor gate * (1 - sigma) may be fused with the addition that follows."""
    ptx = binary(TUNED["A"]).ptx
    assert (
        ptx.count("mul.rn.f32") == 2 * 64
    )  # of each element of a thread's tile, the loop over two blocks written once


@pytest.mark.parametrize("hidden, intermediate", [(7168, 2048), (384, 384), (128, 128), (2048, 768)])
def test_tile_counts(hidden, intermediate):
    problem = BackwardProblem(hidden, intermediate)
    assert (problem.k1, problem.k2) == (hidden // 128, intermediate // 64)
    assert problem.n1 * 256 - intermediate in (0, 128) and problem.n2 * 256 - hidden in (0, 128)


def weights(experts: int, hidden: int, inter: int):
    w13 = quantize_weight(torch.randn(experts, 2 * inter, hidden), Recipe(), 2).transposed()
    w2 = quantize_weight(torch.randn(experts, hidden, inter), Recipe()).transposed()
    return w13, w2, backward_launch.prepare_backward_weights(w13.data, w13.scale, w2.data, w2.scale)


def test_weights_and_scales_lie_in_kernel_order():
    """For each row of the kernel's order and each k-block, the scale that its tile brings is the user's row's."""
    w13, w2, made = weights(2, 384, 128)
    for user, data, scale in ((w13, made.w13_t, made.s13_t), (w2, made.w2_t, made.s2_t)):
        experts, rows, width = user.data.shape
        order = row_order(ROWS, rows)
        assert data.shape == (experts, order.numel(), width)
        assert scale.shape == (experts, width // 128, order.numel() // 256, 4)
        assert torch.equal(data.view(torch.uint8), permute_rows(user.data, ROWS).view(torch.uint8))
        position = torch.arange(order.numel())
        got = scale[:, :, position // 256, position % 128 // 64]  # the tile, and which of its two blocks
        real = order < rows
        assert torch.equal(got[:, :, real], user.scale[:, order[real] // 128].transpose(1, 2))


def test_launch_passes_what_the_kernel_takes():
    """Number, order, dtypes and shapes of a launch's arguments."""
    problem = BackwardProblem(256, 128)
    workspace = launch.Workspace(hidden=256, num_experts=4, top_k=2, max_tokens=8, num_ctas=4, device="cpu")
    saved = workspace.buffers(128, save=True)
    *_, prepared = weights(4, 256, 128)
    dout, ids = torch.zeros(8, 256, dtype=torch.bfloat16), torch.zeros(8, 2, dtype=torch.int64)
    result = backward_launch._allocate(dout, saved, 2)
    tensors = backward_launch.kernel_tensors(workspace, dout, ids, saved, prepared, result)
    arguments = [*tensors, workspace.peers, *launch.kernel_sizes(workspace, 1.0), 0.0]
    names = list(inspect.signature(FusedBackward.__call__).parameters)[1:-1]
    assert len(arguments) == len(names) == len(fake_arguments(problem)) - 1
    for name, given, fake in zip(names, arguments, fake_arguments(problem)[:-1], strict=True):
        if isinstance(given, torch.Tensor):
            assert str(given.dtype) == f"torch.{DTYPES[fake.element_type]}", name
            assert given.dim() == len(fake.shape), name
            for size, wanted in zip(given.shape, fake.shape, strict=True):
                assert not isinstance(wanted, int) or size == wanted, name
        else:
            assert isinstance(given, (int, float)), name


def test_results_that_wgrad_takes():
    workspace = launch.Workspace(hidden=256, num_experts=4, top_k=2, max_tokens=8, num_ctas=4, device="cpu")
    saved = workspace.buffers(128, save=True)
    result = backward_launch._allocate(torch.zeros(8, 256, dtype=torch.bfloat16), saved, 2)
    operands = result.operands(saved.pool, saved.pool_s)
    assert operands.d is result.pool and operands.x is saved.pool
    assert operands.d_gate_up.shape[1] == 2 * operands.weighted_act.shape[1] == 256


def test_rows_of_another_workspace_are_refused():
    workspace = launch.Workspace(hidden=256, num_experts=4, top_k=2, max_tokens=8, num_ctas=4, device="cpu")
    saved = workspace.buffers(128, save=True)
    saved.gate_up = saved.gate_up[:-128]
    with pytest.raises(ValueError, match=r"saved\[0\].gate_up: expected the workspace's \d+ rows, got"):
        backward_launch.fused_backward([workspace], [], [], [saved], [])
