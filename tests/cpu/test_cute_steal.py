"""Weight gradients that dgrad takes, without a GPU: machine code, arguments of a launch, who does which task."""

import functools
import inspect
import random
import re

import pytest
import torch

pytest.importorskip("cutlass")

from cute_kernels import backward_launch, backward_offer, launch, sass, wgrad_config
from cute_kernels.backward_problem import TURN_COLUMNS, TURNED, TURNS, W2, W13, BackwardProblem
from cute_kernels.backward_steal import StealingBackward, fake_arguments
from cute_kernels.tile_config import TileConfig
from cute_kernels.wgrad_launch import WgradQueue
from tests.cpu.test_cute_backward import weights
from tests.cpu.test_cute_forward_code import DTYPES, peer_scopes
from tests.cpu.test_cute_ptx import wrong_loads, wrong_scopes
from tests.support.machine_code import compiled_once, needs_nvdisasm

TUNED = {
    "A": BackwardProblem(7168, 2048, stolen="bfloat16"),
    "A clamped": BackwardProblem(7168, 2048, clamp=True, stolen="bfloat16"),
    "odd": BackwardProblem(384, 384, clamp=True, many_experts=True, stolen="float32", delay_us=1000),
}
binary = functools.partial(compiled_once, StealingBackward, fake_arguments)


@needs_nvdisasm
@pytest.mark.parametrize("name", TUNED)
def test_machine_code(name):
    problem = TUNED[name]
    found = sass.report(binary(problem).cubin)
    waves = 2 * TileConfig().unroll(problem)
    # none at A; elsewhere some accumulators of a tile, outside the steady part of the main loop
    assert found.stack_bytes <= (0 if name == "A" else 64), found
    # dgrad's, and the wave that is issued behind an entry without data
    assert found.qgmma == 4 * (waves + 3), found
    assert found.warpgroup_arrive == waves + 3, f"serialised wgmma: {found}"
    assert found.registers <= 168 and found.top_register <= 240


@needs_nvdisasm
def test_registers_of_the_other_warps():
    """Between giving up registers and the math warps' code nothing names a register that is not there any more."""
    code = sass.disassemble(binary(TUNED["A"]).cubin)
    _, behind = code.split("USETMAXREG.DEALLOC", 1)
    others, math = behind.split("USETMAXREG.TRY_ALLOC", 1)
    top = [max(int(r) for r in re.findall(r"\bR(\d+)\b", part)) for part in (others, math)]
    assert top[0] < TileConfig().other_registers and 168 < top[1] < TileConfig().math_registers


def test_flags_between_ranks_and_loads_past_coherence():
    """As of the other kernels: sys scope for other ranks, non-coherent loads only of what the launch does not write."""
    ptx = binary(TUNED["odd"]).ptx
    assert peer_scopes(ptx) == [] and wrong_scopes(ptx) == []
    assert wrong_loads(ptx) == []


@needs_nvdisasm
def test_products_of_the_copy_are_not_fused():
    """The main loop's additions are the only ones that may take a product along: no more FFMA than dgrad has, but for
    the reciprocal of a column's scale."""
    found = sass.report(binary(TUNED["A"]).cubin)
    dgrad = 2 * 64 * TileConfig().unroll(TUNED["A"])
    assert found.ffma - dgrad <= 26, found


def test_launch_passes_what_the_kernel_takes():
    problem = BackwardProblem(256, 128, stolen="bfloat16")
    workspace = launch.Workspace(hidden=256, num_experts=4, top_k=2, max_tokens=8, num_ctas=4, device="cpu")
    saved = workspace.buffers(128, save=True)
    *_, prepared = weights(4, 256, 128)
    dout, ids = torch.zeros(8, 256, dtype=torch.bfloat16), torch.zeros(8, 2, dtype=torch.int64)
    result = backward_launch._allocate(dout, saved, 2)
    blocks = workspace.capacity_rows // 128

    def copy(width: int, *scales: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(blocks, width, 128, dtype=torch.float8_e4m3fn), torch.zeros(blocks, *scales)

    words = (torch.zeros(n, dtype=torch.int32) for n in (4, TURNED + 1, blocks))
    queue = WgradQueue(saved.offs, saved.counts, *words)
    dw13 = torch.zeros(4, 256, 256, dtype=torch.bfloat16)
    offer = backward_offer.Offer(queue, torch.zeros(blocks * 128), copy(256, 256), copy(256, 1, 4), dw13, 128)
    tensors = backward_launch.kernel_tensors(workspace, dout, ids, saved, prepared, result) + offer.kernel_tensors()
    arguments = [*tensors, workspace.peers, *launch.kernel_sizes(workspace, 1.0), offer.most_rows, 0.0]
    names = list(inspect.signature(StealingBackward.__call__).parameters)[1:-1]
    assert len(arguments) == len(names) == len(fake_arguments(problem)) - 1
    for name, given, fake in zip(names, arguments, fake_arguments(problem)[:-1], strict=True):
        if isinstance(given, torch.Tensor):
            assert str(given.dtype) == f"torch.{DTYPES[fake.element_type]}", name
            assert given.dim() == len(fake.shape), name
            for size, wanted in zip(given.shape, fake.shape, strict=True):
                assert not isinstance(wanted, int) or size == wanted, name
        else:
            assert isinstance(given, (int, float)), name


@pytest.mark.parametrize("steal_us, rows", [(0.0, 0), (4.0, 0), (4.9, 128), (50.0, 57 * 128)])
def test_longest_task_that_is_taken(steal_us, rows):
    assert backward_offer.most_rows(steal_us) == rows


def test_cursors_of_a_queue():
    """The GEMMs' cursors are those of weight_gradients, which counts them in its own order: dW2, dW13."""
    assert (W2, W13) == (0, 1) and sorted({W2, W13, TURNS, TURNED}) == [0, 1, 2, 3]


@pytest.mark.parametrize("seed", range(20))
def test_every_task_is_done_once(seed):
    """Any interleaving of kernels that claim, do or give back, and stop at any time, and then the drain."""
    rng = random.Random(seed)
    experts, tiles, most = rng.randint(1, 6), rng.randint(1, 5), 300
    rows = sorted((rng.choice([0, 100, 200, 400]) for _ in range(experts)), key=lambda n: n or 10**9)
    cursor, done, running = 0, [], [None] * rng.randint(1, 5)
    while running:
        i = rng.randrange(len(running))
        if running[i] is None:
            if rng.random() < 0.02:  # the rows of dX are there
                running.pop(i)
                continue
            running[i], cursor = cursor, cursor + 1
            continue
        task = running[i]
        place = task // tiles
        if place < experts and 0 < rows[place] <= most:
            done.append(task)
            running[i] = None
        else:
            cursor -= 1
            running.pop(i)
    done += range(cursor, experts * tiles)
    assert sorted(done) == list(range(experts * tiles))


def test_pieces_are_those_of_the_copying_kernel():
    assert TURN_COLUMNS == getattr(wgrad_config, "PIECE", TURN_COLUMNS) == 1024
