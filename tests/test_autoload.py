"""The entry point by which torch learns laconic's backends."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

from tests.distributed.processes import ROOT, environment, finish, start

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


def test_torch_finds_the_backends_by_itself(tmp_path: Path) -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    # What pip writes when it installs laconic, for this test alone.
    info = tmp_path / "laconic-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: laconic\nVersion: 0\n")
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in points.items()) for group, points in groups.items()]
    (info / "entry_points.txt").write_text("\n".join(lines))
    paths = os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])
    ending = finish(start(["-c", PROGRAM], environment(PYTHONPATH=paths)))
    assert ending.code == 0, ending.err
    assert ending.out.splitlines() == [
        "laconic QuickGroup",
        "laconic:gloo QuickGroup",
        "cpu:laconic QuickGroup",
    ]
