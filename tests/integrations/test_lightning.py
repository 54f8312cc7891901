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
from laconic.errors import ConfigError, ModelError, TrainingError
from laconic.integrations import LaconicConfig
from tests.distributed.processes import free_port, rank_environment, run_ranks
from tests.integrations.test_huggingface import llama

lightning = pytest.importorskip("lightning.pytorch")

from laconic.integrations.lightning import LaconicCallback, LaconicStrategy  # noqa: E402

# Advice of Lightning's that has nothing to do with what is tested.
pytestmark = pytest.mark.filterwarnings("ignore")


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
    usual = {"accelerator": "cpu", "devices": 1, "max_steps": 3, "accumulate_grad_batches": 2, "limit_train_batches": 2}
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        default_root_dir=folder, callbacks=callbacks, gradient_clip_val=1.0, **(usual | quiet | options)
    )
    trainer.fit(module, torch.utils.data.DataLoader(ids, batch_size=4), ckpt_path=resume)
    return trainer


def test_activations_are_compressed_and_logged(tmp_path: Path) -> None:
    alone, module, callback = Module(), Module(), LaconicCallback()
    logger = lightning.loggers.CSVLogger(tmp_path)
    fit(alone, [], tmp_path, enable_checkpointing=False)
    fit(module, [callback], tmp_path, enable_checkpointing=False, logger=logger)
    assert module.losses == pytest.approx(alone.losses, rel=1e-3)
    assert module.losses[0] == alone.losses[0]
    assert callback.report is not None
    logger.save()
    assert "laconic/activation_factor" in (Path(logger.log_dir) / "metrics.csv").read_text()


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
    with pytest.raises(TrainingError, match="not reduced yet"):
        fit(Module(), [], folder, strategy=LaconicStrategy(8, process_group_backend="gloo"), **options)


def test_two_processes_agree_with_ddp_and_stay_alike(tmp_path: Path) -> None:
    run_ranks(_fit_together, (tmp_path, free_port()), 2)
