"""The C++ kernels return the reference's bits, under every instruction set, and are chosen as asked."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch

from laconic.ops import BITS, kernels_in_use, native
from laconic.ops.codebooks import AFFINE, codebook
from tests.grid import grid
from tests.ops.cases import (
    BLOCK_SIZES,
    CODES,
    DTYPES,
    FIRST_INDEX,
    SEEDS,
    awkward_tensors,
    center_of,
    every_pattern,
    same_bits,
    threads,
)
from tests.ops.implementations import ON_CPU as ops

pytestmark = pytest.mark.skipif(not native.supported_isas(), reason="the C++ kernels are not built")


@pytest.mark.parametrize(("dtype", "code", "block_size"), grid(DTYPES, CODES, BLOCK_SIZES))
def test_all_bits_are_the_references(dtype: torch.dtype, code: str, block_size: int) -> None:
    for (_, x), scale_dtype, seed in itertools.product(awkward_tensors(dtype), DTYPES, SEEDS):
        packed = ops.quantize_blockwise(x, code, block_size, scale_dtype, seed, first_index=FIRST_INDEX)
        for out in DTYPES if seed is None else ():
            ops.dequantize_blockwise(*packed, code, block_size, x.shape[-1] if x.dim() else 1, out)


@pytest.mark.parametrize(("dtype", "code", "block_size"), grid(DTYPES, CODES, [16, 64]))
def test_all_bits_are_the_references_around_a_center(dtype: torch.dtype, code: str, block_size: int) -> None:
    for (_, x), seed in itertools.product(awkward_tensors(dtype), SEEDS):
        length = x.shape[-1] if x.dim() else 1
        center = center_of(length)
        packed = ops.quantize_blockwise(x, code, block_size, torch.bfloat16, seed, center, first_index=FIRST_INDEX)
        ops.dequantize_blockwise(*packed, code, block_size, length, dtype, center)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_pattern_gives_the_references_bits(dtype: torch.dtype, code: str) -> None:
    # In rising blocks; next to a fixed neighbour that sets the scale.
    x = every_pattern(dtype)
    cases = [(x, scale_dtype, seed) for scale_dtype in DTYPES for seed in SEEDS]
    cases.append((torch.stack((torch.full_like(x, 0.37), x), dim=1), torch.float32, None))
    for tensor, scale_dtype, seed in cases:
        ops.quantize_blockwise(tensor, code, 16, scale_dtype, seed)


@pytest.mark.parametrize(("code", "dtype", "block_size"), grid(CODES, DTYPES, [16, 64]))
def test_bytes_that_quantize_never_writes_dequantize_alike(code: str, dtype: torch.dtype, block_size: int) -> None:
    # Each of the 256 bytes under scales of every kind: signs, subnormals, infinities, NaNs, products that
    # overflow. Codes of 5 and 6 bits cross bytes; there the bytes are random, many times each code at each place.
    scales = torch.cat((torch.randn(40) * torch.exp2(60 * torch.randn(40)), torch.tensor([1e-40, -1e-40, 3e38, -0.0])))
    length = 8 * 256 // BITS[code] // block_size * block_size
    num_codes = length * BITS[code] // 8
    codes = torch.arange(256, dtype=torch.uint8).expand(len(scales) + 300, 256)
    if BITS[code] in (5, 6):
        codes = torch.randint(256, (len(scales) + 300, num_codes), generator=torch.Generator().manual_seed(2)).byte()
    for scale_dtype in DTYPES:
        rows = scales.to(scale_dtype)
        if scale_dtype != torch.float32:
            rows = torch.cat((rows, every_pattern(scale_dtype)[::219]))
        # Each step of an affine code beside a minimum of another kind.
        rows = torch.stack((rows, rows.roll(7)) if code in AFFINE else (rows,), 1).repeat(1, length // block_size)
        ops.dequantize_blockwise(codes[: len(rows)], rows, code, block_size, length, dtype)


@pytest.mark.parametrize("code", CODES)
def test_threads_do_not_change_bits(code: str) -> None:
    x = torch.randn(1031, 1027)
    with threads(1):
        codes, scales = native.quantize_blockwise(x, code, 64, torch.bfloat16, 7)
        back = native.dequantize_blockwise(codes, scales, code, 64, 1027, torch.float32)
    with threads(3):
        assert same_bits(native.quantize_blockwise(x, code, 64, torch.bfloat16, 7)[0], codes)
        assert same_bits(native.dequantize_blockwise(codes, scales, code, 64, 1027, torch.float32), back)


def test_flushed_subnormals_of_the_caller_do_not_change_bits() -> None:
    x = torch.tensor([[2.0**-125, 2.0**-127, -(2.0**-127)]])
    expected = native.quantize_blockwise(x, "nf4", 16, torch.float32, None)
    assert [codebook("nf4").levels[c] for c in (expected[0][0, 0] >> 4, expected[0][0, 1])] != [0.0, 0.0]
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        flushed = native.quantize_blockwise(x, "nf4", 16, torch.float32, None)
    finally:
        torch.set_flush_denormal(False)
    assert same_bits(flushed[0], expected[0])
    assert same_bits(flushed[1], expected[1])


FORKS = """
import json, os, sys, traceback
import torch
for line in sys.stdin:
    source, environment, folder = json.loads(line)
    if (pid := os.fork()) == 0:
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(os.path.join(folder, name), os.O_CREAT | os.O_WRONLY), number)
        os.environ |= environment
        code = 0
        try:
            exec(source, {})
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""

RunPython = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def run_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunPython]:
    """run_python(source, **environment): in a process of its own, which has imported torch and nothing of laconic.

    Importing torch takes seconds: one process does it, and each call runs in a fork of that.
    """
    with subprocess.Popen(
        [sys.executable, "-c", FORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as root:
        assert root.stdin is not None
        assert root.stdout is not None

        def run(source: str, **environment: str) -> subprocess.CompletedProcess[str]:
            folder = tmp_path_factory.mktemp("run")
            print(json.dumps([source, environment, str(folder)]), file=root.stdin, flush=True)
            code = int(root.stdout.readline())
            return subprocess.CompletedProcess(source, code, (folder / "out").read_text(), (folder / "err").read_text())

        yield run
        root.stdin.close()


THREADS_OF_CALLS = """
import os, threading
import torch
from laconic.ops import quantize_blockwise

def threads():
    return len(os.listdir("/proc/self/task"))

def quantized():
    return quantize_blockwise(values)[0].numpy().tobytes()

def check():
    assert quantized() == expected
    print(threads() - before - (threading.current_thread() is not threading.main_thread()))

torch.set_num_threads(3)
values = torch.randn(512, 1024)
values.exp()  # torch has its threads now
before, names = threads(), os.listdir("/proc/self/task")
expected = quantized()
check()
quantize_blockwise(values[:160])  # is worth two threads; the third stays
assert os.listdir("/proc/self/task") == names
other = threading.Thread(target=check)
other.start()
other.join()
if os.fork() == 0:  # torch's own operations would wait for ever here
    os._exit(0 if quantized() == expected else 1)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
"""


@pytest.mark.ci
@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_kernels_compute_on_the_threads_of_torch() -> None:
    """A pool beside torch's threads, which wait actively, would share their cores: calls of the main thread take them.

    Other threads would each get a team of their own from OpenMP, so they share a pool; after a fork no team is left.
    """
    result = subprocess.run([sys.executable, "-c", THREADS_OF_CALLS], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["0", "2"]


def test_widest_instruction_set_is_the_default() -> None:
    if not {"LACONIC_ISA", "LACONIC_KERNELS"} & os.environ.keys():
        assert kernels_in_use()["cpu"]["isa"] == native.supported_isas()[-1]
        assert kernels_in_use()["cpu"]["implementation"] == "c++"


@pytest.mark.parametrize("isa", native.supported_isas())
@pytest.mark.ci
def test_environment_variable_forces_an_instruction_set(run_python: RunPython, isa: str) -> None:
    result = run_python("from laconic.ops import kernels_in_use as k; print(k()['cpu']['isa'])", LACONIC_ISA=isa)
    assert result.stdout.strip() == isa


@pytest.mark.ci
@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"LACONIC_ISA": "neon"}, "LACONIC_ISA is 'neon', but it must be portable, avx2 or avx512, or not be set"),
        ({"LACONIC_KERNELS": "fast"}, "LACONIC_KERNELS is 'fast', but it must be 'reference' or not be set"),
    ],
)
def test_unknown_choice_is_refused(run_python: RunPython, environment: dict[str, str], message: str) -> None:
    result = run_python("import laconic.ops", **environment)
    assert result.returncode != 0
    assert f"ConfigError: {message}" in result.stderr


PRETEND_OLD_CPU = """
import laconic._kernels as k
k.supported_isas = lambda: ["portable"]
import laconic.ops
"""
PRETEND_NOT_BUILT = """
import sys
sys.modules["laconic._kernels"] = None
import torch, laconic.ops
for _ in range(2):
    codes, scales = laconic.ops.quantize_blockwise(torch.ones(3))
print(laconic.ops.kernels_in_use()["cpu"]["implementation"], codes.tolist())
"""


def test_instruction_set_that_the_cpu_lacks_is_refused(run_python: RunPython) -> None:
    result = run_python(PRETEND_OLD_CPU, LACONIC_ISA="avx512")
    assert "ConfigError: LACONIC_ISA is 'avx512', but this CPU runs only portable" in result.stderr


def test_missing_extension_means_the_reference_and_is_said_once(run_python: RunPython) -> None:
    result = run_python(PRETEND_NOT_BUILT, LACONIC_ISA="", LACONIC_KERNELS="")
    assert result.stdout.strip() == "reference [255, 15]"
    assert result.stderr.count("slow plain-torch reference: the compiled kernels cannot be imported") == 1


def test_missing_extension_refuses_a_forced_instruction_set(run_python: RunPython) -> None:
    result = run_python(PRETEND_NOT_BUILT, LACONIC_ISA="avx2")
    assert "ConfigError: LACONIC_ISA is 'avx2', but the compiled kernels cannot be imported" in result.stderr


def test_reference_can_be_forced(run_python: RunPython) -> None:
    result = run_python(
        "from laconic.ops import kernels_in_use as k; print(*k()['cpu'].values(), sep='|')", LACONIC_KERNELS="reference"
    )
    assert result.stdout.strip() == "reference||LACONIC_KERNELS asks for it"
