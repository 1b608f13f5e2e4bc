"""The bar chart of one shape: each backend's time beside the Triton path's stages stacked, and the roof below them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

FORWARD = ("quantize", "plan", "dispatch", "gemm1", "swiglu", "gemm2", "combine")
BACKWARD = ("quantize", "dispatch", "gemm_a", "swiglu_backward", "gemm_b", "wgrad13", "wgrad2", "combine")


def bars(records: list[dict[str, Any]]) -> list[tuple[str, list[tuple[str, float]]]]:
    """(label, [(part, milliseconds)]) of every bar, from left to right."""
    us = {(r["bench"], r["backend"]): r["us"] for r in records}
    found: list[tuple[str, list[tuple[str, float]]]] = []
    for bench, stages in (("forward", FORWARD), ("backward", BACKWARD)):
        parts = [(s, us[s, "triton"] / 1e3) for s in stages if (s, "triton") in us]
        if len(parts) == len(stages):
            found.append((f"{bench}\nTriton stages", parts))
        found += [(f"{bench}\n{backend}", [("", t / 1e3)]) for (b, backend), t in us.items() if b == bench]
    found += [(f"GEMMs alone\n{backend}", [("", t / 1e3)]) for (b, backend), t in us.items() if b == "gemms"]
    return found


def roofs(records: list[dict[str, Any]]) -> dict[str, float]:
    """Milliseconds of the FLOPs of forward and backward at the speed of one dense product of the same run."""
    dense = next((r["tflops"] for r in records if r["bench"] == "dense_matmul"), None)
    if not dense:
        return {}
    work = {r["bench"]: r["tflops"] * r["us"] / 1e3 for r in records if r["bench"] in ("forward", "backward")}
    return {bench: flops / dense for bench, flops in work.items()}


def draw(records: list[dict[str, Any]], path: Path) -> Path | None:
    """Write the chart as a PNG.

    Args:
        records: of one shape. path: of the file; its folder is made.

    Returns:
        The path, or None where matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = bars(records)
    figure, axes = pyplot.subplots(figsize=(1.6 + 1.3 * len(columns), 5.0), layout="constrained")
    names = sorted({part for _, parts in columns for part, _ in parts if part})
    color = {name: pyplot.get_cmap("tab20")(i % 20) for i, name in enumerate(names)}
    for x, (_, parts) in enumerate(columns):
        bottom = 0.0
        for part, height in parts:
            axes.bar(x, height, 0.7, bottom, color=color.get(part, "#4c72b0"), edgecolor="white", linewidth=0.5)
            if part and height > 0.04 * max(sum(h for _, h in p) for _, p in columns):
                axes.text(x, bottom + height / 2, part, ha="center", va="center", fontsize=7)
            bottom += height
        axes.text(x, bottom, f"{bottom:.2f}", ha="center", va="bottom", fontsize=8)
    for bench, height in roofs(records).items():
        at = [x for x, (label, _) in enumerate(columns) if label.startswith(bench)]
        axes.hlines(height, min(at) - 0.45, max(at) + 0.45, colors="black", linestyles="dashed", linewidth=1)
        axes.text(max(at) + 0.45, height, "roof", ha="left", va="center", fontsize=7)
    axes.set_xticks(range(len(columns)), [label for label, _ in columns], fontsize=8)
    axes.set_ylabel("ms")
    first = records[0]
    axes.set_title(f"{first['shape']}, T = {first['T']}, {first['routing']}, {first['precision']}, {first['gpu']}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path
