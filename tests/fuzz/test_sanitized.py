"""The C++ kernels under sanitizers: the decoder on any bytes (address, undefined), calls side by side (thread)."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.patience import patient

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "csrc" / "kernels"
HERE = Path(__file__).parent
MEMORY = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
THREADS = ["-fsanitize=thread"]
# As in CMakeLists.txt.
FLAGS = {
    "entropy_avx2": "-mavx2 -mf16c -mbmi2 -mpopcnt",
    "lossless_avx2": "-mavx2 -mf16c -mbmi2 -mpopcnt",
    "lossless_avx512": "-mavx2 -mf16c -mavx512f -mavx512bw -mavx512vl -mavx512dq -mpopcnt -mbmi2"
    " -mavx512vbmi -mavx512vbmi2 -mavx512vpopcntdq",
}


def build(directory: Path, sanitizers: Sequence[str], sources: Sequence[Path]) -> Path:
    """Compile `sources`, the last of which has the `main`; returns the program."""
    objects = []
    running = []
    for source in sources:
        objects.append(directory / f"{source.stem}.o")
        flags = [
            "-std=c++17",
            "-O1",
            "-g1",
            "-ffp-contract=off",
            "-w",
            *sanitizers,
            *FLAGS.get(source.stem, "").split(),
        ]
        running.append(subprocess.Popen(["g++", *flags, "-I", KERNELS, "-c", source, "-o", objects[-1]]))
    assert [process.wait() for process in running] == [0] * len(running)
    program = directory / sources[-1].stem
    subprocess.run(["g++", *sanitizers, *objects, "-pthread", "-o", program], check=True)
    return program


def _fits(source: Path) -> bool:
    return source.stem not in FLAGS or platform.machine() in ("x86_64", "AMD64")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
def test_the_decoder_bears_any_bytes_under_sanitizers(tmp_path: Path) -> None:
    kernels = [path for path in sorted(KERNELS.glob("lossless_*.cpp")) if _fits(path)]
    program = build(tmp_path, MEMORY, [*kernels, KERNELS / "parallel.cpp", HERE / "lossless_fuzz.cpp"])
    result = subprocess.run([program, "5000", "1"], capture_output=True, text=True, check=False, timeout=patient(600))
    assert result.returncode == 0, (result.stdout + result.stderr)[-6000:]
    counts = [int(count) for count in result.stdout.rsplit("status:", 1)[1].split()]
    # Every answer but "not a message of this version" was reached often: the fuzzer gets into payloads.
    assert len(counts) == 13
    assert min(counts[status] for status in range(13) if status not in (2, 3)) >= 5, result.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
def test_the_entropy_decoder_bears_any_bytes_under_sanitizers(tmp_path: Path) -> None:
    kernels = [path for path in sorted(KERNELS.glob("entropy_*.cpp")) if _fits(path)]
    program = build(tmp_path, MEMORY, [*kernels, HERE / "entropy_fuzz.cpp"])
    result = subprocess.run([program, "1000", "1"], capture_output=True, text=True, check=False, timeout=patient(600))
    assert result.returncode == 0, (result.stdout + result.stderr)[-6000:]
    refused, taken = map(int, re.findall(r"(?:refused|taken) (\d+)", result.stdout))
    assert refused > 1000
    assert taken > 100


def race(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run it under ThreadSanitizer, whose exit code is 66; its child starts threads after a fork of several."""
    options = os.environ | {"TSAN_OPTIONS": "die_after_fork=0 halt_on_error=1 exitcode=66"}
    command = [str(program), *arguments]
    # Before GCC 14 it cannot place its memory beside addresses that are as random as some kernels make them.
    if shutil.which("setarch") and subprocess.run(["setarch", "-R", "true"], capture_output=True).returncode == 0:
        command = ["setarch", "-R", *command]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=patient(600), env=options)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
def test_threads_side_by_side_do_not_race_under_the_thread_sanitizer(tmp_path: Path) -> None:
    sources = [KERNELS / f"{name}.cpp" for name in ("lossless_portable", "lossless_ranked", "lossless_message")]
    sources += [KERNELS / "blockwise_portable.cpp", KERNELS / "parallel.cpp", HERE / "threads_race.cpp"]
    found = race(build(tmp_path, THREADS, sources), "60", "1")
    assert found.returncode == 0, (found.stdout + found.stderr)[-6000:]
    assert "all the same" in found.stdout

    # A weaker order of memory in either of the two places where threads hand something on would be seen.
    for name, what in (("parallel", "done.fetch_add(1, "), ("lossless_message", "turn.store(chunk + 1, ")):
        text = (KERNELS / f"{name}.cpp").read_text()
        changed = text.replace(f"{what}std::memory_order_release)", f"{what}std::memory_order_relaxed)")
        assert changed != text, name
        folder = tmp_path / name
        folder.mkdir()
        (folder / f"{name}.cpp").write_text(changed)
        weakened = [folder / source.name if source.stem == name else source for source in sources]
        program = build(folder, THREADS, weakened)
        # On a busy machine threads may run one after the other for a whole try.
        tries = (race(program, "60", str(seed)) for seed in range(20))
        found = next((each for each in tries if each.returncode == 66), None)
        assert found is not None, name
        assert "data race" in found.stderr, name
