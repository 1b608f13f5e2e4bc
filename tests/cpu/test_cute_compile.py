"""Compiling CuTe-DSL kernels without a GPU: the caches, their keys, and what the reader of machine code counts."""

import os
import stat
from dataclasses import dataclass

import pytest

pytest.importorskip("cutlass")

import cutlass
from cutlass import (
    Float32,
    Int32,
    cute,
)
from cutlass.cute.runtime import make_fake_compact_tensor
from cutlass.runtime import make_fake_stream

from cute_kernels import compile as compile_module
from cute_kernels import sass
from tests.support.machine_code import needs_nvdisasm


@dataclass(frozen=True)
class Scale:
    """out[i] = x[i] * factor"""

    factor: int

    @cute.jit
    def __call__(self, x: cute.Tensor, out: cute.Tensor, n: Int32, stream):
        self.kernel(x, out, n).launch(grid=[1, 1, 1], block=[32, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, out: cute.Tensor, n: Int32):
        i, _, _ = cute.arch.thread_idx()
        while i < n:
            out[i] = x[i] * self.factor
            i += 32


def build(factor: int, ffi: bool = True):
    def make():
        x = make_fake_compact_tensor(Float32, (cute.sym_int(),), stride_order=(0,), assumed_align=4)
        return Scale(factor), (
            x,
            x,
            Int32(1),
            make_fake_stream(use_tvm_ffi_env_stream=True) if ffi else make_fake_stream(),
        )

    return make


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    monkeypatch.setenv(compile_module.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(compile_module, "_loaded", {})
    monkeypatch.setattr(compile_module, "counts", compile_module.Counts())
    return tmp_path


def forget():
    compile_module._loaded.clear()


def test_second_process_compiles_nothing(fresh):
    first = compile_module.compiled("scale", Scale(3), build(3))
    assert compile_module.compiled("scale", Scale(3), build(3)) is first
    forget()
    assert callable(compile_module.compiled("scale", Scale(3), build(3)))
    assert (compile_module.counts.compiled, compile_module.counts.from_disk) == (1, 1)
    compile_module.compiled("scale", Scale(4), build(4))
    assert compile_module.counts.compiled == 2


@pytest.mark.parametrize("damage", ["truncate", "empty", "index"])
def test_damaged_files_are_a_miss(fresh, damage):
    compile_module.compiled("scale", Scale(3), build(3))
    (path,) = fresh.glob("*.json" if damage == "index" else "*.o")
    path.write_bytes(path.read_bytes()[:100] if damage != "empty" else b"")
    forget()
    compile_module.compiled("scale", Scale(3), build(3))
    assert (compile_module.counts.compiled, compile_module.counts.from_disk) == (2, 0)
    forget()
    compile_module.compiled("scale", Scale(3), build(3))
    assert compile_module.counts.from_disk == 1


def test_folder_that_cannot_be_made_is_no_error(fresh, monkeypatch):
    blocked = fresh / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv(compile_module.CACHE_VARIABLE, str(blocked))
    assert callable(compile_module.compiled("scale", Scale(3), build(3)))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_folder_is_no_error(fresh):
    fresh.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        assert callable(compile_module.compiled("scale", Scale(3), build(3)))
    finally:
        fresh.chmod(stat.S_IRWXU)


def test_key_depends_on_name_and_configuration():
    keys = {compile_module.kernel_key(name, config) for name in ("a", "b") for config in (Scale(1), Scale(2))}
    assert len(keys) == 4


@needs_nvdisasm
def test_report_of_a_real_cubin():
    made = compile_module.inspect(build(3, ffi=False))
    found = sass.report(made.cubin)
    assert found.registers > 0 and found.qgmma == 0 and found.spills == 0
    assert ".target sm_90a" in made.ptx


LOOPS = """
.L_x_1:
        /*0010*/                   LDL R1, [R1] ;
.L_x_2:
        /*0020*/                   QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR8], R24 ;
        /*0030*/                   STL [R1], R2 ;
        /*0040*/              @P0  BRA `(.L_x_2) ;
        /*0050*/              @P1  BRA `(.L_x_1) ;
        /*0060*/                   LDL R1, [R1] ;
.L_x_3:
        /*0070*/                   STL [R1], R2 ;
        /*0080*/                   BRA `(.L_x_3);
"""


def test_spills_are_counted_in_the_innermost_mma_loop_only():
    assert sass.spills_in_k_loops(LOOPS) == 1
    found = sass.report_from_text("Function k: REG:168 STACK:48 SHARED:16", LOOPS)
    assert (found.registers, found.stack_bytes, found.spills, found.qgmma) == (168, 48, 4, 1)


def test_cutlass_is_the_version_the_kernels_were_tuned_with():
    assert tuple(int(x) for x in cutlass.__version__.split(".")[:2]) >= (4, 8)
