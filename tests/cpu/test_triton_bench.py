"""`megamoe bench` on the CPU with tiny shapes: records that validate, stale ones found, tables and charts."""

from __future__ import annotations

import argparse
import json
import subprocess
import time
import types

import pytest
import torch

from benchmarks import charts
from benchmarks import records as benchmarks_records
from megamoe.cli import bench, bench_problem, bench_torch, chart, timing
from megamoe.cli.problem import ProblemSpec, draw_topk_ids
from megamoe.cli.records import environment, write_records
from megamoe.errors import BackendUnavailable, MegaMoEValueError
from megamoe.provenance import gpu_name, kernel_hash
from megamoe.recipe import Recipe

CPU = torch.device("cpu")


def parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args([*argv, "--device", "cpu", "--rounds", "2", "--sustained", "0"])


@pytest.fixture(scope="module")
def committed(tmp_path_factory):
    """A run of the torch backend, as a folder of results."""
    tmp_path = tmp_path_factory.mktemp("results")
    arguments = ("--shapes", "4,256,128,2", "--tokens", "32", "--backends", "torch", "--out", str(tmp_path))
    assert bench.bench_main(parse(*arguments)) == 0
    return tmp_path


def test_a_run_writes_records_and_a_chart(committed, capsys):
    files = benchmarks_records.load(committed)
    records = files["cpu/layer"]
    assert set(files) == {"cpu/layer", "cpu/stages"} and benchmarks_records.validate(files["cpu/stages"]) == []
    assert benchmarks_records.validate(records) == []
    assert [r["bench"] for r in records] == list(bench.PASSES)
    assert 0 < records[0]["rel_l2_out"] < 0.089 and 0 < records[1]["rel_l2_dw13"] < 0.089
    assert not any(benchmarks_records.is_stale(r) for r in records)
    assert (committed / "cpu" / "layer-4-256-128-2.png").read_bytes()[:4] == b"\x89PNG"


def test_the_suite_writes_all_its_cases(tmp_path, monkeypatch):
    cases = (
        {"shapes": "4,128,128,2", "tokens": 64},
        {"shapes": "4,128,128,2", "tokens": 64, "routing": "zipf", "bench": "forward"},
        {"shapes": "4,128,128,2", "tokens": 64, "ranks": 2, "bench": "forward"},
        {"shapes": "4,128,128,2", "tokens": 64, "precision": "bf16", "bench": "forward"},
    )
    monkeypatch.setattr(bench, "SUITE", cases)
    assert bench.bench_main(parse("--suite", "--backends", "torch", "--out", str(tmp_path), "--no-charts")) == 0
    records = benchmarks_records.load(tmp_path)["cpu/layer"]
    assert benchmarks_records.validate(records) == []
    kinds = [(r["routing"], r["ranks"], r["precision"]) for r in records if r["bench"] == "forward"]
    assert kinds == [("uniform", 1, "fp8"), ("zipf", 1, "fp8"), ("uniform", 2, "fp8"), ("uniform", 1, "bf16")]


def test_a_backend_that_fails_has_no_record_and_the_others_do(tmp_path, monkeypatch, capsys):
    def wrong(problem, run, benches, training):
        raise AssertionError("torch: out at 3.0 dB")

    monkeypatch.setattr(bench, "errors", wrong)
    assert bench.bench_main(parse("--shapes", "4,128,128,2", "--backends", "torch", "--out", str(tmp_path))) == 1
    assert "torch has no record: AssertionError: torch: out at 3.0 dB" in capsys.readouterr().err


def test_a_backend_with_bf16_operands_of_wgrad_is_a_backend_of_its_own(tmp_path):
    arguments = ("--shapes", "4,128,128,2", "--tokens", "32", "--backends", "torch,torch_wgrad_bf16")
    assert bench.bench_main(parse(*arguments, "--out", str(tmp_path), "--no-charts")) == 0
    records = benchmarks_records.load(tmp_path)["cpu/layer"]
    assert {r["backend"] for r in records} == {"torch", "torch_wgrad_bf16"}
    assert [r["backend"] for r in records if r["bench"] == "forward"] == ["torch"]
    assert kernel_hash("cute_wgrad_bf16") == kernel_hash("cute")


def test_a_case_of_the_suite_that_fails_stops_no_other(tmp_path, monkeypatch, capsys):
    def run_out(problem, training):
        if problem.spec.num_experts == 4:
            raise torch.OutOfMemoryError("no room")
        return {}

    only = {"bench": "forward", "backends": "torch", "tokens": 64}
    monkeypatch.setattr(bench, "SUITE", ({"shapes": "4,128,128,2"} | only, {"shapes": "8,128,128,2"} | only))
    monkeypatch.setattr(bench, "torch_gemms", run_out)
    arguments = ("--suite", "--out", str(tmp_path), "--no-charts")
    assert bench.bench_main(parse(*arguments)) == 1
    assert "4,128,128,2 T=64 has no record: OutOfMemoryError: no room" in capsys.readouterr().err
    assert [r["shape"] for r in benchmarks_records.load(tmp_path)["cpu/layer"]] == ["8,128,128,2"]


def test_rows_say_what_they_include_and_ratios_what_they_compare(committed):
    records = benchmarks_records.load(committed)["cpu/layer"]
    assert all(r["includes"] == bench.INCLUDES[r["bench"]] for r in records)
    records = [
        {"bench": b, "backend": backend, "us": us, "tflops": None, "gb_per_s": None}
        for b, backend, us in (
            ("forward", "cute", 2.0),
            ("wgrad", "cute", 5.0),
            ("wgrad", "triton", 20.0),
            ("gemms", "torch_scaled_grouped_mm", 3.0),
            ("wgrad", "torch_grouped_mm", 10.0),
            ("wgrad", "torch_scaled_grouped_mm", 6.0),
        )
    ]
    bench.add_ratios(records)
    assert [r["ratio_to_torch_gemms"] for r in records] == [1.5, 2.0, 0.5, None, None, None]
    assert [r["ratio_to_triton"] for r in records[:3]] == [None, 4.0, 1.0]


def test_small_kernels_are_held_against_a_copy_of_their_size():
    rates = {"quantize": ("triton", 4.0, 500.0), "copy_of_quantize": ("torch", 3.0, 660.0), "copy": ("torch", 9.0, 1e3)}
    records = [
        {"bench": bench, "backend": backend, "us": us, "tflops": None, "gb_per_s": rate}
        for bench, (backend, us, rate) in rates.items()
    ]
    records.append({"bench": "dense_matmul", "backend": "torch", "us": 1.0, "tflops": 1.0, "gb_per_s": None})
    bench.add_ratios(records)
    assert [r["copy_share"] for r in records] == [0.75, None, None, None]
    assert [r["roof_share"] for r in records] == [0.5, 0.66, 1.0, 1.0]
    assert bench_torch.same_size_copies({"quantize": 64}, torch.device("cpu")) == {}


def test_parts_of_the_backward_are_timed_alone_and_checked(tmp_path, monkeypatch, capsys):
    kinds = ("--bench", "wgrad,wgrad13,wgrad2,requantize,fwd_bwd_requantized", "--backends", "torch")
    arguments = ("--shapes", "4,128,128,2", "--tokens", "32", *kinds, "--no-charts", "--out", str(tmp_path))
    assert bench.bench_main(parse(*arguments)) == 0
    files = benchmarks_records.load(tmp_path)
    assert [r["bench"] for r in files["cpu/layer"]] == ["fwd_bwd_requantized", "wgrad"]
    stages = {r["bench"]: r for r in files["cpu/stages"]}
    assert set(stages) == {"wgrad13", "wgrad2", "requantize"} and "rel_l2_dw2" not in stages["wgrad13"]
    assert benchmarks_records.validate([r for file in files.values() for r in file]) == []


STANDS_FOR = {
    "forward": ("forward", "out"), "backward": ("backward", "dw2"), "fwd_bwd": ("forward_backward", "dx"),
    "fwd_bwd_requantized": ("requantize_forward_backward", "dw13"), "requantize": ("requantize_forward_backward", "dp"),
    "dgrad": ("dgrad", "dp"), "wgrad": ("wgrad", "dw13"), "wgrad13": ("wgrad", "dw13"), "wgrad2": ("wgrad", "dw2"),
}  # fmt: skip
"""By bench the method that it times, or that a wrong result of it shows in, and a tensor that this computes."""


@pytest.mark.parametrize("kind", STANDS_FOR)
def test_what_is_timed_is_what_was_checked(kind, tmp_path, monkeypatch, capsys):
    """A call that computes something wrong has no time, whatever the others compute."""
    method, name = STANDS_FOR[kind]
    original = getattr(bench_problem.LayerRun, method)

    def wrong(self, **options):
        found = original(self, **options)
        for part in found.get(name, ()):
            part.mul_(1.7)
        return found

    arguments = ("--shapes", "4,128,128,2", "--tokens", "32", "--bench", kind, "--backends", "torch", "--no-charts")
    assert bench.bench_main(parse(*arguments, "--out", str(tmp_path / "right"))) == 0
    monkeypatch.setattr(bench_problem.LayerRun, method, wrong)
    assert bench.bench_main(parse(*arguments, "--out", str(tmp_path / "wrong"))) == 1
    assert f"torch has no record: AssertionError: torch: {name} " in capsys.readouterr().err


@pytest.mark.parametrize("method", ["backward", "forward_backward", "wgrad"])
def test_gradients_that_are_not_written_are_nobody_elses(method, tmp_path, monkeypatch, capsys):
    """What an earlier backend, or an earlier call, has left in the buffers of dW does not count."""
    original = getattr(bench_problem.LayerRun, method)

    def writes_nothing(self, **options):
        kept = [grad.clone() for grad in self.problem.weight_grads()]
        found = original(self, **options)
        for grad, before in zip(self.problem.weight_grads(), kept, strict=True):
            grad.copy_(before)
        return found

    arguments = ("--shapes", "4,128,128,2", "--tokens", "32", "--backends", "torch,triton,torch_wgrad_bf16")
    monkeypatch.setattr(bench, "usable", lambda names, *_: ["torch", "torch_wgrad_bf16"])
    monkeypatch.setattr(bench_problem.LayerRun, method, writes_nothing)
    assert bench.bench_main(parse(*arguments, "--out", str(tmp_path), "--no-charts")) == 1
    said = capsys.readouterr().err
    for backend in ("torch", "torch_wgrad_bf16"):
        assert f"{backend} has no record: AssertionError: torch: dw13 at nan dB" in said


def judged(change, precision="fp8"):
    """A backward on the CPU whose results `change` has had, judged against the oracle."""
    problem = bench_problem.BenchProblem(ProblemSpec((64,), 128, 128, 16, 2, "balanced"), Recipe(precision), CPU)
    run = bench_problem.LayerRun("torch", problem, training=True)
    problem.oracle(True)
    run.training_forward()
    found = run.backward()
    change(found)
    return problem.judge("torch", found, bench_problem.RESULTS["backward"])


def of_one_row(got):
    got["dx"][0][3] *= 0.7


def of_one_expert(got):
    got["dw13"][0][2] *= 0.88


def of_one_slot(got):
    got["dp"][0][5, 1] += 100.0


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (of_one_row, "dx row 3 off by 0.3.* of its norm > 0.15"),
        (of_one_expert, r"dw13 of expert 2 at 1\d.\d dB < 20"),
        (of_one_slot, "dp off by .* of its spread > 0.4"),
        (lambda got: got["dp"][0].fill_(float("nan")), "dp off by inf of its spread > 0.4"),
        (lambda got: got.pop("dw2"), "expected dx, dp, dw13, dw2, got dx, dp, dw13"),
    ],
)
def test_every_gate_is_applied(change, match):
    assert set(judged(lambda got: None)) == {"rel_l2_dx", "rel_l2_dp", "rel_l2_dw13", "rel_l2_dw2"}
    with pytest.raises(AssertionError, match=f"torch: {match}"):
        judged(change)


def test_a_step_with_new_copies_uses_them_in_both_directions(monkeypatch):
    problem = bench_problem.BenchProblem(ProblemSpec((16,), 128, 128, 4, 2), Recipe(), CPU)
    run = bench_problem.LayerRun("torch", problem, training=True)
    problem.w13.mul_(2.0)  # an optimizer step behind the copies
    got = run.requantize_forward_backward()
    problem.oracle(True)
    problem.judge("torch", got, bench_problem.STEP)
    with pytest.raises(AssertionError, match="torch: out at"):
        problem.judge("torch", run.forward_backward(), bench_problem.STEP)


def test_validate_names_what_is_wrong(committed):
    records = benchmarks_records.load(committed)["cpu/layer"]
    first = records[0]
    assert benchmarks_records.validate([{k: v for k, v in first.items() if k != "us"}]) == ["records[0]: us is missing"]
    assert benchmarks_records.validate([first | {"T": "32"}], "h200/x") == ["h200/x[0]: T = '32'"]
    assert "expected 0 < us_min" in benchmarks_records.validate([first | {"us_min": 1e12}])[0]
    assert "a second record of ('forward'," in benchmarks_records.validate([first, first])[0]
    assert benchmarks_records.validate([first | {"rel_l2_out": float("nan")}]) == ["records[0]: rel_l2_out = nan"]


def test_records_of_other_kernels_are_stale(committed):
    records = benchmarks_records.load(committed)["cpu/layer"]
    old = records[0] | {"backend": "triton", "kernel_hash": "0" * 16}
    new = old | {"kernel_hash": kernel_hash("triton")}
    assert benchmarks_records.is_stale(old) and not benchmarks_records.is_stale(new)
    table = benchmarks_records.render_table([old, new])
    assert table.count("triton (stale)") == 1 and table.endswith("since this was measured.")
    assert "(stale)" not in benchmarks_records.render_table([new])


def test_the_hash_follows_the_sources(tmp_path):
    folder = tmp_path / "megamoe" / "triton_kernels"
    folder.mkdir(parents=True)
    (folder / "a.py").write_text("x = 1\n")
    before = kernel_hash("triton", tmp_path)
    (folder / "a.py").write_text("x = 2\n")
    assert before != kernel_hash("triton", tmp_path)
    assert kernel_hash("torch_scaled_grouped_mm") is None
    assert kernel_hash("cute") != kernel_hash("triton")
    assert kernel_hash("math") == kernel_hash("cute"), "the fused kernel alone"


def test_select_and_render():
    records = [
        {"bench": b, "shape": s, "T": 8, "backend": "torch", "us": 1234.5, "tflops": None, "kernel_hash": None}
        for b in ("backward", "forward")
        for s in ("A", "B")
    ]
    chosen = benchmarks_records.select(records, bench=("forward", "backward"), shape="A")
    assert [r["bench"] for r in chosen] == ["forward", "backward"]
    assert benchmarks_records.render_table(chosen).splitlines() == [
        "| bench | shape | T | backend | µs |",
        "|---|---|---|---|---:|",
        "| forward | A | 8 | torch | 1,234 |",
        "| backward | A | 8 | torch | 1,234 |",
    ]


def test_committed_results_are_valid(capsys):
    assert benchmarks_records.main([]) == 0, capsys.readouterr().out


def test_the_command_that_checks_results_fails_on_bad_ones(tmp_path, capsys):
    write_records(tmp_path / "h200" / "x.json", [{"bench": "forward"}])
    assert benchmarks_records.main(["--results", str(tmp_path)]) == 1
    assert "h200/x[0]: us is missing" in capsys.readouterr().out


def test_write_records_puts_one_on_a_line(tmp_path):
    write_records(tmp_path / "a" / "b.json", [{"us": 1.23456789, "n": 3}, {"us": None}])
    text = (tmp_path / "a" / "b.json").read_text()
    assert text == '[\n{"us": 1.2346, "n": 3},\n{"us": null}\n]\n'
    assert json.loads(text)[0]["us"] == 1.2346


def test_options_are_refused_by_name():
    with pytest.raises(MegaMoEValueError, match=r"--shapes: expected A, B, C or E,H,I,K, got 'Q'"):
        bench.bench_main(parse("--shapes", "Q"))
    with pytest.raises(MegaMoEValueError, match=r"--rounds: expected at least 1, got 0"):
        options = parse("--shapes", "A")
        options.rounds = 0
        bench.bench_main(options)
    with pytest.raises(MegaMoEValueError, match=r"--device: expected cpu.*, got 'cuda:99'"):
        options = parse("--shapes", "A")
        options.device = "cuda:99"
        bench.bench_main(options)
    with pytest.raises(MegaMoEValueError, match=r"--ranks: expected a divisor of 30 tokens and 4 experts, got 4"):
        bench.bench_main(parse("--shapes", "4,128,128,2", "--tokens", "30", "--ranks", "4"))
    with pytest.raises(
        MegaMoEValueError, match=r"--bench: expected of forward, .*, wgrad, wgrad13, wgrad2, requantize, stages, got"
    ):
        bench.bench_main(parse("--shapes", "4,128,128,2", "--bench", "sideways"))
    with pytest.raises(
        MegaMoEValueError, match=r"--backends: expected of cute, triton, torch, cute_wgrad_bf16, .* got 'x'"
    ):
        bench.bench_main(parse("--shapes", "4,128,128,2", "--backends", "x"))
    with pytest.raises(BackendUnavailable, match=r"--backends: none of cute runs this on cpu"):
        bench.bench_main(parse("--shapes", "4,128,128,2", "--backends", "cute"))
    assert bench.shape_names("A,B;8,256,128,2") == ["A", "B", "8,256,128,2"]


@pytest.mark.parametrize("experts, top_k, tokens", [(8, 2, 64), (6, 4, 31), (32, 8, 100), (5, 5, 7)])
def test_balanced_routing_is_balanced(experts, top_k, tokens):
    ids = draw_topk_ids(ProblemSpec((tokens,), 128, 128, experts, top_k, "balanced"), torch.Generator().manual_seed(0))
    counts = torch.bincount(ids.flatten(), minlength=experts)
    assert ids.shape == (tokens, top_k) and int(counts.max() - counts.min()) <= 1
    assert all(len(set(row)) == top_k for row in ids.tolist())


def test_a_wrong_result_has_no_time():
    problem = bench_problem.BenchProblem(ProblemSpec((16,), 128, 128, 4, 2), Recipe(), CPU)
    run = bench_problem.LayerRun("torch", problem, training=False)
    assert set(bench_problem.errors(problem, run, {"forward"}, training=False)["forward"]) == {"rel_l2_out"}
    problem.w2.mul_(-1)  # behind the quantised copies
    problem.forget_oracle()
    with pytest.raises(AssertionError, match=r"torch: out at -6\.\d dB, expected at least 21"):
        bench_problem.errors(problem, run, {"forward"}, training=False)


def test_timing_interleaves_in_changing_order():
    calls: list[str] = []
    variants = {name: lambda name=name: calls.append(name) for name in "abcd"}
    times = timing.time_variants(variants, CPU, rounds=6, sustained_s=0)
    rounds = [tuple(calls[i : i + 4]) for i in range(0, 24, 4)]
    assert all(sorted(order) == list("abcd") for order in rounds) and len(set(rounds)) > 3
    assert all(0 < t.us_min <= t.us <= t.us_max and t.us_sustained == t.us for t in times.values())


def test_the_clock_is_read_while_launches_are_made_back_to_back(monkeypatch):
    """A reading before or behind them is of an idle card."""
    state, calls = {"busy": False}, []
    original = timing._repeated

    def repeated(run, count, device):
        calls.append(count)
        state["busy"] = len(calls) > 2  # behind the rounds
        found = original(run, count, device)
        time.sleep(0.1)
        state["busy"] = False
        return found

    monkeypatch.setattr(timing, "_repeated", repeated)
    monkeypatch.setattr(timing, "clock_mhz", lambda device: 1700 if state["busy"] else 345)
    times = timing.time_variants({"a": lambda: None}, CPU, rounds=2, sustained_s=1e-4)
    assert times["a"].clock_mhz == 1700
    assert timing.time_variants({"a": lambda: None}, CPU, rounds=2, sustained_s=0)["a"].clock_mhz is None
    assert timing.median_clock([1500, 1980, 1975]) == 1975 and timing.median_clock([]) is None


def test_the_clock_is_that_of_the_device_and_not_of_its_number(monkeypatch):
    asked = []

    def query(command, **options):
        asked.append(command)
        return subprocess.CompletedProcess(command, 0, "1980\n")

    properties = types.SimpleNamespace(uuid="6c22c0ba-11aa-7e22-9d5c-0f2a9b1c3d4e")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(timing.subprocess, "run", query)
    assert timing.clock_mhz(torch.device("cuda", 0)) == 1980
    assert asked[0][-1] == "--id=GPU-6c22c0ba-11aa-7e22-9d5c-0f2a9b1c3d4e"


def test_bars_stack_the_stages_and_roofs_follow_the_dense_product(tmp_path):
    same = {"shape": "A", "T": 8, "routing": "uniform", "precision": "fp8", "gpu": "h200"}
    stages = {name: 100.0 for name in (*chart.FORWARD, *chart.BACKWARD)}
    records = [{"bench": b, "backend": "triton", "us": us, "tflops": None, **same} for b, us in stages.items()]
    records += [{"bench": "forward", "backend": "cute", "us": 500.0, "tflops": 1000.0, **same}]
    records += [{"bench": "dense_matmul", "backend": "torch", "us": 50.0, "tflops": 2000.0, **same}]
    found = dict(chart.bars(records))
    assert sum(t for _, t in found["forward\nTriton stages"]) == pytest.approx(0.1 * len(chart.FORWARD))
    assert dict(found["backward\nTriton stages"])["wgrad13"] == pytest.approx(0.1)
    assert found["forward\ncute"] == [("", 0.5)]
    assert chart.roofs(records) == {"forward": pytest.approx(0.25)}
    write_records(tmp_path / "h200" / "stages.json", [r for r in records if r["bench"] != "forward"])
    write_records(tmp_path / "h200" / "layer.json", [r | {"ranks": 1} for r in records if r["bench"] == "forward"])
    assert charts.main(tmp_path) == 0 and (tmp_path / "h200" / "layer-A.png").exists()


def test_environment_of_the_cpu():
    found = environment("torch", CPU)
    assert (found["gpu"], found["torch"], found["kernel_hash"]) == ("cpu", torch.__version__, None)
    assert gpu_name(CPU) == "cpu" and timing.clock_mhz(CPU) is None


def test_progress_reaches_the_end(capsys):
    progress = bench.Progress(4, "A")
    for i in range(4):
        progress(f"step {i}")
    assert capsys.readouterr().err.splitlines()[-1] == f"A [{'#' * 30}] 100% step 3"
