"""Inputs on which MoE layers have failed elsewhere, as functions of the backend and the device that run them.

Each says what goes wrong in its docstring. Weights are those of a small layer; results are held against the fp64 oracle
within the gates, or bit for bit where nothing may change.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from megamoe import LocalWorld, MegaMoE, MoEConfig, MoEContext, Recipe, mega_moe
from megamoe.cli.problem import Problem, ProblemSpec, make_problem
from megamoe.gates import GATES, sqnr_db
from megamoe.reference import oracle_backward, oracle_forward
from tests.support.compare import assert_backward_passes, assert_bitwise, assert_rows_pass
from tests.support.moe_calls import Result, run
from tests.support.poison import poison_allocator

BIG_ROWS = {"cpu": 10, "cuda": 1}
"""By what the row counts of a case are divided: the CPU path is an emulation."""


@dataclasses.dataclass(frozen=True)
class Where:
    """What a case runs on."""

    backend: str
    device: str

    def problem(self, tokens: Sequence[int], routing: str = "uniform", **sizes: int) -> Problem:
        sizes = {"hidden": 256, "intermediate": 128, "num_experts": 8, "top_k": 2, **sizes}
        return make_problem(ProblemSpec(tuple(tokens), routing=routing, **sizes), self.device)  # type: ignore[arg-type]

    def context(self, problem: Problem, recipe: Recipe | None = None, **options: object) -> MoEContext:
        ranks = problem.spec.num_ranks
        world = LocalWorld(ranks) if ranks > 1 else None
        return MoEContext(recipe, world=world, backend=self.backend, **options)  # type: ignore[arg-type]

    def run(self, problem: Problem, context: MoEContext | None = None) -> Result:
        poison_allocator(device=self.device)
        return run(problem, self.context(problem) if context is None else context)

    def run_checked(self, problem: Problem, context: MoEContext | None = None) -> Result:
        """Run and hold against the oracle."""
        got = self.run(problem, context)
        inputs = problem.global_inputs()
        found = got.joined()
        assert all(value.isfinite().all() for value in found.values())
        assert_rows_pass(found["out"], oracle_forward(inputs).out_TH, GATES["fp8"], "out")
        assert_backward_passes(got.backward(), oracle_backward(inputs, torch.cat(problem.douts)), GATES["fp8"])
        return got

    def layer(self, config: MoEConfig, **options: object) -> MegaMoE:
        return MegaMoE(config, backend=self.backend, device=self.device, **options)  # type: ignore[arg-type]


def with_counts(problem: Problem, counts: Sequence[int]) -> Problem:
    """The problem with one slot a token and the given number of rows for each expert, in a mixed order."""
    total = sum(counts)
    assert problem.spec.num_tokens == (total,) and problem.spec.top_k == 1
    ids = torch.cat([torch.full((n,), e) for e, n in enumerate(counts)])
    order = torch.randperm(total, generator=torch.Generator().manual_seed(1))
    return dataclasses.replace(problem, topk_ids=[ids[order][:, None].to(problem.xs[0].device)])


def assert_same(got: Result, want: Result) -> None:
    for name, value in got.joined().items():
        assert_bitwise(value, want.joined()[name], name)


# ---------------------------------------------------------------- nothing for somebody


def rank_without_rows(where: Where) -> None:
    """Every id is on rank 0. Rank 1's gradients exist and are zero, in every step."""
    for _ in range(3):
        problem = where.problem((64, 64), "first_rank")
        got = where.run_checked(problem)
        assert got.dw13 is not None and not got.dw13[4:].any() and not got.dw2[4:].any()


def rank_without_tokens(where: Where) -> None:
    """A rank's batch is empty; it still takes part and its output is attached to autograd."""
    for tokens in ((0, 33), (33, 0), (17, 1), (0, 256)):
        got = where.run_checked(where.problem(tokens))
        for n, out, dx in zip(tokens, got.outs, got.dx, strict=True):
            assert out.shape[0] == dx.shape[0] == n and out.grad_fn is not None
    got = where.run(where.problem((0, 0)))
    assert not got.dw13.any() and not got.dw2.any()


def experts_without_rows(where: Where) -> None:
    """Gradients of idle experts are never written; the allocator hands back dirty blocks."""
    counts = [n // BIG_ROWS[where.device] for n in (162, 0, 2577, 446, 0, 83)]
    problem = where.problem((sum(counts),), num_experts=6, top_k=1)
    where.run(problem)  # all experts busy
    got = where.run_checked(with_counts(problem, counts))
    for e in (1, 4):
        assert not got.dw13[e].any() and not got.dw2[e].any()


def no_rows_at_all(where: Where) -> None:
    """A contraction of length 0, eager and compiled."""
    for call in (mega_moe, torch.compile(mega_moe, fullgraph=True, backend="aot_eager")):
        for tokens in (0, 16):
            problem = where.problem((tokens,))
            problem.topk_ids[0].fill_(-1)
            poison_allocator(1 << 20, device=where.device)
            found = run(problem, where.context(problem), call=call).joined()
            assert all(not value.any() for value in found.values())


# ---------------------------------------------------------------- ids


def masked_slots(where: Where) -> None:
    """Ids of -1 whose weights are NaN or 7.0 add exactly 0 and get exactly 0."""
    problem = where.problem((64,), "masked", top_k=4)
    ids = problem.topk_ids[0]
    ids[5] = ids[63] = -1
    weights = problem.topk_weights[0].clone()
    masked = ids < 0
    weights[masked] = float("nan")
    weights[5], weights[63] = 7.0, float("nan")
    got = where.run(dataclasses.replace(problem, topk_weights=[weights]))
    assert_same(got, where.run_checked(problem))
    assert not got.dp[0][masked].any() and not got.outs[0][5].any() and not got.outs[0][63].any()


def repeated_experts(where: Where) -> None:
    """An expert twice in a token is two slots, each with its own gradient."""
    problem = where.problem((12,), top_k=4)
    ids, weights = problem.topk_ids[0], problem.topk_weights[0]
    ids[0], weights[0] = torch.tensor([3, 3, 7, 7]), torch.tensor([0.1, 0.2, 0.3, 0.4], device=weights.device)
    ids[1] = 5
    got = where.run_checked(problem)
    assert_bitwise(got.dp[0][0, 0], got.dp[0][0, 1], "dp of the same expert")


def nan_rows(where: Where) -> None:
    """NaN and Inf in padded rows; routing inside the layer."""
    layer = where.layer(MoEConfig(256, 128, num_experts=128, top_k=8, num_groups=8, topk_groups=4))
    x = torch.randn(64, 256, device=where.device).bfloat16()
    x[59:] = float("nan")
    x[61] = float("inf")
    clean = x.clone()
    clean[59:] = 0.0
    with torch.no_grad():
        ids, _ = layer.router(x)
        assert ids.min() >= 0 and ids.max() < 128 and (ids.sort(1).values.diff(dim=1) > 0).all()
        assert_bitwise(layer(x)[:59], layer(clean)[:59], "the other rows")


# ---------------------------------------------------------------- shapes


def odd_token_counts(where: Where) -> None:
    """The last rows of a partial tile; T tokens equal the first T of a zero-padded batch."""
    for tokens in (1, 31, 33, 63, 65, 127, 129):
        problem = where.problem((tokens // 2, tokens - tokens // 2))
        where.run_checked(problem)
    short = where.problem((45,))
    fill = lambda v, value: [torch.nn.functional.pad(v[0], (0, 0, 0, 19), value=value)]  # noqa: E731
    padded = dataclasses.replace(
        short,
        spec=dataclasses.replace(short.spec, num_tokens=(64,)),
        xs=fill(short.xs, 0.0),
        topk_ids=fill(short.topk_ids, -1),
        topk_weights=fill(short.topk_weights, 1.0),
        douts=fill(short.douts, 3.0),
    )
    got, want = where.run(padded).joined(), where.run(short).joined()
    for name, value in want.items():
        assert_bitwise(got[name][:45] if name in ("out", "dx", "dp") else got[name], value, name)


def the_answer_names_the_expert(where: Where) -> None:
    """A tile that spans two experts uses the first one's weights. Expert e returns (e + 1) x."""
    for counts in ([128, 130, 65], [64, 64, 64], [1, 0, 127, 129]):
        counts = [*counts, *[0] * (4 - len(counts))]
        size = 128
        problem = with_counts(
            where.problem((sum(counts),), hidden=size, intermediate=size, num_experts=4, top_k=1), counts
        )
        x = torch.randint(1, 5, problem.xs[0].shape, device=where.device).bfloat16()
        x[:, 0] = 8.0  # the gate of every channel
        w13 = torch.zeros_like(problem.w13_E2IH)
        w13[:, :size, 0] = 1.0
        eye = torch.eye(size, device=where.device)
        w13[:, size:] = eye
        silu = torch.nn.functional.silu(torch.tensor(8.0)).item()
        w2 = torch.stack([eye * (e + 1) / silu for e in range(4)]).bfloat16()
        ones = torch.ones_like(problem.topk_weights[0])
        with torch.no_grad():
            out = mega_moe(x, problem.topk_ids[0], ones, w13, w2, context=where.context(problem))
        named = (out.float() / x.float()).round() - 1
        assert torch.equal(named, problem.topk_ids[0].expand_as(named).float())


def row_counts_of_every_kind(where: Where) -> None:
    """The rows of an expert are the contraction length of its weight gradient."""
    big = 8193 // BIG_ROWS[where.device]
    counts = [44, 1, 15, 17, 0, 129, big, 3]
    where.run_checked(with_counts(where.problem((sum(counts),), top_k=1), counts))


def partial_blocks(where: Where) -> None:
    """H and I that end in partial blocks of 128."""
    for hidden, inter in ((192, 96), (192, 320), (320, 192)):
        where.run_checked(where.problem((70,), hidden=hidden, intermediate=inter, num_experts=4))


# ---------------------------------------------------------------- padding and dirty memory


def dirty_memory(where: Where) -> None:
    """Padding that was never written meets 0 * NaN; another step gives the same bits."""
    counts = [1, 127, 129, 0, 5, 0, 300, 2]
    problem = with_counts(where.problem((sum(counts),), top_k=1), counts)
    first = where.run_checked(problem)
    for value in (float("nan"), float("inf"), 3e38):
        held = [torch.full((1 << 20,), value, device=where.device) for _ in range(4)]
        del held
        assert_same(where.run(problem), first)
    where.run(where.problem((77,)))  # another shape in between
    assert_same(where.run(problem), first)


def spare_rows(where: Where) -> None:
    """x is a view of a longer buffer whose other rows hold garbage."""
    for tokens in (1, 7, 31, 32, 33):
        problem = where.problem((tokens,))
        want = where.run(problem)
        for garbage in (3e38, float("inf"), float("nan")):
            buffer = torch.full((tokens + 64, 256), garbage, device=where.device, dtype=torch.bfloat16)
            buffer[:tokens] = problem.xs[0]
            x = buffer[:tokens]
            with torch.no_grad():
                args = (problem.topk_ids[0], problem.topk_weights[0], problem.w13_E2IH, problem.w2_EHI)
                out = mega_moe(x, *args, context=where.context(problem))
            assert_bitwise(out, want.outs[0].detach(), "out")


def one_nan_token(where: Where) -> None:
    """A NaN in one token stays in that token's row."""
    problem = where.problem((64,))
    want = where.run(problem).outs[0]
    x = problem.xs[0].clone()
    x[17, 3] = float("nan")
    with torch.no_grad():
        args = (problem.topk_ids[0], problem.topk_weights[0], problem.w13_E2IH, problem.w2_EHI)
        out = mega_moe(x, *args, context=where.context(problem))
    others = torch.arange(64) != 17
    assert out[17].isnan().any()
    assert_bitwise(out[others], want[others], "the other rows")


def batch_mates(where: Where) -> None:
    """A token's result does not depend on who shares the batch."""
    problem = where.problem((64,))
    args = (problem.w13_E2IH, problem.w2_EHI)
    context = where.context(problem)
    with torch.no_grad():
        full = mega_moe(problem.xs[0], problem.topk_ids[0], problem.topk_weights[0], *args, context=context)
        for t in (0, 31, 63):
            rows = slice(t, t + 1)
            alone = mega_moe(
                problem.xs[0][rows], problem.topk_ids[0][rows], problem.topk_weights[0][rows], *args, context=context
            )
            assert_bitwise(alone, full[rows], f"token {t}")


# ---------------------------------------------------------------- FP8


def zeros(where: Where) -> None:
    """All-zero blocks give scale 0 and 0 / 0."""
    problem = where.problem((40,))
    x, dout, w13, w2 = (t.clone() for t in (problem.xs[0], problem.douts[0], problem.w13_E2IH, problem.w2_EHI))
    x[3], x[4, :128], dout[7:20] = 0.0, 0.0, 0.0
    w13[2, :128, :128], w2[1, 128:] = 0.0, 0.0
    w13[5] = 0.0  # h of this expert is zero
    changed = dataclasses.replace(problem, xs=[x], douts=[dout], w13_E2IH=w13, w2_EHI=w2)
    got = where.run_checked(changed)
    assert not got.dx[0][7:20].any() and not got.outs[0][3].any()


def wide_range_within_a_block(where: Where) -> None:
    """Rows of magnitudes 1e-3 to 1e3 in one block of tokens, upstream gradients the other way round."""
    problem = where.problem((128,), num_experts=2, top_k=1)
    magnitude = torch.logspace(-3, 3, 128, device=where.device)[:, None]
    changed = dataclasses.replace(
        problem,
        xs=[(problem.xs[0].float() * magnitude).bfloat16()],
        douts=[(problem.douts[0].float() / magnitude).bfloat16()],
    )
    got = where.run(changed)
    want = oracle_backward(changed.global_inputs(), changed.douts[0])
    for name, value, exact in (("dW13", got.dw13, want.dw13_E2IH), ("dW2", got.dw2, want.dw2_EHI)):
        assert sqnr_db(value, exact) >= 19.0, name
        for e in range(2):
            for block, exact_block in zip(value[e].split(128), exact[e].split(128), strict=True):
                assert sqnr_db(block, exact_block) >= 17.0, f"{name} of expert {e}"


def clamp(where: Where) -> None:
    """The limit of the gated activation acts forward and backward."""
    problem = where.problem((40,))
    loud = dataclasses.replace(problem, w13_E2IH=problem.w13_E2IH * 20)  # gate and up up to +-60
    limited = where.run(loud, where.context(loud, Recipe(clamp=10.0)))
    free = where.run(loud)
    inputs = loud.global_inputs()
    assert sqnr_db(limited.outs[0], oracle_forward(inputs, 10.0).out_TH) >= 19.0
    assert sqnr_db(free.outs[0], oracle_forward(inputs).out_TH) >= 19.0
    exact = oracle_backward(inputs, loud.douts[0], 10.0)
    assert sqnr_db(limited.dw2, exact.dw2_EHI) >= 19.0
    # masks near the limit flip under quantisation: a weaker bound that a missing mask still misses
    assert sqnr_db(limited.dw13, exact.dw13_E2IH) >= 10.0 > sqnr_db(free.dw13, exact.dw13_E2IH)


# ---------------------------------------------------------------- gradients


def interleaved_backwards(where: Where) -> None:
    """Two calls of different T before their backwards, in both orders."""
    problems = [where.problem((n,)) for n in (23, 40)]
    want = [where.run(p) for p in problems]
    for order in ((0, 1), (1, 0)):
        context = where.context(problems[0])
        leaves = [p.xs[0].clone().requires_grad_() for p in problems]
        outs = [
            mega_moe(x, p.topk_ids[0], p.topk_weights[0], p.w13_E2IH, p.w2_EHI, context=context)
            for x, p in zip(leaves, problems, strict=True)
        ]
        for i in order:
            outs[i].backward(problems[i].douts[0])
        for x, w in zip(leaves, want, strict=True):
            assert_bitwise(x.grad, w.dx[0], "dx")


def gradient_of_each_slot(where: Where) -> None:
    """A slot's gradient is <dout, the expert's output>, also for a weight of 0; -1 gets exactly 0."""
    problem = where.problem((20, 20), "masked", top_k=3)
    problem.topk_weights[0][2] = 0.0
    where.run_checked(problem)


def both_operands_of_weight_gradients(where: Where) -> None:
    """The same with either kind of operands; those rounded to FP8 along rows of very different magnitudes."""
    problem = where.problem((160,), num_experts=2, top_k=1)
    for operands in ("bf16", "fp8"):
        where.run_checked(problem, where.context(problem, Recipe(wgrad_operands=operands)))
    magnitude = torch.logspace(-3, 3, 160, device=where.device)[:, None]
    changed = dataclasses.replace(
        problem,
        xs=[(problem.xs[0].float() * magnitude).bfloat16()],
        douts=[(problem.douts[0].float() / magnitude).bfloat16()],
    )
    got = where.run(changed, where.context(changed, Recipe(wgrad_operands="fp8")))
    want = oracle_backward(changed.global_inputs(), changed.douts[0])
    assert sqnr_db(got.dw13, want.dw13_E2IH) >= 19.0 and sqnr_db(got.dw2, want.dw2_EHI) >= 19.0


def ranks_agree(where: Where) -> None:
    """Everything is equal for any number of ranks; no gradient is off by a factor of R."""
    for routing in ("uniform", "duplicates"):
        problem = where.problem((12, 12, 12, 12), routing)
        many, one = where.run(problem).joined(), where.run(problem.on_one_rank()).joined()
        for name, value in many.items():
            assert_bitwise(value, one[name], name)


def repeats(where: Where) -> None:
    """The same bits in every repeat."""
    for tokens in ((96,), (40, 56)):
        problem = where.problem(tokens, top_k=4)
        first = where.run(problem)
        for _ in range(3):
            assert_same(where.run(problem), first)


CASES: list[Callable[[Where], None]] = [
    rank_without_rows,
    rank_without_tokens,
    experts_without_rows,
    no_rows_at_all,
    masked_slots,
    repeated_experts,
    nan_rows,
    odd_token_counts,
    the_answer_names_the_expert,
    row_counts_of_every_kind,
    partial_blocks,
    dirty_memory,
    spare_rows,
    one_nan_token,
    batch_mates,
    zeros,
    wide_range_within_a_block,
    clamp,
    interleaved_backwards,
    gradient_of_each_slot,
    both_operands_of_weight_gradients,
    ranks_agree,
    repeats,
]
