"""Fill a folder with the wheels that tools/gpu_day.py needs on a machine without a package index; less than 10 MB.

    python tools/gpu_wheels.py wheels                 # pydantic and what it needs, tomli-w
    python tools/gpu_wheels.py wheels --laconic       # and laconic itself, so that nothing is compiled there
    python tools/gpu_wheels.py wheels --transformers  # and 13 MB more: the transformers that the inference engine knows

Versions are those of constraints.txt, for CPython 3.12 on Linux and x86_64. laconic's wheel is built by a Python of
3.12 or later, whose kernels are of the stable ABI; the day takes its kernels and the checkout's Python.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_day.preflight import INFERENCE, WHEELS  # noqa: E402

MOST_NBYTES = 10 << 20
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


def main(arguments: Sequence[str]) -> int:
    """Fill the folder; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--laconic", action="store_true", help="build laconic's wheel, too")
    parser.add_argument("--transformers", action="store_true", help="bring the one that the engine knows, too")
    parser.add_argument("--python", default="python3.12", help="builds laconic's wheel (python3.12)")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    for old in options.folder.rglob("*.whl"):
        old.unlink()
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    pip += ["--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp", "--abi", "cp312"]
    pip += ["--abi", "abi3", "--abi", "none", *(f"--platform={name}" for name in (*_PLATFORMS, "any"))]
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    wanted = [(options.folder, WHEELS)]
    if options.transformers:
        wanted.append((options.folder / INFERENCE, ("transformers",)))
    for folder, names in wanted:
        command = [*pip, "--dest", str(folder), *pinned(constraints, names)]
        if (code := subprocess.run(command, check=False).returncode) != 0:
            return code
    if options.laconic:
        build = [options.python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(options.folder)]
        if (code := subprocess.run([*build, str(ROOT)], check=False).returncode) != 0:
            return code
    wheels = sorted(options.folder.glob("*.whl"))
    nbytes = sum(wheel.stat().st_size for wheel in wheels)
    print(*(f"{wheel.stat().st_size / 1e6:5.2f} MB  {wheel.name}" for wheel in wheels), sep="\n")
    print(f"{nbytes / 1e6:5.2f} MB in all")
    if nbytes >= MOST_NBYTES:
        print(f"that is more than {MOST_NBYTES / 1e6:.0f} MB: too much to bring along")
        return 1
    return 0


def pinned(constraints: str, names: Iterable[str]) -> list[str]:
    """The line of constraints.txt for each name, "name==version".

    Raises:
        KeyError: it has none.
    """
    lines = (line.strip() for line in constraints.splitlines())
    found = {_normal(line.partition("==")[0]): line for line in lines if "==" in line}
    return [found[_normal(name)] for name in names]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
