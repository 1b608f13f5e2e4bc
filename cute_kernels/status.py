"""What the host knows of a workspace's calls: the record that a failed call leaves, in words, and the error raised."""

import struct
from collections.abc import Sequence

from cute_kernels import workspace as ws
from cute_kernels.tile_config import BLOCK

ABORTED, TIMEOUT, OVERFLOW, BAD_IDS, REFUSED, SIGNATURE, NO_PLAN = (
    1,
    2,
    4,
    8,
    16,
    32,
    64,
)  # as in flags.py, which needs the DSL

WAITS = (
    "the counts of all CTAs",
    "a rank's header",
    "rows of a block",
    "GEMM-1 tiles of a block",
    "rows of y",
    "the plan",
)
NEXT_STEPS = {
    ABORTED: "Look at the error of the rank that gave up.",
    TIMEOUT: "Look for a rank that did not make this call, or raise timeout_s.",
    OVERFLOW: "Raise the capacity.",
    BAD_IDS: "-1 stands for no expert.",
    REFUSED: "Look at the error of that rank.",
    SIGNATURE: "Make the same calls on all ranks.",
    NO_PLAN: "Look at that call's error.",
}


class CallError(RuntimeError):
    """A call on a workspace ended without results, on all ranks; out (dx, dp) is NaN.

    Attributes:
        code: ABORTED, TIMEOUT, OVERFLOW, BAD_IDS, REFUSED, SIGNATURE or NO_PLAN.
        needs_reset: the workspaces take no call until they have been reset, on all ranks. Otherwise the next call is
            right.
    """

    def __init__(self, text: str, code: int):
        super().__init__(text)
        self.code = code

    @property
    def needs_reset(self) -> bool:
        return self.code in (ABORTED, TIMEOUT, SIGNATURE)


def error_of(words: Sequence[int], rank: int, top_k: int, num_ranks: int) -> CallError | None:
    """The error that a record stands for; None if there is none.

    Args:
        words: ws.LINE int32 that errors.report filled.
        rank: whose they are.
        top_k, num_ranks: of the workspace.
    """
    code = words[ws.R_CODE]
    if code == 0:
        return None
    text = f"call {words[ws.R_EPOCH]}: {_what(words, code, rank, top_k, num_ranks)}. {NEXT_STEPS.get(code, '')}"
    return CallError(text.rstrip(), code)


def _what(words: Sequence[int], code: int, rank: int, top_k: int, num_ranks: int) -> str:
    index, got, wanted = words[ws.R_INDEX], words[ws.R_GOT], words[ws.R_WANTED]
    more = words[ws.R_MORE :]
    origin = words[ws.R_ORIGIN]
    if origin >= num_ranks:
        return f"aborted by another rank, as rank {rank} saw"
    if code == TIMEOUT:
        where = WAITS[words[ws.R_WHERE]]
        return f"rank {origin}: timeout at {where}, index {index}: expected {wanted}, got {got}"
    if code == OVERFLOW:
        return f"overflow of the pool of rank {index}: {got} rows needed, {wanted} available"
    if code == BAD_IDS:
        value = more[1] if more[1] == more[2] else more[2] << 32 | more[1] & 0xFFFFFFFF  # int32: one word, read twice
        token, slot = divmod(more[0], top_k)
        return f"ids out of range: topk_ids[{token}, {slot}] of rank {index} is {value}"
    if code == REFUSED:
        return f"rank {index} found an error on its host and made no call"
    if code == NO_PLAN:
        return "the row order given is that of a call that ended without results"
    if code == SIGNATURE:
        first, other = more[: ws.SIGNATURE_WORDS], more[ws.SIGNATURE_WORDS : 2 * ws.SIGNATURE_WORDS]
        return f"calls differ: rank 0 makes {signature_text(first)}, rank {index} makes {signature_text(other)}"
    return f"error {code} of rank {origin}"


def signature_text(words: Sequence[int]) -> str:
    """What the words of errors.signature say."""
    kind, sizes, blocks, max_tokens, limit = words
    name = "a backward" if kind & 1 else "a forward with the plan given" if kind & 2 else "a forward"
    scales = "pow2" if kind & 4 else "fp32"
    clamp = struct.unpack("f", struct.pack("i", limit))[0] if kind & 8 else None
    experts, top_k, ranks, ctas = sizes & 1023, sizes >> 10 & 15, sizes >> 14 & 31, sizes >> 19
    return (
        f"{name} (H {(kind >> 4 & 4095) * BLOCK}, I {(kind >> 16) * BLOCK}, E {experts}, K {top_k}, R {ranks}, "
        f"{ctas} CTAs, capacity {blocks * BLOCK} rows, max_tokens {max_tokens}, {scales} scales, clamp {clamp})"
    )
