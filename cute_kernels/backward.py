"""The fused dgrad: pull of dout, GEMM A, dSwiGLU, GEMM B and the sums over k of one rank in one persistent kernel."""

from cutlass import Float32, Int32, Int64, const_expr, cute

from cute_kernels import backward_epilogue
from cute_kernels.backward_problem import BackwardProblem
from cute_kernels.forward import FusedForward
from cute_kernels.tile_config import TileConfig


class FusedBackward(FusedForward):
    """The forward's kernel with other operands and epilogues: roles, pipelines, flags and schedule are those of
    FusedForward. The row order is given by the forward.

        prologue        quantises dout once a token; headers; offsets from the caller
        pull            dout rows along the saved row order -> pool (an operand of GEMM A, and later of wgrad)
        GEMM A          pool @ W2: dh. Epilogue: dSwiGLU (backward_epilogue.dswiglu)
        GEMM B          [dg; du] @ W13: rows of dX, stored to their source's combine buffer as the forward stores y
        collect         dx[t] = bf16(sum over k of dX); dp

    dp goes home on the way (writer -> reader, scope):

        dp_parts[block, row]   math warps, a GEMM-A tile's sums over 128 columns -> the courier that counts the row
                               block's last GEMM-A tile (`done`, gpu, acquired by the counting itself)
        blob.slots             that courier, the sum of a row over its blocks, ascending, to the rank that the row came
                               from -> collect (HOME, sys). A backward has no use for the sorted slots kept there.
    """

    problem: BackwardProblem
    direction_code = 1

    def __init__(self, problem: BackwardProblem, config: TileConfig):
        assert problem.plan_given and problem.save
        super().__init__(problem, config)

    @cute.jit
    def __call__(
        self,
        dout: cute.Tensor,
        ids: cute.Tensor,
        w2_t: cute.Tensor,
        s2_t: cute.Tensor,
        w13_t: cute.Tensor,
        s13_t: cute.Tensor,
        dx: cute.Tensor,
        dp: cute.Tensor,
        peers: cute.Tensor,
        pool: cute.Tensor,
        pool_s: cute.Tensor,
        grad: cute.Tensor,
        grad_s: cute.Tensor,
        codes: cute.Tensor,
        p: cute.Tensor,
        offs: cute.Tensor,
        counts: cute.Tensor,
        gate_up: cute.Tensor,
        grad_bf16: cute.Tensor,
        weighted: cute.Tensor,
        dp_parts: cute.Tensor,
        trace: cute.Tensor,
        base: Int64,
        rank: Int32,
        top_k: Int32,
        num_experts: Int32,
        max_tokens: Int32,
        num_ctas: Int32,
        timeout: Int32,
        limit: Float32,
        stream,
    ):
        """dout, dx [T, H] bf16; ids [T * K] i32, or i64 as pairs of words (only which slots have an expert matters);
        dp [T * K] f32.

        Weights in kernel order: w2_t [E_l * 256 * n1, H], w13_t [E_l * 256 * n2, 2I] e4m3; s2_t [E_l, k1, n1, 4] and
        s13_t [E_l, k2, n2, 4] f32. peers [R] i64: addresses of the blobs.

        Of this rank only: pool [P, H], grad [P, 2I] e4m3 with pool_s [H / 128, P], grad_s [2I / 128, P] f32; from the
        forward codes [P] i32, p [P] f32, offs [E_l + 1], counts [E_l] i32 and gate_up [P, 2I] bf16; operands of wgrad,
        grad_bf16 [P, 2I], weighted [P, I] bf16; dp_parts [I / 128, P] f32. The rest as in FusedForward."""
        tensors = (dout, ids, p, s2_t, s13_t, dx, peers, pool, pool_s, grad, grad_s)
        tensors += (codes, p, offs, counts, gate_up, trace, grad_bf16, weighted, dp_parts, dp)
        sizes = (base, rank, top_k, num_experts, max_tokens, num_ctas, timeout)
        self.start((pool, w2_t, grad, w13_t), tensors, sizes, limit, stream)

    def bind_arguments(self, k, tensors, sizes, places, limit):
        super().bind_arguments(k, tensors, sizes, places, limit)
        k.grad_bf16, k.weighted, k.dp_parts, k.dp = tensors[17:]

    def finish(self, k, t, wave, kind, slot, stage):
        backward_epilogue.backward(k, t, wave, kind, slot, stage)

    def tile_done(self, k, counter, row):
        backward_epilogue.count_tile(k, counter, row)

    def before_home(self, k, sent):
        if const_expr(self.problem.delay_us > 0):
            backward_epilogue.hold_back(k, sent)

    def collect(self, k):
        backward_epilogue.collect(k)


def fake_tensor(dtype, *shape, align: int = 16):
    """A row-major tensor that stands for an argument."""
    from cutlass.cute.runtime import make_fake_compact_tensor

    order = tuple(reversed(range(len(shape))))
    return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=align)


def fake_arguments(problem: BackwardProblem, for_launch: bool = True) -> tuple:
    """Arguments for `cute.compile`: only what is fixed in them shapes the code."""
    from cutlass import BFloat16, Float8E4M3FN
    from cutlass.runtime import make_fake_stream

    tensor = fake_tensor

    def free(divisor=1):
        return cute.sym_int(divisibility=divisor)

    hidden, inter, k1, k2, n1, n2 = (getattr(problem, a) for a in ("hidden", "intermediate", "k1", "k2", "n1", "n2"))
    tokens, rows, experts = free(), free(128), free()
    return (
        tensor(BFloat16, tokens, hidden),
        tensor(Int32, free(), align=4),
        tensor(Float8E4M3FN, free(256), hidden),
        tensor(Float32, experts, k1, n1, 4),
        tensor(Float8E4M3FN, free(256), 2 * inter),
        tensor(Float32, experts, k2, n2, 4),
        tensor(BFloat16, tokens, hidden),
        tensor(Float32, free(), align=4),
        tensor(Int64, free(), align=8),
        tensor(Float8E4M3FN, rows, hidden),
        tensor(Float32, k1, rows),
        tensor(Float8E4M3FN, rows, 2 * inter),
        tensor(Float32, k2, rows),
        tensor(Int32, rows),
        tensor(Float32, rows),
        tensor(Int32, free(), align=4),
        tensor(Int32, experts, align=4),
        tensor(BFloat16, rows, 2 * inter),
        tensor(BFloat16, rows, 2 * inter),
        tensor(BFloat16, rows, inter),
        tensor(Float32, problem.blocks, rows),
        tensor(Int64, free(), align=8),
        Int64(0),
        *(Int32(1) for _ in range(6)),
        Float32(0.0),
        make_fake_stream(use_tvm_ffi_env_stream=True) if for_launch else make_fake_stream(),
    )
