"""The functional core: `mega_moe`, which checks its arguments and calls the operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from megamoe.context import MoEContext, Spec
from megamoe.errors import MegaMoEError, MegaMoETypeError, MegaMoEValueError, expected
from megamoe.operators import forward_op
from megamoe.quantize import FP8, ceil_div
from megamoe.recipe import BLOCK

Tensors: TypeAlias = torch.Tensor | Sequence[torch.Tensor]

FLOATS = (torch.bfloat16, torch.float16, torch.float32)

_DEFAULT = MoEContext()


def mega_moe(
    x: Tensors,
    topk_ids: Tensors,
    topk_weights: Tensors,
    w13: torch.Tensor,
    w2: torch.Tensor,
    *,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    context: MoEContext | None = None,
    is_first_microbatch: bool | None = None,
) -> Any:
    """Apply the experts chosen for each token and sum their outputs, on one rank or over expert-parallel ranks.

    out[t] = sum over slots j of W2[e] @ (silu(W1[e] @ x[t]) * (W3[e] @ x[t]) * topk_weights[t, j]), e = topk_ids[t, j].

    Args:
        x: [T, H], bf16; fp16 and fp32 are rounded to bf16 first. Any strides; never written to. T may be 0.
        topk_ids: int32 or int64 [T, K], global expert ids; -1: no expert, adds exactly 0. An expert may come twice.
        topk_weights: [T, K] fp32, bf16 or fp16 (computed with in fp32).
        w13: [E_l, 2I, H], gate rows first, then up rows: the experts of this process in global order, so all E of a
            LocalWorld. bf16, fp16 or fp32; or e4m3 with `scales`, which is frozen.
        w2: [E_l, H, I], likewise.
        scales: of e4m3 weights: fp32 [E_l, 2 * ceil(I / 128), ceil(H / 128)] and [E_l, ceil(H / 128), ceil(I / 128)].
        context: recipe, ranks, backend; None: one rank, `Recipe()`, backend "auto". Over a LocalWorld of R ranks x,
            topk_ids and topk_weights are lists of R tensors on one device; with R = 1 a tensor does too.
        is_first_microbatch: False: the copies of weights that train are still good from the forward before. Only with a
            context that keeps copies.

    Returns:
        out [T, H] of x's dtype (a list of R if x is a list), differentiable in x, topk_weights, w13 and w2. Gradients
        have their tensor's dtype; those of weights are summed in fp32 and rounded once.

    Raises:
        MegaMoETypeError, MegaMoEValueError: arguments outside the contract; over a group on every rank, unless sizes
            are fixed (docs/failed_calls.md).
        CapacityError: more rows than the context's capacity. BackendUnavailable: the backend cannot run this.

    Effects: runs on the current stream; repeatable bit for bit. R = 1 and contexts with a capacity don't synchronise
    on CUDA devices (unless `debug`). Over a group every rank must call it, T = 0 included, forward and backward. In
    autocast regions nothing is cast beyond the above. Not differentiable twice.
    """
    context = _DEFAULT if context is None else context
    if not isinstance(context, MoEContext):
        raise MegaMoETypeError(expected("context", "a MoEContext or None", type(context).__name__))
    is_list = isinstance(x, list | tuple)
    given: tuple[Any, ...] = (x, topk_ids, topk_weights)
    xs, ids, weights = (list(v) if isinstance(v, list | tuple) else [v] for v in given)
    pair = (None, None) if scales is None else scales
    error = _structure_error(xs, ids, weights, w13, w2, pair)
    scale13, scale2 = (None, None) if error is not None else pair
    if error is None and context.overlap.wgrad != "inline" and context.deferred is None:
        contract = "'inline' where no module holds the weights"
        error = MegaMoEValueError(expected("context.overlap.wgrad", contract, repr(context.overlap.wgrad)))
    error = error or find_error(context.shapes, xs, ids, weights, w13, w2, scale13, scale2)
    if error is not None:
        device = next((t.device for t in (w13, *xs) if isinstance(t, torch.Tensor)), torch.device("cpu"))
        context.report(error, device, w13)
    tracked = [*xs, *weights, w13, w2] + ([] if context.anchor is None else [context.anchor])
    save = context.shapes.save if torch.is_grad_enabled() and any(t.requires_grad for t in tracked) else "none"
    outs, _ = forward_op(
        [v.to(torch.bfloat16) for v in xs],
        ids,
        [v.float() for v in weights],
        w13,
        w2,
        scale13,
        scale2,
        context.anchor,
        context.spec,
        context.handle,
        save,
        is_first_microbatch is not False,
        [w13.requires_grad, w2.requires_grad],
    )
    outs = [out.to(v.dtype) for out, v in zip(outs, xs, strict=True)]
    return outs if is_list else outs[0]


# ---------------------------------------------------------------- checks


def _structure_error(
    xs: list[Any], topk_ids: list[Any], topk_weights: list[Any], w13: Any, w2: Any, scales: Any
) -> MegaMoEError | None:
    """What is no tensor where one is expected, before anything is asked of it."""
    named = {"x": xs, "topk_ids": topk_ids, "topk_weights": topk_weights, "w13": [w13], "w2": [w2]}
    problems = [
        expected(name, "a tensor" if name in ("w13", "w2") else "a tensor, or a list of one for each rank", k)
        for name, values in named.items()
        for k in sorted({type(v).__name__ for v in values if not isinstance(v, torch.Tensor)})
    ]
    if not isinstance(scales, list | tuple) or len(scales) != 2:
        got = f"{len(scales)} of them" if isinstance(scales, list | tuple) else type(scales).__name__
        problems.append(expected("scales", "those of w13 and of w2", got))
    return MegaMoETypeError("\n".join(problems)) if problems else None


def find_error(
    shapes: Spec,
    xs: list[torch.Tensor],
    topk_ids: list[torch.Tensor],
    topk_weights: list[torch.Tensor],
    w13: torch.Tensor,
    w2: torch.Tensor,
    scale13: torch.Tensor | None,
    scale2: torch.Tensor | None,
) -> MegaMoEError | None:
    """What is wrong with the arguments, all of it, from their metadata."""
    lists = {"x": xs, "topk_ids": topk_ids, "topk_weights": topk_weights}
    wrong_length = [
        expected(name, f"{shapes.num_local} tensor(s), one for each rank of this process", len(values))
        for name, values in lists.items()
        if len(values) != shapes.num_local
    ]
    if wrong_length:
        return MegaMoEValueError("\n".join(wrong_length))
    types = _type_errors(xs, topk_ids, topk_weights, w13, w2, scale13, scale2)
    if types:
        return MegaMoETypeError("\n".join(types))
    problems = _weight_errors(shapes, w13, w2, scale13, scale2)
    hidden = w13.shape[-1]
    for i, (x, ids, weights) in enumerate(zip(xs, topk_ids, topk_weights, strict=True)):
        at = f"[{i}]" if len(xs) > 1 else ""
        if x.dim() != 2 or x.shape[1] != hidden:
            problems.append(expected(f"x{at}", f"[T, H = {hidden}]", f"shape {tuple(x.shape)}"))
        elif shapes.is_group and shapes.max_tokens_per_rank is not None and x.shape[0] > shapes.max_tokens_per_rank:
            problems.append(
                expected("x", f"at most max_tokens_per_rank = {shapes.max_tokens_per_rank} rows", x.shape[0])
            )
        if ids.dim() != 2 or ids.shape[0] != x.shape[0]:
            problems.append(expected(f"topk_ids{at}", f"[T = {x.shape[0]}, K]", f"shape {tuple(ids.shape)}"))
        elif ids.shape[1] != topk_ids[0].shape[1] or ids.shape[1] < 1:
            problems.append(expected(f"topk_ids{at}", "the same K >= 1 on every rank", f"K = {ids.shape[1]}"))
        if weights.shape != ids.shape:
            problems.append(
                expected(f"topk_weights{at}", f"topk_ids' shape {tuple(ids.shape)}", f"shape {tuple(weights.shape)}")
            )
        for name, value in ((f"x{at}", x), (f"topk_ids{at}", ids), (f"topk_weights{at}", weights)):
            if value.device != w13.device:
                problems.append(expected(name, f"the device of w13, {w13.device}", value.device))
    return MegaMoEValueError("\n".join(problems)) if problems else None


def _type_errors(
    xs: list[torch.Tensor],
    topk_ids: list[torch.Tensor],
    topk_weights: list[torch.Tensor],
    w13: torch.Tensor,
    w2: torch.Tensor,
    scale13: torch.Tensor | None,
    scale2: torch.Tensor | None,
) -> list[str]:
    problems = []
    for name, values in (("x", xs), ("topk_weights", topk_weights)):
        problems += [expected(name, "bf16, fp16 or fp32", v.dtype) for v in values if v.dtype not in FLOATS]
    integers = (torch.int32, torch.int64)
    problems += [
        expected("topk_ids", "int32 or int64", v.dtype, "Convert the ids first.")
        for v in topk_ids
        if v.dtype not in integers
    ]
    if w13.dtype != w2.dtype or w13.dtype not in (*FLOATS, FP8):
        problems.append(expected("w13, w2", "one dtype of bf16, fp16, fp32, float8_e4m3fn", f"{w13.dtype}, {w2.dtype}"))
    for scale in (scale13, scale2):
        if scale is not None and scale.dtype != torch.float32:
            problems.append(expected("scales", "fp32", scale.dtype))
    return problems


def _weight_errors(
    shapes: Spec, w13: torch.Tensor, w2: torch.Tensor, scale13: torch.Tensor | None, scale2: torch.Tensor | None
) -> list[str]:
    if w13.dim() != 3 or w2.dim() != 3:
        return [expected("w13, w2", "[E, 2I, H] and [E, H, I]", f"shapes {tuple(w13.shape)}, {tuple(w2.shape)}")]
    (experts, rows, hidden), inter = w13.shape, w2.shape[2]
    if not hidden or not inter:
        return [expected("w13, w2", "H >= 1 and I >= 1", f"shapes {tuple(w13.shape)}, {tuple(w2.shape)}")]
    problems = []
    if tuple(w2.shape[:2]) != (experts, hidden) or rows != 2 * inter:
        problems.append(
            expected("w13, w2", "[E, 2I, H] and [E, H, I]", f"shapes {tuple(w13.shape)}, {tuple(w2.shape)}")
        )
    if experts < 1 or experts % shapes.num_local:
        problems.append(expected("w13.shape[0]", f"a positive multiple of the {shapes.num_local} local ranks", experts))
    for name, weight in (("w13", w13), ("w2", w2)):
        if weight.device != w13.device:
            problems.append(expected(name, f"the device of w13, {w13.device}", weight.device))
        if weight.dtype == FP8 and weight.requires_grad:
            problems.append(
                expected(f"{name}.requires_grad", "False for FP8 weights", True, "Train bf16 or fp32 masters.")
            )
    if w13.dtype != FP8:
        if scale13 is not None or scale2 is not None:
            problems.append(expected("scales", "None for weights that are not FP8", "scales"))
        return problems
    grids = (
        (experts, 2 * ceil_div(inter, BLOCK), ceil_div(hidden, BLOCK)),
        (experts, ceil_div(hidden, BLOCK), ceil_div(inter, BLOCK)),
    )
    for name, scale, grid in zip(("scales[0]", "scales[1]"), (scale13, scale2), grids, strict=True):
        if scale is None or tuple(scale.shape) != grid:
            got = "None" if scale is None else f"shape {tuple(scale.shape)}"
            problems.append(expected(name, f"shape {grid}, one scale for 128 x 128 values", got))
    return problems
