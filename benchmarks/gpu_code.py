"""GPU kernels as machine code: registers, spills, widths of accesses, occupancy of each Triton kernel. Needs no GPU.

    python -m benchmarks.run gpu-code --out benchmarks/results/gpu_code_202611.md
    python -m benchmarks.run gpu-code-amd --out benchmarks/results/gpu_code_amd_202611.md

Each op runs its launcher as training does; each launch is compiled by the ptxas of Triton's wheel.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import triton

from benchmarks.kit.amd_code import AMD_TARGETS, MOST_WARPS, compile_for_amd, read_amd_code
from benchmarks.kit.data_sheets import BYTES_PER_SECOND
from benchmarks.kit.kernel_cases import KernelCase, kernel_cases
from benchmarks.kit.kernel_launches import Launch, Recording, record
from benchmarks.kit.machine_code import ARCHITECTURES, MachineCode, compile_launch, compiler_version, missing_tools
from benchmarks.registry import Options, Table, benchmark

_COMPILED_FOR = (80, 90, 100, 120)
_ELEMENTS = 1 << 24
_DEVICES = ("H200", "RTX 4090")


@dataclass(frozen=True)
class _Row:
    kernel: str
    variant: str
    architecture: int
    code: MachineCode


@benchmark("gpu-code")
def gpu_code(options: Options) -> list[Table]:
    """Machine code of each kernel, and launches and bytes of each op."""
    if missing := missing_tools():
        raise SystemExit(
            f"benchmarks.gpu_code needs {', '.join(missing)} of Triton's wheel, but they are not installed"
        )
    elements = 1 << 16 if options.small else _ELEMENTS
    recorded = [_recorded(case) for case in kernel_cases(elements)]
    return [_code_table(recorded), _ops_table(recorded, elements)]


@benchmark("gpu-code-amd")
def gpu_code_amd(options: Options) -> list[Table]:
    """Machine code of each kernel for an AMD GPU; a kernel that does not compile is a row that says why."""
    return [_amd_table(name, 1 << 16 if options.small else _ELEMENTS) for name in AMD_TARGETS]


def _amd_table(name: str, elements: int) -> Table:
    rows: list[list[str]] = []
    failed: list[str] = []
    seen: set[str] = set()
    for case in kernel_cases(elements):
        record(case.call)
        for launch in record(case.call, AMD_TARGETS[name]).launches:
            if launch.specialization in seen:
                continue
            seen.add(launch.specialization)
            of = [_short(launch), f"{case.op}, {case.variant}"]
            try:
                compiled = compile_for_amd(launch, AMD_TARGETS[name])
            except Exception as error:  # of whatever kind: the table says what compiles
                failed.append(" of ".join(of))
                rows.append([*of, f"{type(error).__name__}: {str(error).splitlines()[0]}", *[""] * 9])
                continue
            code = read_amd_code(compiled)
            rows.append(
                [
                    *of,
                    "compiled" if code.is_code_object else "not linked",
                    str(code.vector_registers),
                    str(code.scalar_registers),
                    f"{code.spilled_vectors}, {code.spilled_scalars}",
                    str(code.scratch_nbytes),
                    str(code.shared_nbytes),
                    str(code.num_warps),
                    f"{code.resident_warps / MOST_WARPS:.0%}",
                    code.widths(code.loads),
                    code.widths(code.stores),
                ]
            )
    return Table(
        f"Machine code of each kernel for {name}",
        [
            *("kernel", "launched by", "result", "vector registers", "scalar registers", "spills: vectors, scalars"),
            *("scratch bytes", "shared bytes", "warps", "occupancy", "loads, bits", "stores, bits"),
        ],
        rows,
        f"Triton {triton.__version__}. Compiled and linked, never run: no AMD GPU has been tried, and nothing says that"
        " the bits are those of the reference. 64 threads make a warp, so 16 warps are the most that a program may"
        " have, and each thread of them has 128 vector registers. Scalars are spilled to lanes of vector registers,"
        " vectors to scratch memory. Occupancy is the compiler's prediction. Loads and stores are those of vectors from"
        " and to global memory in the code, by bits per thread, for tensors of at most 2 GiB.",
        failed,
    )


@dataclass(frozen=True)
class _Op:
    name: str
    moved_nbytes: float
    recording: Recording


def _recorded(case: KernelCase) -> _Op:
    record(case.call)  # tables that ops make once for each device
    return _Op(f"{case.op}, {case.variant}", case.moved_nbytes, record(case.call))


def _code_table(ops: list[_Op]) -> Table:
    rows = []
    seen: set[str] = set()
    for op in ops:
        for launch in op.recording.launches:
            if launch.specialization not in seen:
                seen.add(launch.specialization)
                rows += [_row(op, launch, architecture) for architecture in _COMPILED_FOR]
    return Table.of(
        "Machine code of each kernel, for compute capability 8.0, 9.0, 10.0 and 12.0",
        rows,
        [
            ("kernel", lambda row: row.kernel),
            ("launched by", lambda row: row.variant),
            ("sm", lambda row: str(row.architecture)),
            ("registers", lambda row: str(row.code.num_registers)),
            ("spills", lambda row: str(row.code.spills)),
            ("shared bytes", lambda row: str(row.code.shared_nbytes)),
            ("warps", lambda row: str(row.code.num_warps)),
            ("occupancy", lambda row: f"{ARCHITECTURES[row.architecture].occupancy(row.code):.0%}"),
            ("loads, bits", lambda row: row.code.widths(row.code.loads)),
            ("stores, bits", lambda row: row.code.widths(row.code.stores)),
        ],
        f"Triton {triton.__version__}, ptxas"
        f" {', '.join(f'{compiler_version(number)} for sm_{number}' for number in _COMPILED_FOR)}."
        " Compiled, not run. Occupancy is predicted: the share of a multiprocessor's warps that can be resident by"
        " registers, shared memory and warps per program. Spills are loads and stores of local memory in the code;"
        " loads and stores are those of global memory, by bits per thread, counted in the code. 32-bit loads of the"
        " optimizer look up levels in tables that stay in L1. Planes of lossless messages begin at any byte: all"
        " are read by bytes, those of bits also written so, byte planes written as aligned words of 32 bits. Accesses"
        " of one word in measure, write and decode are of samples, of a block's last chunk and of scratch.",
    )


def _short(launch: Launch) -> str:
    return launch.name.strip("_").removesuffix("_kernel")


def _row(op: _Op, launch: Launch, architecture: int) -> _Row:
    return _Row(
        _short(launch),
        op.name,
        architecture,
        compile_launch(launch, architecture),
    )


def _ops_table(ops: list[_Op], elements: int) -> Table:
    rows = []
    for op in ops:
        own = Counter(_short(launch) for launch in op.recording.launches)
        rows.append(
            [
                op.name,
                str(len(op.recording.launches)),
                str(len(op.recording.torch_ops)),
                ", ".join(own),
                f"{op.moved_nbytes / elements:.2f}",
                *(f"{op.moved_nbytes / BYTES_PER_SECOND[name] * 1e6:.0f}" for name in _DEVICES),
            ]
        )
    return Table(
        f"Launches and bytes of each op on {elements:,} elements: prediction, nothing was measured",
        [
            "op",
            "launches of kernels",
            "launches of torch",
            "kernels",
            "bytes moved per element",
            *(f"us on {name}, at least" for name in _DEVICES),
        ],
        rows,
        "Bytes moved are those that have to be read and written once; the times are these bytes over the bandwidth of"
        " the device's data sheet (4.8 TB/s, 1.008 TB/s), the bound that a copy of as many bytes has.",
    )
