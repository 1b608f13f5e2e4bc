"""Reading traces: words to events, shares of time, Chrome JSON, the timeline."""

import torch

from cute_kernels import trace


def words_of(*events):
    """(cta, role, what, begin, end, block, n) -> the kernel's buffer for 2 CTAs."""
    words = torch.zeros(trace.num_words(2), dtype=torch.int64)
    table = words.view(2, len(trace.ROLES), trace.CAPACITY, trace.WORDS)
    used: dict[tuple[int, int], int] = {}
    for cta, role, what, begin, end, block, n in events:
        i = used.get((cta, role), 0)
        used[cta, role] = i + 1
        table[cta, role, i] = torch.tensor([begin, end, what | (cta + 5) << 32, block | n << 32])
    return words


WORDS = words_of(
    (0, trace.PROLOGUE, trace.QUANTIZE, 1000, 2000, 0, 0),
    (0, trace.MATH, trace.GEMM1, 2000, 5000, 7, 3),
    (1, trace.MATH, trace.GEMM2, 2000, 4000, 8, 1),
    (1, trace.SCHEDULER, trace.WAIT_ROWS, 1000, 3000, 8, 0),
)


def test_events_and_shares():
    found = trace.events(WORDS, 2)
    assert [(e.cta, e.sm, e.role, e.what, e.block, e.n) for e in found if e.role == "math"] == [
        (0, 5, "math", "GEMM 1", 7, 3),
        (1, 6, "math", "GEMM 2", 8, 1),
    ]
    shares = trace.shares(found)
    assert shares["math"] == {"GEMM 1": 3000 / 8000, "GEMM 2": 2000 / 8000}
    assert shares["scheduler"]["wait: rows of a block"] == 2000 / 8000
    assert trace.shares([]) == {}
    second = trace.events(WORDS, 2, first_cta=2)
    assert {e.cta for e in found + second} == {0, 1, 2, 3}
    assert trace.shares(found + second)["math"]["GEMM 1"] == 3000 / 8000


def test_table():
    lines = trace.table(trace.shares(trace.events(WORDS, 2))).splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["prologue", "scheduler", "math"]
    assert "GEMM 1 37.5, GEMM 2 25.0" in lines[3] and " 62.5%" in lines[3]


def test_names_match_constants():
    assert trace.NAMES[trace.GEMM2] == "GEMM 2" and trace.NAMES[trace.SUM] == "combine"
    assert trace.NAMES[trace.GEMM1 + 2] == "pause" and trace.ROLES[trace.MATH] == "math"
    assert trace.WAIT_TILES == trace.WAIT_ROWS + 1


def test_chrome_and_timeline(tmp_path):
    found = trace.events(WORDS, 2)
    first = trace.chrome(found)[0]
    assert first["ph"] == "X" and first["ts"] == 0.0 and first["dur"] == 1.0
    path = tmp_path / "timeline.png"
    trace.timeline(found, str(path))
    assert path.stat().st_size > 1000
