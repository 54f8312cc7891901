"""`laconic completion`: real shells complete commands, flags, choices and files, without torch."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from laconic.cli.main import COMMANDS
from tests.patience import patient


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the script for each shell, and a file to complete."""
    folder = tmp_path_factory.mktemp("completion")
    code = (
        "import sys, contextlib, io\nfrom laconic.cli.main import main\n"
        "for shell in ('bash', 'zsh', 'fish'):\n"
        f"  with open({str(folder)!r} + '/' + shell, 'w') as file, contextlib.redirect_stdout(file):\n"
        "    assert main(['completion', shell]) == 0\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=patient(120))
    (folder / "run with spaces").mkdir()
    (folder / "runs.toml").touch()
    return folder


WORDS = [
    (["tra"], {"train"}),
    (["train", "--paralle"], {"--parallel"}),
    (["train", "--parallel", ""], {"ddp", "fsdp"}),
    (["zip", "--code", "t"], {"tiered"}),
    (["completion", ""], {"bash", "zsh", "fish"}),
    (["train", "--config", "runs"], {"runs.toml"}),
    (["infer", "pl"], {"plan"}),
    (["compare", "run\\ w"], {"run with spaces"}),
]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("words", "expected"), WORDS, ids=lambda value: " ".join(sorted(value) if isinstance(value, set) else value)
)
def test_bash_completes(scripts: Path, words: list[str], expected: set[str]) -> None:
    given = " ".join(f'"{word}"'.replace("\\ ", " ") for word in ["laconic", *words])
    script = (
        f"source ./bash; COMP_WORDS=({given}); COMP_CWORD={len(words)}; _laconic; "
        'for reply in "${COMPREPLY[@]}"; do echo "$reply"; done'
    )
    done = subprocess.run(["bash", "-c", script], cwd=scripts, capture_output=True, text=True, timeout=patient(60))
    assert done.stderr == ""
    assert set(done.stdout.splitlines()) == expected


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_knows_every_command(scripts: Path) -> None:
    script = "source ./bash; COMP_WORDS=(laconic ''); COMP_CWORD=1; _laconic; echo ${COMPREPLY[@]}; complete -p laconic"
    done = subprocess.run(["bash", "-c", script], cwd=scripts, capture_output=True, text=True, timeout=patient(60))
    assert set(COMMANDS) <= set(done.stdout.split())
    assert "complete -F _laconic laconic" in done.stdout


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
@pytest.mark.parametrize(
    ("words", "expected"), WORDS[:6], ids=lambda value: " ".join(sorted(value) if isinstance(value, set) else value)
)
def test_fish_completes(scripts: Path, words: list[str], expected: set[str]) -> None:
    script = f"source ./fish; complete -C 'laconic {' '.join(words)}'"
    done = subprocess.run(["fish", "-c", script], cwd=scripts, capture_output=True, text=True, timeout=patient(60))
    found = {line.partition("\t")[0] for line in done.stdout.splitlines()}
    assert found >= expected


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
def test_zsh_takes_the_script_as_a_completion(scripts: Path) -> None:
    done = subprocess.run(["zsh", "-n", "zsh"], cwd=scripts, capture_output=True, text=True, timeout=patient(60))
    assert (done.returncode, done.stderr) == (0, "")
    load = 'autoload -U compinit; compinit -u -D; source ./zsh; print -r -- "$_comps[laconic]"'
    done = subprocess.run(["zsh", "-f", "-c", load], cwd=scripts, capture_output=True, text=True, timeout=patient(60))
    assert (done.stdout, done.stderr) == ("_laconic\n", "")
