"""Configuration: TOML in and out, layers, and what is refused."""

import dataclasses
import re
import tomllib
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laconic.errors import ConfigError
from laconic.train.config.dotted_names import nested_settings
from laconic.train.config.recipes import RECIPES
from laconic.train.config.schema import (
    ActivationsConfig,
    CheckpointConfig,
    DataConfig,
    GradientsConfig,
    ModelConfig,
    MoEConfig,
    OptimizerConfig,
    PipelineConfig,
    TrainConfig,
)
from laconic.train.config.settings import field_docs
from laconic.train.config.settings import settings as settings_of
from laconic.train.config.toml import (
    build_config,
    dump_config,
    json_schema,
    load_config,
    read_toml,
    save_config,
)
from tests.grid import few

SECTIONS = (
    TrainConfig,
    ModelConfig,
    DataConfig,
    ActivationsConfig,
    GradientsConfig,
    OptimizerConfig,
    PipelineConfig,
    MoEConfig,
    CheckpointConfig,
)

# Text that settings can hold: any code points but lone surrogates, and no NUL.
texts = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=30)
paths = texts.filter(bool)
toml_values = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
configs = st.builds(
    TrainConfig,
    model=st.builds(ModelConfig, path=paths)
    | st.builds(
        ModelConfig,
        num_key_value_heads=st.sampled_from([None, 1, 2, 4]),
        tie_word_embeddings=st.booleans(),
        extra=st.dictionaries(texts, toml_values, max_size=4),
    ),
    data=st.builds(DataConfig, paths=st.lists(paths, max_size=3).map(tuple), cache_dir=st.none() | paths),
    activations=st.sampled_from(
        [
            ActivationsConfig(),
            ActivationsConfig(bits=16),
            ActivationsConfig(bits=6, format="int6"),
            ActivationsConfig(format="e2m1", block_size=16, mode="hooks"),
        ]
    ),
    optimizer=st.builds(OptimizerConfig, learning_rate=st.floats(1e-12, 1e3), weight_decay=st.floats(0, 1)),
    gradients=st.builds(GradientsConfig, bits=st.sampled_from([8, 12, 32])),
    pipeline=st.sampled_from(
        [
            PipelineConfig(),
            PipelineConfig(stages=3, micro_batches=6, split=(2, 1, 1)),
            PipelineConfig(stages=2, virtual_stages=2, schedule="interleaved-1f1b"),
        ]
    ),
    run_dir=st.none() | paths,
    seed=st.integers(0, 2**63 - 1),
    tensorboard=st.booleans(),
)


def write(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


@given(config=configs)
def test_saved_config_loads_equal(config: TrainConfig, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("config") / "config.toml"
    save_config(config, path)
    assert load_config(path) == config
    assert [file.name for file in path.parent.iterdir()] == ["config.toml"]


def test_every_field_is_documented_in_the_dump() -> None:
    text = dump_config(TrainConfig())
    for section in SECTIONS:
        docs = field_docs(section)
        assert set(docs) >= {f.name for f in dataclasses.fields(section)} - {
            name for name, hint in get_type_hints(section).items() if dataclasses.is_dataclass(hint)
        }
    assert "# Width of the residual stream.\nhidden_size = 128" in text
    assert "# num_key_value_heads: not set" in text


def test_every_optional_field_is_none_by_default() -> None:
    # TOML has no null: a field that is None is left out of the file, so None must be what leaving it out means.
    for section in SECTIONS:
        for name, hint in get_type_hints(section).items():
            if type(None) in getattr(hint, "__args__", ()):
                default = next(field.default for field in dataclasses.fields(section) if field.name == name)
                assert default is None, name


def test_file_and_overrides_meet_in_one_tree(tmp_path: Path) -> None:
    path = write(
        tmp_path, 'steps = 7\n[model]\nhidden_size = 64\n[data]\npaths = ["a", "b"]\n[model.extra]\nrope = 1.5\n'
    )
    config = load_config(path, {"model.hidden_size": 256, "optimizer.learning_rate": 1})
    assert (config.steps, config.model.hidden_size, config.data.paths) == (7, 256, ("a", "b"))
    assert config.model.extra == {"rope": 1.5}
    assert config.optimizer.learning_rate == 1.0
    assert isinstance(config.optimizer.learning_rate, float)


def test_rules_are_judged_on_the_merged_values(tmp_path: Path) -> None:
    path = write(tmp_path, "[model]\nhidden_size = 130\n")  # not a multiple of the default 4 heads
    assert load_config(path, {"model.num_attention_heads": 5}).model.hidden_size == 130
    with pytest.raises(ConfigError, match=r"model.hidden_size is 130.*multiple of model.num_attention_heads \(4\)"):
        load_config(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[model]\nhiden_size = 1", r"unknown key model.hiden_size in .*run.toml; did you mean model.hidden_size\?"),
        ("hidden_size = 1", r"unknown key hidden_size in .*; did you mean model.hidden_size\?"),
        ("[data]\nbatch_size = 1", r"unknown key data.batch_size in .*; did you mean batch_size\?"),
        ("[optimiser]\neps = 1", r"unknown key optimiser in .*; did you mean optimizer\?"),
        ("[checkpoint]\nzzz = 1", r"unknown key checkpoint.zzz in .*; known keys here: every, keep"),
        ('steps = "7"', r"steps in .*run.toml is '7', but it must be an integer"),
        ("steps = 7.0", r"steps in .* is 7.0, but it must be an integer"),
        ("steps = true", r"steps in .* is True, but it must be an integer"),
        ("tensorboard = 1", r"tensorboard in .* is 1, but it must be true or false"),
        ('parallel = "dpp"', r"parallel in .* is 'dpp', but it must be 'ddp' or 'fsdp'"),
        ('[data]\npaths = "corpus"', r"data.paths in .* is 'corpus', but it must be a list of strings"),
        ("[data]\npaths = [1]", r"data.paths\[0\] in .* is 1, but it must be a string"),
        ("model = 3", r"model in .* is 3, but it must be a table"),
        ("[model]\nextra = 3", r"model.extra in .* is 3, but it must be a table"),
        ("[model]\npath = 3", r"model.path in .* is 3, but it must be a string"),
        ("[optimizer]\neps = 'x'", r"optimizer.eps in .* is 'x', but it must be a number"),
        ("steps = x\n", r"run.toml is not valid TOML: .*line 1"),
    ],
)
def test_bad_file_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(write(tmp_path, text))


def test_missing_and_binary_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the configuration .*absent\.toml: No such file"):
        load_config(tmp_path / "absent.toml")
    (tmp_path / "run.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not valid TOML"):
        read_toml(tmp_path / "run.toml")


def test_value_that_toml_cannot_hold_is_refused(tmp_path: Path) -> None:
    config = TrainConfig(model=ModelConfig(extra={"sliding_window": None}))
    with pytest.raises(ConfigError, match=r"model\.extra cannot be written as TOML"):
        save_config(config, tmp_path / "config.toml")
    with pytest.raises(ConfigError, match="cannot write the configuration"):
        save_config(TrainConfig(), tmp_path / "absent" / "config.toml")


RULES = """
activations.bits = 7 => activations.bits: be 2, 4, 5, 6, 8 or 16
activations = {bits = 8, format = "nf4"} => activations.format: be a 8-bit format
activations = {bits = 16, format = "nf4"} => activations.format: be left out
optimizer.learning_rate = nan => optimizer.learning_rate: be finite
optimizer.beta1 = 1.0 => optimizer.beta1: be below 1
batch_size = 8; accumulation = 3 => batch_size: be a multiple of accumulation (3)
gradients = {bits = 8, reduce = "native"} => gradients.reduce: be q8 or left out with parallel = "ddp"
activations = {mode = "hooks", attention = "int8"} => activations.attention: be exact or left out
pipeline.virtual_stages = 2 => pipeline.virtual_stages: be 1 with pipeline.schedule = 1f1b
pipeline = {stages = 2, schedule = "interleaved-1f1b"} => pipeline.virtual_stages: be at least 2
pipeline = {stages = 4, micro_batches = 3} => pipeline.micro_batches: be at least pipeline.stages
pipeline = {stages = 2, virtual_stages = 2, schedule = "interleaved-1f1b", micro_batches = 5} => \
pipeline.micro_batches: be a multiple of micro_batches // stages (2)
pipeline = {stages = 2, split = [1]} => pipeline.split: have pipeline.stages x pipeline.virtual_stages = 2 numbers
pipeline.split = ["a"] => pipeline.split[0]: be an integer
accumulation = 2; batch_size = 8; pipeline = {stages = 2, micro_batches = 4} => accumulation: be 1 or pipeline.micro_
nproc = 0 => nproc: be at least 1
model.num_key_value_heads = 3 => model.num_key_value_heads: divide
resume = true => resume: come with run_dir
rank_timeout_seconds = 0.0 => rank_timeout_seconds: be above 0
model = {path = "m", hidden_size = 64} => model.hidden_size: be left out with model.path
model = {path = "m", family = "qwen3"} => model.family: be left out with model.path
model = {path = "m", extra = {a = 1}} => model.extra: be left out with model.path
activations = {bits = 16, mode = "hooks"} => activations.mode: be left out, because
activations = {bits = 16, block_size = 32} => activations.block_size: be left out, because
plan = "p.json"; activations.bits = 8 => activations.bits: be left out with a plan
pipeline.schedule = "gpipe" => pipeline.schedule: be left out with pipeline.stages = 1
pipeline.micro_batches = 4 => pipeline.micro_batches: be left out with pipeline.stages = 1
pipeline.split = [4] => pipeline.split: be left out with pipeline.stages = 1
checkpoint.load = 3 => checkpoint.load: be left out without resume
task = "image-classification"; data.text_key = "t" => data.text_key: be text with
images.flip = true => images.flip: be left out unless task = image
moe.dispatcher = "hierarchical" => moe.dispatcher: be left out without moe.expert_parallel
moe = {expert_parallel = 2, depth = 2} => moe.depth: come with
moe = {expert_parallel = 1, dispatch_codec = "int8"} => moe.dispatch_codec: be left out with moe.expert_parallel = 1
moe = {expert_parallel = 1, dispatcher = "auto"} => moe.dispatcher: be left out with moe.expert_parallel = 1
moe = {expert_parallel = 2, swap_pairs = 2} => moe.swap_pairs: be left out without moe.swap_every
moe = {expert_parallel = 2, rates = "r"} => moe.rates: be left out unless moe.swap_every
moe = {expert_parallel = 2, swap_every = 5} => moe.swap_every: be 0 unless
moe.copies = 1 => moe.copies: be left out without moe.expert_parallel
moe = {expert_parallel = 1, copies = 1} => moe.copies: be left out with moe.expert_parallel = 1
moe = {expert_parallel = 2, copy_every = 5} => moe.copy_every: be left out without moe.copies
moe = {expert_parallel = 2, copies = 1, dispatcher = "auto"} => moe.copies: be 0 with moe.dispatcher = auto
moe = {expert_parallel = 2, copies = 1, chunks = [2]} => moe.copies: be 0 with moe.chunks
moe = {expert_parallel = 2, copies = 1, dispatcher = "hierarchical", swap_every = 1} => moe.copies: be 0 with moe.swap
moe = {expert_parallel = 2, copies = 1}; parallel = "fsdp" => moe.copies: be 0 with parallel = "fsdp"
moe.expert_parallel = 2; pipeline.stages = 2 => moe.expert_parallel: be left out with pipeline.stages
moe = {expert_parallel = 2, chunks = [2, 2, 2]} => moe.chunks: have at most 2 numbers
moe = {expert_parallel = 2, dispatcher = "auto", chunks = [2]} => moe.chunks: be left out with moe.dispatcher = auto
moe = {expert_parallel = 2, dispatcher = "auto", dispatch_codec = "lossless"} => moe.dispatch_codec: be exact, raw or
moe = {expert_parallel = 2, overlap_grad_reduce = true} => moe.overlap_grad_reduce: be left out without moe.chunks
moe = {expert_parallel = 2, overlap_grad_reduce = true, chunks = [2]}; gradients.bits = 8 => \
moe.overlap_grad_reduce: be left out with gradients.bits below 32
moe.router_z_loss_coef = 0.1; pipeline.stages = 2 => moe.router_z_loss_coef: be left out with pipeline.stages
moe.expert_parallel = 2; plan = "p.json" => moe.expert_parallel: be left out with a plan
"""
"""Settings, and the rule that one of them breaks: its name, and what it must do."""


@pytest.mark.parametrize("line", RULES.strip().splitlines())
def test_a_broken_rule_names_field_value_and_rule(line: str) -> None:
    settings, _, refusal = line.partition(" => ")
    name, _, rule = refusal.partition(": ")
    with pytest.raises(ConfigError) as caught:
        build_config(tomllib.loads(settings.replace("; ", "\n")))
    assert re.match(rf"{re.escape(name)} is .+?, but it must {re.escape(rule)}", str(caught.value))


SCHEMA = json_schema()
KINDS: dict[str, type | tuple[type, ...]] = {
    "array": list,
    "boolean": bool,
    "integer": int,
    "null": type(None),
    "number": (int, float),
    "object": dict,
    "string": str,
}
CHECKS = {
    "enum": lambda value, options: value in options,
    "maximum": lambda value, limit: value <= limit,
    "minimum": lambda value, limit: value >= limit,
    "exclusiveMaximum": lambda value, limit: value < limit,
    "exclusiveMinimum": lambda value, limit: value > limit,
    "minLength": lambda value, limit: len(value) >= limit,
    "maxItems": lambda value, limit: len(value) <= limit,
    "pattern": lambda value, pattern: re.search(pattern, value) is not None,
    "items": lambda value, rule: all(accepts(rule, item) for item in value),
}
NOTES = {"$schema", "$defs", "default", "description", "properties", "additionalProperties"}


def accepts(rule: dict[str, Any], value: Any) -> bool:
    """Whether `value` is as a JSON schema wants it, for the keywords that ours has."""
    if "$ref" in rule:
        return accepts(SCHEMA["$defs"][rule["$ref"].removeprefix("#/$defs/")], value)
    if "anyOf" in rule:
        return any(accepts(option, value) for option in rule["anyOf"])
    kind = KINDS[rule["type"]]
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        return False
    if isinstance(value, dict):
        known, others = rule.get("properties", {}), rule["additionalProperties"]
        return all(accepts(known[key], inner) if key in known else others for key, inner in value.items())
    checks = set(rule) - NOTES - {"type"}
    assert checks <= set(CHECKS)
    return all(CHECKS[check](value, rule[check]) for check in checks)


@given(config=configs)
def test_the_schema_accepts_every_file_that_is_written(config: TrainConfig) -> None:
    assert accepts(SCHEMA, tomllib.loads(dump_config(config)))


def test_the_schema_accepts_recipes_and_examples_of_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
    examples = [tomllib.loads(text) for text in re.findall(r"```toml\n(.*?)```", page, re.S)]
    assert examples
    for values in [*examples, *RECIPES.values(), {}]:
        build_config(values)
        assert accepts(SCHEMA, values)


PROBES = (
    -(2**70),
    -1,
    0,
    1,
    2**31,
    2**70,
    7.0,
    -0.5,
    0.5,
    1.5,
    1e9,
    True,
    "",
    "no such thing",
    "a\0b",
    [],
    [0],
    [1],
    {},
)


@pytest.mark.parametrize("name", few((one.name for one in settings_of(TrainConfig)), 32, pytest.mark.ci))
def test_schema_and_loader_refuse_the_same_ranges(name: str) -> None:
    refused = 0
    for value in (*PROBES, [1, 1, 1], ["a", 1], {"zzz": 1}):
        values = nested_settings({name: value})
        try:
            build_config(values)
        except ConfigError as error:
            # Rules of several fields are not in the schema: they name another field, which ranges do not.
            rule = str(error).partition("but it must")[2]
            of_several = any(one.name in rule for one in settings_of(TrainConfig) if one.name != name)
            agree = of_several or not accepts(SCHEMA, values)
            refused += 1
        else:
            agree = accepts(SCHEMA, values)
        assert agree, value
    assert refused


def test_the_schema_says_of_every_field_what_the_help_says() -> None:
    assert SCHEMA["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    for section in SECTIONS:
        table = SCHEMA if section is TrainConfig else SCHEMA["$defs"][section.__name__]
        assert table["additionalProperties"] is False
        assert set(table["properties"]) == {field.name for field in dataclasses.fields(section)}
        docs = field_docs(section)
        for name, field in table["properties"].items():
            assert "default" in field
            assert "$ref" in field or field["description"] == docs[name]
    batch = SCHEMA["properties"]["batch_size"]
    assert (batch["type"], batch["minimum"], batch["maximum"], batch["default"]) == ("integer", 1, 2**31 - 1, 16)
    beta = SCHEMA["$defs"]["OptimizerConfig"]["properties"]["beta1"]
    assert (beta["type"], beta["minimum"], beta["exclusiveMaximum"]) == ("number", 0, 1)


def test_all_errors_of_a_configuration_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        build_config({"steps": 0, "seed": -1, "model": {"hiden_size": 1}})
    assert str(caught.value) == (
        "unknown key model.hiden_size; did you mean model.hidden_size?; steps is 0, but it must be at least 1; "
        "seed is -1, but it must be at least 0"
    )
    with pytest.raises(ConfigError, match=r"moe.levels\[3\] is 0, but it must be at least 1; and 5 more$"):
        build_config({"moe": {"levels": [0] * 9}})


def test_a_section_that_is_built_in_python_is_refused_by_the_same_names() -> None:
    with pytest.raises(ConfigError, match=r"^model.hidden_size is 0, but it must be at least 1$"):
        ModelConfig(hidden_size=0)
    with pytest.raises(ConfigError, match=r"^unknown key model.hiden_size; did you mean model.hidden_size\?$"):
        ModelConfig(hiden_size=1)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"^steps is 0, but it must be at least 1$"):
        dataclasses.replace(TrainConfig(), steps=0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        TrainConfig().steps = 3  # type: ignore[misc]


def test_paths_of_files_may_begin_with_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No shell replaces the tilde there, nor in --run-dir=~/x."""
    monkeypatch.setenv("HOME", str(tmp_path))
    values = {"run_dir": "~/run", "plan": "~/plan.json", "data": {"paths": ["~/a", "b"], "tokenizer": "~/t.json"}}
    config = build_config(values)
    assert (config.run_dir, config.plan) == (f"{tmp_path}/run", f"{tmp_path}/plan.json")
    assert (config.data.paths, config.data.tokenizer) == ((f"{tmp_path}/a", "b"), f"{tmp_path}/t.json")


@pytest.mark.parametrize("name", [one.name for one in settings_of(TrainConfig) if one.is_path])
def test_an_empty_path_is_refused(name: str) -> None:
    """As of an unset variable of a shell; it would mean the working directory."""
    values = nested_settings({name: [""] if name == "data.paths" else ""})
    with pytest.raises(ConfigError, match=rf"^{re.escape(name)}(\[0\])? is '', but it must not be empty$"):
        build_config(values)
