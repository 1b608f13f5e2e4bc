"""What a fused kernel is compiled for: the problem's constants and the tuned choices; the shared memory they need."""

from dataclasses import dataclass

from cute_kernels import schedule

BLOCK = 128
TILE_M, TILE_N = 128, 256
THREADS = 384
WARPS = THREADS // 32
MAX_SMEM = 232_448  # bytes a CTA may have on SM90
MAX_RANKS = 16
MAX_EXPERTS = 512
SCRATCH_INTS_PER_EXPERT = WARPS + 2  # of the prologue: a histogram for each warp, rows of CTAs before, totals


@dataclass(frozen=True)
class Problem:
    """What the code of a kernel depends on besides tuning. T, E, K, R and the routing are run-time values.

    Args:
        hidden: H, a multiple of 128.
        intermediate: I, a multiple of 128.
        clamp: whether gate and up are clamped (the limit is a run-time value).
        save: store the bf16 gate and up for a backward, and zero the padding rows of the pool.
        plan_given: row order comes from the caller (codes, weights, offs) instead of from the ids.
        pow2_scales: activation scales are rounded up to powers of two.
        many_experts: more than 128 experts on this rank (a larger table in shared memory).
    """

    hidden: int
    intermediate: int
    clamp: bool = False
    save: bool = False
    plan_given: bool = False
    pow2_scales: bool = False
    many_experts: bool = False

    @property
    def k1(self) -> int:
        """k-blocks of GEMM 1."""
        return self.hidden // BLOCK

    @property
    def k2(self) -> int:
        """k-blocks of GEMM 2."""
        return self.intermediate // BLOCK

    @property
    def n1(self) -> int:
        """Column tiles of GEMM 1: each holds 128 gate columns and the 128 up columns that belong to them."""
        return self.intermediate // BLOCK

    @property
    def n2(self) -> int:
        """Column tiles of GEMM 2; the last one is half empty if H is an odd multiple of 128."""
        return -(-self.hidden // TILE_N)

    @property
    def scale_pitch(self) -> int:
        """fp32 scales from one token to the next in a send buffer: a multiple of 4, for bulk copies of 16 bytes."""
        return -(-self.k1 // 4) * 4

    @property
    def expert_table(self) -> int:
        """Most experts of a rank that the table of offsets in shared memory holds, a power of two."""
        return MAX_EXPERTS if self.many_experts else 128


@dataclass(frozen=True)
class TileConfig:
    """Tuned choices. Hashable: part of the key of compiled kernels.

    Args:
        stages: depth of the TMA pipeline.
        pull_batch: rows (or pieces of rows) that are pulled at once, at most 16; there are two buffers for each. 0: as
            many as fit, at most 8.
        pull_pieces: a row is pulled in this many pieces; 0: one, or as many as shared memory asks for.
        max_unroll: at most so many k-blocks in the main loop's body: 8, 4, 2 or 1.
        group_blocks: blocks of 128 rows in a group of the schedule; 0: chosen from the tile counts.
        math_registers, other_registers: per thread, of the two math warpgroups and of the other one.
        ring: entries of the tile ring.
        half_tiles: where experts have few rows, only 64 rows are loaded of blocks with at most 64 real ones (not where
            a backward will read the padding: whatever lies in shared memory must not reach it).
        prefetch_blocks: k-blocks of its first tile's weights that a CTA asks for before the row order is known.
        trace: roles stamp begin and end of what they do.
    """

    stages: int = 4
    pull_batch: int = 0
    pull_pieces: int = 0
    max_unroll: int = 2
    group_blocks: int = 0
    math_registers: int = 240
    other_registers: int = 24
    ring: int = 4
    half_tiles: bool = True
    prefetch_blocks: int = 6
    trace: bool = False

    def group(self, problem: Problem) -> int:
        return self.group_blocks or schedule.default_group(problem.n1, problem.n2)

    def unroll(self, problem: Problem) -> int:
        """k-blocks in the main loop's body."""
        return schedule.unrolling(problem.k1, problem.k2, self.max_unroll)

    def stage_bytes(self) -> int:
        """What TMA brings for one k-block: both operands, 128 row scales, 4 words of weight scales."""
        return (TILE_M + TILE_N) * BLOCK + TILE_M * 4 + 16

    def pieces(self, problem: Problem) -> int:
        """Pieces of a row: as few as fit."""
        if self.pull_pieces:
            return self.pull_pieces
        pieces = 1
        while pieces < problem.k1 and self._smem_bytes(problem, self.pull_batch or 1, pieces) > MAX_SMEM:
            pieces += 1
        return pieces

    def batch(self, problem: Problem) -> int:
        """Items pulled at once."""
        if self.pull_batch:
            return self.pull_batch
        pieces = self.pieces(problem)
        fitting = [n for n in range(1, 9) if self._smem_bytes(problem, n, pieces) <= MAX_SMEM]
        return max(fitting, default=1)

    def piece_blocks(self, problem: Problem, pieces: int = 0) -> int:
        """k-blocks of a piece, a multiple of 4 unless the row is one piece."""
        pieces = pieces or self.pieces(problem)
        return problem.scale_pitch if pieces == 1 else -(-problem.k1 // pieces // 4) * 4 or 4

    def slot_bytes(self, problem: Problem, pieces: int = 0) -> int:
        """A row buffer: the piece's elements, then its scales, a multiple of 128 bytes."""
        blocks = self.piece_blocks(problem, pieces)
        return blocks * BLOCK + -(-blocks * 4 // 128) * 128

    def _smem_bytes(self, problem: Problem, batch: int, pieces: int) -> int:
        ring_words = TILE_M * self.ring + 4 * self.ring
        barriers = 2 * self.stages + 2 * self.ring + 4
        small = 4 * (problem.expert_table + 1 + schedule.CUTS) + 8 * MAX_RANKS + 8 * barriers + 64
        slots = 2 * batch * self.slot_bytes(problem, pieces)
        return self.stages * self.stage_bytes() + slots + 4 * ring_words + small + 512

    def smem_bytes(self, problem: Problem) -> int:
        """Shared memory of a CTA, with room for alignment."""
        return self._smem_bytes(problem, self.batch(problem), self.pieces(problem))

    def why_not(self, problem: Problem) -> str | None:
        """Why this configuration cannot serve `problem`; None if it can."""
        reasons = []
        for name, value in (("hidden", problem.hidden), ("intermediate", problem.intermediate)):
            if value < BLOCK or value % BLOCK:
                reasons.append(f"{name}: expected a positive multiple of 128, got {value}")
        if not 0 <= self.pull_batch <= 16:
            reasons.append(f"pull_batch: expected 0 to 16, got {self.pull_batch}")
        if self.stages % 2 or self.stages < 2:
            reasons.append(f"stages: expected an even number of at least 2, got {self.stages}")
        if not reasons and self.smem_bytes(problem) > MAX_SMEM:
            reasons.append(f"shared memory: needs {self.smem_bytes(problem)} bytes, a CTA has {MAX_SMEM}")
        used = 256 * self.math_registers + 128 * self.other_registers
        if used > 168 * THREADS:
            reasons.append(f"registers: warpgroups ask for {used}, a CTA has {168 * THREADS}")
        return "; ".join(reasons) or None
