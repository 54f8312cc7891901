"""Whole training steps over slow links, by schedule: one exchange, chunks (FSMoE), levels, Parm's paths.

Nodes of two processes each: fast inside, slow between, all processes on this machine's processors. Two blocks of
attention and wide experts, one or two experts a rank, learn a batch: forward, backward, DDP's mean of the dense
gradients, AdamW. Hidden dimensions are chosen by link, so that experts compute less than, or as long as, rows travel.

Before any other schedule runs in a step, the simulator predicts it: from the parts of one layer on every path timed
alone, and from the step of the first case, whose other parts all cases share. Two bounds are measured beside it. No
schedule of the same work is faster than its processor time spread over all processors, or than its bytes on the link.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.kit.chunk_times import layer_times
from benchmarks.registry import Options, Table, benchmark
from benchmarks.slow_links import Network, Timed, as_rank, in_lab, networks, time_all
from laconic.collectives import Raw
from laconic.moe import (
    ChunkedSchedule,
    DenseGradients,
    Dispatcher,
    GatedExperts,
    Grid,
    HierarchicalDispatcher,
    MoELayer,
    SoftmaxGate,
    expert_shard,
    make_dispatcher,
    mean_over,
)
from laconic.schedule.moe_pipeline import LayerTimes, pipeline_seconds

_RANKS_PER_NODE = 2
_MODEL_DIM, _TOP_K, _NUM_BLOCKS, _LENGTH, _VOCABULARY = 256, 2, 2, 128, 257
_SIZES = {100e6: (1024, (1024, 4096)), 1e9: (2048, (512, 1024))}
"""Tokens of a rank with its own, and hidden dimensions of the experts, by bits per second between nodes."""
_SMOKE_SIZES = (128, (32,))


@dataclass(frozen=True)
class Case:
    """How a step runs its layers."""

    path: str
    degree: int = 1
    in_slots: bool = False
    """Whether dense gradients are reduced in the layers' idle slots; otherwise by DDP, beside all else."""

    def __str__(self) -> str:
        chunks = f", {self.degree} chunks" if self.degree > 1 else ""
        return f"{self.path}{chunks}{', gradients in slots' if self.in_slots else ''}"


_CASES = {
    "ep": [
        *(Case("joint"), Case("levels"), Case("joint", 2), Case("joint", 4), Case("levels", 2)),
        Case("joint", 2, in_slots=True),
    ],
    "mp": [
        *(Case("s1"), Case("baseline"), Case("sharded")),
        *(Case("s1", 2), Case("sharded", 2), Case("sharded", 4)),
    ],
}
"""By grid; predictions start from the first."""
_SINGLE = {"ep": ("joint",), "mp": ("baseline", "s1")}
"""Paths that are single all-to-alls in one piece."""


@benchmark("moe-steps", cases=_CASES)
@in_lab("Whole steps by schedule")
def moe_steps(options: Options) -> Iterator[Table]:
    """For each network, grid and width of experts: a step by every schedule, predicted and measured."""
    for network in networks(options, (2,), (100e6, 1e9), ranks_per_host=_RANKS_PER_NODE):
        num_tokens, widths = _SMOKE_SIZES if options.smoke else _SIZES[min(_SIZES, key=lambda r: abs(r - network.rate))]
        for grid in options.only or _CASES:
            for hidden in widths:
                task = {"grid": grid, "hosts": network.num_hosts, "num_tokens": num_tokens, "hidden": hidden}
                yield _table(network, task, network.run(__name__, task))


def _table(network: Network, task: Mapping[str, Any], found: dict[str, Any]) -> Table:
    timed, predicted = found["timed"], found["predicted"]
    cases = _CASES[task["grid"]]
    best = min((str(Case(path)) for path in _SINGLE[task["grid"]]), key=lambda name: timed[name]["seconds"])
    processors = os.cpu_count() or 1

    def ms(value: Callable[[str], float]) -> Callable[[Case], str]:
        return lambda case: f"{1e3 * value(str(case)):.0f}"

    def gain(case: Case) -> str:
        ratios = [a / b for a, b in zip(found["samples"][best], found["samples"][str(case)], strict=True)]
        return f"{timed[best]['seconds'] / timed[str(case)]['seconds']:.2f}x ({min(ratios):.2f} to {max(ratios):.2f})"

    bounds = [timed[best]["cpu_seconds"] / processors, 8 * timed[best]["interface_nbytes"] / network.rate]
    grid = "ranks" if task["grid"] == "ep" else "ranks that are an MP and ESP pair"
    return Table.of(
        f"{task['hosts']} nodes of {_RANKS_PER_NODE} {grid}, {network.rate_text} between, experts of {task['hidden']}",
        cases,
        [
            ("layers", str),
            ("step predicted, ms", ms(predicted.__getitem__)),
            ("measured, ms", ms(lambda name: timed[name]["seconds"])),
            ("off by", lambda case: f"{predicted[str(case)] / timed[str(case)]['seconds'] - 1:+.0%}"),
            (f"faster than {best} (of rounds)", gain),
            ("all processors busy, ms", ms(lambda name: timed[name]["cpu_seconds"] / processors)),
            ("link busy, ms", ms(lambda name: 8 * timed[name]["interface_nbytes"] / network.rate)),
        ],
        f"{found['num_tokens']} tokens of {_MODEL_DIM} a rank, fp32, top {_TOP_K} of {found['num_experts']} experts,"
        f" {_NUM_BLOCKS} blocks, AdamW; one TCP connection gets {found['measured'] / 1e6:.0f} Mbit/s. Parts of a layer"
        f" in one chunk, alone, ms: {_parts_text(found['parts'])}. Bounds of {best}: {1e3 * bounds[0]:.0f} ms of all"
        f" processors, {1e3 * bounds[1]:.0f} ms of the link, so other orders of its work gain at most"
        f" {timed[best]['seconds'] / max(bounds):.2f}x. Load of the machine before and after: {found['load']}.",
    )


def _parts_text(parts: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    return "; ".join(
        f"{path} {direction} " + ", ".join(f"{step} {1e3 * seconds:.0f}" for step, seconds in steps.items())
        for path, directions in parts.items()
        for direction, steps in directions.items()
    )


# --- what each rank does ---


class _Block(nn.Module):
    """Causal attention of four heads, then experts."""

    def __init__(self, moe: MoELayer) -> None:
        super().__init__()
        self.before, self.after = nn.RMSNorm(_MODEL_DIM), nn.RMSNorm(_MODEL_DIM)
        self.qkv, self.out = nn.Linear(_MODEL_DIM, 3 * _MODEL_DIM), nn.Linear(_MODEL_DIM, _MODEL_DIM)
        self.moe = moe

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, 4, -1)).transpose(1, 3).unbind(2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        routed: Tensor = self.moe(self.after(x))
        return x + routed


class _Model(nn.Module):
    def __init__(self, moes: list[MoELayer]) -> None:
        super().__init__()
        self.embed = nn.Embedding(_VOCABULARY, _MODEL_DIM)
        self.blocks = nn.ModuleList(_Block(moe) for moe in moes)
        self.head = nn.Linear(_MODEL_DIM, _VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


class _Rank:
    """A model, its two ways to reduce dense gradients, and steps by any case."""

    def __init__(self, grid: Grid, num_tokens: int, hidden: int) -> None:
        self.grid, self.hidden = grid, hidden
        self.num_experts = max(4, grid.layout.ep)
        generator = torch.Generator().manual_seed(grid.dp.rank())  # MP ranks have the same tokens
        text = torch.randint(_VOCABULARY, (2, num_tokens // _LENGTH, _LENGTH), generator=generator)
        self.tokens, self.targets = text
        self.states = torch.randn(num_tokens, _MODEL_DIM, generator=generator)
        plain, in_slots = self.model(), self.model()
        names = [name for name, _ in plain.named_parameters() if ".experts." in name]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(plain, names)
        # Small buckets: the gradients of one block do not wait for those of the other.
        wrapped = DistributedDataParallel(plain, process_group=grid.dp, bucket_cap_mb=1)
        dense = [p for name, p in in_slots.named_parameters() if ".experts." not in name]
        self.gradients = DenseGradients(dense, mean_over(grid.dp, codec=Raw()))
        self.models = {False: (plain, wrapped), True: (in_slots, in_slots)}
        self.optimizers = {
            slots: torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
            for slots, (model, _) in self.models.items()
        }

    def model(self) -> _Model:
        torch.manual_seed(0)
        moes = []
        for _ in range(_NUM_BLOCKS):
            gate = SoftmaxGate(self.num_experts, _MODEL_DIM, _TOP_K)
            experts = GatedExperts(self.num_experts, _MODEL_DIM, self.hidden)
            moes.append(MoELayer(gate, expert_shard(experts, self.grid), dispatcher=self.dispatcher("first")))
        return _Model(moes)

    def dispatcher(self, path: str) -> Dispatcher:
        if path == "levels":
            return HierarchicalDispatcher(self.grid.levels, codec=Raw())
        path = ("joint" if self.grid.layout.mp == 1 else "s1") if path == "first" else path
        return make_dispatcher(self.grid, path, codec=Raw())  # type: ignore[arg-type]

    def batch(self) -> Tensor:
        return self.states.clone().requires_grad_()

    def times(self, path: str, rounds: int) -> tuple[dict[str, LayerTimes], Any]:
        """What the parts of one layer take alone."""
        (model, _) = self.models[False]
        layer: Any = model.blocks[0]
        layer.moe.dispatcher = self.dispatcher(path)
        found = layer_times(layer.moe, self.batch, rounds)
        model.zero_grad()
        return found

    def loss(self, case: Case) -> Tensor:
        model, wrapped = self.models[case.in_slots]
        for number, block in enumerate(model.blocks):
            moe: Any = block.moe
            moe.dispatcher = self.dispatcher(case.path)
            gradients = self.gradients if case.in_slots else None
            cut = case.degree > 1 or case.in_slots
            moe.schedule = ChunkedSchedule(case.degree, gradients=gradients, part=f"{number}") if cut else None
        logits = wrapped(self.tokens)
        return F.cross_entropy(logits.flatten(0, 1), self.targets.flatten())

    def step(self, case: Case) -> None:
        self.loss(case).backward()
        model, _ = self.models[case.in_slots]
        if case.in_slots:
            self.gradients.finish()
        for name, parameter in model.named_parameters():
            if ".experts." in name and parameter.grad is not None:
                parameter.grad.div_(self.grid.layout.dp)  # the sum over all ranks' losses becomes their mean
        optimizer = self.optimizers[case.in_slots]
        optimizer.step()
        optimizer.zero_grad()


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """What one rank measures."""
    nodes = task["hosts"]
    if task["grid"] == "mp":
        grid = Grid(_RANKS_PER_NODE, nodes, _RANKS_PER_NODE, device_type="cpu")
    else:
        grid = Grid(ep=_RANKS_PER_NODE * nodes, levels=(nodes,), device_type="cpu")
    num_tokens = task["num_tokens"] * grid.layout.mp
    rank, cases = _Rank(grid, num_tokens, task["hidden"]), _CASES[task["grid"]]
    before = os.getloadavg()[0]
    _check_losses(rank, cases)
    rounds = 1 if task["smoke"] else max(3, task["rounds"])
    measured = {path: rank.times(path, rounds) for path in dict.fromkeys(case.path for case in cases)}
    timed = time_all({str(case): partial(rank.step, case) for case in cases}, rounds)
    return {
        "num_tokens": num_tokens,
        "num_experts": rank.num_experts,
        "parts": {path: parts for path, (_, parts) in measured.items()},
        "predicted": _predicted(cases, {path: times for path, (times, _) in measured.items()}, timed),
        "timed": {name: vars(one) for name, one in timed.items()},
        "samples": {name: one.seconds.samples for name, one in timed.items()},
        "load": f"{before:.1f}, {os.getloadavg()[0]:.1f}",
    }


def _check_losses(rank: _Rank, cases: list[Case]) -> None:
    """All schedules compute the same."""
    with torch.no_grad():
        losses = [rank.loss(case) for case in cases]
    for case, loss in zip(cases, losses, strict=True):
        torch.testing.assert_close(loss, losses[0], rtol=1e-5, atol=1e-5, msg=lambda text, c=case: f"{c}: {text}")


def _predicted(
    cases: list[Case], times: Mapping[str, Mapping[str, LayerTimes]], timed: Mapping[str, Timed]
) -> dict[str, float]:
    """Seconds of a step: that of the first case, with its layers' plans replaced."""

    def layers(case: Case) -> float:
        return _NUM_BLOCKS * sum(pipeline_seconds(one, case.degree) for one in times[case.path].values())

    rest = timed[str(cases[0])].seconds - layers(cases[0])
    return {str(case): rest + layers(case) for case in cases}


if __name__ == "__main__":
    as_rank(measure)
