"""`megamoe soak`: calls follow from their seeds, a difference between backends is found, and the record says so."""

import json

import pytest

from megamoe import torch_steps
from megamoe.cli import main
from megamoe.cli.soak import SIZES, draw

ON_CPU = ["soak", "--backend", "torch", "--against", "torch", "--device", "cpu", "--tokens", "20", "--sizes", "2"]


def test_calls_are_what_their_seeds_say():
    assert draw(5, 100) == draw(5, 100)
    drawn = [draw(seed, 100) for seed in range(200)]
    assert {d.spec.num_ranks for d in drawn} == {1, 2, 3, 4} and {d.save for d in drawn} == {
        "pool",
        "repull",
        "recompute",
    }
    assert {(d.spec.hidden, d.spec.intermediate) for d in drawn} == set(SIZES)
    assert any(0 in d.spec.num_tokens for d in drawn) and max(max(d.spec.num_tokens) for d in drawn) <= 100
    assert f"seed {drawn[7].spec.seed}:" in str(drawn[7])


def test_equal_backends_pass_and_are_recorded(tmp_path, capsys):
    record = tmp_path / "soak.json"
    assert main([*ON_CPU, "--calls", "4", "--seed", "11", "--out", str(record)]) == 0
    text = capsys.readouterr().out
    assert text.count("ok  seed") == 4 and "4 calls in" in text and "0 failed" in text
    found = json.loads(record.read_text())
    assert (found["first_seed"], found["calls"], found["failures"]) == (11, 4, [])


def test_a_difference_is_found(monkeypatch, capsys):
    calls, original = [], torch_steps.combine

    def wrong(*args, **kwargs):
        calls.append(1)
        out = original(*args, **kwargs)
        return out * 1.02 if len(calls) == 1 else out

    monkeypatch.setattr(torch_steps, "combine", wrong)
    seed = next(s for s in range(99) if min(draw(s, 20, 2).spec.num_tokens) > 5)
    assert main([*ON_CPU, "--calls", "1", "--seed", str(seed)]) == 1
    assert f"FAILED  seed {seed}" in capsys.readouterr().out


def test_an_error_is_a_finding_and_the_next_call_goes_on(monkeypatch, capsys):
    def refuse(*_, **__):
        raise RuntimeError("broken")

    monkeypatch.setattr(torch_steps, "combine", refuse)
    assert main([*ON_CPU, "--calls", "2"]) == 1
    assert capsys.readouterr().out.count("RuntimeError: broken") == 2


def test_no_time_is_no_success():
    assert main([*ON_CPU, "--minutes", "0"]) == 1


@pytest.mark.parametrize(
    ("option", "value", "match"), [("--tokens", "0", "at least 1, got 0"), ("--sizes", "9", "1 to 5, got 9")]
)
def test_options_that_are_refused(option, value, match, capsys):
    assert main([*ON_CPU, option, value]) == 1
    assert f"{option}: expected {match}" in capsys.readouterr().err
