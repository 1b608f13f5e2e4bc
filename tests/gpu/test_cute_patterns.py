"""The fused forward and backward where most experts have no rows: every call ends, and is right."""

from __future__ import annotations

import random

import pytest
import torch

pytest.importorskip("cutlass")

from megamoe import torch_steps as steps
from megamoe.routing_plan import make_plan
from tests.gpu.test_cute_backward import Backward, check_rows, check_tokens, real_bits
from tests.gpu.test_cute_forward import Case, World, bits, check

PATTERNS = [
    (0, 5, 0, 0, 300, 0, 1, 0),
    (0, 0, 0, 0, 0, 0, 0, 1),
    (1, 0, 0, 0, 0, 0, 0, 0),
    (0, 0, 0, 129, 0, 0, 128, 0),
]


def world_of(ranks: int) -> World:
    tokens = -(-306 // ranks)
    return World(Case("patterns", tokens=(tokens,) * ranks, top_k=1))


def routed(world: World, rows: tuple[int, ...], seed: int) -> list[torch.Tensor]:
    """Ids that give each expert so many rows, dealt to tokens of all ranks at random; the rest has no expert."""
    flat = [e for e, n in enumerate(rows) for _ in range(n)]
    flat += [-1] * (sum(world.case.tokens) - len(flat))
    random.Random(seed).shuffle(flat)
    whole = torch.tensor(flat, dtype=torch.int32, device="cuda")[:, None]
    return [part.contiguous() for part in whole.split(list(world.case.tokens))]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_rows_of_few_experts(ranks):
    world = world_of(ranks)
    with world.world:
        b = Backward(world)
        for seed, rows in enumerate(PATTERNS):
            xs, _, ps = world.inputs(seed)
            ids = routed(world, rows, seed)
            results = world.run((xs, ids, ps))
            check(world, (xs, ids, ps), results)
            saved, douts, plan = [r.buffers for r in results], b.douts(seed), make_plan(ids, 8)
            grads = b.run(ids, saved, douts)
            quantized = [steps.quantize_rows(d, world.case.recipe) for d in douts]
            for r in range(ranks):
                if int((plan.ranks[r].source_rank >= 0).sum()) < 8:
                    continue  # its bounds are for many rows: dp of a single one may cancel to less than its error
                check_rows(b, r, grads[r], saved[r], plan, quantized)
            check_tokens(b, ids, saved, grads, plan)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_random_patterns_with_most_experts_empty(ranks):
    """Two workspaces give the same bits: one sees all patterns in a row, the other a full routing in between."""
    worlds, rng = [world_of(ranks), world_of(ranks)], random.Random(ranks)
    with worlds[0].world, worlds[1].world:
        pair = [Backward(w) for w in worlds]
        for seed in range(70):
            rows = tuple(0 if rng.random() < 0.7 else rng.choice((1, 5, 30, 38)) for _ in range(8))
            xs, full, ps = worlds[0].inputs(seed % 5)
            ids, douts = routed(worlds[0], rows, seed), pair[0].douts(seed % 5)
            if seed % 7 == 0:
                worlds[1].run((xs, full, ps))
            plan, found = make_plan(ids, 8), []
            for w, b in zip(worlds, pair, strict=True):
                results = w.run((xs, ids, ps))
                grads = b.run(ids, [r.buffers for r in results], douts)
                found.append(bits(results) + real_bits(grads, plan))
            assert all(torch.equal(x, y) for x, y in zip(*found, strict=True)), rows
