"""Launches the wgrad kernels on torch tensors: the task queue, the transposed copies, the GEMMs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from .compile import compiled
from .wgrad_config import TransposeConfig, WgradConfig

MAX_EXPERTS = 1024
EVERYTHING = 1 << 30  # tasks a CTA may take: all that are left
PIECE = 1024  # columns of a row block that `transpose_quantized` counts as one task where some are done already

Operand = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
_OUT_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


@dataclass(frozen=True)
class WgradQueue:
    """What the wgrad GEMMs of one backward pass share; made by `plan_wgrad`.

    offs, counts  int32 [E + 1], [E] on the device: aligned segments, real rows
    order         int32 [E]: experts by rows, descending, or ascending with the empty ones last
    cursors       int32 [n]: one per GEMM; a GEMM uses its cursor up
    block_rows    int32 [P / 128]: real rows of each block of 128
    """

    offs: torch.Tensor
    counts: torch.Tensor
    order: torch.Tensor
    cursors: torch.Tensor
    block_rows: torch.Tensor


@dataclass(frozen=True)
class WgradOperands:
    """What forward and dgrad leave for the weight gradients: pools of P rows in one row order, pad rows anything.

    d_gate_up     [P, 2I] bf16, the unquantised gradients of gate and up
    weighted_act  [P, I] bf16, p * silu(gate) * up
    x, x_scale    [P, H]: the tokens that travelled, e4m3 with fp32 scales [H / 128, P], or bf16 with None
    d, d_scale    the same of the output's gradient
    """

    d_gate_up: torch.Tensor
    weighted_act: torch.Tensor
    x: torch.Tensor
    x_scale: torch.Tensor | None
    d: torch.Tensor
    d_scale: torch.Tensor | None


# ---------------------------------------------------------------- compiling


def _fake(dtype, *shape):
    """Matrices start at multiples of 16 bytes, as TMA wants; vectors (a cursor is a slice) wherever they like."""
    from cutlass.cute.runtime import make_fake_compact_tensor

    order = tuple(reversed(range(len(shape))))
    return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=16 if len(shape) > 1 else 4)


def _fake_stream(ffi: bool):
    from cutlass.runtime import make_fake_stream

    return make_fake_stream(use_tvm_ffi_env_stream=True) if ffi else make_fake_stream()


def build_plan(ffi: bool = True):
    """(kernel, fake arguments) of the plan kernel."""
    from cutlass import Int32, cute

    from .wgrad_plan import WgradPlan

    e = cute.sym_int()
    vectors = [_fake(Int32, n) for n in (cute.sym_int(), e, e, cute.sym_int(), cute.sym_int())]
    return WgradPlan(), (*vectors, Int32(0), _fake_stream(ffi))


def build_transpose(config: TransposeConfig, ffi: bool = True):
    """(kernel, fake arguments) of `QuantizeTransposed` for a `TransposeConfig`."""
    from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, cute

    from .wgrad_transpose import QuantizeTransposed

    rows, blocks, width = cute.sym_int(divisibility=128), cute.sym_int(), config.width
    x = _fake(BFloat16 if config.source == "bf16" else Float8E4M3FN, rows, width)
    scales = _fake(Float32, width // 128, rows) if config.source == "fp8" else None
    factors = _fake(Float32, rows) if config.balanced else None
    done = _fake(Int32, 1) if config.skips else None
    s = _fake(Float32, blocks, -(-width // 256), 4) if config.square else _fake(Float32, blocks, width)
    q = _fake(Float8E4M3FN, blocks, width, 128)
    return QuantizeTransposed(config), (x, scales, factors, _fake(Int32, blocks), done, q, s, _fake_stream(ffi))


def build_row_factors(ffi: bool = True):
    """(kernel, fake arguments) of `RowFactors`."""
    from cutlass import Float32, cute

    from .wgrad_transpose import RowFactors

    rows = cute.sym_int(divisibility=128)
    return RowFactors(), (_fake(Float32, cute.sym_int(), rows), _fake(Float32, 2, rows), _fake_stream(ffi))


def build_gemm(config: WgradConfig, ffi: bool = True):
    """(kernel, fake arguments) of the GEMM for a `WgradConfig`."""
    from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, cute

    from .wgrad import WgradBf16
    from .wgrad_fp8 import WgradFp8

    e = cute.sym_int()
    out = _fake(Float32 if config.out_dtype == "float32" else BFloat16, cute.sym_int(divisibility=128), config.N)
    shared = (_fake(Int32, cute.sym_int()), _fake(Int32, e), _fake(Int32, e), _fake(Int32, 1), out)
    shared += (Int32(1), Int32(1), _fake_stream(ffi))
    if config.precision == "bf16":
        rows = cute.sym_int(divisibility=128)
        return WgradBf16(config), (_fake(BFloat16, rows, config.M), _fake(BFloat16, rows, config.N), *shared)
    blocks = cute.sym_int()
    operands = (_fake(Float8E4M3FN, blocks, config.M, 128), _fake(Float8E4M3FN, blocks, config.N, 128))
    scales = (_fake(Float32, blocks, config.M), _fake(Float32, blocks, config.n_tiles, 4))
    return WgradFp8(config), (*operands, *scales, *shared)


# ---------------------------------------------------------------- checking


def _expect(name: str, x: torch.Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> list[str]:
    """What is wrong with a tensor's shape, type and layout."""
    wrong = []
    if tuple(x.shape) != shape:
        wrong.append(f"{name}: expected shape {shape}, got {tuple(x.shape)}")
    if x.dtype not in dtypes:
        wrong.append(f"{name}: expected {' or '.join(map(str, dtypes))}, got {x.dtype}")
    if not x.is_contiguous():
        wrong.append(f"{name}: expected a contiguous tensor, got strides {x.stride()}. Call .contiguous().")
    return wrong


def _raise(wrong: list[str], **tensors: torch.Tensor) -> None:
    """Raises all violations at once; where the tensors live comes last."""
    if not wrong:
        wrong = [f"{n}: expected a CUDA tensor, got one on {x.device}" for n, x in tensors.items() if not x.is_cuda]
    if wrong:
        raise ValueError("\n".join(wrong))


@cache
def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


# ---------------------------------------------------------------- launching


def plan_wgrad(
    offs: torch.Tensor, counts: torch.Tensor, num_rows: int, num_gemms: int = 2, *, ascending: bool = False
) -> WgradQueue:
    """Sorts the experts and sets the cursors to zero.

    Args:
        offs: int32 [E + 1] on the device, first row of each expert's segment; segments are multiples of 128 rows.
        counts: int32 [E] on the device, real rows of each expert, at the start of its segment.
        num_rows: rows P of the pool, a multiple of 128.
        num_gemms: how many GEMMs will draw from this queue, each from its own cursor.
        ascending: experts with few rows first, those without rows last; False: those with many rows first, so that the
            last tasks to run are short.

    Effects: one kernel on the current stream, a few microseconds; no host sync; graph-safe. A queue serves each of its
    cursors once; plan again for the next backward pass.
    """
    num_experts = counts.shape[0]
    wrong = _expect("offs", offs, (num_experts + 1,), (torch.int32,))
    wrong += _expect("counts", counts, (num_experts,), (torch.int32,))
    if num_rows < 0 or num_rows % 128:
        wrong.append(f"num_rows: expected a multiple of 128, got {num_rows}")
    if not 1 <= num_experts <= MAX_EXPERTS:
        wrong.append(f"counts: expected 1 to {MAX_EXPERTS} experts, got {num_experts}")
    _raise(wrong, offs=offs, counts=counts)
    order, cursors, block_rows = (counts.new_empty(n) for n in (num_experts, num_gemms, num_rows // 128))
    compiled("wgrad_plan", (), build_plan)(offs, counts, order, cursors, block_rows, int(ascending))
    return WgradQueue(offs, counts, order, cursors, block_rows)


def row_factors(scales: torch.Tensor) -> torch.Tensor:
    """[2, P]: of each row m, a power of two in proportion to its largest scale, and 1 / m.

    Args:
        scales: fp32 [width / 128, P] of an e4m3 pool.

    Effects: one kernel on the current stream, no host sync. Factors of pad rows mean nothing.
    """
    blocks, rows = scales.shape
    wrong = _expect("scales", scales, (blocks, rows), (torch.float32,))
    if rows % 128:
        wrong.append(f"scales: expected a multiple of 128 rows, got {rows}")
    _raise(wrong, scales=scales)
    factors = scales.new_empty(2, rows)
    if rows:
        compiled("wgrad_row_factors", (), build_row_factors)(scales, factors)
    return factors


def transpose_quantized(
    x_PN: torch.Tensor,
    queue: WgradQueue,
    scales: torch.Tensor | None = None,
    square: bool = False,
    factors: torch.Tensor | None = None,
    *,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    done: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The transposed e4m3 copy of a pool that the FP8 GEMM reads.

    Args:
        x_PN: [P, N] bf16, or e4m3 with `scales`; rows behind an expert's last one may hold anything.
        queue: says which rows are real.
        scales: fp32 [N / 128, P] of e4m3 rows.
        square: False for the GEMM's A operand: one scale for 128 rows of a column. True for B: one for 128 x 128.
        factors: fp32 [P] by which rows are multiplied first; None: 1. Of `row_factors`: 1 / m for the pool whose
            scales they come from, m for the other operand of the GEMM.
        out: (q, scales) to write to; None: new ones.
        done: int32 [1]: so many tasks of PIECE columns of a row block, blocks ascending, within one the columns
            ascending, are written already and are left alone.

    Returns: q [P / 128, N, 128] e4m3, and scales [P / 128, N], or [P / 128, ceil(N / 256), 4] (two used) if square.
    Effects: one kernel on the current stream, no host sync; repeatable bit for bit. Blocks without
    rows are not written.
    """
    rows, width = x_PN.shape
    wrong = _expect("x_PN", x_PN, (queue.block_rows.shape[0] * 128, width), _sources(scales))
    if width % 128 or width == 0:
        wrong.append(f"x_PN: expected a width that is a multiple of 128, got {width}")
    if scales is not None:
        wrong += _expect("scales", scales, (width // 128, rows), (torch.float32,))
    if factors is not None:
        wrong += _expect("factors", factors, (rows,), (torch.float32,))
    blocks = rows // 128
    shapes = (blocks, width, 128), (blocks, -(-width // 256), 4) if square else (blocks, width)
    if out is not None:
        wrong += _expect("out[0]", out[0], shapes[0], (torch.float8_e4m3fn,))
        wrong += _expect("out[1]", out[1], shapes[1], (torch.float32,))
    if done is not None:
        wrong += _expect("done", done, (1,), (torch.int32,))
    _raise(wrong, x_PN=x_PN)
    if out is None:
        out = x_PN.new_empty(shapes[0], dtype=torch.float8_e4m3fn), x_PN.new_empty(shapes[1], dtype=torch.float32)
    q, s = out
    if blocks:
        source = "bf16" if scales is None else "fp8"
        config = TransposeConfig(width, source, square, factors is not None, done is not None)
        kernel = compiled("wgrad_transpose", config, lambda: build_transpose(config))
        kernel(x_PN, scales, factors, queue.block_rows, done, q, s)
    return q, s


def _sources(scales: torch.Tensor | None) -> tuple[torch.dtype, ...]:
    return (torch.bfloat16,) if scales is None else (torch.float8_e4m3fn,)


def wgrad_gemm(
    a: Operand,
    b: Operand,
    queue: WgradQueue,
    out_EMN: torch.Tensor,
    *,
    cursor: int = 0,
    accumulate: bool = False,
    num_ctas: int | None = None,
    tasks_per_cta: int | None = None,
) -> torch.Tensor:
    """out[e] = (or +=) sum over the real rows r of expert e of a[r] (outer) b[r], in fp32.

    Args:
        a, b: M and N columns, multiples of 128. Both [P, M] and [P, N] bf16 pools, whose pad rows may hold anything; or
            both (q, scales) of `transpose_quantized`, b with square=True: one row block's scaled sum is added after
            the other.
        queue: from `plan_wgrad`; this call uses up its cursor number `cursor`.
        out_EMN: [E, M, N] fp32 or bf16, contiguous.
        accumulate: add to `out` (in fp32, rounded once) instead of overwriting it. Experts without rows: zeros when
            overwriting, untouched when accumulating.
        num_ctas: default one for each SM; with `tasks_per_cta` as many as cover all tasks.
        tasks_per_cta: after so many tasks a CTA ends and its SM is free for other kernels; None: CTAs stay until the
            queue is empty. num_ctas * tasks_per_cta must cover all tasks.

    Effects: one kernel on the current stream, no host sync; graph-safe; repeatable bit for bit, whatever the number
    of CTAs. Returns `out_EMN`.
    """
    blocks = queue.block_rows.shape[0]
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        precision, (width_a, width_b), operands = "bf16", (a.shape[-1], b.shape[-1]), (a, b)
        wrong = _expect("a", a, (blocks * 128, width_a), (torch.bfloat16,))
        wrong += _expect("b", b, (blocks * 128, width_b), (torch.bfloat16,))
    elif isinstance(a, tuple) and isinstance(b, tuple):
        precision, (width_a, width_b), operands = "fp8", (a[0].shape[1], b[0].shape[1]), (a[0], b[0], a[1], b[1])
        wrong = _expect("a[0]", a[0], (blocks, width_a, 128), (torch.float8_e4m3fn,))
        wrong += _expect("b[0]", b[0], (blocks, width_b, 128), (torch.float8_e4m3fn,))
        wrong += _expect("a[1]", a[1], (blocks, width_a), (torch.float32,))
        wrong += _expect("b[1]", b[1], (blocks, -(-width_b // 256), 4), (torch.float32,))
    else:
        raise ValueError("a, b: expected two bf16 pools or two transposed copies, got one of each.")
    config = _config(width_a, width_b, precision, queue, out_EMN, accumulate, wrong)
    _raise(wrong, a=operands[0], b=operands[1], out_EMN=out_EMN)
    _launch(config, operands, queue, out_EMN, cursor, num_ctas, tasks_per_cta)
    return out_EMN


def weight_gradients(
    operands: WgradOperands,
    offs: torch.Tensor,
    counts: torch.Tensor,
    dw13_E2IH: torch.Tensor | None,
    dw2_EHI: torch.Tensor | None,
    *,
    precision: str = "fp8",
    accumulate: bool = False,
    num_ctas: int | None = None,
    tasks_per_cta: int | None = None,
) -> None:
    """dW13[e] = sum of d_gate_up (outer) x and dW2[e] = sum of d (outer) weighted_act over the rows of e.

    Args:
        operands: the four pools.
        offs, counts: as in `plan_wgrad`.
        dw13_E2IH, dw2_EHI: fp32 or bf16, overwritten or added to; None: not wanted.
        precision: "fp8" multiplies transposed e4m3 copies, made here with balanced rows (`RowFactors`): the fastest,
            1.1 to 1.5 dB below BF16 operands; x and d must be e4m3. "bf16" multiplies the pools as they are; x and d
            must be bf16.
        accumulate, num_ctas, tasks_per_cta: as in `wgrad_gemm`. tasks_per_cta=1 on a stream of low priority leaves
            SMs to other kernels as tasks end.

    Raises: ValueError, for what the steps refuse.
    Effects: kernels on the current stream (fp8: plan, two for the rows' factors, four copies, two GEMMs), no host sync;
        graph-safe; repeatable bit for bit. fp8 allocates the copies of one GEMM at a time: at most P (2I + H) bytes.
    """
    queue = plan_wgrad(offs, counts, operands.x.shape[0])
    pairs = (
        (dw2_EHI, (operands.d, operands.d_scale), (operands.weighted_act, None)),
        (dw13_E2IH, (operands.d_gate_up, None), (operands.x, operands.x_scale)),
    )
    for cursor, (out, (a, a_scale), (b, b_scale)) in enumerate(pairs):
        modes = {"cursor": cursor, "accumulate": accumulate, "num_ctas": num_ctas, "tasks_per_cta": tasks_per_cta}
        if out is None:
            continue
        if precision == "bf16":
            wgrad_gemm(a, b, queue, out, **modes)
            continue
        scale = b_scale if a_scale is None else a_scale
        if scale is None:
            raise ValueError("operands: expected e4m3 x and d with their scales, got bf16. Use precision='bf16'.")
        up, down = row_factors(scale)
        copies = (
            transpose_quantized(a, queue, a_scale, False, up if a_scale is None else down),
            transpose_quantized(b, queue, b_scale, True, up if b_scale is None else down),
        )
        wgrad_gemm(*copies, queue, out, **modes)
        del copies, up, down  # before the next ones are made


def _config(M: int, N: int, precision: str, queue: WgradQueue, out, accumulate: bool, wrong: list[str]):
    wrong += _expect("out_EMN", out, (queue.counts.shape[0], M, N), tuple(_OUT_DTYPES))
    config = WgradConfig(M, N, precision, _OUT_DTYPES.get(out.dtype, "float32"), accumulate)
    reason = config.why_not()
    if reason:
        wrong.append(reason)
    return config


def _launch(config: WgradConfig, operands, queue: WgradQueue, out, cursor: int, num_ctas, tasks_per_cta) -> None:
    if not 0 <= cursor < queue.cursors.shape[0]:
        raise ValueError(f"cursor: expected 0 to {queue.cursors.shape[0] - 1}, got {cursor}. Plan for more GEMMs.")
    tasks = config.tiles * queue.counts.shape[0]
    limit = tasks_per_cta or EVERYTHING
    if num_ctas is None:
        num_ctas = _num_sms(out.device) if tasks_per_cta is None else -(-tasks // limit)
    num_ctas = min(num_ctas, tasks)
    if num_ctas * limit < tasks:
        raise ValueError(f"tasks_per_cta: expected {num_ctas} CTAs to cover {tasks} tasks, got {limit} each.")
    if operands[0].shape[0] == 0:  # a pool without rows has no TMA descriptor
        if not config.accumulate:
            out.zero_()
        return
    kernel = compiled("wgrad", config, lambda: build_gemm(config))
    view = out.view(-1, config.N)
    position = queue.cursors[cursor : cursor + 1]
    kernel(*operands, queue.offs, queue.counts, queue.order, position, view, num_ctas, limit)
