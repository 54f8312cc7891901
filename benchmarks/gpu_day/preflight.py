"""Before anything starts: wheels unpacked, kernels built or found, and what is missing."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["WHEELS", "Findings", "check", "prepare"]

WHEELS = ("pydantic", "pydantic_core", "annotated_types", "typing_inspection", "tomli_w")
"""What laconic imports and the machine does not have; tools/gpu_wheels.py fetches it."""

_NEEDED = ("torch", "numpy", "triton", "transformers", "safetensors", "psutil", *WHEELS, "pytest", "hypothesis")
_NEEDED += ("pytest_timeout", "laconic", "laconic._kernels")
_PLANNED = {"python": "3.12", "torch": "2.11", "triton": "3.6", "transformers": "5.17"}
_BUILD_SECONDS = 300
_PROBE_SECONDS = 120
_INTERPRETER_NUMPY = (2, 5)
"""Triton 3.6's interpreter needs an older NumPy: it fails where a kernel takes a scalar from a tensor."""


@dataclass
class Findings:
    """What the machine has."""

    stops: list[str] = field(default_factory=list)
    """What has to be there before anything can start, one line each."""
    notes: list[str] = field(default_factory=list)
    """What parts of the day will miss."""
    facts: dict[str, str] = field(default_factory=dict)
    """Versions, device and driver."""


def prepare(root: Path, wheels: Path | None, site: Path, environment: dict[str, str]) -> list[str]:
    """Unpack wheels into `site` and put it before all else on the path; laconic is built if it has no kernels.

    Args:
        root: of the checkout.
        wheels: folder that tools/gpu_wheels.py filled; may hold a wheel of laconic, whose kernels are taken.
        site: an empty folder.
        environment: of the processes of parts; PYTHONPATH is set.

    Returns:
        What keeps the day from starting.
    """
    environment["PYTHONPATH"] = os.pathsep.join([str(site), str(root)])
    found: list[Path] = []
    if wheels is not None:
        if not wheels.is_dir():
            return [f"--wheels is {wheels}, which is no folder: fill one with python tools/gpu_wheels.py {wheels}"]
        found = sorted(wheels.glob("*.whl"))
    stops = [reason for wheel in found if (reason := _install(wheel, site, environment))]
    if stops or any(wheel.name.startswith("laconic-") for wheel in found) or _has_kernels(root, environment):
        if (site / "laconic").is_dir():  # the checkout's Python; of the wheel only the kernels
            shutil.copytree(root / "src" / "laconic", site / "laconic", dirs_exist_ok=True)
        return stops
    return _build(root, site, environment)


def _install(wheel: Path, site: Path, environment: Mapping[str, str]) -> str:
    """Why pip does not take a wheel; "" if it does."""
    if not zipfile.is_zipfile(wheel):
        return f"{wheel.name} is not a wheel, or was cut off: fetch it again with tools/gpu_wheels.py"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    command += ["--disable-pip-version-check", "--no-cache-dir", "--upgrade", "--target", str(site), str(wheel)]
    done = subprocess.run(command, env=dict(environment), capture_output=True, text=True, check=False)
    if not done.returncode:
        return ""
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [done.stderr[-300:]]
    if "not a supported wheel" in errors[0]:
        return (
            f"{wheel.name} is not for Python {sys.version_info[0]}.{sys.version_info[1]} on this machine: fetch it"
            " again with tools/gpu_wheels.py"
        )
    return f"{wheel.name} cannot be installed: {errors[0]}"


def _has_kernels(root: Path, environment: Mapping[str, str]) -> bool:
    """Whether Python finds the kernels: of an installation, or of a build beside the sources."""
    command = [sys.executable, "-c", "import laconic._kernels"]
    return not subprocess.run(command, env=dict(environment), capture_output=True, cwd=root, check=False).returncode


def _build(root: Path, site: Path, environment: Mapping[str, str]) -> list[str]:
    """Build laconic without isolation and without an index, and install what comes of it in `site`."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-build-isolation", "--no-deps", "--no-index"]
    command += ["--disable-pip-version-check", "--target", str(site), str(root)]
    try:
        done = subprocess.run(
            command, env=dict(environment), capture_output=True, text=True, timeout=_BUILD_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return [f"laconic was not built in {_BUILD_SECONDS} s: bring its wheel, with tools/gpu_wheels.py --laconic"]
    if done.returncode:
        tail = "; ".join(done.stderr.strip().splitlines()[-3:])
        return [f"laconic cannot be built here: {tail}. Bring its wheel, with tools/gpu_wheels.py --laconic"]
    return []


def check(root: Path, environment: Mapping[str, str], rehearses: bool) -> Findings:
    """What the Python of the parts has, and what the machine has beside it."""
    findings = Findings()
    command = [sys.executable, "-m", "benchmarks.gpu_day.probe", *_NEEDED]
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
            findings.stops.append(f"the interpreter of Triton {triton} needs NumPy below 2.5: pip install 'numpy<2.5'")
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
    for name, module in probed["modules"].items():
        if error := module.get("error"):
            remedy = ": bring its wheel, with tools/gpu_wheels.py" if name in WHEELS else ""
            findings.stops.append(f"{name} is missing ({error}){remedy}")
        elif name in _PLANNED:
            versions[name] = module["version"]
    findings.facts |= versions
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


def _version(text: str) -> Sequence[int]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])
