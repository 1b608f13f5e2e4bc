"""`benchmarks/stealing.py` but for the GPU's part: which steps, in which order, what a record says, what is refused."""

import json

import pytest
import torch

from benchmarks import stealing
from benchmarks.records import RESULTS
from megamoe.cli.records import environment

FIGURES = ("shape", "T", "ranks", "step", "delay_us", "steal_us", "ms", "ms_until_dx", "samples_ms", "same_bits")


class Steps:
    """Stands for the GPU: a step takes longer where it is late, less where it steals."""

    def __init__(self, wrong: stealing.Mode | None = None) -> None:
        self.wrong, self.made = wrong, []

    def step(self, mode: stealing.Mode) -> tuple[float, float]:
        self.made.append(mode)
        late = mode.delay_us / 1000
        return 5 + late, 10 + late * (0.1 if mode.is_stealing else 1) + len(self.made) / 1000

    def results(self) -> list[torch.Tensor]:
        return [torch.zeros(3), torch.tensor([-0.0 if self.made[-1] == self.wrong else 0.0])]


def test_every_round_makes_every_step_in_changing_order():
    steps = Steps()
    found = list(stealing.measured(steps.step, steps.results, 6))
    rounds = [tuple(steps.made[i : i + 4]) for i in range(5, 29, 4)]
    assert len(steps.made) == 29 and all(set(order) == set(stealing.MODES) for order in rounds)
    assert len(set(rounds)) > 2
    plain, late, stolen, both = found
    assert (plain["step"], late["delay_us"], stolen["steal_us"], both["step"]) == (
        "dgrad, then wgrad", 1000, 50, "stealing",
    )  # fmt: skip
    assert late["ms_until_dx"] == 6.0 and len(late["samples_ms"]) == 6
    assert late["ms"] - plain["ms"] > 0.9 and both["ms"] - stolen["ms"] < 0.2


@pytest.mark.parametrize("mode", stealing.MODES[1:], ids=str)
def test_other_bits_have_no_time(mode):
    steps = Steps(wrong=mode)
    with pytest.raises(AssertionError, match=r"other bits than the plain step in tensors \[1\]"):
        list(stealing.measured(steps.step, steps.results, 2))


def test_records_say_where_they_were_taken_and_are_those_that_are_committed(tmp_path, capsys):
    out = tmp_path / "h200" / "checks" / "stealing.json"

    def measure(spec, rounds):
        assert (spec.hidden, spec.num_experts, sum(spec.num_tokens), rounds) == (7168, 32, 8192, 14)
        steps = Steps()
        return list(stealing.measured(steps.step, steps.results, rounds))

    assert stealing.main(["--out", str(out)], measure) == 0
    assert "4 ranks, 1000 us late stealing" in capsys.readouterr().out
    records = json.loads(out.read_text())
    assert all(tuple(r)[: len(FIGURES)] == FIGURES for r in records)
    here = environment("cute", torch.device("cpu"))
    assert here["commit"] and here["kernel_hash"] and all(here.items() <= r.items() for r in records)
    committed = json.loads((RESULTS / "h200" / "checks" / "stealing.json").read_text())
    which = ("shape", "T", "ranks", "step", "delay_us", "steal_us")
    assert [[r[f] for f in which] for r in records] == [[r[f] for f in which] for r in committed]
    assert all(set(FIGURES) <= set(r) for r in committed)


def test_a_failed_step_is_the_exit_status(tmp_path, capsys):
    def measure(spec, rounds):
        raise AssertionError("other bits")

    assert stealing.main(["--out", str(tmp_path / "s.json")], measure) == 1
    assert capsys.readouterr().err == "stealing: other bits\n" and not (tmp_path / "s.json").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rounds", "0"], "--rounds: expected at least 1, got 0."),
        (["--ranks", "3"], "--ranks: expected a divisor of 8192 tokens and 32 experts, got 3."),
        (["--ranks", "1"], "--ranks: expected at least 2 ranks, got 1. One has nothing to wait for."),
        (["--ranks", "two"], "--ranks: expected integers separated by commas, got 'two'."),
        (["--shape", "Q"], "--shape: expected A, B, C or E,H,I,K, got 'Q'."),
        (["--out", "/dev/null/s.json"], "--out: expected a file that can be written, got '/dev/null/s.json': "),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_refusals(options, message, tmp_path, capsys):
    assert stealing.main(["--out", str(tmp_path / "s.json"), *options]) == 2
    assert capsys.readouterr().err.startswith(f"stealing: {message}")


@pytest.mark.skipif(torch.cuda.is_available(), reason="what a machine without a GPU is told")
def test_says_that_it_needs_a_gpu(tmp_path, capsys):
    assert stealing.main(["--out", str(tmp_path / "s.json")]) == 2
    assert "'cute' does not run this: it needs a Hopper GPU" in capsys.readouterr().err
