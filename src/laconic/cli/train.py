"""`laconic train`: resolve the configuration, then hand over to the launcher."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from laconic.cli.arguments import Parser
from laconic.cli.flags import flags_parser, parse_flags
from laconic.cli.output import json_only
from laconic.errors import ConfigError
from laconic.train.config.dotted_names import flat_settings, nested_settings
from laconic.train.config.recipes import RECIPES
from laconic.train.config.schema import TrainConfig
from laconic.train.config.settings import Setting
from laconic.train.config.toml import build_config, dump_config, json_schema, merge, read_toml

_WITH_SUMMARY = (0, 130, 143)
"""Exit codes of a run that has ended as it should: done, or stopped and saved."""

_OWN_FLAGS = (
    Setting("config", str, "TOML file with any of the fields below; flags override it.", is_path=True),
    Setting("init", str, "Begin from this Hugging Face model folder; short for --model.path.", is_path=True),
    Setting(
        "recipe",
        str,
        "Named settings to start from: agoq (everything compressed) or exact (nothing).",
        choices=tuple(RECIPES),
    ),
    Setting(
        "print_config", bool, "Print the resolved configuration as TOML and stop. A good start for a file of your own."
    ),
    Setting("json", bool, "Print the summary of the run (summary.json) as one JSON document; all else goes to stderr."),
    Setting("schema", bool, "Print the JSON schema of a configuration file and stop, for editors and other tools."),
)
_PROG = "laconic train"


def run(args: Sequence[str]) -> int:
    """Run `laconic train` with `args`; return the exit code of training."""
    config, own = resolve(args)
    if own.get("schema"):
        print(json.dumps(json_schema(), indent=2))
        return 0
    if own.get("print_config"):
        print(dump_config(config), end="")
        return 0
    if not own.get("json"):
        return _launch(config)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("--json is given under torchrun, whose processes share one stdout; read RUN/summary.json")
    from laconic.train.report.run_dir import new_run_dir  # late: it needs torch

    run_dir = Path(config.run_dir or new_run_dir())
    with json_only() as emit:
        code = _launch(dataclasses.replace(config, run_dir=str(run_dir)))
        if code in _WITH_SUMMARY and (run_dir / "summary.json").is_file():
            emit({"run_dir": run_dir, **json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))})
    return code


def make_parser() -> Parser:
    """Make the parser of the command's arguments, with defaults."""
    return flags_parser(TrainConfig, dataclasses.asdict(TrainConfig()), _OWN_FLAGS, _PROG)


def _launch(config: TrainConfig) -> int:
    from laconic.train.launch.launcher import launch

    code: int = launch(config)
    return code


def resolve(args: Sequence[str]) -> tuple[TrainConfig, dict[str, Any]]:
    """Resolve the configuration that `args` ask for, and the values of the command's own flags that were given.

    Layers, weakest first: defaults; the --recipe; with --resume, the config.toml saved in the run directory; what the
    --plan was made for; the --config file; flags. `--help` prints, with the resolved values as defaults, and exits 0.
    """
    given = parse_flags(TrainConfig, args, _OWN_FLAGS, _PROG)
    own = {one: given.pop(one) for one in ("help", *(flag.name for flag in _OWN_FLAGS)) if one in given}
    if (init := own.get("init")) is not None and given.setdefault("model.path", init) != init:
        raise ConfigError(f"--init is {init!r}, but --model.path is {given['model.path']!r}; give one of them")
    path = own.get("config")
    from_file = {} if path is None else read_toml(path)
    asked = merge(from_file, nested_settings(given))
    layers = [dataclasses.asdict(TrainConfig())]
    named = RECIPES[own["recipe"]] if "recipe" in own else {}
    if not asked.get("resume"):  # a saved run has no line for a field that is not set, which a recipe must not fill
        layers.append(named)
    if asked.get("resume"):
        run_dir = asked.get("run_dir")
        if run_dir is None:
            raise ConfigError("resume needs run_dir, the run to continue, e.g. --resume --run-dir runs/mine")
        saved = Path(os.path.expanduser(run_dir), "config.toml")
        if not saved.is_file():
            raise ConfigError(
                f"run_dir is {run_dir!r}, but it must hold the config.toml of a run for resume; a run that was stopped "
                "before it wrote one is started again without --resume"
            )
        layers.append(read_toml(saved))
    above = asked  # layers above the recipe
    if (plan := asked.get("plan")) is not None:
        from laconic.cost import load_plan  # late: few runs have one
        from laconic.train.config.plan import plan_settings

        planned = plan_settings(load_plan(os.path.expanduser(plan)))
        if functools.reduce(merge, [*layers, asked])["model"]["path"] is not None:
            del planned["model"]  # sizes; that the directory's model is the planned one is checked when it is there
        layers.append(planned)
        above = merge(planned, asked)
    values = functools.reduce(merge, [*layers, asked])
    if asked.get("resume"):
        _check_recipe(own.get("recipe"), named, above, values)
    if own.get("help"):
        flags_parser(TrainConfig, values, _OWN_FLAGS, _PROG).print_help()
        raise SystemExit(0)
    return build_config(values, path), own


def _check_recipe(
    name: str | None, named: Mapping[str, Any], above: Mapping[str, Any], values: Mapping[str, Any]
) -> None:
    """Check that a run that is resumed with `values` follows its recipe, but for what layers above it say."""
    given, resolved = flat_settings(above), flat_settings(values)
    for field, value in flat_settings(named).items():
        if field not in given and resolved[field] != value:
            raise ConfigError(
                f"recipe is {name!r}, which sets {field} to {value!r}, but the run to resume has {resolved[field]!r}; "
                f"leave the recipe out, or give --{field.replace('_', '-')}"
            )
