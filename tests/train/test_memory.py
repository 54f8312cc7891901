"""What the planner predicts for a run is what the run holds."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import laconic
from laconic.activations import SavedTensorTracker
from laconic.cost import Job, predict
from laconic.errors import PlanError
from laconic.optim import AdamW8bit
from laconic.train.config.schema import TrainConfig
from laconic.train.memory.check import MemoryCheck, check_memory, choices_of, job_of
from tests.activations.models import make_model


def three_steps(model: nn.Module, config: TrainConfig, job: Job, bits: int, attention: str) -> MemoryCheck:
    """Trains, watching the forward of the last step's first micro-batch, and compares."""
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(0, 97, (job.batch.sequences, config.sequence_length))
    for _ in range(3):
        optimizer.zero_grad()
        with SavedTensorTracker(model) as tracker:
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
    prediction = predict(job, choices_of(job, bits, attention=attention))
    return check_memory(
        job, prediction, saved_nbytes=tracker.nbytes, parameters=model.parameters(), optimizer=optimizer
    )


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize(("bits", "attention"), [(16, "exact"), (4, "exact"), (5, "exact"), (8, "int8"), (4, "nf4")])
def test_prediction_is_within_five_per_cent(family: str, bits: int, attention: str) -> None:
    config = TrainConfig(batch_size=4, accumulation=2, sequence_length=64, nproc=1)
    model = make_model(family)
    job = job_of(config, model.config.to_dict(), world_size=1)  # type: ignore[operator, union-attr]
    assert job.batch.tokens == 2 * 64
    if bits < 16:
        laconic.compress_activations(model, bits=bits, attention=attention)
    check = three_steps(model, config, job, bits, attention)
    assert set(check.measured) == {"saved per micro-batch", "parameters", "gradients", "optimizer"}
    for kind, nbytes in check.measured.items():
        assert check.predicted[kind] == pytest.approx(nbytes, rel=0.001), kind
    assert abs(check.error) < 0.05
    assert "error +0.0%" in str(check).replace("-0.0%", "+0.0%")


@pytest.mark.parametrize(("bits", "kind"), [(8, "adamw8bit"), (12, "adamw8bit"), (8, "adamw")])
def test_gradients_and_moments_in_few_bits_are_predicted_to_the_byte(bits: int, kind: str) -> None:
    config = TrainConfig(batch_size=2, sequence_length=64, nproc=1)
    model = make_model("llama", intermediate_size=300)
    stored = laconic.compress_gradients(model, bits=bits)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters()) if kind == "adamw" else AdamW8bit(model.parameters())
    ids = torch.randint(0, 97, (2, 64))
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    if kind == "adamw":
        stored.dequantize_to_grad()
    optimizer.step()
    job = job_of(
        config,
        model.config.to_dict(),  # type: ignore[operator, union-attr]
        world_size=1,
        optimizer=kind,
        gradient_bits=bits if kind != "adamw" else 32,
    )
    check = check_memory(job, predict(job), saved_nbytes=1, parameters=model.parameters(), optimizer=optimizer)
    for measured in ("parameters", "gradients", "optimizer"):
        assert check.predicted[measured] == check.measured[measured], measured


def test_a_wrong_prediction_shows() -> None:
    config = TrainConfig(batch_size=2, sequence_length=64, nproc=1)
    model = make_model("llama")
    job = job_of(config, model.config.to_dict(), world_size=1)  # type: ignore[operator, union-attr]
    check = three_steps(model, config, job, 4, "exact")  # predicted at 4 bits, but the model is as it was
    assert check.predicted["saved per micro-batch"] < 0.5 * check.measured["saved per micro-batch"]
    assert check.error < -0.1


def test_a_job_is_that_of_the_configuration() -> None:
    model_config = make_model("llama", num_hidden_layers=4).config.to_dict()  # type: ignore[operator, union-attr]
    config = TrainConfig(batch_size=16, parallel="fsdp", precision="bf16", sequence_length=32)
    job = job_of(config, model_config, world_size=4, optimizer="adamw8bit", gradient_bits=8)
    assert (job.layout.data_parallel, job.layout.sharded, job.layout.world_size) == (4, True, 4)
    assert (job.batch.sequences, job.batch.sequence_length) == (4, 32)
    assert (job.settings.optimizer, job.settings.gradient_bits, job.settings.precision) == ("adamw8bit", 8, "bf16")
    assert not job.precision.autocast
    with pytest.raises(PlanError, match="model_type is 'gpt2'"):
        job_of(config, {"model_type": "gpt2"}, world_size=4)
