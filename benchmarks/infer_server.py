"""What the server costs: the same requests through HTTP, by as many clients at once, and through an engine."""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from benchmarks.kit.timing import Case, seconds_of
from benchmarks.registry import Options, Table, benchmark
from laconic.infer import Engine
from laconic.infer.bench.demo_model import save_demo_model
from laconic.infer.bench.measure import run_together

_SIZES = {
    "small": {"hidden_size": 128, "layers": 4, "experts": 16},
    "middle": {"hidden_size": 512, "layers": 8, "experts": 16},
}
_SMOKE = {"smoke": {"hidden_size": 32, "layers": 2, "experts": 4}}
_LIMITS = {"cache_tokens": 8192, "batch_tokens": 256}


@benchmark("infer-server")
def infer_server(options: Options) -> list[Table]:
    """The table."""
    sizes = _SMOKE if options.smoke else {n: s for n, s in _SIZES.items() if n != "middle" or not options.small}
    count, new_tokens = (3, 4) if options.smoke else (16, 32)
    rows = [_row(name, size, count, new_tokens, options) for name, size in sizes.items()]
    return [
        Table(
            f"Tokens per second of {count} requests at once, {new_tokens} new tokens each, experts=0, float32,"
            f" {options.thread_text} of the model",
            ["model", "engine", "HTTP, whole answers", "HTTP, streams", "whole over engine", "streams over engine"],
            rows,
            "Quotients of tokens per second: median over the rounds, lowest to highest. Engine, server and clients"
            " share the machine's cores; the clients are coroutines of httpx in one process.",
        )
    ]


def _row(name: str, size: dict[str, int], count: int, new_tokens: int, options: Options) -> list[str]:
    generator = random.Random(0)
    prompts = [[generator.randrange(256) for _ in range(generator.randint(4, 96))] for _ in range(count)]
    with tempfile.TemporaryDirectory() as folder:
        save_demo_model(Path(folder), **size)
        with (
            Engine(folder, experts=0, threads=options.threads, **_LIMITS) as engine,
            _server(folder, options.threads) as url,
            asyncio.Runner() as runner,
        ):
            client = httpx.AsyncClient(base_url=url, timeout=120)  # one for all rounds: making it takes long
            cases: dict[str, Case] = {
                "engine": lambda: run_together(engine, prompts, new_tokens),
                "whole": lambda: runner.run(_ask_all(client, prompts, new_tokens, False)),
                "streams": lambda: runner.run(_ask_all(client, prompts, new_tokens, True)),
            }
            seconds = seconds_of(cases, options.rounds, rotate=True)
            runner.run(client.aclose())
    rates = [f"{count * new_tokens / seconds[case]:.0f} ({seconds[case].spread:.1%})" for case in cases]
    quotients = []
    for case in ("whole", "streams"):
        each = [ours / theirs for ours, theirs in zip(seconds["engine"].samples, seconds[case].samples, strict=True)]
        quotients.append(f"{seconds['engine'].over(seconds[case]):.3f} ({min(each):.3f} to {max(each):.3f})")
    return [name, *rates, *quotients]


async def _ask_all(client: httpx.AsyncClient, prompts: list[list[int]], new_tokens: int, stream: bool) -> None:
    await asyncio.gather(*(_ask(client, prompt, new_tokens, stream) for prompt in prompts))


async def _ask(client: httpx.AsyncClient, prompt: list[int], new_tokens: int, stream: bool) -> None:
    body: dict[str, Any] = {"model": "bench", "prompt": prompt, "max_tokens": new_tokens, "temperature": 0}
    if not stream:
        usage = (await client.post("/v1/completions", json=body)).json()["usage"]
        assert usage["completion_tokens"] == new_tokens
        return
    async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
        lines = [line async for line in answer.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]"


@contextmanager
def _server(model_dir: str, threads: int) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    variables = {
        "LACONIC_MODEL": model_dir,
        "LACONIC_ENGINE": json.dumps({"experts": 0, "threads": threads, **_LIMITS}),
        "LACONIC_SERVER": json.dumps({"model_name": "bench"}),
    }
    command = [sys.executable, "-m", "uvicorn", "--factory", "laconic.infer.app:create_app_from_env"]
    quiet = ["--port", str(port), "--log-level", "warning"]
    process = subprocess.Popen([*command, *quiet], env=os.environ | variables)
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            assert process.poll() is None, "the server has ended"
            try:
                httpx.get(f"{url}/health").raise_for_status()
                break
            except httpx.ConnectError:
                time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait(30)
