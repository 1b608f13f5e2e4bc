"""`megamoe verify` and `bench` under torchrun: the bits of one rank, faults found, the same status on all ranks."""

import argparse
import functools
import json
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("cutlass")

from benchmarks.records import is_stale, validate
from cute_kernels.trace import Event
from megamoe.cli import bench_group, group_run
from megamoe.cli.group_run import Member, verify_over
from megamoe.cli.problem import ProblemSpec, make_problem
from megamoe.cli.trace_group import on_one_clock
from megamoe.errors import MegaMoEValueError
from megamoe.recipe import Recipe
from tests.cpu.test_cute_groups import by_emulation
from tests.support.distributed import run_ranks

CPU = torch.device("cpu")


def verified(rank, tokens, routing, backend, transport, recipe):
    by_emulation()
    problem = make_problem(ProblemSpec(tokens, 128, 128, 8, 2, routing))
    report = verify_over(Member(dist.group.WORLD, CPU), problem, recipe, backend, transport)
    return [(v.stage, v.failures) for v in report.verdicts], list(report.other_bits)


@pytest.mark.parametrize(
    ("tokens", "routing", "backend", "transport", "recipe"),
    [
        ((20, 13), "uniform", "cute", "symmetric", Recipe()),
        ((64, 0), "first_rank", "cute", "nccl", Recipe(clamp=0.5)),
        ((20, 13), "masked", "torch", None, Recipe(scale_format="pow2")),
    ],
)
def test_every_stage_over_a_group(tokens, routing, backend, transport, recipe):
    (stages, other_bits), elsewhere = run_ranks(verified, 2, tokens, routing, backend, transport, recipe)
    assert [stage for stage, _ in stages] == ["x", "gate_up", "out", "dp", "dx", "dW13", "dW2"]
    assert not other_bits and not any(failures for _, failures in stages) and elsewhere == ([], [])


def with_a_fault(rank):
    """Rank 1's weights of an expert are others than the problem's."""
    by_emulation()
    problem = make_problem(ProblemSpec((20, 13), 128, 128, 8, 2))
    if rank == 1:
        problem.w13_E2IH[5] *= 1.5
    report = verify_over(Member(dist.group.WORLD, CPU), problem, Recipe(), "cute", "symmetric")
    return [v.stage for v in report.verdicts if v.failures], list(report.other_bits)


def test_a_fault_of_one_rank_is_found():
    (failed, other_bits), _ = run_ranks(with_a_fault, 2)
    assert "out" in failed and {"gate_up", "out", "dx"} <= set(other_bits)


def torchrun(*options, processes=2):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, "-m", "megamoe", *options], capture_output=True, text=True, timeout=300, env=environment
    )


def test_verify_under_torchrun():
    sizes = ["--hidden", "128", "--intermediate", "128", "--experts", "4", "--top-k", "2", "--device", "cpu"]
    done = torchrun("verify", "--backend", "torch", "--tokens", "20,0", *sizes)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("every bit is that of one rank") == 1, "rank 0 alone prints"
    assert "2 processes on cpu, all-to-alls" in done.stdout and "1 of 1 problems pass" in done.stdout


def test_more_processes_than_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with (
        pytest.raises(MegaMoEValueError, match="--nproc-per-node: expected at most the 1 GPUs of this node, got 2"),
        group_run.membership("cuda"),
    ):
        pass
    with (
        pytest.raises(MegaMoEValueError, match="--device: expected cpu or cuda under torchrun, got 'cuda:1'"),
        group_run.membership("cuda:1"),
    ):
        pass


def test_launched_by_torchrun_or_not(monkeypatch):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert not group_run.launched()
    for name in names:
        monkeypatch.setenv(name, "1")
    assert group_run.launched()


def test_bench_under_torchrun(tmp_path):
    options = ["--shapes", "4,128,128,2", "--tokens-per-rank", "24,8", "--rounds", "2", "--backends", "torch"]
    done = torchrun("bench", *options, "--device", "cpu", "--out", str(tmp_path), "--name", "group")
    assert done.returncode == 0, done.stderr
    records = json.loads((tmp_path / "cpu-x2" / "group.json").read_text())
    assert [(r["bench"], r["T_per_rank"], r["ranks"]) for r in records] == [
        ("forward", 24, 2), ("fwd_bwd", 24, 2), ("forward", 8, 2), ("fwd_bwd", 8, 2),
    ]  # fmt: skip
    assert all(r["us"] > 0 and r["us_min"] <= r["us"] <= r["us_max"] for r in records)


def benched(rank):
    by_emulation()
    arguments = argparse.Namespace(precision="fp8", bench="forward,fwd_bwd", rounds=2)
    spec = ProblemSpec((24, 24), 128, 128, 4, 2)
    variants = ["cute_symmetric", "cute_nccl"]
    return bench_group.bench_case("tiny", spec, variants, arguments, Member(dist.group.WORLD, CPU))


def test_bench_shows_the_parts_beside_the_whole():
    records, others = run_ranks(benched, 2)
    assert records == others, "all ranks know the times of the slowest"
    found = {(r["bench"], r["backend"]): r for r in records}
    whole, math, exchange = (found["forward", name] for name in ("cute_symmetric", "math", "exchange"))
    assert whole["us_math_plus_exchange"] == pytest.approx(math["us"] + exchange["us"])
    assert whole["bytes_back_per_rank"] == 2 * whole["bytes_out_per_rank"] > 0
    assert found["forward", "cute_nccl"]["least_sqnr_db"] is None, "the bits of the first variant"
    assert exchange["tflops"] is None and found["fwd_bwd", "cute_nccl"]["tflops"] > 0
    assert not validate(records), "as all records are"
    assert not any(is_stale(r) for r in records)


def test_traces_of_all_gpus_are_put_on_one_clock():
    event = functools.partial(Event, 0, 0, "loader", block=0, n=0)
    ranks = [
        [event("wait: headers", 100, 130), event("GEMM 1", 140, 190)],
        [event("wait: headers", 5000, 5010), event("GEMM 1", 5020, 5100)],
    ]
    joined = on_one_clock(ranks, "wait: headers")
    assert [(e.begin_ns, e.end_ns) for e in joined] == [(100, 130), (140, 190), (120, 130), (140, 220)]
