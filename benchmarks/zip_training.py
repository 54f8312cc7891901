"""Training steps under FSDP2 over real slow links: the collectives as they come, over our raw exchange, and shortened.

Hosts are network namespaces on this machine (laconic.testing.netlab), one process and one thread each: four ranks share
its cores, whatever they compute. Every kind trains a copy of the same model from the same start on the same tokens; the
kinds take turns, step after step. Exposed communication is a step's time minus that of the same step without a network:
every rank alone with the whole model, all of them at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.registry import Options, Table, benchmark
from benchmarks.slow_links import join, leave, run_ranks, time_all
from laconic.testing.netlab import Lab, why_not

_NUM_HOSTS = (4,)
_RATES = (100e6, 1e9)
_SMOKE_HOSTS, _SMOKE_RATES = (2,), (1e9,)
_SMOKE = 1 << 12
_MODELS = ("dense", "mixture of experts")
_KINDS = ("gloo", "raw", "tiered", "auto")
_TOKENS, _VOCABULARY = 128, 2048
# As many steps as losses must agree over; on the slower links fewer, because losses do not depend on the link.
_STEPS, _SLOW_STEPS, _SLOW_RATE = 50, 3, 300e6


@benchmark("zip-training")
def zip_training(options: Options) -> list[Table]:
    """Steps of a dense model and a mixture of experts, 10M parameters each, under FSDP2 in bf16."""
    reason = why_not()
    if reason is not None:
        return [Table("Training over slow links", ["not measured"], [[reason]])]
    smoke = options.elements <= _SMOKE
    tables = []
    for model in _MODELS:
        for num_hosts in options.num_hosts or (_SMOKE_HOSTS if smoke else _NUM_HOSTS):
            for rate in options.rates or (_SMOKE_RATES if smoke else _RATES):
                steps = 2 if smoke else _STEPS if rate > _SLOW_RATE else _SLOW_STEPS
                with Lab(num_hosts, rate) as lab:
                    measured = lab.measured_bits_per_second(int(rate / 8 * (0.2 if smoke else 1)))
                    task = {"model": model, "hidden": 64 if smoke else 320, "steps": steps}
                    result = run_ranks(lab, "benchmarks.zip_training", task, options.profile)
                tables.append(_table(model, num_hosts, rate, measured, result))
    return tables


def _table(model: str, num_hosts: int, rate: float, measured: float, found: dict[str, Any]) -> Table:
    seconds, alone = found["seconds"], found["seconds"]["alone"]
    rows = []
    for kind in _KINDS:
        exposed = {other: seconds[other] - alone for other in ("gloo", "raw", kind)}
        nbytes = found["audit"].get(kind)
        rows.append(
            [
                kind,
                f"{seconds[kind]:.3f}",
                f"{exposed[kind]:.3f}",
                *(_speed(exposed[other], exposed[kind]) for other in ("gloo", "raw")),
                *(_speed(seconds[other], seconds[kind]) for other in ("gloo", "raw")),
                f"{found['interface'][kind] / 1e6:.1f}",
                "-" if nbytes is None else f"{nbytes[1] / 1e6:.1f} of {nbytes[0] / 1e6:.1f}",
                _agreement(found["first_difference"].get(kind), found["steps"]),
            ]
        )
    return Table(
        f"{model}, {num_hosts} hosts, {rate / 1e6:g} Mbit/s each way (one TCP connection gets {measured / 1e6:.0f})",
        [
            *("collectives", "step, s", "exposed communication, s", "communication: gloo / this", "raw / this"),
            *("step: gloo / this", "raw / this", "MB on the interface of rank 0 per step", "by the audit"),
            "losses against raw",
        ],
        rows,
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
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    common: dict[str, Any] = {
        "vocab_size": _VOCABULARY,
        "hidden_size": hidden,
        "num_attention_heads": max(1, hidden // 64),
        "num_key_value_heads": max(1, hidden // 64),
        "tie_word_embeddings": False,
        "use_cache": False,
    }
    if kind == "dense":
        return LlamaForCausalLM(LlamaConfig(**common, intermediate_size=4 * hidden, num_hidden_layers=6))
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": hidden, "num_hidden_layers": 4}
    return MixtralForCausalLM(MixtralConfig(**common, **experts))


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


def main() -> None:
    """What one rank measures."""
    task = join()
    runs = {kind: _Training(kind, task) for kind in ("alone", *_KINDS)}
    timed = time_all({kind: run.step for kind, run in runs.items()}, rounds=task["steps"] - 1, warm_ups=1)
    found = {kind: _first_difference(runs[kind].losses, runs["raw"].losses) for kind in _KINDS}
    zipped = [kind for kind in _KINDS if kind != "gloo"]
    leave(
        {
            "seconds": {kind: timed[kind].seconds for kind in timed},
            "interface": {kind: timed[kind].interface_nbytes for kind in timed},
            "audit": {kind: (runs[kind].audit.raw_nbytes, runs[kind].audit.sent_nbytes) for kind in zipped},
            "first_difference": found,
            "num_parameters": runs["gloo"].num_parameters,
            "steps": task["steps"],
        }
    )


if __name__ == "__main__":
    main()
