"""Models from a family, a config.json or weights, and every way of asking for one that cannot be had."""

import json
from datetime import date, datetime, time
from pathlib import Path
from typing import Any

import pytest
import torch

from laconic.errors import ConfigError, ModelError
from laconic.train.config.schema import ModelConfig
from laconic.train.model import build_model

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def build(**fields: Any) -> Any:
    sizes = {} if "path" in fields else SIZES
    return build_model(ModelConfig(**sizes, **fields), vocab_size=97, max_sequence_length=16, seed=3, eos_token_id=96)


@pytest.mark.parametrize(
    ("family", "name", "value", "message"),
    [
        ("llama", "dtype", "bfloat16", "model.extra.dtype is 'bfloat16', but it must be left out: weights are"),
        ("llama", "dtype", "float32", "model.extra.dtype is 'float32', but it must be left out: weights are"),
        ("qwen3", "sliding_window", 4, "model.extra.sliding_window is 4, but family 'qwen3' makes it None"),
    ],
)
def test_what_a_family_drops_is_refused(family: str, name: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(family=family, extra={name: value})


def test_what_a_family_takes_is_in_the_model() -> None:
    assert build(family="gpt2", extra={"n_positions": 64}).config.max_position_embeddings == 64
    assert build(family="gpt2", extra={"n_positions": 64}).transformer.wpe.weight.shape == (64, 32)
    assert build(family="gpt2", extra={"n_embd": 32}).config.hidden_size == 32
    assert build(family="qwen3", extra={"sliding_window": 4, "use_sliding_window": True}).config.sliding_window == 4
    assert build(family="llama", extra={"max_position_embeddings": 64}).config.max_position_embeddings == 64


@pytest.mark.parametrize("value", [date(1979, 5, 27), datetime(1979, 5, 27, 7), time(7, 32)])
def test_dates_of_a_file_are_refused(value: Any) -> None:
    for extra, name in (({"a": value}, "a"), ({"a": {"b": value}}, "a.b"), ({"a": [1, value]}, "a")):
        with pytest.raises(ConfigError, match=rf"model.extra.{name} is '{value}', but it must be a number"):
            ModelConfig(extra=extra)


@pytest.mark.parametrize(
    "family", ["llama", "mistral", "qwen2", "qwen3", "gemma2", "phi3", "olmo2", "gpt2", "gpt_neox", "opt"]
)
def test_every_family_takes_the_sizes(family: str) -> None:
    model = build(family=family)
    assert model.training
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.get_input_embeddings().weight.shape == (97, 32)
    assert model.config.num_hidden_layers == 2
    assert model.config.eos_token_id == 96
    assert model(torch.zeros(1, 16, dtype=torch.int64)).logits.shape == (1, 16, 97)
    assert 48 in {size for parameter in model.parameters() for size in parameter.shape} or 96 in {
        size for parameter in model.parameters() for size in parameter.shape
    }


def test_weights_follow_from_the_seed_alone() -> None:
    first = build(family="llama")
    torch.manual_seed(99)
    before = torch.get_rng_state()
    second = build(family="llama")
    assert torch.equal(torch.get_rng_state(), before)
    for one, two in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, two)
    other = build_model(ModelConfig(**SIZES), 97, 16, seed=4)
    assert not torch.equal(other.get_input_embeddings().weight, first.get_input_embeddings().weight)


def test_extra_fields_reach_the_family() -> None:
    model = build(family="llama", extra={"attention_dropout": 0.25, "rms_norm_eps": 1e-3})
    assert (model.config.attention_dropout, model.config.rms_norm_eps) == (0.25, 1e-3)


@pytest.mark.parametrize(
    ("family", "name", "size"),
    [
        ("llama", "hidden_size", "hidden_size"),
        ("llama", "num_key_value_heads", "num_key_value_heads"),
        ("llama", "tie_word_embeddings", "tie_word_embeddings"),
        ("gpt2", "n_embd", "hidden_size"),
        ("gpt2", "n_inner", "intermediate_size"),
        ("opt", "ffn_dim", "intermediate_size"),
    ],
)
def test_extra_fields_that_are_other_sizes_than_the_sections_are_refused(family: str, name: str, size: str) -> None:
    with pytest.raises(ConfigError, match=rf"model.extra.{name} is 3, but model.{size} makes it \w+; set only that"):
        build(family=family, extra={name: 3})


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma3_text"])
def test_the_base_of_rotary_positions_is_taken_as_it_was_ever_called(family: str) -> None:
    """The example of docs/training.md; transformers keeps it in rope_parameters now."""
    parameters = build(family=family, extra={"rope_theta": 500000.0}).config.rope_parameters
    of_layers = [parameters, *(table for table in parameters.values() if isinstance(table, dict))]
    assert 500000.0 in [table.get("rope_theta") for table in of_layers]


def test_a_base_that_a_family_would_pass_over_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"model.extra.rope_theta is 500000.0, but family 'gpt_neox' does not take it"
    ):
        build(family="gpt_neox", extra={"rope_theta": 500000.0})


def test_key_value_heads_default_to_query_heads() -> None:
    assert build(family="mistral").config.num_key_value_heads == 2
    assert build(family="mistral", num_key_value_heads=1).config.num_key_value_heads == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"family": "lama"}, "model.family is 'lama'.*did you mean llama"),
        ({"family": "no such thing"}, "model.family is 'no such thing'"),
        ({"family": "bert"}, "attends in both directions.*is_decoder"),
        ({"family": "t5"}, "model.family is 't5'"),
        ({"family": "llama", "extra": {"rms_norm_epz": 1}}, "'rms_norm_epz'.*did you mean rms_norm_eps"),
        ({"family": "gpt2", "num_key_value_heads": 1}, "model.num_key_value_heads cannot be set for family 'gpt2'"),
        ({"family": "bloom"}, "cannot be set for family 'bloom'.*model.path"),
        (
            {"family": "mixtral", "extra": {"num_local_experts": 4, "num_experts_per_tok": 5}},
            "num_experts_per_tok of model.extra is 5, but it must be from 1 to the number of experts, which is 4",
        ),
        ({"family": "deepseek_v3", "extra": {"n_routed_experts": 4, "num_experts_per_tok": 0}}, "per_tok .* is 0"),
        ({"path": "/nowhere/at/all"}, "model.path is '/nowhere/at/all', but it must be a directory.*allow_download"),
    ],
)
def test_what_cannot_be_built_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(**fields)


def test_a_directory_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"that directory has no config.json"):
        build(path=str(tmp_path))


def test_a_folder_that_is_no_model_says_what_makes_one_of_it(tmp_path: Path) -> None:
    from laconic.infer.transformers_seam.loading import read_config
    from laconic.train.memory.directory import load_any

    for name, inside in (("run", "config.toml"), ("adapters", "adapter_config.json"), ("other", "notes.txt")):
        (tmp_path / name / "checkpoints").mkdir(parents=True)
        (tmp_path / name / inside).write_text("{}")
    remedies = {"run": "it is a run: `laconic export .*run DIR`", "adapters": "--merge", "other": "save_pretrained"}
    for name, remedy in remedies.items():
        path = tmp_path / name
        for load in (lambda p: build(path=str(p)), lambda p: load_any(str(p), torch.float32), read_config):
            with pytest.raises((ConfigError, ModelError), match=remedy):
                load(path)


def test_a_config_alone_gives_random_weights_of_its_sizes(tmp_path: Path) -> None:
    build(family="qwen2").config.save_pretrained(tmp_path)
    first, second = build(path=str(tmp_path)), build(path=str(tmp_path))
    assert first.config.model_type == "qwen2"
    for one, two in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, two)


def test_saved_weights_are_loaded_as_fp32(tmp_path: Path) -> None:
    original = build(family="llama").to(torch.bfloat16)
    original.save_pretrained(tmp_path)
    loaded = build(path=str(tmp_path))
    assert loaded.training
    for one, two in zip(original.parameters(), loaded.parameters(), strict=True):
        assert two.dtype == torch.float32
        assert torch.equal(one.float(), two)


def test_a_sequence_beyond_the_saved_positions_is_refused(tmp_path: Path) -> None:
    build(family="gpt2").config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"sequence_length is 17, but .* takes at most 16 tokens"):
        build_model(ModelConfig(path=str(tmp_path)), 97, 17, seed=0)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    build(family="llama").save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[: len(content) // 2])
    with pytest.raises(ModelError, match="weights that cannot be loaded"):
        build(path=str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="no config that transformers can read"):
        build(path=str(tmp_path))


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    model = build(family="llama")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(ModelError, match=r"lacks \d+ of the weights .* first 'model.layers.2"):
        build(path=str(tmp_path))
