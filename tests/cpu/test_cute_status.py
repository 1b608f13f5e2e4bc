"""What the host makes of the record that a failed call leaves, and what a workspace does with it."""

from __future__ import annotations

import struct

import pytest

pytest.importorskip("cutlass")

from cute_kernels import errors, flags, launch, refusal, status
from cute_kernels import workspace as ws
from cute_kernels.compile import inspect


def words(code: int, *, where: int = 0, index: int = 0, got: int = 0, wanted: int = 0, origin: int = 0, more=()):
    found = [0] * ws.LINE
    for at, value in (
        (ws.R_CODE, code), (ws.R_EPOCH, 7), (ws.R_WHERE, where), (ws.R_INDEX, index), (ws.R_GOT, got),
        (ws.R_WANTED, wanted), (ws.R_ORIGIN, origin),
    ):  # fmt: skip
        found[at] = value
    found[ws.R_MORE : ws.R_MORE + len(more)] = more
    return found


def signed(value: int) -> tuple[int, int]:
    """Lower and upper word of an int64 as int32."""
    return struct.unpack("ii", struct.pack("q", value))


def signature_words(*, backward: bool = False, clamp: float | None = None, experts: int = 8) -> list[int]:
    kind = int(backward) + 8 * (clamp is not None) + 2 * 16 + 1 * 65536
    sizes = experts + 4 * 1024 + 2 * 16384 + 66 * 524288
    return [kind, sizes, 4, 103, struct.unpack("i", struct.pack("f", clamp or 0.0))[0]]


FIRST = "rank 0 makes a forward (H 256, I 128, E 8, K 4, R 2, 66 CTAs, capacity 512 rows, max_tokens 103, fp32 scales, "
OTHER = (
    "rank 1 makes a backward (H 256, I 128, E 16, K 4, R 2, 66 CTAs, capacity 512 rows, max_tokens 103, fp32 scales, "
)
RECORDS = {
    "overflow": (
        words(status.OVERFLOW, index=1, got=640, wanted=512),
        "overflow of the pool of rank 1: 640 rows needed, 512 available. Raise the capacity.",
    ),
    "timeout": (
        words(status.TIMEOUT, where=flags.IN_HEADER, index=1, got=6, wanted=7, origin=3),
        "rank 3: timeout at a rank's header, index 1: expected 7, got 6",
    ),
    "refused": (words(status.REFUSED, index=2), "rank 2 found an error on its host and made no call"),
    "aborted": (words(status.ABORTED, origin=4), "aborted by another rank, as rank 0 saw"),
    "int32 id": (words(status.BAD_IDS, index=1, more=(33 * 4 + 2, 99, 99)), "topk_ids[33, 2] of rank 1 is 99."),
    "negative int32 id": (words(status.BAD_IDS, more=(0, -2, -2)), "topk_ids[0, 0] of rank 0 is -2."),
    "no plan": (words(status.NO_PLAN), "the row order given is that of a call that ended without results"),
    "differ": (
        words(
            status.SIGNATURE,
            index=1,
            more=(*signature_words(), *signature_words(backward=True, clamp=0.5, experts=16)),
        ),
        f"calls differ: {FIRST}clamp None), {OTHER}clamp 0.5)",
    ),
}


@pytest.mark.parametrize("name", RECORDS)
def test_records_in_words(name):
    record, text = RECORDS[name]
    error = status.error_of(record, rank=0, top_k=4, num_ranks=4)
    assert error is not None and error.code == record[ws.R_CODE]
    assert str(error).startswith("call 7: ") and text in str(error)
    assert error.needs_reset == (name in ("timeout", "aborted", "differ"))


@pytest.mark.parametrize("value", [8, -2, 2**31 - 1, -(2**31), 2**32, 2**32 - 1, 2**40 + 3, -(2**40), 2**63 - 1])
def test_int64_ids_in_words(value):
    error = status.error_of(words(status.BAD_IDS, more=(5, *signed(value))), rank=0, top_k=4, num_ranks=1)
    assert f"topk_ids[1, 1] of rank 0 is {value}." in str(error)


def test_no_record_no_error():
    assert status.error_of([0] * ws.LINE, rank=0, top_k=4, num_ranks=1) is None


def workspace(**arguments) -> launch.Workspace:
    return launch.Workspace(hidden=256, num_experts=8, top_k=4, max_tokens=8, num_ctas=4, device="cpu", **arguments)


def put(w: launch.Workspace, record: list[int]) -> None:
    for i, value in enumerate(record):
        w._words[i] = value


def test_an_error_that_all_ranks_found_is_raised_once():
    w = workspace()
    put(w, words(status.OVERFLOW, index=0, got=640, wanted=512))
    assert "640 rows needed" in (w.error() or "")
    with pytest.raises(launch.CallError, match="640 rows needed, 512 available"):
        w.check()
    w.check()
    w.raise_pending()
    assert w.error() is None


def test_a_call_given_up_is_raised_until_reset():
    w = workspace()
    put(w, words(status.TIMEOUT, where=flags.IN_HOME, origin=0))
    with pytest.raises(launch.CallError, match="call 7: rank 0: timeout at rows of y"):
        w.check()
    for _ in range(2):
        with pytest.raises(
            launch.CallError, match=r"workspace: expected reset\(\) on all ranks .* timeout at rows of y"
        ):
            w.check()
    assert "timeout" in (w.error() or "")
    w.reset()
    w.check()
    assert w.error() is None


def test_reset_clears_what_ranks_tell_each_other_and_says_again_where_to_report():
    w = workspace()
    at = w.flags()[ws.REPORT, ws.REPORT_TO : ws.REPORT_TO + 2].clone()
    assert at.view(dtype=launch.torch.int64).item() == w._record.data_ptr()
    w.blob.fill_(0xFF)
    w.reset()
    words_of_reset = w.flags().clone()
    assert launch.torch.equal(words_of_reset[ws.REPORT, ws.REPORT_TO : ws.REPORT_TO + 2], at)
    words_of_reset[ws.REPORT, ws.REPORT_TO : ws.REPORT_TO + 2] = 0
    assert not words_of_reset.any() and not w.blob[w.layout.header : w.layout.order].view(launch.torch.int32)[:-2].any()


def test_errors_of_several_workspaces_are_raised_as_one():
    pair = [workspace(num_ranks=2, rank=r) for r in range(2)]
    for w in pair:
        put(w, words(status.REFUSED, index=1))
    with pytest.raises(launch.CallError, match="rank 1 found an error on its host"):
        launch.raise_first(pair, launch.Workspace.check)
    launch.raise_first(pair, launch.Workspace.check)


def test_who_refuses_a_call(monkeypatch):
    """Of ranks in other processes a rank takes leave; where all are here nothing was launched; a dead call has no one
    to hear."""
    told = []
    monkeypatch.setattr(launch, "refuse", lambda w: told.append(w.rank))
    pair = [workspace(num_ranks=2, rank=r) for r in range(2)]
    for w in pair:
        w.connect([0, 0])

    def fail(workspaces):
        with pytest.raises(ValueError, match="wrong"), launch.joined(workspaces):
            raise ValueError("wrong")

    fail(pair)
    assert told == []
    fail(pair[1:])
    assert told == [1]
    put(pair[1], words(status.OVERFLOW))
    with pytest.raises(launch.CallError, match="overflow"), launch.joined(pair[1:]):
        pass
    assert told == [1, 1], "the others make this call"
    put(pair[1], words(status.TIMEOUT))
    for _ in range(2):
        with pytest.raises(launch.CallError, match="timeout"), launch.joined(pair[1:]):
            pass
    assert told == [1, 1]


def test_codes_of_host_and_kernel_are_the_same():
    for name in ("ABORTED", "TIMEOUT", "OVERFLOW", "BAD_IDS", "REFUSED", "SIGNATURE", "NO_PLAN"):
        assert getattr(status, name) == getattr(flags, name)
    assert len(status.WAITS) == flags.IN_PLAN + 1
    assert ws.R_MORE + 2 * ws.SIGNATURE_WORDS <= ws.LINE and ws.H_DETAIL + ws.DETAIL_WORDS <= ws.H_FIRST
    assert errors.HEADER_THREADS > ws.SIGNATURE_WORDS


def test_refusal_compiles():
    made = inspect(lambda: (refusal.Refusal(), refusal.fake_arguments(for_launch=False)))
    for wanted in ("st.release.sys", "ld.acquire.sys", "red.release.sys"):
        assert wanted in made.ptx
