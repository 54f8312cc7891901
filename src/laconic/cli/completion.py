"""`laconic completion`: what makes a shell complete commands, flags, choices and files, made from the parsers.

The script is static: a shell that sources it starts no Python at a TAB.
"""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from laconic.cli.arguments import PATH_METAVARS, Parser
from laconic.cli.main import COMMANDS, module_of

_TWO_WORDS = {"infer": "plan", "bench": "infer"}
"""Commands whose arguments follow a second word."""
_PATHS = "files"


@dataclass(frozen=True)
class _Flag:
    names: tuple[str, ...]
    help: str
    takes: str | tuple[str, ...] | None
    """None: no value; a tuple: one of these; otherwise "files" or "" for anything."""


@dataclass(frozen=True)
class _Command:
    name: str
    help: str
    flags: tuple[_Flag, ...]
    words: tuple[str, ...]
    """What the first positional argument may be, beside files."""
    files: bool
    """Whether positional arguments are files."""


def run(args: Sequence[str]) -> int:
    """Run `laconic completion` with `args`."""
    options = make_parser().parse_args(args)
    print(_SHELLS[options.shell]([_command(name) for name in COMMANDS]), end="")
    return 0


def make_parser() -> Parser:
    """Make the parser of the command's arguments."""
    parser = Parser(
        prog="laconic completion",
        description="Print the completion of commands, flags, choices and files for a shell. bash: "
        'eval "$(laconic completion bash)" in ~/.bashrc; zsh: the same in ~/.zshrc, after compinit; fish: '
        "laconic completion fish > ~/.config/fish/completions/laconic.fish",
    )
    parser.add_argument("shell", choices=tuple(_SHELLS), help="whose syntax it is")
    return parser


def _command(name: str) -> _Command:
    parser: Parser = importlib.import_module(module_of(name)).make_parser()
    positionals = list(parser.positionals())
    words = [_TWO_WORDS[name]] if name in _TWO_WORDS else []
    words += [str(choice) for action in positionals for choice in action.choices or ()]
    takes_files = any(action.choices is None for action in positionals)
    return _Command(name, COMMANDS[name], tuple(map(_flag, parser.flags())), tuple(words), takes_files)


def _flag(action: argparse.Action) -> _Flag:
    text = re.sub(r"\s*\(default: .*\)$", "", (action.help or "").replace("%%", "%")).partition(". ")[0]
    takes: str | tuple[str, ...] | None
    if action.nargs == 0:
        takes = None
    elif action.choices is not None:
        takes = tuple(str(choice) for choice in action.choices)
    else:
        takes = _PATHS if action.metavar in PATH_METAVARS else ""
    return _Flag(tuple(action.option_strings), text.strip(), takes)


def _bash(commands: Sequence[_Command]) -> str:
    lines = [
        "# bash completion of laconic, written by `laconic completion bash`",
        "_laconic() {",
        "  local current=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} flags= words= files=",
        "  COMPREPLY=()",
        "  if [ $COMP_CWORD -eq 1 ]; then",
        f'    COMPREPLY=($(compgen -W "{" ".join(one.name for one in commands)} --help --version" -- "$current"))',
        "    return",
        "  fi",
        '  case "${COMP_WORDS[1]} $before" in',
    ]
    for one in commands:
        for flag in one.flags:
            if flag.takes is not None:
                pattern = "|".join(f'"{one.name} {name}"' for name in flag.names)
                reply = _bash_reply(flag.takes)
                lines.append(f"    {pattern}) {reply}; return ;;")
    lines += ["  esac", '  case "${COMP_WORDS[1]}" in']
    for one in commands:
        names = " ".join(name for flag in one.flags for name in flag.names)
        lines.append(
            f'    {one.name}) flags="{names}" words="{" ".join(one.words)}" files={"1" if one.files else ""} ;;'
        )
    lines += [
        "  esac",
        '  if [[ "$current" == -* ]]; then',
        '    COMPREPLY=($(compgen -W "$flags" -- "$current"))',
        "  else",
        '    COMPREPLY=($(compgen -W "$words" -- "$current"))',
        '    if [ -n "$files" ]; then',
        "      compopt -o filenames 2>/dev/null",
        "      local IFS=$'\\n'",
        '      COMPREPLY+=($(compgen -f -- "$current"))',
        "    fi",
        "  fi",
        "}",
        "complete -F _laconic laconic",
    ]
    return "\n".join(lines) + "\n"


def _bash_reply(takes: str | tuple[str, ...]) -> str:
    if isinstance(takes, tuple):
        return f'COMPREPLY=($(compgen -W "{" ".join(takes)}" -- "$current"))'
    if takes == _PATHS:
        return "compopt -o filenames 2>/dev/null; local IFS=$'\\n'; COMPREPLY=($(compgen -f -- \"$current\"))"
    return ":"


def _zsh(commands: Sequence[_Command]) -> str:
    lines = [
        "#compdef laconic",
        "# zsh completion of laconic, written by `laconic completion zsh`",
        "_laconic() {",
        "  local -a commands",
        "  commands=(",
        *(f"    {shlex.quote(_zsh_text(one.name) + ':' + one.help)}" for one in commands),
        "  )",
        "  if (( CURRENT == 2 )); then",
        "    _describe command commands",
        "    return",
        "  fi",
        "  local command=$words[2]",
        '  words=("${(@)words[2,-1]}")',
        "  (( CURRENT -= 1 ))",
        "  case $command in",
    ]
    for one in commands:
        specs = [
            shlex.quote(f"*{name}[{_zsh_text(flag.help)}]{_zsh_value(flag.takes)}")
            for flag in one.flags
            for name in flag.names
        ]
        if one.words:
            specs.append(shlex.quote(f"1:argument:({' '.join(one.words)})"))
        if one.files:
            specs.append(shlex.quote("*:file:_files"))
        lines.append(f"    {one.name}) _arguments {' '.join(specs)} ;;")
    lines += ["  esac", "}", "compdef _laconic laconic"]
    return "\n".join(lines) + "\n"


def _zsh_text(text: str) -> str:
    return re.sub(r"([\[\]:\\])", r"\\\1", text)


def _zsh_value(takes: str | tuple[str, ...] | None) -> str:
    if takes is None:
        return ""
    if isinstance(takes, tuple):
        return f":value:({' '.join(takes)})"
    return ":file:_files" if takes == _PATHS else ":value: "


def _fish(commands: Sequence[_Command]) -> str:
    first = "not __fish_seen_subcommand_from " + " ".join(one.name for one in commands)
    lines = ["# fish completion of laconic, written by `laconic completion fish`", "complete -c laconic -f"]
    lines += [f"complete -c laconic -n '{first}' -a {one.name} -d {_fish_text(one.help)}" for one in commands]
    for one in commands:
        here = f"complete -c laconic -n '__fish_seen_subcommand_from {one.name}'"
        for flag in one.flags:
            names = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in flag.names)
            value = ""
            if isinstance(flag.takes, tuple):
                value = f" -x -a {_fish_text(' '.join(flag.takes))}"
            elif flag.takes is not None:
                value = " -r -F" if flag.takes == _PATHS else " -x"
            lines.append(f"{here} {names}{value} -d {_fish_text(flag.help)}")
        if one.words:
            lines.append(f"{here} -a {_fish_text(' '.join(one.words))}")
        if one.files:
            lines.append(f"{here} -F")
    return "\n".join(lines) + "\n"


def _fish_text(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


_SHELLS: dict[str, Callable[[Sequence[_Command]], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
