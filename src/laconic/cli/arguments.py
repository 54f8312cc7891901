"""argparse with one style of error: a ConfigError whose line names flag, value, rule and the nearest known flag."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

from laconic.errors import ConfigError
from laconic.train.config.dotted_names import nearest

PATH_METAVARS = ("FILE", "DIR", "PATH", "FILE|DIR", "RUN", "BASE", "MODEL", "SCRIPT", "TARGET")
"""Names in the help of arguments that are paths; shells complete files for them."""
_TYPES = {"int": "an integer", "integer": "an integer", "float": "a number"}
_EXAMPLES = {"INT": "1", "FLOAT": "0.01"}
"""Values to show for what the help calls so."""
_LONGEST = 60


class Parser(argparse.ArgumentParser):
    """Parser of a command. Flags are not abbreviated: an abbreviation would mean another flag once one is added."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **options})
        self._given: list[str] = []

    def parse_args(self, args: Sequence[str], namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse `args`; `--help` prints and exits with 0."""
        self._given = list(args)
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            raise ConfigError(self._unknown(unknown[0]))
        for each in self.positionals():
            if each.nargs == argparse.REMAINDER:  # a script's own
                self._given = self._given[: len(self._given) - len(getattr(options, each.dest))]
        names: dict[argparse.Action, str] = {}
        for one in self._flags_given():
            action = self._option_string_actions.get(one)
            if action in names and action.nargs in ("*", "+"):
                raise ConfigError(f"{one} is given twice, but it must be given once, with all its values behind it")
            if action is not None and (other := names.setdefault(action, one)) != one:
                raise ConfigError(f"{other} and {one} are given, which are the same flag; give one of them")
        own = [each for each in self.positionals() if each.nargs != argparse.REMAINDER]  # others are a script's
        for action in [*names, *own]:
            value = getattr(options, action.dest, None)
            if "" in (value if isinstance(value, list) else [value]) and action.metavar != "TEXT":
                name = names.get(action, _shown(action))
                raise ConfigError(f"{name} is empty, as of a variable that is not set; give a value, or leave it out")
        return options

    def refuse(self, flags: Iterable[str], why: str) -> None:
        """Refuse flags that would have no effect.

        Args:
            flags: as they are written, "--out".
            why: they have none, as the end of a sentence.
        """
        refused = {self._option_string_actions[flag] for flag in flags}
        unused = dict.fromkeys(one for one in self._flags_given() if self._option_string_actions.get(one) in refused)
        if unused:
            verb, it = ("are", "them") if len(unused) > 1 else ("is", "it")
            raise ConfigError(f"{' and '.join(unused)} {verb} given, but would have no effect {why}; leave {it} out")

    def error(self, message: str) -> NoReturn:
        """Raise argparse's `message` in our words."""
        raise ConfigError(self._reworded(message))

    def flags(self) -> Iterator[argparse.Action]:
        """Yield the actions that are flags and shown in the help."""
        yield from (a for a in self._actions if a.option_strings and a.help != argparse.SUPPRESS)

    def positionals(self) -> Iterator[argparse.Action]:
        """Yield the actions that are not flags."""
        yield from (action for action in self._actions if not action.option_strings)

    def _reworded(self, message: str) -> str:
        unknown = [one for one in self._flags_given() if one not in self._option_string_actions]
        if message.startswith("the following arguments are required: "):
            if unknown:  # a misspelt flag explains the missing one
                return self._unknown(unknown[0])
            rest = {_shown(action) for action in self.positionals() if action.nargs == argparse.REMAINDER}
            missing = [name for name in message.partition(": ")[2].split(", ") if name not in rest]
            verb = "is" if len(missing) == 1 else "are"
            return f"{' and '.join(missing)} {verb} missing; {self.prog} --help tells what it takes"
        found = re.fullmatch(r"argument (\S+(?:/\S+)*): (.*)", message, re.DOTALL)
        if found is None:
            return message
        names, problem = found[1].split("/"), found[2]
        name = next((one for one in names if one in self._flags_given()), names[-1])
        action = next((one for one in self._actions if argparse._get_action_name(one) == found[1]), None)
        if unknown and action is not None and not action.option_strings:  # its value was taken for an argument
            return self._unknown(unknown[0])
        if problem.startswith("expected "):
            wanted = "" if action is None else f", e.g. {name} {self._example(action)}"
            return f"{name} needs {_values(problem)}{wanted}"
        if wrong := re.match(r"invalid (\S+) value: (.*)", problem, re.DOTALL):
            kind = wrong[1].strip("'")
            return f"{name} is {_clipped(wrong[2])}, but it must be {_TYPES.get(kind, f'a valid {kind}')}"
        if (wrong := re.match(r"invalid choice: (.*) \(choose from ", problem, re.DOTALL)) and action is not None:
            choices = [str(choice) for choice in action.choices or ()]
            meant = nearest(wrong[1].strip("'"), choices)
            return f"{name} is {_clipped(wrong[1])}, but it must be one of {', '.join(choices)}{meant}"
        return f"{name} {problem}" if problem.startswith("is ") else f"{name}: {problem}"

    def _unknown(self, argument: str) -> str:
        if not argument.startswith("-") or re.fullmatch(r"-\d.*", argument):
            takes = ", ".join(_shown(action) for action in self.positionals())
            return f"unexpected argument {_clipped(repr(argument))}; {self.prog} takes {takes or 'flags only'}"
        flag = argument.partition("=")[0]
        known = [one.lstrip("-") for one in self._option_string_actions if one.startswith("--")]
        meant = flag_hint(flag.lstrip("-").replace("_", "-"), known)
        return f"unknown flag {flag}{meant or f'; {self.prog} --help lists the known ones'}"

    def _flags_given(self) -> list[str]:
        before = self._given[: self._given.index("--")] if "--" in self._given else self._given
        return [_spelled(one).partition("=")[0] for one in before if one.startswith("--")]

    def _parse_optional(self, arg_string: str) -> Any:
        return super()._parse_optional(_spelled(arg_string))

    @staticmethod
    def _example(action: argparse.Action) -> str:
        if action.choices is not None:
            return str(next(iter(action.choices)))
        return _EXAMPLES.get(_metavar(action), _metavar(action))


def flag_hint(name: str, known: Iterable[str], tables: Iterable[str] = ()) -> str:
    """Suggest a flag for an unknown one, as the end of a message; names are spelt as flags, without "--"."""

    def flag(found: re.Match[str]) -> str:
        return f"{found[1]}--{found[2].replace('_', '-')}"

    hint = nearest(name, known, tables).replace("did you mean ", "did you mean --")
    return re.sub(r"(it is called )(\S+)", flag, hint)


def at_least(least: int) -> Callable[[str], int]:
    """The type of a flag that takes a whole number from `least` on."""

    def integer(text: str) -> int:
        if (number := int(text)) < least:
            raise argparse.ArgumentTypeError(f"is {number}, but it must be at least {least}")
        return number

    return integer


def add_json(parser: argparse.ArgumentParser, text: str = "print the result as one JSON document") -> None:
    """Add the flag --json to `parser`."""
    parser.add_argument("--json", action="store_true", help=text)


def _spelled(argument: str) -> str:
    """A flag with hyphens for underscores, as `laconic train` takes both; its value and other arguments as they are."""
    flag, equals, value = argument.partition("=")
    return flag.replace("_", "-") + equals + value if flag.startswith("--") else argument


def _metavar(action: argparse.Action) -> str:
    metavar = action.metavar if action.metavar is not None else action.dest.upper()
    return metavar if isinstance(metavar, str) else metavar[0]


def _shown(action: argparse.Action) -> str:
    return str(action.metavar or action.dest)


def _values(problem: str) -> str:
    number = problem.removeprefix("expected ").replace(" arguments", "").replace(" argument", "")
    return {"one": "a value", "at least one": "at least one value"}.get(number, f"{number} values")


def _clipped(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
