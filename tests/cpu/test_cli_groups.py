"""`megamoe verify` and `bench` under torchrun: the bits of one rank, faults found, the same status on all ranks."""

import argparse
import functools
import json
import os
import subprocess
import sys
import types

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("cutlass")

from benchmarks.records import is_stale, validate
from cute_kernels.trace import Event
from megamoe.cli import bench_group, build_parser, group_run, main
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
    arguments = argparse.Namespace(precision="fp8", rounds=2)
    spec = ProblemSpec((24, 24), 128, 128, 4, 2)
    variants = ["cute_symmetric", "cute_nccl"]
    member = Member(dist.group.WORLD, CPU)
    return bench_group.bench_case("tiny", spec, variants, bench_group.PASSES, arguments, member)


def test_bench_shows_the_parts_beside_the_whole():
    records, others = run_ranks(benched, 2)
    assert records == others, "all ranks know the times of the slowest"
    found = {(r["bench"], r["backend"]): r for r in records}
    whole, math, exchange = (found["forward", name] for name in ("cute_symmetric", "math", "exchange"))
    assert whole["us_math_plus_exchange"] == pytest.approx(math["us"] + exchange["us"])
    assert whole["bytes_back_per_rank"] == 2 * whole["bytes_out_per_rank"] > 0
    first, second = (found["forward", name] for name in ("cute_symmetric", "cute_nccl"))
    assert (first["equal_bits"], second["equal_bits"]) == (None, True) and second["least_sqnr_db"] is None
    assert all(r["emulation_db"] is None or r["emulation_db"] > 40 for r in (first, second))
    assert "emulation_db" not in math and math["kernel_hash"] == whole["kernel_hash"], "stale with the fused kernel"
    assert exchange["tflops"] is None and found["fwd_bwd", "cute_nccl"]["tflops"] > 0
    assert not validate(records), "as all records are"
    assert not any(is_stale(r) for r in records)


class Alone:
    """Stands for a member: what it gathers is its own."""

    device = CPU

    def gather(self, value):
        return [value]


def results_of(**changes):
    """Results of a run, some of them changed."""
    g = torch.Generator().manual_seed(0)
    found = {name: torch.randn(6, 8, generator=g) for name in ("out", "dx", "dp")}
    found |= {name: torch.randn(3, 4, 8, generator=g) for name in ("dW13", "dW2")}
    for name, change in changes.items():
        change(found[name])
    return found


def compared(monkeypatch, **variants):
    """`compare` of variants that computed this, beside an emulation that computed the right thing."""
    emulation = types.SimpleNamespace(results=results_of)
    monkeypatch.setattr(bench_group, "GroupRun", lambda name, share, recipe, experts: emulation)
    run = lambda found: types.SimpleNamespace(results=lambda: found, share=None, recipe=Recipe())  # noqa: E731
    return bench_group.compare({name: run(found) for name, found in variants.items()}, Alone())


def nan_at(*place):
    return lambda tensor: tensor.__setitem__(place, float("nan"))


@pytest.mark.parametrize("name, place", [("out", (0, 0)), ("dx", (5, 7)), ("dp", (2, 1)), ("dW13", (2, 3, 0))])
def test_a_nan_of_any_tensor_has_no_time(monkeypatch, name, place):
    right, wrong = results_of(), results_of(**{name: nan_at(*place)})
    with pytest.raises(AssertionError, match="second against the emulation"):
        compared(monkeypatch, first=right, second=wrong)
    with pytest.raises(AssertionError, match="first against the emulation"):
        compared(monkeypatch, first=wrong)


def test_what_was_compared_with_what_is_in_the_record(monkeypatch):
    noise = lambda t: t.mul_(1.001)  # noqa: E731
    found = compared(monkeypatch, a=results_of(), b=results_of(), c=results_of(dp=noise))
    assert found["a"] == {"emulation_db": None, "least_sqnr_db": None, "equal_bits": None}
    assert found["b"] == {"emulation_db": None, "least_sqnr_db": None, "equal_bits": True}
    assert 59 < found["c"]["least_sqnr_db"] < 61 and found["c"]["equal_bits"] is False


def test_gradients_of_an_earlier_variant_do_not_count():
    run = object.__new__(bench_group.GroupRun)
    run.share = types.SimpleNamespace(grads=(torch.ones(2, 4, 4), torch.ones(2, 4, 4)))
    run.forward, run.fwd_bwd = lambda: None, lambda: types.SimpleNamespace(dx=[None], dp=[None])  # write nothing
    assert run.results()["dW13"].isnan().all() and run.results()["dW2"].isnan().all()


def as_one_of_two(monkeypatch):
    """As torchrun would start this process; nobody is there to meet."""
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("MASTER_PORT", "0"), ("MASTER_ADDR", "x")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WORLD_SIZE", "2")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--routing", "zipf"], "--routing: expected not to be given under torchrun, got zipf"),
        (["--suite"], "--suite: expected not to be given under torchrun, got True"),
        (["--ranks", "4"], "--ranks: expected not to be given under torchrun, got 4"),
        (["--eager"], "--eager: expected not to be given under torchrun, got True"),
        (["--sustained", "1"], "--sustained: expected not to be given under torchrun, got 1.0"),
        (["--rounds", "0"], "--rounds: expected at least 1, got 0"),
        (["--bench", "forward,dgrad"], "--bench: expected of forward, fwd_bwd, got 'forward,dgrad'"),
        (["--backends", "cute,cuda"], "--backends: expected of cute, cute_symmetric, cute_nccl, triton, torch, got"),
        (["--shapes", "V4"], "--shapes: expected A, B, C, V3 or E,H,I,K, got 'V4'"),
        (["--tokens", "5"], "--nproc-per-node: expected a divisor of 5 tokens and 32 experts, got 2"),
        (["--tokens-per-rank", "8,-1"], "--tokens-per-rank: expected at least 0, got -1"),
        (["--device", "cuda:1"], "--device: expected cpu or cuda under torchrun, got 'cuda:1'"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_options_that_mean_nothing_over_processes(options, message, monkeypatch, capsys):
    as_one_of_two(monkeypatch)
    assert main(["bench", *options]) == 2
    assert capsys.readouterr().err.startswith(f"megamoe bench: {message}")


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        ("verify", ["--ranks", "3"], "--ranks: expected the 2 processes of torchrun, got 3"),
        ("verify", ["--json"], "--json: expected not to be given under torchrun, got True"),
        ("verify", ["--tokens", "1,2,3"], "--tokens: expected one T, or one for each of the 2 ranks, got 1,2,3"),
        ("tune", ["--ranks", "4"], "--ranks: expected not to be given under torchrun, got 4"),
    ],
)
def test_other_commands_over_processes(command, options, message, monkeypatch, capsys):
    as_one_of_two(monkeypatch)
    assert main([command, *options]) == 2
    assert capsys.readouterr().err.startswith(f"megamoe {command}: {message}")


def test_all_variants_and_benches_by_default_and_no_other_than_was_asked_for():
    parse = build_parser("bench").parse_args
    assert bench_group.selected(parse([])) == (["cute_symmetric", "cute_nccl", "triton"], ["forward", "fwd_bwd"])
    options = parse(["--backends", "cute,torch", "--bench", "forward"])
    assert bench_group.selected(options) == (["cute_symmetric", "cute_nccl", "torch"], ["forward"])
    assert bench_group.selected(parse(["--backends", "cute_nccl"]))[0] == ["cute_nccl"]
    ((_, spec),) = bench_group.specs_of(parse(["--shapes", "V3"]), 2)
    assert spec.num_tokens == (8192, 8192), "of each rank"
    ((_, spec),) = bench_group.specs_of(parse(["--shapes", "V3", "--tokens", "8192"]), 2)
    assert spec.num_tokens == (4096, 4096), "over all ranks"


def test_tune_under_torchrun(tmp_path):
    options = ["--shape", "4,128,128,2", "--tokens", "16", "--wgrad", "inline", "--rounds", "1", "--device", "cpu"]
    done = torchrun("tune", *options, "--backend", "torch", "--out", str(tmp_path / "overlap.json"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("best: defaults") == 1 and "T=16 uniform R=2" in done.stdout
    (entry,) = json.loads((tmp_path / "overlap.json").read_text())["settings"]
    assert entry["ranks"] == 2


def test_traces_of_all_gpus_are_put_on_one_clock():
    event = functools.partial(Event, 0, 0, "loader", block=0, n=0)
    ranks = [
        [event("wait: headers", 100, 130), event("GEMM 1", 140, 190)],
        [event("wait: headers", 5000, 5010), event("GEMM 1", 5020, 5100)],
    ]
    joined = on_one_clock(ranks, "wait: headers")
    assert [(e.begin_ns, e.end_ns) for e in joined] == [(100, 130), (140, 190), (120, 130), (140, 220)]
