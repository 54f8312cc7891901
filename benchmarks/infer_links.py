"""An engine's link over connections of its own against that over torch.distributed, by gloo, on the loopback address.

Same model, requests and threads; greedy; both must answer the same tokens.
"""

from __future__ import annotations

import contextlib
import random
import tempfile
from pathlib import Path
from typing import get_args

from benchmarks.kit.timing import Case, Timing, seconds_of
from benchmarks.registry import Options, Table, benchmark
from laconic.infer import Engine
from laconic.infer.bench.demo_model import save_demo_model
from laconic.infer.links import LinkKind

_SIZE = {"hidden_size": 512, "layers": 4, "experts": 8}
_SMOKE = {"hidden_size": 32, "layers": 2, "experts": 4}
_REQUESTS = {"decode": (8, 8, 10), "prefill": (4, 128, 1)}
"""Requests at once, tokens of a prompt, new tokens of each."""
_SMOKE_REQUESTS = {"decode": (2, 4, 2)}


@benchmark("infer-links")
def infer_links(options: Options) -> list[Table]:
    """The table."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        save_demo_model(Path(folder), **(_SMOKE if options.smoke else _SIZE))
        engines = {
            link: stack.enter_context(Engine(folder, threads=options.threads, link=link)) for link in get_args(LinkKind)
        }
        requests = _SMOKE_REQUESTS if options.smoke else _REQUESTS
        rows = [_row(name, engines, *sizes, options) for name, sizes in requests.items()]
    return [
        Table(
            "Tokens per second of an engine with one attention and one expert worker, loopback, float32,"
            f" {options.thread_text} each",
            ["requests", "tcp", "group", "group over tcp", "lowest to highest of the rounds"],
            rows,
            "Prefill counts the tokens of prompts, decode the new ones. The quotient is the median over the rounds, "
            "each round with its own times.",
        )
    ]


def _row(
    name: str, engines: dict[str, Engine], count: int, prompt_tokens: int, new_tokens: int, options: Options
) -> list[str]:
    generator = random.Random(0)
    prompts = [[generator.randrange(256) for _ in range(prompt_tokens)] for _ in range(count)]
    answers = [engine.generate(prompts, new_tokens) for engine in engines.values()]
    assert answers[0] == answers[1], "tokens over the two links differ"
    cases: dict[str, Case] = {
        link: lambda engine=engine: engine.generate(prompts, new_tokens)  # type: ignore[misc]
        for link, engine in engines.items()
    }
    seconds = seconds_of(cases, options.rounds, shuffle=True)
    tokens = count * (prompt_tokens if name == "prefill" else new_tokens)
    quotients = [tcp / group for tcp, group in zip(*(seconds[link].samples for link in ("tcp", "group")), strict=True)]
    return [
        f"{name}: {count} prompts of {prompt_tokens} tokens, {new_tokens} new tokens each",
        *(_rate(tokens, seconds[link]) for link in ("tcp", "group")),
        f"{seconds['tcp'].over(seconds['group']):.2f}",
        f"{min(quotients):.2f} to {max(quotients):.2f}",
    ]


def _rate(tokens: int, timing: Timing) -> str:
    return f"{tokens / timing:.0f} ({timing.spread:.0%})"
