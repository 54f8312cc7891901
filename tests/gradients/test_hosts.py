"""Gradients in codes and AdamW8bit in the hands of Hugging Face's Trainer and of Accelerate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainingArguments, get_scheduler

from laconic.gradients import compress_gradients
from laconic.optim import AdamW8bit
from tests.activations.models import make_model

DATA = [
    {"input_ids": ids, "labels": ids}
    for ids in (torch.randint(0, 97, (8,), generator=torch.Generator().manual_seed(seed)) for seed in range(16))
]


def trainer(directory: Path, compressed: bool, exact: bool = False, **arguments: Any) -> Trainer:
    model = make_model("llama")
    if compressed:
        compress_gradients(model, bits=12)
    make = torch.optim.AdamW if exact else AdamW8bit
    optimizer = make(model.parameters(), lr=1e-3)
    options = TrainingArguments(
        output_dir=str(directory),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=8,
        logging_steps=1,
        save_steps=4,
        report_to=[],
        use_cpu=True,
        max_grad_norm=0.5,
        disable_tqdm=True,
        **arguments,
    )
    schedule = get_scheduler("cosine", optimizer, 2, 8)
    return Trainer(model=model, args=options, train_dataset=DATA, optimizers=(optimizer, schedule))


def history(done: Trainer, key: str) -> list[float]:
    return [line[key] for line in done.state.log_history if key in line]


@pytest.mark.ci
def test_trainer_trains_clips_saves_and_resumes(tmp_path: Path) -> None:
    done = {}
    for kind, options in {
        "plain": {"compressed": False},
        "compressed": {"compressed": True},
        "compressed, torch": {"compressed": True, "exact": True},
    }.items():
        done[kind] = trainer(tmp_path / kind, **options)
        done[kind].train()
        for key in ("loss", "grad_norm"):
            assert history(done[kind], key) == pytest.approx(history(done["plain"], key), rel=0.01)
    # A run of torch's AdamW goes on in 8 bits, and one in 8 bits goes on as it was.
    for source in ("compressed, torch", "compressed"):
        resumed = trainer(tmp_path / f"resumed {source}", compressed=True)
        resumed.train(resume_from_checkpoint=str(tmp_path / source / "checkpoint-4"))
        assert history(resumed, "loss")[-4:] == pytest.approx(history(done["plain"], "loss")[-4:], rel=0.01)


@pytest.mark.parametrize("order", ["before", "after"])
def test_accelerate_accumulates_clips_and_steps(order: str) -> None:
    accelerate = pytest.importorskip("accelerate")
    ends = []
    for compressed in (False, True):
        accelerator = accelerate.Accelerator(gradient_accumulation_steps=2, cpu=True)
        model: nn.Module = make_model("llama")
        optimizer: torch.optim.Optimizer = AdamW8bit(model.parameters(), lr=1e-3)
        if compressed and order == "before":
            compress_gradients(model, bits=12)
        loader = torch.utils.data.DataLoader(DATA, batch_size=2)  # type: ignore[arg-type]
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        if compressed and order == "after":
            compress_gradients(model, bits=12)
        averaged = torch.optim.swa_utils.AveragedModel(model)
        norms = []
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                if accelerator.sync_gradients:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), 1.0).item())
                optimizer.step()
                optimizer.zero_grad()
                averaged.update_parameters(model)
        assert len(norms) == 4
        ends.append(norms)
    assert ends[0] == pytest.approx(ends[1], rel=0.01)
