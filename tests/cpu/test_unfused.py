"""The layer as steps and a transport, without autograd around it."""

import pytest
import torch

from megamoe import LocalWorld, Recipe, torch_steps, unfused
from megamoe.cli.problem import ProblemSpec, make_problem
from megamoe.comm import as_transport
from megamoe.quantize import quantize_weight
from megamoe.reference import emulate_backward, emulate_forward
from megamoe.unfused import ExpertWeights, ForwardOptions, Needs
from tests.support.compare import assert_bitwise
from tests.support.poison import nan_like


def experts_of(problem, recipe):
    found = []
    for rank in range(problem.spec.num_ranks):
        w13, w2 = problem.weights_of(rank)
        q13, q2 = quantize_weight(w13, recipe, 2), quantize_weight(w2, recipe)
        found.append(ExpertWeights(q13, q2, q13.transposed(), q2.transposed()))
    return found


def forward(problem, recipe, steps=torch_steps, **options):
    transport = as_transport(LocalWorld(problem.spec.num_ranks), steps)
    experts = experts_of(problem, recipe)
    tokens = (problem.xs, problem.topk_ids, problem.topk_weights)
    outs, saved = unfused.forward(steps, transport, *tokens, experts, recipe, ForwardOptions(**options))
    return transport, experts, outs, saved


@pytest.mark.parametrize("tokens", [(30,), (11, 0, 7, 12)], ids=str)
@pytest.mark.parametrize("save", ["pool", "repull", "recompute"])
def test_equals_the_emulation(tokens, save):
    problem, recipe = make_problem(ProblemSpec(tokens, 128, 96, 4, 2, "masked")), Recipe()
    transport, experts, outs, saved = forward(problem, recipe, save=save)
    assert (saved.pools is None) == (save != "pool") and (saved.gate_ups is None) == (save == "recompute")
    each = 4 // len(tokens)
    dw13 = [nan_like(torch.empty(each, 192, 128)) for _ in tokens]
    dw2 = [nan_like(torch.empty(each, 128, 96)) for _ in tokens]
    needs = Needs(w13=dw13, w2=dw2)
    grads = unfused.backward(torch_steps, transport, problem.douts, saved, experts, needs)
    emulated = emulate_forward(problem.global_inputs(), recipe)
    want = emulate_backward(emulated, torch.cat(problem.douts), recipe)
    assert_bitwise(torch.cat(outs), emulated.out_TH, "out")
    assert_bitwise(torch.cat(grads.dx), want.dx_TH, "dx")
    assert_bitwise(torch.cat(grads.dp), want.dp_TK, "dp")
    assert_bitwise(torch.cat(dw13), want.dw13_E2IH, "dW13")
    assert_bitwise(torch.cat(dw2), want.dw2_EHI, "dW2")


def test_nothing_is_saved_unless_asked():
    problem = make_problem(ProblemSpec((9,), 128, 128, 4, 2))
    assert forward(problem, Recipe())[3] is None


def test_more_rows_than_needed_change_no_bit():
    problem, recipe = make_problem(ProblemSpec((9, 8), 128, 128, 4, 2)), Recipe()
    want = forward(problem, recipe)[2]
    _, _, outs, saved = forward(problem, recipe, num_rows=1024, save="pool")
    assert all(pool.data.shape[0] == 1024 for pool in saved.pools)
    for got, exact in zip(outs, want, strict=True):
        assert_bitwise(got, exact, "out")


class Counting:
    """torch_steps that note which steps were called."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        def step(*args, **options):
            self.calls.append(name)
            return getattr(torch_steps, name)(*args, **options)

        return step


@pytest.mark.parametrize("ranks", [1, 2])
def test_exchanges_do_not_depend_on_what_one_rank_needs(ranks):
    """One rank alone skips what nobody needs; with others it may not, since they wait for its rows."""
    problem, recipe, steps = make_problem(ProblemSpec((8,) * ranks, 128, 128, 4, 2)), Recipe(), Counting()
    transport, experts, _, saved = forward(problem, recipe, steps, save="pool")
    calls = []
    for need in (True, False):
        steps.calls.clear()
        grads = unfused.backward(steps, transport, problem.douts, saved, experts, Needs(need, need))
        calls.append(sorted(steps.calls))
        assert (grads.dx is not None) == (grads.dp is not None) == (need or ranks > 1)
    assert (calls[0] == calls[1]) == (ranks > 1)
    assert "wgrad" not in calls[0]
