"""Draws the bar charts of layers from committed records, without measuring again.

python -m benchmarks.charts             writes benchmarks/results/<gpu>/layer-<shape>.png
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.records import RESULTS, load
from megamoe.cli.chart import draw
from megamoe.cli.records import Record


def of_shape(everything: Mapping[str, Sequence[Record]], gpu: str, shape: str) -> list[Record]:
    """The layer's records of a shape in its plain case, and its stages."""
    stages = [r for r in everything.get(f"{gpu}/stages", []) if r["shape"] == shape]
    measured = {(r["T"], r["precision"]) for r in stages}
    layer = [
        r
        for r in everything.get(f"{gpu}/layer", [])
        if r["shape"] == shape
        and (r["T"], r["precision"]) in measured
        and r["routing"] == "uniform"
        and r["ranks"] == 1
    ]
    return layer + stages


def main(results: Path = RESULTS) -> int:
    """Draw one chart a shape that has stages."""
    everything = load(results)
    for gpu in sorted({name.split("/")[0] for name in everything}):
        for shape in sorted({r["shape"] for r in everything.get(f"{gpu}/stages", [])}):
            records = of_shape(everything, gpu, shape)
            print(draw(records, results / gpu / f"layer-{shape.replace(',', '-')}.png"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
