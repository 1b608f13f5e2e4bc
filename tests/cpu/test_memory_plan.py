"""The memory plan against what a layer really holds: parameters, copies, saved tensors, what is alive at each step."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from megamoe import torch_steps, unfused
from megamoe.cli import plan as plan_command
from megamoe.comm import LocalWorld, as_transport
from megamoe.config import MoEConfig
from megamoe.errors import BackendUnavailable, MegaMoETypeError, MegaMoEValueError
from megamoe.layer import MegaMoE
from megamoe.memory_plan import MemoryPlan, PlanOptions, human, memory_plan
from megamoe.recipe import Recipe
from tests.support.distributed import run_ranks

CONFIG = MoEConfig(256, 384, 8, 2)
TOKENS = 40


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All tensors inside lists, tuples and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)


def storage_bytes(tensors: list[torch.Tensor]) -> int:
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


class Watched:
    """torch_steps, counting the bytes that are alive whenever a step returns, of all that steps have made."""

    def __init__(self) -> None:
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0
        self.peak_step = ""

    def ignore(self, given: list[torch.Tensor]) -> None:
        """Tensors that the caller holds."""
        for storage in (tensor.untyped_storage() for tensor in given):
            self.made[storage._cdata] = (StorageWeakRef(storage), 0)

    def __getattr__(self, name: str) -> Any:
        step = getattr(torch_steps, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            result = step(*args, **kwargs)
            if name == "swiglu_backward" and result.d_gate_up.scale is None:  # one tensor in bf16, as in the kernels
                rows = dataclasses.replace(result.d_gate_up, data=result.d_gate_up_bf16)
                result = dataclasses.replace(result, d_gate_up=rows)
            for tensor in tensors_in(result):
                storage = tensor.untyped_storage()
                self.made.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
            self.made = {key: entry for key, entry in self.made.items() if not entry[0].expired()}
            alive = sum(num_bytes for _, num_bytes in self.made.values())
            if alive > self.peak:
                self.peak, self.peak_step = alive, name
            return result

        return watched


def call_peaks(plan: MemoryPlan) -> tuple[int, int]:
    """Peak of the forward and of the backward of the routed experts: the plan without router, out and dW."""
    sums = {}
    for stage in plan.stages:
        mine = [i for i in stage.items if not i.name.startswith("router") and i.name not in ("weight gradients", "out")]
        own_out = [i for i in stage.items if i.name == "out" and stage.name == "combine"]
        sums[stage.name] = sum(i.num_bytes for i in mine + own_out)
    forward = max(value for name, value in sums.items() if name in ("dispatch", "GEMM 1, SwiGLU, GEMM 2", "combine"))
    return forward, max(sums.values())


@pytest.mark.parametrize("save", ["pool", "repull", "recompute"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_stages_hold_what_the_unfused_path_holds(precision: str, ranks: int, save: str) -> None:
    tokens = 512
    generator = torch.Generator().manual_seed(0)
    steps = Watched()
    transport = as_transport(LocalWorld(ranks), steps)
    xs = [torch.randn(tokens, 256, generator=generator).bfloat16() for _ in range(ranks)]
    ids = [torch.rand(tokens, 8, generator=generator).argsort(1)[:, :2] for _ in range(ranks)]
    weights = [torch.rand(tokens, 2, generator=generator) for _ in range(ranks)]
    rows = 128 * -(-(2 * tokens * ranks + 127 * 8) // 128) if ranks == 1 else 2048
    recipe = Recipe(precision, wgrad_operands="bf16")  # FP8 ones are bf16 values in the torch steps
    each = 8 // ranks
    w13, w2 = torch.randn(each, 768, 256).bfloat16(), torch.randn(each, 256, 384).bfloat16()
    experts = []
    for _ in range(ranks):
        pairs = [torch_steps.quantize_weight_with_transpose(w, recipe, g) for w, g in ((w13, 2), (w2, 1))]
        experts.append(unfused.ExpertWeights(pairs[0][0], pairs[1][0], pairs[0][1], pairs[1][1]))
    steps.ignore(xs)
    options = unfused.ForwardOptions(save, rows)
    outs, saved = unfused.forward(steps, transport, xs, ids, weights, experts, recipe, options)
    forward_peak, steps.peak = steps.peak, 0
    del outs
    into = [[torch.empty_like(w) for _ in range(ranks)] for w in (w13, w2)]
    douts = [torch.randn(tokens, 256, generator=generator).bfloat16() for _ in range(ranks)]
    steps.ignore([*douts, *into[0], *into[1]])
    unfused.backward(steps, transport, douts, saved, experts, unfused.Needs(True, True, *into))

    plan = memory_plan(
        CONFIG,
        ranks,
        save,
        None if ranks == 1 else rows,
        tokens=tokens,
        options=PlanOptions(precision=precision, is_virtual=ranks > 1, wgrad_operands="bf16"),
    )
    assert plan.pool_rows == rows
    forward, backward = call_peaks(plan)
    assert forward_peak == pytest.approx(forward, rel=0.01)
    assert steps.peak == pytest.approx(backward, rel=0.01), (steps.peak_step, plan.peak_stage.name)
    held = list(tensors_in([saved.plan, saved.weights, saved.gate_ups, saved.pools]))
    assert storage_bytes(held) == pytest.approx(
        sum(i.num_bytes for i in plan.saved if not i.name.startswith("router")), rel=0.01
    )


def saved_bytes(layer: MegaMoE, x: torch.Tensor) -> tuple[int, torch.Tensor]:
    """Bytes that a forward hands to autograd beside parameters and x, and its output."""
    given = {t.untyped_storage()._cdata for t in (x, *layer.parameters(), *layer.buffers())}
    seen: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in given:
            seen[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        out = layer(x)
    return sum(seen.values()), out


@pytest.mark.parametrize("weights", ["bf16", "fp32", "fp8"])
@pytest.mark.parametrize("precision", ["fp8", "bf16"])
@pytest.mark.parametrize("num_shared", [0, 2])
def test_a_layer_holds_what_was_planned(weights: str, precision: str, num_shared: int) -> None:
    config = dataclasses.replace(CONFIG, num_shared_experts=num_shared)
    layer = MegaMoE(config, backend="torch", weights=weights, recipe=Recipe(precision))
    plan = memory_plan(config, tokens=TOKENS, options=PlanOptions(weights, precision))
    assert storage_bytes([*layer.parameters(), *layer.buffers()]) == plan.weights_bytes
    x = torch.randn(TOKENS, 256).bfloat16().requires_grad_()
    saved, out = saved_bytes(layer, x)
    assert saved == pytest.approx(plan.saved_bytes, rel=0.05)
    copies = [part.copies.num_bytes() for part in (layer.experts, layer.shared) if part is not None]
    assert sum(copies) == plan.copies_bytes
    out.sum().backward()
    parts = [part for part in (layer.experts, layer.shared) if part is not None]
    grads = [w.grad for part in parts for w in (part.w13, part.w2) if w.grad is not None]
    assert storage_bytes(grads) == plan.gradients_bytes


def held_in_a_group(rank: int, capacity: int | str, tokens: int) -> tuple[int, int, int]:
    layer = MegaMoE(
        CONFIG, world=dist.group.WORLD, backend="torch", capacity=capacity, max_tokens_per_rank=tokens, save="repull"
    )
    x = torch.randn(tokens, 256).bfloat16().requires_grad_()
    saved, out = saved_bytes(layer, x)
    out.sum().backward()
    return storage_bytes([*layer.parameters(), *layer.buffers()]), layer.experts.copies.num_bytes(), saved


@pytest.mark.parametrize("capacity", ["worst", 2560])
def test_a_rank_of_a_group_holds_what_was_planned(capacity: int | str) -> None:
    plan = memory_plan(CONFIG, 2, "repull", capacity, tokens=700)
    for weights, copies, saved in run_ranks(held_in_a_group, 2, capacity, 700):
        assert (weights, copies) == (plan.weights_bytes, plan.copies_bytes)
        assert saved == pytest.approx(plan.saved_bytes, rel=0.05)


def test_inference_keeps_no_transposed_copy_and_saves_nothing() -> None:
    layer = MegaMoE(CONFIG, backend="torch").eval()
    with torch.no_grad():
        layer(torch.randn(TOKENS, 256).bfloat16())
    plan = memory_plan(CONFIG, save="none", tokens=TOKENS)
    assert layer.experts.copies.num_bytes() == plan.copies_bytes
    assert plan.saved_bytes == plan.gradients_bytes == 0


@pytest.mark.parametrize("capacity", [None, "worst", 4096])
def test_pool_rows(capacity: int | str | None) -> None:
    plan = memory_plan(CONFIG, 2, capacity=capacity, tokens=1000)
    assert plan.pool_rows == {None: 4 * 512, "worst": 4608, 4096: 4096}[capacity]
    assert plan.is_estimate == (capacity is None) == ("even load" in plan.explain())
    assert memory_plan(CONFIG, 1, tokens=0).pool_rows == 0


@pytest.mark.parametrize("save", ["pool", "recompute", "none"])
def test_fused_calls_are_planned_with_the_kernels_own_layout(save: str) -> None:
    pytest.importorskip("cutlass")
    from cute_kernels.launch import Buffers
    from cute_kernels.workspace import layout

    plan = memory_plan(CONFIG, 1, save, tokens=512, options=PlanOptions(backend="cute"))
    saves = save == "pool"
    buffers = Buffers.allocate(256, 384, plan.pool_rows, 8, saves, torch.device("cpu"))
    stage = {item.name: item.num_bytes for s in plan.stages if s.name == "fused forward" for item in s.items}
    blob = layout(256, 512, 2, 8, 1, 132, plan.pool_rows // 128).size
    if saves:
        mine = sum(stage[name] for name in ("pool", "h", "gate/up", "row order", "row weights"))
        assert stage["workspace"] == blob
    else:  # the call's buffers are the workspace's
        mine = stage["workspace"] - blob
    assert mine == pytest.approx(buffers.num_bytes, rel=0.01)
    # in the order of the kernels, copies are there beside FP8 masters too, made by tables of that order
    frozen = {
        item.name: item for item in memory_plan(CONFIG, save=save, options=PlanOptions("fp8", backend="cute")).copies
    }
    tables = frozen.pop("kernel order tables")
    assert tuple(frozen.values()) == plan.copies and tables.num_bytes == 12 * 256 * 384 // 8 * (1 + (save != "none"))


def test_wgrad_operands_follow_the_recipe() -> None:
    assert PlanOptions().wgrad_operands == Recipe().wgrad_operands
    peaks = {
        (backend, kind): memory_plan(CONFIG, options=PlanOptions(backend=backend, wgrad_operands=kind)).stages[-1]
        for backend in ("steps", "cute")
        for kind in ("bf16", "fp8")
    }
    assert all(stage.name == "wgrad" for stage in peaks.values())
    assert peaks["cute", "fp8"].num_bytes > peaks["cute", "bf16"].num_bytes  # since here 2I > H
    assert peaks["steps", "fp8"].num_bytes > peaks["steps", "bf16"].num_bytes
    with pytest.raises(MegaMoEValueError, match=r"wgrad_operands: expected 'bf16' or 'fp8', got 'fp4'"):
        memory_plan(CONFIG, options=PlanOptions(wgrad_operands="fp4"))


def test_packed_weights_have_no_forward_copy() -> None:
    sizes = [
        memory_plan(CONFIG, save="none", options=PlanOptions("fp8", backend="cute", is_packed=packed))
        for packed in (False, True)
    ]
    scales = 4 * 3 * 2 * 3 * 8  # of 128 x 128 blocks
    assert sizes[0].copies_bytes - sizes[1].copies_bytes == 3 * 256 * 384 * 8 - scales
    assert sizes[0].weights_bytes == sizes[1].weights_bytes
    for options in (PlanOptions(backend="cute", is_packed=True), PlanOptions("fp8", is_packed=True)):
        with pytest.raises(MegaMoEValueError, match=r"is_packed: expected False unless weights are 'fp8'"):
            memory_plan(CONFIG, options=options)


def test_fused_kernels_run_where_they_run() -> None:
    with pytest.raises(MegaMoEValueError, match=r"steal_us: expected a number from 0 to 1000, got -1"):
        memory_plan(CONFIG, options=PlanOptions(steal_us=-1))
    with pytest.raises(MegaMoEValueError, match=r"backend: expected 'steps' or 'cute', got 'triton'"):
        memory_plan(CONFIG, options=PlanOptions(backend="triton"))
    for ranks, options in ((2, PlanOptions(backend="cute")), (1, PlanOptions(precision="bf16", backend="cute"))):
        with pytest.raises(MegaMoEValueError, match=r"backend: expected 'steps' unless H and I are multiples of 128"):
            memory_plan(CONFIG, ranks, options=options)
    with pytest.raises(MegaMoEValueError, match=r"backend: .* got 'cute' with I = 192, fp8, 1 ranks"):
        memory_plan(dataclasses.replace(CONFIG, intermediate_size=192), options=PlanOptions(backend="cute"))
    both = memory_plan(CONFIG, 2, tokens=512, options=PlanOptions(is_virtual=True, backend="cute"))
    assert both.pool_rows == memory_plan(CONFIG, 2, "pool", "worst", tokens=512).pool_rows and not both.is_estimate


def test_less_is_saved_in_the_order_of_the_modes_and_more_ranks_need_less() -> None:
    config = MoEConfig(7168, 2048, 256, 8)
    by_mode = [memory_plan(config, 8, save).saved_bytes for save in ("pool", "repull", "recompute", "none")]
    assert by_mode == sorted(by_mode, reverse=True) and len(set(by_mode)) == 4
    by_ranks = [memory_plan(config, ranks).peak_bytes for ranks in (1, 2, 8)]
    assert by_ranks == sorted(by_ranks, reverse=True)


def test_explanation_adds_up() -> None:
    plan = memory_plan(dataclasses.replace(CONFIG, num_shared_experts=1), tokens=TOKENS)
    text = plan.explain()
    assert "~" not in text and f"peak {'':<22} {human(plan.peak_bytes):>12}".split() == text.splitlines()[-1].split()
    assert plan.peak_bytes == plan.weights_bytes + plan.copies_bytes + max(s.num_bytes for s in plan.stages)
    assert all(item.name in text for item in (*plan.weights, *plan.copies, *plan.saved, *plan.peak_stage.items))
    assert [human(n) for n in (5, 2048, 3 << 20, 5 << 30)] == ["5 B", "2.0 KiB", "3.0 MiB", "5.00 GiB"]


def test_copies_for_stolen_tasks_are_held_through_dgrad() -> None:
    """P * (2I + H) bytes and scales of each virtual rank; one rank has nobody to wait for."""
    for ranks, more in ((1, 0), (2, 2)):
        sizes = [
            memory_plan(CONFIG, ranks, options=PlanOptions(backend="cute", is_virtual=True, steal_us=us))
            for us in (0.0, 50.0)
        ]
        stage = [next(s for s in plan.stages if s.name == "fused dgrad").num_bytes for plan in sizes]
        width = 2 * CONFIG.intermediate_size + CONFIG.hidden_size
        assert stage[1] - stage[0] == more * sizes[0].pool_rows * (width + 4 * width // 128)


def test_refusals() -> None:
    with pytest.raises(MegaMoEValueError, match=r"ranks: expected a divisor of num_experts = 8, got 3"):
        memory_plan(CONFIG, 3)
    with pytest.raises(MegaMoEValueError, match=r"save: expected one of none, pool, repull, recompute, got 'all'"):
        memory_plan(CONFIG, save="all")
    for arguments in (("x",), (CONFIG, "2"), (CONFIG, True)):
        with pytest.raises(MegaMoETypeError, match=r"(config|ranks): expected a value of type (MoEConfig|int), got "):
            memory_plan(*arguments)
    for capacity in (100, 0, -128, True, "best"):
        with pytest.raises(MegaMoEValueError, match=r"capacity: expected a positive multiple of 128, 'worst' or None"):
            memory_plan(CONFIG, 2, capacity=capacity)
    with pytest.raises(MegaMoEValueError, match=r"(?s)tokens: expected 0 or more, got -1.*weights: .*precision: "):
        memory_plan(CONFIG, tokens=-1, options=PlanOptions("fp4", "fp4"))


# the command


def run(*words: str) -> int:
    import argparse

    parser = argparse.ArgumentParser()
    plan_command.add_arguments(parser)
    return plan_command.plan_main(parser.parse_args(words))


def test_command_prints_draws_and_reads_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "plan.png"
    assert run("--experts", "32", "--ranks", "2", "--png", str(picture)) == 0
    assert "peak above weights, copies" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000
    config = {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert run("--config", str(tmp_path / "config.json"), "--ranks", "1", "--capacity", "worst", "--json") == 0
    got = json.loads(capsys.readouterr().out)
    want = memory_plan(MoEConfig(2048, 768, 128, 8), 1, "pool", "worst").as_dict()
    assert got == json.loads(json.dumps(want))


def test_command_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MegaMoEValueError, match=r"--capacity: expected a number of rows or 'worst', got '-5'"):
        run("--capacity=-5")
    with pytest.raises(MegaMoEValueError, match=r"--config: expected a readable config.json, got '.*nothing.json'"):
        run("--config", str(tmp_path / "nothing.json"))
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(MegaMoEValueError, match=r"--config: expected a JSON object, got list"):
        run("--config", str(tmp_path / "list.json"))
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(BackendUnavailable, match=r"--png: expected matplotlib, got none"):
        run("--png", str(tmp_path / "x.png"))
