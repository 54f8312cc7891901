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
    count, lengths = (3, (4,)) if options.smoke else (16, (32, 128))
    rows = [_row(name, size, count, n, options) for name, size in sizes.items() for n in lengths]
    return [
        Table(
            f"Tokens per second of {count} requests at once, experts=0, float32, {options.thread_text} of the model",
            [
                "model",
                "new tokens each",
                "engine",
                "HTTP, whole answers",
                "HTTP, streams",
                "whole over engine",
                "streams over engine",
            ],
            rows,
            "Quotients of tokens per second: median over the rounds, lowest to highest. Engine, server and clients"
            " share the machine's cores; the clients are coroutines of one process, each with one connection. Through"
            " HTTP requests arrive one after the other, so the first steps of a round have fewer of them.",
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
            clients = runner.run(_connect(url, prompts, new_tokens))
            cases: dict[str, Case] = {
                "engine": lambda: run_together(engine, prompts, new_tokens),
                "whole": lambda: runner.run(_ask_all(clients, stream=False)),
                "streams": lambda: runner.run(_ask_all(clients, stream=True)),
            }
            seconds = seconds_of(cases, options.rounds, shuffle=True)
            runner.run(_close(clients))
    rates = [f"{count * new_tokens / seconds[case]:.0f} ({seconds[case].spread:.1%})" for case in cases]
    quotients = []
    for case in ("whole", "streams"):
        each = [ours / theirs for ours, theirs in zip(seconds["engine"].samples, seconds[case].samples, strict=True)]
        quotients.append(f"{seconds['engine'].over(seconds[case]):.3f} ({min(each):.3f} to {max(each):.3f})")
    return [name, str(new_tokens), *rates, *quotients]


class _Client:
    """Asks for one prompt over one connection that stays. Its requests are bytes, made once.

    A client of httpx takes about as much processor time per token of a stream as the server, and 2 ms per request: on
    the model's own cores that would be measured, too.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, prompt: list[int], new_tokens: int):
        self._reader, self._writer, self._new_tokens = reader, writer, new_tokens
        self._requests = {stream: _request(prompt, new_tokens, stream) for stream in (False, True)}

    async def ask(self, stream: bool) -> None:
        """Take a whole answer, or a stream to its end, and check that all tokens have come."""
        self._writer.write(self._requests[stream])
        head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        assert head.startswith(b"http/1.1 200 "), head
        if stream:
            body = await self._reader.readuntil(b"\r\n0\r\n\r\n")
            assert b"data: [DONE]" in body
            assert b'"completion_tokens":%d,' % self._new_tokens in body
        else:
            length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
            answer = json.loads(await self._reader.readexactly(length))
            assert answer["usage"]["completion_tokens"] == self._new_tokens

    async def close(self) -> None:
        """End the connection."""
        self._writer.close()
        await self._writer.wait_closed()


def _request(prompt: list[int], new_tokens: int, stream: bool) -> bytes:
    options: dict[str, Any] = {"model": "bench", "prompt": prompt, "max_tokens": new_tokens, "temperature": 0}
    if stream:
        options |= {"stream": True, "stream_options": {"include_usage": True}}
    body = json.dumps(options).encode()
    head = f"Host: bench\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return f"POST /v1/completions HTTP/1.1\r\n{head}\r\n\r\n".encode() + body


async def _connect(url: str, prompts: list[list[int]], new_tokens: int) -> list[_Client]:
    address, _, port = url.removeprefix("http://").partition(":")
    return [
        _Client(*await asyncio.open_connection(address, int(port), limit=2**20), prompt, new_tokens)
        for prompt in prompts
    ]


async def _ask_all(clients: list[_Client], stream: bool) -> None:
    await asyncio.gather(*(client.ask(stream) for client in clients))


async def _close(clients: list[_Client]) -> None:
    for client in clients:
        await client.close()


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
    quiet = ["--port", str(port), "--log-level", "warning", "--timeout-keep-alive", "75"]  # as laconic serve
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
