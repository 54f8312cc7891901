"""What the page says transformers' scheduler gives: rows of a prompt that others had before, long prompts in parts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from laconic.infer.transformers_seam import load_attention_model
from tests.infer.alone import Asked
from tests.infer.models import generated, make

LONG = [3 + i % 90 for i in range(60)]


@contextmanager
def counted(path: Path, batch_tokens: int) -> Iterator[tuple[Asked, list[int]]]:
    """Requests of a whole model, and the rows of each of its forwards."""
    model, rows = load_attention_model(path, torch.float32, None), list[int]()
    model.register_forward_pre_hook(lambda *given: rows.append(given[2]["input_ids"].numel()), with_kwargs=True)
    asked = Asked(model, batch_tokens=batch_tokens)
    try:
        yield asked, rows
    finally:
        asked.requests.stop()


def test_whole_pages_of_a_prompt_that_was_there_before_are_not_computed_again(tmp_path: Path) -> None:
    path = make("qwen3_moe", tmp_path)
    prompts = [LONG, LONG, [*LONG[:40], 1, 2, 3]]
    expected = generated(path, prompts, 4)
    with counted(path, 256) as (asked, rows):
        answers = []
        for prompt, computed in zip(prompts, (60, 60 - 48, 43 - 32), strict=True):  # pages of 16 tokens
            rows.clear()
            asked.add("one", prompt, max_new_tokens=4)
            answers.append(asked.end().tokens)
            assert sum(rows) == computed + 3, rows
    assert answers == expected


def test_with_a_window_no_page_is_shared(tmp_path: Path) -> None:
    path = make("gpt_oss", tmp_path)
    with counted(path, 256) as (asked, rows):
        for _ in range(2):
            rows.clear()
            asked.add("one", LONG, max_new_tokens=2)
            assert asked.end().error is None
            assert sum(rows) == 61, rows


def test_a_long_prompt_comes_in_parts_between_which_others_go_on(tmp_path: Path) -> None:
    path = make("qwen3_moe", tmp_path)
    short = [5, 6, 7]
    expected = generated(path, [short], 12) + generated(path, [LONG], 4)
    with counted(path, 16) as (asked, rows):
        asked.add("short", short, max_new_tokens=12)
        asked.add("long", LONG, max_new_tokens=4)
        answers = asked.ends(2)
    assert max(rows) <= 16
    assert len([count for count in rows if count > 2]) >= 4, "60 tokens in parts of at most 16"
    assert [answers["short"].tokens, answers["long"].tokens] == expected
