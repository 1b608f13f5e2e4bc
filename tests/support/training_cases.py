"""What training asks of the layer, as functions of the backend and the device: strides, checkpoints, frozen weights.

As in `layer_cases`, a docstring says what has gone wrong elsewhere. What changes nothing is compared bit for bit.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from unittest import mock

import torch
from torch.utils.checkpoint import checkpoint

from megamoe import LocalWorld, MegaMoE, MoEConfig, Recipe, mega_moe
from megamoe.cli.problem import Problem
from megamoe.gates import GATES, sqnr_db
from megamoe.reference import oracle_backward
from tests.support.compare import assert_bitwise
from tests.support.layer_cases import Where, assert_same
from tests.support.moe_calls import Result, run

CONFIG = MoEConfig(256, 128, num_experts=8, top_k=2, num_shared_experts=1, initializer_range=0.1)


def tokens(where: Where, count: int = 40, seed: int = 7) -> torch.Tensor:
    return torch.randn(count, 256, generator=torch.Generator().manual_seed(seed)).bfloat16().to(where.device)


def layer_of(where: Where, **options: object) -> MegaMoE:
    torch.manual_seed(0)
    return where.layer(CONFIG, **options)


def gradients(layer: MegaMoE, x: torch.Tensor, call: Callable[[torch.Tensor], torch.Tensor] | None = None) -> dict:
    """out and every gradient of one step, on a leaf of its own."""
    layer.zero_grad(set_to_none=True)
    leaf = x.clone().requires_grad_()
    out = (call or layer)(leaf)
    out.backward(torch.linspace(-1, 1, out.numel(), device=x.device).view_as(out).to(out.dtype))
    return {"out": out.detach(), "x": leaf.grad, **{name: p.grad for name, p in layer.named_parameters()}}


def assert_equal(got: dict, want: dict) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert (got[name] is None) == (value is None), name
        if value is not None:
            assert_bitwise(got[name], value, name)


# ---------------------------------------------------------------- strides and types


def _views(t: torch.Tensor) -> list[torch.Tensor]:
    """The values of t in a wider buffer, in every second column, transposed, and one element behind an alignment."""
    rows, columns = t.shape
    wide, sparse = t.new_zeros(rows, 2 * columns), t.new_zeros(rows, 2 * columns)
    wide[:, :columns], sparse[:, ::2] = t, t
    late = t.new_zeros(t.numel() + 1)
    late[1:] = t.flatten()
    return [wide[:, :columns], sparse[:, ::2], t.t().contiguous().t(), late[1:].view(t.shape)]


def strided_inputs(where: Where) -> None:
    """Views are read as if they were packed."""
    problem = where.problem((24,), "masked")
    want = where.run(problem)
    given = (problem.xs[0], problem.topk_ids[0], problem.topk_weights[0], problem.douts[0])
    for x, ids, p, dout in zip(*map(_views, given), strict=True):
        assert not x.is_contiguous() or x.storage_offset()
        x, p = x.detach().requires_grad_(), p.detach().requires_grad_()
        out = mega_moe(x, ids, p, problem.w13_E2IH, problem.w2_EHI, context=where.context(problem))
        out.backward(dout)
        for name, got, exact in (("out", out, want.outs[0]), ("dx", x.grad, want.dx[0]), ("dp", p.grad, want.dp[0])):
            assert_bitwise(got.contiguous(), exact, name)


def gradients_of_any_stride(where: Where) -> None:
    """The upstream gradient of a sum is expanded from one element."""
    problem = where.problem((24,))
    losses: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda out: out.sum(),
        lambda out: out.mean(0).sum(),
        lambda out: out[:, ::2].sum(),
        lambda out: (out.t() @ torch.ones(24, 3, dtype=out.dtype, device=out.device)).sum(),
    ]
    for loss in losses:
        leaf = torch.zeros_like(problem.xs[0]).requires_grad_()
        (dout,) = torch.autograd.grad(loss(leaf), leaf)
        want = where.run(dataclasses.replace(problem, douts=[dout.contiguous()]))
        x = problem.xs[0].clone().requires_grad_()
        args = (problem.topk_ids[0], problem.topk_weights[0], problem.w13_E2IH, problem.w2_EHI)
        loss(mega_moe(x, *args, context=where.context(problem))).backward()
        assert_bitwise(x.grad, want.dx[0], "dx")


def autocast(where: Where) -> None:
    """Under autocast fp32 activations meet bf16 weights, and the next layer gets another dtype."""
    for weights, x_dtype in itertools.product(("bf16", "fp32"), (torch.float32, torch.bfloat16)):
        layer, x = layer_of(where, weights=weights), tokens(where).to(x_dtype)

        def cast(leaf: torch.Tensor, layer: MegaMoE = layer) -> torch.Tensor:
            with torch.autocast(where.device, torch.bfloat16):
                return layer(leaf)  # the backward runs outside

        got, want = gradients(layer, x, cast), gradients(layer, x)
        assert got["out"].dtype == torch.bfloat16 and want["out"].dtype == x_dtype
        for name, p in layer.named_parameters():
            assert got[name].dtype == p.dtype, name
        assert got["x"].dtype == x_dtype
        assert_bitwise(got["out"], want["out"].bfloat16(), "out")


def input_is_not_written(where: Where) -> None:
    """The routed path writes its result into the input, which a shared expert reads later."""
    layer, x = layer_of(where), tokens(where)
    before, version = x.clone(), x._version
    first, second = gradients(layer, x), gradients(layer, x)
    assert_equal(second, first)
    with torch.no_grad():
        layer(x)
        shared = layer.shared
        assert shared is not None
        ones = x.new_ones(40, 1, dtype=torch.float32)
        alone = [shared(x, x.new_zeros(40, 1, dtype=torch.int64), ones) for _ in range(2)]
        layer(x)
    assert_bitwise(alone[0], alone[1], "the shared expert")
    assert_bitwise(x, before, "x")
    assert x._version == version


# ---------------------------------------------------------------- activation checkpointing, saved tensors


def _checkpointed(where: Where, use_reentrant: bool) -> None:
    for save in ("pool", "repull", "recompute"):
        layer, x = layer_of(where, save=save), tokens(where)
        with torch.no_grad():  # exact ties between experts
            layer.router.weight[4:] = layer.router.weight[:4]
        want = gradients(layer, x)
        got = gradients(layer, x, lambda leaf, layer=layer: checkpoint(layer, leaf, use_reentrant=use_reentrant))
        assert_equal(got, want)


def checkpointing_with_reentry(where: Where) -> None:
    """The recomputation routes near ties otherwise; torch's first kind of activation checkpointing."""
    _checkpointed(where, True)


def checkpointing_without_reentry(where: Where) -> None:
    """The recomputation routes near ties otherwise; torch's second kind, which compares what is saved."""
    _checkpointed(where, False)


def _packed(where: Where, problem: Problem, **options: object) -> list[tuple[torch.Size, torch.dtype]]:
    shapes: list[tuple[torch.Size, torch.dtype]] = []
    note = lambda t: shapes.append((t.shape, t.dtype)) or t  # type: ignore[func-returns-value]  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        run(problem, where.context(problem, **options))
    return shapes


def saved_shapes_do_not_depend_on_the_routing(where: Where) -> None:
    """An expert flips on one rank in the recomputation, and saved tensors differ by a row."""
    for tokens_of in ((40,), (20, 20)):
        options = {"capacity": 1408} if len(tokens_of) > 1 else {}
        first = where.problem(tokens_of)
        ids = [ids.clone() for ids in first.topk_ids]
        ids[-1][3, 0], ids[-1][5] = 7, -1  # an expert that no other token has, and a token without one
        flipped = dataclasses.replace(first, topk_ids=ids)
        assert _packed(where, first, **options) == _packed(where, flipped, **options)


def everything_passes_through_saved_tensors(where: Where) -> None:
    """What is saved beside autograd escapes hooks that move it away: the originals are spoilt after the forward."""
    for save in ("pool", "repull", "recompute"):
        problem = where.problem((40,), "masked")
        want = where.run(problem, where.context(problem, save=save))
        xs, ids = problem.xs[0].clone().requires_grad_(), problem.topk_ids[0].clone()
        p = problem.topk_weights[0].clone().requires_grad_()
        w13, w2 = (w.clone().requires_grad_() for w in (problem.w13_E2IH, problem.w2_EHI))
        given = {t.data_ptr() for t in (xs, ids, p, w13, w2)}
        originals: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, o=originals: o.append(t) or t.clone(), lambda t: t):
            out = mega_moe(xs, ids, p, w13, w2, context=where.context(problem, save=save))
        spoilt = [t for t in originals if t.data_ptr() not in given]
        assert len(spoilt) > 3
        for t in spoilt:
            t.detach().view(torch.uint8).fill_(0xFF)  # NaN, or -1
        out.backward(problem.douts[0])
        assert_same(Result([out], [xs.grad], [p.grad], w13.grad, w2.grad), want)


def repeated_backward(where: Where) -> None:
    """A backward with retain_graph, twice: the first one must leave what the second one reads."""
    for save in ("pool", "repull", "recompute"):
        layer = layer_of(where, save=save)
        leaf = tokens(where).requires_grad_()
        out, between = layer(leaf), layer(tokens(where, 40, seed=9))
        found = []
        for _ in range(2):
            layer.zero_grad(set_to_none=True)
            leaf.grad = None
            out.backward(torch.ones_like(out), retain_graph=True)
            found.append({"x": leaf.grad, **{name: p.grad for name, p in layer.named_parameters()}})
            between.sum().backward(retain_graph=True)
        assert_equal(found[1], found[0])


# ---------------------------------------------------------------- which gradients, and of what


def frozen(where: Where) -> None:
    """All combinations of requires_grad; None exactly where frozen, the others' bits are those of all."""
    for parts in ((40,), (24, 16)):
        problem = where.problem(parts, "masked")
        full = where.run(problem)
        for requires in itertools.product((False, True), repeat=4):
            got = run(problem, where.context(problem), requires)
            assert_bitwise(torch.cat(got.outs), torch.cat(full.outs), "out")
            assert all(out.requires_grad == any(requires) for out in got.outs)
            pairs = [*zip(got.dx, full.dx, strict=True), *zip(got.dp, full.dp, strict=True)]
            needs = [requires[0]] * len(parts) + [requires[1]] * len(parts) + list(requires[2:])
            for need, (value, want) in zip(needs, [*pairs, (got.dw13, full.dw13), (got.dw2, full.dw2)], strict=True):
                assert (value is not None) == need, requires
                if need:
                    assert_bitwise(value, want, str(requires))


def no_weight_gradient_for_frozen_weights(where: Where) -> None:
    """Frozen weights still get dW work."""
    if where.backend == "cute":
        from cute_kernels import wgrad_launch as module

        name = "weight_gradients"
    else:
        from megamoe.backends import BACKENDS

        module, name = BACKENDS[where.backend].steps, "wgrad"
    problem = where.problem((40,))
    for requires, launches in (((True, True, False, False), 0), ((False, False, False, True), 1)):
        with mock.patch.object(module, name, wraps=getattr(module, name)) as spy:
            run(problem, where.context(problem), requires)
        assert spy.call_count == launches, requires


def inference(where: Where) -> None:
    """torch.no_grad and inference_mode give the training bits and keep nothing."""
    layer, x = layer_of(where), tokens(where)
    want = layer(x).detach()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out = layer(x)
        assert_bitwise(out, want, mode.__name__)
        assert not out.requires_grad


def micro_batches(where: Where) -> None:
    """A flag of the first micro-batch stops later ones from being added."""
    layer = layer_of(where, weights="fp32")
    batches = [tokens(where, n, seed=n) for n in (5, 40, 1, 130)]
    singles = [gradients(layer, x) for x in batches]
    for set_to_none in (True, False, True):
        layer.zero_grad(set_to_none=set_to_none)
        for i, x in enumerate(batches):
            out = layer(x, is_first_microbatch=i == 0)
            out.backward(torch.linspace(-1, 1, out.numel(), device=x.device).view_as(out).to(out.dtype))
        for name, p in layer.named_parameters():
            total = singles[0][name].clone()
            for single in singles[1:]:
                total += single[name]
            assert_bitwise(p.grad, total, name)


def router_gradients_over_ranks(where: Where) -> None:
    """Parts of dx and of the router's gradient are never summed; expert gradients are off by R."""
    x = tokens(where, 48)
    for loss in ("sum", "mean"):
        found = []
        for ranks in (1, 2, 4):
            torch.manual_seed(0)
            layer = where.layer(CONFIG, **({"world": LocalWorld(ranks)} if ranks > 1 else {}))
            leaf = x.clone().requires_grad_()
            out = torch.cat(layer(list(leaf.chunk(ranks)))) if ranks > 1 else layer(leaf)
            value = out.float().square()
            (value.sum() if loss == "sum" else value.mean()).backward()
            found.append({"x": leaf.grad, **{name: p.grad for name, p in layer.named_parameters()}})
            norm = torch.nn.utils.clip_grad_norm_(layer.parameters(), 1e9)
            found[-1]["norm"] = norm
        assert found[0]["router.weight"].any()
        for other in found[1:]:
            assert_equal(other, found[0])


def training_over_ranks(where: Where) -> None:
    """Training on two ranks drifts from training on one: here losses and weights are the same bit for bit."""
    found = []
    for ranks in (1, 2):
        torch.manual_seed(0)
        world = {"world": LocalWorld(ranks)} if ranks > 1 else {}
        layer = where.layer(CONFIG, weights="fp32", **world)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
        losses = []
        for step in range(6):
            x, target = tokens(where, 48, seed=step), tokens(where, 48, seed=100 + step)
            out = torch.cat(layer(list(x.split([30, 18])))) if ranks > 1 else layer(x)
            loss = (out.float() - target.float()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        found.append({"losses": torch.stack(losses), **layer.state_dict()})
    assert found[0]["losses"][-1] < found[0]["losses"][0]
    assert_equal(found[1], found[0])


def heavy_tails(where: Where) -> None:
    """Gradients with student-t tails (3 degrees of freedom), also at 1e-6: e4m3 with a scale for 128 channels.

    The budget is the gates' for whole tensors; blocks that are not zero stay so, and masked rows give exactly zero.
    """
    problem = where.problem((160,), top_k=2)
    noise = torch.distributions.StudentT(3.0).sample((160, 256)).to(where.device)
    masked = torch.arange(160, device=where.device) % 5 == 0
    found = []
    for scale in (1.0, 1e-6):
        dout = torch.where(masked[:, None], 0.0, noise * scale).bfloat16()
        changed = dataclasses.replace(problem, douts=[dout])
        got = where.run(changed)
        want = oracle_backward(changed.global_inputs(), dout)
        for name, value, exact in (
            ("dx", got.dx[0], want.dx_TH),
            ("dW13", got.dw13, want.dw13_E2IH),
            ("dW2", got.dw2, want.dw2_EHI),
        ):
            assert sqnr_db(value, exact) >= GATES["fp8"].tensor_db, (name, scale)
        assert not got.dx[0][masked].any() and not got.dp[0][masked].any()
        assert got.dx[0][~masked].view(-1, 128).any(1).all() and got.dw13.any() and got.dw2.any()
        found.append(got)
    assert found[0].dx[0].float().std() / found[1].dx[0].float().std() > 0.9e6


def e4m3_gradients_are_the_better_choice(where: Where) -> None:
    """The same tails in e5m2, with the same scales, are further from the truth: why gradients are e4m3."""
    noise = torch.distributions.StudentT(3.0).sample((160, 256)).bfloat16().float()
    blocks = noise.view(160, 2, 128)
    errors = {}
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        scale = blocks.abs().amax(-1, keepdim=True) / torch.finfo(dtype).max
        rounded = (blocks / scale).to(dtype).float() * scale
        errors[dtype] = float((rounded - blocks).norm() / blocks.norm())
    assert errors[torch.float8_e4m3fn] < 0.6 * errors[torch.float8_e5m2]


def wgrad_operands(where: Where) -> None:
    """The same tails in both operands of weight gradients: what is rounded once more stays within the gates."""
    problem = where.problem((160,), top_k=2)
    dout = torch.distributions.StudentT(3.0).sample((160, 256)).to(where.device).bfloat16()
    changed = dataclasses.replace(problem, douts=[dout])
    want = oracle_backward(changed.global_inputs(), dout)
    for operands in ("bf16", "fp8"):
        got = where.run(changed, where.context(changed, Recipe(wgrad_operands=operands)))
        for name, value, exact in (("dW13", got.dw13, want.dw13_E2IH), ("dW2", got.dw2, want.dw2_EHI)):
            assert sqnr_db(value, exact) >= GATES["fp8"].tensor_db, (name, operands)


CASES: list[Callable[[Where], None]] = [
    strided_inputs,
    gradients_of_any_stride,
    autocast,
    input_is_not_written,
    checkpointing_with_reentry,
    checkpointing_without_reentry,
    saved_shapes_do_not_depend_on_the_routing,
    everything_passes_through_saved_tensors,
    repeated_backward,
    frozen,
    no_weight_gradient_for_frozen_weights,
    inference,
    micro_batches,
    router_gradients_over_ranks,
    training_over_ranks,
    heavy_tails,
    e4m3_gradients_are_the_better_choice,
    wgrad_operands,
]
