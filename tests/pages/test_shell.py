"""The shell commands of every page parse, and name flags, targets, modules, extras and files that are there."""

from __future__ import annotations

import shlex
import subprocess

import pytest

from laconic.cli.main import main
from tests.distributed.processes import ROOT
from tests.pages.shell import Shown, make_targets, missing_paths, shell_blocks, shown_in, transcripts, wrong_with

TEXTS = {page.name: page.read_text() for page in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])}


GONE = ("python -m laconic.testing.netlab",)
"""What the changelog says is named differently now."""


def test_commands_of_a_page_are_there_with_all_they_name() -> None:
    shown = [(page, one) for page, text in TEXTS.items() for one in shown_in(text) if one.line not in GONE]
    wrong = {(page, one.line): problem for page, one in shown if (problem := wrong_with(one))}
    assert not wrong, wrong


def test_a_command_answers_what_a_page_says_it_answers(capsys: pytest.CaptureFixture[str]) -> None:
    shown = [transcript for text in TEXTS.values() for transcript in transcripts(text)]
    assert len(shown) >= 2
    for command, answer in shown:
        program, *args = shlex.split(command)
        assert program == "laconic", command
        main(args)
        assert capsys.readouterr() == ("", answer), command


def test_the_shell_parses_what_pages_let_readers_paste() -> None:
    blocks = [(page, block) for page, text in TEXTS.items() for block in shell_blocks(text)]
    assert len(blocks) > 15
    for page, block in blocks:
        done = subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), f"{page}: {block}\n{done.stderr}"


def test_files_and_folders_that_a_page_names_are_there() -> None:
    # What the changelog says of earlier files need not be there any more.
    missing = {page: paths for page, text in TEXTS.items() if page != "CHANGELOG.md" and (paths := missing_paths(text))}
    assert not missing, missing


def test_every_target_is_said_at_the_head_of_the_makefile() -> None:
    head = (ROOT / "Makefile").read_text().split("\n\n")[0]
    unsaid = {target for target in make_targets() if f"# make {target} " not in head}
    assert unsaid <= {"slow", "format", "clean"}, unsaid


def test_many_commands_are_read() -> None:
    commands = [shown for text in TEXTS.values() for shown in shown_in(text)]
    assert len(commands) > 150
    assert sum(shown.whole for shown in commands) > 60


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("laconic trian", "no command trian"),
        ("laconic train --stepz 3", "unknown flag --stepz"),
        ("laconic train --steps many   # a comment", "--steps is 'many'"),
        ("laconic train --zip auto|sometimes", "--zip is 'sometimes'"),
        ("laconic zip", "FILE|DIR is missing"),
        ("laconic infer --workers 3", "begins with plan"),
        ("LACONIC_PURE=1 laconic doctor && laconic docter", "no command docter"),
        ('eval "$(laconic complete bash)"', "no command complete"),
        ("laconic train --print-config > x.toml | laconic verify", "FILE|DIR is missing"),
        ("torchrun --nprocs 2 -m laconic train", "no flag --nprocs"),
        ("torchrun --nproc-per-node 2 -m laconic train --stepz 3", "unknown flag --stepz"),
        ("python -m netlab --hosts 2 -- laconic trian", "no command trian"),
        ("python -m netlab --host 2 -- laconic train", "netlab has no flag --host"),
        ("python -m benchmarks.run nothing", "no benchmark nothing"),
        ("python -m benchmarks.run optim --fast", "no flag --fast"),
        ("python -m benchmarks.nothing", "no module benchmarks.nothing"),
        ("python tools/nothing.py", "tools/nothing.py is not there"),
        ("pytest tests/nothing", "tests/nothing is not there"),
        ("make nothing", "no target nothing"),
        ('pip install "laconic[hf,everything]"', "no extra everything"),
        ("pip install -c pins.txt .", "pins.txt is not there"),
        ("pip install --force-reinstall laconic", "name a checkout"),
        ("uvicorn --factory laconic.infer.app:nothing", "no laconic.infer.app:nothing"),
    ],
)
def test_what_is_not_there_is_found(line: str, problem: str) -> None:
    (shown,) = shown_in(f"    {line}\n")
    assert problem in str(wrong_with(shown))
    (shown,) = shown_in(f"```\n{line}\n```\n")
    assert problem in str(wrong_with(shown))


def test_a_sentence_may_leave_arguments_out_and_a_block_may_not() -> None:
    assert wrong_with(Shown("laconic plan --memory", whole=False)) is None
    assert "--memory needs a value" in str(wrong_with(Shown("laconic plan --memory", whole=True)))
    assert "unknown flag --memry" in str(wrong_with(Shown("laconic plan --memry", whole=False)))


def test_a_path_that_is_not_there_is_found() -> None:
    text = "See `tests/nothing/` and docs/cli.md, benchmarks/results/no_such*.md and https://x.org/docs/y; src/laconic."
    assert missing_paths(text) == ["benchmarks/results/no_such*.md", "tests/nothing/"]
