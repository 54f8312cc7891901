"""Paths of a layer inside an MP group over real slow links: baseline, S1, S2 with and without overlap, FSMoE's.

Hosts are network namespaces, one process and one thread each: nodes of `mp` hosts that are fast inside, with a slow
uplink each. MP and ESP groups are the nodes, EP goes across (Parm's and FSMoE's setting). Rows travel raw in bf16, all
experts get equally many. Seconds are the slowest rank's, bytes those that left host 0; the cases take turns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.registry import Options, Table, benchmark
from benchmarks.slow_links import join, leave, run_ranks, time_all
from laconic.collectives import Raw
from laconic.moe import (
    Dispatcher,
    GatedExperts,
    Grid,
    MoELayer,
    Routing,
    S2Dispatcher,
    expert_shard,
    make_dispatcher,
)
from laconic.moe.gates import Gate
from laconic.testing.netlab import Lab, why_not

_SMOKE = 1 << 12
_NODES, _MP = 2, 2
_RATES = (1e8, 1e9)


@dataclass(frozen=True)
class _Shape:
    tokens: int
    model_dim: int
    hidden_dim: int
    top_k: int


_SHAPES = (_Shape(512, 256, 512, 2), _Shape(2048, 256, 512, 2), _Shape(512, 256, 512, 8))
_CASES = ("baseline", "sharded", "s1", "s2 in 1 step", "s2 in 2 steps", "s1, backward s2")


@benchmark("moe-paths")
def moe_paths(options: Options) -> list[Table]:
    """Forward and backward of a layer on every path, 2 nodes of 2 processes."""
    reason = why_not()
    if reason is not None:
        return [Table("Paths of a layer", ["not measured"], [[reason]])]
    smoke = options.elements <= _SMOKE
    shapes = (_Shape(32, 64, 32, 2),) if smoke else _SHAPES
    tables = []
    for rate in options.rates or ((1e9,) if smoke else _RATES):
        for shape in shapes:
            with Lab(_NODES * _MP, rate, num_nodes=_NODES) as lab:
                found = run_ranks(lab, "benchmarks.moe_paths", {"shape": vars(shape), "rounds": options.rounds})
            tables.append(_table(rate, shape, found))
    return tables


def _table(rate: float, shape: _Shape, found: dict[str, Any]) -> Table:
    rows = []
    for name in _CASES:
        forward, forward_nbytes, both, both_nbytes = found[name]
        rows.append(
            [
                name,
                f"{forward * 1e3:.1f}",
                f"{forward_nbytes / 1e6:.2f}",
                f"{both * 1e3:.1f}",
                f"{both_nbytes / 1e6:.2f}",
                f"{found['baseline'][2] / both:.2f}x",
            ]
        )
    return Table(
        f"{shape.tokens} tokens, top-{shape.top_k}, M = {shape.model_dim}, H = {shape.hidden_dim};"
        f" {_NODES} nodes of {_MP}, {rate / 1e6:g} Mbit/s between them",
        ["path", "forward ms", "MB sent by a host", "with backward ms", "MB", "over baseline"],
        rows,
        "MB count what left one host, also to its own node.",
    )


# --- what each rank does ---


class _Even(Gate):
    """Token t goes to experts t, t + 1, ...: the same load everywhere."""

    def __init__(self, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.num_experts, self.top_k = num_experts, top_k
        self.weights = nn.Parameter(torch.full((top_k,), 1 / top_k))

    def forward(self, x: Tensor) -> Routing:
        experts = (torch.arange(len(x))[:, None] + torch.arange(self.top_k)) % self.num_experts
        return Routing.of_choices(experts, self.weights.expand(len(x), -1), self.num_experts)


def _dispatcher(grid: Grid, name: str) -> Dispatcher:
    if name == "s1, backward s2":
        return make_dispatcher(grid, "s1", backward="s2", codec=Raw())
    if name.startswith("s2"):
        return S2Dispatcher(grid, num_steps=int(name.split()[2]), codec=Raw())
    return make_dispatcher(grid, name, codec=Raw())  # type: ignore[arg-type]


def main() -> None:
    task = join()
    shape = _Shape(**task["shape"])
    grid = Grid(_MP, _NODES, _MP, device_type="cpu")
    torch.manual_seed(0)
    num_experts = max(8, shape.top_k)
    experts = expert_shard(GatedExperts(num_experts, shape.model_dim, shape.hidden_dim, dtype=torch.bfloat16), grid)
    gate = _Even(num_experts, shape.top_k)
    x = torch.randn(shape.tokens, shape.model_dim).bfloat16()
    layers = {name: MoELayer(gate, experts, dispatcher=_dispatcher(grid, name)) for name in _CASES}

    def forward(layer: MoELayer) -> Callable[[], object]:
        def run() -> None:
            with torch.no_grad():
                layer(x)

        return run

    def both(layer: MoELayer) -> Callable[[], object]:
        return lambda: layer(x.clone().requires_grad_()).sum().backward()

    ahead = time_all({name: forward(layer) for name, layer in layers.items()}, task["rounds"])
    whole = time_all({name: both(layer) for name, layer in layers.items()}, task["rounds"])
    leave(
        {
            name: (ahead[name].seconds, ahead[name].interface_nbytes, whole[name].seconds, whole[name].interface_nbytes)
            for name in _CASES
        }
    )


if __name__ == "__main__":
    main()
