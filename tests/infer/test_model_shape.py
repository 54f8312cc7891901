"""Sizes for the planner: every family that is served has them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from laconic.cli.main import main
from laconic.cost.infer import MODELS
from laconic.cost.infer.engine_plan import EngineLimits
from laconic.errors import PlanError
from laconic.infer import AutoPlan
from laconic.infer.split import EngineSplit
from laconic.infer.transformers_seam import find_experts, planned_shape, read_config
from tests.cost.infer_models import RATES
from tests.grid import few
from tests.infer.models import _COMMON, FAMILIES, SERVED_SPLIT


def config_of(family: str, folder: Path, **changes: Any) -> Path:
    """A directory with the configuration alone, which is all that planning reads."""
    path = folder / family
    AutoConfig.for_model(family, **_COMMON | FAMILIES[family] | changes).save_pretrained(path)
    return path


WINDOW = {"use_sliding_window": True, "sliding_window": 8}


@pytest.mark.parametrize(
    ("family", "changes", "full"),
    [
        ("mixtral", {"sliding_window": 8}, 0),
        ("qwen3_moe", WINDOW, 0),
        ("qwen2_moe", WINDOW, 1),
        ("qwen2_moe", WINDOW | {"max_window_layers": 1}, 2),
        ("qwen2_moe", WINDOW | {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, 2),
        ("gpt_oss", {"layer_types": ["full_attention"] * 3}, 3),
        ("mixtral", {}, 3),
    ],
)
def test_windows_are_those_of_the_model(family: str, changes: dict[str, Any], full: int, tmp_path: Path) -> None:
    shape = planned_shape(config_of(family, tmp_path, **changes))
    assert shape.num_full_layers == full
    assert (shape.keys_seen(1000.0) < 1000.0) == (full < 3)


@pytest.mark.parametrize("family", few(SERVED_SPLIT, 4, pytest.mark.ci))
def test_every_family_that_is_served_is_planned(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = config_of(family, tmp_path)
    shape = planned_shape(path)
    model, blocks = find_experts(read_config(path), torch.float32)
    experts = sum(p.numel() for name in blocks for p in model.get_submodule(name).parameters())
    assert shape.experts_parameters(shape.num_experts) == experts
    assert shape.attention_worker_parameters == sum(p.numel() for p in model.parameters()) - experts
    assert 0 <= shape.small_parameters < 0.1 * shape.attention_worker_parameters
    assert (shape.num_moe_layers, shape.positions) == (len(blocks), 16384)
    config: Any = read_config(path)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    assert shape.num_heads == heads
    assert shape.cache_values == kv_heads * (shape.key_dim + shape.value_dim)
    assert shape.expert_hidden == 24

    RATES.save(tmp_path / "rates.json")
    rates = ["--rates", str(tmp_path / "rates.json"), "--max-micro-batches", "2", "--max-slices", "2"]
    flags = ["--workers", "2", "--memory", "1GB", "--prompt", "64", "--output", "8", "--requests", "4"]
    assert main(["infer", "plan", str(path), *flags, *rates]) == 0
    assert capsys.readouterr().out.count("plan: ") == 2
    choice = AutoPlan(tmp_path / "rates.json", prompt=64, output=8).choose(path, EngineSplit(1, 1), EngineLimits())
    assert choice.seconds > 0


def test_shared_and_dense_layers_are_told_apart(tmp_path: Path) -> None:
    shape = planned_shape(config_of("glm4_moe", tmp_path))
    assert (shape.num_layers, shape.num_dense_layers, shape.dense_hidden) == (3, 1, 24)
    assert (shape.shared_hidden, shape.shared_products) == (24, 3)
    assert (shape.attention_products, shape.top_k, shape.num_experts) == (4, 2, 6)
    beside = planned_shape(config_of("granitemoeshared", tmp_path))
    assert (beside.shared_hidden, beside.shared_products) == (16, 2)  # gate and up in one
    window = planned_shape(config_of("afmoe", tmp_path, sliding_window=8, num_hidden_layers=4))
    assert (window.sliding_window, window.num_full_layers) == (8, 1)
    by_mask = planned_shape(config_of("phimoe", tmp_path, sliding_window=8))
    assert (by_mask.sliding_window, by_mask.num_full_layers) == (8, 0)


def test_names_of_the_planner_are_taken_with_bytes_of_their_own() -> None:
    assert planned_shape("qwen3-235b-a22b") == MODELS["qwen3-235b-a22b"]
    assert planned_shape("deepseek-v2", 1) == replace(MODELS["deepseek-v2"], item_nbytes=1)


def test_values_have_two_bytes_where_nothing_says_a_dtype(tmp_path: Path) -> None:
    assert planned_shape(config_of("mixtral", tmp_path)).item_nbytes == 2
    assert planned_shape(config_of("mixtral", tmp_path, dtype="float32")).item_nbytes == 4


def test_what_cannot_be_counted_is_refused_by_name(tmp_path: Path) -> None:
    path = config_of("dots1", tmp_path)
    assert planned_shape(path / "config.json") == planned_shape(path)
    (path / "config.json").rename(path / "other.json")
    with pytest.raises(PlanError, match=r"other.json', but .* must be a directory with a config"):
        planned_shape(path / "other.json")
    with pytest.raises(PlanError, match=r"is a llama model without experts .*\(it is dense\)"):
        planned_shape(config_of("llama", tmp_path))
