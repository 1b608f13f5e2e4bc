"""`megamoe tune`: what it searches, what it refuses to take, whose time counts, and the file that it writes."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from megamoe import MegaMoE, MoEConfig, OverlapConfig, Recipe
from megamoe.cli import build_parser, main, tune
from megamoe.errors import MegaMoEValueError
from megamoe.overlap import OverlapKey, read_overlap
from tests.support.distributed import run_ranks
from tests.support.source_tree import ROOT

CPU = torch.device("cpu")
SPACE = {"wgrad": ["inline", "stream"], "reserve_sms": [0, 4], "lag": [0, 8, 32], "pull_batch": [0, 2]}
SMALL = ["--shape", "8,128,64,2", "--tokens", "12", "--device", "cpu", "--rounds", "1"]


class Kernels:
    """Stands for steps and their timer: a table of costs; every setting computes the same, unless it is `wrong`."""

    def __init__(
        self,
        costs: dict[str, float],
        wrong: tuple[str, ...] = (),
        refused: tuple[str, ...] = (),
        drift: float = 0.0,
        luck: str = "",
    ) -> None:
        self.costs, self.wrong, self.refused, self.drift, self.luck = costs, wrong, refused, drift, luck
        self.timed: list[list[str]] = []

    def step(self, overlap: OverlapConfig) -> dict[str, torch.Tensor]:
        if str(overlap) in self.refused:
            raise ValueError("shared memory: needs 300000 bytes, a CTA has 232448")
        return {"out": torch.full((3,), 2.0 if str(overlap) in self.wrong else 1.0).bfloat16()}

    def timer(self, variants, device, rounds, progress) -> dict[str, float]:
        for run in variants.values():
            run()
        self.timed.append(list(variants))
        warm = 1 + self.drift * len(self.timed)
        lucky = {self.luck: 90.0} if rounds == 1 else {}
        return {name: warm * lucky.get(name, self.costs.get(name, 100.0)) for name in variants}

    def search(self, **options):
        return tune.search(self.step, SPACE, CPU, rounds=1, timer=self.timer, **options)


def test_each_field_is_searched_with_the_best_of_those_before():
    kernels = Kernels({"wgrad=stream": 90.0, "wgrad=stream, lag=8": 80.0, "wgrad=stream, lag=8, pull_batch=2": 70.0})
    best, rows = kernels.search()
    assert best == OverlapConfig("stream", lag=8, pull_batch=2)
    assert kernels.timed[1] == ["defaults", "wgrad=stream", "wgrad=stream, reserve_sms=4"]
    assert kernels.timed[-1] == ["defaults", "wgrad=stream, lag=8, pull_batch=2"] and rows[-1].note == "again: taken"
    assert {str(row.overlap): row.us for row in rows}["wgrad=stream, lag=32"] == 100.0


def test_a_gain_within_the_noise_changes_nothing():
    kernels = Kernels({"wgrad=stream": 99.6, "lag=8": 99.4})
    assert kernels.search(least_gain=0.005)[0] == OverlapConfig(lag=8)
    assert kernels.search(least_gain=0.01)[0] == OverlapConfig()


def test_a_card_that_slows_down_decides_nothing():
    """Settings are compared within a run: a later run is slower as a whole."""
    best, rows = Kernels({"wgrad=stream": 97.0, "wgrad=stream, lag=8": 95.0}, drift=0.1).search()
    assert best == OverlapConfig("stream", lag=8)
    assert {round(row.us / row.us_default, 2) for row in rows if str(row.overlap) == "wgrad=stream"} == {0.97}


def test_luck_is_found_out_in_the_end():
    best, rows = Kernels({}, luck="lag=8").search()
    assert best == OverlapConfig()
    assert [row.note for row in rows if str(row.overlap).startswith("lag=8")][
        -1
    ] == "again: no gain, the defaults are kept"


def test_what_changes_a_bit_is_never_taken():
    kernels = Kernels({"lag=8": 1.0}, wrong=("lag=8",))
    best, rows = kernels.search()
    assert best == OverlapConfig() and not any("lag=8" in names for names in kernels.timed)
    assert [(row.us, row.note) for row in rows if str(row.overlap) == "lag=8"] == [(None, "other bits")]


def test_a_setting_with_other_bits_runs_as_often_as_on_ranks_where_it_has_none():
    """A rank that found them at once would meet its peers in another collective than theirs."""
    kernels, made = Kernels({}, wrong=("lag=8",)), []
    counted = lambda overlap: made.append(str(overlap)) or kernels.step(overlap)  # noqa: E731
    tune.search(counted, {"lag": [0, 8, 32]}, CPU, rounds=1, timer=lambda v, *_: dict.fromkeys(v, 1.0))
    assert (made.count("lag=8"), made.count("lag=32")) == (2, 2)


def test_what_does_not_fit_is_named_and_left_out():
    kernels = Kernels({}, refused=("pull_batch=2",))
    _, rows = kernels.search()
    assert [row.note for row in rows if row.overlap.pull_batch] == [
        "refused: shared memory: needs 300000 bytes, a CTA " + "has 232448"
    ]


def test_digests_tell_bits_apart():
    a = torch.randn(1000).bfloat16()
    b, c = a.clone(), a.clone()
    b[[3, 4]] = b[[4, 3]]
    c[7] = -c[7]
    assert tune.digest({"a": a}) == tune.digest({"a": a.clone()})
    assert tune.digest({"a": a}) != tune.digest({"a": b}) and tune.digest({"a": a}) != tune.digest({"a": c})
    assert tune.digest({"a": torch.zeros(0)}) == {"a": (0, 0)}


def _rank(rank: int) -> tuple[str, list[tuple[str, float | None, str]]]:
    import torch.distributed as dist

    costs = {"wgrad=stream": 50.0 if rank == 0 else 150.0, "lag=8": 95.0, "lag=32": 60.0 if rank else 99.0}
    kernels = Kernels(costs, wrong=("pull_batch=2", "lag=8, pull_batch=2") if rank else ())
    best, rows = kernels.search(group=dist.group.WORLD)
    return str(best), [(str(row.overlap), row.us, row.note) for row in rows]


def test_the_slowest_rank_counts_and_all_agree():
    first, second = run_ranks(_rank, 2)
    assert first == second
    best, rows = first
    assert best == "lag=8"
    assert ("wgrad=stream", 150.0, "") in rows and ("lag=32", 99.0, "") in rows
    assert ("lag=8, pull_batch=2", None, "other bits") in rows


def test_the_command_writes_what_the_layer_reads(tmp_path, capsys):
    out = tmp_path / "tuned" / "overlap.json"
    args = build_parser("tune").parse_args([*SMALL, "--wgrad", "inline,stream,delayed", "--out", str(out)])
    costs = {"defaults": 100.0, "wgrad=stream": 90.0, "wgrad=delayed": 60.0}
    assert tune.tune_main(args, Kernels(costs).timer) == 0
    text = capsys.readouterr().out
    assert "E=8 H=128 I=64 K=2 T=12 uniform R=1, backend torch on cpu" in text
    assert "wgrad=delayed" in text and "-40.0%" in text and "40.0% faster than the defaults" in text
    key = OverlapKey.of(CPU, (8, 128, 64, 2), 1, Recipe())
    assert read_overlap(out, key) == OverlapConfig("delayed")
    layer = MegaMoE(MoEConfig(128, 64, 8, 2), overlap=out, device="cpu")
    assert layer.experts.context.overlap.wgrad == "delayed"
    (entry,) = json.loads(out.read_text())["settings"]
    assert (entry["us"], entry["us_default"], entry["tokens"], entry["backend"]) == (60.0, 100.0, 12, "torch")


def test_real_steps_over_virtual_ranks(tmp_path, capsys):
    """No stand-in: the torch path under a clock; a second run replaces nothing of other layers."""
    out = tmp_path / "overlap.json"
    assert main(["tune", *SMALL, "--out", str(out)]) == 0
    assert main(["tune", *SMALL, "--ranks", "2", "--routing", "zipf", "--out", str(out)]) == 0
    assert {entry["ranks"] for entry in json.loads(out.read_text())["settings"]} == {1, 2}
    assert "reserve_sms" not in capsys.readouterr().out  # only fused kernels have it


@pytest.mark.parametrize(
    "options, match",
    [
        (["--ranks", "5"], "--ranks: expected a divisor of 12 tokens and 8 experts, got 5"),
        (["--wgrad", "inline,never"], "--wgrad: expected 'inline', 'stream' or 'delayed', got 'never'"),
        (["--clamp", "-1"], "--clamp: expected a positive finite limit or None, got -1.0"),
        (["--rounds", "0"], "--rounds: expected at least 1, got 0"),
        (["--shape", "8,128"], "megamoe tune: --shape: expected A, B, C or E,H,I,K, got '8,128'"),
        (["--tokens", "0"], "--tokens: expected at least 1, got 0"),
        (["--least-gain", "nan"], "--least-gain: expected 0 to 100, got nan"),
        (["--lag", "0,many"], "--lag: expected integers separated by commas, got '0,many'"),
        (["--steal-us", "-1"], "--steal-us: expected a number from 0 to 1000, got -1.0"),
        (["--out", "/dev/null/overlap.json"], "--out: expected a file that can be written, got"),
        (["--out", str(ROOT / "pyproject.toml")], "--out: expected a file that megamoe tune wrote, got"),
    ],
)
def test_refusals(options, match, capsys):
    assert main(["tune", *SMALL, *options]) == 2
    assert match in capsys.readouterr().err


def test_values_of_fused_kernels_are_checked_before_anything_runs():
    args = build_parser("tune").parse_args([*SMALL, "--lag", "0,-8"])
    with pytest.raises(MegaMoEValueError, match="--lag: expected an integer from 0 to 1024, got -8"):
        tune.space_of(args, is_fused=True, ranks=1)
    names = {field.name for field in dataclasses.fields(OverlapConfig)}
    args = build_parser("tune").parse_args(SMALL)
    assert set(tune.space_of(args, is_fused=True, ranks=2)) == names
    assert set(tune.space_of(args, is_fused=True, ranks=1)) == names - {"steal_us"}
    assert set(tune.space_of(args, is_fused=False, ranks=2)) == {"wgrad"}
    with pytest.raises(MegaMoEValueError, match="--steal-us: expected numbers separated by commas, got 'some'"):
        tune.space_of(build_parser("tune").parse_args(["--steal-us", "some"]), is_fused=False, ranks=1)
