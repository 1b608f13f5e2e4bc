"""What `benchmarks/sanitize.py` makes of a checker's output: clean, found, failed, or not run with a reason."""

import json
import re
import runpy

import pytest

from benchmarks import sanitize
from benchmarks.records import RESULTS
from tests.support.source_tree import ROOT

RIGHT = "forward: equal to Triton by inf dB\n"


@pytest.mark.parametrize(
    ("output", "status", "says"),
    [
        (RIGHT + "========= ERROR SUMMARY: 0 errors\n", "clean", "0 errors"),
        (RIGHT + "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", "clean", "0 hazards"),
        (RIGHT + "========= RACECHECK SUMMARY: 3 hazards displayed (3 errors, 0 warnings)\n", "found", "3 hazards"),
        ("========= Invalid __global__ write\n========= ERROR SUMMARY: 10 errors\n" + RIGHT, "found", "10 errors"),
        ("Traceback\n========= ERROR SUMMARY: 0 errors\n", "failed", "not confirmed"),
        (RIGHT + "========= Error: Device not supported\n", "not run", "Device not supported"),
        ("", "not run", "said nothing"),
    ],
)
def test_what_the_output_says(output, status, says):
    found = sanitize.judge(output, "forward")
    assert found["status"] == status and says in json.dumps(found)
    if status in ("found", "failed"):
        assert found["reports"] and not any(line.startswith("=") for line in found["reports"])


def test_without_the_tool_nothing_is_run(monkeypatch, tmp_path):
    monkeypatch.setattr("shutil.which", lambda name: None)
    out = tmp_path / "sanitizer.json"
    monkeypatch.setattr("sys.argv", ["sanitize.py", "--out", str(out), "--tools", "memcheck", "--kernels", "forward"])
    assert sanitize.main() == 2, "nothing ran, so nothing was found to be right"
    (record,) = json.loads(out.read_text())
    assert (record["status"], record["reason"]) == ("not run", "compute-sanitizer is not installed")


@pytest.mark.parametrize(
    ("found", "status"),
    [(("clean", "clean"), 0), (("clean", "not run"), 0), (("clean", "found"), 1), (("failed", "not run"), 1)],
)
def test_the_exit_status_is_that_of_the_tools_that_ran(found, status, monkeypatch, tmp_path):
    left = list(found)
    monkeypatch.setattr(
        sanitize, "run", lambda tool, kernel, *_: {"tool": tool, "kernel": kernel, "status": left.pop()}
    )
    options = ["--out", str(tmp_path / "s.json"), "--tools", "memcheck", "--kernels", "forward,dgrad"]
    monkeypatch.setattr("sys.argv", ["sanitize.py", *options])
    assert sanitize.main() == status


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tools", "memcheck,lint"], "--tools: expected of memcheck, synccheck, racecheck, got 'memcheck,lint'"),
        (["--kernels", ""], "--kernels: expected of forward, dgrad, wgrad, ranks, got ''"),
        (["--at-once", "0"], "--at-once: expected at least 1, got 0"),
        (["--timeout", "nan"], "--timeout: expected at least 0, got nan"),
        (["--out", "/dev/null/s.json"], "--out: expected a file that can be written"),
    ],
)
def test_refusals(options, message, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("sys.argv", ["sanitize.py", "--out", str(tmp_path / "s.json"), *options])
    assert sanitize.main() == 2
    assert message in capsys.readouterr().err


def test_a_tool_that_does_not_end(monkeypatch, tmp_path):
    tool = tmp_path / "compute-sanitizer"
    tool.write_text("#!/bin/sh\nexec sleep 60\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = sanitize.run("memcheck", "forward", 0.5, "kns=kernel")
    assert (found["status"], found["reason"]) == ("not run", "not finished after 0.5 s")


def test_the_committed_records_cover_every_tool_and_kernel():
    records = json.loads((RESULTS / "h200" / "checks" / "sanitizer.json").read_text())
    assert {(r["tool"], r["kernel"]) for r in records} == {(t, k) for t in sanitize.TOOLS for k in sanitize.KERNELS}
    for r in records:
        if r["tool"] == "racecheck":
            assert r["status"] == "found", r
        else:
            assert (r["status"], r["summary"]) == ("clean", "0 errors"), r
    assert sanitize.WATCH in {r["watch"] for r in records}


FUSED = ("Error Write Read", "Error Write Read", "Error Read Write")
"""Of every fused launch: two pairs on the verdict, then todo, which is read before it is written."""
COPY = ("Warning Write Read",)
"""Of the copy of a weight gradient: its mbarrier."""
EXPLAINED = {"FusedForward": FUSED, "FusedBackward": FUSED, "QuantizeTransposed": COPY}
"""The pairs of accesses that docs/limits.md lists, by kernel."""
KERNELS = {
    "forward": ["FusedForward"],
    "dgrad": ["FusedForward", "FusedBackward"],
    "wgrad": ["FusedForward", *["QuantizeTransposed"] * 4, "FusedBackward"],
    "ranks": ["FusedForward"] * 2,
}
"""What a call launches."""


def pairs_of(reports: list[str]) -> list[tuple[str, str]]:
    """(kernel, severity and the two accesses) of every report of racecheck."""
    text = "\n".join(reports)
    found = re.findall(
        r"(\w+): Race reported between (\w+) access at (\S+)\+0x\w+\nand (\w+) access at (\S+)\+0x", text
    )
    assert len(found) == text.count("Race reported") and all(at == other for _, _, at, _, other in found)
    kernel = re.compile("|".join(EXPLAINED))
    return [(kernel.search(at).group(), f"{severity} {first} {second}") for severity, first, at, second, _ in found]


def test_racecheck_found_the_pairs_that_are_explained_and_no_other():
    records = json.loads((RESULTS / "h200" / "checks" / "sanitizer.json").read_text())
    for r in (r for r in records if r["tool"] == "racecheck"):
        want = [(kernel, pair) for kernel in KERNELS[r["kernel"]] for pair in EXPLAINED[kernel]]
        assert sorted(pairs_of(r["reports"])) == sorted(want), r["kernel"]
        assert r["summary"].startswith(f"{len(want)} hazards displayed")
    words = (ROOT / "docs" / "limits.md").read_text().split("racecheck reports")[1].split("Calls that are repeated")[0]
    assert re.findall(r"^\| ((?:verdict, two pairs|todo|the mbarrier)\b)", words, re.M) == [
        "verdict, two pairs", "todo", "the mbarrier",
    ]  # fmt: skip


def test_the_calls_can_be_imported_without_a_gpu():
    assert "main" in runpy.run_path(sanitize.__file__.replace("sanitize.py", "sanitize_calls.py"))
