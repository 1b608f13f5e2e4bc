"""The README's tables, from the committed records: `make tables` writes them, a test compares.

python -m benchmarks.tables             rewrites what stands between the two marks in README.md
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.records import FIGURES, is_stale, load
from megamoe.cli.records import Record

README = Path(__file__).resolve().parents[1] / "README.md"
BEGIN, END = "<!-- records: written by `make tables` -->", "<!-- end of records -->"
SETTING = ("clock_mhz", "torch", "triton", "cutlass_dsl", "date")
"""What is said once, above a table."""
CALL = ("bench", "shape", "T", "routing", "ranks", "precision")
"""What tells one measured call from another; backends stand side by side."""
WHOLE = ("forward", "backward", "fwd_bwd", "fwd_bwd_requantized")
"""The benches of whole passes, which the README shows; their parts are in the files."""
ORDER = ("cute", "triton", "cute_wgrad_bf16", "triton_wgrad_bf16")


def render(everything: Mapping[str, Sequence[Record]]) -> str:
    """The records of whole passes of layers as Markdown tables; the files by name."""
    if not any(everything.values()):
        return "No record is committed yet: nothing has been measured."
    shown = [name for name, records in sorted(everything.items()) if name.endswith("/layer") and records]
    files = [f"`benchmarks/results/{name}.json`" for name in sorted(everything)]
    parts = [_section(name, [r for r in everything[name] if r["bench"] in WHOLE]) for name in shown]
    parts.append(f"All of it, with every stage: {', '.join(files)}; `python -m benchmarks.records` prints them.")
    return "\n\n".join(parts)


def _section(name: str, records: Sequence[Record]) -> str:
    """One file: what all its records share, then a line for each measured call."""
    device = _joined(records, "gpu") or name.split("/")[0]
    setting = [f"{f} {_joined(records, f)}" for f in SETTING if _joined(records, f)]
    backends = sorted({r["backend"] for r in records}, key=lambda b: (ORDER.index(b) if b in ORDER else len(ORDER), b))
    calls = list(dict.fromkeys(tuple(r[c] for c in CALL) for r in records))
    by_key = {(tuple(r[c] for c in CALL), r["backend"]): r for r in records}
    marks = {b: " (stale)" if any(is_stale(r) for r in records if r["backend"] == b) else "" for b in backends}
    first = backends[0]
    figures = ("tflops", "us_sustained", "ratio_to_triton", "ratio_to_torch_gemms")
    heads = [*CALL, *(f"{b}{marks[b]}, µs" for b in backends), *(f"{first}: {FIGURES[f][0]}" for f in figures)]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(CALL) + "---:|" * (len(heads) - len(CALL))]
    for call in calls:
        cells = [str(value) for value in call]
        cells += [_cell(by_key.get((call, b)), "us") for b in backends]
        cells += [_cell(by_key.get((call, first)), f) for f in figures]
        lines.append("| " + " | ".join(cells) + " |")
    notes = ["", "(stale): kernels have changed since this was measured."] if any(marks.values()) else []
    return "\n".join([f"{device}: {', '.join(setting)}", "", *lines, *notes])


def _cell(record: Record | None, figure: str) -> str:
    """A figure of a record, a dash where there is none."""
    value = None if record is None else record.get(figure)
    return "–" if value is None else FIGURES[figure][1].format(value)


def _joined(records: Sequence[Record], field: str) -> str:
    """The values of a field, one or a range of them."""
    values = sorted(
        {str(r[field])[:10] if field == "date" else str(r[field]) for r in records if r.get(field) is not None}
    )
    return values[0] if len(values) == 1 else f"{values[0]} to {values[-1]}" if values else ""


def filled(text: str, tables: str) -> str:
    """A document with what stands between the marks replaced."""
    head, rest = text.split(BEGIN)
    return f"{head}{BEGIN}\n\n{tables}\n\n{END}{rest.split(END)[1]}"


def main() -> int:
    """Rewrite the README's tables."""
    README.write_text(filled(README.read_text(), render(load())))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
