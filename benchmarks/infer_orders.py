"""Orders of disaggregated inference on random workloads: how far from the best the named ones are, what slices gain.

All numbers are simulated. A workload is linear: a task takes its start-up, and its work per sample times the samples; a
slice has its part of the work.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import get_args

from benchmarks.kit.inference_orders import best_word, layer_words, lower_bound_seconds, word_seconds
from benchmarks.kit.timing import Case, processor_clock, seconds_of
from benchmarks.registry import Options, Table, benchmark
from laconic.schedule.inference import BlockTimes, InferencePlan, Order, Times, inference_plan, inference_seconds
from laconic.schedule.streams import simulate

_LAYERS = 8
_SLICES = range(1, 17)
_WIDTH = 20
_CAPS = (1, 2, 3, 4, 8)


@dataclass(frozen=True)
class Workload:
    """Seconds per sample of a layer, and the start-up of each task."""

    attention: float
    shared: float
    experts: float
    link: float
    start_up: float

    @classmethod
    def balanced(cls, generator: random.Random) -> Workload:
        """Attention, experts and link take about 1 each, shared experts about a third, start-up about an eighth."""
        attention, experts, link = (generator.uniform(0.5, 1.5) for _ in range(3))
        return cls(attention, generator.uniform(0.1, 0.5), experts, link, generator.uniform(0.05, 0.2))

    @classmethod
    def skewed(cls, generator: random.Random) -> Workload:
        """Each of the four differs by a factor of e in each direction; start-up between 1 % and 10 % of the median."""
        return cls(*[generator.lognormvariate(0, 1) for _ in range(4)], 10 ** generator.uniform(-2, -1))

    def times(self, samples: int, num_slices: int) -> BlockTimes:
        """A micro-batch of so many samples."""
        work = [self.start_up + one * samples for one in (self.attention, self.shared)]
        link, experts = (self.start_up + one * samples / num_slices for one in (self.link, self.experts))
        return BlockTimes.uniform(*work, link, experts, link, num_slices)


Draw = Callable[[random.Random], Workload]


def speedup(workload: Workload, most: int) -> float:
    """Throughput of the best FinDEP plan over the best PPPipe plan, when `most` samples fit on an attention worker."""

    def throughput(samples: int, plan: InferencePlan) -> float:
        seconds = inference_seconds(workload.times(samples, plan.num_slices), plan, _LAYERS)
        return samples * plan.num_micro_batches / seconds

    sizes = [(r1, samples) for r1 in range(1, most + 1) for samples in range(1, most // r1 + 1)]
    before = max(throughput(samples, InferencePlan(r1, shared_first=True)) for r1, samples in sizes)
    after = max(
        throughput(samples, InferencePlan(r1, r2, order))
        for r1, samples in sizes
        for r2 in _SLICES
        for order in get_args(Order)
    )
    return after / before


def speedups(draw: Draw, most: int, count: int) -> list[float]:
    """`speedup` of random workloads, the same for every `most`."""
    generator = random.Random(0)
    return [speedup(draw(generator), most) for _ in range(count)]


@benchmark("infer-orders")
def infer_orders(options: Options) -> list[Table]:
    """The tables."""
    caps = _caps(10 if options.small else 150)
    return [caps, _orders(4 if options.small else 200), _planning()]


def _caps(count: int) -> Table:
    rows = []
    for name, draw in (("balanced", Workload.balanced), ("skewed", Workload.skewed)):
        for most in _CAPS:
            found = speedups(draw, most, count)
            share = sum(one >= 1.15 for one in found) / count
            rows.append([name, f"{most}", f"{median(found):.3f}", f"{max(found):.2f}", f"{share:.0%}"])
    return Table(
        f"Best FinDEP plan over best PPPipe plan by samples that fit, {count} random workloads, {_LAYERS} layers",
        ["workloads", "samples that fit (r1 m_a)", "median speedup", "largest", "share of workloads >= 1.15"],
        rows,
        "Both choose any r1 and m_a that fit; FinDEP also r2 from 1 to 16 and the order. Seconds per sample: balanced, "
        "attention, experts and link uniform in 0.5 to 1.5, shared experts in 0.1 to 0.5, start-up of a task 0.05 to "
        "0.2; skewed, all four lognormal with sigma 1, start-up log-uniform in 0.01 to 0.1. The gain is large where so "
        "few samples fit that micro-batches alone leave the streams idle.",
    )


@dataclass(frozen=True)
class _Compared:
    """Seconds of one workload in each order, of the best order that is the same in all layers, and of the best word."""

    asas: float
    aass: float
    greedy: float
    same_in_layers: float
    best: float
    bound: float

    @classmethod
    def of(cls, times: Times, num_micro_batches: int, num_slices: int, num_layers: int) -> _Compared:
        plan = InferencePlan(num_micro_batches, num_slices)
        named = [
            inference_seconds(times, InferencePlan(num_micro_batches, num_slices, order), num_layers)
            for order in get_args(Order)
        ]
        same = [word_seconds(times, plan, num_layers, word * num_layers) for word in layer_words(num_micro_batches)]
        best = word_seconds(times, plan, num_layers, best_word(times, plan, num_layers, width=_WIDTH))
        return cls(*named, min(same), best, lower_bound_seconds(times, plan, num_layers))

    @property
    def published(self) -> float:
        """The better of the paper's two orders."""
        return min(self.asas, self.aass)


def _layers(kind: str, generator: random.Random, num_slices: int, num_layers: int) -> list[BlockTimes]:
    """Lognormal times, equal in all layers, or other ones in each: the experts' or those of each slice."""
    attention, shared, experts, link = (generator.lognormvariate(0, 1) for _ in range(4))

    def slices(seconds: float) -> tuple[float, ...]:
        sigma = 0.5 if kind == "slices differ" else 0.0
        return tuple(seconds / num_slices * generator.lognormvariate(0, sigma) for _ in range(num_slices))

    layers = []
    for _ in range(num_layers):
        factor = generator.lognormvariate(0, 0.5) if kind == "experts differ by layer" else 1.0
        layers.append(BlockTimes(attention, shared, slices(link), slices(experts * factor), slices(link)))
    return layers


def _orders(count: int) -> Table:
    rows = []
    for kind in ("equal", "experts differ by layer", "slices differ"):
        for num_layers, r1 in ((8, 2), (8, 3), (8, 4), (60, 2), (60, 4)):
            generator = random.Random(0)
            found: list[_Compared] = []
            for _ in range(count):
                r2 = generator.randint(1, 8)
                found.append(_Compared.of(_layers(kind, generator, r2, num_layers), r1, r2, num_layers))
            rows.append(
                [
                    *(kind, f"{num_layers}", f"{r1}"),
                    f"{sum(one.aass < one.asas * (1 - 1e-9) for one in found) / count:.0%}",
                    *(_gain([getattr(one, name) / one.best for one in found]) for name in ("asas", "aass")),
                    *(_gain([getattr(one, name) / one.best for one in found]) for name in ("published", "greedy")),
                    _gain([one.published / one.same_in_layers for one in found]),
                    f"{sum(one.greedy < one.published * 0.999 for one in found) / count:.0%}",
                    f"{sum(one.greedy > one.published * 1.001 for one in found) / count:.0%}",
                    f"{sum(one.best <= one.bound * (1 + 1e-9) for one in found) / count:.0%}",
                ]
            )
    return Table(
        f"Makespans of the orders over that of the best order, mean (largest) excess, {count} random workloads each",
        [
            *("layers", "T", "r1", "AASS before ASAS", "ASAS", "AASS", "better of both", "greedy"),
            *("better of both over best order repeated in each layer", "greedy wins > 0.1 %", "loses > 0.1 %"),
            "best is at the lower bound",
        ],
        rows,
        "Times of attention, shared experts, experts and link are lognormal with sigma 1, r2 is 1 to 8. Where experts "
        "or slices differ, they do by a lognormal factor with sigma 0.5. The best order may defer shared experts into "
        f"the next layer; it is searched with {_WIDTH} partial schedules kept.",
    )


def _gain(ratios: Sequence[float]) -> str:
    excess = [max(ratio - 1, 0.0) for ratio in ratios]  # rounding
    return f"{mean(excess):.2%} ({max(excess):.1%})"


def _planning() -> Table:
    generator = random.Random(0)
    rows = []
    for kind in ("equal", "experts differ by layer"):
        layers = _layers(kind, generator, 8, 60)
        times: Times = layers[0] if kind == "equal" else layers
        for order in get_args(Order):
            plan = InferencePlan(4, 8, order)
            cases: dict[str, Case] = {
                "fast": lambda times=times, plan=plan: inference_seconds(times, plan, 60),
                "tasks": lambda times=times, plan=plan: simulate(inference_plan(times, plan, 60)),
            }
            seconds = seconds_of(cases, 9, warm_ups=3, clock=processor_clock)
            rows.append([kind, order, f"{seconds['fast'] * 1e6:.0f}", f"{seconds['tasks'] * 1e6:.0f}"])
    return Table(
        "Microseconds of processor time to simulate, T = 60, r1 = 4, r2 = 8",
        ["layers", "order", "inference_seconds", "simulate(inference_plan)"],
        rows,
    )
