"""A loop of one's own over Accelerate: gradients in codes in DDP's place, accumulation, clipping, saved states."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import Trainer

import laconic
from laconic.errors import ConfigError
from laconic.gradients.turns import owner_of
from laconic.integrations import LaconicConfig
from laconic.integrations.accelerate import Attached, attach
from laconic.integrations.huggingface import LaconicCallback, LaconicTrainer
from tests.distributed.processes import free_port, rank_environment, run_ranks
from tests.integrations.test_huggingface import arguments, assert_near, llama, rows, words


def fresh(**options: object) -> Accelerator:
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    return Accelerator(cpu=True, **options)


def batches(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randint(0, 256, (4, 32), generator=generator) for _ in range(6)]


class Loop:
    """Three steps of two micro-batches, clipped."""

    def __init__(self, accelerator: Accelerator, config: LaconicConfig | None, optimizer: type[torch.optim.Optimizer]):
        self.accelerator = accelerator
        model = llama()
        self.attached: Attached | None = None if config is None else attach(accelerator, model, config)
        self.model, self.optimizer = accelerator.prepare(model, optimizer(model.parameters(), lr=1e-3))
        self.norms: list[float] = []

    def run(self, numbers: range) -> list[float]:
        found = []
        for ids in [batches(self.accelerator.process_index)[number] for number in numbers]:
            with self.accelerator.accumulate(self.model):
                loss = self.model(input_ids=ids, labels=ids).loss
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                    self.norms.append(float(norm))
                self.optimizer.step()
                self.optimizer.zero_grad()
            found.append(loss.item())
        return found

    @property
    def weights(self) -> Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])


def agree(folder: Path) -> None:
    alone = Loop(fresh(gradient_accumulation_steps=2), None, torch.optim.AdamW)
    expected = alone.run(range(6))
    for bits in (8, 12):
        config = LaconicConfig(gradients=bits)
        loop = Loop(fresh(gradient_accumulation_steps=2), config, laconic.AdamW8bit)
        assert isinstance(loop.model, nn.Module)
        assert not isinstance(loop.model, nn.parallel.DistributedDataParallel)
        got = loop.run(range(2))
        loop.accelerator.save_state(str(folder / f"{bits}"))
        got += loop.run(range(2, 6))
        assert got == pytest.approx(expected, rel=1e-3)
        assert loop.norms == pytest.approx(alone.norms, rel=0.02)

        again = Loop(fresh(gradient_accumulation_steps=2), config, laconic.AdamW8bit)
        again.accelerator.load_state(str(folder / f"{bits}"))
        again.run(range(2, 6))
        assert torch.equal(again.weights, loop.weights)
        if dist.is_initialized():
            first = loop.weights.clone()
            dist.broadcast(first, 0)
            assert torch.equal(first, loop.weights)


@pytest.mark.ci
def test_one_process(tmp_path: Path) -> None:
    agree(tmp_path)


def _agree(rank: int, folder: Path, port: int) -> None:
    os.environ.update(rank_environment(rank, 2, port))
    agree(folder)
    add_two_losses()


def add_two_losses() -> None:
    """Two backwards of one step, as DDP allows them: each is reduced, and the sum is that of the means."""
    found = []
    for config in (None, LaconicConfig(activations=16, gradients=12)):
        accelerator = fresh()
        loop = Loop(accelerator, config, torch.optim.SGD)
        for ids in batches(accelerator.process_index)[:2]:
            accelerator.backward(loop.model(input_ids=ids, labels=ids).loss)
        found.append(torch.cat([(p.grad + 0).flatten() for p in loop.model.parameters()]))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=float(found[0].abs().max()) * 1e-3)


@pytest.mark.ci
def test_two_processes(tmp_path: Path) -> None:
    run_ranks(_agree, (tmp_path, free_port()), 2)


@pytest.mark.ci
def test_two_processes_of_fsdp2(tmp_path: Path) -> None:
    run_ranks(_sharded, (tmp_path, free_port()), 2)


def _sharded(rank: int, folder: Path, port: int) -> None:
    os.environ.update(rank_environment(rank, 2, port))
    alone = Loop(sharding(), None, torch.optim.AdamW)
    expected = alone.run(range(6))
    loop = Loop(sharding(), LaconicConfig(), laconic.AdamW8bit)
    assert loop.attached is not None
    assert loop.attached.report is not None
    assert all(isinstance(parameter, DTensor) for parameter in loop.model.parameters())
    got = loop.run(range(2))
    kept = loop.optimizer.state_dict(), [p.detach().to_local().clone() for p in loop.model.parameters()]
    kept = copy.deepcopy(kept)
    got += loop.run(range(2, 6))
    assert got == pytest.approx(expected, rel=1e-3)
    assert got != expected
    assert loop.norms == pytest.approx(alone.norms, rel=0.02)
    states = loop.optimizer.state.values()
    assert any(isinstance(state.get("exp_avg_codes"), DTensor) for state in states)

    again = Loop(sharding(), LaconicConfig(), laconic.AdamW8bit)
    with torch.no_grad():
        for parameter, shard in zip(again.model.parameters(), kept[1], strict=True):
            parameter.to_local().copy_(shard)
    again.optimizer.load_state_dict(kept[0])
    assert again.run(range(2, 6)) == got[2:]
    with pytest.raises(ConfigError, match="gradients is 8, but FSDP holds and reduces gradients"):
        attach(sharding(), llama(), LaconicConfig(gradients=8))


@pytest.mark.ci
def test_fsdp_that_accelerate_has_left_out_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_ranks(_left_out, (tmp_path, free_port()), 2)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.warns(UserWarning, match="this one process trains without its settings"):
        attach(fresh(), llama())


def _left_out(rank: int, folder: Path, port: int) -> None:
    os.environ.update(rank_environment(rank, 2, port))
    layers = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    message = "FSDP is asked for .* all 2 processes would hold the whole model"

    def by_variable() -> None:
        os.environ["ACCELERATE_USE_FSDP"] = "true"
        attach(fresh(), llama())

    def by_arguments() -> None:
        given = arguments(folder, fsdp=True, fsdp_config=dict(layers))
        LaconicTrainer(llama(), given, train_dataset=rows())

    def by_callback() -> None:
        given = arguments(folder, fsdp=True, fsdp_config=dict(layers))
        Trainer(llama(), given, train_dataset=rows(), callbacks=[LaconicCallback()]).train()

    def by_plugin() -> None:
        attach(fresh(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2)), llama(), LaconicConfig(gradients=8))

    for ask in (by_plugin, by_variable, by_arguments, by_callback):
        os.environ.pop("ACCELERATE_USE_FSDP", None)
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
        with pytest.raises(ConfigError, match=message):
            ask()
    del os.environ["ACCELERATE_USE_FSDP"]  # Accelerate has set it for good
    attach(fresh(), llama())


def sharding() -> Accelerator:
    """One that shards by FSDP2: on CPUs Accelerate leaves a plugin out without a word, so its state is set by hand."""
    accelerator = fresh(gradient_accumulation_steps=2)
    shard_by_hand(accelerator)
    return accelerator


def shard_by_hand(accelerator: Accelerator, layer: str = "LlamaDecoderLayer", **options: Any) -> None:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[layer],
        **options,
    )
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin


@pytest.mark.slow
def test_supervised_fine_tuning_sharded_by_fsdp2(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    run_ranks(_tuned, (tmp_path, free_port()), 2)


def _tuned(rank: int, folder: Path, port: int) -> None:
    os.environ.update(rank_environment(rank, 2, port))
    import trl
    from datasets import Dataset

    from laconic.integrations.huggingface import LaconicSFTTrainer

    data = Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in rows()])

    def sft(kind: Any, **own: Any) -> Any:
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
        settings = arguments(folder, trl.SFTConfig, bf16=False, ddp_backend="gloo")
        trainer = kind(llama(), settings, train_dataset=data, processing_class=words(), **own)
        shard_by_hand(trainer.accelerator)
        trainer.is_fsdp_enabled = True
        trainer.train()
        assert all(isinstance(parameter, DTensor) for parameter in trainer.model.parameters())
        return trainer

    alone = sft(trl.SFTTrainer)
    ours = sft(LaconicSFTTrainer, laconic=LaconicConfig(optimizer="adamw8bit"))
    states = ours.optimizer.optimizer.state.values()
    assert any(isinstance(state.get("exp_avg_codes"), DTensor) for state in states)
    if rank == 0:
        assert_near(ours, alone)
        assert ours.state.log_history[0]["laconic/activation_factor"] > 1.5  # SFTConfig checkpoints layers
    whole = [parameter.full_tensor() for parameter in ours.model.parameters()]
    for tensor in whole:
        first = tensor.clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, tensor)


def test_what_comes_too_late_or_is_not_the_accelerators_is_refused() -> None:
    accelerator = fresh()
    with pytest.raises(ConfigError, match="a loop of your own makes its optimizer itself"):
        attach(accelerator, llama(), LaconicConfig(optimizer="adamw8bit"))
    prepared = accelerator.prepare(llama())
    with pytest.raises(ConfigError, match=r"call attach before accelerator\.prepare"):
        attach(accelerator, prepared)


def test_a_model_is_trained_again_by_another_accelerator(tmp_path: Path) -> None:
    model, gradients = llama(), []
    for _ in range(2):  # as where a cell of a notebook runs twice
        accelerator = fresh()
        gradients.append(attach(accelerator, model, LaconicConfig(gradients=8)).gradients)
        prepared = accelerator.prepare(model)
        ids = batches(0)[0]
        accelerator.backward(prepared(input_ids=ids, labels=ids).loss)
    assert all(owner_of(parameter) is gradients[1] for parameter in model.parameters())


@pytest.mark.ci
def test_an_accelerator_averages_the_gradients_of_one_model_if_all_processes_say_so(tmp_path: Path) -> None:
    run_ranks(_attach_two, (free_port(),), 2)


def _attach_two(rank: int, port: int) -> None:
    os.environ.update(rank_environment(rank, 2, port))
    accelerator, config = fresh(), LaconicConfig(activations=16, gradients=8)
    with pytest.raises(ConfigError, match="gradients is 32 on rank 0 and 8 on rank 1"):
        attach(accelerator, llama(), config if rank else LaconicConfig(activations=16))
    attach(accelerator, llama(), config)
    with pytest.raises(ConfigError, match="averages those of another LlamaForCausalLM already"):
        attach(accelerator, llama(), config)


def test_other_models_of_the_accelerator_are_prepared_as_ever() -> None:
    accelerator = fresh()
    attached = attach(accelerator, llama())
    assert attached.gradients is None
    assert attached.report is not None
    other = nn.Linear(2, 2)
    assert accelerator.prepare(other) is other
