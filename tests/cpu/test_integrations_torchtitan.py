"""torchtitan's conventions: results, FSDP2 over two processes, expert parallelism by DTensors, compile."""

from __future__ import annotations

import copy
import functools
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from megamoe import mega_moe
from megamoe.context import MoEContext
from megamoe.errors import MegaMoETypeError, MegaMoEValueError
from megamoe.integrations import torchtitan
from megamoe.integrations.torchtitan import GroupedExperts
from megamoe.recipe import Recipe
from tests.support.compare import assert_bitwise
from tests.support.distributed import run_ranks

D, F, E = 128, 64, 4
COUNTS = [5, 0, 17, 2]
NAMES = ("w1_EFD", "w2_EDF", "w3_EFD")


def make(recipe: Recipe | None = None, dtype: torch.dtype = torch.bfloat16, save: Any = "pool") -> GroupedExperts:
    torch.manual_seed(0)
    experts = GroupedExperts(D, F, E, recipe=recipe, backend="torch", save=save, dtype=dtype)
    experts.init_weights(0.1)
    return experts


def rows(count: int = sum(COUNTS), seed: int = 1) -> torch.Tensor:
    return torch.randn(count, D, generator=torch.Generator().manual_seed(seed)).bfloat16()


def gradients(experts: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in experts.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("recipe", [Recipe(), Recipe("bf16")], ids=["fp8", "bf16"])
@pytest.mark.parametrize("save", ["pool", "repull", "recompute"])
def test_the_same_as_mega_moe_on_sorted_rows(recipe: Recipe, save: Any) -> None:
    experts = make(recipe, save=save)
    x, dout = rows().requires_grad_(), rows(seed=2)
    out = experts(x, torch.tensor(COUNTS))
    out.backward(dout)
    want_x = rows().requires_grad_()
    w13 = torch.cat([experts.w1_EFD, experts.w3_EFD], 1).detach().requires_grad_()
    w2 = experts.w2_EDF.detach().clone().requires_grad_()
    ids = torch.repeat_interleave(torch.arange(E), torch.tensor(COUNTS))[:, None]
    want = mega_moe(want_x, ids, torch.ones(len(ids), 1), w13, w2, context=MoEContext(recipe, backend="torch"))
    want.backward(dout)
    assert w13.grad is not None
    pairs = {
        "out": (out, want),
        "x": (x.grad, want_x.grad),
        "w1": (experts.w1_EFD.grad, w13.grad[:, :F]),
        "w3": (experts.w3_EFD.grad, w13.grad[:, F:]),
        "w2": (experts.w2_EDF.grad, w2.grad),
    }
    for name, (got, wanted) in pairs.items():
        assert_bitwise(got, wanted, name)


def test_rows_behind_the_last_experts_give_zeros() -> None:
    experts, x = make(), rows(30)
    out = experts(x, torch.tensor(COUNTS, dtype=torch.int32))
    assert not out[sum(COUNTS) :].any() and out.shape == x.shape


def test_what_is_built_is_not_held_between_forward_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    experts, built, stack = make(), [], torchtitan._stack

    def watched(*weights: torch.Tensor) -> Any:
        made = stack(*weights)
        built.append(weakref.ref(made[0]))
        return made

    monkeypatch.setattr(torchtitan, "_stack", watched)
    out = experts(rows().requires_grad_(), torch.tensor(COUNTS))
    assert len(built) == 1 and built[0]() is None
    out.sum().backward()
    assert len(built) == 2 and experts.w1_EFD.grad is not None


def test_activation_checkpointing_changes_no_bit_and_frees_what_was_saved() -> None:
    plain, checkpointed = make(), make()
    saved: list[list[int]] = [[], []]
    for i, call in enumerate((plain, functools.partial(checkpoint, checkpointed, use_reentrant=False))):

        def pack(tensor: torch.Tensor, sizes: list[int] = saved[i]) -> torch.Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = call(rows().requires_grad_(), torch.tensor(COUNTS))
        out.sum().backward()
    assert sum(saved[1]) < sum(saved[0]) / 10
    for name, grad in gradients(plain).items():
        assert_bitwise(getattr(checkpointed, name).grad, grad, name)


def test_frozen_weights_get_no_gradient_and_copies_are_their_own() -> None:
    experts = make()
    experts.w1_EFD.requires_grad_(False)
    experts.w3_EFD.requires_grad_(False)
    copied = copy.deepcopy(experts)
    for module in (experts, copied):
        module(rows(), torch.tensor(COUNTS)).sum().backward()
        assert list(gradients(module)) == ["w2_EDF"]
    assert_bitwise(copied.w2_EDF.grad, experts.w2_EDF.grad, "w2")


def test_compiles_once_for_any_number_of_rows() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    experts, counter = make(), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(experts, fullgraph=True, dynamic=True, backend=counter)
    for counts in ([5, 0, 17, 2], [9, 9, 1, 4], [0, 40, 0, 1]):
        x, want = rows(sum(counts)).requires_grad_(), rows(sum(counts)).requires_grad_()
        got = compiled(x, torch.tensor(counts))
        reference = experts(want, torch.tensor(counts))
        assert_bitwise(got, reference, str(counts))
        got.sum().backward()
        reference.sum().backward()
        assert_bitwise(x.grad, want.grad, "dx")
    assert counter.frame_count <= 2
    torch._dynamo.reset()


def test_not_differentiable_twice() -> None:
    x = rows().requires_grad_()
    (dx,) = torch.autograd.grad(make()(x, torch.tensor(COUNTS)).float().square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.float().sum().backward()


# ---------------------------------------------------------------- two processes


class Model(nn.Module):
    """Two layers of experts with a residual stream between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([make(dtype=torch.float32) for _ in range(2)])
        for layer in self.layers:
            layer.init_weights(0.1)

    def forward(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x, counts)
        return x.float().square().mean()


STEPS = 3


def fully_sharded_case(rank: int) -> list[dict[str, torch.Tensor]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.manual_seed(0)
    model, mesh = Model(), init_device_mesh("cpu", (2,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    results = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(rows(seed=10 * step + rank), torch.tensor(COUNTS))
        loss.backward()
        results.append({"loss": loss.detach()})
        results[-1] |= {name: p.grad.full_tensor() for name, p in model.named_parameters()}
        optimizer.step()
    with torch.no_grad():
        results.append({"loss": model(rows(seed=99), torch.tensor(COUNTS))})
    return results


def test_fully_shard_gives_the_loss_and_the_gradients_of_the_whole() -> None:
    """Bit for bit over several steps: after each, what is gathered again has new values, and so have the FP8 copies."""
    torch.manual_seed(0)
    model = Model()
    working = copy.deepcopy(model).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found = run_ranks(fully_sharded_case, 2)
    for step in range(STEPS):
        with torch.no_grad():
            for low, high in zip(working.parameters(), model.parameters(), strict=True):
                low.copy_(high)
        grads = []
        for rank in range(2):
            working.zero_grad()
            loss = working(rows(seed=10 * step + rank), torch.tensor(COUNTS))
            loss.backward()
            assert_bitwise(found[rank][step]["loss"], loss.detach(), f"loss of rank {rank} in step {step}")
            grads.append(gradients(working))
        for name, parameter in model.named_parameters():
            parameter.grad = (grads[0][name].float() + grads[1][name].float()) / 2
            for rank in range(2):
                assert_bitwise(found[rank][step][name], parameter.grad, f"{name} in step {step}")
        optimizer.step()
    with torch.no_grad():
        for low, high in zip(working.parameters(), model.parameters(), strict=True):
            low.copy_(high)
        assert_bitwise(found[0][-1]["loss"], working(rows(seed=99), torch.tensor(COUNTS)), "loss afterwards")
    assert found[0][0]["loss"] != found[0][-1]["loss"]


def expert_parallel_case(rank: int) -> dict[str, torch.Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh, experts = init_device_mesh("cpu", (2,)), make()
    whole = {name: getattr(experts, name).detach() for name in NAMES}
    for name, weight in whole.items():
        setattr(experts, name, nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)])))
    starts, half = (0, sum(COUNTS[:2]), sum(COUNTS)), E // 2
    mine = rows()[starts[rank] : starts[rank + 1]]
    out = experts(mine, torch.tensor(COUNTS[rank * half : (rank + 1) * half]))
    out.float().sum().backward()
    grads = {name: getattr(experts, name).grad.full_tensor() for name in NAMES}
    experts.w1_EFD = nn.Parameter(distribute_tensor(whole["w1_EFD"], mesh, [Shard(1)]))
    with pytest.raises(MegaMoETypeError, match="w1_EFD: expected a tensor, or a DTensor that shards dim 0 at most"):
        experts(mine, torch.tensor(COUNTS[:half]))
    dist.barrier()
    return {"out": out.detach(), **grads}


def test_expert_parallelism_by_dtensors() -> None:
    experts = make()
    out = experts(rows(), torch.tensor(COUNTS))
    out.float().sum().backward()
    results = run_ranks(expert_parallel_case, 2)
    assert_bitwise(torch.cat([r["out"] for r in results]), out.detach(), "out")
    for name, grad in gradients(experts).items():
        assert_bitwise(results[0][name], grad, name)


def test_refuses_other_counts() -> None:
    with pytest.raises(MegaMoEValueError, match=r"num_tokens_per_expert_E: expected \[4\], rows of each expert"):
        make()(rows(), torch.tensor(COUNTS[:3]))
    with pytest.raises(MegaMoETypeError, match="num_tokens_per_expert_E: expected integers"):
        make()(rows(), torch.tensor(COUNTS).float())
