"""Dispatch and combine on a GPU: the bits of the CPU over LocalWorld and NCCL, static shapes, streams."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megamoe.comm import DispatchOptions, LocalWorld, combine, dispatch
from tests.support.comm_cases import CASES, Batch, Case, make_batch, quantized, train

ONE_RANK = [Case((37,), 8, 4), Case((0,), 4, 2), Case((150,), 1, 3), Case((300,), 16, 8)]


@pytest.fixture(scope="module")
def nccl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A group of this process alone, over NCCL: the whole path of a group, all-to-alls included."""
    torch.cuda.set_device(0)
    store = dist.FileStore(str(tmp_path_factory.mktemp("nccl") / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
    yield dist.group.WORLD
    dist.destroy_process_group()


def to(batch: Batch, device: str) -> Batch:
    lists = (batch.x, batch.ids, batch.weights, batch.dout)
    return Batch(*([t.to(device) for t in values] for values in lists))


def all_options(case: Case) -> list[DispatchOptions]:
    worst = case.num_ranks * (max(case.tokens) + 2)
    return [
        DispatchOptions(case.num_experts, expert_alignment=alignment, num_worst_tokens=bound, expand=expand)
        for alignment in (128, 16)
        for bound in (None, worst)
        for expand in (True, False)
    ]


def compare(case: Case, world: Any) -> None:
    """A world on the GPU against virtual ranks on the CPU: what travels and what comes home, bit for bit."""
    batch = make_batch(case)
    first = [r * case.num_experts // case.num_ranks for r in range(case.num_ranks)]
    for options in all_options(case):
        want, sent_cpu = train(batch, LocalWorld(case.num_ranks), options, first)
        got, sent = train(to(batch, "cuda"), world, options, first)
        for mine, theirs in zip(got, want, strict=True):
            for name in ("out", "weights_home", "dx"):
                assert torch.equal(getattr(mine, name).cpu(), getattr(theirs, name)), (case, options, name)
            # the experts of the test sum over channels, in an order of the device's own
            torch.testing.assert_close(mine.dw.cpu(), theirs.dw, rtol=1e-5, atol=1e-4)
        for rows, rows_cpu in zip(sent.recv_x, sent_cpu.recv_x, strict=True):
            assert torch.equal(rows.cpu(), rows_cpu)
        for counts, counts_cpu in zip(sent.tokens_per_expert, sent_cpu.tokens_per_expert, strict=True):
            assert torch.equal(counts.real.cpu(), counts_cpu.real) and torch.equal(
                counts.aligned.cpu(), counts_cpu.aligned
            )
        rows = dispatch(quantized(to(batch, "cuda")), to(batch, "cuda").ids, None, world, options=options).recv_x
        rows_cpu = dispatch(quantized(batch), batch.ids, None, LocalWorld(case.num_ranks), options=options).recv_x
        for (data, scale), (data_cpu, scale_cpu) in zip(rows, rows_cpu, strict=True):
            assert torch.equal(data.cpu().view(torch.uint8), data_cpu.view(torch.uint8))
            assert torch.equal(scale.cpu(), scale_cpu)


@pytest.mark.parametrize("case", [*ONE_RANK[:2], CASES[2][0], CASES[2][3], CASES[4][0]], ids=str)  # each size compiles
def test_virtual_ranks_on_the_gpu_equal_the_cpu(case: Case) -> None:
    compare(case, LocalWorld(case.num_ranks))


@pytest.mark.parametrize("case", ONE_RANK, ids=str)
def test_nccl_group_of_one_equals_the_cpu(case: Case, nccl: Any) -> None:
    compare(case, nccl)


def there_and_back(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, world: Any, **options: Any) -> Any:
    sent = dispatch(x, ids, weights, world, options=DispatchOptions(16, num_worst_tokens=320, **options))
    y = sent.recv_x.float() * (sent.recv_weights.sum(-1) if sent.recv_weights.dim() > 1 else sent.recv_weights)[:, None]
    return combine(y.bfloat16(), sent.handle).x


@pytest.mark.parametrize("expand", [True, False])
@pytest.mark.parametrize("over_nccl", [False, True])
def test_static_shapes_do_not_synchronise_and_replay(expand: bool, over_nccl: bool, nccl: Any) -> None:
    world = nccl if over_nccl else None
    first, second = (to(make_batch(Case((300,), 16, k)), "cuda") for k in (8, 8))
    second.ids[0].copy_(second.ids[0].flip(0))
    x, ids, weights = (v[0].clone() for v in (first.x, first.ids, first.weights))
    with torch.no_grad():
        want = there_and_back(second.x[0], second.ids[0], second.weights[0], world, expand=expand)  # also compiles
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            there_and_back(x, ids, weights, world, expand=expand)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL has threads of its own
            out = there_and_back(x, ids, weights, world, expand=expand)
        for static, other in zip((x, ids, weights), (second.x, second.ids, second.weights), strict=True):
            static.copy_(other[0])
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
    assert torch.equal(out, want)


@pytest.mark.parametrize("over_nccl", [False, True])
def test_asynchronous_calls_wait_by_events(over_nccl: bool, nccl: Any) -> None:
    """The main stream is kept busy, so that a missing wait reads what is not there yet."""
    world, case = (nccl if over_nccl else None), Case((300,), 16, 8)
    batch = to(make_batch(case), "cuda")
    options = DispatchOptions(16)
    plain = dispatch(batch.x[0], batch.ids[0], batch.weights[0], world, options=options)
    want = combine(plain.recv_x, plain.handle).x
    x = torch.full_like(batch.x[0], torch.nan)
    for _ in range(5):
        torch.cuda._sleep(20_000_000)
        x.copy_(batch.x[0])
        sent = dispatch(x, batch.ids[0], batch.weights[0], world, options=options, async_op=True)
        home = combine(sent.recv_x, sent.handle, async_op=True, previous_event=sent.event)
        home.event.current_stream_wait()
        assert torch.equal(home.x, want)
        x.fill_(torch.nan)
