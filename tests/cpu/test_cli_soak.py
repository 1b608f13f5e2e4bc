"""`megamoe soak`: calls follow from their seeds, a difference between backends is found, and the record says so."""

import json
import subprocess
import sys

import pytest
import torch

from megamoe import torch_steps
from megamoe.cli import main, soak_calls
from megamoe.cli.records import environment
from megamoe.cli.soak import SEEDS_A_PROCESS, merge
from megamoe.cli.soak_calls import RECIPES, SIZES, draw, problem_of, rows_needed
from megamoe.cli.stages import have_same_bits
from megamoe.gates import sqnr_db
from tests.support.source_tree import ROOT

ON_CPU = ["soak", "--backend", "torch", "--against", "torch", "--device", "cpu", "--tokens", "20", "--sizes", "1"]


def test_calls_are_what_their_seeds_say():
    assert draw(5, 100) == draw(5, 100)
    drawn = [draw(seed, 100) for seed in range(400)]
    assert {d.spec.num_ranks for d in drawn} == {1, 2, 3, 4} and {d.save for d in drawn} == {
        "pool",
        "repull",
        "recompute",
    }
    assert {(d.spec.hidden, d.spec.intermediate) for d in drawn} == set(SIZES)
    assert {d.recipe for d in drawn} == set(RECIPES) and {d.overlap.wgrad for d in drawn} == {
        "inline",
        "stream",
        "delayed",
    }
    assert any(0 in d.spec.num_tokens for d in drawn) and max(max(d.spec.num_tokens) for d in drawn) <= 100
    traits = {trait for d in drawn for trait in d.traits()}
    assert {"an empty rank", "ids all -1 on a rank", "no backward", "some gradients only", "against one rank"} <= traits
    assert {"capacity=worst", "capacity=exact", "capacity=none", "called twice", "routing=masked", "steal_us"} <= traits
    assert f"seed {drawn[7].spec.seed}:" in str(drawn[7])


def test_idle_ranks_and_exact_capacity():
    seed = next(s for s in range(999) if (d := draw(s, 50)).idle is not None and d.spec.num_tokens[d.idle])
    drawn = draw(seed, 50)
    problem = problem_of(drawn, torch.device("cpu"))
    assert (problem.topk_ids[drawn.idle] == -1).all() and problem.topk_ids[0].dtype == drawn.ids
    assert rows_needed(problem) % 128 == 0


def test_equal_backends_pass_and_are_recorded(tmp_path, capsys):
    record = tmp_path / "soak.json"
    assert main([*ON_CPU, "--calls", "6", "--seed", "11", "--out", str(record)]) == 0
    text = capsys.readouterr().out
    assert text.count("ok  seed") == 6 and "6 calls in" in text and "0 failed" in text
    found = json.loads(record.read_text())
    assert (found["seeds"], found["calls"], found["failures"], found["processes"]) == ([[11, 16]], 6, [], 1)
    assert found["covered"]["H=256"] == 6 and found["equal_bits"]["out"] == 6


def make_wrong(monkeypatch, is_wrong):
    calls, original = [], torch_steps.combine

    def wrong(*args, **kwargs):
        calls.append(1)
        out = original(*args, **kwargs)
        return out * 1.02 if is_wrong(len(calls)) else out

    monkeypatch.setattr(torch_steps, "combine", wrong)


def test_a_difference_ends_the_run_with_the_command_that_repeats_it(monkeypatch, capsys):
    make_wrong(monkeypatch, lambda n: n == 1)
    seed = next(s for s in range(99) if min(draw(s, 20, 1).spec.num_tokens) > 5)
    assert main([*ON_CPU, "--calls", "5", "--seed", str(seed)]) == 1
    text = capsys.readouterr().out
    assert text.count("FAILED  seed") == 1 and "ok " not in text
    assert f"again: python -m megamoe soak --backend torch --against torch --tokens 20 --sizes 1 --seed {seed}" in text


@pytest.mark.parametrize(("trait", "said"), [("is_again", "called again"), ("is_on_one", "on one rank")])
def test_other_bits_are_found(monkeypatch, capsys, trait, said):
    seed = next(
        s for s in range(999)
        if getattr(d := draw(s, 20, 1), trait) and sum(d.spec.num_tokens) > 5 and d.idle is None and not any(d.needs)
        and not (d.is_again and d.is_on_one) and d.spec.routing != "masked"
    )  # fmt: skip
    ranks = draw(seed, 20, 1).spec.num_ranks
    make_wrong(monkeypatch, lambda n: n == 2 * ranks + 1)  # the first combine of the third run
    assert main([*ON_CPU, "--calls", "1", "--seed", str(seed)]) == 1
    assert f"other bits {said}: out" in capsys.readouterr().out


def test_an_error_is_a_finding(monkeypatch, capsys):
    def refuse(*_, **__):
        raise RuntimeError("broken")

    monkeypatch.setattr(torch_steps, "combine", refuse)
    assert main([*ON_CPU, "--calls", "2", "--keep-going"]) == 1
    assert capsys.readouterr().out.count("RuntimeError: broken") == 2


def test_processes_at_once_have_seeds_of_their_own(tmp_path):
    record = tmp_path / "soak.json"
    assert main([*ON_CPU, "--calls", "2", "--seed", "3", "--processes", "2", "--out", str(record)]) == 0
    found = json.loads(record.read_text())
    assert found["seeds"] == [[3, 4], [3 + SEEDS_A_PROCESS, 4 + SEEDS_A_PROCESS]]
    assert (found["processes"], found["calls"], found["processes_without_record"]) == (2, 4, 0)
    assert found["process_seconds"] > 0 and found["wall_seconds"] > 0


def test_a_process_that_is_asked_to_end_writes_its_record(tmp_path):
    record = tmp_path / "soak.json"
    command = [sys.executable, "-m", "megamoe", *ON_CPU, "--minutes", "5", "--out", str(record)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None and process.stdout.readline().startswith("ok")
    process.terminate()
    rest = process.stdout.read()
    assert process.wait(timeout=60) == 0
    assert json.loads(record.read_text())["calls"] == 1 + rest.count("ok  seed")


def test_merged_records_hide_nothing():
    one = {
        "seeds": [[0, 9]], "calls": 10, "process_seconds": 5.0, "failures": [], "covered": {"R=1": 10},
        "lowest_sqnr_db": {"out": None, "dx": 50.0}, "equal_bits": {"out": 10},
    }  # fmt: skip
    other = one | {"calls": 4, "lowest_sqnr_db": {"out": 60.0, "dx": None}, "failures": ["seed 7: bad"]}
    merged = merge([one, other, None, None], [0, 1, -15, 2], 6.0, ended=[2])
    assert (merged["calls"], merged["process_seconds"], merged["wall_seconds"]) == (14, 10.0, 6.0)
    assert merged["lowest_sqnr_db"] == {"out": 60.0, "dx": 50.0} and merged["covered"] == {"R=1": 20}
    assert (merged["processes"], merged["processes_without_record"]) == (4, 2)
    assert merged["failures"] == ["seed 7: bad", "process 3 died with status 2 and left no record"]
    assert merge([None], [1], 1.0)["failures"] and merge([None], [-15], 1.0, [0])["calls"] == 0


def test_a_process_that_dies_is_a_failure_whatever_it_died_of():
    one = {
        "seeds": [[0, 9]], "calls": 10, "process_seconds": 5.0, "failures": [], "covered": {},
        "lowest_sqnr_db": {}, "equal_bits": {},
    }  # fmt: skip
    lost = "process 1 died with status {} and left no record"
    for status in (-11, -6, -9, -15, 0, 1):
        assert merge([one, None], [0, status], 1.0)["failures"] == [lost.format(status)]
    assert merge([one, None], [0, -11], 1.0, ended=[1])["failures"] == [lost.format(-11)], (
        "told to end, but not by that"
    )
    for status in (-15, -9):
        assert merge([one, None], [0, status], 1.0, ended=[1])["failures"] == []
    assert merge([one, one], [-11, 1], 1.0)["failures"] == ["process 0 died with status -11 behind its record"]


def test_a_process_that_crashes_is_the_exit_status(tmp_path, monkeypatch, capsys):
    """The parent alone knows: a crash writes nothing."""
    real = subprocess.Popen

    def crash(command, **options):
        seed = command[command.index("--seed") + 1]
        return real(["sh", "-c", "kill -SEGV $$"] if seed == "0" else command, **options)

    monkeypatch.setattr(subprocess, "Popen", crash)
    record = tmp_path / "soak.json"
    assert main([*ON_CPU, "--calls", "1", "--processes", "2", "--keep-going", "--out", str(record)]) == 1
    assert json.loads(record.read_text())["failures"] == ["process 0 died with status -11 and left no record"]
    assert "1 failed" in capsys.readouterr().out


def test_equal_values_are_not_equal_bytes():
    a, b = torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])
    assert sqnr_db(a, b) == float("inf") and not have_same_bits(a, b) and have_same_bits(a, a.clone())
    nan = torch.full((2,), float("nan"))
    assert have_same_bits(nan, nan.clone())


def test_a_record_counts_equal_bytes_and_says_where_it_is_from(tmp_path, monkeypatch):
    """0 for -0: the values are those of the other backend, the bytes are not."""
    seed = next(s for s in range(99) if not (d := draw(s, 20, 1)).is_again and not d.is_on_one)
    monkeypatch.setattr(soak_calls, "results", lambda problem, drawn, backend: {
        "out": torch.tensor([-0.0 if backend == "triton" else 0.0]), "dx": torch.ones(2),
    })  # fmt: skip
    record, options = tmp_path / "soak.json", ["--calls", "1", "--seed", str(seed), "--against", "triton"]
    assert main([*ON_CPU, *options, "--out", str(record)]) == 0
    found = json.loads(record.read_text())
    assert found["equal_bits"] == {"dx": 1} and found["lowest_sqnr_db"] == {"out": None, "dx": None}
    assert environment("torch", torch.device("cpu")).items() <= found.items()


def test_no_time_is_no_success():
    assert main([*ON_CPU, "--minutes", "0"]) == 1


@pytest.mark.parametrize(
    ("option", "value", "match"),
    [
        ("--tokens", "0", "at least 1, got 0"),
        ("--sizes", "9", "1 to 5, got 9"),
        ("--calls", "0", "at least 1, got 0"),
        ("--device", "bogus", "cpu, cuda or cuda:N, got 'bogus'"),
        ("--processes", "0", "1 to 64, got 0"),
        ("--minutes", "-1", "at least 0, got -1.0"),
        ("--minutes", "nan", "at least 0, got nan"),
        ("--seed", "-1", "0 to 9223372036854775807, got -1"),
        ("--out", "/dev/null/soak.json", "a file that can be written, got '/dev/null/soak.json': "),
    ],
)
def test_options_that_are_refused(option, value, match, capsys):
    assert main([*ON_CPU, option, value]) == 2
    assert f"{option}: expected {match}" in capsys.readouterr().err


def test_a_backend_that_does_not_run_here_is_refused_once(capsys):
    assert main(["soak", "--backend", "cute", "--against", "torch", "--calls", "3"]) == 1
    said = capsys.readouterr()
    assert "backend: 'cute' does not run this" in said.err and "FAILED" not in said.out + said.err
