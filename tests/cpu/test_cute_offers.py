"""When a fused backward offers dgrad tasks of dW13, on the CPU with emulated launches: same results, who is asked."""

import pytest

from megamoe import Recipe
from megamoe.cli.problem import ProblemSpec, make_problem
from megamoe.overlap import OverlapConfig
from tests.support.compare import assert_bitwise
from tests.support.fake_cute import Offer, install
from tests.support.moe_calls import context_for, run

ALL = (True, True, True, True)
STEALS = OverlapConfig(steal_us=50.0)


@pytest.fixture(autouse=True)
def backend(monkeypatch):
    return install(monkeypatch)


@pytest.mark.parametrize("save", ["pool", "repull", "recompute"])
def test_every_rank_offers_and_drains(save):
    problem = make_problem(ProblemSpec((11, 0, 7, 12), 128, 128, 4, 2, "masked"))
    want = run(problem, context_for(problem, backend="torch")).joined()
    got = run(problem, context_for(problem, backend="cute", save=save, overlap=STEALS)).joined()
    for name, value in got.items():
        assert_bitwise(value, want[name], name)
    assert Offer.made == 4


@pytest.mark.parametrize(
    "sizes, recipe, requires, overlap",
    [
        ((20,), Recipe(), ALL, STEALS),
        ((20, 5), Recipe(wgrad_operands="bf16"), ALL, STEALS),
        ((20, 5), Recipe(), (True, True, False, True), STEALS),
        ((20, 5), Recipe(), ALL, OverlapConfig()),
        ((0, 0), Recipe(), ALL, STEALS),
    ],
    ids=["one rank", "bf16 operands", "frozen w13", "off", "no tokens"],
)
def test_nothing_is_offered(sizes, recipe, requires, overlap):
    problem = make_problem(ProblemSpec(sizes, 128, 128, 4, 2))
    want = run(problem, context_for(problem, recipe, backend="torch"), requires)
    got = run(problem, context_for(problem, recipe, backend="cute", overlap=overlap), requires)
    assert Offer.made == 0
    for a, b in zip((*got.dx, got.dw13, got.dw2), (*want.dx, want.dw13, want.dw2), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert_bitwise(a, b, "a gradient")
