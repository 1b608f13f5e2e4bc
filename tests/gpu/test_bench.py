"""`megamoe bench` on a GPU, at a small size: every row of the records, checked before it is timed."""

from __future__ import annotations

import argparse
import json

import pytest
import torch

from benchmarks import records as committed
from benchmarks import stealing
from megamoe.backends import Problem, why_not
from megamoe.cli import bench
from megamoe.recipe import Recipe

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_every_bench_of_every_backend(precision, tmp_path):
    asked = ["triton"] if precision == "bf16" else bench.BIG.split(",")
    problem = Problem.of(torch.device("cuda"), Recipe(precision), 256, 128, num_experts=8, top_k=2)
    names = [name for name in asked if why_not(name.split("_")[0], problem) is None]
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    options = ["--shapes", "8,256,128,2", "--tokens", "512", "--rounds", "2", "--sustained", "0.001", "--no-charts"]
    options += ["--backends", ",".join(names), "--precision", precision, "--out", str(tmp_path)]
    assert bench.bench_main(parser.parse_args(options)) == 0
    found = [record for file in committed.load(tmp_path).values() for record in file]
    assert committed.validate(found) == []
    rows = {(r["bench"], r["backend"]) for r in found}
    for name in names:
        same = {"forward", "dgrad", "requantize", "fwd_bwd_requantized"} if name.endswith("bf16") else set()
        assert {b for b, backend in rows if backend == name} >= {*bench.PASSES, *bench.PARTS} - same
    torch_rows = {b for b, backend in rows if backend == "torch_grouped_mm"}
    assert torch_rows >= {"wgrad", "wgrad13", "wgrad2"} | ({"gemms", "gemms_fwd_bwd"} if precision == "bf16" else set())
    assert all(r["graph"] for r in found if r["bench"] in bench.PASSES), "one rank is timed as a graph"


def test_stealing_is_measured_with_the_same_bits(tmp_path):
    """The GPU's part of `benchmarks/stealing.py`: the four steps run, and none has other bits."""
    problem = Problem.of(torch.device("cuda"), Recipe(), 256, 128, num_experts=8, top_k=2, num_ranks=2, world="local")
    if reason := why_not("cute", problem):
        pytest.skip(reason)
    out = tmp_path / "stealing.json"
    assert stealing.main(["--out", str(out), "--shape", "8,256,128,2", "--ranks", "2", "--rounds", "2"]) == 0
    found = json.loads(out.read_text())
    assert [(r["step"], r["delay_us"]) for r in found] == [(m.fields()["step"], m.delay_us) for m in stealing.MODES]
    assert all(0 < r["ms_until_dx"] < r["ms"] and r["same_bits"] for r in found)
    assert found[1]["ms_until_dx"] > found[0]["ms_until_dx"] + 0.5, "rows of dX are a millisecond late"
