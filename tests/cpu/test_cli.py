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
    assert "command: expected one of verify" in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_and_refuses_unknown_options(name, capsys):
    with pytest.raises(SystemExit) as stop:
        main([name, "--help"])
    assert stop.value.code == 0 and f"usage: megamoe {name}" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        main([name, "--wings", "2"])
    assert stop.value.code == 2
    assert build_parser(name).prog == f"megamoe {name}"


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
    assert main(["info", "--hidden", "0", "--top-k", "-1"]) == 1
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
