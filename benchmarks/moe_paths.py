"""Paths of a layer inside an MP group over real slow links: baseline, S1, S2 with and without overlap, FSMoE's.

Nodes of `mp` hosts are fast inside, with a slow uplink each. MP and ESP groups are the nodes, EP goes across (Parm's
and FSMoE's setting). Rows travel raw in bf16, all experts get equally many. Bytes are those that left host 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.registry import Options, Table, benchmark
from benchmarks.slow_links import Network, as_rank, in_lab, networks, time_all
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

_NODES, _MP = 2, 2


@dataclass(frozen=True)
class _Shape:
    tokens: int
    model_dim: int
    hidden_dim: int
    top_k: int


_SHAPES = (_Shape(512, 256, 512, 2), _Shape(2048, 256, 512, 2), _Shape(512, 256, 512, 8))
_CASES = ("baseline", "sharded", "s1", "s2 in 1 step", "s2 in 2 steps", "s1, backward s2")


@benchmark("moe-paths")
@in_lab("Paths of a layer")
def moe_paths(options: Options) -> list[Table]:
    """Forward and backward of a layer on every path, 2 nodes of 2 processes."""
    shapes = (_Shape(32, 64, 32, 2),) if options.smoke else _SHAPES
    tables = []
    for network in networks(options, _NODES * _MP, (1e8, 1e9), num_nodes=_NODES):
        tables += [_table(network, shape, network.run(__name__, {"shape": vars(shape)})) for shape in shapes]
    return tables


def _table(network: Network, shape: _Shape, found: dict[str, Any]) -> Table:
    forward, both = found["forward"], found["both"]
    return Table.of(
        f"{shape.tokens} tokens, top-{shape.top_k}, M = {shape.model_dim}, H = {shape.hidden_dim};"
        f" {_NODES} nodes of {_MP}, {network.rate_text} between them",
        _CASES,
        [
            ("path", str),
            ("forward ms", lambda name: f"{forward[name]['seconds'] * 1e3:.1f}"),
            ("MB sent by a host", lambda name: f"{forward[name]['interface_nbytes'] / 1e6:.2f}"),
            ("with backward ms", lambda name: f"{both[name]['seconds'] * 1e3:.1f}"),
            ("MB", lambda name: f"{both[name]['interface_nbytes'] / 1e6:.2f}"),
            ("over baseline", lambda name: f"{both['baseline']['seconds'] / both[name]['seconds']:.2f}x"),
        ],
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


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """What one rank measures."""
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

    cases = {
        "forward": {name: forward(layer) for name, layer in layers.items()},
        "both": {name: both(layer) for name, layer in layers.items()},
    }
    return {
        what: {name: vars(timed) for name, timed in time_all(of_layers, task["rounds"]).items()}
        for what, of_layers in cases.items()
    }


if __name__ == "__main__":
    as_rank(measure)
