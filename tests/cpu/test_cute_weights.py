"""Weights in the kernels' order hold the same values, and the order is the one the wgmma accumulators ask for."""

import dataclasses

import pytest
import torch

from cute_kernels.weights import GATE_UP, ROWS, permute_rows, prepare_weights, row_order
from tests.support.kernel_weights import untile


@pytest.mark.parametrize("kind, rows", [(GATE_UP, 256), (GATE_UP, 768), (ROWS, 256), (ROWS, 512)])
def test_order_is_a_permutation(kind, rows):
    assert row_order(kind, rows).sort().values.tolist() == list(range(rows))


def test_odd_block_is_padded():
    order = row_order(ROWS, 384)
    assert order.numel() == 512 and order.sort().values.tolist() == list(range(512))


def accumulator_columns(wave: int, quad: int, block: int, group: int) -> list[int]:
    """Positions in a tile of the accumulators that a thread takes for 8 neighbouring columns: wgmma m64n128 gives
    thread `quad` columns 8 j + 2 quad + b; of the wave's 128 the second 64 are of the second block."""
    return [128 * wave + 64 * block + 32 * group + 8 * j + 2 * quad + b for j in range(4) for b in range(2)]


@pytest.mark.parametrize("kind", [GATE_UP, ROWS])
def test_a_thread_holds_neighbours(kind):
    inter, tile = 384, 1
    order = row_order(kind, 2 * inter)
    for wave in range(2):
        for quad in range(4):
            for block in range(2):
                for group in range(2):
                    first = 64 * wave + 32 * group + 8 * quad
                    first += tile * 128 + block * inter if kind == GATE_UP else tile * 256 + block * 128
                    rows = [order[tile * 256 + c].item() for c in accumulator_columns(wave, quad, block, group)]
                    assert rows == list(range(first, first + 8))


def test_blocks_hold_the_rows_in_order():
    rows = torch.randint(0, 256, (2, 512, 384), dtype=torch.uint8)
    blocks = permute_rows(rows, ROWS)
    assert blocks.is_contiguous() and torch.equal(untile(blocks), rows[:, row_order(ROWS, 512)])


@pytest.mark.parametrize("hidden, inter", [(256, 128), (384, 256), (128, 384)])
def test_values_and_scales(hidden, inter):
    def fp8(*shape):
        return torch.randn(shape).to(torch.float8_e4m3fn)

    experts = 3
    w13, w2 = fp8(experts, 2 * inter, hidden), fp8(experts, hidden, inter)
    s13, s2 = torch.rand(experts, 2 * inter // 128, hidden // 128), torch.rand(experts, hidden // 128, inter // 128)
    k = prepare_weights(w13, s13, w2, s2)
    k = dataclasses.replace(k, w13=untile(k.w13), w2=untile(k.w2))
    assert torch.equal(k.w13.float(), w13.float()[:, row_order(GATE_UP, 2 * inter)])
    order = row_order(ROWS, hidden)
    real = order < hidden
    assert torch.equal(k.w2[:, real].float(), w2.float()[:, order[real]])
    assert not k.w2[:, ~real].float().any()
    for n in range(inter // 128):
        assert torch.equal(k.s13[:, :, n, 0], s13[:, n]) and torch.equal(k.s13[:, :, n, 1], s13[:, inter // 128 + n])
    for n in range(k.s2.shape[2]):
        assert torch.equal(k.s2[:, :, n, 0], s2[:, 2 * n])
        if 2 * n + 1 < hidden // 128:
            assert torch.equal(k.s2[:, :, n, 1], s2[:, 2 * n + 1])
    assert k.num_local_experts == experts
