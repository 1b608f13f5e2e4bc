"""Sizes of the memory that ranks share: exact beyond 32 bits, and refused beyond what row codes can hold."""

import pytest

from cute_kernels import workspace
from megamoe.backends.cute import check_tokens
from megamoe.errors import MegaMoEValueError


@pytest.mark.parametrize(
    "num_experts, max_tokens, hidden, num_ranks", [(256, 2048, 7168, 8), (448, 2048, 7168, 8), (512, 65536, 8192, 8)]
)
def test_a_blob_holds_its_regions_without_wrapping(num_experts, max_tokens, hidden, num_ranks):
    top_k, num_ctas = 8, 132
    rows = workspace.capacity_rows(max_tokens * top_k * num_ranks, num_experts // num_ranks)
    assert max_tokens * top_k * num_ranks <= rows and rows % 128 == 0
    places = workspace.layout(hidden, max_tokens, top_k, num_experts, num_ranks, num_ctas, rows // 128)
    begins = list(places)
    assert begins == sorted(begins) and all(begin % workspace.ALIGN == 0 for begin in begins)
    least = {"xq": max_tokens * hidden, "xs": max_tokens * hidden // 128 * 4, "y": max_tokens * top_k * hidden * 2}
    ends = dict(zip(places._fields, begins[1:], strict=False))
    for name, size in least.items():
        begin = getattr(places, name)
        assert 0 <= ends[name] - begin - size < max(workspace.ALIGN, size // 16), name
    assert places.size >= sum(least.values())
    if max_tokens == 65536:
        assert places.size > 2**32  # what 32 bits would have wrapped


def test_batches_beyond_a_row_code_are_refused():
    check_tokens(2**27 // 8, 8)
    with pytest.raises(MegaMoEValueError, match=r"x: expected at most 16777216 tokens a rank with K = 8, got 16777217"):
        check_tokens(2**27 // 8 + 1, 8)
