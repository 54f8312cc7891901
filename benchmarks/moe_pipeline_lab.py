"""Layers in pieces over slow links: what degrees gain, what the simulator says, and gradients in idle slots.

Two hosts of two ranks: fast inside, slow between. The experts' hidden dimension is chosen so that they compute about as
long as their rows travel, which is where pieces matter.

The prediction knows the parts one by one: every task of a plan is timed with all streams in one thread, so that nothing
overlaps, in 1 and in 4 chunks. Two numbers for each step follow (start-up and work), and the simulator puts them
together for any degree. What is outside of the plan (routing, order, who gets how many) is what the layer in one piece
takes more than its plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.kit.timing import Case, Timing, in_rounds, note, seconds_of
from benchmarks.registry import Options, Table, benchmark
from benchmarks.slow_links import as_rank, in_lab, networks, slowest_rank
from laconic.collectives import Raw
from laconic.cost.comm.rates import Line
from laconic.moe import (
    ChunkedSchedule,
    DenseGradients,
    Dispatcher,
    FlatDispatcher,
    GatedExperts,
    Grid,
    HierarchicalDispatcher,
    MoELayer,
    SoftmaxGate,
    mean_over,
)
from laconic.schedule.execute import InlineStream
from laconic.schedule.moe import (
    COMPUTE,
    INTER,
    INTRA,
    BackwardPart,
    ChunkTime,
    LayerTimes,
    fill_slots,
    pipeline_seconds,
)

_NUM_HOSTS, _RANKS_PER_HOST = 2, 2
_MODEL_DIM, _TOP_K, _EXPERTS_PER_RANK = 256, 2, 1
_DEGREES = (1, 2, 3, 4, 6)
_FEW, _MANY = 1, 4
_NUM_BLOCKS = 3
_AT_END, _DDP = "at the end", "by DDP, beside all else"
_WAITING, _PLANNED = "in slots, all that waits", "in slots, as planned"


@benchmark("moe-pipeline-lab")
@in_lab("Layers in pieces over slow links")
def moe_pipeline_lab(options: Options) -> list[Table]:
    """For each rate: layers by degree, then a stack of layers with gradients at the end and in idle slots."""
    tables = []
    for network in networks(options, _NUM_HOSTS, (100e6, 1e9), ranks_per_host=_RANKS_PER_HOST):
        num_tokens = 8 if options.smoke else 256 if network.rate < 5e8 else 1024
        rounds = 1 if options.smoke else max(3, options.rounds)
        found = network.run(__name__, {"num_tokens": num_tokens, "rounds": rounds})
        where = f"2 nodes of 2 ranks, {network.rate_text}"
        tables += [_layer_table(where, one) for one in found["layers"]]
        tables.append(_slot_table(where, found["slots"]))
    return tables


def _layer_table(where: str, found: dict[str, Any]) -> Table:
    def columns(direction: str) -> list[tuple[str, Callable[[int], str]]]:
        measured, predicted = found["measured"][direction], found["predicted"][direction]
        return [
            (f"{direction} ms", lambda degree: f"{1e3 * measured[str(degree)]:.1f}"),
            (f"{direction} gain", lambda degree: f"{measured['1'] / measured[str(degree)]:.2f}x"),
            (f"{direction} predicted", lambda degree: f"{1e3 * predicted[str(degree)]:.1f}"),
            (f"{direction} off by", lambda degree: f"{predicted[str(degree)] / measured[str(degree)] - 1:+.0%}"),
        ]

    parts = "; ".join(
        f"{direction}: " + ", ".join(f"{step} {1e3 * seconds:.1f}" for step, seconds in of_steps.items())
        for direction, of_steps in found["parts"].items()
    )
    return Table.of(
        f"{found['name']}, {where}",
        _DEGREES,
        [("degree", str), *columns("forward"), *columns("backward")],
        f"{found['num_tokens']} tokens of {_MODEL_DIM} a rank, top {_TOP_K} of {4 * _EXPERTS_PER_RANK} experts, hidden"
        f" dimension {found['hidden']}. Parts in one piece, alone, ms: {parts}. Without a schedule"
        f" {1e3 * found['plain']['forward']:.1f} and {1e3 * found['plain']['backward']:.1f} ms. The prediction for"
        " degree 1 is exact by construction.",
    )


def _slot_table(where: str, found: dict[str, Any]) -> Table:
    seconds, shares = found["seconds"], found["shares"]
    return Table.of(
        f"Dense gradients of {_NUM_BLOCKS} blocks, {where}",
        seconds,
        [
            ("reduced", str),
            ("backward and reduction, ms", lambda name: f"{1e3 * seconds[name]:.1f}"),
            ("gain", lambda name: f"{seconds[_AT_END] / seconds[name]:.2f}x"),
            ("bytes inside of backward", lambda name: f"{shares[name]:.0%}" if name in shares else ""),
        ],
        f"Flat dispatch, degree {found['degree']}; {found['nbytes'] / 1e6:.2f} MB of dense gradients a rank, averaged"
        f" over all ranks in fp32 ({1e3 * found['alone']:.1f} ms in one message). Predicted with the plan:"
        f" {1e3 * found['predicted']:.1f} ms, with all at the end {1e3 * found['predicted_end']:.1f} ms.",
    )


# --- what each rank does ---


@dataclass(frozen=True)
class _Rank:
    grid: Grid
    num_tokens: int
    rounds: int
    smoke: bool

    def layers(self) -> list[dict[str, Any]]:
        dispatchers: dict[str, Dispatcher] = {
            "Flat": FlatDispatcher(self.grid.ep, codec=Raw()),
            "Hierarchical": HierarchicalDispatcher(self.grid.levels, codec=Raw()),
        }
        return [self.layer(name, dispatcher) for name, dispatcher in dispatchers.items()]

    def layer(self, name: str, dispatcher: Dispatcher) -> dict[str, Any]:
        hidden = 64 if self.smoke else self.balanced_hidden(dispatcher)
        layer = self.made(dispatcher, hidden)
        alone = {str(degree): self.parts(layer, degree) for degree in (_FEW, _MANY)}
        cases: dict[str, ChunkedSchedule | None] = {"plain": None}
        cases |= {str(degree): ChunkedSchedule(degree) for degree in _DEGREES}
        measured = self.timed(layer, cases)
        times = {direction: self.fitted(alone, direction) for direction in ("forward", "backward")}
        predicted = {}
        for direction, found in times.items():
            outside = measured[direction]["1"] - pipeline_seconds(found, 1)
            predicted[direction] = {str(d): outside + pipeline_seconds(found, d) for d in _DEGREES}
        return {
            "name": name,
            "num_tokens": self.num_tokens,
            "hidden": hidden,
            "plain": {direction: found.pop("plain") for direction, found in measured.items()},
            "measured": measured,
            "predicted": predicted,
            "parts": alone[str(_FEW)],
        }

    def made(self, dispatcher: Dispatcher, hidden: int) -> MoELayer:
        torch.manual_seed(0)
        gate = SoftmaxGate(self.grid.layout.ep * _EXPERTS_PER_RANK, _MODEL_DIM, _TOP_K)
        return MoELayer(gate, GatedExperts(_EXPERTS_PER_RANK, _MODEL_DIM, hidden), None, dispatcher)

    def balanced_hidden(self, dispatcher: Dispatcher) -> int:
        """Such that forward's experts take about as long as their rows on both ways, as every rank knows it."""
        probe = 256
        parts = self.parts(self.made(dispatcher, probe), 1)["forward"]
        ratio = (parts["dispatch"] + parts["combine"]) / parts["experts"]
        return min(8192, max(64, round(probe * ratio / 64) * 64))

    def batch(self) -> Tensor:
        generator = torch.Generator().manual_seed(dist.get_rank())
        return torch.randn(self.num_tokens, _MODEL_DIM, generator=generator).requires_grad_()

    def parts(self, layer: MoELayer, degree: int) -> dict[str, dict[str, float]]:
        """Seconds of all chunks of each step, without overlap: medians over rounds of the sums over chunks.

        Of a chunk's experts the slowest rank's count, because all combines wait for them. Of a message the
        shortest time counts: that of the rank that all had waited for, so that waiting is not counted twice.
        """
        inline = InlineStream()
        schedule = ChunkedSchedule(degree, streams=dict.fromkeys((INTER, INTRA, COMPUTE), inline))
        layer.schedule = schedule

        def run() -> dict[str, dict[str, float]]:
            x = self.batch()
            dist.barrier()
            out = layer(x)
            dist.barrier()
            out.sum().backward()
            return {name: self.step_seconds(execution) for name, execution in schedule.executions.items()}

        rounds = in_rounds({"parts": run}, self.rounds, lambda case: case())["parts"]
        return {
            direction: {step: median(one[direction][step] for one in rounds) for step in of_steps}
            for direction, of_steps in rounds[0].items()
        }

    def step_seconds(self, execution: Any) -> dict[str, float]:
        """Seconds of each step of a plan that ran without overlap, summed over its chunks."""
        mine = {task: span.end_seconds - span.start_seconds for task, span in execution.timeline.spans.items()}
        of_ranks: list[dict[str, float]] = [{}] * dist.get_world_size()
        dist.all_gather_object(of_ranks, mine)
        of_steps: dict[str, float] = {}
        for task in mine:
            step = task.split()[0]
            slowest = max if step == "experts" else min
            of_steps[step] = of_steps.get(step, 0.0) + slowest(one[task] for one in of_ranks)
        return of_steps

    def fitted(self, alone: dict[str, dict[str, dict[str, float]]], direction: str) -> LayerTimes:
        """Start-up and work of each step from its seconds in few and in many chunks."""
        found = {}
        for step, few in alone[str(_FEW)][direction].items():
            alpha = max(0.0, (alone[str(_MANY)][direction][step] - few) / (_MANY - _FEW))
            found[step] = ChunkTime(alpha, max(0.0, few - _FEW * alpha))
        return LayerTimes(**found)

    def timed(self, layer: MoELayer, schedules: dict[str, ChunkedSchedule | None]) -> dict[str, dict[str, Timing]]:
        """The slowest rank's seconds by direction and schedule."""
        made: dict[str, Tensor] = {}

        def forward() -> None:
            made["out"] = layer(made["x"])

        def backward() -> None:
            made["loss"].backward()

        def before(case: str) -> None:
            direction, name = case.split(maxsplit=1)
            if direction == "forward":
                layer.schedule = schedules[name]
                layer.zero_grad()
                made["x"] = self.batch()
            else:
                made["loss"] = made["out"].sum()

        cases: dict[str, Case] = {}
        for name in schedules:
            cases |= {f"forward {name}": forward, f"backward {name}": backward}
        seconds = seconds_of(cases, self.rounds, before=before, clock=slowest_rank)
        return {way: {name: seconds[f"{way} {name}"] for name in schedules} for way in ("forward", "backward")}

    # --- slots ---

    def slots(self, layer_times: LayerTimes, degree: int, hidden: int) -> dict[str, Any]:
        """A stack of blocks: gradients reduced after backward, by DDP, in slots without a plan, and with one."""
        # As many dense bytes for each block as one dispatch carries.
        width = max(8, self.num_tokens * _TOP_K // 2)
        model, other = self.stack(width, hidden), self.stack(width, hidden)
        dense = [p for name, p in model.named_parameters() if ".experts." not in name]
        nbytes = sum(p.nbytes for p in dense)
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            other, [name for name, _ in other.named_parameters() if ".experts." in name]
        )
        wrapped = DistributedDataParallel(other, process_group=self.grid.dp, bucket_cap_mb=nbytes / _NUM_BLOCKS / 2**20)
        reduce = mean_over(self.grid.dp, codec=Raw())
        line = self.reduction_line(nbytes)
        dense_seconds = self.dense_seconds(width)
        parts = []
        for number in reversed(range(_NUM_BLOCKS)):
            parts.append(BackwardPart(f"moe {number}", times=layer_times))
            of_block = float(sum(p.nbytes for p in model[number].dense.parameters()))
            parts.append(BackwardPart(f"dense {number}", of_block, None, dense_seconds))
        plan = fill_slots(parts, line, [degree])
        end = _NUM_BLOCKS * (pipeline_seconds(layer_times, degree) + dense_seconds) + line.alpha_seconds
        shares: dict[str, float] = {}

        def run(name: str) -> float:
            gradients = None if name == _DDP else DenseGradients(dense, reduce, plan if name == _PLANNED else None)
            inside = gradients if name in (_WAITING, _PLANNED) else None
            stack = other if name == _DDP else model
            for number, block in enumerate(stack):
                block.moe.schedule = ChunkedSchedule(degree, gradients=inside, part=f"moe {number}")
            stack.zero_grad()
            loss = (wrapped if name == _DDP else model)(self.batch()).sum()

            def step() -> None:
                loss.backward()
                if gradients:
                    gradients.finish()

            seconds = slowest_rank(step)()
            if gradients:
                gradients.remove()
                shares[name] = 1 - sum(one.nbytes for one in gradients.sent if one.slot is None) / nbytes
            return seconds

        cases = {name: partial(run, name) for name in (_AT_END, _DDP, _WAITING, _PLANNED)}
        seconds = {name: Timing(found) for name, found in in_rounds(cases, self.rounds, lambda case: case()).items()}
        note(seconds, warm_up_rounds=1, warm_ups=0)
        return {
            "degree": degree,
            "nbytes": nbytes,
            "alone": line.alpha_seconds + nbytes * line.seconds_per_byte,
            "seconds": seconds,
            "shares": shares,
            "predicted": plan.seconds,
            "predicted_end": end + nbytes * line.seconds_per_byte,
        }

    def stack(self, width: int, hidden: int) -> nn.Sequential:
        flat = FlatDispatcher(self.grid.ep, codec=Raw())
        return nn.Sequential(*[_Block(self.made(flat, hidden), width) for _ in range(_NUM_BLOCKS)])

    def reduction_line(self, nbytes: int) -> Line:
        """Of the all-reduce: a message so small that only its start-up counts, and one of all bytes."""
        reduce = mean_over(self.grid.dp, codec=Raw())
        small, large = torch.zeros(64), torch.zeros(nbytes // 4)
        cases: dict[str, Case] = {"small": lambda: reduce(small), "large": lambda: reduce(large)}
        seconds = seconds_of(cases, 2 * self.rounds, warm_ups=1, clock=slowest_rank)
        slope = max(0.0, (seconds["large"] - seconds["small"]) / (nbytes - small.nbytes))
        return Line(max(0.0, seconds["small"] - slope * small.nbytes), slope)

    def dense_seconds(self, width: int) -> float:
        block, losses = _Dense(width), []

        def before(_: str) -> None:
            losses[:] = [block(self.batch()).sum()]

        cases: dict[str, Case] = {"dense backward": lambda: losses[0].backward()}
        return seconds_of(cases, self.rounds, before=before, clock=slowest_rank)["dense backward"]


class _Dense(nn.Sequential):
    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(_MODEL_DIM, width), nn.GELU(), nn.Linear(width, _MODEL_DIM))


class _Block(nn.Module):
    def __init__(self, moe: MoELayer, width: int) -> None:
        super().__init__()
        self.dense, self.moe = _Dense(width), moe

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dense(x)
        out: Tensor = x + self.moe(x)
        return out


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """What one rank measures."""
    grid = Grid(levels=(_NUM_HOSTS,), device_type="cpu")
    rank = _Rank(grid, task["num_tokens"], task["rounds"], task["smoke"])
    layers = rank.layers()
    flat = layers[0]
    degree = int(min(flat["measured"]["backward"], key=flat["measured"]["backward"].__getitem__))
    layer = rank.made(FlatDispatcher(grid.ep, codec=Raw()), flat["hidden"])
    alone = {str(one): rank.parts(layer, one) for one in (_FEW, _MANY)}
    return {"layers": layers, "slots": rank.slots(rank.fitted(alone, "backward"), degree, flat["hidden"])}


if __name__ == "__main__":
    as_rank(measure)
