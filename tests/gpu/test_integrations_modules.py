"""Experts of training frameworks, LoRA and the examples on a GPU, with each backend that runs there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from examples import overlap_tuning, train_tiny
from megamoe import MegaMoE, MoEConfig, backends
from megamoe.gates import GATES
from megamoe.integrations.lora import LoRAExperts, add_lora
from megamoe.integrations.megatron import GroupedExperts as MegatronExperts
from megamoe.integrations.torchtitan import GroupedExperts as TitanExperts
from megamoe.recipe import Recipe
from tests.support.megatron_conventions import DataParallel, TransformerConfig

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

COUNTS = [130, 0, 33, 5]
D, F, E = 128, 128, len(COUNTS)


@pytest.fixture(params=["triton", "cute"])
def backend(request: pytest.FixtureRequest) -> Any:
    problem = backends.Problem.of(torch.device("cuda"), Recipe(), D, F, num_experts=E, top_k=1)
    why = backends.why_not(request.param, problem)
    if why is not None:
        pytest.skip(why)
    return request.param


def rows(seed: int = 1, count: int = sum(COUNTS)) -> torch.Tensor:
    return torch.randn(count, D, generator=torch.Generator().manual_seed(seed)).bfloat16().cuda()


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.detach().double() - want.detach().double()).norm() / want.detach().double().norm())


def bound(precision: str = "fp8") -> float:
    return 10 ** (-GATES[precision].tensor_db / 20)


def reference(x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    """Each expert on its rows, in fp64."""
    outs, at = [], 0
    for e, count in enumerate(COUNTS):
        gate, up = (x[at : at + count] @ w13[e].T).chunk(2, dim=1)
        outs.append((torch.nn.functional.silu(gate) * up) @ w2[e].T)
        at += count
    return torch.cat(outs)


def test_torchtitan_experts_and_their_gradients(backend: Any) -> None:
    torch.manual_seed(0)
    experts = TitanExperts(D, F, E, backend=backend, device="cuda", dtype=torch.bfloat16)
    experts.init_weights(0.1)
    x, want_x = rows().requires_grad_(), rows().double().requires_grad_()
    leaves = {name: p.detach().double().requires_grad_() for name, p in experts.named_parameters()}
    out = experts(x, torch.tensor(COUNTS, device="cuda"))
    out.backward(rows(2))
    w13 = torch.cat([leaves["w1_EFD"], leaves["w3_EFD"]], 1)
    want = reference(want_x, w13, leaves["w2_EDF"])
    want.backward(rows(2).double())
    assert x.grad is not None and want_x.grad is not None
    assert error(out, want) < bound() and error(x.grad, want_x.grad) < bound()
    for name, leaf in leaves.items():
        assert error(getattr(experts, name).grad, leaf.grad) < bound(), name


def test_torchtitan_experts_do_not_synchronise_and_are_captured() -> None:
    torch.manual_seed(0)
    experts = TitanExperts(D, F, E, backend="triton", device="cuda", dtype=torch.bfloat16)
    x, counts = rows(), torch.tensor(COUNTS, device="cuda")
    with torch.no_grad():
        want = experts(x, counts).clone()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            again = experts(x, counts)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(again, want)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = experts(x, counts)
        x.copy_(rows(3))
        counts.copy_(torch.tensor(COUNTS[::-1]))
        graph.replay()
        assert torch.equal(captured, experts(x, counts))


@pytest.mark.parametrize("delays", [False, True])
def test_megatron_experts_fill_main_grad(backend: Any, delays: bool) -> None:
    torch.manual_seed(0)
    config = TransformerConfig(
        hidden_size=D, moe_ffn_hidden_size=F, delay_wgrad_compute=delays, use_cpu_initialization=False
    )
    experts = MegatronExperts(E, config, backend=backend)
    wrapper = DataParallel(experts, delays)
    x, probs = rows().requires_grad_(), torch.ones(sum(COUNTS), device="cuda", requires_grad=True)
    leaves = [w.detach().double().requires_grad_() for w in (experts.w13, experts.w2)]
    want = reference(rows().double(), *leaves)
    want.backward(rows(2).double())
    for _ in range(2):
        out, _ = experts(x, COUNTS, probs)
        out.backward(rows(2))
        experts.backward_dw()
    assert len(wrapper.ready) == 4
    for weight, leaf in zip((experts.w13, experts.w2), leaves, strict=True):
        assert leaf.grad is not None
        assert error(weight.main_grad / 2, leaf.grad) < bound()  # type: ignore[attr-defined]


def test_lora_trains(backend: Any) -> None:
    torch.manual_seed(0)
    config = MoEConfig(D, F, num_experts=E, top_k=2, initializer_range=0.1)
    layer = MegaMoE(config, weights="fp8", backend=backend, device="cuda")
    before = layer(rows()).detach()
    optimizer = torch.optim.AdamW(add_lora(layer, rank=8), lr=0.02)
    assert isinstance(layer.experts, LoRAExperts)
    assert error(layer(rows()), before) < 2 * bound()
    target, losses = torch.randn(sum(COUNTS), D, device="cuda"), []
    for _ in range(8):
        optimizer.zero_grad()
        loss = (layer(rows()).float() - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.97 * losses[0], losses


def test_the_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert train_tiny.main(["--steps", "60", "--seeds", "2", "--batch", "4", "--lr", "2e-3"]) == 0
    sizes = ["--tokens", "512", "--hidden", "256", "--intermediate", "128", "--experts", "8", "--top-k", "2"]
    assert overlap_tuning.main(["--repeats", "2", *sizes]) == 0
    assert "DIFFERENT" not in capsys.readouterr().out


def test_a_shared_expert_on_its_own_stream_changes_no_bit() -> None:
    config, results = MoEConfig(D, F, num_experts=E, top_k=2, num_shared_experts=1), []
    for overlap in (False, True):
        torch.manual_seed(0)
        layer = MegaMoE(config, backend="triton", device="cuda", overlap_shared=overlap)
        for seed in range(3):  # copies and memory of earlier calls are around
            layer.zero_grad()
            x = rows(seed, 700).requires_grad_()
            out = layer(x)
            out.backward(rows(9, 700))
        results.append({"out": out, "x": x.grad, **{name: p.grad for name, p in layer.named_parameters()}})
    for name, value in results[0].items():
        assert value is not None and torch.equal(results[1][name], value), name
