"""Data-parallel steps of a ResNet and an AFI-ResNet over slow links: gradients as they are, lossless, and in 8 bits.

Two ranks share this machine's cores, a host and a thread each. Every kind trains a copy of the same network from the
same start on the same images with AdamW; the kinds take turns, step after step. Images are noise with labels that a
network can learn by heart: losses tell that all kinds compute the same step, and not how good a network becomes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.registry import Options, Table, benchmark
from benchmarks.slow_links import Network, as_rank, in_lab, networks, time_all

_NETWORKS = ("ResNet", "AFI-ResNet")
_KINDS = {
    "DDP over gloo": "gradients as they are",
    "lossless": "`zip_collectives(codec=Lossless())`",
    "auto": "`zip_collectives()`",
    "8-bit reduction": "`quantize_reduction`",
    "8-bit gradients": "`compress_gradients` and `AdamW8bit`, without DDP",
    "8-bit gradients, 4-bit activations": "the same with `compress_activations`",
}
_WIDTHS, _DEPTHS, _SIDE, _BATCH = (32, 64, 128, 256), (2, 2, 2, 2), 48, 8


@benchmark("vision-ddp")
@in_lab("Data-parallel steps of residual networks")
def vision_ddp(options: Options) -> list[Table]:
    """Seconds and bytes of a step on two hosts, for every kind."""
    tables = []
    for name in _NETWORKS[1 if options.smoke else 0 :]:
        for network in networks(options, 2, (100e6, 1e9)):
            steps = 2 if options.smoke else options.rounds
            task = {"network": name, "widths": _WIDTHS[:2] if options.smoke else _WIDTHS, "steps": steps}
            tables.append(_table(name, network, network.run(__name__, task)))
    return tables


def _table(name: str, network: Network, found: dict[str, Any]) -> Table:
    seconds, interface, first = found["seconds"], found["interface"], next(iter(_KINDS))
    return Table.of(
        f"{name}, {network.where(found)}",
        _KINDS,
        [
            ("gradients", str),
            ("step, s (spread)", lambda kind: f"{seconds[kind]:.3f} ({found['spread'][kind]:.0%})"),
            ("faster than gloo", lambda kind: f"{seconds[first] / seconds[kind]:.2f}x"),
            ("MB out of a host per step", lambda kind: f"{interface[kind] / 1e6:.2f}"),
            ("of gloo's", lambda kind: f"{interface[kind] / interface[first]:.2f}"),
            ("last loss", lambda kind: f"{found['losses'][kind][-1]:.4f}"),
            ("losses", lambda kind: _agreement(found["losses"][kind], found["losses"][first])),
        ],
        f"{found['num_parameters']:,} parameters, fp32; {_BATCH} images of {_SIDE} x {_SIDE} per rank, {found['steps']}"
        " timed steps, medians; in brackets the distance between the quartiles. Losses of rank 0. "
        + "; ".join(f"{kind}: {what}" for kind, what in _KINDS.items())
        + ".",
    )


def _agreement(losses: list[float], others: list[float]) -> str:
    """Whether two runs have the same losses, and how far they are apart."""
    apart = max(abs(a - b) for a, b in zip(losses, others, strict=True))
    return "the same bits" if apart == 0 else f"within {apart:.1e}"


# --- what each rank does ---


def _model(name: str, widths: list[int]) -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    from laconic.vision import AFIResNetConfig, AFIResNetForImageClassification

    torch.manual_seed(0)
    fields: dict[str, Any] = {
        "num_labels": 10,
        "embedding_size": widths[0],
        "hidden_sizes": list(widths),
        "depths": list(_DEPTHS[: len(widths)]),
        "layer_type": "basic",
    }
    if name == "ResNet":
        return ResNetForImageClassification(ResNetConfig(**fields)).train()
    return AFIResNetForImageClassification(AFIResNetConfig(**fields)).train()


class _Training:
    """One kind: a network, its optimizer, its losses so far."""

    def __init__(self, kind: str, task: dict[str, Any], images: Tensor, labels: Tensor) -> None:
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        import laconic
        from laconic.collectives import Lossless
        from laconic.gradients import quantize_reduction

        self._images, self._labels = images, labels
        self.losses: list[float] = []
        self.model = _model(task["network"], task["widths"])
        self._reduce: Callable[[], None] = lambda: None
        if kind.startswith("8-bit gradients"):
            if "activations" in kind:
                example = {"pixel_values": images, "labels": labels}
                laconic.compress_activations(self.model, example_inputs=example)
            self._reduce = laconic.compress_gradients(self.model, dist.group.WORLD).reduce
            self.optimizer: torch.optim.Optimizer = laconic.AdamW8bit(self.model.parameters(), lr=1e-3)
            return
        self.model = DistributedDataParallel(self.model)
        if kind in ("lossless", "auto"):
            laconic.zip_collectives(self.model, codec=Lossless() if kind == "lossless" else "auto")
        elif kind == "8-bit reduction":
            quantize_reduction(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)

    def step(self) -> None:
        """Forward, backward, reduction, update."""
        loss = F.cross_entropy(self.model(self._images).logits, self._labels)
        loss.backward()
        self._reduce()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """What one rank measures."""
    import torch.distributed as dist

    generator = torch.Generator().manual_seed(dist.get_rank())
    images = torch.randn(_BATCH, 3, _SIDE, _SIDE, generator=generator).to(memory_format=torch.channels_last)
    labels = torch.randint(10, (_BATCH,), generator=generator)
    runs = {kind: _Training(kind, task, images, labels) for kind in _KINDS}
    timed = time_all({kind: run.step for kind, run in runs.items()}, rounds=task["steps"], warm_up_rounds=2)
    return {
        "seconds": {kind: timed[kind].seconds for kind in timed},
        "spread": {kind: timed[kind].seconds.spread for kind in timed},
        "interface": {kind: timed[kind].interface_nbytes for kind in timed},
        "losses": {kind: run.losses for kind, run in runs.items()},
        "num_parameters": sum(p.numel() for p in runs["DDP over gloo"].model.parameters()),
        "steps": task["steps"],
    }


if __name__ == "__main__":
    as_rank(measure)
