"""`megamoe trace`: its options; the launch itself needs a GPU."""

import argparse
import json

import pytest
import torch

from cute_kernels import trace as kernel_trace
from megamoe.cli import main, trace
from megamoe.cli.problem import SHAPES, Shape, shape_of, spread
from megamoe.errors import BackendUnavailable, MegaMoEValueError


def test_shapes():
    assert shape_of("--shape", "B") == SHAPES["B"]
    assert shape_of("--shape", "4,256,128,2") == Shape(4, 256, 128, 2, 8192)
    assert shape_of("--shape", "A", 100).num_tokens == 100
    assert spread(shape_of("--shape", "A"), 2).num_tokens == (4096, 4096)
    for text in ("4,256", "4,256,0,2", "4,256,-1,2", "Q", "", "4,256,128,2,"):
        with pytest.raises(MegaMoEValueError, match="--shape: expected A, B, C or E,H,I,K, got "):
            shape_of("--shape", text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ranks", "0"], "--ranks: expected a divisor of 8192 tokens and 32 experts, got 0"),
        (["--tokens", "5", "--ranks", "2"], "--ranks: expected a divisor of 5 tokens and 32 experts, got 2"),
        (["--tokens", "-5"], "--tokens: expected at least 1, got -5"),
        (["--routing", "odd"], "--routing: invalid choice: 'odd'"),
        (["--steal-us", "50"], "--steal-us: expected not to be given without --pass backward, got 50.0"),
        (["--delay-us", "50"], "--delay-us: expected not to be given without --pass backward, got 50"),
        (["--pass", "backward", "--steal-us", "50"], "--steal-us: expected not to be given with one rank, got 50.0"),
        (["--pass", "backward", "--ranks", "2", "--steal-us", "nan"], "--steal-us: expected 0 to 1000, got nan"),
        (["--pass", "backward", "--delay-us", "-1"], "--delay-us: expected 0 to 1000000, got -1"),
        (["--out", "/dev/null/trace"], "--out: expected a file that can be written, got '/dev/null/trace.json': "),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_refusals(options, message, capsys):
    try:
        status = main(["trace", *options])
    except SystemExit as stop:  # of the parser
        status = stop.code
    said = capsys.readouterr().err
    assert (status, said.count("\n")) == (2, 1) and said.startswith(f"megamoe trace: {message}")


@pytest.mark.parametrize(
    "options",
    [["--pass", "backward"], ["--routing", "zipf"], ["--steal-us", "50"], ["--delay-us", "9"], ["--ranks", "2"]],
    ids=" ".join,
)
def test_what_is_not_traced_over_processes_is_refused(options, monkeypatch, capsys):
    for name in ("RANK", "LOCAL_RANK", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["trace", *options]) == 2
    assert f"{options[0]}: expected not to be given under torchrun, got" in capsys.readouterr().err
    assert main(["trace", "--tokens", "5"]) == 2
    assert "--nproc-per-node: expected a divisor of 5 tokens and 32 experts, got 2" in capsys.readouterr().err


def test_writes_both_files_and_prints_shares(tmp_path, monkeypatch, capsys):
    event = kernel_trace.Event(0, 3, "math", "GEMM 1", 1000, 3000, 1, 2)
    wait = kernel_trace.Event(0, 3, "scheduler", "wait: rows of a block", 1000, 2000, 1, 0)
    monkeypatch.setattr(trace, "traced", lambda arguments: [event, wait])
    parser = argparse.ArgumentParser()
    trace.add_arguments(parser)
    assert trace.trace_main(parser.parse_args(["--out", str(tmp_path / "t.of.two")])) == 0
    assert json.loads((tmp_path / "t.of.two.json").read_text())[0]["name"] == "GEMM 1"
    assert (tmp_path / "t.of.two.png").stat().st_size > 1000
    printed = capsys.readouterr().out
    assert "scheduler     0.0%   50.0%   wait: rows of a block 50.0" in printed
    assert "math        100.0%    0.0%   GEMM 1 100.0" in printed


@pytest.mark.skipif(torch.cuda.is_available(), reason="what a machine without a GPU is told")
def test_says_that_it_needs_a_gpu(tmp_path):
    parser = argparse.ArgumentParser()
    trace.add_arguments(parser)
    with pytest.raises(BackendUnavailable, match="'cute' does not run this: it needs a Hopper GPU"):
        trace.trace_main(parser.parse_args(["--shape", "4,256,128,2", "--out", str(tmp_path / "t")]))
