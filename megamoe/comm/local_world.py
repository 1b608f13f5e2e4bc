"""LocalWorld: R virtual ranks in one process, on the CPU or on one GPU."""

from __future__ import annotations

import dataclasses

from megamoe.errors import MegaMoEValueError, expected


@dataclasses.dataclass(frozen=True)
class LocalWorld:
    """R virtual ranks in one process. Calls over it take and return lists of R tensors, one per rank.

    Args:
        num_ranks: R, at least 1.

    Raises:
        MegaMoEValueError: num_ranks is not a positive integer.
    """

    num_ranks: int

    def __post_init__(self) -> None:
        if not isinstance(self.num_ranks, int) or isinstance(self.num_ranks, bool) or self.num_ranks < 1:
            raise MegaMoEValueError(expected("num_ranks", "a positive integer", repr(self.num_ranks)))
