"""Load held: the rows L1 to L6 of docs/reliability.md, each at a size that is given.

A row runs its processes, checks what they compute, and samples them meanwhile; what it returns has the slopes of their
memory, file descriptors and threads. Nothing is measured against a clock but what is reported as seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch
import torch.distributed as dist

from laconic.collectives.codec import Lossless
from laconic.collectives.process_group.group import ProcessGroupOptions
from laconic.infer.bench.demo_model import save_demo_model
from laconic.train.config.toml import save_config
from laconic.train.launch.worker import leave
from laconic.train.report.metrics import read_metrics
from tests.distributed.processes import ForkedCommand, environment, is_running, start_ranks
from tests.patience import patient
from tests.train.runs import tiny_config
from tests.trust.slopes import Sampler, Slope, watched

__all__ = ["ROWS", "Load", "Size", "Sizes", "family_of", "serving"]


@dataclass(frozen=True)
class Size:
    """How much of a row is done.

    Attributes:
        seconds: how long it goes on at most.
        count: collectives or requests, where a row ends with these.
        bounds: the slopes, per minute, that are no leak.
    """

    seconds: float
    count: int
    bounds: dict[str, float]

    def lasting(self, seconds: float) -> Size:
        """The same row for another time. Memory settles by as much in less of it: its bound is the same growth."""
        share = max(1.0, self.seconds / seconds)
        bounds = {kind: bound * share if kind.endswith("_mb") else bound for kind, bound in self.bounds.items()}
        return replace(self, seconds=seconds, bounds=bounds)


@dataclass(frozen=True)
class Sizes:
    """A row's sizes in the slow tests and by hand."""

    short: Size
    long: Size


@dataclass
class Load:
    """What a row did."""

    row: str
    what: str
    facts: dict[str, str] = field(default_factory=dict)
    """What was counted and measured."""
    slopes: dict[str, list[Slope]] = field(default_factory=dict)
    """By what was watched."""

    @property
    def leaks(self) -> list[str]:
        """The slopes above their bounds."""
        return [f"{name}: {slope}" for name, found in self.slopes.items() for slope in found if slope.leaks]


# Seconds are few: pools of the allocator that settle look like a slope of this size.
_SHORT = {"rss_mb": 60.0, "own_mb": 60.0, "fds": 6.0, "threads": 6.0}
_LONG = {"rss_mb": 1.0, "own_mb": 1.0, "fds": 0.2, "threads": 0.2}


# --- L1 and L5: collectives ---

_WARM_UP_CALLS = 256
"""Before samples are taken: connections are made at first use, and buffers grow to the largest message."""


def _collectives(rank: int, world: int, folder: str, size: Size, timeout_seconds: float, numels: list[int]) -> None:
    """Collectives of all kinds and sizes, every result checked, until the count is reached or the time is over."""
    torch.set_num_threads(1)
    options: Any = ProcessGroupOptions(Lossless(), min_nbytes=1024)
    dist.init_process_group(
        "laconic",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout_seconds),
        pg_options=options,
    )
    seconds: dict[int, list[float]] = {}
    began, done = time.monotonic(), 0
    under_way = Path(folder, "under way")
    rng = random.Random(0)
    works: list[tuple[Any, torch.Tensor, float]] = []
    stop = torch.zeros(1)
    while done < size.count:
        if done % 64 == 0:  # all ranks stop at the same call
            if rank == 0 and done == _WARM_UP_CALLS:
                under_way.touch()
                began = time.monotonic()
            stop[0] = float(done > _WARM_UP_CALLS and time.monotonic() - began > size.seconds)
            dist.broadcast(stop, 0)
            if stop.item():
                break
        numel = rng.choices(numels, [1 / (1 + n / 1000) + 0.002 for n in numels])[0]
        kind = rng.randrange(4)
        x = torch.full((numel,), float(rank + done % 7))
        expected = world * (world - 1) / 2 + world * (done % 7)
        start = time.perf_counter()
        if kind == 0:
            dist.all_reduce(x)
            seconds.setdefault(numel, []).append(time.perf_counter() - start)
            _check(x, expected, done)
        elif kind == 1:
            works.append((dist.all_reduce(x, async_op=True), x, expected))
        elif kind == 2:
            every = [torch.empty_like(x) for _ in range(world)]
            dist.all_gather(every, x)
            _check(sum(every), expected, done)  # type: ignore[arg-type]
        else:
            dist.broadcast(x, done % world)
            _check(x, float(done % world + done % 7), done)
        done += 1
        if len(works) == 8 or done == size.count:
            rng.shuffle(works)
            for work, y, total in works:
                work.wait()
                _check(y, total, done)
            works.clear()
    for work, y, total in works:
        work.wait()
        _check(y, total, done)
    if rank == 0:
        under_way.unlink()
        found = {numel: (len(each), statistics.median(each)) for numel, each in seconds.items()}
        Path(folder, "result.json").write_text(json.dumps({"done": done, "seconds": sorted(found.items())}))
    dist.barrier()
    dist.destroy_process_group()
    leave(0)


def _check(x: torch.Tensor, expected: float, number: int) -> None:
    if not bool((x == expected).all()):
        raise AssertionError(f"call {number} gave {x[:3].tolist()}, not {expected}")


def _run_collectives(folder: Path, world: int, size: Size, timeout_seconds: float, numels: list[int]) -> Load:
    load = Load("", "")
    processes = start_ranks(_collectives, (world, str(folder), size, timeout_seconds, numels), world)
    pids = [process.pid or 0 for process in processes]
    under_way = folder / "under way"
    with watched(lambda: pids if under_way.exists() else [], size_interval(size)) as sampler:
        for process in processes:
            process.join()
    codes = [process.exitcode for process in processes]
    assert codes == [0] * world, f"ranks ended with {codes}"
    result = json.loads((folder / "result.json").read_text())
    load.facts["collectives"] = f"{result['done']:,}, every result as expected"
    for numel, (count, seconds) in result["seconds"]:
        rate = 2 * (world - 1) / world * 4 * numel / seconds / 1e6
        load.facts[f"all_reduce of {4 * numel:,} bytes"] = (
            f"{count} times, median {1e3 * seconds:.2f} ms, {rate:.1f} MB/s"
        )
    load.slopes["ranks"] = sampler.slopes(size.bounds)
    return load


def size_interval(size: Size) -> float:
    """Seconds between two samples: some 100 in a short run."""
    return max(0.1, min(2.0, size.seconds / 150))


def collectives_soak(folder: Path, size: Size) -> Load:
    """L1: collectives of 4 bytes to 16 MB between two ranks of a lossless group."""
    load = _run_collectives(folder, 2, size, patient(60), [1, 250, 4_000, 64_000, 1_000_000, 4_000_000])
    load.row, load.what = "L1", "2 ranks, sizes from 4 bytes to 16 MB, blocking and waited for in another order"
    return load


def oversubscribed(folder: Path, size: Size) -> Load:
    """L5: eight ranks on this machine's cores, with four times the timeout."""
    load = _run_collectives(folder, 8, size, patient(240), [1, 250, 4_000, 64_000])
    load.row, load.what = "L5", f"8 ranks on {os.cpu_count()} cores, no spurious failure"
    return load


# --- L2, L3 and L4: training ---


def _train(folder: Path, name: str, size: Size, **changes: Any) -> tuple[list[dict[str, Any]], Sampler]:
    """A run that is stopped when its time is over; its metrics and its samples."""
    always = {"steps": 1_000_000, "eval_every": 0, "eval_sequences": 0, "verify.every": 0, "batch_size": 8}
    config = tiny_config(folder, name, always | changes)
    save_config(config, folder / f"{name}.toml")
    command = ForkedCommand(
        ["train", "--config", str(folder / f"{name}.toml")], folder / f"{name}-printed", environment()
    )
    _until_steps(folder / name, 3, command)
    with watched(lambda: family_of(command.pid), size_interval(size)) as sampler:
        _sleep(size.seconds, command, sampler)
    command.send_signal(2)
    ending = command.finish()
    assert ending.code == 130, ending.err
    return [row for row in read_metrics(folder / name) if "loss" in row], sampler


def family_of(pid: int) -> list[int]:
    """A process and all below it, without the small one that removes the launcher's files."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        return [pid, *(child.pid for child in process.children(recursive=True) if child.num_threads() > 1)]
    return []


def _until_steps(run_dir: Path, count: int, command: ForkedCommand) -> None:
    file = run_dir / "metrics.jsonl"
    while not file.exists() or file.read_text().count('"loss"') < count:
        assert command.poll() is None, command.finish().err
        time.sleep(0.05)


def _sleep(seconds: float, command: ForkedCommand, sampler: Sampler) -> None:
    """Wait until the time is over and there are enough samples for a slope: on a busy machine one takes long."""
    end, looks = time.monotonic() + seconds, sampler.num_looks + 12
    while time.monotonic() < end or sampler.num_looks < looks:
        assert command.poll() is None, command.finish().err
        time.sleep(0.1)


def training(folder: Path, size: Size) -> Load:
    """L2: a GPT on two processes, with gradients as they are, shortened losslessly, and in 8 bits."""
    load = Load("L2", "2 processes, DDP; what averaging gradients takes on the wire")
    shape = {"model.hidden_size": 128, "model.intermediate_size": 384, "sequence_length": 32, "nproc": 2}
    share = Size(size.seconds / 3, 0, size.bounds)
    plain = 0.0
    for name, changes in (
        ("plain", {"zip": "off"}),
        ("lossless", {"zip": "on"}),
        ("8 bits", {"zip": "off", "gradients.bits": 8}),
    ):
        rows, sampler = _train(folder, name.replace(" ", "-"), share, **shape, **changes)
        sent = sum(row["wire_nbytes"] for row in rows) / len(rows)
        plain = plain or sent
        tokens = statistics.median(8 * 32 / row["step_seconds"] for row in rows)
        load.facts[name] = (
            f"{len(rows)} steps, {sent / 1e6:.2f} MB a step (1/{plain / sent:.2f}), median {tokens:,.0f} tokens/s"
        )
        load.slopes[name] = sampler.slopes(size.bounds)
    return load


def experts(folder: Path, size: Size) -> Load:
    """L3: eight experts over four processes, two "nodes" of two, flat and in levels."""
    load = Load("L3", "4 processes, 8 experts, levels 2 x 2 on one machine")
    moe = {"model.family": "qwen3_moe", "moe.expert_parallel": 4, "nproc": 4} | {
        "model.extra": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    }
    share = Size(size.seconds / 2, 0, size.bounds)
    for name, changes in (("flat", {}), ("hierarchical", {"moe.dispatcher": "hierarchical", "moe.levels": (2,)})):
        rows, sampler = _train(folder, name, share, **moe, **changes)
        load.facts[name] = f"{len(rows)} steps, last loss {rows[-1]['loss']:.3f}"
        load.slopes[name] = sampler.slopes(size.bounds)
    return load


def saving(folder: Path, size: Size) -> Load:
    """L4: a run that saves every few steps and is stopped and resumed again and again."""
    load = Load("L4", "2 processes, a save every 5 steps, keep 2, stopped by SIGTERM and resumed")
    changes = {"steps": 1_000_000, "eval_every": 0, "eval_sequences": 0, "checkpoint.every": 5, "nproc": 2}
    config = tiny_config(folder, "run", changes | {"batch_size": 4})
    save_config(config, folder / "config.toml")
    root = folder / "run" / "checkpoints"
    arguments = ["train", "--config", str(folder / "config.toml")]
    command: ForkedCommand | None = None
    disk: list[int] = []
    resumes = 0
    began = time.monotonic()
    resting = True
    with watched(lambda: [] if resting or command is None else family_of(command.pid), size_interval(size)) as sampler:
        while time.monotonic() - began < size.seconds:
            variables = environment()
            command = ForkedCommand(arguments, folder / f"printed-{resumes}", variables)
            steps = _num_rows(folder / "run")
            _until_steps(folder / "run", steps + 12, command)
            resting = False
            end, looks = time.monotonic() + max(4.0, size.seconds / 10), sampler.num_looks + 12
            while time.monotonic() < end or sampler.num_looks < looks:
                disk.append(_nbytes(root))
                time.sleep(0.2)
            resting = True
            command.send_signal(15)
            ending = command.finish()
            assert ending.code == 143, ending.err
            arguments = ["train", "--resume", "--run-dir", str(folder / "run")]
            resumes += 1
    rows = [row for row in read_metrics(folder / "run") if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    one = _nbytes(root) / len([p for p in root.iterdir() if p.is_dir()])
    most = max(disk) / one
    assert most <= 3.2, f"{most:.1f} checkpoints on the disk at once"  # those that are kept, and the next
    load.facts["saves"] = (
        f"{rows[-1]['step'] // 5 + resumes:,} in {len(rows):,} steps, {resumes} times stopped and resumed"
    )
    load.facts["disk"] = f"at most {most:.1f} checkpoints of {one / 1e3:.0f} KB"
    load.slopes["processes"] = sampler.slopes(size.bounds)
    return load


def _num_rows(run_dir: Path) -> int:
    file = run_dir / "metrics.jsonl"
    return file.read_text().count('"loss"') if file.exists() else 0


def _nbytes(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):  # folders may be gone before they are read: rglob would raise
        for name in names:
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(parent, name)).st_size
    return total


# --- L6: requests ---

_FEWEST_REQUESTS = 240
"""However little time there is: each of the prompts several times, so that answers can be compared."""


def requests(folder: Path, size: Size) -> Load:
    """L6: requests at random times to `laconic serve` with two attention and two expert workers."""
    load = Load("L6", "2 attention and 2 expert workers, requests at random times, every tenth client goes away")
    save_demo_model(folder / "model", hidden_size=32, layers=2, experts=4)
    with serving(folder / "model", "--attention", "2", "--experts", "2") as (url, pid):
        asyncio.run(_ask(url, replace(size, count=600)))  # caches and pools grow to what 64 at once need
        with watched(lambda: family_of(pid), size_interval(size)) as sampler:
            seconds, gone = asyncio.run(_ask(url, size))
        metrics = httpx.get(f"{url.removesuffix('/v1')}/metrics").text
        assert "laconic_requests_waiting 0" in metrics
    ordered = sorted(seconds)
    load.facts["requests"] = f"{len(seconds):,} answered, each with the tokens of its prompt; {gone:,} clients left"
    load.facts["seconds"] = (
        f"median {statistics.median(ordered):.3f}, 99th percentile {ordered[int(0.99 * (len(ordered) - 1))]:.3f}"
    )
    load.slopes["server and workers"] = sampler.slopes(size.bounds)
    return load


@contextlib.contextmanager
def serving(model: Path, *flags: str) -> Iterator[tuple[str, int]]:
    """`laconic serve` as its users start it: its address, and its process, which ends with the block."""
    command = [sys.executable, "-m", "laconic", "serve", "--model", str(model), "--port", "0", "--name", "tiny"]
    command += ["--dtype", "float32", "--cache-tokens", "2048", *flags]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            said = ""
            while "is served at" not in said:
                said = process.stdout.readline()
                assert said, "the server ended"
            yield said.split()[-1], process.pid
        finally:
            workers = family_of(process.pid)
            if process.poll() is None:
                process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patient(60))
            process.kill()
            for pid in workers:
                end = time.monotonic() + patient(60)
                while is_running(pid):
                    assert time.monotonic() < end, f"{pid} outlives its server"
                    time.sleep(0.05)


async def _ask(url: str, size: Size) -> tuple[list[float], int]:
    """Ask `size.count` times, or until its time is over, at most 64 at once.

    Returns:
        the seconds of each answer, and how many clients left.
    """
    end = time.monotonic() + size.seconds
    rng = random.Random(1)
    bodies = [
        {"model": "tiny", "prompt": f"prompt {n}", "temperature": 0, "max_tokens": 2 + n % 12, "stream": n % 2 == 0}
        for n in range(24)
    ]
    expected: dict[int, str] = {}
    seconds: list[float] = []
    gone = 0
    places = asyncio.Semaphore(64)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=600, limits=limits) as client:

        async def ask(number: int) -> None:
            nonlocal gone
            which = number % len(bodies)
            start = time.perf_counter()
            try:
                if number % 10 == 9 and which in expected:
                    async with client.stream("POST", f"{url}/completions", json=bodies[which] | {"stream": True}):
                        gone += 1  # and leave
                    return
                answer = await client.post(f"{url}/completions", json=bodies[which])
                assert answer.status_code == 200, answer.text
                text = _text(answer.text, bool(bodies[which]["stream"]))
            finally:
                places.release()
            seconds.append(time.perf_counter() - start)
            assert expected.setdefault(which, text) == text, f"request {number}"

        tasks = []
        for number in range(size.count):
            if number >= _FEWEST_REQUESTS and time.monotonic() > end:
                break
            await places.acquire()
            tasks.append(asyncio.create_task(ask(number)))
            await asyncio.sleep(rng.expovariate(400))
        await asyncio.gather(*tasks)
    return seconds, gone


def _text(body: str, stream: bool) -> str:
    if not stream:
        return str(json.loads(body)["choices"][0]["text"])
    events = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]", body[-200:]
    return "".join(choice["text"] for event in events[:-1] for choice in json.loads(event)["choices"])


_MINUTE = 60.0
ROWS: dict[str, tuple[Callable[[Path, Size], Load], Sizes]] = {
    "L1": (collectives_soak, Sizes(Size(8, 10**6, _SHORT), Size(20 * _MINUTE, 10**5, _LONG))),
    "L2": (training, Sizes(Size(9, 0, _SHORT), Size(6 * _MINUTE, 0, _LONG))),
    "L3": (experts, Sizes(Size(8, 0, _SHORT), Size(6 * _MINUTE, 0, _LONG))),
    "L4": (saving, Sizes(Size(8, 0, _SHORT), Size(30 * _MINUTE, 0, _LONG))),
    "L5": (oversubscribed, Sizes(Size(8, 10**6, _SHORT), Size(10 * _MINUTE, 10**6, _LONG))),
    "L6": (requests, Sizes(Size(8, 600, _SHORT), Size(15 * _MINUTE, 10**4, _LONG))),
}
"""Each row and its sizes."""
