"""Stamps of what each role of each CTA did when: written by the kernel if compiled with trace=True, read here.

One event is four int64 words: begin and end (globaltimer, ns), what | sm << 32, and block | n << 32. Every role of each
CTA has a list of its own; a counter in shared memory holds its length. Off, nothing of this is in the code.
"""

from dataclasses import dataclass
from typing import Any

from cute_kernels import schedule

ROLES = ("prologue", "loader", "pull", "courier", "scheduler", "math")
PROLOGUE, LOADER, PULL, COURIER, SCHEDULER, MATH = range(6)
CAPACITY = 1024  # events of a role of a CTA; later ones are dropped
WORDS = 4

# what an event is
(COUNT, QUANTIZE, WAIT_COUNTS, PLACE, WAIT_HEADERS, PLAN, GEMM1, GEMM2, PAUSE, ROW, WAIT_ROWS, WAIT_TILES, ANNOUNCE,
 WAIT_HOME, SUM, WAIT_NEXT, WGRAD, HOMEWARD, TURN) = range(19)  # fmt: skip
NAMES = ("count ids", "quantise", "wait: counts", "sort ids", "wait: headers", "plan", "GEMM 1", "GEMM 2", "pause",
         "dispatch", "wait: rows of a block", "wait: GEMM-1 tiles", "announce", "wait: rows of y",
         "combine", "wait: the next tile", "wgrad tile", "last tile", "wgrad copy")  # fmt: skip


def of_tile(kind: Any) -> Any:
    """What an entry of the tile ring is (schedule.GEMM1 ...)."""
    return GEMM1 + kind + schedule.integer(kind >= schedule.WGRAD) * (WGRAD - GEMM1 - schedule.WGRAD)


def begin(k: Any) -> Any:
    """Time now, or 0 without tracing."""
    from cutlass import Int64, const_expr, cute

    if const_expr(k.config.trace):
        return Int64(cute.arch.globaltimer())
    return Int64(0)


def event(k: Any, role: int, what: Any, since: Any, block: Any = 0, n: Any = 0) -> None:
    """An event from `since` to now. By one thread of the role."""
    from cutlass import const_expr

    if const_expr(k.config.trace):
        _store(k, role, what, since, block, n)


def _store(k: Any, role: int, what: Any, since: Any, block: Any, n: Any) -> None:
    from cutlass import Int32, Int64, cute

    count, events = k.trace_count, k.trace
    index = Int32(count[role])
    count[role] = index + 1
    index = index + (CAPACITY - 1 - index) * Int32(index >= CAPACITY)
    at = ((k.cta * len(ROLES) + role) * CAPACITY + index) * WORDS
    events[at] = since
    events[at + 1] = Int64(cute.arch.globaltimer())
    events[at + 2] = Int64(Int32(what)) | (Int64(cute.arch.smid()) << 32)
    events[at + 3] = Int64(Int32(block)) | (Int64(Int32(n)) << 32)


def num_words(num_ctas: int) -> int:
    """int64 words of the buffer that a traced launch takes."""
    return num_ctas * len(ROLES) * CAPACITY * WORDS


@dataclass(frozen=True)
class Event:
    """begin_ns, end_ns: globaltimer. what: index into NAMES. block, n: of the tile, or row and 0."""

    cta: int
    sm: int
    role: str
    what: str
    begin_ns: int
    end_ns: int
    block: int
    n: int


def events(words: Any, num_ctas: int, first_cta: int = 0) -> list[Event]:
    """The events of a launch, from the int64 tensor it filled (zeroed before). first_cta: number that CTA 0 gets, where
    the events of several ranks are put together."""
    table = words.cpu().view(num_ctas, len(ROLES), CAPACITY, WORDS)
    found = []
    for cta, role, i in (table[..., 1] != 0).nonzero().tolist():
        begin_ns, end_ns, what, where = table[cta, role, i].tolist()
        name = NAMES[what & 0xFFFFFFFF]
        found.append(
            Event(first_cta + cta, what >> 32, ROLES[role], name, begin_ns, end_ns, where & 0xFFFFFFFF, where >> 32)
        )
    return found


def shares(found: list[Event]) -> dict[str, dict[str, float]]:
    """For each role, the share of the launch's time (mean over CTAs) that each kind of event takes."""
    if not found:
        return {}
    span = max(e.end_ns for e in found) - min(e.begin_ns for e in found)
    ctas = len({e.cta for e in found})
    result: dict[str, dict[str, float]] = {}
    for e in found:
        role = result.setdefault(e.role, {})
        role[e.what] = role.get(e.what, 0.0) + (e.end_ns - e.begin_ns) / (span * ctas)
    return result


def table(roles: dict[str, dict[str, float]]) -> str:
    """`shares` as text: per role the share of the launch that it works, waits, and for what."""
    lines = [f"{'role':10s} {'works':>7s} {'waits':>7s}   of the launch's time, mean over CTAs"]
    for role in ROLES:
        if role in roles:
            parts = sorted(roles[role].items(), key=lambda x: -x[1])
            waits = sum(share for what, share in parts if what.startswith("wait"))
            text = ", ".join(f"{what} {100 * share:.1f}" for what, share in parts if share >= 0.0005)
            lines.append(f"{role:10s} {100 * (sum(roles[role].values()) - waits):6.1f}% {100 * waits:6.1f}%   {text}")
    return "\n".join(lines)


def chrome(found: list[Event]) -> list[dict]:
    """Chrome / Perfetto trace events: one process an SM, one thread a role, times in us."""
    start = min((e.begin_ns for e in found), default=0)
    return [
        {
            "name": e.what, "ph": "X", "pid": e.sm, "tid": e.role, "ts": (e.begin_ns - start) / 1e3,
            "dur": (e.end_ns - e.begin_ns) / 1e3, "args": {"block": e.block, "n": e.n, "cta": e.cta},
        }
        for e in found
    ]  # fmt: skip


COLOURS = {
    "count ids": "#c7b8ea", "quantise": "#8e7cc3", "sort ids": "#b4a7d6", "plan": "#674ea7", "GEMM 1": "#3d85c6",
    "GEMM 2": "#6aa84f", "pause": "#cc0000", "dispatch": "#e69138", "announce": "#999999", "combine": "#f1c232",
    "wgrad copy": "#a64d79", "wgrad tile": "#dd7e6b",
}  # fmt: skip
WAITING = "#eeeeee"


LANES = {"prologue": (-0.45, 0.9), "math": (-0.45, 0.65), "pull": (0.22, 0.23)}
"""Where a role's events lie in the row of an SM, from its centre: begin, height."""


def timeline(found: list[Event], path: str) -> None:
    """Draws a timeline as a PNG: SMs down, time across, what prologue, math warps and the pulling warp (a thin line
    below them) do in colour, waiting in light grey.

    Args:
        found: events of one launch.
        path: of the PNG.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    start = min((e.begin_ns for e in found), default=0)
    figure, axes = plt.subplots(figsize=(16, 9))
    bars: dict[tuple[int, str, str], list[tuple[float, float]]] = {}
    for e in found:
        if e.role in LANES:
            colour = WAITING if e.what.startswith("wait") else COLOURS.get(e.what, "#000000")
            span = ((e.begin_ns - start) / 1e3, (e.end_ns - e.begin_ns) / 1e3)
            bars.setdefault((e.sm, e.role, colour), []).append(span)
    for (sm, role, colour), spans in bars.items():
        begin, height = LANES[role]
        axes.broken_barh(spans, (sm + begin, height), facecolors=colour)
    seen = [name for name in COLOURS if any(e.what == name and e.role in LANES for e in found)]
    patches = [Patch(color=COLOURS[name], label=name) for name in seen] + [Patch(color=WAITING, label="waiting")]
    axes.legend(handles=patches, ncol=len(patches), loc="upper center", bbox_to_anchor=(0.5, 1.06), frameon=False)
    axes.set(xlabel="us", ylabel="SM")
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)
