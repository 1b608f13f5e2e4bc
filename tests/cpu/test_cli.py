"""The command line: what it prints, what it refuses, and the status it exits with."""

import json
import subprocess
import sys

import pytest

import megamoe
from megamoe.cli import COMMANDS, build_parser, main
from tests.support.source_tree import ROOT


@pytest.mark.parametrize("arguments,status", [([], 2), (["--help"], 0), (["-h"], 0)])
def test_help_names_every_command(arguments, status, capsys):
    assert main(arguments) == status
    text = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert f"  {name}" in text and command.summary in text


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"megamoe {megamoe.__version__}\n"


def test_unknown_commands_are_refused(capsys):
    assert main(["fly"]) == 2
    said = capsys.readouterr().err
    assert "command: expected one of verify" in said and said.count("\n") == 1


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_and_refuses_unknown_options(name, capsys):
    with pytest.raises(SystemExit) as stop:
        main([name, "--help"])
    assert stop.value.code == 0 and f"usage: megamoe {name}" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        main([name, "--wings", "2"])
    assert stop.value.code == 2
    assert build_parser(name).prog == f"megamoe {name}"


ODD = [
    ("verify", ["--tokens", "x"], "--tokens: expected integers separated by commas, got 'x'."),
    ("verify", ["--backend", "x"], "--backend: invalid choice: 'x'"),
    ("info", ["--hidden", "x"], "--hidden: invalid int value: 'x'. megamoe info --help tells its options."),
    ("info", ["--experts", "-1"], "--experts: expected a positive multiple of the 1 ranks, got -1."),
    ("plan", ["--tokens", "-1"], "--tokens: expected 0 or more, got -1."),
    ("plan", ["--ranks", "0"], "--ranks: expected a divisor of num_experts = 256, got 0."),
    ("plan", ["--hidden", "0"], "--hidden: expected a positive number of channels, got 0."),
    ("plan", ["--shared", "-1"], "--shared: expected 0 or more, got -1."),
    ("plan", ["--capacity", "0"], "--capacity: expected a positive multiple of 128, 'worst' or None, got 0."),
    ("plan", ["--steal-us", "nan"], "--steal-us: expected a number from 0 to 1000, got nan."),
    ("plan", ["--packed"], "--packed: expected False unless"),
    ("plan", ["--png", "/dev/null/x.png"], "--png: expected a file that can be written, got '/dev/null/x.png': "),
    ("bench", ["--rounds", "0"], "--rounds: expected at least 1, got 0."),
    ("bench", ["--sustained", "-1"], "--sustained: expected 0 to 3600, got -1.0."),
    ("bench", ["--shapes", ""], "--shapes: expected A, B, C or E,H,I,K, got ''."),
    ("bench", ["--tokens", "0"], "--tokens: expected at least 1, got 0."),
    ("bench", ["--ranks", "0"], "--ranks: expected a divisor of 8192 tokens and 32 experts, got 0."),
    ("bench", ["--bench", "x"], "--bench: expected of forward, "),
    ("bench", ["--backends", ""], "--backends: expected of cute, "),
    ("bench", ["--tokens-per-rank", "8"], "--tokens-per-rank: expected not to be given without torchrun, got 8."),
    ("bench", ["--device", "cpu", "--out", "/dev/null/x"], "--out: expected a file that can be written, got '/dev"),
    ("tune", ["--rounds", "-1"], "--rounds: expected at least 1, got -1."),
    ("tune", ["--wgrad", "", "--device", "cpu"], "--wgrad: expected 'inline', 'stream' or 'delayed', got ''."),
    ("soak", ["--calls", "-1"], "--calls: expected at least 1, got -1."),
    ("trace", ["--ranks", "-1"], "--ranks: expected a divisor of 8192 tokens and 32 experts, got -1."),
]


@pytest.mark.parametrize(("name", "options", "message"), ODD, ids=lambda v: v if isinstance(v, str) else " ".join(v))
def test_odd_options_are_refused_in_one_line(name, options, message, capsys):
    try:
        status = main([name, *options])
    except SystemExit as stop:  # of the parser
        status = stop.code
    said = capsys.readouterr()
    assert (status, said.out) == (2, "") and said.err.startswith(f"megamoe {name}: {message}"), said.err
    assert said.err.count("\n") == 1


def test_every_command_has_odd_options_above():
    assert {name for name, *_ in ODD} == set(COMMANDS)


def test_a_backend_that_does_not_run_here_is_no_wrong_option(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["verify", "--backend", "cute", "--device", "cpu"]) == 1
    assert "'cute' does not run this" in capsys.readouterr().err


def test_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "megamoe", "--version"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"megamoe {megamoe.__version__}\n")


def test_a_reader_that_leaves_early_sees_no_traceback():
    command = f"{sys.executable} -m megamoe info --json | head -n 1"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("{\n", "")


def test_info_says_what_runs_and_why_not(capsys):
    assert main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["megamoe"] == megamoe.__version__
    assert facts["packages"]["torch"] and set(facts["packages"]) >= {"triton", "nvidia-cutlass-dsl", "safetensors"}
    assert set(facts["backends"]) == {"torch", "triton", "cute", "auto"}
    assert facts["backends"]["auto"]["fp8"].removeprefix("takes ") in ("torch", "triton", "cute")
    assert facts["backends"]["torch"] == {"fp8": "runs", "bf16": "runs"}
    if not facts["devices"]:
        triton = facts["backends"]["triton"]["fp8"]
        assert triton == "runs" or "CUDA device" in triton or "not installed" in triton  # it runs where interpreted
        assert facts["backends"]["cute"]["fp8"] != "runs"
    assert main(["info", "--hidden", "320"]) == 0
    text = capsys.readouterr().out
    assert "H = 320, I = 2048" in text and "torch   fp8   runs" in text


def test_info_refuses_what_is_no_layer(capsys):
    assert main(["info", "--hidden", "0", "--top-k", "-1"]) == 2
    assert capsys.readouterr().err == (
        "megamoe info: --hidden: expected at least 1, got 0.\n--top-k: expected at least 1, got -1.\n"
    )


def test_info_names_what_is_missing(capsys, monkeypatch):
    from importlib.metadata import PackageNotFoundError

    from megamoe.cli import info

    def missing(package):
        raise PackageNotFoundError(package)

    monkeypatch.setattr(info.importlib.metadata, "version", missing)
    assert main(["info"]) == 0
    assert "nvidia-cutlass-dsl   not installed" in capsys.readouterr().out
