"""Shell commands that pages show, and what is wrong with one: a flag, target, module or file that is not there."""

from __future__ import annotations

import importlib
import importlib.util
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from benchmarks.run import modules
from laconic.cli.arguments import Parser
from laconic.cli.main import COMMANDS, module_of
from laconic.cli.train import resolve
from laconic.errors import ConfigError
from laconic.installation import IS_RELEASED
from tests.distributed.processes import ROOT

PROGRAMS = ("laconic", "make", "python", "python3", "pip", "pytest", "torchrun", "uvicorn", "gunicorn")
"""What is checked. A line that begins with another word is no command, or one of the system's."""

_FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_SETS_UP = ("export", "eval", "openssl", ".", "git")
_SECOND_WORD = {"infer": "plan", "bench": "infer"}
_FOLDERS = "docs src tests benchmarks tools examples netlab csrc"


@dataclass(frozen=True)
class Shown:
    """A line of a page that a reader may type.

    Attributes:
        line: as it stands there.
        whole: it stands in a block or alone; one in the middle of a sentence may leave arguments out.
    """

    line: str
    whole: bool


def shown_in(text: str) -> Iterator[Shown]:
    """Commands of blocks without a language, of indented lines, and between backticks."""
    for block in shell_blocks(text):
        yield from (Shown(line, True) for line in block.replace("\\\n", " ").splitlines() if _begins_a_command(line))
    rest = _FENCED.sub("", text)
    indented = re.findall(r"^ {4}(\S.*)$", rest, re.MULTILINE)
    yield from (Shown(line, True) for line in indented if _begins_a_command(line))
    spans = (" ".join(span.split()) for span in re.findall(r"`([^`\n]+(?:\n[^`\n]+)?)`", rest))
    yield from (Shown(span, False) for span in spans if " " in span and _begins_a_command(span))


def shell_blocks(text: str) -> Iterator[str]:
    """Blocks without a language that begin with a command: what a reader pastes."""
    for language, block in _FENCED.findall(text):
        if not language and _begins_a_command(block):
            yield block


def transcripts(text: str) -> Iterator[tuple[str, str]]:
    """Commands behind `$ ` in indented lines, and what stands below each: what it answers."""
    for command, answer in re.findall(r"^ {4}\$ (.+)\n((?: {4}(?!\$).*\n)*)", _FENCED.sub("", text), re.MULTILINE):
        yield command, re.sub("^ {4}", "", answer, flags=re.MULTILINE)


def wrong_with(shown: Shown) -> str | None:
    """What does not exist, or None."""
    for words in _simple_commands(shown.line):
        problem = _wrong_with_words(words, shown.whole)
        if problem is not None:
            return problem
    return None


def missing_paths(text: str) -> list[str]:
    """Files and folders of the repository that a page names and that are not there."""
    rest = re.sub(r"https?://\S+", "", text)
    named = re.findall(rf"(?<![\w/.-])((?:{'|'.join(_FOLDERS.split())})/[\w./*-]*)", rest)
    return [path for path in sorted({one.rstrip(".-") for one in named}) if not _is_there(path)]


def _begins_a_command(text: str) -> bool:
    first = re.match(r"(?:[A-Z_]+=\S+ )*([\w.]+)(?= |\n|$)", text)
    return first is not None and first[1] in (*PROGRAMS, *_SETS_UP)


def _simple_commands(line: str) -> Iterator[list[str]]:
    """The words of each command of a line: what `&&`, `|` and `;` part, without redirections and assignments."""
    for inner in re.findall(r"\$\(([^)]*)\)", line):
        yield shlex.split(inner)
    # Commas and the like of an alternative are the page's, not the shell's.
    lexer = shlex.shlex(re.sub(r"(?<=\w)\|(?=\w)", "\0", line), posix=True, punctuation_chars="&|;<>")
    lexer.whitespace_split = True
    words: list[str] = []
    target_follows = False
    for token in [*lexer, ";"]:
        if token in ("&&", "||", "|", ";", "&"):
            if words:
                yield words
            words = []
        elif token in (">", ">>", "<"):
            target_follows = True
        elif target_follows:
            target_follows = False
        elif not words and re.fullmatch(r"[A-Z_]+=.*", token):
            continue
        else:
            words.append(token)


def _wrong_with_words(words: list[str], whole: bool) -> str | None:
    program, rest = words[0], words[1:]
    if program == "laconic":
        return _wrong_with_laconic(rest, whole)
    if program == "make":
        unknown = [word for word in rest if "=" not in word and word not in make_targets()]
        return f"make has no target {unknown[0]}" if unknown else None
    if program == "torchrun":
        return _wrong_with_torchrun(rest, whole)
    if program in ("python", "python3"):
        return _wrong_with_python(rest, whole)
    if program == "pip":
        return _wrong_with_pip(rest)
    if program == "pytest":
        missing = [word for word in rest if "/" in word and not _is_there(word)]
        return f"{missing[0]} is not there" if missing else None
    if program in ("uvicorn", "gunicorn"):
        return _wrong_with_factory(rest)
    return None


def _wrong_with_laconic(words: list[str], whole: bool) -> str | None:
    words = [word for word in words if word != "..."]
    if not words or words[0] in ("--version", "--help", "COMMAND"):
        return None
    command, args = words[0], words[1:]
    if command not in COMMANDS:
        return f"laconic has no command {command}"
    if args == ["--help"]:
        return None
    if second := _SECOND_WORD.get(command):
        if args[:1] != [second] and (args or whole):
            return f"laconic {command} begins with {second}"
        args = args[1:]
    for alternative in _alternatives(args):
        try:
            _parse(command, alternative)
        except ConfigError as error:
            left_out = re.search(r"^\S+ needs (a value|at least)|(is|are) missing;", str(error))
            if whole or left_out is None:
                return str(error)
    return None


def _alternatives(args: list[str]) -> Iterator[list[str]]:
    """`--zip auto|on|off` is three commands; N and the like stand for a number."""
    args = ["1" if re.fullmatch("[NK]", word) else word for word in args]
    widest = max((word.count("\0") + 1 for word in args), default=1)
    for index in range(widest):
        yield [choices[min(index, len(choices) - 1)] for choices in (word.split("\0") for word in args)]


def _wrong_with_torchrun(words: list[str], whole: bool) -> str | None:
    from torch.distributed.run import get_args_parser

    flags = {name for action in get_args_parser()._actions for name in action.option_strings}
    for index, word in enumerate(words):
        if word == "-m":
            return _wrong_with_python(words[index:], whole)
        if word.endswith(".py"):
            return _wrong_with_python(words[index:], whole)
        name = word.partition("=")[0]
        if name.startswith("--") and name not in flags:
            return f"torchrun has no flag {name}"
    return None


def _wrong_with_python(words: list[str], whole: bool) -> str | None:
    if words[:1] != ["-m"]:
        script = next((word for word in words if word.endswith(".py")), None)
        return None if script is None or "/" not in script or _is_there(script) else f"{script} is not there"
    if len(words) == 1 or re.fullmatch("[A-Z]+|package.*", words[1]):
        return None  # the reader's own
    module, args = words[1], words[2:]
    if module == "laconic":
        return _wrong_with_laconic(args, whole)
    if not _exists(module):
        return f"there is no module {module}"
    if module == "benchmarks.run" and args and not args[0].startswith("-") and args[0] not in modules():
        return f"there is no benchmark {args[0]}"
    if "--" in args:
        inner = args[args.index("--") + 1 :]
        args = args[: args.index("--")]
        if problem := _wrong_with_words(inner, whole):
            return problem
    if module.partition(".")[0] in _FOLDERS.split():
        sources = _source(module)
        unknown = [word for word in args if word.startswith("--") and f'"{word.partition("=")[0]}"' not in sources]
        return f"{module} has no flag {unknown[0]}" if unknown else None
    return None


def _wrong_with_pip(words: list[str]) -> str | None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for named in re.findall(r"(?:laconic|\.)\[([\w,]+)\]", " ".join(words)):
        for extra in named.split(","):
            if extra not in extras:
                return f"laconic has no extra {extra}"
    if not IS_RELEASED and "laconic" in words:
        return "no package index has laconic; name a checkout or a wheel"
    if "-c" in words and not _is_there(words[words.index("-c") + 1]):
        return f"{words[words.index('-c') + 1]} is not there"
    return None


def _wrong_with_factory(words: list[str]) -> str | None:
    (target,) = [word for word in words if ":" in word]
    module, _, name = target.removesuffix("()").partition(":")
    return None if f"\ndef {name}(" in _source(module) else f"there is no {target}"


@cache
def make_targets() -> frozenset[str]:
    """The targets of the Makefile."""
    return frozenset(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def _parse(command: str, args: list[str]) -> None:
    """Raise ConfigError if the command would refuse `args`, as far as that needs no files."""
    if command == "train" and not {"--plan", "--config", "--resume"}.intersection(args):
        resolve(args)
        return
    _parser(command).parse_args(args)


@cache
def _parser(command: str) -> Parser:
    parser: Parser = importlib.import_module(module_of(command)).make_parser()
    return parser


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


@cache
def _source(module: str) -> str:
    spec = importlib.util.find_spec(module)
    if spec is not None and spec.submodule_search_locations:
        spec = importlib.util.find_spec(f"{module}.__main__")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).read_text()


def _is_there(path: str) -> bool:
    return any(ROOT.glob(path)) if "*" in path else (ROOT / path).exists()
