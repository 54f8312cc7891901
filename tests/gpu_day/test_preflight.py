"""What is missing is found before anything starts: packages, wheels, a device, tools."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks.gpu_day import preflight
from tests.gpu_day.faults import GOOD, ROOT, part

MODULES = (
    "torch",
    "numpy",
    "triton",
    "transformers",
    "safetensors",
    "psutil",
    "pytest",
    "hypothesis",
    "pytest_timeout",
    "packaging",
)
VERSIONS = {"torch": "2.11.0+cu130", "triton": "3.6.0", "transformers": "5.17.0", "numpy": "2.5.2"}
DEVICE = {"built for CUDA": "13.0", "device": "NVIDIA H200", "memory": "139 GiB", "capability": "9.0"}


def wheel(folder: Path, name: str, tag: str = "py3-none-any", module: str = "") -> Path:
    """A wheel of one empty module."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-1.0-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{module or name}.py", "found = True\n")
        archive.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{name}-1.0.dist-info/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n")
        archive.writestr(f"{name}-1.0.dist-info/RECORD", "")
    return path


def test_wheels_are_unpacked_where_parts_find_them(tmp_path: Path) -> None:
    wheel(tmp_path / "wheels", "tomli_w")
    wheel(tmp_path / "wheels" / preflight.INFERENCE, "transformers")
    site = tmp_path / "site"
    assert preflight.unpack(tmp_path / "wheels", site, ROOT) == []
    assert (site / "tomli_w.py").is_file()
    assert (site / "inference" / "transformers.py").is_file()
    assert not (site / "transformers.py").exists()


def test_a_wheel_for_another_python_is_named(tmp_path: Path) -> None:
    wheel(tmp_path / "wheels", "pydantic_core", "cp27-cp27m-win32")
    (stop,) = preflight.unpack(tmp_path / "wheels", tmp_path / "site", ROOT)
    assert "pydantic_core-1.0-cp27-cp27m-win32.whl is not for Python 3." in stop
    assert "tools/gpu_wheels.py" in stop


def test_a_wheel_that_was_cut_off_and_a_folder_that_is_none_are_named(tmp_path: Path) -> None:
    whole = wheel(tmp_path / "wheels", "pydantic")
    whole.write_bytes(whole.read_bytes()[:40])
    assert (
        "pydantic-1.0-py3-none-any.whl is not a wheel, or was cut off"
        in preflight.unpack(tmp_path / "wheels", tmp_path / "site", ROOT)[0]
    )
    assert "which is no folder" in preflight.unpack(tmp_path / "none", tmp_path / "site", ROOT)[0]


def test_of_laconics_wheel_the_kernels_stay_beside_the_checkout(tmp_path: Path) -> None:
    path = wheel(tmp_path / "wheels", "laconic", module="laconic/errors")
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("laconic/_kernels.abi3.so", "kernels")
    assert preflight.unpack(tmp_path / "wheels", tmp_path / "site", ROOT) == []
    assert (tmp_path / "site" / "laconic" / "_kernels.abi3.so").read_text() == "kernels"
    here, there = (folder / "laconic" / "errors.py" for folder in (ROOT / "src", tmp_path / "site"))
    assert there.read_text() == here.read_text()


def check(
    monkeypatch: pytest.MonkeyPatch,
    missing: Mapping[str, str] = {},
    device: Mapping[str, str] = DEVICE,
    versions: Mapping[str, str] = {},
    rehearses: bool = False,
) -> preflight.Findings:
    """The findings of a machine as it is planned for, but for what is given."""
    names = (*MODULES, *preflight.WHEELS, "laconic._kernels", "scikit_build_core", "nanobind", "cmake", "ninja")
    modules: dict[str, dict[str, str]] = {
        name: {"error": missing[name]} if name in missing else {"version": (VERSIONS | dict(versions)).get(name, "1.0")}
        for name in names
    }
    probed = {"python": "3.12.3", "modules": modules, "device": dict(device)}

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 0, json.dumps(probed) + "\n", "")

    monkeypatch.setattr(preflight.subprocess, "run", run)
    return preflight.check(ROOT, {"PATH": "/nowhere"}, rehearses)


def test_the_planned_machine_has_all_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    found = check(monkeypatch)
    assert found.stops == []
    assert found.has_kernels
    assert found.facts["device"] == "NVIDIA H200"
    assert found.facts["on"].endswith(f", {os.cpu_count()} cores")
    # No ncu and no compute-sanitizer stop nothing.
    assert [note.split()[0] for note in found.notes] == ["ncu", "compute-sanitizer"]


@pytest.mark.parametrize("name", ["torch", "pydantic_core", "hypothesis"])
def test_a_missing_package_stops_the_day(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (stop,) = check(monkeypatch, {name: f"ModuleNotFoundError: No module named '{name}'"}).stops
    assert stop.startswith(f"{name} is missing (ModuleNotFoundError")
    assert ("tools/gpu_wheels.py" in stop) == (name in preflight.WHEELS)


def test_without_kernels_what_builds_them_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = check(monkeypatch, {"laconic._kernels": "ModuleNotFoundError"})
    assert found.stops == []
    assert not found.has_kernels
    (stop,) = check(monkeypatch, {"laconic._kernels": "ModuleNotFoundError", "nanobind": "ModuleNotFoundError"}).stops
    assert stop.startswith("nanobind is missing")
    assert check(monkeypatch, {"nanobind": "ModuleNotFoundError"}).stops == []


@pytest.mark.parametrize(
    "error",
    [
        "The NVIDIA driver on your system is too old (found version 12020)",
        "Found no NVIDIA driver on your system",
        "Torch not compiled with CUDA enabled",
    ],
)
def test_a_device_that_torch_cannot_use_stops_the_day_and_no_rehearsal(
    error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = {"built for CUDA": "13.0", "error": error}
    (stop,) = check(monkeypatch, device=device).stops
    assert stop.startswith(f"torch (built for CUDA: 13.0) has no device: {error}")
    assert check(monkeypatch, device=device, versions={"numpy": "2.3.5"}, rehearses=True).stops == []


def test_other_versions_are_noted_and_a_numpy_that_the_interpreter_cannot_take_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    notes = check(monkeypatch, versions={"torch": "2.13.0"}).notes
    assert "torch is 2.13.0, and the day was planned for 2.11" in notes
    (stop,) = check(monkeypatch, versions={"numpy": "2.4.6"}, rehearses=True).stops
    assert "Triton 3.6.0 needs NumPy below 2.4" in stop
    assert check(monkeypatch, versions={"numpy": "2.4.6", "triton": "3.9.0"}, rehearses=True).stops == []


def test_the_real_probe_says_what_a_broken_import_says(tmp_path: Path) -> None:
    """A torch whose driver is too old, as torch words it."""
    (tmp_path / "torch.py").write_text(
        "class version: cuda = '13.0'\n"
        "class cuda:\n"
        "    def init():\n"
        "        raise RuntimeError('The NVIDIA driver on your system is too old (found version 12020).\\nUpdate it')\n"
    )
    (tmp_path / "numpy.py").write_text("raise OSError('libfoo.so.1: cannot open shared object file')\n")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-S", "-m", "benchmarks.gpu_day.probe", "numpy", "no_such_module"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["device"]["error"] == "The NVIDIA driver on your system is too old (found version 12020)."
    assert found["modules"]["numpy"]["error"] == "OSError: libfoo.so.1: cannot open shared object file"
    assert found["modules"]["no_such_module"]["error"].startswith("ModuleNotFoundError")


def test_a_probe_that_crashes_stops_the_day(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, -11, "", "Segmentation fault")

    monkeypatch.setattr(preflight.subprocess, "run", crash)
    (stop,) = preflight.check(ROOT, {"PATH": ""}, False).stops
    assert "crashed or hung while importing" in stop


def test_a_build_that_fails_or_hangs_stops_the_day(
    gpu_day: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "CMake Error: no compiler\nfailed")

    def hang(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        raise subprocess.TimeoutExpired(command, options["timeout"])

    for run, said in ((fail, "cannot be built here: CMake Error: no compiler; failed"), (hang, "not built in 300 s")):
        monkeypatch.setattr(preflight.subprocess, "run", run)
        findings = preflight.Findings(has_kernels=False)
        code = gpu_day.main(["--report", str(tmp_path)], [part("good", GOOD)], lambda *_, f=findings: f)
        shown = capsys.readouterr().out
        assert code == 2
        assert said in shown
        assert "tools/gpu_wheels.py --laconic" in shown
        assert "== good" not in shown
