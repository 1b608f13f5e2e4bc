"""The module: against transformers' block, over ranks, and as a citizen of torch: casts, copies, modes, checkpoints."""

import copy
import io

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megamoe import LocalWorld, MegaMoE, MoEConfig, MoEContext, Recipe, Router
from megamoe.errors import BackendUnavailable, MegaMoETypeError, MegaMoEValueError
from megamoe.gates import GATES, rel_l2, sqnr_db
from tests.support.compare import assert_bitwise, assert_experts_pass, assert_rows_pass

SIZES = dict(hidden_size=128, intermediate_size=64, num_experts=8, top_k=3, num_groups=4, topk_groups=2)
CONFIG = MoEConfig(**SIZES, routed_scaling_factor=2.5, num_shared_experts=1, initializer_range=0.1)
TOKENS = 40


def tokens(shape=(TOKENS, 128), seed=7):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def step(layer, x, upstream=None, **options):
    """out, dx and the gradients of all parameters of one forward and backward."""
    layer.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    out = layer(x, **options)
    out.backward(tokens(out.shape, seed=8).to(out.dtype) if upstream is None else upstream)
    return {"out": out.detach(), "x": x.grad} | {n: p.grad for n, p in layer.named_parameters() if p.requires_grad}


def assert_same(got, want):
    assert got.keys() == want.keys()
    for name, value in got.items():
        assert_bitwise(value, want[name], name)


# ---------------------------------------------------------------- transformers


def hf_pair(recipe, factor=2.5, norm=True, weights="fp32"):
    """transformers' block in fp32 and ours with the same weights."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

    config = transformers.DeepseekV3Config(
        hidden_size=128,
        moe_intermediate_size=64,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        n_shared_experts=2,
        routed_scaling_factor=factor,
        norm_topk_prob=norm,
    )
    theirs = DeepseekV3MoE(config).float()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=parameter.shape[-1] ** -0.5).copy_(parameter.bfloat16())
        theirs.gate.e_score_correction_bias.uniform_(-0.5, 0.5)
        ours = MegaMoE(MoEConfig.from_hf(config), recipe=recipe, weights=weights)
        ours.router.weight.copy_(theirs.gate.weight)
        ours.router.correction_bias.copy_(theirs.gate.e_score_correction_bias)
        ours.experts.w13.copy_(theirs.experts.gate_up_proj)
        ours.experts.w2.copy_(theirs.experts.down_proj)
        shared = theirs.shared_experts
        ours.shared.w13[0].copy_(torch.cat([shared.gate_proj.weight, shared.up_proj.weight]))
        ours.shared.w2[0].copy_(shared.down_proj.weight)
    return theirs, ours


@pytest.mark.parametrize("recipe", [Recipe("bf16"), Recipe()], ids=lambda r: r.precision)
def test_equals_transformers_forward_and_all_gradients(recipe):
    theirs, ours = hf_pair(recipe)
    x, upstream = tokens((2, TOKENS, 128)), tokens((2, TOKENS, 128), seed=9)
    x_hf = x.float().requires_grad_()
    want = theirs(x_hf)
    want.backward(upstream.float())
    got = step(ours, x, upstream)
    bounds = GATES[recipe.precision]
    # out and dx are sums of two blocks' bf16 results: one rounding more than the gates of a single block know
    flat = lambda t: t.reshape(-1, 128)  # noqa: E731
    slack = 1.0 if recipe.precision == "bf16" else 0.0
    assert sqnr_db(got["out"], want) >= bounds.tensor_db - slack
    assert sqnr_db(got["x"], x_hf.grad) >= bounds.tensor_db - slack
    assert_rows_pass(flat(got["out"]), flat(want), bounds if not slack else _loose(bounds), "out")
    assert_rows_pass(flat(got["x"]), flat(x_hf.grad), bounds if not slack else _loose(bounds), "dx")
    assert_experts_pass(got["experts.w13"], theirs.experts.gate_up_proj.grad, bounds, "dW13")
    assert_experts_pass(got["experts.w2"], theirs.experts.down_proj.grad, bounds, "dW2")
    shared = theirs.shared_experts
    shared_w13 = torch.cat([shared.gate_proj.weight.grad, shared.up_proj.weight.grad])[None]
    assert_experts_pass(got["shared.w13"], shared_w13, bounds, "shared dW13")
    assert_experts_pass(got["shared.w2"], shared.down_proj.weight.grad[None], bounds, "shared dW2")
    # through dp, which cancels: bounded as a whole
    assert rel_l2(got["router.weight"], theirs.gate.weight.grad) < (0.02 if recipe.precision == "bf16" else 0.2)


def _loose(bounds):
    import dataclasses

    return dataclasses.replace(bounds, tensor_db=bounds.tensor_db - 1.0)


@pytest.mark.parametrize("factor", [1.0, 2.5])
@pytest.mark.parametrize("norm", [True, False])
def test_the_scaling_factor_acts_once_and_only_on_the_routed_part(factor, norm):
    theirs, ours = hf_pair(Recipe("bf16"), factor, norm)
    x = tokens()
    with torch.no_grad():
        assert sqnr_db(ours(x), theirs(x.float()[None])[0]) > 43
        shared = ours.shared(x, torch.zeros(TOKENS, 1, dtype=torch.int64), torch.ones(TOKENS, 1))
        assert sqnr_db(shared, theirs.shared_experts(x.float())) > 43


# ---------------------------------------------------------------- shapes and counts


def test_shapes_and_expert_counts():
    layer = MegaMoE(CONFIG)
    x = tokens((4, 10, 128))
    out, counts = layer(x, return_expert_counts=True)
    assert out.shape == x.shape and out.dtype == x.dtype
    assert counts.shape == (8,) and not counts.dtype.is_floating_point and counts.sum() == 40 * 3
    ids, _ = layer.router(x.view(-1, 128))
    assert torch.equal(counts, torch.bincount(ids.flatten(), minlength=8))
    assert_bitwise(layer(x.view(40, 128)), out.view(40, 128), "[T, H] and [B, S, H]")
    assert_bitwise(layer(x.transpose(0, 1).contiguous().transpose(0, 1)), out, "strided x")


@pytest.mark.parametrize("shape", [(128,), (3, 127), (1, 2, 3, 128)], ids=str)
def test_refuses_other_shapes(shape):
    with pytest.raises(MegaMoEValueError, match=r"x: expected \[T, 128\] or \[B, S, 128\], got shape"):
        MegaMoE(CONFIG)(torch.zeros(shape))


def test_refuses_an_empty_list():
    with pytest.raises(MegaMoEValueError, match="x: expected one tensor for each rank, got none"):
        MegaMoE(CONFIG, world=LocalWorld(2))([])


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.float8_e4m3fn, torch.complex64, torch.bool])
def test_refuses_dtypes_that_it_would_round_silently(dtype):
    with pytest.raises(MegaMoETypeError, match=f"x: expected a bf16, fp16 or fp32 tensor, got {dtype}"):
        MegaMoE(CONFIG)(tokens().to(dtype))


@pytest.mark.parametrize(("x", "name"), [(None, "NoneType"), ([None], "NoneType"), (tokens().tolist(), "list")])
def test_refuses_what_is_no_tensor(x, name):
    with pytest.raises(MegaMoETypeError, match=rf"x(\[0\])?: expected a bf16, fp16 or fp32 tensor, got {name}"):
        MegaMoE(CONFIG)(x)


@pytest.mark.parametrize(
    ("hints", "match"),
    [
        (dict(token_mask=torch.ones(TOKENS)), "token_mask: expected a bool tensor, got torch.float32"),
        (dict(token_mask=torch.ones(TOKENS, dtype=torch.int64)), "token_mask: expected a bool tensor, got torch.int64"),
        (dict(token_mask=True), "token_mask: expected a bool tensor, got bool"),
        (dict(token_ids="text"), "token_ids: expected a tensor of integers, got str"),
        (dict(topk_ids=torch.ones(TOKENS, 3, dtype=torch.bool)), "topk_ids: expected a tensor of integers, got"),
    ],
)
def test_refuses_hints_of_other_types(hints, match):
    with pytest.raises(MegaMoETypeError, match=match):
        MegaMoE(CONFIG)(tokens(), **hints)


def test_no_tokens():
    layer = MegaMoE(CONFIG)
    got = step(layer, tokens((2, 0, 128)))
    assert got["out"].shape == got["x"].shape == (2, 0, 128)
    assert all(not grad.any() for grad in got.values())


def test_x_is_not_written_to_and_shared_order_does_not_matter():
    layer, x = MegaMoE(CONFIG), tokens()
    before, version = x.clone(), x._version
    first, second = layer(x), layer(x)
    assert_bitwise(x, before, "x")
    assert x._version == version
    assert_bitwise(first, second, "out")


def test_nan_rows_stay_where_they_are():
    layer, x = MegaMoE(CONFIG), tokens()
    clean = x.clone()
    x[-3:], clean[-3:] = float("nan"), 0.0
    assert_bitwise(layer(x)[:-3], layer(clean)[:-3], "the other rows")


# ---------------------------------------------------------------- ranks


@pytest.mark.parametrize("parts", [(20, 20), (10, 10, 10, 10), (0, 33, 7, 0)], ids=str)
@pytest.mark.parametrize("weights", ["bf16", "fp8"])
def test_ranks_give_the_bits_of_one(parts, weights):
    one = MegaMoE(CONFIG, weights=weights)
    many = MegaMoE(CONFIG, weights=weights, world=LocalWorld(len(parts)))
    many.load_state_dict(one.state_dict())
    want = step(one, tokens())
    xs = [x.requires_grad_() for x in tokens().split(parts)]
    outs, counts = many(xs, return_expert_counts=True)
    torch.autograd.backward(outs, list(tokens(seed=8).split(parts)))
    got = {"out": torch.cat(outs), "x": torch.cat([x.grad for x in xs])}
    got |= {n: p.grad for n, p in many.named_parameters() if p.requires_grad}
    assert_same({k: v.detach() for k, v in got.items()}, want)
    assert sum(counts).sum() == TOKENS * 3 and [int(c.sum()) for c in counts] == [3 * n for n in parts]


def test_refuses_experts_that_do_not_divide():
    config = MoEConfig(128, 64, num_experts=30, top_k=2)
    with pytest.raises(MegaMoEValueError, match="num_experts: expected a positive multiple of the 4 ranks, got 30"):
        MegaMoE(config, world=LocalWorld(4))


# ---------------------------------------------------------------- construction


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (dict(weights="int8"), "weights: expected 'fp8', 'bf16' or 'fp32', got 'int8'"),
        (dict(recipe=Recipe(clamp=7.0)), "recipe.clamp: expected config.clamp = None, got 7.0"),
        (dict(backend="numpy"), "backend: expected 'auto' or one of"),
    ],
)
def test_refuses(options, match):
    with pytest.raises(MegaMoEValueError, match=match):
        MegaMoE(CONFIG, **options)


def test_unknown_options_are_refused():
    with pytest.raises(MegaMoETypeError, match="MegaMoE: expected options world, backend, .* capacity, .*got 'tokens'"):
        MegaMoE(CONFIG, tokens=1)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: MegaMoE(None), MegaMoETypeError, "config: expected a MoEConfig, got NoneType"),
        (lambda: MegaMoE({"hidden_size": 8}), MegaMoETypeError, "config: expected a MoEConfig, got dict"),
        (lambda: MegaMoE(CONFIG, recipe="fp8"), MegaMoETypeError, "recipe: expected a Recipe or None, got str. Pass"),
        (lambda: MoEContext("fp8"), MegaMoETypeError, "recipe: expected a Recipe or None, got str. Pass"),
        (lambda: MegaMoE(CONFIG, device="bogus"), MegaMoEValueError, "device: expected cpu, cuda, .*, got 'bogus'"),
        (lambda: MegaMoE(CONFIG, device="cuda:99"), MegaMoEValueError, "device: expected .*, got 'cuda:99'"),
        (lambda: Router(None), MegaMoETypeError, "config: expected a MoEConfig, got NoneType"),
        (lambda: Router(CONFIG)(None), MegaMoETypeError, "x: expected a tensor of floating numbers, got NoneType"),
        (
            lambda: Router(CONFIG)(torch.zeros(2, 128).int()),
            MegaMoETypeError,
            "x: expected a tensor of .* got torch.int32",
        ),
        (
            lambda: MegaMoE(CONFIG)(tokens().to("meta")),
            MegaMoEValueError,
            "x: expected .* of the weights, cpu, got meta",
        ),
        (
            lambda: MegaMoE(CONFIG, device="meta")(tokens().to("meta")),
            MegaMoEValueError,
            "x: expected a dense tensor with data on the device of the weights, meta, got meta",
        ),
    ],
)
def test_other_types_and_devices_are_named(call, error, match):
    with pytest.raises(error, match=match):
        call()


def test_a_backend_by_name_is_used_or_refused():
    assert MegaMoE(CONFIG, backend="torch").backend_name() == "torch"
    with pytest.raises(BackendUnavailable, match="backend: 'cute' does not run this"):
        MegaMoE(CONFIG, backend="cute")(tokens())


def test_the_clamp_of_the_config_is_honoured():
    import dataclasses

    clamped = MegaMoE(dataclasses.replace(CONFIG, clamp=0.01))
    assert clamped.recipe.clamp == 0.01 and clamped.shared.context.recipe.clamp == 0.01
    free = MegaMoE(CONFIG)
    free.load_state_dict(clamped.state_dict())
    assert not torch.equal(free(tokens()), clamped(tokens()))


def test_repr_names_the_configuration():
    assert "num_experts=8" in repr(MegaMoE(CONFIG)) and "weights='bf16'" in repr(MegaMoE(CONFIG))


# ---------------------------------------------------------------- dtypes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("weights", ["bf16", "fp32"])
def test_out_has_the_dtype_of_x_and_gradients_that_of_their_parameter(dtype, weights):
    layer = MegaMoE(CONFIG, weights=weights)
    got = step(layer, tokens().to(dtype))
    assert got["out"].dtype == got["x"].dtype == dtype
    assert all(p.grad.dtype == p.dtype for p in layer.parameters())


@pytest.mark.parametrize("weights", ["bf16", "fp32", "fp8"])
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
def test_under_autocast_out_has_the_autocast_dtype_and_nothing_else_changes(weights, x_dtype):
    layer = MegaMoE(CONFIG, weights=weights)
    x = tokens().to(x_dtype)
    want = step(layer, x, tokens(seed=8).to(x_dtype))
    layer.zero_grad()
    leaf = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(leaf)
    out.backward(tokens(seed=8))  # outside the region
    assert out.dtype == torch.bfloat16
    assert_bitwise(out, want["out"].bfloat16(), "out")
    assert_bitwise(leaf.grad, want["x"], "dx")
    assert all(p.grad.dtype == p.dtype for p in layer.parameters() if p.requires_grad)


def test_gradients_scaled_for_fp16_stay_finite():
    layer = MegaMoE(CONFIG)
    x = tokens().half().requires_grad_()
    layer(x).backward(torch.full((TOKENS, 128), 2.0**12, dtype=torch.float16))
    assert all(p.grad.isfinite().all() for p in layer.parameters())


# ---------------------------------------------------------------- modes and copies of the module


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("weights", ["bf16", "fp8"])
def test_inference_gives_the_training_bits(mode, weights):
    layer = MegaMoE(CONFIG, weights=weights)
    want = layer(tokens())
    layer.eval()
    with mode():
        got = layer(tokens())
    assert not got.requires_grad
    assert_bitwise(got, want, "out")
    with torch.inference_mode():
        born_there = MegaMoE(CONFIG, weights=weights)
        born_there(tokens())


def test_deepcopy_shares_nothing():
    layer = MegaMoE(CONFIG)
    want = step(layer, tokens())
    twin = copy.deepcopy(layer)
    assert_same(step(twin, tokens()), want)
    with torch.no_grad():
        twin.experts.w13.mul_(2)
    assert_bitwise(layer(tokens()), want["out"], "the original")
    assert twin.experts.copies is not layer.experts.copies
    assert twin.experts.context.handle != layer.experts.context.handle


def test_pickle():
    layer, buffer = MegaMoE(CONFIG, weights="fp8"), io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    assert_bitwise(torch.load(buffer, weights_only=False)(tokens()), layer(tokens()), "out")


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("weights", ["bf16", "fp8"])
def test_activation_checkpointing_changes_no_bit(use_reentrant, weights):
    layer = MegaMoE(CONFIG, weights=weights)
    with torch.no_grad():  # exact ties between experts
        layer.router.weight[4:] = layer.router.weight[:4]
    want = step(layer, tokens())

    class Checkpointed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = layer

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=use_reentrant)

    got = step(Checkpointed(), tokens())
    assert_same({name.removeprefix("inner."): value for name, value in got.items()}, want)


def test_saved_tensor_hooks_see_what_is_saved():
    layer, sizes = MegaMoE(CONFIG), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.nbytes) or t.clone(), lambda t: t):
        x = tokens().requires_grad_()
        out = layer(x)
    assert sum(sizes) > TOKENS * 3 * 2 * 64 * 2, "gate and up of every row at least"
    out.backward(tokens(seed=8))
    want = step(layer, tokens())
    assert_bitwise(x.grad, want["x"], "dx with tensors that were moved away and back")


# ---------------------------------------------------------------- accumulation and optimizers


def test_micro_batches_accumulate():
    layer = MegaMoE(CONFIG, weights="fp32")
    batches = [tokens((n, 128), seed=n) for n in (5, 40, 1, 17)]
    singles = [step(layer, x) for x in batches]
    for set_to_none in (True, False):
        layer.zero_grad(set_to_none=set_to_none)
        for i, x in enumerate(batches):
            out = layer(x, is_first_microbatch=i == 0)
            out.backward(tokens(out.shape, seed=8))
        for name, parameter in layer.named_parameters():
            total = singles[0][name].clone()
            for single in singles[1:]:
                total += single[name]
            assert_bitwise(parameter.grad, total, name)


def test_experts_without_rows_get_zero_gradients_and_the_same_step_on_any_number_of_ranks():
    models = []
    for world in (None, LocalWorld(2)):
        torch.manual_seed(3)
        layer = MegaMoE(MoEConfig(**SIZES), weights="fp32", world=world)
        with torch.no_grad():
            layer.router.correction_bias[4:] = -10.0  # nobody goes to rank 1's experts
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, weight_decay=0.1)
        for seed in (1, 2):
            x = tokens(seed=seed)
            out = layer(x) if world is None else torch.cat(layer(list(x.split([23, 17]))))
            optimizer.zero_grad()
            out.float().square().sum().backward()
            assert all(p.grad is not None for p in layer.parameters())
            assert not layer.experts.w13.grad[4:].any() and not layer.experts.w2.grad[4:].any()
            optimizer.step()
        models.append(layer.state_dict())
    for name, value in models[0].items():
        assert_bitwise(models[1][name], value, name)


@pytest.mark.parametrize(
    "hints, error, match",
    [
        (dict(topk_ids=torch.zeros(5, dtype=torch.int64)), MegaMoEValueError, r"topk_ids: .* \[T, K\] or .*\(5,\)"),
        (dict(topk_ids=torch.tensor(1)), MegaMoEValueError, r"topk_ids: expected a dense tensor .*, got shape \(\)"),
        (dict(token_mask=torch.tensor(True)), MegaMoEValueError, r"token_mask: expected a dense tensor \[T\]"),
        (dict(token_mask=torch.ones(5, dtype=torch.bool, device="meta")), MegaMoEValueError, "with data"),
        (
            dict(token_ids=torch.ones(5)),
            MegaMoETypeError,
            "token_ids: expected a tensor of integers, got torch.float32",
        ),
    ],
)
def test_hints_of_other_kinds_are_named(hints, error, match):
    with pytest.raises(error, match=match):
        MegaMoE(CONFIG)(tokens()[:5], **hints)
    with pytest.raises(MegaMoEValueError, match="x: expected a dense tensor"):
        MegaMoE(CONFIG)(tokens()[:5].float().to_sparse())


def test_ranks_give_ids_of_one_width():
    layer = MegaMoE(CONFIG, world=LocalWorld(2))
    ids = [torch.zeros(5, 2, dtype=torch.int64), torch.zeros(3, 1, dtype=torch.int64)]
    with pytest.raises(MegaMoEValueError, match="topk_ids: expected the same K on every rank, got 2, 1"):
        layer([tokens()[:5], tokens()[:3]], topk_ids=ids)
