"""What the page says transformers' scheduler gives: rows of a prompt that others had before, long prompts in parts."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from laconic.infer.sampling import Sampling
from laconic.infer.transformers_seam import CacheLimits, Finished, Requests, load_attention_model
from tests.infer.models import generated, make
from tests.patience import patient

LONG = [3 + i % 90 for i in range(60)]


class Counted:
    """Requests of a whole model, and the rows of each of its forwards."""

    def __init__(self, model: Any, limits: CacheLimits) -> None:
        self.rows: list[int] = []
        self._ended: queue.SimpleQueue[Finished] = queue.SimpleQueue()
        self.requests = Requests(model, limits, self._ended.put)
        self._number = 0

    def note(self, module: nn.Module, arguments: Any, options: dict[str, Any]) -> None:
        self.rows.append(options["input_ids"].numel())

    def add(self, prompt: list[int], new_tokens: int) -> None:
        self.requests.add(str(self._number), prompt, Sampling(max_new_tokens=new_tokens))
        self._number += 1

    def wait(self, count: int = 1) -> dict[str, list[int]]:
        ended = [self._ended.get(timeout=patient(60)) for _ in range(count)]
        assert not [one.error for one in ended if one.error]
        return {one.name: one.tokens for one in ended}


@contextmanager
def counted(path: Path, batch_tokens: int) -> Iterator[Counted]:
    model = load_attention_model(path, torch.float32, None)
    here = Counted(model, CacheLimits(cache_tokens=512, batch_tokens=batch_tokens))
    handle = model.register_forward_pre_hook(here.note, with_kwargs=True)
    try:
        yield here
    finally:
        handle.remove()
        here.requests.stop()


def test_whole_pages_of_a_prompt_that_was_there_before_are_not_computed_again(tmp_path: Path) -> None:
    path = make("qwen3_moe", tmp_path)
    prompts = [LONG, LONG, [*LONG[:40], 1, 2, 3]]
    expected = generated(path, prompts, 4)
    with counted(path, 256) as here:
        answers = []
        for prompt, computed in zip(prompts, (60, 60 - 48, 43 - 32), strict=True):  # pages of 16 tokens
            here.rows.clear()
            here.add(prompt, 4)
            answers += here.wait().values()
            assert sum(here.rows) == computed + 3, here.rows
    assert answers == expected


def test_with_a_window_no_page_is_shared(tmp_path: Path) -> None:
    path = make("gpt_oss", tmp_path)
    with counted(path, 256) as here:
        for _ in range(2):
            here.rows.clear()
            here.add(LONG, 2)
            here.wait()
            assert sum(here.rows) == 61, here.rows


def test_a_long_prompt_comes_in_parts_between_which_others_go_on(tmp_path: Path) -> None:
    path = make("qwen3_moe", tmp_path)
    short = [5, 6, 7]
    expected = generated(path, [short], 12) + generated(path, [LONG], 4)
    with counted(path, 16) as here:
        here.add(short, 12)
        here.add(LONG, 4)
        answers = here.wait(2)
    assert max(here.rows) <= 16
    assert len([rows for rows in here.rows if rows > 2]) >= 4, "60 tokens in parts of at most 16"
    assert [answers["0"], answers["1"]] == expected
