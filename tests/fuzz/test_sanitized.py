"""The C++ decoder under the address and undefined behaviour sanitizers."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "csrc" / "kernels"
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
# As in CMakeLists.txt.
FLAGS = {
    "lossless_avx2": "-mavx2 -mf16c -mbmi2 -mpopcnt",
    "lossless_avx512": "-mavx2 -mf16c -mavx512f -mavx512bw -mavx512vl -mavx512dq -mpopcnt -mbmi2"
    " -mavx512vbmi -mavx512vbmi2 -mavx512vpopcntdq",
}


def build(directory: Path) -> Path:
    """Compile the kernels of the lossless family and the fuzzer; returns the program."""
    sources = [path for path in sorted(KERNELS.glob("lossless_*.cpp")) if _fits(path)]
    objects = []
    running = []
    for source in [*sources, KERNELS / "parallel.cpp", Path(__file__).with_name("lossless_fuzz.cpp")]:
        objects.append(directory / f"{source.stem}.o")
        flags = [
            "-std=c++17",
            "-O1",
            "-g1",
            "-ffp-contract=off",
            "-w",
            *SANITIZERS,
            *FLAGS.get(source.stem, "").split(),
        ]
        running.append(subprocess.Popen(["g++", *flags, "-I", KERNELS, "-c", source, "-o", objects[-1]]))
    assert [process.wait() for process in running] == [0] * len(running)
    program = directory / "lossless_fuzz"
    subprocess.run(["g++", *SANITIZERS, *objects, "-pthread", "-o", program], check=True)
    return program


def _fits(source: Path) -> bool:
    return source.stem not in FLAGS or platform.machine() in ("x86_64", "AMD64")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
def test_the_decoder_bears_any_bytes_under_sanitizers(tmp_path: Path) -> None:
    program = build(tmp_path)
    result = subprocess.run([program, "5000", "1"], capture_output=True, text=True, check=False, timeout=600)
    assert result.returncode == 0, (result.stdout + result.stderr)[-6000:]
    counts = [int(count) for count in result.stdout.rsplit("status:", 1)[1].split()]
    # Every answer but "not a message of this version" was reached often: the fuzzer gets into payloads.
    assert len(counts) == 13
    assert min(counts[status] for status in range(13) if status not in (2, 3)) >= 5, result.stdout
