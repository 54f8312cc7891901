"""Training steps under FSDP2 over real slow links: the collectives as they come, over our raw exchange, and shortened.

Four ranks share this machine's cores, whatever they compute. Every kind trains a copy of the same model from the same
start on the same tokens; the kinds take turns, step after step. Exposed communication is a step's time minus that of
the same step without a network: every rank alone with the whole model, all of them at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.kit.models import causal_model
from benchmarks.registry import Options, Table, benchmark
from benchmarks.slow_links import Network, as_rank, in_lab, networks, time_all

_MODELS = ("dense", "mixture of experts")
_KINDS = ("gloo", "raw", "tiered", "auto")
_TOKENS, _VOCABULARY = 128, 2048
# As many steps as losses must agree over; on the slower links fewer, because losses do not depend on the link.
_STEPS, _SLOW_STEPS, _SLOW_RATE = 50, 3, 300e6


@benchmark("zip-training")
@in_lab("Training over slow links")
def zip_training(options: Options) -> list[Table]:
    """Steps of a dense model and a mixture of experts, 10M parameters each, under FSDP2 in bf16."""
    tables = []
    for model in _MODELS:
        for network in networks(options, (2,) if options.smoke else (4,), (100e6, 1e9)):
            steps = 2 if options.smoke else _STEPS if network.rate > _SLOW_RATE else _SLOW_STEPS
            task = {"model": model, "hidden": 64 if options.smoke else 320, "steps": steps}
            tables.append(_table(model, network, network.run(__name__, task)))
    return tables


def _table(model: str, network: Network, found: dict[str, Any]) -> Table:
    seconds, alone = found["seconds"], found["seconds"]["alone"]
    exposed = {kind: seconds[kind] - alone for kind in _KINDS}

    def audited(kind: str) -> str:
        raw, sent = found["audit"].get(kind, (0, 0))
        return f"{sent / 1e6:.1f} of {raw / 1e6:.1f}" if kind in found["audit"] else "-"

    return Table.of(
        f"{model}, {network.where(found)}",
        _KINDS,
        [
            ("collectives", str),
            ("step, s", lambda kind: f"{seconds[kind]:.3f}"),
            ("exposed communication, s", lambda kind: f"{exposed[kind]:.3f}"),
            ("communication: gloo / this", lambda kind: _speed(exposed["gloo"], exposed[kind])),
            ("raw / this", lambda kind: _speed(exposed["raw"], exposed[kind])),
            ("step: gloo / this", lambda kind: _speed(seconds["gloo"], seconds[kind])),
            ("raw / this", lambda kind: _speed(seconds["raw"], seconds[kind])),
            ("MB on the interface of rank 0 per step", lambda kind: f"{found['interface'][kind] / 1e6:.1f}"),
            ("by the audit", audited),
            ("losses against raw", lambda kind: _agreement(found["first_difference"].get(kind), found["steps"])),
        ],
        f"{found['num_parameters']:,} parameters, bf16 parameters and gradients on the wire, {_TOKENS} tokens per rank,"
        f" {found['steps']} steps; a step without a network takes {alone:.3f} s. gloo is FSDP2 untouched, raw"
        " `zip_collectives(codec=Raw())`, tiered `Lossless('tiered')`.",
    )


def _speed(slow: float, fast: float) -> str:
    # A tiny step may seem to take less time with a network than without.
    return f"{slow / fast:.2f}x" if min(slow, fast) > 0 else "-"


def _agreement(first_difference: int | None, steps: int) -> str:
    if first_difference is None:
        return f"the same bits in {steps} steps"
    return f"differ from step {first_difference + 1} on"


# --- what each rank does ---


def _model(kind: str, hidden: int) -> nn.Module:
    common = {"vocab_size": _VOCABULARY, "tie_word_embeddings": False, "use_cache": False}
    if kind == "dense":
        return causal_model("llama", hidden, intermediate_size=4 * hidden, num_hidden_layers=6, **common)
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2}
    return causal_model("mixtral", hidden, intermediate_size=hidden, num_hidden_layers=4, **experts, **common)


def _sharded(model: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    inner: Any = model.model
    for layer in inner.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def _zip(model: nn.Module, kind: str) -> None:
    import laconic
    from laconic.collectives import Lossless, Raw

    laconic.zip_collectives(model, codec={"raw": Raw(), "tiered": Lossless("tiered"), "auto": "auto"}[kind])


class _Training:
    """One kind: a model, its optimizer, and the losses of this rank so far."""

    def __init__(self, kind: str, task: dict[str, Any]) -> None:
        from laconic.collectives import audit

        model = _model(task["model"], task["hidden"])
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self.model = model.bfloat16() if kind == "alone" else _sharded(model)
        if kind not in ("alone", "gloo"):
            _zip(self.model, kind)
        parameters = list(self.model.parameters())
        if kind == "alone":  # a rank of the others updates its shards only
            parameters = parameters[:: dist.get_world_size()]
        self.optimizer = torch.optim.AdamW(parameters, lr=3e-4, fused=True)
        self.losses: list[Tensor] = []
        self.audit = audit.Snapshot(())
        self._generator = torch.Generator().manual_seed(dist.get_rank())
        self._snapshot: Callable[[], audit.Snapshot] = audit.snapshot

    def step(self) -> None:
        """Forward, backward, update; counts what our collectives say they sent."""
        before = self._snapshot()
        # Numbers that repeat: something to learn.
        start = torch.randint(0, _VOCABULARY, (1, 16), generator=self._generator)
        ids = start.repeat(1, _TOKENS // 16)
        self.optimizer.zero_grad()
        loss = self.model(input_ids=ids, labels=ids).loss
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.detach().float())
        self.audit = self._snapshot() - before


def _first_difference(losses: list[Tensor], others: list[Tensor]) -> int | None:
    """The first step in which a rank's loss has other bits, None if there is none."""
    bits = [torch.stack(found).view(torch.int32) for found in (losses, others)]
    differs = (bits[0] != bits[1]).int()
    dist.all_reduce(differs)
    steps = differs.nonzero().flatten().tolist()
    return steps[0] if steps else None


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """What one rank measures."""
    runs = {kind: _Training(kind, task) for kind in ("alone", *_KINDS)}
    timed = time_all({kind: run.step for kind, run in runs.items()}, rounds=task["steps"] - 1)
    found = {kind: _first_difference(runs[kind].losses, runs["raw"].losses) for kind in _KINDS}
    zipped = [kind for kind in _KINDS if kind != "gloo"]
    return {
        "seconds": {kind: timed[kind].seconds for kind in timed},
        "interface": {kind: timed[kind].interface_nbytes for kind in timed},
        "audit": {kind: (runs[kind].audit.raw_nbytes, runs[kind].audit.sent_nbytes) for kind in zipped},
        "first_difference": found,
        "num_parameters": runs["gloo"].num_parameters,
        "steps": task["steps"],
    }


if __name__ == "__main__":
    as_rank(measure)
