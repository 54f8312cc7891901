"""Arguments of every command: what is wrong is refused in one line, before anything heavy is imported."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from laconic.cli.arguments import Parser
from laconic.cli.main import COMMANDS, main, module_of
from laconic.errors import ConfigError

SECOND_WORD = {"infer": ["plan"], "bench": ["infer"]}


@functools.cache
def parser_of(command: str) -> Parser:
    parser: Parser = importlib.import_module(module_of(command)).make_parser()
    return parser


def refused(command: str, args: list[str]) -> str:
    """The message that refuses `args`, which is one line."""
    with pytest.raises(ConfigError) as found:
        parser_of(command).parse_args(args)
    message = str(found.value)
    assert "\n" not in message
    return message


def flags() -> Iterator[tuple[str, argparse.Action]]:
    for command in COMMANDS:
        for action in parser_of(command).flags():
            if action.option_strings[-1].startswith("--") and action.dest not in ("help", "model.extra.NAME"):
                yield command, action


FLAGS = list(flags())
VALUED = [(command, action) for command, action in FLAGS if action.nargs != 0]


def test_there_are_many_flags() -> None:
    assert len(FLAGS) > 200
    assert {command for command, _ in FLAGS} == set(COMMANDS) - {"completion"}


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_flag_is_named(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, *SECOND_WORD.get(command, []), "--qzwxv", "1"]) == 2
    shown = capsys.readouterr()
    assert re.fullmatch(r"laconic: error: unknown flag --qzwxv; .*--help lists the known ones\n", shown.err), shown.err
    assert shown.out == ""


def test_a_misspelt_flag_names_the_nearest() -> None:
    known = {name for _, other in FLAGS for name in other.option_strings}
    for command, action in FLAGS:
        flag = action.option_strings[-1]
        misspelt = flag[:-2] + flag[-1]
        if len(flag) >= 7 and misspelt not in known:  # two letters are as near to many others
            assert f"unknown flag {misspelt}; did you mean --" in refused(command, [misspelt])


def test_a_flag_without_its_value_says_what_it_needs() -> None:
    for command, action in VALUED:
        if action.nargs != "*":
            flag = action.option_strings[-1]
            assert refused(command, [flag]).startswith(f"{flag} needs ")


@pytest.mark.parametrize("value", ["many", "", "\u0663x", "1e3e", "0x10"])
def test_a_value_of_the_wrong_type_names_flag_value_and_rule(value: str) -> None:
    numbers = [
        (command, action)
        for command, action in VALUED
        if action.choices is None and getattr(action.type, "__name__", "") in ("int", "float", "integer")
    ]
    assert len(numbers) > 100
    for command, action in numbers:
        flag, several = action.option_strings[-1], action.nargs is not None
        args = [flag, *[value] * (3 if action.nargs == 3 else 1)] if several else [f"{flag}={value}"]
        message = refused(command, args)
        assert message.startswith(f"{flag} is {value!r}, but it must be a")


def test_an_unknown_choice_lists_the_known_ones() -> None:
    for command, action in VALUED:
        if not action.choices or action.nargs is not None:
            continue
        flag, choices = action.option_strings[-1], [str(one) for one in action.choices]
        numbers = all(one.isdigit() or one == "None" for one in choices)
        message = refused(command, [f"{flag}={'77' if numbers else 'qzwxv'}"])
        assert message.startswith(f"{flag} is ")
        assert f"but it must be one of {', '.join(choices)}" in message


@pytest.mark.parametrize(
    "args",
    [
        ["train", "stray"],
        ["doctor", "stray"],
        ["zip", "a", "stray"],
        ["export", "a", "b", "stray"],
        ["plan", "a", "stray"],
        ["completion", "bash", "stray"],
        ["explain", "stray"],
        ["profile", "stray"],
        ["advise", "a", "stray"],
        ["--version", "stray"],
    ],
    ids=lambda args: args[0],
)
def test_an_argument_too_many_is_named(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(args) == 2
    assert re.fullmatch(r"laconic: error: unexpected argument 'stray'; laconic .* takes .*\n", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["zip"], "FILE|DIR is missing; laconic zip --help tells what it takes"),
        (["export", "a"], "DIR is missing"),
        (["compare"], "RUN is missing"),
        (["generate", "--prompt", "x"], "--model is missing"),
        (["generate", "--modle", "x"], "unknown flag --modle; did you mean --model?"),
        (["run"], "script is missing"),
        (["advise"], "target is missing"),
        (["completion"], "shell is missing"),
        (["completion", "bsh"], "shell is 'bsh', but it must be one of bash, zsh, fish; did you mean bash?"),
        (["zip", ""], "FILE|DIR: the path is empty"),
        (["zip", "x", "--jobs", "0"], "--jobs is 0, but it must be at least 1"),
        (["zip", "x", "--best", "--code", "raw"], "--best is a code of its own; leave out --code raw"),
        (["zip", "x", "--code", "best"], "--code is 'best', but it must be one of auto, tiered, window, raw"),
        (["run", "--json", "script.py"], "script is missing"),
        (["run", "--json", "script.py", "other.py"], "--json is 'script.py', but it must be a file whose name ends in"),
        (["infer", "paln"], "laconic infer paln is no command, it must be: laconic infer plan"),
    ],
)
def test_what_is_missing_or_wrong_is_named(args: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(args) == 2
    err = capsys.readouterr().err
    assert err.startswith("laconic: error: ")
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("command", ["zip", "unzip", "verify"])
@pytest.mark.parametrize("name", ["absent", "\u00fcn\u00efcode \u6587\u4ef6", "--", "/", "a/.."])
def test_files_that_are_not_there_or_are_directories(
    command: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path)
    code = main([command, name])
    if command == "zip" and name == "a/..":  # the working directory, which holds nothing to shorten
        assert code == 0
        return
    assert code == 2
    err = capsys.readouterr().err
    assert err.startswith("laconic: error: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "args",
    [
        ["compare", "{}"],
        ["export", "{}", "out"],
        ["plan", "{}"],
        ["explain", "--record", "{}"],
        ["infer", "plan", "x", "--workers", "2", "--memory", "1GB", "--rates", "{}"],
        ["train", "--config", "{}"],
        ["train", "--plan", "{}"],
    ],
    ids=lambda args: " ".join(args[:2]),
)
@pytest.mark.parametrize("what", ["directory", "binary"])
def test_files_that_cannot_be_read_are_named(
    args: list[str], what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / what
    if what == "directory":
        path.mkdir()
    else:
        path.write_bytes(b"\xff\xfe\x00")
    assert main([arg.format(path) for arg in args]) == 2
    lines = capsys.readouterr().err.splitlines()  # progress, where the machine is slow, and the error
    assert lines[-1].startswith("laconic: error: ")
    assert str(path) in lines[-1]
    assert not any("Traceback" in line for line in lines)


ARGUMENTS = st.sampled_from(
    ["", "x", "\u6587", "--jobs", "--json", "--", "-m", "--code=raw", "-1", "--batch", "=", "-"]
)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(ARGUMENTS, max_size=5))
def test_no_arguments_make_a_parser_fail_otherwise(args: list[str]) -> None:
    for command in ("zip", "plan", "infer", "completion", "run"):
        with contextlib.suppress(ConfigError):
            parser_of(command).parse_args(args)


def test_an_abbreviation_is_not_taken_for_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["zip", "x", "--job", "1"]) == 2
    assert capsys.readouterr().err == "laconic: error: unknown flag --job; did you mean --jobs?\n"


@pytest.mark.parametrize(
    ("args", "flag"),
    [
        (["train", "--data.paths", "a", "--data.paths", "b"], "--data.paths"),
        (["train", "--data.paths=a", "--data.paths", "b", "c"], "--data.paths"),
        (["plan", "m", "--choices", "4", "--choices", "8"], "--choices"),
    ],
)
def test_a_list_that_is_given_twice_loses_no_values(
    args: list[str], flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(args) == 2
    assert f"{flag} is given twice, but it must be given once, with all its values" in capsys.readouterr().err


def test_the_last_of_a_flag_with_one_value_counts() -> None:
    options = parser_of("generate").parse_args(["--model", "a", "--prompts", "p", "--model", "b", "--prompts=q"])
    assert (options.model, options.prompts) == ("b", "q")


def test_a_list_without_values_does_not_mean_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    """As of an unset variable of a shell; without paths the demo would be trained."""
    assert main(["train", "--data.paths", "--steps", "3"]) == 2
    assert "--data.paths needs at least one value" in capsys.readouterr().err


def test_an_empty_text_does_not_mean_the_default() -> None:
    """As of an unset variable of a shell: --name "" was the directory's name, --rates "" the usual file."""
    texts = [(command, action) for command, action in VALUED if action.choices is None and action.type in (None, str)]
    assert len(texts) > 40
    for command, action in texts:
        flag = action.option_strings[-1]
        if flag == "--prompt":
            continue
        parser = parser_of(command)
        given = ["x" for each in parser.positionals() if each.nargs not in ("?", "*", argparse.REMAINDER)]
        needed = [[each.option_strings[-1], "x"] for each in parser.flags() if each.required and each is not action]
        given = [*itertools.chain.from_iterable(needed), *given]
        # A flag with a list would take positionals behind it, and what is behind a script is the script's
        args = [*given, flag, ""] if action.nargs in ("*", "+") else [flag, "", *given]
        assert refused(command, args).startswith(f"{flag} is empty"), (command, flag)
    assert parser_of("run").parse_args(["script.py", "", "--name", ""]).arguments == ["", "--name", ""]
    assert refused("export", ["", "x"]).endswith(
        "is empty, as of a variable that is not set; give a value, or leave it out"
    )
