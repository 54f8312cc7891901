"""The portable kernels on aarch64, bit for bit as on this machine: compiled by a cross compiler, run under qemu.

    python tools/aarch64.py            # Debian: apt-get install g++-aarch64-linux-gnu qemu-user-static

tools/kernel_digests.cpp runs every family of kernels on the same made-up inputs and prints a digest of each result; the
lines of both machines have to be the same. Warnings are errors. What this does not show: Python, torch and nanobind on
aarch64, speed, and threads on weakly ordered memory, since qemu runs on this machine's. Skips with a reason, and exit
code 77, where compiler or emulator is missing.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMPILER, EMULATORS = "aarch64-linux-gnu-g++", ("qemu-aarch64-static", "qemu-aarch64")
SKIPPED = 77
"""What test harnesses take for "not run"."""


def missing() -> str | None:
    """What this machine lacks, with the remedy; None if it has all."""
    for program, package in (("g++", "g++"), (COMPILER, "g++-aarch64-linux-gnu")):
        if shutil.which(program) is None:
            return f"{program} is not installed (Debian: apt-get install {package})"
    if emulator() is None:
        return f"{EMULATORS[0]} is not installed (Debian: apt-get install qemu-user-static)"
    return None


def emulator() -> str | None:
    """The program that runs aarch64's."""
    return next((found for name in EMULATORS if (found := shutil.which(name))), None)


def flags() -> list[str]:
    """The flags that the kernels are compiled with, as CMakeLists.txt has them."""
    found = re.search(r"^set\(own_flags (.*)\)$", (ROOT / "CMakeLists.txt").read_text(), re.MULTILINE)
    assert found is not None
    return ["-std=c++17", *found[1].split(), "-Werror"]


def sources() -> list[Path]:
    """All that a machine without vector units of x86_64 is compiled from."""
    kernels = ROOT / "csrc" / "kernels"
    others = ["isa.cpp", "parallel.cpp", "lossless_ranked.cpp", "lossless_message.cpp"]
    own = ROOT / "tools" / "kernel_digests.cpp"
    return [own, *sorted(kernels.glob("*_portable.cpp")), *(kernels / name for name in others)]


def compiled(compiler: str, folder: Path, *, static: bool) -> Path:
    """The program that prints digests, compiled."""
    program = folder / f"digests-{compiler}"
    objects = {source: folder / f"{compiler}-{source.stem}.o" for source in sources()}

    def compile_one(source: Path) -> None:
        run(compiler, *flags(), "-pthread", "-c", "-o", objects[source], source)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, objects))
    run(compiler, "-pthread", *(["-static"] if static else []), "-o", program, *objects.values())
    return program


def run(*command: str | Path) -> str:
    """Standard output of a command that has to end with 0."""
    words = [str(part) for part in command]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(words)}\n{done.stderr}\nended with {done.returncode}")
    return done.stdout


def write_tables(path: Path) -> None:
    """Write the tables that the kernels are handed: codebooks, dynamic maps."""
    import torch

    from laconic.ops.codebooks import codebook_tensor
    from laconic.ops.dynamic_map import dynamic_map_tensor

    cpu = torch.device("cpu")
    tables = [codebook_tensor(code, cpu) for code in ("nf4", "e2m1", "int4")]
    tables += [dynamic_map_tensor(signed, cpu) for signed in (True, False)]
    path.write_bytes(torch.cat(tables).numpy().tobytes())


def main() -> int:
    """Compile, run and compare; the exit code."""
    lacking = missing()
    if lacking is not None:
        print(f"skipped: {lacking}")
        return SKIPPED
    emulated = emulator()
    assert emulated is not None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tables(folder / "tables")
        here = run(compiled("g++", folder, static=False), folder / "tables").splitlines()
        there = run(emulated, compiled(COMPILER, folder, static=True), folder / "tables").splitlines()
    different = [f"{a}\n{b}" for a, b in zip(here, there, strict=True) if a != b]
    print("\n".join(different) if different else f"all {len(here)} results have the same bits on aarch64")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
