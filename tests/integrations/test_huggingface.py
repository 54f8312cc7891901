"""transformers' Trainer with laconic: trains as alone, resumes bit for bit, leaves no trace in what it saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForSequenceClassification,
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
    set_seed,
)

import laconic
from laconic import AdamW8bit
from laconic.errors import ConfigError, ModelError
from laconic.gradients.turns import owner_of
from laconic.integrations import LaconicConfig
from laconic.integrations.huggingface import LaconicCallback, LaconicTrainer, LaconicTrainerMixin
from tests.distributed.processes import free_port, rank_environment, run_ranks
from tests.grid import slow_but
from tests.wandb_files import offline_runs, wandb_offline

__all__ = ["wandb_offline"]

# Names that transformers renamed in 5.x; PEFT, TRL and older releases of transformers know only these.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")

EVERYTHING = LaconicConfig(gradients=8, optimizer="adamw8bit")


def llama() -> nn.Module:
    set_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, **shape))


def rows(count: int = 32) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    found = [torch.randint(0, 256, (32,), generator=generator) for _ in range(count)]
    return [{"input_ids": ids, "labels": ids} for ids in found]


def arguments(folder: Path, kind: Any = TrainingArguments, **changes: Any) -> Any:
    usual = {
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
        "report_to": [],
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "logging_steps": 1,
        "learning_rate": 1e-3,
    }
    return kind(str(folder), **(usual | changes))


def test_tensorboard_gets_what_was_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    own = LaconicConfig(gradients=8)
    trainer = trained(tmp_path, own, report_to=["tensorboard"])
    events = accumulator.EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    for name in ("laconic/activation_nbytes_per_token", "laconic/activation_factor", "laconic/gradient_nbytes"):
        logged = [entry[name] for entry in trainer.state.log_history if "loss" in entry]
        assert [scalar.value for scalar in events.Scalars(f"train/{name}")] == pytest.approx(logged)
        assert len(logged) == 4


@pytest.mark.ci
def test_wandb_gets_what_was_saved(tmp_path: Path, wandb_offline: Any) -> None:
    trainer = trained(tmp_path, LaconicConfig(gradients=8), report_to=["wandb"])
    wandb_offline.finish()
    [run] = offline_runs(tmp_path)
    for name in ("laconic/activation_nbytes_per_token", "laconic/activation_factor", "laconic/gradient_nbytes"):
        logged = [entry[name] for entry in trainer.state.log_history if "loss" in entry]
        rows = [row for row in run.rows if f"train/{name}" in row]
        assert [row[f"train/{name}"] for row in rows] == pytest.approx(logged)
        assert [row["train/global_step"] for row in rows] == [1, 2, 3, 4]


def losses(trainer: Trainer) -> Tensor:
    return torch.tensor([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])


def trained(
    folder: Path, laconic: LaconicConfig | None, resume: Path | None = None, model: Any = None, **changes: Any
) -> Trainer:
    """A Trainer that has trained; without laconic the host alone."""
    own = {} if laconic is None else {"laconic": laconic}
    kind = Trainer if laconic is None else LaconicTrainer
    trainer = kind(model or llama(), arguments(folder, **changes), train_dataset=rows(), **own)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return trainer


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """The host alone, which has trained."""
    torch.manual_seed(0)
    return trained(tmp_path_factory.mktemp("alone"), None)


def assert_near(got: Trainer, expected: Trainer) -> None:
    assert len(losses(got)) == len(losses(expected)) > 0
    torch.testing.assert_close(losses(got), losses(expected), rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    "laconic",
    [
        pytest.param(LaconicConfig(), marks=pytest.mark.ci),
        LaconicConfig(mode="combined"),
        pytest.param(LaconicConfig(loss="chunked", activations=16), marks=pytest.mark.ci),
        LaconicConfig(activations=16, gradients=12),
        EVERYTHING,
    ],
    ids=["activations", "combined", "chunked", "gradients", "everything"],
)
def test_losses_are_those_of_the_host_and_logs_say_what_was_saved(
    laconic: LaconicConfig, alone: Trainer, tmp_path: Path
) -> None:
    trainer = trained(tmp_path, laconic)
    assert_near(trainer, alone)
    first, last = ([entry for entry in trainer.state.log_history if "loss" in entry][index] for index in (0, -1))
    # The first loss comes before any update; forward values have the same bits.
    if laconic.loss == "exact":
        assert first["loss"] == losses(alone)[0].item()
    assert first["grad_norm"] == pytest.approx(alone.state.log_history[0]["grad_norm"], rel=0.01)
    assert ("laconic/activation_factor" in last) == laconic.changes_model
    if laconic.activations == 4:
        assert last["laconic/activation_factor"] > 3
    num_weights = sum(p.numel() for p in trainer.model.parameters())
    if laconic.gradients != 32:
        assert num_weights < last["laconic/gradient_nbytes"] < 2 * num_weights


@pytest.mark.ci
def test_a_resumed_run_is_equal_bit_for_bit_and_an_exact_checkpoint_is_taken_over(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2}
    whole = trained(tmp_path / "whole", EVERYTHING, **saving)
    resumed = trained(tmp_path / "resumed", EVERYTHING, tmp_path / "whole" / "checkpoint-2", **saving)
    for got, expected in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(got, expected)

    alone = trained(tmp_path / "alone", None, **saving)
    taken_over = trained(tmp_path / "other", EVERYTHING, tmp_path / "alone" / "checkpoint-2")
    assert isinstance(taken_over.optimizer.optimizer, AdamW8bit)
    torch.testing.assert_close(losses(taken_over)[-2:], losses(alone)[-2:], rtol=1e-3, atol=0)


@pytest.mark.ci
def test_the_best_model_is_found_and_saved_without_a_trace(tmp_path: Path) -> None:
    trainer = LaconicTrainer(
        llama(),
        arguments(
            tmp_path,
            eval_strategy="steps",
            eval_steps=1,
            save_strategy="steps",
            save_steps=1,
            load_best_model_at_end=True,
        ),
        train_dataset=rows(),
        eval_dataset=rows(8),
        laconic=EVERYTHING,
    )
    trainer.train()
    assert trainer.state.best_model_checkpoint is not None
    best = min(entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry)
    assert trainer.evaluate()["eval_loss"] == best
    trainer.save_model(str(tmp_path / "saved"))
    assert not [file for file in (tmp_path / "saved").glob("*.json") if "laconic" in file.read_text()]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    for got, expected in zip(loaded.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.ci
def test_training_again_and_models_that_are_made_anew(tmp_path: Path) -> None:
    twice = trained(tmp_path, EVERYTHING)
    twice.train()
    made = LaconicTrainer(
        model_init=lambda: llama(), args=arguments(tmp_path), train_dataset=rows(), laconic=EVERYTHING
    )
    made.train()
    first, model = losses(made), made.model
    made.train()
    assert made.model is not model
    assert torch.equal(losses(made), first)


COMPILED = {"torch_compile": True, "torch_compile_backend": "eager"}


@pytest.mark.parametrize("changes", slow_but([{}, {"bf16": True}, COMPILED], {}))
@pytest.mark.ci
def test_a_model_that_was_evaluated_before_trains_alike(changes: dict[str, Any], tmp_path: Path) -> None:
    kinds = arguments(tmp_path, **changes)
    trainer = LaconicTrainer(llama(), kinds, train_dataset=rows(), eval_dataset=rows(8), laconic=EVERYTHING)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert torch.equal(losses(trainer), losses(trained(tmp_path, EVERYTHING, **changes)))
    assert trainer.laconic_report is not None
    assert trainer.evaluate()["eval_loss"] < before


@pytest.mark.ci
def test_trainers_follow_each_other_on_one_model(tmp_path: Path) -> None:
    first, alone = trained(tmp_path, EVERYTHING), trained(tmp_path, None)
    second = trained(tmp_path, EVERYTHING, model=first.model)
    assert second.laconic_report is first.laconic_report
    assert_near(second, trained(tmp_path, None, model=alone.model))

    with pytest.raises(ConfigError, match="activations is 8, but the model was converted for an earlier trainer"):
        trained(tmp_path, LaconicConfig(activations=8), model=first.model)
    with pytest.raises(ConfigError, match="activations is 16, but the model was converted"):
        trained(tmp_path, LaconicConfig(activations=16, gradients=8), model=first.model)
    without = trained(tmp_path, LaconicConfig(), model=first.model)  # takes the gradients in codes back
    assert "laconic/gradient_nbytes" not in without.state.log_history[0]
    assert all(owner_of(parameter) is None for parameter in first.model.parameters())
    laconic.decompress_activations(first.model)
    assert trained(tmp_path, LaconicConfig(activations=8), model=first.model).laconic_report is not None


@pytest.mark.ci
def test_a_trainer_that_makes_its_own_optimizer_is_converted_or_refused(tmp_path: Path) -> None:
    class Own(Trainer):
        def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
            return self.optimizer

    class Behind(LaconicTrainerMixin, Own):
        pass

    class InFront(LaconicTrainerMixin, Trainer):
        create_optimizer = Own.create_optimizer

    for kind, owner in ((Behind, "Own"), (InFront, "InFront")):
        trainer = kind(llama(), arguments(tmp_path), train_dataset=rows(), laconic=LaconicConfig(gradients=8))
        trainer.train()
        assert {"laconic/activation_factor", "laconic/gradient_nbytes"} <= trainer.state.log_history[0].keys()
        trainer = kind(llama(), arguments(tmp_path), train_dataset=rows(), laconic=EVERYTHING)
        with pytest.raises(ConfigError, match=f"'adamw8bit', but {owner}.create_optimizer made SGD"):
            trainer.train()


@pytest.mark.parametrize(
    "changes",
    [
        {"bf16": True},
        pytest.param({"gradient_checkpointing": True}, marks=pytest.mark.ci),
        pytest.param({"label_smoothing_factor": 0.1}, marks=pytest.mark.ci),
        pytest.param({"optim": "adamw_torch_fused", "weight_decay": 0.1}, marks=pytest.mark.ci),
        *(
            pytest.param(changes, marks=pytest.mark.slow)
            for changes in (
                {"max_grad_norm": 0.0},
                {"auto_find_batch_size": True},
                {"neftune_noise_alpha": 5.0},
                {"lr_scheduler_type": "cosine", "warmup_steps": 2},
                {"torch_empty_cache_steps": 1, "dataloader_drop_last": True},
            )
        ),
    ],
    ids=str,
)
def test_options_of_the_host_mean_the_same(changes: dict[str, Any], tmp_path: Path) -> None:
    assert_near(trained(tmp_path, EVERYTHING, **changes), trained(tmp_path, None, **changes))


def with_adapters() -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj", "gate_proj"])
    return peft.get_peft_model(llama(), config)


@pytest.mark.ci
def test_adapters_are_trained_and_saved(tmp_path: Path) -> None:
    alone = trained(tmp_path, None, model=with_adapters(), learning_rate=1e-2)
    trainer = trained(tmp_path, EVERYTHING, model=with_adapters(), learning_rate=1e-2)
    assert_near(trainer, alone)
    trainer.save_model(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "adapter_model.safetensors").exists()
    num_trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    assert trainer.state.log_history[0]["laconic/gradient_nbytes"] < 2 * num_trained


@pytest.mark.ci
def test_other_trainers_and_models(tmp_path: Path) -> None:
    class Own(LaconicTrainerMixin, Seq2SeqTrainer):
        pass

    shape = {"d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 4, "d_kv": 16, "decoder_start_token_id": 0}
    found = []
    for kind in (Seq2SeqTrainer, Own):
        set_seed(0)
        settings = arguments(tmp_path, Seq2SeqTrainingArguments, predict_with_generate=True, generation_max_length=8)
        trainer = kind(T5ForConditionalGeneration(T5Config(vocab_size=256, **shape)), settings, train_dataset=rows())
        trainer.train()
        assert trainer.predict(rows(4)).predictions.shape[0] == 4
        found.append(trainer)
    assert_near(found[1], found[0])

    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    labelled = [{**row, "labels": index % 3} for index, row in enumerate(rows())]
    found = []
    for kind in (Trainer, LaconicTrainer):
        set_seed(0)
        model = BertForSequenceClassification(BertConfig(vocab_size=256, num_labels=3, **shape))
        trainer = kind(model, arguments(tmp_path), train_dataset=labelled)
        trainer.train()
        found.append(trainer)
    assert_near(found[1], found[0])


@pytest.mark.ci
def test_images_are_compressed_without_bytes_per_token_in_the_logs(tmp_path: Path) -> None:
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    pixels = torch.randn(32, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    data = [{"pixel_values": image, "labels": index % 4} for index, image in enumerate(pixels)]
    found = []
    for kind in (Trainer, LaconicTrainer):
        set_seed(0)
        model = ViTForImageClassification(ViTConfig(image_size=32, patch_size=8, num_labels=4, **shape))
        found.append(kind(model, arguments(tmp_path), train_dataset=data))
        found[-1].train()
    assert_near(found[1], found[0])
    report = found[1].laconic_report
    assert report is not None
    assert any(row.format == "nf4" for row in report.rows)
    logs = found[1].state.log_history[0]
    assert [name for name in logs if name.startswith("laconic/")] == ["laconic/activation_factor"]
    assert logs["laconic/activation_factor"] > 3


def test_a_callback_compresses_in_any_trainer(tmp_path: Path) -> None:
    callback = LaconicCallback()
    trainer = Trainer(llama(), arguments(tmp_path), train_dataset=rows(), callbacks=[callback])
    trainer.train()
    assert_near(trainer, trained(tmp_path, None))
    assert callback.report is not None
    trainer.train()  # converted once


def words() -> Any:
    """A tokenizer of the numbers below 256."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({str(word): word for word in range(256)}, unk_token="0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="1", pad_token="2")


@pytest.mark.parametrize("changes", slow_but([{}, {"packing": True, "max_length": 32}], {}))
@pytest.mark.ci
def test_supervised_fine_tuning_with_trl(changes: dict[str, Any], tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    from laconic.integrations import huggingface

    data = Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in rows()])
    settings = arguments(tmp_path, trl.SFTConfig, bf16=False, **changes)

    def sft(kind: Any, **own: Any) -> Any:
        trainer = kind(llama(), settings, train_dataset=data, processing_class=words(), **own)
        trainer.train()
        return trainer

    assert huggingface.LaconicSFTTrainer is huggingface.LaconicSFTTrainer
    assert_near(sft(huggingface.LaconicSFTTrainer, laconic=EVERYTHING), sft(trl.SFTTrainer))
    with pytest.raises(ConfigError, match=r"SFTTrainer\.compute_loss computes the loss instead of the model"):
        sft(huggingface.LaconicSFTTrainer, laconic=LaconicConfig(loss="chunked"))


def _preferences(trl: Any) -> tuple[Any, Any, dict[str, Any]]:
    return trl.DPOTrainer, trl.DPOConfig, {"ref_model": llama()}


def _rewards(trl: Any) -> tuple[Any, Any, dict[str, Any]]:
    def different(completions: list[str], **others: Any) -> list[float]:
        return [float(len(set(completion.split()))) for completion in completions]

    return trl.GRPOTrainer, trl.GRPOConfig, {"reward_funcs": different}


@pytest.mark.slow
@pytest.mark.parametrize("parts", [_preferences, _rewards])
def test_other_trainers_of_trl(parts: Any, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    def text(ids: Tensor) -> str:
        return " " + " ".join(map(str, ids.tolist()))

    found = [row["input_ids"] for row in rows()]
    names = {"prompt": slice(8), "chosen": slice(8, 16), "rejected": slice(16, 24)}
    data = Dataset.from_list([{name: text(ids[part]) for name, part in names.items()} for ids in found])
    runs = []
    for laconic_config in (None, EVERYTHING):
        host, settings, others = parts(trl)
        kind = host if laconic_config is None else type("Mine", (LaconicTrainerMixin, host), {})
        own = {} if laconic_config is None else {"laconic": laconic_config}
        short = {"num_generations": 4, "max_completion_length": 8} if host is trl.GRPOTrainer else {}
        set_seed(0)
        args = arguments(tmp_path, settings, bf16=False, **short)
        runs.append(kind(llama(), args=args, train_dataset=data, processing_class=words(), **others, **own))
        runs[-1].train()
    torch.testing.assert_close(losses(runs[1]), losses(runs[0]), rtol=2e-3, atol=1e-4)
    norms = [[entry["grad_norm"] for entry in run.state.log_history if "loss" in entry] for run in runs]
    assert norms[1] == pytest.approx(norms[0], rel=0.02)
    assert runs[1].laconic_report is not None


def test_flags_are_parsed_by_the_host() -> None:
    parser = HfArgumentParser((LaconicConfig,))  # type: ignore[arg-type]
    (config,) = parser.parse_args_into_dataclasses(["--activations", "8", "--attention", "nf4", "--gradients", "12"])
    assert config == LaconicConfig(activations=8, attention="nf4", gradients=12)
    with pytest.raises(SystemExit):
        parser.parse_args_into_dataclasses(["--gradients", "9"])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"activations": 7}, "activations is 7, but it must be one of 2, .* 8, 16"),
        ({"activations": 4.0}, "activations is 4.0"),
        ({"attention": "int7"}, "attention is 'int7', but it must be one of None, exact, recompute"),
        ({"gradients": True}, "gradients is True"),
        ({"mode": "all"}, "mode is 'all', but it must be one of sites, hooks, combined"),
        ({"loss": "fused"}, "loss is 'fused'"),
        ({"gradients": 16}, "gradients is 16, but it must be one of 8, 12, 32"),
        ({"optimizer": "adam"}, "optimizer is 'adam', but it must be one of host, adamw8bit"),
        ({"activations": 16, "attention": "int8"}, "attention is 'int8', but activations is 16"),
        ({"activations": 16, "mode": "combined"}, "mode is 'combined', but activations is 16"),
        ({"attention": "int8", "mode": "hooks"}, "attention is 'int8', but mode is 'hooks'"),
        ({"loss": "chunked", "mode": "hooks"}, "loss is 'chunked', but mode is 'hooks'"),
    ],
)
def test_values_that_do_not_exist_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LaconicConfig(**values)


@pytest.mark.parametrize(
    ("laconic", "changes", "message"),
    [
        ({"optimizer": "adamw8bit"}, {"optim": "adafactor"}, "optimizer is 'adamw8bit', but optim is 'adafactor'"),
        ({"optimizer": "adamw8bit"}, {"optim_args": "a=1"}, "with optim_args 'a=1'"),
        ({"loss": "chunked"}, {"label_smoothing_factor": 0.1}, "label_smoothing_factor is 0.1"),
    ],
)
def test_arguments_that_exclude_each_other_are_refused_at_construction(
    laconic: dict[str, Any], changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        LaconicTrainer(llama(), arguments(tmp_path, **changes), laconic=LaconicConfig(**laconic))


def test_an_optimizer_that_arguments_ask_for_later_is_refused(tmp_path: Path) -> None:
    """As a search of hyperparameters sets them from one training to the next."""
    trainer = LaconicTrainer(llama(), arguments(tmp_path), train_dataset=rows(), laconic=EVERYTHING)
    trainer.args.optim = "sgd"  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="optimizer is 'adamw8bit', but optim is 'sgd'"):
        trainer.train()


def test_a_configuration_is_a_laconic_config(tmp_path: Path) -> None:
    other: Any = {"gradients": 8}
    with pytest.raises(ConfigError, match="laconic is a dict, but it must be a LaconicConfig"):
        LaconicTrainer(llama(), arguments(tmp_path), laconic=other)
    with pytest.raises(ConfigError, match="laconic is a dict"):
        LaconicCallback(other)


def test_an_optimizer_or_a_loss_of_ones_own_is_not_replaced(tmp_path: Path) -> None:
    model = llama()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="the trainer was given an optimizer"):
        LaconicTrainer(model, arguments(tmp_path), laconic=EVERYTHING, optimizers=(sgd, None))
    with pytest.raises(ConfigError, match="compute_loss_func computes the loss instead of the model"):
        LaconicTrainer(
            model,
            arguments(tmp_path),
            laconic=LaconicConfig(loss="chunked"),
            compute_loss_func=lambda outputs, labels, num_items_in_batch=None: outputs.logits.sum(),
        )
    for own in ({"gradients": 8}, {"optimizer": "adamw8bit"}, {"loss": "chunked"}):
        with pytest.raises(ConfigError, match="a callback sees neither"):
            LaconicCallback(LaconicConfig(**own))
    trainer = LaconicTrainer(
        model, arguments(tmp_path), train_dataset=rows(), laconic=LaconicConfig(gradients=8), optimizers=(sgd, None)
    )
    trainer.train()
    assert trainer.optimizer.optimizer is sgd
    assert losses(trainer)[-1] != losses(trainer)[0]


def test_a_model_that_cannot_be_compressed_is_refused_before_the_first_step(tmp_path: Path) -> None:
    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
            return {"loss": self.weight.sum()}

    steps: list[int] = []

    class Counting(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            steps.append(1)

    trainer = LaconicTrainer(Linear(), arguments(tmp_path), train_dataset=rows(), callbacks=[Counting()])
    with pytest.raises(ModelError):
        trainer.train()
    assert not steps


def _train_together(rank: int, folder: Path, port: int) -> None:
    import os

    os.environ.update(rank_environment(rank, 2, port))
    alone = trained(folder / "alone", None, ddp_backend="gloo")
    assert type(alone.model_wrapped).__name__ == "DistributedDataParallel"
    saving = {"save_strategy": "steps", "save_steps": 2, "ddp_backend": "gloo"}
    whole = trained(folder / "whole", EVERYTHING, **saving)
    assert whole.model_wrapped is whole.model
    resumed = trained(folder / "resumed", EVERYTHING, folder / "whole" / "checkpoint-2", **saving)
    for got, expected in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(got, expected)
        first = expected.detach().clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, expected)
    in_ddp = trained(folder / "ddp", LaconicConfig(), ddp_backend="gloo")
    assert type(in_ddp.model_wrapped).__name__ == "DistributedDataParallel"
    if rank == 0:
        assert_near(whole, alone)
        assert_near(in_ddp, alone)
        num_weights = sum(p.numel() for p in whole.model.parameters())
        assert num_weights < whole.state.log_history[0]["laconic/gradient_sent_nbytes"] < 1.3 * num_weights
        norms = [[entry["grad_norm"] for entry in t.state.log_history if "loss" in entry] for t in (whole, alone)]
        assert norms[0] == pytest.approx(norms[1], rel=0.02)


def _train_after_evaluation(rank: int, folder: Path, port: int) -> None:
    import os

    os.environ.update(rank_environment(rank, 2, port))
    first: Any = None
    for config in (EVERYTHING, LaconicConfig(), EVERYTHING):
        trainer = LaconicTrainer(
            first.model if first else llama(),
            arguments(folder, ddp_backend="gloo"),
            train_dataset=rows(),
            eval_dataset=rows(8),
            laconic=config,
        )
        first = first or trainer
        trainer.evaluate()
        trainer.train()
        wrapped = type(trainer.model_wrapped).__name__
        assert wrapped == ("LlamaForCausalLM" if config.gradients == 8 else "DistributedDataParallel")
        for parameter in trainer.model.parameters():
            same = parameter.detach().clone()
            dist.broadcast(same, 0)
            assert torch.equal(same, parameter)


@pytest.mark.slow
def test_two_processes_stay_alike_after_an_evaluation_and_with_one_trainer_after_the_other(tmp_path: Path) -> None:
    run_ranks(_train_after_evaluation, (tmp_path, free_port()), 2)


@pytest.mark.ci
def test_two_processes_agree_with_ddp_stay_alike_and_resume(tmp_path: Path) -> None:
    run_ranks(_train_together, (tmp_path, free_port()), 2)
