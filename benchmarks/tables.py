"""The README's tables, from the committed records: `make tables` writes them, a test compares.

python -m benchmarks.tables             rewrites what stands between the two marks in README.md
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.records import COLUMNS, load, render_table
from megamoe.cli.records import Record

README = Path(__file__).resolve().parents[1] / "README.md"
BEGIN, END = "<!-- records: written by `make tables` -->", "<!-- end of records -->"
SETTING = ("clock_mhz", "torch", "triton", "cutlass_dsl", "date")
"""What is said once, above a table, together with the columns that are the same in all its lines."""


def render(everything: Mapping[str, Sequence[Record]]) -> str:
    """All records as Markdown: for each file a heading, its setting, a table."""
    if not everything:
        return "No record is committed yet: nothing has been measured."
    return "\n\n".join(_section(name, records) for name, records in sorted(everything.items()) if records)


def _section(name: str, records: Sequence[Record]) -> str:
    gpu, title = name.split("/", 1)
    columns = [c for c in COLUMNS if c in ("bench", "backend") or len({r.get(c) for r in records}) > 1]
    columns.sort(key=lambda c: c == "backend")
    shared = [c for c in COLUMNS if c not in columns]
    setting = [f"{f} {_joined(records, f)}" for f in (*shared, *SETTING) if _joined(records, f)]
    table = render_table(records, columns)
    device = _joined(records, "gpu") or gpu
    return f"**{title}** on {device}: {', '.join(setting)}\n\n{table}"


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
