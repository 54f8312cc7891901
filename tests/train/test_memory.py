"""What the planner predicts for a run is what the run holds."""

from __future__ import annotations

import pytest
import torch

import laconic
from laconic.activations import SavedTensorTracker
from laconic.cost import Batch, Choice, Settings
from laconic.cost.planner.policy import by_bits
from laconic.optim import AdamW8bit
from laconic.train.memory.check import check_memory
from laconic.train.memory.trace import traced_job
from tests.activations.models import make_model


@pytest.mark.parametrize(
    ("family", "bits", "stored"),
    [
        pytest.param("llama", 4, 32, marks=pytest.mark.ci),
        pytest.param("qwen3", 8, 8, marks=pytest.mark.slow),
        pytest.param("llama", 4, 12, marks=pytest.mark.slow),
    ],
)
def test_what_a_process_holds_is_predicted_to_the_byte(family: str, bits: int, stored: int) -> None:
    batch = Batch(2, 64)
    model = make_model(family, intermediate_size=300)
    kind = "adamw" if stored == 32 else "adamw8bit"
    settings = Settings(precision="fp32", optimizer=kind, gradient_bits=stored)  # type: ignore[arg-type]
    job = traced_job(model, batch, settings=settings)
    laconic.compress_activations(model, bits=bits, attention="int8")
    if stored < 32:
        laconic.compress_gradients(model, bits=stored)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters()) if stored == 32 else AdamW8bit(model.parameters())
    ids = torch.randint(0, 97, (batch.sequences, batch.sequence_length))
    with SavedTensorTracker(model) as tracker:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    optimizer.step()
    prediction = by_bits(job, [bits], Choice("int8")).prediction
    check = check_memory(prediction, saved_nbytes=tracker.nbytes, parameters=model.parameters(), optimizer=optimizer)
    assert set(check.measured) == {"saved per micro-batch", "parameters", "gradients", "optimizer"}
    assert check.predicted["parameters"] - job.model.buffers_nbytes == check.measured["parameters"]
    for measured in ("gradients", "optimizer"):
        assert check.predicted[measured] == check.measured[measured], measured
    assert check.predicted["saved per micro-batch"] == check.measured["saved per micro-batch"]
    assert check.error == pytest.approx(0, abs=0.001)
    assert "memory predicted (measured): saved per micro-batch" in str(check)
    # A wrong prediction shows.
    exact = by_bits(job, [16]).prediction
    off = check_memory(exact, saved_nbytes=tracker.nbytes, parameters=model.parameters(), optimizer=optimizer)
    assert off.error is not None
    assert off.error > 0.1


def test_without_a_plan_memory_is_measured_only() -> None:
    check = check_memory(None, saved_nbytes=7000, parameters=[torch.zeros(10)])
    assert check.to_dict() == {
        "predicted": {},
        "measured": {"saved per micro-batch": 7000, "parameters": 40},
        "error": None,
    }
    assert str(check) == "memory: saved per micro-batch 7.00 KB, parameters 40 B"
