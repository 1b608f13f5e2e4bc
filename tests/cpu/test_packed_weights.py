"""FP8 weights held once, in the fused kernel's order: same bits, half the bytes, and the way back."""

import copy
import functools
import io

import pytest
import torch

from cute_kernels.weights import prepare_weights
from megamoe import LocalWorld, MegaMoE, MoEConfig, Recipe
from megamoe.backends import BACKENDS
from megamoe.backends.cute_packing import CutePacking
from megamoe.errors import MegaMoERuntimeError, MegaMoEValueError
from megamoe.integrations.lora import add_lora, remove_lora
from megamoe.weights import Masters
from tests.support.compare import assert_bitwise
from tests.support.fake_cute import install

HIDDEN, INTER, EXPERTS = 256, 128, 4
CONFIG = MoEConfig(HIDDEN, INTER, num_experts=EXPERTS, top_k=2, num_shared_experts=1, initializer_range=0.1)
WEIGHTS_BYTES = 3 * HIDDEN * INTER * EXPERTS


@pytest.fixture(autouse=True)
def backend(monkeypatch):
    return install(monkeypatch)


def tokens(n=20, seed=7):
    return torch.randn((n, HIDDEN), generator=torch.Generator().manual_seed(seed)).bfloat16()


def layers(**options):
    """The same FP8 layer twice: as it came, and packed."""
    torch.manual_seed(0)
    plain = MegaMoE(CONFIG, weights="fp8", backend="cute", **options).eval()
    packed = copy.deepcopy(plain)
    packed.pack_weights()
    return plain, packed


def fp8_bytes(layer):
    """Bytes of the FP8 tensors that the routed experts hold, each storage once."""
    copies = layer.experts.copies._fused.experts
    groups = [g for g in (copies.fused, copies.fused_t) if g is not None]
    tensors = [t for g in groups for t in vars(g).values()] + list(layer.experts.parameters())
    tensors += [w.data for w in (copies.w13, copies.w2) if w.data.stride() != (0, 0, 0)]
    storages = {t.untyped_storage()._cdata: t for t in tensors if t.dtype == torch.float8_e4m3fn}
    return sum(t.untyped_storage().nbytes() for t in storages.values())


@pytest.mark.parametrize("hidden, inter", [(256, 128), (512, 384), (1024, 256)])
def test_packed_bytes_are_the_kernels_own(hidden, inter):
    w13, w2 = (torch.randint(0, 256, s, dtype=torch.uint8) for s in ((3, 2 * inter, hidden), (3, hidden, inter)))
    w13, w2 = w13.view(torch.float8_e4m3fn), w2.view(torch.float8_e4m3fn)
    s13, s2 = torch.rand(3, 2 * inter // 128, hidden // 128), torch.rand(3, hidden // 128, inter // 128)
    want, packing = prepare_weights(w13, s13, w2, s2), CutePacking()
    for weight, groups, kernel in ((w13, 2, want.w13), (w2, 1, want.w2)):
        packed = packing.pack(weight, groups)
        assert torch.equal(packed.view(torch.uint8), kernel.view(torch.uint8))
        assert torch.equal(packing.unpack(packed, groups).view(torch.uint8), weight.view(torch.uint8))


def test_same_result_with_one_copy():
    plain, packed = layers()
    with torch.no_grad():
        assert_bitwise(packed(tokens()), plain(tokens()), "out")
    assert fp8_bytes(plain) == 2 * WEIGHTS_BYTES
    assert fp8_bytes(packed) == WEIGHTS_BYTES
    assert packed.experts.copies.num_bytes() < 0.01 * WEIGHTS_BYTES, "scales only"
    packed.unpack_weights()
    with torch.no_grad():
        assert_bitwise(packed(tokens()), plain(tokens()), "out, unpacked")


def test_kernel_operands_are_those_of_plain_weights():
    plain, packed = layers()
    with torch.no_grad():
        plain(tokens()), packed(tokens())
    want, got = (vars(layer.experts.copies._fused.experts.fused) for layer in (plain, packed))
    for name, tensor in want.items():
        assert_bitwise(got[name], tensor, name)
        assert got[name].is_contiguous() and got[name].shape == tensor.shape


def test_over_virtual_ranks():
    plain, packed = layers(world=LocalWorld(2))
    xs = [tokens(13), tokens(5, seed=8)]
    with torch.no_grad():
        for got, want in zip(packed(xs), plain(xs), strict=True):
            assert_bitwise(got, want, "out")


def test_gradients_through_packed_weights():
    results = []
    for layer in layers():
        layer.train()
        x = tokens().requires_grad_()
        layer(x).backward(tokens(seed=8))
        results.append((x.grad, layer.router.weight.grad))
    assert_bitwise(results[1][0], results[0][0], "dx")
    assert_bitwise(results[1][1], results[0][1], "router's gradient")


def test_a_backward_after_eval():
    results = []
    for layer in layers():
        x = tokens().requires_grad_()
        out = layer(x)
        layer.eval()
        out.backward(tokens(seed=8))
        results.append(x.grad)
    assert_bitwise(results[1], results[0], "dx")


@pytest.mark.parametrize("change", [None, "load", "cast", "deepcopy", "pickle"])
def test_state_dict_has_the_bytes_as_they_came(change):
    plain, packed = layers()
    want = plain.state_dict()
    if change == "load":
        torch.manual_seed(1)
        want = MegaMoE(CONFIG, weights="fp8", backend="cute").state_dict()
        plain.load_state_dict(want), packed.load_state_dict(want)
        assert not packed.experts.is_packed
    elif change == "cast":
        packed.float()
        assert not packed.experts.is_packed
        plain.float()
        want = plain.state_dict()
    elif change == "deepcopy":
        packed = copy.deepcopy(packed)
        assert packed.experts.is_packed and packed.shared.is_packed
    elif change == "pickle":
        file = io.BytesIO()
        torch.save(packed, file)
        file.seek(0)
        packed = torch.load(file, weights_only=False)
        assert packed.experts.is_packed
    got = packed.state_dict()
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert_bitwise(got[name], tensor, name)
    with torch.no_grad():
        assert_bitwise(packed(tokens()), plain(tokens()), "out")


def test_fresh_weights_are_not_packed():
    _, packed = layers()
    packed.reset_parameters()
    assert not packed.experts.is_packed
    other = MegaMoE(CONFIG, weights="fp8", backend="cute")
    other.load_state_dict(packed.state_dict())
    with torch.no_grad():
        assert_bitwise(packed(tokens()), other(tokens()), "out")


def test_who_shares_the_weights_keeps_theirs():
    torch.manual_seed(0)
    layer = MegaMoE(CONFIG, weights="fp8", backend="cute")
    shared = layer.experts.w13
    before = shared.detach().clone()
    layer.pack_weights()
    assert_bitwise(shared.detach(), before, "w13 of the other")
    layer.pack_weights()
    assert layer.experts.is_packed, "twice is once"


def test_adapters_unpack_and_refuse():
    plain, packed = layers()
    for layer in (plain, packed):
        torch.manual_seed(2)
        add_lora(layer, rank=2)
    with pytest.raises(MegaMoEValueError, match="experts without adapters"):
        packed.pack_weights()
    assert not plain.experts.base.is_packed
    for layer in (plain, packed):
        remove_lora(layer)
    assert_bitwise(packed.state_dict()["experts.w13"], plain.state_dict()["experts.w13"], "merged w13")


def test_another_backend_refuses_packed_weights():
    _, packed = layers()
    experts = packed.experts
    masters = Masters(experts.w13, experts.w2, experts.w13_scale, experts.w2_scale)
    ask = functools.partial(experts.copies.for_forward, BACKENDS["torch"], masters, Recipe())
    with pytest.raises(MegaMoERuntimeError, match=r"'torch', got packed ones. Call unpack_weights\(\)"):
        ask(requantize=True, transposed=False)


def test_an_unfused_backend_leaves_them_alone():
    layer = MegaMoE(CONFIG, weights="fp8", backend="torch")
    before = layer.experts.w13
    layer.pack_weights()
    assert layer.experts.w13 is before and not layer.experts.is_packed


@pytest.mark.parametrize("weights, hidden, match", [("bf16", 256, "weights: expected 'fp8'"), ("fp8", 384, "256")])
def test_refused(weights, hidden, match):
    layer = MegaMoE(MoEConfig(hidden, INTER, num_experts=EXPERTS, top_k=2), weights=weights, backend="cute")
    before = layer.experts.w13
    with pytest.raises(MegaMoEValueError, match=match):
        layer.pack_weights()
    assert layer.experts.w13 is before and not layer.experts.is_packed


def test_a_failure_on_the_way_changes_nothing(monkeypatch):
    plain, layer = layers()
    layer.unpack_weights()
    pack = CutePacking.pack

    def fails(self, weight, row_groups):
        if row_groups == 1:
            raise torch.OutOfMemoryError("no room for w2")
        return pack(self, weight, row_groups)

    monkeypatch.setattr(CutePacking, "pack", fails)
    with pytest.raises(torch.OutOfMemoryError):
        layer.pack_weights()
    assert not layer.experts.is_packed
    with torch.no_grad():
        assert_bitwise(layer(tokens()), plain(tokens()), "out")
