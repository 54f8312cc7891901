"""Machine code of the Triton kernels: a case launches each; none spills, fuses or approximates; streams move wide.

Nothing runs: the launches are recorded and compiled by Triton's ptxas, for AMD GPUs by its LLVM.
`benchmarks/gpu_code.py` has the whole tables.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.ops.adamw_cases import OPTIONS, as_lists, new_case, quantized
from tests.ops.interpreter import INTERPRETED

pytest.importorskip("triton")
if INTERPRETED:
    pytest.skip("the interpreter does not compile", allow_module_level=True)

import triton

from benchmarks.kit.amd_code import AMD_TARGETS, compile_for_amd, read_amd_code
from benchmarks.kit.kernel_cases import KernelCase, kernel_cases
from benchmarks.kit.kernel_launches import Launch, Recording, kernels, record
from benchmarks.kit.machine_code import ARCHITECTURES, MachineCode, compile_launch, missing_tools

needs_tools = pytest.mark.skipif(bool(missing_tools()), reason=f"not in this Triton: {', '.join(missing_tools())}")

needs_amd = pytest.mark.skipif("amd" not in triton.backends.backends, reason="this Triton compiles for no AMD GPU")

TRITON_VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
KNOWN_SPILLS = {"_decode_kernel": 6} if TRITON_VERSION < (3, 9) else {}
"""Loads and stores of local memory at most; 0 for all others.

With Triton 3.6 the compiler prefers more programs at once over registers for numbers that a program reads once a block.
"""
NOT_FOR_AMD = {"_write_kernel", "_write_ranked_kernel"} if TRITON_VERSION < (3, 9) else set()
"""Kernels that do not compile for an AMD GPU where pointers are known to have at most 2 GiB.

Triton 3.6 takes no pointer whose base is known at run time only; a branch for each base spills on CUDA devices.
"""
OTHER_TRITON = os.environ.get("LACONIC_OTHER_TRITON", "")
"""A folder with another Triton: `pip install --no-deps --target FOLDER triton==3.6.0`."""
WIDEST = {
    "_quantize_blockwise_kernel": (128, None),
    "_dequantize_blockwise_kernel": (None, 128),
    "_gated_product_kernel": (None, 128),
    "_gated_backward_kernel": (128, 128),
    "_accumulate_kernel": (128, 128),
    "_square_kernel": (128, None),
    "_adamw_kernel": (128, 128),
    "_adamw_multi_kernel": (128, 128),
    "_sum_rows_kernel": (128, 128),
    "_pack_bits_kernel": (128, None),
    "_unpack_bits_kernel": (None, 128),
    "_select_bits_kernel": (128, 128),
    "_measure_kernel": (128, None),
    "_write_kernel": (128, None),
}
"""Bits per thread of the widest load and store of kernels that read or write aligned streams; None: not declared."""

NO_BYTES = {
    "_gated_product_kernel",
    "_gated_backward_kernel",
    "_accumulate_kernel",
    "_square_kernel",
    "_sum_blockwise_kernel",
    "_pack_bits_kernel",
}
"""Kernels all of whose streams move by more than a byte per thread at once, those of 4-bit codes too."""


UNWANTED = ("fma", ".ftz", ".approx", "atom.global", "red.global")
"""Arithmetic that is fused, flushes subnormals or is approximate, and sums whose order is left to the device."""


@cache
def recordings() -> list[tuple[KernelCase, Recording]]:
    return [(case, record(case.call)) for case in kernel_cases(1 << 16)]


def launches() -> dict[str, Launch]:
    return {launch.specialization: launch for _, recording in recordings() for launch in recording.launches}


def check(launch: Launch, architecture: int) -> MachineCode:
    code = compile_launch(launch, architecture)
    where = (launch.specialization, architecture)
    assert code.spills <= KNOWN_SPILLS.get(launch.name, 0), where
    assert 0 < ARCHITECTURES[architecture].occupancy(code) <= 1, where
    load, store = WIDEST.get(launch.name, (None, None))
    assert load is None or max(code.loads) >= load, where
    assert store is None or max(code.stores) >= store, where
    assert launch.name not in NO_BYTES or not (code.loads[8] or code.stores[8]), where
    assert not [word for word in UNWANTED if word in code.ptx], where
    return code


def test_every_kernel_is_launched_by_a_case_without_fused_multiply_add() -> None:
    launched = {launch.kernel for launch in launches().values()}
    assert {name for name, kernel in kernels().items() if kernel not in launched} == set()
    assert all(launch.options["enable_fp_fusion"] is False for launch in launches().values())
    assert set(WIDEST) | set(KNOWN_SPILLS) <= {launch.name for launch in launches().values()}


def test_lossless_messages_take_few_launches() -> None:
    for case, recording in recordings():
        if case.op.startswith("lossless"):
            assert len(recording.launches) <= 7, case
            assert not recording.torch_ops, case


@pytest.mark.ci
@needs_tools
@pytest.mark.parametrize(
    "name",
    [
        "_quantize_blockwise_kernel",
        "_dequantize_blockwise_kernel",
        "_gated_backward_kernel",
        "_sum_blockwise_kernel",
        "_accumulate_kernel",
        "_fold_kernel",
        "_adamw_kernel",
        "_adamw_multi_kernel",
        "_sum_rows_kernel",
        "_write_kernel",
        "_decode_kernel",
    ],
)
def test_a_kernel_neither_spills_nor_moves_streams_byte_by_byte_and_computes_as_it_says(name: str) -> None:
    check(next(launch for launch in launches().values() if launch.name == name), 80)


@needs_tools
@pytest.mark.slow
@pytest.mark.parametrize("architecture", [80, 90, 100, 120])
def test_no_kernel_spills_or_moves_streams_byte_by_byte_or_computes_otherwise(architecture: int) -> None:
    for launch in launches().values():
        check(launch, architecture)


@needs_tools
@pytest.mark.slow
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("shape", [(5, 1), (3, 300), (2, 33)])
def test_the_optimizer_compiles_for_rows_of_any_length(shape: tuple[int, int], bits: int) -> None:
    """Triton makes a constant of a length of 1, and assumes nothing of one that 16 does not divide."""
    from laconic.ops.triton import adamw

    lists = as_lists([quantized(new_case(shape, torch.bfloat16, torch.randn(shape), bits), 12)])
    (launch,) = record(lambda: adamw.adamw8bit_multi_(*lists, *(OPTIONS | {"bits": bits}).values())).launches
    assert compile_launch(launch, 90).spills == 0


def check_for_amd(launch: Launch) -> None:
    code = read_amd_code(compile_for_amd(launch, AMD_TARGETS["gfx942"]))
    assert code.is_code_object, launch.specialization
    assert 0 < code.num_warps * 64 <= 1024, launch.specialization
    assert code.resident_warps > 0, launch.specialization
    assert code.scratch_nbytes == 0, launch.specialization


@needs_amd
@pytest.mark.parametrize("name", ["_dequantize_blockwise_kernel", "_sum_rows_kernel", "_read_lists_kernel"])
def test_a_kernel_compiles_for_an_amd_gpu(name: str) -> None:
    check_for_amd(next(launch for launch in launches().values() if launch.name == name))


@needs_amd
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_kernel_compiles_for_an_amd_gpu_and_none_takes_scratch_memory() -> None:
    # Pointers to at most 2 GiB are specialized for it; those of other launches are as on CUDA devices.
    small = [launch for case, _ in recordings() for launch in record(case.call, AMD_TARGETS["gfx942"]).launches]
    for launch in {launch.specialization: launch for launch in small}.values():
        if launch.name in NOT_FOR_AMD:
            with pytest.raises(RuntimeError, match="PassManager"):
                check_for_amd(launch)
        else:
            check_for_amd(launch)
    assert not {launch.specialization for launch in small} <= set(launches())
    for launch in launches().values():
        check_for_amd(launch)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not OTHER_TRITON, reason="LACONIC_OTHER_TRITON names no folder")
def test_no_kernel_spills_with_another_triton() -> None:
    paths = os.pathsep.join(filter(None, [OTHER_TRITON, os.environ.get("PYTHONPATH")]))
    asked = "import triton; print(triton.__version__, triton.__file__)"
    environment = os.environ | {"PYTHONPATH": paths, "LACONIC_OTHER_TRITON": ""}

    def run(*arguments: str) -> str:
        result = subprocess.run(
            [sys.executable, *arguments],
            env=environment,
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=800,
            check=False,
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    version, place = run("-c", asked).split()
    assert version != triton.__version__
    assert Path(place).is_relative_to(Path(OTHER_TRITON).resolve())
    outcome = run("-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", "slow or not slow", __file__)
    assert " passed" in outcome


@needs_tools
@pytest.mark.ci
def test_spills_and_widths_are_seen() -> None:
    """Reading machine code finds what it should: a stream that begins anywhere is not read in wide loads."""
    from laconic.ops.triton import blockwise

    x = torch.zeros(1 << 12, dtype=torch.bfloat16)

    def code_of(x: torch.Tensor, **options: int) -> MachineCode:
        (launch,) = record(lambda: blockwise.quantize_blockwise(x, "int8", 64, torch.bfloat16, None)).launches
        launch.options.update(options)
        return compile_launch(launch, 80)

    assert max(code_of(x).loads) == 128
    assert max(code_of(torch.zeros(1 + (1 << 12), dtype=torch.bfloat16)[1:]).loads) == 16
    assert code_of(x).spills == 0
    assert code_of(x, maxnreg=16).spills > 0
    assert "fma" not in code_of(x).ptx
    assert "fma" in code_of(x, enable_fp_fusion=True).ptx
