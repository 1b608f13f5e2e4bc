"""The fused kernels' PTX: scopes of flags between ranks, and non-coherent loads, which ranks on one GPU cannot show.

Flags between ranks have sys scope; non-coherent loads read only what the launch does not write.
"""

from __future__ import annotations

import dataclasses
import re

import pytest

pytest.importorskip("cutlass")

from cute_kernels import backward, flags, forward
from cute_kernels import compile as compile_module
from cute_kernels.backward_problem import BackwardProblem
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


# scope of each wait: "sys" where ranks wait for each other
SCOPES = {
    flags.IN_COUNT: "gpu",
    flags.IN_HEADER: "sys",
    flags.IN_ARRIVE: "gpu",
    flags.IN_DONE: "gpu",
    flags.IN_HOME: "sys",
}
KERNELS = {
    "forward": (forward, forward.FusedForward, Problem(384, 384, save=True)),
    "backward": (backward, backward.FusedBackward, BackwardProblem(384, 384)),
}


@dataclasses.dataclass
class Made:
    """PTX of a kernel, and (where, scope) of the waits in its source."""

    ptx: str
    waits: set[tuple[int, str]]


@pytest.fixture(scope="module", params=KERNELS)
def made(request) -> Made:
    module, kernel, problem = KERNELS[request.param]
    build = kernel(problem, TileConfig()), module.fake_arguments(problem, for_launch=False)
    waits, wait_for = set(), flags.wait_for

    def noted(watch, address, target, scope, where, index):
        waits.add((where, scope))
        return wait_for(watch, address, target, scope, where, index)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flags, "wait_for", noted)
        return Made(compile_module.inspect(lambda: build).ptx, waits)


def test_only_inputs_are_loaded_past_coherence(made):
    assert ".nc" in made.ptx, "x is read so"
    assert wrong_loads(made.ptx) == []


@pytest.mark.parametrize("right", ["ld.global.cg.b32", "ld.acquire.sys.global.b32", "ld.acquire.gpu.global.b32"])
def test_planted_non_coherent_load_is_found(made, right):
    assert right in made.ptx
    assert wrong_loads(made.ptx.replace(right, "ld.global.nc.b32", 1))


def wrong_scopes(ptx: str) -> list[str]:
    """Flag operations on peers' addresses below sys."""
    found, _, _ = origins(ptx)
    wrong = []
    for line in ptx.splitlines():
        op = re.match(r"\s*(?:@!?%p\d+ )?((?:ld|st|red|atom)\.\S+)\s+(.*);", line)
        if op and re.search(r"relaxed|acquire|release|acq_rel", op.group(1)) and ".sys" not in op.group(1):
            address = re.search(r"\[(%rd\d+)", op.group(2))
            if address and PEER in found.get(address.group(1), set()):
                wrong.append(line.strip())
    return wrong


def test_flags_of_other_ranks_have_sys_scope(made):
    assert wrong_scopes(made.ptx) == []
    wanted = {(where, scope) for where, scope in SCOPES.items() if where in {w for w, _ in made.waits}}
    assert made.waits == wanted and (flags.IN_HOME, "sys") in wanted and (flags.IN_HEADER, "sys") in wanted


@pytest.mark.parametrize(
    ("right", "fault"),
    [
        ("red.release.sys", "red.release.gpu"),  # HOME
        ("st.release.sys", "st.release.gpu"),  # headers, abort words
        ("st.relaxed.sys", "st.relaxed.gpu"),  # what a header says
    ],
)
def test_planted_scope_is_found(made, right, fault):
    assert right in made.ptx
    assert wrong_scopes(made.ptx.replace(right, fault))


def has_reader_fence(ptx: str) -> bool:
    """Behind the prologue, which acquires all headers with ordinary loads, and before any role reads peers' rows with
    bulk copies: every thread's proxy fences of shared and global memory, then a barrier."""
    return re.search(r"fence\.proxy\.async\.shared::cta;\s*fence\.proxy\.async\.global;\s*bar\.sync", ptx) is not None


def test_reader_of_peers_rows_fences_the_proxy(made):
    assert has_reader_fence(made.ptx)
    assert not has_reader_fence(made.ptx.replace("fence.proxy.async.global;", ""))
