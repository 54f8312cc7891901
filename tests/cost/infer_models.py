"""Small models, rates and shapes for tests of the inference planner."""

from __future__ import annotations

from laconic.cost.comm.rates import Line
from laconic.cost.infer import InferenceCostModel, InferenceRates, InferenceShape, WorkerRates, Workload
from laconic.cost.infer.rates import LinkPair

LINK = LinkPair(Line(20e-6, 1e-9), Line(15e-6, 2e-9))
RATES = InferenceRates(
    gemm=Line(10e-6, 1e-12),
    attention=Line(5e-6, 2e-12),
    link=LINK,
    read_seconds_per_byte=2e-11,
    grouped=False,
    source="made up",
)

SLOW_WORKER = WorkerRates(Line(500e-6, 5e-11), read_seconds_per_byte=1e-9, grouped=True, exchange=Line(1e-5, 1e-10))
"""Expert workers of another kind than those of RATES."""


def shape_of(**sizes: int) -> InferenceShape:
    """A small model: 4 layers, 16 experts, top-2, with shared experts."""
    given = {
        "hidden_size": 64,
        "num_layers": 4,
        "num_heads": 4,
        "key_dim": 16,
        "value_dim": 16,
        "attention_parameters": 4 * 64 * 64,
        "cache_values": 2 * 64,
        "num_experts": 16,
        "top_k": 2,
        "expert_hidden": 96,
        "shared_hidden": 128,
        "vocab_size": 1000,
    }
    return InferenceShape(**(given | sizes))


def model_of(work: Workload, rates: InferenceRates = RATES, **sizes: int) -> InferenceCostModel:
    """Costs of a small model."""
    return InferenceCostModel(shape_of(**sizes), rates, work)
