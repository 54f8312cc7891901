"""Tokens of a split model are those of transformers' generate: every family, every way to cut."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from laconic.infer.transformers_seam import CacheLimits
from laconic.schedule.inference import InferencePlan
from tests.infer.inside import Inside
from tests.infer.models import MOVED, NEW_TOKENS, PROMPTS, expected, make, split_families

LIMITS = CacheLimits(cache_tokens=256, batch_tokens=24)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes the model of a family, once."""
    folder = tmp_path_factory.mktemp("models")
    return cache(lambda family: make(family, folder))


@pytest.mark.parametrize("family", split_families("qwen2_moe", "deepseek_v2"))
def test_tokens_are_those_of_generate(models: Callable[[str], Path], family: str) -> None:
    inside = Inside(models(family), 2, InferencePlan(num_micro_batches=2, num_slices=2, order="AASS"))
    assert len(inside.moved) == MOVED.get(family, 0)
    assert inside.left == []
    assert inside.generate(PROMPTS, NEW_TOKENS, LIMITS) == expected(models(family))


@pytest.mark.slow
@pytest.mark.parametrize("num_micro_batches", [1, 2, 3, 4])
@pytest.mark.parametrize("num_slices", [1, 2, 4, 6])
def test_tokens_stay_however_they_are_cut(
    models: Callable[[str], Path], num_micro_batches: int, num_slices: int
) -> None:
    """Two of four ways for each pair of numbers, by turns: each way meets every number of both."""
    ways = (
        ("qwen2_moe", "tokens", "ASAS", True),
        ("qwen2_moe", "experts", "AASS", False),
        ("qwen3_moe", "experts", "ASAS", False),
        ("deepseek_v2", "tokens", "ASAS", True),
    )
    for family, slicing, order, shared_first in ways[(num_micro_batches + num_slices // 2) % 2 :: 2]:
        plan = InferencePlan(num_micro_batches, num_slices, order, slicing, shared_first=shared_first)
        inside = Inside(models(family), 3, plan)
        assert inside.generate(PROMPTS, NEW_TOKENS, LIMITS) == expected(models(family)), (family, plan)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss", "deepseek_v3"])
def test_tokens_stay_in_the_smallest_batches_and_caches(models: Callable[[str], Path], family: str) -> None:
    """Requests wait for room, and lose their place in the cache to others, with some tokens generated."""
    for limits in (CacheLimits(256, 1), CacheLimits(52, 3), CacheLimits(64, 24)):
        inside = Inside(models(family), 2, InferencePlan(num_slices=2))
        assert inside.generate(PROMPTS, NEW_TOKENS, limits) == expected(models(family)), limits
