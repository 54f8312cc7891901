"""Machine code of a Triton kernel for an AMD GPU, and what the compiler says about it. No device is needed.

Triton's wheel brings the compiler, an assembler and a linker. Registers, spills and shared memory are read from the
metadata of the code object, widths of accesses from its assembly.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from benchmarks.kit.kernel_launches import Launch

AMD_TARGETS = {"gfx942": GPUTarget("hip", "gfx942", 64)}
"""MI300X, by what the compiler calls it; 64 threads make a warp."""

MOST_WARPS = 8
"""That a quarter of a compute unit can hold, if registers and shared memory allow."""

_BITS = {"ubyte": 8, "sbyte": 8, "byte": 8, "ushort": 16, "sshort": 16, "short": 16, "dword": 32}
_BITS |= {"dwordx2": 64, "dwordx3": 96, "dwordx4": 128}
_ACCESS = re.compile(rf"^\s+(?:global|buffer)_(load|store)_({'|'.join(sorted(_BITS, reverse=True))})", re.MULTILINE)
_ELF, _MACHINE_AMDGPU = b"\x7fELF", 224


@dataclass(frozen=True)
class AmdCode:
    """A compiled kernel."""

    vector_registers: int
    """Per thread; accumulators included."""
    scalar_registers: int
    """Per warp."""
    spilled_vectors: int
    spilled_scalars: int
    """To lanes of vector registers, as far as there are any left."""
    scratch_nbytes: int
    """Of memory per thread, for what was spilled."""
    shared_nbytes: int
    num_warps: int
    loads: Counter[int]
    """Loads from global memory in the code, by bits per thread."""
    stores: Counter[int]
    resident_warps: int
    """Of `MOST_WARPS`, as the compiler predicts."""
    is_code_object: bool
    """Whether what was linked is an ELF file for AMD GPUs."""

    def widths(self, accesses: Counter[int]) -> str:
        """Accesses as text, widest first: "128 x 4, 8 x 1"."""
        return ", ".join(f"{bits} x {count}" for bits, count in sorted(accesses.items(), reverse=True)) or "none"


def compile_for_amd(launch: Launch, target: GPUTarget) -> CompiledKernel:
    """Compile and link what a launch, recorded for the same target, runs."""
    source = ASTSource(
        fn=launch.kernel, signature=launch.signature, constexprs=launch.constants, attrs=launch.attributes
    )
    return triton.compile(source, target=target, options=dict(launch.options))


def read_amd_code(compiled: CompiledKernel) -> AmdCode:
    """What assembly and code object say."""
    assembly, linked = compiled.asm["amdgcn"], compiled.asm["hsaco"]
    facts = dict(re.findall(r"^\s+(?:- )?\.(\w+):\s+(\d+)$", assembly, re.MULTILINE))
    accesses: dict[str, Counter[int]] = {"load": Counter(), "store": Counter()}
    for kind, width in _ACCESS.findall(assembly):
        accesses[kind][_BITS[width]] += 1
    (resident,) = re.findall(r"^; Occupancy: (\d+)$", assembly, re.MULTILINE)
    return AmdCode(
        vector_registers=int(facts["vgpr_count"]),
        scalar_registers=int(facts["sgpr_count"]),
        spilled_vectors=int(facts["vgpr_spill_count"]),
        spilled_scalars=int(facts["sgpr_spill_count"]),
        scratch_nbytes=int(facts["private_segment_fixed_size"]),
        shared_nbytes=compiled.metadata.shared,
        num_warps=compiled.metadata.num_warps,
        loads=accesses["load"],
        stores=accesses["store"],
        resident_warps=int(resident),
        is_code_object=linked.startswith(_ELF) and int.from_bytes(linked[18:20], "little") == _MACHINE_AMDGPU,
    )
