"""The predicted peak of a step is what torch's allocator sees, by the events of its memory profiler."""

from __future__ import annotations

import pytest
import torch

import laconic
from benchmarks.kit.allocated import peak_of_step
from laconic.cost import Batch, Choice, Layout, Settings
from laconic.cost.memory.saved_tensors import EXACT
from laconic.cost.planner.policy import by_bits
from laconic.train.memory.trace import traced_job
from tests.activations.models import make_model
from tests.grid import grid

pytestmark = pytest.mark.slow  # each traces a model

SHAPES = {
    "deep": {"hidden_size": 64, "intermediate_size": 224, "num_hidden_layers": 8, "num_key_value_heads": 2},
    "wide": {"hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 3, "vocab_size": 700},
}


KEPT = [pytest.param(16, "exact", "exact"), pytest.param(4, "exact", "exact"), pytest.param(8, "int8", "chunked")]


@pytest.mark.parametrize(
    ("sizes", "precision", "bits", "attention", "loss"), grid(list(SHAPES), ["fp32", "bf16"], KEPT, strength=1)
)
def test_peak_is_near_the_allocators(sizes: str, precision: str, bits: int, attention: str, loss: str) -> None:
    micro_batches = 3 if sizes == "wide" else 1  # with and without gradients of earlier ones
    model = make_model("llama", **SHAPES[sizes], tie_word_embeddings=sizes == "wide")
    if bits < 16:
        laconic.compress_activations(model, bits=bits, attention=attention, loss=loss)
    ids = torch.randint(0, 97, (4, 160))
    measured = peak_of_step(model, ids, precision == "bf16", micro_batches, loss == "chunked")
    settings = Settings(precision=precision, loss=loss, device="cpu")  # type: ignore[arg-type]
    job = traced_job(model, Batch(4, 160), Layout(micro_batches=micro_batches), settings)
    rank = by_bits(job, [bits], EXACT if attention == "exact" else Choice(attention)).prediction.ranks[0]
    during_step = rank.total_nbytes - rank.parameters_nbytes - rank.optimizer_nbytes
    # With bf16 and the chunked loss one processor's step takes half a megabyte (5.4 %) more than the others'.
    tolerance = 0.06 if (precision, loss) == ("bf16", "chunked") else 0.05
    assert during_step == pytest.approx(measured, rel=tolerance)
