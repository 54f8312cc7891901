"""Hugging Face's Trainer on converted models: no column is dropped, and a chunked loss without a part says so."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import laconic
from tests.activations.models import make_ids, make_model


def losses_of(folder: Path, convert: dict[str, Any] | None, **arguments: Any) -> list[float]:
    """The losses of two steps of a Trainer that removes columns which the model does not take."""
    from transformers import Trainer, TrainingArguments

    model = make_model("llama")
    if convert is not None:
        laconic.compress_activations(model, **convert)
    rows = [{"input_ids": ids, "labels": ids, "unknown": 1} for ids in make_ids(batch=4)]
    options: dict[str, Any] = {"per_device_train_batch_size": 2, "max_steps": 2, "logging_steps": 1, "report_to": []}
    settings = TrainingArguments(
        str(folder), use_cpu=True, save_strategy="no", disable_tqdm=True, **options, **arguments
    )
    trainer = Trainer(model, settings, train_dataset=rows)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("convert", [{"bits": 8}, {"bits": 8, "loss": "chunked"}, {"bits": 8, "mode": "hooks"}])
def test_a_trainer_finds_its_columns(tmp_path: Path, convert: dict[str, Any]) -> None:
    pytest.importorskip("accelerate")
    expected, got = losses_of(tmp_path, None), losses_of(tmp_path, convert)
    assert len(got) == 2
    torch.testing.assert_close(torch.tensor(got), torch.tensor(expected), rtol=1e-3, atol=0)


def test_label_smoothing_leaves_the_chunked_loss_without_a_part_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("accelerate")
    expected = losses_of(tmp_path, None, label_smoothing_factor=0.1)
    with caplog.at_level(logging.WARNING, logger="laconic"):
        got = losses_of(tmp_path, {"bits": 8, "loss": "chunked"}, label_smoothing_factor=0.1)
    torch.testing.assert_close(torch.tensor(got), torch.tensor(expected), rtol=1e-3, atol=0)
    (message,) = [record.message for record in caplog.records if "inactive" in record.message]
    assert "called without labels" in message
    assert "laconic.linear_cross_entropy" in message


def test_each_model_says_why_its_chunked_loss_is_inactive(caplog: pytest.LogCaptureFixture) -> None:
    ids = make_ids(batch=1)
    with caplog.at_level(logging.WARNING, logger="laconic"):
        for _ in range(2):
            model = make_model("llama").train()
            laconic.compress_activations(model, bits=8, loss="chunked")
            for _ in range(2):
                model(input_ids=ids)
    assert [record.message.count("called without labels") for record in caplog.records] == [1, 1]


def test_a_loss_past_the_head_leaves_the_chunked_loss_without_a_part_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As TRL's SFTTrainer computes it: hidden states of the base model, and a loss of its own."""
    model = make_model("llama").train()
    laconic.compress_activations(model, bits=8, loss="chunked")
    ids = make_ids(batch=1)
    with caplog.at_level(logging.WARNING, logger="laconic"):
        model(input_ids=ids, labels=ids).loss.backward()
        with torch.no_grad():
            model.model(input_ids=ids)
        assert not caplog.records
        hidden = model.model(input_ids=ids).last_hidden_state
        torch.nn.functional.cross_entropy(model.lm_head(hidden)[0], ids[0]).backward()
        model.model(input_ids=ids)  # the same reason again
    (record,) = caplog.records
    assert "past the model's own head" in record.message
    laconic.decompress_activations(model)
    assert "forward" not in vars(model.model)
