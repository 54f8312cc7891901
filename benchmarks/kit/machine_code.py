"""Machine code of a Triton kernel for one CUDA architecture, and what the compiler says about it. No device is needed.

Triton's wheel brings ptxas, cuobjdump and nvdisasm. Registers, spills, shared memory and the width of every access to
global memory are read from the machine code itself, so they are what a device would run.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from benchmarks.kit.kernel_launches import Launch

_WIDTHS = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128}
"""Bits by the suffix of a load or store in machine code; none is 32."""
_ACCESS = re.compile(r"\b(LDG|STG|LDL|STL|LDS|STS|ATOM|ATOMG|RED|REDG)((?:\.[A-Z0-9_]+)*)\b")


@dataclass(frozen=True)
class Architecture:
    """Limits of a multiprocessor (CUDA C++ Programming Guide, table of technical specifications)."""

    number: int
    """Compute capability times ten."""
    max_warps: int
    max_programs: int
    shared_nbytes: int
    num_registers: int = 1 << 16

    def num_resident(self, code: MachineCode) -> int:
        """Programs of a kernel that a multiprocessor holds at once."""
        # Registers are handed out to warps in units of 256; each program takes 1 KiB of shared memory for itself.
        registers = -(-code.num_registers * 32 // 256) * 256 * code.num_warps
        by_shared = self.shared_nbytes // (code.shared_nbytes + 1024)
        return min(self.max_programs, self.max_warps // code.num_warps, self.num_registers // registers, by_shared)

    def occupancy(self, code: MachineCode) -> float:
        """Resident warps over the most there can be."""
        return self.num_resident(code) * code.num_warps / self.max_warps


ARCHITECTURES = {
    80: Architecture(80, max_warps=64, max_programs=32, shared_nbytes=164 << 10),
    89: Architecture(89, max_warps=48, max_programs=24, shared_nbytes=100 << 10),
    90: Architecture(90, max_warps=64, max_programs=32, shared_nbytes=228 << 10),
    100: Architecture(100, max_warps=64, max_programs=32, shared_nbytes=228 << 10),
    120: Architecture(120, max_warps=48, max_programs=24, shared_nbytes=100 << 10),
}
"""A100, RTX 4090, H100 and H200, B200, RTX 5090."""


@dataclass(frozen=True)
class MachineCode:
    """A compiled kernel."""

    num_registers: int
    """Per thread."""
    num_warps: int
    shared_nbytes: int
    spills: int
    """Loads and stores of local memory in the code: registers that did not fit, or arrays indexed at run time."""
    loads: Counter[int]
    """Loads from global memory in the code, by bits per thread."""
    stores: Counter[int]
    num_instructions: int
    ptx: str

    def widths(self, accesses: Counter[int]) -> str:
        """Accesses as text, widest first: "128 x 4, 8 x 1"."""
        return ", ".join(f"{bits} x {count}" for bits, count in sorted(accesses.items(), reverse=True)) or "none"


def missing_tools() -> list[str]:
    """Names of the tools of Triton's wheel that are not on this machine."""
    missing = []
    for name in ("ptxas", "ptxas_blackwell", "cuobjdump", "nvdisasm"):
        try:
            getattr(knobs.nvidia, name)
        except RuntimeError:
            missing.append(name)
    return missing


def compiler_version(architecture: int) -> str:
    """Version of the ptxas that Triton takes for a compute capability (times ten)."""
    return str(get_ptxas(architecture).version)


def compile_launch(launch: Launch, architecture: int) -> MachineCode:
    """Compile what a launch runs for a compute capability (times ten) with Triton's ptxas."""
    source = ASTSource(
        fn=launch.kernel, signature=launch.signature, constexprs=launch.constants, attrs=launch.attributes
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=dict(launch.options))
    sass, usage = _inspect(compiled.asm["cubin"])
    accesses: dict[str, Counter[int]] = {"LDG": Counter(), "STG": Counter(), "LDL": Counter(), "STL": Counter()}
    instructions = [line for line in sass.splitlines() if re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+[@A-Z]", line)]
    for line in instructions:
        for name, suffixes in _ACCESS.findall(line):
            bits = next((_WIDTHS[part] for part in suffixes.split(".") if part in _WIDTHS), 32)
            accesses.setdefault(name, Counter())[bits] += 1
    return MachineCode(
        num_registers=int(usage["REG"]),
        num_warps=compiled.metadata.num_warps,
        shared_nbytes=compiled.metadata.shared,
        spills=accesses["LDL"].total() + accesses["STL"].total(),
        loads=accesses["LDG"],
        stores=accesses["STG"],
        num_instructions=len(instructions),
        ptx=compiled.asm["ptx"],
    )


@cache
def _inspect(cubin: bytes) -> tuple[str, dict[str, str]]:
    """Machine code as text, and cuobjdump's resource usage."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)

        def run(tool: str, *arguments: str) -> str:
            return subprocess.run([tool, *arguments, path], capture_output=True, text=True, check=True).stdout

        sass = run(knobs.nvidia.nvdisasm.path, "-c")
        usage = run(knobs.nvidia.cuobjdump.path, "-res-usage")
    return sass, dict(re.findall(r"(\w+(?:\[\d\])?):(\d+)", usage))
