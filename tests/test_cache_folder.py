"""Users without a home directory: what is read is not there, what would be written is refused by name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import patient

HOMELESS = """
import os, pwd, sys
os.environ.pop("HOME"), os.environ.pop("XDG_CACHE_HOME", None)
def unknown(uid): raise KeyError(uid)
pwd.getpwuid = unknown
from laconic.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


TRAIN = ["train", "--steps", "1", "--nproc", "1", "--run-dir", "run", "--data.paths", "text.txt"]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["profile", "--help"], 0, "~/.cache/laconic/wire_rates.json"),
        (
            TRAIN,
            2,
            "set data.cache_dir, or HOME",
        ),
        pytest.param([*TRAIN, "--data.cache_dir", "kept"], 0, "", marks=pytest.mark.slow),
    ],
)
@pytest.mark.ci
def test_a_user_without_a_home_directory(arguments: list[str], code: int, says: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some words " * 2000)
    done = subprocess.run(
        [sys.executable, "-c", HOMELESS, *arguments],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=patient(100),
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert says in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "~").exists()


def test_rates_are_not_written_into_a_folder_named_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from laconic.cost.hardware.rates_file import save_json
    from laconic.errors import ConfigError

    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="has no home directory; set HOME, or name a file"):
        save_json({}, "~/.cache/laconic/rates.json")
    assert not list(tmp_path.iterdir())
