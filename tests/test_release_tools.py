"""What builds, compares and tries releases: archives that differ are named, interpreters found, workflows pinned."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tests.distributed.processes import ROOT

Tool = Callable[[str], ModuleType]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Tool:
    """Imports a program of tools/ as it is run: beside the others."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    return load


def wheel(path: Path, members: dict[str, str], year: int = 2026) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in members.items():
            archive.writestr(zipfile.ZipInfo(name, (year, 1, 1, 0, 0, 0)), text)


def test_differences_of_two_builds_are_named(tool: Tool, tmp_path: Path) -> None:
    differences = tool("reproducible").differences
    one, other = tmp_path / "one", tmp_path / "other"
    wheel(one / "x.whl", {"a.py": "1", "b.py": "2"})
    wheel(other / "x.whl", {"a.py": "1", "b.py": "2"})
    assert differences(one, other) == []
    wheel(other / "x.whl", {"a.py": "1", "b.py": "3"})
    (found,) = differences(one, other)
    assert found.startswith("x.whl: b.py: ")
    wheel(other / "x.whl", {"a.py": "1", "b.py": "2"}, year=2025)
    assert len(differences(one, other)) == 2
    wheel(other / "x.whl", {"b.py": "2", "a.py": "1"})
    assert differences(one, other) == ["x.whl: members are equal, their order or the archive's own header is not"]
    wheel(other / "y.whl", {"a.py": "1"})
    assert "the other x.whl, y.whl" in differences(one, other)[0]


def test_an_interpreter_is_found_on_the_path_or_in_pyenvs_folder(
    tool: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = tool("interpreters").find_interpreter
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert find("3.99") is None
    here = ".".join(map(str, sys.version_info[:2]))
    (tmp_path / "bin").mkdir()
    shim = tmp_path / "bin" / f"python{here}"
    shim.write_text("#!/bin/sh\nexit 127\n")  # as a shim of pyenv whose version is not switched on
    shim.chmod(0o755)
    assert find(here) is None
    of_pyenv = tmp_path / "versions" / f"{here}.1" / "bin" / "python"
    of_pyenv.parent.mkdir(parents=True)
    of_pyenv.symlink_to(sys.executable)
    assert find(here) == of_pyenv


def test_a_version_gets_its_wheel_and_a_missing_one_is_named(tool: Tool, tmp_path: Path) -> None:
    wheel_for = tool("smoke").wheel_for
    with pytest.raises(SystemExit, match=r"has 0 wheels for Python 3\.13"):
        wheel_for(tmp_path, "3.13")
    old, stable = (tmp_path / f"laconic-0.1.0-{tag}-manylinux_2_35_x86_64.whl" for tag in ("cp311-cp311", "cp312-abi3"))
    old.touch()
    stable.touch()
    assert [wheel_for(tmp_path, version) for version in ("3.11", "3.12", "3.13")] == [old, stable, stable]


def test_cells_of_the_matrix(tool: Tool, tmp_path: Path) -> None:
    matrix = tool("matrix")
    cell = matrix.Cell.parse("3.13-2.11-5.1")
    assert cell.requirements() == ["torch==2.11.*", "transformers==5.1.*"]
    assert re.fullmatch(r"transformers==\d+\.\d+\.\d+", matrix.Cell("3.13", "2.13", "newest").requirements()[1])
    with pytest.raises(SystemExit, match="PYTHON-TORCH-TRANSFORMERS"):
        matrix.Cell.parse("3.13")
    kept = matrix.constraints(tmp_path).read_text()
    assert "torch==" not in kept.replace("galore-torch==", "")
    assert "numpy==" in kept
    assert all((ROOT / path).is_file() for path in matrix.TESTS)
    assert f'"torch>={matrix.TORCHES[0]}"' in (ROOT / "pyproject.toml").read_text()
    assert f'"transformers>={matrix.TRANSFORMERS[0]}"' in (ROOT / "pyproject.toml").read_text()


def test_actions_are_pinned_to_commits_and_jobs_name_their_permissions() -> None:
    assert WORKFLOWS
    for path in WORKFLOWS:
        text = path.read_text()
        used = re.findall(r"uses: (\S+)(.*)", text)
        assert used
        assert all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action) and re.match(r" # v\d", said) for action, said in used)
        assert re.search(r"^permissions: \{\}$", text, re.MULTILINE)
        jobs = text.partition("\njobs:\n")[2]
        assert len(re.findall(r"^  \w+:$", jobs, re.MULTILINE)) == len(
            re.findall(r"^    permissions:", jobs, re.MULTILINE)
        )
        assert text.count("actions/checkout@") == text.count("persist-credentials: false")


@pytest.mark.slow
def test_wheels_without_kernels_have_the_same_bytes_wherever_they_are_built(tool: Tool, tmp_path: Path) -> None:
    """What `make reproducible` does with compiled ones takes many minutes."""
    reproducible = tool("reproducible")
    for name, differing in reproducible.BUILDS.items():
        reproducible.copy_checkout(tmp_path / name)
        changed = {"LACONIC_PURE": "1", "SOURCE_DATE_EPOCH": "1700000000", "TZ": differing["TZ"]}
        done = subprocess.run(
            [sys.executable, "-m", "pip", "wheel", "--no-cache-dir", "--no-deps", "-w", "dist", "."],
            **{"cwd": tmp_path / name, "env": os.environ | changed, "capture_output": True, "text": True},
            timeout=250,
            check=False,
        )
        if "Could not find a version" in done.stderr:
            pytest.skip("no package index: the build backend cannot be installed")
        assert done.returncode == 0, done.stderr
    one, other = (tmp_path / name / "dist" for name in reproducible.BUILDS)
    assert [path.name.rpartition("-py3-")[2] for path in one.iterdir()] == ["none-any.whl"]
    assert reproducible.differences(one, other) == []


@pytest.mark.slow
def test_kernels_give_the_same_bits_on_aarch64() -> None:
    done = subprocess.run(
        [sys.executable, "tools/aarch64.py"], cwd=ROOT, capture_output=True, text=True, timeout=290, check=False
    )
    if done.returncode == 77:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "have the same bits on aarch64" in done.stdout
