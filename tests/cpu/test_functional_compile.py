"""torch.compile and torch.library's own checks: one graph, few compilations, fakes that agree with what runs."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from megamoe import MegaMoE, MoEConfig, Recipe, mega_moe
from megamoe.cli.problem import ProblemSpec, make_problem
from megamoe.operators import forward_op
from megamoe.quantize import quantize_weight
from tests.support.compare import assert_bitwise
from tests.support.moe_calls import context_for, run


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def arguments(problem, context, save="pool", requires=True):
    xs = [x.clone().requires_grad_(requires) for x in problem.xs]
    weights = [p.clone().requires_grad_(requires) for p in problem.topk_weights]
    w13, w2 = (w.clone().requires_grad_(requires) for w in (problem.w13_E2IH, problem.w2_EHI))
    fixed = (None, None, None, context.spec, context.handle, save, True, [requires, requires])
    return xs, problem.topk_ids, weights, w13, w2, *fixed


@pytest.mark.parametrize(
    ("save", "precision", "tokens"),
    [("pool", "fp8", (7, 0)), ("pool", "bf16", (13,)), ("repull", "fp8", (13,)), ("recompute", "fp8", (13,))],
    ids=str,
)
def test_opcheck(save, precision, tokens):
    problem = make_problem(ProblemSpec(tokens, 160, 96, 4, 2))  # sizes that end in partial blocks
    context = context_for(problem, Recipe(precision), capacity="worst" if len(tokens) > 1 else None)
    torch.library.opcheck(forward_op, arguments(problem, context, save))


def test_opcheck_without_grad():
    problem = make_problem(ProblemSpec((5,), 128, 128, 4, 2))
    context = context_for(problem)
    torch.library.opcheck(forward_op, arguments(problem, context, "none", requires=False))


def test_opcheck_fp8_weights():
    problem = make_problem(ProblemSpec((5,), 128, 128, 4, 2))
    context = context_for(problem)
    xs, ids, weights, _, _, *_ = arguments(problem, context)
    w13, w2 = quantize_weight(problem.w13_E2IH, Recipe(), 2), quantize_weight(problem.w2_EHI, Recipe())
    fixed = (None, context.spec, context.handle, "pool", True, [False, False])
    torch.library.opcheck(
        forward_op,
        (xs, ids, weights, w13.data, w2.data, w13.scale, w2.scale, *fixed),
        test_utils=("test_autograd_registration", "test_faketensor"),  # the others cannot compare FP8 inputs
    )


@pytest.mark.parametrize(
    ("save", "tokens"), [("pool", (30,)), ("repull", (9, 21)), ("recompute", (30,)), ("pool", (0, 21))], ids=str
)
def test_compiled_equals_eager(save, tokens):
    problem = make_problem(ProblemSpec(tokens, 128, 128, 4, 2, "masked"))
    context = context_for(problem, save=save, capacity="worst" if len(tokens) > 1 else None)
    compiled = torch.compile(mega_moe, fullgraph=True, backend="aot_eager")
    want, got = run(problem, context).joined(), run(problem, context, call=compiled).joined()
    for name, value in got.items():
        assert_bitwise(value, want[name], name)


@pytest.mark.parametrize(
    "requires", [(True, False, False, False), (False, False, True, False), (False, True, False, True)]
)
def test_compiled_gradients_are_none_exactly_where_frozen(requires):
    problem = make_problem(ProblemSpec((12,), 128, 128, 4, 2))
    compiled = torch.compile(mega_moe, fullgraph=True, backend="aot_eager")
    got, want = run(problem, requires=requires, call=compiled), run(problem, requires=requires)
    for a, b in zip(
        (got.dx[0], got.dp[0], got.dw13, got.dw2), (want.dx[0], want.dp[0], want.dw13, want.dw2), strict=True
    ):
        assert (a is None) == (b is None)
        if a is not None:
            assert_bitwise(a, b, str(requires))


CONFIG = MoEConfig(96, 32, num_experts=8, top_k=2, num_groups=4, topk_groups=2, num_shared_experts=1)


@pytest.mark.parametrize("sizes", [(64, 65, 128, 1)], ids=str)
def test_the_layer_compiles_at_most_twice_for_any_number_of_tokens(sizes):
    layer = MegaMoE(CONFIG)
    counter = CompileCounter()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    for tokens in sizes:
        x = torch.randn(tokens, 96).bfloat16()
        assert_bitwise(compiled(x), layer(x), f"out of {tokens} tokens")
    assert counter.frame_count <= 2


def test_the_layer_without_dynamic_shapes_marked_compiles_twice():
    layer = MegaMoE(CONFIG)
    counter = CompileCounter()
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for tokens in (64, 65, 66, 130, 257):
        x = torch.randn(tokens, 96).bfloat16()
        assert_bitwise(compiled(x), layer(x), f"out of {tokens} tokens")
    assert counter.frame_count <= 2


@pytest.mark.parametrize("weights", ["fp8", "bf16"])
def test_a_compiled_layer_trains_like_an_eager_one(weights):
    layer = MegaMoE(CONFIG, weights=weights)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    grads = []
    for call in (layer, compiled):
        layer.zero_grad()
        x = torch.randn(2, 21, 96, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
        out, counts = call(x, return_expert_counts=True)
        out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).bfloat16())
        parameters = {name: p.grad for name, p in layer.named_parameters() if p.requires_grad}
        grads.append({"out": out, "counts": counts, "x": x.grad, **parameters})
    for name, value in grads[0].items():
        assert_bitwise(grads[1][name], value, name)


def test_many_layers_share_a_graph():
    """The number of a context is no constant of the graph, so a model of many layers stays within dynamo's limit."""
    layers = [MegaMoE(CONFIG) for _ in range(10)]
    counter = CompileCounter()

    def block(context, x, ids, weights, w13, w2):
        return mega_moe(x, ids, weights, w13, w2, context=context)

    compiled = torch.compile(block, fullgraph=True, backend=counter)
    x, ids, weights = torch.randn(6, 96).bfloat16(), torch.randint(8, (6, 2)), torch.rand(6, 2)
    for layer in layers:
        experts = layer.experts
        want = experts(x, ids, weights)
        assert_bitwise(compiled(experts.context, x, ids, weights, experts.w13, experts.w2), want, "out")
    assert counter.frame_count <= 2


def test_nothing_to_do_when_compiled():
    compiled = torch.compile(mega_moe, fullgraph=True, backend="aot_eager")
    problem = make_problem(ProblemSpec((0,), 128, 128, 4, 2))
    got = run(problem, call=compiled)
    assert got.dx[0].shape == (0, 128) and not got.dw13.any() and not got.dw2.any()
    problem = make_problem(ProblemSpec((16,), 128, 128, 4, 2))
    problem.topk_ids[0].fill_(-1)
    got = run(problem, call=compiled).joined()
    assert all(not value.any() for value in got.values())


def test_unknown_sizes_are_right_or_refused_by_torch():
    """Without a capacity the sizes of R > 1 depend on the routing: torch either copes or says so."""
    problem = make_problem(ProblemSpec((8, 9), 128, 128, 4, 2))
    compiled = torch.compile(mega_moe, fullgraph=True, backend="aot_eager")
    context = context_for(problem)
    try:
        got = run(problem, context, call=compiled).joined()
    except Exception as error:
        assert "dynamic" in str(error).lower() or "data-dependent" in str(error).lower()
        return
    want = run(problem, context).joined()
    for name, value in got.items():
        assert_bitwise(value, want[name], name)
