"""The README's tables are the committed records, and the records are what they claim to be."""

import json

import pytest

from benchmarks import records, tables


def without_marks(text: str) -> str:
    """Kernels may change after a measurement; whether the mark is up to date is not compared."""
    lines = [line.replace(" (stale)", "") for line in text.splitlines() if not line.startswith("(stale)")]
    return "\n".join(line for line in lines if line)


def test_the_readme_shows_the_committed_records():
    text = tables.README.read_text()
    want = tables.filled(text, tables.render(records.load()))
    assert without_marks(text) == without_marks(want), "run `make tables`"


def test_the_committed_records_are_valid():
    wrong = [w for name, found in records.load().items() for w in records.validate(found, name)]
    assert not wrong, wrong


RECORD = {
    "bench": "forward",
    "shape": "A",
    "T": 8192,
    "routing": "uniform",
    "ranks": 1,
    "backend": "triton",
    "precision": "fp8",
    "us": 5000.0,
    "us_sustained": 5100.0,
    "us_min": 4900.0,
    "us_max": 5200.0,
    "tflops": 1100.0,
    "gpu": "NVIDIA H200",
    "clock_mhz": 1980,
    "torch": "2.11.0",
    "triton": "3.6.0",
    "cutlass_dsl": None,
    "commit": "abc",
    "kernel_hash": "0",
    "date": "2026-11-30T19:00:00",
}


def test_backends_stand_side_by_side(tmp_path, monkeypatch):
    (tmp_path / "h200").mkdir()
    found = [
        RECORD,
        {**RECORD, "backend": "cute", "us": 4800.0, "tflops": 1200.0, "ratio_to_triton": 1.04},
        {**RECORD, "routing": "zipf", "us": 5050.0},
        {**RECORD, "bench": "wgrad13"},
    ]
    (tmp_path / "h200" / "layer.json").write_text(json.dumps(found))
    (tmp_path / "h200" / "stages.json").write_text(json.dumps([RECORD]))
    lines = tables.render(records.load(tmp_path)).splitlines()
    assert lines[0] == ("NVIDIA H200: clock_mhz 1980, torch 2.11.0, triton 3.6.0, date 2026-11-30")
    head, _, uniform, zipf = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:6])
    assert head[:7] == ["bench", "shape", "T", "routing", "ranks", "precision", "cute (stale), µs"]
    assert uniform[:8] == ["forward", "A", "8192", "uniform", "1", "fp8", "4,800", "5,000"]
    assert uniform[8] == "1,200" and uniform[10] == "1.04x"
    assert zipf[6:9] == ["–", "5,050", "–"]
    assert "`benchmarks/results/h200/stages.json`" in lines[-1] and "wgrad13" not in "".join(lines)


def test_the_comparison_can_fail():
    text = f"a\n{tables.BEGIN}\n\n| x | 1 |\n\n{tables.END}\nb"
    assert tables.filled(text, "| x | 1 |") == text
    assert without_marks(tables.filled(text, "| x | 2 |")) != without_marks(text)
    with pytest.raises(ValueError):
        tables.filled("no marks", "")
