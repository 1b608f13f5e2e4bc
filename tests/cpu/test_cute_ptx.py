"""Non-coherent loads in the fused kernels' PTX: only of memory that the launch does not write."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("cutlass")

from cute_kernels import compile as compile_module
from cute_kernels import forward
from cute_kernels.tile_config import Problem, TileConfig

PEER = -1  # an address that was itself loaded: from the table of peers


def origins(ptx: str) -> tuple[dict[str, set[int]], list[tuple[str, set[int]]], list[set[int]]]:
    """Which kernel parameters 64-bit registers come from; non-coherent loads and written addresses, with theirs."""
    found: dict[str, set[int]] = {}
    moves, reads, writes = [], [], []
    for line in ptx.splitlines():
        match = re.match(r"\s*(?:@!?%p\d+ )?([a-z0-9_.:]+)\s+(.*);", line)
        if not match:
            continue
        op, rest = match.groups()
        registers = re.findall(r"%rd\d+", rest)
        if not registers:
            continue
        address = re.search(r"\[(%rd\d+)", rest)
        if op.startswith("ld.param") and (number := re.search(r"_param_(\d+)", rest)):
            found.setdefault(registers[0], set()).add(int(number.group(1)))
        elif ".nc" in op and address:
            reads.append((line.strip(), address.group(1)))
        elif address and (op.startswith(("st.", "red.", "atom.")) or "bulk.global.shared" in op):
            if ".shared" not in op or "bulk" in op:
                writes.append(address.group(1))
        elif re.match(r"ld\.\S*[bu]64", op):
            found.setdefault(registers[0], set()).add(PEER)
        elif not op.startswith(("ld", "st")) and len(registers) > 1:
            moves.append((registers[0], registers[1:]))
    grown = True
    while grown:
        grown = False
        for to, sources in moves:
            more = set().union(*(found.get(r, set()) for r in sources)) - found.get(to, set())
            if more:
                found.setdefault(to, set()).update(more)
                grown = True
    return found, [(line, found.get(r, set())) for line, r in reads], [found.get(r, set()) for r in writes]


def wrong_loads(ptx: str) -> list[str]:
    """Non-coherent loads from the table of peers' addresses, from a parameter that is also written through, or from
    nobody knows where."""
    _, reads, writes = origins(ptx)
    written = set().union(*writes)
    assert writes and PEER in written, "the reader of PTX understands what the kernel stores"
    return [line for line, where in reads if not where or PEER in where or where & written]


@pytest.fixture(scope="module")
def ptx() -> str:
    problem = Problem(384, 384, save=True)
    kernel = forward.FusedForward(problem, TileConfig())
    return compile_module.inspect(lambda: (kernel, forward.fake_arguments(problem, for_launch=False))).ptx


def test_only_inputs_are_loaded_past_coherence(ptx):
    assert ".nc" in ptx, "x is read so"
    assert wrong_loads(ptx) == []


@pytest.mark.parametrize(
    "right", ["ld.global.cg.b32", "ld.acquire.sys.global.b32", "ld.acquire.gpu.global.b32", "ld.global.cg.v4.s32"]
)
def test_planted_fault_is_found(ptx, right):
    assert right in ptx
    assert wrong_loads(ptx.replace(right, "ld.global.nc.b32", 1))
