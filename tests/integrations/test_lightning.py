"""Lightning's Trainer with laconic: trains as alone, in one and two processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import laconic
from laconic.errors import ConfigError, ModelError
from laconic.gradients.turns import owner_of
from laconic.integrations import LaconicConfig
from laconic.integrations.figures import logged
from tests.distributed.processes import free_port, rank_environment, run_ranks
from tests.integrations.test_huggingface import llama
from tests.wandb_files import offline_runs, wandb_offline

lightning = pytest.importorskip("lightning.pytorch")
accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

from laconic.integrations.lightning import LaconicCallback, LaconicStrategy  # noqa: E402

__all__ = ["wandb_offline"]

# Lightning takes a second to import; by default tests/audit/test_hosts.py trains with it. Its advice is not under test.
pytestmark = [pytest.mark.ci, pytest.mark.filterwarnings("ignore")]


class Module(lightning.LightningModule):
    def __init__(self, optimizer: Any = torch.optim.AdamW) -> None:
        super().__init__()
        self.model = llama()
        self._optimizer = optimizer
        self.losses: list[float] = []
        self.trained_as = ""

    def training_step(self, ids: Tensor, number: int) -> Tensor:
        self.trained_as = type(self.trainer.strategy.model).__name__
        loss = self.model(input_ids=ids, labels=ids).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return self._optimizer(self.parameters(), lr=1e-3)


def fit(module: Module, callbacks: list[Any], folder: Path, resume: Path | None = None, **options: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, 256, (32,), generator=generator) for _ in range(64)]
    usual: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": 3,
        "accumulate_grad_batches": 2,
        "limit_train_batches": 2,
    }
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    usual["gradient_clip_val"] = 1.0
    trainer = lightning.Trainer(default_root_dir=folder, callbacks=callbacks, **(usual | quiet | options))
    trainer.fit(module, torch.utils.data.DataLoader(ids, batch_size=4), ckpt_path=resume)
    return trainer


def test_activations_are_compressed_and_logged(tmp_path: Path) -> None:
    alone, module, callback = Module(), Module(), LaconicCallback()
    csv, events = lightning.loggers.CSVLogger(tmp_path), lightning.loggers.TensorBoardLogger(tmp_path)
    fit(alone, [], tmp_path, enable_checkpointing=False)
    fit(module, [callback], tmp_path, enable_checkpointing=False, logger=[csv, events])
    assert module.losses == pytest.approx(alone.losses, rel=1e-3)
    assert module.losses[0] == alone.losses[0]
    assert callback.report is not None
    csv.save()
    assert "laconic/activation_factor" in (Path(csv.log_dir) / "metrics.csv").read_text()
    reader = accumulator.EventAccumulator(events.log_dir)
    reader.Reload()
    assert [scalar.value for scalar in reader.Scalars("laconic/activation_factor")] == pytest.approx(
        [logged(callback.report)["laconic/activation_factor"]]
    )


def test_wandb_gets_what_was_saved_beside_the_modules_own_figures(
    tmp_path: Path, wandb_offline: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)  # or Lightning sets them for good

    class Logging(Module):
        def training_step(self, ids: Tensor, number: int) -> Tensor:
            loss = super().training_step(ids, number)
            self.log("loss", loss)
            return loss

    for by_hand in (False, True):
        module = ByHand() if by_hand else Logging()
        callback = LaconicCallback()
        folder = tmp_path / f"{by_hand}"
        folder.mkdir()
        logger = lightning.loggers.WandbLogger(project="p", save_dir=folder, offline=True)
        options: dict[str, Any] = {"gradient_clip_val": None, "accumulate_grad_batches": 1} if by_hand else {}
        strategy = LaconicStrategy(8, process_group_backend="gloo")
        options |= {"logger": logger, "strategy": strategy, "log_every_n_steps": 1, "enable_checkpointing": False}
        fit(module, [callback], folder, **options)
        wandb_offline.finish()
        [run] = offline_runs(folder)
        for name, value in logged(callback.report).items():
            assert run.column(name) == [pytest.approx(value)]
        held = run.column("laconic/gradient_nbytes")
        num_weights = sum(parameter.numel() for parameter in module.parameters())
        assert len(held) >= 2
        # By hand each of two optimizers steps after a backward of its own.
        assert all((0 if by_hand else num_weights) < nbytes < 2 * num_weights for nbytes in held)
        if not by_hand:
            steps = [row["trainer/global_step"] for row in run.rows if "laconic/gradient_nbytes" in row]
            assert steps == [row["trainer/global_step"] for row in run.rows if "loss" in row]
        dist.destroy_process_group()


def test_a_checkpoint_is_gone_on_from_and_has_the_modules_own_names(tmp_path: Path) -> None:
    whole = Module(laconic.AdamW8bit)
    checkpoint = lightning.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    fit(whole, [LaconicCallback(), checkpoint], tmp_path)
    saved = tmp_path / "step=2.ckpt"
    assert torch.load(saved, weights_only=False)["state_dict"].keys() == Module().state_dict().keys()
    again = Module(laconic.AdamW8bit)
    fit(again, [LaconicCallback()], tmp_path, saved, enable_checkpointing=False)
    for got, expected in zip(again.parameters(), whole.parameters(), strict=True):
        assert torch.equal(got, expected)


class MadeLate(Module):
    """Makes its model in `configure_model`, as those do that are too large for one process."""

    def __init__(self) -> None:
        super().__init__()
        self.model = None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = llama()


def test_a_model_that_configure_model_makes_is_converted_then(tmp_path: Path) -> None:
    alone, module, callback = MadeLate(), MadeLate(), LaconicCallback()
    fit(alone, [], tmp_path, enable_checkpointing=False)
    for _ in range(2):
        fit(module, [callback], tmp_path, enable_checkpointing=False)
    assert callback.report is not None
    assert module.losses[: len(alone.losses)] == pytest.approx(alone.losses, rel=1e-3)


def test_the_part_to_convert_is_named_or_found(tmp_path: Path) -> None:
    class Two(Module):
        def __init__(self) -> None:
            super().__init__()
            self.other = llama()

    for name in ("other", None):
        module, callback = Two(), LaconicCallback(submodule=name)
        callback.setup(None, module, "fit")
        assert callback.report is not None
        paths = {row.name.partition(".")[0] for row in callback.report.rows}
        assert {"model", "other"} <= paths if name is None else "other" not in paths
    with pytest.raises(ModelError, match="submodule is 'modle', but Two has no such part; it has model, other"):
        LaconicCallback(submodule="modle").setup(None, Two(), "fit")


def test_what_is_lightnings_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"strategy=LaconicStrategy\(gradients=8\)"):
        LaconicCallback(LaconicConfig(gradients=8))
    with pytest.raises(ConfigError, match="configure_optimizers makes it"):
        LaconicCallback(LaconicConfig(optimizer="adamw8bit"))
    with pytest.raises(ConfigError, match="gradients is 32"):
        LaconicStrategy(gradients=32)
    for name, value in (("ddp_comm_hook", print), ("model_averaging_period", 2)):
        with pytest.raises(ConfigError, match=f"{name} is .*averages gradients without DDP"):
            LaconicStrategy(**{name: value})


class ByHand(Module):
    """Manual optimization: two optimizers, clipping, and micro-batches that are not averaged before the last."""

    automatic_optimization = False

    def training_step(self, ids: Tensor, number: int) -> None:
        is_last = number % 2 == 1
        optimizers = self.optimizers()
        loss = self.model(input_ids=ids, labels=ids).loss
        with optimizers[0].toggle_model(sync_grad=is_last):
            for parameter in self.parameters():
                parameter.requires_grad_(True)  # Lightning froze those of the other optimizer
            self.manual_backward(loss / 2)
        self.losses.append(loss.item())
        if is_last:
            for optimizer in optimizers:
                self.clip_gradients(optimizer, 1.0, "norm")
                optimizer.step()
                optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        return [self._optimizer(part, lr=1e-3) for part in (parameters[:5], parameters[5:])]


def fit_again(folder: Path, options: dict[str, Any]) -> None:
    """Fits follow each other on one module, with callbacks and strategies of their own."""
    module, other, reports = Module(), Module(), []
    strategy = LaconicStrategy(8, process_group_backend="gloo")
    for own in (LaconicStrategy(12, process_group_backend="gloo"), strategy):
        callback = LaconicCallback()
        fit(module, [callback], folder, **options, strategy=own)
        reports.append(callback.report)
        assert all(owner_of(parameter) is own.compressed for parameter in module.parameters())
    assert reports[0] == reports[1]  # of the first batches of both, which are alike
    assert reports[0] is not None
    with pytest.raises(ConfigError, match="mode is 'combined', but the model was converted for an earlier"):
        fit(module, [LaconicCallback(LaconicConfig(mode="combined"))], folder, **options)
    strategy.connect(other)  # as the next fit of the same Trainer does
    strategy.configure_ddp()
    assert all(owner_of(parameter) is strategy.compressed for parameter in other.parameters())


def _fit_together(rank: int, folder: Path, port: int) -> None:
    os.environ.update(rank_environment(rank, 2, port))
    import warnings

    warnings.simplefilter("ignore")
    options: dict[str, Any] = {"devices": 2, "enable_checkpointing": False}
    alone, module = Module(), Module(laconic.AdamW8bit)
    fit(alone, [], folder, strategy="ddp", **options)
    assert alone.trained_as == "DistributedDataParallel"
    strategy = LaconicStrategy(8, process_group_backend="gloo")
    fit(module, [LaconicCallback()], folder, strategy=strategy, **options)
    assert module.trained_as == "Module"
    assert module.losses == pytest.approx(alone.losses, rel=1e-3)
    for parameter in module.parameters():
        first = parameter.detach().clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, parameter)
    by_hand = {"gradient_clip_val": None, "accumulate_grad_batches": 1, "limit_train_batches": 4, "max_steps": 8}
    fit_again(folder, options)
    options |= by_hand
    alone, module = ByHand(), ByHand(laconic.AdamW8bit)
    fit(alone, [], folder, strategy="ddp", **options)
    strategy = LaconicStrategy(12, process_group_backend="gloo")  # without a callback
    fit(module, [], folder, strategy=strategy, **options)
    assert module.losses == pytest.approx(alone.losses, rel=1e-3)
    assert len(module.losses) == 8
    for parameter in module.parameters():
        first = parameter.detach().clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, parameter)


def test_two_processes_agree_with_ddp_stay_alike_and_fit_again(tmp_path: Path) -> None:
    run_ranks(_fit_together, (tmp_path, free_port()), 2)


class Validated(Module):
    """Validates before, while and after it trains, and sends from there."""

    def validation_step(self, ids: Tensor, number: int) -> None:
        with torch.inference_mode():  # Lightning's own mode on other devices; on CPUs it takes no_grad
            loss = self.model(input_ids=ids, labels=ids).loss
            large = torch.full((50_000,), float(dist.get_rank()))
            dist.all_reduce(large)
            assert large.eq(1.0).all()
            self.losses.append(self.all_gather(loss).sum().item())
        self.log("validation_loss", loss.clone(), sync_dist=True)

    def val_dataloader(self) -> Any:
        return torch.utils.data.DataLoader([torch.arange(number, number + 32) for number in range(8)], batch_size=2)


class Zipping(lightning.Callback):
    def on_sanity_check_start(self, trainer: Any, module: Any) -> None:
        laconic.zip_collectives(trainer.strategy.model, codec=laconic.collectives.Lossless())


def _validate_and_train(rank: int, folder: Path, port: int) -> None:
    os.environ.update(rank_environment(rank, 2, port))
    import warnings

    warnings.simplefilter("ignore")
    options: dict[str, Any] = {"devices": 2, "enable_checkpointing": False, "val_check_interval": 1}
    losses = []
    for callbacks in ([], [Zipping()]):
        module = Validated()
        strategy = lightning.strategies.DDPStrategy(process_group_backend="gloo")
        fit(module, callbacks, folder, strategy=strategy, **options)
        losses.append(module.losses)
        assert len(module.losses) > 8
        dist.destroy_process_group()
    assert losses[0] == losses[1]


def test_validation_in_inference_mode_sends_like_training(tmp_path: Path) -> None:
    run_ranks(_validate_and_train, (tmp_path, free_port()), 2)
