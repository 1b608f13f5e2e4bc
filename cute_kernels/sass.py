"""Reads a compiled kernel's machine code: registers, stack, spills in loops, tensor-core instructions, shared memory.

The tools are the `cuobjdump` and `nvdisasm` that triton ships, so that a CPU-only machine can check a kernel.
"""

import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass

_ADDRESS = re.compile(r"^\s*/\*([0-9a-f]+)\*/\s+(.*?);")
_LABEL = re.compile(r"^\s*(\.L_x_\d+):")
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")
_SPILL = re.compile(r"\b(?:LDL|STL)\b")


@dataclass(frozen=True)
class KernelReport:
    """What a kernel's machine code holds.

    Attributes:
        registers: per thread at launch.
        top_register: highest register named by any instruction (warpgroups may raise their share after launch).
        stack_bytes: per thread; 0 unless something was spilled or indexed at run time.
        static_smem_bytes: shared memory known to the cubin (dynamic shared memory is a launch argument).
        qgmma, warpgroup_arrive: FP8 tensor-core instructions, and the fences in front of groups of them. If ptxas
            serialises wgmma there is one fence for each instruction instead of one for each group.
        ffma, spills: counts in the whole kernel; spills are LDL and STL.
        spills_in_k_loops: LDL and STL inside innermost loops that hold a QGMMA.
    """

    registers: int
    top_register: int
    stack_bytes: int
    static_smem_bytes: int
    qgmma: int
    hgmma: int
    warpgroup_arrive: int
    ffma: int
    spills: int
    spills_in_k_loops: int

    def __str__(self) -> str:
        return (
            f"REG {self.registers} top R{self.top_register} stack {self.stack_bytes} B, QGMMA {self.qgmma}, "
            f"HGMMA {self.hgmma}, WARPGROUP.ARRIVE {self.warpgroup_arrive}, FFMA {self.ffma}, "
            f"LDL/STL {self.spills} ({self.spills_in_k_loops} in k-loops)"
        )


def find_tool(name: str) -> str | None:
    """Path of `cuobjdump` or `nvdisasm`: on PATH, else beside triton; None if there is none."""
    found = shutil.which(name)
    if found:
        return found
    from importlib.util import find_spec

    spec = find_spec("triton")
    if spec is None or spec.origin is None:
        return None
    path = os.path.join(os.path.dirname(spec.origin), "backends", "nvidia", "bin", name)
    return path if os.path.exists(path) else None


def _run(tool: str, *arguments: str) -> str:
    path = find_tool(tool)
    if path is None:
        raise RuntimeError(f"{tool}: expected on PATH or beside triton, found neither. Install triton.")
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout


def disassemble(cubin: bytes) -> str:
    """The SASS of a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return _run("nvdisasm", "-c", file.name)


def report(cubin: bytes) -> KernelReport:
    """Counts over all functions of a cubin (our cubins hold one kernel)."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _run("cuobjdump", "-res-usage", file.name)
    return report_from_text(usage, disassemble(cubin))


def report_from_text(usage: str, sass: str) -> KernelReport:
    """As `report`, from the tools' output."""

    def resource(name: str) -> int:
        return max((int(x) for x in re.findall(rf"\b{name}:(\d+)", usage)), default=0)

    def count(pattern: str) -> int:
        return len(re.findall(pattern, sass))

    return KernelReport(
        registers=resource("REG"),
        top_register=max((int(x) for x in re.findall(r"\bR(\d+)\b", sass)), default=0),
        stack_bytes=resource("STACK"),
        static_smem_bytes=resource("SHARED"),
        qgmma=count(r"\bQGMMA\b"),
        hgmma=count(r"\bHGMMA\b"),
        warpgroup_arrive=count(r"\bWARPGROUP\.ARRIVE\b"),
        ffma=count(r"\bFFMA\b"),
        spills=count(_SPILL.pattern),
        spills_in_k_loops=spills_in_k_loops(sass),
    )


def spills_in_k_loops(sass: str, mma: str = r"\b[QH]GMMA\b") -> int:
    """LDL and STL inside the innermost loops that hold an MMA: a spill that every k-block pays for.

    A loop is what lies between a label and a backward branch to it. Code that a loop's body jumps over but that lies
    between its ends (an epilogue branch, for example) counts as inside: such a number has to be read in the SASS.
    """
    labels: dict[str, int] = {}
    code: list[str] = []
    loops: list[tuple[int, int]] = []
    for line in sass.splitlines():
        label = _LABEL.match(line)
        if label:
            labels[label.group(1)] = len(code)
            continue
        found = _ADDRESS.match(line)
        if not found:
            continue
        text = found.group(2)
        code.append(text)
        target = _TARGET.search(text)
        if target and "BRA" in text and target.group(1) in labels:
            loops.append((labels[target.group(1)], len(code)))
    with_mma = [(a, b) for a, b in loops if any(re.search(mma, x) for x in code[a:b])]
    innermost = [(a, b) for a, b in with_mma if not any((c, d) != (a, b) and a <= c and d <= b for c, d in with_mma)]
    inside = {i for a, b in innermost for i in range(a, b)}
    return sum(bool(_SPILL.search(code[i])) for i in inside)
