"""LaconicTrainer with experts over processes: all of its options together, what it saves, and what it refuses."""

from __future__ import annotations

import os
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from laconic.activations.whole_model.suspended import is_compressed
from laconic.errors import ConfigError
from laconic.integrations.accelerate import attach
from laconic.integrations.huggingface import LaconicConfig, LaconicTrainer
from laconic.moe import Grid, Parallelized, parallelize
from laconic.optim import AdamW8bit
from laconic.train.launch.worker import leave
from tests.activations.models import make_ids, make_model
from tests.distributed.processes import free_port, rank_environment, run_ranks
from tests.integrations.moe_hosts import weights
from tests.integrations.test_accelerate import shard_by_hand

EVERYTHING = LaconicConfig(activations=4, optimizer="adamw8bit")


def trained(folder: Path, spread: bool, config: LaconicConfig, resume: Path | None = None, **changes: Any) -> Any:
    data = [{"input_ids": ids, "labels": ids} for ids in make_ids(32, 16)]
    usual: dict[str, Any] = {
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": [],
        "per_device_train_batch_size": 2 if spread else 4,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "max_grad_norm": 0.5,
        "remove_unused_columns": False,
    }
    if spread:
        usual["ddp_backend"] = "gloo"
    arguments = TrainingArguments(str(folder), **(usual | changes))
    model = make_model("qwen3_moe", use_cache=False)
    if spread:
        parallelize(model, Grid(ep=2))
    trainer = LaconicTrainer(model, arguments, train_dataset=data, eval_dataset=data[:8], laconic=config)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return trainer


def with_adapters(folder: Path, kind: Any, first: bool, resume: Path | None = None, **changes: Any) -> Any:
    """Fine-tuned by LoRA on experts; `get_peft_model` comes first, or `parallelize`."""
    peft = pytest.importorskip("peft")
    data = [{"input_ids": ids, "labels": ids} for ids in make_ids(16, 16)]
    usual: dict[str, Any] = {"use_cpu": True, "disable_tqdm": True, "report_to": [], "ddp_backend": "gloo"}
    usual |= {"per_device_train_batch_size": 2, "max_steps": 4, "learning_rate": 1e-2, "save_strategy": "steps"}
    arguments = TrainingArguments(str(folder), **usual, save_steps=2, remove_unused_columns=False, **changes)
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=targets)
    model = make_model("qwen3_moe", use_cache=False)
    torch.manual_seed(1)
    if first:
        model = peft.get_peft_model(model, config)
    parallelize(model, Grid(ep=2))
    if not first:
        model = peft.get_peft_model(model, config)
    own = {} if kind is Trainer else {"laconic": LaconicConfig(activations=4)}
    trainer = kind(model, arguments, train_dataset=data, eval_dataset=data[:8], **own)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return trainer


def logged(trainer: Any, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if "loss" in entry]


def _everything(rank: int, world: int, folder: Path, port: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    together: dict[str, Any] = {
        "bf16": True,
        "label_smoothing_factor": 0.1,
        "average_tokens_across_devices": True,
        "gradient_checkpointing": True,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "save_total_limit": 2,
        "load_best_model_at_end": True,
        "greater_is_better": False,
    }
    if world == 1:
        alone = trained(folder / "alone", False, LaconicConfig(activations=16), **together)
        torch.save((logged(alone, "loss"), logged(alone, "grad_norm")), folder / "alone.pt")
        leave(0)
    os.environ.update(rank_environment(rank, world, port))
    whole = trained(folder / "whole", True, EVERYTHING, **together)
    assert is_compressed(whole.model)
    assert isinstance(whole.optimizer.optimizer, AdamW8bit)
    losses, norms = torch.load(folder / "alone.pt")
    assert logged(whole, "loss") == pytest.approx(losses, rel=0.02)
    assert logged(whole, "grad_norm") == pytest.approx(norms, rel=0.05)

    # 1. What is saved is a model of transformers, and the best of them is the trainer's.
    kept = sorted(path.name for path in (folder / "whole").iterdir() if path.name.startswith("checkpoint"))
    assert len(kept) == 2
    best = AutoModelForCausalLM.from_pretrained(whole.state.best_model_checkpoint)
    for (name, got), expected in zip(weights(whole.model).items(), best.parameters(), strict=True):
        assert torch.equal(got, expected), name

    # 2. A resumed run has the bits of one that went on.
    together |= {"load_best_model_at_end": False, "save_total_limit": None}
    going = trained(folder / "going", True, EVERYTHING, **together)
    resumed = trained(folder / "resumed", True, EVERYTHING, folder / "going" / "checkpoint-2", **together)
    expected = weights(going.model)
    for name, got in weights(resumed.model).items():
        assert torch.equal(got, expected[name]), name
    states = [load_file(folder / run / "checkpoint-4" / "model.safetensors") for run in ("going", "resumed")]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    saved = torch.load(folder / "going" / "checkpoint-4" / "optimizer.pt", weights_only=True)
    assert {value.shape[0] for state in saved["state"].values() for value in state.values() if value.dim() == 3} == {4}

    # 3. Where only the model's parts are saved, or everything at the end, all processes take part.
    going.save_model(str(folder / "last"))
    dist.barrier()
    again = AutoModelForCausalLM.from_pretrained(folder / "last")
    for (name, got), parameter in zip(expected.items(), again.parameters(), strict=True):
        assert torch.equal(got, parameter), name

    leave(0)


@pytest.mark.ci
def test_everything_together_trains_saves_and_resumes(tmp_path: Path) -> None:
    for world in (1, 2):
        run_ranks(_everything, (world, tmp_path, free_port()), world)


def _resumes(rank: int, world: int, run: str, resume: str | None, folder: Path, port: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if world > 1:
        os.environ.update(rank_environment(rank, world, port))
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "weight_decay": 0.1, "warmup_steps": 1}
    exact = LaconicConfig(activations=16)
    trained(folder / run, world > 1, exact, None if resume is None else folder / resume, **saving)
    leave(0)


@pytest.mark.slow
def test_one_process_resumes_what_two_have_saved_and_the_other_way_round(tmp_path: Path) -> None:
    for world, run, resume in ((1, "a", None), (2, "b", "a/checkpoint-1"), (1, "c", "b/checkpoint-2")):
        run_ranks(_resumes, (world, run, resume, tmp_path, free_port()), world)
    last = [tmp_path / run / "checkpoint-4" for run in "abc"]
    for file in ("optimizer.pt", "scheduler.pt"):
        one, two, three = (torch.load(place / file, weights_only=True) for place in last)
        for key in {*one} - {"state"}:
            assert one[key] == two[key] == three[key], (file, key)
    files = [load_file(place / "model.safetensors") for place in last]
    for name, expected in files[0].items():
        for got in files[1:]:
            assert float((got[name] - expected).abs().max()) < 1e-5, name


def _adapted(rank: int, folder: Path, port: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ.update(rank_environment(rank, 2, port))
    best = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    for kind in (Trainer, LaconicTrainer):
        for first in (True, False):
            place = folder / f"{kind.__name__}-{first}"
            whole = with_adapters(place / "whole", kind, first)
            resumed = with_adapters(place / "resumed", kind, first, place / "whole" / "checkpoint-2", **best)
            assert resumed.state.best_model_checkpoint.endswith("checkpoint-4")
            expected = weights(whole.model)
            for name, got in weights(resumed.model).items():
                assert torch.equal(got, expected[name]), name
            assert any("experts" in name and "lora_B" in name and bool(p.any()) for name, p in expected.items())
            files = {path.name for path in (place / "whole" / "checkpoint-4").iterdir()}
            assert {"adapter_model.safetensors", "adapter_config.json", "optimizer.pt"} <= files
    leave(0)


@pytest.mark.ci
def test_adapters_on_experts_are_trained_saved_and_resumed(tmp_path: Path) -> None:
    run_ranks(_adapted, (tmp_path, free_port()), 2)


def _refused(rank: int, folder: Path, port: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ.update(rank_environment(rank, 2, port))
    with pytest.raises(ConfigError, match="gradients is 8, but experts that are spread over processes"):
        trained(folder / "codes", True, LaconicConfig(gradients=8))

    model = make_model("qwen3_moe")
    parallelize(model, Grid(ep=2))
    accelerator: Any = Accelerator(cpu=True)
    with pytest.raises(ConfigError, match=r"accelerate's Accelerator saves .* call attach\(accelerator, model\)"):
        accelerator.prepare(model)
    model = make_model("qwen3_moe")
    parallelize(model, Grid(ep=2))
    accelerator.scaler = object()
    with pytest.raises(ConfigError, match="mixed_precision is 'fp16', whose GradScaler would leave out a step"):
        attach(accelerator, model)
    accelerator.scaler = None
    for kind in (DistributedType.FSDP, DistributedType.DEEPSPEED):
        accelerator.state.distributed_type = kind
        with pytest.raises(ConfigError, match=f"{kind.value} would shard and reduce them as if each process had all"):
            attach(accelerator, model)
    accelerator.state.distributed_type = DistributedType.MULTI_CPU
    model = make_model("qwen3_moe")
    parallelize(model, Grid(mp=2, ep=2))
    with pytest.raises(ConfigError, match="mp is 2, so that as many processes expect the same tokens"):
        attach(accelerator, model)

    lightning = pytest.importorskip("lightning.pytorch")
    from laconic.integrations.lightning import LaconicCallback, LaconicStrategy

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def configure_model(self) -> None:
            self.model = make_model("qwen3_moe")
            parallelize(self.model, Grid(ep=2))
            dist.barrier()  # the rank that has the store ends it where it is refused

        def training_step(self, ids: Any, number: int) -> Any:
            raise AssertionError("a step was made")

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-2)

    ddp = lightning.strategies.DDPStrategy(process_group_backend="gloo")
    coded = LaconicStrategy(8, process_group_backend="gloo")
    for strategy, callbacks, message in (
        (ddp, [], r"lightning's Trainer saves .*; give it callbacks=\[LaconicCallback\(\)\]"),
        (coded, [LaconicCallback(LaconicConfig(activations=16))], "LaconicStrategy would hold and reduce them"),
    ):
        quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
        trainer = lightning.Trainer(
            accelerator="cpu", devices=2, strategy=strategy, callbacks=callbacks, enable_progress_bar=False, **quiet
        )
        with pytest.raises(ConfigError, match=message) as caught:
            trainer.fit(Module(), torch.utils.data.DataLoader(list(make_ids(4, 8))))  # type: ignore[arg-type]
        assert len(str(caught.value)) < 300
    leave(0)


def _sharded_by_others(rank: int, folder: Path, port: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ.update(rank_environment(rank, 2, port))
    data = [{"input_ids": ids, "labels": ids} for ids in make_ids(8, 8)]
    arguments = TrainingArguments(
        str(folder), use_cpu=True, disable_tqdm=True, report_to=[], ddp_backend="gloo", remove_unused_columns=False
    )

    def spread(trains: bool = True) -> Parallelized:
        done = parallelize(make_model("qwen3_moe", use_cache=False), Grid(ep=2))
        for parameter in done.experts():
            parameter.requires_grad_(trains)
        return done

    def by_accelerate(**plugin: Any) -> None:
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
        accelerator = Accelerator(cpu=True)
        shard_by_hand(accelerator, "Qwen3MoeDecoderLayer", **plugin)
        model = spread().model
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def by_trainer() -> None:
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
        trainer = Trainer(spread().model, arguments, train_dataset=data)
        shard_by_hand(trainer.accelerator, "Qwen3MoeDecoderLayer")
        trainer.is_fsdp_enabled = True
        trainer.train()

    def by_hand(trains: bool = True, **options: Any) -> None:
        fully_shard(spread(trains).model, **options)

    def leaving_experts_out(trains: bool = True) -> nn.Module:
        done = spread(trains)
        return fully_shard(done.model, ignored_params={*done.experts()})

    class OfFSDP1(FullyShardedDataParallel):  # type: ignore[misc]  # its constructor wants a GPU
        def __init__(self, model: nn.Module) -> None:
            nn.Module.__init__(self)
            self._fsdp_wrapped_module = model

    whole, sums = (
        "would shard and reduce them as if each process had all; ",
        "would leave their gradients sums over all",
    )
    done = r"call fully_shard of what parallelize returns in its place"
    attached = r"leave FSDP out and call attach\(accelerator, model\) of laconic.* or, in a loop of your own, "
    for shard, message in (
        (by_accelerate, f"by accelerate's Accelerator {whole}{attached}{done}"),
        (partial(by_accelerate, cpu_ram_efficient_loading=True), f"by accelerate's Accelerator {whole}"),
        (partial(by_accelerate, ignored_modules=".*experts.*"), f"by accelerate's Accelerator {sums}"),
        (by_trainer, f"by transformers's Trainer {whole}leave FSDP out and take LaconicTrainer, .*{done}"),
        (by_hand, f"but FSDP {whole}{done}"),
        (partial(by_hand, mesh=Grid(ep=2).expert_mesh["edp"]), f"but FSDP {whole}{done}"),
        (partial(by_hand, trains=False), f"but FSDP {whole}{done}"),
        (leaving_experts_out, f"but FSDP {sums}.*{done}"),
        (lambda: OfFSDP1(spread().model), f"but FSDP {whole}{done}"),
    ):
        with pytest.raises(ConfigError, match=message):
            shard()
    # Frozen experts have no gradients to reduce, and whole ones are those that FSDP takes them for.
    ids = make_ids(1, 8)
    leaving_experts_out(trains=False)(input_ids=ids, labels=ids).loss.backward()
    model = make_model("qwen3_moe", use_cache=False)
    parallelize(model, Grid(ep=1))
    fully_shard(model)(input_ids=ids, labels=ids).loss.backward()
    leave(0)


@pytest.mark.ci
def test_fsdp_that_does_not_know_of_experts_is_refused_before_the_first_step(tmp_path: Path) -> None:
    run_ranks(_sharded_by_others, (tmp_path, free_port()), 2)


@pytest.mark.ci
def test_what_would_train_or_save_experts_wrongly_is_refused_before_the_first_step(tmp_path: Path) -> None:
    run_ranks(_refused, (tmp_path, free_port()), 2)
