"""The predicted peak of a step is what torch's allocator sees, by the events of its memory profiler."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import laconic
from benchmarks.kit.allocated import peak_of_step
from laconic.activations import SavedTensorTracker
from laconic.cost import Batch, Choice, Job, Layout, Settings
from laconic.cost.memory.saved_tensors import EXACT
from laconic.cost.planner.policy import by_bits
from laconic.moe import Grid, Hook, MoELayer, RoutedTokens, Routing, parallelize
from laconic.moe.parallel.link_streams import in_callers_thread
from laconic.train.memory import step_peak
from laconic.train.memory.trace import traced_job
from laconic.train.model_split import mean_loss
from tests.activations.models import MIXTURES, make_model
from tests.grid import grid
from tests.moe.worlds import run_world

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


@pytest.mark.parametrize("tokens", [(4, 160), (1, 48)], ids=["activations", "gradients"])  # which would be most
@pytest.mark.parametrize(
    ("sizes", "precision", "bits", "attention", "loss"),
    grid(list(SHAPES), ["fp32", "bf16"], [KEPT[0], pytest.param(4, "int8", "exact"), KEPT[2]], strength=1),
)
def test_peak_of_updates_in_backward_is_near_the_allocators(
    sizes: str, precision: str, bits: int, attention: str, loss: str, tokens: tuple[int, int]
) -> None:
    model = make_model("llama", **SHAPES[sizes], tie_word_embeddings=sizes == "wide")
    settings = Settings(
        precision=precision,  # type: ignore[arg-type]
        loss=loss,  # type: ignore[arg-type]
        device="cpu",
        optimizer="adamw8bit",
        update_in_backward=True,
    )
    job = traced_job(
        make_model("llama", **SHAPES[sizes], tie_word_embeddings=sizes == "wide"), Batch(*tokens), settings=settings
    )
    if bits < 16:
        laconic.compress_activations(model, bits=bits, attention=attention, loss=loss)
    optimizer, ids = laconic.AdamW8bit(model.parameters()), torch.randint(0, 97, tokens)
    optimizer.update_in_backward()

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss_of_step = mean_loss(model, ids, loss == "chunked", input_ids=ids)
        loss_of_step.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    measured = step_peak.peak_nbytes(step, ids.device)
    rank = by_bits(job, [bits], EXACT if attention == "exact" else Choice(attention)).prediction.ranks[0]
    assert rank.gradients_nbytes == rank.gradients_now_nbytes == 0
    whole = measured + rank.parameters_nbytes + rank.optimizer_nbytes
    # Casts of weights count in the loss's backward, too, where autocast has let them go: 3.5 % if that is the peak.
    tolerance = 0.04 if (sizes, precision, loss) == ("wide", "bf16", "exact") and bits < 16 else 0.03
    assert rank.total_nbytes == pytest.approx(whole, rel=tolerance)


class Even(Hook):
    """Gives each expert as many rows, as plans take them to have."""

    def before_dispatch(self, layer: MoELayer, tokens: RoutedTokens) -> RoutedTokens:
        routing = tokens.routing
        assert isinstance(routing, Routing)
        return replace(tokens, routing=replace(routing, experts=torch.arange(len(routing)) % routing.num_experts))


_SHARED = {"moe_intermediate_size": 48, "head_dim": 16}
MORE_MIXTURES: dict[str, dict[str, Any]] = {
    "ernie4_5_moe": {"moe_num_experts": 8, "moe_k": 2, "moe_num_shared_experts": 1, **_SHARED},
    "glm4_moe": {"n_routed_experts": 8, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, **_SHARED},
    "granitemoe": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "minimax_m2": {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 16, "rotary_dim": 8},
    "phimoe": {"num_local_experts": 8, "num_experts_per_tok": 2},
}
"""Routers with biases, scales and jitter; shared experts before the router and behind it; norms of other kinds."""


def mixture(family: str) -> torch.nn.Module:
    """Four layers of eight experts, two of them for each token."""
    if family in MORE_MIXTURES:
        return make_model(family, **MORE_MIXTURES[family], num_hidden_layers=4)
    name = next(name for name in ("num_experts", "num_local_experts", "n_routed_experts") if name in MIXTURES[family])
    return make_model(family, **{name: 8}, num_hidden_layers=4)


def traced_mixture(family: str, precision: str) -> Job:
    world = dist.get_world_size()
    settings = Settings(precision=precision, device="cpu")  # type: ignore[arg-type]
    return traced_job(mixture(family), Batch(4, 160), Layout(data_parallel=world, expert_parallel=world), settings)


def measured_and_predicted(family: str, precision: str = "fp32") -> tuple[int, int]:
    """Bytes during a step under DDP with experts over all processes; those of DDP's buckets, kept between, included."""
    ids = torch.randint(0, 97, (4, 160))
    model = mixture(family)
    parallelize(model, Grid(ep=dist.get_world_size()), hooks=[Even()])
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, broadcast_buffers=False)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            ddp(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    for _ in range(2):  # DDP makes its buckets anew after the first
        step()
    experts = [p for p in model.parameters() if hasattr(p, "to_local")]
    buckets = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None and not hasattr(p, "to_local"))

    def peak() -> int:
        for parameter in experts:
            parameter.grad = None
        # The profiler does not see what is allocated in the thread that rows travel in while shared experts run.
        with in_callers_thread(ids.device):
            return step_peak.peak_nbytes(step, ids.device)

    # Nor what a thread of gloo frees that lets go of a message last, as in some of the steps.
    measured = min(peak() for _ in range(2)) + buckets
    rank = by_bits(traced_mixture(family, precision), [16], EXACT).prediction.ranks[0]
    return measured, rank.total_nbytes - rank.parameters_nbytes - rank.optimizer_nbytes


def measured_and_predicted_alone(family: str, precision: str) -> tuple[int, int]:
    """Bytes during a step of the model's own experts, in one process."""
    ids, model = torch.randint(0, 97, (4, 160)), mixture(family)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad()

    step()
    measured = step_peak.peak_nbytes(step, ids.device)
    settings = Settings(precision=precision, device="cpu")  # type: ignore[arg-type]
    rank = by_bits(traced_job(mixture(family), Batch(4, 160), Layout(), settings), [16], EXACT).prediction.ranks[0]
    return measured, rank.total_nbytes - rank.parameters_nbytes - rank.optimizer_nbytes


def peaks_with_experts_over_processes(cases: list[tuple[str, str]]) -> None:
    for family, precision in cases:
        measured, predicted = measured_and_predicted(family, precision)
        assert predicted == pytest.approx(measured, rel=0.03), (family, precision)


def saved_with_experts_over_processes(family: str, precision: str) -> None:
    """To the byte exactly, and within 1 % in 4 bits, where the rows that came are kept for the experts."""
    job, ids = traced_mixture(family, precision), torch.randint(0, 97, (4, 160))
    for bits, attention in ((16, EXACT), (4, Choice("int8"))):
        model = mixture(family)
        parallelize(model, Grid(ep=dist.get_world_size()), hooks=[Even()])
        if bits < 16:
            laconic.compress_activations(model, bits=bits, attention="int8")
        with (
            SavedTensorTracker(model) as tracker,
            torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"),
        ):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        saved = by_bits(job, [bits], attention).prediction.saved_total_nbytes
        assert saved == pytest.approx(sum(tracker.by_module.values()), rel=0 if bits == 16 else 0.01), (family, bits)
        loss.backward()


PEAKS = [(family, ("fp32", "bf16")[i % 2]) for i, family in enumerate([*MIXTURES, *MORE_MIXTURES])]


@pytest.mark.parametrize(("family", "precision"), PEAKS)
def test_peak_of_a_mixture_is_near_the_allocators(family: str, precision: str) -> None:
    measured, predicted = measured_and_predicted_alone(family, precision)
    assert predicted == pytest.approx(measured, rel=0.03)


@pytest.mark.parametrize("world", [2, 4])
def test_peaks_with_experts_over_processes_are_near_the_allocators(world: int, tmp_path: Path) -> None:
    run_world([partial(peaks_with_experts_over_processes, PEAKS)], world, tmp_path)


@pytest.mark.parametrize(("family", "precision"), [("mixtral", "bf16"), ("deepseek_v3", "bf16"), ("gpt_oss", "fp32")])
def test_what_is_saved_with_experts_over_processes_is_predicted(family: str, precision: str, tmp_path: Path) -> None:
    run_world([partial(saved_with_experts_over_processes, family, precision)], 2, tmp_path)
