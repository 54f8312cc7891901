"""Faults planted under hosts: each refuses its first step, trains without, and leaves the audit out if told to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import laconic
from laconic.cli.main import main
from laconic.errors import AuditError
from laconic.integrations.config import LaconicConfig
from tests.activations.models import make_ids, make_model
from tests.audit import faults
from tests.grid import few, grid
from tests.train.runs import tiny_config, train_alone

PLANTED = {
    "forward": faults.linear_layers_pass_no_gradient_on,
    "codes": faults.what_is_rebuilt_is_twice_as_large,
    "store": faults.gradients_are_stored_twice_as_large,
    "optimizer": faults.weight_decay_is_applied_twice,
}

Train = Callable[[Path, bool], None]


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = make_ids(1, 24, seed=index)[0]
        return {"input_ids": ids, "labels": ids}


def by_trainer(folder: Path, audits: bool) -> None:
    from transformers import TrainingArguments

    from laconic.integrations.huggingface import LaconicTrainer

    arguments = TrainingArguments(
        str(folder), use_cpu=True, disable_tqdm=True, save_strategy="no", report_to=[], max_steps=2, weight_decay=0.5
    )
    config = LaconicConfig(gradients=8, optimizer="adamw8bit", audit=audits)
    LaconicTrainer(make_model("llama"), arguments, train_dataset=Rows(), laconic=config).train()


def by_accelerate(folder: Path, audits: bool) -> None:
    from accelerate import Accelerator

    from laconic.integrations.accelerate import attach

    accelerator, model = Accelerator(cpu=True), make_model("llama").train()
    attach(accelerator, model, LaconicConfig(gradients=8, audit=audits))
    model, optimizer = accelerator.prepare(model, laconic.AdamW8bit(model.parameters(), weight_decay=0.5))
    ids = make_ids(4, 24)
    for _ in range(2):
        accelerator.backward(model(input_ids=ids, labels=ids).loss)
        optimizer.step()
        optimizer.zero_grad()


def by_lightning(folder: Path, audits: bool) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    from laconic.integrations.lightning import LaconicCallback

    class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model("llama")

        def training_step(self, batch: dict[str, Tensor], number: int) -> Tensor:
            loss: Tensor = self.model(**batch).loss
            return loss

        def configure_optimizers(self) -> Any:
            return laconic.AdamW8bit(self.parameters(), weight_decay=0.5)

    module = Module()
    laconic.compress_gradients(module)
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    trainer = lightning.Trainer(
        default_root_dir=folder, accelerator="cpu", devices=1, max_steps=2,
        callbacks=[LaconicCallback(LaconicConfig(audit=audits))], **quiet,
    )  # fmt: skip
    trainer.fit(module.train(), torch.utils.data.DataLoader(Rows(), batch_size=4))


def by_command(folder: Path, audits: bool) -> None:
    changes = {
        "gradients.bits": 8, "optimizer.kind": "adamw8bit", "activations.bits": 4, "audit": audits, "steps": 2,
        "optimizer.weight_decay": 0.5,
    }  # fmt: skip
    assert train_alone(tiny_config(folder, "run", changes)) == 0


HOSTS: dict[str, Train] = {
    "trainer": by_trainer,
    "accelerate": by_accelerate,
    "lightning": by_lightning,
    "laconic train": by_command,
}


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("host", HOSTS)
def test_a_host_says_what_it_compared(host: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    HOSTS[host](tmp_path, True)
    said = capsys.readouterr().err
    assert "audit: as in the exact computation: " in said
    assert "gradients in codes" in said


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(("host", "planted"), grid(list(HOSTS), list(PLANTED), strength=1))
def test_a_host_refuses_a_planted_fault(
    host: str, planted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    PLANTED[planted](monkeypatch)
    with pytest.raises(AuditError):
        HOSTS[host](tmp_path, True)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("host", few(HOSTS, 2, pytest.mark.ci))
def test_a_host_leaves_the_audit_out(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    faults.linear_layers_pass_no_gradient_on(monkeypatch)
    HOSTS[host](tmp_path, False)
    assert "laconic audit: " not in capsys.readouterr().err


SCRIPT = """
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 1))
optimizer = torch.optim.AdamW(net.parameters())
for _ in range(2):
    net(torch.randn(32, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("flags", [[], ["--no-audit"]])
@pytest.mark.parametrize("planted", ["nothing", "forward"])
def test_laconic_run_refuses_a_planted_fault(
    flags: list[str], planted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    if planted == "forward":
        faults.linear_layers_pass_no_gradient_on(monkeypatch)
    code = main(["run", *flags, str(script)])
    said = capsys.readouterr().err
    assert (code != 0) == (planted == "forward" and not flags)
    if planted == "nothing":
        assert ("audit: as in the exact computation" in said) == (not flags)


CHECKPOINTED = "from torch.utils.checkpoint import checkpoint\n" + SCRIPT.replace(
    "net(torch.randn(32, 64))", "checkpoint(net, torch.randn(32, 64).requires_grad_(), use_reentrant=False)"
)


def test_laconic_run_says_what_it_cannot_audit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text(CHECKPOINTED, encoding="utf-8")
    main(["run", str(script)])
    said = capsys.readouterr().err
    assert said.count("laconic audit: nothing was compared; left out: all, as the script calls it inside of") == 1
