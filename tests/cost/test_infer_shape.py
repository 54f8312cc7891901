"""Sizes of models for the inference planner."""

from __future__ import annotations

import pytest

from laconic.cost.infer import MODELS
from laconic.errors import PlanError
from tests.cost.infer_models import shape_of


def test_the_papers_models_have_their_published_sizes() -> None:
    billions = {name: shape.num_parameters / 1e9 for name, shape in MODELS.items()}
    assert billions["deepseek-v2"] == pytest.approx(236, abs=0.5)
    assert billions["qwen3-235b-a22b"] == pytest.approx(235, abs=0.5)
    assert MODELS["deepseek-v2"].cache_values == 128 * (192 + 128)
    assert MODELS["qwen3-235b-a22b"].cache_values == 2 * 4 * 128


def test_windows_shorten_what_queries_see() -> None:
    windowed = shape_of(sliding_window=128, num_full_layers=2)
    assert windowed.keys_seen(100) == 100
    assert windowed.keys_seen(1000) == (1000 + 128) / 2
    assert shape_of().keys_seen(1000) == 1000


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"hidden_size": None}, "hidden_size is None, but it must be a whole number"),
        ({"top_k": 17}, "top_k is 17, but a token has at most num_experts = 16"),
        ({"num_dense_layers": 4}, "at least one layer must have experts"),
        ({"expert_hidden": True}, "expert_hidden is True"),
    ],
)
def test_refusals_name_the_field(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        shape_of(**sizes)
