"""Requests to measure with: prompts of paragraphs of text, and times at which they arrive."""

from __future__ import annotations

import ast
import random
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path

from laconic.errors import ConfigError


def own_text() -> str:
    """Return the docstrings of laconic.infer: text that is always at hand, a few words to a few paragraphs each."""
    found = []
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (text := ast.get_docstring(node)):
                found.append(text)
    return "\n\n".join(found)


def paragraphs(text: str) -> list[str]:
    """Cut text at empty lines; runs of white space become one space."""
    blocks: list[list[str]] = [[]]
    for line in text.splitlines():
        if words := line.split():
            blocks[-1] += words
        elif blocks[-1]:
            blocks.append([])
    return [" ".join(words) for words in blocks if words]


def draw_prompts(
    texts: Sequence[str], encode: Callable[[str], Sequence[int]], count: int, max_tokens: int, seed: int
) -> list[list[int]]:
    """Draw the prompts of `count` requests from texts, without replacement as long as there are enough.

    Longer ones are cut to `max_tokens`; texts without a single token are a ConfigError.
    """
    known = [tokens for text in texts if (tokens := list(encode(text))[:max_tokens])]
    if not known:
        raise ConfigError("the text for prompts has no paragraph with a token; give --prompts FILE with some text")
    generator = random.Random(seed)
    drawn: list[list[int]] = []
    while len(drawn) < count:
        drawn += generator.sample(known, min(len(known), count - len(drawn)))
    return drawn


def poisson_arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Draw the arrivals of a Poisson process, `rate` per second: seconds from the start, ascending."""
    generator = random.Random(seed)
    return list(accumulate(generator.expovariate(rate) for _ in range(count)))
