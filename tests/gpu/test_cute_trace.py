"""`megamoe trace` on a GPU: every tile once, in an order that the protocol allows, and both files."""

from __future__ import annotations

import argparse
import collections
import json

import pytest

pytest.importorskip("cutlass")

from cute_kernels import trace as kernel_trace
from megamoe.cli import trace

SLACK_NS = 3000  # globaltimer ticks coarsely


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    trace.add_arguments(parser)
    return parser.parse_args(["--shape", "8,512,256,2", "--tokens", "600", *words])


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_tile_once_and_behind_what_it_needs(ranks):
    events = trace.traced(arguments("--ranks", str(ranks)))
    ctas = 1 + max(e.cta for e in events)
    tiles = collections.defaultdict(list)
    for e in events:
        if e.role == "math" and e.what in ("GEMM 1", "GEMM 2"):
            tiles[e.cta * ranks // ctas, e.what, e.block].append(e)
    blocks = {(rank, block) for rank, _, block in tiles}
    assert len(blocks) >= 600 * 2 // 128
    for rank, block in blocks:
        first, second = tiles[rank, "GEMM 1", block], tiles[rank, "GEMM 2", block]
        assert sorted(e.n for e in first) == sorted(e.n for e in second) == [0, 1]  # I / 128 and H / 256
        assert min(e.begin_ns for e in second) + SLACK_NS >= max(e.end_ns for e in first)
    assert all(e.begin_ns <= e.end_ns for e in events)
    sums = [e for e in events if e.what == "combine"]
    assert len(sums) == ctas and min(e.end_ns for e in sums) >= max(e.begin_ns for v in tiles.values() for e in v)
    shares = kernel_trace.shares(events)
    assert set(shares) == set(kernel_trace.ROLES)
    assert all(0 < sum(role.values()) <= 1.001 for role in shares.values())


def test_writes_both_files(tmp_path, capsys):
    assert trace.trace_main(arguments("--out", str(tmp_path / "small"))) == 0
    assert {e["name"] for e in json.loads((tmp_path / "small.json").read_text())} >= {"quantise", "GEMM 1", "dispatch"}
    assert (tmp_path / "small.png").stat().st_size > 10000
    assert "scheduler" in capsys.readouterr().out
