"""The oracle against autograd and finite differences, and the emulation against the oracle by the gates."""

import dataclasses

import pytest
import torch

from megamoe.cli.problem import ROUTINGS, ProblemSpec, make_problem
from megamoe.gates import GATES, sqnr_db
from megamoe.recipe import Recipe
from megamoe.reference import (
    Backward,
    Inputs,
    emulate_backward,
    emulate_forward,
    oracle_backward,
    oracle_forward,
)
from tests.support.compare import assert_backward_passes, assert_bitwise, assert_rows_pass

TINY = ProblemSpec((5,), hidden=6, intermediate=4, num_experts=4, top_k=3, routing="masked")


def inputs_of(spec: ProblemSpec, **changes) -> tuple[Inputs, torch.Tensor]:
    problem = make_problem(spec)
    return dataclasses.replace(problem.global_inputs(), **changes), problem.douts[0]


def formula(inputs: Inputs, clamp: float | None) -> torch.Tensor:
    """The layer once more, token by token and slot by slot, straight from its definition."""
    outs = []
    for t in range(inputs.x_TH.shape[0]):
        out = torch.zeros(inputs.x_TH.shape[1], dtype=torch.float64)
        for j, e in enumerate(inputs.topk_ids_TK[t].tolist()):
            if e < 0:
                continue
            both = inputs.w13_E2IH[e].double() @ inputs.x_TH[t].double()
            gate, up = both[: both.numel() // 2], both[both.numel() // 2 :]
            if clamp is not None:
                gate, up = gate.clamp(max=clamp), up.clamp(min=-clamp, max=clamp)
            h = gate / (1 + (-gate).exp()) * up * inputs.topk_weights_TK[t, j].double()
            out = out + inputs.w2_EHI[e].double() @ h
        outs.append(out)
    return torch.stack(outs) if outs else inputs.x_TH.double()


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("clamp", [None, 0.7], ids=["no_clamp", "clamp"])
def test_oracle_is_the_formula(routing, clamp):
    spec = dataclasses.replace(TINY, num_tokens=(9,), routing=routing)
    inputs, _ = inputs_of(spec)
    torch.testing.assert_close(oracle_forward(inputs, clamp).out_TH, formula(inputs, clamp), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("clamp", [None, 0.7], ids=["no_clamp", "clamp"])
@pytest.mark.parametrize("routing", ["masked", "duplicates"])
def test_oracle_passes_gradcheck(routing, clamp):
    inputs, _ = inputs_of(dataclasses.replace(TINY, routing=routing))
    leaves = [
        v.double().requires_grad_() for v in (inputs.x_TH, inputs.topk_weights_TK, inputs.w13_E2IH, inputs.w2_EHI)
    ]

    def layer(x, p, w13, w2):
        return oracle_forward(Inputs(x, inputs.topk_ids_TK, p, w13, w2), clamp).out_TH

    assert torch.autograd.gradcheck(layer, leaves)


@pytest.mark.parametrize("clamp", [None, 0.7], ids=["no_clamp", "clamp"])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_written_out_gradients_are_those_of_autograd(routing, clamp):
    inputs, dout = inputs_of(dataclasses.replace(TINY, num_tokens=(13,), routing=routing))
    leaves = [
        v.double().requires_grad_() for v in (inputs.x_TH, inputs.topk_weights_TK, inputs.w13_E2IH, inputs.w2_EHI)
    ]
    x, p, w13, w2 = leaves
    oracle_forward(Inputs(x, inputs.topk_ids_TK, p, w13, w2), clamp).out_TH.backward(dout.double())
    got = oracle_backward(inputs, dout, clamp)
    for value, leaf in zip((got.dx_TH, got.dp_TK, got.dw13_E2IH, got.dw2_EHI), leaves, strict=True):
        torch.testing.assert_close(value, leaf.grad, rtol=1e-10, atol=1e-12)
    assert not got.dp_TK[inputs.topk_ids_TK < 0].any()


def test_equality_passes_the_clamp():
    """Gate and up exactly at the limit: min and clamp pass the gradient there, one step beyond they don't."""
    one = torch.ones(1, 1)
    grads = {}
    for value in (1.0, 1.0 + 2**-20):
        w13 = torch.full((1, 2, 1), value)
        inputs = Inputs(one, torch.zeros(1, 1, dtype=torch.int64), one, w13, one[None])
        grads[value] = oracle_backward(inputs, one, clamp=1.0).dw13_E2IH
    assert bool((grads[1.0] != 0).all())
    assert not grads[1.0 + 2**-20].any()


def test_dp_spread_bounds_dp():
    inputs, dout = inputs_of(dataclasses.replace(TINY, hidden=64, intermediate=32))
    got = oracle_backward(inputs, dout)
    assert bool((got.dp_TK.abs() <= got.dp_spread_TK * 32**0.5 + 1e-12).all())
    assert bool((got.dp_spread_TK[inputs.topk_ids_TK >= 0] > 0).all())


CASES = {
    "plain": ProblemSpec((40,), 256, 128, 8, 2),
    "partial_blocks": ProblemSpec((33,), 320, 192, 6, 3),
    "small_sizes": ProblemSpec((17,), 192, 96, 4, 2),
    "masked": ProblemSpec((24,), 256, 128, 8, 4, "masked"),
    "duplicates": ProblemSpec((24,), 256, 128, 8, 4, "duplicates"),
    "one_expert": ProblemSpec((20,), 128, 128, 4, 1, "one_expert"),
    "zipf": ProblemSpec((40,), 128, 128, 16, 4, "zipf"),
    "top_k_12": ProblemSpec((8,), 128, 128, 16, 12),
    "one_token": ProblemSpec((1,), 256, 128, 8, 2),
    "no_tokens": ProblemSpec((0,), 256, 128, 8, 2),
}


def both(case: ProblemSpec, recipe: Recipe) -> tuple[Inputs, tuple, tuple]:
    inputs, dout = inputs_of(case)
    forward = emulate_forward(inputs, recipe)
    emulated = forward, emulate_backward(forward, dout, recipe)
    return inputs, emulated, (oracle_forward(inputs, recipe.clamp), oracle_backward(inputs, dout, recipe.clamp))


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_emulation_passes_the_gates(name, precision):
    inputs, (forward, backward), (want, want_grads) = both(CASES[name], Recipe(precision))
    assert forward.out_TH.dtype == backward.dx_TH.dtype == torch.bfloat16
    assert backward.dp_TK.dtype == torch.float32
    assert_rows_pass(forward.out_TH, want.out_TH, GATES[precision], "out")
    assert_backward_passes(backward, want_grads, GATES[precision])
    assert not backward.dp_TK[inputs.topk_ids_TK < 0].any()
    empty = (
        torch.bincount(inputs.topk_ids_TK[inputs.topk_ids_TK >= 0].flatten(), minlength=CASES[name].num_experts) == 0
    )
    assert not backward.dw13_E2IH[empty].any() and not backward.dw2_EHI[empty].any()


def test_pow2_scales_pass_the_gates_and_differ():
    inputs, (forward, backward), (want, want_grads) = both(CASES["plain"], Recipe(scale_format="pow2"))
    assert_rows_pass(forward.out_TH, want.out_TH, GATES["fp8"], "out")
    assert_backward_passes(backward, want_grads, GATES["fp8"])
    assert not torch.equal(forward.out_TH, emulate_forward(inputs, Recipe()).out_TH)


@pytest.mark.parametrize("name", ["plain", "partial_blocks", "masked", "one_token", "no_tokens"])
def test_bf16_operands_of_weight_gradients_are_better(name):
    inputs, (forward, backward), (_, want) = both(CASES[name], Recipe(wgrad_operands="fp8"))
    assert_backward_passes(backward, want, GATES["fp8"])
    bf16 = emulate_backward(forward, inputs_of(CASES[name])[1], Recipe(wgrad_operands="bf16"))
    assert_backward_passes(bf16, want, GATES["fp8"])
    assert_bitwise(backward.dx_TH, bf16.dx_TH, "dx")
    if name not in ("one_token", "no_tokens"):  # one row alone keeps its values
        assert sqnr_db(backward.dw13_E2IH, want.dw13_E2IH) < sqnr_db(bf16.dw13_E2IH, want.dw13_E2IH)


def test_a_wide_clamp_changes_nothing_and_a_tight_one_does():
    inputs, _ = inputs_of(CASES["plain"])
    plain = emulate_forward(inputs, Recipe())
    assert_bitwise(emulate_forward(inputs, Recipe(clamp=1e4)).out_TH, plain.out_TH, "out")
    tight = emulate_forward(inputs, Recipe(clamp=0.5))
    assert not torch.equal(tight.out_TH, plain.out_TH)
    assert_rows_pass(tight.out_TH, oracle_forward(inputs, 0.5).out_TH, GATES["fp8"], "out")


def test_masked_slots_add_nothing_whatever_their_weight():
    """Weights of slots without an expert are NaN and 7: they reach no result, and their gradient is exactly 0."""
    inputs, dout = inputs_of(CASES["masked"])
    masked = inputs.topk_ids_TK < 0
    clean = emulate_forward(inputs, Recipe())
    for fill in (float("nan"), 7.0):
        weights = torch.where(masked, fill, inputs.topk_weights_TK)
        dirty = emulate_forward(dataclasses.replace(inputs, topk_weights_TK=weights), Recipe())
        assert_bitwise(dirty.out_TH, clean.out_TH, "out")
        assert not emulate_backward(dirty, dout, Recipe()).dp_TK[masked].any()
    assert not clean.out_TH[masked.all(1)].any()


@pytest.mark.parametrize("name", ["no_tokens", "all_masked"])
def test_no_row_at_all(name):
    inputs, dout = inputs_of(CASES["plain"] if name == "all_masked" else CASES["no_tokens"])
    if name == "all_masked":
        inputs = dataclasses.replace(inputs, topk_ids_TK=torch.full_like(inputs.topk_ids_TK, -1))
    forward = emulate_forward(inputs, Recipe())
    got = emulate_backward(forward, dout, Recipe())
    assert forward.out_TH.shape == inputs.x_TH.shape and not forward.out_TH.any()
    for value, like in (
        (got.dx_TH, inputs.x_TH),
        (got.dp_TK, inputs.topk_weights_TK),
        (got.dw13_E2IH, inputs.w13_E2IH),
        (got.dw2_EHI, inputs.w2_EHI),
    ):
        assert value.shape == like.shape and not value.any()
    oracle = oracle_forward(inputs)
    assert not oracle.out_TH.any() and oracle.gate_up_P2I.shape == (0, 256) and oracle.y_PH.shape == (0, 256)


def test_an_expert_twice_is_two_slots():
    """Weights .1 and .2 on one expert add up, and each slot has its own, equal, gradient."""
    inputs, dout = inputs_of(ProblemSpec((3,), 128, 128, 8, 4))
    ids = torch.tensor([[3, 3, 7, 7], [5, 5, 5, 5], [0, 1, 2, 3]])
    weights = torch.tensor([[0.1, 0.2, 0.3, 0.4]] * 3)
    twice = dataclasses.replace(inputs, topk_ids_TK=ids, topk_weights_TK=weights)
    merged_ids, merged = ids.clone(), weights.clone()
    merged_ids[0, 1::2] = merged_ids[1, 1:] = -1
    merged[0, 0], merged[0, 2], merged[1, 0] = 0.1 + 0.2, 0.3 + 0.4, 1.0
    once = dataclasses.replace(inputs, topk_ids_TK=merged_ids, topk_weights_TK=merged)
    torch.testing.assert_close(oracle_forward(twice).out_TH, oracle_forward(once).out_TH, rtol=1e-6, atol=1e-6)
    grads = emulate_backward(emulate_forward(twice, Recipe()), dout, Recipe())
    assert grads.dp_TK[0, 0] == grads.dp_TK[0, 1] and grads.dp_TK[0, 2] == grads.dp_TK[0, 3]
    assert grads.dp_TK[1].unique().numel() == 1
    assert_rows_pass(emulate_forward(twice, Recipe()).out_TH, oracle_forward(twice).out_TH, GATES["fp8"], "out")
    assert_backward_passes(grads, oracle_backward(twice, dout), GATES["fp8"])


def test_a_row_alone_equals_the_row_in_its_batch():
    inputs, _ = inputs_of(CASES["partial_blocks"])
    batch = emulate_forward(inputs, Recipe()).out_TH
    for t in (0, 7, 32):
        row = slice(t, t + 1)
        alone = dataclasses.replace(
            inputs,
            x_TH=inputs.x_TH[row],
            topk_ids_TK=inputs.topk_ids_TK[row],
            topk_weights_TK=inputs.topk_weights_TK[row],
        )
        assert_bitwise(emulate_forward(alone, Recipe()).out_TH, batch[row], f"row {t}")


def test_the_output_names_its_expert():
    """Expert e returns (e + 1) * x exactly: identity up, a gate so large that silu(g) is g, all powers of two or small
    integers. Rows [128, 130, 65, 0, 1, 129] an expert, so that segments end inside, at and just behind a block."""
    rows = [128, 130, 65, 0, 1, 129]
    h = 128
    ids = torch.cat([torch.full((n,), e) for e, n in enumerate(rows)])[torch.randperm(sum(rows))]
    x = torch.ones(ids.numel(), h) * 2.0 ** torch.randint(-3, 3, (ids.numel(), 1))
    x[:, 1:] *= torch.randint(0, 2, (ids.numel(), h - 1)) * 2 - 1
    x[:, 0] = 448.0  # channel 0 drives the gate; its amax makes every scale 1
    w13 = torch.zeros(len(rows), 2 * h, h)
    w13[:, :h, 0] = 1.0
    w13[:, h:] = torch.eye(h)
    w2 = torch.stack([torch.eye(h) * (e + 1) for e in range(len(rows))])
    p = torch.full((ids.numel(), 1), 1.0 / 448.0)
    inputs = Inputs(x.bfloat16(), ids[:, None], p, w13.bfloat16(), w2.bfloat16())
    out = emulate_forward(inputs, Recipe()).out_TH.float()
    expert = (out[:, 1:] / x[:, 1:]).round().long() - 1
    assert torch.equal(expert, ids[:, None].expand(-1, h - 1))
    torch.testing.assert_close(oracle_forward(inputs).out_TH[:, 1:], (x * (ids[:, None] + 1))[:, 1:].double())


def test_a_nan_token_stays_in_its_row():
    inputs, _ = inputs_of(CASES["plain"])
    clean = emulate_forward(inputs, Recipe()).out_TH
    x = inputs.x_TH.clone()
    x[5] = float("nan")
    dirty = emulate_forward(dataclasses.replace(inputs, x_TH=x), Recipe()).out_TH
    keep = torch.arange(x.shape[0]) != 5
    assert bool(dirty[5].isnan().all())
    assert_bitwise(dirty[keep], clean[keep], "other rows")


def test_zero_rows_and_zero_gradients_stay_finite():
    inputs, dout = inputs_of(CASES["plain"])
    x, dout = inputs.x_TH.clone(), dout.clone()
    x[3], x[:, 128:], dout[:] = 0.0, 0.0, 0.0
    forward = emulate_forward(dataclasses.replace(inputs, x_TH=x), Recipe())
    got = emulate_backward(forward, dout, Recipe())
    assert not forward.out_TH[3].any() and bool(forward.out_TH.isfinite().all())
    assert isinstance(got, Backward)
    for value in (got.dx_TH, got.dp_TK, got.dw13_E2IH, got.dw2_EHI):
        assert not value.any()


def test_heavy_tailed_and_tiny_gradients_keep_their_direction():
    """Student-t gradients at a scale of 1e-6: the blocks' own scales keep them from underflow."""
    inputs, _ = inputs_of(CASES["plain"])
    dout = torch.distributions.StudentT(3.0).sample(inputs.x_TH.shape).mul(1e-6).bfloat16()
    forward = emulate_forward(inputs, Recipe())
    got, want = emulate_backward(forward, dout, Recipe()), oracle_backward(inputs, dout)
    assert_backward_passes(got, want, GATES["fp8"])


@pytest.mark.parametrize("operands", ["bf16", "fp8"])
def test_weight_gradients_of_rows_of_very_different_magnitude(operands):
    """Tokens from 1e-3 to 1 in one block of 128 and upstream gradients from 1e6 to 1, so that every row adds alike: a
    weight gradient that used another row's scale would be off by orders of magnitude."""
    inputs, dout = inputs_of(ProblemSpec((128,), 256, 128, 2, 1, "one_expert"))
    magnitude = torch.logspace(-3, 0, 128)[torch.randperm(128), None]
    inputs = dataclasses.replace(inputs, x_TH=(inputs.x_TH * magnitude).bfloat16())
    dout = (dout / magnitude.square()).bfloat16()
    recipe = Recipe(wgrad_operands=operands)
    got, want = emulate_backward(emulate_forward(inputs, recipe), dout, recipe), oracle_backward(inputs, dout)
    for name in ("dw13_E2IH", "dw2_EHI"):
        for block, wanted in zip(getattr(got, name)[0].split(128), getattr(want, name)[0].split(128), strict=True):
            assert sqnr_db(block, wanted) >= GATES["fp8"].expert_db, name


def test_repeats_are_equal_bit_for_bit():
    inputs, dout = inputs_of(CASES["masked"])
    first = emulate_forward(inputs, Recipe())
    again = emulate_forward(inputs, Recipe())
    assert_bitwise(first.out_TH, again.out_TH, "out")
    for a, b in zip(
        dataclasses.astuple(emulate_backward(first, dout, Recipe())),
        dataclasses.astuple(emulate_backward(again, dout, Recipe())),
        strict=True,
    ):
        assert a is None or torch.equal(a, b)
