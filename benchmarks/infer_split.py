"""FinDEP's gain in prefill, from tasks measured alone, and from real runs of attention and experts over a shaped link.

Two hosts (network namespaces, netlab): an attention worker and an expert worker, one pinned core and one thread each,
with the executor of laconic.infer and transformers' continuous batching. Three kinds of evidence, in tables of their
own: tasks and links measured alone; plans simulated with these; plans run.

A micro-batch is one prompt. PPPipe is r2 = 1 with shared experts before rows leave, at its own best r1; naive is
PPPipe with r1 = 1. Both run through the same executor as FinDEP's plans.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from math import comb
from pathlib import Path
from statistics import linear_regression, mean, median
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from benchmarks.kit.local_link import LocalLink
from benchmarks.kit.split_prefill import Model, Prefill, Trace, load_share, save_model, traced
from benchmarks.kit.timing import Timing, note
from benchmarks.registry import Options, Table, benchmark
from benchmarks.slow_links import Network, as_rank, in_lab
from laconic.infer.connections import Connection, accept_attention, connect_expert
from laconic.infer.links import TcpExpertLink, serve
from laconic.infer.messages import SUMS, Header
from laconic.schedule.inference import BlockTimes, InferencePlan, Order, Slicing, inference_seconds

_SLICES = (2, 4, 8)
_FIT = (1, 2, 3, 4, 8)
_FIT_IN_RUNS = (1, 2, 3, 8)
_ROUNDS_FOR_ONE = 3
"""Rounds that are run for each that counts."""
_SIZES = (1 << 16, 1 << 18, 1 << 20, 1 << 21)

_SHARED = Model("qwen2_moe", 512, 512, 512, 8, 2, 4, 1024)
_PLAIN = Model("qwen3_moe", 512, 512, 0, 8, 2, 4, 1024)
_SMALL = Model("qwen2_moe", 256, 256, 256, 16, 4, 4, 512)
_SMOKE = Model("qwen2_moe", 64, 32, 32, 8, 2, 2, 64)

_RATE, _OTHER_RATES = 400e6, (100e6, 1600e6)
"""Bits per second. At the first, a message of the larger models takes about as long as their tasks."""


@dataclass(frozen=True)
class LinkTimes:
    """Seconds of one message: `start_up` and `per_byte`."""

    start_up: float
    per_byte: float

    def seconds(self, nbytes: int) -> float:
        """Of a message of `nbytes`; one without rows does not travel."""
        return self.start_up + self.per_byte * nbytes if nbytes else 0.0

    @classmethod
    def fit(cls, seconds: Mapping[int, float]) -> LinkTimes:
        """A line through the seconds of messages by their bytes; it does not start below 0."""
        slope, intercept = linear_regression(list(seconds), list(seconds.values()))
        return cls(max(intercept, 0.0), slope)


def layer_times(trace: Trace, link: LinkTimes) -> list[BlockTimes]:
    """The times of a plan: those of each layer, and a dense layer for what follows the last one."""
    layers = [
        BlockTimes(
            one.attention,
            one.shared,
            tuple(map(link.seconds, one.sent)),
            one.experts,
            tuple(map(link.seconds, one.received)),
        )
        for one in trace.layers
    ]
    return [*layers, BlockTimes(trace.tail, 0.0, (), (), ())]


_WHOLE = "no split, one worker"

Cut = tuple[int, Slicing]
"""Number of slices, and what they are."""

_CUTS: tuple[Cut, ...] = ((1, "tokens"), *((count, slicing) for count in _SLICES for slicing in get_args(Slicing)))


def plan_name(plan: InferencePlan) -> str:
    """naive, PPPipe r1 = 2, FinDEP r1 = 2, 4 slices of tokens, ASAS."""
    if plan.shared_first:
        return "naive" if plan.num_micro_batches == 1 else f"PPPipe r1 = {plan.num_micro_batches}"
    slices = f"{plan.num_slices} slices of {plan.slicing}" if plan.num_slices > 1 else "1 slice"
    order = f", {plan.order}" if plan.num_micro_batches > 1 else ""
    return f"FinDEP r1 = {plan.num_micro_batches}, {slices}{order}"


class Predictions:
    """Simulated seconds per prompt of every plan, from traces of each cut and the times of a link."""

    def __init__(self, traces: Mapping[Cut, Trace], link: LinkTimes) -> None:
        self._times = {cut: layer_times(trace, link) for cut, trace in traces.items()}

    def seconds(self, plan: InferencePlan) -> float:
        """Of one prompt under `plan`."""
        times = self._times[plan.num_slices, plan.slicing]
        return inference_seconds(times, plan, len(times)) / plan.num_micro_batches

    def pppipe(self, fit: int) -> InferencePlan:
        """The best PPPipe plan of at most `fit` micro-batches."""
        return min((InferencePlan(r1, shared_first=True) for r1 in range(1, fit + 1)), key=self.seconds)

    def findep(self, fit: int) -> InferencePlan:
        """The best FinDEP plan of at most `fit` micro-batches; of equals the one of fewer parts."""
        plans = (
            InferencePlan(r1, count, order, slicing)
            for r1 in range(1, fit + 1)
            for count, slicing in sorted(self._times)
            for order in get_args(Order)
        )
        return min(plans, key=self.seconds)


_MODULE = "benchmarks.infer_split"


@benchmark("infer-split")
@in_lab("Split inference")
def infer_split(options: Options) -> list[Table]:
    """Tasks and links alone, and plans simulated with them."""
    alone, simulated = [], []
    for model in [_SMOKE] if options.smoke else [_SHARED, _PLAIN, _SMALL]:
        with tempfile.TemporaryDirectory() as folder:
            save_model(model, Path(folder))
            task = {"folder": folder, "tokens": model.prompt_tokens}
            traces: dict[Cut, Trace] = {}
            for rate in options.rates or (_RATE, *(() if options.smoke else _OTHER_RATES)):
                network = Network(2, rate, options)
                found = network.run(_MODULE, task | {"do": "links" if traces else "trace"})
                traces = traces or _traces(found)
                link = LinkTimes(**found["link"])
                alone.append(_alone_row(model, network, traces[1, "tokens"], link))
                predictions = Predictions(traces, link)
                simulated += [_simulated_row(model, network, predictions, fit) for fit in _FIT]
    return [_alone(alone), _simulated(simulated)]


@benchmark("infer-split-run")
@in_lab("Split inference, run")
def infer_split_run(options: Options) -> list[Table]:
    """Plans that were run, beside what the simulation said before."""
    model = _SMOKE if options.smoke else _SHARED
    network = Network(2, options.rates[0] if options.rates else _RATE, options)
    with tempfile.TemporaryDirectory() as folder:
        save_model(model, Path(folder))
        task = {"folder": folder, "tokens": model.prompt_tokens}
        found = network.run(_MODULE, task | {"do": "trace"})
        predictions = Predictions(_traces(found), LinkTimes(**found["link"]))
        chosen = _chosen(predictions)
        result = network.run(_MODULE, task | {"do": "run", "plans": [asdict(plan) for plan in chosen]})
    *split, whole = map(Timing, result["seconds"])
    measured = dict(zip(chosen, split, strict=True))
    title = f"{model}, {network.where(result)}"
    return [
        _run_table(title, predictions, measured, whole, result["others"]),
        _ratios(predictions, measured, whole, result["same"]),
    ]


def _traces(found: Mapping[str, Any]) -> dict[Cut, Trace]:
    return dict(zip(_CUTS, map(Trace.from_values, found["traces"]), strict=True))


def _chosen(predictions: Predictions) -> list[InferencePlan]:
    """Plans to run: naive, the best of PPPipe and of FinDEP by the prompts that fit, and others to rank."""
    plans = [
        InferencePlan(shared_first=True),
        *(best(fit) for fit in _FIT_IN_RUNS for best in (predictions.pppipe, predictions.findep)),
        InferencePlan(1, 2),
        InferencePlan(2, 1),
        InferencePlan(1, 4, slicing="experts"),
    ]
    return list(dict.fromkeys(plans))


# --- tables ---


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}" if seconds < 0.1 else f"{1e3 * seconds:.0f}"


def _alone_row(model: Model, network: Network, trace: Trace, link: LinkTimes) -> list[str]:
    def of(read: Callable[[Any], float]) -> str:
        return _ms(mean(read(layer) for layer in trace.layers))

    return [
        *(f"{model}", network.rate_text),
        *(of(lambda layer: layer.attention), of(lambda layer: layer.shared), of(lambda layer: sum(layer.experts))),
        of(lambda layer: sum(map(link.seconds, layer.sent))),
        of(lambda layer: sum(map(link.seconds, layer.received))),
        f"{8e-6 / link.per_byte:.0f}",
        _ms(link.start_up),
    ]


def _alone(rows: list[list[str]]) -> Table:
    return Table(
        "Tasks measured alone: milliseconds of one prompt in one layer, in one slice",
        ["model", "link", "attention", "shared", "experts", "dispatch", "combine", "link Mbit/s", "link start-up, ms"],
        rows,
        "Mean over layers. Tasks: processor time of the real modules on a pinned core, medians. Links: messages of 64"
        " KB to 2 MB, medians, a line through them.",
    )


def _simulated_row(model: Model, network: Network, predictions: Predictions, fit: int) -> list[str]:
    naive, pppipe, findep = InferencePlan(shared_first=True), predictions.pppipe(fit), predictions.findep(fit)
    seconds = [predictions.seconds(plan) for plan in (naive, pppipe, findep)]
    return [
        *(f"{model}", network.rate_text, f"{fit}"),
        *(_ms(one) for one in seconds),
        *(plan_name(pppipe), plan_name(findep)),
        *(f"{one / seconds[2]:.3f}" for one in seconds[:2]),
    ]


def _simulated(rows: list[list[str]]) -> Table:
    return Table(
        "Trace-driven: plans simulated with the tasks measured alone, milliseconds per prompt",
        [
            *("model", "link", "prompts that fit", "naive", "PPPipe", "FinDEP", "best PPPipe", "best FinDEP"),
            *("FinDEP over naive", "FinDEP over PPPipe"),
        ],
        rows,
        f"A micro-batch is one prompt; both choose any r1 that fits, FinDEP r2 in 1, {', '.join(map(str, _SLICES))},"
        " the slicing and the order. Every layer has its own times.",
    )


def _run_table(
    title: str,
    predictions: Predictions,
    measured: Mapping[InferencePlan, Timing],
    whole: Timing,
    others: Sequence[float],
) -> Table:
    def row(name: str, predicted: str, seconds: Timing, error: str) -> list[str]:
        low, high = map(_ms, interval(seconds.samples))
        return [name, predicted, _ms(seconds), f"{low} to {high}", error]

    rows = [row(_WHOLE, "-", whole, "-")]
    for plan, seconds in measured.items():
        predicted = predictions.seconds(plan)
        rows.append(row(plan_name(plan), _ms(predicted), seconds, f"{predicted / seconds - 1:+.1%}"))
    least, most, most_of_all = others
    return Table(
        f"Milliseconds per prompt: {title}",
        ["plan", "predicted", "measured, median", "interval", "error of the prediction"],
        rows,
        "One attention worker and one expert worker, a pinned core and a thread each; plans take turns, round by"
        f" round. '{_WHOLE}' is one prompt after another on a single core; two such workers, which hold the model"
        " twice, take half of it per prompt. From the beginning of the first forward to the end of the last. Interval:"
        f" of the median, 95 % or more, by order statistics. One in {_ROUNDS_FOR_ONE} rounds counts: those in which"
        f" others took least of the cores, {least:.0%} to {most:.0%} (in all rounds up to {most_of_all:.0%}).",
    )


def _ratios(predictions: Predictions, measured: Mapping[InferencePlan, Timing], whole: Timing, same: str) -> Table:
    rows = []
    pairs = list(combinations(measured, 2))
    alike = sum(
        (predictions.seconds(one) < predictions.seconds(other)) == (measured[one] < measured[other])
        for one, other in pairs
    )
    errors = [abs(predictions.seconds(plan) / seconds - 1) for plan, seconds in measured.items()]
    for fit in _FIT_IN_RUNS:
        plan = predictions.findep(fit)
        known = [one for one in measured if one.shared_first and one.num_micro_batches <= fit]
        others = dict.fromkeys([InferencePlan(shared_first=True), min(known, key=lambda one: measured[one])])
        beside = {
            plan_name(other): (f"{predictions.seconds(other) / predictions.seconds(plan):.3f}", measured[other])
            for other in others
        }
        for name, (predicted, timing) in (beside | {_WHOLE: ("-", whole)}).items():
            quotients = [a / b for a, b in zip(timing.samples, measured[plan].samples, strict=True)]
            low, high = interval(quotients)
            rows.append(
                [
                    *(f"{fit}", plan_name(plan), name, predicted, f"{median(quotients):.3f}"),
                    *(f"{low:.3f} to {high:.3f}", f"{len(quotients)}"),
                ]
            )
    return Table(
        "Speedups in pairs of the same round",
        ["prompts that fit", "FinDEP plan", "over", "predicted", "measured, median", "interval", "pairs"],
        rows,
        "The FinDEP plan is the one that the simulation chose before anything was run; PPPipe is its faster one, which"
        f" is naive where one prompt fits. Predictions of all plans: median error {median(errors):.1%}, {alike} of"
        f" {len(pairs)} pairs of plans ranked as measured. Plans that chose the token of naive: {same}.",
    )


def interval(samples: Iterable[float]) -> tuple[float, float]:
    """Interval that holds the median of the distribution with probability 0.95, or all samples if they are too few."""
    ordered = sorted(samples)
    count, below, tail = len(ordered), 0, 2.0 ** -len(ordered)
    while tail + comb(count, below + 1) * 2.0**-count <= 0.025:
        below += 1
        tail += comb(count, below) * 2.0**-count
    return ordered[below], ordered[-1 - below]


# --- inside of a rank ---


def _measure(task: dict[str, Any]) -> dict[str, Any]:
    """Rank 0 is the attention worker, rank 1 the expert worker."""
    cores = sorted(os.sched_getaffinity(0))
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), {cores[dist.get_rank() % len(cores)]})
    store = distributed_c10d._get_default_store()
    link = connect_expert(store, 0, 0) if dist.get_rank() == 0 else accept_attention(store, 0, 1)[0]
    if task["do"] == "run":
        return _run(task, link)
    result: dict[str, Any] = {}
    if task["do"] == "trace" and dist.get_rank() == 0:
        folder = Path(task["folder"])
        plans = [InferencePlan(1, count, slicing=slicing) for count, slicing in _CUTS]
        found = traced(folder, task["tokens"], plans, load_share(folder), 1 if task["smoke"] else 5)
        result["traces"] = [trace.to_values() for trace in found]
    sizes = _SIZES[:2] if task["smoke"] else _SIZES
    return result | {"link": asdict(_time_link(link, sizes, 3 if task["smoke"] else 9))}


def _time_link(link: Connection, sizes: Sequence[int], rounds: int) -> LinkTimes:
    """Time messages from rank 0, each answered by an empty one, whose way is half of an exchange of two empty ones."""
    rank = dist.get_rank()
    bodies = {size: torch.zeros(size, dtype=torch.uint8) for size in (0, *sizes)}

    def send(size: int) -> None:
        link.send(Header(SUMS, num_rows=size // 4, width=1, values_nbytes=size), bodies[size])

    def exchange(size: int) -> float:
        started = time.perf_counter()
        if rank == 0:
            send(size)
            link.receive()
        else:
            link.receive()
            send(0)
        return time.perf_counter() - started

    found: dict[int, list[float]] = {size: [] for size in bodies}
    for number in range(-2, rounds):
        for size, kept in found.items():
            seconds = exchange(size)
            if number >= 0:
                kept.append(seconds)
    back = median(found[0]) / 2
    return LinkTimes.fit({size: median(found[size]) - back for size in sizes})


def _run(task: dict[str, Any], connection: Connection) -> dict[str, Any]:
    """Run the plans in turn, in more rounds than count: those count in which other programs worked least."""
    folder = Path(task["folder"])
    pids = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
    dist.all_gather(pids, torch.tensor([os.getpid()]))
    share = load_share(folder)
    if dist.get_rank() == 1:
        dist.barrier()
        serve([connection], share.run)
        return {}
    plans = [InferencePlan(**values) for values in task["plans"]]
    dist.barrier()
    link = TcpExpertLink(connection, "expert worker 0")
    prefills = [Prefill(folder, task["tokens"], plan, link) for plan in plans]
    prefills.append(Prefill(folder, task["tokens"], InferencePlan(shared_first=True), LocalLink(share.run)))
    first = [prefill.run(0)[1][0] for prefill in prefills]

    rounds = 2 if task["smoke"] else max(task["rounds"], 9)
    found: list[tuple[float, list[float]]] = []
    for number in range(1, 1 + _ROUNDS_FOR_ONE * rounds):
        seconds = [0.0] * len(prefills)
        meter = _Others([int(pid) for pid in pids])
        for place in range(number, number + len(prefills)):
            prefill = prefills[place % len(prefills)]
            seconds[place % len(prefills)] = prefill.run(number)[0] / prefill.plan.num_micro_batches
        found.append((meter.share(), seconds))
    for prefill in prefills:
        prefill.close()
    link.close()
    found.sort()
    names = [*map(plan_name, plans), _WHOLE]
    timings = {name: Timing([one[n] for _, one in found[:rounds]]) for n, name in enumerate(names)}
    note(timings, 1, 0)
    return {
        "seconds": [timing.samples for timing in timings.values()],
        "others": [found[0][0], found[rounds - 1][0], found[-1][0]],
        "same": f"{sum(token == first[0] for token in first)} of {len(first)}",
    }


class _Others:
    """How much of the processors other programs take from its making on; the kernel's work for packets is not counted.

    Args:
        pids: of the programs that are not others.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._before = self._read()

    def share(self) -> float:
        """Processor time of others, as a part of all there was."""
        used, mine, total = (now - before for now, before in zip(self._read(), self._before, strict=True))
        return max(used - mine, 0.0) / total

    def _read(self) -> tuple[int, int, int]:
        ticks = [int(text) for text in Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)[0].split()[1:9]]
        user, nice, system, _, _, _, _, steal = ticks
        mine = 0
        for pid in self._pids:
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            mine += int(fields[11]) + int(fields[12])  # utime, stime
        return user + nice + system + steal, mine, sum(ticks)


if __name__ == "__main__":
    as_rank(_measure)
