"""Every command with a file that is not there: exit code 2, one line on stderr, no stdout.

Wrong values are in test_arguments.py, success of every command is in test_json.py and in the command's own file, Ctrl-C
and signals are in test_ending.py.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from safetensors.torch import save_file

from laconic.cli.arguments import PATH_METAVARS
from laconic.cli.main import COMMANDS, main
from tests.cli.test_arguments import SECOND_WORD, parser_of
from tests.collectives.simulated import made_up_rates
from tests.cost.infer_models import RATES

SIZES = ["--hidden-size", "64", "--intermediate-size", "128", "--num-layers", "2", "--num-heads", "2"]
PLAN = [*SIZES, "--vocab-size", "100"]
INFER = ["qwen3-235b-a22b", "--workers", "16", "--memory", "80GB", "--requests", "64", "--output", "64"]
TRAIN = [*("--nproc", "1", "--steps", "1", "--batch-size", "2", "--sequence-length", "8", "--eval-every", "0")]
NEEDED = {
    "train": [*TRAIN, "--data.paths", "text.txt", "--data.cache-dir", "cache", "--run-dir", "run"],
    "run": ["script.py"],
    "advise": ["script.py:build"],
    "compare": ["run"],
    "plan": [*PLAN, "--memory", "1GB"],
    "infer": [*INFER, "--rates", "infer.json"],
    "explain": ["--record", "rates.json"],
    "export": ["run", "model"],
    "generate": ["--model", "nothing", "--prompt", "x"],
    "serve": ["--model", "nothing"],
    "bench": ["--model", "nothing"],
    "zip": ["weights.safetensors"],
    "unzip": ["weights.safetensors.laconic"],
    "verify": ["weights.safetensors.laconic"],
}
"""What a command needs beside the argument in question, in a folder with the files of `prepared`."""
READS = {
    "train": ["--config", "--plan", "--init", "--model.path", "--data.paths", "--data.tokenizer", "--moe.rates"],
    "run": ["script"],
    "advise": ["target"],
    "compare": ["run_dirs"],
    "plan": ["model", "--init", "--calibration"],
    "infer": ["--routing", "--rates", "--expert-rates"],
    "explain": ["--record"],
    "export": ["run_dir"],
    "generate": ["--model"],
    "serve": ["--model"],
    "bench": ["--model"],
    "zip": ["path", "--delta"],
    "unzip": ["path", "--base"],
    "verify": ["path", "--base"],
}
"""The arguments that name what is read."""
OTHERS = {
    "train": ["--run-dir", "--data.cache-dir"],
    "run": ["--json"],
    "advise": ["--plot"],
    "compare": ["--out"],
    "plan": ["--out", "--chart", "--calibrate", "--data"],
    "profile": ["--out", "--infer-out", "--moe-out"],
    "infer": ["--gantt"],
    "export": ["out_dir"],
    "generate": ["--expert-loads", "--trace", "--rates", "--expert-rates", "--prompts"],
    "serve": ["--expert-loads", "--rates", "--expert-rates", "--api-key-file"],
    "bench": ["--output", "--prompts"],
    "zip": ["--out"],
    "unzip": ["--out"],
}
"""Those that name what is written, or are read after a model or together with what is written."""


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with a file of every kind that is read."""
    import torch

    monkeypatch.chdir(tmp_path)
    save_file({"a": torch.zeros(64)}, "weights.safetensors")
    Path("text.txt").write_text("hello world " * 100)
    Path("script.py").write_text("print('not reached')\n")
    made_up_rates().save(tmp_path / "rates.json")
    RATES.save(tmp_path / "infer.json")
    assert main(["zip", "weights.safetensors"]) == 0
    return tmp_path


def refused(args: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The line on stderr of a command that ends with 2 and prints nothing else."""
    capsys.readouterr()
    assert main(args) == 2, args
    shown = capsys.readouterr()
    assert shown.out == "", args
    assert re.fullmatch(r"laconic: error: .+\n", shown.err), (args, shown.err)
    return shown.err


def given(command: str, argument: str, path: str) -> list[str]:
    """A command whose argument is a path, and which has all else that it needs."""
    rest = list(NEEDED.get(command, []))
    if command == "plan" and argument in ("model", "--init"):  # without sizes
        return [command, *(["--init"] if argument == "--init" else []), path]
    if argument.startswith("--"):
        if argument in rest:
            at = rest.index(argument)
            rest = rest[:at] + rest[at + 2 :]
        return [command, *SECOND_WORD.get(command, []), *rest, argument, path]
    return [command, *SECOND_WORD.get(command, []), path, *rest[1:]]


@pytest.mark.parametrize("command", READS)
def test_a_file_that_is_not_there_ends_with_2_and_one_line(
    command: str, prepared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for argument in READS[command]:
        assert "absent" in refused(given(command, argument, str(prepared / "absent")), capsys)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_path_of_a_command_is_known_here(command: str) -> None:
    actions = parser_of(command)._actions
    named = {[*a.option_strings, a.dest][0] for a in actions if str(a.metavar) in PATH_METAVARS}
    assert named <= {*READS.get(command, []), *OTHERS.get(command, [])}
