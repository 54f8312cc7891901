"""Before anything starts: wheels unpacked, kernels built or found, and what is missing."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WHEELS = ("pydantic", "pydantic_core", "annotated_types", "typing_inspection", "tomli_w")
"""What laconic imports and the machine does not have; tools/gpu_wheels.py fetches it."""

INFERENCE = "inference"
"""Folder beside the wheels for what only the inference engine takes: the transformers that it knows."""

_NEEDED = ("torch", "numpy", "triton", "transformers", "safetensors", "psutil", *WHEELS, "pytest", "hypothesis")
_NEEDED += ("pytest_timeout", "packaging")
_KERNELS = "laconic._kernels"
_FOR_BUILDING = ("scikit_build_core", "nanobind", "cmake", "ninja")
_PLANNED = {"python": "3.12", "torch": "2.11", "triton": "3.6", "transformers": "5.17"}
_BUILD_SECONDS = 300
_PROBE_SECONDS = 120
_INTERPRETER_NUMPY = (2, 4)
"""Triton 3.6's interpreter needs an older NumPy, which makes scalars of arrays with one element."""


@dataclass
class Findings:
    """What the machine has."""

    stops: list[str] = field(default_factory=list)
    """What has to be there before anything can start, one line each."""
    notes: list[str] = field(default_factory=list)
    """What parts of the day will miss."""
    facts: dict[str, str] = field(default_factory=dict)
    """Versions, device and driver."""
    has_kernels: bool = True
    """Whether laconic is there with its kernels; if not, it is built."""


def unpack(wheels: Path | None, site: Path, root: Path) -> list[str]:
    """Unpack the wheels of a folder into `site`; of a wheel of laconic only the kernels stay, beside the checkout.

    Args:
        wheels: folder that tools/gpu_wheels.py filled; None installs nothing.
        site: an empty folder, which will be first on the path; `INFERENCE` below it is what the engine alone takes.
        root: of the checkout.

    Returns:
        What keeps the day from starting.
    """
    if wheels is None:
        return []
    if not wheels.is_dir():
        return [f"--wheels is {wheels}, which is no folder: fill one with python tools/gpu_wheels.py {wheels}"]
    stops = _install(sorted(wheels.glob("*.whl")), site)
    stops += _install(sorted((wheels / INFERENCE).glob("*.whl")), site / INFERENCE)
    if (site / "laconic").is_dir():
        shutil.copytree(root / "src" / "laconic", site / "laconic", dirs_exist_ok=True)
    return stops


def _install(wheels: Sequence[Path], site: Path) -> list[str]:
    """Unpack wheels; which of them are not for this Python, or are none, and why."""
    from packaging.tags import sys_tags
    from packaging.utils import InvalidWheelFilename, parse_wheel_filename

    again = "fetch it again with tools/gpu_wheels.py"
    stops = []
    for wheel in wheels:
        try:
            *_, tags = parse_wheel_filename(wheel.name)
            archive = zipfile.ZipFile(wheel)
        except (InvalidWheelFilename, zipfile.BadZipFile):
            stops.append(f"{wheel.name} is not a wheel, or was cut off: {again}")
            continue
        with archive:
            if tags.isdisjoint(sys_tags()):
                version = ".".join(map(str, sys.version_info[:2]))
                stops.append(f"{wheel.name} is not for Python {version} on this machine: {again}")
            else:
                archive.extractall(site)
    return stops


def build(root: Path, site: Path) -> list[str]:
    """Build laconic without isolation and without an index, and install it in `site`; why it could not be built."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-build-isolation", "--no-deps", "--no-index"]
    command += ["--disable-pip-version-check", "--target", str(site), str(root)]
    remedy = "bring its wheel, with tools/gpu_wheels.py --laconic"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return [f"laconic was not built in {_BUILD_SECONDS} s: {remedy}"]
    if done.returncode:
        return [f"laconic cannot be built here: {'; '.join(done.stderr.strip().splitlines()[-3:])}; {remedy}"]
    return []


def check(root: Path, environment: Mapping[str, str], rehearses: bool) -> Findings:
    """What the Python of the parts has, and what the machine has beside it."""
    findings = Findings()
    command = [sys.executable, "-m", "benchmarks.gpu_day.probe", *_NEEDED, _KERNELS, *_FOR_BUILDING]
    try:
        done = subprocess.run(
            command,
            env=dict(environment),
            cwd=root,
            capture_output=True,
            text=True,
            timeout=_PROBE_SECONDS,
            check=False,
        )
        probed: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except (subprocess.TimeoutExpired, ValueError, IndexError):
        findings.stops.append(f"{sys.executable} could not be asked what it has: it crashed or hung while importing")
        return findings
    _take_modules(findings, probed)
    _take_device(findings, probed["device"], rehearses)
    if rehearses and _version(probed["modules"]["numpy"].get("version", "")) >= _INTERPRETER_NUMPY:
        triton = probed["modules"]["triton"].get("version", "")
        if _version(triton) < (3, 7):
            findings.stops.append(f"the interpreter of Triton {triton} needs NumPy below 2.4: pip install 'numpy<2.4'")
    for tool, part in (("ncu", "sanitizer"), ("compute-sanitizer", "sanitizer")):
        if shutil.which(tool, path=environment.get("PATH")) is None:
            findings.notes.append(f"{tool} is not on the PATH: the part {part} says so where it would use it")
    if (
        not rehearses
        and subprocess.run(
            [sys.executable, "-c", "import bitsandbytes"], env=dict(environment), capture_output=True, check=False
        ).returncode
    ):
        findings.notes.append("bitsandbytes is not installed: kernels stand beside a copy alone")
    return findings


def _take_modules(findings: Findings, probed: Mapping[str, Any]) -> None:
    versions = {"python": probed["python"]}
    findings.has_kernels = "error" not in probed["modules"][_KERNELS]
    needed = _NEEDED if findings.has_kernels else (*_NEEDED, *_FOR_BUILDING)
    for name in needed:
        module = probed["modules"][name]
        if error := module.get("error"):
            remedy = ": bring its wheel, with tools/gpu_wheels.py" if name in WHEELS else ""
            findings.stops.append(f"{name} is missing ({error}){remedy}")
        elif name in _PLANNED:
            versions[name] = module["version"]
    findings.facts |= versions | {"numpy": probed["modules"]["numpy"].get("version", ""), "on": _processor()}
    for name, planned in _PLANNED.items():
        if name in versions and _version(versions[name])[:2] != _version(planned):
            findings.notes.append(f"{name} is {versions[name]}, and the day was planned for {planned}")


def _take_device(findings: Findings, device: Mapping[str, str], rehearses: bool) -> None:
    build = device.get("built for CUDA", "no")
    if rehearses:
        findings.facts["device"] = ""
        return
    if error := device.get("error"):
        findings.stops.append(f"torch (built for CUDA: {build}) has no device: {error}; try it with --rehearse")
        return
    findings.facts |= {"CUDA": build, **{name: device[name] for name in ("device", "memory", "capability")}}
    if (smi := shutil.which("nvidia-smi")) is not None:
        done = subprocess.run(
            [smi, "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True, check=False
        )
        findings.facts["driver"] = done.stdout.strip()


def _processor() -> str:
    """Name of the CPU and number of cores."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{name or platform.machine()}, {os.cpu_count()} cores"


def _version(text: str) -> Sequence[int]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])
