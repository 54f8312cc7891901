"""`make test-changed` runs the tests of the wing that changed, those of everything where it cannot tell."""

from __future__ import annotations

import importlib
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from tests.distributed.processes import ROOT


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("changed_tests")


@pytest.mark.ci
def test_a_change_reaches_the_tests_of_its_wing_and_with_far_those_of_others(tool: ModuleType) -> None:
    sources = tool.read_sources()
    changed = "infer/engine.py", "vision/densenet.py", "gradients/store.py", "ops/reference/lossless.py"
    paths = [f"src/laconic/{file}" for file in changed]
    gone, unknown = f"src/laconic/moe/{'gone'}.py", f"nobody_{'names'}"  # in one piece this file would name them
    others = (
        "tests/moe/worlds.py",
        "tests/gpu_day/conftest.py",
        "docs/moe.md",
        "tools/reproducible.py",
        "pyproject.toml",
    )
    found = tool.reached([*paths, *others, gone, unknown], sources)
    engine = found["src/laconic/infer/engine.py"]
    assert "tests/infer/test_engine.py" in engine
    assert "tests/netlab/test_engine_faults.py" in engine
    assert not [file for file in engine if file.startswith(("tests/activations/", "tests/cli/", "tests/ops/"))]
    assert "tests/vision/test_macs.py" in found["src/laconic/vision/densenet.py"]  # by an f-string of laconic.vision
    assert "tests/gradients/test_store.py" in found["src/laconic/gradients/store.py"]
    assert "tests/moe/test_flat.py" in found["tests/moe/worlds.py"]
    assert found["tests/gpu_day/conftest.py"] == ["tests/gpu_day/"]
    assert "tests/test_docs.py" in found["docs/moe.md"]
    assert "tests/test_release_tools.py" in found["tools/reproducible.py"]
    for path in ("pyproject.toml", gone, unknown):
        assert found[path] == tool.EVERYTHING, path
    path = paths[-1]
    near, far = set(found[path]), set(tool.reached([path], sources, far=True)[path])
    assert "tests/ops/test_lossless.py" in near < far
    assert "tests/train/test_loop.py" in far - near


def test_what_is_committed_changed_and_new_counts(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*command: str) -> None:
        subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b", *command],
            cwd=tmp_path,
            check=True,
            capture_output=True,
        )

    monkeypatch.setattr(tool, "ROOT", tmp_path)
    git("init", "--initial-branch", "main")
    for name in ("same", "committed", "gone", "edited"):
        (tmp_path / name).write_text(name)
    git("add", ".")
    git("commit", "--message", "a")
    git("checkout", "-b", "branch")
    (tmp_path / "committed").write_text("other")
    git("commit", "--all", "--message", "b")
    (tmp_path / "edited").write_text("other")
    (tmp_path / "gone").unlink()
    (tmp_path / "new").touch()
    assert tool.changed("main") == ["committed", "edited", "gone", "new"]
    with pytest.raises(SystemExit, match=r"--since nowhere: .*name a branch or a commit"):
        tool.changed("nowhere")
