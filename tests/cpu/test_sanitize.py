"""What `benchmarks/sanitize.py` makes of a checker's output: clean, found, failed, or not run with a reason."""

import json
import runpy

import pytest

from benchmarks import sanitize
from benchmarks.records import RESULTS

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
    assert sanitize.main() == 0
    (record,) = json.loads(out.read_text())
    assert (record["status"], record["reason"]) == ("not run", "compute-sanitizer is not installed")


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
        assert r["status"] == "clean" or r["tool"] == "racecheck" or r.get("reason"), r
    assert sanitize.WATCH in {r["watch"] for r in records}


def test_the_calls_can_be_imported_without_a_gpu():
    assert "main" in runpy.run_path(sanitize.__file__.replace("sanitize.py", "sanitize_calls.py"))
