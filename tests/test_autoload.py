"""The entry point by which torch learns laconic's backends."""

from __future__ import annotations

import os
import shutil
import tomllib
from pathlib import Path

import pytest
import torch

from tests.distributed.processes import ROOT, environment, finish, start
from tests.grid import slow_but

PROGRAM = """
import sys
import torch.distributed as dist
assert "laconic.autoload" in sys.modules
assert not [name for name in sys.modules if name.startswith("laconic.") and name != "laconic.autoload"]
for name in ("laconic", "laconic:gloo", "cpu:laconic"):
    dist.init_process_group(name, store=dist.HashStore(), rank=0, world_size=1)
    print(dist.get_backend(), type(dist.group.WORLD).__name__)
    dist.destroy_process_group()
"""

UNCHANGED = """
import os
from types import FunctionType
import torch, torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
import laconic, laconic.autoload

FOLDER = os.path.dirname(laconic.__file__) + os.sep

def ours():
    functions = [(name, value) for m in (dist, c10d) for name, value in vars(m).items() if type(value) is FunctionType]
    return {name for name, function in functions if function.__code__.co_filename.startswith(FOLDER)}

laconic.autoload.register()
assert "LACONIC" in vars(dist.Backend)
assert not ours(), ours()
import laconic.collectives.process_group
assert not ours(), ours()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.monitored_barrier()
assert not ours(), ours()
group = dist.new_group([0], backend="laconic")
assert ours() == {"monitored_barrier"}, ours()
for _ in range(2):
    dist.monitored_barrier(group)
    dist.monitored_barrier()
    group.monitored_barrier()
    group = dist.new_group([0], backend="laconic")
dist.destroy_process_group()
"""


_BROKEN = {
    "no such module": {},
    "its folder is gone": {"__init__.py": "raise FileNotFoundError(2, 'No such file or directory', __file__)"},
    "half a file": {"autoload.py": "def register(:"},
    "an import that fails": {"autoload.py": "import laconic.absent"},
    "another version's": {"autoload.py": "names = ()"},
    "a registration that fails": {"autoload.py": "def register():\n    raise AttributeError('no attribute _plugins')"},
}
"""What is left of a package whose metadata is still there -> its files."""


def _installed(folder: Path) -> str:
    """A folder as pip leaves it, but for the package itself; as a PYTHONPATH."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    info = folder / "laconic-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: laconic\nVersion: 0\n")
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in points.items()) for group, points in groups.items()]
    (info / "entry_points.txt").write_text("\n".join(lines))
    shutil.copy(ROOT / "src" / "_laconic_backends.py", folder)
    return os.pathsep.join([str(folder), environment()["PYTHONPATH"]])


@pytest.mark.ci
def test_torch_finds_the_backends_by_itself(tmp_path: Path) -> None:
    ending = finish(start(["-c", PROGRAM], environment(PYTHONPATH=_installed(tmp_path))))
    assert ending.code == 0, ending.err
    assert ending.out.splitlines() == [
        "laconic QuickGroup",
        "laconic:gloo QuickGroup",
        "cpu:laconic QuickGroup",
    ]


@pytest.mark.ci
def test_functions_of_torch_are_its_own_until_a_group_is_laconics(tmp_path: Path) -> None:
    ending = finish(start(["-c", UNCHANGED], environment(PYTHONPATH=_installed(tmp_path))))
    assert ending.code == 0, ending.err


@pytest.mark.parametrize("case", slow_but(_BROKEN, "its folder is gone", "an import that fails"))
@pytest.mark.ci
def test_torch_goes_on_without_the_package(case: str, tmp_path: Path) -> None:
    """As after an editable install whose folder was moved: metadata that outlives the code."""
    # Without `site`, which would run the hook by which an editable install finds its package.
    paths = os.pathsep.join([_installed(tmp_path / "a sp\u00e1ce"), str(Path(torch.__file__).parents[1])])
    files = {"__init__.py": "", **_BROKEN[case]}
    for name, text in files.items():
        (tmp_path / "a sp\u00e1ce" / "laconic").mkdir(exist_ok=True)
        (tmp_path / "a sp\u00e1ce" / "laconic" / name).write_text(text)
    program = ["-S", "-c", "import torch; print(torch.ones(2).sum())"]
    ending = finish(start(program, environment(PYTHONPATH=paths, PYTHONWARNINGS="default")))
    assert (ending.code, ending.out) == (0, "tensor(2.)\n"), ending.err
    assert "laconic is installed, but cannot be imported" in ending.err
    assert "`pip uninstall laconic`" in ending.err


def test_what_torch_loads_is_a_file_of_its_own() -> None:
    """Copied by pip even where the package is not, and by builds without CMake, whose templates would take dollars."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    module, _, function = project["project"]["entry-points"]["torch.backends"]["laconic"].partition(":")
    [copied] = project["tool"]["scikit-build"]["generate"]
    assert copied == {"path": f"{module}.py", "template-path": f"src/{module}.py"}
    text = (ROOT / copied["template-path"]).read_text(encoding="utf-8")
    assert "$" not in text
    assert f"def {function}()" in text
