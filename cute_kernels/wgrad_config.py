"""What a k-grouped wgrad kernel is compiled for, what it needs, and which tile a task number means."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

TILE_M, TILE_N = 128, 256
STAGES = 4  # depth of the TMA pipeline; with 48 KiB a stage nothing deeper fits
RING = 4  # task descriptions kept in shared memory
RING_WORDS = 5
MATH_WARPGROUPS = 2
THREADS = 128 * (1 + MATH_WARPGROUPS)
STAGING_BYTES = 16384  # output staging of one math warpgroup: for each warp two chunks of 16 rows x 128 bytes
MAX_SHARED_BYTES = 232448  # what one CTA may have on SM90
GROUP_M = 16  # M tiles of an expert that are taken together, so that running CTAs share operands in L2

PRECISIONS = ("bf16", "fp8")
OUT_DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class WgradConfig:
    """One compiled form of dW[e] = sum over the rows r of expert e of A[r] (outer) B[r].

    M, N         width of A and of B: dW is [E, M, N]. Multiples of 128.
    precision    "bf16": both operands are row-major bf16 pools. "fp8": both are transposed e4m3 copies in
                 blocks of 128 rows, made by `wgrad_transpose`.
    out_dtype    "float32" or "bfloat16"
    accumulate   False: dW is overwritten, zero for an expert without rows. True: added to what is there, in
                 fp32, rounded once; experts without rows stay untouched.
    """

    M: int
    N: int
    precision: str = "bf16"
    out_dtype: str = "float32"
    accumulate: bool = False

    @property
    def block_k(self) -> int:
        """Rows of the pool in one pipeline stage."""
        return 64 if self.precision == "bf16" else 128

    @property
    def element_bytes(self) -> int:
        return 2 if self.precision == "bf16" else 1

    @property
    def m_tiles(self) -> int:
        return self.M // TILE_M

    @property
    def n_tiles(self) -> int:
        """The last one is half empty if N is an odd multiple of 128."""
        return -(-self.N // TILE_N)

    @property
    def tiles(self) -> int:
        """Tasks of one expert; experts without rows have them too."""
        return self.m_tiles * self.n_tiles

    @property
    def stage_bytes(self) -> int:
        """Bytes that one full stage brings, scales included."""
        scales = 0 if self.precision == "bf16" else TILE_M * 4 + 16
        return (TILE_M + TILE_N) * self.block_k * self.element_bytes + scales

    @property
    def shared_bytes(self) -> int:
        """Shared memory of one CTA, rounded up to its alignment."""
        tasks = RING * (2 * 8 + RING_WORDS * 4)
        used = STAGES * (self.stage_bytes + 2 * 8) + MATH_WARPGROUPS * STAGING_BYTES + tasks
        return -(-used // 1024) * 1024

    def why_not(self) -> str | None:
        """None if the kernel can be built, else the reason."""
        for name, value in (("M", self.M), ("N", self.N)):
            if value <= 0 or value % 128:
                return f"{name}: expected a positive multiple of 128, got {value}"
        if self.precision not in PRECISIONS:
            return f"precision: expected one of {PRECISIONS}, got {self.precision!r}"
        if self.out_dtype not in OUT_DTYPES:
            return f"out_dtype: expected one of {OUT_DTYPES}, got {self.out_dtype!r}"
        if self.shared_bytes > MAX_SHARED_BYTES:
            return f"shared memory: expected at most {MAX_SHARED_BYTES} bytes, got {self.shared_bytes}"
        return None


@dataclass(frozen=True)
class TransposeConfig:
    """width: columns, a multiple of 128. source: "bf16" rows, or "fp8" rows with fp32 scales [width / 128, P].

    square: one scale for 128 rows x 128 columns, as the FP8 GEMM's B operand wants, instead of one a column.
    balanced: rows are multiplied by factors first, see `RowFactors`.
    skips: tiles that another kernel has written already are left out.
    """

    width: int
    source: str
    square: bool
    balanced: bool = False
    skips: bool = False


def locate_tile(index, m_tiles: int, n_tiles: int, minimum: Callable = min):
    """(M tile, N tile) of an expert's task `index`: groups of GROUP_M M tiles, inside one M runs fastest.

    Python integers and the DSL's alike; `minimum` is the one of the kind in hand.
    """
    group = index // (GROUP_M * n_tiles)
    first_m = group * GROUP_M
    in_group = minimum(m_tiles - first_m, GROUP_M)
    rest = index - first_m * n_tiles
    n = rest // in_group
    return first_m + rest - n * in_group, n
