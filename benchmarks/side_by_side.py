"""Peers and laconic side by side: the same model, the same batches, the same types of numbers.

    python -m benchmarks.run side-by-side --threads 2 --rounds 5 --out benchmarks/results/side_by_side_NAME.md
    python -m benchmarks.run side-by-side --small --only optimizer

A step is forward, loss, backward and update of a Llama on real text (the Python standard library, pairs of bytes as
tokens). All contenders of a group take turns, round after round; ratios are medians over rounds of the quotient to the
exact step of the same round. Peak is the most that the C allocator has handed out during a step beside the weights:
activations, gradients, optimizer state. Loss is of a small byte-level Llama after training, on held-out text, minus
exact training's with the same seed: the same weights, batches and learning rate in the beginning. A contender whose
loss and gradients have the bits of exact ones is not trained again.

Peers run with their documented settings. One that is missing or fails is a row that says why, and the command ends with
an error; one that cannot run on any CPU is a row, too, but no error. Groups run in processes of their own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import get_context
from statistics import mean, median
from typing import Any

import torch

from benchmarks.contenders import activations, everything, files, losses, network, optimizers, text
from benchmarks.contenders.picture import Point, draw
from benchmarks.contenders.training import EXACT, Contender, Measured, measured
from benchmarks.kit import timing
from benchmarks.kit.timing import Timing
from benchmarks.registry import Options, Table, Text, benchmark, dtype_name, kernels_note
from benchmarks.slow_links import Network
from laconic.activations.whole_model.report import brief
from netlab import why_not

_TRAINED: dict[str, Callable[[], list[Contender]]] = {
    "activations": activations.contenders,
    "optimizer": optimizers.contenders,
    "loss": losses.contenders,
    "everything": everything.contenders,
}
GROUPS = (*_TRAINED, "files", "network")

_PACKAGES = (
    *("torchao", "bitsandbytes", "galore-torch", "q-galore-torch", "apollo-torch", "liger-kernel"),
    *("zipnn", "zstandard", "blosc2", "transformers"),
)
_SLOW_BF16 = 8
"""How many times as long a product of bf16 matrices may take as one of fp32 until bf16 is left out."""


@benchmark("side-by-side", cases=GROUPS)
def side_by_side(options: Options) -> Iterator[Table | Text]:
    """Groups in turn; the picture of those that train comes last."""
    yield Text(_conditions() + "\n")
    text.corpus()  # tokenized once, before anything is timed
    dtypes = [torch.float32]
    slowdown = _bf16_slowdown()
    if options.smoke or slowdown > _SLOW_BF16:
        reason = "" if options.smoke else f", where a product of matrices takes {slowdown:.0f} times as long as in fp32"
        yield Text(f"Everything is in fp32; bf16 is left out on this processor{reason}.\n")
    else:
        dtypes.append(torch.bfloat16)
    points: dict[str, list[Point]] = {}
    for group in options.only or GROUPS:
        if group in _TRAINED:
            found_losses = _losses(group, options)
            for dtype in dtypes:
                rows = _apart(_measure, group, dtype, options)
                if isinstance(rows, str):
                    yield _failed(group, rows)
                    continue
                for row in rows:
                    _add_losses(row, found_losses.get(row.name))
                yield _table(group, rows, dtype, options)
                points[f"{group}, {dtype_name(dtype)}"] = _points(rows)
                if options.out is not None:  # after each group, so that a run that is stopped leaves what it has
                    draw(points, options.out.with_suffix(".png"))
        else:
            tables = _apart(_TABLES[group], options)
            yield from (
                [Table(f"{group}: failed", ["why"], [[tables]], failed=[group])] if isinstance(tables, str) else tables
            )
    if options.out is not None and points:
        yield Text(f"![Memory against time]({options.out.with_suffix('.png').name})\n")


def _conditions() -> str:
    """Versions, and how busy the machine is."""
    versions = []
    for package in _PACKAGES:
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            versions.append(f"{package} not installed")
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    busy = f"**busy machine**: {load:.1f} processes wanted its {cores} cores" if load > 0.5 * cores else "quiet machine"
    return f"{', '.join(versions)}. {kernels_note()} When the run began: {busy} (load average of one minute)."


def _bf16_slowdown() -> float:
    """How many times as long as in fp32 a product of bf16 matrices takes, of the size of a layer's."""
    x, weight = torch.randn(512, 512), torch.randn(512, 2048)
    cases = {"fp32": partial(torch.mm, x, weight), "bf16": partial(torch.mm, x.bfloat16(), weight.bfloat16())}
    seconds = timing.in_rounds(cases, 3, timing.wall_clock)
    fp32, bf16 = (min(read() for read in seconds[name]) for name in cases)
    return bf16 / fp32


# --- processes ---


def _apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns in a process of its own, or why it has not returned: what a peer leaves stays there."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        try:
            result, protocols = pool.submit(_with_protocols, function, arguments).result()
        except BrokenProcessPool:
            return "the process crashed"
        except Exception as error:
            return f"{type(error).__name__}: {brief(error)}"
    timing.protocols += protocols
    return result


def _with_protocols(function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    return function(*arguments), timing.protocols


def _losses(group: str, options: Options) -> dict[str, list[tuple[float, bool]] | str]:
    """Losses of a group's contenders, a seed each, or why there are none; one thread for each run."""
    seeds = range(1 if options.smoke else 2)
    rows = [contender for contender in _TRAINED[group]() if not contender.missing and not contender.compiled]
    found: dict[str, list[tuple[float, bool]] | str] = {}
    with _one_thread_each(), ProcessPoolExecutor(options.threads, get_context("spawn")) as pool:
        run = text.Run.of(options.small, options.smoke)
        waiting = {row.name: [pool.submit(_train, group, row.name, run, seed) for seed in seeds] for row in rows}
        for name, futures in waiting.items():
            try:
                found[name] = [future.result() for future in futures]
            except BrokenProcessPool:
                found[name] = "a process of the group crashed in training"
            except Exception as error:
                found[name] = f"failed in training: {brief(error)}"
    return found


@contextmanager
def _one_thread_each() -> Iterator[None]:
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        os.environ.pop("OMP_NUM_THREADS")
        if before is not None:
            os.environ["OMP_NUM_THREADS"] = before


def _train(group: str, name: str, run: text.Run, seed: int) -> tuple[float, bool]:
    torch.set_num_threads(1)
    return text.train(_named(group, name), run, seed)


def _named(group: str, name: str) -> Contender:
    return next(contender for contender in _TRAINED[group]() if contender.name == name)


def _model_and_ids(options: Options) -> tuple[torch.nn.Module, torch.Tensor]:
    """The model of times and bytes, and its batch."""
    hidden, layers, vocabulary, sequences, length = (
        (64, 2, 512, 2, 32) if options.smoke else (128, 2, 4096, 4, 64) if options.small else (512, 4, 32000, 4, 256)
    )
    return text.llama(hidden, layers, vocabulary), text.byte_pairs(sequences, length, vocabulary)


def _measure(group: str, dtype: torch.dtype, options: Options) -> list[Measured]:
    torch.set_num_threads(options.threads)
    model, ids = _model_and_ids(options)
    return measured(_TRAINED[group](), model.to(dtype), ids, options.rounds)


def _add_losses(row: Measured, found: list[tuple[float, bool]] | str | None) -> None:
    if isinstance(found, str):
        if not row.failure:
            row.failure = found
    elif found:
        row.losses = [loss for loss, _ in found]
        row.same_bits = all(same for _, same in found)


# --- tables ---


def _failed(group: str, reason: str) -> Table:
    return Table(f"{group}: failed", ["why"], [[reason]], failed=[group])


def _table(group: str, rows: list[Measured], dtype: torch.dtype, options: Options) -> Table:
    model, ids = _model_and_ids(options)
    count = sum(parameter.numel() for parameter in model.parameters())
    exact = next(row for row in rows if row.name == EXACT)
    columns: dict[str, list[tuple[str, Callable[[Measured], str]]]] = {
        "activations": [
            ("kept after forward, MB", lambda row: _mb(row.held_nbytes)),
            ("of exact", lambda row: _ratio(row.held_nbytes, exact.held_nbytes)),
            ("of it seen by autograd's hooks, MB", lambda row: _mb(row.saved_nbytes)),
        ],
        "optimizer": [
            ("state, bytes per weight", lambda row: f"{row.state_nbytes / count:.2f}"),
            ("of exact", lambda row: _ratio(row.state_nbytes, exact.state_nbytes)),
            ("gradients, bytes per weight", lambda row: f"{row.gradient_nbytes / count:.2f}"),
        ],
        "loss": [
            ("kept after forward, MB", lambda row: _mb(row.held_nbytes)),
            ("of exact", lambda row: _ratio(row.held_nbytes, exact.held_nbytes)),
        ],
        "everything": [
            ("kept after forward, MB", lambda row: _mb(row.held_nbytes)),
            ("state and gradients, bytes per weight",
             lambda row: f"{(row.state_nbytes + row.gradient_nbytes) / count:.2f}"),
        ],
    }  # fmt: skip
    measures = [
        *columns[group],
        ("peak of a step, MB", lambda row: _mb(row.total_nbytes)),
        ("of exact", lambda row: _ratio(row.total_nbytes, exact.total_nbytes)),
        ("step time of exact (rounds)", lambda row: _time(row.seconds, exact.seconds)),
        ("first step, s", lambda row: f"{row.first_seconds:.1f}"),
        ("loss minus exact (seeds)", lambda row: _loss(row, exact)),
    ]

    def cell(row: Measured, number: int) -> str:
        if row.failure and row.seconds is None:
            return row.failure if number == 0 else "-"
        if row.failure and number == len(measures) - 1:
            return row.failure
        return measures[number][1](row)

    run = text.Run.of(options.small, options.smoke)
    small = text.llama(run.hidden, run.layers, text.corpus().vocab_size)
    few = sum(parameter.numel() for parameter in small.parameters())
    exact_loss = f"{mean(exact.losses):.3f}" if exact.losses else "unknown"
    return Table(
        f"{group}, {dtype_name(dtype)}",
        ["", *(heading for heading, _ in measures)],
        [[_bold(row.name), *(cell(row, number) for number in range(len(measures)))] for row in rows],
        f"Llama of {count:,} parameters (hidden {model.config.hidden_size}, {model.config.num_hidden_layers} layers, "
        f"vocabulary {model.config.vocab_size:,}), {ids.shape[0]} x {ids.shape[1]} tokens, {options.thread_text}; an "
        f"exact step takes {0 if exact.seconds is None else exact.seconds:.2f} s. Loss: Llama of {few:,} parameters, "
        f"fp32, {run.steps} steps of {run.batch_size} x {text.LENGTH} bytes, {len(exact.losses)} seeds; exact ends at "
        f"{exact_loss} nats per byte.",
        [row.name for row in rows if row.failure and not row.expected],
    )


def _bold(name: str) -> str:
    return f"**{name}**" if name.startswith("laconic") else name


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.1f}" if nbytes else "-"


def _ratio(mine: float, theirs: float) -> str:
    return f"{mine / theirs:.3f}" if theirs else "-"


def _time(seconds: Timing | None, exact: Timing | None) -> str:
    if seconds is None or exact is None:
        return "-"
    quotients = [mine / theirs for mine, theirs in zip(seconds.samples, exact.samples, strict=True)]
    return f"{median(quotients):.2f} ({min(quotients):.2f} to {max(quotients):.2f})"


def _loss(row: Measured, exact: Measured) -> str:
    if row.same_bits:
        return "0, the same bits"
    if row.compiled:
        return "not trained (compiling)"
    if not row.losses or not exact.losses:
        return "-"
    apart = [mine - theirs for mine, theirs in zip(row.losses, exact.losses, strict=True)]
    return f"{mean(apart):+.4f} ({', '.join(f'{each:+.4f}' for each in apart)})"


def _points(rows: list[Measured]) -> list[Point]:
    exact = next(row for row in rows if row.name == EXACT)
    return [
        Point(row.name, row.seconds.over(exact.seconds), row.total_nbytes / exact.total_nbytes)
        for row in rows
        if row.seconds is not None and exact.seconds is not None
    ]


# --- files and network ---


def _files(options: Options) -> list[Table]:
    torch.set_num_threads(options.threads)
    model, ids = _model_and_ids(options)
    tables = []
    for title, tensors in files.checkpoints(model, ids).items():
        nbytes, coded = files.code(tensors, options.threads, options.rounds)

        def rate(seconds: Timing | None, nbytes: int = nbytes) -> str:
            return "-" if seconds is None else f"{nbytes / 1e6 / seconds:,.0f} ({seconds.spread:.0%})"

        tables.append(
            Table.of(
                f"files: {title}, {nbytes / 1e6:.1f} MB",
                coded,
                [
                    ("", lambda row: _bold(row.name)),
                    ("share of the bytes", lambda row, n=nbytes: row.failure or f"{row.nbytes / n:.1%}"),
                    ("MB/s there (spread)", lambda row, rate=rate: rate(row.there)),
                    ("MB/s back (spread)", lambda row, rate=rate: rate(row.back)),
                ],
                f"The model of the other groups after 3 steps; {options.thread_text}. In memory, but for `zip`, which "
                "reads and writes files. Back is checked bit for bit.",
                [row.name for row in coded if row.failure],
            )
        )
    return tables


def _network(options: Options) -> list[Table]:
    if reason := why_not():
        return [Table("network", ["not measured"], [[reason]])]
    run = text.Run.of(options.small, options.smoke)
    steps = 2 if options.smoke else 20 if options.small else 60
    task = {"kinds": network.KINDS, "run": asdict(run), "steps": steps, "seeds": 1 if options.smoke else 2}
    lab = Network(2, (options.rates or [1e9 if options.smoke else 100e6])[0], options)
    found = lab.run(network.__name__, task)
    first = network.KINDS[0]
    exact = Measured(first, losses=found["losses"][first])
    return [
        Table.of(
            f"network: {lab.where(found)}, fp32",
            network.KINDS,
            [
                ("", _bold),
                ("MB from rank 0 per step", lambda kind: f"{found['nbytes'][kind] / 1e6:.2f}"),
                ("of gloo", lambda kind: _ratio(found["nbytes"][kind], found["nbytes"][first])),
                ("step time of gloo (rounds)",
                 lambda kind: _time(Timing(found["seconds"][kind]), Timing(found["seconds"][first]))),
                ("loss minus gloo's (seeds)", lambda kind: _loss(Measured(kind, losses=found["losses"][kind]), exact)),
            ],
            f"Llama of {found['num_parameters']:,} parameters under FSDP2, {steps} steps of {run.batch_size} x "
            f"{text.LENGTH} bytes over both ranks, {task['seeds']} seeds; gloo ends at {mean(exact.losses):.3f} nats "
            "per byte. Bytes are "
            "those on the interface without headers of packets. DeepSpeed's ZeRO++ itself needs CUDA: its rows are a "
            "plain torch implementation of the published scheme, blocks of 2048 values.",
        )
    ]  # fmt: skip


_TABLES: dict[str, Callable[[Options], list[Table]]] = {"files": _files, "network": _network}
