"""Raw copies: bulk copies by one thread, 16-byte accesses, views of addresses."""

from cutlass import Float32, Int32, Int64, cute

BULK_LOAD = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];"
BULK_STORE = "cp.async.bulk.global.shared::cta.bulk_group [{$r0}], [{$r1}], {$r2};"


def bulk_load(dst: Int32, src: Int64, num_bytes, barrier) -> None:
    """Global memory (own or a peer's) to shared, counted by an mbarrier. One thread; 16-byte granules."""
    cute.arch.inline_ptx(BULK_LOAD, read_only_args=[dst, src, Int32(num_bytes), barrier.toint()])


def bulk_store(dst: Int64, src: Int32, num_bytes) -> None:
    """Shared memory to global, counted by this thread's bulk groups. One thread; 16-byte granules."""
    cute.arch.inline_ptx(BULK_STORE, read_only_args=[dst, src, Int32(num_bytes)])


def prefetch(address: Int64) -> None:
    """Brings a line of 128 bytes into L2."""
    cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[address])


def float_at(address: Int64):
    """Pointer to an fp32 in global memory."""
    return cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=4)


def load_ints_cg(address: Int64):
    """Four int32 that other CTAs of this launch wrote, from L2, past L1."""
    return cute.arch.inline_ptx(
        "ld.global.cg.v4.s32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Int32] * 4,
        read_only_args=[address],
    )


def load_input(address: Int64):
    """16 bytes of a tensor that the launch only reads, as four words; not kept in L1."""
    return cute.arch.inline_ptx(
        "ld.global.nc.L1::no_allocate.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Int32] * 4,
        read_only_args=[address],
    )


def load_words(address: Int64):
    """16 bytes as four words, where they stand: the compiler does not move this load past other memory accesses."""
    return cute.arch.inline_ptx(
        "ld.global.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Int32] * 4,
        read_only_args=[address],
    )


def load_shared(address: Int32):
    """16 bytes of shared memory as four words."""
    return cute.arch.inline_ptx(
        "ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Int32] * 4,
        read_only_args=[address],
    )


def bulk_prefetch(address: Int64, num_bytes) -> None:
    """Asks for global memory to be brought into L2. One thread; 16-byte granules."""
    cute.arch.inline_ptx("cp.async.bulk.prefetch.L2.global [{$r0}], {$r1};", read_only_args=[address, Int32(num_bytes)])


def smem_tensor(address: Int32, dtype, shape, align: int = 4):
    """A view of shared memory at a byte address."""
    return cute.make_tensor(
        cute.make_ptr(dtype, address, cute.AddressSpace.smem, assumed_align=align), cute.make_layout(shape)
    )


def gmem_tensor(address: Int64, dtype, shape, align: int = 4):
    """A view of global memory at a byte address."""
    return cute.make_tensor(
        cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=align), cute.make_layout(shape)
    )


def load_vector(address: Int64, dtype, count: int):
    """`count` neighbouring elements (at most 16 bytes) in one access."""
    v = cute.make_rmem_tensor(count, dtype)
    cute.autovec_copy(gmem_tensor(address, dtype, count, align=count * dtype.width // 8), v)
    return v


def store_vector(address: Int64, values) -> None:
    """The elements of a register tensor (at most 16 bytes) in one access."""
    count = cute.size(values)
    cute.autovec_copy(
        values, gmem_tensor(address, values.element_type, count, align=count * values.element_type.width // 8)
    )
