"""`laconic train`: flags over the configuration, without training."""

import json
import re
import subprocess
import sys
import tomllib
import types
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, Strict

from laconic.cli.flags import flags_parser, parse_flags
from laconic.cli.main import main
from laconic.cli.train import make_parser, resolve
from laconic.cost import Batch, Job, Layout, Plan, Settings
from laconic.cost.memory.job import precision_of
from laconic.errors import ConfigError, PlanError
from laconic.train.config.schema import TrainConfig, list_of
from laconic.train.config.settings import IS_PATH
from laconic.train.config.toml import dump_config, json_schema, load_config, save_config
from laconic.train.config.values import section
from tests.cost.shapes import Sizes, traced_llama


def config_of(*args: str) -> TrainConfig:
    return resolve(args)[0]


def test_no_flags_mean_the_demo() -> None:
    assert config_of() == TrainConfig()


def test_flags_reach_every_kind_of_field() -> None:
    config = config_of(
        *("--steps", "3", "--optimizer.learning-rate=1e-3", "--parallel", "fsdp", "--data.paths", "a", "b"),
        *("--model.num-key-value-heads", "2", "--activations.format", "int4", "--run_dir", "somewhere"),
        *("--model.extra.rope_theta", "5e5", "--model.extra.name=plain words", "--model.extra.flag", "true"),
    )
    assert (config.steps, config.optimizer.learning_rate, config.parallel) == (3, 1e-3, "fsdp")
    assert config.data.paths == ("a", "b")
    assert (config.model.num_key_value_heads, config.activations.format, config.run_dir) == (2, "int4", "somewhere")
    assert config.model.extra == {"rope_theta": 5e5, "name": "plain words", "flag": True}


@pytest.mark.parametrize("flag", ["--tensorboard", "--tensorboard=true", "--tensorboard=1", "--tensorboard=Yes"])
def test_boolean_flags_switch_on(flag: str) -> None:
    assert config_of(flag).tensorboard is True


@pytest.mark.parametrize(
    "flag",
    [
        "--model.no-tie-word-embeddings",
        "--no-model.tie-word-embeddings",
        "--model.tie-word-embeddings=false",
        "--model.tie_word_embeddings=0",
    ],
)
def test_boolean_flags_switch_off(flag: str) -> None:
    assert config_of(flag).model.tie_word_embeddings is False


def test_flags_override_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('steps = 5\nseed = 9\n[model]\nfamily = "qwen3"\n[model.extra]\na = 1\nb = 2\n')
    config = config_of("--config", str(path), "--steps", "6", "--model.extra.b", "3")
    assert (config.steps, config.seed, config.model.family, config.model.extra) == (6, 9, "qwen3", {"a": 1, "b": 3})


def test_file_and_flags_override_the_recipe(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[gradients]\nbits = 12\n")
    config = config_of("--recipe", "agoq", "--config", str(path), "--optimizer.kind", "adamw")
    assert (config.activations.bits, config.gradients.bits, config.gradients.reduce) == (4, 12, "q8")
    assert config.optimizer.kind == "adamw"
    assert config_of("--recipe", "exact").activations.bits == 16
    with pytest.raises(ConfigError, match="--recipe is 'all', but it must be one of exact, agoq"):
        config_of("--recipe", "all")


def planned(layout: Layout, settings: Settings) -> Plan:
    """The plan of a small Llama."""
    batch, sizes = Batch(2, 32), Sizes(64, 128, 4, 4, 2, 257, True, 16)
    model = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    traced = traced_llama(sizes, batch, precision_of(settings, layout))
    setting = {**traced.setting, "expert_parallel": layout.expert_parallel}
    return Plan(Job(replace(traced, settings=model, setting=setting), batch, layout, settings), {}, {}, "exact")


def test_a_plan_brings_the_settings_it_was_made_for(tmp_path: Path) -> None:
    layout = Layout(data_parallel=2, sharded=True, stages=2, micro_batches=4)
    settings = Settings(optimizer="adamw8bit", gradient_bits=8)
    planned(layout, settings).save(tmp_path / "plan.json")
    config = config_of("--plan", str(tmp_path / "plan.json"), "--steps", "7")
    assert (config.plan, config.steps) == (str(tmp_path / "plan.json"), 7)
    assert (config.model.num_hidden_layers, config.model.num_key_value_heads) == (4, 2)
    assert (config.nproc, config.parallel, config.batch_size, config.sequence_length) == (4, "fsdp", 2 * 2 * 4, 32)
    assert (config.pipeline.stages, config.micro_batches, config.precision) == (2, 4, "bf16")
    assert (config.optimizer.kind, config.gradients.bits) == ("adamw8bit", 8)
    of_folder = config_of("--plan", str(tmp_path / "plan.json"), "--init", "m").model
    assert (of_folder.path, of_folder.num_key_value_heads) == ("m", None)  # whose config.json has the sizes
    save_config(of_folder_run := config_of("--init", "m", "--steps", "3"), tmp_path / "config.toml")
    again = config_of("--resume", "--run-dir", str(tmp_path), "--plan", str(tmp_path / "plan.json"))
    assert (again.model, again.nproc) == (of_folder_run.model, 4)
    planned(replace(layout, expert_parallel=2), settings).save(tmp_path / "plan.json")
    with pytest.raises(PlanError, match="expert_parallel is 2 in the plan, but laconic train carries out no plan"):
        config_of("--plan", str(tmp_path / "plan.json"))


@pytest.mark.parametrize("flag", ["--resume", "--resume=yes", "--resume=1"])
def test_resume_starts_from_the_saved_config(flag: str, tmp_path: Path) -> None:
    save_config(
        load_config(None, {"seed": 4, "steps": 10, "run_dir": "/elsewhere/before/it/was/moved"}),
        tmp_path / "config.toml",
    )
    config = config_of(flag, "--run-dir", str(tmp_path), "--steps", "20")
    assert (config.seed, config.steps, config.resume, config.run_dir) == (4, 20, True, str(tmp_path))


def test_a_recipe_that_the_resumed_run_does_not_follow_is_refused(tmp_path: Path) -> None:
    save_config(config_of("--recipe", "agoq"), tmp_path / "config.toml")
    resume = ("--resume", "--run-dir", str(tmp_path))
    assert config_of(*resume, "--recipe", "agoq") == config_of(*resume)
    with pytest.raises(ConfigError, match=r"recipe is 'exact', which sets activations.bits to 16, but .* has 4"):
        config_of(*resume, "--recipe", "exact")
    save_config(config_of("--recipe", "agoq", "--gradients.bits", "12"), tmp_path / "config.toml")
    with pytest.raises(ConfigError, match=r"sets gradients.bits to 8, but .* has 12; .* or give --gradients.bits"):
        config_of(*resume, "--recipe", "agoq")
    assert config_of(*resume, "--recipe", "agoq", "--gradients.bits", "12").gradients.bits == 12


def test_a_run_of_recipe_and_plan_is_resumed_by_the_same_command(tmp_path: Path) -> None:
    planned(Layout(), Settings(optimizer="adamw8bit", gradient_bits=8)).save(tmp_path / "plan.json")
    command = ("--recipe", "agoq", "--plan", str(tmp_path / "plan.json"), "--run-dir", str(tmp_path))
    save_config(begun := config_of(*command), tmp_path / "config.toml")
    assert begun.activations.loss == "exact"  # by the plan, above the recipe
    assert config_of(*command, "--resume") == replace(begun, resume=True)
    with pytest.raises(ConfigError, match=r"recipe is 'exact', which sets activations\.bits to 16"):
        config_of(*command, "--resume", "--recipe", "exact")


def test_resume_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="resume needs run_dir"):
        config_of("--resume")
    with pytest.raises(ConfigError, match=r"must hold the config.toml of a run"):
        config_of("--resume", "--run-dir", str(tmp_path))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--model.hiden-size", "3"], r"unknown flag --model.hiden-size; did you mean --model.hidden-size\?"),
        (["--hidden-size", "3"], r"unknown flag --hidden-size; did you mean --model.hidden-size\?"),
        (["--no-tensorbord"], r"unknown flag --no-tensorbord; did you mean --no-tensorboard\?"),
        (["--qqq"], r"unknown flag --qqq; laconic train --help lists the known ones"),
        (["--optimizer.lr", "1"], r"unknown flag --optimizer.lr; did you mean --optimizer.learning-rate\?"),
        (["--lr", "1"], r"unknown flag --lr; did you mean --optimizer.learning-rate\?"),
        (["--model.layers", "1"], r"unknown flag --model.layers; did you mean --model.num-hidden-layers\?"),
        (["--model.vocab-size", "1"], r"unknown flag --model.vocab-size; did you mean --model.extra.vocab_size\?"),
        (["--data.path", "1"], r"unknown flag --data.path; did you mean --data.paths\?"),
        (["--swap-every", "1"], r"unknown flag --swap-every; did you mean --moe.swap-every\?"),
        (["--moe.swap-every"], r"--moe.swap-every needs a value, e.g. --moe.swap-every 1$"),
        (["--no-audit=3"], r"--no-audit takes no value; give --audit=true or =false"),
        (["--optimizer", "1"], r"--optimizer is a table; give its fields one by one, e.g. --optimizer.kind VALUE"),
        (["--tensorboard=maybe"], r"--tensorboard is 'maybe', but it must be true or false"),
        (["--model.extra", "a=1"], r"--model.extra is a table; give its fields one by one"),
        (["--model.extra.a"], r"--model.extra.a needs a value"),
        (["--optimizer.beta1", "1"], r"optimizer.beta1 is 1.0, but it must be below 1"),
    ],
)
def test_bad_flag_is_refused_by_name(args: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(*args)


def test_help_shows_defaults_groups_and_documentation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.toml"
    path.write_text("steps = 12345\n")
    assert main(["train", "--config", str(path), "--help"]) == 0
    shown = capsys.readouterr().out
    assert "--model.hidden-size INT" in shown
    assert "Width of the residual stream. (default: 128)" in shown
    assert "(default: 12345)" in shown


def test_printed_config_is_the_resolved_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["train", "--print-config", "--steps", "3"]) == 0
    text = capsys.readouterr().out
    assert tomllib.loads(text)["steps"] == 3
    assert text == dump_config(load_config(None, {"steps": 3}))


def test_printed_schema_is_that_of_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--schema"]) == 0
    assert json.loads(capsys.readouterr().out) == json_schema()


def test_the_package_does_without_pydantic_until_it_trains() -> None:
    code = "import sys, laconic, laconic.cli.main; assert not any(name.startswith('pydantic') for name in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_resolved_config_goes_to_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[Any] = []
    stand_in = types.ModuleType("laconic.train.launch.launcher")
    stand_in.launch = lambda config: launched.append(config) or 7  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "laconic.train.launch.launcher", stand_in)
    assert main(["train", "--steps", "3"]) == 7
    assert launched == [load_config(None, {"steps": 3})]


def test_no_resume_takes_nothing_from_the_run(tmp_path: Path) -> None:
    save_config(load_config(None, {"seed": 4}), tmp_path / "config.toml")
    assert config_of("--resume", "--run-dir", str(tmp_path), "--no-resume").seed == 0


def test_flags_for_paths_are_those_of_the_schema() -> None:
    paths = {flag.option_strings[0] for flag in make_parser().flags() if flag.metavar == "PATH"}
    assert paths == {
        *("--config", "--plan", "--run-dir", "--model.path", "--data.paths", "--data.tokenizer", "--data.cache-dir"),
        *("--moe.rates", "--init"),
    }


@section("brewing.")
class Brewing:
    """How it is made."""

    water_kind: Literal["soft", "hard"] | None = None
    """What is poured; 100% clear."""
    cups: Annotated[int, Strict(), Field(ge=1)] = 2
    """How many."""
    recipes: Annotated[tuple[Annotated[str, IS_PATH], ...], list_of("strings")] = ()
    """Where it is written."""


def test_a_field_is_a_flag_with_help_completion_and_messages() -> None:
    given = parse_flags(Brewing, ["--water_kind=hard", "--recipes", "a", "b"], (), "brew")
    assert given == {"water_kind": "hard", "recipes": ["a", "b"]}
    assert parse_flags(Brewing, ["--water-kind", "None"], (), "brew") == {"water_kind": None}
    parser = flags_parser(Brewing, {"cups": 3}, (), "brew")
    shown = " ".join(parser.format_help().split())
    assert "--water-kind {soft,hard} What is poured; 100% clear. (default: None)" in shown
    assert "--cups INT How many. (default: 3)" in shown
    assert {flag.dest: flag.metavar for flag in parser.flags()}["recipes"] == "PATH"
    for args, message in (
        (["--cups", "many"], "--cups is 'many', but it must be an integer"),
        (
            ["--water-kind", "sotf"],
            "--water-kind is 'sotf', but it must be one of soft, hard",
        ),
        (["--cup", "1"], "unknown flag --cup; did you mean --cups?"),
        (["--wk", "1"], "unknown flag --wk; did you mean --water-kind?"),
        (["--tea", "1"], "unknown flag --tea; brew --help lists the known ones"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            parse_flags(Brewing, args, (), "brew")
    with pytest.raises(ConfigError, match=r"brewing.cups is 0, but it must be at least 1"):
        Brewing(cups=0)
    with pytest.raises(ConfigError, match=r"unknown key brewing.wk; did you mean brewing.water_kind\?"):
        Brewing(wk=0)  # type: ignore[call-arg]
