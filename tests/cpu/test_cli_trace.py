"""`megamoe trace`: its options; the launch itself needs a GPU."""

import argparse
import json

import pytest
import torch

from cute_kernels import trace as kernel_trace
from megamoe.cli import trace
from megamoe.cli.problem import SHAPES, Shape
from megamoe.errors import BackendUnavailable, MegaMoEValueError


def test_shapes():
    assert trace.shape_of("B", 0) == SHAPES["B"]
    assert trace.shape_of("4,256,128,2", 0) == Shape(4, 256, 128, 2, 8192)
    assert trace.shape_of("A", 100).num_tokens == 100
    with pytest.raises(MegaMoEValueError, match="--shape: expected A, B, C or E,H,I,K"):
        trace.shape_of("4,256", 0)


def test_writes_both_files_and_prints_shares(tmp_path, monkeypatch, capsys):
    event = kernel_trace.Event(0, 3, "math", "GEMM 1", 1000, 3000, 1, 2)
    wait = kernel_trace.Event(0, 3, "scheduler", "wait: rows of a block", 1000, 2000, 1, 0)
    monkeypatch.setattr(trace, "traced", lambda arguments: [event, wait])
    parser = argparse.ArgumentParser()
    trace.add_arguments(parser)
    assert trace.trace_main(parser.parse_args(["--out", str(tmp_path / "t")])) == 0
    assert json.loads((tmp_path / "t.json").read_text())[0]["name"] == "GEMM 1"
    assert (tmp_path / "t.png").stat().st_size > 1000
    printed = capsys.readouterr().out
    assert "scheduler     0.0%   50.0%   wait: rows of a block 50.0" in printed
    assert "math        100.0%    0.0%   GEMM 1 100.0" in printed


@pytest.mark.skipif(torch.cuda.is_available(), reason="what a machine without a GPU is told")
def test_says_that_it_needs_a_gpu():
    parser = argparse.ArgumentParser()
    trace.add_arguments(parser)
    with pytest.raises(BackendUnavailable, match="'cute' does not run this: it needs a Hopper GPU"):
        trace.trace_main(parser.parse_args(["--shape", "4,256,128,2"]))
