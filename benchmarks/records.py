"""Committed benchmark records: read, checked, found stale, and rendered as the tables of the README.

python -m benchmarks.records            checks benchmarks/results and prints every table
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from megamoe.cli.records import OPTIONAL, REQUIRED, Record
from megamoe.provenance import kernel_hash

RESULTS = Path(__file__).resolve().parent / "results"

COLUMNS = ("bench", "shape", "T", "routing", "ranks", "backend", "precision")
"""What tells one record from another."""

FIGURES: dict[str, tuple[str, str]] = {
    "us": ("µs", "{:,.0f}"),
    "tflops": ("TFLOP/s", "{:,.0f}"),
    "us_sustained": ("µs sustained", "{:,.0f}"),
    "roof_share": ("of the roof", "{:.0%}"),
    "ratio_to_triton": ("vs Triton", "{:.2f}x"),
    "ratio_to_torch_gemms": ("vs torch GEMMs", "{:.2f}x"),
    "rel_l2_out": ("rel-L2 out", "{:.4f}"),
}
"""Figure -> (heading, format)."""


def load(folder: Path = RESULTS) -> dict[str, list[Record]]:
    """All records under a folder, by "<gpu>/<name>"; the folder need not exist."""
    found = sorted(folder.glob("*/*.json"))
    return {f"{path.parent.name}/{path.stem}": json.loads(path.read_text()) for path in found}


def validate(records: Iterable[Record], where: str = "records") -> list[str]:
    """What is wrong with records, a sentence each; empty if nothing is.

    Args:
        records: as read from a file. where: how the messages call it.
    """
    wrong, seen = [], set()
    for i, record in enumerate(records):
        name = f"{where}[{i}]"
        for field, kind in REQUIRED.items():
            if field not in record:
                wrong.append(f"{name}: {field} is missing")
            elif not _is(record[field], kind):
                wrong.append(f"{name}: {field} = {record[field]!r}")
        wrong += [f"{name}: {f} = {record[f]!r}" for f, kind in OPTIONAL.items() if not _is(record.get(f), kind, True)]
        times = [t for t in (record.get(f) for f in ("us_min", "us", "us_max")) if isinstance(t, (int, float))]
        if len(times) == 3 and not 0 < times[0] <= times[1] <= times[2]:
            wrong.append(f"{name}: expected 0 < us_min <= us <= us_max, got {times}")
        key = tuple(record.get(column) for column in COLUMNS)
        if key in seen:
            wrong.append(f"{name}: a second record of {key}")
        seen.add(key)
    return wrong


def _is(value: object, kind: type | tuple[type, ...], may_be_missing: bool = False) -> bool:
    if value is None and may_be_missing:
        return True
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if float in kinds and isinstance(value, int) and not isinstance(value, bool):
        return True
    return isinstance(value, kinds) and not (isinstance(value, float) and not math.isfinite(value))


def is_stale(record: Record) -> bool:
    """Whether the kernels have changed since the record was taken."""
    return record.get("kernel_hash") != kernel_hash(record["backend"])


def render_table(
    records: Sequence[Record],
    columns: Sequence[str] = ("bench", "shape", "T", "backend"),
    figures: Sequence[str] = ("us", "tflops", "us_sustained", "ratio_to_triton", "ratio_to_torch_gemms"),
) -> str:
    """A Markdown table, one record a line, stale ones marked.

    Args:
        records: in the order of the table. columns: fields that name a line. figures: of `FIGURES`; those that no
            record has are left out.

    Returns:
        The table, without a final newline; a line below it says what the mark means, if there is one.
    """
    shown = [f for f in figures if any(record.get(f) is not None for record in records)]
    lines = [
        "| " + " | ".join([*columns, *(FIGURES[f][0] for f in shown)]) + " |",
        "|" + "---|" * len(columns) + "---:|" * len(shown),
    ]
    for record in records:
        cells = [str(record[column]) for column in columns]
        cells[-1] += " (stale)" if is_stale(record) else ""
        cells += ["–" if record.get(f) is None else FIGURES[f][1].format(record[f]) for f in shown]
        lines.append("| " + " | ".join(cells) + " |")
    if any(is_stale(record) for record in records):
        lines += ["", "(stale): the kernels have changed since this was measured."]
    return "\n".join(lines)


def select(records: Iterable[Record], **fields: object) -> list[Record]:
    """Records whose fields have these values; a tuple means any of them, and their order orders the records."""

    def rank(record: Record) -> tuple[int, ...]:
        return tuple(v.index(record[k]) for k, v in fields.items() if isinstance(v, tuple))

    def fits(record: Record) -> bool:
        return all(record.get(k) in v if isinstance(v, tuple) else record.get(k) == v for k, v in fields.items())

    return sorted(filter(fits, records), key=rank)


def main(argv: Sequence[str] | None = None) -> int:
    """Check all committed records and print them; 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    everything = load(parser.parse_args(argv).results)
    wrong = [message for name, records in everything.items() for message in validate(records, name)]
    for name, records in everything.items():
        if not wrong:
            print(f"\n{name}\n\n{render_table(records, COLUMNS, tuple(FIGURES))}")
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
