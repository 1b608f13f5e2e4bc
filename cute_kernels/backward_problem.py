"""What the fused backward is compiled for: the forward's constants with the operands of dgrad."""

from dataclasses import dataclass

from cute_kernels.tile_config import BLOCK, TILE_N, Problem

W2, W13, TURNS, TURNED = range(4)
"""Cursors of a wgrad queue that dgrad shares: tasks of either GEMM, pieces of the copy of [dg; du], and those done."""

TURN_COLUMNS = 1024
"""Columns of such a piece, of 128 rows."""


@dataclass(frozen=True)
class BackwardProblem(Problem):
    """GEMM A: dh = dout @ W2 (K = H, N = I). GEMM B: dX = [dg; du] @ W13 (K = 2I, N = H). A problem's k1, n1 belong to
    GEMM A, its k2, n2 to GEMM B.

    The row order is always given, and padding rows of the pool are zeroed: wgrad reads it.

    Args:
        stolen: dtype of dW13 ("float32" or "bfloat16"), whose tasks the math warps take while dx is in flight; None:
            they wait.
        delay_us: for tests: a CTA's last rows of dX are announced so much later.
    """

    save: bool = True
    plan_given: bool = True
    stolen: str | None = None
    delay_us: int = 0

    @property
    def k2(self) -> int:
        return 2 * self.intermediate // BLOCK

    @property
    def n1(self) -> int:
        """Column tiles of GEMM A; the last one is half empty if I is an odd multiple of 128."""
        return -(-self.intermediate // TILE_N)

    @property
    def blocks(self) -> int:
        """Blocks of 128 columns of I: scale groups of dg and of du, summands of dp."""
        return self.intermediate // BLOCK
